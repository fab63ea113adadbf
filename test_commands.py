"""Tests of what a reader of the documents types: every command, every name, every piece of Python.

Commands run in this process on the shipped target, with few prompts and steps.

    python -m pytest test_commands.py
"""

import importlib
import inspect
import os
import re
import runpy
import shlex
import sys

import pytest
import torch

import bench
import command
import ddtree
import dlm
import targets
import trajectories
import verify
from decoder import Decoder

HERE = os.path.dirname(os.path.abspath(__file__))
DOCUMENTS = [name for name in ("README.md", "RESULTS.md", "DECISIONS.md")
             if os.path.exists(os.path.join(HERE, name))]  # fmt: skip
TEXT = "\n".join(command.read_text(os.path.join(HERE, name)) for name in DOCUMENTS)
README = command.read_text(os.path.join(HERE, "README.md"))
MODULES = [name[:-3] for name in os.listdir(HERE)
           if name.endswith(".py") and not name.startswith("test_")]  # fmt: skip
SCRIPT = r"(?:^ {4}|`|&& )((?:python|torchrun \S+ \d) (?:%s)\.py[^`&\n]*)" % "|".join(MODULES)
COMMANDS = sorted(set(re.findall(SCRIPT, TEXT, re.M)))
BENCH = "--num-samples 1 --task code --gen-len 24 --seeds 1"
SMALLER = {
    "tasks": "",
    "pretrain": "--steps 1",
    "accuracy": "--num-samples 1 --gen-len 24",
    "trajectories": "--num-prompts 4 --shard 1",
    "order": "--steps 2",
    "graph": "--passes 50",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Times do not matter here."""
    monkeypatch.setattr(ddtree, "REPEATS", 1)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Two small shards of trajectories."""
    folder = tmp_path_factory.mktemp("trajectories")
    trajectories.main(["--out", str(folder), "--num-prompts", "4", "--shard", "1"])
    return str(folder)


def elsewhere(argv):
    """True for a command about what is not here, a real target's weights or files: only its options
    are read."""
    real = any(word in argv for word in (*targets.HUB, "--prompts", "--data"))
    return real or "runs/sdar" in " ".join(argv)


def smaller(argv):
    """The options that make a command of the documents small, and give it an --out of its own."""
    script = argv[0][:-3]
    if script != "bench":
        kind = argv[1] if script == "train" or argv[1:2] == ["accuracy"] else script
        return SMALLER[kind].split() + ["--out", "out"] * (kind not in ("tasks", "accuracy"))
    if "--prompt" in argv or "--pass-cost" in argv:
        return ["--gen-len", "24"]
    looks = "--trace" in argv or "--diagnose" in argv
    small = BENCH.split() + ([] if looks else ["--out", "out.json"])
    return small + ["--temperature", "1"] * ("--temperature" in argv)


@pytest.mark.parametrize("typed", COMMANDS, ids=lambda typed: " ".join(typed.split()))
def test_every_command_runs(typed, request, tmp_path, capsys, monkeypatch):
    """Every command of the documents; here with few prompts and steps, and the shipped files as
    runs/."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    for name in ("target", "order", "order-small", "order-noised", "graph.json"):
        os.symlink(os.path.join(HERE, "checkpoints", name), os.path.join("runs", name))
    argv = shlex.split(typed, comments=True)
    argv = argv[next(i for i, word in enumerate(argv) if word.endswith(".py")) :]
    if argv[0] == "example.py":
        pytest.skip("test_the_example_runs")
    module = importlib.import_module(argv[0][:-3])
    if elsewhere(argv):
        assert module.parse(argv[1:])
        return
    argv += smaller(argv)
    if argv[1:2] in (["order"], ["graph"]):
        argv += ["--data", request.getfixturevalue("records")]
    with pytest.raises(SystemExit) as stop:
        command.run(module.main, argv[1:])
    assert not stop.value.code and capsys.readouterr().out


def test_python_in_the_readme_runs(monkeypatch):
    """Every piece, one after the other, as example.py's imports have it; a drafter that one defines
    leaves the text as it is."""
    monkeypatch.chdir(HERE)
    space = runpy.run_path("example.py", run_name="imports")
    known = set(space)
    for piece in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(piece, space)
    made = [value for name, value in space.items() if name not in known and callable(value)]
    made = [made_here for made_here in made if inspect.isfunction(made_here)]
    takes = {function: list(inspect.signature(function).parameters) for function in made}
    drafts = [function for function in made if takes[function][:3] == ["stale", "canvas", "budget"]]
    target, decoder = targets.load("embedded", dtype=torch.float64), Decoder(gen_len=40)
    prompt = target.encode("Mia has 5 coins. Mia finds 4 more coins.")
    free = dlm.generate(target, decoder, prompt)
    for draft in drafts:
        found = verify.speculate(target, decoder, prompt, lambda s, c: draft(s, c, 8))
        assert found.written == free.written


def test_names_in_the_documents_exist():
    """Every `file.name` is there."""
    found = re.findall(r"`(%s)\.([A-Za-z_.]+)`" % "|".join(MODULES), TEXT)
    names = [(module, name) for module, name in found if name != "py"]
    assert len(names) >= 15
    for module, name in names:
        thing = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
