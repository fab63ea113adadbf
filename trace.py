"""One prompt decoded pass by pass, draft-free and with drafts: recorded, printed, made a page.

    python bench.py --trace
    python bench.py --trace --html trace.html

A round of speculation (paper section 5) verifies a tree of hypothetical states, of which one path
is the target's own: here one sees which. Each node shows m(z) = m(y)·q(s|y)·p(v) (section 4) and
its two factors apart: where the drafter expects the next commit, and what the stale conditionals
would write there. A node, and the free commit, may be a set (section 7).

The page is one file without network, packages or fonts: page.html with page.js and a record in
it. `trace.html#8` opens at pass 8, so that a picture of a telling moment can be taken:

    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,866 \\
        --screenshot=pictures/picture.png "file://$PWD/trace.html#8"

What this file leaves out: choosing the prompt and the drafter (bench.py), and figures over many
prompts (report.py).
"""

import html
import json
import os
import re
import shutil
import textwrap
import unicodedata

import command
import dlm
import verify

DIGITS = 4  # of q, p and m in a record


# ------------------------------------------------------------------------------------ the record


def record(target, decoder, prompt, draft, title):
    """Decode `prompt` (int64 [P]) without drafts and with draft(stale, canvas) -> Tree.

    A dict, ready for JSON:
      title: what heads the trace, such as the prompt's words
      note: where the first block begins, and why
      same: whether both decodings wrote the same
      block_size, attention, rule, temperature: how it was decoded
      free, spot: the two decodings, each
        text, length: the answer and its tokens (the last block may hold more)
        passes: one dict a pass
          block, before: the active block and its L texts, None where undecided
          into, commits: the block of the (free) commit, and its [position, text] pairs
          nodes, path: of spot only: the tree (see `nodes_of`) and its accepted nodes, root first
    """
    passes, rounds, latest = [], [], [None]

    def remembering(stale, canvas):
        latest[0] = stale  # what the coming round's tree is drafted from
        return draft(stale, canvas)

    def step(canvas, state, following, *_):
        commits = commits_between(target, state, following)
        passes.append(entry(target, canvas.block, state, canvas.block, commits))

    def round_(canvas, tree, path, following, out, unit):
        last = tree.states[path[-1]]
        crosses = unit != path[-1]  # the free commit is the next block's first
        commits = commits_between(target, canvas.blank if crosses else last, following)
        now = entry(target, canvas.block, canvas.state, canvas.block + crosses, commits)
        rounds.append(now | {"nodes": nodes_of(target, tree, path, latest[0]), "path": path})

    free = dlm.generate(target, decoder, prompt, watch=step)
    spot = verify.speculate(target, decoder, prompt, remembering, watch=round_)
    return {
        "title": title,
        "note": note(target, len(prompt)),
        "same": free.written == spot.written,
        "block_size": target.block_size,
        "attention": target.attention,
        "rule": decoder.rule,
        "temperature": decoder.temperature,
        "free": decoding(target, free, passes),
        "spot": decoding(target, spot, rounds),
    }


def decoding(target, generation, passes):
    """One of the record's two decodings."""
    ids = generation.ids
    if target.tokenizer is None:
        text = "".join(piece(target, token) for token in ids)
    else:
        text = target.decode(ids)
    return {"text": text, "length": len(ids), "passes": passes}


def entry(target, block, state, into, commits):
    """What a pass of either decoding holds."""
    before = [None if token == target.mask_id else piece(target, token) for token in state]
    return {"block": block, "before": before, "into": into, "commits": commits}


def piece(target, token):
    """A token's text; its number where the target has no tokenizer."""
    return f"#{token} " if target.tokenizer is None else target.tokenizer.decode([token])


def changed(before, after):
    """Positions in which two states differ.

    >>> changed((7, 9, 9), (7, 5, 9))
    [1]
    """
    return [s for s, (old, new) in enumerate(zip(before, after)) if old != new]


def commits_between(target, before, after):
    """What was committed between two states: [position, text] pairs."""
    return [[s, piece(target, after[s])] for s in changed(before, after)]


def nodes_of(target, tree, path, stale):
    """The tree's nodes: parent, commits, q, p and m, each of these None where it is not known.

    Two orders of the same commits reach one state, with the mass of the heavier one. Where the
    target took the other, the node hangs from its accepted parent, and its mass tells no q.
    """
    parents = tree.parents[:]
    for parent, child in zip(path, path[1:]):
        parents[child] = parent
    nodes = [{"parent": -1, "commits": [], "q": None, "p": None, "m": None}]
    for u in range(1, len(parents)):
        nodes.append(node(target, tree, u, parents[u], stale))
    return nodes


def node(target, tree, u, parent, stale):
    """Node u below `parent`: p = Π p(v) over its commits; q = m(z) / (m(y)·p) of a single one."""
    before, after = tree.states[parent], tree.states[u]
    p = stale_probability(stale, before, after)
    m = q = None
    if any(mass != 1.0 for mass in tree.masses):  # else this drafter gives none
        m = tree.masses[u]
        single = len(changed(before, after)) == 1
        if single and p and parent == tree.parents[u]:
            q = min(1.0, m / (tree.masses[parent] * p))
    known = {"q": q, "p": p, "m": m}
    numbers = {name: None if x is None else round(x, DIGITS) for name, x in known.items()}
    return {"parent": parent, "commits": commits_between(target, before, after)} | numbers


def stale_probability(stale, before, after):
    """Π p(v) of the commits between two states; None for a token that `stale` does not keep."""
    masks_left = sum(before[s] == stale.state[s] for s in stale.positions)
    seen = stale.candidates(len(before) - masks_left)  # the candidates at the step of `before`
    p = 1.0
    for s in changed(before, after):
        row = stale.positions.index(s)
        if after[s] not in seen.tokens[row]:
            return None
        p *= float(seen.values[row, seen.tokens[row].index(after[s])])
    return p


def note(target, length):
    """Why the first block may begin in the middle of a word; length: the prompt's, in tokens."""
    L = target.block_size
    if target.attention == "full":
        return f"Blocks of {L} positions begin where the prompt ends, and see the whole canvas."
    block, given = divmod(length, L)
    aligned = f"Blocks of {L} positions are aligned to the prompt's first token. Of its {length}"
    if not given:
        return f"{aligned}, none is left over, and the answer begins block {block}."
    return (
        f"{aligned}, the last {given} share block {block} with the answer's first {L - given}: so "
        "the first block shown may begin in the middle of a sentence, or of a word."
    )


# --------------------------------------------------------------------------------- on a terminal


KEY = (
    "Each round verifies a tree of drafted states in one target pass. A line of the tree is a "
    "commit: position in the block, token (␣ is a space). q: the drafter's probability of the "
    "position; p: the stale conditionals' of the token; m: their product down the path. ✓: the "
    "target's own next state is this node. · is undecided."
)


def show(record, width=None):
    """Print a record round by round, in lines of at most `width` columns (the terminal's)."""
    width = width or shutil.get_terminal_size().columns
    for line in lines(record, width):
        print(cut(line, width))


def lines(record, width):
    """The printed lines of a record, those of a tree uncut."""
    yield from wrapped(record["note"], width)
    yield ""
    yield from wrapped(KEY, width)
    yield ""
    yield f"rule {record['rule']}, T = {record['temperature']:g}"
    yield from wrapped(f"prompt: {record['title']}", width)
    for number, now in enumerate(record["spot"]["passes"], 1):
        yield ""
        yield from round_lines(number, now, width)
    yield ""
    for line in record["spot"]["text"].split("\n"):
        yield visible(line, " ")
    yield ""
    free, spot = (len(record[side]["passes"]) for side in ("free", "spot"))
    same = "the same text" if record["same"] else "another text"
    yield f"draft-free: {free} passes; SPOT: {spot} passes, {same}"


def round_lines(number, now, width):
    """One round: the state before it, the tree, the free commit."""
    drafted, accepted = len(now["nodes"]) - 1, len(now["path"]) - 1
    yield f"round {number}, block {now['block']}: {drafted} drafted, {accepted} accepted"
    before = ["·" if text is None else visible(text) for text in now["before"]]
    yield from wrapped(" ".join(before), width, "  ")
    if drafted:
        yield "      q    p    m"
    else:
        yield "  nothing to draft from: the block is new to the target, or already complete"
    for u, branch in branches([node["parent"] for node in now["nodes"]]):
        node = now["nodes"][u]
        numbers = "".join(probability(node[name]) for name in "qpm")
        mark = "✓" if u in now["path"] else " "
        yield f"  {numbers} {mark} {branch} {named(node['commits'])}"
    crossed = f" of block {now['into']}, verified in the same pass"
    where = crossed if now["into"] != now["block"] else ""
    yield f"  + {named(now['commits'])}: the free commit{where}"


def branches(parents):
    """Pairs (node, the branch drawn before it), depth first, of a tree whose root 0 has parent −1.

    >>> for node, branch in branches([-1, 0, 1, 1, 0]):
    ...     print(branch, node)
    ├─ 1
    │ ├─ 2
    │ └─ 3
    └─ 4
    """
    children = {u: [] for u in range(len(parents))}
    for u, parent in enumerate(parents[1:], 1):
        children[parent].append(u)

    def below(u, trunk):
        for child in children[u]:
            last = child == children[u][-1]
            yield child, trunk + ("└─" if last else "├─")
            yield from below(child, trunk + ("  " if last else "│ "))

    return below(0, "")


def named(commits):
    """Commits as text; all but a single one as a set.

    >>> named([[3, " has"]]), named([[3, " has"], [4, " 12"]])
    ('3 ␣has', '{3 ␣has, 4 ␣12}')
    """
    names = ", ".join(f"{position} {visible(text)}" for position, text in commits)
    return names if len(commits) == 1 else f"{{{names}}}"


def probability(value):
    """A probability in five columns.

    >>> probability(0.126), probability(1.0), probability(None)
    ('  .13', ' 1.00', '    –')
    """
    text = "–" if value is None else f"{value:.2f}"
    return text.removeprefix("0").rjust(5)


def visible(text, space="␣"):
    """Text in which nothing acts on the terminal, and spaces show.

    >>> visible(" a\\n\\x1b[2J")
    '␣a\\\\n\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text).replace(" ", space)


def wrapped(text, width, indent=""):
    """Prose, or the texts of a state, on as many lines as it needs."""
    plain = visible(" ".join(text.split()), " ")
    return textwrap.wrap(plain, width, initial_indent=indent, subsequent_indent=indent)


def cut(line, width):
    """The line within `width` columns of a terminal, where wide characters take two.

    >>> cut("a tree", 6), cut("a tree", 5), cut("木木木", 5)
    ('a tree', 'a tr…', '木木…')
    """
    sizes = [2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line]
    if sum(sizes) <= width:
        return line
    while sum(sizes) > width - 1:
        sizes.pop()
    return line[: len(sizes)] + "…"


# -------------------------------------------------------------------------------------- the page


def write_page(path, record):
    """Write the record as one HTML page that needs nothing else. Raises ValueError."""
    page, script = (
        command.read_text(os.path.join(command.HERE, name)) for name in ("page.html", "page.js")
    )
    if os.path.realpath(path).startswith(os.path.join(command.HERE, "page.")):
        raise ValueError(f"{path} is the page's template: choose another --html")
    parts = {"title": html.escape(record["title"]), "record": embedded(record), "script": script}
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)  # in one go, once each
    command.write_text(path, page)


def embedded(record):
    """JSON that cannot end the script that holds it, whatever a model wrote.

    >>> embedded({"text": "</script>"})
    '{"text": "\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(record)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
