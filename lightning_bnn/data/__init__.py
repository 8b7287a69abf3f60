"""Data modules, ready for a ``Trainer`` or a ``LightningCLI`` configuration."""

from lightning_bnn.data.cifar10 import CIFAR10
from lightning_bnn.data.digits import Digits
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
from lightning_bnn.data.mnist import MNIST
from lightning_bnn.data.tensors import TensorRows, collate_rows
from lightning_bnn.data.toy import ToyRegression, toy_curve
from lightning_bnn.data.uci import UCIRegression

__all__ = [
    "CIFAR10",
    "MNIST",
    "Digits",
    "InMemoryDataModule",
    "Splits",
    "TensorRows",
    "ToyRegression",
    "UCIRegression",
    "collate_rows",
    "toy_curve",
]
