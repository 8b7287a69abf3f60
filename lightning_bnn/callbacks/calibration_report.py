"""Calibration reports in a run: a page after the fit, after a test, and every few epochs.

What the strategy predicts in validation and test is gathered as it is, so that the report costs no
further draws for the strategy itself; only data from elsewhere and compared posteriors are
predicted for the report alone. Statistics are sums in fixed bins and a bounded sample, gathered
batch by batch and added up over processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn

from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.collection import Collection
from lightning_bnn.report.document import Report
from lightning_bnn.report.example_numbers import ExampleNumbers
from lightning_bnn.report.loggers import headlines, log_figures, shows_figures
from lightning_bnn.report.networks import make_posterior, name_all
from lightning_bnn.report.numbers import report_numbers
from lightning_bnn.report.posteriors import data_loader, validation_loader
from lightning_bnn.report.run import RunModels
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.resume import isolated_random_state

__all__ = ["CalibrationReport"]


class CalibrationReport(pl.Callback):
    """Write a page that says how far the uncertainty of a strategy can be trusted.

    ``fit.html`` is made of the validation data at the end of a fit, ``test.html`` at the end of a
    test, ``validation.html`` by ``trainer.validate``, and ``epoch-0009.html`` every n epochs if
    asked for; with several loaders each gets a number, as in ``test-1.html``. The numbers lie
    beside each page as JSON, the figures go to the trainer's loggers, and a few numbers to ``log``:
    ``val_adaptive_ece``, ``val_excess_nll``, ``val_auroc_letters`` and others (see
    :func:`lightning_bnn.report.loggers.headlines`).

    It works with every strategy, and leaves training as it is, to the last bit. Under DDP every
    example counts once: repeats that a ``DistributedSampler`` adds are left out. Where the data are
    shared in another way (an ``IterableDataset``, or sampling of your own), each process counts
    what it gets.

    Args:
        directory: The folder of the pages, or an fsspec URL; ``reports`` in the logger's folder if
            None.
        ood: Loaders or data modules of data from elsewhere, by name, or one of them. Their batches
            may hold inputs alone. With several processes each predicts every n-th batch.
        compare: Other models for the same data, by name: posteriors, strategies, plain networks
            (one draw), or folders of saved posteriors; or a list of such folders. The network of a
            folder is that of the ``config.yaml`` in it or above it, as ``lightning-bnn fit`` leaves
            it, else the strategy's own.
        every_n_epochs: After how many epochs of a fit a page is made of the validation data.
        after_fit: Whether one is made at the end of a fit.
        bins: Bins of the reliability diagram.
        risk: The share of errors to allow; the report tells how much can be answered with it.
        class_names: Names of the classes.

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
        Report(models=['VariationalBNN'], examples=60, task='classes')
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
    ) -> None:
        if every_n_epochs is not None and every_n_epochs < 1:
            raise ConfigurationError(
                f"every_n_epochs= is at least 1, or None for no page; got {every_n_epochs}."
            )
        if bins < 2 or not 0 < risk < 1:
            raise ConfigurationError(
                f"bins= is at least 2 and risk= lies between 0 and 1; got {bins} and {risk}."
            )
        if ood is not None and not isinstance(ood, Mapping):
            ood = {"ood": ood}
        self.directory = None if directory is None else os.fspath(directory)
        self.ood: dict[str, Any] = dict(ood or {})
        self.compare = {} if compare is None else name_all(compare, "compare")
        self.every_n_epochs = every_n_epochs
        self.after_fit = after_fit
        self.bins, self.risk, self.class_names = bins, risk, class_names
        self.reports: dict[str, Report] = {}
        self.files: list[str] = []
        self._folder = ""
        self._models: RunModels
        self._name: str | None = None  # of the page that is being gathered; None: of none
        self._collections: list[Collection] = []
        self._numbers: list[ExampleNumbers] = []
        self._made_at: int | None = None  # the step of the last page
        # whose validation had which loaders
        self._fitted: tuple[Any, list[Any]] | None = None

    # ---------------------------------------------------------------- before anything is lost

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the folder, and check the module."""
        if not isinstance(pl_module, Strategy):
            raise ConfigurationError(
                "CalibrationReport needs a strategy of lightning_bnn, which says what it predicts; "
                f"got {type(pl_module).__name__}. For a model of your own use "
                "lightning_bnn.report.report(probabilities, targets), or report_posteriors."
            )
        own = type(pl_module).__name__
        if own in self.compare:
            raise ConfigurationError(
                f"compare= has the name {own!r}, which is that of the strategy of this run. Give "
                "the other one another name."
            )
        # Asked for here, where every process passes: Lightning broadcasts it.
        self._folder = self.directory or os.path.join(trainer.log_dir or ".", "reports")
        self._made_at = self._name = None
        with isolated_random_state():
            posteriors = {
                name: make_posterior(one, name, pl_module.net, pl_module.likelihood)
                for name, one in self.compare.items()
            }
            loaders = {name: data_loader(one) for name, one in self.ood.items()}
        self._models = RunModels(trainer, pl_module, posteriors, loaders)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Try everything on the first batch."""
        self._models.check(batch)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Try everything on the first batch, be it that of the sanity check."""
        self._models.check(batch)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Try everything on the first batch."""
        self._models.check(batch)

    # ---------------------------------------------------------------- while batches come

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather, if a page is due."""
        # Lightning forgets them when a test begins.
        self._fitted = pl_module, _flat(trainer.val_dataloaders)
        self._begin(trainer, pl_module, self._validation_page(trainer), trainer.val_dataloaders)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Begin to gather."""
        name = None if trainer.fast_dev_run else "test"  # type: ignore[attr-defined]
        self._begin(trainer, pl_module, name, trainer.test_dataloaders)

    def _validation_page(self, trainer: Any) -> str | None:
        if trainer.sanity_checking or trainer.fast_dev_run:
            return None
        if trainer.state.fn != "fit":
            return "validation"
        epoch = trainer.current_epoch + 1
        if self.every_n_epochs is not None and epoch % self.every_n_epochs == 0:
            return f"epoch-{trainer.current_epoch:04d}"
        # The last validation serves for the page after the fit, if nothing is trained after it.
        ends = epoch == trainer.max_epochs or trainer.global_step >= trainer.max_steps >= 0
        return "fit" if self.after_fit and ends else None

    def _begin(self, trainer: pl.Trainer, module: Any, name: str | None, loaders: Any) -> None:
        self._name = name
        if name is None:
            return
        names = self._models.names
        self._collections = [Collection(names, self.bins) for _ in _flat(loaders)]
        self._numbers = [
            ExampleNumbers(loader, trainer.global_rank, trainer.world_size)
            for loader in _flat(loaders)
        ]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Add a batch."""
        self._add(trainer, pl_module, outputs, batch, dataloader_idx)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Add a batch."""
        self._add(trainer, pl_module, outputs, batch, dataloader_idx)

    def _add(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._name is None:
            return
        if not isinstance(outputs, Predictive):
            raise ConfigurationError(
                f"CalibrationReport expected the step of {type(module).__name__} to return what it "
                f"predicts, a Predictive; got {type(outputs).__name__}. Return what the step of "
                "Strategy returns."
            )
        numbers = self._numbers[index].take(len(outputs))
        self._models.add(self._collections[index].models, outputs, batch, numbers)

    # ---------------------------------------------------------------- at the end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages that are due, and log their headlines."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the pages, and log their headlines."""
        if self._name is not None and self._collections:
            first = self._collections[0]
            loaders = self._validation_loaders(trainer, pl_module)
            if loaders and first.models[self._models.own].task != "numbers":
                self._models.gather(loaders[0], first.validation)  # for the temperature
            for collection in self._collections[1:]:
                collection.validation = first.validation
        self._finish(trainer, pl_module, "test")

    def _validation_loaders(self, trainer: Any, module: Any) -> list[Any]:
        """Loaders of validation data that a test knows of, to fit the temperature on."""
        if trainer.datamodule is not None:
            found = validation_loader(trainer.datamodule)
            return [] if found is None else _flat(found)
        return self._fitted[1] if self._fitted is not None and self._fitted[0] is module else []

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Make the page after the fit, unless the last validation has made one."""
        done = self._made_at == trainer.global_step
        if not self.after_fit or done or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        loaders = trainer.val_dataloaders
        if loaders is None:
            return  # a fit without validation data
        with isolated_random_state(), _evaluating(pl_module), pl_module.snapshot():
            self._begin(trainer, pl_module, "fit", loaders)
            limits = trainer.num_val_batches
            for loader, limit, collection in zip(
                _flat(loaders), limits, self._collections, strict=True
            ):
                self._models.gather(loader, collection.models, limit)
            for logged in self._finish(trainer, pl_module, "val", through_module=False):
                for logger in trainer.loggers:
                    logger.log_metrics(logged, step=trainer.global_step)

    def _finish(
        self, trainer: Any, module: Any, stage: str, through_module: bool = True
    ) -> list[dict[str, float]]:
        """Bring together what all processes gathered, write the pages and log."""
        if self._name is None:
            return []
        page, self._name = self._name, None
        self._made_at = trainer.global_step if stage == "val" else self._made_at
        if self._collections:
            self._models.gather_outside(self._collections[0])
            for collection in self._collections[1:]:  # the same for every loader of this run
                collection.outside = self._collections[0].outside
        logged = []
        several = len(self._collections) > 1
        for index, part in enumerate(self._collections):
            whole = part.gathered(trainer.world_size)
            if whole.rows < self.bins:
                rank_zero_warn(
                    f"CalibrationReport makes no page: a diagram of {self.bins} bins needs as many "
                    f"predictions, and {whole.rows} of those of {whole.examples} examples are "
                    "there and finite. Let more batches through, or lower bins=.",
                    category=UserWarning,
                )
                continue
            name = f"{page}-{index + 1}" if several else page
            scalars = self._write(trainer, module, whole, name, stage)
            suffix = f"/dataloader_idx_{index}" if several else ""
            logged.append({f"{stage}_{key}{suffix}": value for key, value in scalars.items()})
            if through_module:
                module.log_dict(logged[-1], sync_dist=True, add_dataloader_idx=False)
        self._collections, self._numbers = [], []
        return logged

    def _write(
        self, trainer: Any, module: Any, whole: Collection, name: str, stage: str
    ) -> dict[str, float]:
        """Make a report on process 0; its headlines, on all of them."""
        scalars: dict[str, float] = {}
        failure: Exception | None = None
        if trainer.is_global_zero:
            try:
                scalars = self._make(trainer, module, whole, name, stage)
            except Exception as error:  # the other processes wait for an answer
                failure = error
        said = trainer.strategy.broadcast((scalars, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        if said[1] is not None:
            raise LightningBNNError(f"The report {name} failed on process 0: {said[1]}")
        return said[0]

    def _make(
        self, trainer: Any, module: Any, whole: Collection, name: str, stage: str
    ) -> dict[str, float]:
        fitted = {key: one for key, one in whole.validation.items() if one.examples}
        source = "test" if stage == "test" else "validation"
        own = type(module).__name__
        where = f"epoch {trainer.current_epoch}" if name.startswith("epoch") else source
        made = Report(
            report_numbers(
                whole.models,
                outside=whole.outside if self.ood else None,
                validation=fitted or None,
                title=f"Calibration of {own}, {where}",
                source=source,
                class_names=self.class_names,
                risk=self.risk,
            )
        )
        self.reports[f"{name}.html"] = made
        self.files.append(made.save(f"{self._folder.rstrip('/')}/{name}.html"))
        shown = [one for one in trainer.loggers if shows_figures(one)]
        if shown:
            from lightning_bnn.report.figures import calibration_figures

            log_figures(shown, calibration_figures(made.numbers), stage, trainer.global_step)
        return headlines(made.numbers, own)


def _flat(loaders: Any) -> list[Any]:
    """Loaders as a list, however the trainer has them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


@contextmanager
def _evaluating(module: pl.LightningModule) -> Iterator[None]:
    """A module in evaluation mode; each part gets its own mode back."""
    before = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in before:
            one.training = training
