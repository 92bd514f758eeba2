// The list of rows: only those on the screen are in the document.

const LIST = document.getElementById("list"), ROWS = document.getElementById("rows");
const SEARCH = document.getElementById("search");
const state = {rows: [], cursor: 0, query: "", only: new Set()};
const FILTERS = {
  sent: {label: "Sent", holds: (entry) => entry.sent.length},
  replicated: {label: "Replicated", holds: (entry) => entry.sides.some((tensor, side) =>
    tensor?.shape && tensor.bytes > 1024 && tensor.held === tensor.bytes
    && shardingOf(side, tensor).dims !== null)},
  ...(SECOND ? {differs: {label: "Differs", holds: (entry) => entry.differs}} : {}),
};

const isFiltered = () => state.query !== "" || state.only.size > 0;
const rowHeight = () => parseFloat(getComputedStyle(document.documentElement)
  .getPropertyValue("--row"));

function isShown(entry) {
  for (const name of state.only) if (!FILTERS[name].holds(entry)) return false;
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => textOf(entry).includes(word));
}

/** Adds a node's rows to `rows`; whether there are any entries. */
function addRows(node, depth, rows, shown) {
  const isOpen = isFiltered() ? !node.shut : node.open;
  const begin = rows.length;
  if (node.parent) rows.push({node, depth, isOpen});
  let hasEntries = false;
  for (const part of node.parts.values()) {
    const here = rows.length;
    if (addRows(part, depth + 1, rows, shown)) hasEntries = true;
    if (!isOpen) rows.length = here;
  }
  for (const entry of node.entries) {
    if (!shown(entry)) continue;
    hasEntries = true;
    if (!isOpen) continue;
    rows.push({entry, depth: depth + 1});
    entry.sent.forEach((sent) => rows.push({entry, sent, depth: depth + 2}));
  }
  if (!hasEntries) rows.length = begin;
  return hasEntries;
}

function refresh() {
  const rows = [], words = isFiltered();
  addRows({...TREE, open: true, shut: false}, -1, rows, words ? isShown : () => true);
  state.rows = rows;
  state.cursor = Math.min(state.cursor, Math.max(0, rows.length - 1));
  ROWS.style.height = `${rows.length * rowHeight()}px`;
  draw();
}

function draw() {
  const height = rowHeight(), begin = Math.max(0, Math.floor(LIST.scrollTop / height) - 6);
  const end = Math.min(state.rows.length,
    Math.ceil((LIST.scrollTop + LIST.clientHeight) / height) + 6);
  const shown = [];
  for (let i = begin; i < end; i++) shown.push(rowElement(state.rows[i], i, height));
  ROWS.replaceChildren(...(state.rows.length ? shown : [nothing()]));
  if (document.getElementById(`row${state.cursor}`)) {
    LIST.setAttribute("aria-activedescendant", `row${state.cursor}`);
  }
}

function nothing() {
  const near = state.query ? nearest(state.query) : [];
  return h("div", {class: "empty"},
    h("p", {}, state.query ? `No matches for “${state.query}”` : "There are none",
      state.only.size ? ` among those shown by “${[...state.only].map((name) =>
        FILTERS[name].label).join("”, “")}”.` : "."),
    near.length ? h("p", {class: "soft"}, "Nearest are") : "",
    near.map((name) => h("p", {}, h("button", {class: "link", onclick: () => search(name)},
      name))));
}

function rowElement(row, number, height) {
  const kind = row.node ? "node" : row.sent ? "sent" : "tensor";
  const differs = row.node ? 0 : row.sent ? row.sent.what : row.entry.lies;
  const names = ["row", kind, row.isOpen ? "open" : "",
    number === state.cursor ? "cursor" : "", differs ? "differs" : ""];
  const parts = {node: nodeParts, sent: sentParts, tensor: tensorParts}[kind](row);
  return h("div", {
    id: `row${number}`, class: names.filter(Boolean).join(" "), role: "treeitem",
    "aria-level": row.depth + 1, "aria-selected": String(number === state.cursor),
    "aria-expanded": row.node ? String(row.isOpen) : null,
    style: `top: ${number * height}px; --indent: ${.7 + row.depth * .95}rem`,
    onclick: () => act(number),
  }, parts);
}

const indented = (row, ...parts) => h("div",
  {class: "name", style: `padding-left: ${.5 + row.depth * .95}rem`}, ...parts);

function nodeParts(row) {
  const {node} = row;
  const notes = [`${node.count}`];
  const differing = SECOND && node.differing;
  return [
    indented(row, h("span", {class: "caret"}, "▸"), h("span", {class: "label"}, node.label),
      h("span", {class: "count"}, ...notes),
      differing ? h("span", {class: "changed small"}, `≠ ${node.differing}`) : ""),
    h("div", {class: "type"}),
    SECOND ? h("div", {class: "other"}) : "",
    h("div", {class: "number"}, nodeBytes(node)),
  ];
}

/** What a layer sends; at least so much, where a part of what XLA combined is not known. */
function nodeBytes({bytes, hasOpen}) {
  const sides = SECOND ? [0, 1] : [0];
  if (!sides.some((side) => bytes[side] || hasOpen[side])) return "";
  return `⇄ ${sides.map((side) => (hasOpen[side] ? "≥ " : "") + bytesText(bytes[side]))
    .join(" | ")}`;
}

function tensorParts(row) {
  const {entry} = row, {tensor} = entry;
  const typeOf = (side) => {
    const shown = entry.sides[side];
    if (side && !entry.lies) return h("span", {class: "dim-name"}, "=");
    if (!shown?.shape) return shown ? [] : [h("span", {class: "soft"}, "not there")];
    const {mesh} = DATA.programs[side], sharding = shardingOf(side, shown);
    return typeText(shown, sharding, mesh, {names: true});
  };
  const drawn = entry.sides[0] ?? entry.sides[1], side = entry.sides[0] ? 0 : 1;
  const label = tensor.kind === "inside" ? tensor.name : tensor.name.split(".").pop();
  const held = entry.sides.map((each) => each?.shape ? bytesText(each.held) : "–");
  return [
    indented(row, drawn.shape ? glyph(shardingOf(side, drawn), DATA.programs[side].mesh) : "",
      h("span", {title: tensor.key}, entry.scope ? `${entry.scope}/` : "", label),
      tensor.annotated && tensor.kind === "inside"
        ? h("span", {class: "tag"}, "annotation") : "",
      tensor.gradient ? h("span", {class: "gradient"}, "gradient") : "",
      entry.isOnly ? h("span", {class: "changed small"},
        entry.sides[0] ? "only in the first" : "only in the second")
        : entry.lies ? h("span", {class: "changed small"}, "≠") : "",
      h("span", {class: "place"}, tensor.place ?? "")),
    h("div", {class: "type mono"}, typeOf(0)),
    SECOND ? h("div", {class: "other mono"}, typeOf(1)) : "",
    h("div", {class: "number"}, SECOND && held[0] !== held[1] ? held.join(" | ") : held[0]),
  ];
}

function sentParts(row) {
  const {sent} = row, [first, second] = sent.bytes;
  const times = [...new Set(sent.sides.flat().map((each) => each.times))];
  const often = times.length > 1 ? ", loops" : times[0] === 1 ? "" : ` in ${times[0] ?? "?"}×`;
  const [{between: [between]}] = sent.sides.flat(), side = sent.sides[0].length ? 0 : 1;
  const {shardings, mesh} = DATA.programs[side];
  return [
    indented(row, arrow(SECOND ? Math.max(first, second) : first, sent.axes),
      h("span", {class: "kind"}, sent.kind),
      sent.axes === null ? h("span", {}, alongText(null))
        : h("span", {}, ...sent.axes.map((axis) => axisMark(axis))),
      sent.what ? h("span", {class: `${sent.what} small`}, sent.what) : ""),
    h("div", {class: "type mono"}, between ? `${shardings[between.before].text} → `
      + shardings[between.after].text : ""),
    h("div", {class: "number", title: [...new Set(sent.sides.flat().map((c) => c.shared))]
      .filter(Boolean).join("; ") || null},
    SECOND ? `${sentText(sent, 0)} | ${sentText(sent, 1)}` : sentText(sent, 0), often),
  ];
}

// What is done with a row.

function toggle(row) {
  if (isFiltered()) row.node.shut = !row.node.shut;
  else row.node.open = !row.node.open;
  refresh();
}

function act(number) {
  state.cursor = number;
  const row = state.rows[number];
  if (!row) return;
  if (row.node) toggle(row);
  else {
    choose(row.entry);
    draw();
  }
}

/** Shows an entry's details, by way of the address: the way back is the browser's. */
function choose(entry) {
  const wanted = `#${encodeURIComponent(entry.key)}`;
  if (location.hash === wanted) showChosen();
  else location.hash = wanted;
}

function reveal(entry) {
  for (let node = entry.node; node; node = node.parent) node.open = !(node.shut = false);
  if (isFiltered() && !isShown(entry)) search("", new Set());
  refresh();
  moveTo(state.rows.findIndex((row) => row.entry === entry && !row.sent));
}

function moveTo(number) {
  if (number < 0) return;
  state.cursor = Math.max(0, Math.min(number, state.rows.length - 1));
  const height = rowHeight(), top = state.cursor * height;
  if (top < LIST.scrollTop) LIST.scrollTop = top;
  else if (top + height > LIST.scrollTop + LIST.clientHeight) {
    LIST.scrollTop = top + height - LIST.clientHeight;
  }
  draw();
}

function search(query, only = state.only) {
  state.query = query.trim();
  // A blank that is being typed stays.
  if (SEARCH.value.trim() !== state.query) SEARCH.value = state.query;
  state.only = only;
  for (const entry of ENTRIES) {
    for (let node = entry.node; node?.shut; node = node.parent) node.shut = false;
  }
  for (const button of document.querySelectorAll("#filters button")) {
    button.setAttribute("aria-pressed", String(only.has(button.dataset.name)));
  }
  state.cursor = 0;
  LIST.scrollTop = 0;
  refresh();
}

function onKey(event) {
  const row = state.rows[state.cursor], page = Math.floor(LIST.clientHeight / rowHeight());
  const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
    Home: -state.rows.length, End: state.rows.length};
  if (event.key in steps) moveTo(Math.max(0, state.cursor + steps[event.key]));
  else if (event.key === "Enter" || event.key === " ") act(state.cursor);
  else if (event.key === "ArrowRight" && row?.node) {
    if (row.isOpen) moveTo(state.cursor + 1);
    else toggle(row);
  } else if (event.key === "ArrowLeft" && row) {
    if (row.node && row.isOpen) toggle(row);
    else {
      let number = state.cursor;
      while (number > 0 && state.rows[number].depth >= row.depth) number--;
      moveTo(number);
    }
  } else return;
  event.preventDefault();
}
