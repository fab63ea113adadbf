"""Verification by state equality (paper section 5) and the one speculative loop of the project.

A round: draft a tree of hypothetical states of the active block; one target pass over the root and
all nodes, each a full copy of the block that sees the cached prefix and itself only; walk from the
root: where F(y) is itself a node, it has been verified, go on from there. The last F gives one more
commit for free. As F is a function, the accepted nodes form a path and the text is exactly the
draft-free one, whatever was drafted.

Cross-block drafting: a node that completes the block is verified together with the next block, all
masked, which sees it.

Sampling (paper section 6): given its noise, F is a function at T > 0 too, and the drafter knows
that noise: `coupled` matching is the same loop. `greedy` and `uncoupled` matching stand beside it
to compare with.

What this file leaves out: where trees come from (ddtree.py).
"""

import time
from dataclasses import replace

from ddtree import root_only
from dlm import Generation, start
from drafter import Stale

MATCHINGS = ("coupled", "greedy", "uncoupled")


def accept(states, following):
    """The accepted path by state equality: indices into `states`, from the root 0.

    states: tuples of ids, root first; following[u] = F(states[u]).

    >>> accept([(9, 9), (1, 9), (9, 2)], [(9, 2), (1, 2), (1, 2)])   # 9: undecided
    [0, 2]
    """
    index = {state: u for u, state in enumerate(states)}
    path = [0]
    while True:
        last = path[-1]
        # F(y) = y only for a complete y, where the walk ends
        if following[last] == states[last] or following[last] not in index:
            return path
        path.append(index[following[last]])


def decoders_of(matching, decoder):
    """(decoder to draft with, decoder whose F a node must equal to be accepted): paper section 6.

    coupled: draft with the target's own noise; exact. greedy: draft and accept the likeliest
    tokens; biased towards them. uncoupled: draft with other noise; exact, and accepts less. At
    T = 0 all are the same. The free commit is always that of `decoder`. ValueError for others.
    """
    if matching == "greedy":
        likeliest = replace(decoder, temperature=0.0)
        return likeliest, likeliest
    if matching == "uncoupled":
        return replace(decoder, seed=~decoder.seed), decoder
    if matching != "coupled":
        choices = ", ".join(MATCHINGS)
        raise ValueError(f"unknown matching {matching!r}: choose from {choices}")
    return decoder, decoder


def speculate(target, decoder, prompt, draft, matching="coupled", walk=accept, watch=None):
    """Decode `prompt` (int64 [P]) with drafts: the answer of `dlm.generate`, in fewer passes.

    draft(stale, canvas) -> Tree whose first state is the canvas's; matching: see `decoders_of`;
    walk(states, following) -> accepted path. watch(canvas, tree, path, next state, pass, its unit
    of the next state) is told of every round. Returns a Generation.
    """
    clock = Clock()
    draft_decoder, accept_decoder = decoders_of(matching, decoder)
    canvas, verified, accepted = start(target, decoder, prompt), None, []
    clock.lap("target")
    while not canvas.is_final(canvas.state):
        canvas.settle()
        # 1. draft, from the conditionals of the last verified state, whose transition the current
        # state is; a block that is new to the target, or complete, leaves nothing to draft from
        if verified is None or verified.block != canvas.block or canvas.is_complete(canvas.state):
            tree = root_only(canvas)
        else:
            tree = checked(draft(verified, canvas), canvas)
        clock.lap("draft")
        # 2. one pass over the root, all nodes, and the next block behind each complete one
        out, ahead = canvas.look(tree.states)
        following = decoder.transition(out)
        agreed = following if accept_decoder == decoder else accept_decoder.transition(out)
        canvas.passes["denoise"] += 1
        clock.lap("target")
        # 3. accept: the walk along F, and one more commit, in the next block if this one is done
        path = walk(tree.states, agreed[: len(tree.states)])
        last = path[-1]
        unit = ahead.get(last, last)
        accepted.append(len(path) - 1)
        if watch:
            watch(canvas, tree, path, following[unit], out, unit)
        if unit != last:
            canvas.advance(tree.states[last], out, last)
        # the conditionals of the deepest state that was verified are the next stale ones
        deepest = tree.states[last] if unit == last else canvas.blank
        known = (deepest, target.mask_id, canvas.block, out.unit(unit))
        verified = None if out.partial else Stale(draft_decoder, *known)
        canvas.state = following[unit]
        clock.lap("rest")
    return Generation(canvas.answer(), canvas.written(), canvas.passes, accepted, clock.seconds)


def checked(tree, canvas):
    """The tree that a draft returned, if it is one; else ValueError says what is wrong with it."""
    root, mask_id = canvas.state, canvas.target.mask_id
    vocab_size = canvas.target.model.config.vocab_size
    try:
        if type(tree.states) is not list or tree.states[:1] != [root]:
            raise ValueError("a draft's first state must be the canvas's: use root_only(canvas)")
        if not len(tree.states) == len(tree.masses) == len(tree.parents):
            raise ValueError("a draft's states, masses and parents must be equally many: add some")
        for state in tree.states:
            if type(state) is not tuple:
                raise ValueError("a drafted state is no tuple of ids: make it one")
            if len(state) != len(root):
                size = f"{len(state)} positions, the block {len(root)}"
                raise ValueError(f"a drafted state has {size}: make them equal")
            if any(old not in (mask_id, new) for old, new in zip(root, state)):
                raise ValueError("a drafted state changes a decided position: keep what is decided")
            whole = all(type(token) is int for token in state)
            if not whole or not 0 <= min(state) <= max(state) < vocab_size:
                raise ValueError("a drafted state holds an id that the target does not have: fix")
    except (AttributeError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"a draft returned no tree of token ids ({why}): return a Tree") from None
    return lone_crossing(tree, canvas) if canvas.target.pad_to else tree


def lone_crossing(tree, canvas):
    """Of several complete nodes only the first: a padded pass has room for one next block [ours].

    The others tell nothing without it: each is its parent's own F, and is written all the same.
    """
    crossing = [u for u, state in enumerate(tree.states) if canvas.goes_on(state)]
    return tree.picked([u for u in range(len(tree.states)) if u not in crossing[1:]])


class Clock:
    """Seconds by stage: `lap(stage)` adds what has gone by since the last lap."""

    def __init__(self):
        self.seconds = {"draft": 0.0, "target": 0.0, "rest": 0.0}
        self.last = time.perf_counter()

    def lap(self, stage):
        now = time.perf_counter()
        self.seconds[stage] += now - self.last
        self.last = now
