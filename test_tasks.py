"""Tests of the tasks: generated problems and their scores, benchmark rows and their errors, answers, hostile programs.

Rows of the benchmarks are written here in the authors' formats; nothing is downloaded, and the real files are not
needed. Programs run in the confined child process, as root or as an ordinary user, whichever runs the tests.

Left out: math_verify, which is compared with only where it is installed, and kernels without Landlock or namespaces.

    python -m pytest test_tasks.py          # about half a minute
"""

import ctypes
import dataclasses
import doctest
import gzip
import http.client
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from fractions import Fraction

import pytest

import sandbox
import tasks

GSM8K = [
    {
        "question": f"Ann has {n} pens, then twice as many. How many?",
        "answer": f"2*{n} = <<2*{n}={2 * n}>>{2 * n}\n#### {2 * n}",
    }
    for n in (1, 2, 600, 4)
]
MATH500 = [
    {"problem": "What is $1/4+1/4$?", "solution": "It is $\\boxed{\\frac12}.$", "answer": "\\frac12", "level": 1},
    {"problem": "Solve $x-3=0$.", "solution": "Add 3: $\\boxed{3}$.", "answer": "3", "level": 1},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs.\n    """\n',
        "entry_point": "total",
        "canonical_solution": "    return sum(xs)\n",
        "test": "\n\ndef check(candidate):\n    assert candidate([]) == 0\n    assert candidate([1, 2]) == 3\n",
    }
]
MBPP = [
    {
        "task_id": number,
        "prompt": "Write a function to square a number.",
        "code": "def square(x):\n  return x * x",
        "test_imports": ["import math"],
        "test_list": ["assert square(2) == 4", "assert math.isclose(square(0.5), 0.25)"],
    }
    for number in (2, 11, 510, 511)
]
FULL_MBPP = [
    {
        "task_id": 20,
        "text": "Write a function to square a number.",
        "code": "def square(x):\r\n  return x * x",
        "test_setup_code": "",
        "test_list": ["assert square(2) == 4"],
        "challenge_test_list": [],
    }
]
ROWS = {"gsm8k": GSM8K, "math500": MATH500, "humaneval": HUMANEVAL, "mbpp": MBPP}
TESTS = sandbox.Tests("", ("f",), "assert f(2) == 4\nassert f(3) == 9\n")
SQUARE = "def f(x):\n    return x * x\n"
# Each would score, or do harm, if it were let: {file} is a file that everybody may write, {pid} the process of the
# tests, {port} a port that somebody listens at.
HOSTILE = {
    "endless loop": "while True: pass\n" + SQUARE,
    "sleeping": "import time\ntime.sleep(1000)\n" + SQUARE,
    "endless call": "def f(x):\n    while True: pass\n",
    "fork bomb": "import os\nwhile True: os.fork()\n",
    "a fork that stays": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n" + SQUARE,
    "a thread": "import threading\nthreading.Thread(target=print).start()\n" + SQUARE,
    "exit in a thread": "import sys, threading\nthreading.Thread(target=sys.exit).start()\n" + SQUARE,
    "10 GB": "x = bytearray(10 * 2**30)\n" + SQUARE,
    "10 GB, little by little": "x = []\nwhile True: x.append(bytearray(2**24))\n" + SQUARE,
    "exit(0)": "exit(0)\n",
    "sys.exit(0)": "import sys\nsys.exit(0)\n" + SQUARE,
    "os._exit(0)": "import os\nos._exit(0)\n" + SQUARE,
    "exit when called": "import os\ndef f(x):\n    os._exit(0)\n",
    "BaseException": "raise BaseException\n" + SQUARE,
    "printed pass": "print('passed')\ndef f(x):\n    return 0\n",
    "pass to every pipe": "import os\nfor fd in range(64):\n    try: os.write(fd, b'passed')\n"
    "    except OSError: pass\n",
    "pass by /proc": "import os\nfor pid in os.listdir('/proc'):\n    for fd in range(9):\n"
    "        try: os.write(os.open(f'/proc/{pid}/fd/{fd}', 1), b'passed')\n        except OSError: pass\n",
    "closed pipes": "import os\nos.closerange(0, 64)\n" + SQUARE,
    "parent killed": "import os\nos.kill(os.getppid(), 9)\n" + SQUARE,
    "tests killed": "import os\nos.kill({pid}, 9)\n" + SQUARE,
    "group killed": "import os\nos.killpg(0, 9)\n" + SQUARE,
    "all killed": "import os\nos.kill(-1, 9)\n" + SQUARE,
    "asserts that hold": "import builtins\nbuiltins.AssertionError = int\nbuiltins.__import__ = print\n"
    "__debug__ and setattr(builtins, 'abs', lambda x: 0)\ndef f(x):\n    return 0\n",
    "equal to everything": "class A:\n    def __eq__(self, other): return True\ndef f(x):\n    return A()\n",
    "an int equal to everything": "class A(int):\n    def __eq__(self, other): return True\n"
    "def f(x):\n    return A()\n",
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for v in list(frame.f_locals.values()):\n"
    "        if hasattr(v, 'write'): v.write(b'passed'); v.flush()\n    frame = frame.f_back\n"
    "def f(x):\n    return 0\n",
    "garbage answers": "import os\nfor fd in range(64):\n    try: os.write(fd, bytes(range(256)) * 99)\n"
    "    except OSError: pass\n",
    "endless answer": "def f(x):\n    return iter(int, 1)\n",
    "writing": "open('{file}', 'a').write('more')\n" + SQUARE,
    "emptying": "open('{file}', 'w').close()\n" + SQUARE,
    "truncating": "import os\nos.truncate('{file}', 0)\n" + SQUARE,
    "removing": "import os\nos.remove('{file}')\n" + SQUARE,
    "replacing": "import os\nos.rename('{file}', '{file}2')\n" + SQUARE,
    "a file beside": "open('{file}2', 'x').close()\n" + SQUARE,
    "a folder beside": "import os\nos.mkdir('{file}2')\n" + SQUARE,
    "own file": "open('here', 'w').write('x')\n" + SQUARE,
    "another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo passed; exit 0'])\n",
    "a shell": "import os\nassert os.system('true') == 0\n" + SQUARE,
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)\n" + SQUARE,
    "environment": "import os\nos.environ['PATH']\n" + SQUARE,
    "syntax error": "def f(x:\n",
    "broken text": "\ud800",
    "null": "\0",
    "nothing": "",
}


def one_sentence(error):
    """The message of a raised error is one line that is not empty."""
    text = str(error.value)
    return bool(text.strip()) and "\n" not in text


def some_problem(task):
    return tasks.problems(task, "test", 1)[0]


def written(path, rows):
    """The path as text, after writing one JSON row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# ------------------------------------------------------------------------------------------------ embedded tasks


def run_here(program, name, xs):
    """Output of a reference program in this process; only for programs that this project itself wrote."""
    space = {"__builtins__": {"sum": sum, "len": len, "abs": abs}}
    exec(program, space)
    return space[name](list(xs))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_no_test_content_is_trained_on(task):
    """Contents of train and test are disjoint, prompts are distinct, and a seed gives the same problems again."""
    train, test = tasks.problems(task, "train", 3000), tasks.problems(task, "test", 3000)
    assert {p.content for p in train}.isdisjoint(p.content for p in test)
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in test)
    assert len({p.prompt for p in train}) == len({p.prompt for p in test}) == 3000
    first = tasks.problems(task, "test", 20)
    assert first == tasks.problems(task, "test", 20) != tasks.problems(task, "test", 20, seed=1)


def test_reference_answers_are_right():
    """Every reference answer scores; code runs here for 1000 problems and in the limited child process for 25."""
    for problem in tasks.problems("arithmetic", "test", 1000):
        assert tasks.score(problem, problem.answer)
        for line in problem.answer.split("\n"):  # every written-out step is right too
            for left, right in [eq.split(" = ") for eq in re.findall(r"\d+ [-+*] \d+ = \d+", line)]:
                assert eval(left) == int(right)
    for i, problem in enumerate(tasks.problems("code", "train", 1000)):
        program = problem.answer.split("```python\n")[1].split("```")[0]
        name, pairs = problem.gold
        assert sandbox.is_safe(program) and len(pairs) == 10
        assert all(run_here(program, name, xs) == out for xs, out in pairs), program
        assert i >= 25 or tasks.score(problem, problem.answer)


@pytest.mark.parametrize(
    "answer, right",
    [
        ("#### 12", True),
        ("6 + 6 = 12\n#### 12", True),
        ("#### 11\n#### 12", True),
        ("#### 120", False),
        ("#### 11", False),
        ("#### -12", False),
        ("12", False),
        ("", False),
        ("####", False),
        ("#### 12\n#### 11", False),
        ("#### 12.5", False),
        ("#### " + "9" * 5000, False),
    ],
)
def test_arithmetic_scores(answer, right):
    """The whole number after the last `####` counts: 12.5 is not 12, and a number of any length is merely wrong."""
    assert tasks.score(dataclasses.replace(some_problem("arithmetic"), gold=12), answer) is right


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "def {f}(xs): return 0",
        "```python\ndef {f}(xs):\n    return 0\n```",
        "```python\ndef {f}(xs:\n```",
        "```python\ndef other(xs):\n    return 0\n```",
        "```python\nprint('[1]')\n```",
        "```python\ndef {f}(xs):\n    print('pass')\n    return 0\n```",
        "```python\ndef {f}(xs):\n    return {f}(xs)\n```",
        "```python\ndef {f}(xs):\n    return xs\n",
        "```python\ndef {f}(a, b):\n    return 0\n```",
        "```python\ndef {f}(xs):\n    return __builtins__\n```",
        "```python\ndef {f}(xs):\n    return {f}\n```",
    ],
)
def test_wrong_code_fails(wrong):
    """No program, a wrong one, a broken one, a printed fake pass, or a value that is none: not solved, and no error."""
    problem = some_problem("code")
    assert tasks.score(problem, wrong.replace("{f}", problem.gold[0])) is False


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from os import system",
        "return xs.__class__",
        "return open('/etc/passwd')",
        "return eval('1')",
        "exec('1')",
        "while True: pass",
        "return (lambda: 1)()",
        "return [f for f in xs][0]()",
        "xs.pop()",
        "xs.append.__self__",
        "return getattr(xs, 'pop')",
        "return __import__('os')",
        "global f",
        "raise ValueError",
        "try: return 1\n    finally: return 2",
        "with xs: return 1",
        "yield 1",
        "del xs",
        "class A: pass",
        "return f'{xs}'",
        "return (x := 1)",
        "return xs[0]",
        "return {1: 2}",
        "return sorted(xs, key=len)",
        "print('[1]')",
        "async def g(): pass",
    ],
)
def test_unsafe_lines_are_refused(line):
    """Off the whitelist is refused unrun: other statements, attributes but append, calls by any other name."""
    assert sandbox.is_safe("def f(xs):\n    xs.append(1)\n    return sum(xs)\n")
    assert not sandbox.is_safe(f"def f(xs):\n    {line}\n    return 1\n")
    assert sandbox.run_program(f"def f(xs):\n    {line}\n    return 1\n", "f", [[1]]) is None


@pytest.mark.parametrize(
    "program",
    [
        "@abs\ndef f(xs):\n    return 1\n",
        "f = lambda xs: 1\n",
        "\0",
        "\ud800",
        "def f(xs):\n    return 1",
        "(" * 10000,
        "-" * 10000 + "1",
    ],
)
def test_unsafe_programs_are_refused(program):
    """Decorators and lambdas are refused; texts that break the parser are no error; a plain function runs."""
    safe = program.endswith("return 1")
    assert sandbox.is_safe(program) is safe
    assert sandbox.run_program(program, "f", [[1]]) == ([1] if safe else None)


@pytest.mark.parametrize(
    "line", ["for x in xs: xs.append(1)", "r = [0] * 10 ** 10", "r = 10 ** 10 ** 10", "r = 'x' * 10 ** 9"]
)
def test_endless_programs_are_contained(line):
    """A program that would take all time or memory fails within seconds."""
    begin = time.time()
    assert sandbox.run_program(f"def f(xs):\n    {line}\n    return 1\n", "f", [[1]]) is None
    assert time.time() - begin < 6


@pytest.mark.parametrize("depth", (100, 700, 900, 980, 5000))
def test_deeply_nested_values_are_no_error(depth):
    """A value nested too deeply to be read back is a failed program, not an error of ours."""
    program = f"def f(xs):\n    r = []\n    for x in range({depth}):\n        r = [r]\n    return r\n"
    got = sandbox.run_program(program, "f", [[1]])
    assert got is None or depth < 1000


# ------------------------------------------------------------------------------------------------ benchmark rows


@pytest.mark.parametrize("task, n", [("gsm8k", 4), ("math500", 2), ("humaneval", 1), ("mbpp", 2)])
def test_reference_answers_of_benchmarks_score(task, n, tmp_path):
    """Every row becomes a problem whose reference answer scores and for which an empty answer does not."""
    found = tasks.problems(task, "test", n, data=written(tmp_path / "rows.jsonl", ROWS[task]))
    assert len({p.content for p in found}) == n and {p.task for p in found} == {task}
    for problem in found:
        assert tasks.score(problem, problem.answer, allow_code=True)
        assert not tasks.score(problem, "", allow_code=True)


def test_prompts_of_benchmarks(tmp_path):
    """The zero-shot prompts, letter by letter."""
    prompts = {}
    for task, rows in ROWS.items():
        n = 1 if task == "humaneval" else 2
        prompts[task] = tasks.problems(task, "test", n, data=written(tmp_path / task, rows))[0].prompt
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompts["math500"] == "What is $1/4+1/4$?" + ask
    assert prompts["gsm8k"] in [row["question"] + ask for row in GSM8K]
    assert prompts["humaneval"] == (
        "Read the following function signature and docstring, and fully implement the function described. Your "
        "response should only contain the code for this function.\n" + HUMANEVAL[0]["prompt"]
    )
    assert prompts["mbpp"] == (
        "You are an expert Python programmer, and here is your task:\nWrite a function to square a number.\nYour code "
        "should pass these tests:\n\nassert square(2) == 4\nassert math.isclose(square(0.5), 0.25)\n You should submit "
        "your final solution in the following format: ```python\n\n```"
    )


def test_mbpp_is_its_test_split(tmp_path):
    """Task ids 11 to 510 count; the full set's other field names and line ends are read too."""
    found = tasks.problems("mbpp", "test", 2, data=written(tmp_path / "rows.jsonl", MBPP))
    assert [p.content for p in found] == ["mbpp 11", "mbpp 510"] and found[0].gold.names == ("square",)
    (full,) = tasks.problems("mbpp", "test", 1, data=written(tmp_path / "full.jsonl", FULL_MBPP))
    assert tasks.score(full, full.answer, allow_code=True)


def test_samples_follow_the_seed_and_the_file(tmp_path):
    """Fewer problems than rows: a sample without replacement, in file order, the same for the same seed."""
    data = written(tmp_path / "rows.jsonl", GSM8K)
    drawn = [[p.content for p in tasks.problems("gsm8k", "test", 2, seed, data)] for seed in range(20)]
    assert all(names == sorted(set(names)) and len(names) == 2 for names in drawn)
    assert drawn == [[p.content for p in tasks.problems("gsm8k", "test", 2, seed, data)] for seed in range(20)]
    assert len({tuple(names) for names in drawn}) > 1


def test_gzipped_and_listed_rows(tmp_path):
    """HumanEval is published gzipped, sanitized MBPP as one JSON list; both are read as they are."""
    (tmp_path / "h.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL[0]).encode()))
    (tmp_path / "m.json").write_text(json.dumps(MBPP, indent=2))
    assert tasks.problems("humaneval", "test", 1, data=str(tmp_path / "h.gz"))[0].content == "HumanEval/0"
    assert len(tasks.problems("mbpp", "test", 2, data=str(tmp_path / "m.json"))) == 2


ROW = json.dumps(GSM8K[0]).encode()


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "no rows"),
        (b"\n\n", "no rows"),
        (b"[]", "no rows"),
        (ROW[:40], "row 1 .* is not JSON"),
        (ROW + b"\n" + ROW[:-1], "row 2 .* is not JSON"),
        (b"\xff\xfe\x00", "no text of JSON rows"),
        (b"\x1f\x8b\x08broken", "no text of JSON rows"),
        (gzip.compress(ROW, mtime=0)[:-9], "no text of JSON rows"),
        (b"[" + ROW, "no text of JSON rows"),
        (b"[" * 100000, "no text of JSON rows"),
        (b'{"a":' * 100000, "is not JSON"),
        (b"3", "has no 'question'"),
        (b"null", "has no 'question'"),
        (b'{"question": 3, "answer": "#### 3"}', "has no 'question'"),
        (json.dumps(MATH500[0]).encode(), "has no 'question', so this is not a file of gsm8k"),
        (b'{"question": "q", "answer": "3"}', "no number after '####'"),
        (b'{"question": "q", "answer": "#### three"}', "no number after '####'"),
    ],
)
def test_broken_files_are_refused(content, says, tmp_path):
    """Empty, cut, foreign or damaged files: one sentence that says which row of which file, or what is missing."""
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        tasks.problems("gsm8k", "test", 1, data=str(tmp_path / "rows.jsonl"))
    assert one_sentence(error)


@pytest.mark.parametrize("task", tasks.BENCHMARKS)
@pytest.mark.parametrize("other", tasks.BENCHMARKS)
def test_another_benchmarks_file_is_refused(task, other, tmp_path):
    """A file of another benchmark is named as such by the field that it lacks."""
    if task != other:
        with pytest.raises(ValueError, match=f"so this is not a file of {task}") as error:
            tasks.problems(task, "test", 1, data=written(tmp_path / "rows.jsonl", ROWS[other]))
        assert one_sentence(error)


@pytest.mark.parametrize("row", [{"prompt": None}, {"test_list": [3]}, {"test_imports": [None]}])
def test_damaged_mbpp_rows_are_refused(row, tmp_path):
    """A row without its text, or with tests that are no text, is named by its id."""
    with pytest.raises(ValueError, match="mbpp problem 11 lacks") as error:
        tasks.problems("mbpp", "test", 1, data=written(tmp_path / "rows.jsonl", [MBPP[1] | row]))
    assert one_sentence(error)


def test_missing_files_and_too_many_problems(tmp_path):
    """No such file, a folder, more problems than rows, the wrong split: one sentence each."""
    data = written(tmp_path / "rows.jsonl", GSM8K)
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"{n} problems of gsm8k asked for: it has 4") as error:
            tasks.problems("gsm8k", "test", n, data=data)
        assert one_sentence(error)
    for path in (str(tmp_path / "nowhere.jsonl"), str(tmp_path)):
        with pytest.raises(FileNotFoundError, match="rows of gsm8k cannot be read") as error:
            tasks.problems("gsm8k", "test", 1, data=path)
        assert one_sentence(error)
    with pytest.raises(ValueError, match="evaluation only") as error:
        tasks.problems("gsm8k", "train", 1, data=data)
    assert one_sentence(error)


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route"),
        TimeoutError("timed out"),
        ConnectionResetError(104, "reset"),
        http.client.IncompleteRead(b""),
    ],
)
def test_no_network_is_one_sentence(failure, monkeypatch):
    """Without a network the sentence names the address and --data as the way out."""

    def unreachable(url, timeout):
        raise failure

    monkeypatch.setattr(tasks.urllib.request, "urlopen", unreachable)
    for task in tasks.BENCHMARKS:
        with pytest.raises(FileNotFoundError, match=f"{task} cannot be downloaded .* --data FILE") as error:
            tasks.problems(task, "test", 1)
        assert one_sentence(error)


def test_downloaded_rows_are_read(monkeypatch):
    """What the authors' address answers is read like a file."""
    monkeypatch.setattr(tasks.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(ROW))
    assert tasks.problems("gsm8k", "test", 1)[0].gold == 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("poetry", "train", 1), "unknown task 'poetry'"),
        (("code", "train", 0), "ask for 1 to"),
        (("code", "train", 1, 0, "rows.jsonl"), "takes no file"),
    ],
)
def test_unknown_tasks_are_refused(arguments, says):
    """An unknown task, no problem asked for, or a file for a generated task: one sentence."""
    with pytest.raises(ValueError, match=says) as error:
        tasks.problems(*arguments)
    assert one_sentence(error)


# ------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{3}", "3"),
        ("\\boxed{1} then \\boxed{2}.", "2"),
        ("\\boxed {\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\sqrt{\\frac{a}{b_{1}}}} and more {}", "\\sqrt{\\frac{a}{b_{1}}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{x : x > 0\\right.}", "\\left\\{x : x > 0\\right."),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{4} but \\boxed{5", "4"),
        ("\\boxed{", None),
        ("boxed{3}", None),
        ("3", None),
        ("\\boxed{}", ""),
        ("\\boxed{" * 3000, None),
    ],
)
def test_last_boxed(text, content):
    """The last complete box, with the braces inside it matched."""
    assert tasks.boxed(text) == content


@pytest.mark.parametrize(
    "text, value",
    [
        ("18", 18),
        ("-18", -18),
        (" 18", 18),
        ("- 18", -18),
        ("\u221218", -18),
        ("18.", 18),
        ("18.00", 18),
        ("18.5", Fraction(37, 2)),
        (".5", Fraction(1, 2)),
        ("$18", 18),
        ("\\$18", 18),
        ("-\\$18", -18),
        ("$1,234,567.50$", Fraction(2469135, 2)),
        ("1{,}234", 1234),
        ("1,\\!234", 1234),
        ("18\\%", 18),
        ("18\\text{ dollars}", 18),
        ("\\text{18}", 18),
        ("18 \\text{ eggs per day}.", 18),
        ("x = 18", 18),
        ("3 + 15 = 18", 18),
        ("18 = 3 + 15", None),
        ("3.14.15", None),
        ("18 or 19", None),
        ("10 - 5", None),
        ("5,6", None),
        ("12,34", None),
        ("1e3", None),
        ("\\frac{1}{2}", None),
        ("1/2", None),
        ("2:30", None),
        ("eighteen", None),
        ("", None),
        ("nan", None),
        ("9" * 5000, None),
        ("\u0663", None),
    ],
)
def test_plain_numbers(text, value):
    """The only number in a text by hand: signs, currency, thousands, units, decimals; two numbers are none."""
    assert tasks.plain_number(text) == value


@pytest.mark.parametrize(
    "given, gold, same",
    [
        ("\\frac{1}{2}", "\\dfrac12", True),
        ("0.5", "\\frac{1}{2}", True),
        ("1/2", "\\frac{1}{2}", True),
        ("-\\frac{1}{2}", "-0.5", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("x = 5", "5", True),
        ("x \\in [1, 2]", "[1,2]", True),
        ("10,\\!080", "10080", True),
        ("120^\\circ", "120", True),
        ("120^{\\circ}", "120", True),
        ("15\\mbox{ cm}^2", "15", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\sqrt3", "\\sqrt{3}", True),
        ("x^{2}+1", "x^2 + 1", True),
        ("50\\%", "50", True),
        ("\\$32.50", "32.5", True),
        ("2\\sqrt{5}.", "2 \\sqrt{5}", True),
        ("1/0", "1/0", True),
        ("2", "3", False),
        ("-2", "2", False),
        ("\\frac{1}{2}", "\\frac{2}{1}", False),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "12", False),
        ("\\sqrt{3}", "3", False),
        ("x^2", "x2", False),
        ("12", "1, 2", False),
        ("", "", False),
        ("", "5", False),
        ("\\text{}", "", False),
        ("9" * 5000, "5", False),
    ],
)
def test_formulas_by_normal_form(given, gold, same, monkeypatch):
    """Equal and different answers by hand, compared without math_verify."""
    monkeypatch.setattr(tasks, "formula_matcher", lambda: "normal form")
    assert tasks.same_formula(given, gold) is same and tasks.same_formula(gold, given) is same


def test_math_verify_where_installed():
    """Where math_verify is installed it is used, and finds equal what the normal form does not."""
    pytest.importorskip("math_verify")
    assert tasks.formula_matcher() == "math_verify"
    assert tasks.same_formula("(x+1)^2", "x^2+2x+1") and not tasks.same_formula("(x+1)^2", "x^2+1")


@pytest.mark.parametrize(
    "text, program",
    [
        ("Sure:\n```python\na\nb\n```\nand\n```python\nc\n```", "a\nb\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```", "a\n"),
        ("```Python \na\n  ```", "a\n"),
        ("```bash\npip\n```\n```python\na\n```", "a\n"),
        ("```python\na", "a"),
        ("a\nb", "a\nb"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```\n```", ""),
    ],
)
def test_first_fence(text, program):
    """The first fence of Python or of nothing named; unclosed, to the end; none, the whole text."""
    assert tasks.first_program(text) == program


# ------------------------------------------------------------------------------------------------------ programs


def test_programs_run_only_if_allowed(tmp_path):
    """Without the caller's leave scoring a program is an error that names the flag; nothing is run."""
    for task in tasks.RUNS_PROGRAMS:
        problem = tasks.problems(task, "test", 1, data=written(tmp_path / "rows.jsonl", ROWS[task]))[0]
        with pytest.raises(ValueError, match="--allow-code") as error:
            tasks.score(problem, problem.answer)
        assert one_sentence(error)


@pytest.mark.parametrize(
    "answer, right",
    [
        ("```python\ndef total(xs):\n    return sum(xs)\n```", True),
        ("    return sum(xs)\n", True),
        ("```python\n    return sum(xs)\n```", True),
        ("   ```python\n   def total(xs):\n       return sum(xs)\n   ```", True),
        ("from __future__ import annotations\ndef total(xs: List[int]):\n    return sum(xs)\n", True),
        ("def total(xs: List[int]):\n    return sum(xs)\nif __name__ == '__main__':\n    input()\n", True),
        ("def helper(xs):\n    return sum(xs)\ntotal = lambda xs: helper(xs)\n", True),
        ("def total(xs):\n    return len(xs)\n", False),
        ("def other(xs):\n    return sum(xs)\n", False),
        ("def check(candidate):\n    pass\n", False),
        ("The sum.", False),
    ],
)
def test_humaneval_answers(answer, right, tmp_path):
    """A whole function, its body alone, an indented fence; the prompt's imports are there; wrong ones fail."""
    (problem,) = tasks.problems("humaneval", "test", 1, data=written(tmp_path / "rows.jsonl", HUMANEVAL))
    assert tasks.score(problem, answer, allow_code=True) is right


@pytest.mark.parametrize(
    "value, check, right",
    [
        ("[(1, {2: {3}}), None, 1.5, 'a']", "== [(1, {2: {3}}), None, 1.5, 'a']", True),
        ("{b'b': (True, 1j, frozenset({4}))}", "== {b'b': (True, 1j, frozenset({4}))}", True),
        ("__import__('collections').Counter('aab')", "== {'a': 2, 'b': 1}", True),
        ("[__import__('collections').namedtuple('P', 'x')(3)]", "== [(3,)]", True),
        ("(1, 2)", "== [1, 2]", False),
        ("True", "is True", True),
        ("__import__('re').search('a', 'a')", "", True),
        ("__import__('re').search('a', 'a')", "== True", False),
        ("__import__('re').search('a', 'b')", "", False),
        ("map(abs, [1])", "== [1]", False),
        ("10 ** 5000", "== 10 ** 5000", True),
    ],
)
def test_results_cross_as_plain_values(value, check, right):
    """Results keep their types on the way to the tests; objects become their plain base or a truth value."""
    assert sandbox.passes(sandbox.Tests("", ("f",), f"assert f() {check}"), f"def f(): return {value}") is right


def test_iterators_cross_as_iterators():
    """A generator can be listed once, as in one process."""
    tests = sandbox.Tests("", ("f",), "g = f()\nassert list(g) == [0, 1] and list(g) == []")
    assert sandbox.passes(tests, "def f():\n    yield from range(2)\n")


@pytest.fixture
def victim():
    """A file in a folder, both open to everybody, and a listening port: what hostile programs reach for."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        path = os.path.join(folder, "victim")
        with open(path, "w") as file:
            file.write("kept")
        os.chmod(path, 0o666)
        os.chmod(folder, 0o777)
        yield path, {"{file}": path, "{pid}": str(os.getpid()), "{port}": str(server.getsockname()[1])}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail(name, victim, monkeypatch):
    """Each fails within its time, changes nothing, reaches nobody, and leaves no process."""
    path, fields = victim
    program = HOSTILE[name]
    for field, value in fields.items():
        program = program.replace(field, value)
    mark = f"# {os.urandom(8).hex()}"
    monkeypatch.setattr(sandbox, "HARNESS", sandbox.HARNESS + mark)
    begin = time.time()
    assert sandbox.passes(TESTS, program, seconds=2) is False
    assert time.time() - begin < 4
    with open(path) as file:
        assert file.read() == "kept" and os.listdir(os.path.dirname(path)) == ["victim"]
    assert not running(mark) and sandbox.passes(TESTS, SQUARE)


HARM = ["network", "writing", "emptying", "truncating", "removing", "replacing", "a file beside", "a folder beside"]


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 4, reason="a kernel without Landlock for networks"
)
@pytest.mark.parametrize("name", HARM)
def test_the_kernel_refuses_without_the_hook(name, victim, monkeypatch):
    """The audit hook is only the second wall: without it the kernel still keeps files and network from a program."""
    harness = sandbox.HARNESS.replace("    sys.addaudithook(refuse)\n", "")
    assert harness != sandbox.HARNESS
    monkeypatch.setattr(sandbox, "HARNESS", harness)
    test_hostile_programs_fail(name, victim, monkeypatch)


def running(mark):
    """Ids of the processes with `mark` in their command line, a moment after they should have ended."""
    time.sleep(0.02)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [pid] if mark.encode() in file.read() else []
        except OSError:  # it has ended
            pass
    return found


def test_confinement_is_checked_first(monkeypatch):
    """Where programs cannot be run, or everything would pass, one sentence says so before any score is given."""
    sandbox.check_confinement.cache_clear()
    for harness in ("", "print('passed', end='')"):
        monkeypatch.setattr(sandbox, "HARNESS", harness)
        with pytest.raises(RuntimeError, match="cannot be confined here") as error:
            sandbox.check_confinement()
        assert one_sentence(error)
    monkeypatch.undo()
    sandbox.check_confinement()


def test_examples_in_docstrings():
    """The worked examples of the docstrings hold."""
    results = [doctest.testmod(module) for module in (tasks, sandbox)]
    assert all(result.attempted and not result.failed for result in results)


def test_the_command_prints_problems():
    """`python tasks.py` prints problems of the embedded tasks and takes no options."""
    script = tasks.__file__
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert all(f"--- {task}" in shown for task in tasks.TASKS)
    refused = subprocess.run([sys.executable, script, "--nope"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
