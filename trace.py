"""One prompt decoded pass by pass, draft-free and with drafts: recorded, printed, written as a page to watch.

    python bench.py --trace
    python bench.py --trace --html trace.html

A round of speculation (paper section 5) is a tree of hypothetical states of which one path is the target's own: here
one sees which. Each node shows m(z) = m(y)·q(s|y)·p(v) (section 4) and its two factors apart: where the drafter
expects the next commit, and what the stale conditionals would write there. A node may commit a set (section 7).

The page is one file (trace.html with a record in it) without network, packages or fonts. `trace.html#12` opens at
pass 12, so that a picture of a telling moment can be taken:

    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1 \\
        --window-size=1200,900 --screenshot=pictures/picture.png file://$PWD/trace.html#12

What this file leaves out: choosing the prompt and the drafter (bench.py); figures over many prompts (report.py).
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
from ddtree import step_of
from verify import speculate

TEMPLATE = os.path.join(command.HERE, "trace.html")
DIGITS = 4  # of q, p and m in a record


# ------------------------------------------------------------------------------------------------- the record


def record(target, decoder, prompt, draft, title):
    """Decode `prompt` (int64 [P]) without drafts and with draft(stale, canvas) -> Tree; a dict, ready for JSON.

    title: what heads the trace, such as the prompt's words; note: where the first block begins, and why; same: whether
    both texts are equal; block_size, attention, rule, temperature: how it was decoded; free and spot: the two
    decodings, each with `text`, `length` (tokens of the answer: the last block may hold more) and `passes`, a list. A
    pass holds `block`; `before`, the block's L texts, None where undecided; `commits`, of the free commit; `into`, the
    block they stand in. A pass of `spot` also holds `nodes` (see `nodes_of`), root first, and `path`, the accepted
    ones. Commits are [position in the block, text] pairs.
    """
    passes, rounds, latest = [], [], [None]

    def remembering(stale, canvas):
        latest[0] = stale  # what the coming round's tree was drafted from
        return draft(stale, canvas)

    def step(canvas, state, following, *_):
        commits = commits_between(target, state, following)
        passes.append(entry(target, canvas.block, state, canvas.block, commits))

    def round_(canvas, tree, path, following, *_):
        last = tree.states[path[-1]]
        crossed = canvas.is_complete(last) and not canvas.is_leaf(last)
        commits = commits_between(target, canvas.blank if crossed else last, following)
        now = entry(target, canvas.block, canvas.state, canvas.block + crossed, commits)
        rounds.append(now | {"nodes": nodes_of(target, tree, path, latest[0]), "path": path})

    free = dlm.generate(target, decoder, prompt, watch=step)
    spot = speculate(target, decoder, prompt, remembering, watch=round_)
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
    whole = target.tokenizer is not None
    text = target.decode(ids) if whole else "".join(piece(target, token) for token in ids)
    return {"text": text, "length": len(ids), "passes": passes}


def entry(target, block, state, into, commits):
    """What a pass of either loop holds."""
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
    """The tree's nodes: `parent`, `commits`, `q`, `p` and `m`, each None where it cannot be said.

    Two orders of the same commits reach one state, and its mass is that of the heavier one. Where the target took the
    other, the node hangs from its accepted parent, and q, which its mass no longer tells, is None.
    """
    parents = tree.parents[:]
    for parent, child in zip(path, path[1:]):
        parents[child] = parent
    nodes = [{"parent": -1, "commits": [], "q": None, "p": None, "m": None}]
    for u in range(1, len(parents)):
        nodes.append(node(target, tree, u, parents[u], stale))
    return nodes


def node(target, tree, u, parent, stale):
    """Node u below `parent`: p = Π p(v) over its commits, q = m(z) / (m(y)·p) where it commits one position."""
    before, after = tree.states[parent], tree.states[u]
    p = stale_probability(stale, step_of_state(target, before), before, after)
    m = q = None
    if any(mass != 1.0 for mass in tree.masses):  # this drafter has masses
        m = tree.masses[u]
        drafted_here = parent == tree.parents[u] and len(changed(before, after)) == 1
        q = min(1.0, m / (tree.masses[parent] * p)) if drafted_here and p else None
    shown = {name: value if value is None else round(value, DIGITS) for name, value in zip("qpm", (q, p, m))}
    return {"parent": parent, "commits": commits_between(target, before, after)} | shown


def step_of_state(target, state):
    """Decided positions of a state, which name its noise (section 6)."""
    return len(state) - state.count(target.mask_id)


def stale_probability(stale, step, before, after):
    """p of all that is committed between two states, by the stale conditionals; None beyond their 32 best tokens."""
    seen, p = stale.at(step), 1.0
    for s in changed(before, after):
        row = stale.positions.index(s)
        if after[s] not in seen.tokens[row]:
            return None
        p *= float(seen.values[row, seen.tokens[row].index(after[s])])
    return p


def note(target, length):
    """Why the first active block may begin in the middle of a word; length: of the prompt, in tokens."""
    L = target.block_size
    if target.attention == "full":
        return f"Blocks of {L} positions begin where the prompt ends; every position sees the whole canvas."
    block, given = divmod(length, L)
    aligned = f"Blocks of {L} positions are aligned to the first token of the prompt, which has {length}"
    if not given:
        return f"{aligned}: they fill {block} blocks, and the answer begins block {block}."
    return (
        f"{aligned}: its last {given} share block {block} with the answer's first {L - given}. So the first block "
        "shown may begin in the middle of a sentence, or of a word."
    )


# -------------------------------------------------------------------------------------------- on a terminal


def show(record, width=None):
    """Print a record, round by round, in lines of at most `width` columns (by default the terminal's)."""
    width = width or shutil.get_terminal_size().columns
    for line in lines(record, width):
        print(cut(line, width))


def lines(record, width):
    """The printed lines of a record, those of a tree uncut."""
    yield from wrapped(record["note"], width)
    yield from wrapped(
        "Each round verifies a tree of drafted states in one target pass. A line of the tree is a commit (position in "
        "the block, token; ␣ is a space): q, the drafter's probability of the position; p, the stale conditionals' of "
        "the token; m, the product down the path. ✓: the target's own next state is this node. · is undecided.",
        width,
    )
    yield from ("", *wrapped(f"prompt: {record['title']}", width))
    for number, now in enumerate(record["spot"]["passes"], 1):
        yield from ("", *round_lines(number, now, width))
    free, spot = (record[side] for side in ("free", "spot"))
    same = "the same text" if record["same"] else "another text"
    yield from ("", *(visible(line, " ") for line in spot["text"].split("\n")))
    yield from ("", f"draft-free: {len(free['passes'])} passes; SPOT: {len(spot['passes'])} passes, {same}")


def round_lines(number, now, width):
    """One round: the state before it, the tree, the free commit."""
    drafted, accepted = len(now["nodes"]) - 1, len(now["path"]) - 1
    yield f"round {number}, block {now['block']}: {drafted} drafted, {accepted} accepted"
    before = ["·" if text is None else visible(text) for text in now["before"]]
    yield from wrapped(" ".join(before), width, "  ")
    if drafted:
        yield "     q    p    m"
    else:
        yield "  nothing to draft from: the block is new to the target, or already complete"
    for u, branch in branches([node["parent"] for node in now["nodes"]]):
        node = now["nodes"][u]
        numbers = "".join(probability(node[name]) for name in "qpm")
        mark = "✓" if u in now["path"] else " "
        yield f"  {numbers} {mark} {branch} {named(node['commits'])}"
    crossed = f" of block {now['into']}, verified in the same pass" if now["into"] != now["block"] else ""
    yield f"  + {named(now['commits'])}: the free commit{crossed}"


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
    """Commits as text; a set in braces.

    >>> named([[3, " has"]]), named([[3, " has"], [4, " 12"]])
    ('3 ␣has', '{3 ␣has, 4 ␣12}')
    """
    names = ", ".join(f"{position} {visible(text)}" for position, text in commits)
    return f"{{{names}}}" if len(commits) > 1 else names


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
    """Prose, or the texts of a state, on as many lines as they need."""
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


# --------------------------------------------------------------------------------------------------- the page


def write_page(path, record):
    """Write the record as one HTML page that needs nothing else. Raises ValueError."""
    with open(TEMPLATE, encoding="utf-8") as file:
        template = file.read()
    parts = {"title": html.escape(record["title"]), "record": embedded(record)}
    page = re.sub(r"\{\{(title|record)\}\}", lambda found: parts[found[1]], template)
    command.write_text(path, page)


def embedded(record):
    """JSON that cannot end the script element that holds it: a model may write anything, `</script>` too.

    >>> embedded({"text": "</script>"})
    '{"text": "\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(record)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
