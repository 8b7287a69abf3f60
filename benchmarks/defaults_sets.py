"""The data and networks of :mod:`benchmarks.defaults`, and how long each set is trained.

Epochs and batch sizes are the same for all methods of a set, and were chosen so that a fit has some
2,000 to 3,000 steps (images of MNIST and CIFAR-10: fewer, they cost more), not by any score.

* ``digits``: scikit-learn's, 60 % for training and 20 % for validation; a seed is a split.
* ``mnist-cnn``, ``mnist-mlp``, ``cifar10``: a seed draws 10,000 training and 2,000 test images;
  the last 2,000 training images are for validation, and never drawn. No augmentation.
* the UCI sets: a seed is a standard split; a tenth of its training rows are for validation. All
  rows are used, protein's too. Scores are in the unit of the target.

Out-of-distribution inputs: digits lying on their side; letters (notMNIST) for MNIST; the same
letters, grey and in the middle of 32 by 32 black pixels, for CIFAR-10. The UCI sets have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.uci import NAMES
from lightning_bnn.data import CIFAR10, MNIST, Digits, InMemoryDataModule, Splits, TensorRows
from lightning_bnn.data import UCIRegression as UCI
from lightning_bnn.data.cifar10 import prepare_images
from lightning_bnn.data.in_memory import check_files
from lightning_bnn.data.mnist import PIXEL_MEAN, PIXEL_SCALE, read_idx
from lightning_bnn.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from lightning_bnn.nets import MLP, ConvNet

__all__ = ["MOST_SEEDS", "SETS", "Problem", "Set", "load"]

TRAIN, VALIDATION, TEST, OUTSIDE = 10_000, 2_000, 2_000, 1_000  # images of MNIST and CIFAR-10
UCI_VALIDATION = 0.1
HELD_OUT_SEED = 1000
MOST_SEEDS = 5  # protein has so many standard splits
LETTERS = "notmnist_test/raw/t10k-images-idx3-ubyte"
QUICK_ROWS, QUICK_STEPS = 128, 60


class Parts(NamedTuple):
    """What a set gives for a seed."""

    splits: Splits
    outside: Tensor | None = None  # out-of-distribution inputs
    target_scale: float = 1.0


@dataclass(frozen=True)
class Set:
    """One row of the benchmark.

    Attributes:
        network: The network in words.
        make_net: Makes it from the shape of an input and the number of outputs.
        read: Gives the parts from the data folder and a seed.
        epochs: How long every method is trained, and its batch size.
        batch_size: Examples in a batch.
        file: A file or folder below the data folder that must be there; none for the digits.
        transitions: HMC's epochs, of one batch each; 0 where the set is too large for it.
    """

    network: str
    make_net: Callable[[tuple[int, ...], int], nn.Module]
    read: Callable[[Path, int], Parts]
    epochs: int
    batch_size: int
    file: str = ""
    transitions: int = 0
    task: Literal["classification", "regression"] = "classification"


class Rows(InMemoryDataModule):
    """Splits that are there already."""

    def __init__(self, splits: Splits, batch_size: int) -> None:
        super().__init__(batch_size)
        self._given = splits

    def load(self) -> Splits:
        """Give them."""
        return self._given


@dataclass(frozen=True)
class Problem:
    """A set and a seed: what a method is given."""

    name: str
    seed: int
    task: Literal["classification", "regression"]
    splits: Splits
    outside: Tensor | None
    target_scale: float
    epochs: int
    batch_size: int
    transitions: int
    make: Callable[[tuple[int, ...], int], nn.Module]

    @property
    def outputs(self) -> int:
        """The network's outputs: ten classes, or a mean and a scale."""
        return 10 if self.task == "classification" else 2

    def likelihood(self) -> Likelihood:
        """The likelihood of all methods but randomised MAP."""
        return Categorical() if self.task == "classification" else HeteroscedasticGaussian()

    def net(self, outputs: int | None = None) -> nn.Module:
        """A new network."""
        shape = tuple(self.splits.train.tensors[0].shape[1:])
        return self.make(shape, outputs or self.outputs)

    def data(self, full_batch: bool = False) -> InMemoryDataModule:
        """The data for a trainer."""
        return Rows(self.splits, len(self.splits.train) if full_batch else self.batch_size)


def load(
    name: str, seed: int, data_dir: Path | None, quick: bool = False, held_out: bool = False
) -> Problem:
    """Read a set.

    Args:
        name: Of the set.
        seed: Which rows.
        data_dir: Where the files are; digits need none.
        quick: Few rows and few steps of it.
        held_out: Training rows that are held out take the place of the test rows.
    """
    chosen = SETS[name]
    splits, outside, target_scale = chosen.read(data_dir or Path(), seed)
    epochs, transitions = chosen.epochs, chosen.transitions
    if held_out:
        splits, outside = _hold_out(splits, seed), None
    if quick:
        splits = Splits(*(_first(part) for part in (splits.train, splits.validation, splits.test)))
        outside = None if outside is None else outside[:QUICK_ROWS]
        epochs = -(-QUICK_STEPS * chosen.batch_size // len(splits.train))
        transitions = min(transitions, QUICK_STEPS)
    return Problem(
        name, seed, chosen.task, splits, outside, target_scale, epochs, chosen.batch_size,
        transitions, chosen.make_net,
    )  # fmt: skip


def _hold_out(splits: Splits, seed: int) -> Splits:
    """A ninth of the training rows, at most 2,000, as test rows."""
    count = min(TEST, len(splits.train) // 9)
    order = torch.randperm(
        len(splits.train), generator=torch.Generator().manual_seed(HELD_OUT_SEED + seed)
    )
    test, train = (
        TensorRows(*(tensor[rows] for tensor in splits.train.tensors))
        for rows in (order[:count], order[count:])
    )
    return Splits(train, splits.validation, test)


def _first(part: TensorRows) -> TensorRows:
    return TensorRows(*(tensor[:QUICK_ROWS] for tensor in part.tensors))


# ---------------------------------------------------------------- networks


def _conv_net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return ConvNet(shape[0], shape[-1], outputs, widths=(16, 32), hidden=64)


def _mlp(hidden: list[int], shape: tuple[int, ...], outputs: int) -> nn.Module:
    return MLP(torch.Size(shape).numel(), hidden, outputs)


# ---------------------------------------------------------------- data


def _draw(part: TensorRows, count: int, seed: int) -> tuple[Tensor, ...]:
    """Some rows, chosen by the seed alone."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:count]
    return tuple(tensor[order] for tensor in part.tensors)


def _letters(data_dir: Path, seed: int) -> Tensor:
    """Letters as bytes, (N, 1, 28, 28)."""
    plain = data_dir / LETTERS
    file = plain if plain.is_file() else plain.with_name(plain.name + ".gz")
    check_files([file])
    return _draw(TensorRows(read_idx(file)), OUTSIDE, seed)[0].unsqueeze(1)


def _digits(data_dir: Path, seed: int) -> Parts:
    upright, turned = Digits(seed=seed), Digits(seed=seed, rotate=90)
    for data in (upright, turned):
        data.setup()
    return Parts(upright.splits, turned.splits.test.tensors[0])


def _mnist(data_dir: Path, seed: int) -> Parts:
    data = MNIST(data_dir / "mnist", validation=VALIDATION)
    data.setup()
    letters = _letters(data_dir, seed).float().div(255).sub(PIXEL_MEAN).div(PIXEL_SCALE)
    return Parts(_some(data.splits, seed), letters)


def _cifar10(data_dir: Path, seed: int) -> Parts:
    data = CIFAR10(data_dir / "cifar10", validation=VALIDATION)
    data.setup()
    to_pixels = partial(prepare_images, augment=False, normalise=True)
    letters = pad(_letters(data_dir, seed), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return Parts(_some(data.splits, seed, to_pixels), to_pixels(letters))


def _some(
    splits: Splits, seed: int, transform: Callable[[Tensor], Tensor] = lambda images: images
) -> Splits:
    def draw(part: TensorRows, count: int) -> TensorRows:
        images, labels = _draw(part, count, seed)
        return TensorRows(transform(images), labels)

    return Splits(
        draw(splits.train, TRAIN), draw(splits.validation, VALIDATION), draw(splits.test, TEST)
    )


def _uci(name: str, data_dir: Path, seed: int) -> Parts:
    data = UCI(NAMES[name], seed, data_dir / "uci", UCI_VALIDATION)
    data.setup()
    return Parts(data.splits, None, data.target_scale)


def _regression(name: str, epochs: int, batch_size: int = 32, transitions: int = 0) -> Set:
    return Set(
        "perceptron, 50 hidden ReLU units, mean and scale", partial(_mlp, [50]),
        partial(_uci, name), epochs, batch_size, f"uci/{NAMES[name]}", transitions, "regression",
    )  # fmt: skip


_CNN = "two 3×3 convolutions of 16 and 32 channels, each with ReLU and 2×2 max pooling, 64 units"
_PERCEPTRON = "perceptron 784-200-200-10, ReLU"
SETS = {
    "digits": Set(_CNN, _conv_net, _digits, 60, 32),
    "mnist-cnn": Set(_CNN, _conv_net, _mnist, 10, 64, "mnist"),
    "mnist-mlp": Set(_PERCEPTRON, partial(_mlp, [200, 200]), _mnist, 20, 64, "mnist"),
    "cifar10": Set(_CNN, _conv_net, _cifar10, 12, 64, "cifar10"),
    "boston": _regression("boston", 200, transitions=1000),
    "energy": _regression("energy", 150, transitions=1000),
    "naval": _regression("naval", 20, 64),
    "protein": _regression("protein", 10, 128),
    "wine": _regression("wine", 60),
    "yacht": _regression("yacht", 300, transitions=1000),
}
