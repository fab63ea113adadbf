"""The only place where programs that a model wrote are run: whitelisted ones of the embedded task, and any, confined.

A program of the embedded task `code` runs only if its syntax tree stays inside a small whitelist (no import, no
attribute but `append`, no name from outside), and then in a child process with limits on time, memory and output.
Programs written for HumanEval and MBPP may hold anything: they run as `passes` describes, and only if the user allowed
it.

What this file leaves out: prompts, and finding the program in an answer (tasks.py).
"""

import ast
import contextlib
import functools
import json
import marshal
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Tests:
    """What a program must pass: `setup` is run first, both for the program and for the tests (HumanEval: the prompt);
    `tests` is Python source that calls the functions `names` of the program and raises if one of them is wrong."""

    setup: str
    names: tuple
    tests: str


# ------------------------------------------------------------------------ whitelisted programs of `code`

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


# ---------------------------------------------------------------------------------- any program, confined

# Two processes. The tester runs the benchmark's tests and says "passed" on its standard output. Its child runs the
# program and answers calls of its functions through two pipes: it never holds the tests, the expected values or the
# tester's output, so nothing that it does to its own interpreter can make a test pass.
HARNESS = r"""
import ctypes, marshal, os, resource, sys, types

libc = ctypes.CDLL(None, use_errno=True)
ROOT = os.getuid() == 0
NETWORK, PROCESSES, IPC, USER = 1 << 30, 1 << 29, 1 << 27, 1 << 28  # CLONE_NEW* of <linux/sched.h>
REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
           "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "shutil.", "signal.pthread_kill", "pty.", "ctypes.")
KINDS = (dict, list, tuple, set, frozenset, str, int, float, bytes, bytearray)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event, args, refused=REFUSED, writing=WRITING):
    if event.startswith(refused) or (event == "open" and args[2] & writing):
        raise PermissionError(event)


def isolate():  # an own network and own process ids for the children, where the kernel lets us
    if libc.unshare(NETWORK | PROCESSES | IPC) != 0 and not ROOT:
        libc.unshare(NETWORK | PROCESSES | IPC | USER)


def keep_library():  # importable also where another user may not go, as below /root: reached by an open folder
    library = os.path.dirname(os.__file__)
    opened = f"/proc/self/fd/{os.open(library, os.O_RDONLY)}"
    sys.path[:] = [path.replace(library, opened) for path in sys.path]
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = [path.replace(library, opened) for path in module.__path__]


def landlock():  # landlock(7): no file is written, made, removed, cut or executed; no TCP, no signal to others
    abi = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return
    files = ((1 << {1: 13, 2: 14}.get(abi, 15)) - 1) & ~0b1100  # all rights but to read files and folders
    rules = (ctypes.c_uint64 * 3)(files, 3, 3)
    ruleset = libc.syscall(444, rules, ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24), 0)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)


def confine(uid, seconds):
    if ROOT:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: not to be read or traced by processes of the same user
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    landlock()
    for name, limit in (("CPU", seconds), ("AS", 1 << 30), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", 64), ("CORE", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    sys.addaudithook(refuse)


def plain(value):  # as marshal can carry it: a Counter becomes a dict, a named tuple a tuple, a match not-a-number,
    try:  # which is true and equal to nothing
        marshal.dumps(value)
        return value
    except ValueError:
        kind = next((kind for kind in KINDS if isinstance(value, kind)), None)
        if kind in KINDS[:5]:
            return kind(plain(item) for item in (value.items() if kind is dict else value))
        return kind(value) if kind else float("nan") if value else None


def serve(inbox, outbox):
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    for source in marshal.load(inbox):
        exec(compile(source, "answer", "exec", dont_inherit=True), vars(module))
    while True:
        name, args, kwargs = marshal.load(inbox)
        value = vars(module)[name](*args, **kwargs)
        loose = hasattr(value, "__iter__") and not isinstance(value, KINDS)  # an iterator or view
        marshal.dump((loose, plain(list(value) if loose else value)), outbox)
        outbox.flush()


def remote(name, inbox, outbox):
    def call(*args, **kwargs):
        marshal.dump((name, args, kwargs), outbox)
        outbox.flush()
        loose, value = marshal.load(inbox)
        return iter(value) if loose else value
    return call


def test(job, inbox, outbox):
    setup, names, tests, sources = job
    marshal.dump(sources, outbox)
    outbox.flush()
    space = {"__name__": "tests"}
    exec(compile(setup, "setup", "exec", dont_inherit=True), space)
    space.update((name, remote(name, inbox, outbox)) for name in names)
    exec(compile(tests, "tests", "exec", dont_inherit=True), space)


def main(uid, seconds):
    isolate()
    if ROOT:
        keep_library()
    (there, to_child), (back, to_tester), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.close(to_child)
        os.close(back)
        inbox, outbox = os.fdopen(there, "rb"), os.fdopen(to_tester, "wb")
        confine(uid, seconds)
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: killed when the tester ends
        serve(inbox, outbox)
    os.close(there)
    os.close(to_tester)
    inbox, outbox = os.fdopen(back, "rb"), os.fdopen(to_child, "wb")
    job, verdict = marshal.load(sys.stdin.buffer), os.dup(1)
    os.dup2(nothing, 1)
    confine(uid + 1, seconds)
    test(job, inbox, outbox)
    os.write(verdict, b"passed")
    os._exit(0)


main(int(sys.argv[1]), int(sys.argv[2]))
"""


def passes(tests, program, seconds=10):
    """True if `program` (Python source) passes `tests` within `seconds` of wall time (and of processor time).

    It runs in a fresh Python without site packages, with an empty environment, in an empty folder. Limits that every
    Linux enforces: 1 GiB of address space, no byte written to any file, no further process or thread, no core file;
    started by root it becomes another user, an id that accounts do not have. Where the kernel offers them: namespaces
    without a network or other processes to see, and Landlock, under which no file is made, cut or removed. Behind
    these, for kernels without them, an audit hook refuses sockets, signals, processes and changes of files from Python.

    Not covered: files that everybody (for an ordinary user: this user) may read can be read, though nowhere be sent;
    on a kernel with neither namespaces nor Landlock an ordinary user's program that gets round the audit hook, which
    is no wall, can reach the network, send signals to this user's processes and empty or remove this user's files; a
    fault of the kernel, or of `marshal`, which reads the program's answers in the (equally confined) tester.

    Arguments and results cross as plain values: tests that hand over functions or objects of the program's own classes
    fail (one of the 500 of full MBPP, none of the other sets), and so does a program that starts threads.
    """
    job = marshal.dumps((tests.setup, tests.names, tests.tests, sources(tests, program)))
    uid = 61184 + 2 * (os.getpid() % 2000)  # of the range that systemd keeps for passing users
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", HARNESS, str(uid), str(seconds)],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.communicate(job, timeout=seconds)[0] == b"passed"
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def sources(tests, program):
    """The texts to run one after the other: the setup, then the program; one text if the program is only the body of
    the function that the setup (a HumanEval prompt) begins.

    >>> sources(Tests("def f(x):\\n", ("f",), ""), "    return x\\n")
    ['def f(x):\\n    return x\\n']
    """
    if not program.lstrip("\n")[:1].isspace():
        return [tests.setup, program]
    if any(re.search(rf"^\s+def {name}\b", program, re.M) for name in tests.names):
        return [tests.setup, textwrap.dedent(program)]
    return [tests.setup + program]


@functools.cache
def check_confinement():
    """RuntimeError unless a program can be run, and fail, as `passes` promises; a caller asks before long work."""
    right = Tests("", ("f",), "assert f(1) == [2]")
    if not passes(right, "import math\ndef f(x): return [x + 1]") or passes(right, "def f(x): return [x]"):
        raise RuntimeError(
            "programs cannot be confined here: this needs Linux and, for root, the right to become another user; "
            "choose tasks that need none"
        )
