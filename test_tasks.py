"""Tests of the tasks: generated problems and their scores, benchmark rows and their errors.

Rows of the benchmarks are written here in the authors' formats; nothing is downloaded, and the real
files are not needed.

Left out: what answers mean (test_answers.py), and programs that do harm (test_sandbox.py).

    python -m pytest test_tasks.py          # about ten seconds
"""

import dataclasses
import doctest
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import subprocess
import sys
import urllib.error

import pytest

import answers
import datafiles
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
    {"problem": "What is $1/4+1/4$?", "solution": "$\\boxed{\\frac12}.$", "answer": "\\frac12"},
    {"problem": "Solve $x-3=0$.", "solution": "Add 3: $\\boxed{3}$.", "answer": "3"},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n"
        '    """Sum of xs.\n    """\n',
        "entry_point": "total",
        "canonical_solution": "    return sum(xs)\n",
        "test": "\n\ndef check(candidate):\n    assert candidate([]) == 0\n"
        "    assert candidate([1, 2]) == 3\n",
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
WRONG = {
    "gsm8k": ["\\boxed{7}", "GOLD", "\\boxed{GOLD} or \\boxed{7}", "\\boxed{1GOLD}",
              "\\boxed{GOLD.5}", "\\boxed{GOLD, 7}", "\\boxed{GOLD + 1}", "\\boxed{-GOLD}",
              "\\boxed{GOLD x}", "\\boxed{}", ""],
    "math500": ["\\boxed{7}", "GOLD", "\\boxed{GOLD x}", "\\boxed{GOLD + 1}", "\\boxed{(GOLD, 7)}",
                "\\boxed{GOLD, 7}", "\\boxed{-GOLD}", "\\boxed{x^{GOLD}}", "\\boxed{}", ""],
    "humaneval": ["```python\ndef total(xs):\n    return 0\n```", "    return 0\n",
                  "```python\ndef total(xs):\n    return xs and 3\n```", "```python\n```",
                  "total([])"],
    "mbpp": ["```python\ndef square(x):\n    return 4\n```", "```python\nsquare(2) == 4\n```",
             "```python\ndef square(x):\n    return x and 4 if x == 2 else x\n```", "4"],
}  # fmt: skip
ROWS = {"gsm8k": GSM8K, "math500": MATH500, "humaneval": HUMANEVAL, "mbpp": MBPP}
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


# ----------------------------------------------------------------------------- embedded tasks


def run_here(program, name, xs):
    """Output of a reference program in this process; only for programs of this project."""
    space = {"__builtins__": {"sum": sum, "len": len, "abs": abs}}
    exec(program, space)
    return space[name](list(xs))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_no_test_content_is_trained_on(task):
    """Contents of train and test are disjoint, prompts distinct, a seed gives the same again."""
    train, test = tasks.problems(task, "train", 3000), tasks.problems(task, "test", 3000)
    assert {p.content for p in train}.isdisjoint(p.content for p in test)
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in test)
    assert len({p.prompt for p in train}) == len({p.prompt for p in test}) == 3000
    first = tasks.problems(task, "test", 20)
    assert first == tasks.problems(task, "test", 20) != tasks.problems(task, "test", 20, seed=1)


def test_reference_answers_are_right():
    """Every reference answer scores; code runs here for 1000 problems, in the child for 25."""
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
    "task, digest",
    [
        ("arithmetic", "3bfe0a2e748237b3"),
        ("code", "2f057abf8b03ff9e"),
        ("drill", "bfafd410090681d0"),
    ],
)
def test_drawn_problems_stay_as_they_are(task, digest):
    """The shipped targets were trained on these very problems: 300 of each split, byte for byte."""
    drawn = [tasks.problems(task, split, 300) for split in ("train", "test")]
    told = repr([[dataclasses.astuple(problem) for problem in half] for half in drawn])
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest


def test_code_is_right_only_if_every_case_is():
    """A program that is right for the first input, or for all but the last, is wrong."""
    for problem in tasks.problems("code", "test", 20):
        name, pairs = problem.gold
        for known in (pairs[:1], pairs[:-1]):
            lines = "".join(f"    if xs == {xs}:\n        return {out}\n" for xs, out in known)
            program = f"def {name}(xs):\n{lines}    return 999\n"
            assert not tasks.score(problem, f"```python\n{program}```")


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
    """The whole number after the last `####` counts; a number of any length is merely wrong."""
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
    """No program, a wrong or broken one, a printed pass, or a value that is none: not solved."""
    problem = some_problem("code")
    assert tasks.score(problem, wrong.replace("{f}", problem.gold[0])) is False


# ----------------------------------------------------------------------------- benchmark rows


@pytest.mark.parametrize("task, n", [("gsm8k", 4), ("math500", 2), ("humaneval", 1), ("mbpp", 2)])
def test_reference_answers_of_benchmarks_score(task, n, tmp_path):
    """Every row becomes a problem whose reference answer scores, and an empty one does not."""
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
        found = tasks.problems(task, "test", n, data=written(tmp_path / task, rows))
        prompts[task] = found[0].prompt
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompts["math500"] == "What is $1/4+1/4$?" + ask
    assert prompts["gsm8k"] in [row["question"] + ask for row in GSM8K]
    assert prompts["humaneval"] == (
        "Read the following function signature and docstring, and fully implement the function "
        "described. Your response should only contain the code for this function.\n"
        + HUMANEVAL[0]["prompt"]
    )
    assert prompts["mbpp"] == (
        "You are an expert Python programmer, and here is your task:\nWrite a function to square a "
        "number.\nYour code should pass these tests:\n\nassert square(2) == 4\n"
        "assert math.isclose(square(0.5), 0.25)\n You should submit your final solution in the "
        "following format: ```python\n\n```"
    )


def test_mbpp_is_its_test_split(tmp_path):
    """Task ids 11 to 510 count; the full set's other field names and line ends are read too."""
    found = tasks.problems("mbpp", "test", 2, data=written(tmp_path / "rows.jsonl", MBPP))
    assert [p.content for p in found] == ["mbpp 11", "mbpp 510"]
    assert found[0].gold.names == ("square",)
    (full,) = tasks.problems("mbpp", "test", 1, data=written(tmp_path / "full.jsonl", FULL_MBPP))
    assert tasks.score(full, full.answer, allow_code=True)


def test_samples_follow_the_seed_and_the_file(tmp_path):
    """Fewer problems than rows: a sample without replacement, in file order, told by the seed."""
    data = written(tmp_path / "rows.jsonl", GSM8K)

    def draw(seed):
        return [p.content for p in tasks.problems("gsm8k", "test", 2, seed, data)]

    drawn = [draw(seed) for seed in range(20)]
    assert all(names == sorted(set(names)) and len(names) == 2 for names in drawn)
    assert drawn == [draw(seed) for seed in range(20)]
    assert len({tuple(names) for names in drawn}) > 1


def test_byte_order_marks_are_no_part_of_a_row(tmp_path):
    """A file saved with a byte-order mark is read like one without, gzipped or listed too."""
    for task, content in (("gsm8k", ROW), ("mbpp", json.dumps(MBPP).encode())):
        for packed in (lambda content: content, gzip.compress):
            (tmp_path / "marked").write_bytes(packed(b"\xef\xbb\xbf" + content))
            assert tasks.problems(task, "test", 1, data=str(tmp_path / "marked"))


def test_devices_and_pipes_are_refused(tmp_path):
    """What would hang or never end is refused in one sentence: a FIFO, /dev/zero."""
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(FileNotFoundError, match="not a regular file") as error:
            tasks.problems("gsm8k", "test", 1, data=path)
        assert one_sentence(error)


def test_gzipped_and_listed_rows(tmp_path):
    """HumanEval is published gzipped, sanitized MBPP as a JSON list; both are read as they are."""
    (tmp_path / "h.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL[0]).encode()))
    (tmp_path / "m.json").write_text(json.dumps(MBPP, indent=2))
    (found,) = tasks.problems("humaneval", "test", 1, data=str(tmp_path / "h.gz"))
    assert found.content == "HumanEval/0"
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
    """Empty, cut, foreign or damaged files: one sentence says which row, or what is missing."""
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


@pytest.mark.parametrize("task", tasks.BENCHMARKS)
def test_wrong_answers_to_every_benchmark_are_refused(task, tmp_path):
    """Another problem's answer, the gold one beside others or as a part of another, and half of a
    right program: none of them scores."""
    data = written(tmp_path / "rows.jsonl", ROWS[task])
    problem = tasks.problems(task, "test", 1 if task == "humaneval" else 2, data=data)[0]
    assert tasks.score(problem, problem.answer, allow_code=True)
    for wrong in WRONG[task]:
        wrong = wrong.replace("GOLD", str(problem.gold))
        assert tasks.score(problem, wrong, allow_code=True) is False, wrong


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

    monkeypatch.setattr(datafiles.urllib.request, "urlopen", unreachable)
    for task in tasks.BENCHMARKS:
        says = f"{task} cannot be downloaded .* --data FILE"
        with pytest.raises(FileNotFoundError, match=says) as error:
            tasks.problems(task, "test", 1)
        assert one_sentence(error)


def test_downloaded_rows_are_read(monkeypatch):
    """What the authors' address answers is read like a file."""
    monkeypatch.setattr(datafiles.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(ROW))
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


# ---------------------------------------------------------------------------------- programs


def test_programs_run_only_if_allowed(tmp_path):
    """Without the caller's leave scoring a program is an error that names the flag."""
    for task in tasks.RUNS_PROGRAMS:
        data = written(tmp_path / "rows.jsonl", ROWS[task])
        problem = tasks.problems(task, "test", 1, data=data)[0]
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
        ("from __future__ import annotations\ndef total(xs: List[int]): return sum(xs)\n", True),
        ("def total(xs): return sum(xs)\nif __name__ == '__main__':\n    input()\n", True),
        ("def helper(xs):\n    return sum(xs)\ntotal = lambda xs: helper(xs)\n", True),
        ("def total(xs):\n    return len(xs)\n", False),
        ("def other(xs):\n    return sum(xs)\n", False),
        ("def check(candidate):\n    pass\n", False),
        ("The sum.", False),
    ],
)
def test_humaneval_answers(answer, right, tmp_path):
    """A whole function, its body alone, an indented fence; the prompt's imports are there."""
    data = written(tmp_path / "rows.jsonl", HUMANEVAL)
    (problem,) = tasks.problems("humaneval", "test", 1, data=data)
    assert tasks.score(problem, answer, allow_code=True) is right


def test_examples_in_docstrings():
    """The worked examples of the docstrings hold."""
    for module in (sandbox, answers):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


def test_the_command_prints_problems():
    """`python tasks.py` prints problems of the embedded tasks and takes no options."""
    script = tasks.__file__
    pipes = {"capture_output": True, "text": True}
    shown = subprocess.run([sys.executable, script], check=True, **pipes).stdout
    assert all(f"--- {task}" in shown for task in tasks.TASKS)
    refused = subprocess.run([sys.executable, script, "--nope"], **pipes)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1


def test_the_scorer_has_a_name():
    """A run is known by what scored it: the library and its version, as one short line."""
    assert re.fullmatch(r"math-verify \d+(\.\d+)+", tasks.scorer())
