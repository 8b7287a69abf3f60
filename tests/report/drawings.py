"""What a figure of the page says, read back from its marks through the labels of its own axes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

READ = """
const numbers = (node, ...names) => names.map(name => Number(node.getAttribute(name)));
const mark = node => {
  if (node.tagName === 'circle') return ['circle', numbers(node, 'cx', 'cy')];
  if (node.tagName === 'line') return ['line', numbers(node, 'x1', 'y1', 'x2', 'y2')];
  if (node.tagName === 'rect') {
    const [x, y, width, height] = numbers(node, 'x', 'y', 'width', 'height');
    return ['rect', [x, y + height, x + width, y]];
  }
  return ['path', (node.getAttribute('d').match(/-?[\\d.]+/g) || []).map(Number)];
};
const read = svg => {
  const ticks = (name, at) => [...svg.querySelectorAll(`.axes .${name}`)]
    .map(line => [...numbers(line, at), line.nextElementSibling.textContent]);
  const layers = {};
  for (const layer of svg.querySelectorAll('[data-series]')) {
    (layers[layer.dataset.series] ||= [])
      .push(...[...layer.children].filter(node => node.tagName !== 'text').map(mark));
  }
  const texts = [...svg.querySelectorAll('text')]
    .map(text => [...numbers(text, 'x', 'y'), text.textContent]);
  const base = svg.querySelector('.base');
  return {x: ticks('tick', 'x1'), y: ticks('grid', 'y1'), layers, texts,
          base: base ? numbers(base, 'x1')[0] : null};
};
// a figure of several drawings has its id for the first, id/1 for the second, ...
return Object.fromEntries([...document.querySelectorAll('figure')]
  .flatMap(figure => [...figure.querySelectorAll('.canvas svg')]
    .map((svg, at) => [at ? `${figure.id}/${at}` : figure.id, read(svg)])));
"""


def value_of(text: str) -> float:
    """The number that a label of an axis says."""
    number = float(re.sub("[,%]", "", text.replace("\u2212", "-")))
    return number / 100 if text.endswith("%") else number


class Drawing:
    """The marks of one figure, in the units of its axes."""

    def __init__(self, read: dict[str, Any]) -> None:
        self.layers, self.texts, self.base = read["layers"], read["texts"], read["base"]
        self.axes = {name: _scale(read[name]) for name in "xy" if len(read[name]) > 1}

    def marks(self, series: str, kind: str) -> np.ndarray:
        """The places (x, y, x, y, ...) of the marks of a kind, a row for each."""
        found = np.array([place for tag, place in self.layers[series] if tag == kind])
        for at, name in ((0, "x"), (1, "y")):
            slope, start = self.axes[name]
            found[:, at::2] = slope * found[:, at::2] + start
        return found

    def path(self, series: str, at: int = 0) -> np.ndarray:
        """The corners (x, y) of one path of a series."""
        places = [place for tag, place in self.layers[series] if tag == "path"]
        corners = np.array(places[at]).reshape(-1, 2)
        slopes, starts = np.array([self.axes[name] for name in "xy"]).T
        return corners * slopes + starts

    def lengths(self, series: str) -> np.ndarray:
        """From and to of lying bars, in pixels from their zero."""
        places = np.array([place for tag, place in self.layers[series] if tag == "rect"])
        return places[:, [0, 2]] - self.base


def _scale(ticks: list[tuple[float, str]]) -> np.ndarray:
    """The line from pixels to what the labels say; labels must lie on one."""
    pixels = np.array([pixel for pixel, _ in ticks])
    values = np.array([value_of(text) for _, text in ticks])
    line = np.polyfit(pixels, values, 1)
    np.testing.assert_allclose(np.polyval(line, pixels), values, atol=0.02 * np.ptp(values))
    return line
