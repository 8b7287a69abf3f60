"""The benchmark on MNIST, run on a few made-up images: resume, bars, what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pruning_mnist import judge, main


def write_idx(path: Path, values: np.ndarray) -> None:
    """An array of bytes as the files of MNIST hold it."""
    sizes = np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 48), ("t10k", 20)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte", pixels)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return tmp_path


def test_a_table_and_a_file_without_places(
    images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(images)
    words = ["--data-dir", str(images), "--run", str(images / "run"), "--json", "kept.json"]
    words += ["--epochs", "5", "--batch-size", "24", "--draws", "2"]
    main(words)
    printed = capsys.readouterr().out
    assert printed.count("on disk with") == 3
    kept = json.loads(Path("kept.json").read_text())
    assert str(images) not in json.dumps(kept)
    assert kept["command"].startswith("python -m benchmarks.pruning_mnist --data-dir DIR --run DIR")
    assert list(kept["errors"]) == ["0%", "50%", "75%", "95%", "98%"]
    assert [one["remaining"] for one in kept["curve"]["results"]][::4] == [2_392_800, 47_856]
    assert kept["bytes_on_disk"]["98%"] < 0.05 * kept["bytes_on_disk"]["0%"]
    assert not kept["went_on_from_a_checkpoint"]
    assert (images / "run" / "curve.png").exists()
    # the same command again goes on from the end: nothing is trained, the figures are the same
    main(words)
    again = json.loads(Path("kept.json").read_text())
    assert again["went_on_from_a_checkpoint"]
    assert again["errors"] == kept["errors"]


def test_bars() -> None:
    held = {"0%": True, "95%": True, "98%": True}
    assert judge({0.0: 1.35, 0.95: 1.45, 0.98: 1.55}) == held
    assert judge({0.0: 1.36, 0.95: 1.45, 0.98: 1.55}) == {**held, "0%": False}
    assert judge({0.0: 1.30, 0.95: 1.41, 0.98: 1.51}) == {"0%": True, "95%": False, "98%": False}


def test_without_data(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Expected .*MNIST"):
        main(["--data-dir", str(tmp_path)])
