"""Targets that see the whole canvas (LLaDA, Dream), with Fast-dLLM's caches: arXiv 2505.22618.

Blocks start at the end of the prompt, and every position sees all others, with masks where nothing
is written yet. So a pass over states of one block brings along what lies around it, or reads K and
V of it that an earlier pass left. Such K and V are approximate, but the same with and without
drafts: exact means here equal to draft-free decoding with the same cache.

What this file leaves out: block-causal targets and the loops (dlm.py, verify.py), which serve these
targets too.
"""

from dataclasses import replace

import torch

from dlm import Canvas, Layout, Target

CACHES = ("none", "prefix", "dual")  # see FullCanvas


class FullCanvas(Canvas):
    """A generation of a full-attention target.

    cache `none`: every pass runs over the whole canvas. Otherwise one such pass opens a block, and
    the later ones see its K and V: `prefix` keeps those before the block and runs over the block
    and all behind it; `dual` keeps all and runs over the block alone.
    """

    crosses = False  # the next block's first pass runs over the whole canvas: it is its own

    @staticmethod
    def length(L, P, gen_len):
        return P + -(-gen_len // L) * L

    def begin(self, ids):
        """Blocks start behind the prompt; nothing is cached yet."""
        L, P = self.target.block_size, self.prompt_len
        if self.target.cache not in CACHES:
            choices = ", ".join(CACHES)
            raise ValueError(f"unknown cache {self.target.cache!r}: choose from {choices}")
        self.origin, self.done, self.state = P, ids, self.blank
        self.prefix = None  # K and V around the block, once its first pass has run
        self.behind = self.length(L, P, self.decoder.gen_len) - P - L  # positions after the block

    def look(self, states, crosses=True):
        """The target's pass over `states` of the active block; none has a next block behind it."""
        target, start, block = self.target, len(self.done), self.block
        tail = self.blank[:1] * self.behind
        if self.prefix is not None:
            tail = tail if target.cache == "prefix" else ()
            return target.forward(states, block, start, self.prefix, (), tail), {}
        out = target.forward(states, block, start, None, self.done, tail)
        if target.cache != "none":
            self.prefix = self.keep(out.record, start)
            if target.shift:
                out = only_first(out)
        return out, {}

    def keep(self, record, start):
        """K and V outside the block (dual), or before it (prefix), of the pass that opens it."""
        end = start + self.target.block_size if self.target.cache == "dual" else None

        def around(t):  # [1, KV, 1, S, d] -> [1, KV, ·, d]
            before = t[:, :, 0, :start]
            return before if end is None else torch.cat([before, t[:, :, 0, end:]], 2)

        return [(around(k), around(v)) for k, v in record]

    def settle(self):
        """A finished block is closed without a pass, as K and V of the next one are made anew."""
        if self.is_complete(self.state):
            self.advance(self.state)

    def is_leaf(self, state):
        return self.is_complete(state)

    def advance(self, state, out=None, u=None):
        self.done, self.state, self.prefix = self.done + list(state), self.blank, None
        self.behind -= self.target.block_size


class FullTarget(Target):
    """A target with full attention.

    shift: the logits at position s speak of position s + 1 (Dream). A block's opening pass then
    decides its first position only, as its logits stand before the block, where later passes do not
    look.
    """

    attention = "full"
    stops = False  # the whole canvas is written
    canvas = FullCanvas

    def __init__(self, model, tokenizer, block_size, mask_id, stop_ids, shift=False, cache="dual"):
        super().__init__(model, tokenizer, block_size, mask_id, stop_ids)
        self.shift, self.cache = shift, cache

    @torch.inference_mode()
    def forward(self, states, block, start, prefix, lead, tail):
        """One pass over `states` (U tuples of L ids) of the block that starts at position `start`.

        prefix: K and V that all see, or None; lead, tail: ids before and behind the block that
        every unit brings along. Returns a Pass.
        """
        count, L = len(states), self.block_size
        # a pass that opens a block for a cache has one unit, and a shape of its own
        if self.pad_to and (not lead or self.cache == "none"):
            states = self.filled(states)
        U, S = len(states), len(lead) + L + len(tail)
        around = [self.tensor(part).expand(U, -1) for part in (lead, tail)]
        ids = self.tensor(states)  # [U, L]
        positions = start - len(lead) + torch.arange(S, device=self.device)  # [S]
        layout = Layout(S, prefix, record=[])
        rows = torch.cat([around[0], ids, around[1]], 1)  # [U, S]
        hidden = self.attend(rows, positions.expand(U, S), layout)  # [U, S, h]
        # where the logits of the block's positions stand; position 0 has none before it
        read = torch.arange(L, device=self.device) + len(lead) - int(self.shift)
        hidden = hidden[:count, read.clamp(min=0)]
        blocks = torch.full((count,), block, device=self.device)
        return self.gather(states[:count], ids[:count], blocks, hidden, layout.record)

    def filled(self, states):
        """`states` filled up to `pad_to`, so that all passes of a kind have one shape [ours]."""
        missing = self.pad_to - len(states)
        if missing < 0:
            raise ValueError(f"{len(states)} units do not fit {self.pad_to}: raise pad_to")
        return list(states) + [states[0]] * missing


def only_first(out):
    """The pass `out` of one unit with only the block's first position to be read."""
    kept = int(out.masked[:1] == [0])
    return replace(out, masked=out.masked[:kept], hidden=out.hidden[:kept], partial=True)
