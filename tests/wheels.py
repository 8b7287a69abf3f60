"""A wheel of the tree as it is, built from a copy so that nothing is left in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(copy: Path) -> Path:
    """Copy what belongs to the project, build its wheel there, and give its place."""
    kept = ["pyproject.toml", "README.md", "LICENSE", "lightning_bnn", "callbacks", "configs"]
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *kept],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        source, target = ROOT / name, copy / name
        if not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--no-index", "--wheel-dir", "dist", "."], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (copy / "dist").glob("*.whl")
    return path
