"""What an answer's text says: the formula in its last box, the program in its fences.

Formulas are compared by math-verify (Hugging Face) in a worker process that ends itself after some
seconds: the library's own timeouts need the main thread and the caller's SIGALRM, and a tower of
powers takes all memory. Before it, typography and units are taken off, and what it reads wrong is
put right (`1 1/2`, `1,250` inside a fraction, `2(3)`) or refused (`10 30`, which it adds up).
An answer is parsed whole or is wrong; nothing is accepted for a part of it.

What this file leaves out: decimals that are only near (0.33 is not 1/3), which unit it is (5 cm is
5 m, and 18% is 18, as in MATH's own answers), numbers in words, programs in prose without a fence;
running programs is sandbox.py's.
"""

import ast
import functools
import importlib.metadata
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading

SECONDS = 2  # of processor time for one comparison
MEMORY = 1 << 32  # bytes of the worker's address space
LONGEST = 1000  # characters of a formula; MATH-500's longest has 57

# ---------------------------------------------------------------------------------------- formulas

SIGNS = {"−–—": "-", "π": r"\pi ", "°": r"^\circ ", "×": r"\times ", "·⋅": r"\cdot "}
SIGNS |= {"∞": r"\infty ", "∪": r"\cup ", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm "}
SIGNS |= {"⁄∕": "/", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34"}
SIGNS |= {"\u00a0\u202f\u2009\n\t": " "}
SIGNS |= {sign: f"^{n}" for n, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
SIGNS |= {sign: f"_{n}" for n, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")}
ALONE = r"(?<![\\A-Za-z])"  # before a word that is no command and no end of a longer word
END = r"(?![A-Za-z])"
TEXT = r"\\(?:text(?:rm|bf|it|normal)?|mbox)\s*\{([^{}]*)\}"
# (pattern, replacement), in this order; none changes what the answer says
REWRITES = [
    (r"\\\\\s*\[[\d.]+[a-z]+\]", r"\\\\ "),
    (r"(?<!\\)\\[()\[\]!]\s*|\\?[$%€£¥¢]|\\(?:(?:text)?cent|textdollar|pounds)" + END, ""),
    (r"(?<!\\)\\[,;: ]|~|\\(?:q?quad|left|right|[bB]igg?[lr]?)" + END, " "),
    (r"\\(?:displaystyle|textstyle|[lL]arge|bf|rm)" + END + r"|\\(?:text)?color\s*\{\w*\}", ""),
    (r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree" + END + r")(?:\s*[CF]" + END + ")?", ""),
    (r"\{,\}|\\text\s*\{,\}", ","),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\\[a-z]+)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\langle(.*)\\rangle", r"(\1)"),
    (r"\(\s*\\begin\{(?:array|matrix)\}(?:\{[clr]+\})?(.*?)\\end\{(?:array|matrix)\}\s*\)",
     r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\\\\\s*\\end", r"\\end"),
    (r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}"),
    (r"\{([^{}]*)\\over" + END + r"([^{}]*)\}", r"\\frac{\1}{\2}"),
    (ALONE + "pi" + END, r"\\pi "),
    (r"_\{\s*(" + TEXT + r")\s*\}", r" \1"),
]  # fmt: skip
MATH = r"\\(?:math(?:rm|bf|it|sf)|boldsymbol|operatorname|underline)\s*\{([^{}]*)\}"
# A word that is a unit, a label or a name rather than a product of variables: what stands in
# \text{}, four letters or more, three behind a space, a known short one; no function, no angle ABC.
SHORT = r"ft|in|cm|mm|km|kg|mg|mph|lbs?|oz|hrs?|mi|yds?|m[Ll]|pts|sq|cu|is|USD?|Rs|(?<=\s)[mgsLh]"
FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|lcm|gcd|det)[a-z]?"
LITTLE = "(?:(?<=^)|(?<=[\\s/]))(?:[A-Za-z]{3}|of|an|by|on|at|[ap]m)"
LONG = rf"(?!(?:{FUNCTION}|[A-Z]+){END})(?:[A-Za-z]{{4,}}|{LITTLE})"
WORD = rf'(?<!")(?<!\\begin{{)(?<!\\end{{){ALONE}(?:{SHORT}|{LONG}){END}'
UNITS = r'(?<=[\w})\]])\s*(?:"\w+"(?: ?[\^_]\{?-?\w\}?)?(?:/\w(?!\w))?[\s/.-]*)+$'
LETTERS, QUOTED = r'(?<!["\\A-Za-z])[A-Za-z]+(?!["A-Za-z])', r'"\g<0>"'
ENDING = " .,;:\\"  # what may follow an answer
LABELS = r'^(?:"\w+"\.?\s*)+(?:[:=]+|(?=[^\s":=)]))'
TURNING = "negative minus not least most than less more half over under times plus dozen".split()
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Numbers: mixed ones, powers of ten, products without a sign; thousands where commas part nothing.
THOUSANDS = r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.])\d{1,3}(?: \d{3})+(?!\s*\d)"
NUMBERS = [
    (r"(?<![\d.\w}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d+)(?!\w)", r"\1\\times 10^{\2}"),
    (r"(?<![_^\d])(\d+\.?\d*)\s*\((?=[^()]*\))", r"\1\\cdot("),
]
BASE = r"(?:^|=)\s*\(?(\d+)\)?_\{?(\d+)\}?$"
# Refused: words left over, two numbers side by side, digits with a base, what is too large.
LARGE = r"[\d)}]\s*\^\s*\{?[-+(\s]*(?:\d{4,}|\d+\s*[\^!])|\d{4,}\)*\s*!|!\s*!|\^.*!"
REFUSED = rf'"|(?<![_^\d])\d+\s+\.?\d|\d\)?\s*_|{LARGE}'


def boxed(text):
    r"""Content of the last complete \boxed{...} or \fbox{...}, braces inside it matched, or None.

    >>> boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    opened, last = [], (-1, None)
    for found in re.finditer(r"(\\(?:boxed|fbox)\s*)?\{|\}|\\.", text, re.S):
        if found[0][0] == "\\" and not found[1]:  # \{ and \} are no braces
            continue
        if found[0] != "}":
            opened.append((found.start() if found[1] else -1, found.end()))
        elif opened:
            start, begin = opened.pop()
            if start > last[0]:
                last = start, text[begin : found.start()]
    return last[1]


def plain(formula):
    r"""A LaTeX answer without typography, units and labels; words that are neither stay in quotes.

    >>> plain(r"Total: \$1{,}250\text{ per week}."), plain(r"\text{Evelyn}"), plain(r"1 1/2")
    ('1250', '"Evelyn"', '1\\frac{1}{2}')
    """
    for signs, meaning in SIGNS.items():
        formula = re.sub(f"[{signs}]", lambda _: meaning, formula)
    for pattern, replacement in REWRITES:
        formula = re.sub(pattern, replacement, formula)
    for _ in range(3):  # wrappers, from the innermost outwards
        formula = re.sub(MATH, r" \1 ", formula)
        formula = re.sub(TEXT, lambda found: f" {re.sub(LETTERS, QUOTED, found[1])} ", formula)
    formula = re.sub(WORD, QUOTED, formula)
    formula = re.sub(r'(?:,\s*)?"?' + ALONE + "(?:and|or)" + END + '"?', ",", formula)
    for word, power in SCALES.items():
        formula = formula.replace(f'"{word}"', rf"\times 10^{{{power}}} ")
    formula = formula.lstrip().rstrip(ENDING)
    if not set(TURNING) & set(re.findall(r'"(\w+)"', formula.lower())):
        formula = re.sub(LABELS, "", re.sub(UNITS, "", formula))
    formula = formula.lstrip(" :=").rstrip(ENDING)
    if formula[:1] not in "([" and formula[:2] != r"\{":
        formula = re.sub(THOUSANDS, lambda found: re.sub("[ ,]", "", found[0]), formula)
    for pattern, replacement in NUMBERS:
        formula = re.sub(pattern, replacement, formula)
    return formula


def name_of(formula):
    """The letters of a plain answer that is a name or a choice, as `"Evelyn"` or (C), else ''."""
    is_name = re.fullmatch(r'[A-Za-z\s"().-]+', formula)
    return re.sub(r"\W", "", formula).casefold() if is_name else ""


@functools.cache
def same(given, gold):
    """True if two LaTeX answers say the same.

    >>> same("1 1/2", r"\\frac{3}{2}"), same("52_9", "52_8"), same("5\\\\text{ cm}", "5")
    (True, False, True)
    """
    if len(given) > LONGEST:
        return False
    given, gold = plain(given), plain(gold)
    if given == gold:
        return given != ""
    if '"' in gold and name_of(gold):
        return name_of(given) == name_of(gold)
    based = [re.search(BASE, formula) for formula in (given, gold)]
    if all(based):
        return based[0].groups() == based[1].groups()
    return not any(re.search(REFUSED, formula) for formula in (given, gold)) and ask(given, gold)


# -------------------------------------------------------------------------- the worker of formulas

LOCK = threading.Lock()
RULES = ("basic_latex", "malformed_operators", "nits")  # the library's own rewrites that are wanted


@functools.cache
def worker(process_id):
    """The worker process of this process, ready for questions. Raises RuntimeError."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("math-verify cannot be loaded: pip install -r requirements.txt")
    return process


def ask(given, gold):
    """Whether the library finds two formulas equal; False if that takes too long or too much."""
    with LOCK:
        process = worker(os.getpid())
        try:
            process.stdin.write(json.dumps([given, gold]) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = ""
        if not reply:  # it ended itself
            process.kill()
            process.wait()
            worker.cache_clear()
    return reply == "True\n"


def equal(given, gold):
    """Whether math-verify finds two plain formulas equal, each read whole."""
    from sympy import I
    from sympy.core.function import AppliedUndef
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from math_verify import verify
    from math_verify.grader import is_equation, take_first_relation, take_last_relation

    rules = NormalizationConfig(units=False, boxed="none", **dict.fromkeys(RULES, True))
    read = functools.partial(latex2sympy, is_real=True, normalization_config=rules)
    said, wanted = [
        formula.xreplace({symbol: I for symbol in formula.free_symbols if symbol.name == "i"})
        for formula in (read(given), read(gold))
    ]
    equals = functools.partial(verify, float_rounding=12, timeout_seconds=None)
    if is_equation(said) and not is_equation(wanted):  # `x = 5` says 5, `2x = 10` does not say 10
        left, value = take_first_relation(said).lhs, take_last_relation(said).rhs
        unknown = left.free_symbols
        if len(unknown) == 1 and not left.is_Symbol and left.is_polynomial():
            return False
        if not unknown and not left.has(AppliedUndef) and not equals(value, left):
            return False
    return equals(wanted, said, allow_set_relation_comp=True)


def serve():
    """Answer questions, one a line, until the caller is gone; a long one ends the process."""
    import math_verify  # noqa: F401  (before the first question's seconds count)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            print(bool(equal(*json.loads(line))), flush=True)
        except Exception:  # whatever the library cannot read is no equal formula
            print(False, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---------------------------------------------------------------------------------------- programs

PYTHON = ("python", "python3", "python2", "py", "py3", "ipython", "pycon")  # or no name at all
FENCE = r"([ \t]*)(`{3,}|~{3,})[ \t]*(.*)"  # its indent, itself, what stands behind it
CODE = r"\s*((?:async def|def|class|from|import|@\w+|\w+ *= *lambda)\b.*)"
TOKEN = r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\\.|#.*"""
DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DEMONSTRATING = {"exit", "main", "run", "testmod", "show"}  # as in unittest.main() and plt.show()


def open_quote(line, quote):
    """The triple quote that is open behind a line of Python if `quote` ('' for none) was before.

    >>> open_quote("def f(): '''It's f.", ""), open_quote("It's f.'''  # '''", "\'\'\'")
    ("\'\'\'", '')
    """
    at = 0
    while found := re.compile(rf"\\.|{quote}" if quote else TOKEN).search(line, at):
        at = found.end()
        if found[0] == quote:
            quote = ""
        elif not quote and found[0] in ('"""', "'''"):
            quote = found[0]
    return quote


def opening(info):
    """(language, first lines of code) of what stands behind an opening fence.

    >>> opening("python title=x"), opening("{.python}"), opening("py def f(x): return x")
    (('python', []), ('python', []), ('py', ['def f(x): return x']))
    """
    language, rest = re.fullmatch(r"[{.\s]*([\w+#-]*)(.*)", info).groups()
    if code := re.fullmatch(CODE, info):
        return "", [code[1]]
    code = re.fullmatch(CODE, rest)
    return language.lower(), [code[1]] if code else []


def blocks(text):
    """([(language, code)] of the fences in a text, the text outside of them).

    A block ends at a fence on a line of its own or behind code, at the next one of Python, or with
    the text; inside a triple-quoted string a fence is text.

    >>> blocks("So:\\n```python\\nx = 1```\\nIt is 1.")
    ([('python', 'x = 1')], 'So:\\nIt is 1.')
    """
    found, outside, mark, quote = [], [], "", ""
    for line in text.split("\n"):
        fence = re.fullmatch(FENCE, line)
        language, first = opening(fence[3]) if fence else ("", [])
        if fence and not quote and (not mark or language in PYTHON):
            indent, mark, code = fence[1], fence[2], first
            found.append((language, code))
        elif mark:
            code.append(line.removeprefix(indent))
        else:
            outside.append(line)
        if mark and code:
            end = code[-1].rstrip()
            bare = end.rstrip(mark[0])
            if end.endswith(mark) and not open_quote(bare, quote):
                code[-1], mark, quote = bare, "", ""
            else:
                quote = open_quote(code[-1], quote)
    return [(language, "\n".join(code)) for language, code in found], "\n".join(outside)


def syntax(code):
    """The statements of a Python text, none if it is no Python."""
    try:
        return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def is_idle(statement):
    """True for what defines nothing: an assertion, or an expression such as `print(f(2))`. A
    setting stays, as `sys.setrecursionlimit(9999)`, and so does a text."""
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Assert)
    call = statement.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return not isinstance(call.func.value, ast.Name) or call.func.attr in DEMONSTRATING
    return not isinstance(call, ast.Constant)


def definitions(code):
    """A Python text whose idle statements, and those that use what is defined only below them, are
    replaced by `pass`.

    >>> definitions("f(2)\\nn = f(3)\\ndef f(x): return x\\nassert f(1) == 2")
    'pass\\npass\\ndef f(x): return x\\npass'
    """
    body, lines, place = syntax(code), code.encode().split(b"\n"), {}
    for i, statement in enumerate(body):
        if isinstance(statement, DEFINING):
            place.setdefault(statement.name, i)
    for i, statement in reversed(list(enumerate(body))):
        inside = list(ast.walk(statement))
        early = any(place.get(getattr(node, "id", None), -1) > i for node in inside)
        lazy = isinstance(statement, DEFINING) or any(isinstance(n, ast.Lambda) for n in inside)
        if is_idle(statement) or (early and not lazy):
            first, last = statement.lineno - 1, statement.end_lineno - 1
            head = lines[first][: statement.col_offset]
            tail = lines[last][statement.end_col_offset :]
            lines[first : last + 1] = [head + b"pass" + tail]
    return b"\n".join(lines).decode()


def program(text):
    """The Python program of an answer: the definitions and imports of all its Python blocks, in
    order. Without any, the text outside of fences; where that defines nothing either, the first
    block as it is (the body of a function, say).

    >>> program("Call it:\\n```\\nf(2)\\n```\\nIt is\\n```py\\ndef f(x): return x\\n```")
    'pass\\n\\ndef f(x): return x\\n'
    """
    found, outside = blocks(text.replace("\ufeff", "").replace("\u00a0", " ").replace("\r", ""))
    python = [code for language, code in found if language in (*PYTHON, "")]
    for code in ("\n".join(code for code in python if syntax(code)), outside):
        if not all(isinstance(statement, (ast.Expr, ast.Assert)) for statement in syntax(code)):
            return definitions(code)
    named = [code for language, code in found if language in PYTHON]
    return next((code for code in named + python if code.strip()), outside)


def library():
    """Name and version of the library that compares formulas. Raises RuntimeError without it."""
    try:
        return f"math-verify {importlib.metadata.version('math-verify')}"
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("math-verify is missing: pip install -r requirements.txt") from None


if __name__ == "__main__":
    serve()
