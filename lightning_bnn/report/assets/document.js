// Elements and numbers as text. All text enters the page through text nodes, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const element = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

const shape = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// What a table says of a key; a name such as "constructor" finds nothing that we did not put there.
const lookup = (table, key, other) => (Object.hasOwn(table, key) ? table[key] : other);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const numbersOf = (values) => (values || []).filter(isNumber);

const range = (count) => Array.from({ length: Math.max(0, count) }, (_, index) => index);

const largest = (values) => numbersOf(values).reduce((a, b) => Math.max(a, b), -Infinity);

const smallest = (values) => numbersOf(values).reduce((a, b) => Math.min(a, b), Infinity);

// A real minus sign, as in print.
const minus = (text) => text.replaceAll("-", "\u2212");

const grouped = (text) => {
  const [whole, rest] = text.split(".");
  const spaced = whole.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  return rest === undefined ? spaced : `${spaced}.${rest}`;
};

// The hair that is added lets a tie go up whatever its binary digits, so that 0.5375 and 53.75 agree.
const fixed = (value, decimals) =>
  isNumber(value) ? minus(grouped((value * (1 + 1e-12)).toFixed(decimals)).replace(/^-(0(\.0*)?)$/, "$1")) : "\u2013";

// About three digits that count, whatever the size.
function plain(value) {
  if (!isNumber(value)) return "\u2013";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return fixed(value, 0);
  const size = Math.abs(value);
  if (size < 5e-5 || size >= 1e7) return minus(value.toExponential(1));
  return fixed(value, Math.min(5, Math.max(0, 2 - Math.floor(Math.log10(size)))));
}

const percent = (value, decimals = 1) =>
  isNumber(value) ? `${fixed(100 * value, decimals)}%` : "\u2013";

const count = (value) => (isNumber(value) ? grouped(String(Math.round(value))) : "\u2013");

// Long names often differ at their end, so that the middle goes.
const shorten = (text, length) => {
  if (text.length <= length) return text;
  const tail = Math.max(0, Math.floor((length - 1) / 2));
  return `${text.slice(0, Math.max(1, length - 1 - tail))}\u2026${text.slice(text.length - tail)}`;
};

const capital = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}`;
