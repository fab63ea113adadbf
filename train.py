"""What is fitted to a target's trajectories: the order drafter, and Spiffy's draft graph.

    python train.py order    # the order drafter (paper section 3), resumable
    python train.py graph    # the calibrated draft graph (Spiffy, paper section 9)

Both need nothing but what trajectories.py collected. The order drafter learns which position a
target commits next: of a recorded pass the stale conditionals stay as they are, the first d real
commits make a hypothetical state, and the next real commit is the label. The graph is counted.

What this file leaves out: collecting (trajectories.py), the loop of a training (pretrain.fit).
"""

import command

if __name__ == "__main__":
    command.begin("loading torch")  # before the imports that take seconds

import argparse
import os
from collections import Counter

import torch
from torch.nn import functional
from tqdm import tqdm

from drafter import OrderDrafter, load_drafter
from pretrain import fit
from trajectories import DEEPEST, DEPTHS, RARE, shards_of, split, target_of

ROWS = 4096  # masked positions in a batch
DRAFTER = ("config.json", "model.safetensors")  # the files of one


# ------------------------------------------------------------------------------ the order drafter


def order_batch(data, states, depth, noised=None):
    """Training examples of the order drafter.

    data: records as `trajectories.join` gives them; states [N]: passes with equally many (k) masked
    positions; depth [N]: of the path. Returns the stale features [N, k, 72], positions [N, k],
    decided bool [N, k] (the first `depth` real commits), the label [N] (the index of the next one)
    and, where `noised` [N] says which of the recorded depths `depth` is, the noised statistics
    [N, k, 4].

    >>> when = torch.tensor([2, 0, 1])  # the middle position commits in this very pass
    >>> data = {"start": torch.tensor([0]), "count": torch.tensor([3]), "when": when}
    >>> data |= {"position": torch.tensor([4, 5, 9]), "features": torch.zeros(3, 72)}
    >>> _, position, decided, label, _ = order_batch(data, torch.tensor([0]), torch.tensor([1]))
    >>> position.tolist(), decided.tolist(), label.tolist()
    ([[4, 5, 9]], [[False, True, False]], [2])
    """
    k = int(data["count"][states[0]])
    rows = data["start"][states][:, None] + torch.arange(k)  # [N, k]
    when = data["when"][rows]
    decided = when < depth[:, None]
    label = (when == depth[:, None]).int().argmax(1)
    statistics = None if noised is None else data["noised"][rows, noised[:, None]].float()
    return data["features"][rows].float(), data["position"][rows], decided, label, statistics


def draw_batch(data, group, reads_noise, generator):
    """A random batch of the passes `group` [·], all with k masked positions, at random depths."""
    k = int(data["count"][group[0]])
    n = ROWS // k // 2
    chosen = group[torch.randint(len(group), (n,), generator=generator)]
    depth = torch.randint(1, min(k, DEEPEST + 1), (n,), generator=generator)
    which = None
    if reads_noise:  # only at the depths that the noise was recorded for
        which = torch.randint(DEPTHS, (n,), generator=generator)
        depth = data["depth"][chosen, which]
    return order_batch(data, chosen, depth, which)


def train_order(
    data, held, folder, steps, seed, about, target=None, init=None, rate=1e-3, save_every=500,
    **shape,
):  # fmt: skip
    """Cross-entropy of q(s|y) on the next real commit (paper section 3), for random passes and path
    depths. Writes the drafter, which it returns, to `folder`; resumable.

    about: what else the training depends on, a dict, for its resumption and the drafter's config;
    target: name of the trajectories' target, for the config; init: folder of the drafter to start
    from; shape: the drafter's. Raises ValueError.
    """
    check_examples(data)
    check_examples(held)
    torch.manual_seed(seed)
    drafter = OrderDrafter(**shape)
    if init:
        start_from(drafter, init)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, weight_decay=0.01)
    L, reads_noise = drafter.shape["block_size"], drafter.shape["noised"]
    groups = [(data["count"] == k).nonzero()[:, 0] for k in range(2, L + 1)]
    # positions of each group, so that every position is drawn as often
    weights = torch.tensor([k * len(group) for k, group in enumerate(groups, 2)]).float()

    def learn(step):
        generator = torch.Generator().manual_seed(seed * 1000003 + step)
        drawn = torch.multinomial(weights, 2, replacement=True, generator=generator)
        total = 0.0
        for i in drawn.tolist():
            batch = draw_batch(data, groups[i], reads_noise, generator)
            features, position, decided, label, noised = batch
            with torch.autocast("cpu", torch.bfloat16):
                logits = drafter(drafter.project(features, position), decided, noised)
            loss = functional.cross_entropy(logits.float(), label) / 2
            loss.backward()
            total += loss.item()
        return total

    def saved(step):
        accuracy = order_accuracy(drafter.eval(), held)["drafter"]
        drafter.train()
        tqdm.write(f"step {step}/{steps}  held-out next position {accuracy:.3f}")

    path = os.path.join(folder, "training.safetensors")
    trained_on = about | {"shape": drafter.shape, "steps": steps, "seed": seed, "rate": rate}
    fit(drafter, [optimizer], learn, steps, path, trained_on, save_every, saved)
    accuracy = order_accuracy(drafter.eval(), held)
    drafter.about = {"target": target, "accuracy": accuracy, "trained_on": trained_on}
    drafter.save(folder, **drafter.about)
    return drafter


def check_examples(data):
    """ValueError unless some pass leaves a position to commit after the next one."""
    if not (data["count"] > 1).any():
        raise ValueError(
            "a part of the trajectories, the training or the held-out one, holds no pass with two "
            "undecided positions: collect more prompts, or longer answers"
        )


def start_from(drafter, folder):
    """Give `drafter` the weights of the one in `folder`, whether that one reads the noise or not;
    weights of the noise that it lacks start at zero."""
    before, own = load_drafter(folder), drafter.state_dict()
    if before.shape not in (drafter.shape, drafter.shape | {"noised": False}):
        raise ValueError(
            f"the drafter in {folder} has another shape, {before.shape}: give its --layers, "
            "--width and --noised"
        )
    weights = before.state_dict()
    missing = own["input.weight"].shape[1] - weights["input.weight"].shape[1]
    weights["input.weight"] = functional.pad(weights["input.weight"], (0, missing))
    drafter.load_state_dict(weights)


@torch.inference_mode()
def order_accuracy(drafter, data, deepest=12, each=75):
    """Held-out accuracy of the next position over path depths 1 … `deepest`: {name: 0 … 1}.

    drafter, drafter_top3: the trained model; beside it the stale-confidence orders, with the
    decoder's rounding and ties. stale_left: the most confident stale position that the true path
    has left; noised_left: the same by noised confidence; stale_rank: the position at stale rank d
    is the d-th next commit (needs no path). Up to `each` passes of every depth and number of masks.
    """
    check_examples(data)
    hits, total, generator = Counter(), 0, torch.Generator().manual_seed(0)
    for depth in range(1, deepest + 1):
        for k in range(depth + 1, drafter.shape["block_size"] + 1):
            fits = (data["count"] == k) & (data["depth"] == depth).any(1)
            states = fits.nonzero()[:, 0]
            states = states[torch.randperm(len(states), generator=generator)[:each]]
            if len(states):
                hits.update(hits_at(drafter, data, states, depth))
                total += len(states)
    return {name: round(count / total, 4) for name, count in hits.items()}


def hits_at(drafter, data, states, depth):
    """How many of the passes `states` [N], with equally many masks, each order foresees rightly at
    path depth `depth`: {name: count}."""
    which = (data["depth"][states] == depth).int().argmax(1)
    depths = torch.full((len(states),), depth)
    features, position, decided, label, noised = order_batch(data, states, depths, which)
    logits = drafter(drafter.project(features, position), decided, noised)  # [N, k]
    k = logits.shape[1]
    rank = data["rank"][data["start"][states][:, None] + torch.arange(k)]  # [N, k]
    confidence_rank = noised[..., 3]
    best = logits.topk(min(3, k), 1).indices
    right = {
        "drafter": logits.argmax(1) == label,
        "drafter_top3": (best == label[:, None]).any(1),
        "stale_left": rank.masked_fill(decided, k).argmin(1) == label,
        "noised_left": confidence_rank.masked_fill(decided, torch.inf).argmin(1) == label,
        "stale_rank": rank.gather(1, label[:, None])[:, 0] == depth,
    }
    return {name: found.sum().item() for name, found in right.items()}


# --------------------------------------------------------------------------- the calibrated graph


def count_sets(data, passes, longest):
    """How often each draft set was the set of the next k commits after the free one, k = 1 … K =
    `longest`, over the first `passes` passes (Spiffy, paper section 9). A Counter.

    A set is a sorted tuple of pairs (position rank i, vocabulary rank j) under that pass's
    conditionals; i counts the positions that are still masked after the free commit.

    >>> data = {"start": torch.tensor([0]), "count": torch.tensor([3])}
    >>> data["when"] = torch.tensor([2, 0, 1])  # the middle position is the free commit
    >>> data["rank"], data["token_rank"] = torch.tensor([1, 0, 2]), torch.tensor([0, 0, 3])
    >>> count_sets(data, 1, 20)  # first the second position left, with the fourth token
    Counter({((1, 3),): 1, ((0, 0), (1, 3)): 1})
    """
    counts = Counter()
    for s in range(min(passes, len(data["count"]))):
        first = int(data["start"][s])
        rows = slice(first, first + int(data["count"][s]))
        when, rank, token = (data[name][rows].tolist() for name in ("when", "rank", "token_rank"))
        left = sorted((r, w, j) for w, r, j in zip(when, rank, token) if w > 0)
        coming = sorted((w, i, j) for i, (_, w, j) in enumerate(left))[:longest]
        pairs = []
        for _, i, j in coming:
            if j == RARE:  # no draft can name it
                break
            pairs.append((i, j))
            counts[tuple(sorted(pairs))] += 1
    return counts


def calibrate_graph(counts, inherit, size=64):
    """The most valuable connected draft sets, greedily, each behind one of its parents: up to
    `size` tuples of pairs (Spiffy, paper section 9).

    Parents of a set: the sets with one pair less. inherit: a set's value is its count plus its
    parents' counts; else its count alone, which is how often its node would be accepted [ours].

    >>> a, b = (0, 0), (1, 0)
    >>> counts = {(a,): 5, (b,): 3, (a, b): 2}
    >>> calibrate_graph(counts, inherit=False)
    [((0, 0),), ((1, 0),), ((0, 0), (1, 0))]
    >>> calibrate_graph(counts, inherit=True, size=2)  # 2 + 5 + 3 for the pair
    [((0, 0),), ((0, 0), (1, 0))]
    """
    parents, value = {}, {}
    for pairs, count in counts.items():
        parents[pairs] = [pairs[:n] + pairs[n + 1 :] for n in range(len(pairs))]
        value[pairs] = count + inherit * sum(counts.get(p, 0) for p in parents[pairs])
    chosen, known = [], {()}
    while len(chosen) < size:
        fresh = (pairs for pairs in value if pairs not in known)
        reachable = [pairs for pairs in fresh if not known.isdisjoint(parents[pairs])]
        if not reachable:
            break
        chosen.append(max(reachable, key=value.get))
        known.add(chosen[-1])
    return chosen


# ------------------------------------------------------------------------------------ the commands


def run_order(args):
    """Train the order drafter and print its held-out accuracy beside the stale orders'."""
    if args.width % 16:
        message = "give a multiple of 16, the width of an attention head"
        raise ValueError(f"--width is {args.width}: {message}")
    if not 0 < args.rate <= 1:
        raise ValueError(f"--rate is {args.rate}: give a learning rate above 0 and up to 1")
    if args.init and os.path.realpath(args.init) == os.path.realpath(args.out):
        raise ValueError(f"--init and --out are both {args.out}: give another --out")
    command.say("reading the trajectories")
    data, held = split(*args.data)
    print(f"{len(data['count'])} training passes, {len(held['count'])} held-out ones", flush=True)
    shards = [path for folder in args.data for path in shards_of(folder)]
    init = [os.path.join(args.init, name) for name in DRAFTER] if args.init else []
    about = {
        "passes": len(data["count"]),
        "data": command.content_id(*shards),
        "init": command.content_id(*init),
        "code": command.code_id(),
    }
    drafter = train_order(
        data, held, args.out, args.steps, args.seed, about, target_of(args.data), args.init,
        args.rate, layers=args.layers, width=args.width, heads=args.width // 16,
        hidden=4 * args.width, noised=args.noised,
    )  # fmt: skip
    for name, value in drafter.about["accuracy"].items():
        print(f"{name:>13} {value:.3f}")


def run_graph(args):
    """Calibrate the draft graph and write its sets as JSON."""
    command.check_writable(args.out)
    command.say("reading the trajectories")
    data, _ = split(args.data)
    sets = calibrate_graph(count_sets(data, args.passes, args.longest), args.inherit)
    graph = {"passes": args.passes, "inherit": args.inherit, "sets": sets}
    command.write_json(args.out, graph)
    print(f"{len(sets)} draft sets in {args.out}, first {sets[:4]}")


def parse(argv=None):
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=shown)
    commands = parser.add_subparsers(dest="command", required=True)
    positive, folder = command.positive, "runs/trajectories"

    order = commands.add_parser("order", help="the order drafter", formatter_class=shown)
    add = order.add_argument
    add("--data", nargs="+", default=[folder], help="one folder of trajectories or several")
    add("--out", default="runs/order")
    add("--steps", type=positive, default=5000)
    add("--layers", type=positive, default=3)
    add("--width", type=positive, default=128)
    add("--init", metavar="FOLDER", help="start from this order drafter")
    add("--rate", type=float, default=1e-3, help="learning rate")
    add("--noised", action="store_true", help="also read statistics of the noised conditionals")
    add("--seed", type=command.natural, default=0)

    graph = commands.add_parser("graph", help="the draft graph (Spiffy)", formatter_class=shown)
    add = graph.add_argument
    add("--data", default=folder)
    add("--out", default="runs/graph.json")
    add("--passes", type=positive, default=20000, help="draft-free passes to replay")
    add("--longest", type=positive, default=20, help="K: commits ahead that are counted")
    add("--inherit", action="store_true", help="add the parents' counts to a set's value")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    if args.command == "order":
        run_order(args)
    else:
        run_graph(args)


if __name__ == "__main__":
    command.run(main)
