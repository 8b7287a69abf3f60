// Figures of a regression: calibration of its distribution, its errors and its uncertainty.

function pitHistogram(block) {
  const data = block.pit;
  if (!data || !data.edges) return null;
  const bins = range(data.edges.length - 1).filter((i) => isNumber(data.count[i]));
  const total = bins.reduce((sum, i) => sum + data.count[i], 0);
  const outside = (i) => outOf(data.count[i], data.lower[i], data.upper[i]);
  return figure({
    id: "pit",
    title: "PIT histogram",
    read: "Where each observed value lies in its predicted distribution, as a probability. A calibrated model gives a flat histogram inside of the band (99% for all bars together). High ends: intervals too narrow. A hump: too wide. A slope: biased.",
    series: [
      { key: "count", label: "observations", colour: "c-main" },
      { key: "outside", label: "outside of the band", colour: "c-bad" },
      { key: "band", label: "band of perfect calibration", colour: "c-band", kind: "area" },
    ],
    draw(width) {
      const p = plot(width, {
        title: "Histogram of the probability integral transform",
        x: { domain: [0, 1], label: "probability integral transform" },
        y: { domain: domain([...data.count, ...(data.upper || [])], { zero: true }), label: "observations", format: count },
      });
      const [band, inside, bad] = [p.layer("band", "c-band"), p.layer("count", "c-main"), p.layer("outside", "c-bad")];
      const edge = p.layer("band", "c-ink");
      for (const i of bins) {
        (outside(i) ? bad : inside).append(p.bar(data.edges[i], data.edges[i + 1], 0, data.count[i]));
        if (!isNumber(data.lower[i])) continue;
        band.append(p.box(data.edges[i], data.edges[i + 1], data.lower[i], data.upper[i]));
        for (const level of [data.lower[i], data.upper[i]]) edge.append(p.line([[data.edges[i], level], [data.edges[i + 1], level]], { class: "line thin" }));
      }
      p.layer("flat", "c-ink").append(p.line([[0, total / bins.length], [1, total / bins.length]], { "stroke-dasharray": "5 4" }));
      p.columns(bins.map((i) => ({
        from: data.edges[i],
        to: data.edges[i + 1],
        title: `PIT ${fixed(data.edges[i], 2)} to ${fixed(data.edges[i + 1], 2)}`,
        rows: [
          ["observations", count(data.count[i])],
          ["expected", plain(total * (data.edges[i + 1] - data.edges[i]))],
          ["band", `${plain(data.lower[i])} to ${plain(data.upper[i])}${outside(i) ? " (outside)" : ""}`],
        ],
      })));
      return p.svg;
    },
    table: () => ({
      head: ["from", "to", "observations", "band from", "band to"],
      rows: bins.map((i) => [fixed(data.edges[i], 3), fixed(data.edges[i + 1], 3), count(data.count[i]), plain(data.lower[i]), plain(data.upper[i])]),
    }),
  });
}

function coverageFigure(block, report) {
  const data = block.coverage;
  if (!data || !data.nominal || data.nominal.length === 0) return null;
  const curves = report.models.map((each, index) => ({ each, index, curve: each.coverage })).filter(({ curve }) => curve && curve.nominal);
  const places = range(data.nominal.length).filter((i) => isNumber(data.nominal[i]) && isNumber(data.observed[i]));
  const outside = (i) => outOf(data.observed[i], (data.lower || [])[i], (data.upper || [])[i]);
  return figure({
    id: "coverage",
    title: "Coverage of the intervals",
    read: "The share of observations inside of the central interval of each stated level. On the diagonal the intervals keep their promise; below it they are too narrow, above it too wide.",
    series: [
      { key: "band", label: "band of perfect calibration", colour: "c-band", kind: "area" },
      ...curves.map(({ each, index }) => modelSeries(each, index)),
      { key: "outside", label: "outside of the band", colour: "c-bad", kind: "ring" },
    ],
    draw(width) {
      const p = plot(width, {
        title: "Observed against nominal coverage",
        x: { domain: [0, 1], label: "stated level of the interval" },
        y: { domain: [0, 1], label: "share inside" },
      });
      p.layer("band", "c-band").append(p.area(data.nominal, data.lower, data.upper));
      p.layer("diagonal", "c-muted").append(p.line([[0, 0], [1, 1]], { "stroke-dasharray": "4 4" }));
      for (const { each, index, curve } of [...curves].sort((a, b) => (a.each === block) - (b.each === block))) {
        const layer = p.layer(`model-${index}`, modelColour(index));
        layer.append(p.line(curve.nominal.map((value, i) => [value, curve.observed[i]]), modelStroke(index, each === block)));
        if (each === block) places.forEach((i) => layer.append(p.dot(curve.nominal[i], curve.observed[i], 3)));
      }
      const bad = p.layer("outside", "c-bad");
      places.filter(outside).forEach((i) => bad.append(p.dot(data.nominal[i], data.observed[i], 6, { class: "ring" })));
      p.columns(between(places.map((i) => data.nominal[i]), [0, 1]).map(({ index, from, to }) => {
        const i = places[index];
        return {
          from,
          to,
          title: `Interval of ${percent(data.nominal[i], 0)}`,
          rows: [["holds", percent(data.observed[i])], ["band", `${percent(data.lower[i])} to ${percent(data.upper[i])}${outside(i) ? " (outside)" : ""}`]],
        };
      }));
      return p.svg;
    },
    table: () => ({
      head: ["stated level", "share inside", "band from", "band to"],
      rows: places.map((i) => [percent(data.nominal[i], 0), percent(data.observed[i]), percent(data.lower[i]), percent(data.upper[i])]),
    }),
  });
}

function errorAgainstSd(block) {
  const data = block.error_sd;
  const bins = range(((data || {}).sd || []).length).filter((i) => isNumber(data.sd[i]) && isNumber(data.rmse[i]));
  if (bins.length === 0) return null;
  const outside = (i) => outOf(data.rmse[i], (data.lower || [])[i], (data.upper || [])[i]);
  const scatter = { sd: [], error: [], ...block.scatter };
  const points = range(scatter.sd.length).filter((i) => isNumber(scatter.sd[i]) && isNumber(scatter.error[i]));
  const sizes = points.map((i) => Math.abs(scatter.error[i]));
  // a few wild errors must not squeeze the rest: the frame ends at three times the largest bin
  const top = Math.min(largest([...sizes, ...data.rmse, ...(data.upper || [])]), 3 * largest([...data.rmse, ...data.sd, ...(data.upper || [])]));
  const above = sizes.filter((size) => size > top).length;
  const places = domain([...bins.map((i) => data.sd[i]), ...points.map((i) => scatter.sd[i])], { air: 0.06 });
  return figure({
    id: "error-sd",
    title: "Error against stated spread",
    read: "Predictions in bins of their standard deviation, and the error that came. Dots on the dashed line keep the promise; above it errors are larger than stated. The bars are where a calibrated model would lie.",
    note: above > 0 && `${count(above)} of the ${count(points.length)} points lie above the frame.`,
    series: [
      { key: "points", label: "single predictions", colour: "c-muted", kind: "dot" },
      { key: "band", label: "range if calibrated", colour: "c-band", kind: "area" },
      { key: "bins", label: "root mean squared error", colour: "c-main", kind: "dot" },
      { key: "outside", label: "outside of the range", colour: "c-bad", kind: "ring" },
    ],
    draw(width) {
      const p = plot(width, {
        title: "Error against predicted standard deviation",
        x: { domain: places, label: "predicted standard deviation" },
        y: { domain: [0, top * 1.04], label: "size of the error" },
      });
      const cloud = p.layer("points", "c-muted");
      points.forEach((i) => Math.abs(scatter.error[i]) <= top && cloud.append(p.dot(scatter.sd[i], Math.abs(scatter.error[i]), 1.8, { "fill-opacity": 0.45 })));
      const band = p.layer("band", "c-band");
      const half = Math.max(3, Math.min(9, width / 60));
      for (const i of bins) {
        if (isNumber((data.lower || [])[i])) band.append(shape("rect", { class: "fill", x: p.X(data.sd[i]) - half, width: 2 * half, y: p.Y(data.upper[i]), height: Math.max(1, p.Y(data.lower[i]) - p.Y(data.upper[i])) }));
      }
      const low = Math.max(0, places[0]);
      p.layer("diagonal", "c-ink").append(p.line([[low, low], [places[1], places[1]]], { "stroke-dasharray": "5 4" }));
      const main = p.layer("bins", "c-main");
      main.append(p.line(bins.map((i) => [data.sd[i], data.rmse[i]])));
      bins.forEach((i) => main.append(p.dot(data.sd[i], data.rmse[i], 4.5)));
      const bad = p.layer("outside", "c-bad");
      bins.filter(outside).forEach((i) => bad.append(p.dot(data.sd[i], data.rmse[i], 7.5, { class: "ring" })));
      p.columns(between(bins.map((i) => data.sd[i]), places).map(({ index, from, to }) => {
        const i = bins[index];
        return {
          from,
          to,
          title: `Standard deviation ${plain(data.sd[i])}`,
          rows: [["error (RMSE)", plain(data.rmse[i])], ["if calibrated", `${plain((data.lower || [])[i])} to ${plain((data.upper || [])[i])}${outside(i) ? " (outside)" : ""}`], ["predictions", count((data.count || [])[i])]],
        };
      }));
      return p.svg;
    },
    table: () => ({
      head: ["standard deviation", "RMSE", "range from", "range to", "predictions"],
      rows: bins.map((i) => [plain(data.sd[i]), plain(data.rmse[i]), plain((data.lower || [])[i]), plain((data.upper || [])[i]), count((data.count || [])[i])]),
    }),
  });
}

function uncertaintyBySd(block) {
  const data = block.uncertainty;
  const bins = range(((data || {}).sd || []).length).filter((i) => isNumber(data.aleatoric[i]) && isNumber(data.epistemic[i]));
  if (bins.length === 0) return null;
  const alone = oneDraw(block);
  const sum = (i) => data.aleatoric[i] + data.epistemic[i];
  return figure({
    id: "uncertainty-sd",
    title: "Where the variance comes from",
    read: `Predictions from the surest tenth (top) to the least sure. Aleatoric variance is noise` +
      (alone ? `. ${ONE_DRAW}` : `; epistemic variance is disagreement among the draws, which more data would shrink. Epistemic share over all: ${percent((block.scalars || {}).epistemic_share)}.`),
    series: [
      { key: "aleatoric", label: "aleatoric", colour: "c-aleatoric" },
      ...(alone ? [] : [{ key: "epistemic", label: "epistemic", colour: "c-epistemic" }]),
    ],
    draw: (width) => bars(width, {
      title: "Variance in bins of the standard deviation",
      step: 25,
      domain: [0, largest(bins.map(sum)) || 1],
      rows: bins.map((i) => ({
        name: `sd ${plain(data.sd[i])}`,
        title: `Mean standard deviation ${plain(data.sd[i])}: ${count(data.count[i])} predictions`,
        value: plain(sum(i)),
        parts: [
          { series: "aleatoric", colour: "c-aleatoric", from: 0, to: data.aleatoric[i], label: "aleatoric variance", text: plain(data.aleatoric[i]) },
          ...(alone ? [] : [{ series: "epistemic", colour: "c-epistemic", from: data.aleatoric[i], to: sum(i), label: "epistemic variance", text: plain(data.epistemic[i]) }]),
        ],
      })),
    }),
    table: () => ({
      head: ["standard deviation", "aleatoric variance", ...(alone ? [] : ["epistemic variance"]), "predictions"],
      rows: bins.map((i) => [plain(data.sd[i]), plain(data.aleatoric[i]), ...(alone ? [] : [plain(data.epistemic[i])]), count(data.count[i])]),
    }),
  });
}

function fitFigure(block) {
  const data = block.fit;
  if (!data || !data.x || data.x.length === 0) return null;
  const alone = oneDraw(block);
  const order = range(data.x.length).filter((i) => isNumber(data.x[i]) && isNumber(data.mean[i])).sort((a, b) => data.x[a] - data.x[b]);
  const by = (column) => order.map((i) => (data[column] || [])[i]);
  const places = by("x");
  const level = percent(isNumber(data.level) ? data.level : 0.9, 0);
  const shown = range(order.length).filter((i, at, all) => at % Math.ceil(all.length / 60) === 0);
  return figure({
    id: "fit",
    title: "The fit with its intervals",
    wide: true,
    read: `The mean and the central ${level} interval of the prediction${alone ? "" : " (pale), with the part of it that comes from not knowing the function (strong)"}, and the observed values.${alone ? ` ${ONE_DRAW}` : ""}`,
    series: [
      { key: "interval", label: `${level} interval`, colour: "c-main", kind: "area" },
      ...(alone ? [] : [{ key: "epistemic", label: "epistemic part", colour: "c-epistemic", kind: "area" }]),
      { key: "mean", label: "mean", colour: "c-main", kind: "line" },
      { key: "observed", label: "observed", colour: "c-ink", kind: "dot" },
    ],
    draw(width) {
      const p = plot(width, {
        title: "Prediction and observations against the input",
        height: Math.round(Math.min(400, Math.max(260, width * 0.42))),
        x: { domain: domain(places, { air: 0.01 }), label: "input" },
        y: { domain: domain([...by("lower"), ...by("upper"), ...by("y")]), label: "target" },
      });
      p.layer("interval", "c-main").append(p.area(places, by("lower"), by("upper")));
      if (!alone) p.layer("epistemic", "c-epistemic").append(p.area(places, by("epistemic_lower"), by("epistemic_upper"), { class: "band strong" }));
      const dots = p.layer("observed", "c-ink");
      by("y").forEach((value, i) => isNumber(value) && dots.append(p.dot(places[i], value, 2.2, { "fill-opacity": 0.6 })));
      p.layer("mean", "c-main").append(p.line(by("mean").map((value, i) => [places[i], value]), { class: "line thick" }));
      p.columns(between(shown.map((i) => places[i]), domain(places, { air: 0.01 })).map(({ index, from, to }) => {
        const i = shown[index];
        return {
          from,
          to,
          title: `Input ${plain(places[i])}`,
          rows: [["mean", plain(by("mean")[i])], [`${level} interval`, `${plain(by("lower")[i])} to ${plain(by("upper")[i])}`], ["observed", plain(by("y")[i])]],
        };
      }));
      return p.svg;
    },
    table: () => ({
      head: ["input", "observed", "mean", "from", "to"],
      rows: shown.map((i) => ["x", "y", "mean", "lower", "upper"].map((column) => plain(by(column)[i]))),
      note: thinned(shown.length, order.length),
    }),
  });
}
