"""Tests of sampling, paper section 6: the accelerated sampler follows the target's law, and writes the draft-free text.

The law of tiny targets (tables of logits instead of a network) is enumerated whole, and compared with what the
speculative loop writes under SEEDS seeds by a chi-square test. ALARM is the chance that a right sampler is called wrong
by one such test; a wrong one must be called wrong at STRICT. Seeds are fixed, so that no result varies.

Left out: time, and how many passes sampling takes (bench.py --temperature).

    python -m pytest test_sampling.py
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
import decoder as decoder_file
import dlm
import drafter as drafting
import targets
import tasks
import verify
from test_exactness import (
    LENGTHS,
    VALUES,
    heaviest_child,
    methods,
    one_sentence,
    random_prompt,
    tiny_target,
    with_truth,
)

ALARM, STRICT = 1e-4, 1e-9
SEEDS = 1000
EXAMPLE = [[0.9, 0.1], [0.6, 0.4]]  # section 6: two positions, whatever is decided


# ------------------------------------------------------------------------------------------------ tables as targets


class TableTarget(dlm.Target):
    """A target that reads its logits from a table: random for every block and state, or the same in all states."""

    def __init__(self, block_size, tokens, seed=0, fixed=None):
        self.block_size, self.mask_id, self.stop_ids = block_size, tokens, frozenset()
        self.device, self.fixed, self.seed = torch.device("cpu"), fixed, seed
        self.pad_to = None
        config = SimpleNamespace(max_position_embeddings=4 * block_size, vocab_size=tokens + 1)
        self.model = SimpleNamespace(config=config)

    def table(self, state, block):
        """Logits [k, tokens + 1] of the masked positions of a state."""
        rng = np.random.default_rng([self.seed, block, *state])
        logits = torch.from_numpy(rng.normal(0, 1.5, (self.block_size, self.mask_id + 1)))
        if self.fixed is not None:
            logits[:, :-1] = torch.tensor(self.fixed, dtype=torch.float64).log()
        logits[:, -1] = -torch.inf
        return logits[[token == self.mask_id for token in state]].log_softmax(-1)

    def forward(self, states, blocks, prefix, parents):
        rows = torch.cat([self.table(state, block) for state, block in zip(states, blocks)])
        where = [i for i, token in enumerate(itertools.chain(*states)) if token == self.mask_id]
        counts = [state.count(self.mask_id) for state in states]
        states, blocks = torch.tensor(states), torch.tensor(blocks)
        return dlm.Pass(states, blocks, where, counts, rows, lambda x: x.clone(), rows.shape[1], [])

    def prefill(self, ids):
        return None

    def extend(self, prefix, out, u):
        return None


def filtered(p, top_k, top_p):
    """The top_k likeliest of p, of these the likeliest until their sum is over top_p, scaled to sum 1."""
    p = p * (p >= np.sort(p)[-(top_k or len(p))])
    total, kept = 0.0, np.zeros_like(p)
    for v in np.argsort(-p, kind="stable"):
        if total / p.sum() <= top_p:
            kept[v] = p[v]
        total += p[v]
    return kept / kept.sum()


def chosen(rule, value, confidence, entropy):
    """Section 7's table, written down once more: the places that a rule commits, of k masked
    positions with these confidences and entropies (lists). At least one; ties to the lowest."""
    k = len(confidence)
    by = [-h for h in entropy] if rule == "entropy" else confidence
    order = sorted(range(k), key=lambda s: (-by[s], s))
    c = [confidence[s] for s in order]
    h = [entropy[s] for s in order]
    allowed = {
        "exact": lambda n: n == 1,
        "threshold": lambda n: c[n - 1] > value,
        "product": lambda n: np.prod(c[:n]) >= value,
        "factor": lambda n: (n + 1) * (1 - c[n - 1]) <= value,
        "entropy": lambda n: sum(h[:n]) - max(h[:n]) <= value,
    }[rule]
    return order[: max([1] + [n for n in range(1, k + 1) if allowed(n)])]


def one_step(decoder, state, logits):
    """{next state: probability}: every way of drawing a token at each masked position, each committed by the rule."""
    softmax = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in logits]
    hot = [np.exp((row - row.max()) / decoder.temperature) for row in logits]
    laws = [filtered(row / row.sum(), decoder.top_k, decoder.top_p) for row in hot]
    read = laws if decoder.tempered else softmax
    masked = [s for s, token in enumerate(state) if token == logits.shape[1] - 1]
    entropy, out = [-sum(x * np.log(x) for x in p if x > 0) for p in read], Counter()
    for drawn in itertools.product(range(logits.shape[1] - 1), repeat=len(masked)):
        sampled = decoder.confidence == "sampled"
        confidence = torch.tensor([p[v] if sampled else p.max() for v, p in zip(drawn, read)])
        if decoder.precision == "bfloat16":
            confidence = confidence.bfloat16().double()
        now = chosen(decoder.rule, decoder.value, confidence.tolist(), entropy)
        token = {masked[place]: drawn[place] for place in now}
        after = tuple(token.get(s, t) for s, t in enumerate(state))
        out[after] += float(np.prod([law[v] for v, law in zip(drawn, laws)]))
    return out


def enumerate_law(target, decoder):
    """{text: probability}: the law of the released sampler, which draws anew in every pass. Section 6."""
    texts = {(): 1.0}
    for block in range(decoder.gen_len // target.block_size):
        states = {(target.mask_id,) * target.block_size: 1.0}
        while any(target.mask_id in state for state in states):
            following = Counter()
            for state, p in states.items():
                if target.mask_id not in state:
                    following[state] += p
                    continue
                for after, q in one_step(decoder, state, target.table(state, block).numpy()).items():
                    following[after] += p * q
            states = following
        texts = {text + state: p * q for text, p in texts.items() for state, q in states.items()}
    assert sum(texts.values()) == pytest.approx(1)
    return texts


def decode_many(target, decoder, draft, seeds=SEEDS, **options):
    """Counter of the texts of `seeds` speculative decodes from an empty first block (one token of a block before)."""
    prompt = torch.zeros(target.block_size, dtype=torch.int64)
    texts = Counter()
    for seed in range(seeds):
        result = verify.speculate(target, replace(decoder, seed=seed), prompt, draft, **options)
        texts[tuple(result.written)] += 1
    return texts


def chi_square(texts, law):
    """The chance of a deviation at least this large under `law`; texts expected less than five times are one class."""
    n, rare, statistic, classes = sum(texts.values()), [0, 0.0], 0.0, 0
    for text in set(law) | set(texts):
        expected = n * law.get(text, 0.0)
        if expected < 5:
            rare = [rare[0] + texts[text], rare[1] + expected]
            continue
        statistic, classes = statistic + (texts[text] - expected) ** 2 / expected, classes + 1
    if rare[0] or rare[1] > 1:
        statistic, classes = statistic + (rare[0] - rare[1]) ** 2 / max(rare[1], 1e-3), classes + 1
    half = torch.tensor([(classes - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def shifted(law_target):
    """The target whose blocks are counted from the prompt's one block on, as `enumerate_law` counts them."""
    table = law_target.table
    law_target.table = lambda state, block: table(state, block - 1)
    return law_target


def draft_of(name, rule="exact"):
    """A way of drafting with budget 6; SPOT's drafter has random weights and reads the noise."""
    torch.manual_seed(0)
    reader = drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16, noised=True).eval()
    return {
        "chain": partial(ddtree.chain, budget=6),
        "tree": partial(ddtree.confidence_tree, budget=6),
        "spot": partial(ddtree.spot, budget=6, drafter=reader),
    }[name]


# ---------------------------------------------------------------------------------------------------- 1. the law

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
]


def law_case(case):
    """(target, decoder, its enumerated law) of one of CASES."""
    block_size, tokens, blocks, rule, value, temperature, confidence, others = case
    target = TableTarget(block_size, tokens, seed=CASES.index(case))
    decoder = decoder_file.Decoder(
        rule, value, gen_len=blocks * block_size, temperature=temperature, confidence=confidence, **others
    )
    return shifted(target), decoder, enumerate_law(TableTarget(block_size, tokens, seed=CASES.index(case)), decoder)


@pytest.mark.parametrize(
    "case, matching",
    [(case, "coupled") for case in CASES] + [(case, "uncoupled") for case in CASES[::2]],
    ids=lambda part: part if type(part) is str else "-".join(map(str, part)),
)
def test_the_speculative_loop_follows_the_law(case, matching):
    """Over the noise, the texts of coupled and of uncoupled matching have the law of the released sampler."""
    target, decoder, law = law_case(case)
    draft = draft_of(("chain", "tree", "spot")[CASES.index(case) % 3])
    assert chi_square(decode_many(target, decoder, draft, matching=matching), law) > ALARM


@pytest.mark.parametrize("confidence", decoder_file.CONFIDENCES)
@pytest.mark.parametrize("rule, value", [("exact", None), ("threshold", 0.7)])
def test_greedy_matching_does_not(rule, value, confidence):
    """Accepting while the draft equals the likeliest token prefers that token."""
    table = [[0.7, 0.3], [0.65, 0.35], [0.6, 0.4]]
    target = TableTarget(3, 2, fixed=table)
    decoder = decoder_file.Decoder(rule, value, gen_len=6, temperature=2.0, confidence=confidence)
    law = enumerate_law(target, decoder)
    assert chi_square(decode_many(target, decoder, draft_of("tree")), law) > ALARM
    assert chi_square(decode_many(target, decoder, draft_of("tree"), matching="greedy"), law) < STRICT


def test_noise_by_position_changes_the_law_of_a_sampled_confidence():
    """Section 6's example: fresh noise gives P(A = 0) = .99, a table indexed by position .90."""
    target = TableTarget(2, 2, fixed=EXAMPLE)
    for noise, right in (("step", 0.99), ("position", 0.90)):
        decoder = decoder_file.Decoder(gen_len=2, temperature=1.0, noise=noise)
        law = enumerate_law(target, decoder)
        assert sum(p for text, p in law.items() if text[0] == 0) == pytest.approx(0.99)
        texts = decode_many(target, decoder, draft_of("spot"))
        share = sum(n for text, n in texts.items() if text[0] == 0) / SEEDS
        assert abs(share - right) < 4 * (right * (1 - right) / SEEDS) ** 0.5
        assert chi_square(texts, law) > ALARM if noise == "step" else chi_square(texts, law) < STRICT


def right_position(states, following):
    """Wrong: takes a node for F(y) if it decides the same positions, whatever the tokens."""
    path = [0]
    while True:
        mask = max(map(max, states))
        shape = [t == mask for t in following[path[-1]]]
        step = [
            u
            for u, state in enumerate(states)
            if u not in path
            and [t == mask for t in state] == shape
            and all(a in (mask, b) for a, b in zip(states[path[-1]], state))
        ]
        if not step or following[path[-1]] == states[path[-1]]:
            return path
        path.append(step[0])


def test_planted_faults_are_found(monkeypatch):
    """An unchecked child, an unchecked token, and noise that two blocks share: each fails the same test."""
    for case, match in ((CASES[0], heaviest_child), (CASES[6], heaviest_child), (CASES[1], right_position)):
        target, decoder, law = law_case(case)
        monkeypatch.setattr("test_exactness.MASK", target.mask_id)
        assert chi_square(decode_many(target, decoder, draft_of("tree"), walk=match), law) < STRICT
    target, decoder, law = law_case(CASES[0])
    gumbel = decoder_file.gumbel
    monkeypatch.setattr(decoder_file, "gumbel", lambda seed, block, *others: gumbel(seed, torch.zeros_like(block), *others))
    assert chi_square(decode_many(target, decoder, draft_of("tree")), law) < STRICT


# -------------------------------------------------------------------------------------- 2. the same text, seed by seed


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


@pytest.mark.parametrize("rule", decoder_file.RULES)
def test_coupled_decoding_writes_the_draft_free_text(rule):
    """Token identity at every temperature, float64, for every way of drafting; uncoupled too: F is the same."""
    decodes = accepted = 0
    for i, setting in enumerate(SETTINGS):
        target = tiny_target(8, i)
        decoder = decoder_file.Decoder(rule, VALUES[rule], gen_len=20, seed=i, **({"precision": "bfloat16"} | setting))
        torch.manual_seed(i)
        reader = drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16, block_size=8, noised=True).eval()
        prompt = random_prompt(LENGTHS[i % len(LENGTHS)], i)
        truth, states = with_truth(target, decoder, prompt)
        assert dlm.generate(target, decoder, prompt, fused=False).written == truth.written
        for name, draft in methods((6, 12, 20)[i % 3], reader, states, rule, i).items():
            for matching in ("coupled", "uncoupled") if name == "spot" else ("coupled",):
                got = verify.speculate(target, decoder, prompt, draft, matching)
                assert (got.written, got.ids) == (truth.written, truth.ids), (name, setting)
                decodes, accepted = decodes + 1, accepted + sum(got.accepted)
    assert decodes * len(decoder_file.RULES) >= 300 and accepted > 0


def test_the_shipped_target_samples_the_same_text():
    """Coupled = draft-free for the shipped target, in float64, with the chain and a drafter that reads the noise."""
    target = targets.load("embedded", dtype=torch.float64)
    torch.manual_seed(0)
    drafts = [partial(ddtree.chain, budget=8), partial(ddtree.spot, budget=8, drafter=drafting.OrderDrafter().eval())]
    for seed, problem in enumerate(tasks.problems("code", "test", 2)):
        prompt = target.encode(problem.prompt)
        texts = []
        for temperature, confidence in ((1.0, "sampled"), (2.0, "distribution")):
            decoder = decoder_file.Decoder(gen_len=64, temperature=temperature, seed=seed, confidence=confidence)
            texts.append(dlm.generate(target, decoder, prompt).written)
            assert all(verify.speculate(target, decoder, prompt, draft).written == texts[-1] for draft in drafts)
        assert texts[0] != texts[1]


def test_a_seed_is_one_text_and_seeds_differ():
    """The noise is a function of the seed: the same again, and others for other seeds."""
    target, prompt = tiny_target(8, 3), random_prompt(13)
    texts = [
        tuple(dlm.generate(target, decoder_file.Decoder(gen_len=20, temperature=1.0, seed=seed), prompt).written)
        for seed in (0, 1, 2, 0)
    ]
    assert texts[0] == texts[3] and len(set(texts)) == 3


@pytest.mark.parametrize("confidence", decoder_file.CONFIDENCES)
@pytest.mark.parametrize("rule", decoder_file.RULES)
def test_no_temperature_is_the_limit_of_little(rule, confidence):
    """T → 0 writes the text of T = 0, by the model's own softmax; T = 0 asks for no law, so nothing is divided."""
    for seed in range(4):
        target, prompt = tiny_target(8, seed), random_prompt(13, seed)
        cold = decoder_file.Decoder(rule, VALUES[rule], gen_len=20, confidence=confidence)
        cold.law = None
        little = decoder_file.Decoder(rule, VALUES[rule], gen_len=20, confidence=confidence, temperature=1e-6)
        truth = dlm.generate(target, cold, prompt).written
        assert dlm.generate(target, little, prompt).written == truth
        assert verify.speculate(target, little, prompt, partial(ddtree.chain, budget=8)).written == truth


# --------------------------------------------------------------------------------------------- 3. noise and law by hand


def test_scramble_is_splitmix64():
    """The published generator's first three outputs from seed 0 (Steele, Lea and Flood 2014)."""
    right = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    states = torch.tensor([0, decoder_file.WEYL, 2 * decoder_file.WEYL - (0 if 2 * decoder_file.WEYL >= -(2**63) else -(2**64))])
    assert [value % 2**64 for value in decoder_file.scramble(states).tolist()] == list(right)


def test_gumbel_noise():
    """Mean .5772 and variance π²/6 within 5 standard errors; no two arguments share noise; rows are independent."""
    n, size = 400, 500
    block, step, position = (torch.arange(n) // 100, torch.arange(n) // 10 % 10, torch.arange(n) % 10)
    noise = decoder_file.gumbel(7, block, step, position, size)
    assert noise.dtype == torch.float64 and noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772157) < 5 * (np.pi**2 / 6 / (n * size)) ** 0.5
    assert abs(noise.var().item() - np.pi**2 / 6) < 5 * (4.4 * (np.pi**2 / 6) ** 2 / (n * size)) ** 0.5
    assert len({tuple(row) for row in noise[:, :2].tolist()}) == n
    assert len(set(noise[:, 0].tolist()) | set(noise[:, 1].tolist())) == 2 * n
    one = slice(123, 124)
    assert (decoder_file.gumbel(7, block[one], step[one], position[one], size) == noise[one]).all()
    assert not (decoder_file.gumbel(8, block, step, position, size) == noise).any()
    assert abs(float(torch.corrcoef(noise[:2])[0, 1])) < 0.2  # neighbouring rows: 5 standard errors are .22


def test_law_by_hand():
    """softmax(logits / T), then top-k, then the likeliest until their sum is over top-p."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    for options, right in (
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 1.0, "top_p": 1e-6}, [1, 0, 0, 0]),
    ):
        assert decoder_file.Decoder(**options).law(logits).exp()[0].tolist() == pytest.approx(right)


def test_confidence_by_hand():
    """Of the token drawn or of the likeliest; from the model's own softmax or from the law."""
    logits, drawn = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log(), torch.tensor([1])
    for options, right in (
        ({}, 0.3),
        ({"confidence": "distribution"}, 0.5),
        ({"tempered": True}, 9 / 38),
        ({"tempered": True, "top_k": 2}, 9 / 34),
        ({"tempered": True, "confidence": "distribution"}, 25 / 38),
    ):
        decoder = decoder_file.Decoder(temperature=0.5, precision="float32", **options)
        assert decoder.confidence_in(drawn, logits).item() == pytest.approx(right)


def test_candidates_are_what_will_be_drawn():
    """If the conditionals do not change, the foreseen token of every step is the one that is committed at that step."""
    target = TableTarget(3, 3, fixed=[[0.5, 0.3, 0.2]] * 3)
    for seed in range(30):
        decoder = decoder_file.Decoder(gen_len=3, temperature=1.0, seed=seed)
        prompt = torch.zeros(3, dtype=torch.int64)
        result = verify.speculate(target, decoder, prompt, partial(ddtree.chain, budget=3))
        assert result.accepted[1] == 1 and result.passes["denoise"] == 2  # one by blind pass, the last is never drafted


def test_the_noise_aware_drafter_reads_the_step():
    """617,601 parameters; its q changes with the noise of the step, the other drafter's does not."""
    torch.manual_seed(0)
    plain, reader = drafting.OrderDrafter().eval(), drafting.OrderDrafter(noised=True).eval()
    assert sum(p.numel() for p in reader.parameters()) == 617_601
    target = tiny_target(8)
    state = tuple(range(3)) + (39,) * 5
    logits = target.forward([state], [0], None, {}).unit(0)
    decided = np.array([[True, False, False, False, False]])
    q = {
        (name, seed): drafter.order(
            drafting.Stale(decoder_file.Decoder(temperature=1.0, seed=seed), state, target.mask_id, 0, logits)
        )(decided)
        for name, drafter in (("plain", plain), ("reader", reader))
        for seed in (0, 1)
    }
    assert (q["plain", 0] == q["plain", 1]).all() and not np.allclose(q["reader", 0], q["reader", 1])


@pytest.mark.parametrize(
    "options, named",
    [({"temperature": t}, "temperature") for t in (-1.0, float("nan"), float("inf"), 1e9, 1e-300)]
    + [
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
    ]
    + [({"confidence": "best"}, "best.*sampled"), ({"noise": "none"}, "none.*step")],
)
def test_absurd_sampling_is_refused(options, named):
    """What no sampler can do is refused in one sentence."""
    with pytest.raises(ValueError, match=named) as error:
        decoder_file.Decoder(**options)
    assert one_sentence(error)


def test_no_confidence_at_all():
    """Where all confidences are 0, the confidence tree takes the first positions as equally likely."""
    stale = drafting.Stale(decoder_file.Decoder(confidence="margin"), (9,) * 4, 9, 0, torch.zeros(4, 9).log_softmax(-1))
    q = ddtree.confidence_order(stale, 2)(np.zeros((1, 4), dtype=bool))
    assert q.tolist() == [[0.5, 0.5, 0, 0]]


def test_unknown_matchings_are_refused():
    with pytest.raises(ValueError, match="best.*coupled") as error:
        verify.decoders_of("best", decoder_file.Decoder())
    assert one_sentence(error)
