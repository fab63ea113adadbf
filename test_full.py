"""Tests of full.py: targets that see the whole canvas, plain and with Fast-dLLM's caches.

On random models in float64 whose reference is the stock Qwen3 without a mask: what a pass that
opens a block sees, what each cache keeps of it, where shifted logits stand, when a block is closed;
the canvas by hand; the text of the draft-free loop under every draft, cache and shift, padded or
not.

Left out: LLaDA's and Dream's own numbers (test_targets.py).

    python -m pytest test_full.py          # about 20 seconds
"""

import itertools
from functools import partial

import pytest
import torch

import ddtree
import dlm
import full
import verify
from decoder import Decoder
from test_exactness import (
    MASK,
    coming,
    heaviest_child,
    methods,
    one_sentence,
    random_prompt,
    small_drafter,
    tiny_model,
    tree_of,
    with_truth,
)

L = 8
KINDS = list(itertools.product((False, True), full.CACHES))  # (shift, cache)


def whole_target(shift, cache, seed=0, stops=(), block_size=L):
    """A random float64 FullTarget."""
    model = tiny_model("block_units", seed)
    return full.FullTarget(model, None, block_size, MASK, stops, shift=shift, cache=cache)


@torch.inference_mode()
def unmasked(row, seed=0):
    """(conditionals of a whole row of ids [P, V], its K and V by layer [1, KV, P, d]) by the stock
    Qwen3 in which every position sees all."""
    model, ids = tiny_model("sdpa", seed), torch.tensor([row])
    everything = torch.zeros(1, 1, len(row), len(row), dtype=torch.float64)
    out = model(input_ids=ids, attention_mask=everything, use_cache=True)
    out.logits[..., MASK] = -torch.inf
    stored = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    return out.logits[0].softmax(-1), stored


def close(ours, right):
    return ours.shape == right.shape and torch.allclose(ours, right, rtol=0, atol=1e-9)


# ---------------------------------------------------------------------------- 1. the canvas by hand


def test_what_a_full_target_is_by_default():
    """Fast-dLLM's dual cache, logits in place, a canvas that is written whole."""
    target = full.FullTarget(tiny_model("block_units"), None, L, MASK, [3])
    assert (target.shift, target.cache, target.attention) == (False, "dual", "full")
    assert (target.stops, target.canvas, target.pad_to) == (False, full.FullCanvas, None)
    assert (target.block_size, target.mask_id, target.stop_ids) == (L, MASK, frozenset({3}))
    assert full.CACHES == ("none", "prefix", "dual") and not full.FullCanvas.crosses


@pytest.mark.parametrize("P, gen_len, length", [(13, 17, 37), (13, 16, 29), (1, 1, 9), (8, 9, 24)])
def test_length_of_a_canvas(P, gen_len, length):
    """The prompt and whole blocks behind it."""
    assert full.FullCanvas.length(L, P, gen_len) == length
    canvas = dlm.start(whole_target(False, "none"), Decoder(gen_len=gen_len), random_prompt(P))
    assert canvas.behind == length - P - L


@pytest.mark.parametrize("cache", full.CACHES)
def test_the_canvas_by_hand(cache):
    """Blocks start behind the prompt; a finished one is closed without a pass, and the next one
    begins without K and V; a complete state tells nothing, and nothing is prefilled or stored."""
    prompt = random_prompt(13).tolist()
    canvas = dlm.start(whole_target(False, cache), Decoder(gen_len=17), prompt)
    blank, full_state = (MASK,) * L, tuple(range(L))
    assert type(canvas) is full.FullCanvas
    assert (canvas.done, canvas.state, canvas.block, canvas.origin) == (prompt, blank, 0, 13)
    assert (canvas.behind, canvas.prefix) == (16, None)
    assert canvas.is_leaf(full_state) and not canvas.is_leaf((MASK,) + full_state[1:])
    out, ahead = canvas.look([blank])
    assert ahead == {} and out.blocks.tolist() == [0] and out.states.tolist() == [list(blank)]
    assert (canvas.prefix is None) == (cache == "none")
    canvas.settle()
    assert canvas.state == blank and canvas.block == 0
    canvas.state = full_state
    assert not canvas.is_final(full_state)
    canvas.settle()
    assert (canvas.done, canvas.state, canvas.block) == (prompt + list(full_state), blank, 1)
    assert (canvas.behind, canvas.prefix) == (8, None)
    assert canvas.look([blank])[0].blocks.tolist() == [1]
    canvas.advance(full_state)
    assert canvas.is_final(full_state) and canvas.behind == 0 and canvas.block == 2
    assert canvas.passes == {"prefill": 0, "denoise": 0, "kv_commit": 0}
    canvas.state = full_state
    assert canvas.written() == list(range(8)) * 3 and canvas.answer() == (list(range(8)) * 3)[:17]


@pytest.mark.parametrize("length, gen_len, fits", [
    (248, 8, True), (249, 8, False), (240, 9, True), (241, 9, False), (0, 8, False),
])  # fmt: skip
def test_canvases_that_do_not_fit_are_refused(length, gen_len, fits):
    """Prompt and whole blocks of 8 behind it must fit a context of 256."""
    target, decoder = whole_target(False, "dual"), Decoder(gen_len=gen_len)
    if fits:
        dlm.start(target, decoder, random_prompt(length))
        return
    with pytest.raises(ValueError, match="context of 256|empty") as error:
        dlm.start(target, decoder, random_prompt(length))
    assert one_sentence(error)


@pytest.mark.parametrize("cache", ("both", "", None, "Dual"))
def test_an_unknown_cache_is_refused(cache):
    """Not taken for another one."""
    with pytest.raises(ValueError, match="unknown cache.*none, prefix, dual") as error:
        dlm.start(whole_target(False, cache), Decoder(gen_len=8), random_prompt(13))
    assert one_sentence(error)


# ------------------------------------------------------------------------------ 2. what a pass sees


@pytest.mark.parametrize("shift, cache", KINDS)
@pytest.mark.parametrize("P", (13, 1))
def test_the_first_pass_of_a_block_sees_the_whole_canvas(P, shift, cache):
    """Blocks start at the prompt's end, and masks stand up to the canvas's end. The conditionals
    are the uncached ones of that row; with shifted logits, those at the place before each position,
    of which only the first is read where a cache is made."""
    target = whole_target(shift, cache)
    canvas = dlm.start(target, Decoder(gen_len=17), random_prompt(P))
    for begin in (P, P + L, P + 2 * L):
        assert (canvas.block, len(canvas.done)) == ((begin - P) // L, begin)
        row = canvas.done + [MASK] * (P + 24 - begin)
        right = unmasked(row)[0][begin - shift : begin - shift + L]
        out, _ = canvas.look([canvas.state])
        assert out.partial == (shift and cache != "none")
        assert close(out.unit(0).exp() if not out.partial else out.log_probs(slice(0, 9)).exp(),
                     right[:1] if out.partial else right)  # fmt: skip
        canvas.advance(tuple(range(L)))


@pytest.mark.parametrize("shift, cache", KINDS)
def test_what_the_caches_keep(shift, cache):
    """Of the first pass of a block, dual keeps K and V of all positions but the block's, prefix
    those before it; later passes leave them as they are, and the next block starts with none."""
    canvas = dlm.start(whole_target(shift, cache), Decoder(gen_len=24), random_prompt(13))
    canvas.advance(tuple(range(L)))
    canvas.look([canvas.state])
    _, stored = unmasked(canvas.done + [MASK] * 16)
    kept = [s for s in range(37) if s < 21 or s >= 29 and cache == "dual"]
    for _ in range(2):
        if cache == "none":
            assert canvas.prefix is None
            continue
        for layer, right in zip(canvas.prefix, stored, strict=True):
            assert all(close(ours, t[:, :, kept]) for ours, t in zip(layer, right, strict=True))
        canvas.look([(5,) + canvas.blank[1:]] * 2)
    canvas.advance(tuple(range(L)))
    assert canvas.prefix is None


@torch.inference_mode()
def behind_kept(row, start, states, kept, tail, shift):
    """Conditionals of `states` at `start`, each with `tail` behind it, whose positions see K and V
    `kept` of a pass over `row`: by the stock Qwen3's own cache, one state after the other."""
    every = []
    for state in states:
        model = tiny_model("sdpa")
        everything = torch.zeros(1, 1, len(row), len(row), dtype=torch.float64)
        first = model(input_ids=torch.tensor([row]), attention_mask=everything, use_cache=True)
        for layer in first.past_key_values.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        new = torch.tensor([list(state) + tail])
        n = new.shape[1]
        out = model(
            input_ids=new, position_ids=torch.arange(start, start + n)[None],
            attention_mask=torch.zeros(1, 1, n, len(kept) + n, dtype=torch.float64),
            cache=first.past_key_values,
        ).logits[0]  # fmt: skip
        out[:, MASK] = -torch.inf
        every += [out[max(s - shift, 0)].softmax(-1) for s in range(L) if state[s] == MASK]
    return torch.stack(every)


@pytest.mark.parametrize("shift, cache", KINDS)
@pytest.mark.parametrize("block", (0, 1, 2))
def test_later_passes_see_what_was_kept(block, shift, cache):
    """Copies of a block that has begun, each alone: behind the K and V kept, with the masks behind
    the block where these are not kept; without a cache, each with the whole canvas."""
    target = whole_target(shift, cache)
    canvas = dlm.start(target, Decoder(gen_len=24), random_prompt(13))
    for _ in range(block):
        canvas.advance(tuple(range(L)))
    canvas.look([canvas.state])
    start, behind = 13 + 8 * block, 16 - 8 * block
    row = canvas.done + [MASK] * (8 + behind)
    states = [(5,) + (MASK,) * 7, (4, MASK, 3, MASK, 2, 1, MASK, MASK)]
    if cache == "none":
        rows = [canvas.done + list(state) + [MASK] * behind for state in states]
        right = [
            unmasked(whole)[0][start + s - shift]
            for whole, state in zip(rows, states)
            for s in range(L) if state[s] == MASK
        ]  # fmt: skip
        right = torch.stack(right)
    else:
        dual = cache == "dual"
        kept = [s for s in range(len(row)) if s < start or dual and s >= start + L]
        right = behind_kept(row, start, states, kept, [] if dual else [MASK] * behind, shift)
    for pad_to in (None, 5):
        target.pad_to = pad_to
        out, ahead = canvas.look(states)
        assert ahead == {} and out.blocks.tolist() == [block] * 2 and not out.partial
        assert out.states.tolist() == [list(state) for state in states] and out.counts == [7, 4]
        assert close(out.log_probs(slice(0, 11)).exp(), right)


@pytest.mark.parametrize("shift, cache, passes", [
    (False, "none", 3), (False, "prefix", 3), (False, "dual", 3),  # 17 tokens are 3 blocks
    (True, "none", 3), (True, "prefix", 6), (True, "dual", 6),
])  # fmt: skip
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_what_the_first_pass_can_decide(shift, cache, passes, temperature):
    """A rule that commits all it can: the whole block, but with shifted logits and a cache its
    first position alone, for the later passes do not hold the place before it. The noise is that
    of a state without decided positions."""
    target, seen = whole_target(shift, cache), []
    decoder = Decoder("threshold", 0.0, gen_len=17, temperature=temperature)

    def watch(canvas, state, following, out, unit):
        if state == canvas.blank:
            seen.append(sum(token != MASK for token in following))
            zero, position = torch.tensor([[0], [0]])
            first = out.log_probs(slice(0, 1))
            noised = decoder.perturbed(first, zero + canvas.block, zero, position)
            assert following[0] == noised.argmax()

    got = dlm.generate(target, decoder, random_prompt(13), watch=watch)
    assert got.passes == {"prefill": 0, "denoise": passes, "kv_commit": 0}
    assert seen == [1 if passes == 6 else L] * 3


def test_only_first_by_hand():
    """The first position of the block, if it is masked, and nothing else; the rest is untouched."""
    target = whole_target(True, "dual")
    for state, kept in (((MASK,) * L, 1), ((3,) + (MASK,) * 7, 0), ((MASK, 3) * 4, 1)):
        canvas = dlm.start(target, Decoder(gen_len=8), random_prompt(5))
        out = target.forward([state], 0, 5, None, canvas.done, ())
        first = full.only_first(out)
        assert first.partial and first.masked == [0] * kept and len(first.hidden) == kept
        assert first.hidden.equal(out.hidden[:kept]) and first.counts == out.counts
        assert first.states.equal(out.states) and not out.partial


# --------------------------------------------------------------------------------- 3. the same text

SETTINGS = [  # decoders; gen_len is no multiple of the block
    {"rule": "exact", "gen_len": 13},
    {"rule": "threshold", "value": 0.5, "gen_len": 20, "temperature": 1.0},
    {"rule": "exact", "quota": 2, "gen_len": 18, "confidence": "margin"},
]


@pytest.mark.parametrize("shift, cache", KINDS)
def test_every_draft_writes_the_draft_free_text(shift, cache):
    """Token identity for attention, shift and caches: whatever is drafted, the text is that of the
    draft-free loop, and every accepted node saves a pass (a finished block's last one has none to
    save), in padded passes too."""
    drafter, decodes, accepted = small_drafter(L), 0, 0
    for i, options in enumerate(SETTINGS):
        target = whole_target(shift, cache, i)
        decoder, prompt = Decoder(seed=i, **options), random_prompt((13, 1, 8)[i])
        budget = (6, 20, 1)[i]
        target.pad_to = (None, 22, 3)[i]
        truth, states = with_truth(target, decoder, prompt)
        assert dlm.generate(target, decoder, prompt, fused=False).passes == truth.passes
        for name, draft in methods(budget, drafter, states, decoder.rule, i).items():
            saved, case = [], (name, options)

            def watch(canvas, tree, path, *_):
                saved.extend(not canvas.is_leaf(tree.states[u]) for u in path[1:])

            got = verify.speculate(target, decoder, prompt, draft, watch=watch)
            assert (got.written, got.ids) == (truth.written, truth.ids), case
            assert sum(saved) + got.passes["denoise"] == truth.passes["denoise"], case
            assert got.passes["prefill"] == got.passes["kv_commit"] == 0
            decodes, accepted = decodes + 1, accepted + sum(saved)
    assert decodes >= 24 and accepted > decodes  # else nodes were not put to the test


@pytest.mark.parametrize("shift, cache", KINDS)
def test_the_next_draft_reads_the_deepest_verified_state(shift, cache):
    """Of the block that is still open, and only of a pass that tells of all its positions: behind a
    shifted opening pass, and in a new block, nothing is drafted."""
    target, decoder, rounds = whole_target(shift, cache, 1), Decoder(gen_len=17), []
    truth, states = with_truth(target, decoder, random_prompt(13))

    def draft(stale, canvas):
        assert stale.block == canvas.block and stale.state in states[canvas.block]
        out, _ = canvas.look([stale.state])
        if not (stale.state == canvas.blank and cache != "none"):  # a cache holds another opening
            assert close(stale.log_probs.exp(), out.unit(0).exp())
        assert decoder.transition(out) == [canvas.state]
        return tree_of(canvas.state, *coming(canvas, states, 3)[: canvas.state.count(MASK) - 1])

    def watch(canvas, tree, path, *_):
        rounds.append((canvas.state.count(MASK), len(path) - 1))

    got = verify.speculate(target, decoder, random_prompt(13), draft, watch=watch)
    assert got.written == truth.written
    partial_first = shift and cache != "none"
    one_block = [(8, 0), (7, 0), (6, 3), (2, 1)] if partial_first else [(8, 0), (7, 3), (3, 2)]
    assert rounds == one_block * 3


@pytest.mark.parametrize("shift, cache", KINDS)
def test_wrong_verifiers_change_the_text(shift, cache):
    """The comparison above must fail for a verifier that does not look at F, else it would prove
    nothing; at T = 1, where a token depends on the step at which it is drawn."""
    target, wrong = whole_target(shift, cache), 0
    draft = partial(ddtree.confidence_tree, budget=12)
    for length in (13, 8):
        decoder, prompt = Decoder(gen_len=8, temperature=1.0), random_prompt(length)
        truth = dlm.generate(target, decoder, prompt).written
        got = verify.speculate(target, decoder, prompt, draft, walk=heaviest_child)
        wrong += got.written != truth
    assert wrong > 0


@pytest.mark.parametrize("shift, cache", KINDS)
def test_a_stop_id_only_cuts_the_answer(shift, cache):
    """The whole canvas is written, to the end of the block that holds token gen_len; the answer
    ends before the first stop id."""
    target, decoder, prompt = whole_target(shift, cache), Decoder(gen_len=18), random_prompt(13)
    free = dlm.generate(target, decoder, prompt)
    assert len(free.written) == 24 and free.ids == free.written[:18]
    target.stop_ids = frozenset({free.written[5]})
    chain = partial(ddtree.chain, budget=8)
    decode = (dlm.generate, partial(verify.speculate, draft=chain))
    for got in [loop(target, decoder, prompt) for loop in decode]:
        assert got.written == free.written
        assert got.ids == free.written[: free.written.index(free.written[5])]


@pytest.mark.parametrize("shift, cache", KINDS)
@pytest.mark.parametrize("block_size", (1, 5))
def test_odd_block_sizes(shift, cache, block_size):
    """Blocks of one position, and of a size that divides nothing: a pass a token, and drafts change
    nothing."""
    target, prompt = whole_target(shift, cache, block_size=block_size), random_prompt(13)
    decoder = Decoder(gen_len=7)
    free = dlm.generate(target, decoder, prompt)
    assert free.passes["denoise"] == len(free.written) == -(-7 // block_size) * block_size
    for draft in (ddtree.confidence_tree, ddtree.chain):
        got = verify.speculate(target, decoder, prompt, partial(draft, budget=8))
        assert got.written == free.written


# --------------------------------------------------------------------------------- 4. padded passes


@pytest.mark.parametrize("shift, cache", KINDS)
def test_padded_passes_have_one_shape_of_a_kind(shift, cache, monkeypatch):
    """Every pass over begun blocks holds `pad_to` units; the one that opens a block for a cache has
    one unit."""
    target, shapes = whole_target(shift, cache), []
    plain = target.model.model.forward

    def spy(**inputs):
        shapes.append(inputs["position_ids"].shape[1])
        return plain(**inputs)

    monkeypatch.setattr(target.model.model, "forward", spy)
    target.pad_to, decoder, prompt = 10, Decoder(gen_len=16), random_prompt(5)
    draft = partial(ddtree.confidence_tree, budget=8)
    for loop in (dlm.generate, partial(verify.speculate, draft=draft)):
        loop(target, decoder, prompt)
    right = {
        "none": {210}, "prefix": {21, 160, 80}, "dual": {21, 80},  # of 5 + 16 positions, 16 and 8
    }[cache]  # fmt: skip
    assert set(shapes) == right
    assert target.filled([1, 2]) == [1, 2] + [1] * 8 and target.filled([1] * 10) == [1] * 10
    with pytest.raises(ValueError, match="11 units do not fit 10") as error:
        target.filled([1] * 11)
    assert one_sentence(error)
