// The table that sets the models side by side, each number with its bootstrap interval.

const AIMS = { lower: "\u2193 lower is better", higher: "\u2191 higher is better" };

// As many decimals as the narrowest interval of the row can tell apart.
function decimalsOf(values) {
  const widths = values.map((each) => each && each.upper - each.lower).filter((width) => isNumber(width) && width > 0);
  if (widths.length === 0) return null;
  return Math.min(5, Math.max(0, 1 - Math.floor(Math.log10(Math.min(...widths)))));
}

// The value and its interval on the scale of the row, with a stroke where the aim is.
function whisker(each, [low, high], aim, colour) {
  const X = (value) => 4 + ((value - low) / (high - low || 1)) * 92;
  if (!isNumber(each.value)) return null;
  const svg = shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "xMinYMid", class: `whisker ${colour}`, "aria-hidden": "true" });
  if (isNumber(aim)) svg.append(shape("line", { class: "aim-mark", x1: X(aim), x2: X(aim), y1: 0, y2: 10 }));
  if (isNumber(each.lower) && isNumber(each.upper)) svg.append(shape("line", { class: "line", x1: X(each.lower), x2: X(each.upper), y1: 5, y2: 5 }));
  svg.append(shape("circle", { class: "fill", cx: X(each.value), cy: 5, r: 3 }));
  return svg;
}

function comparisonTable(report) {
  const data = report.comparison;
  if (!data || !data.rows || data.rows.length === 0 || !data.columns) return null;
  const several = data.columns.length > 1;
  const level = percent(isNumber(data.level) ? data.level : 0.95, 0);
  const indices = range(data.columns.length);
  const rows = data.rows.map((row) => {
    const values = data.columns.map((_, index) => (row.values || [])[index] || {});
    const decimals = decimalsOf(values);
    const number = (value) => (decimals === null ? plain(value) : fixed(value, decimals));
    const span = domain([row.aim, ...values.flatMap((each) => [each.value, each.lower, each.upper])], { air: 0 });
    const aim = row.better === "near" && isNumber(row.aim) ? `\u2192 near ${plain(row.aim)}` : lookup(AIMS, row.better, "");
    const label = shorten(String(row.label), 60);
    const cells = indices.map((index) => {
      const each = values[index];
      const known = (value) => (row.key === "nll" ? nllOf(report.models[index], each.value, value) : value);
      const text = known(number(each.value));
      const told = [["value", known(plain(each.value))]];
      if (isNumber(each.lower)) told.push([`${level} interval`, `${number(each.lower)} to ${number(each.upper)}`]);
      if (several && each.best) told.push(["", values.filter((other) => other.best).length > 1 ? "best of this row, as others are" : "best of this row"]);
      if (several && each.tied) told.push(["", "not clearly different from the best"]);
      const cell = element("td", { class: several && each.best ? "best" : null }, element("div", { class: "cell-line" },
        element("div", {}, element("span", { class: "value" }, several && each.tied ? element("span", { class: "tied" }, "\u2248\u2009", element("span", { class: "unseen" }, "tied with the best: ")) : null, text, several && each.best ? element("span", { class: "unseen" }, " (best)") : null),
        isNumber(each.lower) && isNumber(each.upper) ? element("span", { class: "interval" }, `${number(each.lower)} \u2013 ${number(each.upper)}`) : null),
        whisker(each, span, row.aim, modelColour(index))));
      return explain(cell, `${label}, ${shorten(data.columns[index], 40)}`, told, { focus: true, told: true });
    });
    return element("tr", { "data-row": row.key }, element("th", { scope: "row", title: row.label }, label, element("span", { class: "aim" }, aim)), cells);
  });
  const table = element("table", { class: "comparison" },
    element("thead", {}, element("tr", {}, element("td", {}, ""), indices.map((index) => element("th", { scope: "col", title: data.columns[index] }, element("span", { class: "column" }, several && modelSwatch(index), element("span", {}, shorten(String(data.columns[index]), 30))))))),
    element("tbody", {}, rows));
  table.style.setProperty("--columns", String(indices.length));
  walkable(table);
  return element("section", { id: "comparison", "aria-labelledby": "comparison-title" },
    element("h2", { id: "comparison-title" }, several ? "Comparison" : "The numbers"),
    element("p", { class: "lead" },
      several ? "Bold: the best of the row. \u2248: not clearly different from the best (paired bootstrap). " : "",
      `Small type and whiskers: ${level} bootstrap interval`, isNumber(data.replicates) ? ` (${count(data.replicates)} resamples of the examples).` : "."),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "comparison-title" }, table));
}
