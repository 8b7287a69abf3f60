"""The data module that the others share: splits held in memory, and their loaders.

A data set adds only :meth:`InMemoryDataModule.load`. Randomness is kept apart on purpose:

* what the data *are* (splits, simulated noise) comes from generators of the data set's own seed,
  so the same seed gives the same data whatever ran before;
* the *order* of training batches and the augmentation come from torch's global generator, as with
  any ``DataLoader``, so ``seed_everything`` governs them and a resumed run can replay them;
* validating, testing and predicting draw nothing from the global generator, so how often a run
  is validated does not change how it is trained.

Sets that are read from files look for them in ``data_dir``, or without it in
``$LIGHTNING_BNN_DATA/<set>``, with ``<set>`` one of ``uci``, ``mnist``, ``cifar10``. So one root
folder serves every configuration of a machine, and no configuration has to name it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_bnn.checks import check_whole
from lightning_bnn.data.tensors import TensorRows, collate_rows
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl

__all__ = ["InMemoryDataModule", "Splits", "check_files", "data_folder", "training_size"]

DATA_VARIABLE = "LIGHTNING_BNN_DATA"


def data_folder(data_dir: str | Path | None, expected: str) -> Path:
    """Return the folder of a data set: ``data_dir``, or one in ``$LIGHTNING_BNN_DATA``.

    Args:
        data_dir: The folder as the user gave it, or None to use the environment variable.
        expected: A file of the set below that variable's root folder; its first part names the
            set's folder.

    Raises:
        ConfigurationError: If neither ``data_dir`` nor the environment variable is given.

    Example:
        >>> data_folder("somewhere/yachts", "uci/yacht/data.txt").as_posix()
        'somewhere/yachts'
    """
    root = os.environ.get(DATA_VARIABLE)
    if data_dir is None and not root:
        raise ConfigurationError(
            f"Pass data_dir=, or set the environment variable {DATA_VARIABLE} to a root folder "
            f"that holds {expected}: neither is given."
        )
    return Path(data_dir or f"{root}/{Path(expected).parts[0]}").expanduser()


def check_files(files: Iterable[Path], fix: str = "") -> None:
    """Raise unless the files of a data set are there.

    Args:
        files: They.
        fix: What else would help, as a sentence.

    Raises:
        ConfigurationError: Files are missing.

    Example:
        >>> check_files([Path("here/images.gz")], "Or pass download=True.")
        Traceback (most recent call last):
            ...
        lightning_bnn.errors.ConfigurationError: Expected here/images.gz, not there. Pass
        data_dir=, or set the environment variable LIGHTNING_BNN_DATA to the root folder of your
        data sets. Or pass download=True.
    """
    if missing := ", ".join(path.as_posix() for path in files if not path.exists()):
        raise ConfigurationError(
            f"Expected {missing}, not there. Pass data_dir=, or set the environment variable "
            f"{DATA_VARIABLE} to the root folder of your data sets. {fix}".rstrip()
        )


def training_size(rows: int, validation: int) -> int:
    """Return how many rows are left to train on when ``validation`` of them are held out.

    Args:
        rows: Number of rows before.
        validation: Number of rows to hold out.

    Raises:
        ConfigurationError: If that number is negative or leaves none.

    Example:
        >>> training_size(60_000, validation=10_000)
        50000
    """
    if not 0 <= validation < rows:
        raise ConfigurationError(
            f"validation is how many of the {rows} training examples to hold out, at least 0 and "
            f"fewer than all; got validation={validation}."
        )
    return rows - validation


@dataclass(frozen=True)
class Splits:
    """The parts of a data set.

    Attributes:
        train: What is trained on; its length is N.
        validation: Rows to validate on; may be empty.
        test: Rows to test on.
        predict: Rows to predict; the test rows if None.

    Example:
        >>> rows = TensorRows(torch.zeros(5, 2), torch.zeros(5, 1))
        >>> len(Splits(train=rows, validation=rows, test=rows).train)
        5
    """

    train: TensorRows
    validation: TensorRows
    test: TensorRows
    predict: TensorRows | None = None


class InMemoryDataModule(pl.LightningDataModule):
    """Base of the data modules: subclasses say in :meth:`load` what the splits are.

    Batches are ``(inputs, targets)`` in every loader, the predict loader included.

    Args:
        batch_size: Examples per batch, in every loader.
        num_workers: Worker processes per loader. The data are in memory already, so 0 is usually
            the fastest.

    Example:
        >>> class Zeros(InMemoryDataModule):
        ...     def load(self) -> Splits:
        ...         rows = TensorRows(torch.zeros(5, 2), torch.zeros(5, 1))
        ...         return Splits(train=rows, validation=rows, test=rows)
        >>> data = Zeros(batch_size=4)
        >>> data.setup()
        >>> data.num_data, data.input_shape, len(data.train_dataloader())
        (5, (2,), 2)
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = check_whole("batch_size", batch_size, 1)
        self.num_workers = check_whole("num_workers", num_workers, 0)
        self._splits: Splits | None = None

    def load(self) -> Splits:
        """Read or make the data. Called once, by :meth:`setup`."""
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    def setup(self, stage: str | None = None) -> None:
        """Load the data, the first time; all stages share them.

        Raises:
            ConfigurationError: If validation is asked for and no rows are held out for it.
        """
        if self._splits is None:
            self._splits = self.load()
        if not len(self._splits.validation):
            if stage == "validate":
                raise ConfigurationError(
                    f"{type(self).__name__} has no validation rows: all were left for training. "
                    "Pass validation= to hold some out."
                )
            # An empty loader would make Lightning warn at every fit. Lightning's own method in
            # its place reads as "this data module does not validate".
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    @property
    def splits(self) -> Splits:
        """The parts of the data, once :meth:`setup` has run."""
        if self._splits is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no data yet: they are loaded by setup(). Call setup() "
                "first, or pass the data module to a trainer, which calls it."
            )
        return self._splits

    @property
    def num_data(self) -> int:
        """The number of training examples, N."""
        return len(self.splits.train)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch axis."""
        return tuple(self.splits.train.tensors[0].shape[1:])

    def train_dataloader(self) -> DataLoader:
        """Batches of the training rows, shuffled anew each epoch."""
        return self._loader(self.splits.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Batches of the validation rows. If there are none, a fit runs without validation."""
        return self._loader(self.splits.validation)

    def test_dataloader(self) -> DataLoader:
        """Batches of the test rows."""
        return self._loader(self.splits.test)

    def predict_dataloader(self) -> DataLoader:
        """Batches of the rows to predict: the test rows unless the data set names others."""
        rows = self.splits.predict
        return self._loader(self.splits.test if rows is None else rows)

    def _loader(self, rows: TensorRows, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=collate_rows,
            # Workers are seeded when they start. New ones each epoch make augmentation a function
            # of the generator at the start of the epoch, so that a resumed run can repeat it.
            persistent_workers=False,
            # A loader draws a number whenever it is iterated, shuffled or not. Its own generator
            # keeps evaluation from moving the global generator.
            generator=None if shuffle else torch.Generator(),
        )
