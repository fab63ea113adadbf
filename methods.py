"""The rows of the tables: every way of decoding that bench.py compares, in one list.

To compare a drafter of your own, write my_draft(stale, canvas, budget) -> Tree and add one line to
ROWS:

    Method("mine", "peer", "what it does", lambda bench: my_draft),

It is then in the tables at T = 0 and at T > 0, in the means, in the plot and among the choices of
--methods.

What this file leaves out: the drafters themselves (ddtree.py, drafter.py), and running the rows on
prompts (bench.py).
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import ddtree
import dlm
from decoder import Decoder
from drafter import OrderDrafter
from verify import MATCHINGS, speculate

LARGEST = 20  # draft nodes of the methods with a budget of their own


@dataclass
class Bench:
    """What a run works with, loaded and checked."""

    args: argparse.Namespace  # the options
    target: dlm.Target
    decoder: Decoder  # as the options say, at their first temperature
    problems: dict  # {task: [Problem]}; empty where the prompts are the user's own
    drafter: OrderDrafter  # of --drafter
    small: OrderDrafter  # of --small
    noised: OrderDrafter  # of --noised
    sets: list  # the calibrated draft sets of --graph
    pad_to: int | None = None  # units of every drafted pass, with --pad
    costs: dict = field(default_factory=dict)  # measured Costs by drafter: "drafter", "small"
    truth: dict = field(default_factory=dict)  # {block: its states} of the prompt, for the oracles


@dataclass(frozen=True)
class Method:
    """One row of the tables."""

    name: str
    kind: str  # "free" (a loop without drafts), "peer", "spot" or "oracle"
    about: str  # what the legend says of it
    draft: Callable | None = None  # of a Bench: draft(stale, canvas, budget) -> Tree
    matchings: tuple = ("coupled",)  # what is compared of it at T > 0
    own_budget: bool = False  # it chooses the number of its nodes itself, whatever D is


ROWS = [
    Method("draft-free", "free", "the loop without drafts, fused", matchings=("",)),
    Method("published", "free", "the same with a storing pass per block", matchings=()),
    Method("chain", "peer", "SSD", lambda bench: ddtree.chain),
    Method("tree", "peer", "BlockSpec", lambda bench: ddtree.confidence_tree),
    Method(
        "graph", "peer", "Spiffy, version 1",
        lambda bench: partial(ddtree.graph, sets=bench.sets), MATCHINGS,
    ),
    Method(
        "spot", "spot", "the order drafter's tree",
        lambda bench: partial(ddtree.spot, drafter=bench.drafter), MATCHINGS,
    ),
    Method(
        "spot-floor", "spot", "without the nodes whose mass is under γ (--floor)",
        lambda bench: partial(ddtree.spot, drafter=bench.drafter, floor=bench.args.floor), (),
    ),
    Method(
        "spot-noised", "spot", "with a drafter that also reads the noised conditionals",
        lambda bench: partial(ddtree.spot, drafter=bench.noised), MATCHINGS,
    ),
    Method(
        "spot-cost", "spot", "with as many nodes as pay by measured times",
        lambda bench: cost_aware(bench, "drafter"), (), own_budget=True,
    ),
    Method(
        "spot-small", "spot", "spot-cost with a small drafter",
        lambda bench: cost_aware(bench, "small"), (), own_budget=True,
    ),
    Method(
        "oracle-positions", "oracle", "true order, stale tokens",
        lambda bench: partial(ddtree.oracle_positions, truth=bench.truth), (),
    ),
    Method(
        "oracle-tokens", "oracle", "true tokens, stale order",
        lambda bench: partial(ddtree.oracle_tokens, truth=bench.truth), (),
    ),
]  # fmt: skip
METHODS = {method.name: method for method in ROWS}


def cost_aware(bench, drafter):
    """SPOT with the drafter of that name and a budget that follows from its measured costs."""
    known = {"drafter": getattr(bench, drafter), "costs": bench.costs[drafter]}
    return partial(ddtree.spot_cost_aware, **known)


def chosen(args):
    """The methods that --methods picks, in the tables' order; the draft-free loop always is."""
    return [m for m in METHODS.values() if m.name in args.methods or m.name == "draft-free"]


def rows_of(args, temperature):
    """(method, matching, budget) of every row of one sample; budget 0: none, or one of its own.

    At T = 0 all matchings are the same, so that a method has one row per budget.
    """
    rows = []
    for method in chosen(args):
        cold = ("coupled",) if method.draft else ("",)
        matchings = method.matchings if temperature else cold
        budgets = args.budget if method.draft and not method.own_budget else [0]
        rows += [(method.name, how, budget) for budget in budgets for how in matchings]
    return rows


# ----------------------------------------------------------------------------------- timed decoding


class Commits:
    """Counts the commits of a loop that it watches, and those of the likeliest token of their
    state's conditionals."""

    def __init__(self):
        self.all = self.likeliest = 0
        self.seconds = 0.0  # what the counting took

    def step(self, state, following, out, unit):
        """Of one transition from `state`, which is a unit of the pass `out`."""
        begin = time.perf_counter()
        L, first = len(state), sum(out.counts[:unit])
        places = out.masked[first : first + out.counts[unit]]
        likeliest = out.unit(unit).argmax(-1).tolist()
        for place, token in zip(places, likeliest):
            s = place % L
            if following[s] != state[s]:
                self.all += 1
                self.likeliest += following[s] == token
        self.seconds += time.perf_counter() - begin

    def round(self, canvas, tree, path, following, out, unit):
        """Of a speculative round: every step along the accepted path, and the free commit."""
        for before, after in zip(path, path[1:]):
            self.step(tree.states[before], tree.states[after], out, before)
        last = tree.states[path[-1]] if unit == path[-1] else canvas.blank
        self.step(last, following, out, unit)


def draft_free(target, decoder, prompt, fused=True, commits=None):
    """A timed draft-free generation, and the states that each block went through: {block: [blank or
    prompt state, …, complete]}."""
    truth, begin = {}, time.perf_counter()

    def watch(canvas, state, following, out, unit):
        truth.setdefault(canvas.block, [state]).append(following)
        if commits:
            commits.step(state, following, out, unit)

    result = dlm.generate(target, decoder, prompt, fused, watch)
    counting = commits.seconds if commits else 0.0
    total = time.perf_counter() - begin - counting
    result.seconds = {"draft": 0.0, "target": total, "rest": 0.0}
    return result, truth


def decode(bench, decoder, prompt, row, commits=None):
    """A timed generation as a row says, (method, matching, budget). Loops without drafts are never
    padded."""
    name, matching, budget = row
    target, method = bench.target, METHODS[name]
    target.pad_to = bench.pad_to if method.draft else None
    try:
        if not method.draft:
            fused = name != "published"
            return draft_free(target, decoder, prompt, fused, commits)[0]
        draft = partial(method.draft(bench), budget=budget or LARGEST)
        watch = commits.round if commits else None
        result = speculate(target, decoder, prompt, draft, matching, watch=watch)
        result.seconds["rest"] -= commits.seconds if commits else 0.0
        return result
    finally:
        target.pad_to = bench.pad_to
