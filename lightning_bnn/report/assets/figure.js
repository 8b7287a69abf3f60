// A figure on the page: its heading, its switch, the drawing, the legend, one sentence on how to
// read it, and the same numbers as a table. It draws itself again when its width changes.

const hidden = new Map(); // figure → the series that are switched off; it outlives a redraw
const drawn = new Set();
const state = { model: 0, views: new Map() };

// Of a figure with views the one that is chosen, or the first; the others say how they differ from it.
function resolved(figure) {
  if (figure.kind !== "views") return figure;
  const chosen = figure.views.find(([label]) => label === state.views.get(figure.switch));
  return { ...figure.views[0][1], ...(chosen ? chosen[1] : {}) };
}

// What a figure of one model knows of the others: their figures of the same id.
function contextOf(report, index) {
  const of = (block) => (block.sections || []).flatMap((part) => part.figures).map(resolved).flatMap((each) => (each.kind === "panels" ? each.panels : [each]));
  const figures = new Map();
  return {
    index,
    name: (at) => report.models[at].name,
    others: (id) => {
      if (!figures.has(id)) {
        figures.set(id, report.models.map((block, at) => ({ index: at, figure: at === index ? null : of(block).find((each) => each.id === id) })).filter(({ figure }) => figure));
      }
      return figures.get(id);
    },
  };
}

// A row of buttons of which one is pressed; of many options a list to choose from.
function switcher(name, options, choose) {
  if (options.length > 3) {
    const list = element("select", { class: "controls", "aria-label": capital(name), change: () => choose(list.value) },
      options.map((text) => element("option", { value: text, selected: text === state.views.get(name) }, shorten(text, 40))));
    return list;
  }
  const chosen = options.includes(state.views.get(name)) ? state.views.get(name) : options[0];
  const buttons = options.map((text) =>
    element("button", { type: "button", "aria-pressed": String(text === chosen), click: () => {
      buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent === text)));
      choose(text);
    } }, text),
  );
  return element("div", { class: "switch controls", role: "group", "aria-label": capital(name) }, buttons);
}

function drawing(figure, width, context) {
  if (figure.kind === "panels") {
    const columns = Math.min(figure.panels.length, width >= 560 ? 2 : 1);
    const each = Math.floor((width - 16 * (columns - 1)) / columns);
    const made = element("div", { class: "multiples" }, figure.panels.map((panel) => plot(each, panel, context)));
    made.style.setProperty("--columns", String(columns));
    return made;
  }
  return { plot, bars, heat }[figure.kind](width, figure, context);
}

function legend(figure, context, gone, apply) {
  const plots = figure.kind === "panels" ? figure.panels : figure.kind === "plot" ? [figure] : [];
  const entries = figure.kind === "bars" ? legendOfBars(figure) : legendOf(plots.flatMap((each) => marksOf(each, context)));
  if (entries.length === 0) return null;
  return element("ul", { class: "legend" }, entries.map(({ key, label, colour, kind }) => {
    const swatch = element("span", { class: `swatch ${kind} ${colour}`, "aria-hidden": "true" });
    const button = element("button", { type: "button", class: "entry", "aria-pressed": String(!gone.has(key)), "data-key": key, click: () => {
      if (!gone.delete(key)) gone.add(key);
      button.setAttribute("aria-pressed", String(!gone.has(key)));
      apply();
    } }, swatch, element("span", { class: "label", title: label }, shorten(String(label), 40)));
    return element("li", {}, button);
  }));
}

function figureCard(figure, context, hoisted) {
  const { id } = figure;
  if (!hidden.has(id)) hidden.set(id, new Set(["others"]));
  const gone = hidden.get(id);
  const choice = figure.kind === "views" && figure.views.length > 1 && !hoisted;
  const caption = element("figcaption", {}, element("h4", {}, figure.title),
    choice && switcher(figure.switch, figure.views.map(([label]) => label), (label) => choose(figure.switch, label)));
  const card = element("figure", { id, class: figure.wide ? "card wide" : "card" }, caption);
  let [width, open, canvas] = [0, false, null];

  const apply = () => {
    for (const layer of card.querySelectorAll(".canvas [data-series]")) layer.classList.toggle("gone", gone.has(layer.dataset.series));
  };
  const details = (summary, table) => {
    const holder = element("div", { class: "holder" });
    const fill = () => holder.children.length === 0 && holder.append(dataTable(table));
    const made = element("details", { class: "controls", open, toggle: () => {
      open = made.open;
      if (open) fill();
    } }, element("summary", {}, summary), holder);
    if (open) fill();
    return made;
  };
  card.refresh = () => {
    const now = resolved(figure);
    const drawable = ["plot", "bars", "heat", "panels"].includes(now.kind);
    canvas = drawable ? element("div", { class: "canvas" }) : null;
    while (caption.nextSibling) caption.nextSibling.remove(); // the switch in the caption keeps the focus
    card.append(...[
      now.scores && dataTable(now.scores, "scores"),
      canvas,
      drawable && legend(now, context, gone, apply),
      now.kind === "pictures" && pictures(now),
      now.kind === "tables" && dataTable(now.table),
      now.read && element("p", { class: "read" }, now.read),
      now.note && element("p", { class: "read" }, now.note),
      now.kind === "tables" ? now.further && details(now.more, now.further) : now.table && details("Data", now.table),
    ].filter(Boolean));
    width = 0;
  };
  card.redraw = (force = true, given = null) => {
    if (!canvas) return;
    const now = given ? given * (figure.wide ? 2 : 1) : Math.floor(canvas.clientWidth);
    if (now < 40 || (!force && now === width)) return;
    width = now;
    canvas.replaceChildren(drawing(resolved(figure), now, context));
    apply();
  };
  card.changes = figure.switch;
  card.refresh();
  drawn.add(card);
  return card;
}

// Choose a view: all figures of the same switch follow.
function choose(name, label) {
  state.views.set(name, label);
  for (const card of drawn) {
    if (card.isConnected && card.changes === name) {
      card.refresh();
      card.redraw();
    }
  }
}

// A page of paper is narrower than the window: `given` is the width of half of it.
function redrawAll(force, given = null) {
  for (const card of drawn) {
    if (card.isConnected) attempt(card.redraw, force, given);
    else drawn.delete(card);
  }
}

// A part that is malformed costs its own figure, not the page.
function attempt(build, ...given) {
  try {
    return build(...given);
  } catch (error) {
    console.error(`${build.name}: ${error.message}`);
    return null;
  }
}

// A switch that all figures of a section share stands above them.
function section({ id, title, lead, figures }, context) {
  const first = figures[0];
  const hoisted = figures.length > 0 && figures.every((each) => each.kind === "views" && each.switch === first.switch);
  const options = hoisted ? [...new Set(figures.flatMap((each) => each.views.map(([label]) => label)))] : [];
  const cards = figures.map((each) => attempt(figureCard, each, context, hoisted)).filter(Boolean);
  return element("section", { id, "aria-labelledby": `${id}-title` },
    element("h3", { id: `${id}-title` }, title),
    lead && element("p", { class: "lead" }, lead),
    options.length > 1 && switcher(first.switch, options, (label) => choose(first.switch, label)),
    cards.length > 0 && element("div", { class: "cards" }, cards));
}
