// One tooltip for the whole page. A mark says what it shows with `explain`; mouse, touch and
// keyboard then find it. In a figure one mark is in the tab order and the arrow keys go on.

const explained = new WeakMap();
let bubble = null;

// rows: [label, value] pairs, the value already as text. A mark of a drawing gets its words as a
// label too; text that explains itself (`told`) only becomes reachable.
function explain(node, title, rows, { focus = false, told = false } = {}) {
  explained.set(node, { title, rows });
  node.setAttribute("data-tip", "");
  if (focus) node.setAttribute("tabindex", "-1");
  if (focus && !told) {
    node.setAttribute("role", "img");
    const words = rows.map(([label, value]) => (label ? `${label} ${value}` : value));
    node.setAttribute("aria-label", [title, ...words].filter(Boolean).join("; "));
  }
  return node;
}

function showTip(node, x, y) {
  const { title, rows } = explained.get(node);
  bubble.replaceChildren(
    ...(title ? [element("strong", {}, title)] : []),
    element(
      "dl",
      {},
      rows.map(([label, value]) => [element("dt", {}, label), element("dd", {}, value)]),
    ),
  );
  bubble.hidden = false;
  const box = bubble.getBoundingClientRect();
  const wide = document.documentElement.clientWidth;
  const left = x + 14 + box.width > wide - 8 ? x - 14 - box.width : x + 14;
  const top = y - box.height - 12 < 8 ? y + 16 : y - box.height - 12;
  bubble.style.left = `${Math.min(Math.max(8, left), Math.max(8, wide - box.width - 8))}px`;
  bubble.style.top = `${top}px`;
}

const hideTip = () => {
  bubble.hidden = true;
};

const tipOf = (target) => (target instanceof Element ? target.closest("[data-tip]") : null);

function showAt(node) {
  const box = node.getBoundingClientRect();
  showTip(node, box.left + box.width / 2, box.top + Math.min(24, box.height / 2));
}

function startTips() {
  bubble = document.getElementById("tooltip");
  const follow = (event) => {
    const node = tipOf(event.target);
    if (node && explained.has(node)) showTip(node, event.clientX, event.clientY);
    else hideTip();
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  // a finger that is lifted leaves too, but what it pointed at stays told
  document.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hideTip());
  document.addEventListener("focusin", (event) => {
    const node = tipOf(event.target);
    if (!node || !node.matches(":focus-visible")) return;
    showAt(node);
  });
  document.addEventListener("focusout", hideTip);
  // a mark that took the focus may have scrolled into view: its tooltip goes with it
  const scrolled = () => {
    const node = tipOf(document.activeElement);
    if (node && node.matches(":focus-visible") && !bubble.hidden) showAt(node);
    else hideTip();
  };
  window.addEventListener("scroll", scrolled, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
}

// The arrow keys walk through the marks of one figure.
function walkable(svg) {
  const marks = [...svg.querySelectorAll('[data-tip][tabindex="-1"]')];
  if (marks.length === 0) return;
  marks[0].setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const at = marks.indexOf(document.activeElement);
    let next = null;
    if (event.key in steps) next = at + steps[event.key];
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = marks.length - 1;
    if (next === null || at < 0) return;
    event.preventDefault();
    const mark = marks[Math.min(marks.length - 1, Math.max(0, next))];
    marks.forEach((each) => each.setAttribute("tabindex", each === mark ? "0" : "-1"));
    mark.focus();
  });
}
