"""Doubt between two clusters of data, by each method, beside long HMC.

``python -m benchmarks.in_between [--json FILE] [--picture FILE]`` fits one network (1-50-1, tanh),
prior and noise to points in [-1, -0.7] and [0.5, 1] through ``Trainer.fit``. It prints the standard
deviation of the functions on the gap [-0.5, 0.3], and on the data, over that of long HMC, where 1
is right, and draws the functions of six methods side by side.
The problem is that of Foong et al. (2019), "In-between uncertainty in Bayesian neural networks".
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pytorch_lightning as pl
import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    SGMCMC,
    DeepEnsemble,
    LaplaceBNN,
    MCDropoutBNN,
    Posterior,
    VariationalBNN,
)
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.families import FullRank
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP
from lightning_bnn.priors import Normal
from lightning_bnn.report.figures import draw_regression
from lightning_bnn.samplers import BAOA, HMC, SGHMC
from lightning_bnn.storage.manifest import package_versions

NOISE = 0.1
PRIOR = Normal(0.0, 3.0, fan_in=True)
PICTURED = {
    "HMC, long": "HMC", "Laplace, full": "Laplace, full matrix", "VI, full rank": "VI, full rank",
    "VI, mean field": "VI, mean field", "MC dropout": "MC dropout",
    "deep ensemble, 20": "deep ensemble of 20",
}  # fmt: skip
GAP, CLUSTERS = torch.linspace(-0.5, 0.3, 33)[:, None], torch.linspace(0.5, 1.0, 21)[:, None]


def make_net() -> nn.Module:
    return MLP(1, [50], 1, activation=nn.Tanh)


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(100, 1, generator=generator)
    inputs = torch.cat([-1 + 0.3 * inputs[:50], 0.5 + 0.5 * inputs[50:]])
    noise = NOISE * torch.randn(100, 1, generator=generator)
    return inputs, torch.cos(4 * inputs + 0.8) + noise


def fit(bnn: pl.LightningModule, steps: int, batch_size: int, *callbacks: pl.Callback) -> None:
    points = TensorDataset(*make_data())
    generator = torch.Generator().manual_seed(1)
    batches: list[list[int]] = []
    while len(batches) < min(1000, steps):  # many passes to an epoch, whose ends cost time
        order = torch.randperm(100, generator=generator).tolist()
        batches += [order[i : i + batch_size] for i in range(0, 100, batch_size)]
    pl.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(bnn, DataLoader(points, batch_sampler=batches))  # fmt: skip


def chains(sampler: Any, steps: int, batch_size: int, every: int) -> Posterior:
    torch.manual_seed(0)
    bnn = SGMCMC(
        make_net(), Gaussian(NOISE), PRIOR, sampler, chains=8, start="reset", warm_up=500,
        warm_up_optimizer=partial(torch.optim.Adam, lr=0.01), seed=0,
    )  # fmt: skip
    burn_in = 500 + steps // 4
    fit(bnn, steps + 500, batch_size, SampleCollector(burn_in=burn_in, every=every))
    return bnn.posterior()


def ensemble(steps: int, falling: bool = True, swag: int = 0, **options: Any) -> Posterior:
    torch.manual_seed(0)
    schedule = partial(PolynomialLR, total_iters=steps) if falling else None
    rate = {**falling_rate(steps), "scheduler": schedule}
    bnn = DeepEnsemble(make_net, Gaussian(NOISE), PRIOR, seed=0, **rate, **options)
    if not swag:
        fit(bnn, steps, 50)
        return bnn.posterior()
    moments = SWAGMoments(start=steps // 2, every_n_steps=max(1, steps // 400), rank=20)
    fit(bnn, steps, 50, moments)
    return moments.posterior()


def falling_rate(steps: int) -> dict[str, Any]:
    return {
        "optimizer": partial(torch.optim.Adam, lr=0.01), "scheduler_interval": "step",
        "scheduler": partial(PolynomialLR, total_iters=steps),
    }  # fmt: skip


def single(make: Any, steps: int, **options: Any) -> Posterior:
    """A method of one fit: a strategy of the network, the likelihood and the prior."""
    torch.manual_seed(0)
    bnn = make(make_net(), Gaussian(NOISE), PRIOR, seed=0, **falling_rate(steps), **options)
    fit(bnn, steps, 50)
    return bnn.posterior()


def spread(posterior: Posterior, inputs: Tensor) -> float:
    """The standard deviation of the functions, root mean square over the inputs."""
    count = len(posterior) if isinstance(posterior, Sized) else 1000
    predictive = posterior.predict(inputs, draws=count)
    return float(predictive.epistemic.mean().sqrt())


def draw(path: Path, posteriors: Mapping[str, Posterior]) -> None:
    """The functions of each method on a grid, side by side."""
    matplotlib.use("Agg")
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 5.6), sharex=True, sharey=True)
    grid = torch.linspace(-1.3, 1.3, 261)[:, None]
    for axes, (name, title) in zip(panels.flat, PICTURED.items(), strict=True):
        posterior = posteriors[name]
        count = min(len(posterior), 2000) if isinstance(posterior, Sized) else 1000
        draw_regression(axes, grid, posterior.predict(grid, draws=count), make_data())
        axes.set_title(title, fontsize=11)
        axes.set_ylim(-4, 4)
        axes.label_outer()
        axes.spines[["top", "right"]].set_visible(False)
        if axes is not panels[0, 0]:
            axes.get_legend().remove()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser("benchmarks.in_between", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures and versions here")
    parser.add_argument("--picture", type=Path, help="draw the functions of six methods here")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a quick look")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")

    def steps(count: int) -> int:
        return max(40, int(options.share * count))

    def hmc(count: int) -> Posterior:
        adapt = count // 5
        return chains(partial(HMC, lr=3e-3, leapfrog_steps=60, adapt_steps=adapt), count, 100, 1)

    runs = {
        "HMC, long": lambda: hmc(steps(4000)),
        "HMC": lambda: hmc(steps(800)),
        "BAOA": lambda: chains(partial(BAOA, lr=5e-4), steps(60000), 50, 50),
        "SGHMC": lambda: chains(partial(SGHMC, lr=5e-4, friction=0.05), steps(60000), 50, 50),
        "randomised MAP, 20": lambda: ensemble(
            steps(6000), members=20, randomise="targets and anchors"
        ),
        "MultiSWAG, 20": lambda: ensemble(steps(6000), falling=False, swag=1, members=20),
        "deep ensemble, 20": lambda: ensemble(steps(6000), members=20),
        "VI, mean field": lambda: single(VariationalBNN, steps(20000), estimator="local"),
        "VI, full rank": lambda: single(VariationalBNN, steps(20000), family=FullRank()),
        "Laplace, full": lambda: single(LaplaceBNN, steps(6000), structure="full"),
        "MC dropout": lambda: single(MCDropoutBNN, steps(20000)),
        "SWAG": lambda: ensemble(steps(6000), falling=False, swag=1, members=1),
    }
    found: dict[str, list[float]] = {}
    reference: list[float] = []
    pictured: dict[str, Posterior] = {}
    print(f"{'sd of the functions / that of long HMC':40} between the clusters, on one")
    for name, run in runs.items():
        posterior = run()
        values = [spread(posterior, GAP), spread(posterior, CLUSTERS)]
        reference = reference or values
        if name in PICTURED:
            pictured[name] = posterior
        found[name] = [round(one / other, 3) for one, other in zip(values, reference, strict=True)]
        print(f"{name:40}", *(f"{one:8.2f}" for one in found[name]), flush=True)
    if options.picture:
        draw(options.picture, pictured)
    if options.json:
        command = "python -m benchmarks.in_between --json FILE"
        facts = {"command": command, "share": options.share, "versions": package_versions()}
        record = {**facts, "hmc_sd": reference, "ratio_between_and_on_data": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
