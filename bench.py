"""All methods side by side: passes, speed, exactness (paper section 10).

    python bench.py                                 # the embedded target, both tasks, about a minute on 2 cores
    python bench.py --budget 6 8 12 20              # the paper's budgets
    python bench.py --diagnose                      # why the order matters (section 2), beside the paper's figures
    python bench.py --trace                         # one prompt, round by round
    python bench.py --temperature 0.5 1 1.5 2       # sampling (section 6): three matchers, several seeds
    python bench.py --model sdar-8b --allow-code    # the paper's main experiment, on a CUDA machine
    python bench.py --pass-cost                     # the time of a pass over 1 + D copies
    torchrun --nproc-per-node 8 bench.py …          # the prompts split over processes

Every prompt is decoded by every method in one process, the order of methods rotating from prompt to prompt, after a
warm-up of each. The clock covers a whole generation, drafting included. Headline figures are totals over prompts:
passes per answer, the cut in denoise passes over the fused draft-free loop, new tokens per second as a ratio to it.
The result file is written after every prompt; given again as --out with the same arguments, an interrupted run goes
on.

What this file leaves out: looking at one target closely (diagnose.py).
"""

import argparse
import datetime
import glob
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import transformers

import ddtree
import diagnose
import dlm
import sandbox
import targets
import tasks
import train
from drafter import Stale, load_drafter
from verify import MATCHERS, speculate

FREE = ("draft-free", "published")  # loops without drafts: fused, and with a storing pass per block
DRAFTED = ("chain", "tree", "graph", "spot", "spot-floor", "spot-noised", "oracle-positions", "oracle-tokens")
SAMPLED = [("chain", "coupled"), ("tree", "coupled")] + [  # what is compared at T > 0
    (name, matching) for name in ("graph", "spot", "spot-noised") for matching in MATCHERS
]
COST_AWARE = ("spot-cost", "spot-small")  # SPOT with a budget of its own: the drafter, and a smaller one
LARGEST = 20  # its budget is never above this
REPEATS = 9  # measurements of a pass
MOST = 512  # budget that is accepted at most
PAPER = {"gsm8k": 350, "math500": 350, "humaneval": 164, "mbpp": 257}  # prompts of the main experiment (section 10)
CHECKPOINTS = os.path.join(targets.HERE, "checkpoints")


# --------------------------------------------------------------------------------------------------- measuring


def methods(bench, budget, truth):
    """{name: draft(stale, canvas)} at one budget; `truth` {block: states} is read by the oracles only."""

    def at(drafter_function, **needs):
        return partial(drafter_function, budget=budget, **needs)

    return {
        "chain": at(ddtree.chain),
        "tree": at(ddtree.confidence_tree),
        "graph": at(ddtree.graph, sets=bench["sets"]),
        "spot": at(ddtree.spot, drafter=bench["drafter"]),
        "spot-floor": at(ddtree.spot, drafter=bench["drafter"], floor=bench["args"].floor),
        "spot-noised": at(ddtree.spot, drafter=bench["noised"]),
        "oracle-positions": at(ddtree.oracle_positions, truth=truth),
        "oracle-tokens": at(ddtree.oracle_tokens, truth=truth),
    }


def cost_aware_methods(bench):
    """{name: draft(stale, canvas)} whose budget follows from the measured costs, for the drafter and the small one."""
    return {
        name: partial(ddtree.spot_cost_aware, budget=LARGEST, drafter=bench[drafter], costs=bench["costs"][drafter])
        for name, drafter in zip(COST_AWARE, ("drafter", "small"))
    }


class Commits:
    """Counts the commits of a loop that it watches, and those of the likeliest token of their state's conditionals;
    `seconds`: what the counting took."""

    def __init__(self):
        self.all = self.likeliest = 0
        self.seconds = 0.0

    def step(self, state, following, out, unit):
        begin = time.perf_counter()
        start, L = sum(out.counts[:unit]), len(state)
        positions = [place % L for place in out.where[start : start + out.counts[unit]]]
        likeliest = dict(zip(positions, out.unit(unit).argmax(-1).tolist()))
        changed = [s for s, (before, after) in enumerate(zip(state, following)) if before != after]
        self.all += len(changed)
        self.likeliest += sum(following[s] == likeliest[s] for s in changed)
        self.seconds += time.perf_counter() - begin

    def round(self, canvas, tree, path, following, out, unit):
        """Of a speculative round: every step along the accepted path, and the free commit."""
        for before, after in zip(path, path[1:]):
            self.step(tree.states[before], tree.states[after], out, before)
        self.step(canvas.blank if unit != path[-1] else tree.states[unit], following, out, unit)


def draft_free(target, decoder, prompt, fused=True, commits=None):
    """A timed draft-free generation and the states each block went through, {block: [blank or prompt state, …,
    complete]}."""
    truth, begin = {}, time.perf_counter()

    def watch(canvas, state, following, out, unit):
        truth.setdefault(canvas.block, [state]).append(following)
        if commits:
            commits.step(state, following, out, unit)

    result = dlm.generate(target, decoder, prompt, fused, watch)
    total = time.perf_counter() - begin - (commits.seconds if commits else 0.0)
    result.seconds = {"draft": 0.0, "target": total, "rest": 0.0}
    return result, truth


def drafted(target, decoder, prompt, draft, matching="coupled", commits=None):
    """A timed speculative generation."""
    result = speculate(target, decoder, prompt, draft, matching, watch=commits and commits.round)
    result.seconds["rest"] -= commits.seconds if commits else 0.0
    return result


def measure_costs(target, decoder, prompt, drafter, largest):
    """Seconds of passes over 1 … largest copies of a half-decided block behind the prompt, and of drafter calls.

    Lower quartiles of REPEATS, so that neither the first, cold ones nor a moment's disturbance count; sizes are
    interleaved, unmeasured ones interpolated.
    """
    canvas = dlm.start(target, decoder, prompt)
    if not canvas.crosses:
        canvas.look([canvas.blank], [canvas.block], {})  # opens the block
    half = tuple(0 if i % 2 else mask for i, mask in enumerate(canvas.blank))
    log_probs = canvas.look([half], [canvas.block], {}).unit(0)
    sizes = sorted({1, 2, 3, 5, 7, 9, 13, 17, 21, largest} & set(range(largest + 1)))
    passes, drafts, first = {n: [] for n in sizes}, {n: [] for n in sizes}, []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        order = drafter.order(Stale(decoder, half, target.mask_id, canvas.block, log_probs))
        order(np.zeros((1, len(log_probs)), dtype=bool))  # reads the stale features, then one call
        first.append(time.perf_counter() - begin)
        for n in sizes:
            begin = time.perf_counter()
            decoder.transition(canvas.look([half] * n, [canvas.block] * n, {}))
            passes[n].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            order(np.zeros((n, len(log_probs)), dtype=bool))
            drafts[n].append(time.perf_counter() - begin)
    zero = max(0.0, np.percentile(first, 25) - np.percentile(drafts[1], 25))
    return ddtree.Costs(
        *(
            np.interp(
                np.arange(largest + 1), [0] + sizes, [start] + [np.percentile(times[n], 25) for n in sizes]
            ).tolist()
            for start, times in ((0.0, passes), (zero, drafts))
        )
    )


def runs_of(bench, decoder, prompt, truth, commits):
    """What is compared on one prompt: (method, matching, budget, function that runs it). All methods at T = 0; at T > 0
    the matchers, whose `commits` are counted."""
    target, budgets = bench["target"], bench["args"].budget
    if decoder.temperature > 0:
        return [("draft-free", "", 0, lambda: draft_free(target, decoder, prompt, commits=commits[0])[0])] + [
            (
                name,
                how,
                budget,
                partial(drafted, target, decoder, prompt, methods(bench, budget, {})[name], how, counts),
            )
            for (budget, (name, how)), counts in zip(itertools.product(budgets, SAMPLED), commits[1:])
        ]
    runs = [
        ("published", "", 0, lambda: draft_free(target, decoder, prompt, fused=False)[0]),
        ("draft-free", "", 0, lambda: draft_free(target, decoder, prompt)[0]),
    ]
    drafts = [(name, 0, draft) for name, draft in cost_aware_methods(bench).items()]
    drafts += [(name, budget, draft) for budget in budgets for name, draft in methods(bench, budget, truth).items()]
    return runs + [
        (name, "coupled", budget, partial(drafted, target, decoder, prompt, draft)) for name, budget, draft in drafts
    ]


def measure_prompt(bench, task, index, temperature, seed):
    """Rows of one prompt: every method at every budget, timed, scored and compared with the draft-free tokens."""
    target, args = bench["target"], bench["args"]
    decoder = replace(bench["decoder"], temperature=temperature, seed=noise_seed(args, index, seed))
    problem = bench["problems"][task][index]
    prompt = target.encode(problem.prompt)
    target.units = shape = bench["units"]
    reference, truth = draft_free(target, decoder, prompt)
    commits = [Commits() for _ in range(1 + len(SAMPLED) * len(args.budget))]
    runs = runs_of(bench, decoder, prompt, truth, commits)
    tallies = dict(zip((run[:3] for run in runs), commits)) if temperature else {}
    rows, shift = [], (index + seed) % len(runs)
    for name, matching, budget, run in runs[shift:] + runs[:shift]:
        target.units = None if name in FREE else shape
        result, tally = run(), tallies.get((name, matching, budget))
        target.units, same = shape, result.written == reference.written
        rows.append(
            {
                "task": task,
                "index": index,
                "temperature": temperature,
                "seed": seed,
                "method": name,
                "matching": matching,
                "budget": budget,
                "passes": result.passes,
                "tokens": len(result.written),
                "accepted": result.accepted,
                "seconds": result.seconds,
                "commits": tally and [tally.likeliest, tally.all],
                "right": tasks.score(problem, target.decode(result.ids), args.allow_code),
                "differs": None
                if same
                else {}
                if matching == "greedy"
                else divergence(bench, decoder, prompt, reference, result),
            }
        )
    return rows


def noise_seed(args, index, seed):
    """The decoder's seed for the `seed`-th sample of prompt `index`: prompts of one task share no noise."""
    return args.seed + 1000003 * index + seed


def divergence(bench, decoder, prompt, reference, result):
    """Where two texts part: the first differing new token and the confidence margin of the draft-free step that wrote
    it."""
    target = bench["target"]
    at = next(
        (i for i, (a, b) in enumerate(zip(reference.written, result.written)) if a != b),
        min(len(reference.written), len(result.written)),
    )
    margins = []

    def watch(canvas, state, following, out, unit):
        offset = len(prompt) + at - len(canvas.done)
        if 0 <= offset < target.block_size and not out.partial and state[offset] != following[offset]:
            stale = Stale(decoder, state, target.mask_id, canvas.block, out.unit(unit))
            confidence = stale.at(ddtree.step_of(canvas, state)).confidence.sort(descending=True).values
            margins.append(float(confidence[0] - confidence[min(1, len(confidence) - 1)]))

    dlm.generate(target, decoder, prompt, watch=watch)
    return {"position": at, "margin": margins[0] if margins else None}


# --------------------------------------------------------------------------------------------------- reporting


def summary(rows):
    """Totals of one method's rows: passes per answer by kind, accepted per round (all rounds), rates and shares."""
    n, seconds = len(rows), {stage: sum(row["seconds"][stage] for row in rows) for stage in ("draft", "target", "rest")}
    passes = {kind: sum(row["passes"][kind] for row in rows) / n for kind in ("prefill", "denoise", "kv_commit")}
    accepted = [a for row in rows for a in row["accepted"]]
    total = sum(seconds.values())
    return {
        **passes,
        "accepted": float(np.mean(accepted)) if accepted else 0.0,
        "passes": sum(passes.values()),
        "rate": sum(row["tokens"] for row in rows) / total,
        "shares": {stage: part / total for stage, part in seconds.items()},
        "right": sum(row["right"] for row in rows),
        "exact": sum(row["differs"] is None for row in rows),
        "n": n,
    }


def table(rows, task, budget):
    """The table of one task and budget as lines of text."""
    chosen = [row for row in rows if row["task"] == task and row["budget"] in (0, budget)]
    found = {
        name: summary(same)
        for name in FREE + COST_AWARE + DRAFTED
        if (same := [row for row in chosen if row["method"] == name])
    }
    base, oracle = found["draft-free"], found["oracle-positions"]
    lines = [
        f"{task}, D = {budget}, {base['n']} prompts",
        f"{'':17}{'prefill':>8}{'denoise':>8}{'kv':>5}{'sum':>7}{'cut':>7}{'of oracle':>10}{'accepted':>9}"
        f"{'tokens/s':>9}{'draft/target/rest':>19}{'accuracy':>9}{'exact':>8}",
    ]
    for name, s in found.items():
        cut, shares = base["denoise"] / s["denoise"], "/".join(f"{100 * share:.0f}" for share in s["shares"].values())
        of_oracle = "" if name in FREE else f"{cut / (base['denoise'] / oracle['denoise']):.0%}"
        lines.append(
            f"{name:17}{s['prefill']:8.1f}{s['denoise']:8.1f}{s['kv_commit']:5.1f}{s['passes']:7.1f}"
            f"{cut:6.2f}x{of_oracle:>10}{s['accepted']:9.2f}{s['rate'] / base['rate']:8.2f}x{shares + ' %':>19}"
            f"{s['right'] / s['n']:9.0%}{s['exact']:>5}/{s['n']}"
        )
    return lines


def cut_and_rate(rows, args, method, budget):
    """Mean over tasks of the cut in denoise passes and of the tokens/s ratio, both over fused draft-free."""
    pairs = []
    for task in args.task:
        free, drafted = (
            summary([row for row in rows if (row["task"], row["method"], row["budget"]) == (task, *which)])
            for which in (("draft-free", 0), (method, budget))
        )
        pairs.append((free["denoise"] / drafted["denoise"], drafted["rate"] / free["rate"]))
    return np.mean(pairs, 0)


def mean_cuts(rows, args):
    """The means over tasks as lines of text: one per method, one column per budget."""
    lines = [
        "mean over tasks: cut in denoise passes (tokens/s ratio), both over fused draft-free",
        f"{'':17}" + "".join(f"{f'D = {budget}':>17}" for budget in args.budget),
    ]
    for name in COST_AWARE:
        lines.append(
            f"{name:17}" + "{:>8.2f}x ({:.2f}x), a budget of its own".format(*cut_and_rate(rows, args, name, 0))
        )
    for name in DRAFTED:
        cells = ["{:.2f}x ({:.2f}x)".format(*cut_and_rate(rows, args, name, budget)) for budget in args.budget]
        lines.append(f"{name:17}" + "".join(f"{cell:>17}" for cell in cells))
    return lines


def sampled_table(rows, task, budget, temperature):
    """The table of one task, budget and temperature above 0 as lines of text."""
    chosen = [row for row in rows if row["task"] == task and row["budget"] in (0, budget)]
    found = {
        key: [row for row in chosen if (row["method"], row["matching"]) == key]
        for key in [("draft-free", "")] + SAMPLED
    }
    base = summary(found["draft-free", ""])
    prompts = len({row["index"] for row in chosen})
    lines = [
        f"{task}, T = {temperature:g}, D = {budget}, {base['n']} samples of {prompts} prompts",
        f"{'':13}{'matching':11}{'denoise':>8}{'cut':>7}{'accepted':>9}{'likeliest':>10}{'tokens/s':>9}"
        f"{'accuracy':>9}{'exact':>9}",
    ]
    for (name, matching), same in found.items():
        s, (likeliest, commits) = summary(same), np.sum([row["commits"] for row in same], 0)
        lines.append(
            f"{name:13}{matching:11}{s['denoise']:8.1f}{base['denoise'] / s['denoise']:6.2f}x{s['accepted']:9.2f}"
            f"{likeliest / commits:10.2%}{s['rate'] / base['rate']:8.2f}x{s['right'] / s['n']:9.0%}"
            f"{s['exact']:>5}/{s['n']}"
        )
    return lines


def report_sampled(args, rows):
    """Print the tables of every temperature above 0."""
    for temperature in filter(None, args.temperature):
        same = [row for row in rows if row["temperature"] == temperature]
        for task in args.task:
            for budget in args.budget:
                print("\n" + "\n".join(sampled_table(same, task, budget, temperature)))
    print(
        "\ndenoise: denoising passes per answer. likeliest: share of commits that are the likeliest token of their"
        "\nconditional. exact: texts equal to the draft-free ones of the same seed. coupled: drafted with the target's"
        "\nown noise. greedy: accepted while the likeliest token, which is biased towards it: another law."
        "\nuncoupled: drafted with other noise. spot-noised: SPOT whose drafter also reads the noised conditionals."
    )


def report(bench, rows):
    """Print the tables; returns the number of rows whose text should equal draft-free's and does not."""
    args = bench["args"]
    if 0 in args.temperature:
        report_unsampled(bench, [row for row in rows if row["temperature"] == 0])
    if any(args.temperature):
        report_sampled(args, rows)
    differing = [row for row in rows if row["differs"]]  # empty for greedy matching, whose texts may differ
    if args.pad:
        differing = [row for row in differing if row["method"] not in FREE]
        report_unpadded([row for row in rows if row["method"] == "draft-free"])
    for row in differing:
        print(
            f"MISMATCH {row['method']} D={row['budget']} T={row['temperature']:g} {row['task']} prompt {row['index']}: "
            f"new token {row['differs']['position']}, margin {row['differs']['margin']}"
        )
    return len(differing)


def report_unpadded(rows):
    """Print how far draft-free decoding in passes of one unit agrees with that in passes of the padded shape."""
    same = sum(row["differs"] is None for row in rows)
    print(
        f"\n--pad: texts are compared with draft-free ones of the same padded shape; unpadded, {same}/{len(rows)} agree"
    )
    for row in rows:
        if row["differs"]:
            at = row["differs"]
            print(
                f"  {row['task']} prompt {row['index']}: differs at new token {at['position']}, margin {at['margin']}"
            )


def report_unsampled(bench, rows):
    """Print the tables of T = 0."""
    args, passes = bench["args"], bench["costs"]["drafter"].passes
    for task in args.task:
        for budget in args.budget:
            print("\n" + "\n".join(table(rows, task, budget)))
    print("\n" + "\n".join(mean_cuts(rows, args)))
    print(
        "\nprefill, denoise, kv: target passes per answer by kind. cut: denoise passes of draft-free / the method's. of"
        "\noracle: cut as a share of oracle-positions' cut. accepted: draft nodes per pass, without the free commit."
        "\ntokens/s: ratio to draft-free in this run (keep the machine idle). draft/target/rest: shares of the time."
        "\ndraft-free: fused. published: with a storing pass per block. chain, tree, graph: the peers. spot-floor: no"
        "\nnodes under γ. spot-noised: a drafter for every temperature. spot-cost, spot-small: SPOT with the measured,"
        "\ncost-aware budget, for the drafter and a small one. oracle-positions: true order, stale tokens."
        "\noracle-tokens: true tokens, stale order."
        "\ntime of a pass over n copies, in passes over one: "
        + ", ".join(f"{n}: {passes[n] / passes[1]:.1f}" for n in (3, 5, 9, 13, 21) if n < len(passes))
    )


# -------------------------------------------------------------------------------------------------- the run


def open_run(args):
    """The result file's contents: a new run, or the finished rows of an interrupted one made the same way, also those
    that single processes wrote beside it."""
    git = ["git", "-C", targets.HERE, "describe", "--always", "--dirty"]
    here = {
        "arguments": {key: value for key, value in vars(args).items() if key not in ("out", "plot", "device")},
        "revision": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {args.device.partition(':')[0]}",
    }
    rows = {}
    for path in [args.out] * os.path.exists(args.out) + parts_of(args.out):
        for row in read_rows(path, here):
            rows[*sample_of(row), row["method"], row["matching"], row["budget"]] = row
    found = Counter(sample_of(row) for row in rows.values())
    n = len(args.budget)
    whole = {False: len(FREE + COST_AWARE) + len(DRAFTED) * n, True: 1 + len(SAMPLED) * n}
    return here | {"rows": [row for row in rows.values() if found[sample_of(row)] == whole[row["temperature"] > 0]]}


def parts_of(out):
    """The files that single processes wrote beside a result file and that nobody joined yet."""
    return sorted(glob.glob(glob.escape(out) + ".rank*[0-9]"))


def read_rows(path, here):
    """The rows of a result file that was made as `here` says."""
    try:
        with open(path) as file:
            run = json.load(file)
        different = [key for key in here if run[key] != here[key]]
        [(summary([row]), sample_of(row), row["matching"]) for row in run["rows"]]
    except (ValueError, KeyError, TypeError, OSError):
        raise ValueError(f"{path} is not a result file: choose another --out") from None
    if different:
        raise ValueError(
            f"{path} holds a run with other {', '.join(different)}: make them the same, or choose another --out"
        )
    return run["rows"]


def sample_of(row):
    """What names one sample: (task, prompt, temperature, seed)."""
    return row["task"], row["index"], row["temperature"], row["seed"]


def save_run(run, path):
    """Write the result file, whole or not at all."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path + ".part", "w") as file:
            json.dump(run, file)
        os.replace(path + ".part", path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): choose another --out") from None


def run_all(bench, run, out):
    """Measure every sample that the run does not hold yet, saving after each; tasks alternate.

    Several processes take turns with the samples, and each saves to a file of its own; the first one joins them.
    """
    args, (rank, ranks) = bench["args"], train.world()
    done, path = {sample_of(row) for row in run["rows"]}, out if ranks == 1 else f"{out}.rank{rank}"
    noises = [(t, seed) for t in args.temperature for seed in range(args.seeds if t else 1)]
    most = max(args.num_samples)
    wanted = [
        (task, i, *noise)
        for i in range(most)
        for task, n in zip(args.task, args.num_samples)
        if i < n
        for noise in noises
    ]
    todo = [sample for sample in wanted if sample not in done][rank::ranks]
    save_run(run, path)  # an --out that cannot be written shows now
    for temperature in {sample[2] for sample in todo}:
        measure_prompt(bench, *next(sample for sample in todo if sample[2] == temperature))  # warm-up of every method
    for n, sample in enumerate(todo):
        run["rows"] += measure_prompt(bench, *sample)
        save_run(run, path)
        print(f"\r{n + 1}/{len(todo)} samples", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if ranks > 1:
        torch.distributed.barrier()
    if rank == 0:
        run["rows"] = open_run(args)["rows"] if ranks > 1 else run["rows"]
        save_run(run, out)
        for part in parts_of(out):
            os.remove(part)


def plot(rows, args):
    """Cut over budget, one line per method, as an image (needs matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in DRAFTED:
        pyplot.plot(
            args.budget, [cut_and_rate(rows, args, name, budget)[0] for budget in args.budget], "o-", label=name
        )
    pyplot.xlabel("budget D")
    pyplot.ylabel("cut in denoise passes")
    pyplot.legend()
    pyplot.savefig(args.plot)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description="All methods side by side: passes, speed, exactness.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="embedded", help=f"embedded, {', '.join(targets.HUB)}, a hub id, or a folder in its layout"
    )
    parser.add_argument("--block-size", type=train.positive, help="where neither config.json nor the name says it")
    parser.add_argument("--cache", default="dual", choices=dlm.CACHES, help="of a full-attention target")
    parser.add_argument("--drafter", default=os.path.join(CHECKPOINTS, "order"), help="folder of an order drafter")
    parser.add_argument("--noised", default=os.path.join(CHECKPOINTS, "order-noised"), help="one that reads the noise")
    parser.add_argument("--small", default=os.path.join(CHECKPOINTS, "order-small"), help="a small one, for spot-small")
    parser.add_argument("--graph", default=os.path.join(CHECKPOINTS, "graph.json"), help="calibrated draft sets")
    parser.add_argument(
        "--task",
        nargs="+",
        choices=tasks.TASKS + tasks.BENCHMARKS,
        help=f"the embedded tasks for the embedded target, else {', '.join(PAPER)}",
    )
    parser.add_argument(
        "--num-samples", nargs="+", type=train.positive, help="prompts per task, one number or one for each: 8, or 350"
    )
    parser.add_argument("--data", nargs="+", metavar="FILE", help="the benchmarks' files, in the order of --task")
    parser.add_argument("--allow-code", action="store_true", help="run the programs written for humaneval and mbpp")
    parser.add_argument("--gen-len", type=train.positive, help="new tokens: 160 for the embedded tasks, else 256")
    parser.add_argument(
        "--budget", nargs="+", type=train.positive, help="draft nodes per round, D; a list sweeps: 8, or 6 8 12 20"
    )
    parser.add_argument("--floor", type=float, default=0.02, help="γ: spot-floor drops nodes with less mass")
    parser.add_argument("--rule", default="exact", choices=[*dlm.RULES, *dlm.RELEASED], help="commit rule")
    parser.add_argument("--threshold", type=float, help="the rule's value: τ, f or γ")
    parser.add_argument(
        "--steps", type=train.positive, help="passes per block at most: commits L / steps or more a pass"
    )
    parser.add_argument("--precision", default="bfloat16", choices=list(dlm.PRECISIONS), help="of the confidence")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="0: no sampling; a list sweeps")
    parser.add_argument("--seeds", type=train.positive, default=3, help="samples per prompt at T > 0")
    parser.add_argument("--confidence", default="sampled", choices=dlm.CONFIDENCES, help="what ranks commits")
    parser.add_argument("--tempered", action="store_true", help="read the confidence from the sampled law (SDAR)")
    parser.add_argument("--top-k", type=train.positive, help="sample among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest of this total probability")
    parser.add_argument("--noise", default="step", choices=dlm.NOISES, help="its index; position changes the law")
    parser.add_argument(
        "--dtype", choices=["float32", "float64", "bfloat16"], help="float32 for the embedded target, else bfloat16"
    )
    parser.add_argument("--pad", action="store_true", help="passes of one shape only, so that bfloat16 is exact too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="or auto: all GPUs")
    parser.add_argument("--seed", type=train.natural, default=0, help="draws the evaluation prompts and the noise")
    parser.add_argument("--out", help="result file; default runs/bench-<time>.json")
    parser.add_argument("--plot", help="also draw cut over budget into this image file (needs matplotlib)")
    parser.add_argument("--diagnose", action="store_true", help="print section 2's diagnostics instead")
    parser.add_argument("--trace", action="store_true", help="show the first prompt round by round instead")
    parser.add_argument("--pass-cost", action="store_true", help="print the time of a pass over 1 + D copies instead")
    parser.add_argument("--random-weights", action="store_true", help="no checkpoint: for --pass-cost only")
    return settle(parser.parse_args(argv))


def settle(args):
    """Fill in what depends on the target: a small run for the embedded one, the paper's for the others (section 10)."""
    small = targets.is_embedded(args.model)
    if args.task is None and not small:
        args.task = [task for task in PAPER if args.allow_code or task not in tasks.RUNS_PROGRAMS]
    args.task = args.task or list(tasks.TASKS)
    args.num_samples = args.num_samples or ([8] if small else [PAPER.get(task, 8) for task in args.task])
    args.num_samples = args.num_samples * (len(args.task) if len(args.num_samples) == 1 else 1)
    args.budget = args.budget or ([8] if small else [6, 8, 12, 20])
    args.gen_len = args.gen_len or (160 if small else 256)
    args.dtype = args.dtype or ("float32" if small else "bfloat16")
    return args


def decoder_of(args):
    """The Decoder that the options describe, at the first temperature; every other one is checked too."""
    names = "rule precision gen_len top_k top_p confidence tempered noise seed"
    options = {name: getattr(args, name) for name in names.split()} | {"value": args.threshold}
    return [dlm.Decoder(**options, temperature=temperature) for temperature in args.temperature][0]


def check(args):
    """Refuse what cannot be run, before anything is loaded."""
    targets.check_name(args.model)
    targets.check_device(args.device)
    if not 0 <= args.floor < 1:
        raise ValueError(f"--floor is {args.floor}: give a mass of at least 0 and under 1")
    if max(args.budget) > MOST:
        raise ValueError(f"--budget is {max(args.budget)}: give at most {MOST} draft nodes per round")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    if (args.rule != "exact" or args.steps) and (args.diagnose or args.trace):
        raise ValueError("--diagnose and --trace show single commits: use --rule exact and no --steps")
    if args.pass_cost and args.cache == "none":
        raise ValueError("--pass-cost measures passes behind a cache: use --cache dual")
    if args.threshold is not None and dlm.RULES[dlm.RELEASED.get(args.rule, args.rule)] is None:
        raise ValueError(f"rule {args.rule} has no threshold: leave --threshold out, or choose another --rule")
    for name in ("temperature", "budget", "task"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            raise ValueError(f"--{name} names a value twice: name each once")
    if args.diagnose and any(args.temperature) or args.plot and 0 not in args.temperature:
        raise ValueError("--diagnose and --plot show T = 0: leave --temperature out")
    if args.random_weights and not args.pass_cost:
        raise ValueError("--random-weights writes nonsense: use it with --pass-cost")
    if len(args.num_samples) != len(args.task):
        raise ValueError(f"--num-samples has {len(args.num_samples)} numbers for {len(args.task)} tasks: give one each")
    barred = [task for task in args.task if task in tasks.RUNS_PROGRAMS and not args.allow_code]
    if barred and not args.pass_cost:
        raise ValueError(f"{barred[0]} runs the programs that the target writes: allow that with --allow-code")
    if args.allow_code:
        sandbox.check_confinement()


def load_problems(args):
    """{task: problems}; the files of --data go to the benchmarks in their order."""
    public = [task for task in args.task if task in tasks.BENCHMARKS]
    if args.data and len(args.data) != len(public):
        raise ValueError(
            f"--data names {len(args.data)} files for {len(public)} benchmarks: give one for each, in order"
        )
    files = dict(zip(public, args.data or ()))
    return {
        task: tasks.problems(task, "test", n, args.seed, **({"data": files.get(task)} if task in public else {}))
        for task, n in zip(args.task, args.num_samples)
    }


def prepare(args):
    """Everything a run needs, loaded and checked before any work."""
    problems = {} if args.pass_cost else load_problems(args)
    decoder = decoder_of(args)
    target = targets.load(args.model, args.device, getattr(torch, args.dtype), args.block_size, args.random_weights)
    target.cache = args.cache
    if args.steps and target.block_size % args.steps:
        raise ValueError(f"--steps is {args.steps}: give a divisor of the block size, {target.block_size}")
    decoder = replace(decoder, least=target.block_size // args.steps if args.steps else 1)
    bench = {"args": args, "target": target, "decoder": decoder, "problems": problems, "costs": {}}
    bench |= {name: load_drafter(getattr(args, name), target.device) for name in ("drafter", "small", "noised")}
    bench["sets"] = ddtree.load_graph(args.graph)
    if not bench["noised"].shape["noised"]:
        raise ValueError(
            f"the drafter in {args.noised} does not read the noise: train one with train.py order --noised"
        )
    for name in ("drafter", "small", "noised"):
        widest = bench[name].shape["block_size"]
        if target.block_size > widest:
            raise ValueError(
                f"drafter blocks end at {widest}, the target's at {target.block_size}: give another drafter"
            )
    bench["units"] = target.units = 2 + max(LARGEST, *args.budget) if args.pad else None
    if not args.pass_cost:
        prompt = max((target.encode(p.prompt) for some in problems.values() for p in some), key=len)
        dlm.start(target, decoder, prompt)  # the longest prompt must fit
        if 0 in args.temperature and not (args.diagnose or args.trace):
            for name in ("drafter", "small"):
                cold = replace(decoder, temperature=0.0)
                bench["costs"][name] = measure_costs(target, cold, prompt, bench[name], 1 + LARGEST)
    return bench


def say_what(bench):
    """Print what the figures rest on that the table does not show: foreign drafters, approximate caches, how formulas
    are compared."""
    args, target = bench["args"], bench["target"]
    foreign = [name for name in ("drafter", "small", "noised") if bench[name].about.get("target") != args.model]
    if foreign:
        print(f"foreign, not trained on {args.model}: " + ", ".join(f"{n} ({getattr(args, n)})" for n in foreign))
    if target.attention == "full":
        print(f"full attention, cache {args.cache}: exact means equal to draft-free decoding with the same cache, and")
        print("published is the same loop as draft-free, as no pass is spent on the cache alone")
    if "math500" in args.task:
        print(f"math500 is scored by {tasks.formula_matcher()}")


def look_closer(bench):
    """--diagnose, --trace or --pass-cost, in place of the comparison."""
    args = bench["args"]
    if args.diagnose:
        diagnose.diagnose(bench)
    elif args.trace:
        diagnose.trace(bench)
    else:
        bench["target"].units = None
        diagnose.pass_cost(bench["target"])
        bench["target"].units = bench["units"]
        diagnose.one_block(bench["target"], bench["drafter"], args.budget[0])


def compare(args):
    """The main job; returns the exit status."""
    rank, ranks = train.world()
    if ranks > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=7))  # they meet at the end only
        args.device = train.own_device(args.device)
        out = [args.out]
        torch.distributed.broadcast_object_list(out)
        args.out = out[0]
    check(args)
    run = open_run(args)
    if ranks > 1:
        torch.distributed.barrier()  # all have read what is finished before one writes
    bench = prepare(args)
    if args.diagnose or args.trace or args.pass_cost:
        return look_closer(bench)
    if rank == 0:
        say_what(bench)
        print(
            f"writing {args.out} after every prompt; to go on after an interruption, run the same command "
            f"with --out {args.out}"
        )
    run_all(bench, run, args.out)
    if rank:
        return 0
    differing = report(bench, run["rows"])
    if args.plot:
        plot([row for row in run["rows"] if row["temperature"] == 0], args)
    return int(differing > 0 and (args.dtype != "bfloat16" or args.pad))


def main(argv=None):
    args = None
    try:
        args = parse(argv)
        args.out = args.out or os.path.join("runs", time.strftime("bench-%Y%m%d-%H%M%S.json"))
        status = compare(args)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        sys.exit(f"bench.py: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(f"\nstopped; to go on, run the same command with --out {args and args.out}")
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
