"""The check of the layers finds what it is there to find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "layers.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_package_keeps_its_layers() -> None:
    done = check(ROOT / "lightning_bnn")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("posteriors/base.py", "from lightning_bnn.report import report", "looks up to report"),
        ("errors.py", "import lightning_bnn.cli", "looks up to cli"),
        (
            "callbacks/progress.py",
            "from lightning_bnn.bank import _flat_rows",
            "private _flat_rows",
        ),
        ("launch/units.py", "def f(bnn):\n    return bnn._diverged_at", "reads _diverged_at"),
        ("bank.py", "def f():\n    import scipy", "inside of a function, without a reason"),
        ("pruning/masks.py", "import lightning_bnn.diagnostics", ""),
        ("unknown.py", "", "no place in the layers"),
    ],
)
def test_a_seeded_fault_is_found(place: str, line: str, found: str, tmp_path: Path) -> None:
    copied = tmp_path / "lightning_bnn"
    shutil.copytree(ROOT / "lightning_bnn", copied, ignore=shutil.ignore_patterns("__pycache__"))
    with (copied / place).open("a") as file:
        file.write(f"\n{line}\n")
    done = check(copied)
    assert bool(done.returncode) == bool(found)
    assert found in done.stdout


def test_a_cycle_between_rooms_of_one_layer_is_found(tmp_path: Path) -> None:
    copied = tmp_path / "lightning_bnn"
    shutil.copytree(ROOT / "lightning_bnn", copied, ignore=shutil.ignore_patterns("__pycache__"))
    for here, there in (("families", "samplers"), ("samplers", "families")):
        with (copied / here / "base.py").open("a") as file:
            file.write(f"\nimport lightning_bnn.{there}\n")
    assert "is part of a cycle" in check(copied).stdout
