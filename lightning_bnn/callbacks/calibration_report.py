"""Calibration reports in a run: a page after the fit, after a test, and every few epochs.

What the strategy predicts in validation and test is gathered as it is, so that the report costs no
further draws for the strategy itself; only out-of-distribution data and compared posteriors are
predicted for the report alone. Statistics are sums in fixed bins and a bounded sample, gathered
batch by batch and added up over processes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_bnn.callbacks.report_pages import (
    ReportPages,
    measure,
    noting,
    validation_page,
    warn_of_failure,
)
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl, rank_zero_warn
from lightning_bnn.predictive import Predictive
from lightning_bnn.pruning.section import Pruning
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.document import Report
from lightning_bnn.report.gather import ExampleNumbers, batch_limit, flat_loaders
from lightning_bnn.report.networks import make_posterior, name_all
from lightning_bnn.report.posteriors import data_loader, validation_loader
from lightning_bnn.report.run import RunModels, evaluating, load_validation_data
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Collection
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.resume import ResumableLoader

__all__ = ["CalibrationReport"]


class CalibrationReport(pl.Callback):
    """Write a page that says how far the uncertainty of a strategy can be trusted.

    ``fit.html`` is made of the validation data at the end of a fit (there is none in a fit without
    validation data), ``test.html`` at the end of a test, ``validation.html`` by
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
            folder is that of the ``config.yaml`` in it or above it, as ``lightning-bnn fit`` leaves
            it, else the strategy's own.
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
        if (every_n_epochs is not None and every_n_epochs < 1) or bins < 2 or not 0 < risk < 1:
            raise ConfigurationError(
                "every_n_epochs= is at least 1 or None, bins= at least 2, and risk= between 0 and "
                f"1; got {every_n_epochs}, {bins} and {risk}."
            )
        if ood is not None and not isinstance(ood, Mapping):
            ood = {"ood": ood}
        self.directory = None if directory is None else os.fspath(directory)
        self.ood: dict[str, Any] = dict(ood or {})
        self.compare = {} if compare is None else name_all(compare, "compare")
        self.every_n_epochs, self.after_fit = every_n_epochs, after_fit
        self.bins, self.risk, self.class_names = bins, risk, class_names
        own = [] if pruning is None else [Pruning(pruning)]
        self.sections: list[Section] = [*own, *sections]
        self._pages = ReportPages(risk, class_names)
        self.reports: dict[str, Report] = self._pages.reports
        self.files: list[str] = self._pages.files
        self._models: RunModels
        self._name: str | None = None  # of the page that is being gathered; None: of none
        # for each loader what is gathered of it, the numbers of its examples, and itself
        self._parts: list[tuple[Collection, ExampleNumbers, Any]] = []
        self._made_at: int | None = None  # the step of a page that can serve for the fit
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
        own = type(pl_module).__name__
        if own in self.compare:
            raise ConfigurationError(
                f"compare= has the name {own!r} of this run's strategy. Give it another name."
            )
        # Asked for here, where every process passes: Lightning broadcasts it.
        self._pages.folder = self.directory or os.path.join(trainer.log_dir or ".", "reports")
        self._made_at = self._name = None
        if self._wants_page(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._pages.check_folder(trainer)
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

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the trainer, its module and the data go."""
        self._name, self._parts = None, []
        self.__dict__.pop("_models", None)  # setup makes them

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of what was gathered; Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "")

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Try everything on the first batch, be it that of the sanity check."""
        self._models.check(batch)

    on_validation_batch_start = on_train_batch_start
    on_test_batch_start = on_train_batch_start

    # ---------------------------------------------------------------- while batches come

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather, if a page is due."""
        # Lightning forgets them when a test begins. Its own wrapper would keep the trainer alive.
        loaders = [
            each.loader if isinstance(each, ResumableLoader) else each
            for each in flat_loaders(trainer.val_dataloaders)
        ]
        self._fitted = weakref.ref(pl_module), loaders
        name = validation_page(trainer, self.every_n_epochs, self.after_fit)
        self._begin(trainer, name, trainer.val_dataloaders)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather."""
        name = None if trainer.fast_dev_run else "test"  # type: ignore[attr-defined]
        self._begin(trainer, name, trainer.test_dataloaders)

    def _begin(self, trainer: pl.Trainer, name: str | None, loaders: Any) -> None:
        self._name = name
        if name is None:
            return
        # each page of an epoch costs no more than its predictions
        brief = name.startswith("epoch")
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
        if self._name is None:
            return
        collection, numbers, _ = self._parts[dataloader_idx]
        examples = numbers.take(len(outputs))
        if collection.failure is None:
            with noting(trainer, collection):
                self._models.add(collection.models, outputs, batch, examples)

    on_test_batch_end = on_validation_batch_end

    # ---------------------------------------------------------------- at the end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages that are due, and log their headlines."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages, and log their headlines."""
        if self._name is not None and self._parts:
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
        if self._made_at == trainer.global_step:
            self._pages.save_as_fit()
            return
        if trainer.val_dataloaders is None and trainer.enable_validation:
            try:
                load_validation_data(trainer)
            except Exception as error:  # what was trained stays
                warn_of_failure("fit", repr(error))
                return
        loaders = trainer.val_dataloaders
        if loaders is None:
            return  # a fit without validation data
        with isolated_random_state(), evaluating(pl_module), pl_module.snapshot():
            self._begin(trainer, "fit", loaders)
            for (collection, _, loader), most in zip(
                self._parts, trainer.num_val_batches, strict=True
            ):
                with noting(trainer, collection):
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
        if self._name is None:
            return []
        page, self._name = self._name, None
        if stage == "val":
            # a page of an epoch lacks what needs the posterior: it cannot serve for the fit then
            asking = any(section.needs_posterior for section in self.sections)
            serves = not (asking and page.startswith("epoch"))
            self._made_at, self._pages.last = trainer.global_step if serves else None, []
        if self._parts:
            first = self._parts[0][0]
            if first.failure is None:
                with noting(trainer, first):
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
            measure(trainer, self._models, whole, loader, limits[index])
            name = f"{page}-{index + 1}" if several else page
            scalars = self._pages.write(trainer, self._models.own, whole, name, stage)
            suffix = f"/dataloader_idx_{index}" if several else ""
            logged.append({f"{stage}_{key}{suffix}": value for key, value in scalars.items()})
            if through_module:
                module.log_dict(logged[-1], sync_dist=True, add_dataloader_idx=False)
        self._parts = []
        return logged
