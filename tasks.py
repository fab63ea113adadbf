"""Prompts and scoring: two embedded tasks, generated here, and four public benchmarks from files.

  arithmetic   a story with two or three operations, answered step by step and `#### n` (as GSM8K)
  code         "Write a function f(xs) that returns ...", scored by running it (as MBPP)
  gsm8k        grade-school stories (Cobbe et al. 2021), the number in the last \\boxed{}
  math500      500 problems of MATH (Hendrycks et al. 2021; Lightman et al. 2023), the formula there
  humaneval    functions to complete (Chen et al. 2021), scored by running them
  mbpp         functions to write (Austin et al. 2021), test ids 11 to 510, scored by running them

Every embedded problem has a content: the operands and operations, without names and phrasing. A
hash of it decides whether the problem belongs to `train` or `test`, so no test content is ever
trained on. Sentences have a usual form, used with probability .7, and others: a rigid template
would make the commit order dull. The benchmarks are evaluated only ('test'), zero-shot; their rows
come from a local file or are downloaded.

What this file leaves out: reading files (datafiles.py) and answers (answers.py), running programs
(sandbox.py), few-shot prompts, the enlarged tests of EvalPlus, several answers a prompt (pass@k).

    python tasks.py            # print a few problems of each embedded task
"""

import hashlib
import math
import operator
import random
import re
import sys
from dataclasses import dataclass
from fractions import Fraction

import answers
import command
import datafiles
import sandbox

TASKS = ("arithmetic", "code")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp")
RUNS_PROGRAMS = ("humaneval", "mbpp")  # answered by programs, run only if the caller allows it
MIX = {"arithmetic": 0.45, "code": 0.35, "drill": 0.20}  # shares of what small targets train on
TEST_SHARE = 10  # one content in ten is a test content
MOST = 20000  # distinct prompts that are drawn at most
LARGEST = 30  # no value in an arithmetic story exceeds this
NAMES = "Mia Tom Ana Leo Sam Eva Ben Zoe Max Lily Omar Ruth Nina Paul Iris Hugo".split()
ITEMS = (
    "apples books coins pens shells stamps cards stones plums cups keys balls nuts eggs cakes toys"
).split()
FUNCTIONS = "f g solve total compute answer run apply".split()
ARGUMENTS = "xs nums values items data numbers".split()


@dataclass(frozen=True)
class Problem:
    """One prompt with a reference answer that scores.

    `gold` is an int (arithmetic), (function name, list of (input, output) pairs) (code), a Fraction
    (gsm8k), a LaTeX string (math500) or Tests (humaneval, mbpp). `content` names the problem: its
    operations, or its place in the benchmark.
    """

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


# ------------------------------------------------------------------------------------- arithmetic

RESULT = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# What a step may be called, the forms of the prompt's sentence, and those of the answer's line.
STORY = {
    "boxes": (
        [("", "")],
        ["{name} has {a} boxes with {b} {items} each.",
         "There are {b} {items} in each of {name}'s {a} boxes."],
        ["{a} boxes of {b} {items} hold {sum} {items}.", "Together the boxes hold {sum}."],
    ),
    "+": (
        [("buys", "buying"), ("finds", "finding"), ("gets", "getting")],
        ["{name} {verb} {b} more {items}.", "Then {name} {verb} {b} more."],
        ["After {doing} {b} more, {name} has {sum} {items}.", "Adding {b} gives {sum}."],
    ),
    "-": (
        [("gives {b} {items} to {other}", "giving"), ("loses {b} {items}", "losing"),
         ("sells {b} {items}", "selling")],
        ["{name} {verb}.", "Then {name} {verb}."],
        ["After {doing} {b}, {name} has {sum} {items}.", "Taking away {b} leaves {sum}."],
    ),
    "*": (
        [("", "")],
        ["Then the number of {items} doubles.", "After that {name} doubles the {items}."],
        ["Doubling means {sum} {items}.", "Twice as many are {sum}."],
    ),
}  # fmt: skip


def draw_steps(rng):
    """Two or three operations [(op, a, b, result)], each starting from the last result, all values
    in 1..LARGEST."""
    steps, value = [], rng.randint(2, 12)
    if rng.random() < 0.4:
        a, b = rng.randint(2, 5), rng.randint(2, 6)
        steps.append(("*", a, b, a * b))
        value = a * b
    while len(steps) < 2 or (len(steps) == 2 and rng.random() < 0.5):
        op, b = rng.choice("+-"), rng.randint(2, 9)
        if steps and value <= LARGEST // 2 and rng.random() < 0.12:
            op, b = "*", 2
        result = RESULT[op](value, b)
        if 1 <= result <= LARGEST:
            steps.append((op, value, b, result))
            value = result
    return steps


def story_sentence(rng, step, first, words):
    """The prompt's sentence and the answer's line for one step, about the `words` name, other and
    items."""
    op, a, b, result = step
    verbs, said, lines = STORY["boxes" if first and op == "*" else op]
    verb, doing = rng.choice(verbs) if len(verbs) > 1 else verbs[0]
    words = words | {"a": a, "b": b, "sum": f"{a} {op} {b} = {result}", "doing": doing}
    words["verb"] = verb.format(**words)
    return vary(rng, *said).format(**words), vary(rng, *lines).format(**words)


def arithmetic(rng):
    """One story problem with its written-out answer."""
    steps = draw_steps(rng)
    name, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    begin, said = f"{name} has {steps[0][1]} {items}.", []
    if steps[0][0] != "*":
        said.append(vary(rng, begin, f"At first {begin}"))
        lines = [vary(rng, f"At the start {begin}", f"We begin with {steps[0][1]} {items}.")]
    else:
        lines = [vary(rng, f"First we count the {items} in the boxes.", "We start with the boxes.")]
    words = {"name": name, "other": other, "items": items}
    for i, step in enumerate(steps):
        sentence, line = story_sentence(rng, step, i == 0, words)
        said.append(sentence)
        lines.append(line)
    result = steps[-1][3]
    ask = f"How many {items} does {name} have now?", f"How many {items} are left with {name}?"
    said.append(vary(rng, *ask))
    end = f"So {name} now has {result} {items}.", f"The answer is {result} {items}."
    lines.append(vary(rng, *end, f"That makes {result}."))
    content = "arithmetic " + " ".join(f"{op}{a},{b}" for op, a, b, _ in steps)
    answer = "\n".join(lines) + f"\n#### {result}"
    return Problem("arithmetic", " ".join(said), answer, result, content)


def drill(rng):
    """Training only: a list of sums, so that the facts are seen more often than in stories."""
    sums = []
    while len(sums) < 7:
        op = rng.choice("++--*")
        if op == "*":
            a, b = rng.randint(2, 5), rng.randint(2, 6)
            if rng.random() < 0.3:
                a, b = rng.randint(2, LARGEST // 2), 2
        else:
            a, b = rng.randint(1, LARGEST), rng.randint(2, 9)
        result = RESULT[op](a, b)
        if 1 <= result <= LARGEST:
            sums.append((f"{a} {op} {b}", result))
    prompt = "Work out " + ", ".join(text for text, _ in sums[:-1]) + f" and {sums[-1][0]}."
    answer = "\n".join(f"{text} = {result}" for text, result in sums)
    return Problem("drill", prompt, answer, None, prompt)


# ------------------------------------------------------------------------------------------- code

# What is kept, what is done with each, how all become one value, and what is done with that.
DIGITS = range(1, 10)
FILTERS = [("numbers", None), ("even numbers", "{x} % 2 == 0"), ("odd numbers", "{x} % 2 == 1")]
FILTERS += [("positive numbers", "{x} > 0"), ("negative numbers", "{x} < 0")]
FILTERS += [(f"numbers greater than {k}", f"{{x}} > {k}") for k in DIGITS]
FILTERS += [(f"numbers less than {k}", f"{{x}} < {k}") for k in DIGITS]
FILTERS += [(f"multiples of {k}", f"{{x}} % {k} == 0") for k in DIGITS[2:]]
MAPS = [
    ("{0}", "{x}", "take them as they are"),
    ("squares of the {0}", "{x} * {x}", "square each one"),
    ("doubles of the {0}", "2 * {x}", "double each one"),
    ("absolute values of the {0}", "abs({x})", "drop the sign of each one"),
]
BY = "{{0}}, each {} by {},".format
MAPS += [(BY("increased", k), f"{{x}} + {k}", f"increase each one by {k}") for k in DIGITS]
MAPS += [(BY("reduced", k), f"{{x}} - {k}", f"reduce each one by {k}") for k in DIGITS]
MAPS += [(BY("multiplied", k), f"{{x}} * {k}", f"multiply each one by {k}") for k in DIGITS[2:]]
REDUCES = {  # name: (noun, verb, the loop's start, its update, what follows a comprehension)
    "sum": ("the sum of the {0}", "add them up", "0", "{r} += {value}", ["{r} = sum(kept)"]),
    "product": ("the product of the {0}", "multiply them all", "1", "{r} *= {value}",
                ["{r} = 1", "for k in kept:", "    {r} *= k"]),
    "list": ("a list of the {0}", "collect them in a list", "[]", "{r}.append({value})", []),
    "count": ("how many {0} there are", "count them", "0", "{r} += 1", ["{r} = len(kept)"]),
}  # fmt: skip
POSTS = [("", "{r}", "")]
POSTS += [(f", plus {k}", f"{{r}} + {k}", f" and add {k}") for k in DIGITS]
POSTS += [(f", minus {k}", f"{{r}} - {k}", f" and subtract {k}") for k in DIGITS]
POSTS += [(f", times {k}", f"{{r}} * {k}", f" and multiply by {k}") for k in DIGITS[1:]]


def loop_body(arg, x, r, test, value, reduce):
    """The function's body as a loop, but for its return."""
    _, _, start, update, _ = REDUCES[reduce]
    update = update.format(r=r, value=value)
    inner = [f"    if {test}:", f"        {update}"] if test else [f"    {update}"]
    return [f"{r} = {start}", f"for {x} in {arg}:", *inner]


def comprehension_body(arg, x, r, test, value, reduce):
    """The function's body with a comprehension, but for its return."""
    rest = [line.format(r=r) for line in REDUCES[reduce][4]]
    condition = f" if {test}" if test else ""
    return [f"{'kept' if rest else r} = [{value} for {x} in {arg}{condition}]", *rest]


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
    what, all_of_them = REDUCES[reduce][:2]
    what = what.format(of.format(noun)).rstrip(",")
    where = f", in {arg}" if "," in what else f" in {arg}"
    prompt = f"Write a function {name}({arg}) that returns {what}{where}{after}."
    test, value = test and test.format(x=x), value.format(x=x)
    body = vary(rng, loop_body, comprehension_body)(arg, x, r, test, value, reduce)
    plan = vary(
        rng,
        f"Go through the {noun}, {do}, then {all_of_them}{then}.",
        f"We keep the {noun}, {do} and {all_of_them}{then}.",
        f"Take the {noun} in {arg}, {do}, {all_of_them}{then}.",
    )
    lines = [f"def {name}({arg}):"]
    lines += [f"    {line}" for line in [*body, "return " + post.format(r=r)]]
    answer = "\n".join([plan, "```python", *lines, "```"])
    gold = name, cases(test, value, reduce, post, x)
    return Problem("code", prompt, answer, gold, f"code {noun}|{of}|{reduce}|{after}")


def cases(test, value, reduce, post, x):
    """Ten (input, output) pairs, computed here from the problem's own operations and not from any
    answer's text."""
    rng, pairs = random.Random(7), []
    keep, apply = (eval(f"lambda {x}: {text}", {"abs": abs}) for text in (test or "True", value))
    finish = eval(f"lambda r: {post.format(r='r')}")
    join = {"sum": sum, "product": math.prod, "list": list, "count": len}[reduce]
    for n in range(10):
        xs = [rng.randint(-12, 12) for _ in range(n)]
        pairs.append((xs, finish(join([apply(v) for v in xs if keep(v)]))))
    return pairs


GENERATORS = {"arithmetic": arithmetic, "code": code, "drill": drill}

# ------------------------------------------------------------------------------------- benchmarks

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
COMPLETE = (
    "Read the following function signature and docstring, and fully implement the function "
    "described. Your response should only contain the code for this function.\n"
)
WRITE = (
    "You are an expert Python programmer, and here is your task:\n{}\n"
    "Your code should pass these tests:\n\n{}\n"
    " You should submit your final solution in the following format: ```python\n\n```"
)
MBPP_TEST = range(11, 511)  # task ids of the test split


def gsm8k(row, place):
    """Problem of a row {question, answer}: the gold number stands after the last `####`."""
    number = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", row["answer"], re.ASCII)
    if number is None:
        message = f"gsm8k problem {place} has no number after '####'"
        raise ValueError(f"{message}: give the authors' file")
    gold = Fraction(number[1].replace(",", ""))
    answer = f"{row['answer']}\n\\boxed{{{gold}}}"
    return Problem("gsm8k", row["question"] + BOXED, answer, gold, f"gsm8k {place}")


def math500(row, place):
    """Problem of a row {problem, solution, answer}; the reference is the solution, boxed again."""
    answer = f"{row['solution']}\n\\boxed{{{row['answer']}}}"
    return Problem("math500", row["problem"] + BOXED, answer, row["answer"], f"math500 {place}")


def humaneval(row, place):
    """Problem of a row {task_id, prompt, entry_point, canonical_solution, test}."""
    name = row["entry_point"]
    gold = sandbox.Tests(row["prompt"], (name,), f"{row['test']}\ncheck({name})\n")
    answer = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
    return Problem("humaneval", COMPLETE + row["prompt"], answer, gold, row["task_id"])


def mbpp(row, place):
    """Problem of a row of sanitized MBPP {task_id, prompt, code, test_imports, test_list} or of the
    full set, where the text is `text` and the imports are `test_setup_code`."""
    text, asserts = row.get("prompt", row.get("text")), row["test_list"]
    imports = row.get("test_imports", [row.get("test_setup_code", "")])
    if not isinstance(text, str) or not all(isinstance(line, str) for line in [*asserts, *imports]):
        message = f"mbpp problem {row['task_id']} lacks its text or tests: give the authors' file"
        raise ValueError(message)
    program, tests = row["code"].replace("\r\n", "\n"), "\n".join(asserts)
    defined = dict.fromkeys(re.findall(r"^(?:def|class)\s+(\w+)", program, re.M))
    names = tuple(name for name in defined if re.search(rf"\b{name}\b", tests))
    gold = sandbox.Tests("\n".join(imports) + "\n", names, tests)
    answer = f"```python\n{program}\n```"
    return Problem("mbpp", WRITE.format(text, tests), answer, gold, f"mbpp {row['task_id']}")


READERS = {"gsm8k": gsm8k, "math500": math500, "humaneval": humaneval, "mbpp": mbpp}


def benchmark_problems(task, split, n, seed, data):
    """`n` problems of a benchmark in the order of its file: all of them, or a sample without
    replacement that `seed` decides. MBPP means the task ids 11 to 510 (257 rows in the sanitized
    file, 500 in the full one)."""
    if split != "test":
        message = f"{task} is used for evaluation only: ask for its 'test' problems, not {split!r}"
        raise ValueError(message)
    rows = datafiles.rows(task, data)
    if task == "mbpp":
        rows = [row for row in rows if row["task_id"] in MBPP_TEST]
    if not 1 <= n <= len(rows):
        ask = f"it has {len(rows)}, ask for 1 to {len(rows)}"
        raise ValueError(f"{n} problems of {task} asked for: {ask}")
    places = sorted(random.Random(f"{task} {seed}").sample(range(len(rows)), n))
    return [READERS[task](rows[place], place) for place in places]


def problems(task, split, n, seed=0, data=None):
    """`n` problems of `task`, the same for the same `seed`.

    An embedded task gives distinct prompts, all of whose contents lie in `split` ('train' or
    'test'). A benchmark gives rows of its test set from the file `data` (as the authors publish it:
    JSON lines, gzipped or not), or downloaded if `data` is None: see `benchmark_problems`. Raises
    ValueError or FileNotFoundError that says in one sentence what to change.
    """
    if task in BENCHMARKS:
        return benchmark_problems(task, split, n, seed, data)
    if task not in GENERATORS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS + BENCHMARKS)}")
    if data is not None:
        raise ValueError(f"{task} is generated and takes no file: leave --data out")
    if not 1 <= n <= MOST:
        raise ValueError(f"{n} problems asked for: ask for 1 to {MOST}")
    rng, seen, found = random.Random(f"{task} {split} {seed}"), set(), []
    while len(found) < n:
        problem = GENERATORS[task](rng)
        if problem.prompt not in seen and split_of(problem.content) == split:
            seen.add(problem.prompt)
            found.append(problem)
    return found


# ---------------------------------------------------------------------------------------- scoring

scorer = answers.library  # () -> a short text: a run that goes on under another would mix two


def score(problem, text, allow_code=False):
    """True if the answer text is right.

    arithmetic: what follows the last `####` is the number. code: the first ```python fence passes
    every case. gsm8k, math500: the last box holds what equals the gold answer. humaneval, mbpp: the
    definitions in the Python fences pass the tests, in a confined process; ValueError unless
    `allow_code`.
    """
    if problem.task == "arithmetic":
        return "####" in text and text.rsplit("####", 1)[1].strip() == str(problem.gold)
    if problem.task in RUNS_PROGRAMS:
        if not allow_code:
            message = f"scoring {problem.task} runs programs that the model wrote"
            raise ValueError(f"{message}: allow it with --allow-code")
        sandbox.check_confinement()
        return sandbox.passes(problem.gold, answers.program(text))
    if problem.task in BENCHMARKS:
        answer = answers.boxed(text)
        return answer is not None and answers.same(answer, str(problem.gold))
    fence = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    name, pairs = problem.gold
    inputs, outputs = zip(*pairs)
    return fence is not None and sandbox.run_program(fence[1], name, inputs) == list(outputs)


def main(argv=None):
    """Print three training problems of every task; takes no options."""
    argv = sys.argv[1:] if argv is None else argv
    if argv:
        raise ValueError(f"takes no options, not {' '.join(argv)}")
    for task in GENERATORS:
        for problem in problems(task, "train", 3):
            print(f"--- {task}\n{problem.prompt}\n\n{problem.answer}\n")


if __name__ == "__main__":
    command.run(main)
