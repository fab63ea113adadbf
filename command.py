"""What every command here shares: a first sign of life, one sentence for an error, files written
whole or not at all.

Files are identified by what they hold, never by when they were written, so that a run which goes on
with other code, another drafter or other weights is refused instead of mixed. Only the standard
library is imported: the sign of life comes before the libraries that take seconds to load.

What this file leaves out: what the commands do.

    import command

    if __name__ == "__main__":
        command.begin("loading torch and transformers")  # before the slow imports
    ...
    if __name__ == "__main__":
        command.run(main)
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import stat
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
WHOLE = 1 << 28  # bytes up to which every byte of a file counts for its id
PIECE = 1 << 20  # bytes of each piece that counts of a larger one


# -------------------------------------------------------------------- how a command begins and ends


def begin(doing):
    """Say what takes the first seconds; until `run`, Ctrl-C ends without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say(doing)


def say(doing):
    """Name, on a terminal, what takes the next seconds."""
    if sys.stderr.isatty():
        print(f"{doing} …", file=sys.stderr, flush=True)


def run(main, argv=None):
    """Call main(argv) and exit with its status; an error of input is one sentence and status 1.

    Text that the terminal's encoding lacks is replaced, not refused: no report is lost for a γ.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    name = os.path.basename(sys.argv[0])
    try:
        sys.exit(main(argv))
    except (ValueError, OSError, FloatingPointError, RuntimeError, RecursionError) as error:
        sys.exit(f"{name}: {sentence(error)}")
    except KeyboardInterrupt as stop:
        sys.exit(f"\nstopped{'; ' if stop.args else ''}{' '.join(map(str, stop.args))}")


def sentence(error):
    """An exception as one line; the library's own kinds are named, as their texts alone say little.

    >>> sentence(ValueError("the budget is 0:\\n give at least 1"))
    'the budget is 0: give at least 1'
    >>> sentence(IsADirectoryError(21, "Is a directory", "runs"))
    "'runs' cannot be used (Is a directory): give another path"
    """
    if isinstance(error, OSError) and error.strerror:
        about = repr(error.filename) if error.filename else "a file"
        return f"{about} cannot be used ({error.strerror}): give another path"
    return " ".join(str(error).split())[:1000] or type(error).__name__


def reason(error):
    """What a library raised, short, for the brackets of our own sentence.

    >>> reason(KeyError("vocab_size"))
    "KeyError: 'vocab_size'"
    """
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# -------------------------------------------------------------------- work that takes its time


def progress(what, total, unit, done=0, shown=True):
    """A tqdm bar over `total` things, of which `done` were finished before; in a file, a plain line
    every half minute. shown: False for processes but the first."""
    from tqdm import tqdm  # not in the standard library

    class Lines(tqdm):
        @staticmethod
        def status_printer(file):
            return lambda text: text and print(text, file=file, flush=True)

    live = sys.stderr.isatty()
    seldom = 0.2 if live else 30
    what += f" ({done} already finished)" * (done > 0)
    return (tqdm if live else Lines)(
        total=total, initial=done, desc=what, unit=f" {unit}", disable=not shown,
        mininterval=seldom, maxinterval=max(10, seldom), dynamic_ncols=live,
    )  # fmt: skip


@contextlib.contextmanager
def resumable(saved):
    """Ctrl-C within says that the same command goes on, if saved() is true: something was kept."""
    try:
        yield
    except KeyboardInterrupt:
        advice = ["run the same command again to go on"] if saved() else []
        raise KeyboardInterrupt(*advice) from None


# ---------------------------------------------------------------------- numbers on the command line


def positive(text):
    """A command-line number of at least 1."""
    return whole(text, 1, (1 << 31) - 1)


def natural(text):
    """A command-line number from 0 to 2³¹ − 1."""
    return whole(text, 0, (1 << 31) - 1)


def whole(text, least, most):
    """The whole number in `text`, from `least` to `most`."""
    if not (text.isascii() and text.isdigit()) or not least <= int(text[:20]) <= most:
        message = f"{text[:40]!r} is not a whole number from {least} to {most}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


# -------------------------------------------------------------------------------------------- files


def write(path, save):
    """Write a file whole or not at all: save(path of a part file beside it), then rename.

    The part is named by the process, so that two processes never share one. Raises ValueError.
    """
    part = f"{path}.part{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        check_regular(path)
        save(part)
        os.replace(part, path)
    except Exception as error:  # safetensors has its own kind for a full disk
        why = getattr(error, "strerror", None) or reason(error)
        message = f"{path} cannot be written ({why}): make room, or choose another place with --out"
        raise ValueError(message) from None
    finally:
        if os.path.exists(part):
            os.remove(part)


def write_text(path, text):
    """Write `text` as UTF-8, whole or not at all."""

    def save(part):
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)

    write(path, save)


def write_json(path, value):
    """Write `value` as JSON, whole or not at all."""
    write_text(path, json.dumps(value))


def check_writable(path, option="--out"):
    """ValueError, before any work, for a place where no file could be written in the end."""
    try:
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        check_regular(path)
        trial = f"{path}.part{os.getpid()}"
        with open(trial, "w"):
            pass
        os.remove(trial)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{path} cannot be written ({why}): choose another {option}") from None


def check_regular(path):
    """OSError unless `path` is a regular file or nothing yet: a device or a pipe would hang or
    swallow.
    """
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "it is not a regular file", path)


def read_text(path):
    """A file's text, UTF-8, without a byte-order mark. Raises FileNotFoundError or ValueError."""
    try:
        check_regular(path)
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise ValueError(f"{path} cannot be read ({why}): give a text file in UTF-8") from None


def read_json(path):
    """The object in a JSON file, as a dict. Raises FileNotFoundError or ValueError."""
    text = read_text(path)
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError("it holds no object")
        return value
    except (ValueError, TypeError, RecursionError) as error:
        message = f"{path} is not a usable JSON file ({reason(error)}): fetch it again"
        raise ValueError(message) from None


# --------------------------------------------------------------------------- what identifies a file


def content_id(*paths):
    """16 hex digits that stand for what the files at `paths` hold; a folder counts with all its
    files.

    Of a file over WHOLE bytes only its size and a PIECE of every 64th of it count: another training
    changes every piece, and 16 GB of weights are not read twice.
    """
    digest = hashlib.sha256()
    for path in paths:
        folder = os.path.isdir(path)
        names = sorted(os.listdir(path)) if folder else [os.path.basename(path)]
        for name in names:
            file = os.path.join(path, name) if folder else path
            if os.path.isfile(file):
                digest.update(f"{name} {os.path.getsize(file)}\n".encode())
                for piece in pieces(file):
                    digest.update(piece)
    return digest.hexdigest()[:16]


def pieces(path):
    """The bytes of a file that count for its id, piece by piece."""
    size = os.path.getsize(path)
    step = PIECE if size <= WHOLE else max(PIECE, size // 64)
    with open(path, "rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            yield file.read(PIECE)


def code_id():
    """16 hex digits that stand for the project's code as it is now, committed or not; its tests do
    not count.
    """
    names = sorted(os.listdir(HERE))
    code = [name for name in names if name.endswith(".py") and not name.startswith("test_")]
    return content_id(*(os.path.join(HERE, name) for name in code))


def differing(before, now):
    """The names under which two dicts hold different things, as text.

    >>> differing({"steps": 4, "seed": 0}, {"steps": 8, "seed": 0, "code": "1f"})
    'code, steps'
    """
    return ", ".join(sorted(name for name in before | now if before.get(name) != now.get(name)))
