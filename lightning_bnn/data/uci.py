"""The nine UCI regression sets of the Bayesian deep learning literature, in their standard splits.

Hernández-Lobato and Adams, "Probabilistic Backpropagation", ICML 2015, fixed the sets and the
splits that later papers report on. The splits need no files: one ``RandomState(1)`` draws a
permutation of the rows for each split in turn; the first 90% train and the rest test. There are
20 splits, and 5 of the protein set.

A set is a folder with three text files: ``data.txt`` (numbers, separated by spaces or tabs),
``index_features.txt`` and ``index_target.txt`` (the columns that are inputs, and the target).

Inputs and target are standardised by the mean and standard deviation of the training rows. With
``s = target_scale``, a root mean squared error in original units is ``s`` times the standardised
one, and a log density is the standardised one minus ``log s``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from lightning_bnn.checks import check_number, check_option, check_path, check_whole
from lightning_bnn.data import in_memory
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
from lightning_bnn.data.tensors import TensorRows
from lightning_bnn.errors import ConfigurationError

__all__ = ["UCIName", "UCIRegression", "column_scales", "standard_split"]

UCIName = Literal[
    "bostonHousing",
    "concrete",
    "energy",
    "kin8nm",
    "naval-propulsion-plant",
    "power-plant",
    "protein-tertiary-structure",
    "wine-quality-red",
    "yacht",
]


def standard_split(rows: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and test rows of a standard split.

    Args:
        rows: Number of rows of the data set.
        split: Which split, from 0.

    Example:
        >>> train, test = standard_split(10, split=0)
        >>> train.tolist(), test.tolist()
        ([2, 9, 6, 4, 0, 3, 1, 7, 8], [5])
    """
    # The legacy generator and `choice` are what the published index files were drawn with.
    random = np.random.RandomState(1)
    for _ in range(split + 1):
        order = random.choice(rows, rows, replace=False)
    size = round(0.9 * rows)
    return order[:size], order[size:]


def column_scales(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of each column; the scale of a constant one is 1.

    Args:
        values: Rows by columns.

    Example:
        >>> import numpy as np
        >>> column_scales(np.array([[1.0, 7.0], [3.0, 7.0]]))
        (array([2., 7.]), array([1., 1.]))
    """
    # Compare the ends, not the deviation with 0: rounding in the mean can leave the deviation of
    # a constant column at 1e-16, and dividing by that would make noise of it.
    constant = values.max(axis=0) == values.min(axis=0)
    return values.mean(axis=0), np.where(constant, 1.0, values.std(axis=0))


class UCIRegression(InMemoryDataModule):
    r"""One of the nine UCI regression sets, standardised, in one of its standard splits.

    Args:
        name: Which set.
        split: Which standard split: 0 to 19, or 0 to 4 for the protein set.
        data_dir: The folder that holds ``<name>/data.txt``; ``$LIGHTNING_BNN_DATA/uci`` if None.
        validation: Share of the training rows to hold out for validation (the last ones of the
            split's random order). They are not used for the standardisation either.
        batch_size: Examples per batch.
        num_workers: Worker processes per loader.

    Attributes:
        target_mean: The mean of the training targets, in original units; known after ``setup()``.
        target_scale: Their standard deviation, likewise.

    Raises:
        ConfigurationError: For an unknown name, a split or share out of range, or missing files.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = tempfile.TemporaryDirectory()
        >>> yacht = Path(folder.name, "yacht")
        >>> yacht.mkdir()
        >>> _ = (yacht / "data.txt").write_text("".join(f"{i} 1 {2 * i}\n" for i in range(10)))
        >>> _ = (yacht / "index_features.txt").write_text("0\n1\n")
        >>> _ = (yacht / "index_target.txt").write_text("2\n")
        >>> data = UCIRegression("yacht", split=0, data_dir=folder.name)
        >>> data.setup()
        >>> data.num_data, data.input_shape, data.num_outputs
        (9, (2,), 1)
        >>> round(data.target_mean, 3), round(data.target_scale, 3)
        (8.889, 6.045)
        >>> folder.cleanup()
    """

    num_outputs: int = 1
    target_mean: float
    target_scale: float

    def __init__(
        self,
        name: UCIName,
        split: int = 0,
        data_dir: str | Path | None = None,
        validation: float = 0.0,
        batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        check_option("name", name, get_args(UCIName))
        splits = 5 if name == "protein-tertiary-structure" else 20
        if check_whole("split", split, 0) >= splits:
            raise ConfigurationError(
                f"{name} has the standard splits 0 to {splits - 1}; got split={split}."
            )
        self.set_name: str = name
        self.split = split
        if data_dir is not None:
            check_path("data_dir", data_dir)
        self.data_dir = data_dir
        self.validation = check_number("validation", validation, positive=False)

    def load(self) -> Splits:
        """Read the files, cut the split, and standardise by its training rows."""
        features, target = self._read()
        train, test = standard_split(len(features), self.split)
        size = in_memory.training_size(len(train), round(self.validation * len(train)))
        train, validation = np.split(train, [size])
        feature_mean, feature_scale = column_scales(features[train])
        target_mean, target_scale = column_scales(target[train])
        self.target_mean, self.target_scale = target_mean.item(), target_scale.item()
        inputs = torch.from_numpy((features - feature_mean) / feature_scale).float()
        targets = torch.from_numpy((target - target_mean) / target_scale).float()
        return Splits(
            *(TensorRows(inputs[rows], targets[rows]) for rows in (train, validation, test))
        )

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        folder = in_memory.data_folder(self.data_dir, f"uci/{self.set_name}/data.txt")
        stems = ("data", "index_features", "index_target")
        paths = [folder / self.set_name / f"{stem}.txt" for stem in stems]
        in_memory.check_files(paths)
        values = np.loadtxt(paths[0], ndmin=2)
        features, target = (np.loadtxt(path, dtype=int, ndmin=1) for path in paths[1:])
        return values[:, features], values[:, target]
