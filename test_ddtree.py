"""Draft trees by hand: growth level by level and against a heap, the hedge, the floor, merging;
budgets that pay and the clock they rest on; the peers' shapes, the graph's file, the oracles. Paper
sections 4 and 9.

Left out: what the order drafter reads (test_drafter.py), verifying a tree (test_exactness.py).

    python -m pytest test_ddtree.py          # seconds
"""

import heapq
import json
import math
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ddtree
import drafter as drafting
from ddtree import Costs, Tree
from decoder import Decoder
from test_exactness import one_sentence

M = 99  # [MASK]


# ------------------------------------------------------------------------------------------ helpers


def canvas_of(state, leaf=lambda state: False, block=0):
    """What a draft reads of a canvas."""
    return SimpleNamespace(
        state=state, block=block, target=SimpleNamespace(mask_id=M), is_leaf=leaf,
        is_complete=lambda state: M not in state,
    )  # fmt: skip


def seen(tokens, values=None, ranking=(), confidence=None):
    """The Candidates of one step."""
    values = None if values is None else np.array(values, dtype=np.float32)
    confidence = None if confidence is None else torch.tensor(confidence, dtype=torch.float64)
    return drafting.Candidates(tokens, values, confidence, list(ranking))


def stale_of(L, *steps, first=0):
    """A stale block, all masked, with Candidates by step, from step `first` on; others are none."""
    by_step = dict(enumerate(steps, first))
    return SimpleNamespace(
        positions=list(range(L)), candidates=by_step.__getitem__,
        step=lambda decided: int(decided.sum()),
    )  # fmt: skip


def even(decided):
    """q alike over what is left."""
    left = ~decided
    return left / left.sum(1, keepdims=True)


def never(*_):
    raise AssertionError("asked for nothing")


# -------------------------------------------------------------------------------- small functions


def test_heads_and_picks():
    """The root and the first n nodes; some nodes, with their parents' new places."""
    tree = Tree(["r", "a", "b", "ab", "bc"], [1.0, 0.5, 0.4, 0.3, 0.2], [-1, 0, 0, 1, 2])
    assert tree.head(0) == Tree(["r"], [1.0], [-1])
    assert tree.head(3) == Tree(["r", "a", "b", "ab"], [1.0, 0.5, 0.4, 0.3], [-1, 0, 0, 1])
    assert tree.head(9) == tree
    assert tree.picked([0, 2, 4]) == Tree(["r", "b", "bc"], [1.0, 0.4, 0.2], [-1, 0, 1])
    assert tree.picked([0]) == Tree(["r"], [1.0], [-1])


def test_states():
    canvas = canvas_of((5, M, M))
    assert ddtree.root_only(canvas) == Tree([(5, M, M)], [1.0], [-1])
    assert [ddtree.step_of(canvas, s) for s in ((5, M, M), (5, 0, M), (5, 0, 0))] == [1, 2, 3]
    assert ddtree.commit((5, M, M), 2, 7) == (5, M, 7) and ddtree.commit((M,), 0, 7) == (7,)


# --------------------------------------------------------------------------- growing a tree by hand

# three positions, all masked; p(v) of two candidates by step, and q by what is decided
WORKED = stale_of(
    3,
    seen([[1, 2], [3, 4], [5, 6]], [[0.5, 0.4], [0.9, 0.1], [0.6, 0.3]]),
    seen([[1, 2], [4, 3], [6, 5]], [[0.8, 0.1], [0.5, 0.5], [0.7, 0.2]]),
    seen([[7, 8], [7, 8], [7, 8]], [[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]),
)
Q = {
    (0, 0, 0): (0.5, 0.3, 0.2), (1, 0, 0): (0, 0.75, 0.25), (0, 1, 0): (0.5, 0, 0.5),
    (0, 0, 1): (0.5, 0.5, 0), (1, 1, 0): (0, 0, 1), (1, 0, 1): (0, 1, 0), (0, 1, 1): (1, 0, 0),
}  # fmt: skip
NODES = [  # state, mass, parent: m(y)·q(s|y)·p(v)
    ((M, M, M), 1.0, -1),
    ((M, 3, M), 0.27, 0),  # .3·.9
    ((1, M, M), 0.25, 0),  # .5·.5
    ((2, M, M), 0.2, 0),  # .5·.4: the hedge
    ((M, M, 5), 0.12, 0),  # .2·.6: no hedge at .6
    ((1, 3, M), 0.108, 1),  # .27·.5·.8; by the other order, .25·.75·.5 = .09375, it is lighter
    ((1, 3, 7), 0.0972, 5),  # .108·.9
    ((M, 3, 6), 0.0945, 1),  # .27·.5·.7
    ((1, 4, M), 0.09375, 2),  # .25·.75·.5
    ((7, 3, 6), 0.08505, 7),  # .0945·.9
    ((1, 4, 7), 0.084375, 8),  # .09375·.9
    ((2, 4, M), 0.075, 3),  # .2·.75·.5, and as heavy with token 3: the likelier one first
    ((2, 3, M), 0.075, 3),
]


def tree_of_worked(n):
    states, masses, parents = zip(*NODES[: n + 1])
    return list(states), pytest.approx(list(masses)), list(parents)


def recorded(calls, q=Q):
    """The q of a table, which records the rows that it is asked for."""

    def order(decided):
        rows = [tuple(row) for row in decided.astype(int).tolist()]
        assert decided.dtype == bool and len({sum(row) for row in rows}) == 1
        calls.append(rows)
        return np.array([q[row] for row in rows])

    return order


@pytest.mark.parametrize("budget", range(1, 13))
def test_growth_by_hand(budget):
    """The D heaviest, heaviest first; at each step its own candidates; two orders of the same
    commits are one node with the larger mass, and its parent."""
    tree = ddtree.grow(WORKED, canvas_of((M, M, M)), recorded([]), budget)
    assert (tree.states, tree.masses, tree.parents) == tree_of_worked(budget)
    assert all(type(mass) is float for mass in tree.masses)


def test_the_drafter_is_asked_once_a_level():
    """One call a level, only for the best nodes so far, heaviest first, and for none that is
    complete."""
    root, calls = [(0, 0, 0)], {}
    for budget in (1, 2, 3, 6):
        calls[budget] = []
        ddtree.grow(WORKED, canvas_of((M, M, M)), recorded(calls[budget]), budget)
    a, b, c = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    assert calls[1] == [root, [b]] and calls[2] == [root, [b, a]] and calls[3] == [root, [b, a, a]]
    # of level 2, (1, 3, M) and (M, 3, 6) are among the best 6; level 3 is complete
    assert calls[6] == [root, [b, a, a, c], [(1, 1, 0), (0, 1, 1)]]


def test_a_round_later():
    """Where some of the stale positions are decided by now, q is told so; the step counts all that
    is decided."""
    stale = stale_of(3, WORKED.candidates(1), WORKED.candidates(2), first=3)
    stale.positions, calls = [1, 2, 4], []  # of five
    tree = ddtree.grow(stale, canvas_of((8, M, 4, 8, M)), recorded(calls), 2)
    # .5·.8 and .5·.7, then .4·.9
    assert tree.states == [(8, M, 4, 8, M), (8, 1, 4, 8, M), (8, 1, 4, 8, 7)]
    assert tree.masses == pytest.approx([1.0, 0.4, 0.36]) and tree.parents == [-1, 0, 1]
    assert calls == [[(0, 1, 0)], [(1, 1, 0), (0, 1, 1)]]


@pytest.mark.parametrize("n", range(1, 11))
def test_the_floor_by_hand(n):
    """Nodes that weigh as much as γ are kept, lighter ones are dropped, and then not expanded."""
    canvas = canvas_of((M, M, M))
    exact = ddtree.grow(WORKED, canvas, recorded([]), 12).masses
    for floor in (exact[n], (exact[n] + exact[n + 1]) / 2):
        tree = ddtree.grow(WORKED, canvas, recorded([]), 20, floor)
        assert (tree.states, tree.masses, tree.parents) == tree_of_worked(n)
    assert ddtree.grow(WORKED, canvas, recorded([]), 20, 0.28) == ddtree.root_only(canvas)


@pytest.mark.parametrize("p, hedged", [
    (np.float32(0.6), False),
    (np.nextafter(np.float32(0.6), np.float32(0)), True),
    (np.nextafter(np.float32(0.6), np.float32(1)), False),
    (0.59, True), (0.55, True), (0.4, True), (0.61, False), (0.65, False), (0.99, False),
])  # fmt: skip
def test_the_hedge(p, hedged):
    """The second token is a candidate only under a stale top-1 probability of .6, and no third."""
    stale = stale_of(1, seen([[4, 7, 2]], [[p, (1 - p) / 2, (1 - p) / 4]]))
    tree = ddtree.grow(stale, canvas_of((M,)), even, 9)
    assert tree.states == [(M,), (4,), (7,)][: 2 + hedged]
    assert tree.masses[1:] == pytest.approx([p, (1 - p) / 2][: 1 + hedged])
    # what a round knows of its conditionals stays as it is
    assert stale.candidates(0).values[0, 1] == pytest.approx((1 - p) / 2)


def test_a_hedge_under_noise_is_that_of_the_step():
    """Each position and each step has its own p(v)."""
    stale = stale_of(2, seen([[1, 2], [3, 4]], [[0.7, 0.3], [0.5, 0.45]]),
                     seen([[5, 6], [7, 8]], [[0.4, 0.35], [0.9, 0.1]]))  # fmt: skip
    tree = ddtree.grow(stale, canvas_of((M, M)), even, 20)
    assert set(tree.states[1:]) == {
        (1, M), (M, 3), (M, 4),  # one, and two
        (1, 7), (5, 3), (6, 3), (5, 4), (6, 4),  # at the next step two, and one
    }  # fmt: skip


def test_ties_go_to_the_lowest_position():
    """Of 40 children of two weights, the first of each are kept, in their order."""
    L, blank = 40, (M,) * 40
    values = [[1.0, 0.0] if s % 2 else [0.75, 0.0] for s in range(L)]
    stale = stale_of(L, *[seen([[s, 0] for s in range(L)], values)] * 2)
    tree = ddtree.grow(stale, canvas_of(blank), even, 25)
    kept = [*range(1, 40, 2), 0, 2, 4, 6, 8]
    assert tree.states[1:] == [ddtree.commit(blank, s, s) for s in kept]


def test_leaves_are_not_drafted():
    """A state of which a pass would tell nothing takes no node from the others."""
    leaf = lambda state: 5 in state or state == (1, 3, 7)
    tree = ddtree.grow(WORKED, canvas_of((M, M, M), leaf), recorded([]), 7)
    right = [NODES[n] for n in (0, 1, 2, 3, 5, 7, 8, 9)]
    assert tree.states == [state for state, _, _ in right]
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 2, 5]


def test_what_weighs_nothing_is_no_node():
    """Positions with q = 0 and tokens with p = 0 are left out, also where the budget has room."""
    stale = stale_of(3, *[seen([[1, 2]] * 3, [[0.5, 0.0]] * 3)] * 3)
    order = lambda decided: np.array([[1.0, 0.0, 0.0]] * len(decided))
    tree = ddtree.grow(stale, canvas_of((M, M, M)), order, 20)
    assert tree.states == [(M, M, M), (1, M, M)]


def test_go_on():
    """Before each level it is told the masses of the best nodes so far and of those that would be
    expanded, and may end the growth."""
    canvas, told = canvas_of((M, M, M)), []

    def up_to(levels):
        told.clear()
        return lambda masses, frontier: told.append((masses, frontier)) or len(told) <= levels

    assert ddtree.grow(WORKED, canvas, never, 5, go_on=up_to(0)) == ddtree.root_only(canvas)
    assert told == [([], [1.0])]
    tree = ddtree.grow(WORKED, canvas, recorded([]), 6, go_on=up_to(1))
    assert (tree.states, tree.masses, tree.parents) == tree_of_worked(4)
    assert told[1] == (pytest.approx([0.27, 0.25, 0.2, 0.12]),) * 2
    tree = ddtree.grow(WORKED, canvas, recorded([]), 3, go_on=up_to(9))
    assert told[1:] == [(pytest.approx([0.27, 0.25, 0.2]),) * 2] and len(tree.states) == 4
    ddtree.grow(WORKED, canvas, recorded([]), 6, go_on=up_to(9))
    assert told[2] == (pytest.approx([0.27, 0.25, 0.2, 0.12, 0.108, 0.0945]),
                       pytest.approx([0.108, 0.0945]))  # fmt: skip


@pytest.mark.parametrize("budget", (0, -1))
def test_budgets_that_are_refused(budget):
    drafts = {
        "grow": partial(ddtree.grow, order=never),
        "chain": ddtree.chain,
        "tree": ddtree.confidence_tree,
        "graph": partial(ddtree.graph, sets=[((0, 0),)]),
        "spot": partial(ddtree.spot, drafter=SimpleNamespace(order=lambda stale: never)),
    }
    for name, draft in drafts.items():
        with pytest.raises(ValueError, match=f"budget is {budget}") as error:
            draft(WORKED, canvas_of((M, M, M)), budget=budget)
        assert one_sentence(error), name


# ------------------------------------------------------------------------------- against a heap


def drafting_round(seed, k=6, L=8, vocab=12, stops=(), **settings):
    """A made-up round: stale conditionals at k positions, one decided since; `stops` make states
    final."""
    rng = np.random.default_rng(seed)
    positions = sorted(rng.choice(L, k, replace=False).tolist())
    before = tuple(M if s in positions else int(rng.integers(vocab)) for s in range(L))
    log_probs = torch.tensor(rng.dirichlet(np.full(vocab, 0.2), k)).log()
    stale = drafting.Stale(Decoder(**settings), before, M, 3, log_probs)
    leaf = lambda state: M not in state and not set(stops).isdisjoint(state)
    return stale, canvas_of(ddtree.commit(before, positions[0], 1), leaf, block=3)


def hashed_order(seed):
    """A random q(s|y) that is a function of the state: seeded by the set of decided positions."""

    def q(decided):
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            rng = np.random.default_rng([seed, *taken.astype(int).tolist()])
            row[~taken] = rng.dirichlet(np.full((~taken).sum(), 0.5))
        return out

    return q


def foreseen_by_hand(stale, state):
    """p(v) float32 [k, V] as the noise of the state's step has it."""
    names = (torch.full((len(stale.positions),), n) for n in (3, len(state) - state.count(M)))
    block, step = names
    position = torch.tensor(stale.positions)
    return stale.decoder.perturbed(stale.log_probs, block, step, position).softmax(-1).float()


def heap_tree(stale, canvas, order, budget, floor=0.0):
    """Section 4 one node at a time, {state: mass} of root and `budget` heaviest states: a heap that
    merges states."""
    heap, nodes = [(-1.0, 0, canvas.state)], {}
    while heap and len(nodes) <= budget:
        mass, _, state = heapq.heappop(heap)
        if state in nodes:  # met before with a larger mass
            continue
        nodes[state] = -mass
        if M not in state:
            continue
        q = order(np.array([[state[s] != M for s in stale.positions]]))[0]
        for s, q_s, p in zip(stale.positions, q, foreseen_by_hand(stale, state)):
            for v in p.argsort(descending=True)[: 2 if p.max() < 0.6 else 1].tolist():
                child = state[:s] + (v,) + state[s + 1 :]
                m = -mass * float(q_s) * float(p[v])
                if m > 0 and m >= floor and not canvas.is_leaf(child):
                    heapq.heappush(heap, (-m, len(heap), child))
    return nodes


@pytest.mark.parametrize("T", (0.0, 1.0))
@pytest.mark.parametrize("seed", range(8))
def test_level_wise_tree_is_the_heap_tree(seed, T):
    """Same states and masses at every budget: with token hedge, merged states, full blocks, and no
    final states."""
    k = 4 if seed % 2 else 7
    stale, canvas = drafting_round(seed, k, stops=(3, 4), temperature=T)
    right = heap_tree(stale, canvas, hashed_order(seed), 20)
    for budget in range(1, 21):
        tree = ddtree.grow(stale, canvas, hashed_order(seed), budget)
        heaviest = dict(list(right.items())[: budget + 1])
        assert dict(zip(tree.states, tree.masses)) == pytest.approx(heaviest, rel=1e-6)
        assert len(tree.states) == len(heaviest)
        if budget in (1, 8, 20):
            for floor in (0.01, 0.1):
                tree = ddtree.grow(stale, canvas, hashed_order(seed), budget, floor)
                heavy = heap_tree(stale, canvas, hashed_order(seed), budget, floor)
                assert dict(zip(tree.states, tree.masses)) == pytest.approx(heavy, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_shape_of_a_tree(seed):
    """Root first, heaviest first; a parent stands before its child, is no lighter, has one commit
    less."""
    stale, canvas = drafting_round(seed)
    tree = ddtree.grow(stale, canvas, hashed_order(seed), 20)
    assert tree.states[0] == canvas.state and tree.parents[0] == -1 and tree.masses[0] == 1.0
    assert tree.masses == sorted(tree.masses, reverse=True)
    for u in range(1, len(tree.states)):
        parent = tree.parents[u]
        assert parent < u and tree.masses[parent] >= tree.masses[u]
        changed = [(a, b) for a, b in zip(tree.states[parent], tree.states[u]) if a != b]
        assert len(changed) == 1 and changed[0][0] == M


def test_spot_is_the_tree_of_the_drafter():
    """q comes from the drafter's `order` of this round; without a floor unless one is given."""
    asked = []
    drafter = SimpleNamespace(order=lambda stale: asked.append(stale) or recorded([]))
    tree = ddtree.spot(WORKED, canvas_of((M, M, M)), 12, drafter)
    assert (tree.states, tree.masses, tree.parents) == tree_of_worked(12) and asked == [WORKED]
    tree = ddtree.spot(WORKED, canvas_of((M, M, M)), 12, drafter, 0.11)
    assert tree.states == tree_of_worked(4)[0]
    tree = ddtree.spot(WORKED, canvas_of((M, M, M)), budget=3, drafter=drafter, floor=0.11)
    assert tree.states == tree_of_worked(3)[0]


# ------------------------------------------------------------------------------ budgets that pay


def measured(monkeypatch, largest, crosses=True, slow_first=True):
    """Costs.measure by a clock of our own. In repetition r, which the disturbances d(r) delay, a
    pass over u units takes u² + d s, its transition ½ s, reading the features 5 + d s, and a call
    on n states (n² + 2·d) / 16 s. Returns (Costs, what was passed)."""
    now, delays, looked = [0.0], iter([0, 8, 1, 7, 2, 6, 3, 5, 4]), []
    blank, half = (M,) * 6, (M, 0, M, 0, M, 0)
    log_probs = torch.zeros(3, 5)
    delay = [50.0]  # what comes before the repetitions is cold, and counts nowhere

    class Canvas:
        block = 4

        def look(self, states):
            looked.append(states)
            now[0] += len(states) ** 2 + delay[0]
            return SimpleNamespace(unit=[log_probs].__getitem__), {}

    Canvas.blank, Canvas.crosses = blank, crosses

    def order(stale):
        assert (stale.state, stale.positions, stale.block) == (half, [0, 2, 4], 4)
        assert stale.decoder is decoder and stale.log_probs is log_probs
        delay[0] = next(delays)
        now[0] += (5 + delay[0]) * slow_first
        calls = []

        def q(decided):
            assert decided.dtype == bool and decided.shape[1] == 3 and not decided.any()
            calls.append(len(decided))
            if slow_first or len(calls) > 1:
                now[0] += (len(decided) ** 2 + 2 * delay[0]) / 16

        return q

    def transition(out):
        assert out.unit(0) is log_probs
        now[0] += 0.5

    monkeypatch.setattr(ddtree.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ddtree, "start", lambda target, decoder, prompt: Canvas())
    target, decoder = SimpleNamespace(mask_id=M), SimpleNamespace(transition=transition)
    costs = Costs.measure(target, decoder, None, SimpleNamespace(order=order), largest)
    assert all(states == [half] * len(states) for states in looked[not crosses :])
    assert crosses or looked[0] == [blank]  # where blocks do not cross, the block is opened first
    return costs, [len(states) for states in looked]


def test_costs_by_a_clock_of_our_own(monkeypatch):
    """Nine repetitions of interleaved sizes, of which the lower quartile counts (d = 2 of 0 … 8);
    what was not measured lies between its neighbours; a pass includes its transition; drafts[0] is
    what the first call takes longer than others."""
    costs, sizes = measured(monkeypatch, 12)
    square = [1, 4, 9, (9 + 25) / 2, 25, (25 + 49) / 2, 49, (49 + 81) / 2, 81, 102, 123, 144]
    assert costs.passes == pytest.approx([0.0] + [s + 2 + 0.5 for s in square])
    assert costs.drafts == pytest.approx([5 + 2] + [s / 16 + 0.25 for s in square])
    assert sizes == [1] + [1, 2, 3, 5, 7, 9, 12] * 9


@pytest.mark.parametrize("largest", (1, 2, 21, 23))
def test_costs_up_to_other_sizes(monkeypatch, largest):
    """All sizes from 0 to the largest, which is measured itself; a block is opened where none
    crosses."""
    costs, sizes = measured(monkeypatch, largest, crosses=False)
    assert len(costs.passes) == len(costs.drafts) == largest + 1
    assert costs.passes[1] == 3.5 and costs.passes[-1] == largest**2 + 2.5
    right = [n for n in (1, 2, 3, 5, 7, 9, 13, 17, 21, 23) if n <= largest]
    assert sizes[2:] == right * 9


def test_a_first_call_that_is_quick(monkeypatch):
    """drafts[0] is never negative."""
    costs, _ = measured(monkeypatch, 3, slow_first=False)
    assert costs.drafts == pytest.approx([0.0] + [(n * n + 4) / 16 for n in (1, 2, 3)])


def test_quartiles_and_sizes():
    assert ddtree.quartile([4.0, 0.0, 3.0, 1.0, 2.0]) == 1.0
    assert ddtree.quartile([1.0, 2.0]) == 1.25
    sizes = ddtree.every_size({1: [3.0], 4: [9.0, 9.0]}, 7.0, 4)
    assert sizes == pytest.approx([7.0, 3.0, 5.0, 7.0, 9.0])


def test_best_rate_by_hand():
    """(1 + Σ m) / (c(1 + n) + spent) at its best n; a complete node takes two units; passes that
    were not measured are not planned for; of two that pay alike, the smaller."""
    costs = Costs([0.0, 1.0, 1.5, 1.6, 1.7, 9.0], [0.0])
    masses = [0.9, 0.8, 0.7]
    assert ddtree.best_rate(masses, costs) == pytest.approx((3.4 / 1.7, 3))
    assert ddtree.best_rate(masses, costs, 0.3) == pytest.approx((3.4 / 2.0, 3))
    assert ddtree.best_rate(masses, costs, 0, {0}) == pytest.approx((2.7 / 1.7, 2))  # 1, 3, 4, 5
    assert ddtree.best_rate(masses, costs, 0, {1}) == pytest.approx((2.7 / 1.7, 2))  # 1, 2, 4, 5
    assert ddtree.best_rate([0.9] * 9, costs, 0, {0, 1}) == pytest.approx((1.9 / 1.6, 1))  # 1, 3, 5
    assert ddtree.best_rate([0.1], costs) == (1.0, 0) and ddtree.best_rate([], costs) == (1.0, 0)
    assert ddtree.best_rate([0.9], costs, 1.0) == pytest.approx((1.9 / 2.5, 1))
    flat = Costs([0.0, 1.0, 1.0, 1.0], [0.0])
    assert ddtree.best_rate([0.5] * 9, flat) == (2.0, 2)
    assert ddtree.best_rate([0.5, 0.0], flat) == (1.5, 1)


@pytest.mark.parametrize("seed", range(8))
def test_best_rate_is_the_argmax(seed):
    """n = argmax (1 + Σ_{i≤n} m_i) / (c(1 + n) + spent) by brute force, over those passes that were
    measured."""
    rng = np.random.default_rng(seed)
    masses = sorted(rng.random(20).tolist(), reverse=True)
    steps = rng.random(12 + 2 * seed) * 0.5 + 0.01
    costs = Costs([0.0] + np.cumsum(steps).tolist(), [0.0])
    for spent in (0.0, 0.3):
        rates = [(1 + sum(masses[:n])) / (costs.passes[1 + n] + spent)
                 for n in range(21) if 1 + n < len(costs.passes)]  # fmt: skip
        rate, n = ddtree.best_rate(masses, costs, spent)
        assert rate == pytest.approx(max(rates)) and n == rates.index(max(rates))


def test_worth_growing_by_hand():
    """A level is worth its call if the rate should rise, where every node to be expanded is to
    bring one child of .9 of its mass; only then has its time been spent."""
    calls = Costs([0.0, 1.0, 1.1, 1.2, 1.3], [0.2, 0.1, 0.3])
    spent = [0.2]
    # 1 / 1 without drafting, and so without the .2; 1.9 / (1.1 + .2 + .1) with it
    assert ddtree.worth_growing(calls, spent, [], [1.0]) and spent == pytest.approx([0.3])
    # 1.9 / (1.1 + .3) now; with .81 more 2.71 / (1.2 + .3 + .1)
    assert ddtree.worth_growing(calls, spent, [0.9], [0.9]) and spent == pytest.approx([0.4])
    # a call on three nodes is taken to be as long as one on two, the most that was measured:
    # 3 / (1.2 + .4) now, 3.9 / (1.3 + .4 + .3)
    assert ddtree.worth_growing(calls, spent, [1.0, 1.0], [1.0] * 3)
    assert spent == pytest.approx([0.7])
    dear = Costs([0.0, 1.0, 1.1, 1.2, 1.3], [0.2, 5.0])
    spent = [0.4]
    assert not ddtree.worth_growing(dear, spent, [0.9], [0.9]) and spent == [0.4]


def test_worth_growing_at_its_border():
    """Not where the rate stays the same; the children of heavy nodes go before light nodes."""
    even_money = Costs([0.0, 1.0, 1.9], [0.0, 0.0])
    assert not ddtree.worth_growing(even_money, [0.0], [], [1.0])  # 1.9 / 1.9
    assert ddtree.worth_growing(Costs([0.0, 1.0, 1.89], [0.0, 0.0]), [0.0], [], [1.0])
    # three units are the most: .9 and .81 instead of .9 and .2
    costs = Costs([0.0, 1.0, 1.1, 1.2], [0.0, 0.3])
    assert ddtree.worth_growing(costs, [0.0], [0.9, 0.2], [0.9])  # 2.1 / 1.2, 2.71 / 1.5
    # what was spent so far counts in both: 1.9 / (1.1 + 9), 2.71 / (1.2 + 9 + .3)
    assert ddtree.worth_growing(costs, [9.0], [0.9], [0.9])
    # … and before any call, nothing is spent on doing without: 1 / 1, 1.9 / (1.1 + 9 + .3)
    assert not ddtree.worth_growing(costs, [9.0], [], [1.0])


def one_level(q):
    """(stale, canvas, drafter) of a round whose tree is one level of nodes with masses `q`."""
    L = len(q)
    stale = stale_of(L, *[seen([[1, 2]] * L, [[1.0, 0.0]] * L)] * 2)
    canvas = canvas_of((M,) * L, leaf=lambda state: state.count(M) < L - 1)
    return stale, canvas, SimpleNamespace(order=lambda stale: lambda d: np.array([q] * len(d)))


@pytest.mark.parametrize("scale", (1.0, 2.0, 50.0))
def test_the_floor_of_a_budget_that_pays(scale):
    """γ is the mean rise of a pass in passes over one unit, (1.9 − 1) / 4 = .225, whatever the
    machine: a node of .2 is dropped although the pass with it takes no longer."""
    costs = Costs([0.0] + [scale * c for c in (1.0, 1.0, 1.0, 1.0, 1.9)], [0.0] * 9)
    stale, canvas, drafter = one_level([0.4, 0.25, 0.2, 0.15])
    tree = ddtree.spot_cost_aware(stale, canvas, 9, drafter, costs)
    assert tree.masses == [1.0, 0.4, 0.25]
    free = Costs([0.0] + [scale] * 9, [0.0] * 9)
    assert len(ddtree.spot_cost_aware(stale, canvas, 9, drafter, free).states) == 5
    assert len(ddtree.spot_cost_aware(stale, canvas, 2, drafter, free).states) == 3  # the budget


@pytest.mark.parametrize("drafts, n", [
    ([0.0, 0.0, 50.0], 1),  # 1.9 / 1.1 = 1.73, 2.3 / 1.4 = 1.64
    ([0.6, 0.1, 50.0], 2),  # 1.9 / 1.8 = 1.06, 2.3 / 2.1 = 1.10
    ([0.0, 0.1, 50.0], 1),  # 1.9 / 1.2 = 1.58, 2.3 / 1.5 = 1.53
    ([0.9, 0.0, 50.0], 0),  # 1.9 / 2.0 is no better than 1 / 1
    ([0.0, 0.9, 50.0], 0),
])  # fmt: skip
def test_drafting_counts(drafts, n):
    """Where drafting has taken its time, a wider pass pays; where it cannot pay, none is done."""
    stale, canvas, drafter = one_level([0.9, 0.4])
    costs = Costs([0.0, 1.0, 1.1, 1.4], drafts)
    if n == 0:
        drafter = SimpleNamespace(order=lambda stale: never)
    tree = ddtree.spot_cost_aware(stale, canvas, 9, drafter, costs)
    assert tree.masses == [1.0, 0.9, 0.4][: n + 1]


def test_a_pass_that_cannot_pay():
    """No call of the drafter where a pass over two units takes as long as two passes."""
    stale, canvas, _ = one_level([0.9, 0.4])
    never_asked = SimpleNamespace(order=lambda stale: never)
    costs = Costs([0.0] + [float(u) for u in range(1, 9)], [0.0] * 9)
    tree = ddtree.spot_cost_aware(stale, canvas, 9, never_asked, costs)
    assert tree == ddtree.root_only(canvas)


def test_complete_nodes_take_two_units():
    """A node that fills its block brings the next block into the pass."""
    # both tokens of the one position left: 1, 3, 5 units, so 1.55 / 1.1 and 1.95 / 2
    stale = stale_of(1, seen([[1, 2]], [[0.55, 0.4]]), first=1)
    stale.positions = [1]
    drafter = SimpleNamespace(order=lambda stale: even)
    costs = Costs([0.0, 1.0, 1.05, 1.1, 2.0, 2.0], [0.0] * 9)
    tree = ddtree.spot_cost_aware(stale, canvas_of((5, M)), 9, drafter, costs)
    assert tree.states == [(5, M), (5, 1)]
    # only the second node is complete: 1, 2, 4 units, so 2 / 1.1 and 3 / 1.9
    stale = stale_of(2, *[seen([[1, 2]] * 2, [[1.0, 0.0]] * 2)] * 2)
    left_first = lambda d: np.array([[0.0, 1.0] if row[0] else [1.0, 0.0] for row in d])
    drafter = SimpleNamespace(order=lambda stale: left_first)
    costs = Costs([0.0, 1.0, 1.1, 1.2, 1.9], [0.0] * 9)
    tree = ddtree.spot_cost_aware(stale, canvas_of((M, M)), 9, drafter, costs)
    assert tree.states == [(M, M), (1, M)]
    costs = Costs([0.0, 1.0, 1.1, 1.2, 1.3], [0.0] * 9)
    tree = ddtree.spot_cost_aware(stale, canvas_of((M, M)), 9, drafter, costs)
    assert tree.states == [(M, M), (1, M), (1, 1)]


# --------------------------------------------------------------------------- the peers' drafters

# four positions; at every step other tokens and another ranking
NOISY = stale_of(
    4,
    seen([[1, 2], [3, 4], [5, 6], [7, 8]], ranking=[2, 0, 3, 1]),
    seen([[11, 12], [13, 14], [15, 16], [17, 18]], ranking=[1, 0, 3, 2]),
    seen([[21, 22], [23, 24], [25, 26], [27, 28]], ranking=[0, 2, 3, 1]),
    seen([[31, 32], [33, 34], [35, 36], [37, 38]], ranking=[0, 1, 2, 3]),
    seen([[41, 42], [43, 44], [45, 46], [47, 48]], ranking=[0, 1, 2, 3]),
)


def test_undecided_and_foreseen():
    """Stale indices by falling confidence at the state's step, without those decided since."""
    canvas = canvas_of((M,) * 4)
    assert ddtree.undecided(NOISY, canvas, (M, M, M, M)) == [2, 0, 3, 1]
    assert ddtree.undecided(NOISY, canvas, (M, M, 5, M)) == [1, 0, 3]
    assert ddtree.undecided(NOISY, canvas, (1, M, 5, M)) == [3, 1]
    assert ddtree.undecided(NOISY, canvas, (1, 1, 5, M)) == [3]
    assert ddtree.foreseen(NOISY, canvas, (M, M, M, M)) == (2, 5)
    assert ddtree.foreseen(NOISY, canvas, (M, M, 5, M)) == (1, 13)
    stale = stale_of(2, seen([[1, 2], [3, 4]], ranking=[1, 0]), first=3)
    stale.positions = [1, 4]  # of five, the others decided before
    assert ddtree.undecided(stale, canvas, (9, M, 9, 9, M)) == [1, 0]
    assert ddtree.foreseen(stale, canvas, (9, M, 9, 9, M)) == (4, 3)


@pytest.mark.parametrize("budget", (1, 2, 3, 4, 9))
def test_chain_by_hand(budget):
    """One path: at each step the most confident position left, with the token foreseen there."""
    right = [(M, M, M, M), (M, M, 5, M), (M, 13, 5, M), (21, 13, 5, M), (21, 13, 5, 37)]
    tree = ddtree.chain(NOISY, canvas_of((M,) * 4), budget)
    n = min(budget, 4)
    assert tree == Tree(right[: n + 1], [1.0] * (n + 1), list(range(-1, n)))


def test_chain_ends_at_a_leaf():
    tree = ddtree.chain(NOISY, canvas_of((M,) * 4, leaf=lambda state: 21 in state), 9)
    assert tree.states == [(M, M, M, M), (M, M, 5, M), (M, 13, 5, M)]


def test_path_tree_asks_of_the_last_state():
    asked = []
    choose = lambda state: asked.append(state) or (state.index(M), 7)
    tree = ddtree.path_tree(NOISY, canvas_of((M, M, 0, M)), 2, choose)
    assert tree == Tree([(M, M, 0, M), (7, M, 0, M), (7, 7, 0, M)], [1.0] * 3, [-1, 0, 1])
    assert asked == tree.states[:2]


CONFIDENT = seen(
    [[1, 2], [3, 4], [5, 6], [7, 8]], [[0.5, 0.25], [0.75, 0.125], [0.9, 0.1], [0.5, 0.25]],
    [2, 1, 0, 3], [0.5, 0.75, 0.9, 0.5],
)  # fmt: skip


def test_confidence_order_by_hand():
    """The `width` most confident of those left, their confidences scaled to sum 1; alike where all
    are 0; read at the step of the path."""
    stale = stale_of(4, *[CONFIDENT] * 4)
    decided = np.zeros((2, 4), dtype=bool)
    decided[1, 1] = decided[0, 2] = True
    q = ddtree.confidence_order(stale, 2)
    assert q(decided) == pytest.approx(np.array([[0.4, 0.6, 0, 0], [0.5 / 1.4, 0, 0.9 / 1.4, 0]]))
    assert q(decided).dtype == np.float32
    assert q(np.array([[True, True, True, False]])).tolist() == [[0, 0, 0, 1]]
    wide = ddtree.confidence_order(stale, 3)(decided)
    assert wide[0] == pytest.approx(np.array([0.5, 0.75, 0, 0.5]) / 1.75)
    one = ddtree.confidence_order(stale, 1)(decided)
    assert one.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    none = seen([[1, 2]] * 4, ranking=[3, 1, 0, 2], confidence=[0.0] * 4)
    q = ddtree.confidence_order(stale_of(4, CONFIDENT, none, none, none), 2)
    assert q(decided).tolist() == [[0, 0.5, 0, 0.5], [0.5, 0, 0, 0.5]]
    assert q(np.array([[True, True, True, False]])).tolist() == [[0, 0, 0, 1]]


def test_confidence_tree_by_hand():
    """Width 2, masses as of any order, cut to the D heaviest."""
    stale, canvas = stale_of(4, *[CONFIDENT] * 4), canvas_of((M,) * 4)
    tree = ddtree.confidence_tree(stale, canvas, 3)
    # .9/1.65·.9 = .491; .75/1.65·.75 = .341; .491·.75/1.25·.75 = .221
    assert tree.states == [(M,) * 4, (M, M, 5, M), (M, 3, M, M), (M, 3, 5, M)]
    assert tree.masses == pytest.approx([1, 0.81 / 1.65, 0.5625 / 1.65, 0.81 / 1.65 * 0.45])
    assert tree.parents == [-1, 0, 0, 1]
    narrow = ddtree.confidence_tree(stale, canvas, 3, width=1)
    assert narrow.states[:3] == [(M,) * 4, (M, M, 5, M), (M, 3, 5, M)]
    wide = ddtree.confidence_tree(stale, canvas, 20, width=4)
    assert (M, M, M, 7) in wide.states and (M, M, M, 7) not in tree.states


SETS = [
    ((0, 0),),  # the most confident position, its likeliest token
    ((1, 1),),
    ((0, 0), (2, 1)),  # rank 2 of the root is the second of what (0, 0) has left
    ((1, 1), (3, 0)),
    ((0, 1), (1, 1)),  # rank 0 comes before what (1, 1) has taken
    ((0, 0), (2, 1), (3, 0)),
    ((2, 0),),
]
GRAPH = [
    ((M, M, M, M), -1),
    ((M, M, 5, M), 0),
    ((2, M, M, M), 0),
    ((12, M, 5, M), 1),  # left at step 1: 1, 0, 3
    ((2, M, 15, M), 2),  # left: 1, 3, 2
    ((2, 14, M, M), 2),
    ((12, 23, 5, M), 3),  # left at step 2: 3, 1
    ((M, M, M, 7), 0),
]


@pytest.mark.parametrize("budget", range(1, 9))
def test_graph_by_hand(budget):
    """Ranks count the positions masked in the root by confidence at the step of the node's parent,
    and the tokens are foreseen there; the budget cuts."""
    tree = ddtree.graph(NOISY, canvas_of((M,) * 4), budget, SETS)
    states, parents = zip(*GRAPH[: budget + 1])
    assert tree == Tree(list(states), [1.0] * len(states), list(parents))


def test_graph_near_the_end_of_a_block():
    """Sets whose ranks are gone are left out, with all that build on them, and the next move up."""
    canvas = canvas_of((1, M, 5, M))  # left at step 2: 3, 1
    sets = SETS[:2] + [((2, 0),), ((0, 0), (2, 0)), ((0, 0), (1, 0)), ((1, 0),), ((1, 0), (5, 0))]
    tree = ddtree.graph(NOISY, canvas, 4, sets)
    assert tree.states == [
        (1, M, 5, M), (1, M, 5, 27), (1, 24, 5, M), (1, 33, 5, 27), (1, 23, 5, M),
    ]  # fmt: skip
    assert tree.parents == [-1, 0, 0, 1, 0]


def test_graph_leaves_out_leaves_and_what_builds_on_nothing():
    """A leaf is no node, and no parent of one; a set without a parent in the tree is none."""
    canvas = canvas_of((M,) * 4, leaf=lambda state: state == (M, M, 5, M))
    tree = ddtree.graph(NOISY, canvas, 4, SETS + [((3, 0), (2, 0))])
    assert tree.states == [GRAPH[n][0] for n in (0, 2, 4, 5, 7)]
    assert tree.parents == [-1, 0, 1, 1, 0]
    tree = ddtree.graph(NOISY, canvas_of((M,) * 4), 9, SETS[2:6])
    assert tree.states == [(M,) * 4]


# ---------------------------------------------------------------------------- the graph's file


def test_a_graph_is_read(tmp_path):
    """Sets of tuples, as they were written; also with a byte-order mark, and with notes beside."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"passes": 3, "sets": SETS + [((0, 31), (31, 0))]}))
    assert ddtree.load_graph(str(path)) == SETS + [((0, 31), (31, 0))]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert ddtree.load_graph(str(path))[0] == ((0, 0),)
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints", "graph.json")
    assert len(ddtree.load_graph(here)) >= 20


@pytest.mark.parametrize("sets", (
    [[0, 0]],  # a pair where sets stand
    [[[0]]],
    [[[0, 0, 0]]],
    [[[0.0, 0]]],
    [[[0, 1.0]]],
    [[[True, 0]]],
    [[[0, False]]],
    [[["0", "0"]]],
    [[[-1, 0]]],
    [[[0, -1]]],
    [[[0, 32]]],  # only 32 tokens are foreseen
    [[[1, 0], [0, 0]]],  # not sorted
    [[[0, 0], [0, 1]]],  # a rank twice
    [[[0, 0]], []],  # the root is no set
    [[[0, 0]], None],
    5,
    None,
))  # fmt: skip
def test_sets_that_are_none_are_refused(tmp_path, sets):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"sets": sets}))
    with pytest.raises(ValueError, match="graph.json is not a draft graph") as error:
        ddtree.load_graph(str(path))
    assert one_sentence(error)


@pytest.mark.parametrize("content", (b"", b"{", b"{}", b"[]", b"[[[0, 0]]]", b"\xff\xfe{", b"null"))
def test_files_that_are_no_graph_are_refused(tmp_path, content):
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="graph.json is not a draft graph") as error:
        ddtree.load_graph(str(path))
    assert one_sentence(error)


def test_a_missing_graph_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no draft graph at .*graph.json") as error:
        ddtree.load_graph(str(tmp_path / "graph.json"))
    assert one_sentence(error)


# -------------------------------------------------------------------------------------- the oracles

TRUTH = {
    0: [(M,) * 4, (M, M, 8, M), (M, 9, 8, M), (6, 9, 8, M), (6, 9, 8, 5)],
    2: [(M,) * 4, (6, M, 8, M), (6, 9, 8, 5)],  # sets of commits
}
WELL_KNOWN = seen([[1, 2], [3, 4], [5, 6], [7, 8]], [[0.5, 0.25], [0.75, 0.2], [1, 0], [1, 0]])


def test_next_commits_by_hand():
    """What is still to come of the truth of this block, in order; nothing where it was left."""
    coming = lambda state, block: ddtree.next_commits(canvas_of(state, block=block), TRUTH)
    assert coming((M,) * 4, 0) == [(2, 8), (1, 9), (0, 6), (3, 5)]
    assert coming((M, 9, 8, M), 0) == [(0, 6), (3, 5)]
    assert coming((M,) * 4, 2) == [(0, 6), (2, 8), (1, 9), (3, 5)]
    assert coming((6, 9, 8, 5), 0) == coming((M, M, 7, M), 0) == coming((M,) * 4, 1) == []


def test_oracle_positions_by_hand():
    """The true order with stale tokens, hedged: .75, and then .5 and .25."""
    canvas = canvas_of((M, M, 8, M))  # to come: 1, 0, 3
    stale = stale_of(4, *[WELL_KNOWN] * 4)
    tree = ddtree.oracle_positions(stale, canvas, 20, TRUTH)
    assert tree.states == [
        (M, M, 8, M), (M, 3, 8, M), (1, 3, 8, M), (1, 3, 8, 7), (2, 3, 8, M), (2, 3, 8, 7),
    ]  # fmt: skip
    assert tree.masses == [1.0, 0.75, 0.375, 0.375, 0.1875, 0.1875]
    assert len(ddtree.oracle_positions(stale, canvas, 2, TRUTH).states) == 3
    stale.positions, stale.candidates = [0, 1, 3], lambda step: seen(
        [[1, 2], [3, 4], [7, 8]], [[1, 0]] * 3)  # fmt: skip
    tree = ddtree.oracle_positions(stale, canvas, 2, TRUTH)
    assert tree.states == [(M, M, 8, M), (M, 3, 8, M), (1, 3, 8, M)]
    lost = canvas_of((M, M, 7, M))
    assert ddtree.oracle_positions(stale, lost, 9, TRUTH) == ddtree.root_only(lost)


def test_oracle_tokens_by_hand():
    """The stale order at each step, with the tokens that the block ends with."""
    tree = ddtree.oracle_tokens(NOISY, canvas_of((M,) * 4), 3, TRUTH)
    assert tree.states == [(M,) * 4, (M, M, 8, M), (M, 9, 8, M), (6, 9, 8, M)]
    assert tree.parents == [-1, 0, 1, 2] and tree.masses == [1.0] * 4
    tree = ddtree.oracle_tokens(NOISY, canvas_of((6, M, 8, M), block=2), 9, TRUTH)
    assert tree.states == [(6, M, 8, M), (6, M, 8, 5), (6, 9, 8, 5)]
    lost = canvas_of((M, M, 7, M))
    assert ddtree.oracle_tokens(NOISY, lost, 9, TRUTH) == ddtree.root_only(lost)
