// Lying bars with a name on the left and a number on the right: sums, pairs and shares.

const nameWidth = (width, names) => {
  const letters = names.reduce((most, name) => Math.max(most, name.length), 0);
  return Math.min(width * 0.36, Math.max(44, 14 + letters * 6.9));
};

function bars(width, { title, rows, step = 30, domain: [low, high] }) {
  const left = nameWidth(width, rows.map((row) => row.name));
  const right = Math.max(...rows.map((row) => row.text.length)) * 7.2 + 14;
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
      shape("text", { x: width - 2, y: middle + 4, "text-anchor": "end", class: strong }, row.text),
    );
    for (const part of row.parts) {
      if (!isNumber(part.start) || !isNumber(part.end) || part.start === part.end) continue;
      const box = { x: Math.min(X(part.start), X(part.end)), width: Math.max(1, Math.abs(X(part.end) - X(part.start))) };
      // two lanes of half the height, a little apart
      const [shift, share] = isNumber(part.lane) ? [part.lane ? 0.54 : -0.04, 0.5] : [0, 1];
      layer(part.key, `c-${part.colour || "main"}`).append(
        shape("rect", { class: "fill", y: middle - thick / 2 + shift * thick, height: thick * share, rx: 2, ...box }),
      );
    }
    if (isNumber(row.line) && index < rows.length - 1) {
      // through a step of zero, which has no bar of its own
      const from = row.parts.every((part) => part.start === part.end) ? middle - thick / 2 : middle + thick / 2;
      svg.append(shape("line", { class: "step", x1: X(row.line), x2: X(row.line), y1: from, y2: middle + step - thick / 2 }));
    }
    const told = row.parts.map((part) => [part.label || "", part.text]);
    hits.append(
      explain(shape("rect", { class: "hit", x: 1, y: middle - step / 2, width: width - 2, height: step }), row.title || row.name, told, { focus: true }),
    );
  });
  svg.append(hits);
  walkable(svg);
  return svg;
}

const legendOfBars = ({ rows }) => legendOf(rows.flatMap((row) => row.parts.map((part) => ({ series: part.key, tone: `c-${part.colour || "main"}`, label: part.label, swatch: "fill" }))));
