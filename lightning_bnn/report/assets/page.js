// Put the page together, and keep the chosen model, the theme and the width up to date.

const report = JSON.parse(document.getElementById("numbers").textContent);
report.models = (report.models || []).filter(Boolean);
for (const block of report.models) block.name = String(block.name);

const byId = (id) => document.getElementById(id);

function sections(block) {
  const build = (...builders) => builders.map((each) => attempt(each, block, report));
  if (report.task === "numbers") {
    return [
      section("calibration", "Calibration", "Do the stated distributions hold what they promise?", build(pitHistogram, coverageFigure)),
      section("errors", "Sharpness and errors", "How large are the errors, and does the stated spread foresee them?", build(errorAgainstSd, uncertaintyBySd, fitFigure)),
      attempt(pruningSection, block, report),
      attempt(shiftSection, block, report),
    ];
  }
  return [
    section("calibration", "Calibration", "Does a stated probability come true as often as it says?", build(reliability, confidenceHistogram, temperatureFigure, nllParts)),
    section("errors", "Sharpness and errors", "How much do the predictions tell, and can the wrong ones be found beforehand?", build(riskCoverage, entropyAccuracy, nllDecomposition, brierDecomposition)),
    section("uncertainty", "Uncertainty", "Where the doubt lies, and what kind of doubt it is.", build(perClass, confusion)),
    attempt(pruningSection, block, report),
    attempt(shiftSection, block, report),
    section("examples", "Examples", "What the model found hardest.", build(uncertainExamples)),
  ];
}

function choose(index, { scroll = false } = {}) {
  state.model = index;
  const block = report.models[index];
  hideTip();
  for (const tab of byId("tabs").children) {
    const on = Number(tab.dataset.index) === index;
    tab.setAttribute("aria-selected", String(on));
    tab.setAttribute("tabindex", on ? "0" : "-1");
  }
  byId("figures-title").textContent = report.models.length > 1 ? `Figures of ${block.name}` : "Figures";
  byId("figures").replaceChildren(...sections(block).filter(Boolean));
  redrawAll(true);
  if (scroll) byId("figures-title").scrollIntoView();
}

function tabs() {
  const bar = byId("tabs");
  if (report.models.length < 2) {
    bar.hidden = true;
    return;
  }
  bar.append(...report.models.map((block, index) =>
    element("button", { type: "button", role: "tab", "aria-controls": "figures", "data-index": index, title: block.name, click: () => choose(index) },
      modelSwatch(index), element("span", { class: "label" }, shorten(block.name, 24)))));
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose((state.model + step + report.models.length) % report.models.length);
    bar.children[state.model].focus();
  });
}

function theme() {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const button = byId("theme");
  // a browser may forbid to keep anything: then the choice lasts as long as the page
  const kept = (use) => {
    try {
      return use(window.localStorage);
    } catch {
      return null;
    }
  };
  const before = kept((store) => store.getItem("lightning_bnn theme"));
  if (before === "dark" || before === "light") root.dataset.theme = before;
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept((store) => store.setItem("lightning_bnn theme", root.dataset.theme));
    name();
  });
  system.addEventListener("change", name);
  name();
}

function download() {
  const blob = new Blob([JSON.stringify(report, null, 1)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(blob), download: "report.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

startTips();
byId("title").textContent = report.title || "Calibration report";
byId("data-line").textContent = dataLine(report);
byId("library").textContent = report.library ? `Made with ${report.library}.` : "";
byId("summary").append(...summaryList(report));
byId("models").append(...report.models.map((block) => modelCard(block, report, (index) => choose(index, { scroll: true }))));
const comparison = attempt(comparisonTable, report);
if (comparison) byId("comparison-slot").append(comparison);
for (const part of document.querySelectorAll("[data-task]")) part.hidden = part.dataset.task !== report.task;
const shifted = report.models.some((block) => Object.keys(block.shift || {}).length > 0);
for (const part of document.querySelectorAll("[data-shift]")) part.hidden = !shifted;
const pruned = report.models.some((block) => resultsOf(block).length > 0);
for (const part of document.querySelectorAll("[data-pruning]")) part.hidden = !pruned;
tabs();
theme();
byId("print").addEventListener("click", () => window.print());
byId("download").addEventListener("click", download);
if (report.models.length > 0) choose(0);
else byId("figures-title").hidden = true;
let onPaper = false;
window.addEventListener("beforeprint", () => {
  onPaper = true;
  redrawAll(true, 360);
});
window.addEventListener("afterprint", () => {
  onPaper = false;
  redrawAll(true);
});
new ResizeObserver(() => onPaper || redrawAll(false)).observe(byId("figures"));
