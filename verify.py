"""Verification by state equality (paper section 5) and the one speculative loop of the project.

A round: draft a tree of hypothetical states of the active block; one target pass over the root and all nodes, each a
full copy of the block that sees the cached prefix and itself only; walk from the root: where F(y) is itself a node,
it has been verified, go on from there. The last F gives one more commit for free. As F is a function, the accepted
nodes form a path and the text is exactly the draft-free one, whatever was drafted.

Cross-block drafting: a node that completes the block is verified together with the next block, all masked, which sees
it.

Sampling (section 6): given its noise, F is a function at T > 0 too, and the drafter knows that noise: `coupled`
matching is the same loop. `greedy` and `uncoupled` matching stand beside it to compare with.

What this file leaves out: where trees come from (ddtree.py).
"""

import time
from dataclasses import replace

from ddtree import root_only
from dlm import Generation, start
from drafter import Stale


MATCHERS = ("coupled", "greedy", "uncoupled")


def accept(states, following):
    """The accepted path by state equality: indices into `states`, from the root 0. following[u] = F(states[u])."""
    index = {state: u for u, state in enumerate(states)}
    path = [0]
    while following[path[-1]] in index and following[path[-1]] != states[path[-1]]:  # F(y) = y only for a complete y
        path.append(index[following[path[-1]]])
    return path


def lay_out(canvas, tree):
    """The pass's units: every node, then a blank next block behind each complete one, unless the generation ends there.
    (states, blocks, parents). Where `target.units` is set, only the first complete node gets its next block."""
    complete = [u for u, state in enumerate(tree.states) if canvas.is_complete(state) and not canvas.is_leaf(state)]
    complete = complete[:1] if canvas.target.units else complete
    n = len(tree.states)
    return (
        tree.states + [canvas.blank] * len(complete),
        [canvas.block] * n + [canvas.block + 1] * len(complete),
        {n + i: u for i, u in enumerate(complete)},
    )


def matcher(name, decoder):
    """(drafting decoder, judging decoder) of a matcher (section 6): whose candidates are drafted, and whose F must
    equal a node for it to be accepted. The free commit is always that of `decoder`.

    coupled: draft with the target's own noise; exact. greedy: draft and accept the likeliest tokens; biased towards
    them. uncoupled: draft with other noise; exact, and accepts less. At T = 0 all are the same.
    """
    if name == "greedy":
        likeliest = replace(decoder, temperature=0.0)
        return likeliest, likeliest
    if name == "uncoupled":
        return replace(decoder, seed=~decoder.seed), decoder
    if name != "coupled":
        raise ValueError(f"unknown matcher {name!r}: choose from {', '.join(MATCHERS)}")
    return decoder, decoder


def speculate(target, decoder, prompt, draft, matching="coupled", match=accept, watch=None):
    """Decode `prompt` (int64 [P]) with drafts: the same answer as `dlm.generate`, in fewer passes. Returns a
    Generation.

    draft(stale, canvas) -> Tree whose first state is the canvas's; matching: see `matcher`; match(states, following) ->
    accepted path. watch(canvas, tree, path, next state, pass, its unit of the next state) is told of every round.
    Seconds are split into draft, target and rest.
    """
    begin = time.perf_counter()
    drafting, judging = matcher(matching, decoder)
    canvas, verified, accepted = start(target, decoder, prompt), None, []
    seconds = {"draft": 0.0, "target": time.perf_counter() - begin}
    while not canvas.is_final(canvas.state):
        if canvas.is_complete(canvas.state) and not canvas.crosses:
            canvas.advance(canvas.state)
            verified = None
        # 1. draft from the conditionals of the last verified state, of which the current one is the transition
        drafting_from = time.perf_counter()
        blind = verified is None or canvas.is_complete(canvas.state)
        tree = root_only(canvas) if blind else draft(Stale(drafting, *verified), canvas)
        drafted = time.perf_counter()
        # 2. one pass over the root, all nodes and the next blocks behind finished ones
        states, blocks, parents = lay_out(canvas, tree)
        out = canvas.look(states, blocks, parents)
        following = decoder.transition(out)
        judged = following if judging == decoder else judging.transition(out)
        canvas.passes["denoise"] += 1
        seconds["draft"] += drafted - drafting_from
        seconds["target"] += time.perf_counter() - drafted
        # 3. accept
        path = match(tree.states, judged[: len(tree.states)])
        accepted.append(len(path) - 1)
        last = path[-1]
        unit = next(
            (child for child, parent in parents.items() if parent == last), last
        )  # the next block's, if `last` is complete
        if watch:
            watch(canvas, tree, path, following[unit], out, unit)
        if unit != last:
            canvas.advance(tree.states[last], out, last)
        verified = None if out.partial else (states[unit], target.mask_id, canvas.block, out.unit(unit))
        canvas.state = following[unit]  # the free commit
    seconds["rest"] = time.perf_counter() - begin - sum(seconds.values())
    return Generation(canvas.answer(), canvas.written(), canvas.passes, accepted, seconds)
