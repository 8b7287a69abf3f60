// A plot with two numeric axes. Series are groups that the legend can hide; colours are classes,
// so that the style sheet alone decides them.

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

function plot(width, { title, height, x, y }) {
  const high = height || Math.round(Math.min(340, Math.max(230, width * 0.62)));
  const [right, top, bottom] = [14, 12, 44];
  const yTicks = ticks(...y.domain, Math.max(2, Math.min(6, (high - top - bottom) / 45)));
  const yText = y.format || tickText(yTicks);
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
  const xTicks = x.ticks || ticks(...x.domain, Math.max(2, Math.min(6, frame.width / 70)));
  const xText = x.format || tickText(xTicks);
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

  const at = (points) =>
    points
      .filter(([a, b]) => isNumber(a) && isNumber(b))
      .map(([a, b], index) => `${index ? "L" : "M"}${X(a).toFixed(2)} ${Y(b).toFixed(2)}`)
      .join("");

  return {
    svg,
    X,
    Y,
    frame,
    // everything of a series goes into its layer, and the legend hides the layer
    layer(series, colour) {
      const group = shape("g", { "data-series": series, class: colour, "clip-path": `url(#${clip})` });
      svg.append(group);
      return group;
    },
    line: (points, attributes) =>
      shape("path", { d: at(points), class: "line", ...attributes }),
    // the area between two lines over the same places
    area: (places, lower, upper, attributes) => {
      const known = range(places.length).filter((i) => isNumber(places[i]) && isNumber(lower[i]) && isNumber(upper[i]));
      const there = known.map((i) => [places[i], upper[i]]);
      const back = known.map((i) => [places[i], lower[i]]).reverse();
      return shape("path", { d: known.length ? `${at([...there, ...back])}Z` : "", class: "band", ...attributes });
    },
    // a column of a histogram: a box with a hair of air at its sides
    bar(x0, x1, y0, y1, attributes) {
      const [from, to] = [X(x0) + 0.5, Math.max(X(x0) + 1, X(x1) - 0.5)];
      const box = { x: from, y: Math.min(Y(y0), Y(y1)), width: to - from, height: Math.abs(Y(y1) - Y(y0)) };
      return shape("rect", { ...box, class: "fill", ...attributes });
    },
    box: (x0, x1, y0, y1, attributes) =>
      shape("rect", {
        x: Math.min(X(x0), X(x1)),
        y: Math.min(Y(y0), Y(y1)),
        width: Math.abs(X(x1) - X(x0)),
        height: Math.abs(Y(y1) - Y(y0)),
        class: "fill",
        ...attributes,
      }),
    dot: (a, b, radius, attributes) =>
      shape("circle", { cx: X(a), cy: Y(b), r: radius, class: "fill", ...attributes }),
    // transparent columns over the whole height, so that pointing is easy: {from, to, title, rows}
    columns(list) {
      const group = shape("g", { class: "hits" });
      for (const { from, to, title: head, rows } of list) {
        const [a, b] = [Math.max(from, x.domain[0]), Math.min(to, x.domain[1])];
        const box = { x: X(a), y: top, width: Math.max(1, X(b) - X(a)), height: frame.height };
        group.append(explain(shape("rect", { class: "hit", ...box }), head, rows, { focus: true }));
      }
      svg.append(group);
      walkable(svg);
    },
  };
}

// Columns around places on the axis, each up to half way to its neighbours.
function between(places, [low, high]) {
  const order = range(places.length).sort((a, b) => places[a] - places[b]);
  return order.map((index, at) => ({
    index,
    from: at ? (places[order[at - 1]] + places[index]) / 2 : low,
    to: at < order.length - 1 ? (places[index] + places[order[at + 1]]) / 2 : high,
  }));
}
