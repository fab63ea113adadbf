"""Everything that is trained, calibrated or collected, seeded and resumable: started again, each command goes on.

    python train.py target     the embedded target, from scratch             (about 35 minutes on 2 cores)
    python train.py accuracy   its exact-decoding accuracy on held-out prompts
    python train.py collect    draft-free trajectories of training prompts
    python train.py order      the order drafter (paper section 3) on them
    python train.py graph      the calibrated draft graph (Spiffy) on them

The target learns block diffusion as SDAR does: a clean stream next to noisy copies of its blocks, each noisy block
seeing the clean blocks before it. The drafter and the graph need nothing but trajectories of the target.

What this file leaves out: training a target at full size.
"""

import argparse
import glob
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import dlm
import targets
import tasks
from drafter import OrderDrafter, Stale, load_drafter

BLOCK = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<MASK>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIX = {"arithmetic": 0.45, "code": 0.35, "drill": 0.20}


# -------------------------------------------------------------------------------------- the embedded target


def make_tokenizer(vocab_size=480):
    """A byte-pair tokenizer in the layout of SDAR's: Qwen2's word splitting, ChatML and a mask token."""
    texts = [text for task in MIX for p in tasks.problems(task, "train", 4000, seed=1) for text in (p.prompt, p.answer)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    bpe.train_from_iterator(
        texts + ["user\n", "assistant\n"] * 4000,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(m) for m in learned["merges"]],
        extra_special_tokens=SPECIAL[1:],
        chat_template=CHAT,
    )


def make_target(tokenizer, seed):
    """A randomly initialised 1.7 M-parameter SDAR: a Qwen3 with tied embeddings. Output projections start at zero."""
    torch.manual_seed(seed)
    end, _, stop, mask = tokenizer.convert_tokens_to_ids(SPECIAL)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    config.block_size, config.mask_token_id, config.stop_token_ids = BLOCK, mask, [stop, end]
    config._attn_implementation = "block_units"
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def encode_examples(tokenizer, n, seed):
    """`n` training examples as (ids [n_blocks·L], first answer position), the last block filled up with end-of-text."""
    stop = tokenizer.encode(SPECIAL[2])
    end = tokenizer.encode(SPECIAL[0])
    examples = []
    for task, share in MIX.items():
        drawn = tasks.problems(task, "train", math.ceil(n * share), seed)
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p.prompt}], add_generation_prompt=True, tokenize=False
            )
            for p in drawn
        ]
        for prompt, answer in zip(tokenizer(chats)["input_ids"], tokenizer([p.answer for p in drawn])["input_ids"]):
            ids = prompt + answer + stop
            examples.append((ids + end * (-len(ids) % BLOCK), len(prompt)))
    np.random.default_rng(seed).shuffle(examples)
    return examples


def batches(tokenizer, tokens_per_batch, seed):
    """Endless batches of examples with equally many blocks: (ids [B, n·L], is_answer [B, n·L])."""
    waiting = {}
    while True:
        for ids, start in encode_examples(tokenizer, 20000, seed):
            bucket = waiting.setdefault(len(ids), [])
            bucket.append((ids, start))
            if len(bucket) * len(ids) * 3 >= tokens_per_batch:
                rows = torch.tensor([ids for ids, _ in bucket])
                starts = torch.tensor([start for _, start in bucket])
                yield rows, torch.arange(rows.shape[1]) >= starts[:, None]
                bucket.clear()
        seed += 1


def noisy_copies(ids, is_answer, mask_id, generator):
    """Two complementary maskings of every answer block; rates stratified over the batch's blocks, 13 % of blocks all
    masked."""
    B, T = ids.shape
    blocks = B * (T // BLOCK)
    rate = (torch.randperm(blocks, generator=generator) + torch.rand(blocks, generator=generator)) / blocks / 0.87
    rate = rate.clamp(max=1.0).view(B, -1, 1).expand(-1, -1, BLOCK).reshape(B, T)
    first = (torch.rand(B, T, generator=generator) < rate) & is_answer
    masks = torch.stack([first, ~first & is_answer], 1)  # [B, 2, T]
    return torch.where(masks, mask_id, ids[:, None]), masks


def target_loss(model, ids, is_answer, generator):
    """Cross-entropy on the masked positions of `clean | noisy | complementary`, each block seeing the clean blocks
    before it."""
    B, T = ids.shape
    n = T // BLOCK
    mask_id = model.config.mask_token_id
    noisy, masks = noisy_copies(ids, is_answer, mask_id, generator)
    row = torch.cat([ids, noisy.flatten(1)], 1)
    block = torch.arange(n).repeat(3)
    units = dlm.Units(BLOCK, context=torch.arange(n), sees=block[:, None] > torch.arange(n))
    hidden = model.model(
        input_ids=row, position_ids=torch.arange(T).repeat(3)[None], units=units, use_cache=False
    ).last_hidden_state
    where = masks.flatten(1).nonzero(as_tuple=True)
    logits = model.lm_head(hidden[:, T:][where]).index_fill(
        1, torch.tensor([mask_id]), -torch.inf
    )  # [MASK] is never a label
    return functional.cross_entropy(logits.float(), ids[:, None].expand(-1, 2, -1).flatten(1)[where])


def schedule(step, steps, warmup=100, decay=0.5):
    """Linear warm-up, constant, linear decay to zero over the last half."""
    return min((step + 1) / warmup, 1.0, (steps - step) / (steps * decay))


def save_training(path, model, optimizers, step, about):
    """Everything a killed training needs to go on, as one safetensors file (no pickle), replaced atomically.

    about: what the training depends on, a dict that `load_training` compares.
    """
    tensors = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{j}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    save_file(tensors, path + ".part", metadata={"step": str(step), "about": json.dumps(about)})
    os.replace(path + ".part", path)


def load_training(path, model, optimizers, about):
    """Restore what `save_training` wrote; returns the number of steps done, 0 if there is no such file.

    Raises ValueError if the file belongs to a training that depends on other things than `about`.
    """
    if not os.path.exists(path):
        return 0
    try:
        with safe_open(path, "pt") as file:
            step, before = int(file.metadata()["step"]), json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): delete it to start again, or choose another --out"
        ) from None
    if before != about:
        raise ValueError(f"{path} belongs to another training ({before}, not {about}): choose another --out")
    model.load_state_dict({name[6:]: t for name, t in tensors.items() if name.startswith("model.")}, strict=False)
    for i, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, j, key = name.split(".")
                saved["state"].setdefault(int(j), {})[key] = tensor
        optimizer.load_state_dict(saved)
    return step


def train_target(folder, steps, seed, tokens_per_batch=6144, save_every=250):
    """Train the embedded target from scratch into `folder`; run again with the same arguments, it goes on where it
    stopped."""
    tokenizer = make_tokenizer()
    model = make_target(tokenizer, seed)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    os.makedirs(folder, exist_ok=True)
    resume = os.path.join(folder, "training.safetensors")
    about = {"steps": steps, "seed": seed}
    done, begin, average = load_training(resume, model, optimizers, about), time.time(), None
    for step, (ids, is_answer) in zip(range(steps), batches(tokenizer, tokens_per_batch, seed)):
        if step < done:
            continue
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = target_loss(model, ids, is_answer, torch.Generator().manual_seed(seed * 1000003 + step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step}/{steps}  loss {average:.3f}  {(time.time() - begin) / 60:.1f} min", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save_training(resume, model, optimizers, step + 1, about)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------- draft-free trajectories

DEEPEST, DEPTHS = 16, 4  # path depths that are trained on, and how many of them a pass is recorded at
FIELDS = ("count", "block", "depth", "position", "when", "rank", "token_rank", "features", "noised")
REAL = ("features", "noised")


def lockstep(target, decoder, prompts, watch):
    """Draft-free decoding of equally long prompts, int64 [B, P], in one batch: with one commit a pass they finish their
    blocks together. watch(i, canvas, state, next state, pass, unit) is told of every step of prompt i."""
    canvases = {i: dlm.Canvas(target, decoder, prompt) for i, prompt in enumerate(prompts)}
    prefix = canvases[0].prefix and [
        tuple(torch.cat(parts) for parts in zip(*layer)) for layer in zip(*(c.prefix for c in canvases.values()))
    ]
    while canvases:
        first = next(iter(canvases.values()))
        block, complete = first.block, first.is_complete(first.state)
        units = [unit for c in canvases.values() for unit in ([c.state, c.blank] if complete else [c.state])]
        out = target.forward(units, [block, block + 1][: 1 + complete], prefix, {1: 0} if complete else {})
        following = decoder.transition(out)
        if complete:
            prefix = target.extend(prefix, out, 0)
        for row, (i, c) in enumerate(canvases.items()):
            if complete:
                c.done, c.state = c.done + list(c.state), c.blank
            u = row * (1 + complete) + complete
            watch(i, c, c.state, following[u], out, u)
            c.state = following[u]
        alive = [row for row, c in enumerate(canvases.values()) if not c.is_final(c.state)]
        if len(alive) < len(canvases):
            canvases = {i: c for i, c in canvases.items() if not c.is_final(c.state)}
            prefix = prefix and [(k[alive], v[alive]) for k, v in prefix]


def accuracy(model, n, gen_len, seed):
    """Print the share of `n` held-out prompts of each task that exact decoding answers rightly."""
    target, decoder = targets.load(model), dlm.Decoder(gen_len=gen_len)
    for task in tasks.TASKS:
        same = {}
        for problem in tasks.problems(task, "test", n, seed):
            same.setdefault(len(target.encode(problem.prompt)), []).append(problem)
        right = steps = 0
        for problems in same.values():
            last = {}

            def watch(i, canvas, state, following, *_):
                last[i] = canvas, following

            lockstep(target, decoder, [target.encode(problem.prompt) for problem in problems], watch)
            for i, (canvas, following) in last.items():
                canvas.state = following
                right += tasks.score(problems[i], target.decode(canvas.answer()))
                steps += len(canvas.written())
        print(f"{task:12} {right}/{n} right, {steps / n:.1f} positions an answer", flush=True)


class Recorder:
    """Turns watched steps into training records: for every draft-free pass, the stale features of its masked
    positions and, once the block is finished, `when` each of them commits (0 = in this very pass), the committed
    token's rank under them, and the statistics of the noised conditionals at DEPTHS random depths."""

    def __init__(self, decoder):
        self.decoder, self.open, self.records = decoder, {}, []
        self.generator = torch.Generator().manual_seed(decoder.seed)

    def __call__(self, i, canvas, state, following, out, unit):
        passes, step = self.open.setdefault(i, ([], {}))
        step.update({s: len(passes) for s, (before, after) in enumerate(zip(state, following)) if before != after})
        stale = Stale(self.decoder, state, canvas.target.mask_id, canvas.block, out.unit(unit))
        passes.append(None if out.partial else self.read(stale, canvas))
        if canvas.is_complete(following):
            for n, record in enumerate(passes):
                if record:
                    self.finish(record, n, step, following)
            del self.open[i]

    def read(self, stale, canvas):
        """What is known in the pass itself, on the host."""
        k, L = len(stale.positions), len(stale.state)
        seen = stale.at(L - k)
        depth = torch.randint(1, max(2, min(k, DEEPEST + 1)), (DEPTHS,), generator=self.generator)
        return {
            "count": torch.tensor([k]),
            "block": torch.tensor([canvas.block - (canvas.prompt - canvas.origin) // L]),
            "depth": depth[None],
            "position": torch.tensor(stale.positions),
            "rank": torch.tensor(seen.ranking).argsort(),
            "tokens": torch.tensor(seen.tokens),
            "features": stale.features.cpu(),
            "noised": torch.stack([stale.noised(L - k + d) for d in depth.tolist()], 1).cpu(),
        }

    def finish(self, record, n, step, final):
        """Keep the record of a block's n-th pass, with what the finished block tells."""
        positions = record["position"].tolist()
        hit = record.pop("tokens") == torch.tensor([final[s] for s in positions])[:, None]
        record["when"] = torch.tensor([step[s] - n for s in positions])
        record["token_rank"] = torch.where(hit.any(1), hit.int().argmax(1), 255)
        self.records.append(record)


def equally_long(prompts, most):
    """Batches of at most `most` equally long prompts."""
    by_length = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt), []).append(prompt)
    return [same[i : i + most] for same in by_length.values() for i in range(0, len(same), most)]


def collect(target, decoder, prompts, batch=16):
    """Records of draft-free trajectories over `prompts` (list of int64 [P]), in batches of equally long ones, joined
    into tensors.

    For S passes: count, block (index counted from the answer's first) [S], depth [S, 4] (random path depths). For their
    Σk masked positions: position, when, rank (by stale confidence), token_rank (255 = not among the 32) uint8 [Σk],
    features float16 [Σk, 72] and noised float16 [Σk, 4, 4], the statistics at those depths.
    """
    recorder = Recorder(decoder)
    if target.attention == "full":
        for i, prompt in enumerate(prompts):
            dlm.generate(target, decoder, prompt, watch=partial(recorder, i))
    else:
        for together in equally_long(prompts, batch):
            lockstep(target, decoder, together, recorder)
    joined = {name: torch.cat([record[name] for record in recorder.records]) for name in FIELDS}
    return {name: value.half() if name in REAL else value.to(torch.uint8) for name, value in joined.items()}


def read_prompts(path, n):
    """`n` prompts of a file: one a line, as plain text or as JSON with a `prompt`, `question` or `text`."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): give a text file with a prompt a line"
        ) from None
    if not 0 < n <= len(lines):
        raise ValueError(f"{n} prompts asked for: {path} has {len(lines)}, ask for 1 to {len(lines)}")
    return [prompt_in(line, path) for line in lines[:n]]


def prompt_in(line, path):
    """The prompt that a line holds."""
    if not line.startswith("{"):
        return line
    try:
        row = json.loads(line)
        return str(next(row[key] for key in ("prompt", "question", "text") if row.get(key)))
    except (ValueError, StopIteration):
        raise ValueError(f"{path} has a line without a prompt ({line[:40]}): give every line one") from None


def world():
    """(rank, number of processes) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def own_device(device):
    """The device of this process: under torchrun each takes a GPU of its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and world()[1] > 1 else device


def open_folder(folder, about):
    """Make a folder for trajectories that depend on `about` (a dict), or go on with one of the same."""
    os.makedirs(folder, exist_ok=True)
    note, about = os.path.join(folder, "about.json"), json.dumps(about)
    if glob.glob(os.path.join(folder, "*.safetensors")) and not (os.path.exists(note) and open(note).read() == about):
        raise ValueError(
            f"{folder} holds trajectories collected otherwise: choose another --out, or give the same options"
        )
    part = f"{note}.{os.getpid()}"
    with open(part, "w") as file:
        file.write(about)
    os.replace(part, note)


def run_collect(args):
    """Write trajectories of training prompts as safetensors shards; shards that exist are kept.

    Temperatures take turns from shard to shard, each shard with noise of its own, which its prompts share; under
    torchrun processes take turns too. The model and the prompts' file are known by their names only: what has been
    trained or written anew needs another folder.
    """
    targets.check_name(args.model)
    small = targets.is_embedded(args.model)
    if not small and not args.prompts:
        raise ValueError("a real target needs general prompts: give a file of them with --prompts FILE")
    args.gen_len = args.gen_len or (160 if small else 256)
    args.dtype = args.dtype or ("float32" if small else "bfloat16")
    rank, ranks = world()
    decoders = [dlm.Decoder(gen_len=args.gen_len, temperature=t, confidence=args.confidence) for t in args.temperature]
    if args.prompts:
        texts = read_prompts(args.prompts, args.num_prompts)
    else:
        drawn = [
            tasks.problems(task, "train", math.ceil(args.num_prompts * part), args.seed) for task, part in MIX.items()
        ]
        texts = [p.prompt for problems in drawn for p in problems]
    target = targets.load(args.model, own_device(args.device), getattr(torch, args.dtype), args.block_size)
    target.cache = args.cache
    batches = equally_long([target.encode(text) for text in texts], args.batch)
    batches = [batches[i] for i in np.random.default_rng(args.seed).permutation(len(batches))]
    where = ("out", "device", "command")
    open_folder(args.out, {key: value for key, value in vars(args).items() if key not in where})
    begin = time.time()
    for i, start in enumerate(range(0, len(batches), args.shard)):
        path = os.path.join(args.out, f"{i:04d}.safetensors")
        if i % ranks == rank and not is_whole(path):
            decoder = replace(decoders[i % len(decoders)], seed=args.seed + i)
            save_file(
                collect(target, decoder, sum(batches[start : start + args.shard], []), args.batch), path + ".part"
            )
            os.replace(path + ".part", path)
        print(
            f"{min(start + args.shard, len(batches))}/{len(batches)} batches  {(time.time() - begin) / 60:.1f} min",
            flush=True,
        )


def read_shard(path):
    """The records in one shard; ValueError if the file is not a whole one."""
    try:
        shard = load_file(path)
        return {name: shard[name] for name in FIELDS}
    except (SafetensorError, KeyError, OSError):
        raise ValueError(f"{path} is not a whole trajectory shard: run the same train.py collect again") from None


def is_whole(path):
    """True if there is a readable shard at `path`."""
    try:
        return os.path.exists(path) and bool(read_shard(path))
    except ValueError:
        return False


def join(shards):
    """Several `collect`ed records as one, integers widened, with `start`, the first row of every pass."""
    data = {name: torch.cat([shard[name] for shard in shards]) for name in FIELDS}
    data = {name: value if name in REAL else value.long() for name, value in data.items()}
    data["start"] = data["count"].cumsum(0) - data["count"]
    return data


# --------------------------------------------------------------------------------------------- the order drafter


def order_batch(data, states, depth, noised=None):
    """Training examples: for passes `states` [N] with equally many (k) masked positions and path depths `depth` [N],
    the stale features [N, k, 72], positions [N, k], decided [N, k] (the first `depth` real commits), the label [N] and,
    where `noised` [N] says which of the recorded depths `depth` is, the noised statistics [N, k, 4]."""
    rows = data["start"][states][:, None] + torch.arange(int(data["count"][states[0]]))
    when = data["when"][rows]
    return (
        data["features"][rows].float(),
        data["position"][rows],
        when < depth[:, None],
        (when == depth[:, None]).int().argmax(1),
        None if noised is None else data["noised"][rows, noised[:, None]].float(),
    )


def start_from(drafter, folder):
    """Give `drafter` the weights of the one in `folder`, whether that one reads the noise or not; weights of the noise
    that it lacks start at zero."""
    before, own = load_drafter(folder), drafter.state_dict()
    if before.shape not in (drafter.shape, drafter.shape | {"noised": False}):
        raise ValueError(
            f"the drafter in {folder} has another shape, {before.shape}: give its --layers, --width and --noised"
        )
    weights = before.state_dict()
    missing = own["input.weight"].shape[1] - weights["input.weight"].shape[1]
    weights["input.weight"] = functional.pad(weights["input.weight"], (0, missing))
    drafter.load_state_dict(weights)


def train_order(data, held, folder, steps, seed, target=None, init=None, rate=1e-3, rows=4096, save_every=500, **shape):
    """Cross-entropy of q(s|y) on the next real commit, for random passes and path depths (section 3); resumable.

    Prints held-out accuracy as it goes and writes the drafter to `folder` at every save.
    """
    torch.manual_seed(seed)
    drafter = OrderDrafter(**shape)
    if init:
        start_from(drafter, init)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, weight_decay=0.01)
    os.makedirs(folder, exist_ok=True)
    resume = os.path.join(folder, "training.safetensors")
    about = {"shape": drafter.shape, "steps": steps, "seed": seed, "passes": len(data["count"])}
    about |= {"init": init, "rate": rate, "ranks": int(data["token_rank"].sum())}  # the data, by a sum
    done, begin = load_training(resume, drafter, [optimizer], about), time.time()
    groups = {k: (data["count"] == k).nonzero()[:, 0] for k in range(2, drafter.shape["block_size"] + 1)}
    weights = torch.tensor(
        [k * len(group) for k, group in groups.items()], dtype=torch.float
    )  # every batch has `rows` positions
    for step in range(done, steps):
        generator = torch.Generator().manual_seed(seed * 1000003 + step)
        optimizer.param_groups[0]["lr"] = rate * schedule(step, steps)
        for i in torch.multinomial(weights, 2, replacement=True, generator=generator).tolist():
            k = i + 2
            group, n = groups[k], rows // k // 2
            chosen = group[torch.randint(len(group), (n,), generator=generator)]
            depth, which = torch.randint(1, min(k, DEEPEST + 1), (n,), generator=generator), None
            if drafter.shape["noised"]:  # only at the depths that the noise was recorded for
                which = torch.randint(DEPTHS, (n,), generator=generator)
                depth = data["depth"][chosen, which]
            features, position, decided, label, noised = order_batch(data, chosen, depth, which)
            with torch.autocast("cpu", torch.bfloat16):
                logits = drafter(drafter.project(features, position), decided, noised)
            (functional.cross_entropy(logits.float(), label) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            accuracy = order_accuracy(drafter.eval(), held)
            drafter.train()
            print(
                f"step {step + 1}/{steps}  held-out next position {accuracy['drafter']:.3f}  "
                f"{(time.time() - begin) / 60:.1f} min",
                flush=True,
            )
            save_training(resume, drafter, [optimizer], step + 1, about)
            drafter.save(folder, target=target, accuracy=accuracy, trained_on=about | {"steps": step + 1})
    return drafter


@torch.inference_mode()
def order_accuracy(drafter, data, deepest=12, each=75):
    """Held-out next-position accuracy over path depths 1…12, beside the stale-confidence orders with the decoder's
    rounding and ties.

    drafter / drafter_top3: the trained model; stale_left: the most confident stale position that the true path has
    left; noised_left: the same by noised confidence; stale_rank: the position at stale rank d is the d-th next commit
    (needs no path).
    """
    hits = {"drafter": 0, "drafter_top3": 0, "stale_left": 0, "noised_left": 0, "stale_rank": 0}
    total, generator = 0, torch.Generator().manual_seed(0)
    for depth in range(1, deepest + 1):
        for k in range(depth + 1, drafter.shape["block_size"] + 1):
            states = ((data["count"] == k) & (data["depth"] == depth).any(1)).nonzero()[:, 0]
            states = states[torch.randperm(len(states), generator=generator)[:each]]
            if len(states) == 0:
                continue
            which = (data["depth"][states] == depth).int().argmax(1)
            features, position, decided, label, noised = order_batch(
                data, states, torch.full((len(states),), depth), which
            )
            logits = drafter(drafter.project(features, position), decided, noised)
            rank = data["rank"][data["start"][states][:, None] + torch.arange(k)]
            hits["drafter"] += (logits.argmax(1) == label).sum().item()
            hits["drafter_top3"] += (logits.topk(min(3, k), 1).indices == label[:, None]).any(1).sum().item()
            hits["stale_left"] += (rank.masked_fill(decided, 255).argmin(1) == label).sum().item()
            hits["noised_left"] += (noised[..., 3].masked_fill(decided, torch.inf).argmin(1) == label).sum().item()
            hits["stale_rank"] += (rank.gather(1, label[:, None])[:, 0] == depth).sum().item()
            total += len(states)
    return {name: round(count / total, 4) for name, count in hits.items()}


# ------------------------------------------------------------------------------------------- the calibrated graph


def count_sets(data, passes, longest):
    """How often each draft set was the set of the next k commits after the free one, k = 1…K, over `passes` passes.

    A set is a tuple of (position rank i, vocabulary rank j) pairs under that pass's conditionals, sorted; i counts the
    positions that are still masked in the root.
    """
    counts = Counter()
    for s in range(min(passes, len(data["count"]))):
        rows = slice(int(data["start"][s]), int(data["start"][s] + data["count"][s]))
        when, rank, token = (data[name][rows].tolist() for name in ("when", "rank", "token_rank"))
        left = sorted((r, w, j) for w, r, j in zip(when, rank, token) if w > 0)
        coming = sorted((w, i, j) for i, (_, w, j) in enumerate(left))[:longest]
        for k in range(1, len(coming) + 1):
            if coming[k - 1][2] == 255:  # not among the 32 most probable tokens
                break
            counts[tuple(sorted((i, j) for _, i, j in coming[:k]))] += 1
    return counts


def calibrate_graph(counts, inherit, size=64):
    """Spiffy (section 9): the most valuable connected draft sets, greedily, each behind one of its parents.

    Parents of a set: the set with one pair less. inherit: a set's value is its count plus its parents' counts; else its
    count alone, which is how often its node would be accepted [ours]. Returns `size` tuples of pairs.
    """
    parents = {pairs: [pairs[:n] + pairs[n + 1 :] for n in range(len(pairs))] for pairs in counts}
    value = {pairs: counts[pairs] + inherit * sum(counts[p] for p in parents[pairs]) for pairs in counts}
    chosen, known = [], {()}
    while len(chosen) < size:
        reachable = [pairs for pairs in value if pairs not in known and not known.isdisjoint(parents[pairs])]
        if not reachable:
            break
        chosen.append(max(reachable, key=value.get))
        known.add(chosen[-1])
    return chosen


# ------------------------------------------------------------------------------------------------------ commands


def shards_of(folder):
    """Sorted shard paths of a trajectory folder; at least two are needed, as the last tenth is held out."""
    paths = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    if len(paths) < 2:
        raise FileNotFoundError(
            f"{folder!r} holds {len(paths)} trajectory shards, 2 are needed: run train.py collect --out {folder} first"
        )
    return paths


def split(*folders):
    """(training records, held-out records) of trajectory folders: of each the last tenth of shards is held out."""
    parts = ([], [])
    for paths in map(shards_of, folders):
        held = max(1, len(paths) // 10)
        parts[0].extend(paths[:-held])
        parts[1].extend(paths[-held:])
    return tuple(join([read_shard(path) for path in part]) for part in parts)


def target_of(folders):
    """Name of the target whose trajectories the folders hold; None if they do not say, or differ."""
    names = set()
    for folder in folders:
        try:
            with open(os.path.join(folder, "about.json")) as file:
                names.add(json.load(file)["model"])
        except (OSError, ValueError, KeyError, TypeError):
            names.add(None)
    return names.pop() if len(names) == 1 else None


def run_order(args):
    """Train the order drafter and print its held-out accuracy beside the stale orders'."""
    if args.width % 16:
        raise ValueError(f"--width is {args.width}: give a multiple of 16, the width of an attention head")
    if not 0 < args.rate <= 1:
        raise ValueError(f"--rate is {args.rate}: give a learning rate above 0 and up to 1")
    data, test = split(*args.data)
    print(f"{len(data['count'])} training passes, {len(test['count'])} held-out ones", flush=True)
    drafter = train_order(
        data,
        test,
        args.out,
        args.steps,
        args.seed,
        target_of(args.data),
        args.init,
        args.rate,
        layers=args.layers,
        width=args.width,
        heads=args.width // 16,
        hidden=4 * args.width,
        noised=args.noised,
    )
    for name, value in order_accuracy(drafter.eval(), test).items():
        print(f"{name:>13} {value:.3f}")


def run_graph(args):
    """Calibrate the draft graph and write its sets as JSON."""
    data, _ = split(args.data)
    sets = calibrate_graph(count_sets(data, args.passes, args.longest), args.inherit)
    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    with open(args.out, "w") as file:
        json.dump({"passes": args.passes, "inherit": args.inherit, "sets": sets}, file)
    print(f"{len(sets)} draft sets in {args.out}, first {sets[:4]}")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    target = commands.add_parser("target", help="train the embedded target from scratch")
    target.add_argument("--out", default="runs/target")
    target.add_argument("--steps", type=positive, default=4600)
    collection = commands.add_parser("collect", help="collect draft-free trajectories of training prompts")
    collection.add_argument("--model", default="embedded")
    collection.add_argument("--out", default="runs/trajectories")
    collection.add_argument("--num-prompts", type=positive, default=3000)
    collection.add_argument("--shard", type=positive, default=10, help="batches per file")
    collection.add_argument("--batch", type=positive, default=16, help="equally long prompts decoded together at most")
    collection.add_argument("--gen-len", type=positive, default=160)
    collection.add_argument(
        "--prompts", help="a file with a prompt a line, text or JSON, in place of the embedded tasks"
    )
    collection.add_argument("--block-size", type=positive, help="where neither config.json nor the name says it")
    collection.add_argument("--cache", default="dual", choices=dlm.CACHES, help="of a full-attention target")
    collection.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], help="as in bench.py")
    collection.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    collection.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0], help="several take turns from shard to shard"
    )
    collection.add_argument("--confidence", default="sampled", choices=dlm.CONFIDENCES, help="at T > 0")
    check = commands.add_parser("accuracy", help="exact decoding's accuracy on held-out prompts")
    check.add_argument("--model", default="embedded")
    check.add_argument("--num-samples", type=positive, default=200, help="prompts per task")
    check.add_argument("--gen-len", type=positive, default=160)
    order = commands.add_parser("order", help="train the order drafter on trajectories")
    order.add_argument("--data", nargs="+", default=["runs/trajectories"], help="one folder of trajectories or several")
    order.add_argument("--out", default="runs/order")
    order.add_argument("--steps", type=positive, default=5000)
    order.add_argument("--layers", type=positive, default=3)
    order.add_argument("--width", type=positive, default=128)
    order.add_argument("--init", metavar="FOLDER", help="start from this order drafter")
    order.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    order.add_argument("--noised", action="store_true", help="also read statistics of the noised conditionals")
    graph = commands.add_parser("graph", help="calibrate the draft graph (Spiffy) on trajectories")
    graph.add_argument("--data", default="runs/trajectories")
    graph.add_argument("--out", default="runs/graph.json")
    graph.add_argument("--passes", type=positive, default=20000, help="draft-free passes to replay")
    graph.add_argument("--longest", type=positive, default=20, help="K: commits ahead that are counted")
    graph.add_argument("--inherit", action="store_true", help="add the parents' counts to a set's value")
    for command in (target, collection, check, order):
        command.add_argument("--seed", type=natural, default=0)
    return parser.parse_args(argv)


def positive(text):
    """A command-line number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def natural(text):
    """A command-line number from 0 to 2³¹ − 1."""
    if not (text.isascii() and text.isdigit()) or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {(1 << 31) - 1}")
    return int(text)


def main(argv=None):
    """Run one command of the command line; errors of input end it with one sentence."""
    args = parse(argv)
    try:
        if args.command == "target":
            train_target(args.out, args.steps, args.seed)
        elif args.command == "collect":
            run_collect(args)
        elif args.command == "accuracy":
            accuracy(args.model, args.num_samples, args.gen_len, args.seed)
        elif args.command == "order":
            run_order(args)
        else:
            run_graph(args)
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; run the same command again to go on")


if __name__ == "__main__":
    main()
