"""What every command shares: files written whole or not at all, files read or refused in one
sentence, what identifies a file, numbers on the command line, how a command ends.

Left out: the commands themselves (test_commands.py).

    python -m pytest test_command.py          # seconds
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import command
from test_exactness import one_sentence


def failing(error, text="half of it"):
    """A save that writes some of its file before it fails."""

    def save(part):
        with open(part, "w") as file:
            file.write(text)
        raise error

    return save


# -------------------------------------------------------------------------------------- writing


def test_a_file_is_written_beside_itself_and_then_named(tmp_path):
    """The part is in the same folder, so that naming it is one step; until then the old text
    stands. The folder is made."""
    path, seen = tmp_path / "new" / "runs" / "a.txt", []

    def save(part):
        seen.append(part)
        if len(seen) == 2:
            assert path.read_text() == "1"
        with open(part, "w") as file:
            file.write(str(len(seen)))

    command.write(str(path), save)
    assert path.read_text() == "1"
    command.write(str(path), save)
    assert path.read_text() == "2" and os.listdir(path.parent) == ["a.txt"]
    for part in seen:
        assert os.path.dirname(part) == str(path.parent) and str(os.getpid()) in part


def test_names_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command.check_writable("a.txt")
    command.write_text("a.txt", "here")
    assert (tmp_path / "a.txt").read_text() == "here"


@pytest.mark.parametrize("error, says", [
    (OSError(28, "No space left"), r"a.txt cannot be written \(No space left\): "),
    (RuntimeError("I/O error:\n os error"), r"a.txt cannot be written \(RuntimeError: I/O error: "),
    (KeyError("wide"), r"a.txt cannot be written \(KeyError: 'wide'\): "),
])  # fmt: skip
@pytest.mark.parametrize("old", (None, "whole"))
def test_a_save_that_fails_changes_nothing(tmp_path, error, says, old):
    """What was there stays, nothing else is left, and one sentence says why and what to do."""
    path = tmp_path / "a.txt"
    if old:
        path.write_text(old)
    with pytest.raises(ValueError, match=says) as raised:
        command.write(str(path), failing(error))
    assert one_sentence(raised) and "--out" in str(raised.value)
    assert os.listdir(tmp_path) == ["a.txt"] * bool(old)
    assert not old or path.read_text() == old


def test_ctrl_c_while_saving(tmp_path):
    """It goes through, the old file stays, and no part is left."""
    path = tmp_path / "a.txt"
    path.write_text("whole")
    with pytest.raises(KeyboardInterrupt):
        command.write(str(path), failing(KeyboardInterrupt()))
    assert os.listdir(tmp_path) == ["a.txt"] and path.read_text() == "whole"


def test_text_and_json_are_utf_8(tmp_path):
    path = tmp_path / "a.json"
    command.write_text(str(path), "γ = 0.2\n")
    assert path.read_bytes() == b"\xce\xb3 = 0.2\n"
    command.write_json(str(path), {"γ": [1, None, 0.5]})
    assert json.loads(path.read_bytes()) == command.read_json(str(path)) == {"γ": [1, None, 0.5]}


@pytest.fixture(params=("folder", "pipe", "device", "full", "below", "proc"))
def no_place(request, tmp_path):
    """A path where no file can be written, and what it is afterwards."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    paths = {"device": "/dev/null", "full": "/dev/full", "below": str(tmp_path / "file" / "a"),
             "proc": "/proc/nowhere/a"}  # fmt: skip
    path = paths.get(request.param, str(tmp_path / request.param))
    kind = os.stat(path).st_mode if os.path.exists(path) else None
    yield path
    assert kind == (os.stat(path).st_mode if os.path.exists(path) else None)
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]
    assert not [name for name in os.listdir("/dev") if "part" in name]


def test_places_where_nothing_can_be_written(no_place):
    """Told before any work, with the option that names the place; and when it is written after
    all. None of them is replaced, and none makes the command wait."""
    with pytest.raises(ValueError, match="cannot be written .*choose another --plot$") as error:
        command.check_writable(no_place, "--plot")
    assert one_sentence(error) and no_place in str(error.value)
    with pytest.raises(ValueError, match="choose another --out$"):
        command.check_writable(no_place)
    with pytest.raises(ValueError, match="cannot be written") as error:
        command.write_text(no_place, "text")
    assert one_sentence(error) and no_place in str(error.value)


def test_a_trial_leaves_nothing_and_keeps_what_is_there(tmp_path):
    """Folders that are missing are made; a file that is there stays as it is."""
    command.check_writable(str(tmp_path / "new" / "a.txt"))
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == []
    path = tmp_path / "a.txt"
    path.write_text("kept")
    command.check_writable(str(path))
    assert path.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["a.txt", "new"]


# -------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("read", (command.read_text, command.read_json))
def test_reading(tmp_path, read):
    """UTF-8, with or without a byte-order mark."""
    path = tmp_path / "a.json"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + '{"γ": 1}'.encode())
        assert read(str(path)) == ('{"γ": 1}' if read is command.read_text else {"γ": 1})


@pytest.mark.parametrize("read", (command.read_text, command.read_json))
@pytest.mark.parametrize("content", ("γ".encode("utf-16"), "é{}".encode("latin-1"), b"\x80"))
def test_other_encodings_are_refused(tmp_path, read, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.txt cannot be read .*UTF-8") as error:
        read(str(path))
    assert one_sentence(error) and not isinstance(error.value, UnicodeDecodeError)


@pytest.mark.parametrize("read", (command.read_text, command.read_json))
def test_what_is_no_file_is_refused(tmp_path, read):
    """A missing file; a folder, a pipe or a device, which would be read for ever."""
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.txt") as error:
        read(str(tmp_path / "nowhere.txt"))
    assert one_sentence(error)
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path), str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ValueError, match=f"{path} cannot be read") as error:
            read(path)
        assert one_sentence(error)


@pytest.mark.parametrize("content", ("", "{", "[1]", "3", "null", '"text"', "{]", "[" * 99999))
def test_json_that_is_no_object_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="a.json is not a usable JSON file") as error:
        command.read_json(str(path))
    assert one_sentence(error)


# -------------------------------------------------------------------------- what identifies a file


def test_an_id_stands_for_the_content(tmp_path):
    """16 hex digits: not by time or folder; by every byte, by the name, by the order."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"0123456789")
    b.write_bytes(b"0123456789")
    first = command.content_id(str(a))
    assert len(first) == 16 and not set(first) - set("0123456789abcdef")
    os.utime(a, (1, 1))
    assert command.content_id(str(a)) == first
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a").write_bytes(b"0123456789")
    assert command.content_id(str(tmp_path / "copy" / "a")) == first
    ids = {first, command.content_id(str(b)), command.content_id(str(a), str(b)),
           command.content_id(str(b), str(a)), command.content_id()}  # fmt: skip
    assert len(ids) == 5
    for n in range(10):
        changed = bytearray(b"0123456789")
        changed[n] += 1
        a.write_bytes(changed)
        ids.add(command.content_id(str(a)))
    a.write_bytes(b"012345678")
    assert len(ids | {command.content_id(str(a))}) == 16


def test_the_id_of_a_folder(tmp_path):
    """All its files count, in whatever order they were written; folders in it do not."""
    for folder, names in (("one", "abc"), ("two", "cab")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(f"of {name}")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    first = command.content_id(one)
    assert command.content_id(two) == first
    (tmp_path / "two" / "sub").mkdir()
    assert command.content_id(two) == first
    ids = {first}
    for name in "abc":
        (tmp_path / "two" / name).write_text(f"of {name}!")
        ids.add(command.content_id(two))
    (tmp_path / "two" / "d").write_text("")
    ids.add(command.content_id(two))
    (tmp_path / "two" / "a").rename(tmp_path / "two" / "e")
    assert len(ids | {command.content_id(two)}) == 6


def test_the_id_of_a_large_file(tmp_path, monkeypatch):
    """Up to WHOLE bytes all count; of more, the size, and a piece of every 64th."""
    assert command.WHOLE == 2**28 and command.PIECE == 2**20
    monkeypatch.setattr(command, "WHOLE", 200)
    monkeypatch.setattr(command, "PIECE", 2)
    path = tmp_path / "weights"

    def counts(size):
        """Which of the first 60 bytes of a file of `size` its id tells of."""
        path.write_bytes(bytes(size))
        first, changed = command.content_id(str(path)), []
        for n in range(60):
            path.write_bytes(bytes(n) + b"\1" + bytes(size - n - 1))
            if command.content_id(str(path)) != first:
                changed.append(n)
        return changed

    assert counts(60) == counts(200) == list(range(60))
    assert counts(201) == [n for n in range(60) if n % 3 < 2]  # 201 / 64 = 3
    assert counts(640) == [n for n in range(60) if n % 10 < 2]  # 640 / 64 = 10
    path.write_bytes(bytes(2000))
    first = command.content_id(str(path))
    path.write_bytes(bytes(2001))
    assert command.content_id(str(path)) != first


def test_the_id_of_the_code(tmp_path, monkeypatch):
    """Every product file counts, committed or not; tests and other files do not."""
    assert os.path.samefile(command.HERE, os.path.dirname(os.path.abspath(__file__)))
    monkeypatch.setattr(command, "HERE", str(tmp_path))
    for name in ("a.py", "b.py", "test_a.py", "notes.txt"):
        (tmp_path / name).write_text("1")
    first = command.code_id()
    assert len(first) == 16
    for name in ("test_a.py", "notes.txt", "test_new.py", "new.md"):
        (tmp_path / name).write_text("2")
        assert command.code_id() == first
    ids = {first}
    for name in ("a.py", "b.py", "new.py"):
        (tmp_path / name).write_text("2")
        ids.add(command.code_id())
    os.remove(tmp_path / "a.py")
    assert len(ids | {command.code_id()}) == 5


def test_differing():
    before, now = {"a": 1, "b": 2, "c": 3, "e": None}, {"a": 1, "c": 4, "d": 5}
    assert command.differing(before, now) == "b, c, d" and command.differing(before, before) == ""


# -------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize("error, text", [
    (ValueError("the budget is 0:\n  give at least 1"), "the budget is 0: give at least 1"),
    (FileNotFoundError("there is no file a: check"), "there is no file a: check"),
    (OSError(13, "Denied", "a"), "'a' cannot be used (Denied): give another path"),
    (OSError(28, "No space left"), "a file cannot be used (No space left): give another path"),
    (RuntimeError(), "RuntimeError"),
    (ValueError("x" * 5000), "x" * 1000),
])  # fmt: skip
def test_an_error_as_a_sentence(error, text):
    assert command.sentence(error) == text


def test_a_reason():
    assert command.reason(KeyError("vocab_size")) == "KeyError: 'vocab_size'"
    assert command.reason(ValueError("a\n  b")) == "ValueError: a b"
    assert len(command.reason(ValueError("x" * 500))) == 200


@pytest.mark.parametrize("text, number", [
    ("0", 0), ("1", 1), ("007", 7), ("2147483647", 2**31 - 1), ("2147483648", None), ("-1", None),
    ("1.0", None), ("1e3", None), ("", None), (" 1", None), ("+1", None), ("²", None), ("１", None),
    ("1_0", None), ("9" * 5000, None), ("one", None),
])  # fmt: skip
def test_numbers(text, number):
    """Whole numbers in plain digits; `positive` from 1, `natural` from 0, both to 2³¹ − 1."""
    for read, least in ((command.natural, 0), (command.positive, 1)):
        if number is not None and number >= least:
            assert read(text) == number
            continue
        with pytest.raises(argparse.ArgumentTypeError) as error:
            read(text)
        assert str(error.value).endswith(f" is not a whole number from {least} to 2147483647")
        assert repr(text[:40]) in str(error.value) and len(str(error.value)) < 120


# ------------------------------------------------------------------------------ how a command ends


def ended(main, argv=None):
    """What `run` exits with."""
    with pytest.raises(SystemExit) as stop:
        command.run(main, argv)
    return stop.value.code


def raising(error):
    def main(argv):
        raise error

    return main


def test_exit_status(monkeypatch):
    """main's own; or the sentence of an error of input, which is status 1."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench.py", "--budget", "0"])
    assert ended(lambda argv: None) is None
    assert ended(lambda argv: 1) == 1
    assert ended(lambda argv: len(argv), ["a", "b"]) == 2
    assert ended(lambda argv: 0 if argv is None else 1) == 0
    for kind in (ValueError, FloatingPointError, RuntimeError, RecursionError, FileNotFoundError):
        assert ended(raising(kind("it is 0:\n give 1"))) == "bench.py: it is 0: give 1"
    denied = PermissionError(13, "Permission denied", "a")
    assert ended(raising(denied)).startswith("bench.py: 'a' cannot be used (Permission denied)")
    for fault in (KeyError("a"), TypeError("a"), AssertionError()):  # ours, not the user's
        with pytest.raises(type(fault)):
            command.run(raising(fault))


def test_ctrl_c():
    """One line, status 1, with the advice that the interrupted work gives."""
    assert ended(raising(KeyboardInterrupt())) == "\nstopped"
    assert ended(raising(KeyboardInterrupt("go on with x"))) == "\nstopped; go on with x"


def test_what_resumes_says_so():
    """Only if something was kept, asked after the interruption."""
    kept = []
    again = "run the same command again to go on"
    for saved, advice in ((lambda: kept, ()), (lambda: True, (again,))):
        with pytest.raises(KeyboardInterrupt) as stop:
            with command.resumable(saved):
                raise KeyboardInterrupt
        assert stop.value.args == advice
    with pytest.raises(KeyboardInterrupt) as stop:
        with command.resumable(lambda: kept):
            kept.append(1)
            raise KeyboardInterrupt
    assert stop.value.args
    with command.resumable(lambda: True):
        pass
    with pytest.raises(ValueError, match="other"):
        with command.resumable(lambda: True):
            raise ValueError("other")


CHILD = """
import sys, time
import command
{begin}
def main(argv):
    {main}
command.run(main)
"""


def child(main, begin="", **options):
    """A command that is a process of its own."""
    here = os.path.dirname(os.path.abspath(__file__))
    code = CHILD.format(main=main, begin=begin)
    return subprocess.Popen([sys.executable, "-c", code], cwd=here, text=True, **options,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.parametrize("main, status, says", [
    ("return 0", 0, ""), ("return 3", 3, ""), ("pass", 0, ""),
    ("raise ValueError('the budget is 0: give 1')", 1, "-c: the budget is 0: give 1\n"),
])  # fmt: skip
def test_status_of_a_process(main, status, says):
    process = child(main)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, says)


def test_a_terminal_without_greek_keeps_the_report():
    """What its encoding lacks is replaced, in the report and in errors."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = child("print('γ 0.2'); raise ValueError('γ is wrong: give 1')", env=env)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "? 0.2\n", "-c: ? is wrong: give 1\n")


@pytest.mark.parametrize("begin, main, status, says", [
    ("command.begin('loading'); print('now', flush=True); time.sleep(60)", "pass", -2, ""),
    ("command.begin('loading')", "print('now', flush=True); time.sleep(60)", 1, "\nstopped\n"),
])  # fmt: skip
def test_ctrl_c_of_a_process(begin, main, status, says):
    """While it loads it just ends; later it says that it was stopped; never with a traceback."""
    process = child(main, begin)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, says)


def test_signs_of_life_are_for_terminals(capsys, monkeypatch):
    command.say("loading")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command.say("loading torch")
    assert capsys.readouterr() == ("", "loading torch …\n")


def test_progress_in_a_file(capsys, monkeypatch):
    """Plain lines, not one a step; what was finished before counts; none for other processes."""
    bar = command.progress("measuring", 8, "texts", done=3)
    for _ in range(5):
        bar.update()
    bar.close()
    err = capsys.readouterr().err
    assert "measuring (3 already finished)" in err and "8/8" in err and "\r" not in err
    assert len(err.splitlines()) <= 3
    command.progress("measuring", 8, "texts", shown=False).close()
    assert capsys.readouterr().err == ""
    command.progress("measuring", 8, "texts").close()
    assert "already" not in capsys.readouterr().err
