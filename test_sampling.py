"""Tests of sampling, paper section 6: the accelerated sampler follows the target's law, and writes
the draft-free text.

The law of tiny targets (tables of logits instead of a network) is enumerated whole, by rules, law
and confidence that are written down here and in test_decoder.py once more, and compared with what
the speculative loop writes under SEEDS seeds by a chi-square test. ALARM is the chance that a right
sampler is called wrong by one such test; a wrong one must be called wrong at STRICT. Seeds are
fixed, so that no result varies.

Left out: noise, law and confidence by hand (test_decoder.py); time, and how many passes sampling
takes (bench.py --temperature).

    python -m pytest test_sampling.py          # about a minute
"""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ddtree
import decoder as deciding
import dlm
import drafter as drafting
import targets
import tasks
import verify
from decoder import CONFIDENCES, RULES, Decoder
from test_decoder import section7, tempered
from test_exactness import (
    LENGTHS,
    VALUES,
    heaviest_child,
    methods,
    random_prompt,
    small_drafter,
    tiny_target,
    with_truth,
)

ALARM, STRICT = 1e-4, 1e-9
SEEDS = 400
EXAMPLE = [[0.9, 0.1], [0.6, 0.4]]  # section 6: two positions, whatever is decided


# -------------------------------------------------------------------------------- tables as targets


class TableTarget(dlm.Target):
    """A target that reads its logits from a table: random for every block and state, or the same in
    all states."""

    def __init__(self, block_size, tokens, seed=0, fixed=None):
        self.block_size, self.mask_id, self.stop_ids = block_size, tokens, frozenset()
        self.device, self.fixed, self.seed = torch.device("cpu"), fixed, seed
        self.pad_to, self.known = None, {}
        config = SimpleNamespace(max_position_embeddings=4 * block_size, vocab_size=tokens + 1)
        self.model = SimpleNamespace(config=config)

    def table(self, state, block):
        """log p [k, tokens + 1] of the masked positions of a state; blocks are counted from the
        prompt's one block on."""
        if (state, block) not in self.known:
            rng = np.random.default_rng([self.seed, block - 1, *state])
            logits = torch.from_numpy(rng.normal(0, 1.5, (self.block_size, self.mask_id + 1)))
            if self.fixed is not None:
                logits[:, :-1] = torch.tensor(self.fixed, dtype=torch.float64).log()
            logits[:, -1] = -torch.inf
            masked = [token == self.mask_id for token in state]
            self.known[state, block] = logits[masked].log_softmax(-1)
        return self.known[state, block]

    def forward(self, states, blocks, prefix, parents):
        rows = torch.cat([self.table(state, block) for state, block in zip(states, blocks)])
        masked = [i for i, t in enumerate(itertools.chain(*states)) if t == self.mask_id]
        counts = [state.count(self.mask_id) for state in states]
        states, blocks, size = torch.tensor(states), torch.tensor(blocks), rows.shape[1]
        return dlm.Pass(states, blocks, masked, counts, rows, lambda x: x.clone(), size, [])

    def prefill(self, ids):
        return None

    def extend(self, prefix, out, u):
        return None


def confidence_of(kind, p, token):
    """Section 6's confidence in a token of the distribution p."""
    first, second = sorted(p, reverse=True)[:2]
    return {
        "sampled": p[token], "distribution": first, "margin": first - second,
        "entropy": np.exp(sum(x * np.log(x) for x in p if x > 0)),
    }[kind]  # fmt: skip


def one_step(decoder, state, log_p):
    """{next state: probability}: every way of drawing a token at each masked position, each
    committed by the rule."""
    p = np.exp(log_p).tolist()
    laws = [tempered(row, decoder.temperature, decoder.top_k, decoder.top_p) for row in p]
    read = laws if decoder.tempered else p
    masked = [s for s, token in enumerate(state) if token == log_p.shape[1] - 1]
    out = Counter()
    for drawn in itertools.product(range(log_p.shape[1] - 1), repeat=len(masked)):
        score = [confidence_of(decoder.confidence, q, v) for q, v in zip(read, drawn)]
        score = torch.tensor(score, dtype=torch.float64)
        if decoder.precision == "bfloat16":
            score = score.bfloat16().double()
        if decoder.rule == "entropy":
            score = torch.tensor([sum(x * np.log(x) for x in q if x > 0) for q in read])
        now = section7(decoder.rule, decoder.value, dict(zip(masked, score.tolist())))
        token = {s: v for s, v in zip(masked, drawn) if s in now}
        after = tuple(token.get(s, t) for s, t in enumerate(state))
        out[after] += float(np.prod([law[v] for law, v in zip(laws, drawn)]))
    return out


def enumerate_law(target, decoder):
    """{text: probability}: the law of the released sampler, which draws anew in every pass."""
    texts = {(): 1.0}
    for block in range(1, 1 + decoder.gen_len // target.block_size):
        states = {(target.mask_id,) * target.block_size: 1.0}
        while any(target.mask_id in state for state in states):
            following = Counter()
            for state, p in states.items():
                if target.mask_id not in state:
                    following[state] += p
                    continue
                log_p = target.table(state, block).numpy()
                for after, q in one_step(decoder, state, log_p).items():
                    following[after] += p * q
            states = following
        texts = {text + state: p * q for text, p in texts.items() for state, q in states.items()}
    assert sum(texts.values()) == pytest.approx(1)
    return texts


def decode_many(target, decoder, draft, seeds=SEEDS, **options):
    """Counter of the texts of as many speculative decodes behind a prompt of one block."""
    prompt = torch.zeros(target.block_size, dtype=torch.int64)
    texts = Counter()
    for seed in range(seeds):
        result = verify.speculate(target, replace(decoder, seed=seed), prompt, draft, **options)
        texts[tuple(result.written)] += 1
    return texts


def chi_square(texts, law):
    """The chance of a deviation at least this large under `law`; texts expected less than five
    times are one class."""
    n, rare, statistic, classes = sum(texts.values()), [0, 0.0], 0.0, 0
    for text in set(law) | set(texts):
        expected = n * law.get(text, 0.0)
        if expected < 5:
            rare = [rare[0] + texts[text], rare[1] + expected]
            continue
        statistic, classes = statistic + (texts[text] - expected) ** 2 / expected, classes + 1
    if rare[0] or rare[1] > 1:
        statistic += (rare[0] - rare[1]) ** 2 / max(rare[1], 1e-3)
        classes += 1
    half = torch.tensor([(classes - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def draft_of(name):
    """A way of drafting with budget 6; SPOT's drafter has random weights and reads the noise."""
    return {
        "chain": partial(ddtree.chain, budget=6),
        "tree": partial(ddtree.confidence_tree, budget=6),
        "spot": partial(ddtree.spot, budget=6, drafter=small_drafter(32, noised=True)),
    }[name]


# ---------------------------------------------------------------------------- 1. small things first


def test_the_chi_square_test():
    """The law's own shares are likely, shares of another law are not, nor is what it rules out."""
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    assert chi_square(Counter({(0,): 500, (1,): 300, (2,): 200}), law) > 0.99
    assert chi_square(Counter({(0,): 390, (1,): 350, (2,): 260}), law) < STRICT
    assert chi_square(Counter({(0,): 500, (1,): 300, (2,): 190, (3,): 10}), law) < STRICT


def test_a_seed_is_one_text_and_seeds_differ():
    """The noise is a function of the seed: the same again, and others for other seeds."""
    target, prompt, texts = tiny_target(8, 3), random_prompt(13), []
    for seed in (0, 1, 2, 0):
        decoder = Decoder(gen_len=20, temperature=1.0, seed=seed)
        texts.append(tuple(dlm.generate(target, decoder, prompt).written))
    assert texts[0] == texts[3] and len(set(texts)) == 3


def test_candidates_are_what_will_be_drawn():
    """If the conditionals do not change, the foreseen token of every step is the one that is
    committed at that step."""
    target = TableTarget(3, 3, fixed=[[0.5, 0.3, 0.2]] * 3)
    for seed in range(30):
        decoder, prompt = Decoder(gen_len=3, temperature=1.0, seed=seed), torch.zeros(3).long()
        result = verify.speculate(target, decoder, prompt, partial(ddtree.chain, budget=3))
        # one by a blind pass; the last is never drafted
        assert result.accepted[1] == 1 and result.passes["denoise"] == 2


def test_the_noise_aware_drafter_reads_the_step():
    """617,601 parameters; its q changes with the noise of the step, the other drafter's does
    not."""
    torch.manual_seed(0)
    plain, reader = drafting.OrderDrafter().eval(), drafting.OrderDrafter(noised=True).eval()
    assert sum(p.numel() for p in reader.parameters()) == 617_601
    target, state = tiny_target(8), tuple(range(3)) + (39,) * 5
    log_probs = target.forward([state], [0], None, {}).unit(0)
    decided, q = np.array([[True, False, False, False, False]]), {}
    for seed in (0, 1):
        decoder = Decoder(temperature=1.0, seed=seed)
        stale = drafting.Stale(decoder, state, target.mask_id, 0, log_probs)
        for name, drafter in (("plain", plain), ("reader", reader)):
            q[name, seed] = drafter.order(stale)(decided)
    assert (q["plain", 0] == q["plain", 1]).all()
    assert not np.allclose(q["reader", 0], q["reader", 1])


def test_no_confidence_at_all():
    """Where all confidences are 0, the confidence tree takes the first positions as equally
    likely."""
    flat = torch.zeros(4, 9).log_softmax(-1)
    stale = drafting.Stale(Decoder(confidence="margin"), (9,) * 4, 9, 0, flat)
    q = ddtree.confidence_order(stale, 2)(np.zeros((1, 4), dtype=bool))
    assert q.tolist() == [[0.5, 0.5, 0, 0]]


# ------------------------------------------------------------------- 2. the same text, seed by seed

SETTINGS = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.0, "confidence": "distribution"},
    {"temperature": 1.5, "tempered": True},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "tempered": True},
    {"temperature": 1.0, "noise": "position"},
    {"temperature": 1.0, "confidence": "distribution", "precision": "float32"},
]


@pytest.mark.parametrize("rule", RULES)
def test_coupled_decoding_writes_the_draft_free_text(rule):
    """Token identity at every temperature, float64, for every way of drafting; uncoupled too: F is
    the same."""
    decodes = accepted = 0
    for i, setting in list(enumerate(SETTINGS))[list(RULES).index(rule) % 2 :: 2]:
        target, prompt = tiny_target(8, i), random_prompt(LENGTHS[i % len(LENGTHS)], i)
        decoder = Decoder(rule, VALUES[rule], gen_len=12, seed=i, **setting)
        truth, states = with_truth(target, decoder, prompt)
        assert dlm.generate(target, decoder, prompt, fused=False).written == truth.written
        drafts = methods((6, 12, 20)[i % 3], small_drafter(8, i, noised=True), states, rule, i)
        for name, draft in drafts.items():
            for matching in ("coupled", "uncoupled") if name == "spot" else ("coupled",):
                got = verify.speculate(target, decoder, prompt, draft, matching)
                assert (got.written, got.ids) == (truth.written, truth.ids), (name, setting)
                decodes, accepted = decodes + 1, accepted + sum(got.accepted)
    assert decodes * len(RULES) >= 200 and accepted > 0


@pytest.mark.parametrize("rule, confidence", [
    *zip(RULES, itertools.cycle(CONFIDENCES)), ("exact", "margin"), ("threshold", "entropy"),
])  # fmt: skip
def test_no_temperature_is_the_limit_of_little(rule, confidence):
    """T → 0 writes the text of T = 0, by the model's own softmax; T = 0 asks for no law, so nothing
    is divided."""
    for seed in range(4):
        target, prompt = tiny_target(8, seed), random_prompt(13, seed)
        cold = Decoder(rule, VALUES[rule], gen_len=11, confidence=confidence)
        little = replace(cold, temperature=1e-6)
        cold.law = None
        truth = dlm.generate(target, cold, prompt).written
        assert dlm.generate(target, little, prompt).written == truth
        draft = partial(ddtree.chain, budget=8)
        assert verify.speculate(target, little, prompt, draft).written == truth


def test_the_shipped_target_samples_the_same_text():
    """Coupled = draft-free for the shipped target, in float64, with the chain and a drafter that
    reads the noise."""
    target = targets.load("embedded", dtype=torch.float64)
    torch.manual_seed(0)
    reader = drafting.OrderDrafter(noised=True).eval()
    chain, spot = partial(ddtree.chain, budget=8), partial(ddtree.spot, budget=8, drafter=reader)
    prompt, texts = target.encode(tasks.problems("code", "test", 1)[0].prompt), []
    for temperature, confidence, draft in ((1.0, "sampled", chain), (2.0, "distribution", spot)):
        decoder = Decoder(gen_len=20, temperature=temperature, seed=1, confidence=confidence)
        texts.append(dlm.generate(target, decoder, prompt).written)
        assert verify.speculate(target, decoder, prompt, draft).written == texts[-1]
    assert texts[0] != texts[1]


# --------------------------------------------------------------------------------------- 3. the law

CASES = [  # block size, tokens, blocks, rule, value, T, confidence, other options
    (2, 2, 2, "exact", None, 1.0, "sampled", {}),
    (3, 3, 1, "exact", None, 0.5, "sampled", {}),
    (3, 2, 1, "exact", None, 2.0, "sampled", {"tempered": True}),
    (3, 2, 1, "exact", None, 1.0, "distribution", {}),
    (2, 4, 1, "exact", None, 2.0, "distribution", {"tempered": True, "precision": "float32"}),
    (2, 2, 2, "exact", None, 0.5, "distribution", {"noise": "position"}),
    (3, 3, 1, "exact", None, 2.0, "sampled", {"top_k": 2}),
    (2, 4, 1, "exact", None, 1.0, "sampled", {"top_p": 0.8, "tempered": True}),
    (3, 3, 1, "threshold", 0.6, 1.0, "sampled", {}),
    (3, 2, 1, "threshold", 0.7, 2.0, "distribution", {"tempered": True}),
    (3, 2, 1, "product", 0.3, 0.5, "sampled", {"precision": "float32"}),
    (3, 3, 1, "factor", 1.0, 1.0, "sampled", {}),
    (3, 2, 1, "entropy", 0.4, 1.0, "sampled", {}),
    (2, 2, 2, "entropy", 0.4, 2.0, "distribution", {"tempered": True}),
    (3, 3, 1, "exact", None, 1.0, "margin", {}),
    (3, 2, 1, "threshold", 0.6, 1.0, "entropy", {"tempered": True}),
]


def law_case(case):
    """(target, decoder, its enumerated law) of one of CASES."""
    block_size, tokens, blocks, rule, value, temperature, confidence, others = case
    target = TableTarget(block_size, tokens, seed=CASES.index(case))
    decoder = Decoder(
        rule, value, gen_len=blocks * block_size, temperature=temperature, confidence=confidence,
        **others,
    )  # fmt: skip
    return target, decoder, enumerate_law(target, decoder)


@pytest.mark.parametrize(
    "case, matching",
    [(case, "coupled") for case in CASES] + [(case, "uncoupled") for case in CASES[::5]],
    ids=lambda part: part if type(part) is str else "-".join(map(str, part)),
)
def test_the_speculative_loop_follows_the_law(case, matching):
    """Over the noise, the texts of coupled and of uncoupled matching have the law of the released
    sampler."""
    target, decoder, law = law_case(case)
    draft = draft_of(("chain", "tree", "spot")[CASES.index(case) % 3])
    assert chi_square(decode_many(target, decoder, draft, matching=matching), law) > ALARM


@pytest.mark.parametrize("rule, value, confidence", [
    ("exact", None, "sampled"), ("threshold", 0.7, "distribution"),
    ("exact", None, "margin"), ("threshold", 0.7, "entropy"),
])  # fmt: skip
def test_greedy_matching_does_not(rule, value, confidence):
    """Accepting while the draft equals the likeliest token prefers that token."""
    target = TableTarget(3, 2, fixed=[[0.7, 0.3], [0.65, 0.35], [0.6, 0.4]])
    decoder = Decoder(rule, value, gen_len=3, temperature=2.0, confidence=confidence)
    law = enumerate_law(target, decoder)
    if confidence == "sampled":
        assert chi_square(decode_many(target, decoder, draft_of("tree")), law) > ALARM
    greedy = decode_many(target, decoder, draft_of("tree"), 2 * SEEDS, matching="greedy")
    assert chi_square(greedy, law) < STRICT


def test_noise_by_position_changes_the_law_of_a_sampled_confidence():
    """Section 6's example: fresh noise gives P(A = 0) = .99, a table indexed by position .90."""
    target = TableTarget(2, 2, fixed=EXAMPLE)
    for noise, right in (("step", 0.99), ("position", 0.90)):
        decoder = Decoder(gen_len=2, temperature=1.0, noise=noise)
        law = enumerate_law(target, decoder)
        assert sum(p for text, p in law.items() if text[0] == 0) == pytest.approx(0.99)
        texts = decode_many(target, decoder, draft_of("spot"))
        share = sum(n for text, n in texts.items() if text[0] == 0) / SEEDS
        assert abs(share - right) < 4 * (right * (1 - right) / SEEDS) ** 0.5
        chance = chi_square(texts, law)
        assert chance > ALARM if noise == "step" else chance < STRICT


def right_position(states, following):
    """Wrong: takes a node for F(y) if it decides the same positions, whatever the tokens."""
    path, mask = [0], max(map(max, states))
    while True:
        at, after = states[path[-1]], following[path[-1]]
        shape = [t == mask for t in after]
        step = [
            u for u, state in enumerate(states)
            if u not in path and [t == mask for t in state] == shape
            and all(a in (mask, b) for a, b in zip(at, state))
        ]  # fmt: skip
        if not step or after == at:
            return path
        path.append(step[0])


def test_planted_faults_are_found(monkeypatch):
    """An unchecked child, an unchecked token, and noise that two blocks share: each fails the same
    test."""
    cases = (CASES[6], heaviest_child), (CASES[1], right_position)
    for case, walk in cases:
        target, decoder, law = law_case(case)
        monkeypatch.setattr("test_exactness.MASK", target.mask_id)
        texts = decode_many(target, decoder, draft_of("tree"), walk=walk)
        assert chi_square(texts, law) < STRICT
    # two blocks of two positions, all tokens alike: the second repeats the first
    target, decoder = TableTarget(2, 2, fixed=[[0.5, 0.5]] * 2), Decoder(gen_len=4, temperature=1.0)
    law, gumbel = enumerate_law(target, decoder), deciding.gumbel

    def shared(seed, block, *others):
        return gumbel(seed, torch.zeros_like(block), *others)

    monkeypatch.setattr(deciding, "gumbel", shared)
    assert chi_square(decode_many(target, decoder, draft_of("tree")), law) < STRICT
