"""What it costs to write draws to the disk as they are taken: memory and time.

``python -m benchmarks.draw_stream`` writes 100 draws of a network of 11 million parameters
(resnet18, 47 MB a draw with its buffers) to a temporary directory, as ``SampleCollector`` does, and
reads them again. It gives the peak memory of the process after draw 2 and after the last, and the
time to commit a draw as a ratio to writing (and flushing) the same bytes once, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors.draws import create_stream
from lightning_bnn.storage.store import pieces_of
from lightning_bnn.storage.stream import DrawStream

__all__ = ["main"]

MEMORY_BAR = 1.1
TIME_BAR = 2.0


def make_network() -> nn.Module:
    return torchvision.models.resnet18()


def peak_megabytes() -> float:
    """The largest memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def write_once(path: Path, weights: dict[str, Tensor]) -> None:
    """Write the bytes of a draw to a file, and flush them to the disk."""
    with open(path, "xb") as file:
        for piece in pieces_of(weights):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(directory: Path, draws: int) -> dict[str, Any]:
    """Commit draws and write the same bytes, in turns; then read all draws."""
    torch.manual_seed(0)
    net = make_network()
    weights = {name: tensor.detach()[None] for name, tensor in network_tensors(net).items()}
    first = next(iter(weights.values()))
    stream = create_stream(directory / "stream", net, Categorical(), weights)
    plain = directory / "plain"
    commits, writes, peaks = [], [], []
    for number in range(1, draws + 1):
        first.add_(1e-3)  # no draw is like another
        turns = [
            (commits, lambda step=number: stream.append(step, weights)),
            (writes, lambda: write_once(plain, weights)),
        ]
        for times, run in turns if number % 2 else turns[::-1]:
            # The pages that a removed file leaves to the next one make it faster: for both alike.
            plain.unlink(missing_ok=True)
            write_once(plain, weights)
            plain.unlink()
            times.append(seconds(run))
        peaks.append(peak_megabytes())
    reading, read_peaks = [], []
    stored = DrawStream.open(directory / "stream").draws()
    for index in range(draws):
        reading.append(seconds(lambda index=index: stored[index]))
        read_peaks.append(peak_megabytes())
    size = sum(path.stat().st_size for path in (directory / "stream").rglob("draw-*")) / draws
    return {
        "draws": draws,
        "draw_megabytes": size / 1e6,
        "peak_megabytes_after_draw_2": peaks[1],
        "peak_megabytes_after_last_draw": peaks[-1],
        "peak_megabytes_after_reading_2": read_peaks[1],
        "peak_megabytes_after_reading_all": read_peaks[-1],
        "commit_seconds": commits,
        "write_seconds": writes,
        "read_seconds": reading,
    }


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars, in the order in which they are printed."""
    ratios = [
        (
            "memory, writing",
            found["peak_megabytes_after_last_draw"] / found["peak_megabytes_after_draw_2"],
            MEMORY_BAR,
        ),
        (
            "memory, reading",
            found["peak_megabytes_after_reading_all"] / found["peak_megabytes_after_reading_2"],
            MEMORY_BAR,
        ),
        (
            "time, commit to write",
            statistics.median(found["commit_seconds"]) / statistics.median(found["write_seconds"]),
            TIME_BAR,
        ),
    ]
    return [
        {"bar": name, "value": value, "limit": limit, "passed": value <= limit}
        for name, value, limit in ratios
    ]


def report(found: dict[str, Any], bars: Sequence[dict[str, Any]]) -> None:
    print(f"{found['draws']} draws of {found['draw_megabytes']:.1f} MB")
    for what in ("draw_2", "last_draw", "reading_2", "reading_all"):
        peak = found[f"peak_megabytes_after_{what}"]
        print(f"  peak memory after {what.replace('_', ' '):12} {peak:7.0f} MB")
    for what in ("commit", "write", "read"):
        median = statistics.median(found[f"{what}_seconds"])
        print(f"  {what:6} {1e3 * median:7.0f} ms a draw, median")
    for bar in bars:
        word = "pass" if bar["passed"] else "FAIL"
        print(f"  {word}  {bar['value']:.3f} (at most {bar['limit']})  {bar['bar']}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draw_stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=100, help="draws to write (default 100)")
    parser.add_argument(
        "--directory",
        type=Path,
        help="where to make the temporary directory",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    if options.draws < 3:
        parser.error(f"--draws must be at least 3; got {options.draws}")
    return options


def check_space(directory: Path, draws: int) -> None:
    """Stop before the disk is full."""
    tensors = network_tensors(make_network()).values()
    needed = (draws + 2) * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = shutil.disk_usage(directory).free
    if free < 1.2 * needed:
        raise SystemExit(
            f"{draws} draws need {1.2 * needed / 1e9:.1f} GB, and {directory} has {free / 1e9:.1f} "
            "GB free. Pass fewer --draws or another --directory."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    setting = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        check_space(Path(directory), options.draws)
        found = measure(Path(directory), options.draws)
    bars = judge(found)
    report(found, bars)
    if options.json:
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        command = shlex.join(["python", "-m", "benchmarks.draw_stream", *arguments])
        result = {"command": command, **setting, "versions": versions, **found, "bars": bars}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
