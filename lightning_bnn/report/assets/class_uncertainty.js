// Figures of a classifier: what its loss is made of, and where its uncertainty comes from.

function sumFigure(id, title, read, steps, total) {
  if (!isNumber(total.value) || !steps.every(({ value }) => isNumber(value))) return null;
  return figure({
    id,
    title,
    read,
    draw: (width) => waterfall(width, { title, steps, total }),
    table: () => ({
      head: ["part", "value"],
      rows: [...steps.map(({ name, value, sign = 1 }) => [name, plain(settled(sign * value))]), [total.name, plain(total.value)]],
    }),
  });
}

function nllDecomposition(block, report) {
  const parts = block.nll_decomposition;
  if (!parts) return null;
  const two = report.data && report.data.classes === 2; // then nothing is left to guess
  return sumFigure("nll-decomposition", "What the NLL is made of",
    "Uncertainty is the score of always stating the accuracy. Resolution is what telling sure from unsure predictions gains. Reliability is what miscalibration costs: it would be zero if every confidence were true." +
      (two ? "" : " Which class is the cost of guessing among the rest when the top class is wrong."),
    [
      { name: "uncertainty", value: parts.uncertainty, series: "uncertainty", colour: "c-muted" },
      { name: "resolution", value: parts.resolution, sign: -1, series: "resolution", colour: "c-right" },
      { name: "reliability", value: parts.reliability, series: "reliability", colour: "c-wrong" },
      ...(two ? [] : [{ name: "which class", value: parts.which_class, series: "which", colour: "c-epistemic" }]),
    ],
    { name: "NLL", value: (block.scalars || {}).nll });
}

function brierDecomposition(block) {
  const parts = block.brier_decomposition;
  if (!parts) return null;
  return sumFigure("brier-decomposition", "What the Brier score is made of",
    "The same split for the squared error of the probabilities, summed over all classes: the spread of the classes themselves, less what the predictions tell, plus what miscalibration costs.",
    [
      { name: "uncertainty", value: parts.uncertainty, series: "uncertainty", colour: "c-muted" },
      { name: "resolution", value: parts.resolution, sign: -1, series: "resolution", colour: "c-right" },
      { name: "reliability", value: parts.reliability, series: "reliability", colour: "c-wrong" },
    ],
    { name: "Brier", value: (block.scalars || {}).brier });
}

function nllParts(block) {
  const parts = block.nll_parts;
  if (!parts) return null;
  const alone = oneDraw(block);
  return sumFigure("nll-parts", "Loss that was foreseen, and surprise",
    `The model expects a loss equal to its entropy${alone ? "" : ": an aleatoric part (noise in the data) and an epistemic part (draws that disagree)"}.${alone ? ` ${ONE_DRAW}` : ""} The excess is surprise on top: near zero for a calibrated model, positive for an over-confident one.`,
    [
      { name: alone ? "entropy" : "aleatoric", value: parts.aleatoric, series: "aleatoric", colour: "c-aleatoric" },
      ...(alone ? [] : [{ name: "epistemic", value: parts.epistemic, series: "epistemic", colour: "c-epistemic" }]),
      { name: "excess", value: parts.excess, series: "excess", colour: "c-wrong" },
    ],
    { name: "NLL", value: (block.scalars || {}).nll });
}

const MOST_CLASSES = 24;

function perClass(block, report) {
  const all = (block.per_class || []).filter((each) => isNumber(each.aleatoric) && isNumber(each.epistemic));
  if (all.length === 0) return null;
  const alone = oneDraw(block);
  const sum = (each) => each.aleatoric + each.epistemic;
  const shown = [...all].sort((a, b) => sum(b) - sum(a)).slice(0, MOST_CLASSES).sort((a, b) => a.class - b.class);
  return figure({
    id: "per-class",
    title: "Uncertainty by true class",
    read: "Aleatoric uncertainty (expected entropy, in nats) is noise that more data of the same kind would leave" +
      (alone ? `. ${ONE_DRAW}` : "; epistemic uncertainty (mutual information) is disagreement among the draws, which more data would shrink."),
    note: shown.length < (block.per_class || []).length && `${shown.length} of ${block.per_class.length} classes: those with the largest uncertainty. The table has all.`,
    series: [
      { key: "aleatoric", label: "aleatoric", colour: "c-aleatoric" },
      ...(alone ? [] : [{ key: "epistemic", label: "epistemic", colour: "c-epistemic" }]),
    ],
    draw: (width) => bars(width, {
      title: alone ? "Uncertainty of each class" : "Aleatoric and epistemic uncertainty of each class",
      step: shown.length > 12 ? 24 : 32,
      domain: [0, largest(shown.map(sum)) || 1],
      rows: shown.map((each) => ({
        name: className(report, each.class),
        title: `Class ${className(report, each.class)}: ${count(each.count)} examples, accuracy ${percent(each.accuracy)}`,
        value: fixed(sum(each), 3),
        parts: [
          { series: "aleatoric", colour: "c-aleatoric", from: 0, to: each.aleatoric, label: "aleatoric", text: plain(each.aleatoric) },
          ...(alone ? [] : [{ series: "epistemic", colour: "c-epistemic", from: each.aleatoric, to: sum(each), label: "epistemic", text: plain(each.epistemic) }]),
        ],
      })),
    }),
    table: () => ({
      head: ["class", "examples", "accuracy", "confidence", "aleatoric", ...(alone ? [] : ["epistemic"])],
      rows: block.per_class.map((each) => [className(report, each.class), count(each.count), percent(each.accuracy), percent(each.confidence), plain(each.aleatoric), ...(alone ? [] : [plain(each.epistemic)])]),
    }),
  });
}

function confusion(block, report) {
  const data = block.confusion;
  if (!data || !data.classes || data.classes.length === 0 || !data.matrix) return null;
  const names = data.classes.map((index) => className(report, index));
  const pairs = (data.pairs || []).filter((pair) => pair.count >= 2).slice(0, 3)
    .map((pair) => `${className(report, pair.target)} taken for ${className(report, pair.predicted)} (${count(pair.count)})`);
  const inside = numbersOf(data.matrix.flat()).reduce((sum, value) => sum + value, 0);
  const notes = [
    inside < data.count && `${count(inside)} of them fall into the ${names.length} classes shown.`,
    pairs.length > 0 && `Most frequent: ${pairs.join(", ")}.`,
  ].filter(Boolean);
  return figure({
    id: "confusion",
    title: "Confusion of the most uncertain",
    read: `The ${percent(data.share, 0)} of the predictions with the largest entropy (${count(data.count)}): rows are true classes, columns predicted ones. Blue is right, orange is wrong, stronger is more.`,
    note: notes.join(" "),
    draw(width) {
      const side = 18; // for the name of the rows
      const left = side + nameWidth(width - side, names);
      const cell = Math.min(38, (width - left - 6) / names.length);
      const letters = Math.floor(cell / 7);
      const level = names.every((name) => name.length <= Math.max(1, letters));
      const top = level ? 22 : Math.min(84, 12 + names.reduce((most, name) => Math.max(most, name.length), 0) * 6.2);
      const height = top + cell * names.length + 30;
      const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Confusion matrix of the most uncertain predictions", class: "heat" });
      const most = Math.max(1, largest(data.matrix.flat()));
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
        shape("text", { class: "name", x: left + (cell * names.length) / 2, y: height - 8, "text-anchor": "middle" }, "predicted class"),
        shape("text", { class: "name", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, "true class"),
      );
      names.forEach((target, row) => names.forEach((predicted, column) => {
        const value = data.matrix[row][column];
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
    },
    table: () => ({ head: ["true class", ...names], rows: names.map((name, row) => [name, ...data.matrix[row].map(count)]) }),
  });
}

function uncertainExamples(block, report) {
  const list = (block.uncertain || []).slice(0, 24);
  if (list.length === 0) return null;
  const items = list.map((each) => {
    const right = each.target === each.predicted;
    const [target, predicted] = [className(report, each.target), className(report, each.predicted)];
    const item = element("li", { class: `example ${right ? "right" : "wrong"}` },
      // only pictures inside of the page: the policy refuses others, and so do we
      typeof each.image === "string" && each.image.startsWith("data:image/")
        ? element("img", { src: each.image, alt: `Example ${each.example}, true class ${target}` })
        : element("span", { class: "blank" }, `#${each.example}`),
      element("span", { class: "outcome" }, `${right ? "\u2713" : "\u2717"} `, element("strong", {}, shorten(predicted, 14)), right ? "" : element("span", {}, ` not ${shorten(target, 14)}`)),
      element("span", { class: "small" }, percent(each.confidence, 0)),
    );
    return explain(item, `Example ${each.example}`, [
      ["true class", target], ["predicted", predicted], ["confidence", percent(each.confidence)],
      ["entropy", plain(each.entropy)], ...(oneDraw(block) ? [] : [["epistemic", plain(each.epistemic)]]),
    ]);
  });
  return element("figure", { id: "examples-figure", class: "card wide" },
    element("figcaption", {}, element("h4", {}, "The most uncertain examples")),
    element("ul", { class: "examples" }, items),
    element("p", { class: "read" }, "The examples with the largest entropy: the predicted class, the true one where they differ, and the confidence. Look for labels that are wrong, pictures that nobody could read, and kinds that the training data lacks."));
}
