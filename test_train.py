"""Tests of training: small targets from scratch, trajectories, and what is fitted to them.

What a record, an example or a count must hold is worked out by hand on a few positions; commands
run on the shipped target with a handful of prompts and steps.

    python -m pytest test_train.py
"""

import contextlib
import doctest
import json
import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import command
import dlm
import drafter as drafting
import pretrain
import targets
import tasks
import train
import trajectories
from decoder import Decoder

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKPOINTS = os.path.join(HERE, "checkpoints")
FEW = ["--num-prompts", "3", "--shard", "1", "--gen-len", "33"]  # 5 prompts, 5 shards
TINY = ["--steps", "2", "--layers", "1", "--width", "16"]
MASK = 99


@pytest.fixture(scope="module")
def target():
    return targets.load("embedded")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A few small shards of trajectories."""
    folder = str(tmp_path_factory.mktemp("trajectories"))
    trajectories.main([*FEW, "--out", folder])
    return folder


@pytest.fixture(scope="module")
def data(records):
    return trajectories.join([trajectories.read_shard(p) for p in trajectories.paths_in(records)])


def ended(main, argv):
    """What `command.run` says when it ends main(argv) with an error or Ctrl-C, in one line."""
    with pytest.raises(SystemExit) as stop:
        command.run(main, argv)
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code.strip()
    return stop.value.code


@contextlib.contextmanager
def small_disk(most):
    """No file can grow over `most` bytes: the write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_doctests():
    for module in (command, pretrain, trajectories, train):
        assert doctest.testmod(module).failed == 0
    assert doctest.testmod(train).attempted >= 12


# -------------------------------------------------------------------------- records, by hand


def recorded(states, probs, final, decoder=Decoder(), partial=(), origin=0):
    """The records of one block that goes through `states` to `final`; probs: per pass {position:
    {token: p}} over 40 ids. The prompt is 5 tokens long, and the block begins at position 8."""
    target = SimpleNamespace(mask_id=MASK)
    canvas = SimpleNamespace(target=target, block=2, prompt_len=5, origin=origin)
    canvas.is_complete = lambda state: MASK not in state
    recorder = trajectories.Recorder(decoder)
    for n, (state, known) in enumerate(zip(states, probs)):
        rows = torch.full((len(known), 40), 1e-6)
        for row, tokens in zip(rows, known.values()):
            for token, p in tokens.items():
                row[token] = p
        log_probs = (rows / rows.sum(-1, keepdim=True)).log()
        out = SimpleNamespace(unit=lambda u, kept=log_probs: kept, partial=n in partial)
        recorder(0, canvas, state, (states + [final])[n + 1], out, 0)
    return recorder.records


STATES = [(MASK, 1, MASK, MASK), (MASK, 1, 3, MASK), (0, 1, 3, MASK)]
PROBS = [
    {0: {2: 0.5, 0: 0.3, 1: 0.2}, 2: {3: 0.9, 4: 0.1}, 3: {4: 0.7, 1: 0.2, 5: 0.1}},
    {0: {0: 0.6, 2: 0.4}, 3: {4: 0.5, 5: 0.4, 1: 0.1}},
    {3: {5: 0.8, 4: 0.2}},
]
FINAL = (0, 1, 3, 5)


def test_a_record_by_hand():
    """Which positions were open, when each commits after this pass, where it stood by confidence,
    and at which rank its token was."""
    first, second, third = recorded(STATES, PROBS, FINAL)
    values = {name: first[name].tolist() for name in ("position", "when", "rank", "token_rank")}
    right = {"position": [0, 2, 3], "when": [1, 0, 2], "rank": [2, 0, 1], "token_rank": [1, 0, 2]}
    assert values == right
    values = {name: second[name].tolist() for name in values}
    assert values == {"position": [0, 3], "when": [0, 1], "rank": [0, 1], "token_rank": [0, 1]}
    values = {name: third[name].tolist() for name in values}
    assert values == {"position": [3], "when": [0], "rank": [0], "token_rank": [0]}
    counts = [record["count"].item() for record in (first, second, third)]
    # the prompt ends in block 1, so block 2 is the answer's block 1; it is its block 2 where blocks
    # begin at the prompt's end
    assert counts == [3, 2, 1] and first["block"].item() == 1
    assert recorded(STATES, PROBS, FINAL, origin=5)[0]["block"].item() == 2


def test_a_token_that_no_draft_can_name():
    """Of the 32 likeliest the last has rank 31; the next one has none."""
    falling = {token: 0.9**token for token in range(40)}
    for token, rank in ((31, 31), (32, 255)):
        (record,) = recorded([(MASK, 1)], [{0: falling}], (token, 1))
        assert record["token_rank"].tolist() == [rank]


def test_a_pass_that_cannot_be_read_counts_all_the_same():
    """A partial pass leaves no record, but the passes after it keep their places."""
    second, third = recorded(STATES, PROBS, FINAL, partial=(0,))
    assert second["when"].tolist() == [0, 1] and third["when"].tolist() == [0]


def test_noised_statistics_are_those_of_the_recorded_depths():
    """A record's noise is that of the steps behind it, and its depths lie on the path."""
    decoder = Decoder(temperature=1.0, seed=3)
    for n, record in enumerate(recorded(STATES, PROBS, FINAL, decoder)):
        k = 3 - n
        rows = torch.full((k, 40), 1e-6)
        for row, tokens in zip(rows, PROBS[n].values()):
            for token, p in tokens.items():
                row[token] = p
        log_probs = (rows / rows.sum(-1, keepdim=True)).log()
        stale = drafting.Stale(decoder, STATES[n], MASK, 2, log_probs)
        assert torch.equal(record["features"], stale.features)
        assert record["noised"].shape == (k, 4, 4)
        for i, depth in enumerate(record["depth"][0].tolist()):
            assert 1 <= depth < max(k, 2)
            assert torch.equal(record["noised"][:, i], stale.noised(4 - k + depth))


def test_collected_passes_are_the_draft_free_loops_own(target):
    """Many prompts in one batch: the texts are those of the loop, and so is every step."""
    drawn = tasks.problems("code", "train", 10)
    # equally long, and the second answer ends a block before the others
    together = [target.encode(drawn[i].prompt) for i in (2, 3, 9)]
    decoder = Decoder(gen_len=160)
    steps, right = {0: [], 1: [], 2: []}, {0: [], 1: [], 2: []}

    def watch(kept, i, canvas, state, following, out, unit):
        kept[i].append((canvas.block, state, following, out.unit(unit).exp()))

    canvases = trajectories.lockstep(target, decoder, together, partial(watch, steps))
    results = [
        dlm.generate(target, decoder, prompt, watch=partial(watch, right, i))
        for i, prompt in enumerate(together)
    ]
    for i in range(3):
        for (*here, probs), (*there, right_probs) in zip(steps[i], right[i], strict=True):
            assert here == there and torch.allclose(probs, right_probs, atol=1e-4)
    assert len({len(result.written) for result in results}) > 1
    assert [canvas.written() for canvas in canvases] == [result.written for result in results]
    told = []
    data = trajectories.collect(target, decoder, together, told=told.append)
    assert len(data["count"]) == sum(result.passes["denoise"] for result in results)
    assert sum(told) == 3 and data["features"].dtype == torch.float16
    assert data["when"].dtype == torch.uint8 and data["block"][0] == 0


def test_join_widens_and_finds_the_first_rows(data, records):
    """`start` is the number of positions before a pass; 255 stays 255."""
    shards = [trajectories.read_shard(path) for path in trajectories.paths_in(records)]
    counts = [count for shard in shards for count in shard["count"].tolist()]
    assert data["count"].tolist() == counts
    assert data["start"].tolist() == [sum(counts[:n]) for n in range(len(counts))]
    assert len(data["when"]) == sum(counts) and data["when"].dtype == torch.int64
    assert data["features"].dtype == torch.float16


def test_the_last_tenth_is_held_out(tmp_path):
    """Of every folder: of 2 shards one, of 20 two, never the same in both parts."""

    def shard(path, block):
        one = {name: torch.zeros(1, dtype=torch.uint8) for name in trajectories.FIELDS}
        save_file(one | {"block": torch.tensor([block], dtype=torch.uint8)}, path)

    for folder, n in (("few", 2), ("many", 20)):
        os.mkdir(tmp_path / folder)
        for i in range(n):
            shard(tmp_path / folder / f"{i:04d}.safetensors", i + 100 * (n == 20))
    training, held = trajectories.split(str(tmp_path / "few"), str(tmp_path / "many"))
    assert training["block"].tolist() == [0, *range(100, 118)]
    assert held["block"].tolist() == [1, 118, 119]


def test_training_prompts_come_in_the_mixs_shares():
    texts = trajectories.training_prompts(20, 0)
    drawn = [p.prompt for task, n in (("arithmetic", 9), ("code", 7), ("drill", 4))
             for p in tasks.problems(task, "train", n, 0)]  # fmt: skip
    assert texts == drawn


# ----------------------------------------------------------------------- prompts and processes


def test_prompts_of_a_file(tmp_path):
    """Text or JSON, with a byte-order mark or not, empty lines left out."""
    path = tmp_path / "prompts.txt"
    lines = ["Mia has 3 cards.", "", '{"prompt": "", "question": "a"}', '{"text": "b", "id": 1}']
    lines += ['{"text": "x", "question": "c"}', '{"question": "x", "prompt": "d", "text": "y"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert trajectories.read_prompts(str(path), 5) == ["Mia has 3 cards.", *"abcd"]
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "e"}\n')
    assert trajectories.read_prompts(str(path), 1) == ["e"]


@pytest.mark.parametrize(
    "content, n, says",
    [
        (b"", 1, "is empty"),
        (b"\n \n", 3, "is empty"),
        (b"a\nb\n", 3, "has 2, ask for 1 to 2"),
        (b'{"prompt": {"a": 1}}', 1, "without a prompt"),
        (b'{"prompt": 5}', 1, "without a prompt"),
        (b'{"prompt": ["a"]}', 1, "without a prompt"),
        (b'{"answer": "a"}', 1, "without a prompt"),
        (b'{"prompt": "a"', 1, "without a prompt"),
        (b"\xff\xfe", 1, "cannot be read"),
        (None, 1, "there is no file"),
    ],
)
def test_unfit_prompts_are_refused(content, n, says, tmp_path):
    path = str(tmp_path / "prompts")
    if content is not None:
        with open(path, "wb") as file:
            file.write(content)
    argv = ["--prompts", path, "--num-prompts", str(n), "--out", str(tmp_path / "out")]
    assert says in ended(trajectories.main, argv)


@pytest.mark.parametrize(
    "rank, ranks, says",
    [("abc", "2", "RANK"), ("0", "x", "WORLD_SIZE"), ("2", "2", "RANK"), ("-1", "2", "RANK")],
)
def test_odd_processes_are_refused(rank, ranks, says, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert says in ended(trajectories.main, [*FEW, "--out", str(tmp_path / "out")])


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    assert trajectories.world() == (0, 1) and trajectories.own_device("cuda") == "cuda"
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert trajectories.world() == (5, 8) and trajectories.own_device("cuda") == "cuda:1"
    assert trajectories.own_device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "b")
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        trajectories.own_device("cuda")


def test_two_processes_collect_what_one_does(records, tmp_path, monkeypatch, capsys):
    """Shards are split over processes, and do not depend on who made them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, done in (("0", 3), ("1", 5)):
        monkeypatch.setenv("RANK", rank)
        trajectories.main([*FEW, "--out", str(tmp_path)])
        assert f"{done} of 5 shards" in capsys.readouterr().out
    names = sorted(os.listdir(records))
    assert sorted(os.listdir(tmp_path)) == names and len(names) == 6
    for name in names:
        assert (tmp_path / name).read_bytes() == open(os.path.join(records, name), "rb").read()


# ------------------------------------------------------------- going on with what was collected


def test_a_stopped_collection_goes_on(records, tmp_path, monkeypatch, capsys):
    """Ctrl-C promises to go on only when something is kept; then whole shards are kept, a broken
    one is made anew, and the result is that of one go."""
    argv, made = [*FEW, "--out", str(tmp_path)], []
    collect = trajectories.collect

    def stopped(*args):
        if len(made) in (0, 2):
            made.append(None)
            raise KeyboardInterrupt
        made.append(None)
        return collect(*args)

    monkeypatch.setattr(trajectories, "collect", stopped)
    assert "go on" not in ended(trajectories.main, argv)
    assert "run the same command again to go on" in ended(trajectories.main, argv)
    assert len(trajectories.paths_in(str(tmp_path))) == 1
    first = os.path.join(str(tmp_path), "0000.safetensors")
    before = os.stat(first).st_mtime_ns
    with open(os.path.join(str(tmp_path), "0001.safetensors"), "wb") as file:
        file.write(b"garbage")
    capsys.readouterr()
    trajectories.main(argv)
    err = capsys.readouterr().err
    assert "already finished" in err and "\r" not in err and "100%" in err
    assert os.stat(first).st_mtime_ns == before
    for name in os.listdir(records):
        one, two = (open(os.path.join(f, name), "rb").read() for f in (records, str(tmp_path)))
        assert one == two


def test_a_folder_is_not_gone_on_with_by_another_collection(tmp_path, monkeypatch):
    """Other options, other weights in the same folder, other prompts in the same file, other code:
    refused, and named."""
    model, prompts = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(os.path.join(CHECKPOINTS, "target"), model)
    prompts.write_text("Mia has 3 cards.\nMia has 4 cards and a key.\n")
    argv = ["--model", str(model), "--prompts", str(prompts), "--num-prompts", "2", "--shard", "1"]
    argv += ["--gen-len", "1", "--out", str(tmp_path / "out")]
    trajectories.main(argv)
    trajectories.main(argv)
    assert "other seed" in ended(trajectories.main, [*argv, "--seed", "1"])
    with monkeypatch.context() as patch:
        patch.setattr(command, "code_id", lambda: "edited")
        assert "other code" in ended(trajectories.main, argv)
    text = prompts.read_text()
    prompts.write_text(text.replace("3", "5"))
    assert "other prompts_id" in ended(trajectories.main, argv)
    prompts.write_text(text)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "other target_id" in ended(trajectories.main, argv)
    os.remove(tmp_path / "out" / "about.json")
    assert "other about.json" in ended(trajectories.main, argv)


def test_options_reach_the_collecting(tmp_path, monkeypatch):
    """Temperatures take turns, every shard has a seed of its own, all else reaches decoder, target
    and batches; the order of batches is drawn."""
    calls, target = [], SimpleNamespace(encode=lambda text: torch.tensor([1, int(text)]))
    one = {name: torch.zeros(1) for name in trajectories.FIELDS}

    def collect(target, decoder, prompts, batch, told):
        calls.append((decoder, [int(prompt[1]) for prompt in prompts], batch))
        return one

    monkeypatch.setattr(targets, "load", lambda *given: setattr(target, "given", given) or target)
    monkeypatch.setattr(trajectories, "collect", collect)
    path = tmp_path / "prompts"
    path.write_text("\n".join(map(str, range(10))))
    argv = ["--prompts", str(path), "--num-prompts", "8", "--batch", "2", "--shard", "1"]
    argv += ["--gen-len", "7", "--temperature", "0", "1.5", "--confidence", "margin", "--seed", "5"]
    argv += ["--cache", "prefix", "--dtype", "float64", "--device", "cpu", "--block-size", "16"]
    trajectories.main([*argv, "--out", str(tmp_path / "out")])
    decoders = [decoder for decoder, *_ in calls]
    assert decoders == [
        Decoder(gen_len=7, temperature=t, confidence="margin", seed=seed)
        for t, seed in ((0.0, 5), (1.5, 6), (0.0, 7), (1.5, 8))
    ]
    assert target.given == ("embedded", "cpu", torch.float64, 16) and target.cache == "prefix"
    drawn = [prompts for _, prompts, _ in calls]
    assert sorted(drawn) == [[0, 1], [2, 3], [4, 5], [6, 7]] != drawn
    assert [batch for *_, batch in calls] == [2] * 4


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model", "nowhere"], "no model"),
        (["--model", os.path.join(CHECKPOINTS, "golden-sdar")], "general prompts"),
        (["--temperature", "nan"], "the temperature is"),
        (["--num-prompts", "100000000"], "ask for"),
        (["--out", "/dev/null/out"], "cannot be written"),
        (["--out", "file"], "cannot be written"),
        (["--device", "nonsense"], "device"),
    ],
)
def test_collecting_refuses_bad_input(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert says in ended(trajectories.main, [*FEW, *argv])


# ------------------------------------------------------------------------ the order drafter's data


def made_up(*passes):
    """Records by hand, one {"when": …, "rank": …, "depth": …, "noised": {n: …}} a pass."""
    fields = {name: [] for name in ("count", "depth", "position", "when", "rank", "token_rank")}
    noised = []
    for record in passes:
        k = len(record["when"])
        fields["count"].append(k)
        fields["depth"].append(record.get("depth", [1] * 4))
        fields["when"] += record["when"]
        fields["position"] += record.get("position", range(k))
        for name in ("rank", "token_rank"):
            fields[name] += record.get(name, [0] * k)
        statistics = torch.zeros(k, 4, 4)  # [k, depth, statistic]
        for n, confidence_rank in record.get("noised", {}).items():
            statistics[:, n, 3] = torch.tensor(confidence_rank)
        noised.append(statistics)
    data = {name: torch.tensor(value) for name, value in fields.items()}
    data["start"] = data["count"].cumsum(0) - data["count"]
    rows = len(data["when"])
    data["features"] = torch.arange(rows)[:, None].expand(rows, 72).half()
    return data | {"noised": torch.cat(noised).half(), "block": torch.zeros_like(data["count"])}


def test_an_example_by_hand():
    """The first `depth` commits are decided, the next one is the label; features and statistics are
    those of the right rows."""
    data = made_up(
        {"when": [5, 5]},
        {"when": [2, 0, 1], "position": [4, 5, 9], "noised": {3: [0.5, 0.25, 0.125]}},
        {"when": [0, 1, 2], "position": [1, 2, 3], "noised": {0: [1.0, 2.0, 3.0]}},
    )
    states, depth, which = torch.tensor([2, 1]), torch.tensor([2, 1]), torch.tensor([0, 3])
    features, position, decided, label, noised = train.order_batch(data, states, depth, which)
    assert features[:, :, 0].tolist() == [[5, 6, 7], [2, 3, 4]] and features.shape == (2, 3, 72)
    assert position.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert decided.tolist() == [[True, True, False], [False, True, False]]
    assert label.tolist() == [2, 2]
    assert noised.shape == (2, 3, 4) and noised[..., 3].tolist() == [[1, 2, 3], [0.5, 0.25, 0.125]]
    assert train.order_batch(data, states, depth)[4] is None


@pytest.mark.parametrize("reads_noise", [False, True])
def test_drawn_examples(data, reads_noise):
    """Half of 4,096 positions a batch, at every depth on the path that is trained on; with noise,
    at those that it was recorded for."""
    statistics = torch.zeros_like(data["noised"])
    statistics[..., 3] = torch.repeat_interleave(data["depth"], data["count"], 0)
    data = data | {"noised": statistics}
    for k in (2, 5, 24):
        group = (data["count"] == k).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(0)
        batch = train.draw_batch(data, group, reads_noise, generator)
        features, position, decided, label, noised = batch
        depths = decided.sum(1)
        assert features.shape == (2048 // k, k, 72)
        assert not decided.gather(1, label[:, None]).any()
        assert (noised is not None) == reads_noise
        if reads_noise:  # here its last column says which depth it was recorded for
            assert (noised[..., 3] == depths[:, None]).all()
        recorded = set(data["depth"][group].flatten().tolist())
        assert set(depths.tolist()) == (recorded if reads_noise else set(range(1, min(k, 17))))


def test_every_position_is_drawn_as_often(tmp_path, monkeypatch):
    """30 passes of 2 positions and 10 of 6: half of the batches each."""
    passes = [{"when": [0, 1]}] * 30 + [{"when": list(range(6))}] * 10
    data, counts = made_up(*passes), []

    def draw(data, group, reads_noise, generator):
        counts.append(int(data["count"][group[0]]))
        return train.order_batch(data, group[:1], torch.tensor([1]))

    monkeypatch.setattr(train, "draw_batch", draw)
    small = {"width": 16, "layers": 1, "heads": 1, "hidden": 16}
    train.train_order(data, data, str(tmp_path), 100, 0, {}, **small)
    assert len(counts) == 200 and set(counts) == {2, 6} and 80 < counts.count(2) < 120


class MadeUp:
    """A drafter that always ranks the offsets 2, 4, 3, 1, 0."""

    shape = {"block_size": 5}

    def project(self, features, position):
        return position

    def __call__(self, position, decided, noised):
        logits = torch.tensor([0.0, 1, 5, 2, 3])[position]
        return logits.masked_fill(decided, -torch.inf)


def test_accuracy_by_hand():
    """Five examples: which of them each order foresees, and the shares of them."""
    data = made_up(
        # label 1: stale_left (its rank is 0), noised_left, and the drafter's three of three
        {"when": [0, 1, 2], "rank": [2, 0, 1], "noised": {0: [0.0, 0.1, 0.2]}},
        # label 0: the drafter's three only
        {"when": [1, 0, 2], "rank": [2, 1, 0], "noised": {0: [0.5, 0.0, 0.1]}},
        # depth 1, label 1: stale_left and stale_rank; depth 2, label 2: all but noised_left
        {
            "when": [0, 1, 2, 3, 4], "rank": [0, 1, 2, 3, 4], "depth": [1, 1, 2, 2],
            "noised": {0: [0.0, 0.9, 0.1, 0.2, 0.3], 2: [0.0, 0.1, 0.9, 0.2, 0.3]},
        },
        # label 3: the third of the drafter's three
        {"when": [0, 2, 3, 1, 4], "rank": [0, 1, 2, 3, 4]},
    )  # fmt: skip
    assert train.order_accuracy(MadeUp(), data) == {
        "drafter": 0.2, "drafter_top3": 0.8, "stale_left": 0.6, "noised_left": 0.2,
        "stale_rank": 0.4,
    }  # fmt: skip
    deepest_one = train.order_accuracy(MadeUp(), data, deepest=1)
    assert deepest_one["drafter"] == 0 and deepest_one["stale_left"] == 0.5


def test_no_example_at_all_is_said(records, tmp_path):
    """A part without a pass of two masks: one sentence, before the training."""
    (held,) = trajectories.paths_in(records)[-1:]
    shutil.copytree(records, tmp_path / "data")
    shard = trajectories.read_shard(held)
    first, last = shard["count"][:-1].long().sum(), shard["count"][-1]
    assert last == 1
    one = {name: value[-1:] if name in ("count", "block", "depth") else value[first:]
           for name, value in shard.items()}  # fmt: skip
    save_file(one, tmp_path / "data" / os.path.basename(held))
    argv = ["order", *TINY, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert "no pass with two undecided" in ended(train.main, argv)
    with pytest.raises(ValueError, match="no pass with two undecided"):
        train.order_accuracy(MadeUp(), made_up({"when": [0]}))


# ------------------------------------------------------------------------------- the draft graph


def test_sets_are_counted_by_hand():
    """Prefixes of what commits after the free one, by ranks among what is left; up to `longest`
    commits, and up to one that no draft can name."""
    data = made_up(
        {"when": [2, 0, 1, 3], "rank": [1, 0, 3, 2], "token_rank": [0, 0, 3, 1]},
        {"when": [1, 0, 2], "rank": [0, 1, 2], "token_rank": [0, 9, 255]},
        {"when": [1, 0], "rank": [1, 0]},
        {"when": [0]},
    )
    # first pass: left are the ranks 1, 2, 3 = i 0, 1, 2; they commit as i = 2, 0, 1
    whole = {
        ((2, 3),): 1, ((0, 0), (2, 3)): 1, ((0, 0), (1, 1), (2, 3)): 1,
        ((0, 0),): 2,  # second and third pass; the second stops at the token of rank 255
    }  # fmt: skip
    assert train.count_sets(data, 10, 20) == whole
    assert train.count_sets(data, 10, 2) == {s: n for s, n in whole.items() if len(s) < 3}
    assert train.count_sets(data, 1, 1) == {((2, 3),): 1}
    assert train.count_sets(data, 2, 1)[((0, 0),)] == 1


def test_the_graph_by_hand():
    """Greedy by value, each set behind one of its parents; with --inherit the parents' counts
    count too."""
    a, b, c = (0, 0), (1, 0), (2, 1)
    counts = {
        (a,): 9, (b,): 4, (a, b): 3, (a, c): 5, (b, c): 5, (a, b, c): 8,
        ((7, 0), (8, 0)): 99,  # its parents were never counted: it cannot be reached
    }  # fmt: skip
    right = [(a,), (a, c), (a, b, c), (b,), (b, c), (a, b)]
    assert train.calibrate_graph(counts, inherit=False) == right
    # a 9, ab 3 + 9 + 4 = 16, abc 8 + 3 + 5 + 5 = 21, ac 5 + 9 = 14, bc 5 + 4 = 9, b 4
    right = [(a,), (a, b), (a, b, c), (a, c), (b,), (b, c)]
    assert train.calibrate_graph(counts, inherit=True) == right
    assert train.calibrate_graph(counts, inherit=True, size=2) == right[:2]
    assert train.calibrate_graph({}, inherit=False) == []


def test_the_graph_is_written_whole_or_not_at_all(records, tmp_path):
    """A full disk leaves the old graph and no part of a new one; no device and no pipe is written
    to; --inherit reaches the file."""
    path = tmp_path / "graph.json"
    argv = ["graph", "--data", records, "--passes", "50", "--out", str(path)]
    train.main(argv)
    old = path.read_text()
    with small_disk(len(old) // 2):
        assert "cannot be written" in ended(train.main, argv)
    assert path.read_text() == old and os.listdir(tmp_path) == ["graph.json"]
    train.main([*argv, "--inherit"])
    assert json.loads(path.read_text())["inherit"] is True and path.read_text() != old
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/full", "/dev/null/graph.json", tmp_path):
        said = ended(train.main, [*argv[:-1], str(place)])
        assert str(place) in said and "cannot be written" in said


# ------------------------------------------------------------------------- trainings of any kind


def test_fit_by_hand(tmp_path):
    """The rate follows the schedule, and a save stands at every `save_every` and at the end."""
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    optimizer, saves = torch.optim.SGD(weight.parameters(), lr=10.0), []

    def learn(step):
        weight.weight.sum().backward()
        return 1.0

    path = str(tmp_path / "training.safetensors")
    pretrain.fit(weight, [optimizer], learn, 5, path, {}, 2, saves.append)
    assert weight.weight.item() == pytest.approx(-10 * (0.01 + 0.02 + 0.03 + 0.04 + 0.05))
    assert saves == [2, 4, 5]


@pytest.mark.parametrize("step, right", [(0, 0.01), (99, 1), (500, 1), (750, 0.5), (999, 0.002)])
def test_the_schedule(step, right):
    assert pretrain.schedule(step, 1000) == pytest.approx(right)


def order_of(records, out, *more):
    return ["order", "--data", records, "--out", str(out), *TINY, *more]


def same_weights(one, two):
    a, b = (load_file(os.path.join(str(folder), "model.safetensors")) for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_resumes_bit_for_bit(data, tmp_path, monkeypatch, capsys):
    """Stopped after its first save and started again, a training ends with the weights of one go;
    Ctrl-C says that it goes on, if it does."""
    small = {"save_every": 2, "width": 16, "layers": 1, "heads": 2, "hidden": 16}
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")
    train.train_order(data, data, once, 4, 0, {}, **small)
    draw, drawn = train.draw_batch, []

    def stopped(*args):
        drawn.append(None)
        if len(drawn) in (2, 8):  # in the first step, and in the third one of the second run
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(train, "draw_batch", stopped)
    for says in ([], ["run the same command again to go on"]):
        with pytest.raises(KeyboardInterrupt) as stop:
            train.train_order(data, data, twice, 4, 0, {}, **small)
        assert list(stop.value.args) == says
    assert not os.path.exists(os.path.join(twice, "model.safetensors"))
    capsys.readouterr()
    train.train_order(data, data, twice, 4, 0, {}, **small)
    assert "(2 already finished)" in capsys.readouterr().err
    assert same_weights(once, twice)


def test_a_finished_training_writes_its_drafter(records, tmp_path, monkeypatch, capsys):
    """Killed between the last save and the writing of the model, it writes it when run again."""
    train.main(order_of(records, tmp_path / "once"))
    save = drafting.OrderDrafter.save
    monkeypatch.setattr(drafting.OrderDrafter, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(order_of(records, tmp_path / "twice"))
    assert os.listdir(tmp_path / "twice") == ["training.safetensors"]
    monkeypatch.setattr(drafting.OrderDrafter, "save", save)
    train.main(order_of(records, tmp_path / "twice"))
    assert same_weights(tmp_path / "once", tmp_path / "twice")
    config = json.loads((tmp_path / "twice" / "config.json").read_text())
    assert config["target"] == "embedded" and 0 <= config["accuracy"]["drafter"] <= 1
    assert f"drafter {config['accuracy']['drafter']:.3f}" in capsys.readouterr().out


def test_a_training_does_not_go_on_as_another(records, tmp_path, monkeypatch):
    """Another shape, rate or number of steps, other trajectories in the same folder, another
    drafter to start from, other code: refused, and named."""
    data, init = tmp_path / "data", tmp_path / "init"
    shutil.copytree(records, data)
    train.main(order_of(records, init))
    argv = order_of(str(data), tmp_path / "out", "--init", str(init))
    train.main(argv)
    for other, named in (
        (["--width", "32"], "another shape"),  # than the one to start from
        (["--steps", "4"], "other steps"),
        (["--rate", "0.1"], "other rate"),
        (["--seed", "1"], "other seed"),
    ):
        assert named in ended(train.main, [*argv, *other])
    with monkeypatch.context() as patch:
        patch.setattr(command, "code_id", lambda: "edited")
        assert "belongs to another training (other code)" in ended(train.main, argv)
    path = trajectories.paths_in(str(data))[0]
    before = load_file(path)
    save_file(before | {"features": before["features"] + 1}, path)
    assert "belongs to another training (other data)" in ended(train.main, argv)
    save_file(before, path)
    train.main(argv)
    weights = load_file(init / "model.safetensors")
    save_file(weights | {"head.2.bias": weights["head.2.bias"] + 1}, init / "model.safetensors")
    assert "belongs to another training (other init)" in ended(train.main, argv)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\0\0\0\0\0\0\0{}      "])
def test_broken_training_files_are_named(content, records, tmp_path):
    out, copy = tmp_path / "order", tmp_path / "trajectories"
    out.mkdir()
    (out / "training.safetensors").write_bytes(content)
    said = ended(train.main, order_of(records, out))
    assert "training.safetensors cannot be read" in said
    shutil.copytree(records, copy)
    (copy / "0001.safetensors").write_bytes(content)
    said = ended(train.main, order_of(str(copy), tmp_path / "other"))
    assert "0001.safetensors is not a whole trajectory shard" in said


@pytest.mark.parametrize(
    "argv, says",
    [
        (["order", "--width", "20"], "multiple of 16"),
        (["order", "--rate", "nan"], "learning rate"),
        (["order", "--data", "nowhere"], "run trajectories.py"),
        (["graph", "--data", "nowhere"], "run trajectories.py"),
        (["order", "--init", "a", "--out", "./a"], "another --out"),
        (["order", "--init", "nowhere"], "no drafter in 'nowhere'"),
        (["order", "--out", "/dev/null/out"], "cannot be written"),
    ],
)
def test_training_refuses_bad_input(argv, says, records, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [] if "--data" in argv else ["--data", records]
    assert says in ended(train.main, [*argv, *given])


def test_a_full_disk_is_one_sentence(records, tmp_path, monkeypatch):
    """In collecting and in both trainings; nothing half-written is left."""
    out = tmp_path / "out"
    with small_disk(3000):
        assert "cannot be written" in ended(trajectories.main, [*FEW, "--out", str(out)])
        assert os.listdir(out) == ["about.json"]
        assert "cannot be written" in ended(train.main, order_of(records, tmp_path / "order"))
        assert os.listdir(tmp_path / "order") == []


def test_a_drafter_that_reads_the_noise_starts_as_the_other(tmp_path):
    """`--init`: before any training it gives the q of the drafter that it starts from; another
    shape is refused."""
    torch.manual_seed(0)
    shape = {"width": 16, "layers": 1, "heads": 2, "hidden": 16}
    plain = drafting.OrderDrafter(**shape).eval()
    reader = drafting.OrderDrafter(**shape, noised=True).eval()
    plain.save(str(tmp_path))
    train.start_from(reader, str(tmp_path))
    log_probs = torch.randn(5, 40).log_softmax(-1)
    stale = drafting.Stale(Decoder(temperature=1.0), (0, 1, 2) + (39,) * 5, 39, 0, log_probs)
    decided = np.array([[True, False, False, False, False]])
    assert np.allclose(plain.order(stale)(decided), reader.order(stale)(decided), atol=1e-6)
    with pytest.raises(ValueError, match="another shape"):
        train.start_from(drafting.OrderDrafter(noised=True), str(tmp_path))


def test_shipped_drafter_says_what_it_was_trained_on():
    config = command.read_json(os.path.join(CHECKPOINTS, "order", "config.json"))
    assert config["trained_on"]["passes"] > 100000
    assert config["accuracy"]["drafter"] > config["accuracy"]["stale_left"]


# ------------------------------------------------------------------------------ small targets


def test_examples_are_prompt_answer_stop_and_filling(target):
    """In the chat format that `encode` gives, to a block's end, in the mix's shares."""
    tokenizer = target.tokenizer
    stop, end = tokenizer.encode("<|im_end|>")[0], tokenizer.encode("<|endoftext|>")[0]
    known = {}
    for task, n in (("arithmetic", 9), ("code", 7), ("drill", 4)):
        known |= {p.prompt: p.answer for p in tasks.problems(task, "train", n, seed=5)}
    prompts = {tuple(target.encode(prompt).tolist()): prompt for prompt in known}
    examples = pretrain.encode_examples(tokenizer, 20, 5)
    assert len(examples) == 20
    for ids, start in examples:
        answer = known.pop(prompts[tuple(ids[:start])])
        written = tokenizer.encode(answer) + [stop]
        assert ids[start : start + len(written)] == written and len(ids) % 32 == 0
        rest = ids[start + len(written) :]
        assert len(rest) < 32 and set(rest) <= {end}
    assert not known


def test_batches_hold_examples_of_one_length(monkeypatch):
    """As many as fit, three times over; each row knows where its answer begins; the next epoch
    draws others, and what was left waits for them."""

    def examples(tokenizer, n, seed):
        return [([seed] * 32, 5), ([seed] * 64, 40), ([seed] * 32, 7), ([seed] * 32, 9)]

    monkeypatch.setattr(pretrain, "encode_examples", examples)
    drawn = pretrain.batches(None, 192, 0)
    got = [next(drawn) for _ in range(4)]
    starts = [(32 - answer.sum(1)).tolist() if ids.shape[1] == 32 else (64 - answer.sum(1)).tolist()
              for ids, answer in got]  # fmt: skip
    assert [ids[:, 0].tolist() for ids, _ in got] == [[0], [0, 0], [0, 1], [1]]
    assert starts == [[40], [5, 7], [9, 5], [40]]
    assert got[1][1][1].tolist() == [False] * 7 + [True] * 25


def test_noisy_copies():
    """Two maskings that share every answer position out; 13 % of the blocks are all masked in the
    first, and the rates of the others lie evenly from 0 to 1."""
    ids = torch.arange(400)[:, None].expand(400, 64)
    is_answer = torch.arange(64) >= torch.tensor([10, 40])[torch.arange(400) % 2][:, None]
    noisy, masks = pretrain.noisy_copies(ids, is_answer, 999, torch.Generator().manual_seed(0))
    assert noisy.shape == masks.shape == (400, 2, 64)
    assert torch.equal(masks[:, 0] ^ masks[:, 1], is_answer)
    assert not (masks & ~is_answer[:, None]).any()
    assert torch.equal(noisy, torch.where(masks, 999, ids[:, None].expand(-1, 2, -1)))
    whole = masks[:, 0, 32:][is_answer[:, 32]]  # second blocks that are answer throughout
    rates = whole.float().mean(1)
    assert 0.10 < (rates == 1).float().mean() < 0.22  # 13 %, and some of the rates near 1
    assert rates.mean().item() == pytest.approx(0.13 + 0.87 / 2, abs=0.05)
    assert (rates[rates < 1] < 0.5).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_the_loss_is_what_the_target_says_of_masked_positions(target, request, monkeypatch):
    """Each noisy block read behind the clean blocks before it, as in decoding."""
    monkeypatch.setattr(target.model.config, "mask_token_id", target.mask_id, raising=False)
    # [MASK] is likely, and must not count
    loud = torch.nn.functional.one_hot(torch.tensor(target.mask_id), target.n_ids) * 20.0
    hook = target.model.lm_head.register_forward_hook(lambda _, __, logits: logits + loud)
    request.addfinalizer(hook.remove)
    drawn = pretrain.encode_examples(target.tokenizer, 20, 3)
    ids, start = max(drawn, key=lambda example: len(example[0]) - example[1])
    is_answer = torch.arange(len(ids)) >= start
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        loss = pretrain.target_loss(target.model, torch.tensor([ids]), is_answer[None], noise)
    noise = torch.Generator().manual_seed(1)
    noisy, masks = pretrain.noisy_copies(
        torch.tensor([ids]), is_answer[None], target.mask_id, noise
    )
    losses = []
    for copy, mask in zip(noisy[0], masks[0]):
        for block in range(len(ids) // 32):
            here = slice(32 * block, 32 * block + 32)
            state = tuple(copy[here].tolist())
            prefix = target.prefill(ids[: 32 * block])
            log_probs = target.forward([state], [block], prefix, {}).unit(0)
            labels = torch.tensor(ids[here])[mask[here]]
            losses += (-log_probs.gather(1, labels[:, None])[:, 0]).tolist()
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.fixture
def quick(monkeypatch, target):
    """A target's training with the shipped tokenizer and few examples."""
    draw = pretrain.encode_examples
    monkeypatch.setattr(pretrain, "make_tokenizer", lambda: target.tokenizer)
    monkeypatch.setattr(pretrain, "encode_examples", lambda t, n, seed: draw(t, 40, seed))


def test_a_target_is_trained_killed_and_finished(quick, tmp_path, monkeypatch, capsys):
    """Stopped after a save, and killed before the model is written: in the end the checkpoint is
    that of one go, and `load` takes it."""
    once, twice = str(tmp_path / "once"), str(tmp_path / "twice")
    size = {"tokens_per_batch": 300, "save_every": 2}
    pretrain.train_target(once, 3, 0, **size)
    loss, calls = pretrain.target_loss, []

    def stopped(*args):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "target_loss", stopped)
        with pytest.raises(KeyboardInterrupt, match="go on"):
            pretrain.train_target(twice, 3, 0, **size)
    assert os.listdir(twice) == ["training.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "save_target", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain.train_target(twice, 3, 0, **size)
    pretrain.train_target(twice, 3, 0, **size)
    assert same_weights(once, twice) and sorted(os.listdir(once)) == sorted(os.listdir(twice))
    assert targets.load(twice).block_size == 32 and targets.is_embedded(twice)
    with small_disk(10000), pytest.raises(ValueError, match="cannot be written"):
        pretrain.train_target(twice, 3, 0, **size)
    assert same_weights(once, twice) and sorted(os.listdir(once)) == sorted(os.listdir(twice))
    with pytest.raises(ValueError, match=r"another training \(other steps\)"):
        pretrain.train_target(twice, 4, 0, **size)


def test_the_shipped_tokenizer_is_made_again(target):
    """From the generated texts alone."""
    assert pretrain.make_tokenizer().get_vocab() == target.tokenizer.get_vocab()


def test_accuracy_counts_right_answers(target, capsys, monkeypatch):
    """Every held-out prompt is scored once, with what the target writes for it."""
    seen = []

    def score(problem, text):
        seen.append((problem.prompt, text))
        return len(seen) % 2 == 0

    monkeypatch.setattr(tasks, "score", score)
    pretrain.main(["accuracy", "--num-samples", "4", "--gen-len", "8", "--seed", "3"])
    out = capsys.readouterr().out
    drawn = [p.prompt for t in tasks.TASKS for p in tasks.problems(t, "test", 4, 3)]
    texts = [
        target.decode(dlm.generate(target, Decoder(gen_len=8), target.encode(prompt)).ids)
        for prompt in drawn
    ]
    assert sorted(seen) == sorted(zip(drawn, texts)) and out.count(" 2/4 right") == 2


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--out", "/dev/null/out"], "cannot be written"),
        (["accuracy", "--model", "nowhere"], "no model"),
        (["accuracy", "--model", os.path.join(CHECKPOINTS, "golden-llada")], "use bench.py"),
        (["accuracy", "--num-samples", "100000000"], "ask for"),
    ],
)
def test_pretraining_refuses_bad_input(argv, says, quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in ended(pretrain.main, argv)


# -------------------------------------------------------------------------------- on a terminal


@pytest.mark.parametrize("script", ["pretrain.py", "trajectories.py", "train.py"])
def test_a_sign_of_life_comes_at_once(script):
    """Within 3 seconds of its start a command says what it is loading."""
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, script, "--help"], cwd=HERE, stderr=follower,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    begin = time.monotonic()
    try:
        assert select.select([leader], [], [], 3)[0] and b"loading" in os.read(leader, 100)
        assert time.monotonic() - begin < 3
    finally:
        process.kill()
        process.wait()
        os.close(leader)
        os.close(follower)


def test_a_loss_that_is_no_number_ends_a_training(tmp_path):
    """At once and without a model: hours of NaN would yield one that cannot be loaded."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    path = str(tmp_path / "training.safetensors")
    with pytest.raises(ValueError, match="loss is nan at step 0"):
        pretrain.fit(layer, [optimizer], lambda step: float("nan"), 2, path, {}, 1)
    assert not (tmp_path / "training.safetensors").exists()


def test_an_empty_out_is_no_folder():
    with pytest.raises(ValueError, match="--out is empty"):
        trajectories.open_folder("", {})
