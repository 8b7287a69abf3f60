"""What the files of version 0.1.0 were made with: networks, data, strategies and callbacks.

``test_files.py`` loads and resumes with them. Networks and data are closed formulas, so that
nothing here depends on a generator of random numbers. The script that fitted and saved with version
0.1.0 is ``tests/release_0_1/make.py`` of commit e8e3cc7; later versions must load these files and
must not write them anew.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, DrawsPosterior, Posterior, VariationalBNN
from lightning_bnn.callbacks import ChainMonitor, SampleCollector, SNRPruning, SWAGMoments
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.priors import Normal, StudentT
from lightning_bnn.pruning import mean_network
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT, Cyclical
from tests.trainers import quiet_trainer

FILES = Path(__file__).parent / "files"
EXPECTED = FILES / "expected.safetensors"

# -------------------------------------------------------------------- networks and data


def _waves(*shape: int, pace: float) -> Tensor:
    """Numbers between -1 and 1 that look irregular."""
    return torch.sin(pace * torch.arange(1, 1 + torch.Size(shape).numel()).float()).view(shape)


def _filled(net: nn.Module) -> nn.Module:
    for index, parameter in enumerate(net.parameters()):
        parameter.data = 0.5 * _waves(*parameter.shape, pace=1.7 + index)
    return net


def mlp(hidden: int = 8) -> nn.Module:
    return _filled(nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)))


def dropout_net() -> nn.Module:
    layers = (nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 2))
    return _filled(nn.Sequential(*layers))


def batch_norm_net() -> nn.Module:
    layers = (nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return _filled(nn.Sequential(*layers))


INPUTS = _waves(5, 3, pace=2.3)


def targets_of(likelihood: Likelihood, inputs: Tensor) -> Tensor:
    """Targets of the kind that a likelihood takes, for networks of two outputs."""
    pairs = torch.stack([inputs.sum(1), inputs[:, 0] - inputs[:, 1]], dim=1)
    kinds: dict[type, Callable[[], Tensor]] = {
        Gaussian: lambda: pairs,
        HeteroscedasticGaussian: lambda: pairs[:, :1],
        Categorical: lambda: (pairs[:, 0] > 0).long(),
        Bernoulli: lambda: (pairs > 0).float(),
        Poisson: lambda: pairs.abs().mul(2).round(),
    }
    return kinds[type(likelihood)]()


def training_data(likelihood: Likelihood, batch_size: int = 6, shuffle: bool = True) -> DataLoader:
    inputs = _waves(24, 3, pace=0.9)
    data = TensorDataset(inputs, targets_of(likelihood, inputs))
    return DataLoader(data, batch_size, shuffle=shuffle)


def predictions(posterior: Posterior) -> dict[str, Tensor]:
    """What a posterior says of fixed inputs: with each stored draw once, else with eight draws."""
    draws = len(posterior) if isinstance(posterior, DrawsPosterior) else 8
    predictive = posterior.predict(INPUTS, draws=draws, seed=3)
    targets = targets_of(posterior.likelihood, INPUTS)
    return {"mean": predictive.mean, "log_prob": predictive.log_prob(targets)}


def mean_weights(posterior: Posterior) -> dict[str, Tensor]:
    """The mean of each weight and buffer, by its name in the network."""
    return mean_network(posterior).state_dict()


def checkpoint(name: str, folder: Path) -> Path:
    """A copy of a kept checkpoint, which lies compressed, in a folder."""
    path = folder / f"{name}.ckpt"
    path.write_bytes(gzip.decompress((FILES / f"{name}.ckpt.gz").read_bytes()))
    return path


# -------------------------------------------------------------------- posteriors on disk

POSTERIORS: dict[str, Callable[[], nn.Module]] = {
    "gaussian": dropout_net,
    "draws": mlp,
    "stream": mlp,
    "low_rank": mlp,
    "ensemble": mlp,
    "multi_swag": mlp,
    "batch_norm": batch_norm_net,
    "sparse": partial(mlp, 200),
    "compact": partial(mlp, 20),
    "launched_members": mlp,
    "launched_chains": mlp,
}

# -------------------------------------------------------------------- fits with a checkpoint


class Plain(pl.LightningModule):
    """A LightningModule that knows nothing of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Fit:
    """A fit of 16 steps, or epochs, that was saved in the midst of it.

    Args:
        module: The class of what is fitted.
        options: Gives its arguments.
        callbacks: Gives the callbacks, where draws are written to a given folder.
        likelihood: Of which kind the data are.
        batch_size: Of 24 examples; 24 makes an epoch one step.
        compiled: Whether the noise came from the compiled generator, which a machine without a C
            compiler cannot resume.
    """

    module: type[pl.LightningModule]
    options: Callable[[], dict[str, Any]]
    callbacks: Callable[[Path], Sequence[pl.Callback]] = lambda folder: ()
    likelihood: Likelihood = Gaussian()  # noqa: RUF009
    batch_size: int = 6
    compiled: bool = False

    def run(self, folder: Path, ckpt_path: Path) -> tuple[pl.LightningModule, list[pl.Callback]]:
        """Fit from a checkpoint to the end; the module and its callbacks."""
        torch.manual_seed(1)  # the checkpoint decides, not this
        module, callbacks = self.module(**self.options()), list(self.callbacks(folder))
        epochs = 16 * self.batch_size // 24
        trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, log_every_n_steps=1)
        shuffle = self.module is not Plain
        with warnings.catch_warnings():
            # chains of 16 steps do not agree, of which ChainMonitor warns
            warnings.filterwarnings("ignore", "ChainMonitor", UserWarning)
            data = training_data(self.likelihood, self.batch_size, shuffle)
            trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return module, callbacks

    def end(self, module: Any, callbacks: Sequence[pl.Callback]) -> dict[str, Tensor]:
        """What the fit leaves: predictions of each posterior, and what callbacks have noted."""
        found = {}
        if not isinstance(module, Plain):
            found |= predictions(module.posterior())
        for number, callback in enumerate(callbacks):
            noted: dict[str, Tensor] = {}
            if isinstance(callback, (SampleCollector, SWAGMoments)):
                noted |= predictions(callback.posterior())
            if isinstance(callback, SampleCollector):
                noted["steps"] = torch.tensor(callback.steps)
                noted["draws"] = torch.tensor(len(callback))
            if isinstance(callback, ChainMonitor):
                noted["recorded"] = torch.tensor(callback.recorded)
            if isinstance(callback, SNRPruning):
                removed = [(one.step, one.removed) for one in callback.history]
                noted["removed"] = torch.tensor(removed)
            found |= {f"callback_{number}.{name}": tensor for name, tensor in noted.items()}
        return found


def _variational() -> dict[str, Any]:
    """Point estimates beside Bayesian weights, dropout, and noise that is learned."""
    return {
        "net": dropout_net(),
        "likelihood": Gaussian(0.3, learn=True, noise_prior=0.0),
        "prior": {"*.bias": Normal(0.0, 1.0), "*": Normal(0.0, 2.0, fan_in=True)},
        "bayesian": "3.*",
        "kl_warmup": 12,
        "optimizer": partial(Adam, lr=0.03),
        "scheduler": partial(StepLR, step_size=3),
        "seed": 5,
    }


def _flipout() -> dict[str, Any]:
    return {
        "net": mlp(),
        "likelihood": Categorical(),
        "prior": Normal(loc="pretrained"),
        "estimator": "flipout",
        "family": MeanField("softplus"),
        "draws": 2,
        "optimizer": partial(Adam, lr=0.03),
        "seed": 5,
    }


def _pruned() -> dict[str, Any]:
    """Whole neurons go, and their biases, which are point estimates, with them."""
    return {
        "net": mlp(),
        "likelihood": Bernoulli(),
        "prior": {"*.bias": Normal(), "*": StudentT(0.0, 0.5, df=4.0)},
        "bayesian": "*.weight",
        "initial_scale": 0.1,
        "optimizer": partial(Adam, lr=0.03),
        "seed": 5,
    }


def _snapshots() -> dict[str, Any]:
    return {
        "net": batch_norm_net(),
        "likelihood": HeteroscedasticGaussian(),
        "members": [0, 2],
        "mode": "stacked",
        "optimizer": partial(Adam, lr=0.03),
        "snapshots": 3,
        "seed": 5,
    }


def _optimizers() -> dict[str, Any]:
    return {
        "net": mlp(),
        "start": "around",
        "likelihood": Gaussian(0.3, learn=True, noise_prior=0.0),
        "members": 2,
        "mode": "loop",
        "independent_batches": True,
        "optimizer": [partial(Adam, lr=0.03), partial(SGD, lr=0.03, momentum=0.9)],
        "scheduler": [partial(StepLR, step_size=3), partial(ExponentialLR, gamma=0.8)],
        "seed": 5,
    }


def _variants() -> dict[str, Any]:
    """No seed is given: the checkpoint has it, and with it each member's noise and weights."""
    return {
        "net": mlp(),
        "likelihood": Gaussian(0.3),
        "members": 2,
        "mode": "stacked",
        "adversarial": 0.05,
        "bootstrap": True,
        "randomise": "targets and anchors",
        "prior_function": 1.0,
        "optimizer": partial(Adam, lr=0.03),
    }


def _members() -> dict[str, Any]:
    return {
        "net": mlp(),
        "likelihood": Poisson(),
        "members": 2,
        "mode": "stacked",
        "optimizer": partial(SGD, lr=0.05),
        "seed": 5,
    }


def _chains(sampler: Any, **options: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"net": mlp(), "likelihood": Gaussian(0.5), "chains": 2, "seed": 5}
    return {**shared, "sampler": sampler, "mode": "loop", **options}


def _sghmc() -> dict[str, Any]:
    """A warm-up that trains the noise and the point estimates, then cycles."""
    return _chains(
        partial(SGHMC, lr=0.01),
        likelihood=Gaussian(0.5, learn=True, noise_prior=0.0),
        bayesian="2.*",
        warm_up=4,
        warm_up_optimizer=partial(Adam, lr=0.03),
        scheduler=partial(Cyclical, cycle_length=4, exploration=0.25),
    )


def _batch_norm_chains() -> dict[str, Any]:
    net = batch_norm_net()
    return _chains(partial(SGLD, lr=0.01), net=net, likelihood=Categorical(), chains=[1, 3])


FITS: dict[str, Fit] = {
    "variational": Fit(VariationalBNN, _variational, compiled=True),
    "flipout": Fit(VariationalBNN, _flipout, likelihood=Categorical()),
    "pruned": Fit(
        VariationalBNN,
        _pruned,
        lambda folder: [
            SNRPruning(0.5, start=0.25, end=0.9, unit="channel", every_n_steps=3),
        ],
        likelihood=Bernoulli(),
    ),
    "snapshots": Fit(DeepEnsemble, _snapshots, likelihood=HeteroscedasticGaussian()),
    "optimizers": Fit(DeepEnsemble, _optimizers),
    "variants": Fit(DeepEnsemble, _variants),
    "multi_swag": Fit(
        DeepEnsemble,
        _members,
        lambda folder: [SWAGMoments(start=1, every_n_steps=2, rank=3, lr=0.1, anneal=12)],
        likelihood=Poisson(),
    ),
    "plain_swag": Fit(
        Plain,
        dict,
        lambda folder: [SWAGMoments(0.25, 1, net="model", likelihood=Categorical(), rank=4)],
        likelihood=Categorical(),
        batch_size=24,
    ),
    "sghmc": Fit(
        SGMCMC,
        _sghmc,
        lambda folder: [SampleCollector(burn_in=5, every=2, dirpath=folder / "stream")],
        compiled=True,
    ),
    "hmc": Fit(
        SGMCMC,
        lambda: _chains(partial(HMC, lr=0.05, leapfrog_steps=4, adapt_steps=4)),
        lambda folder: [SampleCollector(burn_in=6, every=2), ChainMonitor(2, 6, examples=3)],
        batch_size=24,
    ),
    "batch_norm_chains": Fit(
        SGMCMC,
        _batch_norm_chains,
        lambda folder: [SampleCollector(every=5), SampleCollector(every=2, refresh_batch_norm=2)],
        likelihood=Categorical(),
    ),
    "psgld": Fit(SGMCMC, lambda: _chains(partial(PSGLD, lr=1e-3))),
    "sgnht": Fit(SGMCMC, lambda: _chains(partial(SGNHT, lr=1e-3))),
    "baoa": Fit(SGMCMC, lambda: _chains(partial(BAOA, lr=1e-3))),
}


# -------------------------------------------------------------------- launched runs


def launched_members(members: list[int], seed: int) -> DeepEnsemble:
    return DeepEnsemble(mlp(), Gaussian(0.3), members=members, mode="loop", seed=seed)


def launched_chains(members: list[int], seed: int) -> SGMCMC:
    options = _chains(partial(SGLD, lr=1e-3), chains=members)
    return SGMCMC(**{**options, "seed": seed})


def launched_data() -> DataLoader:
    return training_data(Gaussian(), batch_size=12)


def launched_trainer() -> dict[str, Any]:
    swag = SWAGMoments(start=0, every_n_steps=1)
    return {"max_epochs": 2, "callbacks": [swag], "logger": False}
