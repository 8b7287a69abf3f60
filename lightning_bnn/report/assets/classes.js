// Figures of a classifier: calibration, then how sharp and how right it is.

const state = { model: 0, bins: "width", score: null };

const className = (report, index) => {
  const names = report.data && report.data.class_names;
  return names && names[index] !== undefined && names[index] !== null ? String(names[index]) : String(index);
};

// Eight colours; after them the same ones again, dashed. The swatches of the style sheet follow.
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const dashOf = (index) => Math.floor(index / 8) % DASHES.length;
const modelColour = (index) => `m${index % 8}`;
const modelLine = (index) => `line d${dashOf(index)}`;
const modelSwatch = (index) => element("span", { class: `swatch ${modelLine(index)} ${modelColour(index)}`, "aria-hidden": "true" });
const modelStroke = (index, chosen) => ({ class: chosen ? "line thick" : "line", "stroke-dasharray": DASHES[dashOf(index)] });
const modelSeries = (each, index) => ({ key: `model-${index}`, label: each.name, colour: modelColour(index), kind: modelLine(index) });

const outOf = (value, lower, upper) => isNumber(value) && isNumber(lower) && isNumber(upper) && (value < lower || value > upper);
const outOfBand = (curve, i) => outOf(curve.came[i], curve.lower[i], curve.upper[i]);

const thinned = (shown, all) => shown < all && `${count(shown)} of ${count(all)} points; the JSON file has all of them.`;

const ONE_DRAW = "One draw cannot show disagreement.";
const oneDraw = (block) => block.draws === 1;

function reliability(block, report) {
  const kinds = [["width", "Equal width"], ["mass", "Equal mass"]].filter(([key]) => block.reliability && block.reliability[key]);
  if (kinds.length === 0) return null;
  if (!block.reliability[state.bins]) state.bins = kinds[0][0];
  const curve = () => block.reliability[state.bins];
  const others = report.models.filter((each) => each !== block && each.reliability && each.reliability.width);
  const known = () => range(curve().count.length).filter((i) => curve().count[i] > 0 && isNumber(curve().came[i]));
  const card = figure({
    id: "reliability",
    title: "Reliability diagram",
    read:
      "Each dot is a bin of predictions (larger: more of them): how sure they were, and how often they were right. On the diagonal the stated " +
      "confidence is true; below it the model is over-confident. The grey band is where the dots of a perfectly calibrated " +
      "model would lie with this many examples (99% for all bins together).",
    controls: kinds.length > 1 ? [switcher("Bins", kinds, state.bins, (key) => { state.bins = key; card.redraw(); })] : [],
    series: [
      { key: "band", label: "band of perfect calibration", colour: "c-band", kind: "area" },
      { key: "gap", label: "gap", colour: "c-gap" },
      { key: "dots", label: "observed", colour: "c-main", kind: "dot" },
      { key: "outside", label: "outside of the band", colour: "c-bad", kind: "ring" },
      ...(others.length ? [{ key: "others", label: "other models", colour: "c-muted", kind: "line" }] : []),
    ],
    off: ["others"],
    draw(width) {
      const now = curve();
      const p = plot(width, {
        title: "Reliability diagram: accuracy against stated confidence",
        height: Math.round(Math.min(380, Math.max(280, width * 0.72))),
        x: { domain: [0, 1], label: "stated confidence" },
        y: { domain: [0, 1], label: "share that was right" },
      });
      const most = largest(now.count);
      const band = p.layer("band", "c-band");
      const gap = p.layer("gap", "c-gap");
      p.layer("diagonal", "c-muted").append(p.line([[0, 0], [1, 1]], { "stroke-dasharray": "4 4" }));
      const rest = p.layer("others", "c-muted");
      for (const each of others) {
        const other = each.reliability[state.bins] || each.reliability.width;
        rest.append(p.line(other.stated.map((value, i) => [value, other.came[i]])));
      }
      const main = p.layer("dots", "c-main");
      main.append(p.line(known().map((i) => [now.stated[i], now.came[i]])));
      const outside = p.layer("outside", "c-bad");
      for (const i of known()) {
        if (isNumber(now.lower[i])) band.append(p.box(now.edges[i], now.edges[i + 1], now.lower[i], now.upper[i]));
        gap.append(shape("line", { class: "stem", x1: p.X(now.stated[i]), x2: p.X(now.stated[i]), y1: p.Y(now.stated[i]), y2: p.Y(now.came[i]) }));
        const radius = 2.5 + 3 * Math.sqrt(now.count[i] / most);
        main.append(p.dot(now.stated[i], now.came[i], radius));
        if (outOfBand(now, i)) outside.append(p.dot(now.stated[i], now.came[i], radius + 3, { class: "ring" }));
      }
      p.columns(known().map((i) => ({
        from: now.edges[i],
        to: now.edges[i + 1],
        title: `Confidence ${fixed(now.edges[i], 2)} to ${fixed(now.edges[i + 1], 2)}`,
        rows: [
          ["stated", fixed(now.stated[i], 3)],
          ["right", fixed(now.came[i], 3)],
          ["gap", fixed(now.came[i] - now.stated[i], 3)],
          ["band", `${fixed(now.lower[i], 3)} to ${fixed(now.upper[i], 3)}${outOfBand(now, i) ? " (outside)" : ""}`],
          ["predictions", count(now.count[i])],
        ],
      })));
      return p.svg;
    },
    table: () => ({
      head: ["from", "to", "predictions", "stated", "right", "band from", "band to"],
      rows: known().map((i) => [
        fixed(curve().edges[i], 3), fixed(curve().edges[i + 1], 3), count(curve().count[i]), fixed(curve().stated[i], 4),
        fixed(curve().came[i], 4), fixed(curve().lower[i], 4), fixed(curve().upper[i], 4),
      ]),
    }),
  });
  return card;
}

function confidenceHistogram(block) {
  const data = block.confidence;
  if (!data || !data.edges) return null;
  const bins = range(data.edges.length - 1);
  const total = bins.map((i) => (data.right[i] || 0) + (data.wrong[i] || 0));
  const { accuracy, mean_confidence: mean } = block.scalars || {};
  return figure({
    id: "confidence",
    title: "How sure the model is",
    read: `Predictions by their confidence, split into right and wrong ones. Mean confidence ${percent(mean)}, accuracy ${percent(accuracy)}: where the first lies above the second, the model promises more than it keeps.`,
    series: [
      { key: "right", label: "right", colour: "c-right" },
      { key: "wrong", label: "wrong", colour: "c-wrong" },
      { key: "marks", label: "accuracy and mean confidence", colour: "c-ink", kind: "line" },
    ],
    draw(width) {
      const p = plot(width, {
        title: "Histogram of confidence",
        x: { domain: [Math.min(0, data.edges[0]), Math.max(1, data.edges[data.edges.length - 1])], label: "stated confidence" },
        y: { domain: domain(total, { zero: true }), label: "predictions", format: count },
      });
      const [right, wrong] = [p.layer("right", "c-right"), p.layer("wrong", "c-wrong")];
      for (const i of bins) {
        const [from, to] = [data.edges[i], data.edges[i + 1]];
        if (data.right[i] > 0) right.append(p.bar(from, to, data.wrong[i] || 0, total[i]));
        if (data.wrong[i] > 0) wrong.append(p.bar(from, to, 0, data.wrong[i]));
      }
      const marks = p.layer("marks", "c-ink");
      const [top, bottom] = [p.frame.y, p.frame.y + p.frame.height];
      const mark = (value, dash) =>
        isNumber(value) && marks.append(shape("line", { class: "line", x1: p.X(value), x2: p.X(value), y1: top, y2: bottom, "stroke-dasharray": dash }));
      mark(mean, null);
      mark(accuracy, "5 4");
      p.columns(bins.filter((i) => total[i] > 0).map((i) => ({
        from: data.edges[i],
        to: data.edges[i + 1],
        title: `Confidence ${fixed(data.edges[i], 2)} to ${fixed(data.edges[i + 1], 2)}`,
        rows: [["right", count(data.right[i])], ["wrong", count(data.wrong[i])], ["share right", percent(data.right[i] / total[i])]],
      })));
      return p.svg;
    },
    note: "The solid line is the mean confidence, the dashed one the accuracy.",
    table: () => ({
      head: ["from", "to", "right", "wrong"],
      rows: bins.map((i) => [fixed(data.edges[i], 3), fixed(data.edges[i + 1], 3), count(data.right[i]), count(data.wrong[i])]),
    }),
  });
}

function temperatureFigure(block) {
  const data = block.temperature;
  if (!data || !data.before || !data.after || !isNumber(data.value)) return null;
  const kinds = [["nll", "NLL"], ["ece", "ECE"], ["brier", "Brier"]].filter(([key]) => isNumber(data.before[key]) && isNumber(data.after[key]));
  const where = data.fitted_on === "validation"
    ? "It was fitted on validation data."
    : "It was fitted on one half of the examples and judged on the other, both ways.";
  return figure({
    id: "temperature",
    title: `Temperature scaling, T = ${fixed(data.value, 2)}`,
    read: `The scores as they are, and after dividing all log-probabilities by one temperature. ${where} T above 1 softens, T below 1 sharpens. Each pair of bars has its own scale.`,
    note: data.verdict_after && `The verdict with the temperature: ${data.verdict_after}.`,
    series: [
      { key: "before", label: "as it is", colour: "c-muted" },
      { key: "after", label: "with the temperature", colour: "c-main" },
    ],
    draw: (width) => bars(width, {
      title: "Scores before and after temperature scaling",
      domain: [0, 1],
      step: 46,
      rows: kinds.map(([key, name]) => {
        const [before, after] = [data.before[key], data.after[key]];
        const most = Math.max(before, after, 1e-12);
        return {
          name,
          value: `${plain(before)} \u2192 ${plain(after)}`,
          parts: [
            { series: "before", colour: "c-muted", from: 0, to: Math.max(0, before) / most, label: "as it is", text: plain(before), share: 0.5, shift: -0.04 },
            { series: "after", colour: "c-main", from: 0, to: Math.max(0, after) / most, label: "with the temperature", text: plain(after), share: 0.5, shift: 0.54 },
          ],
        };
      }),
    }),
    table: () => ({ head: ["score", "as it is", "with the temperature"], rows: kinds.map(([key, name]) => [name, plain(data.before[key]), plain(data.after[key])]) }),
  });
}

function riskCoverage(block, report) {
  const curves = report.models.map((each, index) => ({ each, index, curve: each.risk_coverage })).filter(({ curve }) => curve && curve.coverage && curve.coverage.length);
  const own = curves.find(({ each }) => each === block);
  if (!own) return null;
  const { risk, coverage_at_risk: coverage, aurc } = block.scalars || {};
  const nearest = (curve, place) => curve.coverage.reduce((best, value, i) => (Math.abs(value - place) < Math.abs(curve.coverage[best] - place) ? i : best), 0);
  // the first few predictions alone say little, and would squeeze the rest
  const heights = curves.flatMap(({ curve }) => curve.risk.filter((_, i) => curve.coverage[i] >= 0.05));
  const places = range(own.curve.coverage.length).filter((i, at, all) => at % Math.ceil(all.length / 50) === 0 || at === all.length - 1);
  return figure({
    id: "risk-coverage",
    title: "Risk against coverage",
    read: `The error rate if only the most confident share of the predictions is kept and the rest is handed on. Lower is better; the area under the curve is the AURC (${plain(aurc)}).` +
      (isNumber(coverage) && isNumber(risk) ? ` With at most ${percent(risk, 0)} errors, ${percent(coverage)} of the predictions can be kept.` : ""),
    series: [
      ...curves.map(({ each, index }) => modelSeries(each, index)),
      ...(isNumber(risk) ? [{ key: "limit", label: "accepted risk", colour: "c-ink", kind: "dashed" }] : []),
    ],
    draw(width) {
      const p = plot(width, {
        title: "Error rate against the share of predictions that is kept",
        x: { domain: [0, 1], label: "coverage: share that is kept" },
        y: { domain: domain([...heights, isNumber(risk) ? risk * 1.2 : 0], { zero: true }), label: "risk: error rate" },
      });
      for (const { each, index, curve } of [...curves].sort((a, b) => (a.each === block) - (b.each === block))) {
        const points = curve.coverage.map((value, i) => [value, curve.risk[i]]);
        p.layer(`model-${index}`, modelColour(index)).append(p.line(points, modelStroke(index, each === block)));
      }
      if (isNumber(risk)) {
        const limit = p.layer("limit", "c-ink");
        limit.append(p.line([[0, risk], [1, risk]], { "stroke-dasharray": "5 4" }));
        if (isNumber(coverage) && coverage > 0) {
          limit.append(p.line([[coverage, 0], [coverage, risk]], { "stroke-dasharray": "5 4" }), p.dot(coverage, risk, 4.5));
        }
      }
      p.columns(between(places.map((i) => own.curve.coverage[i]), [0, 1]).map(({ index, from, to }) => ({
        from,
        to,
        title: `Coverage ${percent(own.curve.coverage[places[index]])}`,
        rows: [own, ...curves.filter((each) => each !== own)].slice(0, 8).map(({ each, curve }) => [shorten(each.name, 32), percent(curve.risk[nearest(curve, own.curve.coverage[places[index]])], 2)]),
      })));
      return p.svg;
    },
    table: () => ({ head: ["coverage", "risk"], rows: places.map((i) => [percent(own.curve.coverage[i]), percent(own.curve.risk[i], 2)]), note: thinned(places.length, own.curve.coverage.length) }),
  });
}

function entropyAccuracy(block) {
  const data = block.entropy_accuracy;
  if (!data || !data.edges) return null;
  const bins = range(data.edges.length - 1).filter((i) => data.count[i] > 0 && isNumber(data.accuracy[i]));
  if (bins.length === 0) return null;
  const most = largest(data.count);
  return figure({
    id: "entropy-accuracy",
    title: "Accuracy against entropy",
    read: "Where the model says that it is unsure, it should be wrong more often: the bars should fall from left to right. Pale bars rest on few predictions.",
    draw(width) {
      const p = plot(width, {
        title: "Accuracy in bins of predictive entropy",
        x: { domain: [data.edges[0], data.edges[data.edges.length - 1]], label: "predictive entropy (nats)" },
        y: { domain: [0, 1], label: "accuracy" },
      });
      const layer = p.layer("accuracy", "c-main");
      for (const i of bins) {
        const opacity = 0.3 + 0.7 * Math.sqrt(data.count[i] / most);
        layer.append(p.bar(data.edges[i], data.edges[i + 1], 0, data.accuracy[i], { "fill-opacity": opacity.toFixed(2) }));
        layer.append(p.line([[data.edges[i], data.accuracy[i]], [data.edges[i + 1], data.accuracy[i]]]));
      }
      p.columns(bins.map((i) => ({
        from: data.edges[i],
        to: data.edges[i + 1],
        title: `Entropy ${fixed(data.edges[i], 2)} to ${fixed(data.edges[i + 1], 2)}`,
        rows: [["accuracy", percent(data.accuracy[i])], ["predictions", count(data.count[i])]],
      })));
      return p.svg;
    },
    table: () => ({
      head: ["from", "to", "predictions", "accuracy"],
      rows: bins.map((i) => [fixed(data.edges[i], 3), fixed(data.edges[i + 1], 3), count(data.count[i]), percent(data.accuracy[i])]),
    }),
  });
}
