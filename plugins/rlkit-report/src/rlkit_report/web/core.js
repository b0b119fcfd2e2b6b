// What all parts use: elements whose texts are only ever text, blocks of data, numbers, colours.

const CONTROL = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff" +
  "\\ud800-\\udfff\\u{e0000}-\\u{e007f}]", "gu");

/** Return a value as text whose control codes are written out, as \x1b; line breaks and tabs stay. */
function visible(value) {
  const text = typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
  return text.replace(CONTROL, (control) => {
    const code = control.codePointAt(0).toString(16);
    return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}

const PROPERTIES = new Set(["value", "checked", "disabled", "open", "hidden"]);

/** Return an element; children are elements, or values that are shown as text. */
function el(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, visible(value));
  }
  add(element, ...children);
  return element;
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
  const loading = recent.get(number);
  recent.delete(number);
  recent.set(number, loading);
  if (recent.size > 12) recent.delete(recent.keys().next().value);
  return loading;
}

/** Return a number, which may be the text of one that is not finite; null is none. */
function number(value) {
  return value === null || value === undefined ? null : Number(value);
}

/** Return a number as text of at most four digits that tell something; a dash for none. */
function shown(value) {
  const x = number(value);
  if (x === null) return "–";
  if (!Number.isFinite(x)) return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return String(x);
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
}

/** Return a number of things in short, as 1.5k or 20M. */
function inShort(value) {
  const [unit, name] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / unit).toPrecision(3))}${name}`;
}

/** Return seconds as text: 45 s, 12:30 min, 3:05 h. */
function duration(seconds) {
  const total = Math.round(seconds);
  const two = (x) => String(x).padStart(2, "0");
  if (total < 60) return `${Number(seconds.toPrecision(2))} s`;
  if (total < 3600) return `${Math.floor(total / 60)}:${two(total % 60)} min`;
  return `${Math.floor(total / 3600)}:${two(Math.floor((total % 3600) / 60))} h`;
}

/** Return the last value of a list that is not null; undefined if there is none. */
function last(values) {
  return list(values).findLast((x) => x !== null);
}

const PALETTE = ["#3b82f6", "#e8710a", "#12a150", "#c026d3", "#e11d48", "#0891b2", "#a16207", "#6d5bd0"];

function colour(index) {
  return PALETTE[index % PALETTE.length];
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
