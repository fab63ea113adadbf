"""Tests of the real targets: SDAR, LLaDA2.0-mini, LLaDA and Dream, as small golden checkpoints.

Covered: logits equal to the public reference implementations' in float32, uncached, behind a prefix
cache and in the whole-canvas cache of the full-attention targets; their generations token for
token, draft-free and with drafts; token identity of every draft on every family and cache; the
canvas and caches of full attention by hand; released rules, quotas and confidences; passes of one
shape. Golden numbers come from the reference implementations on random weights (3 layers, width 64;
checkpoints/golden-*).

Left out: the trained weights, and loading (test_loading.py). Nothing is downloaded.

    python -m pytest test_targets.py          # about a minute on one core
"""

import itertools
import os
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ddtree
import dlm
import targets
import test_exactness
import verify
from decoder import Decoder, commits, linear_schedule
from full import CACHES
from test_exactness import (
    heaviest_child, methods, one_sentence, random_prompt, small_drafter, with_truth,
)  # fmt: skip

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
FAMILIES = ("sdar", "llada2", "llada", "dream")
BLOCK_CAUSAL, FULL = FAMILIES[:2], FAMILIES[2:]
L, S = 8, 24  # block and row of the golden logits


# ------------------------------------------------------------------------------------------ helpers


def golden(family, dtype=torch.float32, block_size=L):
    """The golden checkpoint of a family and what the reference implementation computes on it."""
    folder = os.path.join(CHECKPOINTS, f"golden-{family}")
    expected = load_file(os.path.join(folder, "expected.safetensors"))
    return targets.load(folder, dtype=dtype, block_size=block_size), expected


@torch.inference_mode()
def logits(target, ids, positions, layout):
    """Raw logits [1, P, V] of one pass over ids [1, P] at positions [P]."""
    hidden = target.model.model(
        input_ids=ids, position_ids=positions[None], layout=layout, use_cache=False
    )
    return target.model.lm_head(hidden.last_hidden_state)


def uncached(target, ids):
    """Raw logits [1, P, V] of a whole row: block by block, or all of it as one unit."""
    P, index = ids.shape[1], torch.arange(ids.shape[1] // L)
    if target.attention == "full":
        return logits(target, ids, torch.arange(P), dlm.Layout(P))
    return logits(target, ids, torch.arange(P), dlm.Layout(L, None, index, index[:, None] > index))


def conditionals(target, raw):
    """The probabilities of raw logits, over all ids as in released code; [MASK] is never
    committed."""
    return raw.softmax(-1).index_fill(-1, torch.tensor([target.mask_id]), 0)


# ------------------------------------------------------------------------------------ golden logits


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    """The native class under our attention function computes the reference's logits, in float32 and
    from float64."""
    for dtype in (torch.float32, torch.float64):
        target, expected = golden(family, dtype)
        raw = uncached(target, expected["ids"])
        assert raw.dtype == dtype and (expected["ids"] == target.mask_id).sum() > 3
        assert torch.allclose(raw.float(), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", BLOCK_CAUSAL)
def test_golden_logits_behind_a_prefix_cache(family):
    """Complete blocks prefilled, then one pass over two states of the next block: each as if it
    were alone."""
    target, expected = golden(family)
    ids = expected["ids"][0].tolist()
    states = [tuple(ids[16:]), (target.mask_id,) * 3 + tuple(ids[3:8])]
    for chosen in ([0], [1], [0, 1]):
        prefix, units = target.prefill(ids[:16]), [states[u] for u in chosen]
        out = target.forward(units, [2] * len(units), prefix, {})
        for place, u in enumerate(chosen):
            row = torch.tensor([ids[:16] + list(states[u])])
            right = uncached(target, row)[0] if u else expected["logits"][0]
            right = conditionals(target, right[16:][row[0, 16:] == target.mask_id])
            assert torch.allclose(out.unit(place).exp(), right, rtol=0, atol=1e-5)


def test_golden_logits_of_llada_behind_padding():
    """The reference's logits with 4 positions masked out on the left: distances alone matter to
    RoPE, so those of the canvas without them."""
    target, expected = golden("llada")
    ids, right = expected["ids"][:, 4:], expected["logits_leftpad4"][:, 4:]
    for begin in (0, 4):
        raw = logits(target, ids, torch.arange(begin, begin + S - 4), dlm.Layout(S - 4))
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", range(S // L))
@pytest.mark.parametrize("family", FULL)
def test_a_pass_over_one_block_of_a_cached_canvas(family, block):
    """K and V of the whole canvas stored, then the block alone behind those of all other positions:
    as uncached, also for two copies of the block in one pass."""
    target, expected = golden(family)
    store = dlm.Layout(S, record=[])
    logits(target, expected["ids"], torch.arange(S), store)
    at = torch.arange(block * L, (block + 1) * L)
    others = torch.tensor([s for s in range(S) if s not in at])
    prefix = [(k[:, :, 0, others], v[:, :, 0, others]) for k, v in store.record]
    for copies in (1, 2):
        ids = expected["ids"][:, at].repeat(1, copies)
        raw = logits(target, ids, at.repeat(copies), dlm.Layout(L, prefix))
        right = expected["logits"][:, at].repeat(1, copies, 1)
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------- golden generations


def fast_dream_quota(steps=8):
    """{decided: commits} of Fast-dLLM's Dream in a block of L: the first of its steps fixes the
    block's first position, step i ≥ 1 takes int(left·(1 − t[i + 1] / t[i])) with t = linspace(1,
    1e-3, steps + 1), the last one all; a step that takes none changes nothing."""
    t, decided, quota = torch.linspace(1, 1e-3, steps + 1).tolist(), 1, {}
    for i in range(1, steps):
        count = int((L - decided) * (1 - t[i + 1] / t[i])) if i < steps - 1 else L - decided
        quota |= {decided: count} if count else {}
        decided += count
    return quota


def dream_steps(steps, confidence):
    quota = linear_schedule(32, steps)
    return dict(block_size=32, cache="none", quota=quota, confidence=confidence)


STATIC = {"rule": "low_confidence_static"}
DYNAMIC = {"rule": "low_confidence_dynamic", "value": 0.18}
LOW, SURE = {"rule": "threshold", "value": 0.3}, {"rule": "threshold", "value": 0.95}
ENTROPY = {"confidence": "entropy", "quota": fast_dream_quota()}
GENERATIONS = {  # the reference's settings in our words; block size 8 and cache dual unless named
    "sdar gen_low_confidence_static_8": STATIC,
    "sdar gen_low_confidence_static_4": STATIC | {"quota": 2},
    "sdar gen_low_confidence_dynamic_8": DYNAMIC,
    "sdar gen_sequential_8": {"rule": "sequential"},
    "sdar gen_sequential_4": {"rule": "sequential", "quota": 2},
    "llada2 gen_0.3_4": LOW | {"quota": 2},
    "llada2 gen_0.3_8": LOW,
    "llada2 gen_0.95_8": SURE,
    "llada gen_32_32_16": {"block_size": 32, "cache": "none", "quota": 2},
    "llada gen_32_8_32": {"cache": "none"},
    "llada gen_32_8_8": {"cache": "none", "quota": 4},
    "llada fast_generate_None": {"cache": "none"},
    "llada fast_generate_0.3": {"cache": "none"} | LOW,
    "llada fast_generate_with_prefix_cache_None": {"cache": "prefix"},
    "llada fast_generate_with_prefix_cache_0.3": {"cache": "prefix"} | LOW,
    "llada fast_generate_with_dual_cache_None": {},
    "llada fast_generate_with_dual_cache_0.3": LOW,
    "dream gen_maskgit_plus_11": dream_steps(11, "sampled"),
    "dream gen_maskgit_plus_32": dream_steps(32, "sampled"),
    "dream gen_topk_margin_11": dream_steps(11, "margin"),
    "dream gen_topk_margin_32": dream_steps(32, "margin"),
    "dream gen_entropy_11": dream_steps(11, "entropy"),
    "dream gen_entropy_32": dream_steps(32, "entropy"),
    "dream fast_confidence_threshold_dualFalse": {"cache": "prefix"} | LOW,
    "dream fast_confidence_threshold_dualTrue": LOW,
    "dream fast_entropy_dualFalse": {"cache": "prefix"} | ENTROPY,
    "dream fast_entropy_dualTrue": ENTROPY,
}
OVERWRITTEN = "sdar gen_low_confidence_dynamic_4"  # differs, by the reference's fault: see below


def test_every_golden_generation_is_compared():
    """No generation of the reference is left out of the table."""
    keys = set()
    for family in FAMILIES:
        path = os.path.join(CHECKPOINTS, f"golden-{family}", "expected.safetensors")
        with safe_open(path, "pt") as expected:
            texts = [key for key in expected.keys() if key.startswith(("gen_", "fast_"))]
        keys |= {f"{family} {key}" for key in texts}
    assert {key for key in keys if not key.endswith("_nfe")} == {*GENERATIONS, OVERWRITTEN}


def golden_decoder(case):
    """(target, expected, decoder, key) of a golden generation: confidences unrounded, argmax
    tokens."""
    family, key = case.split()
    gen_len = 24 if family in BLOCK_CAUSAL else 32
    options = {"block_size": L, "cache": "dual", "gen_len": gen_len} | GENERATIONS[case]
    target, expected = golden(family, block_size=options.pop("block_size"))
    target.cache = options.pop("cache")
    return target, expected, Decoder(precision="float32", **options), key


@pytest.mark.parametrize("case", GENERATIONS)
def test_golden_generations(case):
    """Token for token what the reference decoder writes, draft-free and with drafts, and in as many
    passes: but Fast-dLLM's cached loop looks for masks after the pass behind the opening one, so
    that it runs one pass too many in each block that the opening pass has finished."""
    target, expected, decoder, key = golden_decoder(case)
    prompt, right, finished = expected["prompt"][0], expected[key][0].tolist(), []

    def watch(canvas, state, following, *_):
        opened = canvas.prefix is not None and state == canvas.blank
        finished.append(opened and canvas.is_complete(following))

    free = dlm.generate(target, decoder, prompt, watch=watch)
    assert right == (free.ids if case.startswith("llada2") else prompt.tolist() + free.written)
    if key + "_nfe" in expected:
        assert expected[key + "_nfe"].item() == free.passes["denoise"] + sum(finished)
    drafter = small_drafter(target.block_size)
    for draft in (ddtree.chain, ddtree.confidence_tree, partial(ddtree.spot, drafter=drafter)):
        got = verify.speculate(target, decoder, prompt, partial(draft, budget=8))
        assert (got.written, got.ids) == (free.written, free.ids)
        assert sum(got.accepted) + got.passes["denoise"] == free.passes["denoise"]


def test_the_quota_of_fast_dream():
    """By hand: t₁ … t₈ = .875125 … .001 in steps of .124875. 7·.1427 → 0, 7·.1664 → 1, 6·.1997 → 1,
    5·.2495 → 1, 4·.3324 → 1, 3·.498 → 1, and the last step takes the 2 that are left."""
    assert fast_dream_quota() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2}


@torch.inference_mode()
def overwrite(target, prompt, end, quota, threshold):
    """SDAR's released loop with its fault: where no more than `quota` confidences exceed the
    threshold it writes the `quota` likeliest tokens, also if fewer masks are left: then over
    decided positions, whose confidence is −inf. Returns (ids up to `end`, decided positions that
    were written again)."""
    row, again = prompt.tolist() + [target.mask_id] * (end - len(prompt)), set()
    for begin in range(len(prompt) // L * L, end, L):
        while target.mask_id in row[begin : begin + L]:
            ids = torch.tensor([row[: begin + L]])
            confidence, tokens = uncached(target, ids)[0, begin:].softmax(-1).max(-1)
            confidence[ids[0, begin:] != target.mask_id] = -torch.inf
            sure = (confidence > threshold).nonzero()[:, 0]
            for s in (sure if len(sure) >= quota else confidence.topk(quota).indices).tolist():
                again |= {begin + s} if row[begin + s] != target.mask_id else set()
                row[begin + s] = tokens[s].item()
    return row, again


@pytest.mark.parametrize(
    "strategy, options, differ", [("static", STATIC, 0), ("dynamic", DYNAMIC, 1)]
)
def test_the_released_sdar_writes_over_finished_tokens(strategy, options, differ):
    """With 2 commits a pass and one mask left, the reference writes a decided position anew. The
    loop that does just that gives its tokens, and ours, which does not, differs from them nowhere
    else."""
    target, expected = golden("sdar")
    prompt, right = expected["prompt"][0], expected[f"gen_low_confidence_{strategy}_4"][0].tolist()
    decoder = Decoder(precision="float32", gen_len=24, quota=2, **options)
    row, again = overwrite(target, prompt, len(right), 2, options.get("value", torch.inf))
    ours = prompt.tolist() + dlm.generate(target, decoder, prompt).written
    changed = {s for s, (a, b) in enumerate(zip(ours, right)) if a != b}
    assert row == right and len(changed) == differ and changed <= again


# ------------------------------------------------------------------- drafts on every family's model


# decoders for random weights, whose confidences are low; gen_len is no multiple of the block
LIVELY = [
    {"rule": "exact", "gen_len": 13},
    {"rule": "exact", "temperature": 1.0, "gen_len": 9},
    {"rule": "threshold", "value": 0.2, "gen_len": 20},
    {"rule": "entropy", "value": 2.0, "temperature": 1.0, "confidence": "distribution",
     "gen_len": 20},
    {"rule": "sequential", "gen_len": 10},
    {"rule": "exact", "quota": 2, "gen_len": 18, "confidence": "margin"},
    {"rule": "threshold", "value": 0.3, "temperature": 1.0, "gen_len": 12},
    {"rule": "exact", "quota": 2, "temperature": 1.0, "tempered": True, "top_k": 9, "gen_len": 18},
    {"rule": "exact", "quota": linear_schedule(L, 5), "confidence": "entropy", "gen_len": 18},
]  # fmt: skip
PROMPTS = (16, 13, 1, 8, 21)
# family, cache, and which of LIVELY: every n-th from i on
MODELS = [("sdar", "dual", 0, 1), ("llada2", "dual", 0, 1)]
MODELS += [(family, cache, i, 3) for family in FULL for i, cache in enumerate(CACHES)]


def lively(family, cache, monkeypatch):
    """The golden model in float64, where a pass over many states is as exact as over one; its ids
    told to the helpers of test_exactness."""
    target, _ = golden(family, torch.float64)
    target.cache = cache
    monkeypatch.setattr(test_exactness, "MASK", target.mask_id)
    monkeypatch.setattr(test_exactness, "VOCAB", target.mask_id + 1)
    return target


@pytest.mark.parametrize("family, cache, first, every", MODELS)
def test_every_draft_writes_the_draft_free_text(family, cache, first, every, monkeypatch):
    """Token identity for the attention, shift and caches of every family: whatever is drafted, the
    text is that of the draft-free loop, and every accepted node saves a pass (a finished last one
    has none to save)."""
    target, drafter = lively(family, cache, monkeypatch), small_drafter(L)
    decodes, accepted = 0, 0
    for i, options in list(enumerate(LIVELY))[first::every]:
        decoder, prompt = Decoder(seed=i, **options), random_prompt(PROMPTS[i % len(PROMPTS)], i)
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods((1, 6, 20)[i % 3], drafter, states, decoder.rule, i).items():
            saved = []

            def watch(canvas, tree, path, *_):
                saved.extend(not canvas.is_leaf(tree.states[u]) for u in path[1:])

            got = verify.speculate(target, decoder, prompt, draft, watch=watch)
            assert (got.written, got.ids) == (truth.written, truth.ids), (name, options)
            assert sum(saved) + got.passes["denoise"] == truth.passes["denoise"], (name, options)
            decodes, accepted = decodes + 1, accepted + sum(saved)
    # else nodes were not put to the test
    assert decodes >= 8 * len(LIVELY) // every and accepted > decodes


@pytest.mark.parametrize(
    "family, cache", [("sdar", "dual"), ("llada2", "dual"), *itertools.product(FULL, CACHES)]
)
def test_wrong_verifiers_change_the_text(family, cache, monkeypatch):
    """The comparison above must fail for a verifier that does not look at F, else it would prove
    nothing; it is made at T = 1, where a token depends on the step at which it is drawn."""
    target, wrong = lively(family, cache, monkeypatch), 0
    for length in PROMPTS[:3]:
        decoder, prompt = Decoder(gen_len=16, temperature=1.0), random_prompt(length)
        truth = dlm.generate(target, decoder, prompt).written
        draft = partial(ddtree.confidence_tree, budget=12)
        got = verify.speculate(target, decoder, prompt, draft, walk=heaviest_child)
        wrong += got.written != truth
        assert verify.speculate(target, decoder, prompt, draft).written == truth
    assert wrong > 0


# ------------------------------------------------------------- the canvas of full-attention targets


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("cache", CACHES)
def test_the_first_pass_of_a_block_sees_the_whole_canvas(family, cache):
    """Blocks start at the prompt's end, here 13 and 21, and masks stand up to the canvas's end. The
    conditionals are the uncached ones of that row; with shifted logits, those at the place before
    each position."""
    target, _ = golden(family, torch.float64)
    target.cache, prompt = cache, random_prompt(13)
    canvas = dlm.start(target, Decoder(gen_len=17), prompt)
    for begin in (13, 21):
        assert (canvas.block, len(canvas.done)) == ((begin - 13) // L, begin)
        assert canvas.state == canvas.blank
        row = torch.tensor([canvas.done + [target.mask_id] * (13 + 24 - begin)])
        first = begin - (family == "dream")
        right = conditionals(target, uncached(target, row)[0, first : first + L])
        out, ahead = canvas.look([canvas.state])
        assert ahead == {}
        right = right[:1] if family == "dream" and cache != "none" else right
        assert torch.allclose(out.unit(0).exp(), right, rtol=0, atol=1e-9)
        canvas.advance(tuple(range(L)))


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("cache", CACHES)
def test_what_the_caches_keep(family, cache):
    """Of the first pass of a block, dual keeps K and V of all positions but the block's, prefix
    those before it; later passes leave them as they are, and the next block starts with none."""
    target, _ = golden(family, torch.float64)
    target.cache, store = cache, dlm.Layout(37, record=[])
    canvas = dlm.start(target, Decoder(gen_len=24), random_prompt(13))
    canvas.advance(tuple(range(L)))
    canvas.look([canvas.state])
    row = torch.tensor([canvas.done + [target.mask_id] * 16])
    logits(target, row, torch.arange(37), store)
    kept = [s for s in range(37) if s < 21 or s >= 29 and cache == "dual"]
    for _ in range(2):
        if cache == "none":
            assert canvas.prefix is None
            continue
        for layer, right in zip(canvas.prefix, store.record, strict=True):
            for ours, whole in zip(layer, right, strict=True):
                assert torch.allclose(ours, whole[:, :, 0, kept], rtol=0, atol=1e-9)
        canvas.look([(5,) + canvas.blank[1:]] * 2)
    canvas.advance(tuple(range(L)))
    assert canvas.prefix is None


@pytest.mark.parametrize("family, cache, passes", [
    ("llada", "none", 3), ("llada", "prefix", 3), ("llada", "dual", 3),  # 17 tokens are 3 blocks
    ("dream", "none", 3), ("dream", "prefix", 6), ("dream", "dual", 6),
])  # fmt: skip
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_what_the_first_pass_can_decide(family, cache, passes, temperature):
    """A rule that commits all it can: the whole block, but with shifted logits and a cache its
    first position alone, for the later passes do not hold the place before it. The noise is that of
    a state without decided positions."""
    target, prompt = golden(family, torch.float64)[0], random_prompt(13)
    target.cache, seen = cache, []
    decoder = Decoder("threshold", 0.0, gen_len=17, temperature=temperature)

    def watch(canvas, state, following, out, unit):
        if state == canvas.blank:
            seen.append(sum(token != target.mask_id for token in following))
            zero, position = torch.tensor([[0], [0]])
            noised = decoder.perturbed(out.unit(0)[:1], zero + canvas.block, zero, position)
            assert following[0] == noised.argmax()

    got = dlm.generate(target, decoder, prompt, watch=watch)
    assert got.passes == {"prefill": 0, "denoise": passes, "kv_commit": 0}
    assert seen == [1 if passes == 6 else L] * 3


@pytest.mark.parametrize("family", FULL)
def test_a_stop_id_only_cuts_the_answer(family):
    """The whole canvas is written, to the end of the block that holds token gen_len; the answer
    ends before the first stop id."""
    target, prompt = golden(family, torch.float64)[0], random_prompt(13)
    decoder = Decoder(gen_len=18)
    free = dlm.generate(target, decoder, prompt)
    assert len(free.written) == 24 and free.ids == free.written[:18]
    target.stop_ids = frozenset({free.written[5]})
    cut = free.written[: free.written.index(free.written[5])]
    drafted = verify.speculate(target, decoder, prompt, partial(ddtree.chain, budget=8))
    for got in (dlm.generate(target, decoder, prompt), drafted):
        assert got.written == free.written and got.ids == cut


@pytest.mark.parametrize(
    "length, gen_len, fits", [(248, 8, True), (249, 8, False), (240, 9, True), (241, 9, False)]
)
def test_canvases_that_do_not_fit_are_refused(length, gen_len, fits):
    """LLaDA's golden context is 256 positions: prompt and whole blocks of 8 behind it must fit."""
    target, decoder = golden("llada")[0], Decoder(gen_len=gen_len)
    if fits:
        dlm.start(target, decoder, random_prompt(length))
        return
    with pytest.raises(ValueError, match="context of 256") as error:
        dlm.start(target, decoder, random_prompt(length))
    assert one_sentence(error)


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("block_size", (1, 5))
@pytest.mark.parametrize("cache", CACHES)
def test_odd_block_sizes(family, block_size, cache):
    """Blocks of one position, and of a size that divides nothing: a pass a token, and drafts change
    nothing."""
    target, prompt = golden(family, torch.float64, block_size)[0], random_prompt(13)
    target.cache, decoder = cache, Decoder(gen_len=7)
    free = dlm.generate(target, decoder, prompt)
    assert free.passes["denoise"] == len(free.written) == -(-7 // block_size) * block_size
    for draft in (ddtree.confidence_tree, ddtree.chain):
        got = verify.speculate(target, decoder, prompt, partial(draft, budget=8))
        assert got.written == free.written


# -------------------------------------------------------------- released rules, quotas, confidences


@pytest.mark.parametrize("name, rule, value", [
    ("low_confidence_static", "exact", None),
    ("low_confidence_dynamic", "threshold", 0.9),
    ("entropy_bounded", "entropy", 0.1),
    ("sequential", "sequential", None),
])  # fmt: skip
def test_released_names_of_rules(name, rule, value):
    """The names of SDAR's released code are ours in other words, with our default values."""
    decoder = Decoder(name)
    assert (decoder.rule, decoder.value) == (rule, value)
    assert Decoder(name, 0.5).value == 0.5


@pytest.mark.parametrize("rule, value, quota, right", [
    ("exact", None, 1, [3]),
    ("exact", None, 3, [1, 3, 4]),  # .9, .7, .6; position 2 is decided
    ("exact", None, 9, [0, 1, 3, 4]),  # no more than there is
    ("threshold", 0.65, 1, [1, 3]),
    ("threshold", 0.65, 3, [1, 3, 4]),  # the quota counts where the rule gives less
    ("threshold", 0.0, 2, [0, 1, 3, 4]),  # and takes nothing away
    ("entropy", 0.0, 2, [0, 4]),  # the quota goes by the rule's own order: entropies .1 and .2
    ("sequential", None, 1, [0]),
    ("sequential", None, 3, [0, 1, 3]),
    ("sequential", None, torch.tensor([2]), [0, 1]),
])  # fmt: skip
def test_quotas_by_hand(rule, value, quota, right):
    """At least `quota` positions, in the rule's order; sequential goes from the left, whatever the
    confidence."""
    confidence = torch.tensor([0.5, 0.7, 0.99, 0.9, 0.6], dtype=torch.float64)
    entropy = torch.tensor([0.1, 0.5, 0.0, 0.4, 0.2], dtype=torch.float64)
    score = {"entropy": -entropy, "sequential": torch.zeros(5, dtype=torch.float64)}
    masked = torch.tensor([True, True, False, True, True])
    chosen = commits(rule, value, score.get(rule, confidence), masked, quota)
    assert chosen.nonzero()[:, 0].tolist() == right


def test_quotas_by_step():
    """A table of quotas is read at each unit's decided positions; 1 where it says nothing."""
    masked = torch.tensor([[True] * 4, [True, False, True, True]])
    second = torch.tensor([0.6, 0.7, 0.8, 0.9, 0.9, 0.8, 0.7])  # p(1), at the masked positions
    flat = torch.stack([1 - second, second], 1).log()
    places, states = masked.flatten().nonzero()[:, 0].tolist(), torch.where(masked, 9, 5)
    blocks = torch.tensor([0, 0])
    out = dlm.Pass(states, blocks, places, [4, 3], flat, lambda rows: rows, 2, [])
    assert Decoder(quota={0: 3}).transition(out) == [(9, 1, 1, 1), (1, 5, 9, 9)]
    assert Decoder(quota={1: 2}).transition(out) == [(9, 9, 9, 1), (1, 5, 1, 9)]


@pytest.mark.parametrize("masks, steps", [(32, 11), (32, 32), (256, 64), (7, 3), (1, 5), (5, 1)])
def test_the_linear_schedule_is_the_reference_loop(masks, steps):
    """Dream's loop, in its own float32 arithmetic, step by step; passes that commit nothing change
    no state."""
    times, left, right = torch.linspace(1, 1e-3, steps + 1), torch.tensor(float(masks)), {}
    for i in range(steps):
        count = int(left * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(left)
        if count:
            right[masks - int(left)] = count
        left = left - count
    schedule = linear_schedule(masks, steps)
    assert schedule == right and sum(schedule.values()) == masks


def test_the_linear_schedule_by_hand():
    """8 masks in 4 steps, t = 1, .75025, .5005, .25075, .001: 8·.24975 → 1, 7·.3329 → 2, 5·.499 →
    2, and the last 3. One step takes all; of 5 steps for one mask, the first 4 would take none."""
    assert linear_schedule(8, 4) == {0: 1, 1: 2, 3: 2, 5: 3}
    assert linear_schedule(8, 1) == {0: 8} and linear_schedule(1, 5) == {0: 1}


def test_confidences_by_hand():
    """margin: p₁ − p₂; entropy: exp(−H), H = 1.0297 for (.5, .3, .2); H = ln 2 for (.5, .5, 0)."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], dtype=torch.float64).log()
    cases = {"margin": [0.2, 0.0], "entropy": [0.35713, 0.5], "distribution": [0.5, 0.5]}
    for name, right in cases.items():
        decoder = Decoder(confidence=name, precision="float32")
        got = decoder.confidence_in(torch.tensor([1, 1]), logits)
        assert got.tolist() == pytest.approx(right, abs=1e-5)


def test_the_entropy_confidence_keeps_the_order_of_the_entropy():
    """Also next to 1, where exp(−H) of H = 1.9e-8 and 1.1e-8 is the same float32: the lower entropy
    goes first."""
    rest = torch.tensor([1e-9, 5e-10])
    logits = torch.stack([torch.zeros(2), rest.log()], 1)
    decoder = Decoder(confidence="entropy", precision="float32")
    confidence = decoder.confidence_in(torch.tensor([0, 0]), logits)
    assert confidence[0] < confidence[1] < 1


@pytest.mark.parametrize("make, named", [
    (lambda: Decoder(quota=0), "quota is 0"),
    (lambda: Decoder(quota=-1), "quota is -1"),
    (lambda: Decoder(quota=1.5), "quota is 1.5"),
    (lambda: Decoder("threshold", quota={0: 2, 3: 0}), "quota is .*3: 0"),
    (lambda: Decoder("low_confidence"), "low_confidence.*exact"),
    (lambda: Decoder(confidence="topk_margin"), "topk_margin.*margin"),
    (lambda: Decoder("threshold", float("nan")), "threshold"),
    (lambda: linear_schedule(32, 0), "number of steps is 0"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(make, named):
    """In one sentence, before anything runs; a quota of 0 would let a pass change nothing,
    forever."""
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert one_sentence(error)


@pytest.mark.parametrize("family", FULL)
def test_an_unknown_cache_is_refused(family):
    """Not taken for another one."""
    target, _ = golden(family)
    target.cache = "both"
    with pytest.raises(ValueError, match="both.*none, prefix, dual") as error:
        dlm.start(target, Decoder(gen_len=8), random_prompt(13))
    assert one_sentence(error)


# ------------------------------------------------------------------------------ passes of one shape


@pytest.mark.parametrize(
    "family, cache", [("sdar", "dual"), ("llada2", "dual"), ("llada", "dual"), ("llada", "none")]
)
def test_padded_passes_are_exact_in_bfloat16(family, cache):
    """`Target.pad_to`: with passes of one shape a state is rounded alike in all of them, so that in
    bfloat16 too every method writes what draft-free decoding in such passes writes."""
    target, expected = golden(family, torch.bfloat16)
    target.cache, target.pad_to = cache, 14
    decoder = Decoder(gen_len=24, precision="float32")
    for seed, length in enumerate((13, 16, 21)):
        prompt = random_prompt(length, seed) % 90
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods(12, small_drafter(L), states, "exact", seed).items():
            got = verify.speculate(target, decoder, prompt, draft)
            assert got.written == truth.written, (name, length)


def test_padded_passes_have_one_shape(monkeypatch):
    """Whatever is drafted, every pass over a block has as many units, also those of the draft-free
    loop; a batch is refused, and so is a tree that does not fit."""
    target, shapes = golden("sdar")[0], set()
    plain = target.model.model.forward

    def forward(**inputs):
        shapes.add(inputs["input_ids"].shape)
        return plain(**inputs)

    monkeypatch.setattr(target.model.model, "forward", forward)
    prompt, decoder, target.pad_to = random_prompt(5) % 90, Decoder(gen_len=24), 10
    dlm.generate(target, decoder, prompt)
    verify.speculate(target, decoder, prompt, partial(ddtree.confidence_tree, budget=8))
    assert shapes == {(1, 10 * L)}
    with pytest.raises(ValueError, match="one row"):
        target.forward([(target.mask_id,) * L] * 2, [0], None, {})
    with pytest.raises(ValueError, match="do not fit"):
        target.forward([(target.mask_id,) * L] * 11, [0] * 11, None, {})
