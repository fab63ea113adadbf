"""The target: a block-diffusion language model, decoded exactly (paper sections 1 and 5).

Read from the top: `generate` is the draft-free loop, the definition of what a target writes; every
other way of decoding in this project must write the same tokens. `Canvas` is where a generation
stands. `Target.forward` is one pass over many states of a block. `block_attention` says who sees
whom in it.

Such a model looks both ways inside a block of L positions and back over all earlier blocks, and its
input holds a mask token wherever nothing has been decided. So a native transformers class runs it,
with our attention function in place of the causal one. Blocks are aligned to absolute position 0.

What this file leaves out: what becomes of the conditionals (decoder.py); targets that see the whole
canvas (full.py); which classes there are, and loading (targets.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

CHUNK = 1 << 25  # logits that exist at once


# ------------------------------------------------------------------------------ the draft-free loop


@dataclass
class Generation:
    """What a decoding loop returns."""

    ids: list  # the answer's token ids, cut before the first stop token
    written: list  # all new token ids, to the end of the last block
    passes: dict  # target passes by kind: prefill, denoise, kv_commit
    accepted: list = field(default_factory=list)  # draft nodes per round, without the free commit
    seconds: dict = field(default_factory=dict)  # by stage: draft, target, rest


def generate(target, decoder, prompt, fused=True, watch=None):
    """The draft-free loop: the definition of what the target writes. prompt int64 [P].

    fused: a finished block and the next one, all masked, share a pass, so that no pass is spent on
    the cache alone (the strongest baseline). False: the published loop, one storing pass a block.
    watch(canvas, state, next state, pass, its unit of the state) is told of every step.
    """
    canvas = start(target, decoder, prompt)
    while not canvas.is_final(canvas.state):
        canvas.settle()
        state = canvas.state
        # one pass over the state; over the next block too if the state is complete
        out, ahead = canvas.look([state], crosses=fused)
        unit = ahead.get(0, 0)
        following = decoder.transition(out)[unit]
        if canvas.is_complete(state):
            canvas.advance(state, out, 0)
            if not fused:
                canvas.passes["kv_commit"] += 1
                continue
        canvas.passes["denoise"] += 1
        if watch:
            watch(canvas, canvas.state, following, out, unit)
        canvas.state = following
    # the published loop stores the last block too
    canvas.passes["kv_commit"] += canvas.crosses and not fused
    return Generation(canvas.answer(), canvas.written(), canvas.passes)


def start(target, decoder, prompt):
    """The canvas of a new generation, prompt int64 [P] or a list of ids."""
    return target.canvas(target, decoder, prompt)


# ------------------------------------------------------------------------ where a generation stands


class Canvas:
    """Finished tokens, the active block's state, the prefix cache, and when to stop.

    On the host a state is a tuple of L token ids, `mask_id` where undecided, so that states can be
    compared and looked up.
    """

    crosses = True  # a finished block and the next one fit in one pass

    def __init__(self, target, decoder, prompt):
        ids = check_prompt(prompt, target)
        context = target.model.config.max_position_embeddings
        if self.length(target.block_size, len(ids), decoder.gen_len) > context:
            raise ValueError(
                f"{len(ids)} prompt tokens and {decoder.gen_len} new ones exceed the context of "
                f"{context}: shorten one of them"
            )
        self.target, self.decoder = target, decoder
        self.prompt_len = len(ids)  # P
        self.blank = (target.mask_id,) * target.block_size  # a block in which nothing is decided
        self.passes = {"prefill": 0, "denoise": 0, "kv_commit": 0}
        self.begin(ids)

    @staticmethod
    def length(L, P, gen_len):
        """Positions up to the end of the block in which the answer ends at the latest.

        >>> Canvas.length(32, 40, 30)
        96
        """
        return -(-(P + gen_len) // L) * L

    def begin(self, ids):
        """Lay out the prompt: complete blocks are cached, the rest begins the active block."""
        L, P = self.target.block_size, self.prompt_len
        self.origin = 0  # absolute position of block 0
        self.done = ids[: P // L * L]  # tokens of finished blocks
        self.state = tuple(ids[len(self.done) :]) + self.blank[P % L :]
        self.prefix = self.target.prefill(self.done)
        self.passes["prefill"] += P >= L

    @property
    def block(self):
        """Index of the active block."""
        return (len(self.done) - self.origin) // self.target.block_size

    def look(self, states, crosses=True):
        """The target's pass over `states` of the active block, each seeing the prefix and itself.

        A blank next block is appended behind every complete state after which generation goes on
        (unless not `crosses`). Returns (Pass, {unit of such a state: unit of its next block}).
        """
        complete = [u for u, state in enumerate(states) if crosses and self.goes_on(state)]
        ahead = {u: len(states) + i for i, u in enumerate(complete)}
        units = states + [self.blank] * len(ahead)
        blocks = [self.block] * len(states) + [self.block + 1] * len(ahead)
        parents = {unit: u for u, unit in ahead.items()}
        return self.target.forward(units, blocks, self.prefix, parents), ahead

    def settle(self):
        """Close a finished block where that needs no pass (full attention); nothing here."""

    def is_complete(self, state):
        return self.target.mask_id not in state

    def is_final(self, state):
        """True for a complete state of the active block after which generation stops."""
        if not self.is_complete(state):
            return False
        new = state[max(0, self.prompt_len - len(self.done)) :]
        stopped = self.target.stops and not self.target.stop_ids.isdisjoint(new)
        return stopped or len(self.done) + len(state) - self.prompt_len >= self.decoder.gen_len

    def goes_on(self, state):
        """True for a complete state behind which another block follows."""
        return self.is_complete(state) and not self.is_final(state)

    def is_leaf(self, state):
        """True for a state of which a pass would tell nothing, so that it is not worth drafting: it
        is its parent's own F, and no block follows in the same pass."""
        return self.is_final(state)

    def advance(self, state, out=None, u=None):
        """Close the active block with `state`, whose K and V are unit u of the pass `out`; the next
        block is blank."""
        self.prefix = self.target.extend(self.prefix, out, u)
        self.done = self.done + list(state)
        self.state = self.blank

    def written(self):
        """All new token ids, to the end of the last block."""
        return (self.done + list(self.state))[self.prompt_len :]

    def answer(self):
        """Token ids of the answer: at most gen_len, cut before the first stop token."""
        new = self.written()[: self.decoder.gen_len]
        stops = [i for i, token in enumerate(new) if token in self.target.stop_ids]
        return new[: stops[0]] if stops else new


def check_prompt(prompt, target):
    """The prompt's ids as a list; ValueError for what cannot be one."""
    if not isinstance(prompt, (torch.Tensor, list, tuple)):
        raise ValueError("the prompt is no list of token ids: use target.encode(text)")
    ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError("the prompt is no list of whole numbers: use target.encode(text)")
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if target.mask_id in ids:
        raise ValueError(
            "the prompt holds the mask token: take it out, as it would be read as undecided"
        )
    size = target.model.config.vocab_size
    if not 0 <= min(ids) <= max(ids) < size:
        raise ValueError(f"the prompt holds ids outside 0 to {size - 1}: encode it for this target")
    return ids


# --------------------------------------------------------------------------------------- the target


class Target:
    """A block-diffusion model with its tokenizer and ids. All ids come from the checkpoint."""

    attention = "block"  # "full" for targets that see the whole canvas: see full.py
    stops = True  # a block with a stop id ends the generation; False: it only cuts the answer
    canvas = Canvas

    def __init__(self, model, tokenizer, block_size, mask_id, stop_ids):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.block_size = block_size  # L
        self.mask_id, self.stop_ids = mask_id, frozenset(stop_ids)
        self.device, self.dtype = model.device, model.dtype
        # ids from here on are untrained: never committed
        self.n_ids = len(tokenizer) if tokenizer is not None else model.config.vocab_size
        # True: the softmax goes over all ids, as in released code, also over those never committed
        self.whole_softmax = False
        self.pad_to = None  # a fixed number of units per pass: see `padded`

    # ---- one pass

    @torch.inference_mode()
    def forward(self, states, blocks, prefix, parents):
        """One pass over U units: lay out, attend, gather. Returns a Pass.

        states: tuples of L ids; unit u stands at block `blocks[u]` behind `prefix` and sees itself
        and the prefix; parents: {unit: unit that it sees too}, for a next block behind a finished
        one. Conditionals can be read at masked positions only. With a prefix of batch size B,
        `states` holds B·U tuples, row by row (not in padded passes).
        """
        count, L = len(blocks), self.block_size
        if self.pad_to:
            states, blocks, parents = self.padded(states, blocks, parents)
        ids = self.tensor(states)  # [B·U, L]
        blocks = self.tensor(blocks)  # [U]
        positions = blocks[:, None] * L + torch.arange(L, device=self.device)  # [U, L]
        layout = Layout(L, prefix, *self.sight(len(blocks), parents), record=[])
        hidden = self.attend(ids, positions, layout)  # [B·U, L, h]
        if self.pad_to:  # what filled the pass up is dropped
            states, ids, blocks, hidden = (x[:count] for x in (states, ids, blocks, hidden))
        return self.gather(states, ids, blocks, hidden, layout.record)

    def tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def sight(self, U, parents):
        """(context [C], sees [U, C]) of a Layout, from {unit: unit that it sees}."""
        if not parents:
            return None, None
        context = self.tensor(sorted(set(parents.values())))
        sees = torch.zeros(U, len(context), dtype=torch.bool, device=self.device)
        for child, parent in parents.items():
            sees[child] |= context == parent
        return context, sees

    def attend(self, ids, positions, layout):
        """The model's last hidden states of units ids [B·U, S] at positions [U, S]: [B·U, S, h]."""
        U, S = positions.shape
        out = self.model.model(
            input_ids=ids.view(-1, U * S), position_ids=positions.reshape(1, U * S), layout=layout,
            use_cache=False,
        )  # fmt: skip
        return out.last_hidden_state.view(-1, S, self.model.config.hidden_size)

    def gather(self, states, ids, blocks, hidden, record):
        """The Pass over units with `states` (ids [N, L]) from their hidden states [N, L, h]."""
        tokens = [token for state in states for token in state]
        masked = [i for i, token in enumerate(tokens) if token == self.mask_id]
        hidden = hidden.flatten(0, 1)[self.tensor(masked)]  # [M, h]
        counts = [state.count(self.mask_id) for state in states]
        blocks = blocks.repeat(len(states) // len(blocks))  # of every row of a batch
        size = self.model.config.vocab_size
        return Pass(ids, blocks, masked, counts, hidden, self.log_probs, size, record)

    def padded(self, states, blocks, parents):
        """The units of a pass filled up to `pad_to`, of which one always stands behind another.

        Then all passes over as long a prefix have one shape, and a state's conditionals are rounded
        alike in all of them [ours]. ValueError for several rows.
        """
        if len(states) != len(blocks):
            raise ValueError("padded passes take one row of units: leave `pad_to` None for a batch")
        missing = self.pad_to - len(blocks)
        if missing < (not parents) or len(set(parents.values())) > 1:
            raise ValueError(f"{len(blocks)} units do not fit {self.pad_to}: raise pad_to")
        parents = parents or {self.pad_to - 1: 0}
        return list(states) + [states[0]] * missing, list(blocks) + [blocks[0]] * missing, parents

    @torch.inference_mode()
    def log_probs(self, hidden):
        """log p_s(v) of hidden states [m, h]: [m, V] in float32 or float64, −inf for [MASK] and
        untrained ids, whose share is missing from the sum if `whole_softmax`."""
        m, size = len(hidden), self.model.config.vocab_size
        if self.pad_to:  # one shape here too
            rows = min(chunk_rows(size), self.pad_to * self.block_size)
            hidden = torch.cat([hidden, hidden.new_zeros(rows - m, hidden.shape[1])])
        logits = self.model.lm_head(hidden)[:m]  # [m, V]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        whole = logits.logsumexp(-1, keepdim=True) if self.whole_softmax else None
        logits[:, self.mask_id] = -torch.inf
        logits[:, self.n_ids :] = -torch.inf
        return logits.sub_(logits.logsumexp(-1, keepdim=True) if whole is None else whole)

    # ---- the prefix cache

    @torch.inference_mode()
    def prefill(self, ids):
        """The prefix cache of n complete blocks `ids`: per layer (K, V), each [1, KV, n·L, d]; None
        for n = 0."""
        n, L = len(ids) // self.block_size, self.block_size
        if n == 0:
            return None
        index = torch.arange(n, device=self.device)
        # a block sees those before it
        layout = Layout(L, None, index, index[:, None] > index, record=[])
        positions = torch.arange(n * L, device=self.device).view(n, L)
        self.attend(self.tensor(ids).view(n, L), positions, layout)
        return [(k.flatten(2, 3), v.flatten(2, 3)) for k, v in layout.record]

    def extend(self, prefix, out, u):
        """The prefix cache with unit u of the pass `out` appended."""
        new = [(k[:, :, u], v[:, :, u]) for k, v in out.record]
        if prefix is None:
            return new
        pairs = zip(prefix, new)
        return [(torch.cat([k, more_k], 2), torch.cat([v, more_v], 2))
                for (k, v), (more_k, more_v) in pairs]  # fmt: skip

    # ---- text

    def encode(self, text):
        """A user's message in the target's chat format as token ids, int64 [P]."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError("the prompt is empty: give at least one word")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("the prompt holds bytes that are no UTF-8: write it in UTF-8")
        if self.tokenizer is None:
            raise ValueError(
                "the model's folder holds no tokenizer files: add them, or give token ids"
            )
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return torch.tensor(self.tokenizer.encode(chat, add_special_tokens=False))

    def decode(self, ids):
        """Text of answer ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class Pass:
    """What one target pass tells of its U units. Conditionals are made as they are read, never all
    at once."""

    states: torch.Tensor  # int64 [U, L]
    blocks: torch.Tensor  # int64 [U], the block that each unit stands at
    masked: list  # flat places u·L + s of the M masked positions, on the host, in order
    counts: list  # masked positions of each unit
    hidden: torch.Tensor  # [M, h], their last hidden states
    head: Callable  # hidden [m, h] -> log p [m, V]
    size: int  # V
    record: list  # per layer (K, V) of all units, each [B, KV, U, S, d]
    partial: bool = False  # True: not all masked positions can be read (see full.py)

    @property
    def decided(self):
        """Decided positions of each unit's state, int64 [U]: its step."""
        L = self.states.shape[1]
        return torch.tensor([L - count for count in self.counts], device=self.states.device)

    def places(self):
        """(unit, position) of the M masked positions, int64 [M] each."""
        L = self.states.shape[1]
        flat = torch.tensor(self.masked, dtype=torch.int64, device=self.states.device)
        return flat // L, flat % L

    def chunks(self):
        """Slices of the M masked positions whose conditionals may exist at once."""
        rows, M = chunk_rows(self.size), len(self.masked)
        return [slice(first, min(first + rows, M)) for first in range(0, M, rows)]

    def log_probs(self, rows):
        """log p_s(v) [m, V] of a slice of the M masked positions; −inf for ids never committed."""
        return self.head(self.hidden[rows])

    def unit(self, u):
        """log p_s(v) [k, V] of unit u's k masked positions."""
        first = sum(self.counts[:u])
        return self.log_probs(slice(first, first + self.counts[u]))


def chunk_rows(size):
    """Number of rows of `size` logits that may exist at once."""
    return max(1, CHUNK // size)


# ------------------------------------------------------------------------------------ who sees whom


@dataclass
class Layout:
    """How the units (block states) of one row see each other; read by `block_attention`."""

    block_size: int  # S, positions of a unit
    prefix: list | None = None  # per layer (K, V), each [B, KV, P, d], that every unit sees
    context: torch.Tensor | None = None  # int64 [C], the units that others may see
    sees: torch.Tensor | None = None  # bool [U, C], which of these a unit sees besides itself
    record: list | None = None  # collects each layer's (K, V) of all units [B, KV, U, S, d]


def block_attention(module, query, key, value, attention_mask, scaling, layout=None, **_):
    """softmax(q·[K_own, K_prefix, K_context]ᵀ)·[V_own, V_prefix, V_context] (paper section 5).

    The row is a sequence of U units of L positions. Every unit sees itself, the cached prefix, and
    the context units that `layout.sees` grants it. One function thus serves the prefill (a block
    sees those before it), the pass over many states of one block (none sees another), the next
    block appended behind a finished one, and training. query [B, H, U·L, d]; key, value
    [B, KV, U·L, d]; returns ([B, U·L, H, d], None). `attention_mask` is unused.
    """
    B, H, S, d = query.shape
    KV, L = key.shape[1], layout.block_size
    U, G = S // L, H // KV  # G: query heads per key head
    # a unit's G heads are rows of one product
    q = (query * scaling).view(B, KV, G, U, L, d).transpose(2, 3).reshape(B, KV, U, G * L, d)
    k, v = key.view(B, KV, U, L, d), value.view(B, KV, U, L, d)
    scores = [q @ k.transpose(-1, -2)]  # own: [B, KV, U, G·L, L]
    shared = []  # V that all units read: [B, KV, ·, d]

    def score(keys):  # [B, KV, n, d] -> [B, KV, U, G·L, n]
        return (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(B, KV, U, G * L, -1)

    if layout.prefix is not None:
        prefix_k, prefix_v = layout.prefix[module.layer_idx]
        scores.append(score(prefix_k))
        shared.append(prefix_v)
    if layout.context is not None:
        # layers may lie on several devices
        context, sees = layout.context.to(k.device), layout.sees.to(k.device)
        context_k, context_v = (t.index_select(2, context).flatten(2, 3) for t in (k, v))
        unseen = ~sees.repeat_interleave(L, 1)[:, None]  # [U, 1, C·L]
        scores.append(score(context_k).masked_fill(unseen, -torch.inf))
        shared.append(context_v)
    if layout.record is not None:
        layout.record.append((k, v))
    weights = torch.cat(scores, -1).softmax(-1).split([part.shape[-1] for part in scores], -1)
    out = weights[0] @ v  # [B, KV, U, G·L, d]
    for weight, values in zip(weights[1:], shared):
        out = out + (weight.flatten(2, 3) @ values).view(out.shape)
    out = out.view(B, KV, U, G, L, d).permute(0, 2, 4, 1, 3, 5)  # [B, U, L, KV, G, d]
    return out.reshape(B, S, H, d), None


AttentionInterface.register("block_units", block_attention)
