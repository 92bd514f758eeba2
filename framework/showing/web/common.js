// What the page of a program and TensorBoard's tab share.
"use strict";

function bytesText(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = size, unit = 0;
  for (; value >= 999.5 && unit < units.length - 1; unit++) value /= 1024;
  const digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(unit ? digits : 0)} ${units[unit]}`;
}

/** An element; `on...` are listeners, what is null or false is left out. */
function h(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "rect", "line", "path", "text", "title", "g"].includes(tag);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

/** A mesh axis, or a part `Y:(2)4` of one: {name, before, size}. */
function partOf(axis, mesh) {
  const match = /^(.+):\((\d+)\)(\d+)$/.exec(axis);
  if (match) return {name: match[1], before: +match[2], size: +match[3]};
  return {name: axis, before: 1, size: mesh.shape[mesh.axes.indexOf(axis)]};
}

/** The number of the shard of a dim that is split by axes, of the device at a place of a mesh. */
function shardNumber(place, axes, mesh) {
  return axes.reduce((shard, axis) => {
    const part = partOf(axis, mesh), number = mesh.axes.indexOf(part.name);
    const inner = mesh.shape.slice(number + 1).reduce((a, b) => a * b, 1);
    const coordinate = Math.floor(place / inner) % mesh.shape[number];
    const finer = mesh.shape[number] / (part.before * part.size);
    return shard * part.size + Math.floor(coordinate / finer) % part.size;
  }, 0);
}
