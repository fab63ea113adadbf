"""The order drafter by hand: every column of what it reads, what the noise shows it, the network in
plain NumPy, its files, and how many passes the shipped drafters need. Paper sections 3 and 6.

Left out: the trees that q grows (test_ddtree.py), training (test_train.py).

    python -m pytest test_drafter.py          # under a minute
"""

import json
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ddtree
import dlm
import drafter as drafting
import targets
import tasks
import verify
from decoder import CONFIDENCES, Decoder, gumbel
from test_exactness import one_sentence

M = 99  # [MASK]
# a block of 10, three positions of it decided; conditionals over 5 ids at the seven others
STATE = (M, M, M, 7, 7, M, M, M, M, 7)
POSITIONS = [0, 1, 2, 5, 6, 7, 8]
PROBS = [
    [0.5, 0.25, 0.125, 0.125, 0.0],
    [0.125, 0.75, 0.0625, 0.0625, 0.0],
    [0.25, 0.125, 0.5, 0.125, 0.0],
    [0.25, 0.1875, 0.1875, 0.1875, 0.1875],
    [0.0, 0.0, 0.0, 0.75, 0.25],
    [0.0, 0.0, 1.0, 0.0, 0.0],
    [0.3125, 0.25, 0.1875, 0.125, 0.125],
]
RANKS = [3, 1, 4, 6, 2, 0, 5]  # .75 and .75, .5 and .5 tie: the lower position first
DISTANCES = [3, 2, 1, 1, 2, 2, 1]  # to positions 3, 3, 3, 4, 4, 9, 9


def stale_of(probs=PROBS, state=STATE, block=2, dtype=torch.float64, **settings):
    log_probs = torch.tensor(probs, dtype=dtype).log()
    return drafting.Stale(Decoder(**settings), state, M, block, log_probs)


def features_by_hand(p, rank, offset, distance, k, L):
    """The 72 stale features of one position."""
    best = sorted(p, reverse=True)[:32] + [0.0] * max(0, 32 - len(p))
    logs = [math.log(max(x, 1e-9)) / 10 for x in best]
    entropy = sum(-x * math.log(x) for x in p if x)
    statistics = [best[0], best[0] - best[1], entropy, sum(p) - sum(best)]
    return best + logs + statistics + [rank / L, offset / L, distance / L, k / L]


def check_features(stale, probs, ranks, distances):
    features, k, L = stale.features, len(probs), len(stale.state)
    assert features.shape == (k, 72) and features.dtype == torch.float32
    for j, row in enumerate(features.tolist()):
        right = features_by_hand(probs[j], ranks[j], stale.positions[j], distances[j], k, L)
        assert row == pytest.approx(right, abs=2e-6), (j, [a - b for a, b in zip(row, right)])


# ------------------------------------------------------------------------ what the drafter may know


@pytest.mark.parametrize("settings", (
    {},
    {"precision": "float32"},
    # the stale features are those of the conditionals themselves, whatever is drawn, and how
    {"temperature": 2.0, "seed": 5, "tempered": True, "top_k": 2, "confidence": "entropy"},
    {"rule": "entropy", "confidence": "margin"},
))  # fmt: skip
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_all_72_columns(dtype, settings):
    """32 falling probabilities, 0 where V < 32; their logs, not under log 1e-9, divided by 10; 8
    statistics."""
    stale = stale_of(dtype=dtype, **settings)
    assert stale.positions == POSITIONS
    check_features(stale, PROBS, RANKS, DISTANCES)


@pytest.mark.parametrize("V", (2, 32, 33, 40))
def test_columns_of_other_vocabularies(V):
    """The 32 likeliest of V ids, wherever they stand, and the rest as the tail; in a block where
    nothing is decided the distance is L."""
    total, L = V * (V + 1) / 2, 4
    # every row is the numbers 1 … V over their sum, in another order (3 is prime to all V but 33)
    step = 7 if V == 33 else 3
    probs = [[((v * step + 5 * j) % V + 1) / total for v in range(V)] for j in range(L)]
    check_features(stale_of(probs, (M,) * L), probs, range(L), [L] * L)


def test_logs_have_a_floor():
    """log 1e-9 / 10 stands for everything less likely, also for what is impossible."""
    row = stale_of([[1 - 1e-12, 1e-12, 0.0]], (M, 7)).features[0].tolist()
    assert row[32:36] == pytest.approx([0.0, -2.0723266, -2.0723266, -2.0723266])


def test_nearest_decided():
    """To the nearest on either side, float32; L where there is none."""
    assert drafting.nearest_decided([1, 2, 3, 6, 7], 8).tolist() == [1, 2, 1, 1, 2]
    assert drafting.nearest_decided([0, 1], 2).tolist() == [2, 2]
    assert drafting.nearest_decided([0, 1, 2], 9).tolist() == [3, 2, 1]
    assert drafting.nearest_decided([], 4).shape == (0,)
    assert drafting.nearest_decided([0], 2).dtype == torch.float32


def test_ranks_follow_the_rounded_confidence():
    """Two that bfloat16 cannot tell apart tie, and the lower position goes first."""
    near, state = [[0.9985, 0.0015], [0.5, 0.5], [0.9999, 0.0001]], (M, M, M, 7)
    assert stale_of(near, state).features[:, 68].tolist() == [0.0, 0.5, 0.25]
    assert stale_of(near, state).candidates(1).ranking == [0, 2, 1]
    exact = stale_of(near, state, precision="float32")
    assert exact.features[:, 68].tolist() == [0.25, 0.5, 0.0]
    assert exact.candidates(1).ranking == [2, 0, 1]


def test_candidates_without_noise():
    """The likeliest tokens and p(v) of each, zeros where V < 32; the confidence at the decoder's
    precision; the same whatever the step."""
    probs = [[0.25, 0.15, 0.6], [0.7, 0.2, 0.1]]
    stale = stale_of(probs, (M, 7, M))
    seen = stale.candidates(1)
    assert [tokens[:3] for tokens in seen.tokens] == [[2, 0, 1], [0, 1, 2]]
    assert all(tokens[3:] == [0] * 29 for tokens in seen.tokens)
    assert seen.values.shape == (2, 32) and seen.values.dtype == np.float32
    assert seen.values[:, :3] == pytest.approx(np.array([[0.6, 0.25, 0.15], [0.7, 0.2, 0.1]]))
    assert (seen.values[:, 3:] == 0).all()
    assert seen.confidence.tolist() == [0.6015625, 0.69921875]  # .6 and .7 in bfloat16
    assert seen.confidence.dtype == torch.float64 and seen.ranking == [1, 0]
    assert stale.candidates(2) is seen
    exact = stale_of(probs, (M, 7, M), precision="float32").candidates(1)
    assert exact.confidence.tolist() == pytest.approx([0.6, 0.7], abs=1e-12)


def test_candidates_of_a_wide_vocabulary():
    """32 of 40 ids, the likeliest first."""
    p = [((v * 3) % 40 + 1) / 820 for v in range(40)]
    seen = stale_of([p], (M,)).candidates(0)
    assert seen.tokens == [sorted(range(40), key=lambda v: -p[v])[:32]]
    assert seen.values[0] == pytest.approx(sorted(p, reverse=True)[:32])


def drawn_by_hand(p, T, seed, block, step, position):
    """T·(log p_T(v) + G_v) and its softmax, p_T the tempered law: two lists over the ids."""
    names = (torch.tensor([n]) for n in (block, step, position))
    G = gumbel(seed, *names, len(p))[0].tolist()
    law = [x ** (1 / T) for x in p]
    score = [T * (math.log(x / sum(law)) + g) if x else -math.inf for x, g in zip(law, G)]
    shares = [math.exp(x - max(score)) for x in score]
    return score, [x / sum(shares) for x in shares]


def confidence_by_hand(kind, p, token):
    first, second = sorted(p, reverse=True)[:2]
    entropy = sum(-x * math.log(x) for x in p if x)
    return {"sampled": p[token], "distribution": first, "margin": first - second,
            "entropy": math.exp(-entropy)}[kind]  # fmt: skip


@pytest.mark.parametrize("T", (0.5, 2.0))
@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("noise", ("step", "position"))
def test_what_the_noise_shows(noise, kind, T):
    """The tokens by T·(log p + G), G of that block, step and position; p(v) is its softmax; the
    confidence is read from the conditionals themselves; the 4 noised statistics in their
    columns."""
    stale = stale_of(temperature=T, seed=7, noise=noise, confidence=kind, precision="float32")
    firsts = set()
    for step in (3, 4, 7):
        seen, columns = stale.candidates(step), stale.noised(step)
        assert columns.shape == (7, 4) and columns.dtype == torch.float32
        named = step if noise == "step" else 0
        confidences, rows = [], []
        for j, p in enumerate(PROBS):
            score, share = drawn_by_hand(p, T, 7, 2, named, POSITIONS[j])
            possible = [v for v in range(5) if p[v]]
            order = sorted(possible, key=lambda v: -score[v])
            assert seen.tokens[j][: len(order)] == order
            shares = [share[v] for v in order]
            assert seen.values[j, : len(order)] == pytest.approx(shares, rel=1e-4)
            assert not seen.values[j, len(order) :].any()
            confidence = confidence_by_hand(kind, p, order[0])
            confidences.append(confidence)
            rows.append([confidence, share[order[0]], float(order[0] == p.index(max(p)))])
        ranking = sorted(range(7), key=lambda j: (-round(confidences[j], 12), j))
        assert seen.confidence.tolist() == pytest.approx(confidences)
        assert seen.ranking == ranking
        right = [row + [ranking.index(j) / 10] for j, row in enumerate(rows)]
        assert columns.numpy() == pytest.approx(np.array(right), rel=1e-4)
        firsts.add(tuple(tokens[0] for tokens in seen.tokens))
    assert len(firsts) > 1 if noise == "step" else len(firsts) == 1


def test_what_the_noise_may_draw():
    """Tokens that top_k excludes are never foreseen; another block or seed is other noise."""
    few = stale_of(temperature=2.0, top_k=1).candidates(3)
    assert [tokens[0] for tokens in few.tokens] == [0, 1, 2, 0, 3, 2, 0]
    assert few.values[:, 0] == pytest.approx(1.0) and not few.values[:, 1:].any()
    first = lambda **settings: stale_of(temperature=2.0, **settings).candidates(3).values.tolist()
    assert first(block=2, seed=0) != first(block=3, seed=0) != first(block=3, seed=1)


def test_noised_statistics_without_noise():
    """At T = 0: confidence, p of the likeliest, 1, and the rank over L."""
    columns = stale_of().noised(3).tolist()
    tops = [max(p) for p in PROBS]
    right = [[top, top, 1.0, rank / 10] for top, rank in zip(tops, RANKS)]
    assert columns == [pytest.approx(row) for row in right]


def test_steps():
    """A state's step counts what is decided, on the path too; each step is drawn once."""
    stale = stale_of()
    decided = np.zeros(7, dtype=bool)
    assert stale.step(decided) == 3
    decided[[0, 5]] = True
    assert stale.step(decided) == 5
    assert stale.candidates(3) is stale.candidates(5)
    warm = stale_of(temperature=1.0)
    assert warm.candidates(3) is not warm.candidates(4) and warm.candidates(3) is warm.candidates(3)
    table = stale_of(temperature=1.0, noise="position")
    assert table.candidates(3) is table.candidates(4)


# ------------------------------------------------------------------------------------- the network


def small_drafter(noised=False, seed=0, block_size=32):
    """Random weights, biases and norms too, so that every one of them shows."""
    torch.manual_seed(seed)
    shape = dict(width=16, layers=2, heads=2, hidden=24, block_size=block_size, noised=noised)
    reader = drafting.OrderDrafter(**shape)
    with torch.no_grad():
        for name, weight in reader.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.4 + ("norm" in name and "bias" not in name))
    return reader.eval()


def logits_by_hand(reader, features, positions, heads=2, layers=2):
    """The network on features [k, F] in float64: input and position table, pre-norm encoder with
    ReLU, a last norm, and the head with the exact GELU. Returns [k]."""
    w = {name: tensor.detach().double().numpy() for name, tensor in reader.state_dict().items()}
    linear = lambda name, x: x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(name, x):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return x * w[name + ".weight"] + w[name + ".bias"]

    def attention(name, x):
        qkv = x @ w[name + ".in_proj_weight"].T + w[name + ".in_proj_bias"]
        out = []
        for q, k, v in zip(*(np.split(part, heads, 1) for part in np.split(qkv, 3, 1))):
            score = np.exp(q @ k.T / math.sqrt(q.shape[1]))
            out.append(score / score.sum(1, keepdims=True) @ v)
        return linear(name + ".out_proj", np.concatenate(out, 1))

    x = linear("input", features) + w["position.weight"][positions]
    for i in range(layers):
        name = f"encoder.layers.{i}."
        x = x + attention(name + "self_attn", norm(name + "norm1", x))
        hidden = np.maximum(linear(name + "linear1", norm(name + "norm2", x)), 0)
        x = x + linear(name + "linear2", hidden)
    x = linear("head.0", norm("encoder.norm", x))
    x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return linear("head.2", x)[:, 0]


@pytest.mark.parametrize("noised", (False, True))
@pytest.mark.parametrize("T", (0.0, 2.0))
def test_q_by_hand(T, noised):
    """What the network reads: the 72 stale features; committed on the path? and depth over the
    drafter's block size; at its own step, the 4 noised statistics; the position table by offset in
    the block. Softmax over what is left of the block."""
    reader = small_drafter(noised)
    stale = stale_of(temperature=T, seed=3)
    decided = np.zeros((3, 7), dtype=bool)
    decided[0, [1, 4]] = decided[1, [0, 6]] = decided[2, [2, 3]] = True
    q = reader.order(stale)(decided)
    assert q.shape == (3, 7) and q.dtype == np.float32
    for row, taken in zip(q, decided):
        path = np.stack([taken, np.full(7, 2 / 32)], 1)
        parts = [stale.features.numpy(), path] + [stale.noised(3 + 2).numpy()] * noised
        logits = logits_by_hand(reader, np.concatenate(parts, 1).astype(float), POSITIONS)
        weight = np.where(taken, 0, np.exp(logits))
        assert row == pytest.approx(weight / weight.sum(), abs=1e-5)
        assert (row[taken] == 0).all() and row.sum() == pytest.approx(1, abs=1e-6)
    assert q.max(1).min() > 0.2  # the example is not flat


def test_rows_of_a_call_are_independent():
    """q of a state does not depend on the states asked for beside it, nor on earlier calls."""
    reader, stale = small_drafter(True), stale_of(temperature=1.0)
    decided = np.eye(7, dtype=bool)
    order = reader.order(stale)
    together = order(decided)
    order(np.zeros((1, 7), dtype=bool))
    for row, right in zip(decided, together):
        assert order(row[None])[0] == pytest.approx(right, abs=1e-6)


def test_all_but_one_decided():
    """The last position left has all of q."""
    decided = np.ones((1, 7), dtype=bool)
    decided[0, 4] = False
    assert small_drafter().order(stale_of())(decided).tolist() == [[0, 0, 0, 0, 1, 0, 0]]


def test_features_are_read_once_and_only_when_asked_for(monkeypatch):
    """What a round does not change is computed at its first call, and not again."""
    reader, projections = small_drafter(), []
    project = reader.project
    monkeypatch.setattr(reader, "project", lambda *a: projections.append(1) or project(*a))
    stale = stale_of()
    order = reader.order(stale)
    assert not projections and "features" not in vars(stale)
    for _ in range(3):
        order(np.zeros((1, 7), dtype=bool))
    assert len(projections) == 1


def test_size_and_shape():
    """The paper's 0.62 M: 617,089 with a 32×128 position table and a 128→64→1 head; the 4 columns
    of the noise add 4·128."""
    sizes = [sum(p.numel() for p in drafting.OrderDrafter(noised=n).parameters()) for n in (0, 1)]
    assert sizes == [617_089, 617_601]
    reader = drafting.OrderDrafter()
    assert reader.about == {} and reader.shape == {
        "width": 128, "layers": 3, "heads": 8, "hidden": 512, "block_size": 32, "noised": False,
    }  # fmt: skip
    assert (drafting.TOP, drafting.STALE_FEATURES) == (32, 72)
    assert len(reader.encoder.layers) == 3 and reader.encoder.layers[0].self_attn.num_heads == 8
    assert reader.input.weight.shape == (128, 74) and reader.position.weight.shape == (32, 128)


def test_training_is_without_dropout():
    """In training mode as in use: the same logits every time."""
    reader, stale = small_drafter(), stale_of()
    decided = np.zeros((1, 7), dtype=bool)
    right = reader.order(stale)(decided)
    reader.train()
    assert reader.order(stale)(decided) == pytest.approx(right, abs=1e-6)


def test_logits_of_committed_positions():
    """−inf where committed, finite elsewhere; one projection serves many states; in float64 too."""
    reader = small_drafter().double()
    decided = torch.eye(7, dtype=torch.bool)[:3]
    x = reader.project(stale_of().features.double(), torch.tensor(POSITIONS))
    assert x.shape == (7, 16)
    logits = reader(x[None], decided)
    assert logits.shape == (3, 7) and logits.dtype == torch.float64
    assert logits[decided].eq(-math.inf).all() and logits[~decided].isfinite().all()


# ---------------------------------------------------------------------------------------- its files


@pytest.mark.parametrize("noised", (False, True))
def test_saving_and_loading(tmp_path, noised):
    """What is loaded gives the q of what was saved, bit for bit, whatever its shape; and tells what
    it was trained on."""
    saved = small_drafter(noised, seed=3)
    saved.save(str(tmp_path / "new"), steps=7, trained_on="nothing")
    assert sorted(os.listdir(tmp_path / "new")) == ["config.json", "model.safetensors"]
    loaded = drafting.load_drafter(str(tmp_path / "new"))
    assert loaded.shape == saved.shape == {
        "width": 16, "layers": 2, "heads": 2, "hidden": 24, "block_size": 32, "noised": noised,
    }  # fmt: skip
    assert loaded.about == {"steps": 7, "trained_on": "nothing"} and not loaded.training
    stale, decided = stale_of(temperature=1.0), np.eye(7, dtype=bool)
    assert (loaded.order(stale)(decided) == saved.order(stale)(decided)).all()


def edit_weights(change):
    """A breaker of folders: rewrites model.safetensors with its dict of tensors changed."""

    def edit(folder):
        path = os.path.join(folder, "model.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def edit_config(change):
    """A breaker of folders: rewrites config.json, as bytes or with its dict changed."""

    def edit(folder):
        path = os.path.join(folder, "config.json")
        with open(path, "rb") as file:
            config = json.loads(file.read())
        new = change if isinstance(change, bytes) else json.dumps(change(config)).encode()
        with open(path, "wb") as file:
            file.write(new)

    return edit


def not_finite(value):
    def change(tensors):
        tensors["head.2.bias"][0] = value

    return edit_weights(change)


@pytest.mark.parametrize("edit, named", [
    (edit_weights(lambda t: t.pop("position.weight")), "position.weight"),
    (edit_weights(lambda t: t.update(extra=torch.zeros(2))), "extra"),
    (edit_weights(lambda t: t.update({"head.2.bias": torch.zeros(3)})), "head.2.bias"),
    (not_finite(math.nan), "not finite"),
    (not_finite(math.inf), "not finite"),
    (lambda folder: os.truncate(os.path.join(folder, "model.safetensors"), 1000), "rror"),
    (lambda folder: os.remove(os.path.join(folder, "model.safetensors")), "safetensors"),
    (edit_config(b"{"), "JSON"),
    (edit_config(b"[1]"), "JSON"),
    (edit_config(b""), "JSON"),
    (edit_config(b"\xff\xfe{"), "utf-8"),
    (edit_config(lambda config: {"steps": 3}), "shape"),
    (edit_config(lambda config: {"shape": 5}), "cannot be loaded"),
    (edit_config(lambda config: {"shape": {**config["shape"], "heads": 7}}), "cannot be loaded"),
    (edit_config(lambda config: {"shape": {**config["shape"], "wide": 7}}), "wide"),
    (edit_config(lambda config: {"shape": {**config["shape"], "layers": 1}}), "layers.1"),
    (edit_config(lambda config: {"shape": {**config["shape"], "noised": True}}), "input.weight"),
])  # fmt: skip
def test_broken_drafters_are_refused(tmp_path, edit, named):
    """A drafter that is not what was saved is refused with one sentence that names the fault, not
    half loaded."""
    small_drafter().save(str(tmp_path))
    drafting.load_drafter(str(tmp_path))
    edit(str(tmp_path))
    with pytest.raises(ValueError, match=named) as error:
        drafting.load_drafter(str(tmp_path))
    assert one_sentence(error) and str(tmp_path) in str(error.value)


def test_a_config_with_a_byte_order_mark_is_read(tmp_path):
    small_drafter().save(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert drafting.load_drafter(str(tmp_path)).shape["hidden"] == 24


def test_a_missing_drafter_is_refused(tmp_path):
    """A folder without a drafter is named in one sentence."""
    for folder in (str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(FileNotFoundError, match="no drafter in") as error:
            drafting.load_drafter(folder)
        assert one_sentence(error) and repr(folder) in str(error.value)


def test_a_save_that_fails_keeps_the_old_drafter(tmp_path, monkeypatch):
    """A full disk is one sentence, and what was there can still be loaded."""
    small_drafter(seed=1).save(str(tmp_path))
    right = drafting.load_drafter(str(tmp_path)).state_dict()

    def full(tensors, path):
        with open(path, "wb") as file:
            file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafting, "save_file", full)
    with pytest.raises(ValueError, match="No space left on device"):
        small_drafter(seed=2).save(str(tmp_path))
    kept = drafting.load_drafter(str(tmp_path)).state_dict()
    assert all(kept[name].equal(weight) for name, weight in right.items())
    assert len(os.listdir(tmp_path)) == 2


# ------------------------------------------------------------------------- the shipped drafters


def shipped():
    """The drafts with what ships, {name: draft(stale, canvas, budget)}."""
    folder = targets.EMBEDDED.replace("target", "")
    order, noised = (drafting.load_drafter(folder + name) for name in ("order", "order-noised"))
    return {
        "chain": ddtree.chain,
        "tree": ddtree.confidence_tree,
        "graph": partial(ddtree.graph, sets=ddtree.load_graph(folder + "graph.json")),
        "spot": partial(ddtree.spot, drafter=order),
        "spot-floor": partial(ddtree.spot, drafter=order, floor=0.2),
        "spot-noised": partial(ddtree.spot, drafter=noised),
    }


@pytest.mark.parametrize("T", (0.0, 2.0))
def test_passes_of_the_shipped_drafters(T):
    """Denoising passes over two prompts a task, 96 new tokens, D = 8, float32: as they were when
    the drafters were trained. A drafter that reads a wrong column still writes the right text, in
    more passes. With the accepted nodes they are the draft-free passes, one a token."""
    target, drafts = targets.load("embedded"), shipped()
    decoder = Decoder(gen_len=96, temperature=T)
    prompts = [p.prompt for task in tasks.TASKS for p in tasks.problems(task, "test", 2, seed=0)]
    passes, texts = dict.fromkeys(PINNED[T], 0), {}
    for prompt in prompts:
        for name in PINNED[T]:
            draft = partial(drafts[name], budget=8)
            found = verify.speculate(target, decoder, target.encode(prompt), draft)
            assert found.written == texts.setdefault(prompt, found.written), name
            assert found.passes["denoise"] + sum(found.accepted) == len(found.written)
            passes[name] += found.passes["denoise"]
    assert sum(map(len, texts.values())) == 333
    assert passes == PINNED[T]


PINNED = {
    0.0: {"chain": 94, "tree": 117, "graph": 93, "spot": 65, "spot-floor": 80, "spot-noised": 66},
    2.0: {"chain": 105, "tree": 123, "graph": 105, "spot": 87, "spot-noised": 85},
}  # fmt: skip


@pytest.mark.parametrize("change", ("layers", "width", "type"))
def test_drafters_of_odd_sizes_and_types(tmp_path, change):
    """Sizes far beyond the file's are refused at once, and weights of another type do not load."""
    folder = str(tmp_path)
    drafting.OrderDrafter(width=16, layers=1, heads=2, hidden=16).save(folder)
    if change == "type":
        weights = load_file(folder + "/model.safetensors")
        weights = {name: tensor.int() for name, tensor in weights.items()}
        save_file(weights, folder + "/model.safetensors")
    else:
        shape = json.loads((tmp_path / "config.json").read_text())["shape"] | {change: 10**7}
        (tmp_path / "config.json").write_text(json.dumps({"shape": shape}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        drafting.load_drafter(folder)


@pytest.mark.parametrize("setting", (
    {"temperature": "1"}, {"top_p": None}, {"value": "x"}, {"rule": 3}, {"rule": ["exact"]},
))  # fmt: skip
def test_settings_of_odd_types(setting):
    with pytest.raises(ValueError, match="give a number|unknown rule"):
        Decoder(**setting)


def test_text_that_is_no_utf8():
    """As Python hands over bytes of another encoding on the command line."""
    with pytest.raises(ValueError, match="UTF-8"):
        targets.load("embedded").encode("caf\udce9")
