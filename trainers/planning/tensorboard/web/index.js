// The tab Meshwright of TensorBoard: a view of the run's program for each of its tabs.

const at = (path) => new URL(path, import.meta.url).href;
const ask = async (path) => {
  const answer = await fetch(at(path));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};
const AXES = 7;
const color = (number) => `var(--axis${number % AXES})`;

const numberText = (value) => Math.abs(value) >= 1000
  ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

// Charts.

/** Curves [[x, y], ...] by name; `text` writes a value of y, `unit` is its unit. */
function chart(title, curves, {text = numberText, unit = "", limit = null, wide = false,
  fill = false, xText = String, xName = "step"} = {}) {
  const width = wide ? 900 : 420, height = wide ? 240 : 190;
  const [left, right, top, bottom] = [62, 12, 10, 22];
  const points = Object.values(curves).flat();
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]).filter(Number.isFinite);
  // What is not finite comes as null, and is a gap.
  const valueText = (y) => Number.isFinite(y) ? text(y) : "not finite";
  if (!ys.length) {
    return h("figure", {}, h("figcaption", {}, title), h("p", {class: "soft"}, "not finite"));
  }
  let [low, high] = [fill ? 0 : Math.min(...ys), Math.max(...ys)];
  if (limit !== null && limit < 1.6 * high) high = Math.max(high, limit);
  if (high === low) [low, high] = [low - Math.abs(low || 1) * .1, high + Math.abs(high || 1) * .1];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const px = (x) => left + (width - left - right) * (last > first ? (x - first) / (last - first) : .5);
  const py = (y) => top + (height - top - bottom) * (1 - (y - low) / (high - low));
  const ticks = [0, .5, 1].map((part) => low + part * (high - low));
  const lines = Object.entries(curves).map(([name, curve], number) => {
    const path = curve.map(([x, y], i) => Number.isFinite(y)
      ? `${Number.isFinite(curve[i - 1]?.[1]) ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`
      : "").join("");
    const area = `${path}L${px(last)} ${py(low)}L${px(first)} ${py(low)}Z`;
    const [x, y] = curve[curve.length - 1];
    return h("g", {}, h("title", {}, `${name}: ${valueText(y)} at ${xText(x)}`),
      fill ? h("path", {d: area, fill: color(number), "fill-opacity": .2}) : "",
      h("path", {d: path, fill: "none", stroke: color(number), "stroke-width": 1.7}),
      curve.length === 1 && Number.isFinite(y) ? h("rect", {x: px(x) - 2, y: py(y) - 2, width: 4, height: 4,
        fill: color(number)}) : "");
  });
  const last_ = Object.values(curves).map((curve) => valueText(curve[curve.length - 1][1]));
  const words = `${title}: ${Object.keys(curves).map((name, i) => `${name} ${last_[i]}`).join("; ")}`;
  const caption = h("figcaption", {}, title, unit ? h("span", {class: "soft"}, ` (${unit})`) : "");
  return h("figure", {class: wide ? "wide" : ""}, caption,
    h("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words},
      ticks.map((y) => [h("line", {class: "grid", x1: left, x2: width - right,
        y1: py(y), y2: py(y)}), h("text", {x: left - 6, y: py(y) + 4,
        "text-anchor": "end"}, text(y))]),
      [...new Set([first, last])].map((x, i) => h("text", {x: px(x), y: height - 6,
        "text-anchor": i ? "end" : "start"}, xText(x))),
      h("text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, xName),
      limit !== null && limit <= high ? h("line", {x1: left, x2: width - right,
        y1: py(limit), y2: py(limit), stroke: "var(--came)", "stroke-width": 1.5,
        "stroke-dasharray": "5 3"}) : "",
      lines),
    h("div", {class: "keys"}, Object.keys(curves).map((name, number) => name
      ? h("span", {}, h("i", {style: `background: ${color(number)}`}), `${name} `,
        h("span", {class: "soft"}, last_[number])) : "")));
}

function table(heads, rows) {
  const cell = (tag, value, number) => h(tag,
    {class: typeof value === "object" || !heads[number].endsWith("*") ? "" : "number"}, value);
  return h("div", {class: "scroll"}, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, i) =>
      h("th", {class: head.endsWith("*") ? "number" : ""}, head.replace("*", ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, i) => cell("td", value, i)))))));
}

const bar = (share, width = 160) =>
  h("div", {style: `width: ${width}px`}, h("div", {class: "bar", style: `width: ${100 * share}%`}));

// Views, each of which takes the run and returns elements.

const view = (...parts) => h("div", {class: "view"}, ...parts);

async function program(run) {
  const page = at(`page?run=${encodeURIComponent(run)}`), answer = await fetch(page);
  if (!answer.ok) return view(h("p", {}, await answer.text()));
  return h("iframe", {src: page, title: "The program: layers, tensors, what is sent"});
}

async function memory(run) {
  const plan = await ask(`plan?run=${encodeURIComponent(run)}`);
  const {timeline, peak_bytes: peak, memory_limit: limit, breakdown, buffers} = plan;
  const largest = Math.max(1, ...breakdown.map(({bytes}) => bytes));
  const alive = (timeline ?? []).map((bytes, i) => [i, bytes]);
  return view(
    h("h2", {}, `${bytesText(peak)} of ${bytesText(limit)} on each device at the peak`),
    h("p", {class: "soft"}, plan.fits ? "The program fits." : "The program does not fit."),
    h("div", {class: "charts"},
      alive.length ? chart("In use on a device during a step", {"": alive},
        {text: bytesText, limit, wide: true, fill: true, xText: (x) => x ? "end" : "begin",
          xName: "ops in the order in which they run"}) : ""),
    h("h3", {}, "What it is used for at the peak"),
    table(["bytes*", "", "part"], breakdown.filter(({bytes}) => bytes).map(
      ({bytes, part}) => [bytesText(bytes), bar(bytes / largest), part])),
    h("h3", {}, "Largest buffers at the peak"),
    table(["bytes*", "number*", "kind", "type", "name", "made at"], buffers.map((buffer) =>
      [bytesText(buffer.bytes), buffer.count, buffer.kind, buffer.type, buffer.name, buffer.source])));
}

const MOST_ITERATIONS = 200;

async function pipeline(run) {
  const {pipelines} = await ask(`plan?run=${encodeURIComponent(run)}`);
  if (!pipelines.length) {
    return view(h("p", {}, "This program has no pipeline. One is made by "
      + "@Pipeline() in the place of @Repeat()."));
  }
  return view(pipelines.map((planned) => {
    const shown = planned.timetable.slice(0, MOST_ITERATIONS);
    const stages = shown[0].map((_, stage) => shown.map((row) => row[stage]));
    return [
      h("h2", {}, planned.path),
      h("p", {class: "soft"}, `${planned.num_stages} stages, ${planned.num_microbatches} microbatches, `
        + `${planned.num_repeats} ${planned.num_repeats === 1 ? "round" : "rounds"}, ${planned.iterations} iterations, `
        + `${(100 * planned.bubble_fraction).toFixed(1)}% bubbles`
        + (planned.timetable.length > shown.length ? `; the first ${shown.length} are drawn` : "")),
      h("p", {class: "soft"}, "A row for each stage, a column for each iteration; the number is "
        + "that of the microbatch, grey is a bubble."),
      h("div", {class: "scroll"}, stages.map((row, stage) => h("div", {class: "cells",
        style: `grid-template-columns: 4.5rem repeat(${row.length}, minmax(.9rem, 2rem)); margin-bottom: 1px`},
      h("span", {class: "soft"}, `stage ${stage}`),
      row.map((number) => number < 0 ? h("i", {class: "idle"})
        : h("i", {style: `background: ${color(number)}`, title: `microbatch ${number}`},
          String(number)))))),
    ];
  }));
}

const MOST_DEVICES = 64;

/** For each device the number of the shard of a weight that it holds. */
function shardNumbers(axes, mesh) {
  const named = {axes: Object.keys(mesh), shape: Object.values(mesh)};
  const count = Math.min(MOST_DEVICES, named.shape.reduce((a, b) => a * b, 1));
  return Array.from({length: count}, (_, place) => shardNumber(place, axes.flat(), named));
}

async function weights(run) {
  const plan = await ask(`plan?run=${encodeURIComponent(run)}`);
  const rows = [...plan.weights].sort((a, b) => b.bytes - a.bytes);
  const total = rows.reduce((n, weight) => n + weight.bytes, 0);
  const cells = (weight) => {
    const numbers = shardNumbers(weight.axes, plan.mesh);
    const palest = Math.max(1, ...numbers);
    return h("div", {class: "cells", style: `grid-template-columns: repeat(${numbers.length}, .9rem)`},
      numbers.map((number, device) => h("i", {
        style: `background: ${color(number)}; opacity: ${weight.axes.flat().length ? 1 - .35 * number / palest : .35}`,
        title: `device ${device}: shard ${number}`}, weight.axes.flat().length ? String(number) : "")));
  };
  return view(
    h("h2", {}, `${bytesText(total)} of weights on each device`),
    h("p", {class: "soft"}, `Over ${Object.entries(plan.mesh).map(([name, size]) =>
      `${name}=${size}`).join(", ")}. Each square is a device, in the mesh's order; its number `
      + "is that of its shard. A pale row is held by every device"
      + (plan.devices > MOST_DEVICES ? `; the first ${MOST_DEVICES} devices are drawn.` : ".")),
    table(["bytes*", "weight", "type", "dims", "sharding", "shard", "devices"], rows.map((weight) => [
      bytesText(weight.bytes), weight.path, weight.type, weight.dims.join(", "), weight.sharding,
      `[${weight.shard_shape.join(", ")}]`, cells(weight)])));
}

// The units of curves, by tag.
const UNITS = {"run/goodput": "share of the time", "speed/step_time_s": "seconds",
  "speed/tokens_per_s": "a second",
  "speed/model_flops_utilization": "share of the devices' peak"};

/** Charts of curves {run: {tag: points}}, one for each tag. */
function charts(group) {
  const byTag = {};
  for (const [run, tags] of Object.entries(group)) {
    for (const [tag, points] of Object.entries(tags)) {
      if (points.length) (byTag[tag] ??= {})[run] = points;
    }
  }
  const share = (tag) => /goodput|dropped|utilization/.test(tag)
    ? (y) => `${(100 * y).toFixed(1)}%` : numberText;
  return Object.keys(byTag).sort().map((tag) => chart(tag, byTag[tag],
    {text: share(tag), unit: UNITS[tag]}));
}

async function experts() {
  const [curves, loads] = await Promise.all([ask("curves"), ask("loads")]);
  const drawn = charts(curves.experts), pictures = Object.entries(loads).flatMap(
    ([run, tags]) => Object.entries(tags).map(([tag, steps]) => loadPicture(run, tag, steps)));
  if (!drawn.length && !pictures.length) {
    return view(h("p", {}, "These logs have no mixture of experts."));
  }
  return view(h("h2", {}, "Load of the experts over training"),
    h("p", {class: "soft"}, "Darker experts have more tokens; a row for each layer."),
    h("div", {class: "charts"}, pictures, drawn));
}

function loadPicture(run, tag, steps) {
  const show = () => {
    const [step, key] = steps[+slider.value];
    picture.src = at(`load?key=${encodeURIComponent(key)}`);
    caption.textContent = `${tag}, ${run}, step ${step}`;
  };
  const caption = h("figcaption"), picture = h("img", {class: "load", alt: "loads of experts"});
  const slider = h("input", {type: "range", min: 0, max: steps.length - 1, value: steps.length - 1,
    "aria-label": "step", oninput: () => show()});
  show();
  return h("figure", {class: "wide"}, caption, picture, slider);
}

async function health() {
  const {health: curves} = await ask("curves"), drawn = charts(curves);
  return drawn.length ? view(h("h2", {}, "Health and goodput"),
    h("p", {class: "soft"}, "Goodput is the share of the time since the training began that went "
      + "into steps whose results it goes on from."), h("div", {class: "charts"}, drawn))
    : view(h("p", {}, "These logs have no points of a training yet."));
}

const VIEWS = {Program: program, Memory: memory, Pipeline: pipeline,
  Weights: weights, Experts: experts, Health: health};
const NEED_FILES = new Set(["Program", "Memory", "Pipeline", "Weights"]);

/** A message, its commands on lines of their own. */
function message(text) {
  const parts = text.split(/(meshwright-\w+(?: --\S+?=[^\s,]+)+)/);
  return h("div", {class: "message"}, h("h2", {}, "Nothing to show yet"),
    parts.map((part, i) => i % 2 ? h("code", {}, part) : part));
}

export async function render() {
  document.head.append(h("meta", {name: "viewport", content: "width=device-width"}),
    h("link", {rel: "stylesheet", href: at("style.css")}));
  document.documentElement.lang = "en";
  const {runs, message: missing} = await ask("runs");
  const state = {view: "Program", run: runs[0]}, main = h("main");
  const nav = h("nav", {role: "tablist"}, Object.keys(VIEWS).map((name) => h("button",
    {role: "tab", "data-view": name, onclick: () => show({view: name})}, name)));
  const choice = h("select", {"aria-label": "run", onchange: () => show({run: choice.value})},
    runs.map((run) => h("option", {value: run}, run === "." ? "this run" : run)));
  async function show(changes) {
    Object.assign(state, changes);
    for (const button of nav.children) {
      button.setAttribute("aria-selected", String(button.dataset.view === state.view));
    }
    const asked = {...state};
    let shown;
    if (missing && NEED_FILES.has(state.view)) shown = message(missing);
    else {
      try {
        shown = await VIEWS[state.view](state.run);
      } catch (error) {
        shown = view(h("p", {}, `This cannot be shown: ${error.message}`));
      }
    }
    if (asked.view === state.view && asked.run === state.run) main.replaceChildren(shown);
  }
  document.body.append(h("header", {}, nav, runs.length > 1 ? choice : ""), main);
  await show({});
}
