"""Tests of the report: every number of every table from made-up rows, worked out by hand.

    python -m pytest test_report.py
"""

import doctest
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import methods
import report


def row(method, index, denoise, tokens, seconds, budget=8, task="arithmetic", **other):
    """A result file's row; what is not given is usual."""
    known = {
        "task": task, "index": index, "temperature": 0.0, "seed": 0, "method": method,
        "matching": "coupled", "budget": budget, "tokens": tokens, "accepted": [],
        "passes": {"prefill": 1, "denoise": denoise, "kv_commit": other.pop("kv", 0)},
        "seconds": dict(zip(("draft", "target", "rest"), seconds)), "commits": None,
        "right": True, "differs": None, "prompt": None, "text": None,
    }  # fmt: skip
    return known | other


LOST = {"position": 3, "margin": 0.25}
# arithmetic: draft-free 60 and 100 passes (80 an answer), 160 tokens in 4 s; SPOT 10 and 30 passes
# in 2 s, of which .6 s drafting and .2 s rest. code: one prompt, 30 passes in 1 s, 15 in 1 s.
ROWS = [
    row("draft-free", 0, 60, 64, (0, 1.5, 0), 0, right=False),
    row("draft-free", 1, 100, 96, (0, 2.5, 0), 0),
    row("published", 0, 60, 64, (0, 2.0, 0), 0, kv=2, right=False),
    row("published", 1, 100, 96, (0, 3.0, 0), 0, kv=3),
    row("spot", 0, 10, 64, (0.2, 0.7, 0.1), accepted=[3, 1]),
    row("spot", 1, 30, 96, (0.4, 0.5, 0.1), accepted=[2, 2, 0], differs=LOST),
    row("spot", 0, 6, 64, (0.2, 0.2, 0.1), 20),
    row("spot", 1, 10, 96, (0.2, 0.2, 0.1), 20),
    row("spot-cost", 0, 40, 64, (0, 1, 0), 0),
    row("spot-cost", 1, 40, 96, (0, 1, 0), 0),
    row("oracle-positions", 0, 8, 64, (0, 1, 0)),
    row("oracle-positions", 1, 24, 96, (0, 1, 0)),
    row("oracle-positions", 0, 4, 64, (0, 1, 0), 20),
    row("oracle-positions", 1, 4, 96, (0, 1, 0), 20),
    row("draft-free", 0, 30, 32, (0, 1, 0), 0, "code"),
    row("spot", 0, 15, 32, (0, 1, 0), 8, "code"),
    row("spot", 0, 5, 32, (0, 0.5, 0), 20, "code"),
    row("spot-cost", 0, 20, 32, (0, 1, 0), 0, "code"),
    row("oracle-positions", 0, 3, 32, (0, 1, 0), 8, "code"),
    row("oracle-positions", 0, 3, 32, (0, 1, 0), 20, "code"),
]
NAMES = ["draft-free", "published", "spot", "spot-cost", "oracle-positions"]
ARGS = SimpleNamespace(
    task=["arithmetic", "code"], budget=[8, 20], temperature=[0.0], methods=NAMES, pad=False,
    plot="plot.png",
)  # fmt: skip


def texts(lines):
    return [line for _, line in lines]


def test_the_table():
    """Every number of one task and budget: budgets unmixed, the base the fused loop, the cut over
    it, rates with drafting time, shares of the time, accuracy of the answers, exact texts."""
    title, header, *lines = texts(report.table(ROWS, "arithmetic", 8))
    assert title == "arithmetic, D = 8, 2 prompts"
    assert header.split() == (
        "prefill denoise kv sum cut oracle accepted tokens/s d/t/r % right exact".split()
    )
    assert [" ".join(line.split()) for line in lines] == [
        "draft-free 1.0 80.0 0.0 81.0 1.00x 0.00 1.00x 0/100/0 50% 2/2",
        "published 1.0 80.0 2.5 83.5 1.00x 0.00 0.80x 0/100/0 50% 2/2",
        "spot 1.0 20.0 0.0 21.0 4.00x 80% 1.60 2.00x 30/60/10 100% 1/2",
        "spot-cost 1.0 40.0 0.0 41.0 2.00x 0.00 2.00x 0/100/0 100% 2/2",
        "oracle-positions 1.0 16.0 0.0 17.0 5.00x 100% 0.00 2.00x 0/100/0 100% 2/2",
    ]
    *_, spot, _, _ = texts(report.table(ROWS, "arithmetic", 20))
    assert spot.split()[2:7] == ["8.0", "0.0", "9.0", "10.00x", "50%"]


def test_the_table_fits_its_columns():
    """At most 100 columns, and no number touches the next, with the paper's sizes."""
    big = [row(name, i, 256, 256, (1, 1, 1), kv=16) | {"accepted": [12]}
           for name in methods.METHODS for i in range(350)]  # fmt: skip
    big = [r | {"budget": 0} if r["method"] in ("draft-free", "published") else r for r in big]
    _, header, *lines = texts(report.table(big, "arithmetic", 8))
    assert len(header) <= 100 and all(len(line) == len(header) for line in lines)
    assert all(len(line.split()) in (11, 12) for line in lines)


def test_the_order_of_rows():
    """Draft-free loops, peers, SPOT's, oracles."""
    kinds = [method.kind for method in methods.METHODS.values()]
    assert kinds == sorted(kinds, key=["free", "peer", "spot", "oracle"].index)
    assert list(methods.METHODS)[:2] == ["draft-free", "published"]


def test_the_means():
    """Means over both tasks of the cut and of the tokens/s ratio, at every budget."""
    title, header, *lines = texts(report.mean_cuts(ROWS, ARGS))
    assert header.split() == "D = 8 D = 20".split()
    # D 8: (4 + 2) / 2 and (2 + 1) / 2; D 20: (10 + 6) / 2 and (4 + 2) / 2; cost: (2 + 1.5) / 2
    assert [" ".join(line.split()) for line in lines] == [
        "spot 3.00x (1.50x) 8.00x (3.00x)",
        "spot-cost 1.75x (1.50x) (a budget of its own)",
        "oracle-positions 7.50x (1.50x) 15.00x (1.50x)",
    ]
    assert all(len(line) <= 100 for line in texts(report.mean_cuts(ROWS, ARGS)))


def sampled(method, index, seed, denoise, commits, matching="coupled", budget=8, **other):
    times = {"temperature": 1.5, "seed": seed, "matching": matching, "commits": commits}
    return row(method, index, denoise, 50, (0, 1, 0), budget, **times, **other)


SAMPLED = [
    sampled("draft-free", 0, 0, 40, [30, 40], "", 0),
    sampled("draft-free", 0, 1, 60, [30, 60], "", 0, right=False),
    sampled("spot", 0, 0, 10, [36, 40], accepted=[3]),
    sampled("spot", 0, 1, 15, [54, 60], accepted=[1, 1]),
    sampled("spot", 0, 0, 5, [40, 40], "greedy", differs={}),
    sampled("spot", 0, 1, 5, [60, 60], "greedy"),
    sampled("spot", 0, 0, 2, [1, 40], budget=20),
    sampled("spot", 0, 0, 2, [1, 40]) | {"temperature": 1.0},
]


def test_the_sampled_table():
    """Every number at T > 0; other temperatures and budgets are not mixed in."""
    title, header, *lines = texts(report.sampled_table(SAMPLED, "arithmetic", 8, 1.5))
    assert title == "arithmetic, T = 1.5, D = 8, 2 samples of 1 prompts" and len(header) <= 100
    assert [" ".join(line.split()) for line in lines] == [
        "draft-free 50.0 1.00x 0.00 60.00% 1.00x 50% 2/2",
        "spot coupled 12.5 4.00x 1.67 90.00% 1.00x 100% 2/2",
        "spot greedy 5.0 10.00x 0.00 100.00% 1.00x 100% 1/2",
    ]


def test_mismatches_are_counted_and_named(capsys):
    """One text that differs is one; greedy matching's may; with --pad only drafted rows must be
    equal, and unpadded draft-free decoding is told apart."""
    assert report.report(ARGS, ROWS) == 1
    line = "MISMATCH spot D=8 T=0 arithmetic prompt 1: new token 3, margin 0.25"
    assert line in capsys.readouterr().out.splitlines()
    warm = {"temperature": [1.5], "budget": [8], "task": ["arithmetic"]}
    warm = SimpleNamespace(**vars(ARGS) | warm)
    assert report.report(warm, [r for r in SAMPLED if r["temperature"] == 1.5]) == 0
    padded = SimpleNamespace(**vars(ARGS) | {"pad": True})
    odd = [r | {"differs": LOST} if r["method"] == "draft-free" else r for r in ROWS]
    assert report.report(padded, odd) == 1
    out = capsys.readouterr().out
    assert "unpadded, 0/3 agree" in out and "code prompt 0: new token 3, margin 0.25" in out


def test_legends_name_every_column():
    """What stands above a column stands in the legend."""
    _, header, *_ = texts(report.table(ROWS, "arithmetic", 8))
    columns = re.split(r"\s+(?!%)", header.strip())
    named = re.findall(r"(?:^|\. |, |; )([\w/]+(?: %)?)(?=[:,])", report.COLUMNS)
    assert len(columns) == 11 and set(columns) <= set(named)
    _, header, *_ = texts(report.sampled_table(SAMPLED, "arithmetic", 8, 1.5))
    named = re.findall(r"(?:^|\. )([\w/]+):", report.SAMPLED_COLUMNS)
    assert len(header.split()) == 8 and set(header.split()) <= set(named)


def test_bold_on_a_terminal_only(capsys, monkeypatch):
    """SPOT's rows stand out on a terminal; a file, a pipe and NO_COLOR get plain text."""
    lines = report.table(ROWS, "arithmetic", 8)
    report.show(lines)
    assert "\033" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    report.show(lines)
    bold = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\033[1m")]
    assert [line[4:].split()[0] for line in bold] == ["spot", "spot-cost"]
    assert all(line.endswith("\033[0m") for line in bold)
    monkeypatch.setenv("NO_COLOR", "1")
    report.show(lines)
    assert "\033" not in capsys.readouterr().out


def test_the_plot(monkeypatch):
    """The means' cuts over the budgets; SPOT's line lies above the others; each is named."""
    pyplot, axes = MagicMock(), MagicMock()
    pyplot.subplots.return_value = MagicMock(), axes
    package = MagicMock(pyplot=pyplot)
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    report.plot(ROWS, ARGS)
    drawn = {tuple(call.args[1]): call.kwargs for call in axes.plot.call_args_list}
    assert set(drawn) == {(3.0, 8.0), (7.5, 15.0)}
    spot, oracle = drawn[3.0, 8.0], drawn[7.5, 15.0]
    assert spot["zorder"] > oracle["zorder"] and spot["linewidth"] > oracle["linewidth"]
    assert [call.args[0] for call in axes.annotate.call_args_list] == ["spot", "oracle-positions"]


def test_a_real_plot(tmp_path):
    """With matplotlib, an image is written."""
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "plot.png")
    report.plot(ROWS, SimpleNamespace(**vars(ARGS) | {"plot": path}))
    with open(path, "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_examples():
    """The docstrings' examples."""
    result = doctest.testmod(report)
    assert result.attempted >= 2 and result.failed == 0
