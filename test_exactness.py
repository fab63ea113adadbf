"""Tests of what must be exact: the loops, the pass, the prefix cache, verification. Paper sections
1 and 5.

First by hand, on a target whose conditionals are written down (`Scripted`): the draft-free loop,
the canvas, what a speculative round reads, accepts, hands on, counts and times. Then on random
models in float64: a pass against the stock Qwen3, and the text of the draft-free loop under every
draft, rule, precision and block size, which wrong verifiers must change. Last the golden SDAR and
what ships.

Left out: rules, noise and F by hand (test_decoder.py), full attention (test_full.py), the law of
sampling (test_sampling.py), drafters and trees (test_drafter.py, test_ddtree.py).

    python -m pytest test_exactness.py          # about a minute
"""

import dataclasses
import itertools
import math
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import ddtree
import dlm
import drafter as drafting
import targets
import tasks
import verify
from decoder import PRECISIONS, RULES, Decoder

HERE = os.path.dirname(os.path.abspath(__file__))
SHIPPED = os.path.join(HERE, "checkpoints")
VOCAB, MASK = 40, 39  # of the random targets
LENGTHS = (31, 1, 32, 45, 33, 64)  # prompt lengths around the borders of blocks
BUDGETS = (1, 6, 8, 12, 20)
VALUES = {  # thresholds under which random targets commit sets
    "exact": None, "sequential": None, "threshold": 0.5, "product": 0.3, "factor": 1.5,
    "entropy": 1.0,
}  # fmt: skip
GRID = [(L, rule, precision) for L in (32, 8) for rule in RULES for precision in PRECISIONS]
PER_POINT = 21  # decodes at each point of GRID
# Draft sets as the graph drafter takes them: (position rank, vocabulary rank) pairs, parents first.
SETS = [
    ((0, 0),), ((1, 0),), ((0, 0), (1, 0)), ((0, 1),), ((2, 0),), ((0, 0), (2, 0)),
    ((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 0)), ((3, 0),), ((0, 0), (3, 0)), ((0, 0), (1, 1)),
    ((0, 0), (1, 0), (3, 0)), ((0, 0), (1, 0), (2, 0), (3, 0)), ((0, 2),),
]  # fmt: skip


# ------------------------------------------------------------------------------------------ helpers


def tiny_model(attention, seed=0, dtype=torch.float64):
    """A random Qwen3 whose texts are lively: a small [MASK] embedding, sharp attention and sharp
    outputs."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        pad_token_id=None, tie_word_embeddings=False, initializer_range=0.3, bos_token_id=0,
        eos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    config._attn_implementation = attention
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[MASK] *= 0.1
        model.lm_head.weight *= 2
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight *= 4
    return model


def tiny_target(block_size=8, seed=0, stops=()):
    """A random float64 Target of block size L that stops at `stops`."""
    return dlm.Target(tiny_model("block_units", seed), None, block_size, MASK, stops)


def random_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, MASK, (length,), generator=generator)


def small_drafter(block_size, seed=0, noised=False):
    """An order drafter with random weights."""
    torch.manual_seed(seed)
    shape = dict(width=16, layers=1, heads=2, hidden=16, block_size=block_size, noised=noised)
    return drafting.OrderDrafter(**shape).eval()


def with_truth(target, decoder, prompt):
    """The draft-free Generation, and what the oracles read: {block: its true states in order}."""
    truth = {}

    def watch(canvas, state, following, *_):
        truth.setdefault(canvas.block, [state]).append(following)

    return dlm.generate(target, decoder, prompt, watch=watch), truth


def tree_of(*states):
    """The tree of a root and its children."""
    n = len(states) - 1
    return ddtree.Tree(list(states), [1.0] + [0.5] * n, [-1] + [0] * n)


def coming(canvas, truth, budget):
    """The true states still to come in the active block, at most `budget`."""
    states = truth.get(canvas.block, [canvas.state])
    at = states.index(canvas.state)
    return states[at + 1 : at + 1 + budget]


def adversarial(stale, canvas, budget, truth, rng):
    """The next true states amid wrong ones: other tokens, reopened positions, wrong full blocks."""
    mask_id = canvas.target.mask_id
    right = [s for s in coming(canvas, truth, budget // 2) if not canvas.is_final(s)]
    nodes = list(right)
    while len(nodes) < budget:
        state = list(right[rng.integers(len(right))] if right else canvas.state)
        for s in rng.choice(len(state), rng.integers(1, 4)):
            if canvas.state[s] == mask_id:  # what is decided must be kept: see verify.checked
                state[s] = int(rng.integers(VOCAB))  # VOCAB - 1 is [MASK]: reopens the position
        if rng.random() < 0.2:
            state = [int(rng.integers(MASK)) if token == mask_id else token for token in state]
        if tuple(state) not in truth[canvas.block]:
            nodes.append(tuple(state))
    rng.shuffle(nodes)
    return tree_of(canvas.state, *(tuple(map(int, state)) for state in nodes))


def methods(budget, drafter, truth, rule, seed=0):
    """Every way of drafting, {name: draft(stale, canvas)}. The position oracle is for `exact`
    only."""
    passes = [0.0] + [1 + 0.02 * u for u in range(2 * budget)]
    costs = ddtree.Costs(passes, [0.01] + [0.001 * n for n in range(30)])
    rng = np.random.default_rng(seed)
    drafts = {
        "chain": partial(ddtree.chain),
        "confidence_tree": partial(ddtree.confidence_tree),
        "graph": partial(ddtree.graph, sets=SETS),
        "spot": partial(ddtree.spot, drafter=drafter),
        "spot, floor": partial(ddtree.spot, drafter=drafter, floor=0.02),
        "spot_cost_aware": partial(ddtree.spot_cost_aware, drafter=drafter, costs=costs),
        "oracle_tokens": partial(ddtree.oracle_tokens, truth=truth),
        "adversarial": partial(adversarial, truth=truth, rng=rng),
    }
    if rule == "exact":
        drafts["oracle_positions"] = partial(ddtree.oracle_positions, truth=truth)
    return {name: partial(draft, budget=budget) for name, draft in drafts.items()}


def one_sentence(error):
    """The message of a raised error is one line of plain words that says what to do, not a
    traceback or a list."""
    text = str(error.value)
    return "\n" not in text and 20 < len(text) < 400 and ": " in text


# --------------------------------------------------- 1. by hand, on a target that is written down


class Finite(list):
    """A list that is read at most 50 times, so that a walk which never ends fails at once."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        assert self.reads < 50, "the walk does not end"
        return super().__getitem__(index)


def test_accept_by_hand():
    """Section 5: from root 0 to F(0) = node 2, to F(2) = node 3, which is full and has no further
    F; a walk ends where F is no node, and at a complete root."""
    a, b, c, d = (9, 9), (1, 2), (1, 9), (9, 2)
    for states, following, path in [
        ([a, (3, 2), c, b, d], [c, (3, 2), b, b, b], [0, 2, 3]),
        ([a, c, d], [(4, 9), b, b], [0]),
        ([b], [b], [0]),
        ([a, d, c], [c, b, (1, 3)], [0, 2]),
        ([a], [c], [0]),
    ]:
        assert verify.accept(Finite(states), Finite(following)) == path


class Scripted(dlm.Target):
    """A target of L = 4 whose conditionals are written down, whatever is decided: position s of
    block b says token (4·b + s) mod 10, most confident in the order 2, 0, 3, 1.

    Its prefix is the ids that are cached, so that every pass checks what it is given.
    """

    ORDER, MASK = {2: 0.9, 0: 0.8, 3: 0.7, 1: 0.6}, 10

    def __init__(self, stop_ids=(), context=64):
        config = SimpleNamespace(max_position_embeddings=context, vocab_size=11)
        self.model = SimpleNamespace(config=config)
        self.block_size, self.mask_id, self.stop_ids = 4, self.MASK, frozenset(stop_ids)
        self.device, self.pad_to, self.calls = torch.device("cpu"), None, []

    def conditionals(self, block, s):
        """log p, float64 [11], at position s of a block: two other tokens share the rest, [MASK]
        has none."""
        p = torch.zeros(11, dtype=torch.float64)
        token, sure = (4 * block + s) % 10, self.ORDER[s]
        p[[token, (token + 1) % 10, (token + 2) % 10]] = torch.tensor(
            [sure, (1 - sure) * 0.6, (1 - sure) * 0.4], dtype=torch.float64
        )
        return p.log()

    def forward(self, states, blocks, prefix, parents):
        for u, (state, block) in enumerate(zip(states, blocks)):
            seen = prefix + (states[parents[u]] if u in parents else ())
            assert len(seen) == 4 * block and self.MASK not in seen
        self.calls.append((list(states), list(blocks), prefix, dict(parents)))
        rows = [
            self.conditionals(block, s)
            for state, block in zip(states, blocks)
            for s in range(4) if state[s] == self.MASK
        ]  # fmt: skip
        rows = torch.stack(rows) if rows else torch.zeros(0, 11, dtype=torch.float64)
        masked = [i for i, token in enumerate(itertools.chain(*states)) if token == self.MASK]
        counts = [state.count(self.MASK) for state in states]
        states, blocks = torch.tensor(states), torch.tensor(blocks)
        return dlm.Pass(states, blocks, masked, counts, rows, lambda x: x.clone(), 11, [])

    def prefill(self, ids):
        return tuple(ids)

    def extend(self, prefix, out, u):
        return prefix + tuple(out.states[u].tolist())


M = Scripted.MASK
PROMPT = [1, 2, 3, 4, 5, 6]  # a whole block, and half of one
STEPS = [  # what is written behind PROMPT: (block, state, following), with gen_len 5 or 6
    (1, (5, 6, M, M), (5, 6, 6, M)),
    (1, (5, 6, 6, M), (5, 6, 6, 7)),
    (2, (M, M, M, M), (M, M, 0, M)),
    (2, (M, M, 0, M), (8, M, 0, M)),
    (2, (8, M, 0, M), (8, M, 0, 1)),
    (2, (8, M, 0, 1), (8, 9, 0, 1)),
]
TRUTH = {1: [(5, 6, M, M), (5, 6, 6, M), (5, 6, 6, 7)],
         2: [STEPS[2][1]] + [following for _, _, following in STEPS[2:]]}  # fmt: skip


@pytest.mark.parametrize("fused", (True, False))
def test_the_draft_free_loop_by_hand(fused):
    """What is written, counted and told to `watch`; in the fused loop the finished block and the
    blank next one share the pass, in the published one each block is stored by a pass of its
    own."""
    target, seen = Scripted(), []

    def watch(canvas, state, following, out, unit):
        assert canvas.state == state == tuple(out.states[unit].tolist())
        assert out.blocks[unit] == canvas.block
        seen.append((canvas.block, state, following))

    got = dlm.generate(target, Decoder(gen_len=5), PROMPT, fused=fused, watch=watch)
    assert (got.ids, got.written) == ([6, 7, 8, 9, 0], [6, 7, 8, 9, 0, 1]) and seen == STEPS
    assert (got.accepted, got.seconds) == ([], {})
    assert got.passes == {"prefill": 1, "denoise": 6, "kv_commit": 0 if fused else 2}
    blank, full, first, then = (M,) * 4, (5, 6, 6, 7), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 6, 7)
    before = [([(5, 6, M, M)], [1], first, {}), ([(5, 6, 6, M)], [1], first, {})]
    crossing = [([full, blank], [1, 2], first, {1: 0})]
    storing = [([full], [1], first, {}), ([blank], [2], then, {})]
    after = [([state], [2], then, {}) for _, state, _ in STEPS[3:]]
    assert target.calls == before + (crossing if fused else storing) + after


@pytest.mark.parametrize("P, gen_len, written, prefill, stored", [
    (1, 1, 3, 0, 1), (1, 3, 3, 0, 1), (1, 4, 7, 0, 2), (3, 1, 1, 0, 1), (3, 2, 5, 0, 2),
    (4, 1, 4, 1, 1), (4, 4, 4, 1, 1), (4, 5, 8, 1, 2), (5, 3, 3, 1, 1), (5, 4, 7, 1, 2),
    (8, 8, 8, 1, 2), (7, 9, 9, 1, 3), (7, 10, 13, 1, 4),
])  # fmt: skip
def test_lengths_at_and_beside_the_borders_of_blocks(P, gen_len, written, prefill, stored):
    """Written to the end of the block that holds token gen_len; a pass a token; a prompt of a block
    and more is prefilled in one pass; the published loop stores every block with new tokens."""
    for fused in (True, False):
        got = dlm.generate(Scripted(), Decoder(gen_len=gen_len), [0] * P, fused=fused)
        assert got.written == [s % 10 for s in range(P, P + written)]
        assert got.ids == got.written[:gen_len]
        kv = 0 if fused else stored
        assert got.passes == {"prefill": prefill, "denoise": written, "kv_commit": kv}


@pytest.mark.parametrize("stop_ids, ids, written", [
    ([], [6, 7, 8, 9, 0, 1, 2, 3, 4], 10),
    ([6], [], 2), ([7], [6], 2), ([8], [6, 7], 6), ([1], [6, 7, 8, 9, 0], 6),
    ([9, 7], [6], 2), ([9, 1], [6, 7, 8], 6), ([4], [6, 7, 8, 9, 0, 1, 2, 3], 10),
    ([5], [6, 7, 8, 9, 0, 1, 2, 3, 4], 10),  # in the prompt, and behind gen_len
])  # fmt: skip
def test_stops_by_hand(stop_ids, ids, written):
    """The block with a stop id is the last one; the answer is cut before the first stop id, or
    after gen_len = 9 tokens; a stop id in the prompt is none."""
    truth = [6, 7, 8, 9, 0, 1, 2, 3, 4, 5][:written]
    decoder, chain = Decoder(gen_len=9), partial(ddtree.chain, budget=3)
    for fused in (True, False):
        got = dlm.generate(Scripted(stop_ids), decoder, PROMPT, fused=fused)
        assert (got.ids, got.written) == (ids, truth)
        assert got.passes["kv_commit"] == (0 if fused else (written + 2) // 4)
    got = verify.speculate(Scripted(stop_ids), decoder, PROMPT, chain)
    assert (got.ids, got.written) == (ids, truth)


def test_the_canvas_by_hand():
    """Its fields before and after a block is closed, and what it says of states."""
    target, decoder = Scripted(stop_ids=[7, 5]), Decoder(gen_len=5)
    canvas = dlm.start(target, decoder, PROMPT)
    assert type(canvas) is dlm.Canvas and canvas.target is target and canvas.decoder is decoder
    assert (canvas.state, canvas.done, canvas.block) == ((5, 6, M, M), [1, 2, 3, 4], 1)
    assert (canvas.prompt_len, canvas.blank, canvas.prefix) == (6, (M,) * 4, (1, 2, 3, 4))
    assert canvas.passes == {"prefill": 1, "denoise": 0, "kv_commit": 0} and canvas.crosses
    for state, complete, final in [
        ((5, 6, M, M), False, False), ((5, 6, 7, M), False, False), ((5, 6, M, 7), False, False),
        ((5, 6, 6, 8), True, False), ((5, 6, 6, 7), True, True), ((5, 6, 5, 8), True, True),
    ]:  # fmt: skip
        assert canvas.is_complete(state) == complete and canvas.is_final(state) == final
        assert canvas.goes_on(state) == (complete and not final) and canvas.is_leaf(state) == final
    assert canvas.written() == [M, M]
    out, ahead = canvas.look([(5, 6, 6, M), (5, 6, 6, 8), (5, 6, 6, 7), (5, 6, 8, 8)])
    assert ahead == {1: 4, 3: 5}  # behind complete states that are not final
    assert out.states[4:].tolist() == [[M] * 4] * 2 and out.blocks.tolist() == [1] * 4 + [2] * 2
    assert target.calls[-1][3] == {4: 1, 5: 3}
    assert canvas.look([(5, 6, 6, 8)], crosses=False)[1] == {}
    canvas.settle()
    assert canvas.state == (5, 6, M, M)
    canvas.advance((5, 6, 6, 8), out, 1)
    assert (canvas.done, canvas.state, canvas.block) == (PROMPT + [6, 8], (M,) * 4, 2)
    assert canvas.prefix == (1, 2, 3, 4, 5, 6, 6, 8)
    assert canvas.is_final((8, 9, 0, 1)) and not canvas.is_complete((8, 9, 0, M))
    canvas.state = (8, 9, 7, 1)
    assert canvas.written() == [6, 8, 8, 9, 7, 1] and canvas.answer() == [6, 8, 8, 9]
    longer = dlm.start(target, Decoder(gen_len=7), PROMPT)
    longer.advance((5, 6, 6, 8), longer.look([(5, 6, 6, 8)])[0], 0)
    assert not longer.is_final((8, 9, 0, 1)) and longer.is_final((8, 9, 7, 1))
    begins = (3, [], (0, 0, 0, M)), (4, [0] * 4, (M,) * 4), (5, [0] * 4, (0, M, M, M))
    for P, done, state in begins:
        canvas = dlm.start(Scripted(), decoder, [0] * P)
        assert (canvas.done, canvas.state, canvas.passes["prefill"]) == (done, state, int(P > 3))


# ------------------------------------------------------------------------- 2. prompts, and refusals


@pytest.mark.parametrize("prompt", [
    torch.tensor(PROMPT), PROMPT, tuple(PROMPT), torch.tensor(PROMPT, dtype=torch.int32),
])  # fmt: skip
def test_prompts_that_are_taken(prompt):
    """Ids as a tensor, a list or a tuple; any id but the mask's."""
    assert dlm.check_prompt(prompt, Scripted()) == PROMPT
    assert dlm.generate(Scripted(), Decoder(gen_len=5), prompt).ids == [6, 7, 8, 9, 0]
    assert dlm.check_prompt([0, 9], Scripted()) == [0, 9]


@pytest.mark.parametrize("prompt, named", [
    ("12", "encode"), (b"12", "encode"), (7, "encode"), (None, "encode"), ({1: 2}, "encode"),
    (np.array([1, 2]), "encode"), ([1, 2.0], "whole numbers.*encode"), (["a"], "whole numbers"),
    ([True, 1], "whole numbers"), ([[1, 2]], "whole numbers"), (torch.zeros(1, 3).long(), "whole"),
    (torch.zeros(3), "whole numbers"), (torch.tensor(3), "whole numbers"),
    (torch.ones(2, dtype=torch.bool), "whole numbers"),
    ([], "empty"), ((), "empty"), (torch.zeros(0).long(), "empty"),
    ([1, M, 2], "mask token"), ([1, M], "mask token"), ([M], "mask token"),
    ([1, -1], "outside 0 to 10"), ([11, 1], "outside 0 to 10"), ([2**70], "outside 0 to 10"),
])  # fmt: skip
def test_prompts_that_are_refused(prompt, named):
    """What is no list of ids, holds the mask, or ids that the target does not have: one sentence,
    from every loop."""
    decode = partial(verify.speculate, draft=partial(ddtree.chain, budget=3))
    for loop in (dlm.generate, dlm.start, decode):
        with pytest.raises(ValueError, match=named) as error:
            loop(Scripted(), Decoder(gen_len=5), prompt)
        assert one_sentence(error)


@pytest.mark.parametrize("length, gen_len, fits", [
    (0, 8, False), (257, 8, False), (249, 8, False), (241, 8, True), (248, 8, True), (1, 255, True),
])  # fmt: skip
def test_prompts_that_do_not_fit_are_refused(length, gen_len, fits):
    """No prompt, or one whose answer would exceed the context of 256, is refused; the last that
    fits is decoded."""
    target, decoder, prompt = tiny_target(8), Decoder(gen_len=gen_len), random_prompt(length)
    for decode in (dlm.generate, partial(verify.speculate, draft=partial(ddtree.chain, budget=8))):
        if fits:
            assert len(decode(target, decoder, prompt).ids) == gen_len
            continue
        with pytest.raises(ValueError, match="prompt") as error:
            decode(target, decoder, prompt)
        assert one_sentence(error)


def test_text_and_ids():
    """The embedded target's chat format around a message, ready for the answer; special tokens are
    left out of texts. A prompt without a word, or no tokenizer, is refused."""
    target = targets.load("embedded")
    ids = target.encode("Write 3.")
    assert ids.dtype == torch.int64 and ids.dim() == 1
    chat = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write 3."}], add_generation_prompt=True, tokenize=False
    )
    without = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write 3."}], tokenize=False
    )
    assert target.tokenizer.decode(ids) == chat and "Write 3." in chat and chat != without
    stop = min(target.stop_ids)
    assert target.decode(target.tokenizer.encode("a b", add_special_tokens=False) + [stop]) == "a b"
    for text in ("  \n", "", None, 7):
        with pytest.raises(ValueError, match="empty") as error:
            target.encode(text)
        assert one_sentence(error)
    with pytest.raises(ValueError, match="no tokenizer") as error:
        tiny_target().encode("a word")
    assert one_sentence(error)


# ------------------------------------------------------------------ 3. a speculative round, by hand


def truthful(budget, seen=None, truth=TRUTH, final=False):
    """A draft of the true states to come (a final one only if `final`); notes what it is given."""

    def draft(stale, canvas):
        if seen is not None:
            seen.append((stale.block, stale.state, canvas.block, canvas.state))
        states = coming(canvas, truth, budget)
        return tree_of(canvas.state, *(s for s in states if final or not canvas.is_final(s)))

    return draft


@pytest.mark.parametrize("budget, accepted", [
    (1, [0, 1, 1, 0]),  # the last round has only the final state to draft
    (2, [0, 1, 2]),
    (0, [0, 0, 0, 0, 0, 0]),
])  # fmt: skip
def test_rounds_by_hand(budget, accepted):
    """Drafts of the next true states: every accepted node saves a pass, the free commit stands in
    the next block where a node completes its own; nothing is drafted in the first round."""
    target, seen, told = Scripted(), [], []

    def watch(canvas, tree, path, following, out, unit):
        assert tree.states[0] == canvas.state
        assert Decoder(gen_len=5).transition(out)[unit] == following
        told.append((canvas.block, tree.states[path[-1]], following, len(path) - 1))

    draft = truthful(budget, seen)
    got = verify.speculate(target, Decoder(gen_len=5), PROMPT, draft, watch=watch)
    assert (got.ids, got.written) == ([6, 7, 8, 9, 0], [6, 7, 8, 9, 0, 1])
    assert got.accepted == accepted
    assert got.passes == {"prefill": 1, "denoise": len(accepted), "kv_commit": 0}
    assert len(target.calls) == len(accepted) == len(told)
    if budget == 2:
        # the stale state is the deepest verified one, of its own block: blank behind a crossing
        assert seen == [(1, (5, 6, M, M), 1, (5, 6, 6, M)), (2, (M,) * 4, 2, (M, M, 0, M))]
        assert told == [
            (1, (5, 6, M, M), (5, 6, 6, M), 0), (1, (5, 6, 6, 7), (M, M, 0, M), 1),
            (2, (8, M, 0, 1), (8, 9, 0, 1), 2),
        ]  # fmt: skip
        assert target.calls[1] == (
            [(5, 6, 6, M), (5, 6, 6, 7), (M,) * 4], [1, 1, 2], (1, 2, 3, 4), {2: 1}
        )  # fmt: skip
        assert target.calls[2][1:] == ([2, 2, 2], (1, 2, 3, 4, 5, 6, 6, 7), {})


def test_a_complete_root_is_not_drafted_from():
    """The free commit that completes a block leaves nothing to draft: the next pass holds it and
    the blank next block."""
    target, seen = Scripted(), []
    draft = truthful(0, seen)
    got = verify.speculate(target, Decoder(gen_len=5), PROMPT, draft)
    assert target.calls[2] == ([(5, 6, 6, 7), (M,) * 4], [1, 2], (1, 2, 3, 4), {1: 0})
    assert [state for *_, state in seen] == [(5, 6, 6, M), *(s for _, s, _ in STEPS[3:])]
    assert got.accepted == [0] * 6


def test_a_drafted_final_state_does_not_lengthen_the_text():
    """The loop is lossless whatever is drafted, so also for a draft whose node is the true last
    state of the answer, which saves no pass."""
    got = verify.speculate(Scripted(), Decoder(gen_len=5), PROMPT, truthful(9, final=True))
    assert got.written == [6, 7, 8, 9, 0, 1] and got.accepted == [0, 1, 3]
    target, decoder, prompt = tiny_target(8, 2), Decoder(gen_len=8), random_prompt(16)
    truth, states = with_truth(target, decoder, prompt)
    draft = truthful(99, truth=states, final=True)
    assert verify.speculate(target, decoder, prompt, draft).written == truth.written


@pytest.mark.parametrize("pad_to", (None, 6))
@pytest.mark.parametrize("wrong_first", (True, False))
def test_two_complete_nodes_in_a_round(wrong_first, pad_to):
    """Accepted nodes and passes add up to the draft-free passes, whichever of two complete nodes
    is the true one; a padded pass keeps the first, as it has room for one next block."""
    target, met = Scripted(), []
    target.pad_to = pad_to

    def draft(stale, canvas):
        true, wrong = coming(canvas, TRUTH, 1), (5, 6, 6, 1)
        if canvas.block == 2:
            return ddtree.root_only(canvas)
        return tree_of(canvas.state, *([wrong, *true] if wrong_first else [*true, wrong]))

    def watch(canvas, tree, *_):
        met.append(len(tree.states))

    got = verify.speculate(target, Decoder(gen_len=5), PROMPT, draft, watch=watch)
    assert got.written == [6, 7, 8, 9, 0, 1]
    assert sum(got.accepted) + got.passes["denoise"] == 6
    dropped = wrong_first and pad_to
    assert got.accepted[:2] == ([0, 0] if dropped else [0, 1]) and met[1] == (2 if pad_to else 3)


def test_lone_crossing_by_hand():
    """Of complete nodes only the first stays, with its parent; incomplete and final ones all do."""
    canvas = dlm.start(Scripted(stop_ids=[0]), Decoder(gen_len=9), PROMPT)
    states = [(5, 6, M, M), (5, 6, 6, M), (5, 6, 6, 1), (5, 6, 6, 2), (5, 6, 6, 0), (5, 6, M, 4)]
    tree = ddtree.Tree(states, [1.0, 0.5, 0.4, 0.3, 0.2, 0.1], [-1, 0, 1, 1, 1, 0])
    kept = verify.lone_crossing(tree, canvas)
    assert kept.states == states[:3] + states[4:] and kept.masses == [1.0, 0.5, 0.4, 0.2, 0.1]
    assert kept.parents == [-1, 0, 1, 1, 0]
    assert verify.checked(tree, canvas) is tree
    canvas.target.pad_to = 9
    assert verify.checked(tree, canvas) == kept


def test_the_walk_is_told_of_the_drafted_states_only():
    """walk(states, following) gets the root and the nodes, not the next blocks behind them, and
    says what is accepted."""
    met = []

    def walk(states, following):
        assert len(states) == len(following)
        met.append((tuple(states), tuple(following)))
        return [0]  # accepts nothing: right, only slow

    got = verify.speculate(Scripted(), Decoder(gen_len=5), PROMPT, truthful(2), walk=walk)
    assert got.written == [6, 7, 8, 9, 0, 1] and got.accepted == [0] * 6
    assert met[1] == (((5, 6, 6, M), (5, 6, 6, 7)), ((5, 6, 6, 7), (5, 6, 6, 7)))


@pytest.mark.parametrize("change, named", [
    (lambda tree: tree_of(), "first state.*root_only"),
    (lambda tree: tree_of(*tree.states[1:]), "first state"),
    (lambda tree: tree_of((5, 6, M, M), *tree.states), "first state"),
    (lambda tree: dataclasses.replace(tree, masses=tree.masses[1:]), "equally many"),
    (lambda tree: dataclasses.replace(tree, parents=tree.parents + [0]), "equally many"),
    (lambda tree: tree_of(*tree.states, (5, 6, 6)), "has 3 positions, the block 4"),
    (lambda tree: tree_of(*tree.states, (5, 6, 6, 7, M)), "has 5 positions, the block 4"),
    (lambda tree: tree_of(*tree.states, (5, 6, 1, 7)), "decided position"),
    (lambda tree: tree_of(*tree.states, (5, 6, M, 7)), "decided position"),
    (lambda tree: tree_of(*tree.states, (1, 6, 6, M)), "decided position"),
    (lambda tree: tree_of(*tree.states, (5, 6, 6, -1)), "does not have"),
    (lambda tree: tree_of(*tree.states, (5, 6, 6, 11)), "does not have"),
])  # fmt: skip
def test_what_a_draft_returns_is_checked(change, named):
    """Another root, unequal lengths, another width, a decided position changed or reopened, ids
    that the target lacks: one sentence, at once, as each would change the text or never end."""
    draft = truthful(2)
    with pytest.raises(ValueError, match=named) as error:
        verify.speculate(
            Scripted(), Decoder(gen_len=5), PROMPT, lambda *round: change(draft(*round))
        )
    assert "draft" in str(error.value) and len(str(error.value)) < 200


def test_drafts_at_the_edge_are_taken():
    """The root alone, a state twice, ids 0 and the last one."""
    canvas = dlm.start(Scripted(), Decoder(gen_len=5), PROMPT)
    root = canvas.state
    for tree in (tree_of(root), tree_of(root, root), tree_of(root, (5, 6, 0, 9), (5, 6, 9, M))):
        assert verify.checked(tree, canvas) is tree


@pytest.mark.parametrize("prompt", (PROMPT, [0]))
def test_seconds_by_hand(prompt, monkeypatch):
    """A clock that every stage moves by another digit: the prompt's pass and those of the rounds
    are the target's, as are their transitions, drafting is the draft's, and the walk the rest."""
    now = [0.0]
    monkeypatch.setattr(verify.time, "perf_counter", lambda: now[0])

    def slow(function, seconds):
        def call(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return call

    target, rounds = Scripted(), []
    target.prefill = slow(target.prefill, 1e-6)
    target.forward = slow(target.forward, 1e-4)
    monkeypatch.setattr(Decoder, "transition", slow(Decoder.transition, 1e-2))
    draft, walk = slow(truthful(2), 1.0), slow(verify.accept, 1e2)

    def watch(canvas, tree, *_):
        rounds.append(len(tree.states) > 1 or canvas.block == 2)

    got = verify.speculate(target, Decoder(gen_len=5), PROMPT, draft, walk=walk, watch=watch)
    right = {"draft": 2.0, "target": 1e-6 + 3e-4 + 3e-2, "rest": 300.0}
    assert got.seconds == pytest.approx(right, abs=1e-9) and len(rounds) == 3
    assert sum(got.seconds.values()) == pytest.approx(now[0], abs=1e-9)


def test_the_clock(monkeypatch):
    """Every lap adds what has gone by since the last one to its stage."""
    times = iter((10.0, 11.0, 13.0, 17.0))
    monkeypatch.setattr(verify.time, "perf_counter", lambda: next(times))
    clock = verify.Clock()
    for stage in ("draft", "rest", "draft"):
        clock.lap(stage)
    assert clock.seconds == {"draft": 5.0, "target": 0.0, "rest": 2.0}


# ------------------------------------------------------------------------------------- 4. matchings


def test_matchings_by_hand():
    """coupled: the same decoder twice. greedy: likeliest tokens, for drafting and acceptance.
    uncoupled: other noise to draft with, the decoder to accept with."""
    decoder = Decoder("threshold", 0.7, gen_len=20, temperature=1.5, seed=3, confidence="margin")
    assert verify.MATCHINGS == ("coupled", "greedy", "uncoupled")
    assert verify.decoders_of("coupled", decoder) == (decoder, decoder)
    cold = dataclasses.replace(decoder, temperature=0.0)
    assert verify.decoders_of("greedy", decoder) == (cold, cold)
    other, same = verify.decoders_of("uncoupled", decoder)
    assert same == decoder and other.seed != decoder.seed
    assert dataclasses.replace(other, seed=3) == decoder
    seeds = range(-5, 6)
    others = [verify.decoders_of("uncoupled", Decoder(seed=s))[0].seed for s in seeds]
    assert len(set(others)) == len(seeds)
    for extreme in (2**63 - 1, -(2**63)):
        verify.decoders_of("uncoupled", Decoder(seed=extreme))


@pytest.mark.parametrize("matching", ("best", "", "Coupled", None))
def test_unknown_matchings_are_refused(matching):
    with pytest.raises(ValueError, match="unknown matching.*coupled, greedy, uncoupled") as error:
        verify.speculate(
            Scripted(), Decoder(), PROMPT, partial(ddtree.chain, budget=2), matching=matching
        )
    assert one_sentence(error)


@pytest.mark.parametrize("matching", verify.MATCHINGS)
def test_what_each_matching_drafts_with_and_accepts(matching):
    """At T = 2: the draft's decoder is that of the matching; a node is accepted if it is that F of
    its parent; the commit behind the last one is the target's own draw, whatever the matching."""
    commits, likeliest = 0, 0
    for seed in range(12):
        decoder, met, free = Decoder(gen_len=8, temperature=2.0, seed=seed), [], []
        drafting_with, accepting_with = verify.decoders_of(matching, decoder)

        def draft(stale, canvas):
            met.append(stale.decoder)
            return ddtree.confidence_tree(stale, canvas, budget=9)

        def watch(canvas, tree, path, following, out, unit):
            nonlocal commits, likeliest
            assert canvas.state in free[-1:] or not free  # the last round's free commit
            free.append(following)
            after = accepting_with.transition(out)
            assert all(after[a] == tree.states[b] for a, b in zip(path, path[1:]))
            last = path[-1]
            assert after[last] not in tree.states or after[last] == tree.states[last]
            assert following == decoder.transition(out)[unit]
            commits += 1
            likeliest += following == Decoder().transition(out)[unit]

        got = verify.speculate(Scripted(), decoder, PROMPT, draft, matching, watch=watch)
        assert met and all(made == drafting_with for made in met)
        assert tuple(got.written[-4:]) == free[-1]
        if matching != "greedy":
            assert got.written == dlm.generate(Scripted(), decoder, PROMPT).written
    assert 0 < likeliest < commits


def test_all_matchings_are_one_without_noise():
    """At T = 0 drafts, accepted nodes and texts are the same."""
    target, prompt = tiny_target(8, 3), random_prompt(13)
    draft = partial(ddtree.confidence_tree, budget=8)
    results = [
        verify.speculate(target, Decoder(gen_len=20), prompt, draft, matching)
        for matching in verify.MATCHINGS
    ]
    assert len({(tuple(r.written), tuple(r.accepted)) for r in results}) == 1


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_the_next_draft_reads_the_deepest_verified_state(temperature):
    """Every draft gets the conditionals of the deepest accepted node, or of the blank next block
    behind it: those of a pass over that state alone, whose transition the current state is."""
    target, decoder = tiny_target(8, 4), Decoder(gen_len=30, temperature=temperature)
    truth, states = with_truth(target, decoder, random_prompt(13))
    depths, crossed = [], []

    def draft(stale, canvas):
        out = target.forward([stale.state], [stale.block], canvas.prefix, {})
        assert stale.block == canvas.block and decoder.transition(out) == [canvas.state]
        assert torch.allclose(stale.log_probs.exp(), out.unit(0).exp(), rtol=0, atol=1e-12)
        crossed.append(stale.state == canvas.blank and canvas.block > 2)
        return truthful(3, truth=states)(stale, canvas)

    def watch(canvas, tree, path, *_):
        depths.append(len(path) - 1)

    got = verify.speculate(target, decoder, random_prompt(13), draft, watch=watch)
    assert got.written == truth.written and got.accepted == depths
    assert max(depths) == 3 and any(crossed)
    assert sum(depths) + got.passes["denoise"] == truth.passes["denoise"]


# ---------------------------------------------------------------------- 5. the target, and its pass


def test_what_a_target_is_by_default():
    """Its ids, its block, nothing padded, the softmax over allowed ids, in evaluation mode."""
    model = tiny_model("block_units").train()
    target = dlm.Target(model, range(35), 8, 30, [3, 4, 3])
    assert target.model is model and not model.training
    assert (target.block_size, target.mask_id, target.stop_ids) == (8, 30, frozenset({3, 4}))
    assert (target.n_ids, target.pad_to, target.whole_softmax) == (35, None, False)
    assert (target.attention, target.stops, target.canvas) == ("block", True, dlm.Canvas)
    assert target.device == model.device and target.dtype == torch.float64
    assert tiny_target().n_ids == VOCAB


@pytest.mark.parametrize("pad_to", (None, 2))
@pytest.mark.parametrize("whole", (False, True))
def test_conditionals_by_hand(whole, pad_to):
    """log softmax over the ids that may be committed; over all of them if `whole_softmax`, where
    the share of [MASK] = 30 and of untrained ids from 35 on is missing. −inf for these."""
    target = dlm.Target(tiny_model("block_units"), range(35), 8, 30, [])
    target.model.lm_head, target.whole_softmax, target.pad_to = torch.nn.Identity(), whole, pad_to
    logits = torch.randn(3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1, 30], logits[2, 36] = 9.0, 9.0
    allowed = torch.tensor([v < 35 and v != 30 for v in range(VOCAB)])
    share = logits.exp() / logits.exp()[:, allowed | torch.tensor(whole)].sum(1, keepdim=True)
    right = share.masked_fill(~allowed, 0)
    got = target.log_probs(logits.clone())
    assert got.dtype == torch.float64 and got.shape == (3, VOCAB)
    assert torch.allclose(got.exp(), right, rtol=0, atol=1e-12)
    assert (got[:, ~allowed] == -math.inf).all()
    assert target.log_probs(logits.bfloat16()).dtype == torch.float32
    assert target.log_probs(logits[:0].clone()).shape == (0, VOCAB)


@pytest.mark.parametrize("pad_to, chunk, rows", [
    (None, None, None), (2, None, 16), (5, None, 40), (2, 7, 7), (2, 16, 16), (2, 17, 16),
])  # fmt: skip
def test_padded_conditionals_have_one_shape(pad_to, chunk, rows, monkeypatch):
    """The head runs over as many rows whatever is asked for: a pass's positions, or a chunk."""
    target, shapes = tiny_target(), []

    def head(hidden):
        shapes.append(len(hidden))
        return hidden.new_zeros(len(hidden), VOCAB)

    target.model.lm_head, target.pad_to = torch.nn.Identity(), pad_to
    target.model.lm_head.forward = head
    if chunk:
        monkeypatch.setattr(dlm, "CHUNK", chunk * VOCAB + VOCAB - 1)
    for m in (1, 5, 7):
        assert target.log_probs(torch.zeros(m, 32, dtype=torch.float64)).shape == (m, VOCAB)
    assert shapes == ([1, 5, 7] if rows is None else [rows] * 3)


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("column", (0, 3, 30, 34, 35, 39))
@pytest.mark.parametrize("whole", (False, True))
def test_logits_that_are_none_are_an_error(whole, column, value):
    """NaN or +inf in any column at T = 0 and 1; but where the softmax leaves out [MASK] = 30 and
    ids from 35 on, theirs are not read. Nothing but −inf, or [MASK] alone, is an error too."""
    target = dlm.Target(tiny_model("block_units"), range(35), 8, 30, [])
    target.whole_softmax, state, plain = whole, [(1, 2) + (30,) * 6], target.model.lm_head
    decoders = [Decoder(temperature=T) for T in (0.0, 1.0)]
    truth = [decoder.transition(target.forward(state, [0], None, {})) for decoder in decoders]

    def transitions(spoil):
        target.model.lm_head = lambda hidden: spoil(plain(hidden))
        for decoder, right in zip(decoders, truth):
            yield decoder, right, target.forward(state, [0], None, {})

    def broken(logits):
        logits[-1, column] = value
        return logits

    def empty(logits):
        logits[-1, [v for v in range(VOCAB) if v != 30 or column == 0]] = -math.inf
        return logits

    del target.model.lm_head
    target.model.__dict__["lm_head"] = plain
    for decoder, right, out in transitions(broken):
        if not whole and column in (30, 35, 39):
            assert decoder.transition(out) == right
            continue
        with pytest.raises(FloatingPointError) as error:
            decoder.transition(out)
        assert one_sentence(error)
    for decoder, right, out in transitions(empty):
        with pytest.raises(FloatingPointError):
            decoder.transition(out)


@pytest.mark.parametrize("broken", (
    "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight",
))  # fmt: skip
def test_nan_weights_are_an_error(broken):
    """A NaN has no argmax, so decoding says so instead of writing token 0."""
    target = tiny_target()
    dict(target.model.named_parameters())[broken].data[0] = torch.nan
    with pytest.raises(FloatingPointError) as error:
        dlm.generate(target, Decoder(gen_len=8), random_prompt(9))
    assert one_sentence(error)


@pytest.mark.parametrize("rule", RULES)
def test_mask_and_untrained_ids_are_never_written(rule):
    """[MASK] = 30 and ids from 35 on, which the tokenizer lacks, have the highest logits and are
    never committed."""
    model = tiny_model("block_units", 5)
    head = torch.nn.Linear(32, VOCAB, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[[30, 35, 36, 37, 38, 39]] = 1e4
    model.lm_head = head
    target = dlm.Target(model, range(35), 8, 30, [])  # of a tokenizer only the length is read
    prompt, decoder = random_prompt(13) % 30, Decoder(rule, VALUES[rule], gen_len=24)
    probs = target.forward([(30,) * 8], [0], None, {}).unit(0).exp()
    assert probs[:, [30, 35, 36, 37, 38, 39]].eq(0).all()
    assert torch.allclose(probs.sum(1), torch.ones_like(probs[:, 0]))
    truth = dlm.generate(target, decoder, prompt)
    assert all(t < 35 and t != 30 for t in truth.written)
    draft = partial(ddtree.confidence_tree, budget=8)
    assert verify.speculate(target, decoder, prompt, draft).written == truth.written


def test_who_sees_whom_by_hand():
    """context: the units that others see, in order; sees[u]: which of these unit u does."""
    target = tiny_target()
    assert target.sight(3, {}) == (None, None)
    context, sees = target.sight(5, {3: 2, 4: 0})
    assert context.tolist() == [0, 2]
    assert sees.tolist() == [[False] * 2] * 3 + [[False, True], [True, False]]
    context, sees = target.sight(4, {2: 1, 3: 1})
    assert context.tolist() == [1] and sees.tolist() == [[False], [False], [True], [True]]


@torch.inference_mode()
def dense_conditionals(ids, block_size, attention, seed):
    """Conditionals at the masks of a whole row by the stock Qwen3 under an additive block-causal
    mask."""
    model, ids = tiny_model(attention, seed), torch.tensor([ids])
    at = torch.arange(ids.shape[1])
    later = at // block_size > (at // block_size)[:, None]
    lowest = torch.finfo(torch.float64).min
    mask = torch.zeros(later.shape, dtype=torch.float64).masked_fill(later, lowest)[None, None]
    out = model(input_ids=ids, attention_mask=mask, position_ids=at[None], use_cache=False)
    out.logits[..., MASK] = -torch.inf
    return out.logits[ids == MASK].softmax(-1)


@pytest.mark.parametrize("attention, tolerance", [("sdpa", 1e-10), ("eager", 1e-5)])
@pytest.mark.parametrize("blocks", (0, 1, 3))
def test_a_cached_pass_equals_full_recomputation(blocks, attention, tolerance):
    """One cached pass over a root, two finished nodes, their next blocks and another state = each
    recomputed alone. (The stock eager attention has its softmax in float32.)"""
    L, target = 8, tiny_target(8, 6)
    done = random_prompt(blocks * L, 1).tolist()
    full, second = (tuple(random_prompt(L, seed).tolist()) for seed in (2, 3))
    root, other = full[:3] + (MASK,) * 5, (MASK,) + full[1:6] + (MASK, 4)
    blank = (MASK,) * L
    states, places = [root, full, other, second, blank, blank], [blocks] * 4 + [blocks + 1] * 2
    out = target.forward(states, places, target.prefill(done), {4: 3, 5: 1})
    assert out.states.tolist() == [list(state) for state in states]
    assert out.blocks.tolist() == places and out.size == VOCAB and not out.partial
    for u, row in enumerate([root, full, other, second, second + blank, full + blank]):
        right = dense_conditionals(done + list(row), L, attention, 6)
        probs = out.unit(u).exp()
        assert probs.shape == right.shape
        assert torch.allclose(probs, right, rtol=0, atol=tolerance)
    for u, node in ((1, full), (3, second)):  # a finished node's K and V, stored
        prefix = target.extend(target.prefill(done), out, u)
        after = target.forward([root], [blocks + 1], prefix, {})
        right = dense_conditionals(done + list(node + root), L, attention, 6)
        assert torch.allclose(after.unit(0).exp(), right, rtol=0, atol=tolerance)


def test_extending_the_cache_equals_prefilling_it():
    """K and V kept from passes over finished blocks = those of one prefill, to float64 rounding."""
    target, L = tiny_target(8, 7), 8
    ids = random_prompt(3 * L).tolist()
    prefix = None
    for n in range(3):
        out = target.forward([tuple(ids[n * L : n * L + L])], [n], prefix, {})
        prefix = target.extend(prefix, out, 0)
    for kept, right in zip(prefix, target.prefill(ids), strict=True):
        for ours, whole in zip(kept, right, strict=True):
            assert ours.shape == whole.shape == (1, 1, 24, 16)
            assert torch.allclose(ours, whole, rtol=0, atol=1e-10)
    assert target.prefill([]) is None


def test_rows_of_a_batch_equal_single_rows():
    """With a prefix of 3 rows, 2 units a row are passed together: each row = that row alone, to
    float64 rounding."""
    target, L = tiny_target(8, 9), 8
    prefixes = [target.prefill(random_prompt(2 * L, row).tolist()) for row in range(3)]
    batch = [tuple(torch.cat(parts) for parts in zip(*layer)) for layer in zip(*prefixes)]
    full = [tuple(random_prompt(L, 10 + row).tolist()) for row in range(3)]
    states = [(full[row], (MASK,) * L) for row in range(3)]
    every = [state for pair in states for state in pair]
    together = target.forward(every, [2, 3], batch, {1: 0})
    assert together.blocks.tolist() == [2, 3] * 3 and together.counts == [0, L] * 3
    for row in range(3):
        alone = target.forward(list(states[row]), [2, 3], prefixes[row], {1: 0})
        ours, right = together.unit(2 * row + 1).exp(), alone.unit(1).exp()
        assert torch.allclose(ours, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocks", (0, 2))
def test_copies_in_one_pass_equal_one_at_a_time(blocks):
    """Copies do not see each other: 21 states in one pass = 21 passes, to float64 rounding."""
    target, rng = tiny_target(8, 8), np.random.default_rng(0)
    prefix = target.prefill(random_prompt(8 * blocks).tolist())
    states = [
        tuple(int(t) if rng.random() < 0.5 else MASK for t in rng.integers(0, MASK, 8))
        for _ in range(21)
    ]
    together = target.forward(states, [blocks] * 21, prefix, {})
    for u, state in enumerate(states):
        alone = target.forward([state], [blocks], prefix, {})
        assert torch.allclose(together.unit(u).exp(), alone.unit(0).exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("parents", ({}, {2: 1}))
def test_a_padded_pass_by_hand(parents):
    """Filled up with copies of the first unit, to one next block behind a finished one; what is
    handed back is the pass without them."""
    target, blank = tiny_target(8, 8), (MASK,) * 8
    states, blocks = [(1, 2) + (MASK,) * 6, tuple(range(8)), blank], [2, 2, 3 if parents else 2]
    prefix = target.prefill(random_prompt(16).tolist())
    plain = target.forward(states, blocks, prefix, parents)
    target.pad_to = 5
    shaped = target.padded(states, blocks, parents)
    assert shaped == (states + states[:1] * 2, blocks + [2] * 2, parents or {4: 0})
    padded = target.forward(states, blocks, prefix, parents)
    assert padded.states.equal(plain.states) and padded.blocks.equal(plain.blocks)
    assert (padded.masked, padded.counts) == (plain.masked, plain.counts)
    for u in (0, 2):
        assert torch.allclose(padded.unit(u).exp(), plain.unit(u).exp(), rtol=0, atol=1e-12)
    after = [target.extend(prefix, out, 1)[1][0] for out in (padded, plain)]
    assert torch.allclose(*after, rtol=0, atol=1e-12)


def test_what_does_not_fit_a_padded_pass_is_refused():
    """Several rows; more units than there is room for (one of them is a next block); two blocks
    seen."""
    target, full = tiny_target(), tuple(range(8))
    target.pad_to = 4
    for count, parents in ((3, {}), (4, {3: 0})):
        target.forward([full] * count, [0] * count, None, parents)
    with pytest.raises(ValueError, match="one row") as error:
        target.forward([full] * 2, [0], None, {})
    assert one_sentence(error)
    for count, parents in ((4, {}), (5, {4: 0}), (4, {2: 0, 3: 1})):
        with pytest.raises(ValueError, match="do not fit 4") as error:
            target.forward([full] * count, [0] * count, None, parents)
        assert one_sentence(error)


def test_padded_passes_have_one_shape(monkeypatch):
    """Whatever is drafted, every pass over a block has as many units, also those of the draft-free
    loop."""
    target, shapes = tiny_target(8, 1), set()
    plain = target.model.model.forward

    def spy(**inputs):
        shapes.add(inputs["input_ids"].shape)
        return plain(**inputs)

    monkeypatch.setattr(target.model.model, "forward", spy)
    prompt, decoder, target.pad_to = random_prompt(5), Decoder(gen_len=24), 10
    free = dlm.generate(target, decoder, prompt)
    draft = partial(ddtree.confidence_tree, budget=8)
    assert verify.speculate(target, decoder, prompt, draft).written == free.written
    assert shapes == {(1, 10 * 8)}


# ---------------------------------------------------------- 6. the same text as the draft-free loop


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_size", (32, 8))
def test_fused_and_published_loops_agree(block_size, rule):
    """Both draft-free loops: same tokens, same denoise passes; the published one also stores once a
    block."""
    target, decoder = tiny_target(block_size, 1), Decoder(rule, VALUES[rule], gen_len=20)
    for length in LENGTHS:
        prompt = random_prompt(length)
        fused, published = (dlm.generate(target, decoder, prompt, fused=x) for x in (True, False))
        assert (fused.written, fused.ids) == (published.written, published.ids)
        blocks = (length + len(fused.written)) // block_size - length // block_size
        whole, denoise = int(length >= block_size), fused.passes["denoise"]
        assert fused.passes == {"prefill": whole, "denoise": denoise, "kv_commit": 0}
        assert published.passes == {"prefill": whole, "denoise": denoise, "kv_commit": blocks}
        if rule in ("exact", "sequential"):  # one pass a token
            assert denoise == len(fused.written)


def stop_tokens(target, decoder, prompt, i):
    """Stop ids of case i: none, an id that is never written, or one that the target does write
    early."""
    if i % 3 == 0:
        return frozenset()
    written = dlm.generate(target, decoder, prompt).written
    never = next(t for t in range(MASK) if t not in written)
    return frozenset({never} if i % 3 == 1 else {never, written[len(written) // 3]})


@pytest.mark.parametrize("block_size, rule, precision", GRID)
def test_every_draft_writes_the_draft_free_text(block_size, rule, precision):
    """Token identity, section 5: F is a function, so whatever is drafted, the text is that of the
    draft-free loop, and every accepted node saves a pass; in every other case passes are padded."""
    assert PER_POINT * len(GRID) >= 500  # decodes compared by this test in all
    seed = GRID.index((block_size, rule, precision))
    target, drafter = tiny_target(block_size, seed), small_drafter(block_size, seed)
    decoder = Decoder(rule, VALUES[rule], precision, gen_len=20)
    decodes, accepted, crossed, i = 0, 0, [], seed

    def watch(canvas, tree, path, *_):
        crossed.append(len(path) > 1 and canvas.is_complete(tree.states[path[-1]]))

    while decodes < PER_POINT:
        prompt, budget = random_prompt(LENGTHS[i % 6], seed), BUDGETS[i % 5]
        target.pad_to = budget + 2 if i % 2 and block_size == 8 else None
        target.stop_ids = frozenset()
        target.stop_ids = stop_tokens(target, decoder, prompt, i)
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods(budget, drafter, states, rule, i).items():
            got = verify.speculate(target, decoder, prompt, draft, watch=watch)
            case = name, len(prompt), budget, i
            assert (got.written, got.ids) == (truth.written, truth.ids), case
            assert sum(got.accepted) + got.passes["denoise"] == truth.passes["denoise"], case
            decodes, accepted = decodes + 1, accepted + sum(got.accepted)
        i += 1
    assert accepted > 0  # else nodes were not put to the test
    assert any(crossed) or block_size == 32  # nor full ones; of L = 32 the shipped target has some


# -------------------------------------------------------------------- 7. wrong verifiers are caught


def extends(child, state):
    """True if `child` is `state` with exactly one more position decided."""
    changed = [(a, b) for a, b in zip(state, child) if a != b]
    return len(changed) == 1 and changed[0][0] == MASK


def heaviest_child(states, following):
    """Wrong: walks down to the heaviest child without looking at F."""
    path = [0]
    for u, state in enumerate(states):
        if extends(state, states[path[-1]]):
            path.append(u)
    return path


def one_token_off(states, following):
    """Wrong: takes a node for F(y) if it decides the same positions and at most one token
    differs."""

    def near(a, b):
        same = all((x == MASK) == (y == MASK) for x, y in zip(a, b))
        return same and sum(x != y for x, y in zip(a, b)) <= 1

    path = [0]
    while True:
        at, after = states[path[-1]], following[path[-1]]
        step = [u for u, state in enumerate(states) if extends(state, at) and near(state, after)]
        if not step:
            return path
        path.append(step[0])


def last_unchecked(states, following):
    """Wrong: the true path, and then one child more that nobody has checked."""
    path = verify.accept(states, following)
    return path + [u for u, state in enumerate(states) if extends(state, states[path[-1]])][:1]


@pytest.mark.parametrize("walk", (heaviest_child, one_token_off, last_unchecked))
def test_wrong_verifiers_change_the_text(walk):
    """The comparison of section 6 must fail for a wrong verifier on some prompt, else it would
    prove nothing."""
    target, decoder, same = tiny_target(8, 4), Decoder(gen_len=24), []
    drafts = methods(20, small_drafter(8), None, "threshold")
    for length, name in itertools.product((31, 1, 32), ("confidence_tree", "spot")):
        prompt = random_prompt(length)
        truth = dlm.generate(target, decoder, prompt).written
        assert verify.speculate(target, decoder, prompt, drafts[name]).written == truth
        wrong = verify.speculate(target, decoder, prompt, drafts[name], walk=walk)
        same.append(wrong.written == truth)
    assert not all(same[::2]) and not all(same[1::2])


# --------------------------------------------------------------- 8. the golden SDAR, and what ships


def golden():
    """The golden checkpoint in float32 and what the reference implementation computes on it."""
    folder = os.path.join(SHIPPED, "golden-sdar")
    return targets.load(folder), load_file(os.path.join(folder, "expected.safetensors"))


@torch.inference_mode()
def test_golden_logits():
    """Logits of all 24 positions = the reference SDAR's in float32; our cached conditionals are
    their softmax."""
    target, expected = golden()
    index = torch.arange(3)
    hidden = target.model.model(
        input_ids=expected["ids"], position_ids=torch.arange(24)[None], use_cache=False,
        layout=dlm.Layout(8, None, index, index[:, None] > index),
    ).last_hidden_state  # fmt: skip
    assert torch.allclose(target.model.lm_head(hidden), expected["logits"], rtol=0, atol=1e-4)
    ids = expected["ids"][0].tolist()
    out = target.forward([tuple(ids[16:])], [2], target.prefill(ids[:16]), {})
    right = expected["logits"][0].softmax(-1).index_fill(1, torch.tensor([target.mask_id]), 0)
    right = right[expected["ids"][0] == target.mask_id]
    assert torch.allclose(out.unit(0).exp(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy, rule, value", [
    ("static", "exact", None), ("dynamic", "threshold", 0.18),
])  # fmt: skip
def test_golden_generations(strategy, rule, value):
    """Token for token what the reference decoder writes with unrounded confidence, draft-free and
    with every draft."""
    target, expected = golden()
    decoder, prompt = Decoder(rule, value, "float32", gen_len=24), expected["prompt"][0]
    right = expected[f"gen_low_confidence_{strategy}_8"][0].tolist()
    for fused in (True, False):
        assert prompt.tolist() + dlm.generate(target, decoder, prompt, fused).written == right
    _, truth = with_truth(target, decoder, prompt)
    for name, draft in methods(8, small_drafter(8), truth, rule).items():
        got = verify.speculate(target, decoder, prompt, draft)
        assert prompt.tolist() + got.written == right, name


@pytest.mark.parametrize("task, rule, passes", [
    ("arithmetic", "exact", [78, 76]), ("code", "exact", [90, 89]),
    ("code", "threshold", [12, 12]),
])  # fmt: skip
def test_the_shipped_target_writes_the_same_text_with_the_shipped_drafters(task, rule, passes):
    """Token identity for what ships with the project, in float64: trained target, trained order
    drafter, calibrated graph. The passes of the draft-free loop on two prompts are pinned."""
    target = targets.load("embedded", dtype=torch.float64)
    drafter = drafting.load_drafter(os.path.join(SHIPPED, "order"))
    sets = ddtree.load_graph(os.path.join(SHIPPED, "graph.json"))
    decoder = Decoder(rule, gen_len=96)
    prompts = [target.encode(p.prompt) for p in tasks.problems(task, "test", 2, seed=0)]
    assert [dlm.generate(target, decoder, p).passes["denoise"] for p in prompts] == passes
    free, truth = with_truth(target, decoder, prompts[0])
    drafts = methods(8, drafter, truth, rule)
    drafts["graph"] = partial(ddtree.graph, budget=8, sets=sets)
    half = sorted(drafts)[task == "code" :: 2]  # the other half is the other task's
    crossed = []

    def watch(canvas, tree, path, *_):
        crossed.append(len(path) > 1 and canvas.goes_on(tree.states[path[-1]]))

    for name in {"graph", "spot", *half}:
        got = verify.speculate(target, decoder, prompts[0], drafts[name], watch=watch)
        assert got.written == free.written, name
    assert any(crossed)
