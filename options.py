"""bench.py's options: what they are, what they default to, and what is refused before any work.

What this file leaves out: what is done with them (bench.py).
"""

import argparse
import importlib.util
import os

import torch

import command
import full
import sandbox
import targets
import tasks
from command import natural, positive
from decoder import CONFIDENCES, NOISES, PRECISIONS, RELEASED, RULES, Decoder
from methods import METHODS

MOST = 512  # budget that is accepted at most
# prompts of the paper's main experiment (section 10)
PAPER = {"gsm8k": 350, "math500": 350, "humaneval": 164, "mbpp": 257}
CHECKPOINTS = os.path.join(command.HERE, "checkpoints")
PICTURES = (".png", ".svg", ".pdf")


def shipped(name):
    """The path of a checkpoint that comes with the project."""
    return os.path.join(CHECKPOINTS, name)


def parse(argv=None):
    """The options, with every default filled in."""
    parser = argparse.ArgumentParser(
        description="All methods side by side: passes, speed, exactness.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target(parser.add_argument_group("the target and what drafts for it").add_argument)
    add_work(parser.add_argument_group("what is decoded").add_argument)
    add_decoder(parser.add_argument_group("how it is decoded").add_argument)
    add_looks(parser.add_argument_group("other things to look at"))
    return settle(parser.parse_args(argv))


def add_target(option):
    """The target, its drafters, and where it runs."""
    known = ", ".join(targets.HUB)
    option("--model", default="embedded", help=f"embedded, {known}, a hub id, or such a folder")
    option("--block-size", type=positive, help="where neither config.json nor the name says it")
    option("--cache", default="dual", choices=full.CACHES, help="of a full-attention target")
    option("--drafter", default=shipped("order"), help="folder of an order drafter")
    option("--noised", default=shipped("order-noised"), help="of one that reads the noise")
    option("--small", default=shipped("order-small"), help="of a small one, for spot-small")
    option("--graph", default=shipped("graph.json"), help="calibrated draft sets")
    types = ["float32", "float64", "bfloat16"]
    option("--dtype", choices=types, help="float32 for the embedded target, else bfloat16")
    option("--pad", action="store_true", help="passes of one shape, so that bfloat16 is exact too")
    cuda = torch.cuda.is_available()
    option("--device", default="cuda" if cuda else "cpu", help="or auto: all GPUs")
    option("--random-weights", action="store_true", help="no checkpoint: for --pass-cost only")


def add_work(option):
    """Prompts, methods, budgets, and the result."""
    every = tasks.TASKS + tasks.BENCHMARKS
    public = ", ".join(PAPER)
    option("--task", nargs="+", choices=every, help=f"the embedded target's tasks, else {public}")
    option("--num-samples", nargs="+", type=positive,
           help="prompts per task, one number or one for each: 8, or 350")
    option("--data", nargs="+", metavar="FILE", help="the benchmarks' files, in --task's order")
    option("--allow-code", action="store_true", help="run the programs written for humaneval, mbpp")
    option("--methods", nargs="+", choices=list(METHODS), metavar="ROW",
           help=f"rows to compare with draft-free: all, of {', '.join(METHODS)}")
    option("--budget", nargs="+", type=positive,
           help="draft nodes per round, D; a list sweeps: 8, or 6 8 12 20")
    option("--floor", type=float, default=0.02, help="γ: spot-floor drops nodes with less mass")
    option("--seed", type=natural, default=0, help="draws the evaluation prompts and the noise")
    option("--out", help="result file; default runs/bench-<time>.json; given again, it goes on")
    option("--plot", metavar="IMAGE", help="draw cut over budget, too (needs matplotlib)")


def add_decoder(option):
    """What the Decoder is made of."""
    option("--gen-len", type=positive, help="new tokens: 160 for the embedded target, else 256")
    option("--rule", default="exact", choices=[*RULES, *RELEASED], help="commit rule")
    option("--threshold", type=float, help="the rule's value: τ, f or γ")
    option("--steps", type=positive, help="passes per block at most: L / steps commits each")
    option("--precision", default="bfloat16", choices=list(PRECISIONS), help="of the confidence")
    option("--temperature", nargs="+", type=float, default=[0.0], help="0: none; a list sweeps")
    option("--seeds", type=positive, default=3, help="samples per prompt at T > 0")
    option("--confidence", default="sampled", choices=CONFIDENCES, help="what ranks commits")
    option("--tempered", action="store_true", help="confidence of the sampled law (SDAR)")
    option("--top-k", type=positive, help="sample among the k likeliest tokens")
    option("--top-p", type=float, default=1.0, help="among the likeliest of this probability")
    option("--noise", default="step", choices=NOISES, help="its index; position changes the law")


def add_looks(group):
    """What is done in place of the comparison."""
    own = group.add_mutually_exclusive_group()
    own.add_argument("--prompt", metavar="TEXT", help="answer this: draft-free beside SPOT")
    own.add_argument("--prompts", metavar="FILE", help="the same for every line of a file")
    look = group.add_mutually_exclusive_group()
    look.add_argument("--trace", action="store_true", help="show one prompt round by round")
    look.add_argument("--diagnose", action="store_true", help="why the order matters, in figures")
    look.add_argument("--pass-cost", action="store_true", help="the time of a pass over copies")
    group.add_argument("--html", metavar="FILE", help="write --trace as a page to look at")


def settle(args):
    """Fill in what depends on the target: a small run for the embedded one, the paper's for the
    others (section 10). ValueError for options that would be lost."""
    small = targets.is_embedded(args.model)
    check_not_lost(args)
    if args.task is None:
        public = [task for task in PAPER if args.allow_code or task not in tasks.RUNS_PROGRAMS]
        args.task = list(tasks.TASKS) if small else public
    if args.num_samples is None:
        args.num_samples = [8] if small else [PAPER.get(task, 8) for task in args.task]
    if len(args.num_samples) == 1:
        args.num_samples = args.num_samples * len(args.task)
    args.methods = args.methods or (["spot"] if own_prompts(args) else list(METHODS))
    args.budget = args.budget or ([8] if small else [6, 8, 12, 20])
    args.gen_len = args.gen_len or (160 if small else 256)
    args.dtype = args.dtype or ("float32" if small else "bfloat16")
    return args


def own_prompts(args):
    """True if the prompts are the user's, not a task's."""
    return args.prompt is not None or args.prompts is not None


def compares(args):
    """True if the tables are made, not something else looked at."""
    return not (own_prompts(args) or args.trace or args.diagnose or args.pass_cost)


def check_not_lost(args):
    """ValueError for options that what is asked for has no use for."""
    own = own_prompts(args)
    if own and (args.task or args.num_samples or args.data):
        raise ValueError("--prompt brings its own: leave --task, --num-samples and --data out")
    if own and args.pass_cost:
        raise ValueError("--pass-cost measures passes alone: leave --prompt and --prompts out")
    if not compares(args) and (args.out or args.plot):
        raise ValueError("--out and --plot are for the comparison: leave them out here")
    if args.methods and (args.trace or args.diagnose or args.pass_cost):
        raise ValueError("--methods picks rows of a table, and none is made: leave it out")
    if args.html and not args.trace:
        raise ValueError("--html is the page of a trace: add --trace")
    if (own or args.trace) and len(args.temperature) > 1:
        raise ValueError("--prompt and --trace show one temperature: give one")
    if args.random_weights and not args.pass_cost:
        raise ValueError("--random-weights writes nonsense: use it with --pass-cost")
    cold = [name for name in args.methods or () if not METHODS[name].matchings]
    if cold and 0 not in args.temperature and not own:
        raise ValueError(f"{cold[0]} is a row at T = 0 only: leave it out, or add temperature 0")


def decoder_of(args):
    """The Decoder that the options describe, at the first temperature; every other is checked."""
    names = "rule precision gen_len top_k top_p confidence tempered noise seed"
    options = {name: getattr(args, name) for name in names.split()} | {"value": args.threshold}
    return [Decoder(**options, temperature=temperature) for temperature in args.temperature][0]


def check(args):
    """ValueError for what cannot be run, before anything is loaded."""
    targets.check_name(args.model)
    targets.check_device(args.device)
    if not 0 <= args.floor < 1:
        raise ValueError(f"--floor is {args.floor}: give a mass of at least 0 and under 1")
    if max(args.budget) > MOST:
        raise ValueError(f"--budget is {max(args.budget)}: give at most {MOST} draft nodes")
    for name in ("temperature", "budget", "task", "methods"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            raise ValueError(f"--{name} names a value twice: name each once")
    if (args.rule != "exact" or args.steps) and args.diagnose:
        raise ValueError("--diagnose is about single commits: use --rule exact and no --steps")
    if args.pass_cost and args.cache == "none":
        raise ValueError("--pass-cost measures passes behind a cache: use --cache dual")
    if args.threshold is not None and RULES[RELEASED.get(args.rule, args.rule)].value is None:
        raise ValueError(f"rule {args.rule} has no threshold: leave --threshold out")
    if args.diagnose and any(args.temperature) or args.plot and 0 not in args.temperature:
        raise ValueError("--diagnose and --plot show T = 0: leave --temperature out")
    if len(args.num_samples) != len(args.task):
        given, wanted = len(args.num_samples), len(args.task)
        raise ValueError(f"--num-samples has {given} numbers for {wanted} tasks: give one each")
    check_code(args)
    check_pictures(args)


def check_code(args):
    """ValueError for benchmarks that run programs without leave, or that cannot be confined."""
    barred = [task for task in args.task if task in tasks.RUNS_PROGRAMS and not args.allow_code]
    if barred and not args.pass_cost:
        raise ValueError(f"{barred[0]} runs programs that the target writes: add --allow-code")
    if args.allow_code:
        sandbox.check_confinement()


def check_pictures(args):
    """ValueError for a picture or a page that could not be written in the end."""
    if args.plot:
        if not importlib.util.find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave it out")
        if not any(METHODS[name].draft and not METHODS[name].own_budget for name in args.methods):
            raise ValueError("--plot draws drafts at a budget: add such a row to --methods")
        if not args.plot.endswith(PICTURES):
            raise ValueError(f"--plot is {args.plot}: end it in one of {', '.join(PICTURES)}")
        command.check_writable(args.plot, "--plot")
    if args.html:
        command.check_writable(args.html, "--html")
