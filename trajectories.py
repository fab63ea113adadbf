"""Draft-free trajectories of a target: collected once, then all that drafters are fitted to.

    python trajectories.py                          # the embedded target, on its training prompts
    python trajectories.py --model sdar-8b --prompts prompts.jsonl --out runs/sdar-8b
    torchrun --nproc-per-node 8 trajectories.py …   # the prompts split over processes

For every pass a record says what a drafter may know (the stale features of the masked positions)
and what became of them (when each one commits, and which stale token it gets): paper section 3.
Records lie in shards; shards that exist are kept, so that a collection that was stopped goes on.

What this file leaves out: what is fitted to the records (train.py).
"""

import command

if __name__ == "__main__":
    command.begin("loading torch and transformers")  # before the imports that take seconds

import argparse
import glob
import json
import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import dlm
import targets
import tasks
from decoder import CONFIDENCES, PRECISIONS, Decoder
from drafter import Stale
from full import CACHES

DEEPEST, DEPTHS = 16, 4  # path depths trained on, and how many of them a pass is recorded at
RARE = 255  # the token rank of what is not among the 32 likeliest
FIELDS = (
    "count", "block", "depth", "position", "when", "rank", "token_rank", "features", "noised"
)  # fmt: skip
REAL = ("features", "noised")  # float16, all others uint8


# ------------------------------------------------------------------- many prompts in one batch


def lockstep(target, decoder, prompts, watch=None):
    """Draft-free decoding of equally long prompts, each int64 [P], in one batch: with one commit a
    pass they finish their blocks together. Returns the finished canvases, in the prompts' order.

    watch(i, canvas, state, next state, pass, unit) is told of every step of prompt i. For
    block-causal targets and rules that commit one position a pass.
    """
    canvases = [dlm.start(target, decoder, prompt) for prompt in prompts]
    alive = list(enumerate(canvases))
    prefix = stacked([canvas.prefix for canvas in canvases])
    while alive:
        first = alive[0][1]
        block, complete = first.block, first.is_complete(first.state)
        units = []  # of every row the state and, behind a finished one, the blank next block
        for _, canvas in alive:
            units += [canvas.state, canvas.blank] if complete else [canvas.state]
        blocks, parents = ([block, block + 1], {1: 0}) if complete else ([block], {})
        out = target.forward(units, blocks, prefix, parents)
        following = decoder.transition(out)
        if complete:
            prefix = target.extend(prefix, out, 0)
        for row, (i, canvas) in enumerate(alive):
            if complete:
                canvas.done, canvas.state = canvas.done + list(canvas.state), canvas.blank
            unit = row * len(blocks) + len(blocks) - 1
            if watch:
                watch(i, canvas, canvas.state, following[unit], out, unit)
            canvas.state = following[unit]
        going = [row for row, (_, canvas) in enumerate(alive) if not canvas.is_final(canvas.state)]
        if len(going) < len(alive):
            alive = [alive[row] for row in going]
            prefix = prefix and [(k[going], v[going]) for k, v in prefix]
    return canvases


def stacked(prefixes):
    """The prefix caches of B canvases, each [1, KV, P, d] per layer, as one of batch size B."""
    if prefixes[0] is None:
        return None
    return [tuple(torch.cat(parts) for parts in zip(*layer)) for layer in zip(*prefixes)]


def equally_long(prompts, most):
    """Batches of at most `most` equally long prompts.

    >>> equally_long(["a", "bc", "d", "e"], 2)
    [['a', 'd'], ['e'], ['bc']]
    """
    by_length = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt), []).append(prompt)
    return [same[i : i + most] for same in by_length.values() for i in range(0, len(same), most)]


# ------------------------------------------------------------------------------------- records


class Recorder:
    """Turns watched steps into one record for every draft-free pass.

    In the pass itself it notes the stale features of the masked positions and the statistics of the
    noised conditionals at DEPTHS random depths; once the block is finished, `when` each of them
    commits (0 = in this very pass) and the rank of the committed token under them.
    """

    def __init__(self, decoder):
        self.decoder = decoder
        self.open = {}  # by prompt: (records of the block's passes, {position: pass it commits in})
        self.records = []
        self.generator = torch.Generator().manual_seed(decoder.seed)

    def __call__(self, i, canvas, state, following, out, unit):
        passes, committed = self.open.setdefault(i, ([], {}))
        for s, (before, after) in enumerate(zip(state, following)):
            if before != after:
                committed[s] = len(passes)
        stale = Stale(self.decoder, state, canvas.target.mask_id, canvas.block, out.unit(unit))
        passes.append(None if out.partial else self.read(stale, canvas))
        if canvas.is_complete(following):
            for n, record in enumerate(passes):
                if record:
                    self.finish(record, n, committed, following)
            del self.open[i]

    def read(self, stale, canvas):
        """What is known in the pass itself, on the host."""
        k, L = len(stale.positions), len(stale.state)
        seen = stale.candidates(L - k)
        most = max(2, min(k, DEEPEST + 1))
        depth = torch.randint(1, most, (DEPTHS,), generator=self.generator)
        noised = [stale.noised(L - k + d) for d in depth.tolist()]
        return {
            "count": torch.tensor([k]),
            # counted from the block that the answer begins in
            "block": torch.tensor([canvas.block - (canvas.prompt_len - canvas.origin) // L]),
            "depth": depth[None],
            "position": torch.tensor(stale.positions),
            "rank": torch.tensor(seen.ranking).argsort(),
            "tokens": torch.tensor(seen.tokens),
            "features": stale.features.cpu(),
            "noised": torch.stack(noised, 1).cpu(),
        }

    def finish(self, record, n, committed, final):
        """Keep the record of a block's n-th pass, with what the finished block tells."""
        positions = record["position"].tolist()
        written = torch.tensor([final[s] for s in positions])
        hit = record.pop("tokens") == written[:, None]  # [k, 32]
        record["when"] = torch.tensor([committed[s] - n for s in positions])
        record["token_rank"] = torch.where(hit.any(1), hit.int().argmax(1), RARE)
        self.records.append(record)


def collect(target, decoder, prompts, batch=16, told=None):
    """Records of draft-free trajectories over `prompts` (each int64 [P]), in batches of equally
    long ones, as tensors. told(n) is called whenever n more prompts are done.

    Of S passes: count and block [S], depth [S, 4] (random path depths). Of their Σk masked
    positions: position, when, rank (by stale confidence) and token_rank (255 = not among the 32),
    all these uint8; features float16 [Σk, 72] and noised float16 [Σk, 4, 4], the statistics at
    those depths.
    """
    recorder = Recorder(decoder)
    if target.attention == "full":
        for i, prompt in enumerate(prompts):
            dlm.generate(target, decoder, prompt, watch=partial(recorder, i))
            if told:
                told(1)
    else:
        for together in equally_long(prompts, batch):
            lockstep(target, decoder, together, recorder)
            if told:
                told(len(together))
    records = {name: torch.cat([r[name] for r in recorder.records]) for name in FIELDS}
    types = {name: torch.float16 if name in REAL else torch.uint8 for name in FIELDS}
    return {name: records[name].to(types[name]) for name in FIELDS}


def join(shards):
    """Several `collect`ed records as one, integers widened, with `start`, the first row of every
    pass."""
    data = {name: torch.cat([shard[name] for shard in shards]) for name in FIELDS}
    data = {name: value if name in REAL else value.long() for name, value in data.items()}
    data["start"] = data["count"].cumsum(0) - data["count"]
    return data


# -------------------------------------------------------------------------------------- folders


def read_shard(path):
    """The records in one shard; ValueError if the file is not a whole one."""
    try:
        shard = load_file(path)
        return {name: shard[name] for name in FIELDS}
    except (SafetensorError, KeyError, OSError):
        message = f"{path} is not a whole trajectory shard: run the same trajectories.py again"
        raise ValueError(message) from None


def is_whole(path):
    """True if there is a readable shard at `path`."""
    try:
        return os.path.exists(path) and bool(read_shard(path))
    except ValueError:
        return False


def paths_in(folder):
    """Sorted paths of the shards in a folder."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))


def shards_of(folder):
    """Sorted shard paths of a trajectory folder; at least two, as the last tenth is held out."""
    paths = paths_in(folder)
    if len(paths) < 2:
        raise FileNotFoundError(
            f"{folder!r} holds {len(paths)} trajectory shards, 2 are needed: run trajectories.py "
            f"--out {folder} first, with a smaller --shard if it was"
        )
    return paths


def split(*folders):
    """(training records, held-out records) of folders: the last tenth of each one's shards is held
    out."""
    training, held = [], []
    for paths in map(shards_of, folders):
        last = max(1, len(paths) // 10)
        training += paths[:-last]
        held += paths[-last:]
    return tuple(join([read_shard(path) for path in part]) for part in (training, held))


def target_of(folders):
    """Name of the target whose trajectories the folders hold; None if they do not agree on one."""
    names = set()
    for folder in folders:
        try:
            names.add(command.read_json(os.path.join(folder, "about.json")).get("model"))
        except (OSError, ValueError):
            names.add(None)
    return names.pop() if len(names) == 1 else None


def open_folder(folder, about):
    """Make a folder for trajectories that depend on `about` (a dict), or go on with one of the
    same. ValueError for one that was collected otherwise."""
    if not folder:
        raise ValueError("--out is empty: name a folder")
    note = os.path.join(folder, "about.json")
    command.check_writable(note)
    if paths_in(folder):
        try:
            names = command.differing(command.read_json(note), json.loads(json.dumps(about)))
        except (OSError, ValueError):
            names = "about.json"
        if names:
            raise ValueError(
                f"{folder} holds trajectories collected otherwise (other {names}): choose another "
                "--out, or give the same options"
            )
    command.write_json(note, about)


# -------------------------------------------------------------------------------------- prompts


def read_prompts(path, n):
    """`n` prompts of a file: one a line, as plain text or as JSON with a `prompt`, `question` or
    `text`. Raises FileNotFoundError or ValueError."""
    lines = [line.strip() for line in command.read_text(path).split("\n")]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"{path} is empty: give a file with a prompt a line")
    if not 0 < n <= len(lines):
        most = len(lines)
        raise ValueError(f"{n} prompts asked for: {path} has {most}, ask for 1 to {most}")
    return [prompt_in(line, path) for line in lines[:n]]


def prompt_in(line, path):
    """The prompt that a line holds.

    >>> prompt_in('{"id": 7, "question": "Mia has 4 cards."}', "a file")
    'Mia has 4 cards.'
    """
    if not line.startswith("{"):
        return line
    try:
        row = json.loads(line)
        prompt = next(row[key] for key in ("prompt", "question", "text") if row.get(key))
        if not isinstance(prompt, str):
            raise TypeError("it is no text")
        return prompt
    except (ValueError, TypeError, StopIteration, RecursionError):
        raise ValueError(
            f"{path} has a line without a prompt ({line[:40]}): give every line one, as text"
        ) from None


def training_prompts(n, seed):
    """About `n` training prompts of the embedded tasks, in the shares that the target learnt."""
    shares = tasks.MIX.items()
    drawn = [tasks.problems(task, "train", math.ceil(n * share), seed) for task, share in shares]
    return [problem.prompt for problems in drawn for problem in problems]


# ------------------------------------------------------------------------------ several processes


def world():
    """(rank, number of processes) under torchrun, else (0, 1). Raises ValueError."""
    rank, ranks = from_torchrun("RANK", 0), from_torchrun("WORLD_SIZE", 1)
    if rank >= ranks:
        raise ValueError(f"RANK is {rank}, WORLD_SIZE {ranks}: start it by torchrun, or unset them")
    return rank, ranks


def own_device(device):
    """The device of this process: under torchrun each takes a GPU of its own."""
    shared = device == "cuda" and world()[1] > 1
    return f"cuda:{from_torchrun('LOCAL_RANK', 0)}" if shared else device


def from_torchrun(name, alone):
    """A number that torchrun puts into the environment; `alone` without it."""
    try:
        return command.natural(os.environ.get(name, str(alone)))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}: start it by torchrun, or unset it") from None


# ----------------------------------------------------------------------------------- the command


def about(args):
    """All that trajectories depend on, as a dict: options, target, prompts and code."""
    options = {name: value for name, value in vars(args).items() if name not in ("out", "device")}
    contents = {
        "target_id": targets.identity(args.model),
        "prompts_id": command.content_id(args.prompts) if args.prompts else None,
        "code": command.code_id(),
    }
    return options | contents


def run_collect(args):
    """Write trajectories of training prompts as shards; those that exist are kept.

    Temperatures take turns from shard to shard, each shard with noise of its own, which its prompts
    share; under torchrun processes take turns too.
    """
    (rank, ranks), texts = world(), texts_of(args)
    shared = {name: getattr(args, name) for name in ("gen_len", "confidence", "precision")}
    decoders = [Decoder(temperature=t, **shared) for t in args.temperature]
    open_folder(args.out, about(args))
    command.say(f"loading {args.model}")
    device, dtype = own_device(args.device), getattr(torch, args.dtype)
    target = targets.load(args.model, device, dtype, args.block_size)
    target.cache = args.cache
    shards = shards_for(target, texts, args)
    paths = [os.path.join(args.out, f"{i:04d}.safetensors") for i in range(len(shards))]
    mine = range(rank, len(shards), ranks)
    todo = [i for i in mine if not is_whole(paths[i])]
    total, left = (sum(len(shards[i]) for i in part) for part in (mine, todo))
    bar = command.progress("collecting", total, "prompts", total - left, shown=rank == 0)
    with bar, command.resumable(lambda: paths_in(args.out)):
        for i in todo:
            decoder = replace(decoders[i % len(decoders)], seed=args.seed + i)
            records = collect(target, decoder, shards[i], args.batch, bar.update)
            command.write(paths[i], partial(save_file, records))
    print(f"{len(paths_in(args.out))} of {len(shards)} shards are in {args.out}", flush=True)


def texts_of(args):
    """The prompts' texts; fills in the options that depend on the target. Raises ValueError."""
    targets.check_name(args.model)
    small = targets.is_embedded(args.model)
    if not small and not args.prompts:
        raise ValueError("a real target needs general prompts: give a file of them with --prompts")
    args.gen_len = args.gen_len or (160 if small else 256)
    args.dtype = args.dtype or ("float32" if small else "bfloat16")
    if args.prompts:
        return read_prompts(args.prompts, args.num_prompts)
    return training_prompts(args.num_prompts, args.seed)


def shards_for(target, texts, args):
    """The encoded prompts of every shard: `shard` batches of equally long ones, in random order."""
    batches = equally_long([target.encode(text) for text in texts], args.batch)
    order = np.random.default_rng(args.seed).permutation(len(batches))
    batches = [batches[i] for i in order]
    return [sum(batches[i : i + args.shard], []) for i in range(0, len(batches), args.shard)]


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, positive = parser.add_argument, command.positive
    add("--model", default="embedded")
    add("--out", default="runs/trajectories")
    add("--num-prompts", type=positive, default=3000)
    add("--shard", type=positive, default=10, help="batches per file")
    add("--batch", type=positive, default=16, help="equally long prompts decoded together at most")
    add("--gen-len", type=positive, help="new tokens: 160 for the embedded tasks, else 256")
    add("--prompts", help="a file with a prompt a line, text or JSON, not the embedded tasks'")
    add("--block-size", type=positive, help="where neither config.json nor the name says it")
    add("--cache", default="dual", choices=CACHES, help="of a full-attention target")
    add("--dtype", choices=["float32", "float64", "bfloat16"], help="as in bench.py")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    turns = "several take turns from shard to shard"
    add("--temperature", nargs="+", type=float, default=[0.0], help=turns)
    add("--confidence", default="sampled", choices=CONFIDENCES, help="at T > 0")
    add("--precision", default="bfloat16", choices=list(PRECISIONS), help="of the confidence")
    add("--seed", type=command.natural, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    run_collect(parse(argv))


if __name__ == "__main__":
    command.run(main)
