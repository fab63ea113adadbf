"""A run's result file: named, held by one run at a time, gone on with, joined from processes.

A run that is interrupted goes on if everything its rows depend on is still the same; files are
known by what they hold (`about`). Under torchrun every process saves to a file of its own, and they
tell each other what they have over the network, so that machines need no shared disk.

What this file leaves out: what the file's keys mean (report.py), and how rows are made (bench.py).
"""

import fcntl
import glob
import math
import os
import platform
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import torch
import transformers

import command
import tasks
from methods import METHODS, rows_of
from targets import identity
from trajectories import world

NOT_COMPARED = ("out", "plot", "html", "device")  # options that rows do not depend on
KINDS = {  # what a row holds
    "task": (str,), "index": (int,), "temperature": (int, float), "seed": (int,),
    "method": (str,), "matching": (str,), "budget": (int,), "passes": (dict,), "tokens": (int,),
    "accepted": (list,), "seconds": (dict,), "commits": (list, type(None)), "right": (bool,),
    "differs": (dict, type(None)), "prompt": (str, type(None)), "text": (str, type(None)),
}  # fmt: skip


# ---------------------------------------------------------------------------- one run, one file


@contextmanager
def held(out):
    """The result file's path, locked for this run until the block ends. ValueError if another run
    holds it; None makes a new name."""
    rank, _ = world()
    path, lock = claim(out) if rank == 0 else (None, None)
    try:
        yield from_first(path)
    finally:
        if lock:
            os.remove(lock.name)
            lock.close()


def claim(out):
    """(path, open file that locks it) of `out`, or of a new name where that is None."""
    if out:
        command.check_writable(out)
        lock = locked(out)
        if lock is None:
            raise ValueError(f"another run writes {out}: wait for it, or choose another --out")
        return out, lock
    stem = os.path.join("runs", time.strftime("bench-%Y%m%d-%H%M%S"))
    number = 1
    while True:
        path = f"{stem}.json" if number == 1 else f"{stem}-{number}.json"
        command.check_writable(path)
        lock = None if os.path.exists(path) else locked(path)
        # a run that began in the same second may have ended while we looked
        if lock and not os.path.exists(path):
            return path, lock
        if lock:
            os.remove(lock.name)
            lock.close()
        number += 1


def locked(path):
    """An open file beside `path` that this process has locked; None if another process has."""
    while True:
        file = open(path + ".lock", "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # the last holder may have removed the file before we locked it
        ours = os.fstat(file.fileno())
        if os.path.exists(file.name) and os.path.samestat(os.stat(file.name), ours):
            return file
        file.close()


# ------------------------------------------------------------------------- several processes


def from_first(value):
    """The first process's value, in every process."""
    if world()[1] == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def from_all(rows):
    """The rows of all processes, each once, in every process."""
    lists = [rows]
    if world()[1] > 1:
        lists = [None] * world()[1]
        torch.distributed.all_gather_object(lists, rows)
    return list({key_of(row): row for some in lists for row in some}.values())


def own_file(out):
    """Where this process saves: under torchrun beside the result file."""
    rank, ranks = world()
    return out if ranks == 1 else f"{out}.rank{rank}"


def parts_of(out):
    """The files that single processes wrote beside a result file and that nobody joined yet."""
    return sorted(glob.glob(glob.escape(out) + ".rank*[0-9]"))


# --------------------------------------------------------------------------- what a run depends on


def about(args):
    """All that a run's rows depend on, as the result file holds it."""
    git = ["git", "-C", command.HERE, "describe", "--always", "--dirty"]
    options = {name: value for name, value in vars(args).items() if name not in NOT_COMPARED}
    files = {name: [getattr(args, name)] for name in ("drafter", "small", "noised", "graph")}
    files["data"] = args.data or []
    contents = {name: command.content_id(*paths) for name, paths in files.items()}
    return {
        "arguments": options,
        "code": command.code_id(),
        "revision": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {args.device.partition(':')[0]}",
        "scorer": tasks.scorer(),
        "contents": contents | {"target": identity(args.model)},
    }


def open_run(out, here, args):
    """The result file's contents: `here` and the finished rows of an interrupted run that was made
    the same way, also those that single processes left beside it. ValueError for another run's."""
    rows = []
    for path in [out] * os.path.exists(out) + parts_of(out):
        rows += read_rows(path, here)
    rows = from_all(rows)
    found = Counter(sample_of(row) for row in rows)
    # a sample that was cut short is measured again
    whole = {cold: len(rows_of(args, temperature=not cold)) for cold in (True, False)}
    kept = [row for row in rows if found[sample_of(row)] == whole[row["temperature"] == 0]]
    return here | {"rows": kept}


def read_rows(path, here):
    """The rows of a result file that was made as `here` says. ValueError."""
    place = "its head"
    try:
        run = command.read_json(path)
        different = [key for key in here if key != "revision" and run[key] != here[key]]
        if type(run["rows"]) is not list:
            raise TypeError("rows is no list")
        for number, row in enumerate(run["rows"], 1):
            place = f"row {number}"
            check_row(row)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        why = f"{place}: {command.reason(error)}"
        raise ValueError(f"{path} is not a result file ({why}): choose another --out") from None
    if different:
        names = ", ".join(different)
        raise ValueError(
            f"{path} holds a run with other {names}: make them the same, or choose another --out"
        )
    return run["rows"]


def check_row(row):
    """ValueError, KeyError or TypeError for what is no row of a table."""
    for key, kinds in KINDS.items():
        if type(row[key]) not in kinds:
            raise TypeError(f"{key} is {row[key]!r}")
    if row["method"] not in METHODS:
        raise ValueError(f"unknown method {row['method']!r}")
    passes = [row["passes"][kind] for kind in ("prefill", "denoise", "kv_commit")]
    seconds = [row["seconds"][stage] for stage in ("draft", "target", "rest")]
    counts = passes + row["accepted"] + [row["index"], row["budget"], row["tokens"]]
    counts += row["commits"] or []
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a count is not a whole number")
    if not all(type(part) in (int, float) and math.isfinite(part) for part in seconds):
        raise ValueError("seconds are not numbers")
    if passes[1] < 1 or sum(seconds) <= 0:
        raise ValueError("it took no pass, or no time")
    if row["commits"] is not None and not (len(row["commits"]) == 2 and row["commits"][1]):
        raise ValueError("commits are not two counts")
    if row["differs"]:
        row["differs"]["position"], row["differs"]["margin"]


def sample_of(row):
    """What names one sample: (task, prompt, temperature, seed)."""
    return row["task"], row["index"], row["temperature"], row["seed"]


def key_of(row):
    """What names one row."""
    return *sample_of(row), row["method"], row["matching"], row["budget"]


# -------------------------------------------------------------------------------- the end of a run


def samples(args):
    """Every sample of a run, (task, prompt, temperature, seed); tasks alternate."""
    noises = [(t, seed) for t in args.temperature for seed in range(args.seeds if t else 1)]
    return [
        (task, i, *noise)
        for i in range(max(args.num_samples))
        for task, n in zip(args.task, args.num_samples)
        if i < n
        for noise in noises
    ]


def join(run, out, args):
    """Bring the rows of all processes together and write the result file; the parts go.

    ValueError if a sample is missing: then what there is is saved, and the parts stay.
    """
    rank, ranks = world()
    run["rows"] = from_all(run["rows"])
    there = {sample_of(row) for row in run["rows"]}
    missing = [sample for sample in samples(args) if sample not in there]
    if rank == 0:
        command.write_json(out, run)
    if missing:
        task, index, temperature, seed = missing[0]
        raise ValueError(
            f"{len(missing)} of {len(samples(args))} samples are missing, the first {task} prompt "
            f"{index}, T={temperature:g}, seed {seed}: run the same command with --out {out}"
        )
    if ranks > 1:
        torch.distributed.barrier()  # the file is written before a part goes
        mine = [own_file(out)] if rank else parts_of(out)
        for part in mine:
            if os.path.exists(part):
                os.remove(part)
