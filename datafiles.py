"""The benchmarks' data files: where their authors publish them, and their rows, checked.

A file is read as it is published: JSON lines, gzipped or not, or one JSON list, with or without a
byte-order mark. Whatever else it is, one sentence says what is wrong with it and what to give.

What this file leaves out: what a row means (tasks.py), and a cache of downloads (the files have
less than 1 MB; keep one and give its path instead).
"""

import gzip
import http.client
import json
import urllib.request

import command

# Where the rows are published as text. The hub's copies of all but MATH-500 are parquet files,
# which would need another package: those three come from their authors' repositories.
AUTHORS = "https://raw.githubusercontent.com/"
SOURCES = {
    "gsm8k": AUTHORS + "openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    "math500": "https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/main/test.jsonl",
    "humaneval": AUTHORS + "openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": AUTHORS + "google-research/google-research/master/mbpp/sanitized-mbpp.json",
}
FIELDS = {
    "gsm8k": {"question": str, "answer": str},
    "math500": {"problem": str, "solution": str, "answer": str},
    "humaneval": dict.fromkeys("task_id prompt entry_point canonical_solution test".split(), str),
    "mbpp": {"task_id": int, "code": str, "test_list": list},
}


def file_bytes(task, data):
    """The bytes of the file `data`, or of the authors' file if `data` is None. Raises
    FileNotFoundError that says what to do."""
    try:
        if data is not None:
            command.check_regular(data)
            with open(data, "rb") as file:
                return file.read()
        with urllib.request.urlopen(SOURCES[task], timeout=30) as reply:
            return reply.read()
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
    what = f"the rows of {task} cannot be read from {data!r} ({why}): give the authors' file"
    if data is None:
        what = f"{task} cannot be downloaded from {SOURCES[task]} ({why}): give that file"
    raise FileNotFoundError(f"{what} with --data FILE")


def rows(task, data):
    """[row dict] of a JSON-lines file (gzipped or not) or of a JSON list, each with the fields that
    `task` needs. Raises ValueError that names the file and the first row that is broken."""
    name, content, found = repr(data or SOURCES[task]), file_bytes(task, data), []
    try:
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        text = content.decode("utf-8-sig")
        listed = text.lstrip().startswith("[")
        lines = map(json.dumps, json.loads(text)) if listed else text.split("\n")
    except (OSError, EOFError, ValueError, RecursionError):
        message = f"{name} is no text of JSON rows: give the authors' file of {task}"
        raise ValueError(message) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            message = f"row {number} of {name} is not JSON: the file is cut or of another kind"
            raise ValueError(message) from None
        for field, kind in FIELDS[task].items():
            if not isinstance(row, dict) or not isinstance(row.get(field), kind):
                message = f"row {number} of {name} has no {field!r}"
                raise ValueError(f"{message}, so this is not a file of {task}")
        found.append(row)
    if not found:
        raise ValueError(f"{name} has no rows: give the authors' file of {task}")
    return found
