// Lying bars with a name on the left and a number on the right: sums, pairs and shares.

const nameWidth = (width, names) => {
  const letters = names.reduce((most, name) => Math.max(most, name.length), 0);
  return Math.min(width * 0.36, Math.max(44, 14 + letters * 6.9));
};

// rows: {name, value: text, parts: [{series, colour, from, to, label, text}], strong, line}
function bars(width, { title, rows, step = 30, domain: [low, high] }) {
  const left = nameWidth(width, rows.map((row) => row.name));
  const right = Math.max(...rows.map((row) => row.value.length)) * 7.2 + 14;
  const height = rows.length * step + 12;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title, class: "bars" });
  const span = high - low || 1;
  const X = (value) => left + ((value - low) / span) * (width - left - right);
  const thick = Math.min(20, step * 0.62);
  svg.append(shape("line", { class: "base", x1: X(0), x2: X(0), y1: 2, y2: height - 2 }));
  const layers = new Map();
  const layer = (series, colour) => {
    const key = `${series}/${colour}`;
    if (!layers.has(key)) {
      layers.set(key, shape("g", { "data-series": series, class: colour }));
      svg.append(layers.get(key));
    }
    return layers.get(key);
  };
  const hits = shape("g", { class: "hits" });
  rows.forEach((row, index) => {
    const middle = 6 + step * (index + 0.5);
    const strong = row.strong ? "strong" : null;
    svg.append(
      shape("text", { x: left - 9, y: middle + 4, "text-anchor": "end", class: strong }, shorten(row.name, Math.floor((left - 8) / 6.7))),
      shape("text", { x: width - 2, y: middle + 4, "text-anchor": "end", class: strong }, row.value),
    );
    for (const part of row.parts) {
      if (!isNumber(part.from) || !isNumber(part.to) || part.from === part.to) continue;
      const box = { x: Math.min(X(part.from), X(part.to)), width: Math.max(1, Math.abs(X(part.to) - X(part.from))) };
      const at = middle - thick / 2 + (part.shift || 0) * thick;
      layer(part.series, part.colour).append(
        shape("rect", { class: "fill", y: at, height: thick * (part.share || 1), rx: 2, ...box }),
      );
    }
    if (isNumber(row.line) && index < rows.length - 1) {
      // through a step of zero, which has no bar of its own
      const from = row.parts.every((part) => part.from === part.to) ? middle - thick / 2 : middle + thick / 2;
      svg.append(shape("line", { class: "step", x1: X(row.line), x2: X(row.line), y1: from, y2: middle + step - thick / 2 }));
    }
    const told = row.parts.map((part) => [part.label, part.text]);
    hits.append(
      explain(shape("rect", { class: "hit", x: 1, y: middle - step / 2, width: width - 2, height: step }), row.title || row.name, told, { focus: true }),
    );
  });
  svg.append(hits);
  walkable(svg);
  return svg;
}

// What is left of a zero after rounding is zero.
const settled = (value) => (Math.abs(value) < 1e-12 ? 0 : value);

// Steps that add up to a total: {name, value, sign, series, colour}
function waterfall(width, { title, steps, total }) {
  let sum = 0;
  const ends = [0];
  const rows = steps.map(({ name, value, sign = 1, series, colour }) => {
    const from = sum;
    sum += sign * (isNumber(value) ? settled(value) : 0);
    ends.push(sum);
    const text = plain(settled(sign * value));
    return { name, value: text, line: sum, parts: [{ series, colour, from, to: sum, label: "", text }] };
  });
  const end = plain(settled(total.value));
  rows.push({
    name: total.name,
    value: end,
    strong: true,
    parts: [{ series: "total", colour: "c-total", from: 0, to: total.value, label: "", text: end }],
  });
  return bars(width, { title, rows, domain: [smallest(ends), largest([...ends, total.value])] });
}
