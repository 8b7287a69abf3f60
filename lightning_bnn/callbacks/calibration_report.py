"""Calibration reports in a run: a page after the fit, after a test, and every few epochs.

What the strategy predicts in validation and test is gathered as it is, so that the report costs no
further draws for the strategy itself; only out-of-distribution data and compared posteriors are
predicted for the report alone. Statistics are sums in fixed bins and a bounded sample, gathered
batch by batch and added up over processes. Process 0 writes the pages.

In a fit a page that fails is a warning, because training is worth more than its report; in a test
or a validation by itself it is an error.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_bnn.checks import check_kind, check_path, check_probability, check_whole
from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.lightning import pl, rank_zero_warn
from lightning_bnn.predictive import Predictive
from lightning_bnn.pruning.section import Pruning
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.document import Report, folder_problem, make_report
from lightning_bnn.report.gather import ExampleNumbers, batch_limit, flat_loaders
from lightning_bnn.report.loggers import headlines, log_figures, shows_figures
from lightning_bnn.report.networks import make_posterior, name_all
from lightning_bnn.report.posteriors import data_loader, validation_loader
from lightning_bnn.report.run import RunModels, evaluating
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Collection
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.resume import ResumableLoader
from lightning_bnn.strategies.training_batches import load_validation_data

__all__ = ["CalibrationReport"]


class CalibrationReport(pl.Callback):
    """Write a page that says how far the uncertainty of a strategy can be trusted.

    ``fit.html`` is made of the validation data at the end of a fit (there is none in a fit without
    validation data, and a warning), ``test.html`` at the end of a test, ``validation.html`` by
    ``trainer.validate``, and ``epoch-0009.html`` every n epochs if asked for; with several loaders
    each gets a number, as in ``test-1.html``. The numbers lie beside each page as JSON, the figures
    go to the trainer's loggers, and a few numbers to ``log``: ``val_adaptive_ece``,
    ``val_excess_nll``, ``val_auroc_letters`` and others (see
    :func:`lightning_bnn.report.loggers.headlines`). They are logged where a page is made: to
    monitor one of them in every epoch, set ``every_n_epochs=1``.

    It works with every strategy, and leaves training as it is, to the last bit. What cannot work is
    said before training; a page that fails in a fit is a warning, in a test an error. A test of
    classes predicts the validation data once more, to fit the temperature on them.

    Under DDP every example counts once: repeats that a ``DistributedSampler`` adds are left out.
    Where the data are shared in another way (an ``IterableDataset``, or sampling of your own), each
    process counts what it gets. With ``ddp_spawn`` the pages are there, but ``reports`` and
    ``files`` stay in the processes that were spawned.

    Args:
        directory: The folder of the pages, or an fsspec URL; ``reports`` in the logger's folder if
            None.
        ood: Loaders or data modules of out-of-distribution data, by name, or one of them. Their
            batches may hold inputs alone. With several processes each predicts every n-th batch.
        compare: Other models for the same data, by name: posteriors, strategies, plain networks
            (one draw), or folders of saved posteriors; or a list of such folders. The network of a
            folder is what its file says, else the strategy's own. Load a posterior of yet another
            network of your own first: ``{"name": Posterior.load(folder, net)}``.
        every_n_epochs: After how many epochs of a fit a page is made of the validation data.
        after_fit: Whether one is made at the end of a fit.
        bins: Bins of the reliability diagram.
        risk: The share of errors to allow; the report tells how much can be answered with it.
        class_names: Names of the classes.
        pruning: Shares of the strategy's weights. The pages then say what removing them would cost,
            those of the lowest signal-to-noise ratio first
            (:func:`lightning_bnn.pruning.prune_curve`): after a fit, a test or a validation by
            itself, not every n epochs. Each share costs a pass over the data.
        sections: Further parts of the pages, of your own.

    Attributes:
        reports: The last reports of this process, by file name. Only process 0 has them.
        files: The pages that were written, in order.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn import VariationalBNN
        >>> from lightning_bnn.likelihoods import Categorical
        >>> data = DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 3), 20)
        >>> folder = tempfile.TemporaryDirectory()
        >>> calibration = CalibrationReport(folder.name)
        >>> trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[calibration],
        ...                      enable_progress_bar=False)
        >>> bnn = VariationalBNN(nn.Linear(4, 3), Categorical(), num_data=60)
        >>> results = trainer.test(bnn, data, verbose=False)
        >>> calibration.reports["test.html"]
        Report(models=['VariationalBNN'], examples=60, task='classification')
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        ood: Any = None,
        compare: Any = None,
        every_n_epochs: int | None = None,
        after_fit: bool = True,
        bins: int = 15,
        risk: float = 0.05,
        class_names: Sequence[str] | None = None,
        pruning: Sequence[float] | None = None,
        sections: Sequence[Section] = (),
    ) -> None:
        if every_n_epochs is not None:
            check_whole("every_n_epochs", every_n_epochs, 1)
        check_whole("bins", bins, 2)
        check_probability("risk", risk)
        check_kind("sections", sections, Sequence, "a list of sections of a report")
        for section in sections:
            check_kind("sections", section, Section, "a list of sections of a report")
        if ood is not None and not isinstance(ood, Mapping):
            ood = {"ood": ood}
        self.directory = None if directory is None else check_path("directory", directory)
        self.ood: dict[str, Any] = dict(ood or {})
        self.compare = {} if compare is None else name_all(compare, "compare")
        self.every_n_epochs, self.after_fit = every_n_epochs, after_fit
        self.bins, self.risk, self.class_names = bins, risk, class_names
        curve = [] if pruning is None else [Pruning(pruning)]
        self.sections: list[Section] = [*curve, *sections]
        self.reports: dict[str, Report] = {}
        self.files: list[str] = []
        self._folder = ""
        self._models: RunModels
        self._page: str | None = None  # the page that is being gathered; None: none
        # for each loader what is gathered of it, the numbers of its examples, and itself
        self._parts: list[tuple[Collection, ExampleNumbers, Any]] = []
        self._made: tuple[int, str] | None = None  # the step of a page that can serve for the fit
        # whose validation had which loaders; the module is not kept alive for it
        self._fitted: tuple[weakref.ref[Any], list[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the weak reference, which cannot be sent to another process."""
        return {**self.__dict__, "_fitted": None}

    # ---------------------------------------------------------------- before anything is lost

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the folder, try to write in it, and check the module."""
        if stage == "predict":
            return
        if not isinstance(pl_module, Strategy):
            raise ConfigurationError(
                f"CalibrationReport needs a strategy of lightning_bnn; got "
                f"{type(pl_module).__name__}. For a model of your own use lightning_bnn.report."
            )
        name = type(pl_module).__name__
        if name in self.compare:
            raise ConfigurationError(
                f"compare= has the name {name!r} of this run's strategy. Give it another name."
            )
        # Asked for here, where every process passes: Lightning broadcasts it.
        self._folder = self.directory or os.path.join(trainer.log_dir or ".", "reports")
        self._made = self._page = None
        if self._wants_page(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            reason = folder_problem(self._folder) if trainer.is_global_zero else None
            reason = trainer.strategy.broadcast(reason)  # so that no process waits for another
            if reason is not None:
                raise ConfigurationError(
                    f"CalibrationReport cannot write to the folder {self._folder!r} ({reason}). "
                    "Pass another directory=."
                )
        with isolated_random_state():
            posteriors = {
                name: make_posterior(model, name, pl_module.net, pl_module.likelihood)
                for name, model in self.compare.items()
            }
            loaders = {name: data_loader(each, f"ood[{name!r}]") for name, each in self.ood.items()}
        self._models = RunModels(
            trainer, pl_module, posteriors, loaders, self.class_names, self.sections
        )

    def _wants_page(self, trainer: Any) -> bool:
        """Whether what the trainer does can make a page."""
        return trainer.state.fn != "fit" or self.after_fit or self.every_n_epochs is not None

    def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        """Let the trainer, its module and the data go."""
        self._page, self._parts = None, []
        self.__dict__.pop("_models", None)  # setup makes them

    on_exception = teardown  # type: ignore[assignment]  # which is not called then

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Try everything on the first batch, be it that of the sanity check."""
        self._models.check(batch)

    on_validation_batch_start = on_train_batch_start
    on_test_batch_start = on_train_batch_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if there will be no page for want of data."""
        if self._wants_page(trainer) and not (trainer.enable_validation or trainer.fast_dev_run):
            rank_zero_warn(
                "CalibrationReport makes no page of this fit, which has no validation data. Pass "
                "some to Trainer.fit (and do not set limit_val_batches=0), or after_fit=False to "
                "have pages of tests only.",
                category=UserWarning,
            )

    # ---------------------------------------------------------------- while batches come

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather, if a page is due."""
        # Lightning forgets them when a test begins. Its own wrapper would keep the trainer alive.
        loaders = [
            each.loader if isinstance(each, ResumableLoader) else each
            for each in flat_loaders(trainer.val_dataloaders)
        ]
        self._fitted = weakref.ref(pl_module), loaders
        page = _validation_page(trainer, self.every_n_epochs, self.after_fit)
        self._begin(trainer, page, trainer.val_dataloaders)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather."""
        page = None if trainer.fast_dev_run else "test"  # type: ignore[attr-defined]
        self._begin(trainer, page, trainer.test_dataloaders)

    def _begin(self, trainer: pl.Trainer, page: str | None, loaders: Any) -> None:
        self._page = page
        if page is None:
            return
        # each page of an epoch costs no more than its predictions
        brief = page.startswith("epoch")
        sections = [each for each in self.sections if not (brief and each.needs_posterior)]
        rank, processes = trainer.global_rank, trainer.world_size
        self._parts = [
            (
                Collection(self._models.names, self.bins, sections),
                ExampleNumbers(loader, rank, processes),
                loader,
            )
            for loader in flat_loaders(loaders)
        ]

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Add a batch."""
        # said in the sanity check already, whether this validation makes a page or not
        if self._wants_page(trainer) and not isinstance(outputs, Predictive):
            raise ConfigurationError(
                f"CalibrationReport expected the step of {type(pl_module).__name__} to return what "
                f"it predicts, a Predictive; got {type(outputs).__name__}. Return what the step of "
                "Strategy returns."
            )
        if self._page is None:
            return
        collection, numbers, _ = self._parts[dataloader_idx]
        examples = numbers.take(len(outputs))
        with _noting(trainer, collection):
            self._models.add(collection.models, outputs, batch, examples)

    on_test_batch_end = on_validation_batch_end

    # ---------------------------------------------------------------- at the end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages that are due, and log their headlines."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages, and log their headlines."""
        if self._page is not None and self._parts:
            first = self._parts[0][0]
            if first.models[self._models.own].task != "regression":
                self._gather_validation(trainer, pl_module, first)  # for the temperature
            for collection, *_ in self._parts[1:]:
                for name, model in collection.models.items():
                    model.validation = first.models[name].validation
        self._finish(trainer, pl_module, "test")

    def _gather_validation(self, trainer: Any, module: Any, collection: Collection) -> None:
        """Predict the first loader of validation data that a test knows of, as far as allowed."""
        limit = trainer.limit_val_batches
        loader, options = None, {}
        if trainer.datamodule is not None and limit != 0:
            loader = validation_loader(trainer.datamodule)
            # as it comes, it is of all processes, and the limit is that of each of them
            options = {"processes": trainer.world_size}
        elif self._fitted is not None and self._fitted[0]() is module:
            loader = next(iter(self._fitted[1]), None)
        if loader is not None and limit != 0:
            most = batch_limit(loader, limit, **options)
            self._models.gather(loader, collection.validation, most, prepared=not options)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the page after the fit, unless the last validation has made one."""
        if not self.after_fit or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._made is not None and self._made[0] == trainer.global_step:
            self._save_as_fit(self._made[1])
            return
        if trainer.val_dataloaders is None and trainer.enable_validation:
            try:
                load_validation_data(trainer)
            except Exception as error:  # what was trained stays
                _warn("fit", repr(error))
                return
        loaders = trainer.val_dataloaders
        if loaders is None:
            return  # a fit without validation data
        with isolated_random_state(), evaluating(pl_module), pl_module.snapshot():
            self._begin(trainer, "fit", loaders)
            for (collection, _, loader), most in zip(
                self._parts, trainer.num_val_batches, strict=True
            ):
                with _noting(trainer, collection):
                    self._models.gather(loader, collection.models, most, prepared=True)
            for logged in self._finish(trainer, pl_module, "val", through_module=False):
                values = {name: torch.tensor(value) for name, value in logged.items()}
                trainer.callback_metrics.update(values)
                for logger in trainer.loggers:
                    logger.log_metrics(logged, step=trainer.global_step)

    def _finish(
        self, trainer: Any, module: Any, stage: str, through_module: bool = True
    ) -> list[dict[str, float]]:
        """Bring together what all processes gathered, write the pages and log."""
        if self._page is None:
            return []
        page, self._page = self._page, None
        if stage == "val":
            # a page of an epoch lacks what needs the posterior: it cannot serve for the fit then
            asking = any(section.needs_posterior for section in self.sections)
            serves = not (asking and page.startswith("epoch"))
            self._made = (trainer.global_step, page) if serves else None
        if self._parts:
            first = self._parts[0][0]
            with _noting(trainer, first):
                self._models.gather_ood(first)
            for collection, *_ in self._parts[1:]:  # the same for every loader of this run
                for name, model in collection.models.items():
                    model.ood = first.models[name].ood
                collection.failure = collection.failure or first.failure
        logged = []
        limits = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        several = len(self._parts) > 1
        for index, (collection, _, loader) in enumerate(self._parts):
            whole = collection.gathered(trainer.world_size)
            if whole.failure is None and whole.rows < self.bins:
                text = (
                    f"CalibrationReport makes no page: a diagram of {self.bins} bins needs as many "
                    f"predictions, and {whole.rows} of {whole.examples} examples are finite. Let "
                    "more batches through, or lower bins=."
                )
                rank_zero_warn(text, category=UserWarning)
                continue
            self._measure(trainer, whole, loader, limits[index])
            name = f"{page}-{index + 1}" if several else page
            scalars = self._write(trainer, whole, name, stage)
            suffix = f"/dataloader_idx_{index}" if several else ""
            logged.append({f"{stage}_{key}{suffix}": value for key, value in scalars.items()})
            if through_module:
                module.log_dict(logged[-1], sync_dist=True, add_dataloader_idx=False)
        self._parts = []
        return logged

    def _measure(self, trainer: Any, whole: Collection, loader: Any, limit: float) -> None:
        """Let sections ask the strategy's posterior, once all processes have gathered."""
        statistics = whole.models[self._models.own]
        if whole.fewest == 0:  # the metrics of that process would have nothing to add up
            for section in statistics.sections:
                if section.needs_posterior:
                    section.unavailable = "a process has none of the data."
        else:
            with _noting(trainer, whole):
                self._models.measure(statistics, loader, limit)

    # ---------------------------------------------------------------- pages

    def _write(self, trainer: Any, whole: Collection, name: str, stage: str) -> dict[str, float]:
        """Make a page on process 0; the headlines of the strategy, on all of them."""
        scalars: dict[str, float] = {}
        failure: Exception | None = None
        if trainer.is_global_zero and whole.failure is None:
            try:
                scalars = self._make(trainer, whole, name, stage)
            except Exception as error:  # the other processes wait for an answer
                failure, whole.failure = error, _said(error)
        scalars, reason = trainer.strategy.broadcast((scalars, whole.failure))
        if reason is not None:
            if trainer.state.fn != "fit":
                text = f"The report {name} failed on process 0: {reason}"
                raise failure or LightningBNNError(text)
            _warn(name, reason)
        return scalars

    def _make(self, trainer: Any, whole: Collection, name: str, stage: str) -> dict[str, float]:
        source = "test" if stage == "test" else "validation"
        where = f"epoch {trainer.current_epoch}" if name.startswith("epoch") else source
        title = f"Calibration of {self._models.own}, {where}"
        made = make_report(
            whole.models, title=title, source=source, class_names=self.class_names, risk=self.risk
        )
        self._save(name, made)
        shown = [logger for logger in trainer.loggers if shows_figures(logger)]
        if shown:
            # matplotlib is slow to import, and most runs have no logger that shows figures
            from lightning_bnn.report.figures import calibration_figures

            log_figures(shown, calibration_figures(made.numbers), stage, trainer.global_step)
        return headlines(made.numbers, self._models.own)

    def _save(self, name: str, made: Report) -> None:
        file = made.save(f"{self._folder.rstrip('/')}/{name}.html")
        self.reports[f"{name}.html"] = made
        if file not in self.files:
            self.files.append(file)

    def _save_as_fit(self, page: str) -> None:
        """Give the pages of the last epoch the name of those after the fit as well."""
        for name, made in list(self.reports.items()):  # process 0 alone has any
            if page != "fit" and name.startswith(page):
                try:
                    self._save(name.replace(page, "fit").removesuffix(".html"), made)
                except Exception as error:
                    _warn("fit", _said(error))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _warn(page: str, reason: str) -> None:
    text = f"CalibrationReport could not make the page {page} ({reason}). Training continues."
    rank_zero_warn(text, category=UserWarning)


@contextmanager
def _noting(trainer: Any, collection: Collection) -> Iterator[None]:
    """In a fit, note the first error for the page's end instead of raising it."""
    try:
        yield
    except Exception as error:
        if trainer.state.fn != "fit":
            raise
        collection.failure = collection.failure or _said(error)


def _validation_page(trainer: Any, every_n_epochs: int | None, after_fit: bool) -> str | None:
    """The name of the page that a validation makes; None if it makes none."""
    if trainer.sanity_checking or trainer.fast_dev_run:
        return None
    if trainer.state.fn != "fit":
        return "validation"
    loop, epoch = trainer.fit_loop.epoch_loop, trainer.current_epoch + 1
    last_batch = loop.batch_progress.is_last_batch
    if every_n_epochs is not None and epoch % every_n_epochs == 0:
        # made if no other validation comes in this epoch, also where that cannot be known
        interval, total = trainer.val_check_batch, trainer.num_training_batches
        unknown = interval is None or math.isinf(total)
        if last_batch or unknown or loop.batch_idx + 1 + interval > total:
            return f"epoch-{trainer.current_epoch:04d}"
    # The last validation serves for the page after the fit, if nothing is trained after it.
    ends = epoch == trainer.max_epochs and last_batch
    ends = ends or trainer.global_step >= trainer.max_steps >= 0
    return "fit" if after_fit and ends else None
