"""All methods side by side: passes, speed, exactness (paper section 10).

    python bench.py                                 # the embedded target, both tasks: a minute
    python bench.py --prompt "Mia has 5 coins. …"   # your own: the answer, draft-free beside SPOT
    python bench.py --budget 6 8 12 20              # the paper's budgets
    python bench.py --methods chain spot            # some rows only
    python bench.py --temperature 0.5 1 1.5 2       # sampling (section 6): matchings, several seeds
    python bench.py --diagnose                      # why the order matters (section 2)
    python bench.py --trace --html trace.html       # one prompt, round by round
    python bench.py --pass-cost                     # the time of a pass over 1 + D copies
    python bench.py --model sdar-8b --allow-code    # the paper's main experiment, on a GPU
    torchrun --nproc-per-node 8 bench.py …          # the prompts split over processes

Every prompt is decoded by every method in one process, the order of methods rotating from prompt to
prompt, after a warm-up of each. The clock covers a whole generation, drafting included. The result
file is written after every prompt; given again as --out with the same arguments, an interrupted run
goes on.

What this file leaves out: which methods there are (methods.py), the options (options.py), the
result file (runs.py), tables and plots (report.py), looking closely (diagnose.py, trace.py).
"""

import command

if __name__ == "__main__":
    command.begin("loading torch and transformers")  # before the imports that take seconds

import datetime
import sys
from dataclasses import replace
from functools import cache, partial

import torch

import ddtree
import diagnose
import dlm
import report
import runs
import targets
import tasks
import trace
from drafter import Stale, load_drafter
from methods import LARGEST, METHODS, Bench, Commits, chosen, decode, draft_free, rows_of
from options import check, compares, decoder_of, own_prompts, parse
from trajectories import own_device, read_prompts, world

DRAFTERS = ("drafter", "small", "noised")  # the options that name one


# ---------------------------------------------------------------------------------------- measuring


def measure_prompt(bench, task, index, temperature, seed, bar):
    """Rows of one sample: every method at every budget, timed, scored and compared with what the
    draft-free loop writes; told on the `bar`."""
    target, args = bench.target, bench.args
    decoder = decoder_for(bench, index, temperature, seed)
    problem = bench.problems[task][index]
    prompt = target.encode(problem.prompt)
    reference, truth = draft_free(target, decoder, prompt)
    here = replace(bench, truth=truth)

    @cache  # equal texts get one verdict
    def right(text):
        return tasks.score(problem, text, args.allow_code)

    rows, order = [], rows_of(args, temperature)
    shift = (index + seed) % len(order)
    for row in order[shift:] + order[:shift]:
        method, matching, budget = row
        now = f"{task} {index} {method}" + f" D={budget}" * (budget > 0)
        bar.set_postfix_str(now, refresh=sys.stderr.isatty())
        commits = Commits() if temperature else None
        result = decode(here, decoder, prompt, row, commits)
        text = target.decode(result.ids)
        bar.update()
        rows.append({
            "task": task, "index": index, "temperature": temperature, "seed": seed,
            "method": method, "matching": matching, "budget": budget,
            "passes": result.passes, "tokens": len(result.written),
            "accepted": result.accepted, "seconds": result.seconds,
            "commits": commits and [commits.likeliest, commits.all],
            "right": right(text),
            "differs": difference(bench, decoder, prompt, reference, result, matching),
            "prompt": None, "text": text,
        })  # fmt: skip
    return texts_once(rows, problem.prompt)


def decoder_for(bench, index, temperature, seed):
    """The decoder of one sample; prompts of a task share no noise."""
    noise = bench.args.seed + 1000003 * index + seed
    return replace(bench.decoder, temperature=temperature, seed=noise)


def texts_once(rows, prompt):
    """A sample's rows with its prompt, and with its texts only where they are not the draft-free
    row's."""
    free = next(row for row in rows if row["method"] == "draft-free")
    for row in rows:
        row["text"] = None if row is not free and row["text"] == free["text"] else row["text"]
    free["prompt"] = prompt
    return rows


def difference(bench, decoder, prompt, reference, result, matching):
    """None if both wrote the same, to the end of the last block; else where they part:

    {position: of the first differing new token; margin: confidence of the draft-free step that
    wrote it, over the next best position}; {} under greedy matching, whose texts may differ.
    """
    if result.written == reference.written:
        return None
    if matching == "greedy":
        return {}
    target, pairs = bench.target, list(zip(reference.written, result.written))
    parted = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs]
    at = parted[0] if parted else len(pairs)
    margins = []

    def watch(canvas, state, following, out, unit):
        offset = len(prompt) + at - len(canvas.done)
        here = 0 <= offset < target.block_size and state[offset] != following[offset]
        if here and not out.partial:
            stale = Stale(decoder, state, target.mask_id, canvas.block, out.unit(unit))
            seen = stale.candidates(ddtree.step_of(canvas, state))
            best = seen.confidence.sort(descending=True).values.tolist()
            margins.append(best[0] - best[min(1, len(best) - 1)])

    dlm.generate(target, decoder, prompt, watch=watch)
    return {"position": at, "margin": margins[0] if margins else None}


# ---------------------------------------------------------------------------------------- the run


def run_all(bench, run, out):
    """Measure every sample that the run does not hold yet, saving after each.

    Several processes take turns with the samples; each saves to a file of its own, and in the end
    they are joined. Raises KeyboardInterrupt with what to do next.
    """
    args, (rank, ranks) = bench.args, world()
    wanted, done = runs.samples(args), {runs.sample_of(row) for row in run["rows"]}
    todo = [sample for sample in wanted if sample not in done][rank::ranks]
    if done and rank == 0:
        print(f"{len(done)} of {len(wanted)} samples already finished", file=sys.stderr)
    work = sum(len(rows_of(args, sample[2])) for sample in todo)
    try:
        warm_up(bench, todo)
        with command.progress("decoding", work, "texts", shown=rank == 0) as bar:
            for sample in todo:
                run["rows"] += measure_prompt(bench, *sample, bar)
                command.write_json(runs.own_file(out), run)
    except KeyboardInterrupt:
        again = f"to go on, run the same command with --out {out}"
        raise KeyboardInterrupt(again if run["rows"] else "nothing was finished yet") from None
    runs.join(run, out, args)


def warm_up(bench, todo):
    """One generation of every row, at each temperature, of which nothing is kept."""
    first = {sample[2]: sample for sample in reversed(todo)}
    work = sum(len(rows_of(bench.args, temperature)) for temperature in first)
    with command.progress("warm-up", work, "texts", shown=world()[0] == 0) as bar:
        for sample in first.values():
            measure_prompt(bench, *sample, bar)


# ------------------------------------------------------------------------- the user's own prompts


def answer(bench, texts):
    """Print the answer to every prompt, draft-free beside SPOT (or what --methods picks); returns
    how many texts differ."""
    args, target, decoder = bench.args, bench.target, bench.decoder
    drafts = [method for method in chosen(args) if method.draft]
    rows = [(m.name, "coupled", 0 if m.own_budget else D) for D in args.budget for m in drafts]
    rows = list(dict.fromkeys(rows))  # one with a budget of its own comes once
    if targets.is_embedded(args.model):
        say_known()
    command.say("warm-up")
    short, first = replace(decoder, gen_len=1), target.encode(texts[0])
    for row in [("draft-free", "", 0)] + rows:
        decode(bench, short, first, row)
    differing = 0
    for text in texts:
        prompt = target.encode(text)
        free, truth = draft_free(target, decoder, prompt)
        here = replace(bench, truth=truth)
        print(f"\nprompt: {text}\n\n{target.decode(free.ids)}\n")
        print(f"{'':17}{'D':>4}{'passes':>8}{'tokens/s':>10}{'cut':>8}{'speed':>8}  text")
        print(answer_line("draft-free", 0, free, free, None))
        for row in rows:
            result = decode(here, decoder, prompt, row)
            parts = difference(bench, decoder, prompt, free, result, "coupled")
            print(answer_line(row[0], row[2], result, free, parts))
            differing += parts is not None
    print(
        "\npasses: denoising passes of the target. cut: draft-free's / the row's. tokens/s: new "
        "tokens per\nsecond; speed: ratio to draft-free, rough on one prompt. text: whether it is "
        "the draft-free one."
    )
    return differing


def answer_line(name, budget, result, free, parts):
    """A row of the small table below an answer."""
    rate, base = (len(g.written) / sum(g.seconds.values()) for g in (result, free))
    passes = result.passes["denoise"]
    same = f"differs at token {parts['position']}, margin {parts['margin']}" if parts else "equal"
    return (
        f"{name:17}{budget or '':>4}{passes:8}{rate:10.1f}"
        f"{free.passes['denoise'] / passes:7.2f}x{rate / base:7.2f}x  {same}"
    )


def say_known():
    """Print what kinds of prompt the embedded target was trained on."""
    print("The embedded target knows these kinds of prompt, and writes nonsense for others:")
    for task in tasks.TASKS:
        print(f"  {task}: {tasks.problems(task, 'test', 1)[0].prompt}")


# ------------------------------------------------------------------------------------------ loading


def load_problems(args):
    """{task: problems}; the files of --data go to the benchmarks in their order."""
    public = [task for task in args.task if task in tasks.BENCHMARKS]
    if args.data and len(args.data) != len(public):
        given = len(args.data)
        raise ValueError(f"--data names {given} files for {len(public)} benchmarks: one for each")
    files = dict(zip(public, args.data or ()))
    counts = zip(args.task, args.num_samples)
    return {task: tasks.problems(task, "test", n, args.seed, files.get(task)) for task, n in counts}


def prepare(args, texts):
    """The Bench of a run: everything loaded and checked before any work. texts: own prompts."""
    problems = {} if args.pass_cost or texts else load_problems(args)
    decoder = decoder_of(args)
    drafters = {name: load_drafter(getattr(args, name)) for name in DRAFTERS}
    if not drafters["noised"].shape["noised"]:
        raise ValueError(
            f"the drafter in {args.noised} does not read the noise: train one with train.py order "
            "--noised"
        )
    sets = ddtree.load_graph(args.graph)
    command.say(f"loading the target, {args.model}")
    dtype = getattr(torch, args.dtype)
    target = targets.load(args.model, args.device, dtype, args.block_size, args.random_weights)
    target.cache = args.cache
    check_sizes(args, target, drafters)
    decoder = replace(decoder, quota=target.block_size // args.steps if args.steps else 1)
    drafters = {name: drafter.to(target.device) for name, drafter in drafters.items()}
    bench = Bench(args, target, decoder, problems, **drafters, sets=sets)
    bench.pad_to = target.pad_to = 2 + max(LARGEST, *args.budget) if args.pad else None
    if not args.pass_cost:
        texts = texts or [problem.prompt for some in problems.values() for problem in some]
        longest = max((target.encode(text) for text in texts), key=len)
        dlm.start(target, decoder, longest)  # it must fit the context
        measure_costs(bench, longest)
    return bench


def check_sizes(args, target, drafters):
    """ValueError for drafters and steps that do not fit the target's blocks."""
    L = target.block_size
    if args.steps and L % args.steps:
        raise ValueError(f"--steps is {args.steps}: give a divisor of the block size, {L}")
    for drafter in drafters.values():
        widest = drafter.shape["block_size"]
        if L > widest:
            raise ValueError(f"drafter blocks end at {widest}, the target's at {L}: give another")


def measure_costs(bench, prompt):
    """Measure what passes and drafting take, if a method's budget follows from it."""
    args = bench.args
    used = not (args.trace or args.diagnose) and (own_prompts(args) or 0 in args.temperature)
    if used and any(method.own_budget for method in chosen(args)):
        command.say("measuring the time of passes")
        cold = replace(bench.decoder, temperature=0.0)
        for name in ("drafter", "small"):
            parts = (bench.target, cold, prompt, getattr(bench, name), 1 + LARGEST)
            bench.costs[name] = ddtree.Costs.measure(*parts)


def say_what(bench):
    """Print what the figures rest on that the table does not show: foreign drafters, approximate
    caches, how formulas are compared."""
    args, target = bench.args, bench.target
    about = {name: getattr(bench, name).about.get("target") for name in DRAFTERS}
    foreign = [name for name, trained_on in about.items() if trained_on != args.model]
    if foreign:
        names = ", ".join(f"{name} ({getattr(args, name)})" for name in foreign)
        print(f"foreign, not trained on {args.model}: {names}")
    if target.attention == "full":
        print(
            f"full attention, cache {args.cache}: exact means equal to draft-free decoding with "
            "the same\ncache, and published is the same loop as draft-free, as no pass is spent on "
            "the cache alone"
        )
    if set(args.task) & {"gsm8k", "math500"}:
        print(f"formulas are compared by {tasks.scorer()}")


# -------------------------------------------------------------------------------------- the command


def look(args):
    """--prompt, --trace, --diagnose or --pass-cost in place of the comparison; the exit status."""
    texts = [args.prompt] if args.prompt is not None else []
    if args.prompts is not None:
        lines = [line for line in command.read_text(args.prompts).split("\n") if line.strip()]
        texts = read_prompts(args.prompts, len(lines))
    if args.html and len(texts) > 1:
        raise ValueError("--html is the page of one prompt: give --prompt, or a file with one")
    bench = prepare(args, texts)
    texts = texts or [problem.prompt for some in bench.problems.values() for problem in some]
    if args.pass_cost:
        bench.target.pad_to = None
        diagnose.pass_cost(bench.target)
        bench.target.pad_to = bench.pad_to
        diagnose.one_block(bench.target, bench.drafter, args.budget[0])
    elif args.diagnose:
        diagnose.diagnose(bench, texts)
    elif args.trace:
        show_traces(bench, texts if own_prompts(args) else texts[:1])
    else:
        return status(args, answer(bench, texts))
    return 0


def show_traces(bench, texts):
    """Print every prompt's trace, or write one's page."""
    draft = partial(METHODS["spot"].draft(bench), budget=bench.args.budget[0])
    for text in texts:
        prompt = bench.target.encode(text)
        record = trace.record(bench.target, bench.decoder, prompt, draft, text)
        if bench.args.html:
            trace.write_page(bench.args.html, record)
            print(f"wrote {bench.args.html}: open it in a browser")
        else:
            trace.show(record)


def compare(args):
    """The main job; returns the exit status."""
    with runs.held(args.out) as out:
        run = runs.open_run(out, runs.about(args), args)
        bench = prepare(args, [])
        if world()[0] == 0:
            say_what(bench)
            print(f"writing {out} after every prompt; if interrupted, go on with --out {out}")
        run_all(bench, run, out)
    if world()[0]:
        return 0
    differing = report.report(args, run["rows"], bench.costs.get("drafter"))
    if args.plot:
        report.plot([row for row in run["rows"] if row["temperature"] == 0], args)
    return status(args, differing)


def status(args, differing):
    """1 if texts differ although they must not: in bfloat16 without --pad they may."""
    return int(differing > 0 and (args.dtype != "bfloat16" or args.pad))


def main(argv=None):
    args = parse(argv)
    check(args)
    if not compares(args):
        return look(args)
    if world()[1] > 1:
        # they meet at the end only
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=7))
        args.device = own_device(args.device)
    return compare(args)


if __name__ == "__main__":
    command.run(main)
