"""Draft trees (paper sections 4 and 9): which hypothetical block states are worth verifying in the next pass.

`grow` is the level-wise best-first tree of section 4 over any order distribution q(s|y); SPOT, the confidence tree
(BlockSpec) and the position oracle differ only in the q they hand it. `chain` (SSD) and `graph` (Spiffy) are the peers'
other shapes. All take the stale conditionals and the canvas and return a Tree, so that only the drafting differs.

What this file leaves out: verifying a tree (verify.py), training the drafter and calibrating the graph (train.py).
"""

import json
from dataclasses import dataclass
from functools import partial

import numpy as np

from drafter import TOP

YIELD = 0.9  # share of a node's mass that its best child is expected to hold: about the drafter's accuracy [ours]
HEDGE = 0.6  # under this stale probability the second token is a candidate too


@dataclass
class Tree:
    """Root and draft nodes: states (tuples of L ids, root first), masses m(z) (1 where a drafter has none), and each
    node's parent (−1 for the root)."""

    states: list
    masses: list
    parents: list

    def head(self, n):
        """The root and the n heaviest nodes; closed under parents, as a node is never heavier than its parent."""
        return Tree(self.states[: n + 1], self.masses[: n + 1], self.parents[: n + 1])


def root_only(canvas):
    """The tree of a round that drafts nothing."""
    return Tree([canvas.state], [1.0], [-1])


def step_of(canvas, state):
    """Number of decided positions of a state: its step, which names the noise (section 6)."""
    return len(state) - state.count(canvas.target.mask_id)


def commit(state, position, token):
    """The state with one more position decided."""
    return state[:position] + (token,) + state[position + 1 :]


def grow(stale, canvas, order, budget, floor=0.0, go_on=None):
    """m(z) = m(y)·q(s|y)·p(v), m(root) = 1: the `budget` heaviest states, grown level by level (section 4).

    order: function from decided bool [N, k] to q [N, k] over the stale positions. Each level expands, in one call of
    it, those of the best nodes seen that are not expanded yet, until none is left: the same tree as one node at a
    time from a heap. A state reached by two orders is one node with the larger mass [ours]. Nodes under `floor` (γ)
    are dropped. go_on(masses of the best nodes, masses of those to be expanded) may end the growth early. Nodes come
    heaviest first, so a parent stands before its children. All states of a level have the same step, so that at T > 0
    they share their candidates (section 6).
    """
    if budget < 1:
        raise ValueError(f"the budget is {budget}: give at least 1 draft node per round")
    positions, k = stale.positions, len(stale.positions)
    mask_id = canvas.target.mask_id
    states, masses, parents, known = [canvas.state], [1.0], [-1], {canvas.state}
    kept, frontier = [], [0]
    while frontier and (go_on is None or go_on([masses[i] for i in kept], [masses[i] for i in frontier])):
        seen = stale.at(step_of(canvas, states[frontier[0]]))
        value = seen.values[:, :2].copy()  # p(v) of the two candidates
        value[value[:, 0] >= HEDGE, 1] = 0
        decided = np.array([[states[i][s] != mask_id for s in positions] for i in frontier])
        child = np.array([masses[i] for i in frontier])[:, None, None] * order(decided)[:, :, None] * value
        child = child.ravel()  # [N·k·2]
        cut = masses[kept[-1]] if len(kept) == budget else 0.0
        candidates = np.flatnonzero((child > cut) & (child >= floor))
        fresh = []
        for c in candidates[np.argsort(-child[candidates], kind="stable")].tolist():
            i, j, r = c // (2 * k), c // 2 % k, c % 2
            state = commit(states[frontier[i]], positions[j], seen.tokens[j][r])
            if state in known or canvas.is_leaf(state):  # nothing to verify [ours]
                continue
            known.add(state)
            fresh.append(len(states))
            states.append(state)
            masses.append(float(child[c]))
            parents.append(frontier[i])
            if len(fresh) == budget:
                break
        kept = sorted(kept + fresh, key=lambda i: -masses[i])[:budget]
        frontier = [i for i in kept if i in fresh and not canvas.is_complete(states[i])]
    index = {i: n for n, i in enumerate([0] + kept)}
    return Tree([states[i] for i in index], [masses[i] for i in index], [-1] + [index[parents[i]] for i in kept])


@dataclass
class Costs:
    """Measured seconds [ours]: passes[u], one target pass over u units; drafts[n], one drafter call on n states,
    drafts[0] what a round pays before its first call (reading the stale features)."""

    passes: list
    drafts: list


def best_rate(masses, costs, spent=0.0, complete=()):
    """max_n (1 + Σ_{i≤n} m_i) / (c(1 + n) + spent) and its n: expected commits per second of a round [ours].

    complete: indices of nodes that fill their block; such a node brings the next block into the pass and counts twice.
    """
    units = 1 + np.cumsum([0] + [1 + (i in complete) for i in range(len(masses))])
    measured = units < len(costs.passes)
    rates = (1 + np.cumsum([0.0] + masses))[measured] / (np.array(costs.passes)[units[measured]] + spent)
    return rates.max(), int(rates.argmax())


def worth_growing(costs, spent, masses, frontier):
    """A `go_on` for `grow`: another level is drafted only while it should raise the round's commits per second [ours].

    Each node to be expanded is taken to bring one child with YIELD of its mass. spent: one-element list, the seconds of
    drafting so far, updated here.
    """
    call = costs.drafts[min(len(frontier), len(costs.drafts) - 1)]
    rate, _ = best_rate(masses, costs, spent[0] if masses else 0.0)
    hoped, _ = best_rate(sorted(masses + [YIELD * m for m in frontier], reverse=True), costs, spent[0] + call)
    if hoped > rate:
        spent[0] += call
    return hoped > rate


# ------------------------------------------------------------------------------------------------- the drafters


def undecided(stale, canvas, state):
    """Stale indices 0…k−1 still masked in `state`, by falling confidence at its step."""
    ranking = stale.at(step_of(canvas, state)).ranking
    return [j for j in ranking if state[stale.positions[j]] == canvas.target.mask_id]


def path_tree(stale, canvas, budget, choose):
    """The tree that is one path of up to `budget` nodes: choose(state) -> (position, token), one after the other."""
    tree = root_only(canvas)
    while len(tree.masses) <= budget and undecided(stale, canvas, tree.states[-1]):
        state = commit(tree.states[-1], *choose(tree.states[-1]))
        if canvas.is_leaf(state):
            break
        tree.states.append(state)
        tree.parents.append(len(tree.masses) - 1)
        tree.masses.append(1.0)
    return tree


def foreseen(stale, canvas, state):
    """The most confident stale position left at the state's step, and the token foreseen there."""
    j = undecided(stale, canvas, state)[0]
    return stale.positions[j], stale.at(step_of(canvas, state)).tokens[j][0]


def chain(stale, canvas, budget):
    """SSD-style: the D most confident stale positions in confidence order, with their foreseen tokens, as one path."""
    return path_tree(stale, canvas, budget, partial(foreseen, stale, canvas))


def confidence_order(stale, width):
    """q(s|y) ∝ stale confidence over the `width` most confident positions left: BlockSpec's tree, read as an order
    model."""

    def q(decided):
        seen = stale.at(stale.step(decided[0]))
        confidence = seen.confidence.cpu().numpy()
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            best = [j for j in seen.ranking if not taken[j]][:width]
            total = confidence[best].sum()
            row[best] = confidence[best] / total if total > 0 else 1 / len(best)
        return out

    return q


def confidence_tree(stale, canvas, budget, width=2):
    """BlockSpec-style: the confidence tree of width W over positions and tokens, cut to the D heaviest nodes.

    Masses as in `grow`, with the normalised confidences as q [ours]; its depth K is whatever the cut leaves.
    """
    return grow(stale, canvas, confidence_order(stale, width), budget)


def load_graph(path):
    """Calibrated draft sets, as train.py graph writes them: tuples of (position rank, vocabulary rank) pairs."""
    try:
        with open(path) as file:
            sets = [tuple((i, j) for i, j in pairs) for pairs in json.load(file)["sets"]]
        for pairs in sets:
            ranks = [i for i, _ in pairs]
            if (
                not pairs
                or ranks != sorted(set(ranks))
                or not all(type(i) is int and i >= 0 and j in range(TOP) for i, j in pairs)
            ):
                raise ValueError
        return sets
    except FileNotFoundError:
        raise FileNotFoundError(f"no draft graph at {path!r}: calibrate one with train.py graph") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a draft graph: calibrate it again with train.py graph") from None


def graph(stale, canvas, budget, sets):
    """Spiffy: a calibrated draft graph. `sets`: the chosen draft sets in order, each a tuple of (position rank i,
    vocabulary rank j) pairs sorted by i; parents (one pair less) come first. Ranks are instantiated on the newest
    conditionals, at T > 0 as the noise of the node's step has them [ours]."""
    left = len(undecided(stale, canvas, canvas.state))
    tree, node = root_only(canvas), {(): 0}
    for pairs in sets:
        parent = next((p for p in (pairs[:n] + pairs[n + 1 :] for n in range(len(pairs))) if p in node), None)
        if len(tree.states) > budget:
            break
        if parent is None or pairs[-1][0] >= left:
            continue  # near a block's end some ranks are gone: the next sets move up
        i, j = next(iter(set(pairs) - set(parent)))
        before = tree.states[node[parent]]
        at = undecided(stale, canvas, before)[i - sum(rank < i for rank, _ in parent)]
        state = commit(before, stale.positions[at], stale.at(step_of(canvas, before)).tokens[at][j])
        if canvas.is_leaf(state):
            continue
        node[pairs] = len(tree.states)
        tree.states.append(state)
        tree.parents.append(node[parent])
        tree.masses.append(1.0)
    return tree


def spot(stale, canvas, budget, drafter, floor=0.0):
    """SPOT: the tree of the order drafter's q(s|y), with γ = `floor`."""
    return grow(stale, canvas, drafter.order(stale), budget, floor)


def spot_cost_aware(stale, canvas, budget, drafter, costs):
    """n = argmax (1 + Σ_{i≤n} m_i) / (c(1 + n) + drafting): SPOT that drafts and verifies as far as it pays [ours].

    Of at most `budget` nodes; no drafter call at all where none can pay. γ follows from the measured `costs`: a node
    whose mass is under the mean (c(n+1) − c(n)) / c(1) costs more than the draft-free loop pays for as many commits.
    """
    spent, passes = [costs.drafts[0]], np.array(costs.passes[1:])
    floor = max(0.0, (passes[-1] - passes[0]) / (len(passes) - 1) / passes[0])
    tree = grow(stale, canvas, drafter.order(stale), budget, floor, partial(worth_growing, costs, spent))
    complete = {i for i, state in enumerate(tree.states[1:]) if canvas.is_complete(state)}
    return tree.head(best_rate(tree.masses[1:], costs, spent[0], complete)[1])


# -------------------------------------------------------------- oracles: what knowing the truth would give


def next_commits(canvas, truth):
    """The true commits (position, token) still to come in the active block; truth: {block: its states, in order}."""
    states = truth.get(canvas.block, [])
    if canvas.state not in states:
        return []  # the text has left the truth, as rounding may make it in bfloat16
    at = states.index(canvas.state)
    return [
        (s, after[s])
        for before, after in zip(states[at:], states[at + 1 :])
        for s in range(len(after))
        if before[s] != after[s]
    ]


def oracle_positions(stale, canvas, budget, truth):
    """True commit order, stale tokens (with the hedge): the bound for a better order drafter (section 2)."""
    coming = [s for s, _ in next_commits(canvas, truth)]
    if not coming:
        return root_only(canvas)

    def q(decided):
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            left = [s for s in coming if not taken[stale.positions.index(s)]]
            row[stale.positions.index(left[0])] = 1.0
        return out

    return grow(stale, canvas, q, budget)


def oracle_tokens(stale, canvas, budget, truth):
    """True tokens in stale-confidence order: what knowing every token would give without a model of the order
    (section 2)."""
    if not next_commits(canvas, truth):
        return root_only(canvas)
    final = truth[canvas.block][-1]

    def choose(state):
        position, _ = foreseen(stale, canvas, state)
        return position, final[position]

    return path_tree(stale, canvas, budget, choose)
