"""Tests of bench.py: what its rows are, its options, its result files, its doors.

Commands run in this process on the shipped target, with one short prompt and without the warm-up.

    python -m pytest test_bench.py
"""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

import bench
import command
import ddtree
import dlm
import full
import methods
import options
import report
import runs
import tasks
import verify
from decoder import CONFIDENCES, NOISES, PRECISIONS, RELEASED, RULES, Decoder
from methods import METHODS, Method

WARM_UP = bench.warm_up
HERE = os.path.dirname(os.path.abspath(__file__))
SHORT = ["--num-samples", "1", "--task", "code", "--gen-len", "24"]
QUICK = [*SHORT, "--methods", "spot"]
PROMPT = "Mia has 5 coins. Mia finds 4 more coins. How many coins does Mia have now?"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Times do not matter here."""
    monkeypatch.setattr(ddtree, "REPEATS", 1)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)


def golden(name):
    return os.path.join(HERE, "checkpoints", name)


def run(argv, capsys):
    """Run bench.py with `argv`; returns (exit status or message, printed text)."""
    with pytest.raises(SystemExit) as stop:
        command.run(bench.main, [str(word) for word in argv])
    return stop.value.code, capsys.readouterr().out


def rows_in(path):
    with open(path) as file:
        return json.load(file)["rows"]


def counts(path):
    """What a run measured apart from time, by row."""
    return {
        runs.key_of(row): (row["passes"]["denoise"], row["right"], row["differs"])
        for row in rows_in(path)
        if not METHODS[row["method"]].own_budget  # their trees depend on measured times
    }


# ------------------------------------------------------------------------------------ the methods


@pytest.fixture(scope="module")
def prepared():
    """A Bench of the shipped target and one prompt a task."""
    args = options.parse(["--num-samples", "1", "--gen-len", "24", "--floor", "0.3"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddtree, "REPEATS", 1)
        return bench.prepare(args, [])


def test_every_method_is_measured(tmp_path, capsys):
    """All rows of the list, all equal to draft-free; the published loop is the unfused one; the
    file's keys are the documented ones and hold prompt and answer."""
    path = tmp_path / "run.json"
    code, out = run([*SHORT, "--out", path], capsys)
    rows = {row["method"]: row for row in rows_in(path)}
    assert code == 0 and list(METHODS) == [n for n in METHODS if n in rows]
    assert len(re.findall(r" 1/1$", out, re.M)) == len(METHODS)
    free, published = rows["draft-free"], rows["published"]
    assert free["passes"]["kv_commit"] == 0 < published["passes"]["kv_commit"]
    assert all(row["differs"] is None for row in rows.values())
    denoise = {name: row["passes"]["denoise"] for name, row in rows.items()}
    assert denoise["oracle-positions"] < denoise["spot"] < denoise["draft-free"] / 2
    assert denoise["draft-free"] > denoise["oracle-tokens"]
    assert free["prompt"] == tasks.problems("code", "test", 1)[0].prompt
    assert len(free["text"]) > 10 and rows["spot"]["text"] is rows["spot"]["prompt"] is None
    names = set(re.findall(r"[a-z]+", re.sub(r"  .*", "", report.__doc__)))
    keys = re.findall(r"^ {4,8}((?:[a-z]+, )*[a-z]+) {3,}", report.__doc__, re.M)
    documented = {key for some in keys for key in some.split(", ")}
    with open(path) as file:
        head = json.load(file)
    assert documented == {*head, *free} and names


def test_the_arguments_of_the_drafts(prepared, monkeypatch):
    """Each row drafts with its own drafter, floor, budget, graph and truth."""
    seen = {}

    def spy(name):
        def draft(stale, canvas, **given):
            seen.setdefault(name, given)
            return ddtree.root_only(canvas)

        return draft

    for name in ("chain", "confidence_tree", "graph", "spot", "spot_cost_aware",
                 "oracle_positions", "oracle_tokens"):  # fmt: skip
        monkeypatch.setattr(ddtree, name, spy(name))
    prompt = prepared.target.encode(PROMPT)
    here = replace(prepared, truth={1: "true"}, costs={"drafter": "its costs", "small": "other"})
    found = {}
    for name, method in METHODS.items():
        if method.draft:
            seen.clear()
            row = (name, "coupled", 0 if method.own_budget else 5)
            methods.decode(here, Decoder(gen_len=4), prompt, row)
            found[name] = next(iter(seen.values()))
    order, noised, small = prepared.drafter, prepared.noised, prepared.small
    assert found == {
        "chain": {"budget": 5},
        "tree": {"budget": 5},
        "graph": {"budget": 5, "sets": prepared.sets},
        "spot": {"budget": 5, "drafter": order},
        "spot-floor": {"budget": 5, "drafter": order, "floor": 0.3},
        "spot-noised": {"budget": 5, "drafter": noised},
        "spot-cost": {"budget": 20, "drafter": order, "costs": "its costs"},
        "spot-small": {"budget": 20, "drafter": small, "costs": "other"},
        "oracle-positions": {"budget": 5, "truth": {1: "true"}},
        "oracle-tokens": {"budget": 5, "truth": {1: "true"}},
    }


def test_rows_of_a_sample():
    """At T = 0 every method at every budget; at T > 0 those with matchings; --methods picks."""
    args = SimpleNamespace(methods=list(METHODS), budget=[6, 8])
    cold, warm = methods.rows_of(args, 0.0), methods.rows_of(args, 1.0)
    assert len(cold) == 2 + 8 * 2 + 2 and ("spot-cost", "coupled", 0) in cold
    assert cold[:2] == [("draft-free", "", 0), ("published", "", 0)]
    assert len(warm) == 1 + 2 * (2 + 3 * 3) and ("graph", "uncoupled", 8) in warm
    few = SimpleNamespace(methods=["spot", "chain"], budget=[8])
    assert methods.rows_of(few, 0.0) == [
        ("draft-free", "", 0), ("chain", "coupled", 8), ("spot", "coupled", 8)]  # fmt: skip


def test_a_new_row_is_in_both_tables(tmp_path, capsys, monkeypatch):
    """One line in the list, and a drafter has its rows at T = 0 and T > 0."""
    monkeypatch.setitem(METHODS, "mine", Method("mine", "peer", "mine", lambda _: ddtree.chain))
    argv = [*SHORT, "--methods", "mine", "--temperature", "0", "1", "--seeds", "1"]
    code, out = run([*argv, "--out", tmp_path / "run.json"], capsys)
    lines = [line for line in out.splitlines() if line.startswith("mine ")]
    assert code == 0 and len(lines) == 3 and sum("coupled" in line for line in lines) == 1


def test_the_order_rotates(prepared, monkeypatch):
    """Which method comes first changes from prompt to prompt and from sample to sample."""
    first = []
    real = methods.decode

    def decode(bench_, decoder, prompt, row, commits):
        first.append(row)
        return real(bench_, decoder, prompt, row, commits)

    monkeypatch.setattr(bench, "decode", decode)
    args = SimpleNamespace(**vars(prepared.args) | {"methods": ["chain", "spot"], "gen_len": 4})
    here = replace(prepared, args=args, decoder=Decoder(gen_len=4))
    here.problems = {"code": tasks.problems("code", "test", 2)}
    orders = []
    for index, seed in ((0, 0), (1, 0), (1, 1)):
        first.clear()
        bench.measure_prompt(here, "code", index, 0.0, seed, tqdm(disable=True))
        orders.append([row[0] for row in first])
    assert orders == [["draft-free", "chain", "spot"], ["chain", "spot", "draft-free"],
                      ["spot", "draft-free", "chain"]]  # fmt: skip


@pytest.mark.parametrize("gen_len, right", [(4, False), (160, True)])
def test_the_written_text_is_scored(gen_len, right, prepared):
    """A whole answer to this story is right, a cut one is not."""
    args = SimpleNamespace(**vars(prepared.args) | {"methods": []})
    here = replace(prepared, args=args, decoder=Decoder(gen_len=gen_len))
    here.problems = {"arithmetic": tasks.problems("arithmetic", "test", 1)}
    rows = bench.measure_prompt(here, "arithmetic", 0, 0.0, 0, tqdm(disable=True))
    assert [row["right"] for row in rows] == [right]
    assert ("####" in rows[0]["text"]) == right


def test_samples_have_noise_of_their_own(prepared):
    """No two prompts or samples of a task share their noise, and --seed moves all."""
    pairs = [(index, seed) for index in range(5) for seed in range(3)]
    decoders = [bench.decoder_for(prepared, index, 1.5, seed) for index, seed in pairs]
    assert len({decoder.seed for decoder in decoders}) == 15
    assert {decoder.temperature for decoder in decoders} == {1.5}
    assert prepared.decoder.temperature == 0 and prepared.decoder.gen_len == 24


def test_the_whole_text_is_compared(prepared):
    """A difference behind the answer's end is one, with its place and the margin there."""
    target, decoder = prepared.target, Decoder(gen_len=24)
    prompt = target.encode(PROMPT)
    reference, truth = methods.draft_free(target, decoder, prompt)
    last = len(reference.written) - 1
    other = replace(reference, written=reference.written[:-1] + [reference.written[-1] + 1])
    found = bench.difference(prepared, decoder, prompt, reference, other, "coupled")
    assert other.ids == reference.ids and found["position"] == last and 0 <= found["margin"] <= 1
    twice = replace(other, written=other.written[:3] + [0] + other.written[4:])
    assert bench.difference(prepared, decoder, prompt, reference, twice, "coupled")["position"] == 3
    assert bench.difference(prepared, decoder, prompt, reference, reference, "coupled") is None
    assert bench.difference(prepared, decoder, prompt, reference, other, "greedy") == {}
    # the states are the draft-free ones: the prompt's own, then one commit a pass
    block = min(truth)
    steps = list(zip(truth[block], truth[block][1:]))
    changes = [sum(a != b for a, b in zip(*step)) for step in steps]
    assert changes == [1] * len(steps) and target.mask_id not in truth[block][-1]


def test_commits_are_counted(prepared):
    """At T > 0 all commits along the accepted paths, and how many are the likeliest: those of a
    draft-free and of a coupled run are the same."""
    target = prepared.target
    decoder = Decoder(gen_len=24, temperature=6.0, confidence="distribution")
    prompt = target.encode(PROMPT)
    tallies = []
    for row in (("draft-free", "", 0), ("spot", "coupled", 8), ("spot", "greedy", 8)):
        commits = methods.Commits()
        result = methods.decode(prepared, decoder, prompt, row, commits)
        assert commits.all == len(result.written)
        tallies.append(commits.likeliest)
    assert tallies[0] == tallies[1] < commits.all and tallies[2] > tallies[1]


def test_counting_is_not_timed(prepared):
    """What the counting of commits took is taken off the clock."""
    prompt = prepared.target.encode(PROMPT)
    for row in (("draft-free", "", 0), ("spot", "coupled", 8)):
        commits = methods.Commits()
        commits.seconds = 1000.0
        decoder = Decoder(gen_len=4, temperature=1.0)
        result = methods.decode(prepared, decoder, prompt, row, commits)
        assert sum(result.seconds.values()) < -900


def test_only_drafted_passes_are_padded(prepared, monkeypatch):
    """With --pad a loop without drafts is timed unpadded, and the target is padded afterwards."""
    seen = []
    real = dlm.Target.forward

    def forward(target, *given):
        seen.append(target.pad_to)
        return real(target, *given)

    monkeypatch.setattr(dlm.Target, "forward", forward)
    here, prompt = replace(prepared, pad_to=22), prepared.target.encode(PROMPT)
    found = {}
    for row in (("draft-free", "", 0), ("published", "", 0), ("spot", "coupled", 8)):
        seen.clear()
        methods.decode(here, Decoder(gen_len=4), prompt, row)
        found[row[0]] = set(seen)
        assert prepared.target.pad_to == 22
    prepared.target.pad_to = None
    assert found == {"draft-free": {None}, "published": {None}, "spot": {22}}


@pytest.mark.parametrize("steps, quota", [(8, 4), (32, 1), (None, 1)])
def test_steps_are_passes_per_block(steps, quota):
    """--steps 8 commits at least 32 / 8 positions a pass."""
    given = ["--steps", str(steps)] if steps else []
    made = bench.prepare(options.parse([*QUICK, *given]), [])
    assert made.decoder.quota == quota and made.target.block_size == 32


def test_options_reach_the_decoder():
    """Every option that describes decoding is in the Decoder that decodes."""
    argv = "--rule low_confidence_dynamic --threshold 0.25 --precision float32 --gen-len 7 --seed 3"
    argv += " --temperature 1.5 --top-k 4 --top-p 0.5 --confidence margin --tempered"
    right = Decoder("threshold", 0.25, "float32", 7, 1.5, 3, 4, 0.5, "margin", True, "position")
    assert options.decoder_of(options.parse([*argv.split(), "--noise", "position"])) == right


@pytest.mark.parametrize(
    "choice",
    [["--rule", rule] for rule in [*RULES, *RELEASED]]
    + [["--precision", precision] for precision in PRECISIONS]
    + [["--dtype", dtype] for dtype in ("float64", "bfloat16")]
    + [["--task", "arithmetic"], ["--steps", "16"], ["--rule", "threshold", "--threshold", "0.5"]]
    + [["--pad"], ["--pad", "--dtype", "bfloat16"]]
    + [["--temperature", "1", "--confidence", confidence] for confidence in CONFIDENCES]
    + [["--temperature", "2", "--noise", noise] for noise in NOISES]
    + [["--temperature", "1", "--tempered", "--top-k", "5", "--top-p", "0.9"]]
    + [["--model", golden("golden-dream"), "--cache", cache] for cache in full.CACHES],
    ids=" ".join,
)
def test_every_choice_runs_and_is_exact(choice, tmp_path, capsys, monkeypatch):
    """Each choice of an option runs; in float32 and float64 SPOT writes the draft-free text."""
    if "--model" in choice:  # it has no tokenizer
        monkeypatch.setattr(dlm.Target, "encode", lambda *_: torch.arange(1, 9))
        monkeypatch.setattr(dlm.Target, "decode", lambda self, ids: str(ids))
        choice = [*choice, "--dtype", "float32"]
    path = tmp_path / "run.json"
    code, out = run([*QUICK, "--seeds", "1", "--out", path, *choice], capsys)
    rows = rows_in(path)
    assert code == 0 and {row["method"] for row in rows} == {"draft-free", "spot"}
    if "bfloat16" not in choice or "--precision" in choice or "--pad" in choice:
        drafted = [row for row in rows if row["method"] == "spot" and row["matching"] != "greedy"]
        assert drafted and all(row["differs"] is None for row in drafted)
        assert len(re.findall(r" 1/1$", out, re.M)) >= len(drafted)


def careless(*given, **options):
    """A speculative loop whose last token, behind the answer, is wrong."""
    result = verify.speculate(*given, **options)
    result.written[-1] = 1 - min(1, result.written[-1])
    return result


@pytest.mark.parametrize("how, status", [([], 1), (["--dtype", "bfloat16"], 0),
                                         (["--dtype", "bfloat16", "--pad"], 1)])  # fmt: skip
def test_a_mismatch_exits_1_and_names_it(how, status, tmp_path, capsys, monkeypatch):
    """One text that differs is named with prompt, position and margin, and the run exits 1; but in
    bfloat16, where passes of other shapes round otherwise, only with --pad."""
    monkeypatch.setattr(methods, "speculate", careless)
    code, out = run([*QUICK, *how, "--out", tmp_path / "run.json"], capsys)
    assert code == status
    assert re.search(r"MISMATCH spot D=8 T=0 code prompt 0: new token \d+, margin \d\.", out)


# -------------------------------------------------------------------------------- one's own prompts


def test_own_prompt_is_answered(capsys):
    """The answer, draft-free beside SPOT: passes, rates, equal or not; and what is known."""
    code, out = run(["--prompt", PROMPT], capsys)
    assert code == 0 and "prompt: " + PROMPT in out and "#### 9" in out
    assert "arithmetic: " in out and "code: Write a function" in out
    lines = {line.split(" ")[0]: line.split() for line in out.splitlines() if line}
    free, spot = lines["draft-free"], lines["spot"]
    assert free[1] == "60" and free[3:] == ["1.00x", "1.00x", "equal"]
    assert spot[1:3] == ["8", "13"] and spot[4] == f"{60 / 13:.2f}x" and spot[-1] == "equal"


def test_own_prompts_from_a_file(tmp_path, capsys):
    """Every line, as text or as JSON; --methods picks rows; T > 0 has one row a method."""
    path = tmp_path / "prompts.txt"
    path.write_text('Mia has 3 cards.\n\n{"question": "Mia has 4 cards."}\n')
    argv = ["--prompts", path, "--methods", "chain", "spot-cost", "--gen-len", "8"]
    code, out = run([*argv, "--temperature", "1", "--budget", "4", "8"], capsys)
    assert code == 0 and re.findall("prompt: (.*)", out) == ["Mia has 3 cards.", "Mia has 4 cards."]
    lines = [line.split(" ")[0] for line in out.splitlines()]
    assert lines.count("chain") == 4 and lines.count("spot-cost") == 2


def test_a_wrong_answer_exits_1(capsys, monkeypatch):
    """--prompt says where the texts part."""
    monkeypatch.setattr(methods, "speculate", careless)
    code, out = run(["--prompt", PROMPT, "--gen-len", "24"], capsys)
    assert code == 1 and "differs at token" in out


def test_trace_of_own_prompt(tmp_path, capsys):
    """--trace shows the rounds of the prompt, under a rule of sets too; --html writes the page."""
    code, out = run(["--prompt", PROMPT, "--trace", "--rule", "threshold"], capsys)
    assert code == 0 and "round 1" in out and "coins" in out
    page = tmp_path / "trace.html"
    code, out = run(["--trace", "--html", page, "--gen-len", "24"], capsys)
    assert code == 0 and str(page) in out and "<html" in page.read_text(encoding="utf-8")


def test_diagnostics_are_printed(capsys):
    """Every line of section 2 has its figure; the shipped drafter foresees the order far better
    than the stale confidences."""
    code, out = run(["--diagnose", "--num-samples", "1"], capsys)
    lines = [line for line in out.splitlines() if line.strip()]
    assert code == 0 and len(lines) >= 9 and all(re.search(r"\.\d|here", line) for line in lines)
    figure = {line[:62].strip(): line[62:78].split() for line in lines}
    drafter = float(figure["next position, path depths 1-12: order drafter (top 3)"][0])
    left = float(figure["the most confident stale position left on the true path"][0])
    ranked = float(figure["the position at stale rank d commits d-th"][0])
    assert 0.8 < drafter and left < drafter - 0.05 and ranked < left
    cuts = figure["oracle-positions: cut in passes, D = 8 / 20"]
    assert 4 < float(cuts[0][:-1]) < float(cuts[2][:-1])


@pytest.mark.parametrize("name, value", [("RANK", "abc"), ("WORLD_SIZE", "2.5"), ("RANK", "3")])
def test_odd_ranks_get_one_sentence(name, value, capsys, monkeypatch):
    """What torchrun would not set is named."""
    monkeypatch.setenv(name, value)
    code, _ = run(QUICK, capsys)
    assert isinstance(code, str) and name in code and "torchrun" in code


def test_pass_cost_is_printed(capsys):
    """A row for every number of copies, a legend of every column, one block, the memory."""
    for model in ("golden-sdar", "golden-dream"):
        code, out = run(["--pass-cost", "--model", golden(model)], capsys)
        assert code == 0 and re.findall(r"^ +(\d+) +[\d.]+ ", out, re.M) == "1 7 9 13 21".split()
        assert "one block" in out and "GiB" in out
        header = re.search(r"copies .*", out)[0]
        assert all(f"{name}:" in out for name in re.split(" {2,}", header))


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model", "gpt"], "no model 'gpt'"),
        (["--drafter", "nowhere"], "no drafter in 'nowhere'"),
        (["--noised", "nowhere"], "no drafter"),
        (["--noised", golden("order-small")], "does not read the noise"),
        (["--graph", "nowhere.json"], "no draft graph"),
        (["--graph", "README.md"], "not a draft graph"),
        (["--gen-len", "5000"], "exceed the context"),
        (["--num-samples", "10000000"], "ask for 1 to"),
        (["--num-samples", "1", "2", "3"], "3 numbers for 2 tasks"),
        (["--floor", "2"], "floor"),
        (["--floor", "nan"], "floor"),
        (["--device", "nonsense"], "device"),
        (["--device", "meta"], "device"),
        (["--budget", "9999"], "at most 512"),
        (["--budget", "8", "8"], "twice"),
        (["--methods", "spot", "spot"], "twice"),
        (["--temperature", "1", "1"], "twice"),
        *((["--temperature", t], "the temperature is") for t in "-1 nan inf 1e9 1e-300".split()),
        (["--temperature", "1", "--top-p", "2"], "top_p"),
        (["--temperature", "1", "--methods", "oracle-tokens"], "at T = 0 only"),
        (["--temperature", "1", "--diagnose"], "show T = 0"),
        (["--temperature", "1", "2", "--trace"], "one temperature"),
        (["--temperature", "1", "2", "--prompt", "x"], "one temperature"),
        (["--rule", "threshold", "--threshold", "nan"], "not a number"),
        (["--rule", "threshold", "--diagnose"], "single commits"),
        (["--threshold", "0.5"], "has no threshold"),
        (["--steps", "8", "--diagnose"], "single commits"),
        (["--steps", "5"], "divisor of the block size"),
        (["--block-size", "16"], "block size 16"),
        (["--pass-cost", "--cache", "none"], "behind a cache"),
        (["--pass-cost", "--methods", "spot"], "no"),
        (["--random-weights"], "--pass-cost"),
        (["--task", "humaneval"], "--allow-code"),
        (["--task", "gsm8k", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--task", "gsm8k", "--data", "a", "b"], "2 files for 1"),
        (["--task", "code", "--data", "README.md"], "1 files for 0"),
        (["--model", golden("golden-sdar"), "--task", "code"], "no tokenizer"),
        (["--prompt", "x", "--task", "code"], "leave --task"),
        (["--prompt", "x", "--pass-cost"], "leave --prompt"),
        (["--prompt", "x", "--out", "here.json"], "for the comparison"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompts", "nowhere"], "nowhere"),
        (["--prompts", "empty.txt"], "empty.txt"),
        (["--html", "page.html"], "add --trace"),
        (["--trace", "--html", "/dev/null/page.html"], "another --html"),
        (["--trace", "--html", ".", "--prompt", "x"], "another --html"),
        (["--trace", "--html", "page.html", "--prompts", "two.txt"], "one prompt"),
        (["--out", "."], "not a regular file"),
        (["--out", "/dev/null/run.json"], "cannot be written"),
        (["--out", "/dev/full"], "not a regular file"),
        (["--out", "/dev/zero"], "not a regular file"),
        (["--out", "pipe"], "not a regular file"),
        (["--out", "README.md"], "not a result file"),
        (["--out", "empty.txt"], "not a result file"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_input_gets_one_sentence(argv, says, tmp_path, capsys, monkeypatch):
    """One clear line and a non-zero exit, before any work; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("no JSON")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "two.txt").write_text("a\nb\n")
    os.mkfifo("pipe")
    code, _ = run(argv, capsys)
    assert isinstance(code, str) and says in code and "\n" not in code.strip()
    assert (tmp_path / "README.md").read_text() == "no JSON"
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".lock", ".json"))]


@pytest.mark.parametrize("argv", [
    ["--budget", "0"], ["--budget", "-3"], ["--num-samples", "0"], ["--task", "poetry"],
    ["--rule", "magic"], ["--methods", "magic"], ["--nope"], ["--prompt", "a", "--prompts", "b"],
    ["--diagnose", "--pass-cost"], ["--trace", "--pass-cost"], ["--trace", "--diagnose"],
], ids=" ".join)  # fmt: skip
def test_refused_options(argv, capsys):
    """argparse refuses what is unknown, not positive, or two things at once."""
    assert run(argv, capsys)[0] == 2


def test_plot_is_checked_before_the_work(tmp_path, capsys, monkeypatch):
    """Its ending, its place, and that something is drawn."""
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: True)
    for path, says in (("a.doc", "end it in"), ("/dev/null/a.png", "another --plot")):
        assert says in run(["--plot", path], capsys)[0]
    assert "at a budget" in run(["--plot", "a.png", "--methods", "spot-cost"], capsys)[0]
    assert "T = 0" in run(["--plot", "a.png", "--temperature", "1"], capsys)[0]
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert "pip install matplotlib" in run(["--plot", "a.png"], capsys)[0]


def test_a_terminal_that_knows_no_greek(monkeypatch):
    """What the encoding lacks is replaced, and the rest is printed."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    with pytest.raises(SystemExit) as stop:
        command.run(bench.main, ["--prompt", PROMPT, "--gen-len", "24"])
    sys.stdout.flush()
    assert stop.value.code == 0 and b"equal" in printed.getvalue()
    with pytest.raises(SystemExit) as stop:
        command.run(bench.main, ["--help"])
    assert stop.value.code == 0


# ----------------------------------------------------------------------------------- result files


def test_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    """Stopped after its first prompt, a run given the same --out ends as an uninterrupted one."""
    argv = [*QUICK, "--num-samples", "2"]
    whole, broken = str(tmp_path / "whole.json"), str(tmp_path / "broken.json")
    run([*argv, "--out", whole], capsys)
    real = command.write_json

    def write_and_stop(path, contents):
        real(path, contents)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write_json", write_and_stop)
    code, _ = run([*argv, "--out", broken], capsys)
    assert f"go on, run the same command with --out {broken}" in code
    assert 0 < len(counts(broken)) < len(counts(whole))
    monkeypatch.setattr(command, "write_json", real)
    with pytest.raises(SystemExit) as stop:
        command.run(bench.main, [*argv, "--out", broken])
    assert stop.value.code == 0 and "1 of 2 samples already finished" in capsys.readouterr().err
    assert counts(broken) == counts(whole)
    assert sorted(os.listdir(tmp_path)) == ["broken.json", "whole.json"]


def test_ctrl_c_before_the_first_sample(tmp_path, capsys, monkeypatch):
    """Nothing is saved, so nothing is promised."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_prompt", stop)
    code, _ = run([*QUICK, "--out", tmp_path / "run.json"], capsys)
    assert code == "\nstopped; nothing was finished yet"
    assert os.listdir(tmp_path) == []


def test_a_sign_of_life_and_ctrl_c_while_importing():
    """On a terminal something is said within three seconds, before torch is loaded; Ctrl-C then
    ends without a traceback."""
    main, side = pty.openpty()
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, "bench.py"], cwd=HERE, stderr=side)
    os.close(side)
    said = os.read(main, 1000)
    assert b"loading torch" in said and time.monotonic() - begin < 3
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == -signal.SIGINT
    rest = b""
    with contextlib.suppress(OSError):  # the terminal's end
        rest = os.read(main, 1000)
    assert b"Traceback" not in said + rest


def test_progress_names_what_is_done(tmp_path, capsys, monkeypatch):
    """The warm-up, the task, the method, rate and time left."""
    monkeypatch.setattr(bench, "warm_up", WARM_UP)
    with pytest.raises(SystemExit):
        command.run(bench.main, [*QUICK, "--out", str(tmp_path / "run.json")])
    said = capsys.readouterr().err
    assert "warm-up" in said and re.search(r"2/2 .*(texts/s|s/ texts).*code 0", said)


def test_what_changes_a_run_refuses_to_go_on(tmp_path, capsys, monkeypatch):
    """Other arguments, code, scorer, drafters or weights under the same names: nothing is mixed."""
    monkeypatch.chdir(tmp_path)
    for name in ("order", "target"):
        shutil.copytree(golden(name), name)
    argv = [*QUICK, "--model", "target", "--drafter", "order", "--out", "run.json"]
    assert run(argv, capsys)[0] == 0
    before = counts("run.json")
    assert run(argv, capsys)[0] == 0  # the same again goes on, with nothing to do
    assert "other arguments" in run([*argv, "--seed", "1"], capsys)[0]
    with monkeypatch.context() as patch:
        patch.setattr(command, "code_id", lambda: "edited")
        assert "other code" in run(argv, capsys)[0]
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "scorer", lambda: "another")
        assert "other scorer" in run(argv, capsys)[0]
    for path in ("order/model.safetensors", "target/model.safetensors", "target/config.json"):
        with open(path, "rb") as file:
            old = file.read()
        with open(path, "wb") as file:
            file.write(old.replace(b"}", b"} ", 1) if path.endswith("json") else old[:-1] + b"\1")
        assert "other contents" in run(argv, capsys)[0]
        with open(path, "wb") as file:
            file.write(old)
    assert counts("run.json") == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished result file's contents, and the arguments that made it."""
    path = tmp_path_factory.mktemp("finished") / "run.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(bench, "warm_up", lambda *_: None)
        command.run(bench.main, [*QUICK, "--out", str(path)])
    return json.loads(path.read_text())


@pytest.mark.parametrize("change", [
    {"method": "magic"}, {"method": ["spot"]}, {"task": 3}, {"index": "0"}, {"index": -1},
    {"temperature": None}, {"matching": None}, {"budget": 1.5}, {"passes": 3}, {"passes": {}},
    {"passes": {"prefill": 0, "denoise": 0, "kv_commit": 0}}, {"tokens": "many"},
    {"seconds": {"draft": 0, "target": 0, "rest": 0}}, {"seconds": {"draft": "a"}},
    {"seconds": {"draft": 0, "target": float("nan"), "rest": 0}}, {"accepted": ["a"]},
    {"commits": [1]}, {"commits": [1, 0]}, {"right": 1}, {"differs": {"here": 1}}, {"text": 5},
], ids=str)  # fmt: skip
def test_odd_rows_are_refused(change, finished, tmp_path):
    """A row of another kind makes it no result file: one sentence names the row."""
    path = str(tmp_path / "run.json")
    rows = [finished["rows"][0], finished["rows"][1] | change]
    command.write_json(path, finished | {"rows": rows})
    with pytest.raises(ValueError, match="not a result file .row 2") as error:
        runs.read_rows(path, finished)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [None, "abc", [1], [{}], [[]]], ids=str)
def test_rows_that_are_none_are_refused(rows, finished, tmp_path):
    """So do rows that are no rows, a missing key, and text that is no JSON."""
    path = str(tmp_path / "run.json")
    command.write_json(path, finished | {"rows": rows})
    with pytest.raises(ValueError, match="not a result file"):
        runs.read_rows(path, finished)
    for text in ("", "[]", '{"rows": []}', "[" * 100000):
        command.write_text(path, text)
        with pytest.raises(ValueError, match="not a result file"):
            runs.read_rows(path, finished)


def test_a_sample_cut_short_is_measured_again(finished, tmp_path, capsys):
    """Of a sample some of whose rows are lost nothing is kept."""
    path = tmp_path / "run.json"
    command.write_json(str(path), finished | {"rows": finished["rows"][:1]})
    args = options.parse([*QUICK])
    here = {key: finished[key] for key in finished if key != "rows"}
    assert runs.open_run(str(path), here, args)["rows"] == []
    command.write_json(str(path), finished)
    assert runs.open_run(str(path), here, args)["rows"] == finished["rows"]


def test_two_runs_never_share_a_file(tmp_path, monkeypatch):
    """Begun in the same second, they get names of their own; a file that is written is refused to
    others, and free again afterwards, also when its run was killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    with runs.held(None) as one, runs.held(None) as two:
        assert one == "now.json" or one != two
        assert len({one, two}) == 2
        with pytest.raises(ValueError, match="another run writes"), runs.held(one):
            pass
    command.write_json(one, {})
    with runs.held(None) as three:
        assert three not in (one,) and not os.path.exists(three)
    (tmp_path / "left.json.lock").write_text("")  # of a killed process: nobody holds it
    with runs.held("left.json") as path:
        assert path == "left.json"
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "lock" in name]


def test_a_missing_sample_is_said(finished, tmp_path, capsys):
    """After joining, every sample must be there; what is there is saved."""
    out = str(tmp_path / "run.json")
    args = options.parse([*QUICK, "--num-samples", "3"])
    with pytest.raises(ValueError, match=r"2 of 3 samples are missing, the first code prompt 1"):
        runs.join(finished | {}, out, args)
    assert rows_in(out) == finished["rows"]


def test_processes_take_turns(finished, tmp_path, monkeypatch):
    """The second of two processes measures every other sample that is not finished."""
    done = []

    def measure(here, *sample):
        done.append(sample[:-1])
        return []

    monkeypatch.setattr(bench, "measure_prompt", measure)
    for module in (bench, runs):
        monkeypatch.setattr(module, "world", lambda: (1, 2))
    monkeypatch.setattr(runs, "join", lambda *_: None)
    args = options.parse([*QUICK, "--num-samples", "6"])
    out = str(tmp_path / "run.json")
    bench.run_all(SimpleNamespace(args=args), finished | {}, out)  # it holds prompt 0
    assert [sample[1] for sample in done] == [2, 4] and os.path.exists(out + ".rank1")


APART = """
import os, sys
os.chdir(os.environ["RANK"])
import bench, command, ddtree
ddtree.REPEATS = 1
bench.warm_up = lambda *_: None
command.run(bench.main)
"""


def test_two_machines_without_a_shared_disk(tmp_path, capsys):
    """torchrun splits the prompts over processes, and the first joins what all measured, though
    none sees the other's files; what a killed one had finished is kept."""
    argv = [*QUICK, "--num-samples", "3"]
    run([*argv, "--out", tmp_path / "one.json"], capsys)
    for rank in "01":
        (tmp_path / rank).mkdir()
    # what the second machine's process measured before it was killed
    left = json.loads((tmp_path / "one.json").read_text())
    left["rows"] = [row | {"tokens": 12345} for row in left["rows"] if row["index"] == 2]
    command.write_json(str(tmp_path / "1" / "two.json.rank1"), left)
    (tmp_path / "apart.py").write_text(APART)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    there = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    done = subprocess.run([*words, "apart.py", *argv, "--out", "two.json"], cwd=tmp_path, env=there,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "code, D = 8, 3 prompts" in done.stdout
    two = tmp_path / "0" / "two.json"
    assert counts(two) == counts(tmp_path / "one.json")
    assert {row["index"] for row in rows_in(two) if row["tokens"] == 12345} == {2}
    assert os.listdir(tmp_path / "0") == ["two.json"] and os.listdir(tmp_path / "1") == []


def test_public_benchmarks_run(tmp_path, capsys):
    """Two benchmarks from files, programs only with --allow-code; n is given for each."""
    story = {"question": "Tom has 2 apples and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
    function = {
        "task_id": 11, "text": "Double x.", "code": "def f(x):\n    return 2 * x",
        "test_list": ["assert f(2) == 4"], "test_setup_code": "",
    }  # fmt: skip
    files = [tmp_path / "gsm8k.jsonl", tmp_path / "mbpp.jsonl"]
    files[0].write_text(json.dumps(story) + "\n" + json.dumps(story) + "\n")
    files[1].write_text(json.dumps(function) + "\n")
    argv = ["--task", "gsm8k", "mbpp", "--data", *files, "--gen-len", "24", "--methods", "spot"]
    argv += ["--num-samples", "2", "1", "--out", tmp_path / "run.json"]
    assert "--allow-code" in run(argv, capsys)[0]
    code, out = run([*argv, "--allow-code"], capsys)
    assert code == 0 and "gsm8k, D = 8, 2 prompts" in out and "mbpp, D = 8, 1 prompts" in out


def test_prompts_are_parted_at_line_ends_only(tmp_path, capsys):
    """Other marks that Python counts as line ends stay inside a prompt (U+2028 is common)."""
    path = tmp_path / "prompts"
    path.write_text("Mia has 5 coins.\u2028How many?\x0cNow?\n", encoding="utf-8")
    assert not bench.main(["--prompts", str(path), "--gen-len", "8"])
    assert "How many?" in capsys.readouterr().out
