"""Prompts and scoring: the two embedded tasks, generated here, so that nothing has to be downloaded.

  arithmetic   a story with two or three small operations, answered by written-out steps and `#### n` (as GSM8K)
  code         "Write a function f(xs) that returns ...", answered by a Python function, scored by running it (as MBPP)

Every problem has a content (the operands and operations, without names and phrasing). A hash of the content
decides whether the problem belongs to `train` or `test`, so no test content is ever trained on. Sentences have a usual
form, used with probability .7, and others: a rigid template would make the commit order dull.

Model-written programs run only if their syntax tree stays inside a small whitelist (no import, no attribute but
`append`, no name from outside), and then in a child process with limits on time, memory and output.

What this file leaves out: the public benchmarks.

    python tasks.py            # print a few problems of each task
"""

import ast
import hashlib
import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass

TASKS = ("arithmetic", "code")
TEST_SHARE = 10  # one content in ten is a test content
MOST = 20000  # distinct prompts that are drawn at most
LARGEST = 30  # no value in an arithmetic story exceeds this
NAMES = "Mia Tom Ana Leo Sam Eva Ben Zoe Max Lily Omar Ruth Nina Paul Iris Hugo".split()
ITEMS = "apples books coins pens shells stamps cards stones plums cups keys balls nuts eggs cakes toys".split()
FUNCTIONS = "f g solve total compute answer run apply".split()
ARGUMENTS = "xs nums values items data numbers".split()


@dataclass(frozen=True)
class Problem:
    """One prompt with a reference answer; `gold` is an int (arithmetic) or (function name, list of (input, output)
    pairs) (code)."""

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


def problems(task, split, n, seed=0):
    """`n` problems of `task` with distinct prompts, all of whose contents lie in `split` ('train' or 'test')."""
    if task not in GENERATORS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS)}")
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

SAFE_NODES = (
    ast.Module,
    ast.FunctionDef,
    ast.arguments,
    ast.arg,
    ast.Return,
    ast.Assign,
    ast.AugAssign,
    ast.For,
    ast.If,
    ast.Expr,
    ast.Compare,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.List,
    ast.ListComp,
    ast.comprehension,
    ast.Attribute,
    ast.Load,
    ast.Store,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
SAFE_CALLS = {"sum", "len", "abs", "max", "min", "sorted", "range"}
RUNNER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
program, name, inputs = json.load(sys.stdin)
space = {"__builtins__": {k: __builtins__.__dict__[k] for k in %r}}
exec(compile(program, "answer", "exec"), space)
sys.stdout.write(json.dumps([space[name](xs) for xs in inputs])[:1 << 20])
"""


def is_safe(program):
    """True if the program parses and every node of its syntax tree is whitelisted."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, SAFE_NODES) or (isinstance(node, ast.FunctionDef) and node.decorator_list):
            return False
        if isinstance(node, ast.Attribute) and node.attr != "append":
            return False
        if (
            isinstance(node, ast.Call)
            and not isinstance(node.func, ast.Attribute)
            and getattr(node.func, "id", None) not in SAFE_CALLS
        ):
            return False
    return True


def run_program(program, name, inputs, seconds=4):
    """Outputs of `name` on `inputs` from a limited child process, or None if it is unsafe, fails or takes too long."""
    if not is_safe(program):
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUNNER % (sorted(SAFE_CALLS),)],
            capture_output=True,
            input=json.dumps([program, name, inputs]),
            text=True,
            timeout=seconds,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, json.JSONDecodeError, RecursionError):
        return None


def score(problem, text):
    """True if the answer text is right: what follows the last `####` is the number, or the first code fence passes
    every case."""
    if problem.task == "arithmetic":
        return "####" in text and text.rsplit("####", 1)[1].strip() == str(problem.gold)
    fence = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    name, pairs = problem.gold
    return fence is not None and run_program(fence[1], name, [xs for xs, _ in pairs]) == [out for _, out in pairs]


def main(argv=()):
    """Print three training problems of every task; takes no options."""
    if argv:
        sys.exit(f"tasks.py takes no options, not {' '.join(argv)}")
    for task in GENERATORS:
        for problem in problems(task, "train", 3):
            print(f"--- {task}\n{problem.prompt}\n\n{problem.answer}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
