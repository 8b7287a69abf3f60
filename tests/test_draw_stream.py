"""The benchmark of streamed draws runs, and judges as it says; no test looks at a measured time."""

import json
from pathlib import Path

import pytest
from torch import nn

from benchmarks import draw_stream


def test_it_measures_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw_stream, "make_network", lambda: nn.Linear(50, 20))
    (tmp_path / "work").mkdir()
    file = tmp_path / "new" / "figures.json"
    place = ["--directory", str(tmp_path / "work")]
    draw_stream.main(["--draws", "4", *place, "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m benchmarks.draw_stream --draws 4")
    assert [len(result[f"{what}_seconds"]) for what in ("commit", "write", "read")] == [4, 4, 4]
    assert result["draw_megabytes"] == pytest.approx((51 * 20 * 4 + 152) / 1e6, rel=0.05)
    assert [bar["limit"] for bar in result["bars"]] == [1.1, 1.1, 2.0]
    assert list((tmp_path / "work").iterdir()) == []
    assert "4 draws of" in capsys.readouterr().out


def test_the_bars() -> None:
    found = {
        "peak_megabytes_after_draw_2": 100.0,
        "peak_megabytes_after_last_draw": 111.0,
        "peak_megabytes_after_reading_2": 200.0,
        "peak_megabytes_after_reading_all": 219.0,
        "commit_seconds": [3.0, 1.0, 2.0],
        "write_seconds": [1.0, 1.0, 9.0],
    }
    assert [bar["passed"] for bar in draw_stream.judge(found)] == [False, True, True]
    found["commit_seconds"] = [2.1] * 3
    assert [bar["passed"] for bar in draw_stream.judge(found)] == [False, True, False]


def test_a_disk_that_is_too_small_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"draws need .* GB, and .* GB free"):
        draw_stream.main(["--draws", "100000000", "--directory", str(tmp_path)])
    with pytest.raises(SystemExit):
        draw_stream.main(["--draws", "2"])
