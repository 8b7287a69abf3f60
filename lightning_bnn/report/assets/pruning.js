// Pruning: the signal-to-noise ratios of the weights, and what removing the lowest of them costs.

// name in the numbers → [label, row of the comparison, as it is shown, how it is written]
const as = (value) => value;
const PRUNED_SCORES = {
  accuracy: ["error rate", "accuracy", (value) => (isNumber(value) ? 1 - value : null), (value) => percent(value, 2)],
  rmse: ["RMSE", "rmse", as, plain],
  nll: ["NLL", "nll", as, plain],
  ece: ["ECE", "ece", as, plain],
  crps: ["CRPS", "crps", as, plain],
  brier: ["Brier score", "brier", as, plain],
  coverage: ["90% interval holds", "coverage_90", as, (value) => percent(value, 1)],
};

const resultsOf = (block) =>
  ((block.pruning || {}).results || []).filter((each) => each && isNumber(each.fraction) && each.fraction < 1).sort((a, b) => a.fraction - b.fraction);

// What is left falls tenfold with each unit: as much room from 90 to 99% as from 0 to 90%.
const stretched = (fraction) => -Math.log10(1 - fraction);

const shareText = (fraction) => `${minus(String(Number((100 * fraction).toPrecision(6))))}%`;

const ratio = (power) => (power < -4.3 || power >= 7 ? plain(10 ** power) : minus(String(Number((10 ** power).toPrecision(3)))));

const nounOf = (data) => (data.unit === "channel" ? "units" : "weights");

function ratioHistogram(block) {
  const data = block.pruning;
  const whole = data.histogram;
  if (!whole || !whole.log10_edges || whole.log10_edges.length < 2) return null;
  const edges = whole.log10_edges;
  const bins = range(edges.length - 1);
  const layers = (whole.layers || []).filter((each) => each && each.counts);
  let chosen = null;
  const counts = () => (chosen === null ? whole.counts : layers[chosen].counts);
  // one threshold for all layers; with the same share of each layer there is none to draw
  const lines = data.scope === "layer" ? [] : resultsOf(block).filter((each) => each.fraction > 0 && each.threshold > 0).map((each) => ({ ...each, at: Math.log10(each.threshold) }))
    .filter(({ at }) => at >= edges[0] - 1); // one far outside would leave no room for the bars
  const beyond = [[whole.below, "below the first bin"], [whole.above, "above the last one"], [whole.zero, "exactly zero, as those removed already"]].filter(([value]) => value > 0);
  const picker = layers.length > 1 && element("select", { class: "controls", "aria-label": "Layer" },
    element("option", { value: "" }, "all layers"), layers.map((each, at) => element("option", { value: at }, shorten(String(each.name), 40))));
  const card = figure({
    id: "snr",
    title: "Signal-to-noise ratio of the weights",
    wide: true,
    read: `Each ${data.unit === "channel" ? "unit" : "weight"} by |mean| / standard deviation, on a logarithmic axis. ` +
      (lines.length ? "To remove a share, all to the left of its line go." : "The same share of every layer goes, so that each has a threshold of its own."),
    note: beyond.length > 0 && `Not shown: ${beyond.map(([value, where]) => `${count(value)} ${where}`).join(", ")}.`,
    controls: picker ? [picker] : [],
    series: [
      { key: "counts", label: nounOf(data), colour: "c-main" },
      ...(lines.length ? [{ key: "thresholds", label: "share removed", colour: "c-ink", kind: "dashed" }] : []),
    ],
    draw(width) {
      const now = counts();
      const places = lines.map(({ at }) => at);
      const [low, high] = [smallest([edges[0], ...places]), largest([edges[edges.length - 1], ...places])];
      const p = plot(width, {
        title: "Histogram of the signal-to-noise ratio",
        height: Math.round(Math.min(330, Math.max(230, width * 0.36))),
        x: { domain: [low, high], label: "signal-to-noise ratio (logarithmic)", format: ratio },
        // room for the names of the lines
        y: { domain: [0, (largest(now) || 1) * 1.16], label: nounOf(data), format: count },
      });
      const layer = p.layer("counts", "c-main");
      layer.append(...bins.filter((i) => now[i] > 0).map((i) => p.bar(edges[i], edges[i + 1], 0, now[i])));
      const marks = p.layer("thresholds", "c-ink");
      const [top, bottom] = [p.frame.y, p.frame.y + p.frame.height];
      let free = Infinity; // from the right: the largest shares are of most interest
      for (const { at, fraction } of [...lines].reverse()) {
        marks.append(shape("line", { class: "line thin", x1: p.X(at), x2: p.X(at), y1: top, y2: bottom, "stroke-dasharray": "5 4" }));
        if (free - p.X(at) < 36) continue;
        free = p.X(at);
        marks.append(shape("text", { x: free - 3, y: top + 9, "text-anchor": "end" }, shareText(fraction)));
      }
      const all = chosen === null ? data.total : layers[chosen].total;
      p.columns(bins.filter((i) => now[i] > 0).map((i) => {
        const gone = lines.filter(({ at }) => at >= (edges[i] + edges[i + 1]) / 2).map(({ fraction }) => fraction);
        return {
          from: edges[i],
          to: edges[i + 1],
          title: `Ratio ${ratio(edges[i])} to ${ratio(edges[i + 1])}`,
          rows: [[nounOf(data), count(now[i])], ["share of them", percent(now[i] / all, 2)], ...(gone.length ? [["go with", `${shareText(smallest(gone))} removed`]] : [])],
        };
      }));
      return p.svg;
    },
    table: () => ({
      head: ["ratio from", "to", chosen === null ? nounOf(data) : `${nounOf(data)} of ${layers[chosen].name}`],
      rows: bins.map((i) => [ratio(edges[i]), ratio(edges[i + 1]), count(counts()[i])]),
    }),
  });
  if (picker) {
    picker.addEventListener("change", () => {
      chosen = picker.value === "" ? null : Number(picker.value);
      card.redraw();
    });
  }
  return card;
}

// The scores that the results have, those that are known first.
function prunedScores(block) {
  const there = Object.keys(PRUNED_SCORES).filter((name) => (block.pruning.score_names || []).includes(name));
  const others = (block.pruning.score_names || []).filter((name) => !there.includes(name));
  return [...there, ...others].map((name) => {
    const [label, row, value, text] = lookup(PRUNED_SCORES, name, [String(name), null, as, plain]);
    return { name, label, row, text, of: (result) => value(lookup(result.scores || {}, name, null)), value };
  });
}

// The interval of the whole model, as the comparison has it.
function wholeInterval(score, index, report) {
  const row = ((report.comparison || {}).rows || []).find((each) => each.key === score.row);
  const { lower, upper } = ((row || {}).values || [])[index] || {};
  const ends = [score.value(lower), score.value(upper)];
  return ends.every(isNumber) ? [Math.min(...ends), Math.max(...ends)] : null;
}

function pruningCurves(block, report) {
  const own = resultsOf(block);
  const scores = prunedScores(block).filter((score) => own.some((result) => isNumber(score.of(result))));
  if (own.length < 2 || scores.length === 0) return null;
  const curves = report.models.map((each, index) => ({ each, index, results: resultsOf(each) })).filter(({ results }) => results.length > 1);
  const index = report.models.indexOf(block);
  const level = percent(isNumber((report.comparison || {}).level) ? report.comparison.level : 0.95, 0);
  const bands = scores.map((score) => wholeInterval(score, index, report));
  const spanOf = domain(curves.flatMap(({ results }) => results.map(({ fraction }) => stretched(fraction))), { air: 0.03 });
  const one = (score, band, width) => {
    const places = own.map(({ fraction }) => stretched(fraction));
    const room = (width - 84) / (spanOf[1] - spanOf[0]);
    // the ends, and between them what has room, the largest shares first
    const shown = [];
    for (const place of [places[places.length - 1], ...places.slice(0, -1).filter((_, i) => i === 0), ...places.slice(1, -1).reverse()]) {
      if (shown.every((other) => Math.abs(place - other) * room >= 40)) shown.push(place);
    }
    const p = plot(width, {
      title: `${score.label} against the share that is removed`,
      height: Math.round(Math.min(280, Math.max(220, width * 0.62))),
      x: { domain: spanOf, label: `${nounOf(block.pruning)} removed`, ticks: shown, format: (place) => shareText(1 - 10 ** -place) },
      y: { domain: domain([...curves.flatMap(({ results }) => results.map(score.of)), ...(band || [])], { air: 0.07 }), label: score.label, format: score.text === plain ? null : shareText },
    });
    if (band) p.layer("interval", "c-band").append(p.box(...spanOf, ...band));
    for (const { each, index: at, results } of [...curves].sort((a, b) => (a.each === block) - (b.each === block))) {
      const layer = p.layer(`model-${at}`, modelColour(at));
      layer.append(p.line(results.map((result) => [stretched(result.fraction), score.of(result)]), modelStroke(at, each === block)));
      if (each === block) results.forEach((result) => isNumber(score.of(result)) && layer.append(p.dot(stretched(result.fraction), score.of(result), 4)));
    }
    p.columns(between(places, spanOf).map(({ index: i, from, to }) => ({
      from,
      to,
      title: `${shareText(own[i].fraction)} removed, ${count(own[i].remaining)} left`,
      rows: [
        ...scores.map((each) => [each.label, each.text(each.of(own[i]))]),
        ...(band ? [[`${score.label}, ${level} interval of the whole`, `${score.text(band[0])} to ${score.text(band[1])}`]] : []),
      ],
    })));
    return p.svg;
  };
  return figure({
    id: "pruning-curve",
    title: "What removing them costs",
    wide: true,
    read: `The scores of the model when the ${nounOf(block.pruning)} of the lowest ratios are set to zero, without training again. The axis is stretched towards 100%, so that what is left falls tenfold over equal distances.` +
      (bands.some(Boolean) ? ` Grey: the ${level} bootstrap interval of the whole model. A score inside of it could be that of the whole model on other examples of the same kind.` : ""),
    series: [
      ...(bands.some(Boolean) ? [{ key: "interval", label: `${level} interval of the whole model`, colour: "c-band", kind: "area" }] : []),
      ...curves.map(({ each, index: at }) => modelSeries(each, at)),
    ],
    draw(width) {
      const columns = Math.min(scores.length, width >= 560 ? 2 : 1);
      const made = element("div", { class: "multiples" }, scores.map((score, at) => one(score, bands[at], Math.floor((width - 16 * (columns - 1)) / columns))));
      made.style.setProperty("--columns", String(columns));
      return made;
    },
  });
}

function pruningTable(block) {
  const data = block.pruning;
  const results = resultsOf(block);
  if (results.length === 0) return null;
  const scores = prunedScores(block);
  const layers = ((data.histogram || {}).layers || []).filter(Boolean);
  const given = data.results || [];
  const head = ["removed", `${nounOf(data)} left`, "largest ratio removed", ...scores.map(({ label }) => label)];
  const rows = results.map((each) => [shareText(each.fraction), count(each.remaining), plain(each.threshold), ...scores.map((score) => score.text(score.of(each)))]);
  return element("div", { id: "pruning-results", class: "card wide" },
    element("h4", {}, "The results"),
    dataTable({ head, rows }),
    layers.length > 0 && element("details", { class: "controls" }, element("summary", {}, "By layer"),
      dataTable({
        head: ["layer", nounOf(data), "median ratio", ...results.map((each) => `of ${shareText(each.fraction)}`)],
        rows: layers.map((each) => [shorten(String(each.name), 40), count(each.total), plain(each.median), ...results.map((result) => percent((each.removed || [])[given.indexOf(result)]))]),
        note: "The columns on the right: the share of the layer that goes when so much of the whole is removed.",
      })));
}

function pruningSection(block, report) {
  const data = block.pruning;
  if (!data) return null;
  const said = data.text || data.unavailable;
  const text = said ? `${said.charAt(0).toUpperCase()}${said.slice(1)}` : "";
  const cards = data.results ? [ratioHistogram, pruningCurves, pruningTable].map((build) => attempt(build, block, report)).filter(Boolean) : [];
  return element("section", { id: "pruning", "aria-labelledby": "pruning-title" },
    element("h3", { id: "pruning-title" }, "Pruning"),
    element("p", { class: "lead" }, cards.length ? `Which weights can go? Those whose mean is small against their standard deviation tell least. ${text}` : text),
    cards.length > 0 && element("div", { class: "cards" }, cards));
}
