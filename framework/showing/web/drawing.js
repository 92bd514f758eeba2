// Elements, and drawings of splits, of what is sent and of the shards of each device.

/** An element; `on...` are listeners, what is null or false is left out. */
function h(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "rect", "line", "path", "text", "title", "g"].includes(tag);
  const one = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) one.setAttribute(name, value);
  }
  one.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return one;
}

/** A mesh axis, or a part `Y:(2)4` of one: {name, before, size}. */
function partOf(axis, mesh = MESH) {
  const match = /^(.+):\((\d+)\)(\d+)$/.exec(axis);
  if (match) return {name: match[1], before: +match[2], size: +match[3]};
  return {name: axis, before: 1, size: mesh.shape[mesh.axes.indexOf(axis)]};
}

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
    .filter((one) => one.count > 1);
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

/** For each device, in the order of the mesh: {id, at, slices} of a tensor's dims. */
function shardsOf(tensor, sharding, mesh) {
  const count = mesh.shape.reduce((a, b) => a * b, 1), found = [];
  const along = (place, axis) => {
    const part = partOf(axis, mesh), number = mesh.axes.indexOf(part.name);
    const inner = mesh.shape.slice(number + 1).reduce((a, b) => a * b, 1);
    const coordinate = Math.floor(place / inner) % mesh.shape[number];
    const finer = mesh.shape[number] / (part.before * part.size);
    return Math.floor(coordinate / finer) % part.size;
  };
  for (let place = 0; place < count; place++) {
    const slices = tensor.shape.map((size, dim) => {
      const axes = sharding.dims[dim], shard = Math.ceil(size / splitsOf(axes, mesh));
      const number = axes.reduce((n, axis) => n * partOf(axis, mesh).size
        + along(place, axis), 0);
      return [Math.min(size, number * shard), Math.min(size, (number + 1) * shard)];
    });
    found.push({id: mesh.ids ? mesh.ids[place] : place, slices,
      at: mesh.axes.map((axis) => `${axis}=${along(place, axis)}`).join(" ")});
  }
  return found;
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
function shardsDrawing(tensor, sharding, mesh, shards) {
  const [rows, columns] = drawnDims(sharding, mesh);
  const [down, across] = [rows, columns].map((one) => Math.min(one?.count ?? 1, MOST_CELLS));
  const number = (slices, one) => {
    if (!one) return 0;
    const size = Math.ceil(tensor.shape[one.dim] / one.count);
    return Math.floor(slices[one.dim][0] / size);
  };
  const holders = new Map();
  for (const shard of shards) {
    const key = `${number(shard.slices, rows)},${number(shard.slices, columns)}`;
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
  const hidden = [rows, columns].filter((one) => one && one.count > MOST_CELLS);
  const names = [[rows, "down"], [columns, "across"]].filter(([one]) => one)
    .map(([one, way]) => `dim ${one.dim} ${way}, in ${one.count} along ${one.axes.join(", ")}`);
  return h("div", {class: "shards"},
    h("svg", {width: "100%", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Shards: ${names.join("; ") || "every device holds all of it"}`}, cells),
    h("p", {class: "soft small"}, names.join("; ") || "Every device holds all of it",
      hidden.length ? `; the first ${MOST_CELLS} are drawn` : "", "."));
}
