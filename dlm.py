"""The target: a block-diffusion language model, decoded exactly.

Holds the prefix cache, one pass over many block states (paper section 5), the commit rules, the noise and the
transition F (sections 1, 6 and 7) and the draft-free loop, which is the definition of truth: every other way of
decoding in this project must write the same tokens.

A block-diffusion model looks both ways inside a block of L positions and back over all earlier blocks, and its input
holds a mask token wherever nothing has been decided. So a native transformers class runs it, with our attention
function registered in place of the causal one. Blocks of a block-causal target are aligned to absolute position 0;
`FullCanvas` decodes the full-attention ones.

What this file leaves out: which classes those are, and loading (targets.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

RULES = {  # commit rules and their default values
    "exact": None,
    "sequential": None,
    "threshold": 0.9,
    "product": 0.9,
    "factor": 1.0,
    "entropy": 0.1,
}
RELEASED = {  # what SDAR's released code calls them
    "low_confidence_static": "exact",
    "low_confidence_dynamic": "threshold",
    "entropy_bounded": "entropy",
}
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONFIDENCES = ("sampled", "distribution", "margin", "entropy")  # see Decoder.read
CACHES = ("none", "prefix", "dual")  # of a full-attention target: see FullCanvas
NOISES = ("step", "position")  # what indexes the noise; "position" alone changes the law, and is here to show that
COLDEST, HOTTEST = 1e-6, 100.0  # temperatures that are taken, beside 0
CHUNK = 1 << 25  # logits that exist at once


# ------------------------------------------------------------------------- attention over units of one block


@dataclass
class Units:
    """How the units (block states) of one row see each other; read by `block_attention`.

    prefix: per layer (K, V), each [B, KV, P, d], or None; context: int64 [C], the units that others may see; sees:
    bool [U, C], which context units a unit sees besides itself; record: collects each layer's (K, V) [B, KV, U, L,
    d].
    """

    block_size: int
    prefix: list | None = None
    context: torch.Tensor | None = None
    sees: torch.Tensor | None = None
    record: list | None = None


def block_attention(module, query, key, value, attention_mask, scaling, units=None, **_):
    """softmax(q·[K_own, K_prefix, K_context]ᵀ)·[V_own, V_prefix, V_context]: block-causal attention (section 5).

    The row is a sequence of U units of L positions. Every unit sees the cached prefix, the context units that
    `units.sees` grants it, and itself. One function thus serves the prefill (a unit sees those before it), the pass
    over many hypothetical states of one block (none sees another), the next block appended behind a finished one, and
    training. query [B, H, U·L, d]; key, value [B, KV, U·L, d]; returns ([B, U·L, H, d], None). `attention_mask` is
    unused.
    """
    B, H, S, d = query.shape
    KV, L = key.shape[1], units.block_size
    U, G = S // L, H // KV  # G: query heads per key head
    q = (query * scaling).view(B, KV, G, U, L, d).transpose(2, 3).reshape(B, KV, U, G * L, d)
    k, v = key.view(B, KV, U, L, d), value.view(B, KV, U, L, d)
    scores, values = [q @ k.transpose(-1, -2)], [v]  # own: [B, KV, U, G·L, L]
    if units.prefix is not None:
        prefix_k, prefix_v = units.prefix[module.layer_idx]
        scores.append((q.flatten(2, 3) @ prefix_k.transpose(-1, -2)).view(B, KV, U, G * L, -1))
        values.append(prefix_v)
    if units.context is not None:
        context, sees = units.context.to(k.device), units.sees.to(k.device)  # layers may lie on several devices
        context_k, context_v = (t.index_select(2, context).flatten(2, 3) for t in (k, v))
        hidden = ~sees.repeat_interleave(L, 1)[:, None]  # [U, 1, C·L]
        scores.append(
            (q.flatten(2, 3) @ context_k.transpose(-1, -2)).view(B, KV, U, G * L, -1).masked_fill(hidden, -torch.inf)
        )
        values.append(context_v)
    if units.record is not None:
        units.record.append((k, v))
    weights = torch.cat(scores, -1).softmax(-1).split([part.shape[-1] for part in scores], -1)
    out = weights[0] @ values[0]
    for weight, part in zip(weights[1:], values[1:]):
        out = out + (weight.flatten(2, 3) @ part).view(out.shape)
    return out.view(B, KV, U, G, L, d).permute(0, 2, 4, 1, 3, 5).reshape(B, S, H, d), None


AttentionInterface.register("block_units", block_attention)


# ------------------------------------------------------------------------------------ commit rules


def commit_order(score, masked):
    """Masked positions by falling score, ties to the lowest position: the ONE tie-breaking of the project.

    score, masked: [..., L]. Returns (order int64 [..., L], sorted score [..., L]); unmasked positions come last, as
    -inf.
    """
    sorted_score, order = score.masked_fill(~masked, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return order, sorted_score


def commits(rule, value, confidence, entropy, masked, least=1):
    """The set of masked positions that `rule` commits now (section 7's table); at least `least` (an int or int64 [...,
    1]) as far as masks are left.

    With c₁ ≥ c₂ ≥ … sorted: exact: top 1; threshold: c > τ; product: largest n with Π_{j≤n} c_j ≥ τ;
    factor: largest n with (n+1)(1−c_n) ≤ f; entropy: sorted by entropy, largest k with Σ_{j≤k} H_j − max H ≤ γ.
    sequential: the first from the left. confidence, entropy (only read by `entropy`), masked: [..., L]. Returns bool
    [..., L].
    """
    score = -entropy if rule == "entropy" else torch.zeros_like(confidence) if rule == "sequential" else confidence
    order, c = commit_order(score, masked)
    n = torch.arange(1, c.shape[-1] + 1, device=c.device)
    if rule in ("exact", "sequential"):
        holds = (n == 1).expand_as(c)
    elif rule == "threshold":
        holds = c > value
    elif rule == "product":
        holds = c.cumprod(-1) >= value
    elif rule == "factor":
        holds = (n + 1) * (1 - c) <= value
    else:
        holds = (-c).cumsum(-1) - (-c).cummax(-1).values <= value
    holds = holds & (c > -torch.inf)
    count = holds.sum(-1, keepdim=True).clamp(min=least)  # every condition is monotone in n
    return torch.zeros_like(masked).scatter(-1, order, (n <= count)) & masked


# --------------------------------------------------------------------------------------------- noise and transition

WEYL, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def scramble(x):
    """The splitmix64 hash of int64 x, which wraps around as unsigned 64-bit arithmetic does."""
    x = x + WEYL
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * FIRST
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * SECOND
    return x ^ ((x >> 31) & (1 << 33) - 1)


def gumbel(seed, block, step, position, size):
    """G = −log(−log u): standard Gumbel noise of ids 0…size−1, float64 [M, size], a pure function of its arguments.

    block, step, position: int64 [M]; u, from 52 bits of a counter hash [ours], is never 0 or 1. The bits are the same
    on every machine; the two logarithms may differ in the last place between device types, so that one seed writes one
    text per device type (section 6).
    """
    key = torch.full_like(block, seed)
    for part in (block, step, position):
        key = scramble(key) ^ part
    ids = torch.arange(size, device=block.device) * WEYL
    bits = (scramble(scramble(key)[:, None] + ids) >> 12) & (1 << 52) - 1
    return ((bits.double() + 0.5) * 2.0**-52).log_().neg_().log_().neg_()


@dataclass
class Decoder:
    """What turns conditionals into the next state: the commit rule and, at T > 0, how tokens are drawn (section 6).

    value: the rule's threshold; least: commits per pass at least, released code's block_size / steps, or {decided
    positions: commits} where they vary (see `linear_schedule`). precision: bfloat16 rounds probabilities before they
    are compared [ours, as released code does at full size]; float32 compares them as they are. gen_len: new tokens
    after which generation stops, at a block's end. temperature, top_k, top_p: the law that tokens are drawn from, in
    this order, as in the released SDAR decoder; 0 takes the likeliest. confidence: probability of the `sampled` token
    (released) or of the likeliest one of the `distribution`; `margin` and `entropy` are Dream's; tempered: read it from
    that law (SDAR) and not from the model's own softmax (LLaDA). noise: `step` draws anew at every commit, which keeps
    the law; `position` once per position, which does not for a sampled confidence.
    """

    rule: str = "exact"
    value: float | None = None
    precision: str = "bfloat16"
    gen_len: int = 256
    temperature: float = 0.0
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    confidence: str = "sampled"
    tempered: bool = False
    noise: str = "step"
    least: int | dict = 1

    def __post_init__(self):
        self.rule = RELEASED.get(self.rule, self.rule)
        for kind, known in (
            ("rule", RULES),
            ("precision", PRECISIONS),
            ("confidence", CONFIDENCES),
            ("noise", NOISES),
        ):
            if getattr(self, kind) not in known:
                raise ValueError(f"unknown {kind} {getattr(self, kind)!r}: choose from {', '.join(known)}")
        counts = self.least.values() if isinstance(self.least, dict) else [self.least]
        if not all(type(count) is int and count >= 1 for count in counts):  # with 0, a pass may change nothing, forever
            raise ValueError(f"least is {self.least}: commit a whole number of positions per pass, at least 1")
        if self.gen_len < 1:
            raise ValueError(f"gen_len is {self.gen_len}: ask for at least 1 new token")
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"the temperature is {self.temperature}: give 0 (no sampling), or {COLDEST} to {HOTTEST}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: keep at least 1 token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a probability above 0 and up to 1")
        self.value = RULES[self.rule] if self.value is None else self.value
        if self.value is not None and self.value != self.value:
            raise ValueError(f"the value of rule {self.rule} is not a number: give one")

    def rounded(self, probability):
        """Probabilities at the decoder's precision, in the type they came in."""
        return probability.bfloat16().to(probability.dtype) if self.precision == "bfloat16" else probability

    def law(self, log_probs):
        """log p(v) of the law that tokens are drawn from at T > 0: softmax(log_probs / T), the top_k likeliest of it,
        of these the likeliest up to and including the one that brings their sum over top_p. [..., V], same type."""
        law = ((log_probs - log_probs.amax(-1, keepdim=True)) / self.temperature).log_softmax(-1)
        if self.top_k is not None and self.top_k < law.shape[-1]:
            least = law.topk(self.top_k, -1).values[..., -1:]
            law = law.masked_fill(law < least, -torch.inf).log_softmax(-1)
        if self.top_p < 1:
            ranked, order = law.sort(dim=-1, descending=True, stable=True)
            before = ranked.exp().cumsum(-1) - ranked.exp()
            law = law.masked_fill((before > self.top_p).gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)
        return law

    def perturbed(self, log_probs, block, step, position):
        """T·(log p(v) + G_v), float64 [M, V], whose argmax is a draw from the law (section 6); the log_probs at T = 0.

        Of M rows of log_probs [M, V]; block, step (decided positions of the state) and position, int64 [M], name the
        noise. Scaled by T, so that its softmax goes over into the conditional as T falls to 0 [ours].
        """
        if self.temperature == 0:
            return log_probs
        step = step if self.noise == "step" else torch.zeros_like(step)
        noise = gumbel(self.seed, block, step, position, log_probs.shape[1])
        return self.temperature * (self.law(log_probs.double()) + noise)

    def read(self, log_probs, tokens):
        """Of M rows, confidence in `tokens` (int64 [M]) at the decoder's precision, and entropy, both [M].

        sampled: p(token); distribution: max p; margin: p₁ − p₂; entropy: exp(−H), which orders as −H does.
        """
        tempered = self.tempered and self.temperature > 0
        probs = self.law(log_probs.double()).exp() if tempered else log_probs.exp()
        entropy = probs[:, 0]
        if "entropy" in (self.rule, self.confidence):
            entropy = torch.special.entr(probs).sum(-1)
        if self.confidence == "sampled":
            confidence = probs.gather(1, tokens[:, None])[:, 0]
        elif self.confidence == "distribution":
            confidence = probs.amax(-1)
        elif self.confidence == "margin":
            confidence = -probs.topk(2, -1).values.diff()[:, 0]
        else:
            confidence = (-entropy.double()).exp()  # near 1, float32 would make ties
        return self.rounded(confidence), entropy

    def quota(self, step):
        """Commits per pass at least, of units with `step` decided positions (int64 [U]): an int or int64 [U, 1]."""
        if not isinstance(self.least, dict):
            return self.least
        return torch.tensor([[self.least.get(decided, 1)] for decided in step.tolist()], device=step.device)

    @torch.inference_mode()
    def transition(self, out):
        """z = F(y): the state of every unit of the pass `out` after one more step, a list of U tuples of L ids.

        Raises FloatingPointError for conditionals that are not numbers. The states are all that the host waits for.
        """
        unit, position = out.at()
        block, step = out.blocks[unit], out.decided[unit]
        tokens, masked = torch.zeros_like(out.states), torch.zeros_like(out.states, dtype=torch.bool)
        masked[unit, position] = True
        confidence, entropy = torch.zeros(2, *tokens.shape, dtype=torch.float64, device=tokens.device)
        for rows in out.chunks():
            log_probs, at = out.log_probs(rows), (unit[rows], position[rows])
            tokens[at] = self.perturbed(log_probs, block[rows], step[rows], position[rows]).argmax(-1)
            confidence[at], entropy[at] = (part.double() for part in self.read(log_probs, tokens[at]))
        now = commits(self.rule, self.value, confidence, entropy, masked, self.quota(out.decided))
        following = torch.where(now, tokens, out.states)
        following = torch.cat([following, confidence.isnan().any().long().expand(1, following.shape[1])])
        *following, broken = (tuple(state) for state in following.tolist())
        if any(broken):
            raise FloatingPointError(
                "the target's logits hold NaN: check the checkpoint, or run in float32 with --dtype float32"
            )
        return following


def linear_schedule(masks, steps, last=1e-3):
    """Dream's commits per pass, {decided: commits}: of `masks` positions, int(left·(1 − s/t)) at t → s along
    linspace(1, last, steps + 1), all at the last step. Steps that would commit nothing are left out: they change no
    state."""
    if steps < 1:
        raise ValueError(f"the number of steps is {steps}: give at least 1")
    times = torch.linspace(1, last, steps + 1).tolist()
    schedule, decided = {}, 0
    for step, (t, s) in enumerate(zip(times, times[1:]), 1):
        commits_now = int((masks - decided) * (1 - s / t)) if step < steps else masks - decided
        if commits_now:
            schedule[decided] = commits_now
            decided += commits_now
    return schedule


# ------------------------------------------------------------------------------------------------- the target


@dataclass
class Pass:
    """One target pass over U units: `states` int64 [U, L]; `blocks` int64 [U], where they stand; `where`, the places
    u·L + s of the M masked positions, a list in order, kept on the host so that nothing waits for the device; `hidden`
    [M, h], their last hidden states; `head`, from these to the conditionals of `size` ids; `record`, per layer (K, V)
    of all units. Conditionals are made as they are read, never all at once.
    """

    states: torch.Tensor
    blocks: torch.Tensor
    where: list
    hidden: torch.Tensor
    head: Callable
    size: int
    record: list
    partial: bool = False  # not all undecided positions can be read

    def __post_init__(self):
        U, L = self.states.shape
        self.counts = torch.tensor(self.where, dtype=torch.int64).div(L, rounding_mode="floor").bincount(minlength=U)
        self.decided = (L - self.counts).to(self.states.device)  # int64 [U], decided positions of each state: its step
        self.counts = self.counts.tolist()  # masked positions of each unit

    def at(self):
        """(unit, position) of the M masked positions, int64 [M] each."""
        where = torch.tensor(self.where, dtype=torch.int64, device=self.states.device)
        return where // self.states.shape[1], where % self.states.shape[1]

    def keep_first(self):
        """Leave only the first position of the one unit to be read, where the others' conditionals are not to be
        used."""
        kept = int(self.where[:1] == [0])
        self.where, self.hidden, self.counts, self.partial = self.where[:kept], self.hidden[:kept], [kept], True

    def chunks(self):
        """Slices of the M masked positions whose conditionals may exist at once."""
        rows = chunk_rows(self.size)
        return [slice(start, start + rows) for start in range(0, len(self.hidden), rows)]

    def log_probs(self, rows):
        """log p_s(v) [m, V] of a slice of the M masked positions; −inf for ids that must never be committed."""
        return self.head(self.hidden[rows])

    def unit(self, u):
        """log p_s(v) [k, V] of unit u's k masked positions."""
        start = sum(self.counts[:u])
        return self.log_probs(slice(start, start + self.counts[u]))


def chunk_rows(size):
    """Number of rows of `size` ids that may exist at once."""
    return max(1, CHUNK // size)


class Target:
    """A block-diffusion model with its tokenizer and ids. All ids come from the checkpoint.

    attention: "block" (block-causal, blocks aligned to position 0) or "full" (every position sees the whole canvas);
    shift: the logits at position s speak of position s + 1; stops: a block with a stop id ends the generation (False:
    the whole canvas is written, and stop ids only cut the answer). Ids from n_ids on are untrained: never committed.
    """

    def __init__(self, model, tokenizer, block_size, mask_id, stop_ids, attention="block", shift=False):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.block_size, self.mask_id, self.stop_ids = block_size, mask_id, frozenset(stop_ids)
        self.attention, self.shift, self.stops = attention, shift, attention == "block"
        self.cache = "dual"  # of a full-attention target: see FullCanvas
        self.units = None  # a fixed number of units per pass: see `padded`
        self.whole_softmax = False  # True: over all ids, as in released code, also over those never committed
        self.n_ids = len(tokenizer) if tokenizer is not None else model.config.vocab_size
        self.device, self.dtype = model.device, model.dtype

    @torch.inference_mode()
    def forward(self, states, blocks, prefix, parents, origin=0, lead=(), tail=()):
        """One pass over U units: `states`, a list of tuples of L ids; unit u stands at block `blocks[u]` behind
        `prefix`.

        parents: {unit: unit it also sees}, for a next block appended to a finished one. origin: absolute position of
        block 0; lead, tail: ids around the block that every unit brings along. Logits can be read at masked positions
        only. Returns a Pass. With a prefix of batch size B, `states` holds B·U tuples, row by row (not in padded
        passes).
        """
        count = len(blocks)
        if self.units and (not lead or self.cache == "none"):
            states, blocks, parents = self.padded(states, blocks, parents)
        U, L, S = len(blocks), self.block_size, len(lead) + self.block_size + len(tail)
        rows = states if count == U else states[:count]
        where = [i for i, token in enumerate(t for state in rows for t in state) if token == self.mask_id]
        states, blocks, lead, tail = (torch.tensor(x, device=self.device).long() for x in (states, blocks, lead, tail))
        units = Units(S, prefix, record=[])
        if parents:
            units.context = torch.tensor(sorted(set(parents.values())), device=self.device)
            units.sees = torch.zeros(U, len(units.context), dtype=torch.bool, device=self.device)
            for child, parent in parents.items():
                units.sees[child] |= units.context == parent
        rows = torch.cat([lead.expand(len(states), -1), states, tail.expand(len(states), -1)], 1)
        positions = origin + blocks[:, None] * L - len(lead) + torch.arange(S, device=self.device)
        hidden = self.model.model(
            input_ids=rows.view(-1, U * S), position_ids=positions.view(1, -1), units=units, use_cache=False
        ).last_hidden_state.view(-1, S, self.model.config.hidden_size)
        at = (torch.arange(L, device=self.device) + len(lead) - int(self.shift)).clamp(min=0)
        if count < U:
            states, blocks, hidden = states[:count], blocks[:count], hidden[:count]
        hidden = hidden[:, at].flatten(0, 1)[torch.tensor(where, dtype=torch.int64, device=self.device)]
        blocks = blocks.repeat(len(states) // len(blocks))
        return Pass(states, blocks, where, hidden, self.log_probs, self.model.config.vocab_size, units.record)

    def padded(self, states, blocks, parents):
        """The units of a pass filled up to `self.units`, of which one always stands behind another (not where the whole
        canvas is seen): then all passes over as long a prefix have one shape, but those that open a block of a whole
        canvas, and a state's conditionals are rounded alike in all of them [ours]. ValueError for several rows."""
        if len(states) != len(blocks):
            raise ValueError("padded passes take one row of units: leave `units` None to decode a batch")
        missing = self.units - len(blocks)
        if missing < (not parents) or len(set(parents.values())) > 1:
            raise ValueError(f"{len(blocks)} units do not fit a pass of {self.units}: give the target more units")
        if not parents and self.attention == "block":
            parents = {self.units - 1: 0}
        return list(states) + [states[0]] * missing, list(blocks) + [blocks[0]] * missing, parents

    @torch.inference_mode()
    def log_probs(self, hidden):
        """log p_s(v) of hidden states [m, h], [m, V] in float32 or float64; −inf for [MASK] and untrained ids, whose
        share is missing from the sum if `whole_softmax`."""
        m = len(hidden)
        if self.units:  # one shape here too
            rows = min(chunk_rows(self.model.config.vocab_size), self.units * self.block_size)
            hidden = torch.cat([hidden, hidden.new_zeros(rows - m, hidden.shape[1])])
        logits = self.model.lm_head(hidden)[:m]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = logits.logsumexp(-1, keepdim=True) if self.whole_softmax else None
        logits[:, self.mask_id] = -torch.inf
        logits[:, self.n_ids :] = -torch.inf
        return logits.sub_(logits.logsumexp(-1, keepdim=True) if total is None else total)

    @torch.inference_mode()
    def prefill(self, ids):
        """The prefix cache of n complete blocks `ids`: per layer (K, V) [1, KV, n·L, d]; None for n = 0."""
        n = len(ids) // self.block_size
        if n == 0:
            return None
        ids = torch.tensor(ids, device=self.device)
        index = torch.arange(n, device=self.device)
        units = Units(self.block_size, None, index, index[:, None] > index, [])
        self.model.model(
            input_ids=ids.view(1, -1),
            position_ids=torch.arange(len(ids), device=self.device)[None],
            units=units,
            use_cache=False,
        )
        return [(k.flatten(2, 3), v.flatten(2, 3)) for k, v in units.record]

    def extend(self, prefix, out, u):
        """The prefix cache with unit u of the pass `out` appended."""
        new = [(k[:, :, u], v[:, :, u]) for k, v in out.record]
        if prefix is None:
            return new
        return [(torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)) for (old_k, old_v), (k, v) in zip(prefix, new)]

    def encode(self, prompt):
        """A user's message in the target's chat format as token ids, int64 [P], ready for the answer."""
        if not prompt.strip():
            raise ValueError("the prompt is empty: give at least one word")
        if self.tokenizer is None:
            raise ValueError("the model's folder holds no tokenizer files: add them, or give token ids to the decoder")
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return torch.tensor(self.tokenizer.encode(chat, add_special_tokens=False))

    def decode(self, ids):
        """Text of answer ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


# ------------------------------------------------------------------------------------------- generation's state


class Canvas:
    """Where a generation stands: finished tokens, the active block's state, the prefix cache, and when to stop.

    On the host a state is a tuple of L token ids, so that states can be compared and looked up; prompt int64 [P].
    """

    crosses = True  # a finished block and the next one fit in one pass

    def __init__(self, target, decoder, prompt):
        L, P = target.block_size, len(prompt)
        context = target.model.config.max_position_embeddings
        if P < 1:
            raise ValueError("the prompt is empty: give at least one token")
        if self.length(L, P, decoder.gen_len) > context:
            raise ValueError(
                f"{P} prompt tokens and {decoder.gen_len} new ones exceed the context of {context}: shorten one of them"
            )
        ids = prompt.tolist()
        if target.mask_id in ids:
            raise ValueError(
                "the prompt holds the mask token: take it out, as it would be read as an undecided position"
            )
        self.target, self.decoder, self.prompt = target, decoder, P
        self.blank = (target.mask_id,) * L  # a block in which nothing is decided
        self.begin(ids)

    @staticmethod
    def length(L, P, gen_len):
        """Positions up to the end of the block in which the answer ends at the latest."""
        return -(-(P + gen_len) // L) * L

    def begin(self, ids):
        """Lay out the prompt: complete blocks are cached, the rest begins the first active block."""
        L, P = self.target.block_size, len(ids)
        self.origin = 0  # absolute position of block 0
        self.done = ids[: P // L * L]  # tokens of finished blocks
        self.state = tuple(ids[len(self.done) :]) + self.blank[P % L :]
        self.prefix = self.target.prefill(self.done)
        self.passes = {"prefill": int(P >= L), "denoise": 0, "kv_commit": 0}

    @property
    def block(self):
        """Index of the active block."""
        return (len(self.done) - self.origin) // self.target.block_size

    def look(self, states, blocks, parents):
        """The target's pass over units of the active block, and of the next one behind their `parents`."""
        return self.target.forward(states, blocks, self.prefix, parents)

    def is_complete(self, state):
        return self.target.mask_id not in state

    def is_final(self, state):
        """True for a complete state of the active block after which generation stops."""
        if not self.is_complete(state):
            return False
        new = state[max(0, self.prompt - len(self.done)) :]
        stopped = self.target.stops and not self.target.stop_ids.isdisjoint(new)
        return stopped or len(self.done) + len(state) - self.prompt >= self.decoder.gen_len

    def is_leaf(self, state):
        """True for a state of which a pass would tell nothing: it is its parent's own F, and no block follows in the
        same pass."""
        return self.is_final(state)

    def advance(self, state, out=None, u=None):
        """Close the active block with `state`, whose K and V are unit u of the pass `out`; the next block is blank."""
        self.done = self.done + list(state)
        self.prefix = self.target.extend(self.prefix, out, u)
        self.state = self.blank

    def written(self):
        """All new token ids, to the end of the last block."""
        return (self.done + list(self.state))[self.prompt :]

    def answer(self):
        """Token ids of the answer: at most gen_len, cut before the first stop token."""
        new = self.written()[: self.decoder.gen_len]
        return new[: next((i for i, t in enumerate(new) if t in self.target.stop_ids), len(new))]


class FullCanvas(Canvas):
    """A generation of a full-attention target (LLaDA, Dream) with Fast-dLLM's caches: arXiv 2505.22618.

    Blocks start at the end of the prompt, and every position sees the whole canvas, with masks where nothing is written
    yet. cache `none`: every pass runs over the whole canvas. Otherwise one such pass opens a block, and the later ones
    see its K and V: `prefix` keeps those before the block and runs over the block and all behind it; `dual` keeps all,
    and runs over the block alone. Such K and V are approximate, but the same with and without drafts. With shifted
    logits the opening pass decides the block's first position only, which the later passes cannot read.
    """

    crosses = False

    @staticmethod
    def length(L, P, gen_len):
        return P + -(-gen_len // L) * L

    def begin(self, ids):
        L, P = self.target.block_size, len(ids)
        if self.target.cache not in CACHES:
            raise ValueError(f"unknown cache {self.target.cache!r}: choose from {', '.join(CACHES)}")
        self.origin, self.done, self.state, self.prefix = P, ids, self.blank, None
        self.rest = self.length(L, P, self.decoder.gen_len) - P - L  # positions behind the active block
        self.passes = {"prefill": 0, "denoise": 0, "kv_commit": 0}

    def look(self, states, blocks, parents):
        target, start, tail = self.target, len(self.done), self.blank[:1] * self.rest
        if self.prefix is not None:
            tail = tail if target.cache == "prefix" else ()
            return target.forward(states, blocks, self.prefix, {}, self.origin, (), tail)
        out = target.forward(states, blocks, None, {}, self.origin, self.done, tail)
        if target.cache == "none":
            return out
        behind = start + (target.block_size if target.cache == "dual" else 10**9)
        kept = [[torch.cat([t[:, :, 0, :start], t[:, :, 0, behind:]], 2) for t in layer] for layer in out.record]
        self.prefix = kept
        if target.shift:
            out.keep_first()
        return out

    def is_leaf(self, state):
        return self.is_complete(state)

    def advance(self, state, out=None, u=None):
        self.done, self.state, self.prefix = self.done + list(state), self.blank, None
        self.rest -= self.target.block_size


def start(target, decoder, prompt):
    """The canvas of a new generation, prompt int64 [P]."""
    return (Canvas if target.attention == "block" else FullCanvas)(target, decoder, prompt)


@dataclass
class Generation:
    """What a decoding loop returns: answer ids, all new ids up to the last block's end, passes by kind, accepted
    nodes per round (the free commit not counted) and seconds by stage."""

    ids: list
    written: list
    passes: dict
    accepted: list = field(default_factory=list)
    seconds: dict = field(default_factory=dict)


def generate(target, decoder, prompt, fused=True, watch=None):
    """The draft-free loop: the definition of what the target writes. prompt int64 [P]; returns a Generation.

    fused: a finished block and the next, all masked, share one pass, so that no pass is spent on the cache alone (the
    strongest baseline); False: the published loop, one storing pass a block. watch(canvas, state, next state, pass, its
    unit of the state) is told of every step.
    """
    canvas = start(target, decoder, prompt)
    while not canvas.is_final(canvas.state):
        state, block, complete = canvas.state, canvas.block, canvas.is_complete(canvas.state)
        if complete and not canvas.crosses:
            canvas.advance(state)
            continue
        if complete and not fused:
            canvas.advance(state, canvas.look([state], [block], {}), 0)
            canvas.passes["kv_commit"] += 1
            continue
        units = [state, canvas.blank] if complete else [state]
        out = canvas.look(units, [block, block + 1][: len(units)], {1: 0} if complete else {})
        canvas.passes["denoise"] += 1
        following = decoder.transition(out)[-1]
        if complete:
            canvas.advance(state, out, 0)
        if watch:
            watch(canvas, units[-1], following, out, len(units) - 1)
        canvas.state = following
    canvas.passes["kv_commit"] += canvas.crosses and not fused  # the published loop stores the last block too
    return Generation(canvas.answer(), canvas.written(), canvas.passes)
