// What is known of one tensor, or of the whole program; and the start of the page.

const DETAILS = document.getElementById("details");

const drawnCode = new Set();

/** The lines around a place; once in what is shown. */
function codeOf(place) {
  if (!place || drawnCode.has(place)) return "";
  drawnCode.add(place);
  const at = place.lastIndexOf(":"), file = DATA.sources[place.slice(0, at)];
  const line = +place.slice(at + 1);
  if (!file?.[line]) return "";
  const near = [-3, -2, -1, 0, 1, 2, 3].map((n) => line + n)
    .filter((n) => file[n] !== undefined);
  const indent = Math.min(...near.filter((n) => file[n]).map((n) => file[n].search(/\S/)));
  const lines = near.map((n) => h("span", {class: n === line ? "at" : ""},
    h("span", {class: "no"}, String(n)), file[n].slice(indent)));
  return h("pre", {class: "code", "data-place": place}, lines);
}

/** A link to a tensor, where it is in the list; else its name. */
function linkTo(key, text = key) {
  const entry = BY_KEY.get(key);
  return entry ? h("button", {class: "link", onclick: () => choose(entry)}, text)
    : h("span", {}, text);
}

function originPart(side, number, how = "") {
  const {origins, shardings} = DATA.programs[side], origin = origins[number];
  const name = origin.kind === "annotation" && origin.layer ? origin.layer : origin.name;
  return h("div", {class: "origin"},
    how ? h("span", {class: "soft"}, `${how} `) : "", `${origin.kind} `,
    linkTo(origin.key, name), " ", h("code", {}, shardings[origin.sharding].text),
    origin.place ? h("span", {class: "soft"}, ` at ${origin.place}`) : "",
    codeOf(origin.place));
}

function wayPart(side, number) {
  const {ways, hops} = DATA.programs[side], way = [];
  for (let at = number; at >= 0; at = ways[at][0]) way.unshift(hops[ways[at][1]]);
  if (!way.length) return "";
  return h("details", {},
    h("summary", {}, way.length === 1 ? "by one op" : `by way of ${way.length} ops`),
    h("ol", {class: "way"}, way.map(([direction, name, place]) => h("li", {},
      `${direction} through `, linkTo(name), place ? ` (${place})` : ""))));
}

function provenancePart(side, provenance) {
  const {mesh} = DATA.programs[side];
  return h("div", {class: "card"},
    h("p", {}, axisMark(provenance.axis, mesh), ` splits dim ${provenance.dim}, from`),
    originPart(side, provenance.origin), wayPart(side, provenance.way));
}

function competitionPart(side, competition) {
  const {mesh} = DATA.programs[side];
  return h("div", {class: "card"},
    h("p", {}, axisMark(competition.axis, mesh), ` on dim ${competition.dim} splits `,
      linkTo(competition.beside), " beside it, and did not come through ", linkTo(competition.at), "."),
    originPart(side, competition.loser.origin, "it is from"),
    competition.winner ? [h("p", {}, axisMark(competition.winner.axis, mesh),
      ` on dim ${competition.winner.dim} won`),
    originPart(side, competition.winner.origin, "it is from")] : "",
    h("p", {class: "soft"}, `Decided by ${competition.decided}.`));
}

function collectivePart(side, collective) {
  const {mesh, shardings} = DATA.programs[side];
  const often = collective.times === null ? ", unknown times in a loop"
    : collective.times > 1 ? `, ${collective.times} times in a loop` : "";
  const own = isOpen(collective) ? "" : bytesText(collective.own);
  const texts = [own + often, collective.shared].map((text) => text.replace(/^, /, ""));
  return h("div", {class: "card"},
    h("p", {}, h("strong", {}, collective.kind), " ",
      ...(collective.axes ?? []).map((axis) => axisMark(axis, mesh)),
      ` ${texts.filter(Boolean).join(", ")}`),
    collective.cause.map((line) => h("p", {class: "soft"}, line)),
    collective.between.map((each) => {
      const [before, after] = [shardings[each.before], shardings[each.after]];
      return [
        h("div", {class: "flow"}, glyph(before, mesh), h("code", {}, before.text),
          arrow(sentBytes(collective), collective.axes), glyph(after, mesh), h("code", {}, after.text)),
        h("p", {class: "soft"}, linkTo(each.tensor), " is sent for ", linkTo(each.at)),
        each.was.map((number) => originPart(side, number, "before:")),
        each.now.map((number) => originPart(side, number, "after:")),
      ];
    }));
}

function splitsPart(side, tensor) {
  const {mesh} = DATA.programs[side], sharding = shardingOf(side, tensor);
  if (sharding.dims === null) {
    return [h("p", {}, `XLA's own sharding, which no mesh axes express: ${sharding.text}`)];
  }
  const shards = shardsOf(tensor, sharding, mesh);
  const rows = tensor.shape.map((size, dim) => h("tr", {},
    h("td", {}, String(dim)), h("td", {}, tensor.dims[dim] || "–"),
    h("td", {class: "number"}, String(size)),
    h("td", {}, sharding.dims[dim].length
      ? sharding.dims[dim].map((axis) => axisMark(axis, mesh)) : "–"),
    h("td", {class: "number"}, String(Math.ceil(size / splitsOf(sharding.dims[dim], mesh))))));
  const head = ["dim", "name", "size", "split by", "on a device"].map((text, number) =>
    h("th", {class: [2, 4].includes(number) ? "number" : ""}, text));
  return [
    tensor.shape.length ? h("div", {class: "wide"}, h("table", {},
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))) : "",
    sharding.manual.length ? h("p", {class: "soft"},
      `Manual: each device along ${sharding.manual.join(", ")} has a tensor of its own.`) : "",
    sharding.unreduced.length ? h("p", {class: "soft"},
      `Unreduced: the sum along ${sharding.unreduced.join(", ")} is not added up yet.`) : "",
    h("h3", {}, "Shards of each device"),
    shardsDrawing(sharding, mesh, shards),
    devicesPart(shards),
  ];
}

function devicesPart(shards) {
  const body = h("tbody");
  const most = 64, row = (shard) => h("tr", {}, h("td", {}, String(shard.id)),
    h("td", {class: "soft"}, shard.at),
    h("td", {class: "mono"}, `[${shard.slices.map((s) => s.join(":")).join(", ")}]`));
  const more = h("button", {class: "link", onclick: () => {
    body.append(...shards.slice(most).map(row));
    more.remove();
  }}, `all ${shards.length} devices`);
  body.append(...shards.slice(0, most).map(row));
  return h("details", {}, h("summary", {}, "which part each holds"),
    h("div", {class: "wide"}, h("table", {}, h("thead", {}, h("tr", {},
      ["device", "in the mesh", "holds"].map((text) => h("th", {}, text)))), body)),
    shards.length > most ? more : "");
}

function tensorPart(side, tensor) {
  const {mesh} = DATA.programs[side], sharding = tensor.shape && shardingOf(side, tensor);
  const sent = tensor.sent.map((number) => DATA.programs[side].collectives[number]);
  return [
    tensor.shape ? h("p", {class: "mono"}, typeText(tensor, sharding, mesh, {names: true}))
      : "",
    tensor.shape ? h("p", {class: "soft"}, `${bytesText(tensor.bytes)}, `
      + `${bytesText(tensor.held)} of it on each device; `
      + (tensor.annotated ? "annotated" : "inferred")) : "",
    tensor.notes?.map((note) => h("p", {class: "changed"}, note)) ?? "",
    sent.length ? [h("h3", {}, "Sent here"), sent.map((each) => collectivePart(side, each))]
      : "",
    tensor.shape ? [h("h3", {}, "Why it lies so"),
      tensor.from.map((each) => provenancePart(side, each)),
      tensor.from.length ? "" : h("p", {class: "soft"}, tensor.why
        ? `Not split: ${tensor.why}.` : sharding.dims?.some((axes) => axes.length)
          ? "Its reason is not known: only XLA's completion splits it so." : "Not split.")]
      : "",
    tensor.lost?.length ? [h("h3", {}, "What it did not get"),
      tensor.lost.map((each) => competitionPart(side, each))] : "",
    tensor.place ? [h("h3", {}, tensor.gradient ? "Gradient of" : "Made at"),
      h("p", {}, tensor.place), codeOf(tensor.place)] : "",
    tensor.shape ? [h("h3", {}, "Splits"), splitsPart(side, tensor)] : "",
  ];
}

/** What differs between both programs, in a few lines. */
function changesPart(entry) {
  const [first, second] = entry.sides.map((tensor, side) => tensor?.shape
    && shardingOf(side, tensor));
  return h("div", {class: "card"},
    entry.isOnly ? h("p", {}, `Only the ${entry.sides[0] ? "first" : "second"} has it.`) : "",
    entry.lies && first && second ? h("div", {class: "flow"},
      glyph(first, FIRST.mesh), h("code", {}, first.text), "⟶",
      glyph(second, SECOND.mesh), h("code", {}, second.text)) : "",
    entry.sent.filter(({what}) => what).map((sent) => h("p", {},
      h("strong", {}, sent.kind), ` ${alongText(sent.axes)} `,
      h("span", {class: sent.what}, sent.what),
      `: ${[0, 1].map((side) => sentText(sent, side)).join(" ⟶ ")}`)));
}

function details(entry) {
  const {tensor, sides} = entry;
  drawnCode.clear();
  const heads = ["In the first program", "In the second program"];
  const parts = SECOND && entry.differs
    ? [changesPart(entry), sides.map((each, side) => each ? [
      h("h3", {class: "changed"}, heads[side]), tensorPart(side, each)] : "")]
    : tensorPart(sides[0] ? 0 : 1, tensor);
  return [
    backButton(), h("h2", {}, tensor.name),
    h("p", {class: "soft small"}, tensor.kind === "inside" ? tensor.key : tensor.kind),
    parts,
  ];
}

const backButton = () => h("button", {class: "back", onclick: () => {
  location.hash = "";
}}, "‹ all tensors");

/** A list of what is largest, each with a line as thick as what it sends. */
function topList(rows) {
  return h("ul", {class: "top"}, rows.map(([entry, drawn, texts, number]) => h("li", {},
    h("button", {onclick: () => choose(entry)}, drawn,
      h("span", {class: "what"}, ...texts), h("span", {class: "number"}, number)))));
}

function overview() {
  const pairs = ENTRIES.flatMap((entry) => entry.sent.map((sent) => ({entry, sent})));
  const most = ({sent}) => !SECOND || (sent.what && sent.open.includes(true)) ? sent.most
    : Math.abs(sent.bytes[1] - sent.bytes[0]);
  const shown = pairs.filter((pair) => most(pair) > 0).sort((a, b) => most(b) - most(a));
  // Long names differ at their ends.
  const place = ({entry}) => {
    const name = [entry.tensor.layer, entry.tensor.name].filter(Boolean).join(" ");
    return name.length > 40 ? h("span", {title: name}, `${name.slice(0, 15)}…${name.slice(-24)}`)
      : name;
  };
  // A loop of unknown trips counts once.
  const isLeast = (side) => DATA.programs[side].collectives.some((each) => each.times === null);
  const total = (side) => {  // What XLA combined is there for each of its ops.
    const once = new Map(DATA.programs[side].collectives.map((c, i) => [c.name || i, c]));
    const all = [...once.values()].map(({bytes, times}) => bytes * (times ?? 1));
    return (isLeast(side) ? "≥ " : "") + bytesText(sum(all));
  };
  const held = (side) => bytesText(sum(DATA.programs[side].tensors
    .filter((t) => t.kind === "argument").map((t) => t.held)));
  const both = (text) => SECOND ? `${text(0)} | ${text(1)}` : text(0);
  const facts = {
    tensors: both((side) => String(DATA.programs[side].tensors.length)),
    "arguments on a device": both(held), "sent in one call": both(total),
    ...(SECOND ? {"with another sharding": String(ENTRIES.filter((e) => e.lies).length)} : {}),
  };
  const unsplit = ENTRIES.filter(FILTERS.replicated.holds)
    .sort((a, b) => b.tensor.bytes - a.tensor.bytes);
  return [
    h("h2", {}, SECOND ? "What differs" : "The whole program"),
    DATA.programs.map((program, side) => h("p", {class: "soft small"},
      SECOND ? `${["First", "Second"][side]}: ` : "", programText(program), ". ",
      program.note)),
    h("dl", {class: "facts"}, Object.entries(facts).map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h3", {}, SECOND ? "Collectives that differ, the largest" : "Largest collectives"),
    shown.length ? "" : h("p", {class: "soft"}, SECOND ? "None differs." : "None."),
    topList(shown.slice(0, 12).map(({entry, sent}) => [entry,
      arrow(Math.max(...sent.bytes), sent.axes, 52),
      [h("strong", {}, sent.kind), " ", sent.what
        ? h("span", {class: sent.what}, `${sent.what} `) : "", place({entry})],
      SECOND ? `${sentText(sent, 0)} | ${sentText(sent, 1)}` : sentText(sent, 0)])),
    SECOND ? [h("h3", {}, "Tensors with another sharding, the largest"),
      topList(ENTRIES.filter((e) => e.lies && e.tensor.shape)
        .sort((a, b) => b.tensor.bytes - a.tensor.bytes).slice(0, 12)
        .map((entry) => [entry, glyph(shardingOf(entry.sides[0] ? 0 : 1, entry.tensor)),
          [place({entry})], bytesText(entry.tensor.bytes)]))]
      : [h("h3", {}, "Largest tensors that nothing splits"),
        unsplit.length ? "" : h("p", {class: "soft"}, "None of more than 1 KiB."),
        topList(unsplit.slice(0, 6).map((entry) => [entry, glyph(shardingOf(0, entry.tensor)),
          [place({entry})], bytesText(entry.tensor.bytes)]))],
    h("div", {class: "keys"}, h("h3", {}, "Keys"),
      h("p", {class: "soft small"}, h("kbd", {}, "/"), " search  ", h("kbd", {}, "↑"), " ",
        h("kbd", {}, "↓"), " move  ", h("kbd", {}, "→"), " ", h("kbd", {}, "←"),
        " unfold, fold  ", h("kbd", {}, "Enter"), " show  ", h("kbd", {}, "Esc"), " back")),
  ];
}

const meshText = (mesh) => mesh.axes.map((axis, i) => `${axis}=${mesh.shape[i]}`).join(", ");
const programText = (program) => `${program.name} over ${meshText(program.mesh)}, `
  + program.how;

/** The key in the address; "" of one that was cut off. */
function addressed() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

function showChosen() {
  const entry = BY_KEY.get(addressed());
  document.body.classList.toggle("chosen", Boolean(entry));
  DETAILS.replaceChildren(...(entry ? details(entry) : overview()).flat(Infinity)
    .filter((part) => part !== "" && part !== undefined));
  DETAILS.scrollTop = 0;
  if (entry && state.rows[state.cursor]?.entry !== entry) reveal(entry);
}

function start() {
  const axes = MESH.axes.map((axis, i) => h("span", {}, axisMark(axis), `=${MESH.shape[i]} `));
  document.getElementById("title").append(h("h1", {}, FIRST.name,
    h("span", {class: "legend soft small", style: "font-weight: 400"}, ...axes,
      SECOND ? " beside " + `${SECOND.name} over ${meshText(SECOND.mesh)}` : "")));
  document.getElementById("filters").append(...Object.entries(FILTERS).map(([name, {label}]) =>
    h("button", {"data-name": name, "aria-pressed": "false", onclick: () => {
      const only = new Set(state.only);
      if (!only.delete(name)) only.add(name);
      search(SEARCH.value, only);
    }}, label)));
  document.body.classList.toggle("two", Boolean(SECOND));
  openSome(34);
  LIST.addEventListener("scroll", draw, {passive: true});
  LIST.addEventListener("keydown", onKey);
  SEARCH.addEventListener("input", () => search(SEARCH.value));
  SEARCH.addEventListener("keydown", (event) => {
    if (event.key === "Escape") search("");
    if (event.key === "Escape" || event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      LIST.focus();
      if (event.key !== "Escape") moveTo(state.rows.findIndex((row) => row.entry));
      if (event.key === "Enter") act(state.cursor);
    }
  });
  addEventListener("keydown", (event) => {
    if (event.target.matches("input")) return;
    if (event.key === "/") {
      event.preventDefault();
      SEARCH.focus();
      SEARCH.select();
    } else if (event.key === "Escape" && location.hash.length > 1) location.hash = "";
  });
  addEventListener("resize", refresh);
  addEventListener("hashchange", showChosen);
  refresh();
  showChosen();
  LIST.focus({preventScroll: true});
}

start();
