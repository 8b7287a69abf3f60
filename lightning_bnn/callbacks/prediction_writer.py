"""Stream predictions to CSV files, so that memory does not grow with the data.

One row per example. After ``index``, the columns depend on the kind of prediction:

* classes: ``class`` (the most probable), ``probability`` (its own), ``entropy``, ``aleatoric``,
  ``mutual_information`` (the epistemic part; entropy = aleatoric + mutual information), in nats.
  Where the network predicts a class at each position, there is one row per position, and
  ``position`` counts them after ``index``;
* yes-or-no labels: ``label`` (0 or 1), ``probability`` (of a 1), ``entropy``, ``aleatoric``,
  ``mutual_information``;
* regression: ``mean``, ``standard_deviation``, ``aleatoric`` and ``epistemic`` (variances,
  adding up to the square of the standard deviation), ``lower_90`` and ``upper_90`` (the central
  interval that holds 90% of the mixture).

With several labels or outputs each column comes once for each, numbered from 0: ``mean_0``,
``mean_1``, ... A predictive of your own says its columns with a method ``columns``.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, TextIO

import fsspec
from torch import Tensor

from lightning_bnn.checks import check_path
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import BasePredictionWriter, pl

__all__ = ["PredictionWriter"]


class PredictionWriter(BasePredictionWriter):
    r"""Write the predictions of ``trainer.predict`` to CSV, batch after batch.

    See :mod:`lightning_bnn.callbacks.prediction_writer` for the columns. ``index`` is the place
    of an example in its data set; where that is not known (an ``IterableDataset``), it counts
    the examples of the file. Use it with ``trainer.predict(..., return_predictions=False)``.

    A file is written under a name that ends in ``.part`` and gets its own name when the
    prediction ends, so that a file without ``.part`` is whole.

    Args:
        path: The CSV file, or an fsspec URL; ``predictions.csv`` in the logger's folder if None.
            With several data loaders or processes the files are numbered, as in
            ``predictions-loader1-rank0.csv``.

    Attributes:
        files: The files that this process finished in the last prediction.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn import VariationalBNN
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> bnn = VariationalBNN(nn.Linear(2, 1), Gaussian(0.1), num_data=100)
        >>> folder = tempfile.TemporaryDirectory()
        >>> writer = PredictionWriter(folder.name + "/predictions.csv")
        >>> trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[writer],
        ...                      enable_progress_bar=False)
        >>> loader = torch.utils.data.DataLoader(torch.zeros(3, 2), batch_size=2)
        >>> trainer.predict(bnn, loader, return_predictions=False)
        >>> with open(writer.files[0]) as file:
        ...     file.readline()
        'index,mean,standard_deviation,aleatoric,epistemic,lower_90,upper_90\n'
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = None if path is None else check_path("path", path)
        self.files: list[str] = []
        self._open: dict[str, _Table] = {}
        self._last_indices: Sequence[int] | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the files of an earlier prediction, and find the folder of this one."""
        self.files, self._open, self._last_indices = [], {}, None
        # Asked for here, where every rank passes: Lightning broadcasts it.
        self._default = os.path.join(trainer.log_dir or ".", "predictions.csv")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the rows of a batch."""
        if not hasattr(prediction, "columns"):
            raise ConfigurationError(
                "PredictionWriter expected predict_step to return a Predictive, as every strategy "
                f"of lightning_bnn does; got {type(prediction).__name__}. For a class of your own "
                "give it a method columns()."
            )
        columns = prediction.columns()
        if batch_indices is self._last_indices:
            # A loader that gives no indices leaves those of the loader before it in place.
            batch_indices = None
        else:
            self._last_indices = batch_indices
        path = self.file(trainer, dataloader_idx)
        if path not in self._open:
            self._open[path] = _Table(path, ["index", *columns])
        self._open[path].append(columns, len(prediction), batch_indices)

    def file(self, trainer: pl.Trainer, dataloader_idx: int = 0) -> str:
        """The file that this process writes for a data loader."""
        path = self._default if self.path is None else self.path
        suffix = PurePosixPath(path).suffix
        stem = path.removesuffix(suffix)
        if len(trainer.num_predict_batches) > 1:
            stem += f"-loader{dataloader_idx}"
        if trainer.world_size > 1:
            stem += f"-rank{trainer.global_rank}"
        return stem + suffix

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the files their own names."""
        for table in self._open.values():
            table.finish()
        self.files, self._open = list(self._open), {}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close what was written so far; it stays under its name with ``.part``."""
        for table in self._open.values():
            table.file.close()
        self._open = {}


class _Table:
    """A CSV file in the making."""

    def __init__(self, path: str, header: list[str]) -> None:
        self.filesystem, self.path = fsspec.core.url_to_fs(path)
        if parent := self.path.rpartition("/")[0]:
            self.filesystem.makedirs(parent, exist_ok=True)
        self.file: TextIO = self.filesystem.open(
            self.path + ".part", "w", newline="", encoding="utf-8"
        )
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(header)
        self.count = 0

    def append(
        self, columns: dict[str, Tensor], examples: int, indices: Sequence[int] | None
    ) -> None:
        if not examples:
            return
        if not indices:
            indices = range(self.count, self.count + examples)
        self.count += examples
        rows = len(next(iter(columns.values()))) // examples  # more than 1 with positions
        # As strings of NumPy: the shortest that give the same number back.
        values = [column.detach().cpu().numpy().astype(str) for column in columns.values()]
        index = [str(i) for i in indices for _ in range(rows)]
        self.writer.writerows(zip(index, *values, strict=True))
        self.file.flush()

    def finish(self) -> None:
        self.file.close()
        self.filesystem.mv(self.path + ".part", self.path)
