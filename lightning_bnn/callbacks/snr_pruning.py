r"""Prune weights of a low signal-to-noise ratio during training.

After some steps the posterior as it stands says which weights carry no information: those of the
lowest :math:`|\mu|/\sigma` (Blundell et al., 2015, section 5.1). They become exactly zero and stay
so; the others are trained on, and make up for what is lost. Along a schedule the share rises from
step to step (:mod:`lightning_bnn.callbacks.pruning_schedule`), so that no pruning takes much at
once.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_bnn.callbacks.progress import completed
from lightning_bnn.callbacks.pruning_schedule import PruningRule, Shape, check_places, resolve
from lightning_bnn.checks import check_option, check_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl
from lightning_bnn.network import copy_network, in_network_order, network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.masks import Scope, check_options, keep_removable
from lightning_bnn.pruning.removable import (
    Rest,
    Unit,
    candidates,
    find_removable,
    protected_names,
)
from lightning_bnn.selection import Choice
from lightning_bnn.strategies import Strategy
from lightning_bnn.strategies.variational import refuse_averaging

__all__ = ["PruningStep", "SNRPruning"]


@dataclass(frozen=True)
class PruningStep:
    """What one pruning did.

    Args:
        step: The optimizer steps before it.
        fraction: The share of prunable weights, or units, that the schedule asked for.
        removed: The weights that are gone by now.
        threshold: The largest signal-to-noise ratio that it removed; None if it removed nothing
            that was still there.
    """

    step: int
    fraction: float
    removed: int
    threshold: float | None


class SNRPruning(pl.Callback):
    """Prunes the weights of a :class:`~lightning_bnn.VariationalBNN` while it trains.

    The masks belong to the strategy and are in its part of a checkpoint, so that a fit which
    resumes without this callback keeps them. For a strategy that has no variances while it trains
    (a sampler, an ensemble), prune what it leaves behind: ``prune(posterior, fraction)``.

    Args:
        fraction: The share of all prunable weights, or units, to remove, in [0, 1).
        schedule: ``"cubic"`` or ``"linear"`` from ``start`` to ``end``, or ``"once"`` at ``start``.
        start: Where pruning begins: a share of training (0.5), or a whole number of epochs.
        end: Where the fraction is reached, as for ``start``; it is not used by ``"once"``.
        every_n_steps: Optimizer steps from one pruning to the next; by default as many as make at
            most 50 prunings.
        unit: ``"weight"``, or ``"channel"`` for whole output channels and neurons.
        scope: ``"global"`` for one threshold, ``"layer"`` for the same share of each tensor.
        protect: Weights to leave alone, as :func:`lightning_bnn.selection.select` takes them;
            biases and normalisation always are. A submodule is one of the strategy's ``net``.
        rest: For channels, what becomes of layers that cannot be followed: ``"raise"``,
            ``"keep"`` or ``"weight"``.

    Attributes:
        history: What each pruning did, a list of :class:`PruningStep`.

    Logs ``sparsity`` and the last ``pruning_threshold`` at each pruning and at the end of an epoch.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn import VariationalBNN
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
        >>> pruning = SNRPruning(fraction=0.75, start=0.25, end=1.0)
        >>> trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False, callbacks=[pruning])
        >>> bnn = VariationalBNN(nn.Linear(4, 1), Gaussian(0.1))
        >>> trainer.fit(bnn, loader)
        >>> [(one.step, one.removed) for one in pruning.history]
        [(3, 1), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)]
        >>> pruning.sparsity, int(bnn.posterior().sample(5)["weight"].count_nonzero())
        (0.75, 5)
    """

    def __init__(
        self,
        fraction: float = 0.95,
        schedule: Shape = "cubic",
        start: int | float = 0.5,  # int: a command line would make 1.0 of 1
        end: int | float = 0.9,
        every_n_steps: int | None = None,
        unit: Unit = "weight",
        scope: Scope = "global",
        protect: Choice = None,
        rest: Rest = "raise",
    ) -> None:
        check_options(fraction, unit, scope, rest)
        check_option("schedule", schedule, get_args(Shape))
        check_places(start, end, schedule)
        if every_n_steps is not None:
            check_whole("every_n_steps", every_n_steps, 1)
            if schedule == "once":
                raise ConfigurationError(
                    f"schedule='once' prunes once; leave every_n_steps={every_n_steps} out."
                )
        self.fraction, self.every_n_steps = float(fraction), every_n_steps
        self.schedule, self.start, self.end = schedule, start, end
        self.unit, self.scope, self.protect, self.rest = unit, scope, protect, rest
        self.history: list[PruningStep] = []
        self._strategy: Any = None
        self._trainer: pl.Trainer | None = None
        self._rule: PruningRule | None = None
        self._seen = -1  # the last position that was looked at
        self._restored: dict[str, Any] | None = None

    # ---------------------------------------------------------------- what it leaves behind

    @property
    def masks(self) -> dict[str, Tensor]:
        """By name, 1 where a weight of the strategy stays and 0 where it is pruned.

        Only tensors that lost something are in it; they are as ``torch.nn.utils.prune`` has them.
        """
        strategy = self._known_strategy()
        tensors = network_tensors(strategy.net)
        return {name: keep.to(tensors[name].dtype) for name, keep in strategy.masks().items()}

    @property
    def sparsity(self) -> float:
        """The share of the prunable weights of the strategy, protected ones too, that is gone."""
        removed, total = _count(self._known_strategy())
        return removed / max(1, total)

    def apply(self, net: nn.Module) -> nn.Module:
        """A copy of a network with these masks on it, through ``torch.nn.utils.prune``.

        There ``prune.is_pruned`` is true, and ``prune.remove`` makes the zeros permanent. Buffers
        are multiplied by their masks.

        Args:
            net: A network of the architecture that was trained, such as
                ``mean_network(posterior)``.
        """
        net = copy_network(net)
        parameters = dict(net.named_parameters())
        for name, mask in in_network_order(net, self.masks, "masks").items():
            if name not in parameters:
                buffer = net.get_buffer(name)
                buffer.mul_(mask.to(buffer.device))
                continue
            every = list(net.named_parameters(remove_duplicate=False))
            for place in [other for other, p in every if p is parameters[name]]:
                # a tied weight stays tied: its layers share what is masked
                owner, _, key = place.rpartition(".")
                prune.custom_from_mask(net.get_submodule(owner), key, mask)
        return net

    def _known_strategy(self) -> Any:
        if self._strategy is None:
            raise ConfigurationError("SNRPruning has pruned nothing yet: no Trainer has fitted.")
        return self._strategy

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a module that has no variances while it trains."""
        self._restored = None
        strategy: Any = pl_module if isinstance(pl_module, Strategy) else None
        if not hasattr(strategy, "family") or not hasattr(strategy, "prune"):
            raise ConfigurationError(
                f"SNRPruning needs the standard deviations of a VariationalBNN; got "
                f"{type(pl_module).__name__}. Prune its posterior instead: "
                "prune(posterior, fraction)."
            )
        if stage == "fit":
            refuse_averaging(trainer)
            if not strategy.family.can_prune:
                raise ConfigurationError(
                    f"Weights of {type(strategy.family).__name__} cannot be pruned while training, "
                    "because they depend on each other. Prune the posterior after the fit: "
                    "prune(posterior, fraction)."
                )
        if stage == "fit" or self._strategy is None:
            if strategy is not self._strategy:
                self._trainer = None  # of another strategy nothing is pruned yet
            self._strategy = strategy

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume from a checkpoint or an earlier fit of this trainer, or start anew."""
        again = self._trainer is trainer and 0 < self._seen <= trainer.global_step
        self._trainer = trainer
        if self._restored is not None or not again:
            self._adopt(self._restored or {})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the steps of the schedule, try whether the fraction can be had, prune if due."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._rule = None
            return
        if not self.history or self._rule is None:  # else it has begun
            self._rule = resolve(
                self.schedule, self.fraction, self.start, self.end, self.every_n_steps,
                trainer, pl_module,
            )  # fmt: skip
        self._masks(self.fraction, quiet=True)  # whether it can be reached
        # a checkpoint of this very step may have been made before this callback had its turn
        steps = self._rule.unit == "steps"
        self._look(trainer, trainer.global_step if steps else trainer.current_epoch)

    # ---------------------------------------------------------------- while training

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Prune, if this batch ended a step after which it is due."""
        if self._rule is not None:
            position = completed(trainer, self._rule.unit)
            if position is not None and self._look(trainer, position):
                self._log(pl_module, on_step=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prune after an epoch that ended without a last batch; log how much is gone."""
        if self._rule is None:
            return
        if self._rule.unit == "epochs":
            self._look(trainer, trainer.current_epoch + 1)
        self._log(pl_module, on_step=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if the fit was stopped before the fraction was reached."""
        if self._rule is None:
            return
        reached = self.history[-1].fraction if self.history else 0.0
        if trainer.should_stop and reached < self.fraction:
            warnings.warn(
                f"The fit was stopped after {trainer.global_step} steps with {reached:.3g} pruned; "
                f"SNRPruning was to reach {self.fraction:g} after {self._rule.end} "
                f"{self._rule.unit}. Prune the rest afterwards: prune(posterior, fraction).",
                UserWarning,
                stacklevel=2,
            )

    def _look(self, trainer: pl.Trainer, position: int) -> bool:
        """Prune if it is due at a position; was it?"""
        assert self._rule is not None
        due = self._rule.due(position, self._seen)
        self._seen = max(self._seen, position)
        if due:
            strategy, fraction = self._known_strategy(), self._rule.share(position)
            masks, threshold = self._masks(fraction, quiet=fraction < self.fraction)
            strategy.prune(masks)
            removed = _count(strategy)[0]
            self.history.append(PruningStep(trainer.global_step, fraction, removed, threshold))
        return due

    def _masks(self, fraction: float, quiet: bool) -> tuple[dict[str, Tensor], float | None]:
        """What stays, and the largest ratio among the weights, or units, that go just now."""
        strategy = self._known_strategy()
        posterior: WeightPosterior = strategy.posterior()
        # by names: the posterior has a copy of the network, whose submodules are others
        names, protect = strategy.family.layout.names, None
        if self.protect is not None:
            protect = sorted(protected_names(strategy.net, names, self.protect))
        removable = find_removable(posterior, self.unit, protect, self.rest)
        with warnings.catch_warnings():
            if quiet:  # that a layer would vanish is said once, of the last pruning
                warnings.simplefilter("ignore")
            kept = keep_removable(removable, fraction, self.scope)
        gone = [removable.ratios[name][~keep] for name, keep in kept.items()]
        # what went before has the ratio 0
        threshold = max((float(each.max()) for each in gone if each.numel()), default=0.0) or None
        return removable.masks(posterior.net, kept), threshold

    def _log(self, module: pl.LightningModule, on_step: bool) -> None:
        values = {"sparsity": self.sparsity}
        thresholds = [step.threshold for step in self.history if step.threshold is not None]
        if thresholds:
            last = thresholds[-1]
            values["pruning_threshold"] = last if math.isfinite(last) else math.nan
        module.log_dict(values, on_step=on_step, on_epoch=not on_step, sync_dist=not on_step)

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Under which the checkpoint has the state: other options are another callback."""
        return self._generate_state_key(
            fraction=self.fraction, schedule=self.schedule, start=self.start, end=self.end,
            every_n_steps=self.every_n_steps, unit=self.unit, scope=self.scope,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, and what was done; the masks are the strategy's."""
        return {
            "history": [asdict(step) for step in self.history],
            "rule": None if self._rule is None else asdict(self._rule),
            "seen": self._seen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for a fit that resumes; one that has done nothing takes it at once."""
        self._restored = state_dict
        if not self.history:
            self._adopt(state_dict)

    def _adopt(self, state: dict[str, Any]) -> None:
        rule = state.get("rule")
        self._rule = None if rule is None else PruningRule(**rule)
        self.history = [PruningStep(**step) for step in state.get("history", [])]
        self._seen = state.get("seen", -1)


def _count(strategy: Any) -> tuple[int, int]:
    """The pruned and all of the prunable weights of a strategy."""
    masks, tensors = strategy.masks(), dict(strategy.net.named_parameters())
    names = candidates(strategy.net, strategy.family.layout.names)
    removed = sum(int((~masks[name]).sum()) for name in names if name in masks)
    return removed, sum(tensors[name].numel() for name in names)
