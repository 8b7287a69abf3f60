// Put the page together, and keep the chosen model, the theme and the width up to date.

const report = JSON.parse(document.getElementById("numbers").textContent);
report.models = (report.models || []).filter(Boolean);
for (const block of report.models) block.name = String(block.name);

const byId = (id) => document.getElementById(id);

function show(index, { scroll = false } = {}) {
  state.model = index;
  const block = report.models[index];
  hideTip();
  for (const tab of byId("tabs").children) {
    const on = Number(tab.dataset.index) === index;
    tab.setAttribute("aria-selected", String(on));
    tab.setAttribute("tabindex", on ? "0" : "-1");
  }
  byId("figures-title").textContent = report.models.length > 1 ? `Figures of ${block.name}` : "Figures";
  const context = contextOf(report, index);
  byId("figures").replaceChildren(...(block.sections || []).map((part) => attempt(section, part, context)).filter(Boolean));
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
    element("button", { type: "button", role: "tab", "aria-controls": "figures", "data-index": index, title: block.name, click: () => show(index) },
      modelSwatch(index), element("span", { class: "label" }, shorten(block.name, 24)))));
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show((state.model + step + report.models.length) % report.models.length);
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
byId("models").append(...report.models.map((block) => modelCard(block, report, (index) => show(index, { scroll: true }))));
const comparison = attempt(comparisonTable, report);
if (comparison) byId("comparison-slot").append(comparison);
for (const part of document.querySelectorAll("[data-task]")) part.hidden = part.dataset.task !== report.task;
const shown = new Set(report.models.flatMap((block) => (block.sections || []).map(({ id }) => id)));
for (const part of document.querySelectorAll("[data-section]")) part.hidden = !shown.has(part.dataset.section);
byId("terms").prepend(...(report.method || []).flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]));
tabs();
theme();
byId("print").addEventListener("click", () => window.print());
byId("download").addEventListener("click", download);
if (report.models.length > 0) show(0);
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
