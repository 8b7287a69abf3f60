"""How far SGHMC on minibatches is from HMC, on a network with two hidden layers.

``python -m benchmarks.toy_agreement [--json FILE] [--picture FILE]`` samples the posterior of the
toy regression by full-batch HMC with accept/reject, the reference, and by SGHMC on minibatches,
both through ``Trainer.fit`` with the same network, prior and likelihood. It prints, over the
training range [0, 0.5] and over the whole page [-0.2, 1.2], how the two predictives differ:

* mean gap: |difference of the means| / HMC's predictive sd, the largest and the mean over x;
* sd ratio: SGHMC's predictive sd / HMC's, the smallest and the largest over x;
* W2: the Wasserstein distance of the two distributions of f(x), in units of HMC's predictive sd;
* total variation: ½∫|p − q| dy of the two predictive densities (of about 1000 draws), the mean
  over x.

Bar: the mean gap is at most 0.15 everywhere on the training range.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DrawsPosterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.data import ToyRegression
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import HMC, SGHMC
from lightning_bnn.storage.manifest import package_versions

BAR = 0.15
NOISE = 0.1
CHAINS = 8


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return MLP(1, [20, 20], 1, activation=nn.Tanh)


def sample(
    data: ToyRegression, sampler: Any, batch_size: int, steps: int, burn_in: int, every: int
) -> tuple[DrawsPosterior, SGMCMC]:
    """Draws of all chains, through the trainer."""
    bnn = SGMCMC(
        make_net(), Gaussian(NOISE), Normal(0.0, 2.0, fan_in=True), sampler, chains=CHAINS,
        start="reset", warm_up=500, warm_up_optimizer=partial(torch.optim.Adam, lr=0.01), seed=0,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_steps=steps + 500, max_epochs=-1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[SampleCollector(burn_in=burn_in + 500, every=every)],
    )  # fmt: skip
    # many passes to an epoch: epochs of a few steps would take most of the time
    count = len(data.splits.train)
    batches: list[list[int]] = []
    generator = torch.Generator().manual_seed(1)
    while len(batches) < 2000 // (1 if batch_size < count else 20):
        order = torch.randperm(count, generator=generator).tolist()
        batches += [order[i : i + batch_size] for i in range(0, count, batch_size)]
    trainer.fit(bnn, DataLoader(TensorDataset(*data.splits.train.tensors), batch_sampler=batches))
    posterior = bnn.posterior()
    assert isinstance(posterior, DrawsPosterior)
    return posterior, bnn


def functions(posterior: DrawsPosterior, grid: Tensor) -> Tensor:
    """f(x) of every draw, (draws, points)."""
    return posterior.predict(grid, draws=len(posterior)).outputs[..., 0].double()


def compare(one: Tensor, other: Tensor) -> dict[str, float]:
    """The figures of the docstring, of SGHMC's and of HMC's functions."""
    sd_one, sd_other = ((f.var(0) + NOISE**2).sqrt() for f in (one, other))
    gap = (one.mean(0) - other.mean(0)).abs() / sd_other
    levels = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    quantiles = [f.quantile(levels, dim=0) for f in (one, other)]
    distance = (quantiles[0] - quantiles[1]).square().mean(0).sqrt() / sd_other
    values = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    total = []
    thinned = [f[:: max(1, len(f) // 1000)] for f in (one, other)]
    for index in range(one.shape[1]):
        densities = [
            torch.exp(-0.5 * ((values - f[:, index, None]) / NOISE) ** 2).mean(0) for f in thinned
        ]
        densities = [d / d.sum() for d in densities]
        total.append(0.5 * (densities[0] - densities[1]).abs().sum())
    ratio = sd_one / sd_other
    return {
        "mean_gap_largest": float(gap.max()),
        "mean_gap_mean": float(gap.mean()),
        "sd_ratio_smallest": float(ratio.min()),
        "sd_ratio_largest": float(ratio.max()),
        "w2_mean": float(distance.mean()),
        "total_variation_mean": float(torch.stack(total).mean()),
    }


def draw(path: Path, data: ToyRegression, posteriors: dict[str, DrawsPosterior]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from lightning_bnn.report.figures import draw_regression

    figure, panes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    grid = data.grid()
    observed = data.splits.train.tensors
    for axes, (name, posterior) in zip(panes, posteriors.items(), strict=True):
        predictive = posterior.predict(grid, draws=min(400, len(posterior)))
        draw_regression(axes, grid, predictive, observed, data.noise_free(grid))
        axes.set_title(name, fontsize=10)
        axes.set_ylim(-1.5, 2.5)
    panes[1].set_ylabel("")
    panes[1].get_legend().remove()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser("benchmarks.toy_agreement", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures and versions here")
    parser.add_argument("--picture", type=Path, help="draw both predictives here")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a quick look")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    data = ToyRegression(train_size=100)
    data.setup()
    runs: dict[str, tuple[Any, int, int, int, int]] = {
        "SGHMC, minibatches of 50": (partial(SGHMC, lr=5e-4, friction=0.05), 50, 60000, 10000, 50),
        "HMC, all 100 points": (
            partial(HMC, lr=3e-3, leapfrog_steps=60, adapt_steps=200), 100, 2000, 400, 1,
        ),
    }  # fmt: skip
    posteriors: dict[str, DrawsPosterior] = {}
    facts: dict[str, Any] = {}
    for name, (sampler, batch_size, steps, burn_in, every) in runs.items():
        begin = time.perf_counter()
        share = options.share
        posterior, bnn = sample(
            data, sampler, batch_size, int(steps * share), int(burn_in * share), every
        )
        posteriors[name] = posterior
        facts[name] = {"draws": len(posterior), "seconds": round(time.perf_counter() - begin)}
        accepted = getattr(bnn.sampler, "acceptance", None)
        if accepted is not None:
            facts[name]["last_acceptance"] = [round(float(a), 3) for a in accepted]
        facts[name]["max_rhat"] = rhat(posterior, data)
        print(name, facts[name], flush=True)
    grid = data.grid()
    inside = (grid[:, 0] >= 0) & (grid[:, 0] <= 0.5)
    values = [functions(posterior, grid) for posterior in posteriors.values()]
    figures = {
        "training range": compare(values[0][:, inside], values[1][:, inside]),
        "page": compare(*values),
    }
    for place, found in figures.items():
        print(place, {name: round(value, 3) for name, value in found.items()})
    largest = figures["training range"]["mean_gap_largest"]
    print(f"{'pass' if largest <= BAR else 'FAIL'}  {largest:.3f} (at most {BAR})")
    if options.picture:
        draw(options.picture, data, posteriors)
    if options.json:
        kept = {"command": "python -m benchmarks.toy_agreement", "versions": package_versions()}
        text = json.dumps({**kept, "runs": facts, "figures": figures}, indent=2)
        options.json.write_text(text + "\n")
    return largest


def rhat(posterior: DrawsPosterior, data: ToyRegression) -> float:
    from lightning_bnn.diagnostics import diagnose

    inside = torch.linspace(0, 0.5, 26)[:, None]
    return round(float(diagnose(posterior, inside).max_rhat), 3)


if __name__ == "__main__":
    main()
