// The tree of layers, with the tensors of one program or two, and what each sends.

const DATA = JSON.parse(document.getElementById("data").textContent);
const [FIRST, SECOND] = DATA.programs;
const MESH = FIRST.mesh;

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const alongText = (axes) => axes === null ? "in groups that no axes make"
  : axes.length ? `along ${axes.join(", ")}` : "along no axis";

// Of what XLA combined, only what is known to be the op's own; of a loop, all of its trips.
const sentBytes = ({own, times}) => (own ?? 0) * (times ?? 1);
const isOpen = ({own}) => own === null;

/** What a tensor sends, by kind and axes: {kind, axes, sides: [[...], [...]], bytes}. */
function sentAt(sides) {
  const byKind = new Map();
  sides.forEach((tensor, side) => {
    for (const number of tensor?.sent ?? []) {
      const collective = DATA.programs[side].collectives[number];
      const key = `${collective.kind} ${alongText(collective.axes)}`;
      if (!byKind.has(key)) {
        byKind.set(key, {key, kind: collective.kind, axes: collective.axes, sides: [[], []]});
      }
      byKind.get(key).sides[side].push(collective);
    }
  });
  for (const sent of byKind.values()) {
    sent.bytes = sent.sides.map((of) => sum(of.map(sentBytes)));
    sent.open = sent.sides.map((of) => of.some(isOpen));
    // By which the largest come first: a part may be nearly all of it.
    sent.most = Math.max(...sent.sides.map((of) => sum(of.map(({own, bytes, times}) =>
      (own ?? bytes) * (times ?? 1)))));
    sent.what = whatChanged(sent);
  }
  return [...byKind.values()].sort((a, b) => b.most - a.most);
}

function whatChanged({sides, bytes: [before, after], open}) {
  if (!SECOND) return "";
  if (!sides[0].length || !sides[1].length) return sides[0].length ? "gone" : "new";
  if (before === after || open.includes(true)) return "";
  return after > before ? "grew" : "shrank";
}

/** What is sent on one side: `11 KiB`, or `part of 145 KiB` where no part is known. */
function sentText(sent, side) {
  const of = sent.sides[side];
  if (!of.length) return "–";
  const parts = of.filter(isOpen).map(({bytes}) => `part of ${bytesText(bytes)}`);
  const known = of.some((each) => !isOpen(each)) ? [bytesText(sent.bytes[side])] : [];
  return [...known, ...new Set(parts)].join(" + ");
}

function makeEntries() {
  const byKey = new Map();
  DATA.programs.forEach((program, side) => {
    for (const tensor of program.tensors) {
      if (!byKey.has(tensor.key)) byKey.set(tensor.key, [null, null]);
      byKey.get(tensor.key)[side] = tensor;
    }
    if (program.elsewhere.length) {
      const key = "no tensor";
      if (!byKey.has(key)) byKey.set(key, [null, null]);
      byKey.get(key)[side] = {key, kind: "elsewhere", name: "at no tensor of the program's",
        layer: "", sent: program.elsewhere};
    }
  });
  const differing = new Set(DATA.differing);
  return [...byKey].map(([key, sides]) => {
    const tensor = sides[0] ?? sides[1], sent = sentAt(sides);
    const isOnly = Boolean(SECOND) && sides.includes(null);
    return {
      key, sides, tensor, sent, isOnly,
      lies: differing.has(key) || isOnly,
      differs: differing.has(key) || isOnly || sent.some(({what}) => what),
    };
  });
}

const ENTRIES = makeEntries();
const BY_KEY = new Map(ENTRIES.map((entry) => [entry.key, entry]));
const MOST_SENT = Math.max(1, ...ENTRIES.flatMap((e) => e.sent.flatMap((s) => s.bytes)));

function pathOf(tensor) {
  const heads = {argument: "arguments", result: "results", elsewhere: "elsewhere"};
  if (tensor.kind in heads) {
    return [heads[tensor.kind], ...tensor.name.split(".").slice(0, -1)];
  }
  return tensor.layer ? tensor.layer.split(".") : ["in no layer"];
}

function newNode(label, parent) {
  return {label, parent, parts: new Map(), entries: [], open: false, shut: false};
}

function makeTree() {
  const root = newNode("", null);
  for (const entry of ENTRIES) {
    let node = root;
    for (const part of pathOf(entry.tensor)) {
      if (!node.parts.has(part)) node.parts.set(part, newNode(part, node));
      node = node.parts.get(part);
    }
    node.entries.push(entry);
    entry.node = node;
  }
  join(root);
  return root;
}

/** Joins a layer to its only part where it has nothing else, or to its only tensor. */
function join(node) {
  for (let [key, part] of [...node.parts]) {
    if (node.parent && !part.parts.size && part.entries.length === 1) {
      const [entry] = part.entries;  // TF's scope of a single op.
      entry.scope = part.label;
      entry.node = node;
      node.entries.push(entry);
      node.parts.delete(key);
      continue;
    }
    while (!part.entries.length && part.parts.size === 1) {
      const [only] = part.parts.values();
      only.label = `${part.label}.${only.label}`;
      only.parent = node;
      part = only;
    }
    node.parts.set(key, part);
    join(part);
  }
  const all = [...node.parts.values()];
  node.count = node.entries.length + sum(all.map((p) => p.count));
  node.differing = node.entries.filter((e) => e.differs).length
    + sum(all.map((p) => p.differing));
  node.bytes = [0, 1].map((side) => sum(all.map((p) => p.bytes[side]))
    + sum(node.entries.flatMap((e) => e.sent.map((s) => s.bytes[side]))));
  node.hasOpen = [0, 1].map((side) => all.some((p) => p.hasOpen[side])
    || node.entries.some((e) => e.sent.some((s) => s.open[side])));
}

const TREE = makeTree();

/** Opens layers, the outer ones first, while all rows fit on a screen. */
function openSome(most) {
  const isBorder = (node) => ["arguments", "results"].includes(node.label.split(".")[0]);
  const nodes = [...TREE.parts.values()];
  const left = nodes.filter((node) => !isBorder(node));
  let count = nodes.length;
  while (left.length) {
    const node = left.shift();
    const rows = node.parts.size + sum(node.entries.map((e) => 1 + e.sent.length));
    if (count + rows <= most) {
      node.open = true;
      count += rows;
      left.push(...node.parts.values());
    }
  }
}

/** All that a search looks at, in small letters. */
function textOf(entry) {
  if (entry.text === undefined) {
    const tensors = entry.sides.filter(Boolean);
    const sent = entry.sent.map((each) => [each.kind, alongText(each.axes),
      ...[0, 1].map((side) => sentText(each, side))].join(" "));
    const shown = tensors.map((t) => [t.key, t.name, t.layer, t.place, t.kind,
      t.shape && `${t.dtype}[${t.shape.join(",")}]`, (t.dims ?? []).join(" "),
      t.shape && shardingOf(entry.sides[0] === t ? 0 : 1, t).text].join(" "));
    entry.text = [...shown, ...sent].join("\n").toLowerCase();
  }
  return entry.text;
}

const shardingOf = (side, tensor) => DATA.programs[side].shardings[tensor.sharding];

/** The names, layers and lines that are most like a text. */
function nearest(text, count = 4) {
  const pairs = (word) => {
    const counts = new Map();
    for (let i = 0; i + 1 < word.length; i++) {
      const pair = word.slice(i, i + 2);
      counts.set(pair, (counts.get(pair) ?? 0) + 1);
    }
    return counts;
  };
  const asked = pairs(text.toLowerCase()), scored = new Map();
  for (const entry of ENTRIES) {
    for (const name of [entry.tensor.name, entry.tensor.layer, entry.tensor.place]) {
      if (!name || scored.has(name)) continue;
      let alike = 0;
      for (const [pair, n] of pairs(name.toLowerCase())) {
        alike += Math.min(n, asked.get(pair) ?? 0);
      }
      const size = Math.max(1, name.length + text.length - 2);
      scored.set(name, 2 * alike / size);
    }
  }
  return [...scored].filter(([, score]) => score > 0.25)
    .sort((a, b) => b[1] - a[1]).slice(0, count).map(([name]) => name);
}
