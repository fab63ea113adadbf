"""Prompts and scoring: two embedded tasks, generated here, and four public benchmarks, read from the authors' files.

  arithmetic   a story with two or three small operations, answered by written-out steps and `#### n` (as GSM8K)
  code         "Write a function f(xs) that returns ...", answered by a Python function, scored by running it (as MBPP)
  gsm8k        grade-school stories (Cobbe et al. 2021), the number in the last \\boxed{}
  math500      500 problems of MATH (Hendrycks et al. 2021; Lightman et al. 2023), the formula in the last \\boxed{}
  humaneval    functions to complete (Chen et al. 2021), scored by running them
  mbpp         functions to write (Austin et al. 2021), test ids 11 to 510, scored by running them

Every embedded problem has a content (the operands and operations, without names and phrasing). A hash of the content
decides whether the problem belongs to `train` or `test`, so no test content is ever trained on. Sentences have a usual
form, used with probability .7, and others: a rigid template would make the commit order dull. The benchmarks are
evaluated only ('test'), zero-shot; their rows come from a local file or are downloaded.

What this file leaves out: running programs (sandbox.py), few-shot prompts, the enlarged tests of EvalPlus, sampling
several answers (pass@k), and a cache of downloads (the files have less than 1 MB; keep one and give its path instead).

    python tasks.py            # print a few problems of each embedded task
"""

import gzip
import hashlib
import http.client
import importlib.util
import json
import random
import re
import sys
import urllib.request
from dataclasses import dataclass
from fractions import Fraction

import sandbox

TASKS = ("arithmetic", "code")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp")
RUNS_PROGRAMS = ("humaneval", "mbpp")  # their answers are programs, run only if the caller allows it
TEST_SHARE = 10  # one content in ten is a test content
MOST = 20000  # distinct prompts that are drawn at most
LARGEST = 30  # no value in an arithmetic story exceeds this
NAMES = "Mia Tom Ana Leo Sam Eva Ben Zoe Max Lily Omar Ruth Nina Paul Iris Hugo".split()
ITEMS = "apples books coins pens shells stamps cards stones plums cups keys balls nuts eggs cakes toys".split()
FUNCTIONS = "f g solve total compute answer run apply".split()
ARGUMENTS = "xs nums values items data numbers".split()


@dataclass(frozen=True)
class Problem:
    """One prompt with a reference answer that scores. `gold` is an int (arithmetic), (function name, list of (input,
    output) pairs) (code), a Fraction (gsm8k), a LaTeX string (math500) or Tests (humaneval, mbpp). `content` names the
    problem: its operations, or its place in the benchmark."""

    task: str
    prompt: str
    answer: str
    gold: object
    content: str


def split_of(content):
    """'test' for one content in TEST_SHARE, else 'train': a function of the content alone."""
    digest = hashlib.sha256(content.encode()).digest()
    return "test" if digest[0] * 256 + digest[1] < 65536 // TEST_SHARE else "train"


def vary(rng, *forms):
    """The first form with probability .7, else one of the others."""
    return forms[0] if len(forms) == 1 or rng.random() < 0.7 else rng.choice(forms[1:])


# ---------------------------------------------------------------------------------------------- arithmetic


def draw_steps(rng):
    """Two or three operations [(op, a, b, result)], each starting from the last result, all values in 1..LARGEST."""
    steps, value = [], rng.randint(2, 12)
    if rng.random() < 0.4:
        a, b = rng.randint(2, 5), rng.randint(2, 6)
        steps.append(("*", a, b, a * b))
        value = a * b
    while len(steps) < 2 or (len(steps) == 2 and rng.random() < 0.5):
        op, b = rng.choice("+-"), rng.randint(2, 9)
        if steps and value <= LARGEST // 2 and rng.random() < 0.12:
            op, b = "*", 2
        result = value + b if op == "+" else value - b if op == "-" else value * b
        if 1 <= result <= LARGEST:
            steps.append((op, value, b, result))
            value = result
    return steps


def story_sentence(rng, step, name, other, items, first):
    """The prompt's sentence and the answer's line for one step."""
    op, a, b, result = step
    if first and op == "*":
        return (
            vary(
                rng,
                f"{name} has {a} boxes with {b} {items} each.",
                f"There are {b} {items} in each of {name}'s {a} boxes.",
            ),
            vary(
                rng,
                f"{a} boxes of {b} {items} hold {a} * {b} = {result} {items}.",
                f"Together the boxes hold {a} * {b} = {result}.",
            ),
        )
    equation = f"{a} {op} {b} = {result}"
    if op == "+":
        verb, doing = rng.choice([("buys", "buying"), ("finds", "finding"), ("gets", "getting")])
        return (
            vary(rng, f"{name} {verb} {b} more {items}.", f"Then {name} {verb} {b} more."),
            vary(rng, f"After {doing} {b} more, {name} has {equation} {items}.", f"Adding {b} gives {equation}."),
        )
    if op == "-":
        verb, doing = rng.choice(
            [
                (f"gives {b} {items} to {other}", "giving"),
                (f"loses {b} {items}", "losing"),
                (f"sells {b} {items}", "selling"),
            ]
        )
        return (
            vary(rng, f"{name} {verb}.", f"Then {name} {verb}."),
            vary(rng, f"After {doing} {b}, {name} has {equation} {items}.", f"Taking away {b} leaves {equation}."),
        )
    return (
        vary(rng, f"Then the number of {items} doubles.", f"After that {name} doubles the {items}."),
        vary(rng, f"Doubling means {equation} {items}.", f"Twice as many are {equation}."),
    )


def arithmetic(rng):
    """One story problem with its written-out answer."""
    steps = draw_steps(rng)
    name, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    said, lines = [], []
    if steps[0][0] != "*":
        said.append(vary(rng, f"{name} has {steps[0][1]} {items}.", f"At first {name} has {steps[0][1]} {items}."))
        lines.append(
            vary(rng, f"At the start {name} has {steps[0][1]} {items}.", f"We begin with {steps[0][1]} {items}.")
        )
    else:
        lines.append(vary(rng, f"First we count the {items} in the boxes.", "We start with the boxes."))
    for i, step in enumerate(steps):
        sentence, line = story_sentence(rng, step, name, other, items, i == 0)
        said.append(sentence)
        lines.append(line)
    result = steps[-1][3]
    said.append(vary(rng, f"How many {items} does {name} have now?", f"How many {items} are left with {name}?"))
    lines.append(
        vary(rng, f"So {name} now has {result} {items}.", f"The answer is {result} {items}.", f"That makes {result}.")
    )
    content = "arithmetic " + " ".join(f"{op}{a},{b}" for op, a, b, _ in steps)
    return Problem("arithmetic", " ".join(said), "\n".join(lines) + f"\n#### {result}", result, content)


def drill(rng):
    """Training only: a list of sums, so that the facts are seen more often than stories show them."""
    sums = []
    while len(sums) < 7:
        op = rng.choice("++--*")
        a, b = (rng.randint(2, 5), rng.randint(2, 6)) if op == "*" else (rng.randint(1, LARGEST), rng.randint(2, 9))
        if op == "*" and rng.random() < 0.3:
            a, b = rng.randint(2, LARGEST // 2), 2
        result = a + b if op == "+" else a - b if op == "-" else a * b
        if 1 <= result <= LARGEST:
            sums.append((f"{a} {op} {b}", result))
    prompt = "Work out " + ", ".join(text for text, _ in sums[:-1]) + f" and {sums[-1][0]}."
    return Problem("drill", prompt, "\n".join(f"{text} = {result}" for text, result in sums), None, prompt)


# ---------------------------------------------------------------------------------------------------- code

FILTERS = [("numbers", None)] + [
    (f"{sign} numbers", test)
    for sign, test in [
        ("even", "{x} % 2 == 0"),
        ("odd", "{x} % 2 == 1"),
        ("positive", "{x} > 0"),
        ("negative", "{x} < 0"),
    ]
]
FILTERS += [(f"numbers greater than {k}", f"{{x}} > {k}") for k in range(1, 10)]
FILTERS += [(f"numbers less than {k}", f"{{x}} < {k}") for k in range(1, 10)]
FILTERS += [(f"multiples of {k}", f"{{x}} % {k} == 0") for k in range(3, 10)]
MAPS = [
    ("{0}", "{x}", "take them as they are"),
    ("squares of the {0}", "{x} * {x}", "square each one"),
    ("doubles of the {0}", "2 * {x}", "double each one"),
    ("absolute values of the {0}", "abs({x})", "drop the sign of each one"),
]
MAPS += [(f"{{0}}, each increased by {k},", f"{{x}} + {k}", f"increase each one by {k}") for k in range(1, 10)]
MAPS += [(f"{{0}}, each reduced by {k},", f"{{x}} - {k}", f"reduce each one by {k}") for k in range(1, 10)]
MAPS += [(f"{{0}}, each multiplied by {k},", f"{{x}} * {k}", f"multiply each one by {k}") for k in range(3, 10)]
REDUCES = {
    "sum": ("the sum of the {0}", "add them up"),
    "product": ("the product of the {0}", "multiply them all"),
    "list": ("a list of the {0}", "collect them in a list"),
    "count": ("how many {0} there are", "count them"),
}
POSTS = [("", "{r}", "")] + [(f", plus {k}", f"{{r}} + {k}", f" and add {k}") for k in range(1, 10)]
POSTS += [(f", minus {k}", f"{{r}} - {k}", f" and subtract {k}") for k in range(1, 10)]
POSTS += [(f", times {k}", f"{{r}} * {k}", f" and multiply by {k}") for k in range(2, 10)]


def loop_body(arg, x, r, test, value, reduce, post):
    """The function's body as a loop."""
    start, update = {
        "sum": ("0", f"{r} += {value}"),
        "product": ("1", f"{r} *= {value}"),
        "list": ("[]", f"{r}.append({value})"),
        "count": ("0", f"{r} += 1"),
    }[reduce]
    lines = [f"{r} = {start}", f"for {x} in {arg}:"]
    lines += [f"    if {test}:", f"        {update}"] if test else [f"    {update}"]
    return lines + ["return " + post.format(r=r)]


def comprehension_body(arg, x, r, test, value, reduce, post):
    """The function's body with a comprehension; a product needs a loop all the same."""
    kept = f"[{value} for {x} in {arg}" + (f" if {test}]" if test else "]")
    if reduce == "list":
        return [f"{r} = {kept}", "return " + post.format(r=r)]
    if reduce == "product":
        return [f"kept = {kept}", f"{r} = 1", "for k in kept:", f"    {r} *= k", "return " + post.format(r=r)]
    return [f"kept = {kept}", f"{r} = {'len' if reduce == 'count' else 'sum'}(kept)", "return " + post.format(r=r)]


def code(rng):
    """One programming problem with its answer and ten input/output pairs."""
    noun, test = rng.choice(FILTERS)
    of, value, do = rng.choice(MAPS)
    reduce = rng.choice(list(REDUCES))
    if reduce == "count":
        of, value, do = MAPS[0]
    after, post, then = rng.choice(POSTS) if reduce != "list" else POSTS[0]
    name, arg = rng.choice(FUNCTIONS), rng.choice(ARGUMENTS)
    x, r = vary(rng, "x", "n", "v"), vary(rng, "total", "result", "out")
    what = REDUCES[reduce][0].format(of.format(noun)).rstrip(",")
    prompt = (
        f"Write a function {name}({arg}) that returns {what}"
        + (f" in {arg}" if "," not in what else f", in {arg}")
        + f"{after}."
    )
    test, value = test and test.format(x=x), value.format(x=x)
    body = vary(rng, loop_body, comprehension_body)(arg, x, r, test, value, reduce, post)
    first = vary(
        rng,
        f"Go through the {noun}, {do}, then {REDUCES[reduce][1]}{then}.",
        f"We keep the {noun}, {do} and {REDUCES[reduce][1]}{then}.",
        f"Take the {noun} in {arg}, {do}, {REDUCES[reduce][1]}{then}.",
    )
    source = f"def {name}({arg}):\n" + "".join(f"    {line}\n" for line in body)
    content = f"code {noun}|{of}|{reduce}|{after}"
    return Problem(
        "code", prompt, f"{first}\n```python\n{source}```", (name, cases(test, value, reduce, post, x)), content
    )


def cases(test, value, reduce, post, x):
    """Ten (input, output) pairs, computed here from the problem's own operations and not from any answer's text."""
    rng, pairs = random.Random(7), []
    keep, apply = (eval(f"lambda {x}: {text}", {"abs": abs}) for text in (test or "True", value))
    finish = eval(f"lambda r: {post.format(r='r')}")
    for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
        xs = [rng.randint(-12, 12) for _ in range(n)]
        kept, product = [apply(v) for v in xs if keep(v)], 1
        for v in kept:
            product *= v
        pairs.append((xs, finish({"sum": sum(kept), "product": product, "list": kept, "count": len(kept)}[reduce])))
    return pairs


GENERATORS = {"arithmetic": arithmetic, "code": code, "drill": drill}

# ---------------------------------------------------------------------------------------------- benchmarks

# Where the rows are published as text. The hub's copies of all but MATH-500 are parquet files, which would need another
# package, so those three come from their authors' repositories.
SOURCES = {
    "gsm8k": "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    "math500": "https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/main/test.jsonl",
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
}
FIELDS = {
    "gsm8k": {"question": str, "answer": str},
    "math500": {"problem": str, "solution": str, "answer": str},
    "humaneval": {"task_id": str, "prompt": str, "entry_point": str, "canonical_solution": str, "test": str},
    "mbpp": {"task_id": int, "code": str, "test_list": list},
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
COMPLETE = (
    "Read the following function signature and docstring, and fully implement the function described. "
    "Your response should only contain the code for this function.\n"
)
WRITE = (
    "You are an expert Python programmer, and here is your task:\n{}\nYour code should pass these tests:\n\n{}\n"
    " You should submit your final solution in the following format: ```python\n\n```"
)
MBPP_TEST = range(11, 511)  # task ids of the test split


def file_bytes(task, data):
    """The bytes of the file `data`, or of the authors' file if `data` is None; FileNotFoundError says what to do."""
    try:
        if data is not None:
            with open(data, "rb") as file:
                return file.read()
        with urllib.request.urlopen(SOURCES[task], timeout=30) as reply:
            return reply.read()
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        if data is not None:
            raise FileNotFoundError(
                f"the rows of {task} cannot be read from {data!r} ({reason}): give the authors' file with --data FILE"
            ) from None
        raise FileNotFoundError(
            f"{task} cannot be downloaded from {SOURCES[task]} ({reason}): fetch that file elsewhere and give it with"
            " --data FILE"
        ) from None


def file_rows(task, data):
    """[row dict] of a JSON-lines file (gzipped or not) or of a JSON list, each with the fields that `task` needs;
    ValueError names the file and the first row that is broken."""
    name = repr(data or SOURCES[task])
    content = file_bytes(task, data)
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        listed = text.lstrip().startswith("[")
        lines = [json.dumps(row) for row in json.loads(text)] if listed else text.split("\n")
    except (OSError, EOFError, ValueError, RecursionError):
        raise ValueError(f"{name} is no text of JSON rows: give the authors' file of {task}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"row {number} of {name} is not JSON: the file is cut short or of another kind") from None
        for field, kind in FIELDS[task].items():
            if not isinstance(row, dict) or not isinstance(row.get(field), kind):
                raise ValueError(f"row {number} of {name} has no {field!r}, so this is not a file of {task}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{name} has no rows: give the authors' file of {task}")
    return rows


def gsm8k(row, place):
    """Problem of a row {question, answer}: the gold number stands after the last `####`."""
    gold = plain_number(row["answer"].rsplit("####", 1)[-1])
    if "####" not in row["answer"] or gold is None:
        raise ValueError(f"gsm8k problem {place} has no number after '####': give the authors' file")
    return Problem("gsm8k", row["question"] + BOXED, row["answer"] + f"\n\\boxed{{{gold}}}", gold, f"gsm8k {place}")


def math500(row, place):
    """Problem of a row {problem, solution, answer}; the reference answer is the solution, boxed once more."""
    answer = f"{row['solution']}\n\\boxed{{{row['answer']}}}"
    return Problem("math500", row["problem"] + BOXED, answer, row["answer"], f"math500 {place}")


def humaneval(row, place):
    """Problem of a row {task_id, prompt, entry_point, canonical_solution, test}."""
    tests = sandbox.Tests(row["prompt"], (row["entry_point"],), f"{row['test']}\ncheck({row['entry_point']})\n")
    answer = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
    return Problem("humaneval", COMPLETE + row["prompt"], answer, tests, row["task_id"])


def mbpp(row, place):
    """Problem of a row of sanitized MBPP {task_id, prompt, code, test_imports, test_list} or of the full set, where
    the text is `text` and the imports are `test_setup_code`."""
    text, asserts = row.get("prompt", row.get("text")), row["test_list"]
    imports = row.get("test_imports", [row.get("test_setup_code", "")])
    if not isinstance(text, str) or not all(isinstance(line, str) for line in [*asserts, *imports]):
        raise ValueError(f"mbpp problem {row['task_id']} lacks its text or tests: give the authors' file")
    code, tests = row["code"].replace("\r\n", "\n"), "\n".join(asserts)
    defined = re.findall(r"^(?:def|class)\s+(\w+)", code, re.M)
    names = tuple(dict.fromkeys(name for name in defined if re.search(rf"\b{name}\b", tests)))
    gold = sandbox.Tests("\n".join(imports) + "\n", names, tests)
    return Problem("mbpp", WRITE.format(text, tests), f"```python\n{code}\n```", gold, f"mbpp {row['task_id']}")


READERS = {"gsm8k": gsm8k, "math500": math500, "humaneval": humaneval, "mbpp": mbpp}


def benchmark_problems(task, split, n, seed, data):
    """`n` problems of a benchmark in the order of its file: all of them, or a sample without replacement that `seed`
    decides. MBPP means the task ids 11 to 510 (257 rows in the sanitized file, 500 in the full one)."""
    if split != "test":
        raise ValueError(f"{task} is used for evaluation only: ask for its 'test' problems, not {split!r}")
    rows = [row for row in file_rows(task, data) if task != "mbpp" or row["task_id"] in MBPP_TEST]
    if not 1 <= n <= len(rows):
        raise ValueError(f"{n} problems of {task} asked for: it has {len(rows)}, ask for 1 to {len(rows)}")
    places = sorted(random.Random(f"{task} {seed}").sample(range(len(rows)), n))
    return [READERS[task](rows[place], place) for place in places]


def problems(task, split, n, seed=0, data=None):
    """`n` problems of `task`, the same for the same `seed`.

    An embedded task gives distinct prompts, all of whose contents lie in `split` ('train' or 'test'). A benchmark gives
    rows of its test set from the file `data` (as the authors publish it: JSON lines, gzipped or not), or downloaded if
    `data` is None: see `benchmark_problems`. ValueError and FileNotFoundError say in one sentence what to change.
    """
    if task in BENCHMARKS:
        return benchmark_problems(task, split, n, seed, data)
    if task not in GENERATORS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS + BENCHMARKS)}")
    if data is not None:
        raise ValueError(f"{task} is generated and takes no file: leave --data out or choose {', '.join(BENCHMARKS)}")
    if not 1 <= n <= MOST:
        raise ValueError(f"{n} problems asked for: ask for 1 to {MOST}")
    rng, seen, found = random.Random(f"{task} {split} {seed}"), set(), []
    while len(found) < n:
        problem = GENERATORS[task](rng)
        if problem.prompt not in seen and split_of(problem.content) == split:
            seen.add(problem.prompt)
            found.append(problem)
    return found


# ------------------------------------------------------------------------------------------------- scoring

UNITS = r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$"
REWRITES = [  # (pattern, replacement), in this order: what does not change the meaning of an answer
    (r"\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
    (r"\\(?:quad|qquad)(?![A-Za-z])|\\[!,;: ]|~", " "),
    (r"\{,\}", ","),
    (r"\\[dt]frac", r"\\frac"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\\?%|\\?\$", ""),
    (r"(?<=[^\s{(])\s*" + UNITS, ""),
    (r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r"\1"),
    (r"\s+", ""),
    (r"\.$", ""),
    (r"^[A-Za-z](?:=|\\in(?![A-Za-z]))(?=.)", ""),
    (r"\\frac(\d)(?=[\d{])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"([\^_])\{(\w)\}", r"\1\2"),
]
FRACTION = r"(-?)(?:\\frac\{(-?\d+)\}\{(\d+)\}|(-?\d+)/(\d+))"
NUMBER = r"(?<![\w.])(?:(-)\s*)?\$?\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"


def boxed(text):
    """Content of the last complete \\boxed{...}, braces inside it matched, or None.

    >>> boxed(r"\\boxed{1}, so \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for found in re.finditer(r"\\.|[{}]", text[start:], re.S):  # \{ and \} are no braces
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if depth == 0:
                return text[start : start + found.start()]
    return None


def plain_number(text):
    """The only number in a text (after its last `=`), as a Fraction, or None if there are none or several. Units, $
    and a full stop may stand around it; commas inside it part thousands.

    >>> plain_number("$1,250.50 per week.")
    Fraction(2501, 2)
    """
    text = re.sub(r"\{,\}", ",", text.replace("\u2212", "-")).rsplit("=", 1)[-1]
    text = re.sub(r"\\[!,;: ]", "", text).replace("\\$", "$")
    found = re.findall(NUMBER, text, re.ASCII)
    runs = [run.rstrip(".,") for run in re.findall(r"[\d.,]*\d[\d.,]*", text)]
    if len(found) != 1 or runs != [found[0][1]] or len(runs[0]) > 1000:
        return None
    return Fraction(runs[0].replace(",", "")) * (-1 if found[0][0] else 1)


def normal_form(formula):
    """A LaTeX answer without what does not change its meaning (spaces, sizes of brackets, degree and percent signs,
    units, `x =`); a number or a fraction of integers becomes its value."""
    for pattern, replacement in REWRITES:
        formula = re.sub(pattern, replacement, formula.strip())
    if (fraction := re.fullmatch(FRACTION, formula, re.ASCII)) and len(formula) < 1000:
        sign, *parts = fraction.groups()
        over, under = (int(part) for part in parts if part)
        return Fraction(-over if sign else over, under) if under else formula
    return plain_number(formula) if re.fullmatch(NUMBER, formula, re.ASCII) else formula


def formula_matcher():
    """How MATH-500 answers are compared here: 'math_verify' if that package is installed, else 'normal form'."""
    return "math_verify" if importlib.util.find_spec("math_verify") else "normal form"


def same_formula(given, gold):
    """True if two LaTeX answers have the same normal form or, where math_verify is installed, it finds them equal."""
    if normal_form(given) == normal_form(gold) != "":
        return True
    if formula_matcher() != "math_verify":
        return False
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{given}}}")))


def first_program(text):
    """The first code fence (```python, ```py or ```), up to the end if it is never closed; without a fence the text."""
    for fence in re.finditer(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", text, re.S | re.M):
        if fence[1].strip().lower() in ("", "python", "python3", "py"):
            return fence[2]
    return text


def score(problem, text, allow_code=False):
    """True if the answer text is right.

    arithmetic: what follows the last `####` is the number. code: the first ```python fence passes every case.
    gsm8k: the last \\boxed{} holds one number, equal to the gold one. math500: it holds the same formula. humaneval,
    mbpp: the first fence passes the tests, in a confined child process; ValueError unless `allow_code`.
    """
    if problem.task == "arithmetic":
        return "####" in text and text.rsplit("####", 1)[1].strip() == str(problem.gold)
    if problem.task in RUNS_PROGRAMS:
        if not allow_code:
            raise ValueError(f"scoring {problem.task} runs programs that the model wrote: allow it with --allow-code")
        sandbox.check_confinement()
        return sandbox.passes(problem.gold, first_program(text))
    if problem.task in BENCHMARKS:
        answer = boxed(text)
        if problem.task == "math500":
            return answer is not None and same_formula(answer, problem.gold)
        return answer is not None and plain_number(answer) == problem.gold
    fence = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    name, pairs = problem.gold
    return fence is not None and sandbox.run_program(fence[1], name, [xs for xs, _ in pairs]) == [
        out for _, out in pairs
    ]


def main(argv=()):
    """Print three training problems of every task; takes no options."""
    if argv:
        sys.exit(f"tasks.py takes no options, not {' '.join(argv)}")
    for task in GENERATORS:
        for problem in problems(task, "train", 3):
            print(f"--- {task}\n{problem.prompt}\n\n{problem.answer}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
