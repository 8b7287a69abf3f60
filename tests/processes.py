"""Scripts of the tests in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def run_script(module: str, *words: object, timeout: int = 300) -> str:
    """Run ``python -m module words``, and give what it printed; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def read_ranks(directory: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each of two ranks wrote: its weights after each fit, and what else it found."""
    return [
        (
            torch.load(directory / f"weights{rank}.pt", weights_only=True),
            json.loads((directory / f"found{rank}.json").read_text()),
        )
        for rank in (0, 1)
    ]
