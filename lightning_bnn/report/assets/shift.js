// Figures of data from elsewhere: can the uncertainty tell them from the data of the report?

const SCORES = {
  entropy: "Entropy",
  mutual_information: "Mutual information",
  maximum_probability: "Maximum probability",
  sd: "Standard deviation",
  epistemic_sd: "Epistemic sd",
};

// The two that one draw cannot have: it agrees with itself.
const OF_DRAWS = ["mutual_information", "epistemic_sd"];

const UNITS = { entropy: " (nats)", mutual_information: " (nats)" };

const scoresOf = (block, data) =>
  Object.keys((data && data.by) || {}).filter((key) => data.by[key] && !(oneDraw(block) && OF_DRAWS.includes(key)));

const scoreName = (key) => lookup(SCORES, key, key);

function shiftFigure(name, data, block, report, at) {
  const scores = scoresOf(block, data);
  if (scores.length === 0) return null;
  const chosen = () => (scores.includes(state.score) ? state.score : scores[0]);
  const now = () => data.by[chosen()];
  const source = (report.data && report.data.source) || "data";
  const rowsOf = () => range((now().edges || []).length - 1);
  const table = () => element("table", { class: "scores" },
    element("thead", {}, element("tr", {}, ["score", "AUROC", "AUPR", "FPR95"].map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, scores.map((key) => element("tr", { class: key === chosen() ? "chosen" : null },
      element("th", { scope: "row" }, scoreName(key)),
      ["auroc", "aupr", "fpr95"].map((kind) => element("td", {}, fixed(data.by[key][kind], 3))))),
    ));
  // the average precision of guessing is the share of foreign examples
  const own = (report.data || {}).examples - ((block.invalid || {}).count || 0);
  const foreign = data.examples - (data.invalid || 0);
  const chance = isNumber(own) && isNumber(foreign) && !isNumber(report.data.sampled) ? ` An AUPR of ${fixed(foreign / (own + foreign), 2)} is chance.` : "";
  const slot = element("div", {}, table());
  const card = figure({
    id: `shift-${at}`,
    title: name,
    read: `The more the two histograms lie apart, the better the score tells foreign data. ${count(data.examples)} examples.${chance}`,
    note: [oneDraw(block) && ONE_DRAW, data.invalid > 0 && `${count(data.invalid)} predictions were not finite and are left out.`].filter(Boolean).join(" "),
    series: [
      { key: "inside", label: `${source} data`, colour: "c-right" },
      { key: "outside", label: name, colour: "c-wrong" },
    ],
    draw(width) {
      const { edges, inside, outside } = now();
      const known = rowsOf();
      const label = scoreName(chosen()).toLowerCase() + lookup(UNITS, chosen(), "");
      const p = plot(width, {
        title: `Histograms of ${label}`,
        height: Math.round(Math.min(280, Math.max(210, width * 0.5))),
        x: { domain: [edges[0], Math.max(edges[edges.length - 1], edges[0] + 1e-12)], label },
        y: { domain: domain([...inside, ...outside], { zero: true }), label: "share", format: (value) => percent(value, value < 0.1 && value > 0 ? 1 : 0) },
      });
      const parts = [["inside", "c-right", inside], ["outside", "c-wrong", outside]];
      for (const [key, colour, shares] of parts) {
        const layer = p.layer(key, colour);
        // empty bars in between keep the outline on the axis
        const outline = known.flatMap((i) => [[edges[i], shares[i] || 0], [edges[i + 1], shares[i] || 0]]);
        layer.append(
          ...known.filter((i) => shares[i] > 0).map((i) => p.box(edges[i], edges[i + 1], 0, shares[i], { "fill-opacity": 0.35 })),
          p.line(outline),
        );
      }
      p.columns(known.filter((i) => inside[i] > 0 || outside[i] > 0).map((i) => ({
        from: edges[i],
        to: edges[i + 1],
        title: `${scoreName(chosen())} ${plain(edges[i])} to ${plain(edges[i + 1])}`,
        rows: [[`${source} data`, percent(inside[i])], [shorten(name, 32), percent(outside[i])]],
      })));
      return p.svg;
    },
    table: () => ({
      head: ["from", "to", `${source} data`, name],
      rows: rowsOf().map((i) => [plain(now().edges[i]), plain(now().edges[i + 1]), percent(now().inside[i], 2), percent(now().outside[i], 2)]),
    }),
  });
  card.querySelector(".canvas").before(slot);
  const redraw = card.redraw;
  card.redraw = (...given) => {
    slot.replaceChildren(table());
    redraw(...given);
  };
  return card;
}

function shiftSection(block, report) {
  const entries = Object.entries(block.shift || {});
  const cards = entries.map(([name, data], at) => attempt(shiftFigure, name, data, block, report, at)).filter(Boolean);
  const scores = [...new Set(entries.flatMap(([, data]) => scoresOf(block, data)))];
  const made = section("shift", "Shift",
    "Data of another kind, which the model should find strange. AUROC and AUPR: how well the score ranks foreign examples above familiar ones (1 is perfect, an AUROC of 0.5 is chance). FPR95: the share of foreign examples taken for familiar when 95% of the familiar ones are kept (lower is better).",
    cards);
  if (made && scores.length > 1) {
    if (!scores.includes(state.score)) state.score = scores[0];
    const choose = switcher("Score", scores.map((key) => [key, scoreName(key)]), state.score, (key) => {
      state.score = key;
      cards.forEach((card) => card.redraw());
    });
    made.querySelector(".cards").before(choose);
  }
  return made;
}
