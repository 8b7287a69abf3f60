r"""IVON as a strategy: mean-field variational inference by natural gradients.

The same bound as :class:`~lightning_bnn.VariationalBNN` with its mean-field family, on any network
and under any prior, minimised by the update of :mod:`lightning_bnn.optimizers.natural` in the place
of Adam on means and scales: one vector of state fewer, and scales that follow the curvature. The
posterior is a Gaussian with the standard deviations
:math:`1/\sqrt{\lambda(h + \delta)}`. (Shen et al., 2024, *Variational Learning is Effective for
Large Deep Networks*.)

**The estimator.** An optimizer step takes one draw of the weights (``draws`` of them) whatever the
number of accumulated batches and processes, and their gradients are averaged: ĥ is then that of one
draw on one large batch, exactly. All processes have the same noise: their average is the gradient
of the whole batch at one point, replicas stay equal, and one state of the noise is in the
checkpoint. Clipping the norm of gradients scales those of means and scales alike.

**The defaults.** A scale on which the data are silent rises from σ₀ = 0.01 by a factor of
:math:`e^{(1-\beta_2)\,\text{steps}/2}`, here 4.5, whatever the length of the fit. Noise that the
means had no time to get used to costs as much as too little, as with Adam (``starting_scale`` in
:mod:`lightning_bnn.strategies.variational`). No mean moves by more in a step than Adam would move
it: without that bound, regressions whose noise is a function of the inputs diverged. NLL on
validation rows after 800 steps of the sets of ``benchmarks.defaults`` (one seed):

==========================  ======  ======  ======  ======  ======
\                           digits  boston  energy  yacht   naval
==========================  ======  ======  ======  ======  ======
``VariationalBNN``           .074    .276    -.92   -1.23    .93
η .2, σ₀ .01, factor 4.5     .055    .134   -1.22   -1.86    .65
η .1, σ₀ .01, factor 4.5     .085    .110   -1.34   -1.89    .73
η .2, σ₀ .02, factor 2.7     .071    .143   -1.10   -1.76    .75
η .1, σ₀ .03, factor 4.5     .208    .249    -.88   -1.54   1.05
the second, without bound    .049    .221    -.36    6.2   314
==========================  ======  ======  ======  ======  ======
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_bnn.checks import check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.optimizers import NaturalGradient
from lightning_bnn.optimizers.natural import check_rate
from lightning_bnn.posteriors.prior import GivenPrior
from lightning_bnn.priors import fan_in
from lightning_bnn.selection import Choice
from lightning_bnn.strategies.base import DataOptions
from lightning_bnn.strategies.schedule import (
    NamedSchedule,
    SchedulerFactory,
    peak_rate,
    steps_of_fit,
)
from lightning_bnn.strategies.variational import VariationalBNN
from lightning_bnn.target import Tempers

__all__ = ["IVONBNN"]

_LR = 0.2
_SCALE = 0.01
_FALL, _LEAST, _MOST = 3.0, 1e-5, 0.05  # (1 - beta2) times the steps of a fit; its bounds
_BETA2 = 0.999  # where the length of the fit is not known


class IVONBNN(VariationalBNN):
    """Variational inference by natural gradients, as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy, and its weights become the means.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors. A posterior is
            one, too (see :class:`~lightning_bnn.PosteriorPrior`).
        bayesian: Which weights are Bayesian (see :func:`lightning_bnn.selection.select`); the
            others are point estimates.
        num_data: N; found from the training data if left out.
        temperature: T, or ``"validation"``, as for ``VariationalBNN``.
        tempers: What T is the temperature of (see :mod:`lightning_bnn.target`).
        draws: Draws of the weights in each training step.
        lr: η, the rate of SGD at the scales that the fit begins with; by default 0.2.
        beta1: The momentum.
        beta2: How slowly precisions change; by default 1 − 3 / steps of the fit.
        radius: No mean moves by more than η times it in a step; by default so that a mean moves
            by at most :func:`lightning_bnn.strategies.schedule.peak_rate`, as under Adam.
        initial_scale: σ₀, the standard deviation that every weight starts with; by default 0.01.
        scheduler: ``"auto"`` and ``"cosine"``: a warm-up and a cosine to 0 over the fit; None: a
            constant rate; or what makes a learning-rate scheduler from the optimizer.
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction; None: 32.
        evidence_draws: As for ``VariationalBNN``.
        seed: Seed of the noise; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see :class:`DataOptions`).

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import Normal
        >>> bnn = IVONBNN(nn.Linear(2, 1), Gaussian(0.1), Normal(0.0, 1.0), num_data=100)
        >>> optimizer = bnn.configure_optimizers()["optimizer"]
        >>> bnn.loss((torch.randn(8, 2), torch.randn(8, 1))).backward()
        >>> optimizer.step()
        >>> bnn.posterior().predict(torch.randn(4, 2)).mean.shape
        torch.Size([4, 1])
    """

    family: MeanField
    defaults: ClassVar[Mapping[str, str]] = {"prior": "Normal()", "lr": f"{_LR}"}

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: GivenPrior | None = None,
        bayesian: Choice = None,
        num_data: int | None = None,
        temperature: float | Literal["validation"] = 1.0,
        tempers: Tempers = "likelihood",
        draws: int = 1,
        lr: float | None = None,
        beta1: float = 0.9,
        beta2: float | None = None,
        radius: float | None = None,
        initial_scale: float | None = None,
        scheduler: NamedSchedule | SchedulerFactory | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int | None = None,
        evidence_draws: int = 0,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        if isinstance(temperature, Real) and temperature == 0:
            raise ConfigurationError(
                "IVONBNN measures its steps by the posterior's width, which is 0 at temperature=0. "
                "Pass a positive one."
            )
        super().__init__(
            net,
            likelihood,
            prior,
            bayesian,
            num_data,
            temperature,
            tempers,
            draws=draws,
            initial_scale=_SCALE if initial_scale is None else initial_scale,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            predict_draws=predict_draws,
            evidence_draws=evidence_draws,
            seed=seed,
            **data,
        )
        self._rate = _LR if lr is None else check_number("lr", lr)
        self._beta1 = check_rate("beta1", beta1)
        self._beta2 = None if beta2 is None else check_rate("beta2", beta2)
        self._radius = None if radius is None else check_number("radius", radius)

    def configure_optimizers(self) -> Any:
        """Natural gradients for the Gaussian, and SGD for the rest."""
        gaussian = {id(one) for one in self.family.parameters()}
        points = [p for p in self.parameters() if p.requires_grad and id(p) not in gaussian]
        widest = max((fan_in(self.net, name) for name in self.trained), default=1)
        radius = peak_rate(widest, self._untrained) / self._rate
        optimizer = NaturalGradient(
            self.family.mean,
            self.family.rho,
            points,
            lr=self._rate,
            ess=self._ess() if self.target.knows_num_data else 1.0,  # until the fit begins
            scale=self._scale(),
            beta1=self._beta1,
            beta2=_BETA2 if self._beta2 is None else self._beta2,
            radius=radius if self._radius is None else self._radius,
        )
        schedule = self._chosen_schedule(self._scheduler, None)
        return self._with_schedule(optimizer, schedule, self._interval(schedule))

    def _ess(self) -> float:
        return self.target.num_data / self.target.temperature

    def _scale(self) -> float:
        return float(self.family.sd().detach().log().mean().exp())

    def on_train_start(self) -> None:
        """Begin with what the length of the fit says."""
        super().on_train_start()
        if self.global_step > 0:
            return
        steps = steps_of_fit(self.trainer)
        for group in self.trainer.optimizers[0].param_groups:
            group["scale"] = self._scale()
            if self._beta2 is None and not math.isinf(steps):
                group["beta2"] = 1 - min(max(_FALL / steps, _LEAST), _MOST)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Tell the optimizer N and T, which may change in the course of a fit."""
        for group in optimizer.param_groups:
            group["ess"] = self._ess()
