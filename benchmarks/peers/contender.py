"""What an adaptor gives to the benchmark, and the two networks it is asked to train.

An adaptor is one file that ends in ``CONTENDER = Contender(...)``. It imports its library inside
its functions only, so that listing the contenders imports nothing. All contenders train the same
network on the same batch with one draw of the weights per step, the KL term included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

__all__ = ["NUM_DATA", "PROBLEMS", "Contender", "Fit", "Problem", "replace_layers", "train_loader"]

NUM_DATA = 60_000
"""The size of the imagined training set: it scales the KL term and changes no cost."""

Step = Callable[[], Any]


def mlp() -> nn.Module:
    """A perceptron 784-400-400-10."""
    return nn.Sequential(
        nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
    )


def resnet() -> nn.Module:
    """Torchvision's resnet18 with ten classes."""
    return resnet18(num_classes=10)


@dataclass(frozen=True)
class Problem:
    """One network, the batch it sees, and the bar for our step on it.

    Attributes:
        name: The key in the JSON output.
        title: The heading of the table.
        make_net: Builds the deterministic network.
        input_shape: The shape of one example.
        batch_size: Examples in a step.
        steps: Timed steps in a contender's turn, unless the command line says otherwise.
        bar: Our bare step may cost at most so many plain steps.
    """

    name: str
    title: str
    make_net: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch_size: int
    steps: int
    bar: float

    def batch(self) -> tuple[Tensor, Tensor]:
        """The one random batch, the same for every contender."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch_size, *self.input_shape, generator=generator)
        targets = torch.randint(10, (self.batch_size,), generator=generator)
        return inputs, targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, as plain PyTorch has it."""
        return F.cross_entropy(outputs, targets)


PROBLEMS = (
    Problem("mlp", "MLP 784-400-400-10, batch 128", mlp, (784,), 128, steps=60, bar=1.35),
    Problem("resnet18", "resnet18 on 3x32x32, batch 32", resnet, (3, 32, 32), 32, steps=3, bar=1.5),
)


@dataclass(frozen=True)
class Fit:
    """What ``Trainer.fit`` needs to train a contender.

    Attributes:
        lightning: The package the module is built on, ``pytorch_lightning`` or
            ``lightning.pytorch``: one does not train the modules of the other.
        module: The LightningModule.
        data: A DataLoader or a LightningDataModule.
        trainer_class: A library's own Trainer, where it has one.
    """

    lightning: str
    module: Any
    data: Any
    trainer_class: type | None = None


@dataclass(frozen=True)
class Contender:
    """One library, or the plain step that the others are compared with.

    Attributes:
        name: The name of the distribution (what ``pip install`` takes).
        import_name: The module whose presence says that it is installed.
        make_step: Builds everything for a network and gives a function that takes one training
            step and returns the loss.
        make_fit: Builds the same for ``Trainer.fit``; None where there is no LightningModule.
        slow: Left out by ``--quick``.
        converts_layers: One of the five whose cheapest the bar asks us to halve.
    """

    name: str
    import_name: str
    make_step: Callable[[Problem], Step]
    make_fit: Callable[[Problem], Fit] | None = None
    slow: bool = False
    converts_layers: bool = False


def replace_layers(
    module: nn.Module,
    linear: Callable[[nn.Linear], nn.Module],
    conv2d: Callable[[nn.Conv2d], nn.Module],
) -> None:
    """Swap each Linear and Conv2d in a network, for a library with layers but no converter."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, linear(child))
        elif isinstance(child, nn.Conv2d):
            setattr(module, name, conv2d(child))
        else:
            replace_layers(child, linear, conv2d)


class RepeatedBatch(Dataset):
    """One batch, again and again: loading must cost nothing, or it would dilute the ratios."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, index: int) -> Any:
        return self.batch


def as_it_is(batch: Any) -> Any:
    return batch


def train_loader(batch: Any) -> DataLoader:
    """A DataLoader that hands out the batch itself."""
    return DataLoader(RepeatedBatch(batch), batch_size=None, collate_fn=as_it_is)
