"""The table of a run for a person: a summary, then a row for each unit that matters.

It fits the screen: what a narrow one has no room for is left out, a column at a time, and no row
takes two lines. Of many units those are shown that run or have failed; the others are counted. It
is all in words and in ASCII, so that it can be read without colours and in any encoding.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_bnn.launch.rows import Row, run_rows
from lightning_bnn.launch.summary import Summary, duration_text, summarise

__all__ = [
    "MOST_ROWS",
    "RunTable",
    "encodable",
    "node_name",
    "other_lines",
    "rich_table",
    "run_rows",
]

MOST_ROWS = 40
_MOST_ERRORS, _LINES_OF_ERROR = 3, 2
_GAP = 2
_SHORTEST_NODE = 8
# What comes first where there are too many.
_ORDER = ("failed", "diverged", "silent", "saving", "training", "starting", "done", "queued")
_STYLES = {"failed": "bold red", "diverged": "bold red", "silent": "yellow", "done": "green"}
# What is left out first where the screen is narrow.
_LEFT_OUT = ("last sign", "time", "device", "attempt", "node", "loss", "ETA")
_TO_THE_LEFT = ("member", "state", "node", "device")


def rich_table(
    rows: Sequence[Row],
    summary: Summary | None = None,
    most: int = MOST_ROWS,
    note: str | None = None,
) -> RunTable:
    """What a ``rich`` console prints of a run.

    Args:
        rows: The rows of the run.
        summary: Their summary, if it is known already.
        most: How many of them are shown at most.
        note: What else there is to say, below the summary.

    Example:
        >>> rows = [Row((0,), "done", "a", device="cpu", step=90, steps=90, loss=0.25, attempt=1),
        ...         Row((1,), "training", "b", device="cpu", step=30, steps=90, eta=20, attempt=2)]
        >>> Console(width=60).print(rich_table(rows))
        1 of 2 members done, 1 running, ETA 20 s
        member  state     node  device  step   loss  attempt   ETA
        0       done      a     cpu       90   0.25        1     -
        1       training  b     cpu    30/90      -        2  20 s
    """
    return RunTable(rows, summary or summarise(rows), most, note)


def other_lines(rows: Sequence[Row]) -> int:
    """How many lines of a table are no rows: summary, note, headings, what is counted, errors."""
    errors = min(_MOST_ERRORS, sum(row.error is not None for row in rows))
    return 6 + _LINES_OF_ERROR * errors


@dataclass(frozen=True)
class RunTable:
    """A table that fits the console that it is printed on; made by :func:`rich_table`."""

    rows: Sequence[Row]
    summary: Summary
    most: int = MOST_ROWS
    note: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the rows and the columns, and draw them."""

        def text(words: str, style: str = "", wraps: bool = False) -> Text:
            known = encodable(words, options.encoding)
            return Text(known, style, no_wrap=not wraps, overflow="fold" if wraps else "crop")

        yield text(str(self.summary), "bold", wraps=True)
        if self.note is not None:
            yield text(self.note, "yellow", wraps=True)
        shown = _chosen(self.rows, self.most)
        if shown:
            yield _drawn(shown, options.max_width)
        rest: Counter[str] = Counter(row.state for row in self.rows for _ in row.members)
        rest.subtract(row.state for row in shown for _ in row.members)
        counted = [f"{rest[state]:,} {state}" for state in _ORDER if rest[state]]
        if counted:
            yield text("and " + ", ".join(counted))
        wrong = [row for row in self.rows if row.error]
        for row in wrong[:_MOST_ERRORS]:
            lines = (row.error or "").strip().splitlines() or ["unknown"]
            noun = "member" if len(row.members) == 1 else "members"
            said = f"{noun} {_members(row)} failed: {lines[0]}"
            for line in textwrap.wrap(said, options.max_width)[:_LINES_OF_ERROR]:
                yield text(line)
        if len(wrong) > _MOST_ERRORS:
            yield text(f"and {len(wrong) - _MOST_ERRORS:,} more errors")


def _chosen(rows: Sequence[Row], most: int) -> list[Row]:
    if len(rows) <= most:
        return list(rows)
    return sorted(rows, key=lambda row: _ORDER.index(row.state))[:most]


def _drawn(rows: Sequence[Row], width: int) -> Table:
    cells = _cells(rows)
    for name in (*_LEFT_OUT, None):
        over = sum(map(_width, cells.items())) + _GAP * (len(cells) - 1) - width
        if over > 0 and "node" in cells:
            longest = max(_SHORTEST_NODE, _width(("node", cells["node"])) - over)
            over -= _width(("node", cells["node"])) - longest
            if over <= 0:
                cells["node"] = [_shortened(cell, longest) for cell in cells["node"]]
        if over <= 0 or name is None:
            break
        cells.pop(name, None)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in cells:
        side = "left" if name in _TO_THE_LEFT else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="crop")  # type: ignore[arg-type]
    for row, texts in zip(rows, zip(*cells.values(), strict=True), strict=True):
        style = _STYLES.get(row.state, "")
        styled = (style if name == "state" else "" for name in cells)
        table.add_row(*map(Text, texts, styled))
    return table


def _width(column: tuple[str, list[str]]) -> int:
    return max(map(len, [column[0], *column[1]]))


def _cells(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The text of each column."""
    nodes: dict[str, set[str]] = {}
    for row in rows:
        if row.host is not None and row.node is not None:
            nodes.setdefault(row.host, set()).add(row.node)
    several = {host for host, found in nodes.items() if len(found) > 1}
    return {
        "member": [_members(row) for row in rows],
        "state": [_state(row) for row in rows],
        "node": [node_name(row.host, row.node, row.host in several) for row in rows],
        "device": [row.device or "-" for row in rows],
        "step": [_steps(row) for row in rows],
        "loss": ["-" if row.loss is None else f"{row.loss:.4g}" for row in rows],
        "attempt": [str(row.attempt or "-") for row in rows],
        "time": ["-" if row.seconds is None else duration_text(row.seconds) for row in rows],
        "ETA": ["-" if row.eta is None else duration_text(row.eta) for row in rows],
        "last sign": ["-" if row.age is None else f"{duration_text(row.age)} ago" for row in rows],
    }


def _members(row: Row) -> str:
    first, last = row.members[0], row.members[-1]
    return str(first) if first == last else f"{first}-{last}"


def _state(row: Row) -> str:
    if row.state == "done" and row.diverged:
        return f"done, {len(row.diverged)} diverged"
    if row.state == "silent" and row.age is not None:
        return f"silent {duration_text(row.age)}"
    return row.state


def _steps(row: Row) -> str:
    if row.step is None:
        return "-"
    if row.steps is None or row.state in ("done", "diverged"):
        return f"{row.step:,}"
    return f"{row.step:,}/{row.steps:,}"


def node_name(host: str | None, node: str | None, both: bool = False) -> str:
    """A node for a person: the short name of its machine, and where that is not enough its number.

    Example:
        >>> node_name("gpu-7.cluster.example", "3f2a91c0aa"), node_name(None, "3f2a91c0aa")
        ('gpu-7', '3f2a91c0')
        >>> node_name("gpu-7.cluster.example", "3f2a91c0aa", both=True)
        'gpu-7/3f2a'
    """
    if host is None:
        return "-" if node is None else node[:8]
    # an address is no name with a domain
    short = host if host.replace(".", "").isdigit() else host.split(".")[0]
    return f"{short}/{node[:4]}" if both and node is not None else short


def encodable(words: str, encoding: str | None) -> str:
    """A text with a question mark for each character that a stream has no code for.

    Example:
        >>> encodable("σ = 1", "ascii")
        '? = 1'
    """
    return words.encode(encoding or "ascii", "replace").decode(encoding or "ascii")


def _shortened(name: str, length: int) -> str:
    """Keep both ends: the machines of a cluster are often called alike, but for the end."""
    if len(name) <= length:
        return name
    start = (length - 2) // 3
    return f"{name[:start]}..{name[len(name) - (length - 2 - start) :]}"
