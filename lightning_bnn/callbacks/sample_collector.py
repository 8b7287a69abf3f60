"""Collect draws while a trainer runs: after a burn-in, every so many steps.

A draw belongs to an optimizer step. After step s a draw is taken of every chain if s > burn-in,
(s − burn-in) is a multiple of ``every`` and the step was one of sampling (not of a warm-up, not of
the exploration part of a cyclical schedule). Draws go to the disk as they are taken (see
:mod:`lightning_bnn.storage.stream`) or are kept in memory and in the checkpoint. What is on the
disk and what a checkpoint says always fit: a fit that goes on from a checkpoint drops the draws
that were taken after it, and takes them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from torch import nn

from lightning_bnn.callbacks.draw_rule import (
    DrawRule,
    Weights,
    check_count,
    check_finite,
    check_schedule,
    ended_cycle,
    network_of,
    refuse_to_take_nothing,
    sampled,
    strategy_of,
    weights_of,
)
from lightning_bnn.callbacks.training_batches import training_batches
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import copy_network
from lightning_bnn.posteriors import DrawsPosterior
from lightning_bnn.posteriors.batch_norm import (
    batch_norm_layers,
    recompute_batch_norm,
    training_batch_norm,
)
from lightning_bnn.posteriors.draws import create_stream, unstack
from lightning_bnn.storage.files import absolute, open_directory
from lightning_bnn.storage.stream import DrawStream
from lightning_bnn.target import split_batch

__all__ = ["SampleCollector"]


class SampleCollector(pl.Callback):
    """Take draws of the weights while training, and make a posterior of them.

    It works with :class:`~lightning_bnn.SGMCMC`, with other strategies that have
    ``current_draws``, and with any LightningModule, whose parameters and buffers are then one
    chain. It needs no validation. In a ``fast_dev_run`` it does nothing. A trainer may have
    several collectors whose options differ; a checkpoint knows them by these.

    Args:
        burn_in: The number of optimizer steps before the first draw can be taken.
        every: Steps from one draw to the next, or ``"cycle"``: at the end of each cycle of a
            :class:`~lightning_bnn.samplers.Cyclical` schedule.
        max_draws: Stop collecting when every chain has so many; the training goes on.
        dirpath: A directory, or an fsspec URL, to which draws are written as they are taken;
            memory then does not grow with their number, and ``Posterior.load`` reads the
            directory at any moment. If None, they are kept in memory and in every checkpoint.
        refresh_batch_norm: The number of training batches from which BatchNorm's running
            statistics are recomputed for each draw; with 0 a draw has those of its chain, and so
            has a layer that is in evaluation mode while training.

    Attributes:
        steps: The steps after which draws were taken.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn import SGMCMC
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=4)
        >>> collector = SampleCollector(burn_in=2, every=2)
        >>> trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False, callbacks=[collector])
        >>> trainer.fit(SGMCMC(nn.Linear(2, 1), Gaussian(0.1), chains=4), loader)
        >>> collector.steps, len(collector.posterior())
        ([4, 6, 8], 12)
    """

    def __init__(
        self,
        burn_in: int = 0,
        every: int | Literal["cycle"] = 1,
        max_draws: int | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        refresh_batch_norm: int = 0,
    ) -> None:
        self.rule = DrawRule(burn_in, every)
        if max_draws is not None:
            check_count("max_draws", max_draws, 1)
        check_count("refresh_batch_norm", refresh_batch_norm, 0)
        self.burn_in = burn_in
        self.every = every
        self.max_draws = max_draws
        self.dirpath = None if dirpath is None else absolute(dirpath)
        self.refresh_batch_norm = refresh_batch_norm
        self.steps: list[int] = []
        self._chains = 1
        self._seen = 0  # the last step that was looked at
        self._pending = False  # whether its draw was still to come when the checkpoint was made
        self._goes_on = False
        self._stage = ""
        self._restored: dict[str, Any] | None = None
        self._put_by: dict[str, Any] | None = None  # while another checkpoint is tested
        self._module: pl.LightningModule | None = None
        self._fitted: pl.LightningModule | None = None
        self._net_copy: nn.Module | None = None
        self._stream: DrawStream | None = None
        self._stream_id: str | None = None
        self._release: Callable[[], None] | None = None  # of the directory, for other runs
        self._draws: list[Weights] = []
        self._learned: Weights = {}

    def __len__(self) -> int:
        """The number of draws, of all chains together."""
        return len(self.steps) * self._chains

    def posterior(self, likelihood: Likelihood | None = None) -> DrawsPosterior:
        """The posterior of all draws so far, step after step and in it chain after chain.

        Args:
            likelihood: How outputs of the network give targets; by default the strategy's own. A
                LightningModule that is no strategy has none, so there it must be given.
        """
        module = self._module
        if module is None or not self.steps:
            raise ConfigurationError(
                f"No draws were collected yet: the first is taken after burn_in={self.burn_in} "
                f"steps, and the trainer has taken {self._seen}."
            )
        chosen = getattr(module, "likelihood", None) if likelihood is None else likelihood
        if not isinstance(chosen, Likelihood):
            raise ConfigurationError(
                f"{type(module).__name__} has no likelihood of lightning_bnn.likelihoods; pass "
                "likelihood= to say how its outputs give targets."
            )
        if self.dirpath is not None:
            stream = self._stream
            if stream is None:
                stream = DrawStream.open(self.dirpath, last_step=self.steps[-1])
            if stream.id != self._stream_id:
                raise ConfigurationError(
                    f"The draws in {self.dirpath} are of another run than those that this "
                    "collector has taken. Put the directory back, or load what is there with "
                    "Posterior.load."
                )
            return DrawsPosterior.from_stream(stream, network_of(module), chosen, self.steps)
        chosen = deepcopy(chosen)
        if self._learned:
            chosen.load_state_dict(self._learned)
        draws = [draw for snapshot in self._draws for draw in unstack(snapshot)]
        return DrawsPosterior(network_of(module), chosen, draws, chains=self._chains)

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell a strategy where its draws are collected: by the first collector."""
        self._module, self._restored, self._stage = pl_module, None, stage
        collectors = [one for one in trainer.callbacks if isinstance(one, SampleCollector)]  # type: ignore[attr-defined]
        for other in collectors:
            if other is self:
                continue
            if other.state_key == self.state_key:
                raise ConfigurationError(
                    f"Two collectors of the trainer are {self.state_key}: they would take the same "
                    "draws, and a checkpoint cannot tell them apart. Leave one out."
                )
            if self.dirpath and _same_place(self.dirpath, other.dirpath):
                raise ConfigurationError(
                    f"Two collectors of the trainer have the same dirpath={self.dirpath!r}. Give "
                    "each a directory of its own."
                )
        strategy = strategy_of(pl_module)
        if hasattr(strategy, "collector"):
            strategy.collector = collectors[0]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether the fit goes on with earlier draws, and whether they are there."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # a trainer that fits again goes on counting; a new one starts from 0
        again = self._fitted is pl_module and 0 < self._seen <= trainer.global_step
        self._goes_on, self._fitted = self._restored is not None or again, pl_module
        if not self._goes_on:
            if self._draws:
                rank_zero_warn(
                    f"SampleCollector drops the {len(self)} draws of an earlier fit that it has in "
                    "memory, as this fit starts anew. Take collector.posterior() before it, or "
                    "pass dirpath= to keep draws."
                )
            self._adopt({})
        if self.refresh_batch_norm:
            batch_norm_layers(network_of(pl_module))
        if self.dirpath is not None:
            _on_first_rank(trainer, lambda: self._check_directory(trainer))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the directory; drop the draws that were taken after the checkpoint."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self._goes_on:
            self._seen = trainer.global_step
        check_schedule(self.rule, trainer, pl_module)
        if not self.steps and not self._pending:
            refuse_to_take_nothing(self.rule, trainer, pl_module, self._seen)
        if self.refresh_batch_norm:
            self._net_copy = copy_network(network_of(pl_module))
        if self.dirpath is not None:
            self._stream_id = _on_first_rank(trainer, lambda: self._open(trainer, pl_module))
        if self._pending:
            self._take(trainer, pl_module)
            self._pending, self._seen = False, trainer.global_step

    def _open(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Open the stream for this run alone, as it was at the checkpoint; give its id."""
        assert self.dirpath is not None
        self._let_go()
        self._release = open_directory(self.dirpath).claim()
        stream = self._find_stream(trainer)
        if stream is None:
            weights, likelihood = weights_of(pl_module), getattr(pl_module, "likelihood", None)
            known = likelihood if isinstance(likelihood, Likelihood) else None
            stream = create_stream(self.dirpath, network_of(pl_module), known, weights)
        stream.truncate(after_step=self._seen)
        self._stream = stream
        return stream.id

    def _check_directory(self, trainer: pl.Trainer) -> None:
        self._find_stream(trainer)

    def _find_stream(self, trainer: pl.Trainer) -> DrawStream | None:
        """The stream to go on with; None where a new one may begin."""
        assert self.dirpath is not None
        if not self._goes_on:
            try:
                DrawStream.check_free(self.dirpath)
            except ConfigurationError as error:
                if trainer.ckpt_path is None:
                    raise
                raise ConfigurationError(
                    f"{trainer.ckpt_path} holds no state of {self.state_key}, so this fit would "
                    f"start new draws, and {error} To go on with them, give the collector the "
                    "options that it had."
                ) from error
            return None
        said = (
            f"The checkpoint says that {self.dirpath} has the draws of {len(self.steps)} steps"
            + (f", the last of step {self.steps[-1]}" if self.steps else "")
        )
        fix = "Put the directory back, or pass dirpath= where it is now."
        try:
            stream = DrawStream.open(self.dirpath, last_step=self._seen)
        except PosteriorFormatError as error:
            if self.steps:
                raise ConfigurationError(f"{said}, and {error} {fix}") from error
            DrawStream.check_free(self.dirpath)
            return None
        if stream.id != self._stream_id:
            if not self.steps and not stream.recorded_steps():
                return None  # neither has a draw to lose
            raise ConfigurationError(f"{said}; those that are there are of another run. {fix}")
        missing = sorted(set(self.steps) - set(stream.steps()))
        if missing:
            raise ConfigurationError(f"{said}; it lacks those of step {missing[0]}. {fix}")
        return stream

    # ---------------------------------------------------------------- while training

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Take a draw, if this batch ended a step after which one is due."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._is_due(trainer, pl_module):
            self._take(trainer, pl_module)
        self._seen = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if there is nothing to make a posterior of."""
        if not self.steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"SampleCollector(burn_in={self.burn_in}, every={self.every!r}) took no draw in "
                f"the {trainer.global_step} steps of this fit. Train longer, or choose another "
                "burn_in= or every=.",
                category=UserWarning,
            )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Let go of the directory."""
        self._let_go()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the directory."""
        self._let_go()

    def _let_go(self) -> None:
        """Let other runs have the directory, and go back to the draws of before a test."""
        if self._release is not None:
            self._release()
        if self._put_by is not None:
            self._adopt(self._put_by)
        self._release = self._put_by = None

    def _is_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        full = self.max_draws is not None and len(self.steps) >= self.max_draws
        if full or not sampled(trainer, pl_module):
            return False
        ended = self.every == "cycle" and ended_cycle(trainer, pl_module)
        return self.rule.is_due(trainer.global_step, self._seen, ended)

    def _take(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step, weights = trainer.global_step, weights_of(pl_module)
        check_finite(weights, step, pl_module)
        if self.refresh_batch_norm and trainer.is_global_zero:
            weights = self._refresh(trainer, pl_module, weights, step)
        likelihood = getattr(pl_module, "likelihood", None)
        learned = likelihood.state_dict() if isinstance(likelihood, Likelihood) else {}
        if self.dirpath is None:
            buffers = {name for name, _ in network_of(pl_module).named_buffers()}
            own = {name: tensor for name, tensor in weights.items() if name in buffers}
            # running statistics are of the batches that a rank has seen
            self._draws.append(_copy_to_cpu({**weights, **trainer.strategy.broadcast(own)}))
            self._learned = _copy_to_cpu(learned)
        else:
            fields = {"epoch": trainer.current_epoch}
            # the others wait, and may read the draws next
            _on_first_rank(trainer, lambda: self._append(step, weights, learned, fields))
        self._chains = len(next(iter(weights.values())))
        self.steps.append(step)

    def _append(self, *snapshot: Any) -> None:
        assert self._stream is not None
        self._stream.append(*snapshot)

    def _refresh(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, weights: Weights, step: int
    ) -> Weights:
        assert self._net_copy is not None
        layers = training_batch_norm(network_of(pl_module))
        if not layers:
            return weights
        split = getattr(strategy_of(pl_module), "split", split_batch)
        with (
            training_batches(trainer, self.refresh_batch_norm, seed=step) as batches,
            trainer.precision_plugin.forward_context(),
        ):
            inputs = (split(batch)[0] for batch in batches)
            return recompute_batch_norm(self._net_copy, weights, inputs, layers)

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Under which the checkpoint has the state: other options are another collector.

        The directory may be moved or renamed, and more draws be asked for.
        """
        return self._generate_state_key(
            burn_in=self.burn_in,
            every=self.every,
            refresh_batch_norm=self.refresh_batch_norm,
            stored=self.dirpath is not None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The steps of all draws; where they are, or the draws themselves."""
        trainer = None if self._module is None else self._module._trainer
        pending = trainer is not None and self._is_due(trainer, self._module)  # type: ignore[arg-type]
        return self._state(pending)

    def _state(self, pending: bool) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "seen": self._seen,
            "pending": pending,
            "chains": self._chains,
            "stream": self._stream_id,
            "draws": list(self._draws),
            "learned": self._learned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the checkpoint's draws; those that are there come back after a test of it."""
        self._restored = state_dict
        if self.steps and self._stage != "fit":
            self._put_by = self._state(self._pending)
        self._adopt(state_dict)

    def _adopt(self, state: dict[str, Any]) -> None:
        self.steps = list(state.get("steps", []))
        self._seen, self._pending = state.get("seen", 0), state.get("pending", False)
        self._chains, self._stream_id = state.get("chains", 1), state.get("stream")
        self._draws, self._learned = list(state.get("draws", [])), state.get("learned", {})
        self._stream = None


def _copy_to_cpu(weights: Weights) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def _same_place(one: str, other: str | None) -> bool:
    if other is None or "://" in one or "://" in other:
        return other is not None and one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def _on_first_rank(trainer: pl.Trainer, call: Callable[[], Any]) -> Any:
    """Let one rank do something; all of them get its text or None, or raise."""
    result, problem, raised = None, None, None
    if trainer.is_global_zero:
        try:
            result = call()
        except Exception as error:  # of any kind: the other ranks are waiting
            raised, problem = error, f"On the first rank: {type(error).__name__}: {error}"
    result, problem = trainer.strategy.broadcast((result, problem))
    if raised is not None:
        raise raised
    if problem is not None:
        raise ConfigurationError(problem)
    return result
