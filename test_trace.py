"""Tests of one prompt's trace: what is recorded, what is printed, and the page, in a real browser.

The browser's tests need Chromium (Debian: apt-get install chromium) and are skipped without it.
"""

import doctest
import json
import os
import re
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

import command
import ddtree
import dlm
import targets
import trace
from decoder import Decoder
from drafter import load_drafter
from verify import speculate

PROMPT = "Mia has 9 toys. Mia gets 9 more toys. Then Mia sells 4 toys. How many toys are left?"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-quic --no-first-run "
    "--disable-sync --disable-background-networking --disable-component-update "
    "--virtual-time-budget=60000"
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def target():
    return targets.load("embedded")


@pytest.fixture(scope="module")
def drafter():
    return load_drafter(os.path.join(command.HERE, "checkpoints", "order"))


@pytest.fixture(scope="module")
def draft(drafter):
    return partial(ddtree.spot, budget=8, drafter=drafter)


@pytest.fixture(scope="module")
def record(target, draft):
    return trace.record(target, Decoder(gen_len=160), target.encode(PROMPT), draft, PROMPT)


def replay(decoding):
    """All texts that a decoding's passes commit, in order of position; each `before` checked."""
    blocks = {}
    for now in decoding["passes"]:
        before = blocks.setdefault(now["block"], now["before"][:])
        assert before == now["before"]
        for u in now.get("path", [])[1:]:
            for position, text in now["nodes"][u]["commits"]:
                assert before[position] is None
                before[position] = text
        into = blocks.setdefault(now["into"], [None] * len(before))
        for position, text in now["commits"]:
            assert into[position] is None
            into[position] = text
    given = sum(text is not None for text in decoding["passes"][0]["before"])
    return [text for block in sorted(blocks) for text in blocks[block]][given:]


# ------------------------------------------------------------------------------------ the record


def test_worked_examples():
    assert doctest.testmod(trace).failed == 0


def test_both_decodings_rebuild_the_text_in_their_own_number_of_passes(target, draft, record):
    ids, decoder = target.encode(PROMPT), Decoder(gen_len=160)
    free, spot = dlm.generate(target, decoder, ids), speculate(target, decoder, ids, draft)
    written = [target.tokenizer.decode([token]) for token in free.written]
    assert replay(record["free"]) == replay(record["spot"]) == written
    assert len(record["free"]["passes"]) == free.passes["denoise"]
    assert len(record["spot"]["passes"]) == spot.passes["denoise"]
    assert [len(now["path"]) - 1 for now in record["spot"]["passes"]] == spot.accepted
    assert record["free"]["text"] == record["spot"]["text"] == target.decode(free.ids)
    assert record["spot"]["length"] == len(free.ids)
    assert record["same"] and json.loads(json.dumps(record)) == record


def test_accepted_nodes_hang_from_each_other(record):
    for now in record["spot"]["passes"]:
        parents = [now["nodes"][u]["parent"] for u in now["path"]]
        assert parents == [-1, *now["path"][:-1]]


def test_a_mass_is_that_of_the_parent_times_q_times_p(record):
    unknown = 0
    for now in record["spot"]["passes"]:
        for node in now["nodes"][1:]:
            above = now["nodes"][node["parent"]]["m"] if node["parent"] else 1.0
            if node["q"] is None:
                unknown += 1
            elif node["m"] > 0.01:
                assert node["m"] == pytest.approx(above * node["q"] * node["p"], rel=0.02)
    assert unknown < 10  # only states that were drafted in another order


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_q_and_p_are_the_drafters_and_the_stale_conditionals(target, drafter, temperature):
    seen = []

    def draft(stale, canvas):
        tree = ddtree.spot(stale, canvas, 8, drafter)
        seen.append((stale, tree))
        return tree

    decoder = Decoder(gen_len=32, temperature=temperature, confidence="distribution", seed=3)
    record = trace.record(target, decoder, target.encode(PROMPT), draft, PROMPT)
    rounds = [now for now in record["spot"]["passes"] if len(now["nodes"]) > 1]
    assert len(seen) == len(rounds) > 1
    for (stale, tree), now in zip(seen, rounds):
        q, nodes = drafter.order(stale), now["nodes"]
        for u, node in enumerate(nodes[1:], 1):
            if node["parent"] != tree.parents[u] or tree.masses[u] < 1e-3:
                continue
            before = tree.states[node["parent"]]
            decided = np.array([[before[s] != target.mask_id for s in stale.positions]])
            row = stale.positions.index(node["commits"][0][0])
            candidates = stale.candidates(stale.step(decided[0]))
            token = tree.states[u][stale.positions[row]]
            p = candidates.values[row, candidates.tokens[row].index(token)]
            assert node["q"] == pytest.approx(q(decided)[0, row], abs=2e-3)
            assert node["p"] == pytest.approx(p, abs=1e-4)


def test_a_drafter_without_masses_shows_p_alone(target):
    chain = partial(ddtree.chain, budget=4)
    record = trace.record(target, Decoder(gen_len=32), target.encode(PROMPT), chain, PROMPT)
    nodes = [node for now in record["spot"]["passes"] for node in now["nodes"][1:]]
    assert nodes and all(node["q"] is node["m"] is None and node["p"] > 0 for node in nodes)


def test_a_set_commit_is_a_set(target, draft):
    decoder = Decoder(gen_len=160, rule="threshold")
    record = trace.record(target, decoder, target.encode(PROMPT), draft, PROMPT)
    assert record["same"] and record["rule"] == "threshold"
    assert replay(record["free"]) == replay(record["spot"])
    assert max(len(now["commits"]) for now in record["spot"]["passes"]) > 1
    assert re.search(r"\+ \{\d+ .+, \d+ .+\}: the free commit", "\n".join(trace.lines(record, 80)))


def test_a_node_that_commits_a_set_shows_its_m_and_the_product_of_its_p(target):
    def pairs(stale, canvas):
        state = canvas.state
        left = [j for j, s in enumerate(stale.positions) if state[s] == target.mask_id][:2]
        if len(left) < 2 or len(stale.positions) < 8:
            return ddtree.root_only(canvas)
        for j in left:
            state = ddtree.commit(state, stale.positions[j], stale.candidates(0).tokens[j][0])
        return ddtree.Tree([canvas.state, state], [1.0, 0.25], [-1, 0])

    record = trace.record(target, Decoder(gen_len=32), target.encode(PROMPT), pairs, PROMPT)
    nodes = [node for now in record["spot"]["passes"] for node in now["nodes"][1:]]
    assert nodes
    for node in nodes:
        assert len(node["commits"]) == 2 and node["m"] == 0.25 and node["q"] is None
        assert 0 < node["p"] <= 1


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2"])
def test_every_family_with_or_without_a_tokenizer(family):
    folder = os.path.join(command.HERE, "checkpoints", f"golden-{family}")
    target = targets.load(folder, block_size=8)
    prompt = torch.arange(5, 18)
    draft = partial(ddtree.chain, budget=3)
    record = trace.record(target, Decoder(gen_len=16), prompt, draft, "ids")
    assert record["same"] and replay(record["free"]) == replay(record["spot"])
    given = sum(text is not None for text in record["free"]["passes"][0]["before"])
    assert given == (0 if record["attention"] == "full" else 13 % 8)
    assert ("begin where the prompt ends" in record["note"]) == (record["attention"] == "full")
    assert list(trace.lines(record, 80))


def test_padded_passes(target, draft):
    padded = targets.load("embedded")
    padded.units = 10
    record = trace.record(padded, Decoder(gen_len=64), target.encode(PROMPT), draft, PROMPT)
    assert record["same"] and replay(record["free"]) == replay(record["spot"])


def test_the_note_says_where_the_first_block_begins(target, record):
    length = len(target.encode(PROMPT))
    given = length % 32
    assert given and f"the last {given} share block {length // 32} with" in record["note"]
    assert f"first {32 - given}" in record["note"]
    assert "none is left over, and the answer begins block 2" in trace.note(target, 64)


# --------------------------------------------------------------------------------- on a terminal


def test_printed_lines_keep_to_the_width(record, capsys):
    for width in (60, 100):
        trace.show(record, width)
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert lines[0].startswith("Blocks of 32 positions are aligned")
    assert "rule exact, T = 0" in lines
    assert "├─ " in text and "└─ " in text and "│ " in text and "✓" in text
    assert text.count("round ") >= len(record["spot"]["passes"])
    passes = len(record["free"]["passes"]), len(record["spot"]["passes"])
    assert lines[-1] == f"draft-free: {passes[0]} passes; SPOT: {passes[1]} passes, the same text"


def test_a_printed_round():
    nodes = [
        {"parent": -1, "commits": [], "q": None, "p": None, "m": None},
        {"parent": 0, "commits": [[1, " b"]], "q": 0.5, "p": 1.0, "m": 0.5},
        {"parent": 1, "commits": [[2, "c\n"]], "q": None, "p": 0.25, "m": 0.125},
        {"parent": 0, "commits": [[2, "d"], [3, "e"]], "q": None, "p": 0.5, "m": 0.004},
    ]
    before = ["a", None, None, None]
    now = {"block": 2, "before": before, "into": 3, "commits": [[0, "x"]]}
    now |= {"nodes": nodes, "path": [0, 1, 2]}
    assert list(trace.round_lines(7, now, 80)) == [
        "round 7, block 2: 3 drafted, 2 accepted",
        "  a · · ·",
        "      q    p    m",
        "    .50 1.00  .50 ✓ ├─ 1 ␣b",
        "      –  .25  .12 ✓ │ └─ 2 c\\n",
        "      –  .50  .00   └─ {2 d, 3 e}",
        "  + 0 x: the free commit of block 3, verified in the same pass",
    ]


def test_a_text_cannot_act_on_the_terminal(record, capsys):
    bad = json.loads(json.dumps(record))
    bad["title"] = bad["spot"]["text"] = "\x1b[2J\u202e木"
    bad["spot"]["passes"][1]["nodes"][1]["commits"][0][1] = "\x1b]0;title\x07"
    trace.show(bad, 60)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\u202e" not in out and "\\x1b[2J" in out


# -------------------------------------------------------------------------------------- the page

EVIL = "</script><img src=x onerror=alert(1)><!--<script>{{record}}&amp;"


def evil(record):
    """The record with a text that tries to leave its place, wherever a text may stand."""
    record = json.loads(json.dumps(record))
    record["title"] = record["note"] = EVIL
    for now in record["spot"]["passes"]:
        for node in now["nodes"]:
            node["commits"] = [[position, EVIL] for position, _ in node["commits"]]
        now["commits"] = [[position, EVIL] for position, _ in now["commits"]]
    return record


def page_of(record, folder):
    trace.write_page(folder / "page.html", record)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_page_holds_the_record_and_loads_nothing(record, tmp_path):
    trace.write_page(tmp_path / "page.html", evil(record))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="record">(.*?)</script>', page)
    assert json.loads(embedded[1]) == evil(record)
    assert page.count("</script>") == 2 and "<img" not in page
    page = page_of(record, tmp_path)
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(|import\(", page)
    assert "default-src 'none'" in page


def test_a_page_that_cannot_be_written_is_one_sentence(record, tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        trace.write_page(tmp_path, record)


def browse(page, folder, fragment="", script=""):
    """The document after its scripts, and `script`, have run in Chromium."""
    path = folder / "browsed.html"
    path.write_text(page + f"<script>{{{script}}}</script>", encoding="utf-8")
    arguments = [*FLAGS.split(), f"--user-data-dir={folder}/user", "--dump-dom"]
    words = [CHROMIUM, *arguments, f"file://{path}{fragment}"]
    run = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60, check=True)
    return run.stdout


@needs_browser
def test_in_a_browser_a_pass_is_shown(record, tmp_path):
    page, passes = page_of(record, tmp_path), len(record["spot"]["passes"])
    free = len(record["free"]["passes"])
    dom = browse(page, tmp_path, f"#{passes}")
    assert f"pass <b>{passes}</b> of {free}" in dom
    total = len(replay(record["spot"]))
    assert f"✓ all {total} positions in {passes} passes" in dom
    assert f"{passes} of {total} positions" in dom  # draft-free: one a pass
    spot = re.search(r'id="spot".*?<div class="text">(.*?)</div>', dom, re.S)[1]
    written = re.sub(r'<span class="nl">.</span>|<[^>]+>', "", spot).replace("&lt;", "<")
    written = written.replace("&gt;", ">")
    assert record["spot"]["text"] in written and "cell open" not in spot
    assert "and verifies it in one pass" in dom and "exactly the same text" in dom
    assert dom.count('<tr class="accepted">') == len(record["spot"]["passes"][-1]["path"]) - 1
    assert '<tr class="extra">' in dom and "<path" in dom


@needs_browser
def test_in_a_browser_nothing_leaves_its_place(record, tmp_path):
    report = "document.body.dataset.images = document.images.length"
    dom = browse(page_of(evil(record), tmp_path), tmp_path, "#5", script=report)
    assert 'data-images="0"' in dom and "pass <b>5</b>" in dom
    assert dom.count("&lt;img src=x onerror") > 5  # shown as what it is


@needs_browser
def test_in_a_browser_keys_step_and_play(record, tmp_path):
    """Arrows step, End and Home jump, space plays to the end and then stops."""
    script = """
      const said = [], press = key =>
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"]) {
        press(key);
        said.push(document.getElementById("slider").value);
      }
      press(" ");
      said.push(document.getElementById("play").textContent);
      document.body.dataset.said = said.join(" ");
    """
    dom = browse(page_of(record, tmp_path), tmp_path, "#3", script)
    last = len(record["free"]["passes"])
    assert f'data-said="4 5 4 {last} {last} 0 Pause"' in dom
    assert f"pass <b>{last}</b> of {last}" in dom and ">Play</button>" in dom


@needs_browser
def test_in_a_browser_as_narrow_as_a_phone_nothing_overflows(record, tmp_path):
    """In a frame, as Chromium's own window is never narrower than 500 pixels."""
    n = len(record["spot"]["passes"]) - 1
    report = "parent.postMessage(`${root.clientWidth} wide, needs ${root.scrollWidth}`, '*')"
    report = f"<script>{{const root = document.documentElement; {report};}}</script>"
    (tmp_path / "inner.html").write_text(page_of(record, tmp_path) + report, encoding="utf-8")
    frame = f'<iframe src="inner.html#{n}" style="width: 360px; height: 800px; border: 0"></iframe>'
    collect = "<script>onmessage = event => document.body.append(event.data);</script>"
    dom = browse(f"<body>{collect}{frame}</body>", tmp_path)
    assert "360 wide, needs 360" in dom


@needs_browser
def test_in_a_browser_a_set_shows_as_a_set(target, draft, tmp_path):
    decoder = Decoder(gen_len=64, rule="threshold")
    record = trace.record(target, decoder, target.encode(PROMPT), draft, PROMPT)
    sizes = [len(now["commits"]) for now in record["spot"]["passes"]]
    n = sizes.index(max(sizes)) + 1
    dom = browse(page_of(record, tmp_path), tmp_path, f"#{n}")
    assert f"free commit: a set of {max(sizes)}" in dom and f"pass <b>{n}</b>" in dom
    assert "SPOT, pass by pass, rule threshold</p>" in dom


def test_pages_of_two_prompts_hold_each_its_own(tmp_path):
    """Writing one page leaves the template as it is, which itself cannot be written over."""
    for title in ("first prompt", "second prompt"):
        record = {"title": title}
        trace.write_page(str(tmp_path / "trace.html"), record)
        assert title in (tmp_path / "trace.html").read_text()
    with pytest.raises(ValueError, match="template"):
        trace.write_page(os.path.join(trace.command.HERE, "page.html"), record)
