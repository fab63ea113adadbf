"""Tests of the real targets: SDAR, LLaDA2.0-mini, LLaDA and Dream, as small golden checkpoints in the hub's layout.

Covered: logits equal to the public reference implementations' in float32, uncached, behind a prefix cache and in the
whole-canvas cache of the full-attention targets; their generations token for token, draft-free and with drafts; token
identity of every draft on every family and cache; the canvas and caches of full attention by hand; released rules,
quotas and confidences; what the hub's files leave out (block size, mask, stop ids); prompts; random weights; the hub's
cache; every refusal as one sentence. Golden numbers come from the reference implementations on random weights (3
layers, width 64; checkpoints/golden-*).

Left out: the trained weights, and several GPUs. Nothing is downloaded.

    python -m pytest test_targets.py          # about a minute on one core
"""

import dataclasses
import itertools
import json
import os
import shutil
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bench
import ddtree
import dlm
import targets
import test_exactness
import verify
from test_exactness import (
    edit_config,
    edit_weights,
    heaviest_child,
    methods,
    one_sentence,
    random_prompt,
    remove_weights,
    small_drafter,
    truncate,
    with_truth,
)

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
FAMILIES = ("sdar", "llada2", "llada", "dream")
BLOCK_CAUSAL, FULL = FAMILIES[:2], FAMILIES[2:]
L, S = 8, 24  # block and row of the golden logits


# ------------------------------------------------------------------------------------------------------ helpers


def golden(family, dtype=torch.float32, block_size=L):
    """The golden checkpoint of a family and what the reference implementation computes on it."""
    folder = os.path.join(CHECKPOINTS, f"golden-{family}")
    return targets.load(folder, dtype=dtype, block_size=block_size), load_file(
        os.path.join(folder, "expected.safetensors")
    )


def copy(family, folder):
    """A golden checkpoint copied to `folder`, to be changed there; returns the folder."""
    shutil.copytree(os.path.join(CHECKPOINTS, f"golden-{family}"), folder, ignore=shutil.ignore_patterns("expected*"))
    return str(folder)


@torch.inference_mode()
def logits(target, ids, positions, units):
    """Raw logits [1, P, V] of one pass over ids [1, P] at positions [P]."""
    hidden = target.model.model(input_ids=ids, position_ids=positions[None], units=units, use_cache=False)
    return target.model.lm_head(hidden.last_hidden_state)


def uncached(target, ids):
    """Raw logits [1, P, V] of a whole row: block by block, or all of it as one unit."""
    P, index = ids.shape[1], torch.arange(ids.shape[1] // L)
    whole = dlm.Units(P) if target.attention == "full" else dlm.Units(L, None, index, index[:, None] > index)
    return logits(target, ids, torch.arange(P), whole)


def conditionals(target, raw):
    """The probabilities of raw logits, over all ids as in released code; [MASK] is never committed."""
    return raw.softmax(-1).index_fill(-1, torch.tensor([target.mask_id]), 0)


def refused(*arguments, named="", **options):
    """`targets.load` must refuse with one sentence in which `named` (a regular expression) is found."""
    with pytest.raises((ValueError, FileNotFoundError), match=named) as error:
        targets.load(*arguments, **options)
    assert one_sentence(error)


# ------------------------------------------------------------------------------------------------- golden logits


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    """The native class under our attention function computes the reference's logits, in float32 and from float64."""
    for dtype in (torch.float32, torch.float64):
        target, expected = golden(family, dtype)
        raw = uncached(target, expected["ids"])
        assert raw.dtype == dtype and (expected["ids"] == target.mask_id).sum() > 3
        assert torch.allclose(raw.float(), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", BLOCK_CAUSAL)
def test_golden_logits_behind_a_prefix_cache(family):
    """Complete blocks prefilled, then one pass over two states of the next block: each as if it were alone."""
    target, expected = golden(family)
    ids = expected["ids"][0].tolist()
    states = [tuple(ids[16:]), (target.mask_id,) * 3 + tuple(ids[3:8])]
    for chosen in ([0], [1], [0, 1]):
        out = target.forward([states[u] for u in chosen], [2] * len(chosen), target.prefill(ids[:16]), {})
        for place, u in enumerate(chosen):
            row = torch.tensor([ids[:16] + list(states[u])])
            right = uncached(target, row)[0] if u else expected["logits"][0]
            right = conditionals(target, right[16:][row[0, 16:] == target.mask_id])
            assert torch.allclose(out.unit(place).exp(), right, rtol=0, atol=1e-5)


def test_golden_logits_of_llada_behind_padding():
    """The reference's logits with 4 positions masked out on the left: distances alone matter to RoPE, so those of the
    canvas without them."""
    target, expected = golden("llada")
    ids, right = expected["ids"][:, 4:], expected["logits_leftpad4"][:, 4:]
    for begin in (0, 4):
        raw = logits(target, ids, torch.arange(begin, begin + S - 4), dlm.Units(S - 4))
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", range(S // L))
@pytest.mark.parametrize("family", FULL)
def test_a_pass_over_one_block_of_a_cached_canvas(family, block):
    """K and V of the whole canvas stored, then the block alone behind those of all other positions: as uncached, also
    for two copies of the block in one pass."""
    target, expected = golden(family)
    store = dlm.Units(S, record=[])
    logits(target, expected["ids"], torch.arange(S), store)
    at = torch.arange(block * L, (block + 1) * L)
    others = torch.tensor([s for s in range(S) if s not in at])
    prefix = [(k[:, :, 0, others], v[:, :, 0, others]) for k, v in store.record]
    for copies in (1, 2):
        raw = logits(target, expected["ids"][:, at].repeat(1, copies), at.repeat(copies), dlm.Units(L, prefix))
        right = expected["logits"][:, at].repeat(1, copies, 1)
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


# -------------------------------------------------------------------------------------------- golden generations


def fast_dream_quota(steps=8):
    """{decided: commits} of Fast-dLLM's Dream in a block of L: the first of its steps fixes the block's first position,
    step i ≥ 1 takes int(left·(1 − t[i + 1] / t[i])) with t = linspace(1, 1e-3, steps + 1), the last one all; a step
    that takes none changes nothing."""
    t, decided, quota = torch.linspace(1, 1e-3, steps + 1).tolist(), 1, {}
    for i in range(1, steps):
        count = int((L - decided) * (1 - t[i + 1] / t[i])) if i < steps - 1 else L - decided
        quota |= {decided: count} if count else {}
        decided += count
    return quota


def dream_steps(steps, confidence):
    return dict(block_size=32, cache="none", least=dlm.linear_schedule(32, steps), confidence=confidence)


STATIC, DYNAMIC = {"rule": "low_confidence_static"}, {"rule": "low_confidence_dynamic", "value": 0.18}
LOW, SURE = {"rule": "threshold", "value": 0.3}, {"rule": "threshold", "value": 0.95}
ENTROPY = {"confidence": "entropy", "least": fast_dream_quota()}
GENERATIONS = {  # the reference's settings in our words; block size 8 and cache dual unless named
    "sdar gen_low_confidence_static_8": STATIC,
    "sdar gen_low_confidence_static_4": STATIC | {"least": 2},
    "sdar gen_low_confidence_dynamic_8": DYNAMIC,
    "sdar gen_sequential_8": {"rule": "sequential"},
    "sdar gen_sequential_4": {"rule": "sequential", "least": 2},
    "llada2 gen_0.3_4": LOW | {"least": 2},
    "llada2 gen_0.3_8": LOW,
    "llada2 gen_0.95_8": SURE,
    "llada gen_32_32_16": {"block_size": 32, "cache": "none", "least": 2},
    "llada gen_32_8_32": {"cache": "none"},
    "llada gen_32_8_8": {"cache": "none", "least": 4},
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
        with safe_open(os.path.join(CHECKPOINTS, f"golden-{family}", "expected.safetensors"), "pt") as expected:
            keys |= {f"{family} {key}" for key in expected.keys() if key.startswith(("gen_", "fast_"))}
    assert {key for key in keys if not key.endswith("_nfe")} == {*GENERATIONS, OVERWRITTEN}


def golden_decoder(case):
    """(target, expected, decoder, key) of a golden generation: confidences unrounded, argmax tokens."""
    family, key = case.split()
    options = {"block_size": L, "cache": "dual", "gen_len": 24 if family in BLOCK_CAUSAL else 32} | GENERATIONS[case]
    target, expected = golden(family, block_size=options.pop("block_size"))
    target.cache = options.pop("cache")
    return target, expected, dlm.Decoder(precision="float32", **options), key


@pytest.mark.parametrize("case", GENERATIONS)
def test_golden_generations(case):
    """Token for token what the reference decoder writes, draft-free and with drafts, and in as many passes: but
    Fast-dLLM's cached loop looks for masks after the pass behind the opening one, so that it runs one pass too many in
    each block that the opening pass has finished."""
    target, expected, decoder, key = golden_decoder(case)
    prompt, right, finished = expected["prompt"][0], expected[key][0].tolist(), []

    def watch(canvas, state, following, *_):
        finished.append(canvas.prefix is not None and state == canvas.blank and canvas.is_complete(following))

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
    """By hand: t₁ … t₈ = .875125 … .001 in steps of .124875. 7·.1427 → 0, 7·.1664 → 1, 6·.1997 → 1, 5·.2495 → 1,
    4·.3324 → 1, 3·.498 → 1, and the last step takes the 2 that are left."""
    assert fast_dream_quota() == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2}


@torch.inference_mode()
def overwrite(target, prompt, end, quota, threshold):
    """SDAR's released loop with its fault: where no more than `quota` confidences exceed the threshold it writes the
    `quota` likeliest tokens, also if fewer masks are left: then over decided positions, whose confidence is −inf.
    Returns (ids up to `end`, decided positions that were written again)."""
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


@pytest.mark.parametrize("strategy, options, differ", [("static", STATIC, 0), ("dynamic", DYNAMIC, 1)])
def test_the_released_sdar_writes_over_finished_tokens(strategy, options, differ):
    """With 2 commits a pass and one mask left, the reference writes a decided position anew. The loop that does just
    that gives its tokens, and ours, which does not, differs from them nowhere else."""
    target, expected = golden("sdar")
    prompt, right = expected["prompt"][0], expected[f"gen_low_confidence_{strategy}_4"][0].tolist()
    decoder = dlm.Decoder(precision="float32", gen_len=24, least=2, **options)
    row, again = overwrite(target, prompt, len(right), 2, options.get("value", torch.inf))
    ours = prompt.tolist() + dlm.generate(target, decoder, prompt).written
    changed = {s for s, (a, b) in enumerate(zip(ours, right)) if a != b}
    assert row == right and len(changed) == differ and changed <= again


# ---------------------------------------------------------------------------------- drafts on every family's model


LIVELY = [  # decoders for random weights, whose confidences are low; gen_len is no multiple of the block
    {"rule": "exact", "gen_len": 13},
    {"rule": "exact", "temperature": 1.0, "gen_len": 9},
    {"rule": "threshold", "value": 0.2, "gen_len": 20},
    {"rule": "entropy", "value": 2.0, "temperature": 1.0, "confidence": "distribution", "gen_len": 20},
    {"rule": "sequential", "gen_len": 10},
    {"rule": "exact", "least": 2, "gen_len": 18, "confidence": "margin"},
    {"rule": "threshold", "value": 0.3, "temperature": 1.0, "gen_len": 12},
    {"rule": "exact", "least": 2, "temperature": 1.0, "tempered": True, "top_k": 9, "gen_len": 18},
    {"rule": "exact", "least": dlm.linear_schedule(L, 5), "confidence": "entropy", "gen_len": 18},
]
PROMPTS = (16, 13, 1, 8, 21)
MODELS = [("sdar", "dual", 0, 1), ("llada2", "dual", 0, 1)]  # family, cache, and which of LIVELY: every n-th from i on
MODELS += [(family, cache, i, 3) for family in FULL for i, cache in enumerate(dlm.CACHES)]


def lively(family, cache, monkeypatch):
    """The golden model in float64, where a pass over many states is as exact as over one; its ids told to the helpers
    of test_exactness."""
    target, _ = golden(family, torch.float64)
    target.cache = cache
    monkeypatch.setattr(test_exactness, "MASK", target.mask_id)
    monkeypatch.setattr(test_exactness, "VOCAB", target.mask_id + 1)
    return target


@pytest.mark.parametrize("family, cache, first, every", MODELS)
def test_every_draft_writes_the_draft_free_text(family, cache, first, every, monkeypatch):
    """Token identity for the attention, shift and caches of every family: whatever is drafted, the text is that of the
    draft-free loop, and every accepted node saves a pass (a finished last one has none to save)."""
    target, drafter = lively(family, cache, monkeypatch), small_drafter(L)
    decodes, accepted = 0, 0
    for i, options in list(enumerate(LIVELY))[first::every]:
        decoder, prompt = dlm.Decoder(seed=i, **options), random_prompt(PROMPTS[i % len(PROMPTS)], i)
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods((1, 6, 20)[i % 3], drafter, states, decoder.rule, i).items():
            saved = []
            got = verify.speculate(
                target, decoder, prompt, draft,
                watch=lambda canvas, tree, path, *_: saved.extend(not canvas.is_leaf(tree.states[u]) for u in path[1:]),
            )  # fmt: skip
            assert (got.written, got.ids) == (truth.written, truth.ids), (name, options)
            assert sum(saved) + got.passes["denoise"] == truth.passes["denoise"], (name, options)
            decodes, accepted = decodes + 1, accepted + sum(saved)
    assert decodes >= 8 * len(LIVELY) // every and accepted > decodes  # else nodes were not put to the test


@pytest.mark.parametrize("family, cache", [("sdar", "dual"), ("llada2", "dual"), *itertools.product(FULL, dlm.CACHES)])
def test_wrong_verifiers_change_the_text(family, cache, monkeypatch):
    """The comparison above must fail for a verifier that does not look at F, else it would prove nothing; it is made at
    T = 1, where a token depends on the step at which it is drawn."""
    target, wrong = lively(family, cache, monkeypatch), 0
    for length in PROMPTS[:3]:
        decoder, prompt = dlm.Decoder(gen_len=16, temperature=1.0), random_prompt(length)
        truth, draft = dlm.generate(target, decoder, prompt).written, partial(ddtree.confidence_tree, budget=12)
        wrong += verify.speculate(target, decoder, prompt, draft, match=heaviest_child).written != truth
        assert verify.speculate(target, decoder, prompt, draft).written == truth
    assert wrong > 0


# ------------------------------------------------------------------------------- the canvas of full-attention targets


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("cache", dlm.CACHES)
def test_the_first_pass_of_a_block_sees_the_whole_canvas(family, cache):
    """Blocks start at the prompt's end, here 13 and 21, and masks stand up to the canvas's end. The conditionals are
    the uncached ones of that row; with shifted logits, those at the place before each position."""
    target, _ = golden(family, torch.float64)
    target.cache, prompt = cache, random_prompt(13)
    canvas = dlm.start(target, dlm.Decoder(gen_len=17), prompt)
    for begin in (13, 21):
        assert (canvas.block, len(canvas.done), canvas.state) == ((begin - 13) // L, begin, canvas.blank)
        row = torch.tensor([canvas.done + [target.mask_id] * (13 + 24 - begin)])
        first = begin - (family == "dream")
        right = conditionals(target, uncached(target, row)[0, first : first + L])
        out = canvas.look([canvas.state], [canvas.block], {})
        right = right[:1] if family == "dream" and cache != "none" else right
        assert torch.allclose(out.unit(0).exp(), right, rtol=0, atol=1e-9)
        canvas.advance(tuple(range(L)))


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("cache", dlm.CACHES)
def test_what_the_caches_keep(family, cache):
    """Of the first pass of a block, dual keeps K and V of all positions but the block's, prefix those before it; later
    passes leave them as they are, and the next block starts with none."""
    target, _ = golden(family, torch.float64)
    target.cache, store = cache, dlm.Units(37, record=[])
    canvas = dlm.start(target, dlm.Decoder(gen_len=24), random_prompt(13))
    canvas.advance(tuple(range(L)))
    canvas.look([canvas.state], [canvas.block], {})
    logits(target, torch.tensor([canvas.done + [target.mask_id] * 16]), torch.arange(37), store)
    kept = [s for s in range(37) if s < 21 or s >= 29 and cache == "dual"]
    for _ in range(2):
        if cache == "none":
            assert canvas.prefix is None
            continue
        for layer, right in zip(canvas.prefix, store.record, strict=True):
            for ours, whole in zip(layer, right, strict=True):
                assert torch.allclose(ours, whole[:, :, 0, kept], rtol=0, atol=1e-9)
        canvas.look([(5,) + canvas.blank[1:]] * 2, [canvas.block] * 2, {})
    canvas.advance(tuple(range(L)))
    assert canvas.prefix is None


@pytest.mark.parametrize("family, cache, passes", [
    ("llada", "none", 3), ("llada", "prefix", 3), ("llada", "dual", 3),  # 17 tokens are 3 blocks
    ("dream", "none", 3), ("dream", "prefix", 6), ("dream", "dual", 6),
])  # fmt: skip
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_what_the_first_pass_can_decide(family, cache, passes, temperature):
    """A rule that commits all it can: the whole block, but with shifted logits and a cache its first position alone,
    for the later passes do not hold the place before it. The noise is that of a state without decided positions."""
    target, prompt = golden(family, torch.float64)[0], random_prompt(13)
    target.cache, seen = cache, []
    decoder = dlm.Decoder("threshold", 0.0, gen_len=17, temperature=temperature)

    def watch(canvas, state, following, out, unit):
        if state == canvas.blank:
            seen.append(sum(token != target.mask_id for token in following))
            zero, position = torch.tensor([[0], [0]])
            noised = decoder.perturbed(out.unit(0)[:1], zero + canvas.block, zero, position)
            assert following[0] == noised.argmax()

    assert dlm.generate(target, decoder, prompt, watch=watch).passes == {
        "prefill": 0,
        "denoise": passes,
        "kv_commit": 0,
    }
    assert seen == [1 if passes == 6 else L] * 3


@pytest.mark.parametrize("family", FULL)
def test_a_stop_id_only_cuts_the_answer(family):
    """The whole canvas is written, to the end of the block that holds token gen_len; the answer ends before the first
    stop id."""
    target, prompt, decoder = golden(family, torch.float64)[0], random_prompt(13), dlm.Decoder(gen_len=18)
    free = dlm.generate(target, decoder, prompt)
    assert len(free.written) == 24 and free.ids == free.written[:18]
    target.stop_ids = frozenset({free.written[5]})
    for got in (
        dlm.generate(target, decoder, prompt),
        verify.speculate(target, decoder, prompt, partial(ddtree.chain, budget=8)),
    ):
        assert got.written == free.written and got.ids == free.written[: free.written.index(free.written[5])]


@pytest.mark.parametrize("length, gen_len, fits", [(248, 8, True), (249, 8, False), (240, 9, True), (241, 9, False)])
def test_canvases_that_do_not_fit_are_refused(length, gen_len, fits):
    """LLaDA's golden context is 256 positions: prompt and whole blocks of 8 behind it must fit."""
    target, decoder = golden("llada")[0], dlm.Decoder(gen_len=gen_len)
    if fits:
        dlm.start(target, decoder, random_prompt(length))
        return
    with pytest.raises(ValueError, match="context of 256") as error:
        dlm.start(target, decoder, random_prompt(length))
    assert one_sentence(error)


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("block_size", (1, 5))
@pytest.mark.parametrize("cache", dlm.CACHES)
def test_odd_block_sizes(family, block_size, cache):
    """Blocks of one position, and of a size that divides nothing: a pass a token, and drafts change nothing."""
    target, prompt = golden(family, torch.float64, block_size)[0], random_prompt(13)
    target.cache, decoder = cache, dlm.Decoder(gen_len=7)
    free = dlm.generate(target, decoder, prompt)
    assert free.passes["denoise"] == len(free.written) == -(-7 // block_size) * block_size
    for draft in (ddtree.confidence_tree, ddtree.chain):
        assert verify.speculate(target, decoder, prompt, partial(draft, budget=8)).written == free.written


# ---------------------------------------------------------------------------------- released rules, quotas, confidences


@pytest.mark.parametrize("name, rule, value", [
    ("low_confidence_static", "exact", None),
    ("low_confidence_dynamic", "threshold", 0.9),
    ("entropy_bounded", "entropy", 0.1),
    ("sequential", "sequential", None),
])  # fmt: skip
def test_released_names_of_rules(name, rule, value):
    """The names of SDAR's released code are ours in other words, with our default values."""
    decoder = dlm.Decoder(name)
    assert (decoder.rule, decoder.value) == (rule, value)
    assert dlm.Decoder(name, 0.5).value == 0.5


@pytest.mark.parametrize("rule, value, least, right", [
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
def test_quotas_by_hand(rule, value, least, right):
    """At least `least` positions, in the rule's order; sequential goes from the left, whatever the confidence."""
    confidence = torch.tensor([0.5, 0.7, 0.99, 0.9, 0.6], dtype=torch.float64)
    entropy = torch.tensor([0.1, 0.5, 0.0, 0.4, 0.2], dtype=torch.float64)
    masked = torch.tensor([True, True, False, True, True])
    assert dlm.commits(rule, value, confidence, entropy, masked, least).nonzero()[:, 0].tolist() == right


def test_quotas_by_step():
    """A table of quotas is read at each unit's decided positions; 1 where it says nothing."""
    masked = torch.tensor([[True] * 4, [True, False, True, True]])
    flat = torch.tensor([[0.4, 0.6], [0.3, 0.7], [0.2, 0.8], [0.1, 0.9], [0.1, 0.9], [0.2, 0.8], [0.3, 0.7]]).log()
    where = masked.flatten().nonzero()[:, 0].tolist()
    out = dlm.Pass(torch.where(masked, 9, 5), torch.tensor([0, 0]), where, flat, lambda rows: rows, 2, [])
    assert dlm.Decoder(least={0: 3}).transition(out) == [(9, 1, 1, 1), (1, 5, 9, 9)]
    assert dlm.Decoder(least={1: 2}).transition(out) == [(9, 9, 9, 1), (1, 5, 1, 9)]


@pytest.mark.parametrize("masks, steps", [(32, 11), (32, 32), (256, 64), (7, 3), (1, 5), (5, 1)])
def test_the_linear_schedule_is_the_reference_loop(masks, steps):
    """Dream's loop, in its own float32 arithmetic, step by step; passes that commit nothing change no state."""
    times, left, right = torch.linspace(1, 1e-3, steps + 1), torch.tensor(float(masks)), {}
    for i in range(steps):
        count = int(left * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(left)
        if count:
            right[masks - int(left)] = count
        left = left - count
    schedule = dlm.linear_schedule(masks, steps)
    assert schedule == right and sum(schedule.values()) == masks


def test_the_linear_schedule_by_hand():
    """8 masks in 4 steps, t = 1, .75025, .5005, .25075, .001: 8·.24975 → 1, 7·.3329 → 2, 5·.499 → 2, and the last 3.
    One step takes all; of 5 steps for one mask, the first 4 would take none."""
    assert dlm.linear_schedule(8, 4) == {0: 1, 1: 2, 3: 2, 5: 3}
    assert dlm.linear_schedule(8, 1) == {0: 8} and dlm.linear_schedule(1, 5) == {0: 1}


def test_confidences_by_hand():
    """margin: p₁ − p₂; entropy: exp(−H), H = 1.0297 for (.5, .3, .2); H = ln 2 for (.5, .5, 0)."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], dtype=torch.float64).log()
    for name, right in (("margin", [0.2, 0.0]), ("entropy", [0.35713, 0.5]), ("distribution", [0.5, 0.5])):
        decoder = dlm.Decoder(confidence=name, precision="float32")
        assert decoder.read(logits, torch.tensor([1, 1]))[0].tolist() == pytest.approx(right, abs=1e-5)


def test_the_entropy_confidence_keeps_the_order_of_the_entropy():
    """Also next to 1, where exp(−H) of H = 1.9e-8 and 1.1e-8 is the same float32: the lower entropy goes first."""
    rest = torch.tensor([1e-9, 5e-10])
    logits = torch.stack([torch.zeros(2), rest.log()], 1)
    confidence, _ = dlm.Decoder(confidence="entropy", precision="float32").read(logits, torch.tensor([0, 0]))
    assert confidence[0] < confidence[1] < 1


@pytest.mark.parametrize("make, named", [
    (lambda: dlm.Decoder(least=0), "least is 0"),
    (lambda: dlm.Decoder(least=-1), "least is -1"),
    (lambda: dlm.Decoder(least=1.5), "least is 1.5"),
    (lambda: dlm.Decoder("threshold", least={0: 2, 3: 0}), "least is .*3: 0"),
    (lambda: dlm.Decoder("low_confidence"), "low_confidence.*exact"),
    (lambda: dlm.Decoder(confidence="topk_margin"), "topk_margin.*margin"),
    (lambda: dlm.Decoder("threshold", float("nan")), "threshold"),
    (lambda: dlm.linear_schedule(32, 0), "steps is 0"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(make, named):
    """In one sentence, before anything runs; a quota of 0 would let a pass change nothing, forever."""
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert one_sentence(error)


@pytest.mark.parametrize("family", FULL)
def test_an_unknown_cache_is_refused(family):
    """Not taken for another one."""
    target, _ = golden(family)
    target.cache = "both"
    with pytest.raises(ValueError, match="both.*none, prefix, dual") as error:
        dlm.start(target, dlm.Decoder(gen_len=8), random_prompt(13))
    assert one_sentence(error)


# ---------------------------------------------------------------------------------------- what a family brings along


@pytest.mark.parametrize(
    "family, attention, shift, mask_id, stop_ids",
    [
        ("sdar", "block", False, 96, {95}),
        ("llada2", "block", False, 100, {99}),
        ("llada", "full", False, 100, {99}),
        ("dream", "full", True, 100, {98}),
    ],
)
def test_what_a_target_says_of_itself(family, attention, shift, mask_id, stop_ids):
    """Attention, shift, stop rule and ids, for the loops that decode with it."""
    target, _ = golden(family)
    assert (target.attention, target.shift, target.stops) == (attention, shift, attention == "block")
    assert (target.block_size, target.mask_id, target.stop_ids) == (L, mask_id, stop_ids)
    assert target.n_ids == target.model.config.vocab_size and target.dtype == torch.float32


@pytest.mark.parametrize(
    "alias, gigabytes",
    [
        ("sdar-8b", 16.4),
        ("sdar-4b", 8.8),
        ("sdar-1.7b", 4.1),
        ("llada2.0-mini", 32.5),
        ("llada-8b", 16.0),
        ("dream-7b", 15.2),
    ],
)
def test_sizes_in_the_table(alias, gigabytes):
    """The table's sizes add up to the published checkpoints' bytes in bfloat16, and their ids and block are the
    table's."""
    path, raw = targets.known_config(alias)
    family = targets.FAMILIES[raw["model_type"]]
    config = targets.native_config(path, raw, family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model) is family.model
    assert 2 * sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(gigabytes, rel=0.015)
    assert targets.choose_block_size(path, raw, targets.HUB[alias][0], None, True) == 32
    mask_id, stop_ids = targets.read_ids(path, raw, family, None, config.vocab_size)
    assert mask_id == family.known["mask_token_id"] and len(stop_ids) >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_from_the_files(family, tmp_path):
    """generation_config.json's list of stop ids counts before config.json's one id; the table only fills gaps."""
    folder = copy(family, tmp_path / "ids")
    with open(os.path.join(folder, "generation_config.json"), "w") as file:
        json.dump({"eos_token_id": [90, 91]}, file)
    assert targets.load(folder, block_size=L).stop_ids == {90, 91}
    os.remove(os.path.join(folder, "generation_config.json"))
    edit_config(eos_token_id=[93, 94])(folder)
    assert targets.load(folder, block_size=L).stop_ids == {93, 94}


@pytest.mark.parametrize("name, config, asked, right", [
    ("JetLM/SDAR-8B-Chat-b32", None, None, 32),
    ("JetLM/SDAR-8B-Chat-b16", None, None, 16),
    ("JetLM/SDAR-8B-Chat-b32", 4, None, 32),
    ("JetLM/SDAR-8B-Chat-b16", None, 16, 16),
    ("models/SDAR-4B-Chat-b8/", None, None, 8),
    ("JetLM/SDAR-8B-Chat", 4, None, 4),
    ("JetLM/SDAR-8B-Chat-b64", 64, 64, 64),
    ("mine-b16", 8, None, 8),
])  # fmt: skip
def test_where_the_block_size_comes_from(name, config, asked, right):
    """As SDAR's names say it, whose config.json may be that of a sibling, else as config.json says it."""
    raw = {"model_type": "sdar"} | ({"block_size": config} if config else {})
    assert targets.choose_block_size("config.json", raw, name, asked, False) == right


@pytest.mark.parametrize("model_type", ("llada2_moe", "llada", "Dream"))
def test_the_usual_block_size(model_type):
    """32 for the families whose block size is the decoder's choice."""
    assert targets.choose_block_size("config.json", {"model_type": model_type}, "x/y", None, False) == 32


# ------------------------------------------------------------------------------------------------------- prompts


def encode(tokenizer, prompt):
    return dlm.Target.encode(SimpleNamespace(tokenizer=tokenizer), prompt).tolist()


def test_the_real_sdar_prompt():
    """SDAR-8B's own template and tokens (its vocabulary cut to what is needed here, with its ids): ChatML, no system
    prompt, no think tags."""
    folder = os.path.join(CHECKPOINTS, "golden-sdar-tokenizer")
    tokenizer = targets.load_tokenizer(folder, targets.SDAR)
    user, answer = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    assert encode(tokenizer, "What is 17 plus 25?") == (
        user + [3838, 374, 220, 16, 22, 5519, 220, 17, 20, 30] + answer
    )  # one token a digit
    assert encode(tokenizer, "naïve café\n") == user + [3376, 37572, 586, 51950, 198] + answer
    path, raw = targets.read_folder(folder)
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == (151669, {151643, 151645})
    raw.pop("mask_token_id"), raw.pop("eos_token_id")
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == (151669, {151643, 151645})


def test_the_prompt_of_llada2():
    """The table's template, tokenised: thinking off, then the message."""
    target, _ = golden("llada2")
    shown = target.tokenizer.convert_ids_to_tokens(target.encode("What is t20"))
    system, human = (
        "<role> SYSTEM </role> detailed thinking off <|role_end|>",
        "<role> HUMAN </role> What is t20 <|role_end|>",
    )
    assert shown == [*system.split(), *human.split(), "<role>", "ASSISTANT", "</role>"]


@pytest.mark.parametrize("family, source, right", [
    (targets.SDAR, "golden-sdar-tokenizer", "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.DREAM, "golden-sdar-tokenizer", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
     "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.LLADA, "golden-llada2", "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nA {}\n'\"<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    (targets.LLADA2, "golden-llada2", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>A {}\n'\""
     "<|role_end|><role>ASSISTANT</role>"),
])  # fmt: skip
def test_templates_in_the_table(family, source, right, tmp_path):
    """A tokenizer without a template gets its family's, which leaves the message as it is."""
    folder = str(tmp_path / "tokenizer")
    shutil.copytree(
        os.path.join(CHECKPOINTS, source), folder, ignore=shutil.ignore_patterns("*.jinja", "*.safetensors")
    )
    path = os.path.join(folder, "tokenizer_config.json")
    settings = targets.read_json(path)
    settings.pop("chat_template", None)
    with open(path, "w") as file:
        json.dump(settings, file)
    chat = [{"role": "user", "content": "A {}\n'\""}]
    tokenizer = targets.load_tokenizer(folder, family)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == right


def test_a_template_of_the_checkpoint_comes_first(tmp_path):
    """A checkpoint's own template is used where there is one."""
    folder = copy("llada2", tmp_path / "own")
    with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
        file.write("<role>{{ messages[0].content }}</role>")
    tokenizer = targets.load_tokenizer(folder, targets.LLADA2)
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "What")) == ["<role>", "What", "</role>"]


def test_tokens_off_their_ids_are_refused(tmp_path):
    """A vocabulary that is not whole would shift the ids of all added tokens: refused, not decoded with."""
    folder = str(tmp_path / "short")
    shutil.copytree(os.path.join(CHECKPOINTS, "golden-sdar-tokenizer"), folder)
    path = os.path.join(folder, "vocab.json")
    words = {word: i for word, i in targets.read_json(path).items() if i < 151643}
    with open(path, "w") as file:
        json.dump(words, file)
    with pytest.raises(ValueError, match="has id .*, not 1516") as error:
        targets.load_tokenizer(folder, targets.SDAR)
    assert one_sentence(error)


# ------------------------------------------------------------------------------------------------ random weights


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_a_folder(family, tmp_path):
    """A model of the size that config.json says, without weights: N(0, 0.02²), norms 1, and RoPE as in the real one."""
    folder = copy(family, tmp_path / "bare")
    remove_weights(folder)
    torch.manual_seed(0)
    target, (real, expected) = (
        targets.load(folder, dtype=torch.bfloat16, block_size=L, random_weights=True),
        golden(family),
    )
    tensors, right = target.model.state_dict(), real.model.state_dict()
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in right.items()}
    assert all(tensor.isfinite().all() for tensor in tensors.values()) and target.dtype == torch.bfloat16
    assert tensors["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert (tensors["model.norm.weight"] == 1).all()
    assert torch.equal(target.model.model.rotary_emb.inv_freq, real.model.model.rotary_emb.inv_freq)
    assert uncached(target, expected["ids"]).isfinite().all()
    assert (target.mask_id, target.stop_ids, target.attention) == (real.mask_id, real.stop_ids, real.attention)


@pytest.mark.parametrize("alias", ["sdar-8b", "llada2.0-mini", "llada-8b", "dream-7b"])
def test_random_weights_of_an_alias(alias, monkeypatch):
    """From the table alone: no file, no network, no tokenizer; here with the sizes made small."""
    hub, model_type, _ = targets.HUB[alias]
    small = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=8, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=4, num_experts=16, moe_intermediate_size=8, n_layers=2, d_model=16, mlp_hidden_size=8,
                 n_heads=4, n_kv_heads=4)  # fmt: skip
    known = targets.FAMILIES[model_type].known
    for name in [name for name in small if name in known]:
        monkeypatch.setitem(known, name, small[name])
    if model_type == "sdar":
        monkeypatch.setitem(targets.HUB, alias, (hub, model_type, (16, 8, 2, 4)))
    monkeypatch.setattr(targets, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    target = targets.load(alias, dtype=torch.bfloat16, random_weights=True)
    assert target.block_size == 32 and target.tokenizer is None
    assert target.mask_id == known["mask_token_id"] and target.stop_ids == set(known["stop_token_ids"])
    assert targets.load(alias, random_weights=True, block_size=16).block_size == 16
    if target.attention == "block":
        out = target.forward([(target.mask_id,) * 32], [1], target.prefill(list(range(32))), {})
        assert out.states.shape == (1, 32)


# -------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub's library and no network; returns a function that puts a golden checkpoint in it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(family, hub):
        root, revision = tmp_path / f"models--{hub.replace('/', '--')}", "0" * 40
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        return copy(family, root / "snapshots" / revision)

    return put


@pytest.mark.parametrize(
    "family, alias",
    [
        ("sdar", "sdar-1.7b"),
        ("sdar", "sdar-4b"),
        ("sdar", "sdar-8b"),
        ("llada2", "llada2.0-mini"),
        ("llada", "llada-8b"),
        ("dream", "dream-7b"),
    ],
)
def test_a_cached_checkpoint_needs_no_network(family, alias, cache):
    """By alias and by hub id; SDAR's block size, which its config.json lacks, comes from the repository's name."""
    hub = targets.HUB[alias][0]
    edit_config(block_size=None)(cache(family, hub))
    for name in (alias, hub):
        target = targets.load(name)
        assert target.block_size == 32 and type(target.model) is targets.FAMILIES[targets.HUB[alias][1]].model
    if family in ("llada", "dream"):  # the decoder's choice
        assert targets.load(alias, block_size=16).block_size == 16


def test_a_sibling_of_another_block_size(cache):
    """Any repository of the hub can be named; -b16 says the block size."""
    edit_config(block_size=None)(cache("sdar", "JetLM/SDAR-8B-Chat-b16"))
    assert targets.load("JetLM/SDAR-8B-Chat-b16").block_size == 16


@pytest.mark.parametrize("name", [*targets.HUB, "JetLM/SDAR-8B-Chat-b16", "no-such/repository"])
def test_an_unreachable_hub_is_one_sentence(name, cache):
    """Neither cached nor to be fetched."""
    refused(name, named="cannot fetch .*/.* from the hub.*network")


def test_an_incomplete_cache_is_not_taken_for_whole(cache):
    """A download that broke off is fetched on, and without a network refused."""
    shards(cache("llada", "GSAI-ML/LLaDA-8B-Instruct"), lost=True)
    refused("llada-8b", named="model-00002-of-00002.safetensors|cannot fetch")


def test_only_data_is_fetched(monkeypatch, tmp_path):
    """No code and no pickle is asked of the hub."""
    asked = []

    def download(hub, allow_patterns, local_files_only=False):
        asked.extend(allow_patterns)
        if local_files_only:
            raise FileNotFoundError("not cached")
        return copy("sdar", tmp_path / "fetched")

    monkeypatch.setattr(targets, "snapshot_download", download)
    assert targets.load("someone/SDAR").mask_id == 96
    assert set(asked) == {"*.json", "*.safetensors", "*.txt", "*.jinja"}


# ----------------------------------------------------------------------------------------------- what is refused


def shards(folder, lost=False):
    """Splits the weights of `folder` in two files with an index, as on the hub; lost: the second is not there."""
    whole = os.path.join(folder, "model.safetensors")
    tensors = load_file(whole)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, half in list(halves.items())[: 1 if lost else 2]:
        save_file({name: tensors[name] for name in half}, os.path.join(folder, file), metadata={"format": "pt"})
    with open(whole + ".index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}, index)
    os.remove(whole)


TENSOR = {  # in the second layer: a matrix of each family, by its name on the hub
    "sdar": "model.layers.1.mlp.up_proj.weight",
    "llada2": "model.layers.1.mlp.experts.3.up_proj.weight",
    "llada": "model.transformer.blocks.1.ff_out.weight",
    "dream": "model.layers.1.self_attn.q_proj.bias",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ("missing", "surplus", "layer", "misshaped", "top", "transposed"))
def test_tensors_that_do_not_fit_are_refused(family, fault, tmp_path):
    """A missing, surplus or misshaped tensor is named, and nothing is filled up or cut to size."""
    folder, name = copy(family, tmp_path / "broken"), TENSOR[family]
    top = "model.transformer.ln_f.weight" if family == "llada" else "model.norm.weight"
    head = "model.transformer.ff_out.weight" if family == "llada" else "lm_head.weight"
    edit, named = {
        "missing": (lambda t: t.pop(name), "missing.*layers.1.|missing.*" + name),
        "surplus": (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "model.extra.weight"),
        "layer": (lambda t: t.update({name.replace(".1.", ".46."): t[name].clone()}), r"surplus.*\.46\."),
        "misshaped": (lambda t: t.update({name: t[name][:-1].clone()}), name + ".*shape"),
        "top": (lambda t: t.update({top: torch.zeros(63)}), "mismatched.*norm.weight.*63"),
        "transposed": (lambda t: t.update({head: t[head].T.contiguous()}), "mismatched.*lm_head"),
    }[fault]
    edit_weights(edit)(folder)
    refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_files_are_refused(family, tmp_path):
    """Truncated, lost or missing files of weights; whole ones in two shards are read."""
    folder = copy(family, tmp_path / "whole")
    right = targets.load(folder, block_size=L).model.state_dict()
    shards(folder)
    got = targets.load(folder, block_size=L).model.state_dict()
    assert all(torch.equal(got[name], right[name]) for name in right)
    second = os.path.join(folder, "model-00002-of-00002.safetensors")
    os.truncate(second, os.path.getsize(second) - 100)
    refused(folder, block_size=L, named="cannot be read")
    os.remove(second)
    refused(folder, block_size=L, named="lacks 1 file.*model-00002-of-00002.safetensors")
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        file.write("{}")
    refused(folder, block_size=L, named="weight_map")
    folder = copy(family, tmp_path / "other")
    truncate(folder)
    refused(folder, block_size=L, named="cannot be read")
    remove_weights(folder)
    refused(folder, block_size=L, named="lacks.*model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_configurations_are_refused(family, tmp_path):
    """No object, a field that shapes the model missing or of another kind, scaled RoPE, ids off the vocabulary."""
    width = "d_model" if family == "llada" else "hidden_size"
    cases = [
        (edit_config(b"[1]"), "config.json"),
        (edit_config(b"{"), "config.json"),
        (edit_config(**{width: None}), width),
        (edit_config(**{width: "wide"}), "config.json"),
        (edit_config(rope_theta=None), "rope_theta"),
        (edit_config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
        (edit_config(mask_token_id=500), "mask_token_id"),
        (edit_config(eos_token_id=500), "stop ids"),
        (edit_config(eos_token_id=-1), "stop ids"),
    ]
    for i, (edit, named) in enumerate(cases):
        folder = copy(family, tmp_path / str(i))
        edit(folder)
        refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", (0, -8, 2.0, "8"))
def test_wrong_block_sizes_are_refused(family, block_size):
    """Only a whole number of at least 1."""
    refused(os.path.join(CHECKPOINTS, f"golden-{family}"), block_size=block_size, named="block size")


def test_contradicting_block_sizes_are_refused(tmp_path):
    """What the name or config.json says the model was trained with is not overridden by the argument."""
    refused(os.path.join(CHECKPOINTS, "golden-sdar"), block_size=16, named="block size 16 .* 8")
    refused("embedded", block_size=8, named="block size 8 .* 32")
    refused(copy("sdar", tmp_path / "SDAR-1.7B-Chat-b32"), block_size=8, named="block size 8 .* 32")
    folder = copy("sdar", tmp_path / "none")
    edit_config(block_size=None)(folder)
    refused(folder, named="names no block_size")


@pytest.mark.parametrize("model_type", ("gpt2", "dream", None))
def test_an_unknown_model_type_is_refused(model_type, tmp_path):
    """Another architecture is not guessed at."""
    folder = copy("sdar", tmp_path / "other")
    edit_config(model_type=model_type)(folder)
    refused(folder, named="model_type.*sdar.*llada2_moe.*llada.*Dream")


@pytest.mark.parametrize("name", ("sdar", "sdar-9b", "nowhere/at/all", "../none", "", CHECKPOINTS))
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    """All aliases are listed."""
    for random_weights in (False, True):
        refused(name, random_weights=random_weights, named=".*".join(["no model", "embedded", *targets.HUB]))


@pytest.mark.parametrize("device", ("cuda:99", "gpu", "meta-data"))
def test_an_unknown_device_is_refused(device):
    """Before anything is read."""
    refused("embedded", device, named=f"{device}.*cannot be used")


def test_several_devices_need_accelerate(monkeypatch):
    """device auto is the library's own placement; it and random weights on several devices are refused in words."""
    monkeypatch.setattr(targets, "is_accelerate_available", lambda: False)
    refused("embedded", "auto", named="accelerate")
    monkeypatch.setattr(targets, "is_accelerate_available", lambda: True)
    refused("sdar-1.7b", "auto", random_weights=True, named="one device")


def test_outputs_of_a_spread_model_are_gathered():
    """The hooks that bring outputs to the first device leave a model on one device as it is."""
    target, expected = golden("sdar")
    before = uncached(target, expected["ids"])
    target.model = targets.gather(target.model)
    assert torch.equal(uncached(target, expected["ids"]), before)


# ------------------------------------------------------------------------------------------------- passes of one shape


@pytest.mark.parametrize("family, cache", [("sdar", "dual"), ("llada2", "dual"), ("llada", "dual"), ("llada", "none")])
def test_padded_passes_are_exact_in_bfloat16(family, cache):
    """`Target.units`: with passes of one shape a state is rounded alike in all of them, so that in bfloat16 too every
    method writes what draft-free decoding in such passes writes."""
    target, expected = golden(family, torch.bfloat16)
    target.cache, target.units = cache, 14
    decoder = dlm.Decoder(gen_len=24, precision="float32")
    for seed, length in enumerate((13, 16, 21)):
        prompt = random_prompt(length, seed) % 90
        truth, states = with_truth(target, decoder, prompt)
        for name, draft in methods(12, small_drafter(L), states, "exact", seed).items():
            assert verify.speculate(target, decoder, prompt, draft).written == truth.written, (name, length)


def test_padded_passes_have_one_shape(monkeypatch):
    """Whatever is drafted, every pass over a block has as many units, also those of the draft-free loop; a batch is
    refused, and so is a tree that does not fit."""
    target, shapes = golden("sdar")[0], set()
    plain = target.model.model.forward
    monkeypatch.setattr(
        target.model.model, "forward", lambda **inputs: (shapes.add(inputs["input_ids"].shape), plain(**inputs))[1]
    )
    prompt, decoder, target.units = random_prompt(5) % 90, dlm.Decoder(gen_len=24), 10
    dlm.generate(target, decoder, prompt)
    verify.speculate(target, decoder, prompt, partial(ddtree.confidence_tree, budget=8))
    assert shapes == {(1, 10 * L)}
    with pytest.raises(ValueError, match="one row"):
        target.forward([(target.mask_id,) * L] * 2, [0], None, {})
    with pytest.raises(ValueError, match="do not fit"):
        target.forward([(target.mask_id,) * L] * 11, [0] * 11, None, {})


@pytest.mark.parametrize("family", ("sdar", "llada", "dream"))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_where_texts_part(family, temperature):
    """A text that differs at new token i is reported with i and the margin of the step that wrote it, in any family."""
    target, prompt = golden(family)[0], random_prompt(13) % 90
    decoder = dlm.Decoder(gen_len=24, temperature=temperature)
    truth = dlm.generate(target, decoder, prompt)
    for at in range(0, len(truth.written), 3):
        other = dataclasses.replace(truth, written=truth.written[:at] + [-1] + truth.written[at + 1 :])
        found = bench.divergence({"target": target}, decoder, prompt, truth, other)
        assert found["position"] == at
        opening = family == "dream" and at % L == 0  # decided by the pass that opens the block, alone
        assert found["margin"] is None if opening else found["margin"] >= 0
