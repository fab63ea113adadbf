"""F, the target's next state: which positions commit now, and with which tokens.

Paper sections 1 (exact decoding), 6 (sampling) and 7 (commit rules).

A pass gives the conditionals p_s(v) at the masked positions s of a block. `Decoder.transition`
makes the next state of them in three steps: a token for every masked position (the likeliest, or a
draw), a score for every one of them (the confidence in that token), and a commit rule that says
which of them are decided now. At T > 0 the draw is a function too, of noise that (seed, block,
step, position) names. So F is a function of the state at every temperature, and that is all that
verification by state equality rests on.

What this file leaves out: where conditionals come from (dlm.py); rules with memory of earlier
passes (KLASS, CreditDecoding) and rules that take commits back (WINO, Saber), as these are no
functions of the state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONFIDENCES = ("sampled", "distribution", "margin", "entropy")  # see Decoder.confidence_in
NOISES = ("step", "position")  # what indexes the noise; "position" changes the law, to show that
COLDEST, HOTTEST = 1e-6, 100.0  # temperatures that are taken, beside 0


# ------------------------------------------------------------------------------------- commit rules


def commit_order(score, masked):
    """Masked positions by falling score, ties to the lowest: the ONE tie-breaking of the project.

    score [..., L], masked bool [..., L]. Returns (order int64 [..., L], sorted score [..., L]);
    positions that are not masked come last, as −inf.

    >>> score, masked = torch.tensor([.5, .9, .9, 1.]), torch.tensor([True, True, True, False])
    >>> commit_order(score, masked)[0].tolist()
    [1, 2, 0, 3]
    """
    known = score.masked_fill(~masked, -torch.inf)
    ranked, order = known.sort(dim=-1, descending=True, stable=True)
    return order, ranked


def prefix(condition):
    """A rule that commits the first n positions by falling score, as many as `condition` allows.

    condition(c, n, value) -> bool [..., L], of the falling scores c₁ ≥ c₂ ≥ … [..., L] and n = 1 …
    L. It must be monotone: where it fails for n, it fails for every larger n.
    """

    def chooses(score, masked, value):
        order, c = commit_order(score, masked)
        n = torch.arange(1, c.shape[-1] + 1, device=c.device)
        holds = condition(c, n, value) & (c > -torch.inf)
        # monotone but for rounding, so what follows a failure fails too
        holds = holds.cumprod(-1).bool()
        return torch.zeros_like(masked).scatter(-1, order, holds)

    return chooses


@dataclass(frozen=True)
class Rule:
    """A commit rule: one row of section 7's table. To add a rule, add its row to RULES.

    chooses(score [..., L], masked bool [..., L], value) -> bool [..., L], the positions to commit
    now. Any function of these will do, also one whose set is no prefix of a ranking; `prefix` makes
    it for those that are. It need not see to it that something is committed: `commits` adds the
    best position by score.
    """

    chooses: Callable
    value: float | None = None  # the default threshold
    score: str = "confidence"  # what ranks positions: "confidence", "entropy" (−H) or "left"


RULES = {
    # one position a pass: the most confident
    "exact": Rule(prefix(lambda c, n, value: n == 1)),
    # one position a pass: the leftmost
    "sequential": Rule(prefix(lambda c, n, value: n == 1), score="left"),
    # Fast-dLLM: all c > τ
    "threshold": Rule(prefix(lambda c, n, value: c > value), 0.9),
    # max-commit [ours: the paper names it only]: the largest n with Π_{j≤n} c_j ≥ τ
    "product": Rule(prefix(lambda c, n, value: c.cumprod(-1) >= value), 0.9),
    # Fast-dLLM: the largest n with (n + 1)(1 − c_n) ≤ f
    "factor": Rule(prefix(lambda c, n, value: (n + 1) * (1 - c) <= value), 1.0),
    # EB-Sampler: by rising entropy H, the largest n with Σ_{j≤n} H_j − max H ≤ γ, where max H = H_n
    "entropy": Rule(prefix(lambda c, n, value: c - c.cumsum(-1) <= value), 0.1, "entropy"),
}
RELEASED = {  # what SDAR's released code calls them
    "low_confidence_static": "exact",
    "low_confidence_dynamic": "threshold",
    "entropy_bounded": "entropy",
}


def commits(rule, value, score, masked, quota=1):
    """The set of masked positions that `rule` commits now: what it chooses, and the `quota` best by
    score.

    score [..., L], one number a position, whatever it is that ranks them; masked bool [..., L];
    quota: commits at least, an int or int64 [..., 1], as far as masks are left. Returns bool [...,
    L], only masked positions.

    >>> score, masked = torch.tensor([.95, .97, .2, 1.]), torch.tensor([True, True, True, False])
    >>> commits("threshold", .9, score, masked).tolist()
    [True, True, False, False]
    >>> commits("threshold", .99, score, masked).tolist()
    [False, True, False, False]
    """
    order, _ = commit_order(score, masked)
    n = torch.arange(1, score.shape[-1] + 1, device=score.device)
    best = torch.zeros_like(masked).scatter(-1, order, (n <= quota).expand(order.shape))
    return (RULES[rule].chooses(score, masked, value) | best) & masked


def linear_schedule(masks, steps, last=1e-3):
    """Dream's commits per pass, {decided positions: commits}, for a block of `masks` masks in
    `steps` steps.

    Of the positions left, int(left · (1 − s/t)) at the step t → s along linspace(1, last, steps +
    1), and all at the last step. Steps that would commit nothing are left out, as they change no
    state. Raises ValueError.

    >>> linear_schedule(8, 4)
    {0: 1, 1: 2, 3: 2, 5: 3}
    """
    if type(masks) is not int or type(steps) is not int or steps < 1:
        raise ValueError(f"the number of steps is {steps}: give a whole number of at least 1")
    times = torch.linspace(1, last, steps + 1).tolist()
    schedule, decided = {}, 0
    for step, (t, s) in enumerate(zip(times, times[1:]), 1):
        left = masks - decided
        now = int(left * (1 - s / t)) if step < steps else left
        if now:
            schedule[decided] = now
            decided += now
    return schedule


# -------------------------------------------------------------------------------------------- noise

WEYL = 0x9E3779B97F4A7C15 - 2**64  # the constants of splitmix64, as int64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def scramble(x):
    """The splitmix64 hash of int64 x, which wraps around as unsigned 64-bit arithmetic does."""
    x = x + WEYL
    # >> keeps the sign of an int64: the masks cut it off
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * FIRST
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * SECOND
    return x ^ ((x >> 31) & (1 << 33) - 1)


def gumbel(seed, block, step, position, size):
    """G = −log(−log u): standard Gumbel noise of ids 0 … size − 1, float64 [M, size] (section 6).

    A pure function of its arguments; block, step, position: int64 [M]. u, from 52 bits of a counter
    hash [ours], is never 0 or 1. The bits are the same on every machine; the two logarithms may
    differ in the last place between device types, so that one seed writes one text per device type.
    """
    key = torch.full_like(block, seed)
    for part in (block, step, position):
        key = scramble(key) ^ part
    ids = torch.arange(size, device=block.device) * WEYL
    bits = (scramble(scramble(key)[:, None] + ids) >> 12) & (1 << 52) - 1  # [M, size]
    u = (bits.double() + 0.5) * 2.0**-52
    return u.log_().neg_().log_().neg_()


# -------------------------------------------------------------------------------------- the decoder


@dataclass
class Decoder:
    """What turns conditionals into the next state: the commit rule and, at T > 0, how tokens are
    drawn.
    """

    rule: str = "exact"  # a name in RULES or RELEASED
    value: float | None = None  # the rule's threshold; None: its default
    # bfloat16: probabilities are rounded before they are compared [ours, as released code does at
    # full size]; float32: they are compared as they are
    precision: str = "bfloat16"
    gen_len: int = 256  # new tokens after which generation stops, at a block's end
    temperature: float = 0.0  # 0 takes the likeliest token
    seed: int = 0  # of the noise
    # the law that tokens are drawn from: softmax(log p / T), then top_k, then top_p, as in the
    # released SDAR decoder
    top_k: int | None = None
    top_p: float = 1.0
    confidence: str = "sampled"  # see confidence_in
    tempered: bool = False  # True: read the confidence from that law (SDAR); False: from p (LLaDA)
    # what names the noise. step: drawn anew at every commit, which keeps the law; position: once a
    # position, which does not where the confidence is that of the sampled token
    noise: str = "step"
    # commits per pass at least: released code's block_size / steps, or {decided positions: commits}
    # where they vary (see linear_schedule)
    quota: int | dict = 1

    def __post_init__(self):
        self.rule = RELEASED.get(str(self.rule), self.rule)
        self.check()
        self.value = RULES[self.rule].value if self.value is None else self.value

    def check(self):
        """ValueError with one sentence for a setting that cannot be used."""
        names = {"rule": RULES, "precision": PRECISIONS, "confidence": CONFIDENCES, "noise": NOISES}
        for kind, known in names.items():
            if getattr(self, kind) not in tuple(known):
                choices = ", ".join(known)
                raise ValueError(f"unknown {kind} {getattr(self, kind)!r}: choose from {choices}")
        for kind in ("temperature", "top_p", "value"):
            number = getattr(self, kind)
            if not isinstance(number, (int, float)) and not (kind == "value" and number is None):
                raise ValueError(f"{kind} is {number!r}: give a number")
        quotas = self.quota.values() if isinstance(self.quota, dict) else [self.quota]
        # with 0, a pass may change nothing, for ever
        if not all(type(count) is int and count >= 1 for count in quotas):
            raise ValueError(f"quota is {self.quota}: commit a whole number a pass, at least 1")
        if type(self.gen_len) is not int or self.gen_len < 1:
            raise ValueError(f"gen_len is {self.gen_len}: ask for a whole number of at least 1")
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            span = f"0 (no sampling), or {COLDEST} to {HOTTEST}"
            raise ValueError(f"the temperature is {self.temperature}: give {span}")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"the seed is {self.seed}: give a whole number of at most 63 bits")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k}: keep a whole number of tokens, at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a probability above 0 and up to 1")
        if self.value is not None and self.value != self.value:
            raise ValueError(f"the value of rule {self.rule} is not a number: give one")

    # ---- tokens

    def law(self, log_probs):
        """log p(v) of the law that tokens are drawn from at T > 0. [..., V], same type.

        softmax(log_probs / T); the top_k likeliest of it; of these the likeliest, up to and
        including the one that brings their sum over top_p.
        """
        top = log_probs.amax(-1, keepdim=True)
        law = ((log_probs - top) / self.temperature).log_softmax(-1)
        if self.top_k is not None and self.top_k < law.shape[-1]:
            lowest = law.topk(self.top_k, -1).values[..., -1:]
            law = law.masked_fill(law < lowest, -torch.inf).log_softmax(-1)
        if self.top_p < 1:
            ranked, order = law.sort(dim=-1, descending=True, stable=True)
            # the sum of all that are likelier than a token
            before = ranked.exp().cumsum(-1) - ranked.exp()
            dropped = (before > self.top_p).gather(-1, order.argsort(-1))
            law = law.masked_fill(dropped, -torch.inf).log_softmax(-1)
        return law

    def perturbed(self, log_probs, block, step, position):
        """T·(log p(v) + G_v), float64 [M, V], whose argmax is a draw from the law (section 6);
        log_probs at T = 0.

        log_probs [M, V]; block, step (decided positions of the state) and position, int64 [M], name
        the noise. Scaled by T, so that its softmax goes over into the conditional as T falls to 0
        [ours].
        """
        if self.temperature == 0:
            return log_probs
        step = step if self.noise == "step" else torch.zeros_like(step)
        noise = gumbel(self.seed, block, step, position, log_probs.shape[1])
        return self.temperature * (self.law(log_probs.double()) + noise)

    # ---- scores

    def rounded(self, probability):
        """Probabilities at the decoder's precision, in the type they came in."""
        if self.precision == "bfloat16":
            return probability.bfloat16().to(probability.dtype)
        return probability

    def read_from(self, log_probs):
        """The probabilities that confidence and entropy are read from, [M, V]."""
        tempered = self.tempered and self.temperature > 0
        return self.law(log_probs.double()).exp() if tempered else log_probs.exp()

    def confidence_in(self, tokens, log_probs):
        """The confidence in `tokens` (int64 [M]), at the decoder's precision, [M] (section 6).

        sampled: p(token), the released rule; distribution: max p; Dream's margin: p₁ − p₂; and its
        entropy, given as exp(−H), which orders as −H does.
        """
        probs = self.read_from(log_probs)  # [M, V]
        if self.confidence == "sampled":
            confidence = probs.gather(1, tokens[:, None])[:, 0]
        elif self.confidence == "distribution":
            confidence = probs.amax(-1)
        elif self.confidence == "margin":
            first, second = probs.topk(2, -1).values.T
            confidence = first - second
        else:
            # float64, as float32 would make ties near 1
            confidence = (-torch.special.entr(probs).sum(-1).double()).exp()
        return self.rounded(confidence)

    def score(self, tokens, log_probs):
        """What the rule ranks positions by, one number each, float64 [M]."""
        kind = RULES[self.rule].score
        if kind == "left":  # all alike, so that the lowest position goes first
            return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        if kind == "entropy":
            return -torch.special.entr(self.read_from(log_probs)).sum(-1).double()
        return self.confidence_in(tokens, log_probs).double()

    # ---- the transition

    def quota_at(self, step):
        """Commits per pass at least, of units with `step` decided positions (int64 [U]): int or
        int64 [U, 1].
        """
        if not isinstance(self.quota, dict):
            return self.quota
        counts = [[self.quota.get(decided, 1)] for decided in step.tolist()]
        return torch.tensor(counts, device=step.device)

    @torch.inference_mode()
    def transition(self, out):
        """z = F(y): the state of every unit of the pass `out` after one more step, a list of U
        tuples of L ids.

        Raises FloatingPointError for logits of which no token can be taken. The states are all that
        the host waits for.
        """
        unit, position = out.places()  # of the M masked positions
        block, step = out.blocks[unit], out.decided[unit]
        tokens = torch.zeros_like(out.states)  # [U, L]
        score = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
        masked = torch.zeros_like(tokens, dtype=torch.bool)
        masked[unit, position] = True
        broken = torch.zeros(1, dtype=torch.bool, device=tokens.device)
        for rows in out.chunks():
            place = unit[rows], position[rows]
            log_probs = out.log_probs(rows)  # [m, V]
            best = self.perturbed(log_probs, block[rows], step[rows], position[rows]).max(-1)
            tokens[place] = best.indices
            score[place] = self.score(best.indices, log_probs)
            # NaN if any logit of the row is, infinite if none of its ids is allowed
            broken |= ~best.values.isfinite().all()
        now = commits(self.rule, self.value, score, masked, self.quota_at(out.decided))
        following = torch.where(now, tokens, out.states)
        # the flag travels as one more row, so that there is one transfer
        flag = broken.long().expand(1, following.shape[1])
        *following, broken = (tuple(state) for state in torch.cat([following, flag]).tolist())
        if any(broken):
            raise FloatingPointError(
                "the target's logits are NaN or infinite: check the checkpoint, or run it with "
                "--dtype float32"
            )
        return following
