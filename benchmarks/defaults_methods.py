"""The methods of :mod:`benchmarks.defaults`, each as its first program would be written.

No number is chosen here but the trainer's ``max_epochs`` and the batch size, which all methods of a
set share; HMC needs all examples in a batch.

``adam`` is plain Lightning: Adam at its usual rate of 1e-3, early stopping on the validation NLL (a
fifth of the epochs, at least 10, without a better one) and the best weights restored.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from benchmarks.defaults_peers import PEERS
from benchmarks.defaults_sets import SETS, Problem
from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.calibration.separation import separation
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.diagnostics import diagnose
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian, Likelihood
from lightning_bnn.metrics import (
    Accuracy,
    ExpectedCalibrationError,
    IntervalCoverage,
    NegativeLogLikelihood,
    RootMeanSquaredError,
)
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Learned, Normal, Prior
from lightning_bnn.samplers import HMC

__all__ = [
    "ADAM", "BASELINES", "BATCH", "METHODS", "OURS", "PRIORS", "Fitted", "Plain", "applies", "fit",
    "fit_ours", "fit_plain", "score", "timed",
]  # fmt: skip

ADAM, ADAM_ONE_NOISE = "adam", "adam-one-noise"
# what a method is compared with, if not with plain Adam: the same likelihood, by plain Adam
BASELINES = {"rmap": ADAM_ONE_NOISE}
PATIENCE, LEAST_PATIENCE = 0.2, 10
BATCH = 500  # of a prediction


@dataclass
class Fitted:
    """What a method leaves behind.

    Attributes:
        predict: Gives the predictive of a batch of inputs, with as many draws as is its default.
        seconds: The time of the fit on the wall, and of the processor.
        facts: What else is known of the fit: temperatures, R-hat, steps, members that are left.
    """

    predict: Callable[[Tensor], Predictive]
    seconds: float
    cpu_seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


def timed(train: Callable[[], None]) -> tuple[float, float]:
    """Train; the seconds on the wall and of the processor."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    train()
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def _trainer(epochs: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip


# ---------------------------------------------------------------- plain Adam


class Plain(pl.LightningModule):
    """A network and its likelihood, trained by Adam."""

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood

    def nll(self, batch: Any) -> Tensor:
        """The mean negative log likelihood of a batch."""
        inputs, targets = batch
        return -self.likelihood.predictive(self.net(inputs)[None]).log_prob(targets).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        return self.nll(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log what is watched."""
        self.log("val_nll", self.nll(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam as it comes."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def plain_adam(problem: Problem) -> Fitted:
    return fit_plain(problem, Plain(problem.net(), problem.likelihood()))


def plain_adam_one_noise(problem: Problem) -> Fitted:
    return fit_plain(problem, Plain(problem.net(outputs=1), Gaussian(learn=True)))


def fit_plain(problem: Problem, module: Plain) -> Fitted:
    patience = max(LEAST_PATIENCE, int(PATIENCE * problem.epochs))
    with tempfile.TemporaryDirectory() as folder:
        stop = EarlyStopping("val_nll", patience=patience)
        keep = ModelCheckpoint(folder, monitor="val_nll", save_weights_only=True)
        trainer = _trainer(problem.epochs, stop, keep, enable_checkpointing=True)
        seconds = timed(partial(trainer.fit, module, problem.data()))
        best = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
        module.load_state_dict(best)
    module.eval()

    def predict(inputs: Tensor) -> Predictive:
        with torch.no_grad():
            return module.likelihood.predictive(module.net(inputs)[None])

    share = trainer.current_epoch / problem.epochs  # of the epochs, before it stopped early
    return Fitted(predict, *seconds, {"steps": trainer.global_step, "share": share})


# ---------------------------------------------------------------- ours


def variational(problem: Problem, prior: Prior | None = None) -> Fitted:
    return fit_ours(problem, VariationalBNN(problem.net(), problem.likelihood(), prior))


def sgmcmc(problem: Problem, prior: Prior | None = None) -> Fitted:
    bnn = SGMCMC(problem.net(), problem.likelihood(), prior)
    return fit_ours(problem, bnn, SampleCollector())


def hmc(problem: Problem) -> Fitted:
    bnn = SGMCMC(problem.net(), problem.likelihood(), sampler=HMC)
    return fit_ours(problem, bnn, SampleCollector(), full_batch=True)


def ensemble(problem: Problem, prior: Prior | None = None) -> Fitted:
    return fit_ours(problem, DeepEnsemble(problem.net(), problem.likelihood(), prior))


def swag(problem: Problem) -> Fitted:
    bnn = DeepEnsemble(problem.net(), problem.likelihood(), members=1)
    return fit_ours(problem, bnn, SWAGMoments())


def multi_swag(problem: Problem) -> Fitted:
    return fit_ours(problem, DeepEnsemble(problem.net(), problem.likelihood()), SWAGMoments())


def randomised_map(problem: Problem) -> Fitted:
    likelihood = Gaussian(learn=True)  # a pilot finds the noise of targets
    bnn = DeepEnsemble(problem.net(outputs=1), likelihood, randomise="targets and anchors")
    return fit_ours(problem, bnn)


def fit_ours(
    problem: Problem, bnn: Any, *callbacks: pl.Callback, full_batch: bool = False
) -> Fitted:
    trainer = _trainer(problem.transitions if full_batch else problem.epochs, *callbacks)
    seconds = timed(partial(trainer.fit, bnn, problem.data(full_batch)))
    moments = next((one for one in callbacks if isinstance(one, SWAGMoments)), None)
    posterior = bnn.posterior() if moments is None else moments.posterior()
    facts: dict[str, Any] = {"steps": trainer.global_step, "draws": posterior.default_draws}
    if isinstance(bnn, SGMCMC) and (measured := bnn.measured_temperatures):
        facts["temperatures"] = measured["temperature"].tolist()
        if (positions := measured.get("configurational_temperature")) is not None:
            facts["configurational_temperatures"] = positions.tolist()
    if isinstance(bnn, DeepEnsemble):
        facts["dropped_members"] = int((~bnn.alive).sum())
    if isinstance(bnn, SGMCMC):
        facts |= _agreement(posterior, problem.splits.test.tensors[0])
    return Fitted(posterior.predict, *seconds, facts)


def _agreement(posterior: Any, inputs: Tensor) -> dict[str, Any]:
    """R-hat of the predictions: the worst of all watched numbers, and the median."""
    try:
        diagnosis = diagnose(posterior, inputs)
    except ConfigurationError as problem:  # too few draws, or ArviZ is not there
        return {"rhat_missing": str(problem)}
    values = torch.from_numpy(diagnosis.rhat)
    return {"rhat": diagnosis.max_rhat, "median_rhat": float(values.nanmedian())}


OURS: dict[str, Callable[[Problem], Fitted]] = {
    "vi": variational,
    "sgmcmc": sgmcmc,
    "ensemble": ensemble,
    "swag": swag,
    "multiswag": multi_swag,
    "rmap": randomised_map,
    "hmc": hmc,
}

# the methods with other priors than the default one
PRIORS: dict[str, Callable[[Problem], Fitted]] = {
    f"{name}-{called}": partial(method, prior=prior)
    for name, method in {"vi": variational, "sgmcmc": sgmcmc, "ensemble": ensemble}.items()
    for called, prior in {
        "fan-in": Normal(0.0, 1.0, fan_in=True),
        "learned": Normal(scale=Learned()),
    }.items()
}


def _peer(name: str, problem: Problem) -> Fitted:
    train, predict = PEERS[name].prepare(problem)
    return Fitted(predict, *timed(train))


METHODS: Mapping[str, Callable[[Problem], Fitted]] = {
    ADAM: plain_adam,
    ADAM_ONE_NOISE: plain_adam_one_noise,
    **OURS,
    **PRIORS,
    **{name: partial(_peer, name) for name in PEERS},
}


def applies(method: str, name: str) -> bool:
    """Whether a method is measured on a set."""
    if method == "hmc":
        return SETS[name].transitions > 0
    if method in ("rmap", ADAM_ONE_NOISE):
        return SETS[name].task == "regression"
    return method not in PEERS or SETS[name].task in PEERS[method].tasks


def fit(method: str, problem: Problem) -> Fitted:
    """Fit by a method, from the problem's seed."""
    pl.seed_everything(problem.seed, verbose=False)
    return METHODS[method](problem)


# ---------------------------------------------------------------- scores


def score(fitted: Fitted, problem: Problem) -> dict[str, float]:
    """How a method does on the test rows, in the unit of the target."""
    metrics: dict[str, Any] = {"nll": NegativeLogLikelihood()}
    if problem.task == "classification":
        metrics |= {"accuracy": Accuracy(), "ece": ExpectedCalibrationError()}
    else:
        metrics |= {"rmse": RootMeanSquaredError(), "coverage": IntervalCoverage(0.9)}
    inputs, targets = problem.splits.test.tensors
    doubts: dict[str, list[Tensor]] = {"mutual information": [], "entropy": []}
    draws = 1
    for batch, observed in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        predictive = fitted.predict(batch)
        draws = predictive.draws
        for metric in metrics.values():
            metric.update(predictive, observed)
        if problem.outside is not None:
            _add_doubts(doubts, predictive)
    scores = {name: float(metric.compute()) for name, metric in metrics.items()}
    if problem.task == "regression":
        scores["nll"] += torch.tensor(problem.target_scale).double().log().item()
        scores["rmse"] *= problem.target_scale
    if problem.outside is not None:
        outside: dict[str, list[Tensor]] = {name: [] for name in doubts}
        for batch in problem.outside.split(BATCH):
            _add_doubts(outside, fitted.predict(batch))
        areas = {
            name: separation(
                torch.cat(doubts[name]).double().numpy(), torch.cat(outside[name]).double().numpy()
            )["auroc"]
            for name in doubts
        }
        scores["auroc_entropy"] = areas["entropy"]
        # one network has no mutual information
        scores["auroc"] = areas["mutual information" if draws > 1 else "entropy"]
    return scores


def _add_doubts(doubts: dict[str, list[Tensor]], predictive: Predictive) -> None:
    doubts["mutual information"].append(predictive.mutual_information)
    doubts["entropy"].append(predictive.entropy)
