from __future__ import annotations

import pytest

from lightning_bnn.launch.rows import Row
from lightning_bnn.launch.summary import Summary, duration_text, summarise


def queued(count: int) -> list[Row]:
    return [Row((number,)) for number in range(100, 100 + count)]


def test_members_are_counted_not_units() -> None:
    rows = [
        Row((0, 1, 2), "done", diverged=(1,)),
        Row((3, 4), "training"),
        Row((5, 6), "saving"),
        Row((7,), "starting"),
        Row((8, 9), "diverged", diverged=(8, 9)),
        Row((10,), "failed"),
        Row((11,), "silent"),
        Row((12,), "queued"),
    ]
    summary = summarise(rows)
    assert summary.members == 13
    assert summary.counts == {
        "done": 2, "diverged": 3, "running": 5, "failed": 1, "silent": 1, "queued": 1,
    }  # fmt: skip
    assert sum(summary.counts.values()) == summary.members


def test_the_line_names_only_what_there_is() -> None:
    assert str(Summary(20, {"done": 20})) == "20 of 20 members done"
    assert str(Summary(1200, {"running": 4, "queued": 1196})) == (
        "0 of 1,200 members done, 4 running, 1,196 queued"
    )
    some = Summary(20, {"done": 12, "running": 4, "queued": 3, "failed": 1}, eta=180.0)
    assert str(some) == "12 of 20 members done, 4 running, 3 queued, 1 failed, ETA 3 min"


@pytest.mark.parametrize(
    ("rows", "eta"),
    [
        ([Row((0,), "training", eta=30.0), Row((1,), "training", eta=50.0)], 50.0),
        # a whole unit takes 5 + 30 s, and two of three wait for the one that runs
        ([Row((0,), "training", eta=30.0, seconds=5.0), *queued(2)], 100.0),
        # what was done before tells how long one takes; two places take three in turn
        (
            [
                Row((0,), "done", seconds=60.0),
                Row((1,), "training", eta=10.0, seconds=50.0),
                Row((2,), "training", eta=20.0, seconds=40.0),
                *queued(3),
            ],
            130.0,  # 10 + 60 + 60, while the other ends at 20 + 60
        ),
        ([Row((0,), "done", seconds=60.0), Row((1,), "starting", seconds=10.0)], 50.0),
        ([Row((0,), "done", seconds=60.0), Row((1,), "starting", seconds=90.0)], 0.0),
        ([Row((0,), "starting", seconds=10.0)], None),
        ([Row((0,), "saving", seconds=10.0), Row((1,), "training", eta=2.0)], 2.0),
        ([Row((0,), "saving", seconds=10.0), *queued(1)], None),
        ([Row((0,), "done", seconds=60.0), *queued(1)], None),  # nothing runs
        ([Row((0,), "done", seconds=60.0)], None),
        ([Row((0,), "silent", seconds=60.0)], None),
        ([], None),
    ],
)
def test_the_eta_of_a_run(rows: list[Row], eta: float | None) -> None:
    assert summarise(rows).eta == eta


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "<1 s"), (1.0, "1 s"), (99.4, "99 s"), (99.6, "2 min"), (3600.0, "60 min"),
        (5969.0, "99 min"), (5971.0, "1.7 h"), (47.9 * 3600, "47.9 h"), (48 * 3600, "2.0 d"),
    ],
)  # fmt: skip
def test_a_duration_is_a_short_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
