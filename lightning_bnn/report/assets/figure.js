// A figure on the page: its heading, its switches, the drawing, the legend, one sentence on how to
// read it, and the same numbers as a table. It draws itself again when its width changes.

const hidden = new Map(); // figure → the series that are switched off; it outlives a redraw
const drawn = new Set();

function dataTable({ head, rows, note }) {
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the figure's numbers" },
    element(
      "table",
      { class: "data" },
      element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((text) => element("td", {}, text))))),
    ),
    note && element("p", { class: "small" }, note),
  );
}

// options: [[key, label], …]; a row of buttons of which one is pressed
function switcher(label, options, chosen, choose) {
  const buttons = options.map(([key, text]) =>
    element("button", { type: "button", "data-key": key, "aria-pressed": String(key === chosen), click: () => {
      buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.key === key)));
      choose(key);
    } }, text),
  );
  return element("div", { class: "switch controls", role: "group", "aria-label": label }, buttons);
}

function figure({ id, title, read, note, series = [], off = [], draw, table, controls = [], wide = false }) {
  if (!hidden.has(id)) hidden.set(id, new Set(off));
  const gone = hidden.get(id);
  const canvas = element("div", { class: "canvas" });
  const holder = element("div", { class: "holder" });
  const details = table && element("details", { class: "controls" }, element("summary", {}, "Data"), holder);

  const apply = () => {
    for (const layer of canvas.querySelectorAll("[data-series]")) {
      layer.classList.toggle("gone", gone.has(layer.dataset.series));
    }
  };
  const fillTable = () => {
    if (details && details.open) holder.replaceChildren(dataTable(table()));
  };
  const legend =
    series.length > 0 &&
    element("ul", { class: "legend" }, series.map(({ key, label, colour, kind = "fill", fixed: always }) => {
      const swatch = element("span", { class: `swatch ${kind} ${colour}`, "aria-hidden": "true" });
      if (always) return element("li", {}, element("span", { class: "entry" }, swatch, label));
      const button = element("button", { type: "button", class: "entry", "aria-pressed": String(!gone.has(key)), "data-key": key, click: () => {
        if (!gone.delete(key)) gone.add(key);
        button.setAttribute("aria-pressed", String(!gone.has(key)));
        apply();
      } }, swatch, element("span", { class: "label", title: label }, shorten(String(label), 40)));
      return element("li", {}, button);
    }));

  const card = element(
    "figure",
    { id, class: wide ? "card wide" : "card" },
    element("figcaption", {}, element("h4", {}, title), ...controls),
    canvas,
    legend,
    element("p", { class: "read" }, read),
    note && element("p", { class: "read" }, note),
    details,
  );
  let width = 0;
  card.redraw = function draws(force = true, given = null) {
    const now = given ? given * (wide ? 2 : 1) : Math.floor(canvas.clientWidth);
    if (now < 40 || (!force && now === width)) return;
    width = now;
    canvas.replaceChildren(draw(now));
    apply();
    fillTable();
  };
  if (details) details.addEventListener("toggle", fillTable);
  drawn.add(card);
  return card;
}

// A page of paper is narrower than the window: `given` is the width of half of it.
function redrawAll(force, given = null) {
  for (const card of drawn) {
    if (card.isConnected) attempt(card.redraw, force, given);
    else drawn.delete(card);
  }
}

// A part of the numbers that is missing or malformed costs its own figure, not the page.
function attempt(build, ...given) {
  try {
    return build(...given);
  } catch (error) {
    console.error(`${build.name}: ${error.message}`);
    return null;
  }
}

function section(id, title, lead, figures) {
  const kept = figures.flat().filter(Boolean);
  if (kept.length === 0) return null;
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    element("h3", { id: `${id}-title` }, title),
    element("p", { class: "lead" }, lead),
    element("div", { class: "cards" }, kept),
  );
}
