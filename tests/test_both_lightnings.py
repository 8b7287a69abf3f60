"""``pytorch_lightning`` and ``lightning.pytorch``, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "LIGHTNING_BNN_LIGHTNING"}
    settings = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300, check=False
    )


def test_programs_and_checkpoints_of_both(tmp_path: Path) -> None:
    """Fits, callbacks, checkpoints and the command line; the second resumes the first's fits."""
    for folder, package in (("first", "pytorch_lightning"), ("second", "lightning.pytorch")):
        (tmp_path / folder).mkdir()
        done = run("-m", "tests.both_lightnings", package, str(tmp_path / folder))
        assert done.stdout.endswith("all well\n"), done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("before", "variable", "chosen"),
    [
        ("", "", "pytorch_lightning"),
        ("import lightning as L;", "", "lightning.pytorch"),
        ("import pytorch_lightning, lightning;", "", "pytorch_lightning"),
        ("import lightning, pytorch_lightning;", "", "lightning.pytorch"),
        ("import pytorch_lightning;", "lightning.pytorch", "lightning.pytorch"),
    ],
)
def test_which_one_is_meant(before: str, variable: str, chosen: str) -> None:
    program = f"{before}from lightning_bnn.lightning import PACKAGE; print(PACKAGE)"
    done = run("-c", program, LIGHTNING_BNN_LIGHTNING=variable)
    assert done.stdout == f"{chosen}\n", done.stderr


def test_a_wrong_name_is_refused() -> None:
    done = run("-c", "import lightning_bnn", LIGHTNING_BNN_LIGHTNING="lightning")
    assert "is pytorch_lightning or lightning.pytorch; got 'lightning'" in done.stderr
