"""The networks that the ensemble benchmark trains ten of, and the bars on them.

All contenders train the same network on the same batch with Adam. A row is a
:class:`~benchmarks.peers.contender.Contender` whose step is one of all ten members.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.contender import Problem, mlp
from benchmarks.sampler_peers.contender import cnn, small

__all__ = ["MEMBERS", "NETWORKS", "Network"]

MEMBERS = 10
MINIMUM_SCALE = 1e-4  # as the likelihood has it


@dataclass(frozen=True)
class Network(Problem):
    """One network, the batch it sees, and the bars on it.

    Attributes:
        sequential_bar: A step of all members may cost at most so much of their plain steps one
            after another; None where only ``bar``, in plain steps of one network, counts.
        regression: A Gaussian whose mean and scale the network gives, in place of ten classes.
    """

    sequential_bar: float | None = None
    regression: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        """The one random batch, the same for every contender."""
        if not self.regression:
            return super().batch()
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch_size, *self.input_shape, generator=generator)
        return inputs, torch.randn(self.batch_size, 1, generator=generator)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, as plain PyTorch has it."""
        if not self.regression:
            return super().loss(outputs, targets)
        mean, raw = outputs.chunk(2, -1)
        scale = F.softplus(raw) + MINIMUM_SCALE
        return (0.5 * ((targets - mean) / scale).square() + scale.log()).mean()


NETWORKS = (
    Network(
        "small", "perceptron 13-50-2, batch 128", small, (13,), 128,
        steps=400, bar=1.6, regression=True,
    ),
    Network("mlp", "MLP 784-400-400-10, batch 128", mlp, (784,), 128, steps=60, bar=5.8),
    Network(
        "cnn", "CNN 1-16-32 on 1x28x28, batch 128", cnn, (1, 28, 28), 128,
        steps=20, bar=10.0, sequential_bar=1.05,
    ),
)  # fmt: skip
