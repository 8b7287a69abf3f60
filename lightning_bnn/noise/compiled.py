"""Build and load the normal generator in ``normal.c``, where there is a C compiler.

On a CPU the Gaussian noise is most of what a step of inference costs beyond an ordinary training
step, and PyTorch's generator makes one number at a time. The C version makes sixteen, in about
an eighth of the time. It is compiled once for each machine, in less than a second, and kept in
the user's cache folder. Without a compiler, or with ``LIGHTNING_BNN_COMPILE=0`` in the
environment, PyTorch's generator serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["WORDS", "load"]

WORDS = 64  # of the generator's state: four in each of sixteen lanes

_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
# The hash of the first numbers from a known state: every correct build gives it, on any machine.
_EXPECTED = "fa4471c616975fd6"
_log = logging.getLogger(__name__)

Fill = Callable[[Tensor, Tensor], None]


@cache
def load() -> Fill | None:
    """The function that fills a contiguous float32 tensor from a state, or None.

    Example:
        >>> fill = load()
        >>> if fill is not None:
        ...     numbers = torch.empty(100_000)
        ...     fill(numbers, torch.arange(1, WORDS + 1, dtype=torch.int32))
        ...     assert abs(numbers.std() - 1) < 0.02
    """
    if os.environ.get("LIGHTNING_BNN_COMPILE", "1") == "0":
        return None
    try:
        function = ctypes.CDLL(str(_library())).lightning_bnn_fill_normal
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.info("Noise comes from PyTorch's generator; a compiled one failed: %s", error)
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = None

    def fill(tensor: Tensor, state: Tensor) -> None:
        function(tensor.data_ptr(), tensor.numel(), state.data_ptr())

    if not _is_right(fill):
        _log.warning("The compiled noise generator gives wrong numbers; PyTorch's serves instead.")
        return None
    return fill


def _is_right(fill: Fill) -> bool:
    numbers = torch.empty(67)
    fill(numbers, (torch.arange(1, WORDS + 1) * 0x9E3779B9).to(torch.int32))
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16] == _EXPECTED


def _library() -> Path:
    """The shared library, compiled unless an earlier process did."""
    source = files(__package__).joinpath("normal.c").read_bytes()
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler was found")
    key = hashlib.sha256(source + _processor().encode() + " ".join(_FLAGS).encode()).hexdigest()
    folder = _folder()
    target = folder / f"normal-{key[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            (Path(work) / "normal.c").write_bytes(source)
            for machine in (["-march=native"], []):
                command = [compiler, *_FLAGS, *machine, "normal.c", "-o", "normal.so", "-lm"]
                done = subprocess.run(command, cwd=work, capture_output=True, timeout=60)
                if done.returncode == 0:
                    break
            else:
                raise OSError(f"{compiler} failed: {done.stderr[-500:].decode(errors='replace')}")
            # another process may do the same at the same moment: whole files only
            os.replace(Path(work) / "normal.so", target)
    return target


def _processor() -> str:
    """What tells machines apart that may share a home folder: native code of one may not run."""
    features = ""
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "feat"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"


def _folder() -> Path:
    """The user's cache folder, or a temporary one where that cannot be written.

    Code is loaded from it, so it must belong to this user alone.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "lightning_bnn"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and (
            not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        ):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="lightning_bnn-"))
