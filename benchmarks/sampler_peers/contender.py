"""What an adaptor gives to the sampler benchmark, and the networks it is asked to sample.

An adaptor is one file that ends in ``LIBRARY = Library(...)``. It imports its library inside its
functions only, so that listing the libraries imports nothing. All libraries take the gradient of
the same mean loss on the same batch, without a prior, and move the weights with fresh noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.peers.contender import NUM_DATA, Step, mlp

__all__ = [
    "LEARNING_RATE",
    "NETWORKS",
    "NUM_DATA",
    "SAMPLERS",
    "Library",
    "Network",
    "Step",
    "optimizer_step",
]

SAMPLERS = ("SGLD", "SGHMC")

LEARNING_RATE = 1e-3
"""Small enough for every library's idea of a step; it changes no cost."""


def cnn() -> nn.Module:
    """Two convolutions with pooling, 1-16-32 channels, and a linear head: 20 490 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def small() -> nn.Module:
    """A perceptron 13-50-2, as for a table of data."""
    return nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 2))


@dataclass(frozen=True)
class Network:
    """One network, the batch it sees, and the bars on it.

    Attributes:
        name: The key in the JSON output.
        title: The heading of the table.
        make_net: Builds the deterministic network.
        input_shape: The shape of one example.
        batch_size: Examples in a step.
        outputs: Classes, or real targets where ``regression`` is set.
        steps: Timed steps in a turn, unless the command line says otherwise.
        stacked_bar: Stacked chains may cost at most so much of sequential ones.
        bars: Our step may cost at most so many plain steps, by sampler. Where there are none,
            only chains are measured.
        below_peers: Whether our step must also be below every peer's.
        regression: Squared error in place of cross entropy.
    """

    name: str
    title: str
    make_net: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch_size: int
    outputs: int
    steps: int
    stacked_bar: float
    bars: dict[str, float] = field(default_factory=dict)
    below_peers: bool = False
    regression: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        """The one random batch, the same for every contender."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch_size, *self.input_shape, generator=generator)
        if self.regression:
            return inputs, torch.randn(self.batch_size, self.outputs, generator=generator)
        return inputs, torch.randint(self.outputs, (self.batch_size,), generator=generator)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return (mse_loss if self.regression else cross_entropy)(outputs, targets)


NETWORKS = (
    Network(
        "mlp", "MLP 784-400-400-10, batch 128", mlp, (784,), 128, 10,
        steps=24, stacked_bar=1.05, bars={"SGLD": 1.4, "SGHMC": 1.4}, below_peers=True,
    ),
    Network(
        "cnn", "CNN 1-16-32 on 1x28x28, batch 128", cnn, (1, 28, 28), 128, 10,
        steps=8, stacked_bar=1.05, bars={"SGLD": 1.1, "SGHMC": 1.15},
    ),
    Network(
        "small", "perceptron 13-50-2, batch 32", small, (13,), 32, 2,
        steps=160, stacked_bar=0.6, regression=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Library:
    """One row of the table: a library, or one way to use it.

    Attributes:
        name: The row's name; a peer's is that of its distribution (what ``pip install`` takes).
        import_name: The module whose presence says that it is installed.
        make_step: Builds everything for a network and a sampler's name, and gives a function that
            takes one step and returns the loss.
        samplers: Which of ``SAMPLERS`` it has.
        peer: Whether ours must be below it.
    """

    name: str
    import_name: str
    make_step: Callable[[Network, str], Step]
    samplers: tuple[str, ...] = SAMPLERS
    peer: bool = True


def optimizer_step(network: Network, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The ordinary training step, for everything that is an optimizer."""
    inputs, targets = network.batch()

    def step() -> Any:
        loss = network.loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step
