// A plot with two numeric axes, drawn from its description. Series are groups that the legend can
// hide; colours are classes, so that the style sheet alone decides them.

let clips = 0;

// Steps of 1, 2 or 5 times a power of ten, about `wanted` of them.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  // a single tick gives no scale, and no distance that says how many digits it needs
  if (last - first < 1 && high > low) return ticks(low, high, 2 * wanted);
  return range(last - first + 1).map((index) => (first + index) * step);
}

// A range that is never empty, with a little air at the end that is not zero.
function domain(values, { zero = false, air = 0.04 } = {}) {
  let low = smallest(values);
  let high = largest(values);
  if (low > high) [low, high] = [0, 1];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) {
    // one value alone: a range of its own size around it
    const half = Math.abs(low) / 2 || 0.5;
    [low, high] = zero ? [0, high || 1] : [low - half, high + half];
  }
  const extra = air * (high - low);
  return [zero && low === 0 ? 0 : low - extra, high + extra];
}

// As many digits as tell a tick from the next one, and one way of writing for the whole axis.
const tickText = (places) => {
  const step = places.length > 1 ? places[1] - places[0] : 1;
  const powers = step < 1e-4 || largest(places.map(Math.abs)) >= 1e6;
  const power = (value) => Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  return (value) => {
    if (Math.abs(value) < step / 1e6) return "0";
    if (powers) return minus(value.toExponential(Math.max(0, power(value) - power(step))));
    return fixed(value, Math.max(0, -power(step)));
  };
};

// How an axis can write its ticks; tickText does where it says nothing.
const FORMATS = {
  count,
  percent: (value) => percent(value, value > 0 && value < 0.1 ? 1 : 0),
  power: (place) => (place < -4.3 || place >= 7 ? plain(10 ** place) : minus(String(Number((10 ** place).toPrecision(3))))),
  removed: (place) => `${minus(String(Number((100 * (1 - 10 ** -place)).toPrecision(6))))}%`,
};

// Of given ticks the last and the first, and between them what has room, the last first.
function thinned(places, X) {
  const shown = [];
  for (const place of [places[places.length - 1], places[0], ...places.slice(1, -1).reverse()]) {
    if (shown.every((other) => Math.abs(X(place) - X(other)) >= 40)) shown.push(place);
  }
  return shown;
}

const DASHES = [null, "7 3", "2 3", "9 3 2 3"]; // after eight colours the same again, dashed
const dashOf = (index) => Math.floor(index / 8) % DASHES.length;

// The axes, and the functions from numbers to places on the drawing.
function frameOf(width, { title, aspect, x, y }) {
  const high = Math.round(Math.min(400, Math.max(aspect < 0.6 ? 215 : 240, width * aspect)));
  const [right, top, bottom] = [14, 12, 44];
  const yTicks = ticks(...y.domain, Math.max(2, Math.min(6, (high - top - bottom) / 45)));
  const yText = lookup(FORMATS, y.format, tickText(yTicks));
  // the longest label stays clear of the name of the axis
  const left = Math.max(54, 28 + 7.4 * largest(yTicks.map((value) => yText(value).length)));
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${high}`,
    role: "group",
    "aria-label": title,
    class: "plot",
  });
  const X = (value) => left + ((value - x.domain[0]) / (x.domain[1] - x.domain[0])) * (width - left - right);
  const Y = (value) => high - bottom - ((value - y.domain[0]) / (y.domain[1] - y.domain[0])) * (high - top - bottom);
  const clip = `clip-${(clips += 1)}`;
  const frame = { x: left, y: top, width: width - left - right, height: high - top - bottom };
  // a little more than the frame, so that a dot on its edge stays whole
  const seen = { x: left - 8, y: top - 8, width: frame.width + 16, height: frame.height + 16 };
  svg.append(shape("clipPath", { id: clip }, shape("rect", seen)));

  const axes = shape("g", { class: "axes", "aria-hidden": "true" });
  const xTicks = x.ticks ? thinned(x.ticks, (place) => X(place)) : ticks(...x.domain, Math.max(2, Math.min(6, frame.width / 70)));
  const xText = lookup(FORMATS, x.format, tickText(xTicks));
  for (const value of yTicks) {
    axes.append(
      shape("line", { class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }),
      shape("text", { x: left - 7, y: Y(value) + 4, "text-anchor": "end" }, yText(value)),
    );
  }
  for (const value of xTicks) {
    axes.append(
      shape("line", { class: "tick", x1: X(value), x2: X(value), y1: high - bottom, y2: high - bottom + 4 }),
      shape("text", { x: X(value), y: high - bottom + 17, "text-anchor": "middle" }, xText(value)),
    );
  }
  const middle = top + frame.height / 2;
  axes.append(
    shape("line", { class: "base", x1: left, x2: width - right, y1: high - bottom, y2: high - bottom }),
    shape("text", { class: "name", x: left + frame.width / 2, y: high - 8, "text-anchor": "middle" }, x.label),
    shape(
      "text",
      { class: "name", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` },
      y.label,
    ),
  );
  svg.append(axes);
  return { svg, X, Y, frame, clip, x, y };
}

// For every kind of mark the shapes of its i-th entry; a line and an area are one shape each.
const SHAPES = {
  line: (f, mark) => [shape("path", { d: pathOf(f, mark.x, mark.y), class: lineClass(mark), "stroke-dasharray": mark.dash || (has(mark, "dashed") ? "5 4" : null) })],
  area: (f, mark) => {
    const known = range(mark.x.length).filter((i) => [mark.x[i], mark.y[i], mark.y2[i]].every(isNumber));
    const of = (values) => known.map((i) => values[i]);
    const d = known.length ? `${pathOf(f, [...of(mark.x), ...of(mark.x).reverse()], [...of(mark.y2), ...of(mark.y).reverse()])}Z` : "";
    return [shape("path", { d, class: has(mark, "strong") ? "band strong" : "band" })];
  },
  // a hair of air between bars; they are pale where they rest on few
  bars: each((f, m) => {
    const [from, to] = [f.X(m.x) + 0.5, Math.max(f.X(m.x) + 1, f.X(m.x2) - 0.5)];
    return rect(f, from, to, m, { "fill-opacity": isNumber(m.weight) ? (0.3 + 0.7 * Math.sqrt(m.weight)).toFixed(2) : null });
  }, "x2", "y2"),
  boxes: each((f, m) => rect(f, f.X(m.x), f.X(m.x2), m), "x2", "y2"),
  // a histogram; empty bars in between keep the outline on the axis
  steps(f, mark) {
    const bins = range(mark.y.length).filter((i) => [mark.x[i], mark.x[i + 1], mark.y[i]].every(isNumber));
    const boxes = bins.filter((i) => mark.y[i] > 0).map((i) => rect(f, f.X(mark.x[i]), f.X(mark.x[i + 1]), { y: 0, y2: mark.y[i] }, { "fill-opacity": 0.35 }));
    const line = pathOf(f, bins.flatMap((i) => [mark.x[i], mark.x[i + 1]]), bins.flatMap((i) => [mark.y[i], mark.y[i]]));
    return [...boxes, shape("path", { d: line, class: "line" })];
  },
  ranges: each((f, m) => {
    const half = Math.max(3, Math.min(9, f.frame.width / 55));
    return rect(f, f.X(m.x) - half, f.X(m.x) + half, m);
  }, "y2"),
  stems: each((f, m) => shape("line", { class: "stem", x1: f.X(m.x), x2: f.X(m.x), y1: f.Y(m.y), y2: f.Y(m.y2) }), "y2"),
  dots: each((f, m, mark) => shape("circle", { class: "fill", cx: f.X(m.x), cy: f.Y(m.y), r: isNumber(m.weight) ? 2.5 + 3 * Math.sqrt(m.weight) : has(mark, "pale") ? 2 : 4, "fill-opacity": has(mark, "pale") ? 0.5 : null })),
  rings: each((f, m) => shape("circle", { class: "ring", cx: f.X(m.x), cy: f.Y(m.y), r: isNumber(m.weight) ? 5.5 + 3 * Math.sqrt(m.weight) : 7 })),
  rules(f, mark) {
    const [top, bottom] = [f.frame.y, f.frame.y + f.frame.height];
    let free = Infinity; // from the right, where there is room for text
    return range(mark.x.length).reverse().filter((i) => isNumber(mark.x[i])).flatMap((i) => {
      const at = f.X(mark.x[i]);
      const made = [shape("line", { class: lineClass(mark), x1: at, x2: at, y1: top, y2: bottom, "stroke-dasharray": has(mark, "dashed") ? "5 4" : null })];
      if (!mark.text || free - at < 36) return made;
      free = at;
      return [...made, shape("text", { x: at - 3, y: top + 9, "text-anchor": "end" }, String(mark.text[i]))];
    });
  },
};

function has(mark, style) {
  return (mark.style || "").split(" ").includes(style);
}

function lineClass(mark) {
  return ["line", has(mark, "thick") && "thick", has(mark, "thin") && "thin"].filter(Boolean).join(" ");
}

// The shapes of a mark that has one for each entry; an entry with a number missing has none.
function each(draw, ...further) {
  return (f, mark) => {
    const most = largest(mark.weight || []);
    return range(mark.x.length).filter((i) => ["x", "y", ...further].every((name) => isNumber((mark[name] || [])[i]))).map((i) => {
      const entry = Object.fromEntries(["x", "y", "x2", "y2"].map((name) => [name, (mark[name] || [])[i]]));
      return draw(f, { ...entry, weight: mark.weight && most > 0 ? mark.weight[i] / most : null }, mark);
    });
  };
}

function rect(f, from, to, { y, y2 }, attributes) {
  const [top, bottom] = [Math.min(f.Y(y), f.Y(y2)), Math.max(f.Y(y), f.Y(y2))];
  return shape("rect", { class: "fill", x: from, width: to - from, y: top, height: bottom - top, ...attributes });
}

function pathOf(f, xs, ys) {
  return range(xs.length).filter((i) => isNumber(xs[i]) && isNumber(ys[i]))
    .map((i, at) => `${at ? "L" : "M"}${f.X(xs[i]).toFixed(2)} ${f.Y(ys[i]).toFixed(2)}`).join("");
}

// The marks of a plot with those that the other models share: first theirs, so that its own are above.
// Every mark gets the name of its series and the class of its colour.
function marksOf(figure, context) {
  const own = (figure.marks || []).map((mark) => ({ ...mark, model: context.index }));
  const shared = own.filter((mark) => mark.shared);
  const others = shared.length === 0 ? [] : context.others(figure.id).flatMap(({ index, figure: twin }) =>
    (twin.marks || []).filter((mark) => mark.shared).map((mark) => ({ ...mark, model: index, style: mark.style === "thick" ? "" : mark.style, twin: true })));
  const named = (mark) => {
    const { model } = mark;
    const ofModel = { series: `model-${model}`, tone: `m${model % 8}`, dash: DASHES[dashOf(model)], label: context.name(model), swatch: `line d${dashOf(model)}` };
    if (mark.shared === "models") return { ...mark, ...ofModel };
    if (mark.twin) return { ...mark, series: "others", tone: "c-muted", label: "other models", swatch: "line" };
    if (mark.colour === "model") return { ...mark, ...ofModel, label: "", dash: null };
    return { ...mark, series: mark.key || "", tone: `c-${mark.colour || "main"}`, swatch: swatchOf(mark) };
  };
  const at = own.findIndex((mark) => mark.shared);
  return [...own.slice(0, Math.max(0, at)), ...others, ...own.slice(Math.max(0, at))].map(named);
}

function swatchOf(mark) {
  const kinds = { line: "line", area: "area", dots: "dot", rings: "ring", ranges: "area", rules: "line" };
  if (mark.kind === "boxes" && mark.colour === "band") return "area";
  return has(mark, "dashed") ? "dashed" : lookup(kinds, mark.kind, "fill");
}

// Entries of the legend, each once; those of models in their order.
function legendOf(marks) {
  const entries = new Map();
  for (const { series, tone, label, swatch } of marks) {
    if (label && !entries.has(series)) entries.set(series, { key: series, label, colour: tone, kind: swatch });
  }
  const order = (key) => (key.startsWith("model-") ? Number(key.slice(6)) : 0);
  return [...entries.values()].sort((a, b) => (a.key.startsWith("model-") && b.key.startsWith("model-") ? order(a.key) - order(b.key) : 0));
}

// The axes hold what the other models share as well.
function widened(figure, context, axis) {
  const twins = (figure.marks || []).some((mark) => mark.shared === "models") ? context.others(figure.id) : [];
  const ranges = [figure, ...twins.map((twin) => twin.figure)].map((each) => each[axis].domain);
  return { ...figure[axis], domain: [smallest(ranges.map((each) => each[0])), largest(ranges.map((each) => each[1]))] };
}

function plot(width, figure, context) {
  const [x, y] = [widened(figure, context, "x"), widened(figure, context, "y")];
  const f = frameOf(width, { title: figure.title, aspect: figure.aspect || 0.62, x, y });
  const layers = new Map();
  const marks = marksOf(figure, context);
  for (const mark of marks) {
    const key = `${mark.series}/${mark.tone}`;
    if (!layers.has(key)) {
      layers.set(key, shape("g", { "data-series": mark.series, class: mark.tone, "clip-path": `url(#${f.clip})` }));
      f.svg.append(layers.get(key));
    }
    layers.get(key).append(...lookup(SHAPES, mark.kind, () => [])(f, mark));
  }
  if (figure.spans && figure.table) f.svg.append(hitsOf(f, figure, marks, context));
  walkable(f.svg);
  return f.svg;
}

// Transparent columns over the whole height, so that pointing is easy: each tells a line of the table.
function hitsOf(f, { spans, table }, marks, context) {
  const group = shape("g", { class: "hits" });
  const twins = marks.filter((mark) => mark.twin && mark.shared === "models").slice(0, 7);
  const nearest = (mark, place) => mark.x.reduce((best, value, i) => (Math.abs(value - place) < Math.abs(mark.x[best] - place) ? i : best), 0);
  table.rows.forEach((row, i) => {
    const [from, to] = [Math.max(spans[0][i], f.x.domain[0]), Math.min(spans[1][i], f.x.domain[1])];
    if (!isNumber(from) || !isNumber(to)) return;
    const middle = (spans[0][i] + spans[1][i]) / 2;
    const value = (mark) => mark.y[nearest(mark, middle)];
    const rows = row.slice(1).map((text, at) => [twins.length && at === 0 ? `${shorten(context.name(context.index), 24)}: ${table.head[1]}` : table.head[at + 1], text]);
    rows.push(...twins.map((mark) => [shorten(mark.label, 32), f.y.format === "percent" ? percent(value(mark), 2) : plain(value(mark))]));
    const box = { x: f.X(from), y: f.frame.y, width: Math.max(1, f.X(to) - f.X(from)), height: f.frame.height };
    group.append(explain(shape("rect", { class: "hit", ...box }), `${capital(table.head[0])} ${row[0]}`, rows, { focus: true }));
  });
  return group;
}
