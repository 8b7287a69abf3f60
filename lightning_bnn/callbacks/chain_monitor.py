"""Watch while sampling whether chains agree: R-hat and ESS of predictions, logged.

At fixed examples the current predictions of all chains are recorded every few steps. Of the
record the worst rank-normalised split R-hat is logged as ``rhat_max`` and the smallest bulk or tail
effective sample size as ``ess_min``, through ArviZ. Only the predictions are kept, never weights,
and R-hat is computed anew each time the record has grown by a fifth, so that the cost of a long run
stays small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.callbacks.sample_collector import SampleCollector
from lightning_bnn.callbacks.watched import WatchedExamples
from lightning_bnn.checks import check_whole
from lightning_bnn.diagnostics.chains import Series, Watched, take_elements
from lightning_bnn.diagnostics.diagnosis import Diagnosis, diagnose_watched
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.diagnostics.statistics import require_arviz
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl, rank_zero_warn
from lightning_bnn.strategies import SGMCMC

__all__ = ["ChainMonitor"]

# The least number of records that R-hat is computed from.
ENOUGH = 10


class ChainMonitor(pl.Callback):
    """Log R-hat and ESS of the predictions of chains while they are sampled.

    It works with a strategy that runs chains, and records only while the strategy samples: not in
    its warm-up, nor in the exploration part of a cyclical schedule. When the fit ends with an R-hat
    above 1.01, a warning says what to do. The record is part of the checkpoint. Random numbers of
    the training are left alone.

    The first values are logged with the tenth record, and are there in each epoch from then on. A
    callback that watches them has to bear that they are not there before:
    ``EarlyStopping(monitor="rhat_max", stopping_threshold=1.01, patience=1000, strict=False)``.

    Args:
        every_n_steps: How many optimizer steps lie between two records.
        burn_in: The number of steps before the first record. None takes that of the
            ``SampleCollector`` beside it, or 0.
        inputs: Where to watch predictions: a loader of (inputs, targets) pairs or of inputs, one
            such batch, or a tensor. None takes the first batch, of the validation data if the
            trainer checks them before training, else of the training data.
        examples: At most how many examples are watched.
        elements: At most how many numbers of their predictions are watched, a fixed choice.

    Example:
        >>> monitor = ChainMonitor(every_n_steps=20, burn_in=1000)
        >>> monitor.recorded
        0
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        burn_in: int | None = None,
        inputs: Any = None,
        examples: int = 32,
        elements: int = 32,
    ) -> None:
        require_arviz()
        self.every_n_steps = check_whole("every_n_steps", every_n_steps, 1)
        self.burn_in = None if burn_in is None else check_whole("burn_in", burn_in, 0)
        self.inputs = inputs
        self.examples = check_whole("examples", examples, 1)
        self.elements = check_whole("elements", elements, 1)
        self._record = _Record(WatchedExamples(self.examples))
        self._restored: _Record | None = None  # of a checkpoint, for a fit that resumes
        self._module: Any = None
        self._first_step = 0
        self._logged_epoch: int | None = None

    @property
    def recorded(self) -> int:
        """How often the predictions of all chains were recorded."""
        return len(next(iter(self._record.values.values()), ()))

    def diagnosis(self) -> Diagnosis:
        """R-hat and ESS of all that was recorded so far.

        Raises:
            ConfigurationError: There are too few records.
        """
        if not self.recorded:
            raise ConfigurationError(
                "ChainMonitor has recorded nothing yet: it does every "
                f"{self.every_n_steps} steps of sampling, after {self._first_step} steps."
            )
        return self._diagnose(by_chain=True)

    def _diagnose(self, by_chain: bool) -> Diagnosis:
        record = self._record
        series = {
            name: Series(torch.stack(rows, dim=1).numpy(), record.shapes[name])
            for name, rows in record.values.items()
        }
        examples = record.watched.examples
        return diagnose_watched(Watched(series, {}), examples, self.elements, by_chain)

    # ---------------------------------------------------------------- while fitting

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the module runs chains."""
        self._restored = None
        if stage == "fit" and not isinstance(pl_module, SGMCMC):
            name = type(pl_module).__name__
            raise ConfigurationError(f"ChainMonitor watches the chains of SGMCMC; got {name}.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume the record or start a new one; choose given examples; find the burn-in."""
        if self._restored is not None:
            self._record = self._restored
        elif pl_module is not self._module or not 0 < self._record.step <= trainer.global_step:
            # not the trainer that fits the same chains again
            self._record = _Record(WatchedExamples(self.examples))
        self._module, self._logged_epoch = pl_module, None
        if self.inputs is not None:
            self._record.watched.choose(trainer, choose_examples(self.inputs, self.examples))
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        burn_ins = [other.burn_in for other in callbacks if isinstance(other, SampleCollector)]
        self._first_step = max(burn_ins, default=0) if self.burn_in is None else self.burn_in

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the record that a checkpoint was made just before."""
        if self._record.pending and self._record.watched.examples is not None:
            self._add_record(trainer, pl_module)
        self._record.pending = False

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *place: Any
    ) -> None:
        """Take the examples from the first batch, where none were given."""
        self._record.watched.choose_from(trainer, pl_module, batch)

    on_train_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the predictions of all chains, and log what they tell."""
        if self._is_due(trainer, pl_module):
            self._add_record(trainer, pl_module)
        # again in each epoch: loggers forget a value at the end of one
        worst = self._record.worst
        if worst is not None and self._logged_epoch != trainer.current_epoch:
            self._logged_epoch = trainer.current_epoch
            pl_module.log("rhat_max", worst[0], prog_bar=True, batch_size=1)
            pl_module.log("ess_min", worst[1], batch_size=1)

    def _is_due(self, trainer: pl.Trainer, pl_module: Any) -> bool:
        step = trainer.global_step
        after = step > max(self._first_step, self._record.step)  # once in accumulated batches
        return after and step % self.every_n_steps == 0 and bool(pl_module.sampling)

    def _add_record(self, trainer: pl.Trainer, pl_module: Any) -> None:
        record = self._record
        record.step = trainer.global_step
        for name, value in record.watched.values(trainer, pl_module).items():
            record.shapes[name] = tuple(value.shape[1:])
            row = take_elements(value, self.elements)
            record.values.setdefault(name, []).append(row.cpu().double())
        if _grown_by_a_fifth(self.recorded):
            self._judge(trainer)

    def _judge(self, trainer: pl.Trainer) -> None:
        worst = (math.nan, math.nan)
        if trainer.is_global_zero:
            diagnosis = self._diagnose(by_chain=False)
            worst = diagnosis.max_rhat, diagnosis.min_ess
        # to the last bit the same on every rank: another callback may stop the training by it
        worst = trainer.strategy.broadcast(worst)
        if not math.isnan(worst[0]):
            self._record.worst, self._logged_epoch = worst, None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if the chains do not agree."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.recorded < ENOUGH:
            rank_zero_warn(
                f"ChainMonitor recorded the chains {self.recorded} times, and tells nothing below "
                f"{ENOUGH}. Lower every_n_steps={self.every_n_steps}, or sample longer."
            )
        elif not (diagnosis := self.diagnosis()).converged:
            rank_zero_warn(
                f"ChainMonitor, of {diagnosis.draws} records of {diagnosis.chains} chain(s): "
                f"{diagnosis.advice}"
            )

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The record, and what it is a record of."""
        record = self._record
        watched = record.watched.state_dict()
        trainer = None if self._module is None else self._module._trainer
        return {
            **vars(record),
            "values": {name: torch.stack(rows) for name, rows in record.values.items()},
            "watched": watched["examples"] if self.inputs is None else None,  # or given again
            "mode": watched["mode"],
            "pending": trainer is not None and self._is_due(trainer, self._module),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for a fit that resumes; a monitor without a record takes it at once."""
        watched = WatchedExamples(self.examples)
        watched.load_state_dict({"examples": state_dict["watched"], "mode": state_dict["mode"]})
        changed = {
            "values": {name: list(rows) for name, rows in state_dict["values"].items()},
            "shapes": {name: tuple(shape) for name, shape in state_dict["shapes"].items()},
            "watched": watched,
        }
        saved = {name: value for name, value in state_dict.items() if name != "mode"}
        self._restored = _Record(**{**saved, **changed})
        if not self.recorded:  # else a test of an earlier checkpoint would lose later records
            self._record = self._restored


@dataclass
class _Record:
    """What was recorded, and at which examples.

    Attributes:
        watched: The examples.
        values: By name, the rows ``(chains, elements)`` of each record.
        shapes: By name, the shape of the quantity before elements were chosen.
        worst: The R-hat and the ESS logged last.
        step: Of the last record.
        pending: Whether a record was still to be taken when the checkpoint was made.
    """

    watched: WatchedExamples
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    worst: tuple[float, float] | None = None
    step: int = 0
    pending: bool = False


def _grown_by_a_fifth(count: int) -> bool:
    """Whether ``count`` is a number at which R-hat is computed: it grows by a fifth.

    Example:
        >>> [count for count in range(100) if _grown_by_a_fifth(count)][:8]
        [10, 11, 13, 16, 19, 23, 27, 32]
    """
    if count <= ENOUGH:
        return count == ENOUGH
    return int(math.log(count, 1.2)) > int(math.log(count - 1, 1.2))
