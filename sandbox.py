"""The only place where programs that a model wrote are run: whitelisted ones, and any, confined.

A program of the embedded task `code` runs only if its syntax tree stays inside a small whitelist
(no import, no attribute but `append`, no name from outside), and then in a child process with
limits on time, memory and output. Programs written for HumanEval and MBPP may hold anything: they
run as `passes` describes, and only if the user allowed it.

What this file leaves out: prompts (tasks.py), and finding the program in an answer (answers.py).
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
    """What a program must pass: `setup` is run first, both for the program and for the tests
    (HumanEval: the prompt); `tests` is Python source that calls the functions `names` of the
    program and raises if one of them is wrong."""

    setup: str
    names: tuple
    tests: str


# ------------------------------------------------------------------ whitelisted programs of `code`

SAFE_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.For, ast.If, ast.Expr, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Call, ast.Name,
    ast.Constant, ast.List, ast.ListComp, ast.comprehension, ast.Attribute, ast.Load, ast.Store,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
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
        if not isinstance(node, SAFE_NODES):
            return False
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return False
        if isinstance(node, ast.Attribute) and node.attr != "append":
            return False
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            if getattr(node.func, "id", None) not in SAFE_CALLS:
                return False
    return True


def run_program(program, name, inputs, seconds=4):
    """Outputs of `name` on `inputs` from a limited child process, or None if the program is unsafe,
    fails or takes too long."""
    if not is_safe(program):
        return None
    command = [sys.executable, "-I", "-S", "-c", RUNNER % (sorted(SAFE_CALLS),)]
    job = json.dumps([program, name, inputs])
    try:
        done = subprocess.run(command, capture_output=True, input=job, text=True, timeout=seconds)
        return json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, RecursionError):
        return None


# -------------------------------------------------------------------------- any program, confined

# Three processes. The tester runs the benchmark's tests and says "passed" on its standard output.
# The program runs in another, which answers calls of its functions through two pipes: it never
# holds the tests, the expected values or the tester's output, so nothing that it does to its
# interpreter can make a test pass. The keeper between them, the first of its own process ids, waits
# for the tester's end or its deadline: when the keeper ends, the kernel ends the program. The
# tester has a deadline too, so that nothing outlives a caller that was killed.
HARNESS = r"""
import collections, ctypes, marshal, os, resource, select, signal, struct, sys, types

libc = ctypes.CDLL(None, use_errno=True)
ROOT = os.getuid() == 0
LIBRARY = os.path.dirname(os.__file__)
MOUNTS, NETWORK, PROCESSES = 1 << 17, 1 << 30, 1 << 29  # CLONE_NEW* of <linux/sched.h>
IPC, USER = 1 << 27, 1 << 28
REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn",
           "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link",
           "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr",
           "shutil.", "signal.pthread_kill", "pty.", "ctypes.")
MODULES = {"Decimal": "decimal", "Fraction": "fractions"}  # imported only where one crosses
LEAVES = (bool, int, float, complex, str, bytes, bytearray)
KINDS = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "range": range,
    "deque": collections.deque, "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(), "iterator": iter, **MODULES,
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = [LIBRARY, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null",
            "/dev/urandom", "/usr/share/zoneinfo", os.path.join(sys.base_prefix, "lib")]
# Refused to the program by the kernel (numbers of <asm/unistd.h>): socket socketpair shmget semget
# msgget mq_open memfd_create ptrace process_vm_readv process_vm_writev io_uring_setup unshare setns
# setsid setpgid prctl.
CALLS = {
    "x86_64": (0xC000003E, (41, 53, 29, 64, 68, 240, 319, 101, 310, 311, 425, 272, 308, 112, 109,
                            157)),
    "aarch64": (0xC00000B7, (198, 199, 194, 190, 186, 180, 279, 117, 270, 271, 425, 97, 268, 157,
                             154, 167)),
}


def watch(refused, writing, readable, path_of, whole):
    def refuse(event, args):
        if event.startswith(refused) or (event == "open" and args[2] & writing):
            raise PermissionError(event)
        if event == "open" and not isinstance(args[0], int):
            if not whole(path_of(args[0])).startswith(readable):
                raise PermissionError(event)
    return refuse


def isolate():  # an own network, IPC and, for the children, process ids, where that can be had
    if libc.unshare(NETWORK | PROCESSES | IPC) != 0 and not ROOT:
        libc.unshare(NETWORK | PROCESSES | IPC | USER)


def own_proc():  # a /proc with the keeper and the program only, or none: no command line to read
    if libc.unshare(MOUNTS) != 0:
        return
    libc.mount(b"none", b"/", None, ctypes.c_ulong(1 << 18 | 1 << 14), None)  # MS_PRIVATE | MS_REC
    if libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None) != 0 and not ROOT:
        libc.mount(b"none", b"/proc", b"tmpfs", ctypes.c_ulong(0), None)


def keep_library():  # to be imported also where another user may not go: by an open folder
    opened = f"/proc/self/fd/{os.open(LIBRARY, os.O_RDONLY)}"
    sys.path[:] = [path.replace(LIBRARY, opened) for path in sys.path]
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = [path.replace(LIBRARY, opened) for path in module.__path__]
    READABLE.append(opened)


def landlock():  # landlock(7): only the library is read, nothing written or run; no TCP, no signals
    abi = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return
    files = (1 << {1: 13, 2: 14}.get(abi, 15)) - 1
    rules = (ctypes.c_uint64 * 3)(files, 3, 3)
    ruleset = libc.syscall(444, rules, ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24), 0)
    for path in filter(os.path.exists, READABLE):
        opened = os.open(path, os.O_PATH)
        rights = 0b1100 if os.path.isdir(path) else 0b100  # read files, list folders
        libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
        os.close(opened)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)


def seccomp():  # seccomp(2): the system calls CALLS fail, and all by the numbers of another machine
    machine, calls = CALLS.get(os.uname().machine, (0, ()))
    n = len(calls)
    steps = [(0x20, 0, 0, 4), (0x15, 0, n + 3, machine), (0x20, 0, 0, 0), (0x35, n + 1, 0, 1 << 30)]
    steps += [(0x15, n - i, 0, call) for i, call in enumerate(calls)]
    steps += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001)]  # allow, EPERM
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    if n:
        libc.prctl(22, 2, struct.pack("HP", len(steps), ctypes.addressof(packed)), 0, 0)


def confine(uid, seconds):
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    landlock()
    if ROOT:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capability
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: not to be read or traced by the same user
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: killed when the process above it ends
    limits = {"CPU": seconds, "AS": 1 << 30, "FSIZE": 0, "NPROC": 0, "NOFILE": 64, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    seccomp()
    sys.addaudithook(watch(REFUSED, WRITING, tuple(READABLE), os.fsdecode, os.path.abspath))


def pack(value):  # (kind, content) that marshal can carry and that compares as the value does
    for kind in LEAVES:
        if isinstance(value, kind):
            return "", kind(value)
    names = [kind.__name__ for kind in type(value).__mro__]
    kind = next((kind for kind in KINDS if kind in names), None)
    if kind in MODULES:
        return kind, str(value)
    if kind == "range":
        return kind, (value.start, value.stop, value.step)
    if kind == "dict":
        return kind, [(pack(key), pack(item)) for key, item in value.items()]
    if kind or hasattr(value, "__iter__"):
        return kind or "iterator", [pack(item) for item in value]
    return "", float("nan") if value else None  # a match, say: true, and equal to nothing


def unpack(packed):
    kind, content = packed
    if kind in MODULES:
        return getattr(__import__(MODULES[kind]), kind)(content)
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if kind in ("", "range"):
        return range(*content) if kind else content
    items = [unpack(item) for item in content]
    return items if kind == "list" else KINDS[kind](items)


def serve(inbox, outbox):
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    for source in marshal.load(inbox):
        exec(compile(source, "answer", "exec", dont_inherit=True), vars(module))
    while True:
        name, args, kwargs = marshal.load(inbox)
        marshal.dump(pack(vars(module)[name](*args, **kwargs)), outbox)
        outbox.flush()


def remote(name, inbox, outbox):
    def call(*args, **kwargs):
        marshal.dump((name, args, kwargs), outbox)
        outbox.flush()
        return unpack(marshal.load(inbox))
    return call


def test(job, inbox, outbox):
    setup, names, tests, sources = job
    marshal.dump(sources, outbox)
    outbox.flush()
    space = {"__name__": "tests"}
    exec(compile(setup, "setup", "exec", dont_inherit=True), space)
    space.update((name, remote(name, inbox, outbox)) for name in names)
    exec(compile(tests, "tests", "exec", dont_inherit=True), space)


def keep(there, to_tester, seconds):  # returns in the program's process, a child of the keeper's
    program = os.fork()
    if program:
        os.close(to_tester)
        waiting = select.poll()
        waiting.register(there, 0)  # hung up when the tester has ended
        waiting.poll(1000 * seconds)
        os.kill(program, 9)
        os._exit(0)


def main(uid, seconds):
    signal.alarm(seconds + 1)
    isolate()
    if ROOT:
        keep_library()
    (there, to_child), (back, to_tester) = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.close(to_child)
        os.close(back)
        own_proc()
        keep(there, to_tester, seconds + 1)
        inbox, outbox = os.fdopen(there, "rb"), os.fdopen(to_tester, "wb")
        confine(uid, seconds)
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
    """True if `program` (Python source) passes `tests` within `seconds` of wall time (and of
    processor time).

    It runs in a fresh Python without site packages, with an empty environment, in an empty folder.
    Limits that every Linux enforces: 1 GiB of address space, no byte written to any file, no
    further process or thread, no core file, an end of all processes `seconds` + 2 after the start
    even if the caller is killed; started by root it becomes another user, an id that accounts do
    not have. Where the kernel offers them: namespaces (no network, only its own processes in /proc,
    no shared memory of others), Landlock (only Python's library and the system's are read; no file
    is made, cut, removed or run), and seccomp on x86-64 and ARM64 (no socket of any kind, no shared
    memory beyond the limit, no tracing). Behind these, for kernels without them, an audit hook
    refuses sockets, signals, processes, changes of files and reading outside the library.

    Not covered: without Landlock a program that gets round the audit hook, which is no wall, reads
    what everybody (for an ordinary user: this user) may read, reference solutions among it; without
    namespaces too, also command lines in /proc; without seccomp too, it connects to sockets that
    everybody may write to, and shared memory passes the limit. With none of the three it can reach
    the network, send signals to this user's processes and empty or remove this user's files. A
    fault of the kernel, or of `marshal`, which reads the program's answers in the (equally
    confined) tester, is covered nowhere.

    Arguments and results cross as plain values, numbers of `decimal` and `fractions` and views of
    dicts among them. Tests that hand over functions or objects of the program's own classes fail
    (one of the 500 of full MBPP, none of the other sets), and so does a program with threads.
    """
    job = marshal.dumps((tests.setup, tests.names, tests.tests, sources(tests, program)))
    uid = 61184 + 2 * (os.getpid() % 2000)  # of the range that systemd keeps for passing users
    command = [sys.executable, "-I", "-S", "-B", "-c", HARNESS, str(uid), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(command, cwd=folder, env={}, start_new_session=True, **pipes)
        try:
            return child.communicate(job, timeout=seconds)[0] == b"passed"
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def sources(tests, program):
    """The texts to run one after the other: the setup, then the program; one text if the program is
    only the body of the function that the setup (a HumanEval prompt) begins.

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
    """RuntimeError unless a program can be run, and fail, as `passes` promises: to be asked before
    long work."""
    tests = Tests("", ("f",), "assert f(1) == [2]")
    right = passes(tests, "import math\ndef f(x): return [x + 1]")
    if not right or passes(tests, "def f(x): return [x]"):
        message = "this needs Linux and, for root, the right to become another user"
        raise RuntimeError(f"programs cannot be confined here: {message}; choose other tasks")
