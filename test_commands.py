"""Tests of what a user types: every command of the README, every choice of bench.py, bad input, and resuming.

Commands run in this process on the shipped target, with few prompts; `train.py target` for a handful of steps only.

    python -m pytest test_commands.py
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import bench
import ddtree
import diagnose
import dlm
import drafter
import sandbox
import targets
import tasks
import train
import verify

HERE = os.path.dirname(os.path.abspath(__file__))
README = open(os.path.join(HERE, "README.md"), encoding="utf-8").read()
COMMANDS = sorted(
    {
        line
        for line in re.findall(
            r"(?:^    |`|&& )((?:python|torchrun \S+ \d) (?:bench|train|tasks)\.py[^`&\n]*)", README, re.M
        )
    }
)
SMALLER = {
    "bench": "--num-samples 1 --task code --gen-len 24 --seeds 1",
    "tasks": "",
    "target": "--steps 1",
    "accuracy": "--num-samples 2",
    "collect": "--num-prompts 4 --shard 1",
    "order": "--steps 2",
    "graph": "--passes 50",
}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Times do not matter here."""
    monkeypatch.setattr(bench, "REPEATS", 1)


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Two small shards of trajectories."""
    folder = tmp_path_factory.mktemp("trajectories")
    train.main(["collect", "--out", str(folder), "--num-prompts", "4", "--shard", "1"])
    return str(folder)


def run(argv, capsys):
    """Run one script's main with `argv` (script first); returns (exit code or message, printed text)."""
    main = {"bench.py": bench.main, "train.py": train.main, "tasks.py": tasks.main}[argv[0]]
    code = None
    try:
        main(argv[1:])
    except SystemExit as stop:
        code = stop.code
    return code, capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command(command, records, tmp_path, capsys, monkeypatch):
    """Every command of the README runs; here with few prompts and steps, an --out of its own, and the shipped files
    as runs/."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    for name in ("target", "order", "order-small", "order-noised", "graph.json"):
        os.symlink(os.path.join(bench.CHECKPOINTS, name), os.path.join("runs", name))
    argv = shlex.split(command, comments=True)
    argv = argv[next(i for i, word in enumerate(argv) if word.endswith(".py")) :]
    kind = argv[1] if argv[0] == "train.py" else argv[0][:-3]
    if elsewhere(argv):
        assert (bench if kind == "bench" else train).parse(argv[1:])
        return
    argv += SMALLER[kind].split() + ["--temperature", "1"] * (kind == "bench" and "--temperature" in argv)
    if kind not in ("tasks", "accuracy"):
        argv += ["--out", str(tmp_path / "out")]
    if kind in ("order", "graph"):
        argv += ["--data", records]
    code, out = run(argv, capsys)
    assert code is None and out


def elsewhere(argv):
    """True for a command about what is not here, a real target's weights or files: only its options are read."""
    return any(word in argv for word in (*targets.HUB, "--prompts", "--data")) or "runs/sdar" in " ".join(argv)


def test_readme_names_exist():
    """Every `file.name` of the paper ↔ code table is there."""
    found = re.findall(
        r"`(dlm|targets|drafter|ddtree|verify|train|diagnose|bench|tasks|sandbox)\.([A-Za-z_.]+)`", README
    )
    modules = {
        "dlm": dlm,
        "targets": targets,
        "drafter": drafter,
        "ddtree": ddtree,
        "verify": verify,
        "train": train,
        "bench": bench,
        "tasks": tasks,
        "diagnose": diagnose,
        "sandbox": sandbox,
    }
    names = [(module, name) for module, name in found if name != "py"]
    assert len(names) >= 15
    for module, name in names:
        thing = modules[module]
        for part in name.split("."):
            thing = getattr(thing, part)


def test_readme_snippet_is_lossless():
    """The README's example of a drafter of one's own runs, and the text stays the draft-free one."""
    space = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], space)
    target, decoder = targets.load("embedded", dtype=torch.float64), dlm.Decoder(gen_len=64)
    prompt = target.encode(tasks.problems("code", "test", 1)[0].prompt)
    drafted = verify.speculate(target, decoder, prompt, lambda stale, canvas: space["random_chain"](stale, canvas, 8))
    assert drafted.written == dlm.generate(target, decoder, prompt).written and max(drafted.accepted) > 0


@pytest.mark.parametrize(
    "choice",
    [["--rule", rule] for rule in dlm.RULES]
    + [["--precision", p] for p in dlm.PRECISIONS]
    + [["--dtype", d] for d in ("float64", "bfloat16")]
    + [["--task", task] for task in tasks.TASKS]
    + [["--temperature", "1", "--seeds", "1", "--confidence", c] for c in dlm.CONFIDENCES]
    + [["--temperature", "2", "--seeds", "1", "--noise", noise] for noise in dlm.NOISES]
    + [["--temperature", "1", "--seeds", "1", "--tempered", "--top-k", "5", "--top-p", "0.9"]]
    + [["--rule", rule] for rule in dlm.RELEASED]
    + [["--rule", "threshold", "--threshold", "0.5"], ["--steps", "16"], ["--pad"], ["--pad", "--dtype", "bfloat16"]],
)
def test_every_choice_runs_and_is_exact(choice, tmp_path, capsys):
    """Each choice of an option runs; in float32 and float64 every method writes the draft-free text."""
    argv = [
        "bench.py",
        "--num-samples",
        "1",
        "--task",
        "code",
        "--gen-len",
        "24",
        "--out",
        str(tmp_path / "run.json"),
        *choice,
    ]
    code, out = run(argv, capsys)
    rows = json.load(open(tmp_path / "run.json"))["rows"]
    assert code is None
    if "--temperature" in choice:
        assert {(row["method"], row["matching"]) for row in rows} == {("draft-free", ""), *bench.SAMPLED}
        assert all(0 < row["commits"][0] <= row["commits"][1] == row["tokens"] for row in rows)
    else:
        assert {row["method"] for row in rows} == set(bench.FREE + bench.COST_AWARE + bench.DRAFTED)
    if "bfloat16" not in choice or "--precision" in choice or "--pad" in choice:
        exact = [row for row in rows if row["matching"] != "greedy" and ("--pad" not in choice or row["budget"])]
        assert exact and all(row["differs"] is None for row in exact)
        assert len(re.findall(r" 1/1$", out, re.M)) >= len(exact)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["bench.py", "--model", "gpt"], "no model 'gpt'"),
        (["bench.py", "--drafter", "nowhere"], "no drafter in 'nowhere'"),
        (["bench.py", "--graph", "nowhere.json"], "no draft graph"),
        (["bench.py", "--graph", "README.md"], "not a draft graph"),
        (["bench.py", "--gen-len", "5000"], "exceed the context"),
        (["bench.py", "--num-samples", "10000000"], "ask for 1 to"),
        (["bench.py", "--rule", "threshold", "--trace"], "use --rule exact"),
        (["bench.py", "--floor", "2"], "floor"),
        (["bench.py", "--device", "nonsense"], "device"),
        (["bench.py", "--device", "meta"], "device"),
        (["bench.py", "--floor", "nan"], "floor"),
        (["bench.py", "--budget", "9999"], "at most 512"),
        (["bench.py", "--model", os.path.join(HERE, "checkpoints", "golden-sdar"), "--task", "code"], "no tokenizer"),
        (["bench.py", "--out", "."], "not a result file"),
        *((["bench.py", "--temperature", t], "the temperature is") for t in ("-1", "nan", "inf", "1e9", "1e-300")),
        (["bench.py", "--temperature", "1", "1"], "twice"),
        (["bench.py", "--budget", "8", "8"], "twice"),
        (["bench.py", "--rule", "threshold", "--threshold", "nan"], "not a number"),
        (["bench.py", "--threshold", "0.5"], "has no threshold"),
        (["bench.py", "--steps", "8", "--diagnose"], "single commits"),
        (["bench.py", "--pass-cost", "--cache", "none"], "behind a cache"),
        (["bench.py", "--noised", os.path.join(bench.CHECKPOINTS, "order-small")], "does not read the noise"),
        (["bench.py", "--out", "/dev/null/run.json"], "cannot be written"),
        (["train.py", "collect", "--model", os.path.join(bench.CHECKPOINTS, "golden-sdar")], "general prompts"),
        (["bench.py", "--temperature", "1", "--top-p", "2"], "top_p"),
        (["bench.py", "--temperature", "1", "--diagnose"], "show T = 0"),
        (["bench.py", "--steps", "5"], "divisor of the block size"),
        (["bench.py", "--random-weights"], "--pass-cost"),
        (["bench.py", "--task", "humaneval"], "--allow-code"),
        (["bench.py", "--task", "gsm8k", "--data", "nowhere.jsonl"], "cannot be read"),
        (["bench.py", "--task", "gsm8k", "--data", "a", "b"], "2 files for 1"),
        (["bench.py", "--task", "code", "--data", "README.md"], "1 files for 0"),
        (["bench.py", "--num-samples", "1", "2", "3"], "3 numbers for 2 tasks"),
        (["bench.py", "--block-size", "16"], "block size 16"),
        (["bench.py", "--noised", "nowhere"], "no drafter"),
        (["train.py", "collect", "--prompts", "nowhere"], "cannot be read"),
        (["train.py", "collect", "--prompts", "README.md", "--num-prompts", "100000"], "has"),
        (["train.py", "collect", "--temperature", "nan"], "the temperature is"),
        (["bench.py", "--out", "README.md"], "not a result file"),
        (["train.py", "order", "--width", "20"], "multiple of 16"),
        (["train.py", "order", "--rate", "nan"], "learning rate"),
        (["train.py", "order", "--data", "nowhere"], "run train.py collect"),
        (["train.py", "graph", "--data", "nowhere"], "run train.py collect"),
        (["train.py", "collect", "--model", "nowhere"], "no model"),
    ],
)
def test_bad_input_gets_one_sentence(argv, says, tmp_path, capsys, monkeypatch):
    """One clear line and a non-zero exit, before any work."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(os.path.join(HERE, "README.md"), tmp_path)
    code, _ = run(argv, capsys)
    assert isinstance(code, str) and says in code and "\n" not in code.strip()


@pytest.mark.parametrize(
    "argv",
    [
        ["--budget", "0"],
        ["--budget", "-3"],
        ["--num-samples", "0"],
        ["--task", "poetry"],
        ["--rule", "magic"],
        ["--nope"],
    ],
)
def test_refused_options(argv, capsys):
    """argparse refuses unknown options, unknown choices and numbers that are not positive."""
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    assert stop.value.code == 2


def counts(path):
    """What a run measured apart from time."""
    rows = json.load(open(path))["rows"]
    return {
        (r["task"], r["index"], r["method"], r["budget"]): (r["passes"]["denoise"], r["right"], r["differs"])
        for r in rows
        if r["method"] not in bench.COST_AWARE
    }  # their trees depend on measured times


def test_public_benchmarks_run(tmp_path, capsys):
    """Two benchmarks from files, programs only with --allow-code; n is given for each."""
    story = {"question": "Tom has 2 apples and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
    function = {
        "task_id": 11,
        "text": "Double x.",
        "code": "def f(x):\n    return 2 * x",
        "test_list": ["assert f(2) == 4"],
    }
    files = [tmp_path / "gsm8k.jsonl", tmp_path / "mbpp.jsonl"]
    files[0].write_text(json.dumps(story) + "\n" + json.dumps(story) + "\n")
    files[1].write_text(json.dumps(function | {"test_setup_code": ""}) + "\n")
    argv = ["bench.py", "--task", "gsm8k", "mbpp", "--data", *map(str, files), "--gen-len", "24"]
    argv += ["--num-samples", "2", "1", "--out", str(tmp_path / "run.json")]
    code, _ = run(argv, capsys)
    assert "--allow-code" in code
    code, out = run([*argv, "--allow-code"], capsys)
    assert code is None and "gsm8k, D = 8, 2 prompts" in out and "mbpp, D = 8, 1 prompts" in out


def torchrun(*argv):
    """Run a script in two processes, as `torchrun --nproc-per-node 2` does; returns what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *argv]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_options_reach_the_decoder():
    """Every option that describes decoding is in the Decoder that decodes."""
    argv = "--rule low_confidence_dynamic --threshold 0.25 --precision float32 --gen-len 7 --temperature 1.5 --seed 3"
    argv += " --top-k 4 --top-p 0.5 --confidence margin --tempered --noise position"
    right = dlm.Decoder("threshold", 0.25, "float32", 7, 1.5, 3, 4, 0.5, "margin", True, "position")
    assert bench.decoder_of(bench.parse(argv.split())) == right


def test_two_processes_give_the_table_of_one(tmp_path, capsys):
    """torchrun splits the prompts, and joins what the processes measured; what a killed one finished is kept."""
    argv = ["bench.py", "--num-samples", "2", "--task", "code", "--gen-len", "24"]
    one, two, killed = (str(tmp_path / name) for name in ("one.json", "two.json", "killed.json"))
    run([*argv, "--out", one], capsys)
    assert "code, D = 8, 2 prompts" in torchrun(*argv, "--out", two)
    assert counts(two) == counts(one) and not os.path.exists(two + ".rank0")
    left = json.load(open(two))
    left["rows"] = [row | {"tokens": 12345} for row in left["rows"] if row["index"] == 1]
    json.dump(left, open(killed + ".rank1", "w"))
    assert run([*argv, "--out", killed], capsys)[0] is None
    assert counts(killed) == counts(one)
    assert {row["index"] for row in json.load(open(killed))["rows"] if row["tokens"] == 12345} == {1}


def test_pass_cost_is_printed(capsys):
    """A row for every number of copies, one block decoded, and the memory."""
    for model in ("golden-sdar", "golden-dream"):
        code, out = run(["bench.py", "--pass-cost", "--model", os.path.join(HERE, "checkpoints", model)], capsys)
        assert code is None and re.findall(r"^ +(\d+) +[\d.]+ ", out, re.M) == ["1", "7", "9", "13", "21"]
        assert "one block" in out and "GiB" in out


def test_interrupted_run_resumes_to_the_same_table(tmp_path, capsys, monkeypatch):
    """Stopped after its first prompt, a run given the same --out goes on and ends with the counts of an uninterrupted
    one."""
    argv = ["bench.py", "--num-samples", "2", "--task", "code", "--gen-len", "24"]
    whole, broken = str(tmp_path / "whole.json"), str(tmp_path / "broken.json")
    run([*argv, "--out", whole], capsys)
    save = bench.save_run

    def save_and_stop(contents, path):
        save(contents, path)
        if contents["rows"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "save_run", save_and_stop)
    code, _ = run([*argv, "--out", broken], capsys)
    assert "to go on" in code and 0 < len(counts(broken)) < len(counts(whole))
    monkeypatch.setattr(bench, "save_run", save)
    assert run([*argv, "--out", broken], capsys)[0] is None
    assert counts(broken) == counts(whole)
    code, _ = run([*argv, "--out", broken, "--seed", "1"], capsys)
    assert "other arguments" in code  # and nothing is overwritten
    assert counts(broken) == counts(whole)


def test_a_mismatch_exits_1_and_names_it(tmp_path, capsys, monkeypatch):
    """A verifier that accepts what it should not is reported with prompt, position and margin, and the run exits 1."""

    def gullible(states, following):
        return [0, len(states) - 1] if len(states) > 1 else [0]

    monkeypatch.setattr(bench, "speculate", lambda *args, **kwargs: verify.speculate(*args, **kwargs, match=gullible))
    code, out = run(["bench.py", "--num-samples", "1", "--task", "code", "--out", str(tmp_path / "run.json")], capsys)
    assert code == 1 and re.search(r"MISMATCH \S+ D=\d T=0 code prompt 0: new token \d+, margin \d\.", out)


@pytest.mark.parametrize(
    "sets", ["[[[0,40]]]", "[[[-1,0]]]", "[[[0,0],[0,1]]]", "[[[1,0],[0,0]]]", "[[]]", "[[[0.7,0]]]", "3"]
)
def test_unfit_draft_sets_are_refused(sets, tmp_path):
    """Ranks outside their range, a position twice, unsorted or empty sets: one sentence that names the file."""
    (tmp_path / "graph.json").write_text('{"sets": ' + sets + "}")
    with pytest.raises(ValueError, match="graph.json is not a draft graph"):
        ddtree.load_graph(str(tmp_path / "graph.json"))


def test_damaged_rows_are_dropped_or_refused(tmp_path, capsys):
    """A prompt whose rows are cut short is measured again; rows that are no rows make it no result file."""
    argv, path = ["bench.py", "--num-samples", "1", "--task", "code", "--gen-len", "33"], tmp_path / "run.json"
    run([*argv, "--out", str(path)], capsys)
    before, whole = counts(path), json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"rows": whole["rows"][:-2]}))
    assert run([*argv, "--out", str(path)], capsys)[0] is None and counts(path) == before
    for rows in (None, "abc", [1], [{}]):
        path.write_text(json.dumps(whole | {"rows": rows}))
        assert "not a result file" in run([*argv, "--out", str(path)], capsys)[0]
