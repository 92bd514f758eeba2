// Drawings of splits, of what is sent and of the shards of each device.

const axisColor = (axis, mesh = MESH) =>
  `var(--axis${Math.max(0, mesh.axes.indexOf(partOf(axis, mesh).name)) % 7})`;
const axisMark = (axis, mesh) =>
  h("i", {class: "ax", style: `color: ${axisColor(axis, mesh)}`}, axis);
const splitsOf = (axes, mesh = MESH) =>
  axes.reduce((n, axis) => n * partOf(axis, mesh).size, 1);

/** `f32[512 X, 256]`, dims with their names and the axes that split them. */
function typeText(tensor, sharding, mesh, {names = false} = {}) {
  if (!tensor?.shape) return [];
  const dims = tensor.shape.map((size, dim) => [
    dim ? ", " : "", String(size),
    names && tensor.dims[dim] ? h("span", {class: "dim-name"}, ` ${tensor.dims[dim]}`) : "",
    ...(sharding.dims?.[dim] ?? []).map((axis) => axisMark(axis, mesh)),
  ]);
  const more = sharding.dims === null ? [` ${sharding.text}`]
    : sharding.unreduced.length ? [" unreduced ", ...sharding.unreduced.map((a) =>
      axisMark(a, mesh))] : [];
  return [`${tensor.dtype}[`, ...dims.flat(), "]", ...more];
}

/** The two dims of a drawing: [rows, columns], each {axes, count} or null. */
function drawnDims(sharding, mesh) {
  const split = (sharding.dims ?? [])
    .map((axes, dim) => ({dim, axes, count: splitsOf(axes, mesh)}))
    .filter((dim) => dim.count > 1);
  if (split.length > 1) return split.slice(0, 2);
  const [only] = split, last = (sharding.dims ?? []).length - 1;
  if (!only) return [null, null];
  return only.dim === last ? [null, only] : [only, null];
}

/** A small picture of a split: the shard of one device is filled. */
function glyph(sharding, mesh = MESH, width = 30, height = 17) {
  const [rows, columns] = drawnDims(sharding, mesh);
  const down = rows?.count ?? 1, across = columns?.count ?? 1;
  const main = (columns ?? rows)?.axes[0];
  const color = main ? axisColor(main, mesh) : "var(--faint)";
  const lines = [];
  const cuts = (count) => Math.min(count, 8);
  for (let i = 1; i < cuts(down); i++) {
    const y = height * i / cuts(down);
    lines.push(h("line", {x1: 0, x2: width, y1: y, y2: y,
      stroke: axisColor(rows.axes[0], mesh), "stroke-width": 1}));
  }
  for (let i = 1; i < cuts(across); i++) {
    const x = width * i / cuts(across);
    lines.push(h("line", {x1: x, x2: x, y1: 0, y2: height,
      stroke: axisColor(columns.axes[0], mesh), "stroke-width": 1}));
  }
  const outline = {x: .5, y: .5, width: width - 1, height: height - 1, rx: 2};
  return h("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"},
    h("rect", {...outline, fill: color, "fill-opacity": main ? .1 : .22}),
    main ? h("rect", {x: 0, y: 0, width: width / cuts(across), height: height / cuts(down),
      fill: color, "fill-opacity": .65}) : "",
    lines, h("rect", {...outline, fill: "none", stroke: color}));
}

const thickness = (bytes) => 1.2 + 11.8 * Math.cbrt(bytes / MOST_SENT);

/** An arrow, thick by bytes. */
function arrow(bytes, axes, width = 44) {
  const thick = bytes ? thickness(bytes) : 0, color = axes?.length
    ? axisColor(axes[0]) : "var(--axis6)";
  const head = Math.max(5, thick * .75), middle = 8;
  return h("svg", {width, height: 16, viewBox: `0 0 ${width} 16`, "aria-hidden": "true"},
    thick ? h("line", {x1: 0, x2: width - head, y1: middle, y2: middle, stroke: color,
      "stroke-width": thick}) : "",
    thick ? h("path", {fill: color, d: `M${width - head - .5} ${middle - Math.max(4, thick / 2 + 1.5)} `
      + `L${width} ${middle} L${width - head - .5} ${middle + Math.max(4, thick / 2 + 1.5)} Z`}) : "");
}

/** For each device, in the order of the mesh: {id, at, numbers, slices} by dim of a tensor. */
function shardsOf(tensor, sharding, mesh) {
  const count = mesh.shape.reduce((a, b) => a * b, 1);
  return Array.from({length: count}, (_, place) => {
    const numbers = sharding.dims.map((axes) => shardNumber(place, axes, mesh));
    const slices = tensor.shape.map((size, dim) => {
      const shard = Math.ceil(size / splitsOf(sharding.dims[dim], mesh));
      return [0, 1].map((side) => Math.min(size, (numbers[dim] + side) * shard));
    });
    return {id: mesh.ids ? mesh.ids[place] : place, numbers, slices,
      at: mesh.axes.map((axis) => `${axis}=${shardNumber(place, [axis], mesh)}`).join(" ")};
  });
}

/** `0–3, 8`: numbers, those in a row joined. */
function idsText(ids) {
  const sorted = [...ids].sort((a, b) => a - b), runs = [];
  for (const id of sorted) {
    const last = runs[runs.length - 1];
    if (last && id === last[1] + 1) last[1] = id;
    else runs.push([id, id]);
  }
  return runs.map(([a, b]) => a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`)
    .join(", ");
}

const MOST_CELLS = 16;

/** The shards of the two dims that are split first, with the devices that hold each. */
function shardsDrawing(sharding, mesh, shards) {
  const [rows, columns] = drawnDims(sharding, mesh);
  const [down, across] = [rows, columns].map((drawn) =>
    Math.min(drawn?.count ?? 1, MOST_CELLS));
  const number = (shard, drawn) => drawn ? shard.numbers[drawn.dim] : 0;
  const holders = new Map();
  for (const shard of shards) {
    const key = `${number(shard, rows)},${number(shard, columns)}`;
    holders.set(key, [...(holders.get(key) ?? []), shard.id]);
  }
  const width = 380, height = Math.max(44, Math.min(220, down * 30));
  const cells = [], main = (columns ?? rows)?.axes[0];
  const color = main ? axisColor(main, mesh) : "var(--faint)";
  for (let r = 0; r < down; r++) {
    for (let c = 0; c < across; c++) {
      const ids = idsText(holders.get(`${r},${c}`) ?? []);
      const box = {x: c * width / across, y: r * height / down,
        width: width / across, height: height / down};
      const fits = ids.length * 6.2 < box.width - 4 && box.height > 12;
      cells.push(h("g", {},
        h("rect", {...box, fill: color, "fill-opacity": (r + c) % 2 ? .12 : .26,
          stroke: "var(--back)", "stroke-width": 1.5}),
        h("title", {}, `devices ${ids}`),
        fits ? h("text", {x: box.x + box.width / 2, y: box.y + box.height / 2 + 3.5,
          "text-anchor": "middle"}, ids) : ""));
    }
  }
  const hidden = [rows, columns].filter((drawn) => drawn && drawn.count > MOST_CELLS);
  const names = [[rows, "down"], [columns, "across"]].filter(([drawn]) => drawn)
    .map(([{dim, count, axes}, way]) => `dim ${dim} ${way}, in ${count} along ${axes.join(", ")}`);
  sharding.dims.forEach((axes, dim) => {
    const parts = splitsOf(axes, mesh), isDrawn = dim === rows?.dim || dim === columns?.dim;
    if (parts > 1 && !isDrawn) {
      names.push(`dim ${dim}, in ${parts} along ${axes.join(", ")}, not drawn: `
        + "the devices of a cell hold different parts of it");
    }
  });
  return h("div", {class: "shards"},
    h("svg", {width: "100%", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Shards: ${names.join("; ") || "every device holds all of it"}`}, cells),
    h("p", {class: "soft small"}, names.join("; ") || "Every device holds all of it",
      hidden.length ? `; the first ${MOST_CELLS} are drawn` : "", "."));
}
