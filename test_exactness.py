"""Tests of what must be exact: decoding, trees, commit rules and loading. Paper sections 3, 4, 5, 7 and 9.

Covered: every draft method writes the text of the draft-free loop (float64, random targets) and wrong verifiers do not;
the commit rules by hand; [MASK] and untrained ids; the prefix cache against a full recomputation by the stock Qwen3;
a golden SDAR checkpoint; level-wise trees against a heap; the drafter's size and files; loading errors.

Left out: speed, and tasks and scoring (test_tasks.py). Nothing is downloaded.

    python -m pytest test_exactness.py          # about two minutes on two cores
"""

import heapq
import json
import os
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import ddtree
import dlm
import drafter as drafting
import targets
import tasks
import verify
from decoder import PRECISIONS, RULES, Decoder, commit_order, commits

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints", "golden-sdar")
VOCAB, MASK = 40, 39  # of the random targets
LENGTHS = (1, 31, 32, 33, 64, 45)  # prompt lengths around the borders of blocks
BUDGETS = (1, 6, 8, 12, 20)
VALUES = {
    "exact": None,
    "sequential": None,
    "threshold": 0.5,
    "product": 0.3,
    "factor": 1.5,
    "entropy": 1.0,
}  # random targets commit sets
GRID = [(L, rule, precision) for L in (32, 8) for rule in RULES for precision in PRECISIONS]
PER_POINT = 21  # decodes at each point of GRID
# Draft sets as the graph drafter takes them: (position rank, vocabulary rank) pairs, parents first.
SETS = [
    ((0, 0),),
    ((1, 0),),
    ((0, 0), (1, 0)),
    ((0, 1),),
    ((2, 0),),
    ((0, 0), (2, 0)),
    ((0, 0), (1, 0), (2, 0)),
    ((0, 1), (1, 0)),
    ((3, 0),),
    ((0, 0), (3, 0)),
    ((0, 0), (1, 1)),
    ((0, 0), (1, 0), (3, 0)),
    ((0, 0), (1, 0), (2, 0), (3, 0)),
    ((0, 2),),
]


# ------------------------------------------------------------------------------------------------------ helpers


def tiny_model(attention, seed=0, dtype=torch.float64):
    """A random Qwen3 whose texts are lively: a small [MASK] embedding, sharp attention and sharp outputs."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        rope_parameters=rope,
    )
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
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def small_drafter(block_size, seed=0):
    """An order drafter with random weights."""
    torch.manual_seed(seed)
    return drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16, block_size=block_size).eval()


def some_stale(target, k=5):
    """Real stale conditionals with k masked positions."""
    state = tuple(range(target.block_size - k)) + (MASK,) * k
    return drafting.Stale(Decoder(), state, MASK, 0, target.forward([state], [0], None, {}).unit(0))


def with_truth(target, decoder, prompt):
    """The draft-free Generation, and what the oracles read: {block: its true states in order}."""
    truth = {}

    def watch(canvas, state, following, *_):
        truth.setdefault(canvas.block, [state]).append(following)

    return dlm.generate(target, decoder, prompt, watch=watch), truth


def adversarial(stale, canvas, budget, truth, rng):
    """The next true states amid wrong ones: other tokens, reopened positions, wrong full blocks."""
    states = truth[canvas.block]
    right = [s for s in states[states.index(canvas.state) + 1 :] if not canvas.is_final(s)][: budget // 2]
    nodes = list(right)
    while len(nodes) < budget:
        state = list(right[rng.integers(len(right))] if right else canvas.state)
        for s in rng.choice(len(state), rng.integers(1, 4)):
            if canvas.state[s] == canvas.target.mask_id:  # what is decided must be kept: see verify.checked
                state[s] = int(rng.integers(VOCAB))  # VOCAB - 1 is [MASK]: reopens the position
        if rng.random() < 0.2:
            mask_id = canvas.target.mask_id
            state = [int(rng.integers(MASK)) if token == mask_id else token for token in state]
        if tuple(state) not in states:
            nodes.append(tuple(state))
    rng.shuffle(nodes)
    nodes = [tuple(map(int, state)) for state in nodes]
    return ddtree.Tree([canvas.state] + nodes, [1.0] + [0.5] * len(nodes), [-1] + [0] * len(nodes))


def methods(budget, drafter, truth, rule, seed=0):
    """Every way of drafting, {name: draft(stale, canvas)}. The position oracle is for `exact` only."""
    costs = ddtree.Costs([0.0] + [1 + 0.02 * u for u in range(2 * budget)], [0.01] + [0.001 * n for n in range(30)])
    drafts = {
        "chain": partial(ddtree.chain, budget=budget),
        "confidence_tree": partial(ddtree.confidence_tree, budget=budget),
        "graph": partial(ddtree.graph, budget=budget, sets=SETS),
        "spot": partial(ddtree.spot, budget=budget, drafter=drafter),
        "spot, floor": partial(ddtree.spot, budget=budget, drafter=drafter, floor=0.02),
        "spot_cost_aware": partial(ddtree.spot_cost_aware, budget=budget, drafter=drafter, costs=costs),
        "oracle_tokens": partial(ddtree.oracle_tokens, budget=budget, truth=truth),
        "adversarial": partial(adversarial, budget=budget, truth=truth, rng=np.random.default_rng(seed)),
    }
    if rule == "exact":
        drafts["oracle_positions"] = partial(ddtree.oracle_positions, budget=budget, truth=truth)
    return drafts


def one_sentence(error):
    """The message of a raised error is one line of plain words that says what to do, not a traceback or a list."""
    text = str(error.value)
    return "\n" not in text and 20 < len(text) < 400 and ": " in text


# --------------------------------------------------------------------------- 1. the same text as the draft-free loop


def stop_tokens(target, decoder, prompt, i):
    """Stop ids of case i: none, an id that is never written, or one that the target does write early."""
    if i % 3 == 0:
        return frozenset()
    written = dlm.generate(target, decoder, prompt).written
    never = next(t for t in range(MASK) if t not in written)
    return frozenset({never} if i % 3 == 1 else {never, written[len(written) // 3]})


@pytest.mark.parametrize("block_size, rule, precision", GRID)
def test_every_draft_writes_the_draft_free_text(block_size, rule, precision):
    """Token identity, section 5: F is a function, so whatever is drafted, the text is that of the draft-free loop."""
    assert PER_POINT * len(GRID) >= 500  # decodes compared by this test in all
    seed = GRID.index((block_size, rule, precision))
    target, drafter = tiny_target(block_size, seed), small_drafter(block_size, seed)
    decoder = Decoder(rule, VALUES[rule], precision, gen_len=36 if block_size == 32 else 20)
    decodes, accepted, crossed, i = 0, 0, [], seed

    def watch(canvas, tree, path, *_):
        crossed.append(len(path) > 1 and canvas.is_complete(tree.states[path[-1]]))

    while decodes < PER_POINT:
        prompt, budget = random_prompt(LENGTHS[i % 6], seed), BUDGETS[i % 5]
        target.stop_ids = frozenset()
        target.stop_ids = stop_tokens(target, decoder, prompt, i)
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods(budget, drafter, states, rule, i).items():
            got = verify.speculate(target, decoder, prompt, draft, watch=watch)
            assert (got.written, got.ids) == (truth.written, truth.ids), (name, len(prompt), budget, i)
            assert sum(got.accepted) + got.passes["denoise"] == truth.passes["denoise"], name  # each saves one pass
            decodes, accepted = decodes + 1, accepted + sum(got.accepted)
        i += 1
    assert accepted > 0 and any(crossed)  # else (full) nodes were not put to the test


@pytest.mark.parametrize("task, rule", [("arithmetic", "exact"), ("code", "exact"), ("code", "threshold")])
def test_the_shipped_target_writes_the_same_text_with_the_shipped_drafters(task, rule):
    """Token identity for what ships with the project, in float64: trained target, trained order drafter, calibrated
    graph."""
    target, shipped = targets.load("embedded", dtype=torch.float64), os.path.dirname(GOLDEN)
    drafter, sets = (
        drafting.load_drafter(os.path.join(shipped, "order")),
        ddtree.load_graph(os.path.join(shipped, "graph.json")),
    )
    decoder = Decoder(rule, gen_len=96)
    for problem, budget in zip(tasks.problems(task, "test", 2, seed=5), (8, 20)):
        prompt, truth = target.encode(problem.prompt), {}
        free = dlm.generate(
            target,
            decoder,
            prompt,
            watch=lambda canvas, state, after, *_: truth.setdefault(canvas.block, [state]).append(after),
        )
        drafts = methods(budget, drafter, truth, rule) | {"graph": partial(ddtree.graph, budget=budget, sets=sets)}
        for name, draft in drafts.items():
            assert verify.speculate(target, decoder, prompt, draft).written == free.written, name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_size", (32, 8))
def test_fused_and_published_loops_agree(block_size, rule):
    """Both draft-free loops: same tokens, same denoise passes; the published one also stores once a block."""
    target, decoder = tiny_target(block_size, 1), Decoder(rule, VALUES[rule], gen_len=40)
    for length in LENGTHS:
        prompt = random_prompt(length)
        fused, published = (dlm.generate(target, decoder, prompt, fused=fused) for fused in (True, False))
        assert (fused.written, fused.ids) == (published.written, published.ids)
        blocks = (length + len(fused.written)) // block_size - length // block_size
        whole = int(length >= block_size)
        assert fused.passes == {"prefill": whole, "denoise": fused.passes["denoise"], "kv_commit": 0}
        assert published.passes == {"prefill": whole, "denoise": fused.passes["denoise"], "kv_commit": blocks}
        if rule == "exact":  # one pass a token
            assert fused.passes["denoise"] == len(fused.written)


def test_where_generation_stops():
    """Stop at the end of a block with a stop id, or after gen_len; cut the answer at the first stop id or gen_len."""
    target, decoder = tiny_target(8, 2), Decoder(gen_len=20)
    prompt = random_prompt(13)
    free = dlm.generate(target, decoder, prompt)
    assert len(free.written) == 27 and MASK not in free.written  # 13 + 20 = 33, up to 40
    assert free.ids == free.written[:20]
    target.stop_ids = frozenset({free.written[5]})  # position 18, in the block that ends at 24
    first = free.written.index(free.written[5])
    stopped = dlm.generate(target, decoder, prompt)
    assert stopped.ids == free.written[:first]
    assert len(stopped.written) == (3 if first < 3 else 11)
    target.stop_ids = frozenset(prompt[8:].tolist()) - set(free.written)
    assert target.stop_ids  # in the first active block, but in the prompt
    assert dlm.generate(target, decoder, prompt).written == free.written


def test_a_drafted_final_state_does_not_lengthen_the_text():
    """The loop is lossless whatever is drafted, so also for a draft whose node is the true last state of the answer."""
    target, decoder, prompt = tiny_target(8, 2), Decoder(gen_len=8), random_prompt(16)
    truth, states = with_truth(target, decoder, prompt)

    def draft(stale, canvas):
        block = states.get(canvas.block, [canvas.state])
        coming = block[block.index(canvas.state) :]
        return ddtree.Tree(coming, [1.0] * len(coming), list(range(-1, len(coming) - 1)))

    assert verify.speculate(target, decoder, prompt, draft).written == truth.written


# ---------------------------------------------------------------------------------------- 2. wrong verifiers are caught


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
    """Wrong: takes a node for F(y) if it decides the same positions and at most one token differs."""

    def near(a, b):
        return all((x == MASK) == (y == MASK) for x, y in zip(a, b)) and sum(x != y for x, y in zip(a, b)) <= 1

    path = [0]
    while True:
        step = [
            u for u, state in enumerate(states) if extends(state, states[path[-1]]) and near(state, following[path[-1]])
        ]
        if not step:
            return path
        path.append(step[0])


def last_unchecked(states, following):
    """Wrong: the true path, and then one child more that nobody has checked."""
    path = verify.accept(states, following)
    return path + [u for u, state in enumerate(states) if extends(state, states[path[-1]])][:1]


@pytest.mark.parametrize("walk", (heaviest_child, one_token_off, last_unchecked))
def test_wrong_verifiers_change_the_text(walk):
    """The comparison of test 1 must fail for a wrong verifier on some prompt, else it would prove nothing."""
    target, decoder = tiny_target(8, 4), Decoder(gen_len=40)
    drafts = methods(20, small_drafter(8), None, "threshold")
    for draft in (drafts["confidence_tree"], drafts["spot"]):
        same = []
        for length in LENGTHS:
            prompt = random_prompt(length)
            truth = dlm.generate(target, decoder, prompt).written
            same.append(
                (
                    verify.speculate(target, decoder, prompt, draft, walk=walk).written == truth,
                    verify.speculate(target, decoder, prompt, draft).written == truth,
                )
            )
        assert not all(wrong for wrong, _ in same) and all(right for _, right in same)


def test_accept_by_hand():
    """Section 5: from root 0 to F(0) = node 2, to F(2) = node 3, which is full and has no further F."""
    a, b, c, d = (9, 9), (1, 2), (1, 9), (9, 2)
    assert verify.accept([a, (3, 2), c, b, d], [c, (3, 2), b, b, b]) == [0, 2, 3]
    assert verify.accept([a, c, d], [(4, 9), b, b]) == [0]
    assert verify.accept([b], [b]) == [0]


# ------------------------------------------------------------------------------------------------- 3. commit rules


@pytest.mark.parametrize(
    "rule, value, right",
    [
        ("exact", None, [1]),  # positions 1 and 4 tie at .95: the lowest goes first
        ("threshold", 0.9, [1, 2, 4]),  # .95, .92, .95 > .9; position 3 is decided
        ("threshold", 0.95, [1]),  # strictly greater: none, so the most confident one
        ("threshold", 0.0, [0, 1, 2, 4, 5]),  # all that is masked
        ("product", 0.9, [1, 4]),  # .95, .9025, .8303
        ("product", 0.8, [1, 2, 4]),
        ("product", 0.99, [1]),  # not even one: at least one commits
        ("factor", 1.0, [1, 2, 4]),  # 2·.05 = .1, 3·.05 = .15, 4·.08 = .32, 5·.5 = 2.5
        ("factor", 0.3, [1, 4]),
        ("factor", 0.01, [1]),
        ("entropy", 0.1, [0, 1, 2, 4]),  # sorted .02 .02 .05 .3 .9: Σ − max = 0, .02, .04, .09, .39
        ("entropy", 0.03, [1, 4]),
        ("entropy", 0.0, [1]),  # Σ − max = 0 for one: again the lowest of the tie
    ],
)
def test_commit_rules_by_hand(rule, value, right):
    """Section 7's table on one row of six positions; the reasons stand beside each case."""
    confidence = torch.tensor([0.5, 0.95, 0.92, 0.99, 0.95, 0.1], dtype=torch.float64)
    entropy = torch.tensor([0.05, 0.02, 0.3, 0.0, 0.02, 0.9], dtype=torch.float64)
    masked = torch.tensor([True, True, True, False, True, True])
    score = -entropy if rule == "entropy" else confidence
    now = commits(rule, value, score, masked)
    assert now.nonzero()[:, 0].tolist() == right


@pytest.mark.parametrize("rule", RULES)
def test_commits_of_a_batch_are_those_of_its_rows(rule):
    """Rows are independent, commit masked positions only, and at least one wherever a mask is left."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(50, 8, generator=generator, dtype=torch.float64).mul(8).round() / 8  # many ties
    masked = torch.rand(50, 8, generator=generator) < torch.linspace(0, 1, 50)[:, None]
    assert not masked[0].any() and masked[-1].all()
    score = -confidence if rule == "entropy" else confidence
    batch = commits(rule, VALUES[rule], score, masked)
    rows = torch.stack([commits(rule, VALUES[rule], *row) for row in zip(score, masked)])
    assert batch.equal(rows) and not (batch & ~masked).any()
    assert batch.any(1).equal(masked.any(1))


def test_commit_order_by_hand():
    """Falling score, ties to the lowest position, decided positions last."""
    order, score = commit_order(torch.tensor([0.3, 0.7, 0.9, 0.7]), torch.tensor([True, True, False, True]))
    assert order.tolist() == [1, 3, 0, 2] and score[:3].tolist() == pytest.approx([0.7, 0.7, 0.3])


@pytest.mark.parametrize("precision, first", [("bfloat16", 0), ("float32", 1)])
def test_precision_decides_the_order(precision, first):
    """bfloat16 steps are 1/256 below 1: .9985 and .9999 become 1, the lowest goes first; float32 tells them apart."""
    logits = torch.tensor([[0.9985, 0.0015], [0.0001, 0.9999]]).log()
    out = dlm.Pass(torch.full((1, 2), MASK), torch.tensor([0]), [0, 1], [2], logits, lambda rows: rows, 2, [])
    right = (0, MASK) if first == 0 else (MASK, 1)
    assert Decoder(precision=precision).transition(out) == [right]
    stale = drafting.Stale(Decoder(precision=precision), (MASK, MASK), MASK, 0, logits)
    assert stale.candidates(0).ranking[0] == first  # the drafter breaks ties alike


# ----------------------------------------------------------------------------------- 4. ids that are never written


@pytest.mark.parametrize("rule", RULES)
def test_mask_and_untrained_ids_are_never_written(rule):
    """[MASK] = 30 and ids from 35 on, which the tokenizer lacks, have the highest logits and are never committed."""
    model = tiny_model("block_units", 5)
    head = torch.nn.Linear(32, VOCAB, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[[30, 35, 36, 37, 38, 39]] = 1e4
    model.lm_head = head
    target = dlm.Target(model, range(35), 8, 30, [])  # of a tokenizer only the length is read: 35 ids
    prompt = random_prompt(13) % 30
    decoder = Decoder(rule, VALUES[rule], gen_len=24)
    probs = target.forward([(30,) * 8], [0], None, {}).unit(0).exp()
    assert probs[:, [30, 35, 36, 37, 38, 39]].eq(0).all() and torch.allclose(probs.sum(1), torch.ones_like(probs[:, 0]))
    truth = dlm.generate(target, decoder, prompt)
    assert all(t < 35 and t != 30 for t in truth.written)
    assert verify.speculate(target, decoder, prompt, partial(ddtree.confidence_tree, budget=8)).written == truth.written


@pytest.mark.parametrize("broken", ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"))
def test_nan_weights_are_an_error(broken):
    """A NaN has no argmax, so decoding says so instead of writing token 0."""
    target = tiny_target()
    dict(target.model.named_parameters())[broken].data[0] = torch.nan
    with pytest.raises(FloatingPointError) as error:
        dlm.generate(target, Decoder(gen_len=8), random_prompt(9))
    assert one_sentence(error)


# --------------------------------------------------------------------------- 5. the prefix cache is a recomputation


@torch.inference_mode()
def dense_conditionals(ids, block_size, attention, seed):
    """Conditionals at the masks of a whole row by the stock Qwen3 under an additive block-causal mask."""
    model, ids = tiny_model(attention, seed), torch.tensor([ids])
    at = torch.arange(ids.shape[1])
    later = at // block_size > (at // block_size)[:, None]
    mask = torch.zeros(later.shape, dtype=torch.float64).masked_fill(later, torch.finfo(torch.float64).min)
    logits = model(input_ids=ids, attention_mask=mask[None, None], position_ids=at[None], use_cache=False).logits
    logits[..., MASK] = -torch.inf
    return logits[ids == MASK].softmax(-1)


@pytest.mark.parametrize("attention, tolerance", [("sdpa", 1e-10), ("eager", 1e-5)])  # eager: softmax in float32
@pytest.mark.parametrize("blocks", (0, 1, 3))
def test_a_cached_pass_equals_full_recomputation(blocks, attention, tolerance):
    """One cached pass over a root, a finished node, its next block and another = each recomputed alone."""
    L, target = 8, tiny_target(8, 6)
    done = random_prompt(blocks * L, 1).tolist()
    full = tuple(random_prompt(L, 2).tolist())
    root, other, blank = full[:3] + (MASK,) * 5, (MASK,) + full[1:6] + (MASK, 4), (MASK,) * L
    out = target.forward([root, full, other, blank], [blocks] * 3 + [blocks + 1], target.prefill(done), {3: 1})
    for u, row in enumerate([root, full, other, full + blank]):
        right = dense_conditionals(done + list(row), L, attention, 6)
        probs = out.unit(u).exp()
        assert probs.shape == right.shape and torch.allclose(probs, right, rtol=0, atol=tolerance)
    prefix = target.extend(target.prefill(done), out, 1)  # the finished node's K and V, stored
    after = target.forward([root], [blocks + 1], prefix, {})
    right = dense_conditionals(done + list(full + root), L, attention, 6)
    assert torch.allclose(after.unit(0).exp(), right, rtol=0, atol=tolerance)


def test_extending_the_cache_equals_prefilling_it():
    """K and V kept from passes over finished blocks = those of one prefill, to float64 rounding."""
    target, L = tiny_target(8, 7), 8
    ids = random_prompt(3 * L).tolist()
    prefix = None
    for n in range(3):
        out = target.forward([tuple(ids[n * L : n * L + L])], [n], prefix, {})
        prefix = target.extend(prefix, out, 0)
    for kept, right in zip(prefix, target.prefill(ids)):
        assert all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(kept, right))


def test_rows_of_a_batch_equal_single_rows():
    """With a prefix of 3 rows, 2 units a row are passed together: each row = that row alone, to float64 rounding."""
    target, L = tiny_target(8, 9), 8
    prefixes = [target.prefill(random_prompt(2 * L, row).tolist()) for row in range(3)]
    batch = [tuple(torch.cat(parts) for parts in zip(*layer)) for layer in zip(*prefixes)]
    full = [tuple(random_prompt(L, 10 + row).tolist()) for row in range(3)]
    states = [(full[row], (MASK,) * L) for row in range(3)]
    together = target.forward([state for pair in states for state in pair], [2, 3], batch, {1: 0})
    for row in range(3):
        alone = target.forward(list(states[row]), [2, 3], prefixes[row], {1: 0})
        assert torch.allclose(together.unit(2 * row + 1).exp(), alone.unit(1).exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocks", (0, 2))
def test_copies_in_one_pass_equal_one_at_a_time(blocks):
    """Copies do not see each other: 21 states in one pass = 21 passes, to float64 rounding."""
    target, rng = tiny_target(8, 8), np.random.default_rng(0)
    prefix = target.prefill(random_prompt(8 * blocks).tolist())
    states = [tuple(int(t) if rng.random() < 0.5 else MASK for t in rng.integers(0, MASK, 8)) for _ in range(21)]
    together = target.forward(states, [blocks] * 21, prefix, {})
    for u, state in enumerate(states):
        alone = target.forward([state], [blocks], prefix, {})
        assert torch.allclose(together.unit(u).exp(), alone.unit(0).exp(), rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------- 6. the golden SDAR


def golden():
    """The golden checkpoint in float32 and what the reference implementation computes on it."""
    return targets.load(GOLDEN), load_file(os.path.join(GOLDEN, "expected.safetensors"))


@torch.inference_mode()
def test_golden_logits():
    """Logits of all 24 positions = the reference SDAR's in float32; our cached conditionals are their softmax."""
    target, expected = golden()
    index = torch.arange(3)
    units = dlm.Layout(8, None, index, index[:, None] > index)
    hidden = target.model.model(
        input_ids=expected["ids"], position_ids=torch.arange(24)[None], layout=units, use_cache=False
    ).last_hidden_state
    assert torch.allclose(target.model.lm_head(hidden), expected["logits"], rtol=0, atol=1e-4)
    ids = expected["ids"][0].tolist()
    probs = target.forward([tuple(ids[16:])], [2], target.prefill(ids[:16]), {}).unit(0).exp()
    right = expected["logits"][0].softmax(-1).index_fill(1, torch.tensor([target.mask_id]), 0)
    right = right[expected["ids"][0] == target.mask_id]
    assert torch.allclose(probs, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy, rule, value", [("static", "exact", None), ("dynamic", "threshold", 0.18)])
def test_golden_generations(strategy, rule, value):
    """Token for token what the reference decoder writes with unrounded confidence, draft-free and with every draft."""
    target, expected = golden()
    decoder, prompt = Decoder(rule, value, "float32", gen_len=24), expected["prompt"][0]
    right = expected[f"gen_low_confidence_{strategy}_8"][0].tolist()
    for fused in (True, False):
        assert prompt.tolist() + dlm.generate(target, decoder, prompt, fused).written == right
    _, truth = with_truth(target, decoder, prompt)
    for name, draft in methods(8, small_drafter(8), truth, rule).items():
        assert prompt.tolist() + verify.speculate(target, decoder, prompt, draft).written == right, name


# ------------------------------------------------------------------------------------------------------ 7. trees


def drafting_round(seed, k=6, L=8, vocab=12, stops=()):
    """A made-up round: stale conditionals at k positions, one decided since; `stops` make states final."""
    rng = np.random.default_rng(seed)
    positions = sorted(rng.choice(L, k, replace=False).tolist())
    before = tuple(MASK if s in positions else int(rng.integers(vocab)) for s in range(L))
    stale = drafting.Stale(Decoder(), before, MASK, 0, torch.tensor(rng.dirichlet(np.full(vocab, 0.2), k)).log())
    canvas = SimpleNamespace(
        state=ddtree.commit(before, positions[0], 1),
        target=SimpleNamespace(mask_id=MASK),
        is_complete=lambda state: MASK not in state,
        is_leaf=lambda state: MASK not in state and not set(stops).isdisjoint(state),
    )
    return stale, canvas


def hashed_order(seed):
    """A random q(s|y) that is a function of the state: seeded by the set of decided positions."""

    def q(decided):
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            rng = np.random.default_rng([seed, *taken.astype(int).tolist()])
            row[~taken] = rng.dirichlet(np.full((~taken).sum(), 0.5))
        return out

    return q


def heap_tree(stale, canvas, order, budget, floor=0.0):
    """Section 4 one node at a time, {state: mass} of root and `budget` heaviest states: a heap that merges states."""
    heap, nodes = [(-1.0, 0, canvas.state)], {}
    while heap and len(nodes) <= budget:
        mass, _, state = heapq.heappop(heap)
        if state in nodes:  # met before with a larger mass
            continue
        nodes[state] = -mass
        if canvas.is_complete(state):
            continue
        q = order(np.array([[state[s] != MASK for s in stale.positions]]))[0]
        for s, q_s, p in zip(stale.positions, q, stale.log_probs.exp().float()):
            for v in p.argsort(descending=True)[: 2 if p.max() < ddtree.HEDGE else 1].tolist():
                child = state[:s] + (v,) + state[s + 1 :]
                m = -mass * float(q_s) * float(p[v])
                if m > 0 and m >= floor and not canvas.is_leaf(child):
                    heapq.heappush(heap, (-m, len(heap), child))
    return nodes


@pytest.mark.parametrize("seed", range(12))
def test_level_wise_tree_is_the_heap_tree(seed):
    """Same states and masses at every budget: with token hedge, merged states, full blocks, and no final states."""
    stale, canvas = drafting_round(seed, k=4 if seed % 2 else 7, stops=(3, 4))
    assert (stale.log_probs.exp().amax(1) < ddtree.HEDGE).any()
    for budget in range(1, 21):
        for floor in (0.0, 0.01, 0.1):
            tree = ddtree.grow(stale, canvas, hashed_order(seed), budget, floor)
            right = heap_tree(stale, canvas, hashed_order(seed), budget, floor)
            assert len(set(tree.states)) == len(tree.states) <= budget + 1
            assert dict(zip(tree.states, tree.masses)) == pytest.approx(right, rel=1e-12)
            assert not any(canvas.is_leaf(state) for state in tree.states)


@pytest.mark.parametrize("seed", range(6))
def test_shape_of_a_tree(seed):
    """Root first, heaviest first; a parent stands before its child, is no lighter, has one commit less."""
    stale, canvas = drafting_round(seed)
    tree = ddtree.grow(stale, canvas, hashed_order(seed), 20)
    assert tree.states[0] == canvas.state and tree.parents[0] == -1 and tree.masses[0] == 1.0
    assert tree.masses == sorted(tree.masses, reverse=True)
    for u in range(1, len(tree.states)):
        parent = tree.parents[u]
        assert parent < u and tree.masses[parent] >= tree.masses[u] and extends(tree.states[u], tree.states[parent])
    depth = [canvas.state.count(MASK) - state.count(MASK) for state in tree.states]
    assert max(depth) > 1
    head = tree.head(5)
    assert (head.states, head.masses, head.parents) == (tree.states[:6], tree.masses[:6], tree.parents[:6])


@pytest.mark.parametrize("seed", range(6))
def test_floor_drops_the_nodes_under_it(seed):
    """γ between two masses keeps exactly those above; γ equal to a mass keeps it; γ > 1 leaves the root."""
    stale, canvas = drafting_round(seed)
    tree = ddtree.grow(stale, canvas, hashed_order(seed), 20)
    for n in (1, 3, 7, 12):
        for floor in (tree.masses[n], (tree.masses[n] + tree.masses[n + 1]) / 2):
            assert ddtree.grow(stale, canvas, hashed_order(seed), 20, floor).states == tree.head(n).states
    assert ddtree.grow(stale, canvas, hashed_order(seed), 20, 1.1).states == [canvas.state]


def test_the_drafter_is_asked_once_a_level():
    """Level-wise growth calls the drafter at most once per decided position, a heap once per node."""
    stale, canvas = drafting_round(0, k=7)
    calls = []

    def order(decided):
        calls.append(len(decided))
        return hashed_order(0)(decided)

    tree = ddtree.grow(stale, canvas, order, 20)
    assert len(calls) <= 7 < len(tree.states) and calls[0] == 1


@pytest.mark.parametrize("seed", range(8))
def test_best_rate_is_the_argmax(seed):
    """n = argmax (1 + Σ_{i≤n} m_i) / (c(1 + n) + spent) by brute force, over those passes that were measured."""
    rng = np.random.default_rng(seed)
    masses = sorted(rng.random(20).tolist(), reverse=True)
    costs = ddtree.Costs([0.0] + np.cumsum(rng.random(12 + 2 * seed) * 0.5 + 0.01).tolist(), [0.0])
    for spent in (0.0, 0.3):
        rates = [(1 + sum(masses[:n])) / (costs.passes[1 + n] + spent) for n in range(21) if 1 + n < len(costs.passes)]
        rate, n = ddtree.best_rate(masses, costs, spent)
        assert rate == pytest.approx(max(rates)) and n == rates.index(max(rates))


@pytest.mark.parametrize("seed", range(4))
def test_cost_aware_tree(seed):
    """Free drafts, flat passes: the whole tree. A pass or call that cannot pay: no call. Else the best head."""
    target, drafter = tiny_target(8, seed), small_drafter(8, seed)
    stale, canvas = some_stale(target, 6), dlm.Canvas(target, Decoder(gen_len=20), random_prompt(3))
    full = ddtree.spot(stale, canvas, 12, drafter)
    assert ddtree.spot_cost_aware(stale, canvas, 12, drafter, ddtree.Costs([1.0] * 30, [0.0] * 30)) == full
    for costs in (ddtree.Costs([0.0, 1.0] + [100.0] * 30, [0.0] * 30), ddtree.Costs([1.0] * 30, [100.0] * 30)):
        never_asked = SimpleNamespace(order=lambda stale: None)
        assert ddtree.spot_cost_aware(stale, canvas, 12, never_asked, costs) == ddtree.root_only(canvas)
    passes = [0.0] + [1 + 0.1 * n for n in range(9)]  # passes of over 9 units were not measured
    tree = ddtree.spot_cost_aware(stale, canvas, 12, drafter, ddtree.Costs(passes, [0.0] * 30))
    rates = [sum(tree.masses[: n + 1]) / passes[n + 1] for n in range(len(tree.states))]
    assert len(tree.states) <= 9 and max(rates) == rates[-1] and tree.states[0] == canvas.state


def test_chain_and_graph_by_hand():
    """Chain: confident positions first, top tokens. Graph: (position rank, vocabulary rank) sets."""
    state = (5, MASK, MASK, MASK)
    canvas = SimpleNamespace(state=state, target=SimpleNamespace(mask_id=MASK), is_leaf=lambda s: False)
    probs = torch.zeros(4, 10)
    for row, tokens, values in zip(
        probs, [[5, 2], [3, 4], [6, 7], [8, 9]], [[0.9, 0.1], [0.5, 0.4], [0.7, 0.2], [0.6, 0.3]]
    ):
        row[tokens] = torch.tensor(values)
    stale = drafting.Stale(Decoder(), (MASK,) * 4, MASK, 0, probs.log())
    tree = ddtree.chain(stale, canvas, 2)  # position 0 is decided by now
    assert tree.states == [state, (5, MASK, 6, MASK), (5, MASK, 6, 8)] and tree.parents == [-1, 0, 1]
    sets = [((0, 0),), ((1, 1),), ((0, 0), (1, 1)), ((0, 0), (9, 0)), ((2, 0),)]  # rank 9 does not exist
    tree = ddtree.graph(stale, canvas, 4, sets)
    assert tree.states == [  # the last set moves up for the one that the block has no room for
        state,
        (5, MASK, 6, MASK),
        (5, MASK, MASK, 9),
        (5, MASK, 6, 9),
        (5, 3, MASK, MASK),
    ]
    assert tree.parents[4] == 0 and tree.parents[:3] == [-1, 0, 0] and tree.parents[3] in (1, 2)


@pytest.mark.parametrize(
    "content, error",
    [
        (None, FileNotFoundError),
        ("{", ValueError),
        ("{}", ValueError),
        ("[]", ValueError),
        ('{"sets": [[0, 0]]}', ValueError),
    ],
)
def test_broken_graphs_are_refused(tmp_path, content, error):
    """A missing file, or one that is no draft graph, is one sentence that names it; a whole one is read."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"sets": SETS}))
    assert ddtree.load_graph(str(path)) == SETS
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(error, match="graph.json") as raised:
        ddtree.load_graph(str(path))
    assert one_sentence(raised)


# ------------------------------------------------------------------------------------------------- 8. the drafter


def test_drafter_size():
    """The paper's count: 0.62 M parameters; 617,089 with a 32×128 position table and a 128→64→1 head."""
    count = sum(p.numel() for p in drafting.OrderDrafter().parameters())
    assert 615_000 < count < 625_000 and count == 617_089


def test_order_is_a_distribution_over_undecided_positions():
    """q(s|y): 0 where the path has decided, above 0 elsewhere, sum 1; a row does not depend on its neighbours."""
    stale = some_stale(tiny_target(8))
    order = drafting.OrderDrafter().eval().order(stale)
    decided = np.array([[False] * 5, [True, False, False, True, False], [False, True, True, True, True]])
    q = order(decided)
    assert q.shape == (3, 5) and (q[decided] == 0).all() and (q[~decided] > 0).all()
    assert np.allclose(q.sum(1), 1, atol=1e-6)
    assert all(np.allclose(order(row[None])[0], right, atol=1e-6) for row, right in zip(decided, q))


def test_stale_features_by_hand():
    """The 8 statistics: p1, p1 − p2, entropy, tail mass, rank / L, offset / L, distance / L, share still masked."""
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.75, 0.25, 0.0]], dtype=torch.float64)
    stale = drafting.Stale(Decoder(), (MASK, 7, MASK, 7), MASK, 0, probs.log())
    assert stale.features.shape == (2, 72) and stale.positions == [0, 2]
    seen = stale.candidates(2)
    assert seen.ranking == [1, 0] and seen.confidence.tolist() == [0.5, 0.75]
    assert [tokens[0] for tokens in seen.tokens] == [0, 1] and seen.values[0, :4].tolist() == [0.5, 0.25, 0.25, 0.0]
    assert seen.values.shape == (2, 32) and all(len(tokens) == 32 for tokens in seen.tokens)
    entropy = [-0.5 * np.log(0.5) - 0.5 * np.log(0.25), -0.75 * np.log(0.75) - 0.25 * np.log(0.25)]
    right = torch.tensor(
        [
            [0.50, 0.25, entropy[0], 0, 1 / 4, 0 / 4, 1 / 4, 2 / 4],
            [0.75, 0.50, entropy[1], 0, 0 / 4, 2 / 4, 1 / 4, 2 / 4],
        ]
    )
    assert torch.allclose(stale.features[:, 64:], right.float(), atol=1e-6)


def test_drafter_survives_saving(tmp_path):
    """What is loaded gives the q of what was saved, bit for bit, whatever its shape."""
    stale = some_stale(tiny_target(8))
    saved = small_drafter(8, 3)
    saved.save(str(tmp_path), trained_on="nothing")
    loaded, decided = drafting.load_drafter(str(tmp_path)), np.zeros((1, 5), dtype=bool)
    assert loaded.shape == saved.shape and not loaded.training
    assert (loaded.order(stale)(decided) == saved.order(stale)(decided)).all()


def edit_weights(change):
    """A breaker of folders: rewrites model.safetensors with its dict of tensors changed by `change`."""

    def edit(folder):
        path = os.path.join(folder, "model.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def edit_config(content=None, **fields):
    """A breaker of folders: config.json becomes `content` (bytes), or gets `fields`, where None removes one."""

    def edit(folder):
        path = os.path.join(folder, "config.json")
        with open(path, "rb") as file:
            old = file.read()
        new = {**json.loads(old), **fields}
        with open(path, "wb") as file:
            file.write(content or json.dumps({key: value for key, value in new.items() if value is not None}).encode())

    return edit


def truncate(folder):
    os.truncate(os.path.join(folder, "model.safetensors"), 1000)


def remove_weights(folder):
    os.remove(os.path.join(folder, "model.safetensors"))


@pytest.mark.parametrize(
    "edit, named",
    [
        (edit_weights(lambda t: t.pop("position.weight")), "position.weight"),
        (edit_weights(lambda t: t.update(extra=torch.zeros(2))), "extra"),
        (edit_weights(lambda t: t.update({"position.weight": torch.zeros(3)})), "position.weight"),
        (truncate, "safetensors|header"),
        (remove_weights, "safetensors"),
        (edit_config(b"{"), "cannot be loaded"),
        (edit_config(b"[1]"), "cannot be loaded"),
        (edit_config(b"\xff\xfe{"), "cannot be loaded"),
        (edit_config(b'{"shape": {"heads": 7}}'), "cannot be loaded"),
    ],
    ids="missing surplus misshaped truncated no-weights json list binary heads".split(),
)
def test_broken_drafters_are_refused(tmp_path, edit, named):
    """A drafter that is not what was saved is refused with one sentence that names the fault, not half loaded."""
    small_drafter(8).save(str(tmp_path))
    edit(str(tmp_path))
    with pytest.raises(ValueError, match=named) as error:
        drafting.load_drafter(str(tmp_path))
    assert one_sentence(error) and str(tmp_path) in str(error.value)


def test_a_missing_drafter_is_refused(tmp_path):
    """A folder without a drafter is named in one sentence."""
    with pytest.raises(FileNotFoundError, match="nowhere") as error:
        drafting.load_drafter(str(tmp_path / "nowhere"))
    assert one_sentence(error)


# -------------------------------------------------------------------------------------------- 9. loading a target


@pytest.mark.parametrize(
    "edit, named",
    [
        (remove_weights, "safetensors"),
        (truncate, "cannot be read"),
        (edit_weights(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "model.layers.1.mlp.up_proj.weight"),
        (edit_weights(lambda t: t.update({"model.extra.weight": torch.zeros(2)})), "model.extra.weight"),
        (edit_weights(lambda t: t.update({"model.norm.weight": torch.zeros(63)})), "model.norm.weight"),
        (edit_config(b"{"), "config.json"),
        (edit_config(b"[1]"), "config.json"),
        (edit_config(b"\xff\xfe{"), "config.json"),
        (edit_config(hidden_size=None), "hidden_size"),
        (edit_config(hidden_size="wide"), "hidden_size"),
        (edit_config(rope_theta=None), "rope_theta"),
        (edit_config(block_size=None), "block_size"),
        (edit_config(block_size=0), "block_size"),
        (edit_config(block_size="8"), "block_size"),
        (edit_config(mask_token_id=None), "mask_token_id"),
        (edit_config(mask_token_id=500), "mask_token_id"),
    ],
    ids=(
        "no-weights truncated missing surplus misshaped json list binary no-hidden-size text-hidden-size no-rope "
        "no-block block-0 text-block no-mask mask-outside"
    ).split(),
)
def test_broken_targets_are_refused(tmp_path, edit, named):
    """What is not whole is refused with one sentence that names the fault, and never filled up with random weights."""
    folder = str(tmp_path / "broken")
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("expected*"))
    targets.load(folder)  # whole before it is broken
    edit(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=named) as error:
        targets.load(folder)
    assert one_sentence(error)


def test_several_stop_ids_in_a_config(tmp_path):
    """Hub configs write one end-of-sequence id or a list of them: each is a stop id."""
    folder = str(tmp_path / "list")
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("expected*"))
    edit_config(eos_token_id=[95, 94])(folder)
    assert targets.load(folder).stop_ids == {94, 95}
    assert targets.load(GOLDEN).stop_ids == {95}


def test_an_unknown_target_is_refused():
    """An unknown name is answered with the names that are known."""
    with pytest.raises(FileNotFoundError, match="nowhere.*embedded") as error:
        targets.load("nowhere")
    assert one_sentence(error)


@pytest.mark.parametrize(
    "arguments, named",
    [({"rule": "best"}, "best.*exact"), ({"gen_len": 0}, "gen_len"), ({"precision": "float8"}, "float8.*bfloat16")],
)
def test_unknown_decoders_are_refused(arguments, named):
    """An unknown rule or precision, or no token to write, is refused before anything runs."""
    with pytest.raises(ValueError, match=named) as error:
        Decoder(**arguments)
    assert one_sentence(error)


@pytest.mark.parametrize(
    "length, gen_len, fits",
    [(0, 8, False), (257, 8, False), (249, 8, False), (241, 8, True), (248, 8, True), (1, 255, True)],
)
def test_prompts_that_do_not_fit_are_refused(length, gen_len, fits):
    """No prompt, or one whose answer would exceed the context of 256, is refused; the last that fits is decoded."""
    target, decoder, prompt = tiny_target(8), Decoder(gen_len=gen_len), random_prompt(length)
    for decode in (partial(dlm.generate), partial(verify.speculate, draft=partial(ddtree.chain, budget=8))):
        if fits:
            assert len(decode(target, decoder, prompt).ids) == gen_len
            continue
        with pytest.raises(ValueError, match="prompt") as error:
            decode(target, decoder, prompt)
        assert one_sentence(error)


def test_an_empty_text_is_refused():
    """A prompt without a word is refused before it is encoded."""
    with pytest.raises(ValueError, match="empty"):
        tiny_target().encode("  \n")
