"""One target looked at closely: why the order matters (paper section 2), one prompt round by round, the cost of a pass.

    python bench.py --diagnose
    python bench.py --trace
    python bench.py --pass-cost --model sdar-8b --random-weights

What this file leaves out: comparing methods (bench.py).
"""

import resource
import statistics
import time
from functools import partial

import torch

import ddtree
import dlm
import train
from verify import speculate

COMMITTED = 999  # above every rank


# ------------------------------------------------------------------------------------------------ diagnostics


def diagnose(bench):
    """Section 2's diagnostics on the evaluation prompts, beside the paper's figures for SDAR-8B."""
    args = bench["args"]
    prompts = [bench["target"].encode(p.prompt) for task in args.task for p in bench["problems"][task]]
    data = train.join([train.collect(bench["target"], bench["decoder"], prompts)])

    def line(label, here, paper=""):
        print(f"{label:62}{here:>16}   {paper:>19}")

    line("diagnostic", "here", "paper")
    of = torch.repeat_interleave(torch.arange(len(data["count"])), data["count"])  # the pass each position belongs to
    later, hit, open_ = (
        data["block"][of] > 0,
        data["token_rank"] == 0,
        data["when"] > 0,
    )  # when 0: committed in this very pass
    shares = [hit[open_ & part].float().mean() for part in (~later, later)]
    line(
        "stale argmax = finally committed token, first / later blocks", "{:.2f} / {:.2f}".format(*shares), ".92 / ≥ .90"
    )
    missed = torch.zeros(len(data["count"])).index_add_(
        0, of, (open_ & (data["when"] <= 8) & (data["token_rank"] >= 8)).float()
    )
    line(
        "8 stale candidates per position cover the next 8 commits",
        f"{(missed[data['count'] > 8] == 0).float().mean():.2f}",
        ".89",
    )
    top = data["rank"].masked_fill(~open_, COMMITTED)
    lowest = torch.full((len(data["count"]),), COMMITTED).scatter_reduce_(0, of, top, "amin")
    leads = open_ & (top == lowest[of])  # the most confident position left
    for block in range(int(data["block"].max()) + 1):
        chosen = leads & (data["block"][of] == block)
        paper = ".03 in block 9" if block == int(data["block"].max()) else ""
        line(
            f"most confident stale position commits next, block {block}",
            f"{(data['when'][chosen] == 1).float().mean():.2f}",
            paper,
        )
    accuracy = train.order_accuracy(bench["drafter"].cpu(), data)
    line(
        "next position, path depths 1-12: order drafter (top 3)",
        "{drafter:.2f} ({drafter_top3:.2f})".format(**accuracy),
        ".75",
    )
    line("    the most confident stale position left on the true path", f"{accuracy['stale_left']:.2f}")
    line("    the position at stale rank d commits d-th", f"{accuracy['stale_rank']:.2f}", ".22")
    truths = [(prompt, *truth_of(bench, prompt)) for prompt in prompts]
    for name, oracle, paper in (
        ("oracle-positions", ddtree.oracle_positions, "5.4-5.7x / 7.2-8.2x"),
        ("oracle-tokens", ddtree.oracle_tokens, "D 20: 3.4-6.5x"),
    ):
        cuts = [oracle_cut(bench, truths, oracle, budget) for budget in (8, 20)]
        line(f"{name}: cut in passes, D = 8 / 20", "{:.1f}x / {:.1f}x".format(*cuts), paper)


def truth_of(bench, prompt):
    """(denoise passes of draft-free decoding, the states each block went through {block: states})."""
    truth = {}

    def watch(canvas, state, following, *_):
        truth.setdefault(canvas.block, [state]).append(following)

    return dlm.generate(bench["target"], bench["decoder"], prompt, watch=watch).passes["denoise"], truth


def oracle_cut(bench, truths, oracle, budget):
    """Cut in denoise passes of an oracle, over all evaluation prompts."""
    free = drafted = 0
    for prompt, passes, truth in truths:
        draft = partial(oracle, budget=budget, truth=truth)
        free += passes
        drafted += speculate(bench["target"], bench["decoder"], prompt, draft).passes["denoise"]
    return free / drafted


# -------------------------------------------------------------------------------------------------- the trace


def commit_names(before, after, piece):
    """What was committed between two states, as "position token" texts."""
    return [f"{s} {piece[new]}" for s, (old, new) in enumerate(zip(before, after)) if old != new]


def show_tree(tree, path, piece):
    """Print the draft tree depth first, accepted nodes marked ✓.

    A state that two orders of the same commits reach is one node; it hangs from its accepted parent where it has one.
    """
    parents = tree.parents[:]
    for parent, child in zip(path, path[1:]):
        parents[child] = parent

    def show(u, depth):
        for child in (c for c in range(1, len(parents)) if parents[c] == u):
            name = ", ".join(commit_names(tree.states[u], tree.states[child], piece))
            print(f"    {'✓' if child in path else ' '} {'   ' * depth}└─ {name:12} m = {tree.masses[child]:.2f}")
            show(child, depth + 1)

    show(0, 0)


def trace(bench):
    """Write one prompt block by block: what each round drafted, which path was accepted, what was committed."""
    target, args = bench["target"], bench["args"]
    problem = bench["problems"][args.task[0]][0]
    piece = [repr(target.tokenizer.decode([i]))[1:-1].replace(" ", "␣") for i in range(target.n_ids)]
    rounds = []

    def show(canvas, tree, path, following, *_):
        rounds.append(path)
        last = tree.states[path[-1]]
        drafted, accepted = len(tree.states) - 1, len(path) - 1
        print(f"\nround {len(rounds)}, block {canvas.block}: {drafted} drafted, {accepted} accepted")
        print("  " + " ".join("·" if t == target.mask_id else piece[t] for t in canvas.state))
        if not drafted:
            print("    (nothing to draft from: the block is new to the target, or already complete)")
        show_tree(tree, path, piece)
        crossed = canvas.is_complete(last) and not canvas.is_leaf(last)
        free = commit_names(canvas.blank if crossed else last, following, piece)
        print(f"    + {', '.join(free)}: the free commit" + (" of the next block, verified in the same pass" * crossed))

    print(f"prompt: {problem.prompt}\n")
    print(
        "Each round verifies a draft tree in one target pass. A line is a commit: position in the block, token (␣ is a"
        "\nspace), mass m. ✓: the target's own next state is this node. · is undecided. Block 0 is the first of all."
    )
    draft = partial(ddtree.spot, budget=args.budget[0], drafter=bench["drafter"])
    result = speculate(target, bench["decoder"], target.encode(problem.prompt), draft, watch=show)
    print(f"\n{len(result.written)} positions in {result.passes['denoise']} passes\n\n{target.decode(result.ids)}")


# ------------------------------------------------------------------------------------------- the cost of a pass


def seconds_of(run, device, repeats=7, enough=5.0):
    """(median seconds of `run` until the device is done, median seconds until it returns), after one warm-up; fewer
    repeats if they take more than `enough` seconds."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    run()
    done, returned = [], []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        run()
        returned.append(time.perf_counter() - begin)
        wait()
        done.append(time.perf_counter() - begin)
        if sum(done) > enough:
            break
    return statistics.median(done), statistics.median(returned)


def pass_cost(target):
    """Print the time of a pass over 1 + D copies of a block behind 256 cached tokens, beside the time it takes to
    read the weights once at the speed this device copies memory with: no pass over a dense model is faster.

    host: share of the time in which Python has not yet handed over all work; on a CPU there is no such division. An
    unpinned mixture of experts reads only those weights that its tokens are routed to.
    """
    L, device, length = target.block_size, target.device, 256
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(target.n_ids, target.mask_id), (length // L * L,), generator=generator).tolist()
    prefix = target.prefill(ids) if target.attention == "block" else kept_canvas(target, ids)
    half = tuple(ids[s] if s % 2 else target.mask_id for s in range(L))
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    buffer = torch.empty(min(weights, 1 << 29), dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    rate = 2 * buffer.numel() / seconds_of(lambda: other.copy_(buffer), device)[0]
    print(f"{weights / 1e9:.2f} GB of weights, memory copied at {rate / 1e9:.1f} GB/s: {1e3 * weights / rate:.2f} ms")
    print(f"{'copies':>7}{'ms':>10}{'in passes over 1':>18}{'over the floor':>16}{'host':>7}")
    decoder, one = dlm.Decoder(), None
    for n in (1, 7, 9, 13, 21):
        states, blocks = [half] * n, [length // L] * n
        done, _ = seconds_of(lambda: decoder.transition(target.forward(states, blocks, prefix, {})), device)
        _, handed = seconds_of(lambda: target.forward(states, blocks, prefix, {}), device)
        one = one or done
        host = f"{handed / done:.0%}" if device.type == "cuda" else "-"
        print(f"{n:7}{1e3 * done:10.2f}{done / one:17.2f}x{done / (weights / rate):15.2f}x{host:>7}", flush=True)


def one_block(target, drafter, budget):
    """Decode one block without drafts and with SPOT's, and print the passes and the memory that this took."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, min(target.n_ids, target.mask_id), (2 * target.block_size,), generator=generator)
    decoder = dlm.Decoder(gen_len=target.block_size)
    free = dlm.generate(target, decoder, prompt)
    spot = speculate(target, decoder, prompt, partial(ddtree.spot, budget=budget, drafter=drafter))
    same = "the same text" if spot.written == free.written else "another text"
    print(f"one block: {free.passes['denoise']} passes, SPOT at D = {budget} {spot.passes['denoise']} passes, {same}")
    if target.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(target.device)
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory at its peak: {memory / 2**30:.2f} GiB on {target.device.type}")


def kept_canvas(target, ids):
    """The dual cache of a canvas that holds `ids` and one undecided block."""
    canvas = dlm.start(target, dlm.Decoder(gen_len=target.block_size), torch.tensor(ids))
    canvas.look([canvas.blank], [0], {})
    return canvas.prefix
