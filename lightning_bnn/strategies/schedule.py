r"""The default schedule of the learning rate: a linear warm-up, then a cosine to the fit's end.

In step t = 0, 1, ... of a fit of T steps the learning rate is

.. math::
    \eta_t = \eta\,\frac{t+1}{W} \quad (t < W), \qquad
    \eta_t = \frac{\eta}{2}\left[1 + \cos\frac{\pi\,(t-W)}{T-W}\right] \quad (t \ge W),

with a warm-up of W = max(10, 5 % of T) steps, but at most a quarter of T. So it is nearly 0 in the
last step, and 0 if there should be more. T is what the trainer's ``max_epochs`` and ``max_steps``
allow. Where no length is known (``max_epochs=-1``, training data without a length, ``max_time``
alone), η stays constant after a warm-up of 100 steps. (Loshchilov and Hutter, 2017, *SGDR*; Goyal
et al., 2017, *Accurate, Large Minibatch SGD*, for the warm-up.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bnn.checks import check_factory, check_option
from lightning_bnn.lightning import GradientAccumulationScheduler, pl

__all__ = [
    "CONSTANT_RATE",
    "NamedSchedule",
    "SchedulerFactory",
    "WarmUpCosine",
    "check_scheduler",
    "default_schedules",
    "fit_schedules",
    "make_scheduler",
    "peak_rate",
    "schedule_factor",
    "steps_of_fit",
    "warm_up_steps",
]

SchedulerFactory = Callable[[Optimizer], LRScheduler]
NamedSchedule = Literal["auto", "cosine"]

CONSTANT_RATE = 1e-3  # of the default Adam where no schedule lowers it
_PEAK, _PEAK_RESTORED, _PER_INPUT = 5e-3, 1e-2, 1 / 8
_SHARE = 0.05
_LEAST = 10
_UNKNOWN = 100  # steps of warm-up where the length of the fit is not known


def check_scheduler(scheduler: Any) -> None:
    """Raise unless it is a factory, the name of a schedule, or None.

    Example:
        >>> check_scheduler("linear")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: scheduler= is 'auto' or 'cosine'; got 'linear'.
    """
    if isinstance(scheduler, str):
        check_option("scheduler", scheduler, ("auto", "cosine"))
    elif scheduler is not None:
        check_factory("scheduler", scheduler)


def make_scheduler(scheduler: Any, optimizer: Any) -> Any:
    """What makes the schedule that an option names; a factory, or None, as it is.

    Args:
        scheduler: The option.
        optimizer: That of the optimizer: ``"auto"`` leaves the rate of one that was given alone.

    Example:
        >>> make_scheduler("auto", None), make_scheduler("auto", "given")
        (<class 'lightning_bnn.strategies.schedule.WarmUpCosine'>, None)
    """
    if not isinstance(scheduler, str):
        return scheduler
    return None if scheduler == "auto" and optimizer is not None else WarmUpCosine


def peak_rate(fan_in: int, untrained: bool = True, restores: bool = False) -> float:
    """The peak learning rate of the default Adam under the default schedule.

    0.005, or 0.01 where the best weights by validation are restored, but at most 1 / (8 √fan-in),
    because Adam moves every weight by about its rate, and what a unit sums over moves with the
    number of its inputs; and at most 0.001 for trained weights.

    Chosen by the NLL on validation rows of training data, after short fits under this schedule
    (batches of 32 or 64; one seed, two of boston), at peaks of .001, .003, .005 and .01:

    =======================  ======  =========================  ==========================
    network (steps)          fan-in  VI                         one network
    =======================  ======  =========================  ==========================
    boston, 1x50 (300)       50      1.00   .75   .62   .59      .96    .71    .58    .70
    energy, 1x50 (800)       50       .54  -.03  -.23  -.22      .56   -.09   -.66  -1.28
    naval, 1x50 (800)        50      1.29  1.04   .98   .97     1.32    .92    .70    .47
    protein, 1x50 (800)      50      1.26  1.23  1.23  1.23     1.25   1.22   1.22   1.21
    wine, 1x50 (800)         50      1.17  1.16  1.15  1.14     1.15   1.15   1.15   1.15
    yacht, 1x50 (800)        50       .70  -.27  -.69  -.68      .62   -.36  -1.17  -1.97
    digits, 2x64 (800)       64      .127  .074  .077  .155     .112   .070   .062   .060
    MNIST, 2x200 (300)       784     .274  .242  .243  .230     .272   .240   .250   .239
    MNIST, ConvNet (200)     1568    .206  .134  .126  .146     .224   .168   .166   .155
    CIFAR-10, ConvNet (200)  2048    1.58  1.45  1.44  1.49     1.51   1.35   1.34   1.40
    =======================  ======  =========================  ==========================

    One of 2x1200 units on MNIST (150 steps) had .236, .238, .246 and .263 at .001, .0025, .0036
    and .005, hence the bound by fan-in. Networks of 1x50 on small sets overfit if trained for long
    (boston, 1500 steps: .55 at .001, 2.3 at .005): that is for the prior and for validation. With
    it, ensembles of the sets of ``benchmarks.defaults`` had, at .005 and .01, on rows cut from the
    training data (one seed): boston .29, .28; energy -1.40, -1.49; naval -.37, -1.45; protein 1.06,
    1.03; wine 1.16, 1.17; yacht -2.44, -2.77; digits .060, .045.

    Args:
        fan_in: The largest fan-in of a weight tensor that is trained.
        untrained: Whether the network starts at weights that look like new initial values.
        restores: Whether the best weights by validation are restored.

    Example:
        >>> peak_rate(50), round(peak_rate(784), 5), peak_rate(50, untrained=False)
        (0.005, 0.00446, 0.001)
        >>> peak_rate(50, restores=True)
        0.01
    """
    peak = min(_PEAK_RESTORED if restores else _PEAK, _PER_INPUT / math.sqrt(max(1, fan_in)))
    return peak if untrained else min(peak, CONSTANT_RATE)


def schedule_factor(step: int, total: float) -> float:
    """The share of the peak rate in a step, counted from 0.

    Args:
        step: t.
        total: T, the steps of the fit; infinite where it is not known.

    Example:
        >>> [round(schedule_factor(step, 8), 3) for step in (0, 1, 2, 5, 7, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.067, 0.0]
        >>> schedule_factor(49, math.inf), schedule_factor(10**6, math.inf)
        (0.5, 1.0)
    """
    warm_up = warm_up_steps(total)
    if step < warm_up:
        return (step + 1) / warm_up
    if math.isinf(total):
        return 1.0
    return (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1.0, total - warm_up)))) / 2


def warm_up_steps(total: float) -> int:
    """W, the steps in which the rate rises to its peak.

    Example:
        >>> warm_up_steps(1000), warm_up_steps(20), warm_up_steps(math.inf)
        (50, 5, 100)
    """
    if math.isinf(total):
        return _UNKNOWN
    return min(max(_LEAST, round(_SHARE * total)), int(total) // 4)


class WarmUpCosine(LRScheduler):
    """A warm-up and a cosine over the length of a fit, stepped each step.

    The rate is a function of the step and the length, so a resumed fit is exact, and one that
    resumes with another length follows the schedule of that length from then on.

    Args:
        optimizer: Its rates are the peak.
        total: T, the steps of the fit.
        last_epoch: The step to resume from; -1 to start.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = WarmUpCosine(optimizer, total=4)
        >>> rates = []
        >>> for _ in range(4):
        ...     rates.append(round(schedule.get_last_lr()[0], 4))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.1, 0.1, 0.075, 0.025]
    """

    def __init__(self, optimizer: Optimizer, total: float = math.inf, last_epoch: int = -1) -> None:
        self.total = total
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at this step."""
        factor = schedule_factor(self.last_epoch, self.total)
        return [rate * factor for rate in self.base_lrs]

    def follow(self, total: float, peak: float | None = None) -> None:
        """Follow the schedule of a length from the step on that is next.

        Args:
            total: T.
            peak: The peak of all groups; None leaves it as it is.
        """
        self.total = total
        if peak is not None:
            self.base_lrs = [peak] * len(self.base_lrs)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):  # as compiled and capturable optimizers have it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def steps_of_fit(trainer: pl.Trainer) -> float:
    """All steps of a fit, those already taken included; infinite where it is not known.

    Args:
        trainer: One that has loaded its training data.
    """
    total = trainer.estimated_stepping_batches
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    windows = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    batches, epochs, steps = (
        trainer.num_training_batches,
        trainer.max_epochs or 0,
        trainer.max_steps,
    )
    if windows and batches < math.inf and epochs > 0:
        by_epoch = (windows[0].get_accumulate_grad_batches(epoch) for epoch in range(epochs))
        total = sum(math.ceil(batches / window) for window in by_epoch)
        total = min(total, steps) if steps >= 0 else total
    return math.inf if total < 0 else total


def default_schedules(trainer: pl.Trainer) -> list[WarmUpCosine]:
    """The default schedules that a trainer steps: one, or one for each member's optimizer."""
    made = [config.scheduler for config in trainer.lr_scheduler_configs]
    each = [one for schedule in made for one in getattr(schedule, "members", [schedule])]
    return [one for one in each if isinstance(one, WarmUpCosine)]


def fit_schedules(
    trainer: pl.Trainer, peak: float | None = None, total: float | None = None
) -> None:
    """Give the default schedules the length of the fit that begins now.

    A schedule that was not resumed begins here, also in a later fit of the same trainer, and ends
    with the fit.

    Args:
        trainer: One that has loaded its training data, and a checkpoint, if any.
        peak: The rate that a tuner has found, for schedules that have not begun.
        total: The step at which they end; by default the last of the fit.
    """
    end = steps_of_fit(trainer) if total is None else total
    for schedule in default_schedules(trainer):
        before = trainer.global_step - schedule.last_epoch
        begun = schedule.last_epoch > 0
        schedule.follow(end - before, None if begun else peak)
