"""Four ensembles on the toy regression, side by side.

``python -m benchmarks.toy_ensembles [--picture FILE]`` fits a deep ensemble, MultiSWAG on the same
members, randomised MAP and random prior functions to the points on [0, 0.5] through
``Trainer.fit``, with the network, prior and likelihood of ``benchmarks.toy_agreement``, and prints
the standard deviation of the predicted functions on the data and at both ends of the page
[-0.2, 1.2]. The members of one ensemble are trained as one program.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, PolynomialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DeepEnsemble, Posterior
from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.data import ToyRegression
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP
from lightning_bnn.priors import Normal

NOISE = 0.1
MEMBERS = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "deep ensemble": {},
    "randomised MAP": {"randomise": "targets and anchors"},
    "random prior functions": {"prior_function": 1.0},
}


def make_net() -> nn.Module:
    return MLP(1, [20, 20], 1, activation=nn.Tanh)


def falling(optimizer: torch.optim.Optimizer, epochs: int) -> LRScheduler:
    """Steps that end at zero: the members shall be at their optimum."""
    return PolynomialLR(optimizer, epochs, power=1.0)


def fit(data: ToyRegression, epochs: int, callbacks: Sequence[pl.Callback] = (), **options: Any):
    """An ensemble, through the trainer."""
    ensemble = DeepEnsemble(
        make_net, Gaussian(NOISE), Normal(0.0, 2.0, fan_in=True), members=MEMBERS,
        optimizer=partial(torch.optim.Adam, lr=0.01), seed=0, **options,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    points = TensorDataset(*data.splits.train.tensors)
    trainer.fit(ensemble, DataLoader(points, batch_size=50, shuffle=True))
    return ensemble


def fit_all(data: ToyRegression, epochs: int) -> dict[str, Posterior]:
    posteriors: dict[str, Posterior] = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(0)
        schedule = partial(falling, epochs=epochs)
        posteriors[name] = fit(data, epochs, scheduler=schedule, **options).posterior()
    # The steps stay large, so that the weights wander: their spread is what SWAG measures.
    torch.manual_seed(0)
    swag = SWAGMoments(start=0.5, every_n_epochs=max(1, epochs // 200), rank=20)
    fit(data, epochs, callbacks=[swag])
    posteriors["MultiSWAG"] = swag.posterior()
    return posteriors


def draw(path: Path, data: ToyRegression, posteriors: dict[str, Posterior]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from lightning_bnn.report.figures import draw_regression

    figure, panes = plt.subplots(
        2, 2, figsize=(10, 6.4), sharex=True, sharey=True, layout="constrained"
    )
    grid = data.grid()
    for axes, (name, posterior) in zip(panes.flat, posteriors.items(), strict=True):
        predictive = posterior.predict(grid, draws=10 * MEMBERS if name == "MultiSWAG" else None)
        draw_regression(axes, grid, predictive, data.splits.train.tensors, data.noise_free(grid))
        axes.set_title(name, fontsize=10)
        axes.set_ylim(-1.5, 2.5)
        axes.label_outer()
    for axes in panes.flat[1:]:
        axes.get_legend().remove()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser("benchmarks.toy_ensembles", description=__doc__)
    parser.add_argument("--picture", type=Path, help="draw the predictives here")
    parser.add_argument("--epochs", type=int, default=1500, help="of two steps each")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    data = ToyRegression(train_size=100)
    data.setup()
    posteriors = fit_all(data, options.epochs)
    places = torch.tensor([[-0.2], [0.25], [1.2]])
    found = {}
    print("standard deviation of the functions at x = -0.2, 0.25, 1.2")
    for name, posterior in posteriors.items():
        count = 10 * MEMBERS if name == "MultiSWAG" else None
        spread = posterior.predict(places, draws=count).epistemic.sqrt().flatten()
        found[name] = [round(float(one), 4) for one in spread]
        print(f"  {name:24}", *(f"{one:8.3f}" for one in found[name]))
    if options.picture:
        draw(options.picture, data, posteriors)
    return found


if __name__ == "__main__":
    main()
