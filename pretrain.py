"""The embedded target, from scratch: a block-diffusion language model of 1.7 M parameters.

    python pretrain.py                               # about 35 minutes on 2 cores, resumable
    python pretrain.py accuracy --model runs/target  # exact decoding on held-out prompts

It learns block diffusion as SDAR does: a clean stream next to noisy copies of its blocks, each
noisy block seeing the clean blocks before it. Everything is seeded, and a killed training goes on
where it last saved and ends with the same weights; `fit` does this for every training here.

What this file leaves out: training a target at full size; what is fitted to a target's
trajectories (train.py).
"""

import command

if __name__ == "__main__":
    command.begin("loading torch and transformers")  # before the imports that take seconds

import argparse
import json
import math
import os
import sys
import tempfile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import dlm
import targets
import tasks
import trajectories
from decoder import Decoder

BLOCK = 32  # L
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<MASK>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---------------------------------------------------------------------------- tokenizer and model


def make_tokenizer(vocab_size=480):
    """A byte-pair tokenizer in the layout of SDAR's: Qwen2's word splitting, ChatML, [MASK]."""
    problems = [p for task in tasks.MIX for p in tasks.problems(task, "train", 4000, seed=1)]
    texts = [text for p in problems for text in (p.prompt, p.answer)]
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts + ["user\n", "assistant\n"] * 4000, trainer)
    learned = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"], merges=merges, extra_special_tokens=SPECIAL[1:], chat_template=CHAT
    )


def make_target(tokenizer, seed):
    """A randomly initialised SDAR of 1.7 M parameters: a Qwen3 with tied embeddings, whose output
    projections start at zero."""
    torch.manual_seed(seed)
    end, _, stop, mask = tokenizer.convert_tokens_to_ids(SPECIAL)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=48,
        max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=end, eos_token_id=end, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    config.block_size, config.mask_token_id, config.stop_token_ids = BLOCK, mask, [stop, end]
    config._attn_implementation = "block_units"
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


# ------------------------------------------------------------------------------- batches and loss


def encode_examples(tokenizer, n, seed):
    """`n` training examples, shuffled: (ids, n_blocks·L of them, first answer position).

    What is left of an answer's last block behind its stop token is filled up with end-of-text.
    """
    stop, end = tokenizer.encode(SPECIAL[2]), tokenizer.encode(SPECIAL[0])
    examples = []
    for task, share in tasks.MIX.items():
        drawn = tasks.problems(task, "train", math.ceil(n * share), seed)
        prompts = tokenizer([chat(tokenizer, p.prompt) for p in drawn])["input_ids"]
        answers = tokenizer([p.answer for p in drawn])["input_ids"]
        for prompt, answer in zip(prompts, answers):
            ids = prompt + answer + stop
            examples.append((ids + end * (-len(ids) % BLOCK), len(prompt)))
    np.random.default_rng(seed).shuffle(examples)
    return examples


def chat(tokenizer, prompt):
    """A user's message as the text that a target is given."""
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)


def batches(tokenizer, tokens_per_batch, seed):
    """Endless batches of examples with equally many blocks n: (ids [B, n·L], is_answer bool [B,
    n·L]). A row counts three times, as the loss reads it clean and in two noisy copies."""
    waiting = {}  # examples by length
    while True:
        for ids, start in encode_examples(tokenizer, 20000, seed):
            same = waiting.setdefault(len(ids), [])
            same.append((ids, start))
            if len(same) * len(ids) * 3 >= tokens_per_batch:
                rows = torch.tensor([ids for ids, _ in same])
                starts = torch.tensor([start for _, start in same])
                yield rows, torch.arange(rows.shape[1]) >= starts[:, None]
                same.clear()
        seed += 1


def noisy_copies(ids, is_answer, mask_id, generator):
    """Two complementary maskings of every answer block: (ids int64 [B, 2, T], masks bool [B, 2,
    T]). Mask rates are stratified over the batch's blocks; 13 % of the blocks are all masked.

    >>> ids, is_answer = torch.arange(64)[None], torch.arange(64)[None] >= 32
    >>> noisy, masks = noisy_copies(ids, is_answer, 99, torch.Generator().manual_seed(0))
    >>> torch.equal(masks[:, 0] ^ masks[:, 1], is_answer)  # each answer position in one of the two
    True
    >>> torch.equal(noisy == 99, masks)
    True
    """
    B, T = ids.shape
    blocks = B * (T // BLOCK)
    stratum = torch.randperm(blocks, generator=generator)
    rate = (stratum + torch.rand(blocks, generator=generator)) / blocks / 0.87
    rate = rate.clamp(max=1.0).view(B, -1, 1).expand(-1, -1, BLOCK).reshape(B, T)
    first = (torch.rand(B, T, generator=generator) < rate) & is_answer
    masks = torch.stack([first, ~first & is_answer], 1)  # [B, 2, T]
    return torch.where(masks, mask_id, ids[:, None]), masks


def target_loss(model, ids, is_answer, generator):
    """Cross-entropy on the masked positions of `clean | noisy | complementary`, each block seeing
    the clean blocks before it. ids int64 [B, T], is_answer bool [B, T]; a scalar."""
    T = ids.shape[1]
    n, mask_id = T // BLOCK, model.config.mask_token_id
    noisy, masks = noisy_copies(ids, is_answer, mask_id, generator)
    rows = torch.cat([ids, noisy.flatten(1)], 1)  # [B, 3·T]
    clean = torch.arange(n)
    block = clean.repeat(3)
    layout = dlm.Layout(BLOCK, context=clean, sees=block[:, None] > clean)
    positions = torch.arange(T).repeat(3)[None]
    out = model.model(input_ids=rows, position_ids=positions, layout=layout, use_cache=False)
    place = masks.flatten(1).nonzero(as_tuple=True)  # of the M masked positions
    hidden = out.last_hidden_state[:, T:][place]  # [M, h]
    # [MASK] is never a label
    logits = model.lm_head(hidden).index_fill(1, torch.tensor([mask_id]), -torch.inf)
    labels = ids[:, None].expand(-1, 2, -1).flatten(1)[place]
    return functional.cross_entropy(logits.float(), labels)


# --------------------------------------------------------------------------- any training of steps


def schedule(step, steps, warmup=100, decay=0.5):
    """The learning rate's factor: linear warm-up, constant, linear decay to zero over the last
    half.

    >>> [schedule(step, 1000) for step in (0, 99, 400, 750)]
    [0.01, 1.0, 1.0, 0.5]
    """
    return min((step + 1) / warmup, 1.0, (steps - step) / (steps * decay))


def fit(model, optimizers, learn, steps, path, about, save_every, saved=None):
    """Train for `steps` steps, or go on with a training that was killed and saved in `path`.

    learn(step) adds the gradients of a step and returns its loss. about: what the training depends
    on, a dict; the file of another is refused. saved(step) is told of every save.
    """
    command.check_writable(path)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    done, average = load_training(path, model, optimizers, about), None
    bar = command.progress("training", steps, "steps", done)
    with bar, command.resumable(lambda: os.path.exists(path)):
        for step in range(done, steps):
            for optimizer, peak in zip(optimizers, peaks):
                optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
            loss = learn(step)
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}: check data and --rate")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average = loss if average is None else 0.98 * average + 0.02 * loss
            bar.set_postfix_str(f"loss {average:.3f}", refresh=False)
            bar.update()
            if (step + 1) % save_every == 0 or step + 1 == steps:
                save_training(path, model, optimizers, step + 1, about)
                if saved:
                    saved(step + 1)


def save_training(path, model, optimizers, step, about):
    """Everything a killed training needs to go on, as one safetensors file (no pickle)."""
    tensors = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{i}.{j}.{key}"] = torch.as_tensor(value).clone()
    notes = {"step": str(step), "about": json.dumps(about)}
    command.write(path, lambda part: save_file(tensors, part, metadata=notes))


def load_training(path, model, optimizers, about):
    """Restore what `save_training` wrote; returns the steps done, 0 if there is no such file.

    ValueError for a broken file, and for one of a training that depends on other things than
    `about`.
    """
    if not os.path.exists(path):
        return 0
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata()
            step, before = int(notes["step"]), dict(json.loads(notes["about"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        message = f"{path} cannot be read ({command.reason(error)}): delete it to start again"
        raise ValueError(message) from None
    if before != about:
        names = command.differing(before, about)
        message = f"{path} belongs to another training (other {names}): choose another --out"
        raise ValueError(message)
    weights = {name[6:]: t for name, t in tensors.items() if name.startswith("model.")}
    model.load_state_dict(weights, strict=False)
    for i, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, j, key = name.split(".")
                state["state"].setdefault(int(j), {})[key] = tensor
        optimizer.load_state_dict(state)
    return step


# ------------------------------------------------------------------------------------- the target


def train_target(folder, steps, seed, tokens_per_batch=6144, save_every=250):
    """Train the embedded target into `folder`; with the same arguments a killed training goes on.
    A training that is finished writes the checkpoint again."""
    command.say("drawing texts for the tokenizer")
    tokenizer = make_tokenizer()
    model = make_target(tokenizer, seed)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    drawn = enumerate(batches(tokenizer, tokens_per_batch, seed))

    def learn(step):
        # a training that goes on draws the batches of its earlier steps too
        ids, is_answer = next(batch for i, batch in drawn if i == step)
        noise = torch.Generator().manual_seed(seed * 1000003 + step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = target_loss(model, ids, is_answer, noise)
        loss.backward()
        return loss.item()

    path = os.path.join(folder, "training.safetensors")
    about = {"steps": steps, "seed": seed, "code": command.code_id()}
    fit(model, optimizers, learn, steps, path, about, save_every)
    save_target(folder, model, tokenizer)


def save_target(folder, model, tokenizer):
    """Write a checkpoint in the hub's layout, each file whole or not at all. Raises ValueError."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="part") as part:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            for name in sorted(os.listdir(part)):
                os.replace(os.path.join(part, name), os.path.join(folder, name))
    except (OSError, SafetensorError) as error:
        message = f"{folder} cannot be written ({command.reason(error)}): make room, run it again"
        raise ValueError(message) from None


def accuracy(model, n, gen_len, seed):
    """Print the share of `n` held-out prompts of each task that exact decoding answers rightly."""
    targets.check_name(model)
    if not targets.is_embedded(model):
        raise ValueError(f"{model} is not a target that pretrain.py wrote: use bench.py for it")
    command.say("loading the target")
    target, decoder = targets.load(model), Decoder(gen_len=gen_len)
    for task in tasks.TASKS:
        together = {}  # problems and prompts, by the prompt's length
        for problem in tasks.problems(task, "test", n, seed):
            prompt = target.encode(problem.prompt)
            together.setdefault(len(prompt), []).append((problem, prompt))
        right = written = 0
        with command.progress(task, n, "prompts") as bar:
            for same in together.values():
                problems, prompts = zip(*same)
                canvases = trajectories.lockstep(target, decoder, prompts)
                for problem, canvas in zip(problems, canvases):
                    right += tasks.score(problem, target.decode(canvas.answer()))
                    written += len(canvas.written())
                bar.update(len(same))
        print(f"{task:12} {right}/{n} right, {written / n:.1f} positions an answer", flush=True)


# ------------------------------------------------------------------------------------ the commands


def parse(argv=None):
    """The options; `accuracy`, the second command, comes first on the line."""
    argv = sys.argv[1:] if argv is None else argv
    checks = argv[:1] == ["accuracy"]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="second command: pretrain.py accuracy --help",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    if checks:
        parser.add_argument("command", help="exact decoding's accuracy on held-out prompts")
        parser.add_argument("--model", default="embedded")
        parser.add_argument(
            "--num-samples", type=command.positive, default=200, help="prompts per task"
        )
        parser.add_argument("--gen-len", type=command.positive, default=160)
    else:
        parser.set_defaults(command="train")
        parser.add_argument("--out", default="runs/target")
        parser.add_argument("--steps", type=command.positive, default=4600)
    parser.add_argument("--seed", type=command.natural, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    if args.command == "accuracy":
        return accuracy(args.model, args.num_samples, args.gen_len, args.seed)
    train_target(args.out, args.steps, args.seed)
    print(f"the target is in {args.out}: python bench.py --model {args.out}")


if __name__ == "__main__":
    command.run(main)
