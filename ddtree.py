"""Draft trees (paper sections 4 and 9): which hypothetical block states are worth verifying in the
next pass.

`grow` is the level-wise best-first tree of section 4 over any order distribution q(s|y); SPOT, the
confidence tree (BlockSpec) and the position oracle differ only in the q they hand it. `chain` (SSD)
and `graph` (Spiffy) are the peers' other shapes. All take the stale conditionals and the canvas and
return a Tree, so that only the drafting differs.

What this file leaves out: verifying a tree (verify.py), training the drafter and calibrating the
graph (train.py).
"""

import json
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import command
from dlm import start
from drafter import TOP, Stale

HEDGE = 0.6  # under this stale probability the second token is a candidate too
# share of a node's mass that its best child is expected to hold: about the drafter's accuracy
# [ours]
YIELD = 0.9
REPEATS = 9  # measurements of a pass


@dataclass
class Tree:
    """Root and draft nodes, root first."""

    states: list  # tuples of L ids
    masses: list  # m(z); 1 where a drafter has none
    parents: list  # each node's parent, −1 for the root

    def head(self, n):
        """The root and the first n nodes; of a tree with falling masses the n heaviest, closed
        under parents, as a node is never heavier than its parent."""
        return Tree(self.states[: n + 1], self.masses[: n + 1], self.parents[: n + 1])

    def picked(self, nodes):
        """The tree of the given nodes, in their order; the root and each node's parent are among
        them.

        >>> Tree(["root", "a", "b", "ab"], [1, .2, .5, .1], [-1, 0, 0, 2]).picked([0, 2, 3])
        Tree(states=['root', 'b', 'ab'], masses=[1, 0.5, 0.1], parents=[-1, 0, 1])
        """
        index = {u: n for n, u in enumerate(nodes)} | {-1: -1}
        parents = [index[self.parents[u]] for u in nodes]
        return Tree([self.states[u] for u in nodes], [self.masses[u] for u in nodes], parents)


def root_only(canvas):
    """The tree of a round that drafts nothing."""
    return Tree([canvas.state], [1.0], [-1])


def step_of(canvas, state):
    """Number of decided positions of a state: its step, which names the noise (paper section 6)."""
    return len(state) - state.count(canvas.target.mask_id)


def commit(state, position, token):
    """The state with one more position decided."""
    return state[:position] + (token,) + state[position + 1 :]


# ----------------------------------------------------------------------- the tree of an order model


def grow(stale, canvas, order, budget, floor=0.0, go_on=None):
    """m(z) = m(y)·q(s|y)·p(v), m(root) = 1: the `budget` heaviest states (paper section 4).

    Grown level by level: one call of `order` expands those of the best nodes seen that are not
    expanded yet, until none is left. This gives the same tree as one node at a time from a heap.
    order: function from decided, bool [N, k], to q [N, k] over the k stale positions. Nodes under
    `floor` (γ) are dropped. go_on(masses of the best nodes, masses of those to be expanded) may end
    the growth early. Nodes come heaviest first, so a parent stands before its children.

    >>> from types import SimpleNamespace as Fake
    >>> canvas = Fake(state=(9, 9), target=Fake(mask_id=9), is_leaf=lambda state: 9 not in state,
    ...               is_complete=lambda state: 9 not in state)
    >>> seen = Fake(values=np.array([[.5, .4], [.9, .1]]), tokens=[[1, 2], [3, 4]])
    >>> stale = Fake(positions=[0, 1], candidates=lambda step: seen)
    >>> tree = grow(stale, canvas, lambda decided: np.array([[.2, .8]]), budget=3)
    >>> tree.states, [round(m, 2) for m in tree.masses]
    ([(9, 9), (9, 3), (1, 9), (2, 9)], [1.0, 0.72, 0.1, 0.08])
    """
    if budget < 1:
        raise ValueError(f"the budget is {budget}: give at least 1 draft node per round")
    states, masses, parents = [canvas.state], [1.0], [-1]
    known = {canvas.state}
    kept, frontier = [], [0]  # the best nodes so far, by falling mass; those of them to be expanded
    while frontier:
        if go_on and not go_on([masses[i] for i in kept], [masses[i] for i in frontier]):
            break
        cut = masses[kept[-1]] if len(kept) == budget else 0.0
        level = [(states[i], masses[i]) for i in frontier]
        fresh = []
        for mass, i, state in children(stale, canvas, order, level, floor, cut):
            # a state that two orders reach is one node with the larger mass [ours], and that one
            # comes first; of a leaf a pass would tell nothing [ours]
            if state in known or canvas.is_leaf(state):
                continue
            known.add(state)
            fresh.append(len(states))
            states.append(state)
            masses.append(mass)
            parents.append(frontier[i])
            # the level's children come by falling mass: none behind these can be among the best
            if len(fresh) == budget:
                break
        kept = sorted(kept + fresh, key=lambda i: -masses[i])[:budget]
        new = set(fresh)
        frontier = [i for i in kept if i in new and not canvas.is_complete(states[i])]
    return Tree(states, masses, parents).picked([0] + kept)


def children(stale, canvas, order, level, floor, cut):
    """The children of a level's nodes that weigh at least `floor` and more than `cut`, by falling
    mass: yields (mass, index in the level, state).

    level: [(state, mass)]; all have the same step, so that at T > 0 they share their candidates.
    """
    mask_id, positions = canvas.target.mask_id, stale.positions
    k = len(positions)
    seen = stale.candidates(step_of(canvas, level[0][0]))
    value = seen.values[:, :2].copy()  # p(v) of the two candidates, [k, 2]
    value[value[:, 0] >= HEDGE, 1] = 0
    decided = np.array([[state[s] != mask_id for s in positions] for state, _ in level])
    mass = np.array([mass for _, mass in level])
    # m(y)·q(s|y)·p(v), [N, k, 2]
    child = mass[:, None, None] * order(decided)[:, :, None] * value
    child = child.ravel()
    worth = np.flatnonzero((child > cut) & (child >= floor))
    for c in worth[np.argsort(-child[worth], kind="stable")].tolist():
        i, j, rank = c // (2 * k), c // 2 % k, c % 2
        yield float(child[c]), i, commit(level[i][0], positions[j], seen.tokens[j][rank])


def spot(stale, canvas, budget, drafter, floor=0.0):
    """SPOT: the tree of the order drafter's q(s|y), with γ = `floor`."""
    return grow(stale, canvas, drafter.order(stale), budget, floor)


# ------------------------------------------------------------------------ a budget that pays [ours]


@dataclass
class Costs:
    """Measured seconds [ours]."""

    passes: list  # passes[u]: one target pass over u units
    drafts: list  # drafts[n]: one drafter call on n states; drafts[0]: what comes before the first

    @classmethod
    def measure(cls, target, decoder, prompt, drafter, largest):
        """Seconds of passes over 1 … `largest` copies of a half-decided block behind the prompt,
        and of drafter calls.

        Lower quartiles of REPEATS, so that neither the first, cold ones nor a moment's disturbance
        count; sizes are interleaved, unmeasured ones interpolated.
        """
        canvas = start(target, decoder, prompt)
        if not canvas.crosses:
            canvas.look([canvas.blank])  # opens the block
        half = tuple(0 if i % 2 else mask for i, mask in enumerate(canvas.blank))
        log_probs = canvas.look([half])[0].unit(0)
        k = len(log_probs)
        sizes = sorted({1, 2, 3, 5, 7, 9, 13, 17, 21, largest} & set(range(largest + 1)))
        passes, drafts, first = {n: [] for n in sizes}, {n: [] for n in sizes}, []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            order = drafter.order(Stale(decoder, half, target.mask_id, canvas.block, log_probs))
            order(np.zeros((1, k), dtype=bool))  # reads the stale features, then one call
            first.append(time.perf_counter() - begin)
            for n in sizes:
                begin = time.perf_counter()
                decoder.transition(canvas.look([half] * n)[0])
                passed = time.perf_counter()
                order(np.zeros((n, k), dtype=bool))
                passes[n].append(passed - begin)
                drafts[n].append(time.perf_counter() - passed)
        before = max(0.0, quartile(first) - quartile(drafts[1]))
        return cls(every_size(passes, 0.0, largest), every_size(drafts, before, largest))


def quartile(seconds):
    """The lower quartile."""
    return float(np.percentile(seconds, 25))


def every_size(measured, zero, largest):
    """Seconds at sizes 0 … largest from {size: [seconds]}, `zero` at 0, in between interpolated."""
    sizes = list(measured)
    known = [zero] + [quartile(measured[n]) for n in sizes]
    return np.interp(np.arange(largest + 1), [0] + sizes, known).tolist()


def best_rate(masses, costs, spent=0.0, complete=()):
    """max_n (1 + Σ_{i≤n} m_i) / (c(1 + n) + spent) and its n: expected commits per second of a
    round [ours].

    complete: indices of nodes that fill their block; such a node brings the next block into the
    pass and counts twice.

    >>> best_rate([.9, .1], Costs(passes=[0, 1.0, 1.2, 1.4], drafts=[]))
    (1.5833333333333333, 1)
    """
    weight = [1 + (i in complete) for i in range(len(masses))]
    units = 1 + np.cumsum([0] + weight)  # of a pass over the first n nodes
    measured = units < len(costs.passes)
    commits = (1 + np.cumsum([0.0] + masses))[measured]
    seconds = np.array(costs.passes)[units[measured]] + spent
    rates = commits / seconds
    return float(rates.max()), int(rates.argmax())


def worth_growing(costs, spent, masses, frontier):
    """A `go_on` for `grow`: another level is drafted only while it should raise the round's commits
    per second [ours].

    Each node to be expanded is taken to bring one child with YIELD of its mass. spent: one-element
    list, the seconds of drafting so far, updated here.
    """
    call = costs.drafts[min(len(frontier), len(costs.drafts) - 1)]
    rate, _ = best_rate(masses, costs, spent[0] if masses else 0.0)
    hoped_for = sorted(masses + [YIELD * m for m in frontier], reverse=True)
    hoped, _ = best_rate(hoped_for, costs, spent[0] + call)
    if hoped > rate:
        spent[0] += call
    return hoped > rate


def spot_cost_aware(stale, canvas, budget, drafter, costs):
    """n = argmax (1 + Σ_{i≤n} m_i) / (c(1 + n) + drafting): SPOT that drafts and verifies as far as
    it pays [ours].

    Of at most `budget` nodes; no drafter call at all where none can pay. γ follows from the
    measured `costs`: a node whose mass is under the mean (c(n+1) − c(n)) / c(1) costs more than the
    draft-free loop pays for as many commits.
    """
    one, most = costs.passes[1], costs.passes[-1]
    floor = max(0.0, (most - one) / (len(costs.passes) - 2) / one)
    spent = [costs.drafts[0]]
    go_on = partial(worth_growing, costs, spent)
    tree = grow(stale, canvas, drafter.order(stale), budget, floor, go_on)
    complete = {i for i, state in enumerate(tree.states[1:]) if canvas.is_complete(state)}
    _, n = best_rate(tree.masses[1:], costs, spent[0], complete)
    return tree.head(n)


# ------------------------------------------------------------------------------ the peers' drafters


def undecided(stale, canvas, state):
    """Stale indices 0 … k−1 still masked in `state`, by falling confidence at its step."""
    ranking = stale.candidates(step_of(canvas, state)).ranking
    mask_id = canvas.target.mask_id
    return [j for j in ranking if state[stale.positions[j]] == mask_id]


def path_tree(stale, canvas, budget, choose):
    """The tree that is one path of up to `budget` nodes: choose(state) -> (position, token) of each
    next commit.

    >>> from types import SimpleNamespace as Fake
    >>> canvas = Fake(state=(9, 9), target=Fake(mask_id=9), is_leaf=lambda state: False)
    >>> stale = Fake(positions=[0, 1], candidates=lambda step: Fake(ranking=[1, 0]))
    >>> path_tree(stale, canvas, 4, lambda state: (state.index(9), 5)).states
    [(9, 9), (5, 9), (5, 5)]
    """
    tree = root_only(canvas)
    while len(tree.states) <= budget and undecided(stale, canvas, tree.states[-1]):
        position, token = choose(tree.states[-1])
        state = commit(tree.states[-1], position, token)
        if canvas.is_leaf(state):
            break
        tree.parents.append(len(tree.states) - 1)
        tree.states.append(state)
        tree.masses.append(1.0)
    return tree


def foreseen(stale, canvas, state):
    """The most confident stale position left at the state's step, and the token foreseen there."""
    j = undecided(stale, canvas, state)[0]
    return stale.positions[j], stale.candidates(step_of(canvas, state)).tokens[j][0]


def chain(stale, canvas, budget):
    """SSD-style: the D most confident stale positions in confidence order, with their foreseen
    tokens, as one path."""
    if budget < 1:
        raise ValueError(f"the budget is {budget}: give at least 1 draft node per round")
    return path_tree(stale, canvas, budget, partial(foreseen, stale, canvas))


def confidence_order(stale, width):
    """q(s|y) ∝ stale confidence over the `width` most confident positions left: BlockSpec's tree,
    read as an order model."""

    def q(decided):
        seen = stale.candidates(stale.step(decided[0]))
        confidence = seen.confidence.cpu().numpy()
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            best = [j for j in seen.ranking if not taken[j]][:width]
            total = confidence[best].sum()
            row[best] = confidence[best] / total if total > 0 else 1 / len(best)
        return out

    return q


def confidence_tree(stale, canvas, budget, width=2):
    """BlockSpec-style: the confidence tree of width W over positions and tokens, cut to the D
    heaviest nodes.

    Masses as in `grow`, with the normalised confidences as q [ours]; its depth K is whatever the
    cut leaves.
    """
    return grow(stale, canvas, confidence_order(stale, width), budget)


def load_graph(path):
    """Calibrated draft sets, as train.py graph writes them: tuples of (position rank, vocabulary
    rank) pairs. FileNotFoundError or ValueError for a file that is none."""
    try:
        sets = [tuple((i, j) for i, j in pairs) for pairs in command.read_json(path)["sets"]]
        whole = all(is_draft_set(pairs) for pairs in sets)
    except FileNotFoundError:
        raise FileNotFoundError(f"no draft graph at {path!r}: run train.py graph") from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is not a draft graph: run train.py graph again")
    return sets


def is_draft_set(pairs):
    """True for (position rank, vocabulary rank) pairs, at least one, sorted by position rank."""
    ranks = [i for i, _ in pairs]
    if not all(type(rank) is int and rank >= 0 for pair in pairs for rank in pair):
        return False
    return bool(pairs) and ranks == sorted(set(ranks)) and all(j < TOP for _, j in pairs)


def graph(stale, canvas, budget, sets):
    """Spiffy: a calibrated draft graph, version 1 of arXiv 2509.18085.

    sets: the chosen draft sets in order, each a tuple of (position rank i, vocabulary rank j) pairs
    sorted by i; parents (one pair less) come first. Ranks are instantiated on the newest
    conditionals, at T > 0 as the noise of the node's step has them [ours].
    """
    if budget < 1:
        raise ValueError(f"the budget is {budget}: give at least 1 draft node per round")
    left = len(undecided(stale, canvas, canvas.state))
    tree, node = root_only(canvas), {(): 0}
    for pairs in sets:
        if len(tree.states) > budget:
            break
        parents = [pairs[:n] + pairs[n + 1 :] for n in range(len(pairs))]
        parent = next((p for p in parents if p in node), None)
        # near a block's end some ranks are gone: the next sets move up
        if parent is None or pairs[-1][0] >= left:
            continue
        (i, j) = next(pair for pair in pairs if pair not in parent)
        before = tree.states[node[parent]]
        # rank i counts the positions masked in the root, of which the parent has taken some
        at = undecided(stale, canvas, before)[i - sum(rank < i for rank, _ in parent)]
        token = stale.candidates(step_of(canvas, before)).tokens[at][j]
        state = commit(before, stale.positions[at], token)
        if canvas.is_leaf(state):
            continue
        node[pairs] = len(tree.states)
        tree.states.append(state)
        tree.parents.append(node[parent])
        tree.masses.append(1.0)
    return tree


# ------------------------------------------------------- oracles: what knowing the truth would give


def next_commits(canvas, truth):
    """The true commits (position, token) still to come in the active block; truth: {block: its
    states, in order}."""
    states = truth.get(canvas.block, [])
    if canvas.state not in states:
        return []  # the text has left the truth, as rounding may make it in bfloat16
    at = states.index(canvas.state)
    steps = zip(states[at:], states[at + 1 :])
    return [
        (s, new)
        for before, after in steps
        for s, (old, new) in enumerate(zip(before, after))
        if old != new
    ]


def oracle_positions(stale, canvas, budget, truth):
    """True commit order, stale tokens (with the hedge): the bound for a better order drafter (paper
    section 2)."""
    coming = [s for s, _ in next_commits(canvas, truth)]
    if not coming:
        return root_only(canvas)
    index = {s: j for j, s in enumerate(stale.positions)}

    def q(decided):
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            left = [index[s] for s in coming if not taken[index[s]]]
            row[left[0]] = 1.0
        return out

    return grow(stale, canvas, q, budget)


def oracle_tokens(stale, canvas, budget, truth):
    """True tokens in stale-confidence order: what knowing every token would give without a model of
    the order (paper section 2)."""
    if not next_commits(canvas, truth):
        return root_only(canvas)
    final = truth[canvas.block][-1]

    def choose(state):
        position, _ = foreseen(stale, canvas, state)
        return position, final[position]

    return path_tree(stale, canvas, budget, choose)
