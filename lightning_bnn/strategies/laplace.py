r"""The Laplace approximation: a trained network, and a Gaussian from the curvature at its weights.

The network is trained to its mode w* as an ensemble of one member is
(:mod:`lightning_bnn.strategies.ensemble`): on the mean energy, with the best weights by validation.
Then one pass over the training data gives

.. math::
    q(w) = N\big(w^*, (H + P)^{-1}\big), \qquad
    H = \sum_i J_i^\top \Lambda_i J_i,

with J the derivatives of the outputs in the weights, Λ the Hessian (or the Fisher information) of
−log p in the outputs, and P the precision of the prior. H is the generalised Gauss-Newton matrix:
the Hessian of the linearised network, which is never negative. It is kept as its diagonal, as
Kronecker factors of each layer, or in full (:mod:`lightning_bnn.curvature`), of all weights or of
some; the others are point estimates. Where the network is linear in these weights and the noise
Gaussian and known, mean, covariance and evidence are exact.

The scales of the prior that the mode was found with are seldom those that the data ask for. With
``scales="one"`` or ``"per tensor"`` they are replaced, after the pass, by those that maximise the
evidence at w* (:mod:`lightning_bnn.curvature.evidence`). So is the noise of
``Gaussian(learn=True)``, which at the mode is that of the residuals of the training data, and too
small. With ``scales="validation"`` one factor is chosen by the NLL of validation data, of the
predictive that is asked for; the evidence is then that of a model chosen by other data, and no
measure for comparing models.

**Resuming.** The pass comes at the end of the last epoch, after its validation, and what it finds
is in the checkpoints that are written later. Sums that are half made are in none: a fit that is
killed in the pass takes all of it again when it is resumed, to the same numbers. Where there is a
checkpoint of the last step, nothing else is repeated: ``ModelCheckpoint`` writes one with
``every_n_train_steps``, or with ``save_on_train_epoch_end=False`` after each validation. As it is,
its last one is of the epoch before, which is then trained again, to the same weights.

MacKay (1992), *A Practical Bayesian Framework for Backpropagation Networks*; Ritter, Botev and
Barber (2018), *A Scalable Laplace Approximation for Neural Networks*; Daxberger et al. (2021),
*Laplace Redux*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bnn.checks import check_option, check_whole
from lightning_bnn.curvature import (
    Covariance,
    Processes,
    Scales,
    Structure,
    approximate,
    check_structure,
    collect,
    without_curvature,
)
from lightning_bnn.curvature.linear import some_examples
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import rank_zero_warn, sized_len
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import copy_network, network_tensors
from lightning_bnn.posteriors import LaplacePosterior, WeightPosterior
from lightning_bnn.posteriors.laplace import PredictiveKind
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior
from lightning_bnn.selection import Choice, FlatLayout, select, trainable_names
from lightning_bnn.strategies.bar import redraw
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory, Strategy
from lightning_bnn.strategies.ensemble import DeepEnsemble
from lightning_bnn.strategies.laplace_function import (
    check_own_prior,
    chosen_scales,
    mean_nll,
    tell_scales,
)
from lightning_bnn.strategies.schedule import NamedSchedule, SchedulerFactory
from lightning_bnn.strategies.training_batches import single_loader, validation_batches

__all__ = ["LaplaceBNN"]

_REHEARSED = 2  # examples, before a fit


class LaplaceBNN(DeepEnsemble):
    """A network trained to its mode, and a Laplace approximation there, as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy, and training begins at its weights.
        likelihood: How outputs of the network give targets.
        prior: One Gaussian prior for all weights, or a mapping from name patterns to such priors.
            A posterior is one, too (see :class:`~lightning_bnn.PosteriorPrior`); its scales are
            given.
        structure: How the curvature is kept: ``"diagonal"``; ``"kron"``, Kronecker factors of
            linear and convolutional layers; ``"full"``, a matrix of all weights, for thousands; or
            ``"low rank"``, its leading eigenpairs (:mod:`lightning_bnn.curvature.low_rank`).
        bayesian: Which weights vary: ``None`` for all, or as for
            :func:`lightning_bnn.selection.select`, such as
            :func:`lightning_bnn.selection.last_layer`. The others are point estimates.
        predictive: ``"linearised"``: the Gaussian over outputs of the linearised network;
            ``"draws"``: draws of the weights (see :mod:`lightning_bnn.posteriors.laplace`).
        scales: The prior's scales in the posterior. ``"given"``: those of ``prior``; ``"one"``:
            times one factor, which maximises the evidence; ``"per tensor"``: times one for each
            tensor; ``"validation"``: times one factor, which has the lowest NLL of the first
            validation data of the fit. None: as given if there is a ``prior``, else ``"one"``.
            With the evidence a learned noise scale (``Gaussian(learn=True)``) is found, too.
        num_data: The number of training examples; found from the training data if left out.
        optimizer: Makes the optimizer from parameters; by default Adam, at the rate of
            :func:`lightning_bnn.strategies.schedule.peak_rate`.
        scheduler: ``"auto"``, ``"cosine"``, None or what makes a learning-rate scheduler from the
            optimizer (see :class:`~lightning_bnn.strategies.base.Strategy`).
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        restore_best: Whether the curvature is taken at the best weights by validation, where the
            fit has validation data (see :class:`~lightning_bnn.DeepEnsemble`).
        predict_draws: Draws in validation, test and prediction; None: 32.
        rank: Of ``structure="low rank"``, the number of eigenpairs; None: 100.
        seed: Seed of what is random; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see
            :class:`~lightning_bnn.strategies.base.DataOptions`).

    Example:
        >>> from lightning_bnn.lightning import pl
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> bnn = LaplaceBNN(nn.Linear(1, 1), Gaussian(0.1), structure="full")
        >>> trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False)
        >>> trainer.fit(bnn, DataLoader(TensorDataset(x, 2 * x), batch_size=8))
        >>> bnn.posterior().predict(torch.tensor([[0.0], [9.0]])).epistemic.shape
        torch.Size([2, 1])
        >>> bnn.log_evidence() < 0
        True
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: GivenPrior | None = None,
        structure: Structure = "kron",
        bayesian: Choice = None,
        predictive: PredictiveKind = "linearised",
        scales: Scales | None = None,
        num_data: int | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: NamedSchedule | SchedulerFactory | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        restore_best: bool = True,
        predict_draws: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ConfigurationError(f"net= is a torch.nn.Module; got {type(net).__name__}.")
        names = select(net, bayesian)
        super().__init__(
            net, likelihood, prior, members=1, start="around", num_data=num_data,
            optimizer=optimizer, scheduler=scheduler, scheduler_interval=scheduler_interval,
            restore_best=restore_best, seed=seed, **data,
        )  # fmt: skip
        check_option("predictive", predictive, ("linearised", "draws"))
        self.predictive_kind: PredictiveKind = predictive
        self.predicts_with_samples = predictive == "draws"
        self.scales = chosen_scales(scales, prior)
        self.structure, self.rank = structure, rank
        check_structure(structure, self.net, names, rank)
        self.predict_draws = (
            None if predict_draws is None else check_whole("predict_draws", predict_draws, 1)
        )
        own = dict(self.net.named_parameters())
        self._names = names
        # of the weights that vary alone; a buffer of it holds pretrained locations
        self.own_prior = BoundPrior(
            chosen_prior(prior, trainable_names(net)), self.net, {name: own[name] for name in names}
        )
        self.own_prior.gaussian_precisions(torch.cat([own[n].detach().flatten() for n in names]))
        check_own_prior(self.scales, structure, self.own_prior)
        self._rehearsed = False
        self._phase = ""

    # ---------------------------------------------------------------- the curvature

    def on_fit_start(self) -> None:
        """Rehearse the pass with the first batch of the fit."""
        super().on_fit_start()
        self._rehearsed, self._phase = False, ""
        if self.scales == "validation" and not self.trainer.enable_validation:
            raise ConfigurationError(
                "scales='validation' chooses the prior's scale by the validation NLL, and this fit "
                "has no validation data. Pass val_dataloaders= (or a data module with "
                "val_dataloader) to fit, or scales='one', which needs none."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the curvature of two examples: what cannot work is said before time is spent."""
        super().on_train_batch_start(batch, batch_idx)
        if not self._rehearsed:
            self._rehearsed = True
            few = [some_examples(part, slice(_REHEARSED)) for part in self.split(batch)]
            weights, fixed = self._tensors()
            net = copy_network(self.net).eval()
            curvature, _ = collect(
                net, weights, fixed, self.likelihood_of(0), self.structure, [(few[0], few[1])],
                self.target.num_data, rank=1,
            )  # fmt: skip
            if nothing := without_curvature(curvature, self.likelihood):
                rank_zero_warn(f"Of the first examples: {nothing}", category=UserWarning)

    def finish(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """The curvature of all training data at the weights as they are, and the evidence."""
        trainer = self.trainer
        processes = Processes()
        if trainer.world_size > 1:
            add_up = partial(trainer.strategy.reduce, reduce_op="sum")
            processes = Processes(trainer.world_size, trainer.global_rank, add_up)
        total = sized_len(single_loader(trainer.train_dataloader))
        of = "" if total is None else f"/{total}"
        shown = self._in_phases("curvature", batches, of)
        nll = partial(self._validation_nll, processes=processes, tried=count(1))
        weights, fixed = self._tensors()
        found = approximate(
            copy_network(self.net).eval(), weights, fixed, self.likelihood_of(0), self.own_prior,
            self.structure, map(self.split, shown), self.target.num_data, self.rank, self.scales,
            nll if self.scales == "validation" else None, processes,
        )  # fmt: skip
        self._phase = ""
        tell_scales(self.scales, self._names, found)
        return {
            "log_evidence": torch.tensor(found.log_evidence, dtype=torch.float64),
            "precisions": torch.tensor(found.precisions, dtype=torch.float64),
            "noise": torch.tensor(found.noise, dtype=torch.float64),
            "mode": self._mode_of_weights(),
            **{f"covariance.{name}": t for name, t in found.covariance.tensors.items()},
        }

    def phase(self) -> dict[str, str]:
        """How far the pass is."""
        return {"phase": self._phase} if self._phase else super().phase()

    def _in_phases(self, name: str, items: Iterable[Any], of: str = "") -> Iterator[Any]:
        """Go through items, and show in the bar how far it is."""
        for number, item in enumerate(items, 1):
            self._phase = f"{name} {number}{of}"
            redraw(self.trainer)
            yield item

    def _validation_nll(
        self, covariance: Covariance, processes: Processes, tried: Iterator[int]
    ) -> float:
        self._phase = f"prior scale {next(tried)}"
        redraw(self.trainer)
        posterior = self._posterior_with(covariance)
        with validation_batches(self.trainer) as batches:
            pairs = map(self.split, batches)
            return mean_nll(posterior, pairs, self.draws_of(posterior), processes)

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights that vary, and all other tensors of the network, as they stand."""
        tensors = {**network_tensors(self.net)}
        tensors |= {name: tensor[0] for name, tensor in self.current_draws().items()}
        weights = {name: tensors.pop(name).detach() for name in self._names}
        return weights, {name: tensor.detach() for name, tensor in tensors.items()}

    def _mode_of_weights(self) -> Tensor:
        return torch.cat([row.detach()[0] for row in self.bank.stacked_parameters()])

    @property
    def _is_current(self) -> bool:
        """Whether the curvature is that of the weights as they stand."""
        mode = self.finished.get("mode")
        now = self._mode_of_weights()
        return mode is not None and torch.equal(mode.to(now), now)

    # ---------------------------------------------------------------- what it leaves behind

    @property
    def inferred(self) -> list[str]:
        """The names of the weights that vary."""
        return self._names

    @property
    def point_estimates(self) -> list[str]:
        """The names of the other weights that are trained."""
        return [name for name in self.trained if name not in set(self._names)]

    def posterior(self) -> WeightPosterior:
        """The Laplace approximation; before the end of a fit the trained weights alone.

        Raises:
            ConfigurationError: The weights were changed after the fit.
        """
        if not self._is_current:
            if self.finished and not self._is_fitting():
                raise ConfigurationError(
                    "The weights were changed after their curvature was taken (an average of "
                    "weights, or another state dict). Pass the network to lightning_bnn.laplace, "
                    "which takes it again."
                )
            return super().posterior()
        start = "covariance."
        tensors = {
            name.removeprefix(start): tensor.to(self.weights.device)
            for name, tensor in self.finished.items()
            if name.startswith(start)
        }
        layout = FlatLayout(self._tensors()[0])
        covariance = Covariance.kinds[self.structure](layout, tensors)
        return self._posterior_with(
            covariance, float(self.finished["log_evidence"]), float(self.finished["noise"])
        )

    def _posterior_with(
        self, covariance: Covariance, log_evidence: float | None = None, noise: float = 1.0
    ) -> LaplacePosterior:
        weights, fixed = self._tensors()
        likelihood = self.likelihood_of(0)
        if noise != 1.0:
            likelihood = likelihood.widened(noise)
        return LaplacePosterior(
            self.net, likelihood, weights, covariance, fixed, self.predictive_kind,
            log_evidence,
        )  # fmt: skip

    def member_posteriors(self) -> dict[int, WeightPosterior]:
        """The posterior, under number 0."""
        return {0: self.posterior()}

    def log_evidence(self) -> float:
        """The logarithm of p(D), in nats, at the prior scales of the posterior.

        Raises:
            ConfigurationError: The network has not been fitted.
        """
        if not self._is_current:
            raise ConfigurationError(
                "The evidence is found at the end of a fit. Call Trainer.fit, or load a "
                "checkpoint that was made after one."
            )
        return float(self.finished["log_evidence"])

    def prior_precisions(self) -> dict[str, float]:
        """By name, the precision 1/scale² of the prior of each tensor in the posterior.

        Tensors whose prior is a posterior have one for each weight, and are left out.
        """
        if not self._is_current:
            return {}
        found = zip(self._names, self.finished["precisions"].tolist(), strict=True)
        return {name: one for name, one in found if name not in self.own_prior.located}

    def _predict(self, inputs: Any) -> Predictive:
        """With the mode alone, or from the Laplace approximation."""
        if isinstance(self._snapshot, LaplacePosterior):
            return Strategy._predict(self, inputs)
        return super()._predict(inputs)
