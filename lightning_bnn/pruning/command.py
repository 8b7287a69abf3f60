"""Remove the weights with the least signal from a saved posterior.

``lightning-bnn prune --posterior runs/vi --fraction 0.95 --data configs/data/digits.yaml --out
runs/small`` reads a posterior, prints how its scores on the test data change as more and more is
removed, and saves the pruned posterior. The configuration of the fit is used only where
``--config`` names it, and is then saved beside the pruned posterior.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from typing import get_args

import fsspec
from rich.filesize import decimal

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import in_precision_of, network_tensors
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.pruning.compact import compact
from lightning_bnn.pruning.curve import (
    FRACTIONS,
    align,
    check_curve_name,
    check_fractions,
    percent,
    prune_curve,
)
from lightning_bnn.pruning.export import check_export_name, export_network
from lightning_bnn.pruning.functions import prune, support
from lightning_bnn.pruning.masks import Rest, Scope, Unit, check_fraction
from lightning_bnn.pruning.removable import candidates
from lightning_bnn.pruning.section import Pruning
from lightning_bnn.report.document import check_page_name, folder_problem
from lightning_bnn.report.gather import batch_inputs, first_batch
from lightning_bnn.report.networks import (
    folder_of,
    instantiate,
    load_configured,
    path_names,
    read_configuration,
)
from lightning_bnn.report.posteriors import data_loader, report_posteriors
from lightning_bnn.storage.files import open_directory
from lightning_bnn.storage.manifest import MANIFEST

__all__ = ["main", "stored_bytes"]

_NEED_DATA = ("fractions", "report", "figure", "export")


def main(
    arguments: Sequence[str] | None = None, load: Callable[..., Posterior] = Posterior.load
) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The words after ``lightning-bnn prune``.
        load: Reads a posterior from its folder.

    Raises:
        ConfigurationError: A folder, a file, a fraction or a combination of options is wrong.
    """
    options = _parser().parse_args(arguments)
    fractions = _check(options)
    source = folder_of(options.posterior)
    posterior = _load(source, options.config, load)
    data = None
    if options.data is not None:
        data = instantiate(read_configuration(options.data), "data", options.data)
    choice = {name: getattr(options, name) for name in ("unit", "scope", "protect", "rest")}
    with warnings.catch_warnings():
        # Lightning's advice on workers of loaders is no part of this
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        pruned = prune(posterior, options.fraction, **choice)
        kept = compact(pruned) if options.compact else pruned
        if options.export is not None:  # first: not every network can be exported
            batch = first_batch(data_loader(data), "The test data of --data")
            inputs = in_precision_of(network_tensors(kept.net), kept.net, batch_inputs(batch))
            print(f"The mean network is in {export_network(kept, options.export, inputs)}")
        if data is not None:
            curve = prune_curve(posterior, data, fractions, draws=options.draws, **choice)
            print(f"{curve}\n")
            if options.figure is not None:
                print(f"The figure is in {curve.save(options.figure)}")
        print(_layers(pruned))
        if options.compact:
            small, large = (
                sum(p.numel() for p in one.net.parameters()) for one in (kept, posterior)
            )
            print(f"The compact network has {small:,} of {large:,} parameters.")
        if options.out is not None:
            _save(kept, source, options.out, options.config)
        if options.report is not None:
            name = path_names([options.posterior])[0]
            both = {name: posterior, f"{name}, {percent(options.fraction)} removed": pruned}
            sections = [Pruning({name: curve})]
            made = report_posteriors(both, data, draws=options.draws, sections=sections)
            print(f"The report is in {made.save(options.report)}")
    return 0


def _check(options: argparse.Namespace) -> tuple[float, ...]:
    """Everything that can be wrong with the words alone; the fractions of the table."""
    check_fraction(options.fraction, "--fraction")
    missing = [name for name in _NEED_DATA if getattr(options, name) is not None]
    if options.data is None and missing:
        raise ConfigurationError(
            f"--{missing[0]} needs data: pass --data FILE, a YAML file with a data module."
        )
    checks = {"figure": check_curve_name, "report": check_page_name, "export": check_export_name}
    for name in (*checks, "out"):
        path = getattr(options, name)
        if path is None:
            continue
        if name in checks:
            checks[name](path)
        folder = path.rstrip("/") if name == "out" else os.path.dirname(path) or "."
        if (reason := folder_problem(folder)) is not None:
            raise ConfigurationError(f"--{name} cannot be written to {folder!r} ({reason}).")
    if options.out is not None and open_directory(options.out).names():
        raise ConfigurationError(
            f"--out is expected to be a new or empty folder; something is in {options.out}. Name "
            "another, or remove what is there."
        )
    smaller = [fraction for fraction in FRACTIONS if fraction < options.fraction]
    return check_fractions([*(options.fractions or smaller), options.fraction])


def _load(
    source: str, configuration: str | None, load: Callable[..., Posterior]
) -> WeightPosterior:
    posterior = load_configured(source, configuration, load)
    if not isinstance(posterior, WeightPosterior):
        raise ConfigurationError(
            f"Only a posterior over weights can be pruned; {source} holds a "
            f"{type(posterior).__name__}."
        )
    return posterior


def _layers(pruned: WeightPosterior) -> str:
    """What is left of each weight, and of all of them."""
    somewhere = support(pruned)
    names = candidates(pruned.net, pruned.varying)
    sizes = [(name, somewhere[name].numel(), int(somewhere[name].sum())) for name in names]
    sizes.append(("together", sum(row[1] for row in sizes), sum(row[2] for row in sizes)))
    rows = [
        (name, f"{size:,}", f"{left:,}", f"{1 - left / size:.2%}") for name, size, left in sizes
    ]
    return align([*zip(("layer", "weights", "left", "removed"), *rows, strict=True)])


def _save(
    posterior: WeightPosterior, source: str, directory: str, configuration: str | None
) -> None:
    """Save the posterior, and beside it the configuration of the fit, if it was given."""
    posterior.save(directory)
    if configuration is not None:
        with fsspec.open(configuration, "rb") as file:
            content = file.read()
        with fsspec.open(f"{directory.rstrip('/')}/config.yaml", "wb") as file:
            file.write(content)
    before, after = stored_bytes(source), stored_bytes(directory)
    print(f"It takes {decimal(after)} instead of {decimal(before)} ({after / before:.1%}).")
    print(f"The pruned posterior is in {directory}")


def stored_bytes(directory: str | os.PathLike[str]) -> int:
    """The bytes of all files of a stored posterior, its manifest included.

    What else lies in the folder (a log, a configuration) does not count; of a launched run all that
    its members left does.

    Example:
        >>> import torch
        >>> from lightning_bnn.storage import store
        >>> blobs = {"0": {"w": torch.ones(1000)}}
        >>> store.write("memory://saving-doc-bytes", kind="draws", blobs=blobs, fields={})
        >>> 4000 < stored_bytes("memory://saving-doc-bytes") < 6000
        True
    """
    filesystem, name = fsspec.core.url_to_fs(os.fspath(directory))
    paths = [f"{name.rstrip('/')}/{entry}" for entry in (MANIFEST, "blobs", "records", "units")]
    return sum(int(filesystem.du(path)) for path in paths if filesystem.exists(path))


def shares(text: str) -> list[float]:
    """Numbers with commas between them; argparse names this function where they are none."""
    return [float(share) for share in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-bnn prune",
        usage="lightning-bnn prune --posterior FOLDER --fraction SHARE [--data FILE] "
        "[--out FOLDER] [options]",
        description="Remove the weights with the lowest signal-to-noise ratio |mean| / sd from a "
        "posterior, and show what that does to its predictions. A posterior of known layers says "
        "how its network is made; for a network of your own, pass --config.",
    )
    add = parser.add_argument
    add("--posterior", required=True, metavar="FOLDER",
        help="folder or URL of a posterior, or of the run that holds it")  # fmt: skip
    add("--fraction", required=True, type=float, metavar="SHARE",
        help="the share of the weights to remove, from 0 up to but not including 1")  # fmt: skip
    add("--data", metavar="FILE",
        help="YAML file with class_path and init_args of a data module, or the configuration of a "
        "fit: print scores on its test data")  # fmt: skip
    add("--out", metavar="FOLDER",
        help="new folder or URL for the pruned posterior, and for --config beside it")  # fmt: skip
    add("--fractions", type=shares, metavar="LIST",
        help="shares of the table and the figures, such as 0,0.5,0.9; by default some up to "
        "--fraction")  # fmt: skip
    add("--unit", choices=get_args(Unit), default="weight",
        help="remove single weights, or whole channels and neurons")  # fmt: skip
    add("--scope", choices=get_args(Scope), default="global",
        help="one threshold for all layers, or the same share of each layer")  # fmt: skip
    add("--protect", action="extend", nargs="+", metavar="PATTERN",
        help="names of weights that stay, such as 'head.*'")  # fmt: skip
    add("--rest", choices=get_args(Rest), default="raise",
        help="with --unit channel: refuse layers whose units cannot be removed, keep them, or "
        "remove single weights there")  # fmt: skip
    add("--compact", action="store_true",
        help="leave out units that are zero everywhere: a smaller network")  # fmt: skip
    add("--draws", type=int, metavar="N",
        help="draws of each prediction; by default 32, or all that are stored")  # fmt: skip
    add("--report", metavar="FILE",
        help="write a calibration report of the posterior before and after (.html)")  # fmt: skip
    add("--figure", metavar="FILE",
        help="write the figure of the table (.png, .svg, .pdf) or its numbers (.json)")  # fmt: skip
    add("--export", metavar="FILE",
        help="write the mean network of the pruned posterior as .onnx or .pt2")  # fmt: skip
    add("--config", metavar="FILE",
        help="configuration of the fit, which makes the network; a config.yaml beside the "
        "posterior is used only if it is named here")  # fmt: skip
    return parser
