"""Tests of decoder.py by hand: commit rules at and beside equality, quotas, noise, the law, scores,
F.

Every right value is worked out here: `section7` is the table of commit rules written down once
more, `noise` the hash in Python's whole numbers, `tempered` the law in plain floats. Scores are
eighths, so that sums and products of them are exact and equality is equality.

Left out: the law of whole texts (test_sampling.py), texts of whole models (test_exactness.py).

    python -m pytest test_decoder.py          # seconds
"""

import dataclasses
import doctest
import itertools
import math
import random

import numpy as np
import pytest
import torch

import decoder as deciding
import dlm
import drafter as drafting
import full
import verify
from decoder import Decoder, commits

MASK = 9  # of the states made here
VALUES = {  # thresholds under which random scores commit sets
    "exact": None, "sequential": None, "threshold": 0.5, "product": 0.25, "factor": 1.5,
    "entropy": 1.0,
}  # fmt: skip


def one_sentence(error):
    """The message of a raised error is one line of plain words that says what to do, not a
    traceback or a list."""
    text = str(error.value)
    return "\n" not in text and 20 < len(text) < 400 and ": " in text


def test_worked_examples():
    """The examples in the docstrings of the core are true."""
    for module, least in ((deciding, 2), (dlm, 1), (full, 0), (verify, 1)):
        failed, tried = doctest.testmod(module)
        assert failed == 0 and tried >= least, module


# ---------------------------------------------------------------------------------- 1. commit rules


def section7(rule, value, scores):
    """The positions that a rule commits, by section 7's table; scores: {masked position: score}.

    The score is the confidence c, for `entropy` −H; `exact` and `sequential` take the best one.
    """
    ranked = sorted(scores, key=lambda s: (-scores[s], s))
    c = [scores[s] for s in ranked]
    if rule == "threshold":
        return {s for s in scores if scores[s] > value} | set(ranked[:1])
    allowed = {
        "exact": lambda n: n == 1,
        "sequential": lambda n: n == 1,
        "product": lambda n: math.prod(c[:n]) >= value,
        "factor": lambda n: (n + 1) * (1 - c[n - 1]) <= value,
        "entropy": lambda n: sum(-x for x in c[:n]) - max(-x for x in c[:n]) <= value,
    }[rule]
    largest = max([n for n in range(1, len(c) + 1) if allowed(n)], default=1)
    return set(ranked[:largest])


def chosen(rule, value, scores, masked=None, quota=1):
    """Positions that `commits` says of one row of scores."""
    masked = [True] * len(scores) if masked is None else masked
    score = torch.tensor(scores, dtype=torch.float64)
    return commits(rule, value, score, torch.tensor(masked), quota).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("rule, value, scores, right", [
    ("exact", None, [0.5, 0.75, 0.75, 0.25], [1]),  # a tie goes to the lowest position
    ("exact", None, [0.25, 0.25, 0.25, 0.25], [0]),
    ("sequential", None, [0.0, 0.0, 0.0], [0]),
    ("threshold", 0.75, [0.5, 0.75, 0.875, 0.8125], [2, 3]),  # .75 is not over .75
    ("threshold", 0.75, [0.75, 0.5, 0.75], [0]),  # nothing is: the most confident, lowest
    ("threshold", 0.75, [0.7500001, 0.5, 0.75], [0]),
    ("threshold", 0.749999, [0.75, 0.5, 0.75], [0, 2]),
    ("threshold", 0.0, [0.0, 0.5, 0.25], [1, 2]),
    ("product", 0.25, [0.5, 0.125, 0.5], [0, 2]),  # .5 · .5 = .25 is enough
    ("product", 0.2500001, [0.5, 0.125, 0.5], [0]),
    ("product", 0.03125, [0.5, 0.125, 0.5], [0, 1, 2]),  # .5 · .5 · .125
    ("product", 0.0312501, [0.5, 0.125, 0.5], [0, 2]),
    ("product", 0.875, [0.5, 0.125, 0.5], [0]),  # not even one: one commits all the same
    ("product", 0.5, [1.0, 0.5, 1.0], [0, 1, 2]),
    ("factor", 0.5, [0.75, 0.5, 0.75], [0]),  # 2 · .25 = .5 allowed, 3 · .25 = .75 not
    ("factor", 0.75, [0.75, 0.5, 0.75], [0, 2]),
    ("factor", 0.7499, [0.75, 0.5, 0.75], [0]),
    ("factor", 2.0, [0.75, 0.5, 0.75], [0, 1, 2]),  # 4 · .5 = 2
    ("factor", 1.9999, [0.75, 0.5, 0.75], [0, 2]),
    ("factor", 0.0, [1.0, 0.5, 1.0, 0.875], [0, 2]),
    ("factor", 0.1, [0.75, 0.5, 0.75], [0]),
    ("entropy", 0.25, [-0.5, -0.25, -0.75], [0, 1]),  # Σ − max = 0, .25, .75
    ("entropy", 0.2499, [-0.5, -0.25, -0.75], [1]),
    ("entropy", 0.75, [-0.5, -0.25, -0.75], [0, 1, 2]),
    ("entropy", 0.7499, [-0.5, -0.25, -0.75], [0, 1]),
    ("entropy", 0.0, [-0.5, 0.0, 0.0, -0.25], [1, 2, 3]),  # Σ − max = 0, 0, 0, .25
    ("entropy", 0.0, [-0.25, -0.25, -0.5], [0]),
])  # fmt: skip
def test_rules_at_and_beside_equality(rule, value, scores, right):
    """`exact` and ties; threshold is strict, product, factor and entropy are not."""
    table = section7(rule, value, dict(enumerate(scores)))
    assert chosen(rule, value, scores) == right == sorted(table)


@pytest.mark.parametrize("rule, value, right", [
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
])  # fmt: skip
def test_rules_on_one_row(rule, value, right):
    """Section 7's table on one row of six positions; the reasons stand beside each case."""
    score = [0.5, 0.95, 0.92, 0.99, 0.95, 0.1]
    if rule == "entropy":
        score = [-0.05, -0.02, -0.3, 0.0, -0.02, -0.9]
    assert chosen(rule, value, score, [True, True, True, False, True, True]) == right


@pytest.mark.parametrize("rule", deciding.RULES)
def test_rules_are_the_tables(rule):
    """On 400 rows of eighths, with many ties and any number of decided positions, at every value
    in sixteenths, and with quotas: what the table says, and the best ones up to the quota."""
    rng = random.Random(rule)
    for _ in range(400):
        scores = [rng.randrange(9) / 8 for _ in range(6)]
        if rule == "entropy":
            scores = [-x for x in scores]
        if rule == "sequential":
            scores = [0.0] * 6
        masked = [rng.random() < 0.7 for _ in range(6)]
        value, quota = rng.randrange(33) / 16, rng.choice((1, 1, 2, 3, 7))
        left = {s: score for s, score in enumerate(scores) if masked[s]}
        right = section7(rule, value, left) if left else set()
        right |= set(sorted(left, key=lambda s: (-left[s], s))[:quota])
        assert chosen(rule, value, scores, masked, quota) == sorted(right), (scores, masked, value)


@pytest.mark.parametrize("junk", (math.inf, 1.0, 0.0, -1.0, -math.inf, math.nan))
@pytest.mark.parametrize("rule", deciding.RULES)
def test_decided_positions_are_neither_read_nor_committed(rule, junk):
    """None, one, two or three decided positions, whatever their score: the rest is chosen as if
    it stood alone, and where nothing is masked nothing commits."""
    scores = {0: 0.5, 2: 0.375, 5: 0.875, 6: 0.5}
    sign = -1 if rule == "entropy" else 1
    row = [sign * scores.get(s, junk) for s in range(8)]
    values = (0.0, 0.125, 0.25, 0.4375, 0.5, 0.9, 1.5, 2.0)
    for value, quota in itertools.product(values, (1, 3, 9)):
        for count in range(5):  # of the masked ones
            left = {s: sign * scores[s] for s in list(scores)[:count]}
            right = section7(rule, value, left) if left else set()
            right |= set(sorted(left, key=lambda s: (-left[s], s))[:quota])
            assert chosen(rule, value, row, [s in left for s in range(8)], quota) == sorted(right)


@pytest.mark.parametrize("rule", deciding.RULES)
def test_commits_of_a_batch_are_those_of_its_rows(rule):
    """Rows are independent, commit masked positions only, and at least one wherever a mask is
    left; a quota may differ by row."""
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(50, 8, generator=generator, dtype=torch.float64).mul(8).round() / 8
    score = -score if rule == "entropy" else score
    masked = torch.rand(50, 8, generator=generator) < torch.linspace(0, 1, 50)[:, None]
    assert not masked[0].any() and masked[-1].all()
    batch = commits(rule, VALUES[rule], score, masked)
    alone = [commits(rule, VALUES[rule], *row) for row in zip(score, masked)]
    assert batch.equal(torch.stack(alone))
    assert not (batch & ~masked).any() and batch.any(1).equal(masked.any(1))
    quota = torch.arange(50)[:, None] % 4 + 1
    batch = commits(rule, VALUES[rule], score, masked, quota)
    rows = zip(score, masked, quota.flatten().tolist())
    alone = [commits(rule, VALUES[rule], *row) for row in rows]
    assert batch.equal(torch.stack(alone))


def test_a_rule_ends_at_its_first_failure():
    """`prefix`: where a condition fails for n, it fails for what follows, whatever it says."""
    chooses = deciding.prefix(lambda c, n, value: n != 2)
    score, masked = torch.tensor([0.5, 0.25, 0.75]), torch.tensor([True] * 3)
    assert chooses(score, masked, None).tolist() == [False, False, True]
    assert chooses(score, ~masked, None).tolist() == [False] * 3
    everything = deciding.prefix(lambda c, n, value: c == c)
    two = torch.tensor([True, False, True])
    assert everything(score, two, None).equal(two)


def test_a_rule_need_be_no_prefix(monkeypatch):
    """A rule may choose any set; the best position goes with it."""
    rule = deciding.Rule(lambda score, masked, value: score < value, 0.5)
    monkeypatch.setitem(deciding.RULES, "low", rule)
    assert chosen("low", 0.5, [0.75, 0.25, 0.625, 0.375], [True, True, True, False]) == [0, 1]
    assert Decoder("low").value == 0.5


def test_commit_order_by_hand():
    """Falling score, ties to the lowest position, decided positions last, as −inf."""
    score = torch.tensor([0.3, 0.7, 0.9, 0.7])
    order, ranked = deciding.commit_order(score, torch.tensor([True, True, False, True]))
    assert order.tolist() == [1, 3, 0, 2]
    assert ranked[:3].tolist() == pytest.approx([0.7, 0.7, 0.3]) and ranked[3] == -math.inf
    ties, masked = torch.zeros(100), torch.arange(100) % 3 > 0  # more than an unstable sort keeps
    right = [s for s in range(100) if s % 3] + [s for s in range(100) if s % 3 == 0]
    assert deciding.commit_order(ties, masked)[0].tolist() == right


def test_defaults():
    """Default thresholds and scores of the rules, the released names, and the default decoder."""
    defaults = {name: (rule.value, rule.score) for name, rule in deciding.RULES.items()}
    assert defaults == {
        "exact": (None, "confidence"), "sequential": (None, "left"),
        "threshold": (0.9, "confidence"), "product": (0.9, "confidence"),
        "factor": (1.0, "confidence"), "entropy": (0.1, "entropy"),
    }  # fmt: skip
    assert deciding.RELEASED == {
        "low_confidence_static": "exact",
        "low_confidence_dynamic": "threshold",
        "entropy_bounded": "entropy",
    }
    assert dataclasses.asdict(Decoder()) == {
        "rule": "exact", "value": None, "precision": "bfloat16", "gen_len": 256,
        "temperature": 0.0, "seed": 0, "top_k": None, "top_p": 1.0, "confidence": "sampled",
        "tempered": False, "noise": "step", "quota": 1,
    }  # fmt: skip
    assert deciding.PRECISIONS == {"bfloat16": torch.bfloat16, "float32": torch.float32}
    assert deciding.CONFIDENCES == ("sampled", "distribution", "margin", "entropy")
    assert deciding.NOISES == ("step", "position")
    assert (deciding.COLDEST, deciding.HOTTEST) == (1e-6, 100.0)


@pytest.mark.parametrize("name, rule, value", [
    ("low_confidence_static", "exact", None),
    ("low_confidence_dynamic", "threshold", 0.9),
    ("entropy_bounded", "entropy", 0.1),
    ("sequential", "sequential", None),
    ("product", "product", 0.9),
    ("factor", "factor", 1.0),
])  # fmt: skip
def test_released_names_of_rules(name, rule, value):
    """The names of SDAR's released code are ours in other words, with our default values."""
    decoder = Decoder(name)
    assert (decoder.rule, decoder.value) == (rule, value)
    assert Decoder(name, 0.5).value == 0.5 and Decoder(name, 0.0).value == 0.0


# ---------------------------------------------------------------------------------------- 2. quotas


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
    """At least `quota` positions, in the rule's order."""
    scores = {"entropy": [-0.1, -0.5, 0.0, -0.4, -0.2], "sequential": [0.0] * 5}
    row = scores.get(rule, [0.5, 0.7, 0.99, 0.9, 0.6])
    assert chosen(rule, value, row, [True, True, False, True, True], quota) == right


def test_quotas_by_step():
    """A table of quotas is read at each unit's decided positions; 1 where it says nothing."""
    rows = [[0.4, 0.6], [0.3, 0.7], [0.2, 0.8], [0.1, 0.9], [0.1, 0.9], [0.2, 0.8], [0.3, 0.7]]
    out = read([(MASK,) * 4, (MASK, 5, MASK, MASK)], torch.tensor(rows).log())
    assert Decoder(quota={0: 3}).transition(out) == [(MASK, 1, 1, 1), (1, 5, MASK, MASK)]
    assert Decoder(quota={1: 2}).transition(out) == [(MASK, MASK, MASK, 1), (1, 5, 1, MASK)]
    assert Decoder(quota=2).transition(out) == [(MASK, MASK, 1, 1), (1, 5, 1, MASK)]
    step = torch.tensor([0, 3])
    assert Decoder(quota={0: 3}).quota_at(step).tolist() == [[3], [1]]
    assert Decoder(quota=4).quota_at(step) == 4


@pytest.mark.parametrize("masks, steps", [(32, 11), (32, 32), (256, 64), (7, 3), (1, 5), (5, 1)])
def test_the_linear_schedule_is_the_reference_loop(masks, steps):
    """Dream's loop, in its own float32 arithmetic, step by step; passes that commit nothing change
    no state."""
    times, left, right = torch.linspace(1, 1e-3, steps + 1), torch.tensor(float(masks)), {}
    for i in range(steps):
        share = 1 - times[i + 1] / times[i]
        count = int(left * share) if i < steps - 1 else int(left)
        if count:
            right[masks - int(left)] = count
        left = left - count
    schedule = deciding.linear_schedule(masks, steps)
    assert schedule == right and sum(schedule.values()) == masks


def test_the_linear_schedule_by_hand():
    """8 masks in 4 steps, t = 1, .75025, .5005, .25075, .001: 8·.24975 → 1, 7·.3329 → 2, 5·.499 →
    2, and the last 3. One step takes all; of 5 steps for one mask, the first 4 would take none.
    Down to t = .5 in 2 steps, t = 1, .75, .5: 8·.25 = 2, and the last 6."""
    assert deciding.linear_schedule(8, 4) == {0: 1, 1: 2, 3: 2, 5: 3}
    assert deciding.linear_schedule(8, 1) == {0: 8} and deciding.linear_schedule(1, 5) == {0: 1}
    assert deciding.linear_schedule(8, 2, last=0.5) == {0: 2, 2: 6}
    assert deciding.linear_schedule(32, 4) == {0: 7, 7: 8, 15: 8, 23: 9}
    assert deciding.linear_schedule(3, 8) == {0: 1, 1: 2}  # 3·(1 − .126/.251) = 1.49, before 0


# --------------------------------------------------------------------------------- 3. noise and law

GOLDEN = 0x9E3779B97F4A7C15


def splitmix(x):
    """The published generator's output from state x, in whole numbers under 2⁶⁴."""
    x = (x + GOLDEN) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def noise(seed, block, step, position, token):
    """G of one token: 52 bits of the hash of the four numbers, one after the other, and the
    token."""
    key = seed % 2**64
    for part in (block, step, position):
        key = splitmix(key) ^ part
    bits = splitmix((splitmix(key) + token * GOLDEN) % 2**64) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def test_scramble_is_splitmix64():
    """The published generator's first three outputs from seed 0 (Steele, Lea and Flood 2014)."""
    right = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = torch.tensor([0, deciding.WEYL, 2 * deciding.WEYL + 2**64])
    assert [value % 2**64 for value in deciding.scramble(states).tolist()] == right
    assert [splitmix(n * GOLDEN) for n in range(3)] == right


@pytest.mark.parametrize("seed", (0, 7, ~7, -(2**63), 2**63 - 1))
def test_the_noise_is_the_hash(seed):
    """Bit for bit what the docstring says, at any seed: a text is one for all machines."""
    names = [(0, 0, 0), (1, 2, 3), (3, 2, 1), (2, 1, 3), (7, 31, 250)]
    columns = [torch.tensor(column) for column in zip(*names)]
    got = deciding.gumbel(seed, *columns, 5)
    right = [[noise(seed, *name, token) for token in range(5)] for name in names]
    assert got.dtype == torch.float64 and got.shape == (5, 5)
    assert np.allclose(got.numpy(), right, rtol=1e-12, atol=1e-12)


def test_gumbel_noise():
    """Mean .5772 and variance π²/6 within 5 standard errors; no two arguments share noise; rows
    are independent."""
    n, size = 400, 500
    number = torch.arange(n)
    block, step, position = number // 100, number // 10 % 10, number % 10
    noise = deciding.gumbel(7, block, step, position, size)
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772157) < 5 * (np.pi**2 / 6 / (n * size)) ** 0.5
    variance = np.pi**2 / 6
    assert abs(noise.var().item() - variance) < 5 * (4.4 * variance**2 / (n * size)) ** 0.5
    assert len({tuple(row) for row in noise[:, :2].tolist()}) == n
    assert len(set(noise[:, 0].tolist()) | set(noise[:, 1].tolist())) == 2 * n
    one = slice(123, 124)
    assert (deciding.gumbel(7, block[one], step[one], position[one], size) == noise[one]).all()
    assert not (deciding.gumbel(8, block, step, position, size) == noise).any()
    assert abs(float(torch.corrcoef(noise[:2])[0, 1])) < 0.2  # 5 standard errors are .22


@pytest.mark.parametrize("kind, moves", [
    ("step", "seed block step position"), ("position", "seed block position"),
])  # fmt: skip
def test_what_names_the_noise(kind, moves):
    """Seed, block, step and position each change every token's noise; `position` ignores the step,
    which it takes for 0, and nothing else."""
    logits = torch.zeros(1, 20).log_softmax(-1)

    def noised(seed=5, block=1, step=2, position=3):
        decoder = Decoder(temperature=1.0, noise=kind, seed=seed)
        return decoder.perturbed(logits, *(torch.tensor([x]) for x in (block, step, position)))

    for part in ("seed", "block", "step", "position"):
        same = noised(**{part: 7}) == noised()
        assert not same.any() if part in moves.split() else same.all(), part
    step = 2 if kind == "step" else 0
    right = [noise(5, 1, step, 3, token) - math.log(20) for token in range(20)]
    assert noised()[0].tolist() == pytest.approx(right, abs=1e-6)


def tempered(p, T, top_k=None, top_p=1.0):
    """softmax(log p / T), of it all that are no less likely than the k-th, of these the likeliest
    while the sum of the likelier ones is not over top-p."""
    hot = [x ** (1 / T) for x in p]
    hot = [x / sum(hot) for x in hot]
    least = sorted(hot)[-min(top_k or len(p), len(p))]
    hot = [x if x >= least else 0.0 for x in hot]
    hot = [x / sum(hot) for x in hot]
    order = sorted(range(len(p)), key=lambda v: (-hot[v], v))
    kept = [v for i, v in enumerate(order) if sum(hot[u] for u in order[:i]) <= top_p]
    total = sum(hot[v] for v in kept)
    return [hot[v] / total if v in kept else 0.0 for v in range(len(p))]


LAWS = [  # p, options, law
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ([0.64, 0.36], {"temperature": 2.0}, [8 / 14, 6 / 14]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    ([0.1, 0.2, 0.3, 0.4], {"temperature": 1.0, "top_k": 1}, [0, 0, 0, 1]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_k": 99}, [0.4, 0.3, 0.2, 0.1]),
    ([0.25, 0.5, 0.25, 0.0], {"temperature": 1.0, "top_k": 2}, [0.25, 0.5, 0.25, 0]),  # a tie stays
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    ([0.1, 0.3, 0.2, 0.4], {"temperature": 1.0, "top_p": 0.8}, [0, 3 / 9, 2 / 9, 4 / 9]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_p": 1e-6}, [1, 0, 0, 0]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    # the sum of .25 and .25 is .5, not over it: the third brings it over; ties from the lowest on
    ([0.25] * 4, {"temperature": 1.0, "top_p": 0.5}, [1 / 3, 1 / 3, 1 / 3, 0]),
    ([0.25] * 4, {"temperature": 1.0, "top_p": 0.4999}, [1 / 2, 1 / 2, 0, 0]),
    ([0.25] * 4, {"temperature": 1.0, "top_p": 0.5001}, [1 / 3, 1 / 3, 1 / 3, 0]),
    # top-p is of what top-k leaves, both of the tempered law: .16 : .09 : .04 -> .552, .310
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5, "top_k": 3, "top_p": 0.55}, [1, 0, 0, 0]),
    ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5, "top_p": 0.55}, [0.64, 0.36, 0, 0]),
]


@pytest.mark.parametrize("p, options, right", LAWS)
def test_law_by_hand(p, options, right):
    """softmax(log p / T), then top-k, then top-p, up to and including the one that brings the sum
    over it; log p may be off by a constant, and its type stays."""
    limits = options["temperature"], options.get("top_k"), options.get("top_p", 1.0)
    assert tempered(p, *limits) == pytest.approx(right)
    for dtype, shift in itertools.product((torch.float64, torch.float32), (0.0, 3.0)):
        log_p = torch.tensor([p, p[::-1]], dtype=dtype).log() + shift
        law = Decoder(**options).law(log_p)
        assert law.dtype == dtype and law.shape == (2, len(p))
        if dtype == torch.float64 or options.get("top_p", 1.0) != 0.5:
            assert law[0].exp().tolist() == pytest.approx(right, abs=1e-6)
        if len(set(p)) == len(p):  # rows are independent
            assert law[1].exp().tolist() == pytest.approx(right[::-1], abs=1e-6)


def test_perturbed_by_hand():
    """T·(log law + G) in float64, where the law is of T, top-k and top-p; at T = 0 the
    conditionals as they are."""
    p = [0.4, 0.3, 0.2, 0.1]
    log_p = torch.tensor([p, p[::-1]]).log()
    name = [torch.tensor([3, 4]), torch.tensor([5, 6]), torch.tensor([7, 1])]
    for T, options in ((0.5, {}), (2.0, {"top_k": 2}), (3.0, {"top_p": 0.6})):
        got = Decoder(temperature=T, seed=11, **options).perturbed(log_p, *name)
        assert got.dtype == torch.float64
        for row, numbers, values in zip(got, ((3, 5, 7), (4, 6, 1)), (p, p[::-1])):
            law = tempered(values, T, options.get("top_k"), options.get("top_p", 1.0))
            for token, share in enumerate(law):
                right = -math.inf
                if share:
                    right = T * (math.log(share) + noise(11, *numbers, token))
                assert row[token].item() == pytest.approx(right, abs=1e-5)
    assert Decoder().perturbed(log_p, *name) is log_p


# ---------------------------------------------------------------------------------------- 4. scores

DRAWN = [0.5, 0.3, 0.2]  # token 1 is drawn
ENTROPY = -sum(p * math.log(p) for p in DRAWN)  # 1.0297


@pytest.mark.parametrize("options, right", [
    ({}, 0.3),
    ({"confidence": "distribution"}, 0.5),
    ({"confidence": "margin"}, 0.5 - 0.3),
    ({"confidence": "entropy"}, math.exp(-ENTROPY)),
    ({"tempered": True}, 9 / 38),
    ({"tempered": True, "top_k": 2}, 9 / 34),
    ({"tempered": True, "confidence": "distribution"}, 25 / 38),
    ({"tempered": True, "confidence": "margin"}, 16 / 38),
    ({"tempered": True, "temperature": 0.0}, 0.3),  # T = 0 has no law
    ({"tempered": True, "temperature": 0.0, "confidence": "margin"}, 0.2),
])  # fmt: skip
def test_confidence_by_hand(options, right):
    """Of the token drawn or of the likeliest; from the model's own softmax or from the law; one
    number a position, rounded only in bfloat16."""
    rows = torch.tensor([[0.2, 0.2, 0.6], DRAWN], dtype=torch.float64).log()
    drawn = torch.tensor([2, 1])
    rounded = torch.tensor(right).bfloat16().item()
    for precision, right in (("float32", right), ("bfloat16", rounded)):
        decoder = Decoder(**{"temperature": 0.5, "precision": precision} | options)
        got = decoder.confidence_in(drawn, rows)
        assert got.shape == (2,) and got[1].item() == pytest.approx(right, rel=1e-6)
        score = decoder.score(drawn, rows)
        assert score.dtype == torch.float64 and score.tolist() == got.tolist()


def test_confidences_of_two_rows():
    """margin: p₁ − p₂; entropy: exp(−H), H = 1.0297 for (.5, .3, .2); H = ln 2 for (.5, .5, 0)."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], dtype=torch.float64).log()
    cases = ("margin", [0.2, 0.0]), ("entropy", [0.35713, 0.5]), ("distribution", [0.5, 0.5])
    for name, right in cases:
        decoder = Decoder(confidence=name, precision="float32")
        got = decoder.confidence_in(torch.tensor([1, 1]), logits)
        assert got.tolist() == pytest.approx(right, abs=1e-5)


def test_the_entropy_confidence_keeps_the_order_of_the_entropy():
    """Also next to 1, where exp(−H) of H = 1.9e-8 and 1.1e-8 is the same float32: the lower entropy
    goes first."""
    logits = torch.stack([torch.zeros(2), torch.tensor([1e-9, 5e-10]).log()], 1)
    decoder = Decoder(confidence="entropy", precision="float32")
    confidence = decoder.confidence_in(torch.tensor([0, 0]), logits)
    assert confidence[0] < confidence[1] < 1


def test_scores_of_the_other_rules():
    """sequential: all alike. entropy: −H in float64, unrounded whatever the precision; of p, or of
    the law if tempered (.25, .09, .04 over .38 at T = .5)."""
    rows, drawn = torch.tensor([DRAWN, [0.1, 0.1, 0.8]]).log(), torch.tensor([1, 0])
    assert Decoder("sequential").score(drawn, rows).tolist() == [0.0, 0.0]
    hot = [25 / 38, 9 / 38, 4 / 38]
    law = -sum(p * math.log(p) for p in hot)
    for T, of_law in itertools.product((0.0, 0.5), (False, True)):
        right = law if T and of_law else ENTROPY
        for precision in deciding.PRECISIONS:
            decoder = Decoder("entropy", precision=precision, temperature=T, tempered=of_law)
            score = decoder.score(drawn, rows)
            assert score.dtype == torch.float64
            assert score[0].item() == pytest.approx(-right, rel=1e-6)


@pytest.mark.parametrize("precision, first", [("bfloat16", 0), ("float32", 1), (None, 0)])
def test_precision_decides_the_order(precision, first):
    """bfloat16 steps are 1/256 below 1: .9985 and .9999 become 1, the lowest goes first; float32
    tells them apart. Rounded is the default."""
    logits = torch.tensor([[0.9985, 0.0015], [0.0001, 0.9999]]).log()
    decoder = Decoder(precision=precision) if precision else Decoder()
    right = (0, MASK) if first == 0 else (MASK, 1)
    assert decoder.transition(read([(MASK, MASK)], logits)) == [right]
    stale = drafting.Stale(decoder, (MASK, MASK), MASK, 0, logits)
    assert stale.candidates(0).ranking[0] == first  # the drafter breaks ties alike
    got = decoder.rounded(torch.tensor([0.9985, 0.3]))
    assert got.dtype == torch.float32
    right = [0.9985, 0.3] if precision == "float32" else [1.0, 0.30078125]
    assert got.tolist() == pytest.approx(right, abs=1e-7)


# --------------------------------------------------------------------------------------------- 5. F


def read(states, rows, blocks=None):
    """The Pass over `states`, tuples of ids, whose masked positions have the conditionals `rows`,
    [M, V], one after the other."""
    counts = [state.count(MASK) for state in states]
    masked = [i for i, token in enumerate(itertools.chain(*states)) if token == MASK]
    assert len(rows) == len(masked)
    states, blocks = torch.tensor(states), torch.tensor(blocks or [0] * len(states))
    return dlm.Pass(states, blocks, masked, counts, rows, lambda x: x.clone(), rows.shape[1], [])


STATES, BLOCKS = [(MASK, 1, MASK, MASK), (2, 3, 4, 5), (MASK,) * 4, (0, MASK, 6, 7)], [3, 3, 5, 4]


def some_rows(seed=0, size=6):
    """Conditionals of the 8 masked positions of STATES, as log p, float64 [8, size]."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.dirichlet(np.full(size, 0.5), 8)).log()


def by_hand(decoder, rows):
    """F of every one of STATES, one position after the other, in plain Python; `exact` rule."""
    after, rows = [], iter(rows.exp().tolist())
    for state, block in zip(STATES, BLOCKS):
        step, best = sum(token != MASK for token in state), None
        for s, token in enumerate(state):
            if token != MASK:
                continue
            p = next(rows)
            law = tempered(p, decoder.temperature, decoder.top_k, decoder.top_p)
            index = step if decoder.noise == "step" else 0
            draw = [
                math.log(x) + noise(decoder.seed, block, index, s, v) if x else -math.inf
                for v, x in enumerate(law)
            ]
            drawn = draw.index(max(draw))
            sure = law if decoder.tempered else p
            sure = sure[drawn] if decoder.confidence == "sampled" else max(sure)
            sure = torch.tensor(sure, dtype=torch.float64)
            sure = sure.bfloat16().item() if decoder.precision == "bfloat16" else sure.item()
            if best is None or sure > best[0]:
                best = sure, s, drawn
        if best is not None:
            _, s, drawn = best
            state = state[:s] + (drawn,) + state[s + 1 :]
        after.append(state)
    return after


@pytest.mark.parametrize("options", [
    {}, {"confidence": "distribution"}, {"noise": "position"}, {"tempered": True},
    {"top_k": 2, "top_p": 0.7}, {"precision": "float32"}, {"temperature": 2.0, "tempered": True},
])  # fmt: skip
def test_a_step_by_hand(options):
    """At T > 0, 20 seeds: each unit's own block and step and each position name the noise, the
    token drawn is scored, the most confident one commits; a complete state stays as it is."""
    for seed in range(20):
        decoder = Decoder(**{"temperature": 1.0, "seed": seed} | options)
        rows = some_rows(seed)
        assert decoder.transition(read(STATES, rows, BLOCKS)) == by_hand(decoder, rows)


def test_a_step_at_no_temperature_by_hand():
    """The likeliest token of the most confident position, unit by unit, as tuples of numbers."""
    rows = torch.tensor([
        [0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.125, 0.125, 0.75],  # (9, 1, 9, 9): position 2
        [0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.375, 0.375, 0.25], [0.25, 0.5, 0.25],
        [0.25, 0.375, 0.375],  # a tie of two tokens goes to the lower id
    ]).log()  # fmt: skip
    right = [(MASK, 1, 1, MASK), (2, 3, 4, 5), (2, MASK, MASK, MASK), (0, 1, 6, 7)]
    following = Decoder().transition(read(STATES, rows, BLOCKS))
    assert following == right and all(type(x) is int for state in following for x in state)
    everything = Decoder("threshold", 0.1).transition(read(STATES, rows, BLOCKS))
    assert everything == [(0, 1, 1, 2), (2, 3, 4, 5), (2, 0, 0, 1), (0, 1, 6, 7)]
    left = Decoder("sequential").transition(read(STATES, rows, BLOCKS))
    assert left == [(0, 1, MASK, MASK), (2, 3, 4, 5), (2, MASK, MASK, MASK), (0, 1, 6, 7)]
    assert Decoder().transition(read([(1, 2)], torch.zeros(0, 3))) == [(1, 2)]


@pytest.mark.parametrize("rows", (1, 2, 3, 7, 8, 9))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_chunks_change_nothing(rows, temperature, monkeypatch):
    """M = 8 conditionals in chunks of 1, 2, 3, M − 1, M and M + 1: none is lost, none is read
    twice, F is the same; a fault in any row of any chunk is seen."""
    plain, decoder = some_rows(), Decoder("threshold", 0.4, temperature=temperature)
    whole = decoder.transition(read(STATES, plain, BLOCKS))
    monkeypatch.setattr(dlm, "CHUNK", rows * 6 + 5)  # as many rows of 6 as fit
    out = read(STATES, plain, BLOCKS)
    assert dlm.chunk_rows(6) == rows and dlm.chunk_rows(10**9) == 1
    parts = [out.log_probs(part) for part in out.chunks()]
    assert torch.cat(parts).equal(plain) and max(map(len, parts)) == min(rows, 8)
    assert len(parts) == -(-8 // rows)
    assert decoder.transition(out) == whole
    for row in range(8):
        broken = plain.clone()
        broken[row, 2] = math.nan
        with pytest.raises(FloatingPointError):
            decoder.transition(read(STATES, broken, BLOCKS))


def test_what_a_pass_says_of_its_places():
    """unit, position, step and conditionals of the masked positions, by hand."""
    rows = some_rows()
    out = read(STATES, rows, BLOCKS)
    unit, position = out.places()
    assert unit.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert position.tolist() == [0, 2, 3, 0, 1, 2, 3, 1]
    assert out.decided.tolist() == [1, 4, 0, 3]
    parts = [rows[:3], rows[3:3], rows[3:7], rows[7:]]
    assert all(out.unit(u).equal(right) for u, right in enumerate(parts))
    assert out.log_probs(slice(2, 5)).equal(rows[2:5]) and out.partial is False


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_conditionals_that_are_none_are_an_error(temperature, value):
    """NaN or +inf anywhere, or nothing but −inf, has no argmax: one sentence instead of token 0."""
    options = ({}, {"top_k": 2}, {"top_p": 0.5}, {"rule": "entropy"}, {"confidence": "margin"})
    for column, more in itertools.product(range(6), options):
        rows = some_rows()
        rows[7, column] = value
        with pytest.raises(FloatingPointError, match="checkpoint") as error:
            Decoder(temperature=temperature, **more).transition(read(STATES, rows, BLOCKS))
        assert one_sentence(error)
    rows = some_rows()
    rows[0] = -math.inf
    with pytest.raises(FloatingPointError):
        Decoder(temperature=temperature).transition(read(STATES, rows, BLOCKS))
    rows = some_rows()
    rows[:, 1:4] = -math.inf  # ids that are not allowed are none of it
    Decoder(temperature=temperature).transition(read(STATES, rows, BLOCKS))


# ------------------------------------------------------------------------------- 6. what is refused


@pytest.mark.parametrize("options, named", [
    ({"rule": "best"}, "unknown rule 'best'.*exact, sequential, threshold"),
    ({"rule": "low_confidence"}, "low_confidence.*exact"),
    ({"precision": "float8"}, "unknown precision 'float8'.*bfloat16, float32"),
    ({"confidence": "best"}, "unknown confidence 'best'.*sampled"),
    ({"confidence": "topk_margin"}, "topk_margin.*margin"),
    ({"noise": "none"}, "unknown noise 'none'.*step"),
    *[({"gen_len": x}, f"gen_len is {x}") for x in (0, -1, 1.5, 8.0, True)],
    *[({"temperature": x}, "temperature") for x in (-1.0, math.nan, math.inf, 1e-300, 9e-7, 100.1)],
    *[({"seed": x}, f"seed is {x}") for x in (2**70, 2**63, -(2**63) - 1, 1.5)],
    *[({"top_k": x}, f"top_k is {x}") for x in (0, -3, 1.5, 2.0)],
    *[({"top_p": x}, "top_p") for x in (0.0, -0.5, 1.5, 1.0001, math.nan)],
    *[({"quota": x}, f"quota is {x}") for x in (0, -1, 1.5)],
    ({"rule": "threshold", "quota": {0: 2, 3: 0}}, "quota is .*3: 0"),
    ({"quota": {0: 2.0}}, "quota is"),
    ({"rule": "threshold", "value": math.nan}, "threshold"),
    ({"rule": "entropy_bounded", "value": math.nan}, "rule entropy"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(options, named):
    """In one sentence, before anything runs; a quota of 0 would let a pass change nothing, for
    ever."""
    with pytest.raises(ValueError, match=named) as error:
        Decoder(**options)
    assert one_sentence(error)


@pytest.mark.parametrize("options", [
    {"gen_len": 1}, {"temperature": 1e-6}, {"temperature": 100.0}, {"temperature": 0},
    {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"top_k": 1}, {"top_p": 1.0}, {"top_p": 1e-9},
    {"quota": 1}, {"quota": {0: 1, 4: 3}}, {"rule": "threshold", "value": -math.inf},
])  # fmt: skip
def test_settings_at_the_edge_are_taken(options):
    """The last ones that mean something."""
    decoder = Decoder(**options)
    assert all(getattr(decoder, name) == value for name, value in options.items())


@pytest.mark.parametrize("steps", (0, -2))
def test_schedules_of_no_steps_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps is {steps}") as error:
        deciding.linear_schedule(32, steps)
    assert one_sentence(error)
