"use strict";
// Plays a record of trace.py: both decodings at the same pass, and the tree of SPOT's round.
// Whatever a model wrote goes in as a text node, never as markup.

const PLAY = 320; // milliseconds a pass is shown
const LANE = 14; // pixels between two branches, at most

const record = JSON.parse(document.getElementById("record").textContent);
const by = id => document.getElementById(id);
const passes = n => `${n} ${n === 1 ? "pass" : "passes"}`;
const visible = text =>
  text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  return element;
}

// ---------------------------------------------------------------------------- the texts

// The cells of one decoding in order: the text each will hold, and the pass (from 1) that
// commits it; 0 for what the prompt gives to the first block.
function readCells(decoding) {
  const first = decoding.passes[0].block, cells = [];
  const put = (block, commits, pass, kind) => {
    for (const [position, text] of commits) {
      cells[(block - first) * record.block_size + position] = { text, pass, kind };
    }
  };
  decoding.passes[0].before.forEach((text, position) => {
    if (text !== null) put(first, [[position, text]], 0, "");
  });
  decoding.passes.forEach((now, n) => {
    for (const u of (now.path || []).slice(1)) {
      put(now.block, now.nodes[u].commits, n + 1, " accepted");
    }
    put(now.into, now.commits, n + 1, now.path ? " extra" : "");
  });
  return cells;
}

function layOut(name) {
  const decoding = record[name], cells = readCells(decoding), section = by(name);
  const first = decoding.passes[0].block, box = section.querySelector(".text");
  const given = cells.filter(cell => cell.pass === 0).length;
  if (given) box.append(make("span", "nl", "…"));
  cells.forEach((cell, i) => {
    if (i % record.block_size === 0) {
      box.append(make("span", "block"));
      box.lastChild.dataset.block = first + i / record.block_size;
    }
    const parts = cell.text.split(/(\n)/).flatMap(part =>
      part === "\n" ? [make("span", "nl", "↵"), part] : part);
    cell.element = make("span", "cell", ...parts);
    cell.part = cell.pass === 0 ? " given" : i >= given + decoding.length ? " past" : "";
    box.lastChild.append(cell.element);
  });
  const rail = document.querySelector(`.lane.${name} .rail`);
  const blocks = [...section.querySelectorAll(".block")];
  return { first, given, cells, section, rail, blocks, passes: decoding.passes };
}

function showText(side, n) {
  const end = side.passes.length, done = n >= end, total = side.cells.length - side.given;
  for (const cell of side.cells) {
    const fresh = cell.pass === n && n > 0 ? " fresh" + cell.kind : "";
    const open = cell.pass > n;
    cell.element.className = "cell" + cell.part + (open ? " open" : fresh);
    cell.element.setAttribute("aria-hidden", open);
  }
  const active = n ? side.passes[Math.min(n, end) - 1].into : side.first;
  side.blocks.forEach((block, i) => {
    block.classList.toggle("active", !done && side.first + i === active);
  });
  const written = side.cells.filter(cell => cell.pass <= n).length - side.given;
  side.section.classList.toggle("done", done);
  side.section.querySelector(".stat").textContent =
    done ? `✓ all ${total} positions in ${passes(end)}` : `${written} of ${total} positions`;
  side.rail.firstChild.style.width = `${100 * Math.min(1, n / end)}%`;
}

// ----------------------------------------------------------------------------- the tree

// Rows {u, parent, lane, kind}, the accepted path and its free commit first; a branch keeps to
// one lane, which no other crosses. u is null for the free commit.
function arrange(nodes, path) {
  const children = nodes.map(() => []), rows = [], taken = [], end = path.at(-1);
  nodes.slice(1).forEach((node, i) => children[node.parent].push(i + 1));
  for (const some of children) some.sort((a, b) => path.includes(b) - path.includes(a));
  const isFree = (lane, from, to) =>
    !(taken[lane] ||= []).some(([a, b]) => a <= to && from <= b);

  function descend(u, lane, from) {
    const start = rows.length, chain = [u];
    while (chain.at(-1) !== end && children[chain.at(-1)].length) {
      chain.push(children[chain.at(-1)][0]);
    }
    const extra = chain.at(-1) === end, to = start + chain.length - (extra ? 0 : 1);
    while (!isFree(lane, from, to)) lane++;
    taken[lane].push([from, to]);
    for (const v of chain) {
      const kind = v === 0 ? "root" : path.includes(v) ? "accepted" : "dropped";
      rows.push({ u: v, parent: nodes[v].parent, lane, kind });
    }
    if (extra) rows.push({ u: null, parent: end, lane, kind: "extra" });
    for (const [i, v] of [...chain.entries()].reverse()) {
      const others = v === end ? children[v] : children[v].slice(1);
      for (const child of others) descend(child, lane + 1, start + i + 1);
    }
  }

  descend(0, 0, 0);
  return rows;
}

function commitsOf(row, now) {
  const commits = row.kind === "extra" ? now.commits : now.nodes[row.u].commits;
  const fresh = { accepted: " fresh accepted", extra: " fresh extra" }[row.kind] || "";
  const texts = commits.map(([position, text]) => make("span", "commit",
    make("span", "at", position), " ", make("span", "token" + fresh, visible(text))));
  const set = commits.length > 1 ? `: a set of ${commits.length}` : "";
  const into = now.into === now.block ? "" : `, in block ${now.into}`;
  if (row.kind === "extra") texts.push(make("span", "hint", `free commit${set}${into}`));
  else texts.push(make("span", "hidden", row.kind));
  return texts;
}

function rowOf(row, now, width) {
  const graph = make("td"), what = make("td", "what");
  graph.style.minWidth = `${width}px`;
  row.line = make("tr", row.kind, graph, what);
  if (row.kind === "root") {
    const nothing = now.nodes.length > 1 ? "" : "; nothing to draft from yet";
    what.append(make("span", "hint", `the state before this pass${nothing}`));
  } else {
    what.append(...commitsOf(row, now));
  }
  if (row.kind === "root" || row.kind === "extra") {
    what.colSpan = 4;
    return row.line;
  }
  for (const name of "qpm") {
    const value = now.nodes[row.u][name];
    const text = value === null ? "–" : value.toFixed(2).replace(/^0/, "");
    row.line.append(make("td", name, text));
    if (value !== null) row.line.lastChild.style.setProperty("--share", value);
  }
  return row.line;
}

function wires(rows, box, lane) {
  const svg = draw("svg", { "aria-hidden": "true", width: 1, height: 1 });
  const top = box.getBoundingClientRect().top, at = new Map();
  for (const row of rows) {
    const place = row.line.getBoundingClientRect();
    row.x = row.lane * lane + 7;
    row.y = place.top - top + place.height / 2;
    at.set(row.u, row);
  }
  for (const row of rows.slice(1).reverse()) {
    const { x, y } = at.get(row.parent), bend = y + Math.min(12, row.y - y);
    const turn = x === row.x ? "" : `C${row.x} ${y} ${row.x} ${y} ${row.x} ${bend}`;
    svg.append(draw("path", { d: `M${x} ${y}${turn}V${row.y}`, class: `wire ${row.kind}` }));
  }
  for (const row of rows) {
    const r = row.kind === "dropped" ? 3.5 : 4.5;
    svg.append(draw("circle", { cx: row.x, cy: row.y, r, class: `dot ${row.kind}` }));
  }
  return svg;
}

function showTree(n) {
  const end = spot.passes.length, number = Math.min(n, end), section = by("round");
  const name = by("round-name"), stat = section.querySelector(".stat");
  const box = section.querySelector(".tree");
  section.classList.toggle("over", n > end);
  if (!n) {
    name.textContent = "The tree of a round";
    stat.textContent = "";
    const what = "Each round drafts a tree of states and verifies it in one pass of the target.";
    return box.replaceChildren(make("p", "hint", what));
  }
  const now = spot.passes[number - 1], rows = arrange(now.nodes, now.path);
  name.textContent = `Round ${number}, block ${now.block}`;
  stat.textContent = n > end ? "the last one"
    : `${now.nodes.length - 1} drafted, ${now.path.length - 1} accepted`;
  const lanes = 1 + Math.max(...rows.map(row => row.lane));
  const lane = Math.min(LANE, box.clientWidth / 4 / lanes);
  const heads = [make("td"), make("th", "what", "position, token"),
    make("th", "", "q"), make("th", "", "p"), make("th", "", "m")];
  for (const head of heads.slice(1)) head.scope = "col";
  box.replaceChildren(make("table", "",
    make("caption", "hidden", "Drafted states, the accepted path first"),
    make("thead", "", make("tr", "", ...heads)),
    make("tbody", "", ...rows.map(row => rowOf(row, now, lanes * lane + 6)))));
  box.append(wires(rows, box, lane));
}

// --------------------------------------------------------------------- passes and play

const free = layOut("free"), spot = layOut("spot");
const last = Math.max(free.passes.length, spot.passes.length);
let pass = 0, timer = null;

function show(n) {
  pass = Math.max(0, Math.min(last, n));
  showText(free, pass);
  showText(spot, pass);
  showTree(pass);
  by("slider").value = pass;
  by("slider").setAttribute("aria-valuetext", `pass ${pass} of ${last}`);
  by("pass").replaceChildren("pass ", make("b", "", pass), ` of ${last}`);
}

// A step by hand: it ends the play, is said aloud, and stands in the address.
function go(n) {
  clearInterval(timer);
  timer = null;
  by("play").textContent = "Play";
  show(n);
  const [alone, drafted] = [free, spot].map(side =>
    side.section.querySelector(".stat").textContent);
  by("status").textContent = `Pass ${pass}. Draft-free: ${alone}. SPOT: ${drafted}.`;
  history.replaceState(null, "", `#${pass}`);
}

function play() {
  if (timer !== null) return go(pass);
  if (pass === last) show(0);
  by("play").textContent = "Pause";
  timer = setInterval(() => (pass < last ? show(pass + 1) : go(pass)), PLAY);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowLeft: pass - 1, ArrowRight: pass + 1, Home: 0, End: last };
  // a button answers to space by itself
  if (event.key === " " && event.target.tagName !== "BUTTON") play();
  else if (event.key in moves) go(moves[event.key]);
  else return;
  event.preventDefault();
}

const asked = () => show(parseInt(location.hash.slice(1), 10) || 0);

by("title").textContent = record.title;
if (record.rule !== "exact") by("what").append(`, rule ${record.rule}`);
if (record.temperature) by("what").append(`, T = ${record.temperature}`);
by("note").textContent = record.note;
by("lead").textContent =
  `The target alone writes this in ${passes(free.passes.length)}. SPOT drafts a tree of states ` +
  `and verifies it in one pass: ${spot.passes.length} are enough for ` +
  (record.same ? "exactly the same text." : "another text.");
by("spot-end").textContent = `SPOT ends at pass ${spot.passes.length}`;
for (const side of [free, spot]) side.rail.style.width = `${100 * side.passes.length / last}%`;
by("slider").max = last;
by("slider").oninput = () => go(Number(by("slider").value));
by("play").onclick = play;
by("back").onclick = () => go(pass - 1);
by("forth").onclick = () => go(pass + 1);
addEventListener("keydown", press);
addEventListener("hashchange", asked);
addEventListener("resize", () => showTree(pass));
asked();
