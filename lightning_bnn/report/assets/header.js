// The top of the page: title, what was looked at, the findings in words, a verdict for each model.

const modelColour = (index) => `m${index % 8}`;
const modelSwatch = (index) => element("span", { class: `swatch line d${dashOf(index)} ${modelColour(index)}`, "aria-hidden": "true" });

const MARKS = { good: ["\u2713", "Good"], warn: ["!", "Warning"], bad: ["\u2715", "Problem"], note: ["i", "Note"] };

const VERDICTS = {
  calibrated: "good",
  "over-confident": "bad",
  "under-confident": "warn",
  miscalibrated: "bad",
  biased: "bad",
  "nothing found": "note",
};

function dataLine(report) {
  const data = report.data || {};
  const parts = [];
  if (data.source) parts.push(`${data.source} data`);
  if (isNumber(data.examples)) parts.push(`${count(data.examples)} examples`);
  if (isNumber(data.rows) && data.rows !== data.examples) parts.push(`${count(data.rows)} predictions`);
  if (isNumber(data.classes)) parts.push(`${count(data.classes)} classes`);
  if (report.models.length > 1) parts.push(`${report.models.length} models`);
  const draws = numbersOf(report.models.map((block) => block.draws));
  if (draws.length > 0) {
    const [low, high] = [smallest(draws), largest(draws)];
    parts.push(low === high ? `${count(high)} ${high === 1 ? "draw" : "draws"}${report.models.length > 1 ? " each" : ""}` : `${count(low)} to ${count(high)} draws`);
  }
  if (isNumber(data.sampled)) parts.push(`intervals and curves from a sample of ${count(data.sampled)}`);
  const made = /^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)/.exec(report.made || "");
  if (made) parts.push(`made ${made[1]} ${made[2]} UTC`);
  return parts.join(" \u00b7 ");
}

function summaryList(report) {
  const several = report.models.length > 1;
  return (report.summary || []).map(({ model, level, text }) => {
    const kind = Object.hasOwn(MARKS, level) ? level : "note";
    const [mark, word] = MARKS[kind];
    return element("li", { class: `finding ${kind}` },
      element("span", { class: "mark", "aria-hidden": "true" }, mark),
      element("span", {},
        element("span", { class: "unseen" }, `${word}: `),
        several && model ? element("strong", {}, `${model}: `) : null,
        String(text)));
  });
}

// A target that was called impossible makes the NLL infinite, which JSON cannot say.
const nllOf = (block, value, text) => (!isNumber(value) && ((block || {}).invalid || {}).impossible > 0 ? "\u221e" : text);

function badge(verdict, task) {
  if (!verdict || !verdict.label) return null;
  const level = lookup(VERDICTS, verdict.label, "note");
  const node = element("span", { class: `badge ${level}` }, `${MARKS[level][0]} ${verdict.label}`);
  const shown = isNumber(verdict.p_value) && verdict.p_value < 1e-4 ? "below 0.0001" : plain(verdict.p_value);
  const tail = task === "regression" ? "p-value" : "p-value (tail corrected for skewness)";
  explain(node, `Verdict: ${verdict.label}`, [["z", fixed(verdict.z, 2)], [tail, shown]], { focus: true, told: true });
  node.setAttribute("tabindex", "0");
  return node;
}

function modelCard(block, report, choose) {
  const scalars = block.scalars || {};
  const nll = nllOf(block, scalars.nll, plain(scalars.nll));
  const kinds = report.task === "regression"
    ? [["RMSE", plain(scalars.rmse)], ["90% interval", percent(scalars.coverage_90)], ["NLL", nll]]
    : [["accuracy", percent(scalars.accuracy)], ["ECE", plain(scalars.ece)], ["NLL", nll]];
  const index = report.models.indexOf(block);
  return element("li", { class: "model" },
    element("div", { class: "line-up" },
      element("h3", { title: block.name }, report.models.length > 1 && modelSwatch(index), shorten(block.name, 52)),
      badge(block.verdict, report.task)),
    element("dl", { class: "key" }, kinds.map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value)))),
    element("p", { class: "small" },
      isNumber(block.draws) ? `${count(block.draws)} ${block.draws === 1 ? "draw" : "draws"}` : "",
      report.models.length > 1 && element("button", { type: "button", class: "plain controls", click: () => choose(index) }, "show figures", element("span", { class: "unseen" }, ` of ${block.name}`))));
}
