"""Trees against a heap, the costs by brute force, the peers' shapes, and the drafter's size and
files. Paper sections 3, 4 and 9.

Left out: what the drafter reads, column by column (test_drafter.py).

    python -m pytest test_ddtree.py          # seconds
"""

import heapq
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ddtree
import dlm
import drafter as drafting
from decoder import Decoder
from test_exactness import (
    MASK,
    SETS,
    drafting_round,
    extends,
    one_sentence,
    random_prompt,
    small_drafter,
    some_stale,
    tiny_target,
)


def hashed_order(seed):
    """A random q(s|y) that is a function of the state: seeded by the set of decided positions."""

    def q(decided):
        out = np.zeros(decided.shape, dtype=np.float32)
        for row, taken in zip(out, decided):
            rng = np.random.default_rng([seed, *taken.astype(int).tolist()])
            row[~taken] = rng.dirichlet(np.full((~taken).sum(), 0.5))
        return out

    return q


def heap_tree(stale, canvas, order, budget, floor=0.0):
    """Section 4 one node at a time, {state: mass} of root and `budget` heaviest states: a heap that
    merges states."""
    heap, nodes = [(-1.0, 0, canvas.state)], {}
    while heap and len(nodes) <= budget:
        mass, _, state = heapq.heappop(heap)
        if state in nodes:  # met before with a larger mass
            continue
        nodes[state] = -mass
        if canvas.is_complete(state):
            continue
        q = order(np.array([[state[s] != MASK for s in stale.positions]]))[0]
        for s, q_s, p in zip(stale.positions, q, stale.log_probs.exp().float()):
            for v in p.argsort(descending=True)[: 2 if p.max() < ddtree.HEDGE else 1].tolist():
                child = state[:s] + (v,) + state[s + 1 :]
                m = -mass * float(q_s) * float(p[v])
                if m > 0 and m >= floor and not canvas.is_leaf(child):
                    heapq.heappush(heap, (-m, len(heap), child))
    return nodes


@pytest.mark.parametrize("seed", range(12))
def test_level_wise_tree_is_the_heap_tree(seed):
    """Same states and masses at every budget: with token hedge, merged states, full blocks, and no
    final states."""
    stale, canvas = drafting_round(seed, k=4 if seed % 2 else 7, stops=(3, 4))
    assert (stale.log_probs.exp().amax(1) < ddtree.HEDGE).any()
    for budget in range(1, 21):
        for floor in (0.0, 0.01, 0.1):
            tree = ddtree.grow(stale, canvas, hashed_order(seed), budget, floor)
            right = heap_tree(stale, canvas, hashed_order(seed), budget, floor)
            assert len(set(tree.states)) == len(tree.states) <= budget + 1
            assert dict(zip(tree.states, tree.masses)) == pytest.approx(right, rel=1e-12)
            assert not any(canvas.is_leaf(state) for state in tree.states)


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
        assert extends(tree.states[u], tree.states[parent])
    depth = [canvas.state.count(MASK) - state.count(MASK) for state in tree.states]
    assert max(depth) > 1
    head = tree.head(5)
    assert head == ddtree.Tree(tree.states[:6], tree.masses[:6], tree.parents[:6])


@pytest.mark.parametrize("seed", range(6))
def test_floor_drops_the_nodes_under_it(seed):
    """γ between two masses keeps exactly those above; γ equal to a mass keeps it; γ > 1 leaves the
    root."""
    stale, canvas = drafting_round(seed)
    tree = ddtree.grow(stale, canvas, hashed_order(seed), 20)
    for n in (1, 3, 7, 12):
        for floor in (tree.masses[n], (tree.masses[n] + tree.masses[n + 1]) / 2):
            kept = ddtree.grow(stale, canvas, hashed_order(seed), 20, floor)
            assert kept.states == tree.head(n).states
    assert ddtree.grow(stale, canvas, hashed_order(seed), 20, 1.1).states == [canvas.state]


def test_the_drafter_is_asked_once_a_level():
    """Level-wise growth calls the drafter at most once per decided position, a heap once per
    node."""
    stale, canvas = drafting_round(0, k=7)
    calls = []

    def order(decided):
        calls.append(len(decided))
        return hashed_order(0)(decided)

    tree = ddtree.grow(stale, canvas, order, 20)
    assert len(calls) <= 7 < len(tree.states) and calls[0] == 1


@pytest.mark.parametrize("seed", range(8))
def test_best_rate_is_the_argmax(seed):
    """n = argmax (1 + Σ_{i≤n} m_i) / (c(1 + n) + spent) by brute force, over those passes that were
    measured."""
    rng = np.random.default_rng(seed)
    masses = sorted(rng.random(20).tolist(), reverse=True)
    costs = ddtree.Costs([0.0] + np.cumsum(rng.random(12 + 2 * seed) * 0.5 + 0.01).tolist(), [0.0])
    for spent in (0.0, 0.3):
        measured = range(min(21, len(costs.passes) - 1))
        rates = [(1 + sum(masses[:n])) / (costs.passes[1 + n] + spent) for n in measured]
        rate, n = ddtree.best_rate(masses, costs, spent)
        assert rate == pytest.approx(max(rates)) and n == rates.index(max(rates))


@pytest.mark.parametrize("seed", range(4))
def test_cost_aware_tree(seed):
    """Free drafts, flat passes: the whole tree. A pass or call that cannot pay: no call. Else the
    best head."""
    target, drafter = tiny_target(8, seed), small_drafter(8, seed)
    stale, canvas = some_stale(target, 6), dlm.Canvas(target, Decoder(gen_len=20), random_prompt(3))
    full = ddtree.spot(stale, canvas, 12, drafter)
    free = ddtree.Costs([1.0] * 30, [0.0] * 30)
    assert ddtree.spot_cost_aware(stale, canvas, 12, drafter, free) == full
    dear_passes = ddtree.Costs([0.0, 1.0] + [100.0] * 30, [0.0] * 30)
    for costs in (dear_passes, ddtree.Costs([1.0] * 30, [100.0] * 30)):
        never_asked = SimpleNamespace(order=lambda stale: None)
        tree = ddtree.spot_cost_aware(stale, canvas, 12, never_asked, costs)
        assert tree == ddtree.root_only(canvas)
    passes = [0.0] + [1 + 0.1 * n for n in range(9)]  # passes of over 9 units were not measured
    tree = ddtree.spot_cost_aware(stale, canvas, 12, drafter, ddtree.Costs(passes, [0.0] * 30))
    rates = [sum(tree.masses[: n + 1]) / passes[n + 1] for n in range(len(tree.states))]
    assert len(tree.states) <= 9 and max(rates) == rates[-1] and tree.states[0] == canvas.state


def test_chain_and_graph_by_hand():
    """Chain: confident positions first, top tokens. Graph: (position rank, vocabulary rank)
    sets."""
    state = (5, MASK, MASK, MASK)
    target = SimpleNamespace(mask_id=MASK)
    canvas = SimpleNamespace(state=state, target=target, is_leaf=lambda s: False)
    probs = torch.zeros(4, 10)
    for row, tokens, values in zip(
        probs, [[5, 2], [3, 4], [6, 7], [8, 9]], [[0.9, 0.1], [0.5, 0.4], [0.7, 0.2], [0.6, 0.3]]
    ):
        row[tokens] = torch.tensor(values)
    stale = drafting.Stale(Decoder(), (MASK,) * 4, MASK, 0, probs.log())
    tree = ddtree.chain(stale, canvas, 2)  # position 0 is decided by now
    assert tree.states == [state, (5, MASK, 6, MASK), (5, MASK, 6, 8)]
    assert tree.parents == [-1, 0, 1]
    # rank 9 does not exist
    sets = [((0, 0),), ((1, 1),), ((0, 0), (1, 1)), ((0, 0), (9, 0)), ((2, 0),)]
    tree = ddtree.graph(stale, canvas, 4, sets)
    assert tree.states == [  # the last set moves up for the one that the block has no room for
        state,
        (5, MASK, 6, MASK),
        (5, MASK, MASK, 9),
        (5, MASK, 6, 9),
        (5, 3, MASK, MASK),
    ]
    assert tree.parents[4] == 0 and tree.parents[:3] == [-1, 0, 0] and tree.parents[3] in (1, 2)


@pytest.mark.parametrize(
    "content, error",
    [
        (None, FileNotFoundError),
        ("{", ValueError),
        ("{}", ValueError),
        ("[]", ValueError),
        ('{"sets": [[0, 0]]}', ValueError),
    ],
)
def test_broken_graphs_are_refused(tmp_path, content, error):
    """A missing file, or one that is no draft graph, is one sentence that names it; a whole one is
    read."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"sets": SETS}))
    assert ddtree.load_graph(str(path)) == SETS
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(error, match="graph.json") as raised:
        ddtree.load_graph(str(path))
    assert one_sentence(raised)


# ----------------------------------------------------------------------------------- 8. the drafter


def test_drafter_size():
    """The paper's count: 0.62 M parameters; 617,089 with a 32×128 position table and a 128→64→1
    head."""
    count = sum(p.numel() for p in drafting.OrderDrafter().parameters())
    assert 615_000 < count < 625_000 and count == 617_089


def test_order_is_a_distribution_over_undecided_positions():
    """q(s|y): 0 where the path has decided, above 0 elsewhere, sum 1; a row does not depend on its
    neighbours."""
    stale = some_stale(tiny_target(8))
    order = drafting.OrderDrafter().eval().order(stale)
    decided = [[False] * 5, [True, False, False, True, False], [False, True, True, True, True]]
    decided = np.array(decided)
    q = order(decided)
    assert q.shape == (3, 5) and (q[decided] == 0).all() and (q[~decided] > 0).all()
    assert np.allclose(q.sum(1), 1, atol=1e-6)
    assert all(np.allclose(order(row[None])[0], right, atol=1e-6) for row, right in zip(decided, q))


def test_stale_features_by_hand():
    """The 8 statistics: p1, p1 − p2, entropy, tail mass, rank / L, offset / L, distance / L, share
    still masked."""
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.75, 0.25, 0.0]], dtype=torch.float64)
    stale = drafting.Stale(Decoder(), (MASK, 7, MASK, 7), MASK, 0, probs.log())
    assert stale.features.shape == (2, 72) and stale.positions == [0, 2]
    seen = stale.candidates(2)
    assert seen.ranking == [1, 0] and seen.confidence.tolist() == [0.5, 0.75]
    assert [tokens[0] for tokens in seen.tokens] == [0, 1]
    assert seen.values[0, :4].tolist() == [0.5, 0.25, 0.25, 0.0]
    assert seen.values.shape == (2, 32) and all(len(tokens) == 32 for tokens in seen.tokens)
    entropy = [-0.5 * np.log(0.5) - 0.5 * np.log(0.25), -0.75 * np.log(0.75) - 0.25 * np.log(0.25)]
    right = torch.tensor(
        [
            [0.50, 0.25, entropy[0], 0, 1 / 4, 0 / 4, 1 / 4, 2 / 4],
            [0.75, 0.50, entropy[1], 0, 0 / 4, 2 / 4, 1 / 4, 2 / 4],
        ]
    )
    assert torch.allclose(stale.features[:, 64:], right.float(), atol=1e-6)


def test_drafter_survives_saving(tmp_path):
    """What is loaded gives the q of what was saved, bit for bit, whatever its shape."""
    stale = some_stale(tiny_target(8))
    saved = small_drafter(8, 3)
    saved.save(str(tmp_path), trained_on="nothing")
    loaded, decided = drafting.load_drafter(str(tmp_path)), np.zeros((1, 5), dtype=bool)
    assert loaded.shape == saved.shape and not loaded.training
    assert (loaded.order(stale)(decided) == saved.order(stale)(decided)).all()


def edit_weights(change):
    """A breaker of folders: rewrites model.safetensors with its dict of tensors changed by
    `change`."""

    def edit(folder):
        path = os.path.join(folder, "model.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def edit_config(content=None, **fields):
    """A breaker of folders: config.json becomes `content` (bytes), or gets `fields`, where None
    removes one."""

    def edit(folder):
        path = os.path.join(folder, "config.json")
        with open(path, "rb") as file:
            old = file.read()
        new = {**json.loads(old), **fields}
        kept = {key: value for key, value in new.items() if value is not None}
        with open(path, "wb") as file:
            file.write(content or json.dumps(kept).encode())

    return edit


def truncate(folder):
    os.truncate(os.path.join(folder, "model.safetensors"), 1000)


def remove_weights(folder):
    os.remove(os.path.join(folder, "model.safetensors"))


@pytest.mark.parametrize(
    "edit, named",
    [
        (edit_weights(lambda t: t.pop("position.weight")), "position.weight"),
        (edit_weights(lambda t: t.update(extra=torch.zeros(2))), "extra"),
        (edit_weights(lambda t: t.update({"position.weight": torch.zeros(3)})), "position.weight"),
        (truncate, "safetensors|header"),
        (remove_weights, "safetensors"),
        (edit_config(b"{"), "cannot be loaded"),
        (edit_config(b"[1]"), "cannot be loaded"),
        (edit_config(b"\xff\xfe{"), "cannot be loaded"),
        (edit_config(b'{"shape": {"heads": 7}}'), "cannot be loaded"),
    ],
    ids="missing surplus misshaped truncated no-weights json list binary heads".split(),
)
def test_broken_drafters_are_refused(tmp_path, edit, named):
    """A drafter that is not what was saved is refused with one sentence that names the fault, not
    half loaded."""
    small_drafter(8).save(str(tmp_path))
    edit(str(tmp_path))
    with pytest.raises(ValueError, match=named) as error:
        drafting.load_drafter(str(tmp_path))
    assert one_sentence(error) and str(tmp_path) in str(error.value)


def test_a_missing_drafter_is_refused(tmp_path):
    """A folder without a drafter is named in one sentence."""
    with pytest.raises(FileNotFoundError, match="nowhere") as error:
        drafting.load_drafter(str(tmp_path / "nowhere"))
    assert one_sentence(error)
