"""What becomes of conditionals, by hand: every commit rule at its border, confidences, the law, the
noise, and what may not be decoded at all. Paper sections 1, 6 and 7.

Left out: whole texts (test_exactness.py), the law of sampled texts (test_sampling.py).

    python -m pytest test_decoder.py          # seconds
"""

import math
from dataclasses import replace

import pytest
import torch

import dlm
from decoder import CONFIDENCES, RELEASED, RULES, Decoder, commits, gumbel, linear_schedule
from test_exactness import MASK, VOCAB, one_sentence, random_prompt, tiny_target

M, D = True, False  # masked, decided


def committed(rule, value, score, masked=None, quota=1):
    """Positions that a rule commits, of one row of scores."""
    masked = [M] * len(score) if masked is None else masked
    score = torch.tensor(score, dtype=torch.float64)
    return commits(rule, value, score, torch.tensor(masked), quota).nonzero()[:, 0].tolist()


# ------------------------------------------------------------------------------------ commit rules


@pytest.mark.parametrize(
    "rule, value, score, right",
    [
        # scores are dyadic, so that sums and products are exact and equality is met
        ("threshold", 0.75, [0.875, 0.75, 0.5], [0]),  # strictly above τ
        ("threshold", 0.5, [0.875, 0.75, 0.5], [0, 1]),
        ("product", 0.5, [1.0, 0.75, 0.6875], [0, 1, 2]),  # .75·.6875 = .5156
        ("product", 0.375, [0.75, 0.5, 0.25], [0, 1]),  # .375 ≥ .375
        ("product", 0.375 + 2**-20, [0.75, 0.5, 0.25], [0]),
        ("factor", 0.75, [0.875, 0.75, 0.5], [0, 1]),  # 2·.125, 3·.25 = .75 ≤ .75, 4·.5
        ("factor", 0.75 - 2**-20, [0.875, 0.75, 0.5], [0]),
        ("factor", 2.0, [0.875, 0.75, 0.5], [0, 1, 2]),  # 4·.5 = 2
        ("entropy", 0.25, [-0.25, -0.5, -1.0], [0, 1]),  # Σ − max: 0, .25, .75
        ("entropy", 0.25 - 2**-20, [-0.25, -0.5, -1.0], [0]),
        ("entropy", 0.75, [-0.25, -0.5, -1.0], [0, 1, 2]),
        ("exact", None, [0.5, 0.75, 0.75], [1]),
        ("sequential", None, [0.0, 0.0, 0.0], [0]),
    ],
)
def test_rules_at_equality(rule, value, score, right):
    """Section 7's table, where the condition holds with equality and where it just fails; at least
    one position commits, and the order of the positions does not matter."""
    assert committed(rule, value, score) == right
    back = committed(rule, value, score[::-1])
    if rule not in ("exact", "sequential"):
        assert back == sorted(len(score) - 1 - s for s in right)


@pytest.mark.parametrize("rule", RULES)
def test_decided_positions_do_not_count(rule):
    """A row with decided positions among its own commits what the row without them commits,
    whatever their scores are; two of them must not turn a product around."""
    for few in ([0.95, 0.9, 0.99], [-0.1, -0.02, -0.5], [0.2, 0.1, 0.15]):
        value = RULES[rule].value
        alone = committed(rule, value, few)
        for other in (0.0, 1.0, 5.0, -3.0):
            score = [other, few[0], other, few[1], few[2], other, other]
            masked = [D, M, D, M, M, D, D]
            got = committed(rule, value, score, masked)
            assert got == [[1, 3, 4][s] for s in alone], (rule, other)
    assert committed(rule, RULES[rule].value, [0.5, 0.6], [D, D]) == []


def test_quota():
    """At least as many as asked for, the best by score, and no more than are masked."""
    score = [0.5, 0.99, 0.7, 0.9]
    assert committed("threshold", 0.95, score, quota=1) == [1]
    assert committed("threshold", 0.95, score, quota=3) == [1, 2, 3]
    assert committed("threshold", 0.6, score, quota=2) == [1, 2, 3]
    assert committed("exact", None, score, [M, D, M, D], quota=9) == [0, 2]
    both = commits(
        "exact", None, torch.tensor([score, score]), torch.tensor([[M] * 4] * 2), torch.tensor([[1], [2]])
    )  # fmt: skip
    assert both.tolist() == [[D, M, D, D], [D, M, D, M]]


def test_defaults():
    """The papers' thresholds, the released names, and the precision that is ours."""
    values = {name: rule.value for name, rule in RULES.items()}
    assert values == {"exact": None, "sequential": None, "threshold": 0.9, "product": 0.9,
                      "factor": 1.0, "entropy": 0.1}  # fmt: skip
    assert RELEASED == {"low_confidence_static": "exact", "low_confidence_dynamic": "threshold",
                        "entropy_bounded": "entropy"}  # fmt: skip
    decoder = Decoder()
    assert (decoder.rule, decoder.precision, decoder.temperature) == ("exact", "bfloat16", 0.0)
    assert (decoder.confidence, decoder.tempered, decoder.noise, decoder.quota) == (
        "sampled", False, "step", 1)  # fmt: skip
    assert Decoder("low_confidence_dynamic").value == 0.9 and Decoder("threshold", 0.5).value == 0.5


def test_schedule_of_dream():
    """int(left·(1 − s/t)) along linspace(1, 1e-3, steps + 1), the rest at the last step."""
    assert linear_schedule(32, 4) == {0: 7, 7: 8, 15: 8, 23: 9}
    assert linear_schedule(3, 8) == {0: 1, 1: 2}  # 3·(1 − .126/.251) = 1.49, before 0; the rest
    assert sum(linear_schedule(32, 7).values()) == 32
    with pytest.raises(ValueError, match="steps"):
        linear_schedule(8, 0)


# ------------------------------------------------------------------------------ confidence and law


def test_confidences_by_hand():
    """sampled p(token), distribution max p, margin p₁ − p₂, entropy exp(−H)."""
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    token = torch.tensor([1])
    right = {"sampled": 0.25, "distribution": 0.5, "margin": 0.25}
    right["entropy"] = math.exp(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    for kind in CONFIDENCES:
        decoder = Decoder(confidence=kind, precision="float32")
        assert decoder.confidence_in(token, p.log()).item() == pytest.approx(right[kind], rel=1e-12)


def test_rounding():
    """bfloat16 keeps 8 bits: .998 and .9999 become one number; float32 tells them apart."""
    p = torch.tensor([[0.9999, 0.0001], [0.9985, 0.0015]], dtype=torch.float64)
    first = torch.tensor([0, 0])
    rounded = Decoder().confidence_in(first, p.log())
    assert rounded.tolist() == [1.0, 1.0] and rounded.dtype == torch.float64
    exact = Decoder(precision="float32").confidence_in(first, p.log())
    assert exact.tolist() == pytest.approx([0.9999, 0.9985], rel=1e-12)


def test_scores():
    """What ranks: the confidence; −H under the entropy rule, from the model's own softmax or from
    the tempered law; nothing but the place under the sequential rule."""
    p = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)
    first = torch.tensor([0, 0])
    entropy = [sum(v * math.log(v) for v in row) for row in p.tolist()]
    assert Decoder("entropy").score(first, p.log()).tolist() == pytest.approx(entropy)
    assert Decoder("sequential").score(first, p.log()).tolist() == [0.0, 0.0]
    assert Decoder("threshold").score(first, p.log()).tolist() == [0.5, 0.75]
    # softmax(log p / .5) ∝ p²: .9 and .1
    cold = Decoder("entropy", temperature=0.5, tempered=True)
    right = 0.9 * math.log(0.9) + 0.1 * math.log(0.1)
    assert cold.score(first, p.log()).tolist() == pytest.approx([math.log(0.5), right])
    assert replace(cold, tempered=False).score(first, p.log()).tolist() == pytest.approx(entropy)


def test_law_by_hand():
    """softmax(log p / T), then the top k, then the likeliest up to and including the one that
    brings the sum over top_p: at equality the next one stays out only above it."""
    log_probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    law = lambda **kw: Decoder(**({"temperature": 1.0} | kw)).law(log_probs).exp()[0].tolist()
    assert law() == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert law(temperature=0.5) == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])
    assert law(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(top_k=3) == pytest.approx([0.5, 0.25, 0.125, 0.125])  # the tie stays whole
    assert law(top_k=9) == law() and law(top_k=4) == law()
    # before .25 the sum is .5, which is not over .5: it is the one that brings it over
    assert law(top_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(top_p=0.49) == pytest.approx([1, 0, 0, 0])
    assert law(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(top_k=2, top_p=0.6) == pytest.approx([1, 0, 0, 0])  # .667 of the top two
    assert law(temperature=0.5, top_p=0.72) == pytest.approx([1, 0, 0, 0])  # T comes first


def test_what_names_the_noise():
    """Each of seed, block, step, position and id changes G; `position` leaves out the step only;
    T·(log p + G) carries the factor T."""
    one = [torch.tensor([n]) for n in (2, 5, 7)]  # block, step, position
    base = gumbel(1, *one, 50)
    assert base.equal(gumbel(1, *one, 50)) and len(set(base[0].tolist())) == 50
    assert base[:, :20].equal(gumbel(1, *one, 20))
    for changed in range(3):
        other = [part + (i == changed) for i, part in enumerate(one)]
        assert not base.isclose(gumbel(1, *other, 50)).any()
    assert not base.isclose(gumbel(2, *one, 50)).any()
    log_probs = torch.full((1, 50), 1 / 50).log()
    for T in (0.5, 2.0):
        decoder = Decoder(temperature=T, seed=1)
        right = T * (math.log(1 / 50) + base)
        assert decoder.perturbed(log_probs, *one).allclose(right)
        by_place = replace(decoder, noise="position")
        later = [one[0], one[1] + 3, one[2]]
        assert by_place.perturbed(log_probs, *one).equal(by_place.perturbed(log_probs, *later))
        assert by_place.perturbed(log_probs, *one).equal(
            decoder.perturbed(log_probs, one[0], torch.zeros_like(one[1]), one[2])
        )
    assert Decoder().perturbed(log_probs, *one) is log_probs


# ------------------------------------------------------------------------------------- transitions


class Head:
    """Conditionals written down: a pass's `hidden` are its log p."""

    def __new__(cls, rows):
        return rows


def made_up(log_probs, masked, states, blocks=None):
    """A Pass of U units whose masked positions have the given conditionals."""
    states = torch.tensor(states)
    L = states.shape[1]
    counts = [sum(place // L == u for place in masked) for u in range(len(states))]
    blocks = torch.zeros(len(states), dtype=torch.int64) if blocks is None else torch.tensor(blocks)
    size = log_probs.shape[1]
    return dlm.Pass(states, blocks, masked, counts, log_probs, Head, size, [])


@pytest.mark.parametrize("chunk", (1, 3, 4, 5, 100))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_chunks_change_nothing(monkeypatch, chunk, temperature):
    """Conditionals are made some rows at a time: the same states come out, whatever is the size."""
    states = [[9, 9, 1], [9, 2, 9]]
    log_probs = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    decoder = Decoder("product", 1e-9, temperature=temperature)
    out = made_up(log_probs, [0, 1, 3, 5], states, [3, 4])
    whole = decoder.transition(out)
    monkeypatch.setattr(dlm, "CHUNK", 8 * chunk)
    assert [part.stop - part.start for part in out.chunks()] == {
        1: [1, 1, 1, 1], 3: [3, 1], 4: [4], 5: [4], 100: [4]}[chunk]  # fmt: skip
    assert decoder.transition(out) == whole
    if temperature == 0:
        best = log_probs.argmax(-1).tolist()
        assert whole == [(best[0], best[1], 1), (best[2], 2, best[3])]


def test_draws_are_of_each_units_block_step_and_position():
    """At T > 0 a masked position takes argmax T·(log p + G) of its own block, step and place."""
    states = [[9, 9, 1], [9, 2, 9], [9, 9, 9]]
    masked, blocks = [0, 1, 3, 5, 6, 7, 8], [3, 4, 4]
    log_probs = torch.rand(7, 8, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    decoder = Decoder("product", 1e-9, temperature=1.5, seed=11)
    got = decoder.transition(made_up(log_probs, masked, states, blocks))
    for row, place in zip(log_probs, masked):
        u, s = divmod(place, 3)
        step = 3 - states[u].count(9)
        noise = gumbel(11, *(torch.tensor([n]) for n in (blocks[u], step, s)), 8)[0]
        assert got[u][s] == int((row / 1.5 + noise).argmax())


class Fixed(torch.nn.Module):
    """An output layer that says the same of every position."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, hidden):
        return self.logits.expand(len(hidden), -1).clone()


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("bad, column", [
    (math.nan, 0), (math.nan, 7), (math.inf, 0), (math.inf, 5), (math.inf, MASK), (-math.inf, None),
])  # fmt: skip
def test_logits_of_which_no_token_can_be_taken(temperature, whole, bad, column):
    """NaN or +inf in any column, or −inf in all but the mask's: an error, never token 0."""
    target = tiny_target(8, 3)
    target.whole_softmax = whole
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    if column is None:
        logits[:, :MASK] = bad
    else:
        logits[0, column] = bad
    target.model.lm_head = Fixed(logits)
    if column == MASK and bad == math.inf and not whole:
        return  # the mask's own logit is not read
    with pytest.raises(FloatingPointError) as error:
        dlm.generate(target, Decoder(gen_len=8, temperature=temperature), random_prompt(9))
    assert one_sentence(error)


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("setting", [
    {"rule": "greedy"}, {"precision": "half"}, {"confidence": "top"}, {"noise": "none"},
    {"gen_len": 0}, {"gen_len": 1.5}, {"temperature": -1.0}, {"temperature": 1e9},
    {"temperature": math.nan}, {"seed": 2**70}, {"seed": 1.5}, {"top_k": 0}, {"top_k": 1.5},
    {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": math.nan}, {"quota": 0}, {"quota": {0: 0}},
    {"quota": 1.5}, {"rule": "threshold", "value": math.nan},
])  # fmt: skip
def test_settings_that_are_refused(setting):
    with pytest.raises(ValueError) as error:
        Decoder(**setting)
    assert one_sentence(error)


@pytest.mark.parametrize("prompt", [
    "text", 5, None, torch.zeros(2, 3, dtype=torch.int64), torch.rand(4), [1.0, 2.0], [[1, 2]],
    [], torch.zeros(0, dtype=torch.int64), [1, MASK], [-1, 2], [1, VOCAB], torch.tensor(5),
])  # fmt: skip
def test_prompts_that_are_refused(prompt):
    with pytest.raises(ValueError, match="prompt") as error:
        dlm.generate(tiny_target(8), Decoder(gen_len=8), prompt)
    assert one_sentence(error)


def test_prompts_as_tensor_list_or_tuple():
    target, decoder, prompt = tiny_target(8), Decoder(gen_len=8), random_prompt(5)
    texts = [dlm.generate(target, decoder, ids).written
             for ids in (prompt, prompt.tolist(), tuple(prompt.tolist()))]  # fmt: skip
    assert texts[0] == texts[1] == texts[2]
