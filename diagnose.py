"""One target looked at closely: why the order matters (paper section 2), and the cost of a pass.

    python bench.py --diagnose
    python bench.py --pass-cost --model sdar-8b --random-weights

What this file leaves out: comparing methods (bench.py), one prompt round by round (trace.py).
"""

import resource
import statistics
import time
from functools import partial

import torch

import command
import ddtree
import dlm
import train
import trajectories
from decoder import Decoder
from methods import draft_free
from verify import speculate

COMMITTED = 999  # above every rank


# --------------------------------------------------------------------------- why the order matters


def diagnose(bench, texts):
    """Print section 2's diagnostics on `texts`, beside the paper's figures for SDAR-8B."""
    prompts = [bench.target.encode(text) for text in texts]
    data = records(bench, prompts)
    row("diagnostic", "here", "paper")
    how_tokens_hold(data)
    how_the_order_does_not(data)
    accuracy = train.order_accuracy(bench.drafter.cpu(), data)
    bench.drafter.to(bench.target.device)
    found = "{drafter:.2f} ({drafter_top3:.2f})".format(**accuracy)
    row("next position, path depths 1-12: order drafter (top 3)", found, ".75")
    left, ranked = f"{accuracy['stale_left']:.2f}", f"{accuracy['stale_rank']:.2f}"
    row("    the most confident stale position left on the true path", left)
    row("    the position at stale rank d commits d-th", ranked, ".22")
    target, decoder = bench.target, bench.decoder
    truths = [draft_free(target, decoder, prompt) for prompt in waiting("the truth", prompts)]
    for name, oracle, paper in (
        ("oracle-positions", ddtree.oracle_positions, "5.4-5.7x / 7.2-8.2x"),
        ("oracle-tokens", ddtree.oracle_tokens, "D 20: 3.4-6.5x"),
    ):
        cuts = [oracle_cut(bench, name, prompts, truths, oracle, budget) for budget in (8, 20)]
        row(f"{name}: cut in passes, D = 8 / 20", "{:.1f}x / {:.1f}x".format(*cuts), paper)


def row(label, here, paper=""):
    """Print one diagnostic."""
    print(f"{label:62}{here:>16}   {paper:>19}", flush=True)


def waiting(what, things):
    """The things, one after the other, with a bar that says what is done to them."""
    with command.progress(what, len(things), "prompts") as bar:
        for thing in things:
            yield thing
            bar.update()


def records(bench, prompts):
    """Draft-free trajectories over `prompts`, as trajectories.join gives them."""
    with command.progress("recording trajectories", len(prompts), "prompts") as bar:
        found = trajectories.collect(bench.target, bench.decoder, prompts, told=bar.update)
    return trajectories.join([found])


def passes_of(data):
    """Of every recorded position, the pass it belongs to, and whether it is still masked after it
    (when 0: committed in this very pass)."""
    of = torch.repeat_interleave(torch.arange(len(data["count"])), data["count"])
    return of, data["when"] > 0


def how_tokens_hold(data):
    """Print how often stale conditionals foresee the tokens."""
    of, open_ = passes_of(data)
    later, hit = data["block"][of] > 0, data["token_rank"] == 0
    first, others = (hit[open_ & part].float().mean() for part in (~later, later))
    label = "stale argmax = finally committed token, first / later blocks"
    row(label, f"{first:.2f} / {others:.2f}", ".92 / ≥ .90")
    # passes with a token among the next 8 commits that 8 candidates do not hold
    miss = open_ & (data["when"] <= 8) & (data["token_rank"] >= 8)
    missed = torch.zeros(len(data["count"])).index_add_(0, of, miss.float())
    covered = (missed[data["count"] > 8] == 0).float().mean()
    row("8 stale candidates per position cover the next 8 commits", f"{covered:.2f}", ".89")


def how_the_order_does_not(data):
    """Print how often the most confident stale position is the next one committed, by block."""
    of, open_ = passes_of(data)
    rank = data["rank"].masked_fill(~open_, COMMITTED)
    lowest = torch.full((len(data["count"]),), COMMITTED).scatter_reduce_(0, of, rank, "amin")
    leads = open_ & (rank == lowest[of])  # the most confident position left
    last = int(data["block"].max())
    for block in range(last + 1):
        chosen = leads & (data["block"][of] == block)
        share = (data["when"][chosen] == 1).float().mean()
        paper = ".03 in block 9" if block == last else ""
        row(f"most confident stale position commits next, block {block}", f"{share:.2f}", paper)


def oracle_cut(bench, name, prompts, truths, oracle, budget):
    """Cut in denoise passes of an oracle; truths: (draft-free Generation, its states) by prompt."""
    free = drafted = 0
    for prompt, (generation, truth) in waiting(f"{name}, D = {budget}", list(zip(prompts, truths))):
        draft = partial(oracle, budget=budget, truth=truth)
        free += generation.passes["denoise"]
        drafted += speculate(bench.target, bench.decoder, prompt, draft).passes["denoise"]
    return free / drafted


# ------------------------------------------------------------------------------ the cost of a pass


def seconds_of(run, device, repeats=7, enough=5.0):
    """(median seconds of `run` until the device is done, median seconds until it returns), after
    one warm-up; fewer repeats if they take more than `enough` seconds."""
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
    """Print the time of a pass over 1 + D copies of a block behind 256 cached tokens, beside the
    time it takes to read the weights once at the speed this device copies memory with: no pass over
    a dense model is faster. On a CPU `host` has no meaning. An unpinned mixture of experts reads
    only those weights that its tokens are routed to.
    """
    L, device, length = target.block_size, target.device, 256
    generator = torch.Generator().manual_seed(0)
    most = min(target.n_ids, target.mask_id)
    ids = torch.randint(0, most, (length // L * L,), generator=generator).tolist()
    canvas = opened_canvas(target, ids)
    half = tuple(ids[s] if s % 2 else target.mask_id for s in range(L))
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    rate = copy_rate(weights, device)
    floor = weights / rate
    print(
        f"{weights / 1e9:.2f} GB of weights, memory copied at {rate / 1e9:.1f} GB/s: "
        f"{1e3 * floor:.2f} ms"
    )
    print(f"{'copies':>7}{'ms':>10}{'over one':>10}{'over floor':>12}{'host':>7}")
    decoder, one = Decoder(), None
    for n in (1, 7, 9, 13, 21):
        done, _ = seconds_of(lambda: decoder.transition(canvas.look([half] * n)[0]), device)
        _, handed = seconds_of(lambda: canvas.look([half] * n), device)
        one = one or done
        host = f"{handed / done:.0%}" if device.type == "cuda" else "-"
        print(
            f"{n:7}{1e3 * done:10.2f}{done / one:9.2f}x{done / floor:11.2f}x{host:>7}", flush=True
        )
    print(
        "copies: states in the pass, 1 + D. ms: of the pass and F. over one: in passes over one "
        "copy.\nover floor: in times of reading the weights once. host: share of the time in which "
        "Python has not\nyet handed over all work (on a CPU there is no such division: -)."
    )


def copy_rate(most, device):
    """Bytes per second that this device reads and writes in copying up to `most` bytes."""
    buffer = torch.empty(min(most, 1 << 29), dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    return 2 * buffer.numel() / seconds_of(lambda: other.copy_(buffer), device)[0]


def opened_canvas(target, ids):
    """A canvas behind `ids` whose active block has had its first pass."""
    canvas = dlm.start(target, Decoder(gen_len=target.block_size), ids)
    canvas.look([canvas.blank])
    return canvas


def one_block(target, drafter, budget):
    """Decode one block without drafts and with SPOT's; print the passes and the memory it took."""
    generator = torch.Generator().manual_seed(1)
    most = min(target.n_ids, target.mask_id)
    prompt = torch.randint(0, most, (2 * target.block_size,), generator=generator)
    decoder = Decoder(gen_len=target.block_size)
    free = dlm.generate(target, decoder, prompt)
    draft = partial(ddtree.spot, budget=budget, drafter=drafter)
    spot = speculate(target, decoder, prompt, draft)
    same = "the same text" if spot.written == free.written else "another text"
    passes = spot.passes["denoise"]
    print(
        f"one block: {free.passes['denoise']} passes, SPOT at D = {budget} {passes} passes, {same}"
    )
    if target.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(target.device)
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory at its peak: {memory / 2**30:.2f} GiB on {target.device.type}")
