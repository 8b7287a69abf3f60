"""Learned prior scales in variational inference, beside scales that are given.

``python -m benchmarks.learned_scales --data-dir DIR [--json FILE]`` trains ``VariationalBNN`` with
its defaults at T = 1 on MNIST, a perceptron 784-200-200-10 with ReLU, under N(0, s²) for several s,
under N(0, 1/fan-in) and under ``Normal(scale=Learned())``. It prints accuracy and NLL on the test
images, and the KL. How long the fits are decides what is compared: σ of a weight on which the data
are silent rises to the prior's scale only in a long fit, and in a short one wide priors are good
because it has not. ``--epochs`` takes several lengths.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.defaults_methods import BATCH
from benchmarks.options import versions, write
from benchmarks.uci import mean_and_error, without_place
from lightning_bnn import VariationalBNN
from lightning_bnn.data import MNIST
from lightning_bnn.data.in_memory import DATA_VARIABLE
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.metrics import Accuracy, NegativeLogLikelihood
from lightning_bnn.nets import MLP
from lightning_bnn.priors import Learned, Normal

PRIORS = {
    "learned": Normal(scale=Learned()),
    **{f"{scale:g}": Normal(0.0, scale) for scale in (0.03, 0.1, 0.3, 1.0)},
    "fan-in": Normal(0.0, 1.0, fan_in=True),
}


def measure(prior: str, epochs: int, seed: int, data_dir: Path) -> dict[str, float]:
    """Fit and test."""
    pl.seed_everything(seed, verbose=False)
    data = MNIST(data_dir / "mnist", batch_size=128, validation=0)
    bnn = VariationalBNN(MLP(784, [200, 200], 10), Categorical(), PRIORS[prior])
    pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(bnn, data)  # fmt: skip
    posterior, metrics = bnn.posterior(), {"nll": NegativeLogLikelihood(), "accuracy": Accuracy()}
    inputs, targets = data.splits.test.tensors
    for batch, observed in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        predictive = posterior.predict(batch)
        for metric in metrics.values():
            metric.update(predictive, observed)
    scores = {name: float(metric.compute()) for name, metric in metrics.items()}
    with torch.no_grad():
        kl = float(bnn.family.kl(bnn.family.rsample(torch.zeros_like(bnn.family.mean)), bnn.prior))
    return {**scores, "kl": kl}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m benchmarks.learned_scales", description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get(DATA_VARIABLE))
    parser.add_argument("--epochs", type=int, nargs="+", default=[40])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PRIORS, default=list(PRIORS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here")
    options = parser.parse_args(arguments)
    if options.data_dir is None:
        parser.error(f"pass --data-dir, or set {DATA_VARIABLE}")
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    rows: dict[str, dict[str, Any]] = {}
    for epochs in options.epochs:
        print(
            f"\n| prior, {epochs} epochs | test NLL | test error % | KL, nats |\n|---|---|---|---|"
        )
        for prior in options.only:
            found = [
                measure(prior, epochs, seed, options.data_dir) for seed in range(options.seeds)
            ]
            row = {
                name: mean_and_error([one[name] for one in found])._asdict() for name in found[0]
            }
            rows[f"{prior}, {epochs} epochs"] = row
            nll, error = row["nll"], 100 * (1 - row["accuracy"]["mean"])
            spread = f" ± {nll['spread']:.4f}" if nll["spread"] is not None else ""
            print(
                f"| {prior} | {nll['mean']:.4f}{spread} | {error:.2f} | {row['kl']['mean']:,.0f} |",
                flush=True,
            )
            result = {"seeds": options.seeds, "versions": versions(["lightning-bnn"]), "rows": rows}
            write(options.json, "learned_scales", without_place(arguments), result)
    return rows


if __name__ == "__main__":
    main()
