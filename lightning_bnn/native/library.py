"""Build and load the C files of this folder, where there is a C compiler.

On a CPU the Gaussian noise, and after it the memory moved by many small operations on all weights,
is most of what a step of inference costs beyond an ordinary training step. PyTorch's generator
makes one number at a time; ``normal.c`` makes sixteen, in about an eighth of the time, and
``mean_field.c`` does in two passes what takes a dozen otherwise. The library is compiled once for
each machine, in a second, and kept in the user's cache folder. Without a compiler, or with
``LIGHTNING_BNN_COMPILE=0`` in the environment, PyTorch serves.

Its loops run on PyTorch's own threads: the files are compiled for OpenMP but linked without it,
so that its functions are found in the OpenMP that PyTorch has loaded. Where that fails, the
library is built without threads; the numbers are the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import math
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["WORDS", "Library", "Slices", "load", "noise_source"]

WORDS = 64  # of the generator's state: four in each of sixteen lanes

_SOURCES = ["normal.c", "mean_field.c"]
_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
_VARIANTS = [["-march=native", "-fopenmp"], ["-march=native"], ["-fopenmp"], []]
# The hash of what is made from known numbers: every correct build gives it, on any machine.
_EXPECTED = "aa190734cdb73cb2"
_WORTH_A_THREAD = 32768  # numbers: for fewer, waking it costs more than it does
_log = logging.getLogger(__name__)


class Slices:
    """Consecutive slices of a flat vector, each with its own Gaussian prior.

    Args:
        sizes: How many numbers each holds.
        locs: The means of the priors.
        scales: Their standard deviations; infinite for none.

    Example:
        >>> Slices([6, 2], locs=[0.0, 0.0], scales=[0.1, 1.0]).struct.count
        2
    """

    def __init__(
        self, sizes: Sequence[int], locs: Sequence[float], scales: Sequence[float]
    ) -> None:
        count = len(sizes)
        self.sizes, self.locs, self.scales = list(sizes), list(locs), list(scales)
        self._starts = (ctypes.c_int64 * (count + 1))(0, *itertools.accumulate(sizes))
        self._locs = (ctypes.c_float * count)(*locs)
        self._precisions = (ctypes.c_float * count)(*(1 / scale**2 for scale in scales))
        addresses = [ctypes.addressof(self._starts), ctypes.addressof(self._locs)]
        self.struct = _Slices(count, *addresses, ctypes.addressof(self._precisions))

    def totals(self, sums: ctypes.Array[ctypes.c_double], chunk: int) -> list[float]:
        """The sum over each slice, of sums over what it shares with each chunk.

        That of chunk c and slice s is number c + s.
        """
        return [
            sum(sums[slice(start // chunk + s, (stop - 1) // chunk + s + 1)])
            for s, (start, stop) in enumerate(itertools.pairwise(self._starts))
        ]


class _Slices(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("count", "starts", "locs", "precisions")]


class Library:
    """The compiled functions. All tensors are contiguous, on the CPU, and float32 unless said.

    Args:
        path: The shared library.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, slices = ctypes.c_void_p, ctypes.POINTER(_Slices)
        self._fill = library.lightning_bnn_fill_normal
        self._fill.argtypes = [pointer, ctypes.c_size_t, pointer]
        self._fill.restype = None
        self._draw = library.lightning_bnn_draw
        self._draw.argtypes = [*[pointer] * 3, slices, *[pointer] * 3, ctypes.c_int]
        self._draw.restype = ctypes.c_double
        self._gradients = library.lightning_bnn_gradients
        self._gradients.argtypes = [
            *[pointer] * 3, ctypes.c_float, *[pointer] * 3, slices, ctypes.c_int
        ]  # fmt: skip
        self._gradients.restype = None
        self._step = library.lightning_bnn_natural_step
        self._step.argtypes = [
            *[pointer] * 5, ctypes.c_int64, *[ctypes.c_float] * 4, ctypes.c_int
        ]  # fmt: skip
        self._step.restype = None
        self._chunk = ctypes.c_int64.in_dll(library, "lightning_bnn_chunk").value

    def fill_normal(self, tensor: Tensor, state: Tensor) -> None:
        """Fill ``tensor`` with standard normal numbers and move the state (int32) on."""
        self._fill(tensor.data_ptr(), tensor.numel(), state.data_ptr())
        # autograd must hear of a change that went past it
        torch.autograd.graph.increment_version(tensor)

    def draw(
        self, weights: Tensor, mean: Tensor, rho: Tensor, slices: Slices, key: tuple[int, int]
    ) -> tuple[float, list[float]]:
        """Write mean + exp(rho)·z into ``weights``, with z from the key.

        Returns:
            Σ ((mean − loc)² + exp(2 rho)) / (2 scale²) − rho: the KL up to constants; and
            Σ (mean − loc)² + exp(2 rho) of each slice.
        """
        size, chunk = mean.numel(), self._chunk
        words = (ctypes.c_uint64 * 2)(*key)
        chunks = -(-size // chunk)
        sums = (ctypes.c_double * chunks)()
        squares = (ctypes.c_double * (chunks + len(slices.sizes)))()
        total = self._draw(
            weights.data_ptr(), mean.data_ptr(), rho.data_ptr(), slices.struct,
            ctypes.addressof(words), ctypes.addressof(sums), ctypes.addressof(squares),
            _threads(size),
        )  # fmt: skip
        torch.autograd.graph.increment_version(weights)
        return float(total), slices.totals(squares, chunk)

    def gradients(
        self,
        by_mean: Tensor,
        by_rho: Tensor,
        by_slices: Sequence[Tensor | None],
        by_kl: float,
        mean: Tensor,
        rho: Tensor,
        weights: Tensor,
        slices: Slices,
    ) -> None:
        """Write the gradients of ``mean`` and ``rho`` from those of a draw and of its KL.

        A slice without a gradient has that of zero.
        """
        addresses = [0 if by_slice is None else by_slice.data_ptr() for by_slice in by_slices]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._gradients(
            by_mean.data_ptr(), by_rho.data_ptr(), ctypes.addressof(pointers), by_kl,
            mean.data_ptr(), rho.data_ptr(), weights.data_ptr(), slices.struct,
            _threads(mean.numel()),
        )  # fmt: skip
        torch.autograd.graph.increment_version([by_mean, by_rho])

    def natural_step(
        self,
        mean: Tensor,
        rho: Tensor,
        momentum: Tensor,
        by_mean: Tensor,
        by_rho: Tensor,
        keep: float,
        pull: float,
        rate: float,
        most: float,
    ) -> None:
        """A step of IVON in place (see :func:`lightning_bnn.optimizers.ivon.natural_step_`)."""
        self._step(
            mean.data_ptr(), rho.data_ptr(), momentum.data_ptr(), by_mean.data_ptr(),
            by_rho.data_ptr(), mean.numel(), keep, pull, rate, most, _threads(mean.numel()),
        )  # fmt: skip
        torch.autograd.graph.increment_version([mean, rho, momentum])


def _threads(size: int) -> int:
    return min(torch.get_num_threads(), 1 + size // _WORTH_A_THREAD)


@cache
def load() -> Library | None:
    """The library, compiled unless an earlier process did, or None where that is not possible.

    Example:
        >>> library = load()
        >>> if library is not None:
        ...     numbers = torch.empty(100_000)
        ...     library.fill_normal(numbers, torch.arange(1, WORDS + 1, dtype=torch.int32))
        ...     assert abs(numbers.std() - 1) < 0.02
    """
    if os.environ.get("LIGHTNING_BNN_COMPILE", "1") == "0":
        return None
    for variant in _VARIANTS:
        try:
            with _folder() as folder:
                library = Library(_build(variant, Path(folder)))
        except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
            _log.info("Compiling with %s failed: %s", variant, error)
            continue
        if _fingerprint(library) == _EXPECTED and _sums_squares(library) and _steps(library):
            return library
        _log.warning("What was compiled with %s gives wrong numbers and is not used.", variant)
    _log.info("Noise comes from PyTorch's generator.")
    return None


def noise_source() -> str:
    """Where the noise of training comes from: with one seed, each source gives other numbers.

    All builds of the library give the same, which the number stands for.

    Example:
        >>> noise_source() in (f"compiled ({_EXPECTED})", "PyTorch")
        True
    """
    return "PyTorch" if load() is None else f"compiled ({_EXPECTED})"


def _fingerprint(library: Library) -> str:
    """The hash of what every function makes of known numbers, in two chunks and three slices."""
    state = (torch.arange(1, WORDS + 1, device="cpu") * 0x9E3779B9).to(torch.int32)
    size = 8300
    numbers = torch.empty(67 + 3 * size, dtype=torch.float32, device="cpu")
    library.fill_normal(numbers, state)
    mean, rho, by_weights = numbers[67:].split(size)
    rho = 0.25 * rho - 2
    slices = Slices([50, 8050, 200], [0.0, 0.5, -1.0], [1.0, 0.25, 2.0])
    weights, by_mean, by_rho = (torch.empty_like(mean) for _ in range(3))
    kl, _ = library.draw(weights, mean, rho, slices, (1, 2**64 - 2))
    by_slices = [None, *by_weights[50:].split([8050, 200])]
    library.gradients(by_mean, by_rho, by_slices, 0.125, mean, rho, weights, slices)
    results = [tensor.numpy().tobytes() for tensor in (numbers, weights, by_mean, by_rho)]
    return hashlib.sha256(b"".join(results) + kl.hex().encode()).hexdigest()[:16]


def _sums_squares(library: Library) -> bool:
    """Whether sums over slices that end inside of chunks, and over none, are right."""
    sizes = [3, 8189, 1, 9000]  # the second ends with a chunk
    mean = torch.arange(sum(sizes), device="cpu", dtype=torch.float32) % 7
    slices = Slices(sizes, [0.0] * 4, [math.inf] * 4)
    _, found = library.draw(torch.empty_like(mean), mean, mean - 90, slices, (0, 0))
    return found == [part.square().sum().item() for part in mean.split(sizes)]


def _steps(library: Library) -> bool:
    """Whether a natural-gradient step is that of PyTorch in float64, up to rounding."""
    size = 8300
    values = torch.linspace(-2, 2, 5 * size, device="cpu").view(size, 5).t().contiguous()
    mean, rho, momentum, by_mean, by_rho = wide = values.double()
    one, two, three, four, five = values
    library.natural_step(one, two, three, four, five, 0.75, 0.8, 0.5, 1.0)
    momentum.lerp_(by_mean, 0.25)
    u = (0.8 * by_rho).clamp(-1, 1)
    rho.sub_(0.5 * torch.log(1 + u + u * u / 2))
    mean.sub_((0.5 * torch.exp(2 * rho) * momentum).clamp(-1, 1))
    return torch.allclose(values.double(), wide, rtol=1e-5, atol=1e-6)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def _build(variant: Sequence[str], folder: Path) -> Path:
    """The shared library of a variant of the flags, compiled unless an earlier process did.

    Its name ends with the hash of its contents: code that was cut short would end the process.
    """
    package = files(__package__)
    sources = {name: package.joinpath(name).read_bytes() for name in ("normal.h", *_SOURCES)}
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C compiler was found")
    flags = [*_FLAGS, *variant]
    about = [*sources.values(), _processor().encode(), " ".join(flags).encode()]
    name = f"native-{_hash(b''.join(about))}"
    for path in folder.glob(f"{name}-*.so"):
        if _is_whole(path):
            return path
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for source, text in sources.items():
            (Path(work) / source).write_bytes(text)
        objects = [str(Path(source).with_suffix(".o")) for source in _SOURCES]
        for command in (
            [compiler, *flags, "-c", *_SOURCES],
            [compiler, "-shared", *objects, "-o", "native.so", "-lm"],
        ):
            done = subprocess.run(command, cwd=work, capture_output=True, timeout=60)
            if done.returncode != 0:
                message = done.stderr[-500:].decode(errors="replace")
                raise OSError(f"{compiler} failed: {message}")
        built = Path(work) / "native.so"
        built.chmod(0o700)
        with open(built, "rb+") as file:
            target = folder / f"{name}-{_hash(file.read())}.so"
            os.fsync(file.fileno())
        # another process may do the same at the same moment: whole files only
        os.replace(built, target)
    return target


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _is_whole(path: Path) -> bool:
    """Whether a library is all that this user has built, and nobody else can have written it."""
    try:
        facts = path.lstat()
        private = stat.S_ISREG(facts.st_mode) and _is_ours(facts)
        return private and path.stem.endswith(_hash(path.read_bytes()))
    except FileNotFoundError:  # another process has removed it just now
        return False


def _is_ours(facts: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return True
    return facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _processor() -> str:
    """What tells machines apart that may share a home folder: native code of one may not run."""
    features = ""
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "feat"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"


def _folder() -> AbstractContextManager[str | Path]:
    """The user's cache folder, or a temporary one, gone when the library was loaded from it.

    Code is loaded from it, so it must belong to this user alone.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_bnn"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.lstat()
        private = stat.S_ISDIR(facts.st_mode) and _is_ours(facts)
        if private and os.access(folder, os.W_OK):
            return nullcontext(folder)
        if not private:
            _log.warning(
                "%s holds code that is run, but is a link, or others own it or can write to it. "
                "It is not used, and each process compiles for itself. Remove it.",
                folder,
            )
    except (OSError, RuntimeError) as error:
        _log.info("There is no folder for compiled code: %s", error)
    return tempfile.TemporaryDirectory(prefix="lightning_bnn-", ignore_cleanup_errors=True)
