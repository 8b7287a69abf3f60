"""Collect posterior draws while a trainer runs: after a burn-in, every so many steps.

A draw belongs to an optimizer step. After step s a draw is taken of every chain if s > burn-in,
(s − burn-in) is a multiple of ``every`` and the step was one of sampling (not of a warm-up, not of
the exploration part of a cyclical schedule). For the chains of SGMCMC both numbers are found while
sampling, unless one is given (:mod:`lightning_bnn.callbacks.burn_in`).

Draws go to the disk as they are taken (see :mod:`lightning_bnn.storage.stream`) or are kept in
memory and in the checkpoint. What is on the disk and what a checkpoint says always fit: a resumed
fit drops the draws that were taken after its checkpoint, and takes them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_bnn.callbacks.burn_in import AGREE, BurnIn
from lightning_bnn.callbacks.progress import training_length
from lightning_bnn.callbacks.sources import (
    copy_to_cpu,
    not_finite,
    source_of,
    with_training_statistics,
)
from lightning_bnn.callbacks.watched import WatchedExamples
from lightning_bnn.checks import check_path, check_whole
from lightning_bnn.diagnostics.agreement import split_rhat
from lightning_bnn.diagnostics.chains import take_elements
from lightning_bnn.errors import ConfigurationError, NonFiniteError, PosteriorFormatError
from lightning_bnn.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DrawsPosterior
from lightning_bnn.posteriors.batch_norm import batch_norm_layers, training_batch_norm
from lightning_bnn.posteriors.draws import create_stream
from lightning_bnn.posteriors.weights import Weights
from lightning_bnn.storage.files import absolute, open_directory
from lightning_bnn.storage.stream import DrawStream
from lightning_bnn.strategies import SGMCMC
from lightning_bnn.strategies.bar import InBar, show_phase
from lightning_bnn.strategies.base import cyclical_schedule

__all__ = ["SampleCollector", "draw_is_due"]

Every = int | Literal["cycle"]

_LOG_DIR = "<log_dir>"
_EXAMPLES = 32  # that are watched, and at most so many numbers of each quantity
_JUDGED = 20  # records that chains are judged by, at least
_HIGH = 1.2  # an R-hat that is said at the end
_STILL = 0.01  # of what other chains move: a chain that stands still


def draw_is_due(step: int, seen: int, burn_in: int, every: Every, ended_cycle: bool) -> bool:
    """Whether a draw is due after ``step``, where ``seen`` was the last step before.

    Steps count from 1. With manual optimization a batch may take several, of which the last is
    looked at.

    Args:
        step: The number of steps that the optimizer has taken.
        seen: That number when it was looked at before.
        burn_in: The steps before the first draw can be taken.
        every: The steps from one draw to the next, or ``"cycle"``.
        ended_cycle: Whether the step was the last of a cycle.

    Example:
        >>> [step for step in range(1, 30) if draw_is_due(step, step - 1, 10, 5, False)]
        [15, 20, 25]
    """
    if step <= max(seen, burn_in):
        return False
    if isinstance(every, str):
        return ended_cycle
    return (step - burn_in) // every > max(0, seen - burn_in) // every


@dataclass
class _State:
    """What a checkpoint holds."""

    steps: list[int] = field(default_factory=list)  # after which draws were taken
    seen: int = 0  # the last step that was looked at
    pending: bool = False  # whether its draw was still to come when the checkpoint was made
    chains: int = 1
    stream: str | None = None  # the id of the stream that has the draws
    dirpath: str | None = None  # where it is
    draws: list[Weights] = field(default_factory=list)  # or the draws themselves
    learned: Weights = field(default_factory=dict)  # by the likelihood, at the last draw
    burn_in: int = 0  # as given, or as found
    every: Every = 1
    record: dict[str, Any] | None = None  # of what is found while sampling
    watched: dict[str, Any] | None = None  # the examples for it
    unseen: bool = False  # whether it had not looked at the last step yet


class SampleCollector(pl.Callback, InBar):
    """Take draws of the weights while training, and make a posterior of them.

    It works with :class:`~lightning_bnn.SGMCMC`, with other strategies, and with any
    LightningModule, whose parameters and buffers are then one chain. It needs no validation. In a
    ``fast_dev_run`` it does nothing. A trainer may have several collectors whose options differ; a
    checkpoint knows them by these.

    Args:
        burn_in: The number of optimizer steps before the first draw can be taken; 0 if only
            ``every`` is given. With neither, the chains of SGMCMC are burnt in until they agree
            (see :mod:`lightning_bnn.callbacks.burn_in`).
        every: Steps from one draw to the next, or ``"cycle"``: at the end of each cycle of a
            :class:`~lightning_bnn.samplers.Cyclical` schedule; 1 if only ``burn_in`` is given.
            With neither, it follows from the autocorrelation of what the chains predict.
        max_draws: Stop collecting when every chain has so many; the training continues.
        dirpath: A directory, or an fsspec URL, to which draws are written as they are taken;
            memory then does not grow with their number, and ``Posterior.load`` reads the
            directory at any moment. ``<log_dir>`` in it stands for the folder of the trainer's
            logger, such as ``"<log_dir>/draws"``: each run then has its own, and a fit that
            resumes has that of its checkpoint. If None, draws are kept in memory and in every
            checkpoint.
        refresh_batch_norm: The number of training batches from which BatchNorm's running
            statistics are recomputed for each draw; with 0 a draw has those of its chain, and so
            has a layer that is in evaluation mode while training.

    Example:
        >>> from functools import partial
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.samplers import SGLD
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=4)
        >>> collector = SampleCollector(burn_in=2, every=2)
        >>> trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False, callbacks=[collector])
        >>> trainer.fit(SGMCMC(torch.nn.Linear(2, 1), Gaussian(0.1), chains=4, warm_up=0,
        ...                    sampler=partial(SGLD, lr=1e-3)), loader)
        >>> collector.steps, len(collector.posterior())
        ([4, 6, 8], 12)
    """

    def __init__(
        self,
        burn_in: int | None = None,
        every: Every | None = None,
        max_draws: int | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        refresh_batch_norm: int = 0,
    ) -> None:
        self._found = burn_in is None and every is None  # while sampling, if there are chains
        self._given_burn_in = check_whole("burn_in", 0 if burn_in is None else burn_in, 0)
        cycle = isinstance(every, str) and every == "cycle"
        given = 1 if every is None else every
        self._given_every: Every = "cycle" if cycle else check_whole("every", given, 1)
        self.max_draws = None if max_draws is None else check_whole("max_draws", max_draws, 1)
        self.dirpath = None if dirpath is None else absolute(check_path("dirpath", dirpath))
        self._template = str(dirpath) if dirpath and _LOG_DIR in str(dirpath) else None
        self._of_template = self.dirpath  # what was last made of it
        self.refresh_batch_norm = check_whole("refresh_batch_norm", refresh_batch_norm, 0)
        self._state = self._new_state()
        self._record: BurnIn | None = None  # where something is to be found
        self._watched = WatchedExamples(_EXAMPLES)
        self._stream: DrawStream | None = None
        self._release: Callable[[], None] | None = None  # lets other runs have the directory
        self._stage = ""
        self._resumes = False  # whether the fit continues with the draws that there are
        self._restored = False
        self._put_by: _State | None = None  # while another checkpoint is tested
        self._source: Any = None  # a Source, from the first setup on
        self._trainer: pl.Trainer | None = None
        self._fitted: pl.LightningModule | None = None

    def _new_state(self) -> _State:
        return _State(burn_in=self._given_burn_in, every=self._given_every)

    @property
    def burn_in(self) -> int:
        """The steps before the first draw: as given, or as found so far."""
        return self._state.burn_in

    @property
    def every(self) -> Every:
        """The steps from one draw to the next: as given, or as found so far."""
        return self._state.every

    @property
    def steps(self) -> list[int]:
        """The steps after which draws were taken."""
        return self._state.steps

    def __len__(self) -> int:
        """The number of draws, of all chains together."""
        return len(self.steps) * self._state.chains

    def posterior(self, likelihood: Likelihood | None = None) -> DrawsPosterior:
        """The posterior of all draws so far, step after step and in it chain after chain.

        Args:
            likelihood: How outputs of the network give targets; by default the strategy's own. A
                LightningModule that is no strategy has none, so there it must be given.
        """
        source = self._source
        if source is None or not self.steps:
            raise ConfigurationError(
                f"No draws were collected yet: burn_in={self.burn_in} steps, of which the trainer "
                f"has taken {self._state.seen}."
            )
        likelihood = likelihood or source.likelihood
        if likelihood is None:
            raise ConfigurationError(
                "The LightningModule has no likelihood of lightning_bnn.likelihoods. Pass "
                "likelihood= to say how its outputs give targets."
            )
        state = {**vars(self._state), "dirpath": self.dirpath}
        return DrawsPosterior.from_collected(state, source.net, likelihood, self._stream)

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell SGMCMC where its draws are collected: by the first collector."""
        self._trainer, self._source = trainer, source_of(pl_module)
        self._restored, self._stage = False, stage
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        places = [c.dirpath for c in callbacks if isinstance(c, SampleCollector) and c.dirpath]
        if self.dirpath is not None and places.count(self.dirpath) > 1:
            raise ConfigurationError(
                f"Two collectors of the trainer have the same dirpath={self.dirpath!r}. Give each "
                "a directory of its own."
            )
        processes = type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher"
        if stage == "fit" and processes and self.dirpath is None:
            raise ConfigurationError(
                "The trainer's strategy trains in other processes, and draws in their memory end "
                "with them. Pass dirpath= to SampleCollector, and read the draws with "
                "Posterior.load; or choose strategy='ddp'."
            )
        if isinstance(pl_module, SGMCMC):
            pl_module.collector = next(c for c in callbacks if isinstance(c, SampleCollector))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out whether the fit resumes with earlier draws."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # a trainer that fits again counts its steps on; a new one starts from 0
        again = self._fitted is pl_module and 0 < self._state.seen <= trainer.global_step
        self._resumes, self._fitted = self._restored or again, pl_module
        if self._template is not None and self.dirpath == self._of_template:
            place = absolute(self._template.replace(_LOG_DIR, trainer.log_dir or "."))
            known = self._state.dirpath if self._resumes else None
            self.dirpath = self._of_template = known or place
        if not self._resumes:
            if self._state.draws:
                rank_zero_warn(
                    f"SampleCollector drops the {len(self)} draws of an earlier fit, as this fit "
                    "starts anew. Take collector.posterior() before it, or pass dirpath=."
                )
            self._state, self._stream = self._new_state(), None
        self._watched = WatchedExamples(_EXAMPLES)
        if self._state.watched is not None:
            self._watched.load_state_dict(self._state.watched)
        saved = self._state.record
        self._record = None if saved is None else BurnIn.from_state_dict(saved)
        if self.refresh_batch_norm:
            batch_norm_layers(self._source.net)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the directory; drop the draws that were taken after the checkpoint."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self._resumes:
            self._state.seen = trainer.global_step
            self._record = self._make_record()
        self._check_schedule(trainer, pl_module)
        show_phase(trainer)
        if self.dirpath is not None:
            self._state.stream = _on_first_rank(trainer, self._open)
        ended = self._state.unseen and self._look(trainer, pl_module)
        if self._state.pending or ended:
            self._take(trainer)
            self._state.pending, self._state.seen = False, trainer.global_step

    def _make_record(self) -> BurnIn | None:
        """What finds the burn-in and the spacing of draws, if neither was given."""
        planned = self._source.sampling_steps
        if planned is None or not self._found:
            return None
        draw = self._source.current_draws().values()
        size = sum(tensor.numel() * tensor.element_size() for tensor in draw)
        return BurnIn(planned, size if self.dirpath is None else 0, self._source.in_cycles)

    def _check_schedule(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raise unless cycles are counted in steps, and the fit is long enough for a draw."""
        schedule = cyclical_schedule(trainer)
        if self.every == "cycle" and schedule is None:
            raise ConfigurationError(
                "every='cycle' needs a cyclical schedule. Pass "
                "scheduler=partial(Cyclical, cycle_length=...), or every= as a number."
            )
        for config in trainer.lr_scheduler_configs if module.automatic_optimization else ():
            by_step = (config.interval, config.frequency) == ("step", 1)
            if config.scheduler is schedule and not by_step:
                raise ConfigurationError(
                    f"The cycles of {type(schedule).__name__} are counted in steps: return it from "
                    "configure_optimizers with 'interval': 'step' and 'frequency': 1."
                )

        if self.steps or self._state.pending:
            return
        settling, start, every = self._source.settling_steps, self.burn_in, self.every
        if isinstance(every, str):  # cycles begin when the strategy has settled
            assert schedule is not None
            start, every = settling, schedule.cycle_length
        before = max(self._state.seen, self.burn_in, settling) - start
        total = training_length(trainer, module, "steps")
        if total is not None and start + (before // every + 1) * every > total:
            raise ConfigurationError(
                f"SampleCollector(burn_in={self.burn_in}, every={self.every!r}) would take no draw "
                f"in the {int(total)} steps of this fit, {settling} of them to warm up and adapt. "
                "Train longer, or choose another burn_in= or every=."
            )

    def _open(self) -> str:
        """Open the stream for this run alone, as it was at the checkpoint; give its id."""
        assert self.dirpath is not None
        source = self._source
        self.teardown(None, None, None)
        try:
            self._find_stream()  # raises before a claim makes the directory
            self._release = open_directory(self.dirpath).claim()
            stream = self._find_stream()
            if stream is None:
                weights = source.current_draws()
                stream = create_stream(self.dirpath, source.net, source.likelihood, weights)
            stream.truncate(after_step=self._state.seen)
        except OSError as error:
            raise ConfigurationError(
                f"SampleCollector cannot write to dirpath={self.dirpath!r} ({error}). Pass a "
                "directory that can be made and written."
            ) from error
        self._stream = stream
        return stream.id

    def _find_stream(self) -> DrawStream | None:
        """The stream to resume with; None where a new one may begin."""
        assert self.dirpath is not None
        if not self._resumes:
            DrawStream.check_free(self.dirpath)
            return None
        try:
            stream = DrawStream.open(self.dirpath, last_step=self._state.seen)
            missing = sorted(set(self.steps) - set(stream.steps()))
            problem = f"the draws of step {missing[0]} are not there" if missing else ""
            if stream.id != self._state.stream:
                problem = "its draws are of another run"
            if not problem:
                return stream
            has_draws = bool(stream.recorded_steps())
        except PosteriorFormatError as error:
            problem, has_draws = str(error).rstrip("."), False
        if self.steps or has_draws:
            raise ConfigurationError(
                f"The checkpoint has draws of {len(self.steps)} steps in {self.dirpath}, but "
                f"{problem}. Put the directory back, or pass dirpath= where it is now."
            )
        return None  # neither has a draw to lose

    # ---------------------------------------------------------------- while training

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any
    ) -> None:
        """Take a draw, if this batch ended a step after which one is due."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._must_look(trainer):
            self._look(trainer, pl_module)
        if self._is_due(trainer):
            self._take(trainer)
        self._state.seen = trainer.global_step

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *place: Any
    ) -> None:
        """Take the examples to be watched from the first batch."""
        if self._found and isinstance(pl_module, SGMCMC):
            self._watched.choose_from(trainer, pl_module, batch)

    on_train_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def _must_look(self, trainer: pl.Trainer) -> bool:
        """Whether this was a step of sampling that something is to be found by."""
        new = self._record is not None and trainer.global_step > self._state.seen
        return new and self._source.sampling

    def _look(self, trainer: pl.Trainer, module: Any) -> bool:
        """Record the chains' predictions, if it is time; whether that ended the burn-in."""
        record = self._record
        assert record is not None
        was = record.ended
        if record.step():
            values = self._watched.values(trainer, module).values()
            row = torch.cat([take_elements(value, _EXAMPLES) for value in values], dim=1)
            # to the last bit the same on every rank, which all must decide alike
            record.add(trainer.strategy.broadcast(row.cpu()))
        if was is not None or record.ended is None:
            return False
        assert record.every is not None
        self._state.every = record.every
        self._state.burn_in = trainer.global_step - record.every  # the first draw is one of now
        return True

    def phase(self) -> dict[str, str]:
        """The burn-in, and the number of draws, in the progress bar."""
        step = self._trainer.global_step if self._trainer is not None else 0
        burning = {"phase": f"burn-in {step}/{self.burn_in}"} if step < self.burn_in else {}
        if self._burning_in and self._source.sampling:
            burning = {"phase": "burn-in"}
        return {**burning, "draws": f"{len(self)}"}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that all draws are there and what was found; warn if something is missing."""
        if self._record is not None and self.steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._tell(self._record)
        if self.steps and self.dirpath is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]

            def end() -> None:
                assert self._stream is not None
                self._stream.end()

            _on_first_rank(trainer, end)
        if not self.steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"SampleCollector(burn_in={self.burn_in}, every={self.every!r}) took no draw in "
                f"{trainer.global_step} steps. Train longer, or choose another burn_in= or every=."
            )

    def _tell(self, record: BurnIn) -> None:
        """Say what was found; warn if chains do not agree or one does not move."""
        took = f"SampleCollector took {len(self.steps)} draws of each chain, every {self.every} "
        if record.cycles or record.recorded == 0:
            rank_zero_info(f"{took}steps of the sampling parts of the cycles.")
            return
        why = "the chains agreed" if record.rhat <= AGREE else "a third of the sampling was over"
        rank_zero_info(
            f"{took}steps, from step {self.steps[0]} on, when {why} (R-hat {record.rhat:.2f}); "
            f"predictions have an autocorrelation time of about {record.time:.0f} steps."
        )
        values = record.settled()
        if values.shape[1] < _JUDGED:
            return
        moves = values.std(1).mean(1)
        ids = self._source.ids
        still = [ids[k] for k in (moves <= _STILL * moves.median()).nonzero().flatten().tolist()]
        if still:
            rank_zero_warn(
                f"The chains {still} hardly move: their predictions vary by less than 1 % of what "
                "others' do, so that their draws are copies of one. Let the sampler find its lr "
                "(leave it out), or raise it; train longer."
            )
        rhat = float(split_rhat(values).max())
        if rhat > _HIGH:
            rank_zero_warn(
                f"The chains do not agree on what they predict: R-hat reaches {rhat:.2f}, and is "
                "near 1 when all sample one posterior. Each is near a mode of its own, and their "
                "mixture predicts as an ensemble of so many networks does: more chains make it "
                "better. For a posterior that all chains share, train several times longer, use "
                "larger batches (they allow a larger step), or a smaller network."
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        """Let other runs have the directory, and go back to the draws of before a test."""
        if self._release is not None:
            self._release()
        if self._put_by is not None:
            self._state, self._stream = self._put_by, None
        self._release = self._put_by = None

    on_exception = teardown  # type: ignore[assignment]  # which is not called then

    @property
    def _burning_in(self) -> bool:
        """Whether the burn-in still lasts, and is to end when chains agree."""
        return self._record is not None and self._record.ended is None

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if self._burning_in:
            return False
        full = self.max_draws is not None and len(self.steps) >= self.max_draws
        if full or not self._source.sampling:
            return False
        step, ended = trainer.global_step, self._source.ended_cycle
        return draw_is_due(step, self._state.seen, self.burn_in, self.every, ended)

    def _take(self, trainer: pl.Trainer) -> None:
        source, step = self._source, trainer.global_step
        weights = source.current_draws()
        parameters = [name for name, _ in source.net.named_parameters() if name in weights]
        # not of buffers: a mask may well be infinite
        for row, name in not_finite({name: weights[name] for name in parameters}).items():
            raise NonFiniteError(
                f"{name!r} of chain {source.ids[row]} is not finite after step {step}; the draws "
                "before it are good. Lower the learning rate or the temperature, or clip gradients."
            )
        layers = training_batch_norm(source.net) if self.refresh_batch_norm else []
        if layers and trainer.is_global_zero:
            weights = with_training_statistics(
                source, weights, layers, trainer, self.refresh_batch_norm, step
            )
        learned = {} if source.likelihood is None else source.likelihood.state_dict()
        if self.dirpath is None:
            buffers = {k: weights[k] for k, _ in source.net.named_buffers() if k in weights}
            # running statistics are of the batches that a rank has seen
            draw = {**weights, **trainer.strategy.broadcast(buffers)}
            self._state.draws.append(copy_to_cpu(draw))
            self._state.learned = copy_to_cpu(learned)
        else:

            def append() -> None:
                assert self._stream is not None
                self._stream.append(step, weights, learned, {"epoch": trainer.current_epoch})

            _on_first_rank(trainer, append)  # the others wait, and may read the draws next
        self._state.chains = len(next(iter(weights.values())))
        self.steps.append(step)

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Under which the checkpoint has the state: other options are another collector.

        The directory may be moved or renamed, and more draws be asked for.
        """
        return self._generate_state_key(
            burn_in=self._given_burn_in,
            every=self._given_every if not self._found else None,
            refresh_batch_norm=self.refresh_batch_norm,
            stored=self.dirpath is not None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The steps of all draws; where they are, or the draws themselves."""
        # another callback may save before this one has had its turn
        fits = self._trainer is not None and self._stage == "fit"
        found = {
            "pending": fits and self._is_due(self._trainer),  # type: ignore[arg-type]
            "unseen": fits and self._must_look(self._trainer),  # type: ignore[arg-type]
            "record": self._record and self._record.state_dict(),
            "watched": self._record and self._watched.state_dict(),
        }
        lists = {"steps": list(self.steps), "draws": list(self._state.draws)}  # both grow
        return {**vars(self._state), **lists, **found, "dirpath": self.dirpath}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the checkpoint's draws; those that there are return after a test of it."""
        self._restored = True
        if self.steps and self._stage != "fit":
            self._put_by = self._state
        given = {"burn_in": self.burn_in, "every": self.every}  # which 0.1 has not saved
        self._state, self._stream = _State(**{**given, **state_dict}), None


def _on_first_rank(trainer: pl.Trainer, call: Callable[[], str | None]) -> str | None:
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
