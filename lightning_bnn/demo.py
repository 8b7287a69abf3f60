"""The demo: small fits, a picture, two saved posteriors and a calibration report.

``lightning-bnn demo`` fits the one-dimensional regression of Bayes by Backprop, and
scikit-learn's digits in four ways: by plain Adam, variational inference, SG-MCMC and a deep
ensemble. It writes a picture, and a report that compares the four. The data ship with
scikit-learn or are made on the spot. It takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bnn import demo_digits
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.data import ToyRegression
from lightning_bnn.lightning import PACKAGE, pl
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP
from lightning_bnn.posteriors import Posterior
from lightning_bnn.priors import Normal
from lightning_bnn.report.figures import draw_regression, draw_shift
from lightning_bnn.strategies import VariationalBNN

__all__ = ["fit_toy", "main"]

TOY_EPOCHS = 750


def fit_toy(seed: int = 0, epochs: int = TOY_EPOCHS) -> tuple[Posterior, ToyRegression]:
    """Fit the toy regression: an MLP of 50-50 ReLU units, prior N(0, 1), learned noise."""
    pl.seed_everything(seed, verbose=False)
    data = ToyRegression(batch_size=128)
    bnn = VariationalBNN(
        MLP(1, [50, 50], 1),
        likelihood=Gaussian(0.05, learn=True),
        prior=Normal(0.0, 1.0),
        estimator="local",
        initial_scale=0.05,
        optimizer=partial(Adam, lr=1e-2),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs),
    )
    demo_digits.make_trainer(epochs, "Toy regression").fit(bnn, data)
    return bnn.posterior(), data


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo and write its picture, its posteriors and its reports."""
    parser = argparse.ArgumentParser("lightning-bnn demo", description=__doc__.split("\n\n")[1])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory to write to")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # Lightning's advice on workers is no part of a demo
    for logger in (f"{PACKAGE}.utilities.rank_zero", "lightning_bnn"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    torch.set_num_threads(1)  # networks this small lose more than they gain by a second thread
    console = Console()

    toy, toy_data = fit_toy()
    toy.save(out / "toy_posterior")
    grid = toy_data.grid(281)
    curve = toy.predict(grid, draws=256)
    sd = curve.variance.sqrt().flatten()
    inside = (grid.flatten() >= 0) & (grid.flatten() <= 0.5)
    console.print(
        f"Toy regression: predictive sd {float(sd[inside].mean()):.3f} on the data, "
        f"{float(sd[0]):.3f} and {float(sd[-1]):.3f} at the edges."
    )

    # the callback writes a report of the variational fit on its own
    own_report = CalibrationReport(out / "variational")
    named = {
        "plain Adam": demo_digits.fit_plain(),
        "variational": demo_digits.fit_variational(callbacks=[own_report]),
        "SG-MCMC": demo_digits.fit_chains(),
        "deep ensemble": demo_digits.fit_ensemble(),
    }
    named["variational"].save(out / "digits_posterior")
    console.print("Comparing them on the test digits ...")
    report = demo_digits.compare(named)
    report.save(out / "report.html")
    console.print(_table(report.numbers))
    console.print(str(report), markup=False, highlight=False)
    two = {name: named[name] for name in ("SG-MCMC", "plain Adam")}
    _picture(out / "predictive.png", grid, curve, toy_data, two)
    console.print(f"wrote predictive.png, report.html and two posteriors to {out}")


def _table(numbers: Mapping[str, Any]) -> Table:
    table = Table(title=f"Digits, {numbers['data']['examples']} test examples")
    names = ("accuracy", "nll", "brier", "ece")
    for heading in ("", *names):
        table.add_column(heading, justify="right" if heading else "left")
    for block in numbers["models"]:
        table.add_row(block["name"], *(f"{block['scalars'][name]:.4f}" for name in names))
    return table


def _picture(
    path: Path, grid: Tensor, curve: Any, toy: ToyRegression, named: Mapping[str, Posterior]
) -> None:
    matplotlib.use("Agg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4), width_ratios=(1.7, 1))
    draw_regression(left, grid, curve, toy.splits.train.tensors, toy.noise_free(grid))
    left.set_ylim(-1.5, 2.5)
    left.set_title("Sure where there are data, unsure beside them", fontsize=11)
    inputs, targets = demo_digits.unseen_digits()
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    shifted = {level: inputs + level * noise for level in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
    draw_shift(right, named, shifted, targets)
    right.set_xlabel("noise added to the digits' pixels")
    right.set_title("Digits: does it know when it errs?", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
