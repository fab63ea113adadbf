"""What a run found: tables, legends and a plot (paper section 10).

A result file is one JSON object (runs.py writes it after every prompt):

    arguments     the options, by name
    code          what the project's code was, committed or not: command.code_id()
    revision      the commit nearest to it, for people
    torch, transformers, machine, scorer     versions, and how formulas are compared
    contents      what the target, the drafters, the graph and the data files held, by name
    rows          one object for each generation:

        task, index          which benchmark, and which of its prompts
        temperature, seed    T, and which of the samples at T > 0
        method, matching     a row of methods.METHODS, and how drafts are matched ("": none)
        budget               D; 0 for a loop without drafts or a budget of its own
        passes               target passes by kind: {"prefill", "denoise", "kv_commit"}
        tokens               new tokens, to the end of the last block
        accepted             draft nodes accepted in each round, without the free commit
        seconds              {"draft", "target", "rest"}
        commits              at T > 0: [those of the likeliest token, all]; else null
        right                whether the answer scores
        differs              null where the text is the draft-free one; else {"position": first
                             differing new token, "margin": by how much the draft-free step
                             preferred the position it wrote}; {} under greedy matching
        prompt               the prompt's text, in the draft-free row; null in the others
        text                 the answer; null where it is that of the draft-free row

Figures are totals over prompts, never means of ratios, except where "mean over tasks" is said.

What this file leaves out: measuring (bench.py), and looking closely (diagnose.py, trace.py).
"""

import os
import sys
import textwrap

import numpy as np

from methods import METHODS, chosen

WIDTH = 100  # columns of a table and its legend
COLUMNS = (
    "prefill, denoise, kv: target passes per answer, by kind; sum: all of them. cut: denoise "
    "passes of draft-free / the method's. oracle: the cut as a share of oracle-positions'. "
    "accepted: draft nodes per round, without the free commit. tokens/s: ratio to draft-free in "
    "this run (keep the machine idle). d/t/r %: shares of the time spent drafting, in target "
    "passes, on the rest. right: answers that score. exact: texts equal to the draft-free ones."
)
SAMPLED_COLUMNS = (
    "denoise: denoising passes per answer. cut: those of draft-free / the method's. accepted: "
    "draft nodes per round, without the free commit. likeliest: share of commits that are the "
    "likeliest token of their conditional. tokens/s: ratio to draft-free in this run. right: "
    "answers that score. exact: texts equal to the draft-free ones of the same seed. matching: "
    "coupled, drafted with the target's own noise; greedy, accepted while the likeliest token, "
    "which is biased towards it: another law; uncoupled, drafted with other noise."
)


# ------------------------------------------------------------------------------------------ figures


def summary(rows):
    """What the rows of one method come to:

    prefill, denoise, kv_commit, passes: per answer, by kind and in all; accepted: draft nodes per
    round; rate: new tokens per second; shares: of the time, by stage; likeliest: share of commits
    (None at T = 0); right, exact: numbers of the n rows.
    """
    n = len(rows)
    kinds, stages = ("prefill", "denoise", "kv_commit"), ("draft", "target", "rest")
    passes = {kind: sum(row["passes"][kind] for row in rows) / n for kind in kinds}
    seconds = {stage: sum(row["seconds"][stage] for row in rows) for stage in stages}
    total = sum(seconds.values())
    accepted = [nodes for row in rows for nodes in row["accepted"]]
    commits = [row["commits"] for row in rows if row["commits"]]
    likeliest, every = np.sum(commits, 0) if commits else (0, 0)
    return {
        **passes,
        "passes": sum(passes.values()),
        "accepted": sum(accepted) / len(accepted) if accepted else 0.0,
        "rate": sum(row["tokens"] for row in rows) / total,
        "shares": {stage: part / total for stage, part in seconds.items()},
        "likeliest": likeliest / every if every else None,
        "right": sum(row["right"] for row in rows),
        "exact": sum(row["differs"] is None for row in rows),
        "n": n,
    }


def select(rows, **which):
    """The rows with these values: select(rows, task="code", budget=8)."""
    return [row for row in rows if all(row[key] == value for key, value in which.items())]


def cut_and_rate(rows, tasks, method, budget):
    """Mean over tasks of the cut in denoise passes and of the tokens/s ratio, both over fused
    draft-free."""
    pairs = []
    for task in tasks:
        free = summary(select(rows, task=task, method="draft-free"))
        fast = summary(select(rows, task=task, method=method, budget=budget))
        pairs.append((free["denoise"] / fast["denoise"], fast["rate"] / free["rate"]))
    return np.mean(pairs, 0)


# ------------------------------------------------------------------------------------------- tables


def table(rows, task, budget):
    """The table of one task and budget at T = 0: pairs (Method or None, line of text)."""
    at = [row for row in rows if row["task"] == task and row["budget"] in (0, budget)]
    found = {name: select(at, method=name) for name in METHODS}
    found = {name: summary(same) for name, same in found.items() if same}
    base, oracle = found["draft-free"], found.get("oracle-positions")
    lines = [
        (None, f"{task}, D = {budget}, {base['n']} prompts"),
        (None, f"{'':17}{'prefill':>8}{'denoise':>8}{'kv':>5}{'sum':>7}{'cut':>7}{'oracle':>7}"
               f"{'accepted':>9}{'tokens/s':>9}{'d/t/r %':>9}{'right':>6}{'exact':>8}"),
    ]  # fmt: skip
    for name, s in found.items():
        method = METHODS[name]
        comparable = oracle and method.draft and not method.own_budget
        of_oracle = f"{oracle['denoise'] / s['denoise']:.0%}" if comparable else ""
        shares = "/".join(f"{100 * share:.0f}" for share in s["shares"].values())
        exact = f"{s['exact']}/{s['n']}"
        line = (
            f"{name:17}{s['prefill']:8.1f}{s['denoise']:8.1f}{s['kv_commit']:5.1f}"
            f"{s['passes']:7.1f}{base['denoise'] / s['denoise']:6.2f}x{of_oracle:>7}"
            f"{s['accepted']:9.2f}{s['rate'] / base['rate']:8.2f}x{shares:>9}"
            f"{s['right'] / s['n']:6.0%}{exact:>8}"
        )
        lines.append((method, line))
    return lines


def mean_cuts(rows, args):
    """The means over tasks: pairs (Method or None, line of text), one column per budget."""
    lines = [
        (None, "mean over tasks: cut in denoise passes (tokens/s ratio), both over draft-free"),
        (None, f"{'':17}" + "".join(f"{f'D = {budget}':>16}" for budget in args.budget)),
    ]
    for method in chosen(args):
        if not method.draft:
            continue
        budgets = [0] if method.own_budget else args.budget
        pairs = [cut_and_rate(rows, args.task, method.name, budget) for budget in budgets]
        cells = [f"{cut:.2f}x ({rate:.2f}x)" for cut, rate in pairs]
        line = f"{method.name:17}" + "".join(f"{cell:>16}" for cell in cells)
        lines.append((method, line + " (a budget of its own)" * method.own_budget))
    return lines


def sampled_table(rows, task, budget, temperature):
    """The table of one task, budget and temperature above 0: pairs (Method or None, line)."""
    at = [row for row in rows if row["task"] == task and row["budget"] in (0, budget)]
    at = select(at, temperature=temperature)
    base = summary(select(at, method="draft-free"))
    prompts = len({row["index"] for row in at})
    title = f"{task}, T = {temperature:g}, D = {budget}, {base['n']} samples of {prompts} prompts"
    lines = [
        (None, title),
        (None, f"{'':17}{'matching':11}{'denoise':>8}{'cut':>7}{'accepted':>9}{'likeliest':>10}"
               f"{'tokens/s':>9}{'right':>6}{'exact':>10}"),
    ]  # fmt: skip
    for method in METHODS.values():
        for matching in method.matchings:
            same = select(at, method=method.name, matching=matching)
            if not same:
                continue
            s = summary(same)
            exact = f"{s['exact']}/{s['n']}"
            line = (
                f"{method.name:17}{matching:11}{s['denoise']:8.1f}"
                f"{base['denoise'] / s['denoise']:6.2f}x{s['accepted']:9.2f}{s['likeliest']:10.2%}"
                f"{s['rate'] / base['rate']:8.2f}x{s['right'] / s['n']:6.0%}{exact:>10}"
            )
            lines.append((method, line))
    return lines


# ----------------------------------------------------------------------------------------- printing


def show(lines):
    """Print a table's lines, SPOT's in bold on a terminal (see no-color.org)."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR")
    print()
    for method, line in lines:
        ours = method is not None and method.kind == "spot"
        print(f"\033[1m{line}\033[0m" if ours and not plain else line)


def legend(text):
    """Print a paragraph below a table."""
    print("\n" + textwrap.fill(text, WIDTH, break_on_hyphens=False))


def report(args, rows, costs=None):
    """Print all tables; returns how many rows' texts should be the draft-free ones and are not.

    costs: measured Costs, of which the times of the passes are printed.
    """
    cold = select(rows, temperature=0)
    if cold:
        for task in args.task:
            for budget in args.budget:
                show(table(cold, task, budget))
        show(mean_cuts(cold, args))
        legend(COLUMNS)
        legend("rows: " + "; ".join(f"{m.name}: {m.about}" for m in chosen(args)) + ".")
        if costs:
            print(pass_times(costs.passes))
    report_sampled(args, [row for row in rows if row["temperature"]])
    differing = [row for row in rows if row["differs"]]  # empty under greedy matching
    if args.pad:
        differing = [row for row in differing if METHODS[row["method"]].draft]
        report_unpadded(select(rows, method="draft-free"))
    for row in differing:
        print(
            f"MISMATCH {row['method']} D={row['budget']} T={row['temperature']:g} {row['task']} "
            f"prompt {row['index']}: new token {row['differs']['position']}, "
            f"margin {row['differs']['margin']}"
        )
    return len(differing)


def report_sampled(args, rows):
    """Print the tables of every temperature above 0."""
    for temperature in filter(None, args.temperature):
        for task in args.task:
            for budget in args.budget:
                show(sampled_table(rows, task, budget, temperature))
    if rows:
        legend(SAMPLED_COLUMNS)
        sampled = [m for m in chosen(args) if m.matchings]
        legend("rows: " + "; ".join(f"{m.name}: {m.about}" for m in sampled) + ".")


def pass_times(passes):
    """The line that says what passes over n copies cost; passes: seconds by n.

    >>> pass_times([0, 2.0, 2.5, 3.0])
    'time of a pass over n copies, in passes over one: 3: 1.5'
    """
    sizes = [n for n in (3, 5, 9, 13, 21) if n < len(passes)]
    times = ", ".join(f"{n}: {passes[n] / passes[1]:.1f}" for n in sizes)
    return f"time of a pass over n copies, in passes over one: {times}"


def report_unpadded(rows):
    """Print how far draft-free decoding in passes of one unit agrees with that in padded ones."""
    same = sum(row["differs"] is None for row in rows)
    legend(
        "--pad: texts are compared with draft-free ones of the same padded shape; unpadded, "
        f"{same}/{len(rows)} agree"
    )
    for row in rows:
        if row["differs"]:
            position, margin = row["differs"]["position"], row["differs"]["margin"]
            print(f"  {row['task']} prompt {row['index']}: new token {position}, margin {margin}")


# ----------------------------------------------------------------------------------------- the plot


def plot(rows, args):
    """Cut over budget, one line per method, as an image (needs matplotlib): SPOT's on top, every
    line named at its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {}
    for method in chosen(args):
        if method.draft and not method.own_budget:
            points = [cut_and_rate(rows, args.task, method.name, D)[0] for D in args.budget]
            curves[method.name] = points
    order = sorted(curves, key=lambda name: curves[name][-1])
    ends = [curves[name][-1] for name in order]
    highest = max(max(points) for points in curves.values())
    heights = dict(zip(order, spread(ends, highest / 22)))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, (name, points) in enumerate(curves.items()):
        looks = look(METHODS[name], number)
        axes.plot(args.budget, points, **looks)
        beside = (1.02, heights[name])  # at the right edge, in the line's colour
        axes.annotate(
            name, beside, xycoords=("axes fraction", "data"), va="center",
            color=looks["color"], weight="bold" if name == "spot" else "normal",
        )  # fmt: skip
    axes.set_xlabel("budget D")
    axes.set_ylabel("cut in denoise passes")
    axes.set_ylim(bottom=0)
    axes.set_xticks(args.budget)
    figure.savefig(args.plot, bbox_inches="tight", dpi=150)
    pyplot.close(figure)


def look(method, number):
    """How a method's line is drawn; `number` gives it a colour."""
    if method.name == "spot":
        return {"color": "C3", "linewidth": 3, "marker": "o", "zorder": 5}
    style = {"peer": "-", "spot": "--", "oracle": ":"}[method.kind]
    others = (0, 1, 2, 4, 5, 6, 7, 8, 9)
    color = f"C{others[number % len(others)]}"
    return {"color": color, "linestyle": style, "linewidth": 1.2, "marker": ".", "zorder": 2}


def spread(heights, gap):
    """Rising heights moved up so far that they are `gap` apart.

    >>> spread([1.0, 1.1, 3.0], 0.5)
    [1.0, 1.5, 3.0]
    """
    out = []
    for height in heights:
        out.append(max(height, out[-1] + gap) if out else height)
    return out
