"""The one-dimensional regression of Bayes by Backprop.

Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015, section 5.2::

    y = x + 0.3 sin(2π(x + ε)) + 0.3 sin(4π(x + ε)) + ε,    ε ~ N(0, 0.02²)

with x uniform on [0, 0.5]. The page to look at is [-0.2, 1.2]: there a good posterior is narrow
on the data and wide beside them.

The noise enters inside the sines too, so it is not the same everywhere: to first order its
standard deviation is 0.02 |1 + 0.6π cos(2πx) + 1.2π cos(4πx)|, from near 0 up to 0.13 at x = 0.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
from lightning_bnn.data.tensors import TensorRows

__all__ = ["ToyRegression", "toy_curve"]


def toy_curve(inputs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Return x + 0.3 sin(2π(x + ε)) + 0.3 sin(4π(x + ε)) + ε; the noise-free curve at ε = 0.

    Args:
        inputs: x, of any shape.
        noise: ε, a number or of the shape of ``inputs``.

    Example:
        >>> import torch
        >>> toy_curve(torch.tensor([0.0, 0.25, 0.5]))
        tensor([0.0000, 0.5500, 0.5000])
    """
    shifted = inputs + noise
    return (
        inputs
        + 0.3 * torch.sin(2 * math.pi * shifted)
        + 0.3 * torch.sin(4 * math.pi * shifted)
        + noise
    )


class ToyRegression(InMemoryDataModule):
    """Noisy points on a curve, for x in [0, 0.5]; predicting runs over a grid on [-0.2, 1.2].

    Inputs and targets have shape (1,). Validation and test follow the same law as the training
    points. The predict loader gives the grid and, as its targets, the noise-free curve.

    Args:
        batch_size: Examples per batch.
        train_size: Number of training points.
        validation_size: Number of validation points.
        test_size: Number of test points.
        noise: Standard deviation of ε.
        grid_points: Points of the grid that the predict loader gives.
        seed: Seed of the points, independent of any other seed.
        num_workers: Worker processes per loader.

    Example:
        >>> data = ToyRegression(train_size=100)
        >>> data.setup()
        >>> data.num_data, data.input_shape, data.num_outputs
        (100, (1,), 1)
        >>> grid = data.grid(points=3)
        >>> grid.squeeze(1)
        tensor([-0.2000,  0.5000,  1.2000])
        >>> data.noise_free(grid).shape
        torch.Size([3, 1])
    """

    num_outputs: int = 1
    support: tuple[float, float] = (0.0, 0.5)
    page: tuple[float, float] = (-0.2, 1.2)

    def __init__(
        self,
        batch_size: int = 64,
        train_size: int = 512,
        validation_size: int = 256,
        test_size: int = 256,
        noise: float = 0.02,
        grid_points: int = 281,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.sizes = (
            check_whole("train_size", train_size, 1),
            check_whole("validation_size", validation_size, 0),
            check_whole("test_size", test_size, 0),
        )
        self.noise = check_number("noise", noise, positive=False)
        self.grid_points = check_whole("grid_points", grid_points, 1)
        self.seed = check_whole("seed", seed, 0)

    @staticmethod
    def noise_free(inputs: Tensor) -> Tensor:
        """Return the curve without noise: :func:`toy_curve` at ε = 0."""
        return toy_curve(inputs)

    def grid(self, points: int = 281) -> Tensor:
        """Return ``points`` equally spaced inputs on [-0.2, 1.2], of shape (points, 1)."""
        return torch.linspace(*self.page, points).unsqueeze(1)

    def load(self) -> Splits:
        """Draw the points of each split from its own stream."""
        train, validation, test = (
            self._draw(size, stream) for stream, size in enumerate(self.sizes)
        )
        grid = self.grid(self.grid_points)
        return Splits(train, validation, test, predict=TensorRows(grid, self.noise_free(grid)))

    def _draw(self, size: int, stream: int) -> TensorRows:
        # Seeded by (seed, stream): the size of one split does not change the points of another.
        random = np.random.default_rng([self.seed, stream])
        inputs = torch.from_numpy(random.uniform(*self.support, size=(size, 1)))
        noise = torch.from_numpy(random.normal(scale=self.noise, size=(size, 1)))
        return TensorRows(inputs.float(), toy_curve(inputs, noise).float())
