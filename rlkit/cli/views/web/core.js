// What all parts use: elements whose texts are only ever text, blocks of data, numbers, colours.

const CONTROL = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff" +
  "\\ud800-\\udfff\\u{e0000}-\\u{e007f}]", "gu");

/** Return a value as text whose control codes are written out, as \x1b; line breaks and tabs stay. */
function visible(value) {
  const text = typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
  return text.replace(CONTROL, (found) => {
    const code = found.codePointAt(0).toString(16);
    return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}

/** Return an element; children are elements, or values that are shown as text. */
function el(tag, options, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") made[name] = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, visible(value));
  }
  add(made, ...children);
  return made;
}

/** Append children: elements, or values that are shown as text; null is none. */
function add(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return parent;
}

/** Return a list as it is, and anything else as an empty one: rows may be of any shape. */
function list(value) {
  return Array.isArray(value) ? value : [];
}

/** Replace an element's children. */
function fill(parent, ...children) {
  parent.replaceChildren();
  return add(parent, ...children);
}

/** Return the data of a block: base64 of gzip of JSON. */
async function load(name) {
  const packed = atob(document.getElementById(name).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i += 1) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const recent = new Map();

/** Return a page of rollouts; the last ones that were looked at are kept. */
function page(number) {
  if (!recent.has(number)) recent.set(number, load(`page-${number}`));
  const found = recent.get(number);
  recent.delete(number);
  recent.set(number, found);
  if (recent.size > 12) recent.delete(recent.keys().next().value);
  return found;
}

/** Return a number, which may be the text of one that is not finite; null is none. */
function number(value) {
  return value === null || value === undefined ? null : Number(value);
}

function shown(value) {
  const known = number(value);
  if (known === null) return "–";
  if (!Number.isFinite(known)) return String(known);
  if (Number.isInteger(known) && Math.abs(known) < 1e7) return String(known);
  const size = Math.abs(known);
  return size >= 1e6 || size < 1e-3 ? known.toExponential(2) : String(Number(known.toPrecision(4)));
}

const PALETTE = ["#3b82f6", "#e8710a", "#12a150", "#c026d3", "#e11d48", "#0891b2", "#a16207", "#6d5bd0"];

function colour(number_) {
  return PALETTE[number_ % PALETTE.length];
}

function faded(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

/** Return the last part of a run's path, or the whole where two runs end alike. */
function labels(runs) {
  const ends = runs.map((run) => run.name.replace(/\/+$/, "").split("/").pop());
  return runs.map((run, i) => (ends.indexOf(ends[i]) === ends.lastIndexOf(ends[i]) ? ends[i] : run.name));
}

/** Return a select with "all" before its choices, which are [value, label]. */
function select(label, choices, value, onchange) {
  const options = [["", "all"], ...choices].map(([own, text]) => el("option", { value: String(own) }, text));
  const chosen = el("select", { onchange: () => onchange(chosen.value) }, options);
  chosen.value = value;
  return el("label", {}, `${label} `, chosen);
}
