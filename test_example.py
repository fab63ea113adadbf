"""The example, as a reader runs it, and the worked examples in the docstrings.

    python -m pytest test_example.py          # seconds
"""

import doctest
import importlib
import os
import runpy
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MODULES = sorted(
    name[:-3] for name in os.listdir(HERE) if name.endswith(".py") and not name.startswith("test_")
)


def check(printed, answer, free, spot):
    """The text, an empty line, and the passes of both ways of decoding."""
    *text, empty, last = printed.splitlines()
    assert answer in "\n".join(text) and empty == ""
    assert last == f"{free} passes draft-free, {spot} with SPOT"


def test_the_example():
    """As a process of its own, in the project's folder, with a question of one's own."""
    question = "Mia has 5 coins. Mia finds 4 more coins. How many coins does Mia have now?"
    argv = [sys.executable, "example.py", question]
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == ""
    check(done.stdout, "9", 60, 13)


def test_the_example_as_it_is(capsys, monkeypatch):
    """Without words, it answers the prompt that it holds."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    runpy.run_path("example.py", run_name="__main__")
    check(capsys.readouterr().out, "return", 89, 26)


def test_all_worked_examples():
    """Every doctest of every file that is no test; those that carry the method have some."""
    tried = {}
    for name in MODULES:
        failed, tried[name] = doctest.testmod(importlib.import_module(name))
        assert failed == 0, name
    for name in ("command", "ddtree", "decoder", "dlm", "drafter", "verify"):
        assert tried[name] >= 1, name
