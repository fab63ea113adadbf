"""The drafter by hand: every column of what it reads, the path, the noise, the hedge, the costs, and
how many passes the shipped drafters need. Paper sections 3, 4 and 6.

Left out: trees against a heap, files (test_exactness.py); training (test_train.py).

    python -m pytest test_drafter.py          # under a minute
"""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ddtree
import dlm
import drafter as drafting
import targets
import tasks
import verify
from decoder import Decoder, gumbel
from test_exactness import MASK, drafting_round, random_prompt, tiny_target

# a block of 8, positions 2, 3 and 6 undecided; each with its probabilities over 4 ids
STATE = (5, 5, MASK, MASK, 5, 5, MASK, 5)
PROBS = [[0.5, 0.25, 0.125, 0.125], [0.125, 0.75, 0.125, 0.0], [0.25, 0.25, 0.5, 0.0]]


def stale_of(probs=PROBS, state=STATE, block=2, **settings):
    log_probs = torch.tensor(probs, dtype=torch.float64).log()
    return drafting.Stale(Decoder(**settings), state, MASK, block, log_probs)


def test_all_72_columns():
    """32 probabilities, falling; their logs, not under log 1e-9, divided by 10; 8 statistics."""
    for s, (row, p) in enumerate(zip(stale_of().features.tolist(), PROBS)):
        falling = sorted(p, reverse=True) + [0.0] * 28
        assert row[:32] == pytest.approx(falling, abs=1e-7)
        logs = [math.log(max(x, 1e-9)) / 10 for x in falling]
        assert row[32:64] == pytest.approx(logs, rel=1e-6)
        entropy = -sum(x * math.log(x) for x in p if x)
        rank = [1, 0, 2][s]  # .5 and .5 tie: the lower position first
        offset, distance = [2, 3, 6][s], [1, 1, 1][s]
        right = [falling[0], falling[0] - falling[1], entropy, 0, rank / 8, offset / 8, distance / 8,
                 3 / 8]  # fmt: skip
        assert row[64:] == pytest.approx(right, abs=1e-6)


def test_columns_of_a_wide_vocabulary():
    """Only the 32 likeliest of 40 ids are kept; the rest is the tail."""
    p = [(41 - v) / 820 for v in range(1, 41)]  # 40 … 1 over 820
    row = stale_of([p] * 8, (MASK,) * 8).features[0].tolist()
    assert row[:32] == pytest.approx(p[:32]) and row[67] == pytest.approx(sum(p[32:]), rel=1e-5)
    assert row[70] == 1.0 and row[71] == 1.0  # nothing is decided: distance L, all masked


def test_nearest_decided():
    """To the nearest on either side; L where there is none."""
    assert drafting.nearest_decided([1, 2, 3, 6, 7], 8).tolist() == [1, 2, 1, 1, 2]
    assert drafting.nearest_decided([0, 1], 2).tolist() == [2, 2]


def test_ranks_follow_the_rounded_confidence():
    """Two that bfloat16 cannot tell apart tie, and the lower position goes first."""
    near = [[0.9985, 0.0015], [0.9999, 0.0001]]
    state = (MASK, MASK)
    assert stale_of(near, state).features[:, 68].tolist() == [0.0, 0.5]
    assert stale_of(near, state, precision="float32").features[:, 68].tolist() == [0.5, 0.0]


@pytest.mark.parametrize("noise", ("step", "position"))
def test_candidates_under_noise(noise):
    """argmax T·(log p + G) of that step at that block and place; p(v) its softmax; the confidence is
    that in the drawn token; the 4 noised statistics in their columns."""
    stale = stale_of(temperature=2.0, seed=7, noise=noise, precision="float32")
    for step in (5, 6):
        seen, columns = stale.candidates(step), stale.noised(step).tolist()
        named = step if noise == "step" else 0
        confidences = []
        for j, (s, p) in enumerate(zip((2, 3, 6), PROBS)):
            G = gumbel(7, *(torch.tensor([n]) for n in (2, named, s)), 4)[0].tolist()
            law = [x**0.5 for x in p]
            law = [x / sum(law) for x in law]
            score = [2.0 * (math.log(x) + g) if x else -math.inf for x, g in zip(law, G)]
            top = max(range(4), key=score.__getitem__)
            share = 1 / sum(math.exp(x - score[top]) for x in score)
            assert seen.tokens[j][0] == top and seen.values[j, 0] == pytest.approx(share, rel=1e-5)
            assert seen.confidence[j].item() == pytest.approx(p[top])
            likeliest = float(top == p.index(max(p)))
            assert columns[j][:3] == pytest.approx([p[top], share, likeliest], rel=1e-5)
            confidences.append(p[top])
        ranking = sorted(range(3), key=lambda j: (-confidences[j], j))
        assert seen.ranking == ranking
        assert [row[3] for row in columns] == [ranking.index(j) / 8 for j in range(3)]


def test_steps():
    """A state's step counts what is decided, on the path too; at T = 0 all steps are alike."""
    stale = stale_of()
    assert stale.positions == [2, 3, 6]
    assert stale.step(np.array([False, False, False])) == 5
    assert stale.step(np.array([True, False, True])) == 7
    assert stale.candidates(5) is stale.candidates(6)
    warm = stale_of(temperature=1.0)
    assert warm.candidates(5) is not warm.candidates(6)


def test_what_the_network_reads():
    """Offsets, not ranks, name the position table; the path features are committed? and depth / L;
    the noised statistics follow them; a committed position has no share."""
    torch.manual_seed(0)
    reader = drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16, block_size=8, noised=True)
    reader.eval().encoder = torch.nn.Identity()
    stale = stale_of(temperature=1.0, seed=3)
    decided = np.array([[True, False, False], [False, True, False]])
    q = reader.order(stale)(decided)
    with torch.inference_mode():
        x = torch.zeros(2, 3, 78)
        x[..., :72] = stale.features
        x[..., 72] = torch.from_numpy(decided)
        x[..., 73] = 1 / 8
        x[..., 74:] = stale.noised(6)
        x = reader.input(x) + reader.position(torch.tensor([2, 3, 6]))
        logits = reader.head(x)[..., 0].masked_fill(torch.from_numpy(decided), -math.inf)
    assert np.allclose(q, logits.softmax(-1).numpy(), atol=1e-6)
    assert (q[decided] == 0).all() and np.allclose(q.sum(1), 1)


def test_sizes():
    """617,089 parameters; the four columns of the noise add 4·128."""
    sizes = [sum(p.numel() for p in drafting.OrderDrafter(noised=n).parameters()) for n in (0, 1)]
    assert sizes == [617_089, 617_601]


# -------------------------------------------------------------------------------------------- trees


def made_up_canvas(state, leaf=lambda state: False):
    return SimpleNamespace(
        state=state, block=0, target=SimpleNamespace(mask_id=MASK), is_leaf=leaf,
        is_complete=lambda state: MASK not in state,
    )  # fmt: skip


def even(decided):
    """q alike over what is left."""
    left = ~decided
    return left / left.sum(1, keepdims=True)


@pytest.mark.parametrize("p, children", [(0.6, 1), (0.59, 2), (0.61, 1)])
def test_the_hedge(p, children):
    """The second token is a candidate only under a stale top-1 probability of .6, and no third."""
    stale = stale_of([[p, 0.9 - p, 0.1, 0.0]], (MASK, 5), precision="float32")
    tree = ddtree.grow(stale, made_up_canvas((MASK, 5)), even, 9)
    assert tree.states[1:] == [(0, 5), (1, 5)][:children]
    assert tree.masses[1:] == pytest.approx([p, 0.9 - p][:children])


@pytest.mark.parametrize("budget", (0, -1))
def test_budgets_that_are_refused(budget):
    stale, canvas = drafting_round(0)
    for draft in (ddtree.chain, partial(ddtree.grow, order=even), ddtree.confidence_tree,
                  partial(ddtree.graph, sets=[((0, 0),)])):  # fmt: skip
        with pytest.raises(ValueError, match="budget"):
            draft(stale, canvas, budget=budget)


def test_confidence_tree_by_hand():
    """Width 2: the two most confident positions left, their confidences scaled to sum 1."""
    stale, canvas = stale_of(), made_up_canvas(STATE)
    q = ddtree.confidence_order(stale, 2)(np.array([[False] * 3, [False, True, False]]))
    assert np.allclose(q, [[0.4, 0.6, 0.0], [0.5, 0.0, 0.5]])
    tree = ddtree.confidence_tree(stale, canvas, 3)
    assert [ddtree.commit(STATE, 3, 1), ddtree.commit(STATE, 2, 0)] == tree.states[1:3]
    # .6·.75 = .45; .4·.5 = .2, hedged .4·.25; behind the first .5·.5 of it
    assert tree.masses[1:] == pytest.approx([0.45, 0.2, 0.1125])


def test_costs_by_a_clock_of_our_own(monkeypatch):
    """A pass over u units takes u + 1 s, a call on n states n/10 s, reading the features 7 s: each
    lands where it belongs; sizes that were not measured lie between their neighbours."""
    now = [0.0]
    monkeypatch.setattr(ddtree.time, "perf_counter", lambda: now[0])

    class Canvas:
        crosses, blank, block = True, (MASK,) * 8, 0

        def look(self, states, crosses=True):
            now[0] += len(states) + 1
            return SimpleNamespace(unit=lambda u: torch.zeros(4, 5)), {}

    def order(stale):
        now[0] += 7

        def q(decided):
            now[0] += len(decided) / 10

        return q

    monkeypatch.setattr(ddtree, "start", lambda *_: Canvas())
    decoder = SimpleNamespace(transition=lambda out: None)
    target = SimpleNamespace(mask_id=MASK)
    costs = ddtree.Costs.measure(target, decoder, None, SimpleNamespace(order=order), 21)
    assert costs.passes == pytest.approx([0.0] + [u + 1 for u in range(1, 22)])
    assert costs.drafts == pytest.approx([7.0] + [n / 10 for n in range(1, 22)])


def test_what_pays():
    """A node that fills its block counts for two units; drafting counts; passes that were not
    measured are not planned for."""
    costs = ddtree.Costs([0.0, 1.0, 1.5, 1.6, 1.7, 9.0], [0.0])
    assert ddtree.best_rate([0.9, 0.8, 0.7], costs) == pytest.approx((3.4 / 1.7, 3))
    assert ddtree.best_rate([0.9, 0.8, 0.7], costs, 0.3) == pytest.approx((3.4 / 2.0, 3))
    # the first node complete: 1, 3, 4, 5 units
    assert ddtree.best_rate([0.9, 0.8, 0.7], costs, 0, {0}) == pytest.approx((2.7 / 1.7, 2))
    assert ddtree.best_rate([0.1], costs) == pytest.approx((1.0, 0))
    spent = [0.2]
    calls = ddtree.Costs([0.0, 1.0, 1.1, 1.2, 1.3], [0.2, 0.1, 0.3])
    assert ddtree.worth_growing(calls, spent, [], [1.0]) and spent == pytest.approx([0.3])
    # 1.9 / (1.1 + .3) now; with two more (.81, .09) at most 2.8 / (1.3 + .3 + .1)
    assert ddtree.worth_growing(calls, spent, [0.9], [0.9]) and spent == pytest.approx([0.4])
    dear = ddtree.Costs([0.0, 1.0, 1.1, 1.2, 1.3], [0.2, 5.0])
    assert not ddtree.worth_growing(dear, spent, [0.9], [0.9]) and spent == pytest.approx([0.4])


def test_cost_aware_floor():
    """γ is the mean rise of a pass, in passes over one unit: nodes under it are never drafted."""
    seen = []
    stale, canvas = drafting_round(1)
    passes = [0.0] + [2.0 + 0.2 * u for u in range(11)]  # rises by .1 of c(1)
    original = ddtree.grow

    def grow(stale, canvas, order, budget, floor, go_on):
        seen.append(floor)
        return original(stale, canvas, order, budget, floor, go_on)

    ddtree.grow = grow
    try:
        drafter = SimpleNamespace(order=lambda stale: even)
        ddtree.spot_cost_aware(stale, canvas, 5, drafter, ddtree.Costs(passes, [0.0] * 9))
    finally:
        ddtree.grow = original
    assert seen == pytest.approx([0.1])


def test_graph_ranks_count_what_is_masked_in_the_root():
    """Rank i counts positions by confidence among those masked now; of two ranks in a set, the
    second counts what the first has taken; parents come first, the budget cuts."""
    probs = [[0.9, 0.1, 0, 0], [0.8, 0.2, 0, 0], [0.7, 0.3, 0, 0], [0.6, 0.4, 0, 0]]
    stale = stale_of(probs, (MASK,) * 4)
    canvas = made_up_canvas((0, MASK, MASK, MASK))  # the most confident one is decided by now
    sets = [((1, 0),), ((0, 0), (1, 0)), ((0, 1),), ((2, 1),), ((0, 1), (2, 1)), ((3, 0),)]
    tree = ddtree.graph(stale, canvas, 9, sets)
    assert tree.states == [
        (0, MASK, MASK, MASK), (0, MASK, 0, MASK), (0, 0, 0, MASK), (0, 1, MASK, MASK),
        (0, MASK, MASK, 1), (0, 1, MASK, 1),
    ]  # fmt: skip
    assert tree.parents[:5] == [-1, 0, 1, 0, 0] and tree.parents[5] in (3, 4)
    assert ddtree.graph(stale, canvas, 2, sets).states == tree.states[:3]


# ------------------------------------------------------------------------------------- the loop


def test_the_next_round_reads_the_deepest_accepted_state():
    """What a draft is handed are the conditionals of the last verified state, whose transition is
    the canvas's state; behind a finished block those of the blank next one."""
    target, decoder = tiny_target(8, 5), Decoder(gen_len=24)
    prompt, rounds = random_prompt(11), []
    truth = {}

    def record(canvas, state, following, *_):
        truth.setdefault(canvas.block, [state]).append(following)

    dlm.generate(target, decoder, prompt, watch=record)

    def draft(stale, canvas):
        alone = target.forward([stale.state], [canvas.block], canvas.prefix, {})
        assert stale.block == canvas.block
        assert torch.allclose(stale.log_probs, alone.unit(0), atol=1e-10)
        assert decoder.transition(alone)[0] == canvas.state
        rounds.append(stale.state)
        return ddtree.oracle_positions(stale, canvas, 4, truth)

    result = verify.speculate(target, decoder, prompt, draft)
    assert result.written == dlm.generate(target, decoder, prompt).written
    assert sum(result.accepted) > 5 and any(state.count(MASK) == 8 for state in rounds)


def test_other_noise_for_uncoupled_drafts():
    """coupled: the decoder itself, twice; uncoupled: drafts with another seed; greedy: without
    noise, both; and the free commit stays the decoder's own draw."""
    decoder = Decoder(temperature=1.0, seed=5)
    assert verify.decoders_of("coupled", decoder) == (decoder, decoder)
    drafts, accepts = verify.decoders_of("uncoupled", decoder)
    assert accepts == decoder and drafts.seed != 5 and drafts.temperature == 1.0
    drafts, accepts = verify.decoders_of("greedy", decoder)
    assert drafts == accepts and drafts.temperature == 0.0 and drafts.seed == 5
    target, prompt = tiny_target(8, 1), random_prompt(9)
    hot = Decoder(gen_len=16, temperature=2.0, seed=5)
    free = dlm.generate(target, hot, prompt)
    alone = lambda stale, canvas: ddtree.root_only(canvas)  # every commit is the free one
    for matching in verify.MATCHINGS:
        result = verify.speculate(target, hot, prompt, alone, matching)
        assert result.written == free.written, matching


def test_seconds_of_all_stages():
    """draft, target and rest are told apart and add up to the wall time."""
    import time

    target, decoder, prompt = tiny_target(8, 1), Decoder(gen_len=16), random_prompt(9)

    def slow(stale, canvas):
        time.sleep(0.01)
        return ddtree.root_only(canvas)

    begin = time.perf_counter()
    result = verify.speculate(target, decoder, prompt, slow)
    wall = time.perf_counter() - begin
    assert result.seconds["draft"] >= 0.01 * (len(result.accepted) - 4) > 0.05
    assert result.seconds["target"] > 0 and result.seconds["rest"] > 0
    assert sum(result.seconds.values()) == pytest.approx(wall, rel=0.2)


@pytest.mark.parametrize("broken", (
    lambda c: ddtree.Tree([], [], []),
    lambda c: ddtree.Tree([c.blank], [1.0], [-1]),
    lambda c: ddtree.Tree([c.state, c.state[:-1]], [1.0, 1.0], [-1, 0]),
    lambda c: ddtree.Tree([c.state, c.state], [1.0], [-1, 0]),
    lambda c: ddtree.Tree([c.state, c.blank], [1.0, 1.0], [-1, 0]),
    lambda c: ddtree.Tree([c.state, tuple(99 if t == MASK else t for t in c.state)], [1.0] * 2, [-1, 0]),
    lambda c: ddtree.Tree([c.state, tuple(-1 if t == MASK else t for t in c.state)], [1.0] * 2, [-1, 0]),
))  # fmt: skip
def test_drafts_that_are_no_trees(broken):
    with pytest.raises(ValueError, match="draft"):
        verify.speculate(tiny_target(8), Decoder(gen_len=16), random_prompt(9),
                         lambda stale, canvas: broken(canvas))  # fmt: skip


@pytest.mark.parametrize("pad", (None, 24))
def test_every_accepted_node_saves_a_pass(pad):
    """accepted + passes = draft-free passes, also where two drafted nodes complete the block and
    padding leaves room for one next block, and the second of them is the right one."""
    target, decoder, prompt = tiny_target(8, 2), Decoder(gen_len=24), random_prompt(13)
    truth = {}
    free = dlm.generate(
        target, decoder, prompt,
        watch=lambda canvas, state, after, *_: truth.setdefault(canvas.block, [state]).append(after),
    )  # fmt: skip

    def draft(stale, canvas):
        states = truth[canvas.block]
        coming = states[states.index(canvas.state) :]
        coming = [state for state in coming if not canvas.is_leaf(state)][:12]
        last = coming[-1]
        wrong = tuple((t + 1) % MASK if old == MASK else t for t, old in zip(last, canvas.state))
        nodes = [coming[0]] + [wrong] * (canvas.is_complete(last)) + coming[1:]
        return ddtree.Tree(nodes, [1.0] * len(nodes), [-1] + [0] * (len(nodes) - 1))

    target.pad_to = pad
    result = verify.speculate(target, decoder, prompt, draft)
    assert result.written == free.written
    assert sum(result.accepted) + result.passes["denoise"] == free.passes["denoise"]
    assert result.passes["denoise"] < free.passes["denoise"] / 3


# ------------------------------------------------------------------------- the shipped drafters


def test_passes_of_the_shipped_drafters():
    """Passes over two prompts a task, 96 new tokens, D = 8, float32: as they were when the drafters
    were trained. A drafter that reads a wrong column still writes the right text, in more passes.
    The loop without drafts and the target are pinned with them."""
    target = targets.load("embedded")
    folder = targets.EMBEDDED.replace("target", "")
    order, noised = (drafting.load_drafter(folder + name) for name in ("order", "order-noised"))
    sets = ddtree.load_graph(folder + "graph.json")
    drafts = {
        "chain": ddtree.chain,
        "tree": ddtree.confidence_tree,
        "graph": partial(ddtree.graph, sets=sets),
        "spot": partial(ddtree.spot, drafter=order),
        "spot-floor": partial(ddtree.spot, drafter=order, floor=0.2),
        "spot-noised": partial(ddtree.spot, drafter=noised),
    }
    passes = {}
    for task in tasks.TASKS:
        for problem in tasks.problems(task, "test", 2):
            prompt = target.encode(problem.prompt)
            for T in (0.0, 2.0):
                decoder = Decoder(gen_len=96, temperature=T)
                free = dlm.generate(target, decoder, prompt)
                counts = {"draft-free": free.passes["denoise"]}
                names = drafts if T == 0 else ("chain", "spot-noised")
                for name, draft in ((name, drafts[name]) for name in names):
                    result = verify.speculate(target, decoder, prompt, partial(draft, budget=8))
                    assert result.written == free.written
                    counts[name] = result.passes["denoise"]
                for name, count in counts.items():
                    passes[T, name] = passes.get((T, name), 0) + count
    assert passes == PINNED


PINNED = {
    (0.0, "draft-free"): 333, (0.0, "chain"): 94, (0.0, "tree"): 117, (0.0, "graph"): 93,
    (0.0, "spot"): 65, (0.0, "spot-floor"): 80, (0.0, "spot-noised"): 66,
    (2.0, "draft-free"): 333, (2.0, "chain"): 105, (2.0, "spot-noised"): 85,
}  # fmt: skip


@pytest.mark.parametrize("change", ("layers", "width", "type"))
def test_drafters_of_odd_sizes_and_types(tmp_path, change):
    """Sizes far beyond the file's are refused at once, and weights of another type do not load."""
    import json

    from safetensors.torch import load_file, save_file

    folder = str(tmp_path)
    drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16).save(folder)
    if change == "type":
        weights = load_file(folder + "/model.safetensors")
        weights = {name: tensor.int() for name, tensor in weights.items()}
        save_file(weights, folder + "/model.safetensors")
    else:
        shape = json.loads((tmp_path / "config.json").read_text())["shape"] | {change: 10**7}
        (tmp_path / "config.json").write_text(json.dumps({"shape": shape}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        drafting.load_drafter(folder)


@pytest.mark.parametrize("setting", (
    {"temperature": "1"}, {"top_p": None}, {"value": "x"}, {"rule": 3}, {"rule": ["exact"]},
))  # fmt: skip
def test_settings_of_odd_types(setting):
    with pytest.raises(ValueError, match="give a number|unknown rule"):
        Decoder(**setting)


def test_text_that_is_no_utf8():
    """As Python hands over bytes of another encoding on the command line."""
    with pytest.raises(ValueError, match="UTF-8"):
        targets.load("embedded").encode("caf\udce9")
