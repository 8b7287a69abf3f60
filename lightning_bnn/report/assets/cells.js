// Figures that are no plots: a matrix of counts, examples with their pictures, and tables.

function heat(width, { title, names, matrix, x_label, y_label }) {
  const side = 18; // for the name of the rows
  const left = side + nameWidth(width - side, names);
  const cell = Math.min(38, (width - left - 6) / names.length);
  const letters = Math.floor(cell / 7);
  const level = names.every((name) => name.length <= Math.max(1, letters));
  const top = level ? 22 : Math.min(84, 12 + names.reduce((most, name) => Math.max(most, name.length), 0) * 6.2);
  const height = top + cell * names.length + 30;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title, class: "heat" });
  const most = Math.max(1, largest(matrix.flat()));
  names.forEach((name, i) => {
    const [middle, across] = [top + cell * (i + 0.5), left + cell * (i + 0.5)];
    const words = { "text-anchor": level ? "middle" : "start", transform: level ? null : `rotate(-90 ${across + 4} ${top - 6})` };
    svg.append(
      shape("text", { x: left - 7, y: middle + 4, "text-anchor": "end" }, shorten(name, Math.floor((left - side - 6) / 6.7))),
      shape("text", { x: level ? across : across + 4, y: top - 6, ...words }, shorten(name, 11)),
    );
  });
  const middle = top + (cell * names.length) / 2;
  svg.append(
    shape("text", { class: "name", x: left + (cell * names.length) / 2, y: height - 8, "text-anchor": "middle" }, x_label),
    shape("text", { class: "name", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, y_label),
  );
  names.forEach((target, row) => names.forEach((predicted, column) => {
    const value = matrix[row][column];
    const box = { x: left + cell * column + 0.5, y: top + cell * row + 0.5, width: cell - 1, height: cell - 1, rx: 2 };
    const group = shape("g", { class: row === column ? "c-right" : "c-wrong" },
      shape("rect", { class: "cell", ...box }),
      value > 0 && shape("rect", { class: "fill", ...box, "fill-opacity": (0.1 + 0.5 * (value / most)).toFixed(2) }),
      value > 0 && cell >= 17 && shape("text", { x: box.x + cell / 2, y: box.y + cell / 2 + 4, "text-anchor": "middle" }, count(value)),
    );
    svg.append(explain(group, row === column ? `Class ${target}, right` : `Class ${target} taken for ${predicted}`, [["predictions", count(value)]], { focus: true }));
  }));
  walkable(svg);
  return svg;
}

function pictures({ pictures: list }) {
  return element("ul", { class: "examples" }, list.map((each) => {
    const item = element("li", { class: `example ${each.right ? "right" : "wrong"}` },
      // only pictures inside of the page: the policy refuses others, and so do we
      typeof each.image === "string" && each.image.startsWith("data:image/")
        ? element("img", { src: each.image, alt: each.name })
        : element("span", { class: "blank" }, each.name.replace("Example ", "#")),
      element("span", { class: "outcome" }, `${each.right ? "\u2713" : "\u2717"} `, element("strong", {}, shorten(each.says, 14)), each.but ? element("span", {}, ` not ${shorten(each.but, 14)}`) : ""),
      element("span", { class: "small" }, each.small),
    );
    return explain(item, each.name, each.rows);
  }));
}

function dataTable({ head, rows, note, chosen }, kind = "data") {
  const first = (text, at) => (kind === "scores" && at === 0 ? element("th", { scope: "row" }, text) : element("td", {}, text));
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the figure's numbers" },
    element(
      "table",
      { class: kind },
      element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, rows.map((row, i) => element("tr", { class: i === chosen ? "chosen" : null }, row.map(first)))),
    ),
    note && element("p", { class: "small" }, note),
  );
}
