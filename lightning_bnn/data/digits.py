"""Handwritten digits, 8 by 8 pixels: the classification set that needs no download.

1,797 images of ten classes that ship with scikit-learn (the test part of the UCI set "Optical
Recognition of Handwritten Digits"). Split 60 / 20 / 20 into train, validation and test, with the
classes in equal shares. Turned by some degrees they are a shift: the same digits, as no training
digit was seen.
"""

from __future__ import annotations

import math
from numbers import Real

import numpy as np
import torch

from lightning_bnn.checks import check_flag, check_whole
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
from lightning_bnn.data.tensors import TensorRows
from lightning_bnn.errors import ConfigurationError

__all__ = ["Digits"]


class Digits(InMemoryDataModule):
    """scikit-learn's digits: inputs in [0, 1] of shape (1, 8, 8), targets 0 to 9.

    Args:
        batch_size: Examples per batch.
        seed: Seed of the split, independent of any other seed.
        flatten: Give inputs of shape (64,) instead.
        num_workers: Worker processes per loader.
        rotate: Degrees by which every image is turned, counter-clockwise about its centre. Pixels
            are interpolated bilinearly, and pixels outside the image are 0. The split and
            the targets stay the same.

    Example:
        >>> data = Digits(batch_size=32)
        >>> data.setup()
        >>> data.num_data, data.input_shape, data.num_classes
        (1078, (1, 8, 8), 10)
        >>> inputs, targets = next(iter(data.test_dataloader()))
        >>> inputs.shape, targets.dtype
        (torch.Size([32, 1, 8, 8]), torch.int64)

        The same test digits, lying on their side:

        >>> turned = Digits(batch_size=32, rotate=90)
        >>> turned.setup()
        >>> others, same = next(iter(turned.test_dataloader()))
        >>> torch.equal(same, targets), torch.allclose(others, inputs.rot90(1, (2, 3)), atol=1e-5)
        (True, True)
    """

    num_classes: int = 10

    def __init__(
        self,
        batch_size: int = 64,
        seed: int = 0,
        flatten: bool = False,
        num_workers: int = 0,
        rotate: float = 0.0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.seed = check_whole("seed", seed, 0)
        self.flatten = check_flag("flatten", flatten)
        if not isinstance(rotate, Real) or not math.isfinite(rotate):
            raise ConfigurationError(f"rotate= is an angle in degrees; got {rotate!r:.80}.")
        self.rotate: float = float(rotate)

    def load(self) -> Splits:
        """Read the images and split them, each class in the same shares."""
        from sklearn.datasets import load_digits  # slow imports
        from sklearn.model_selection import train_test_split  # slow imports

        pixels, labels = load_digits(return_X_y=True)
        # Pixels count the dark points in a 4 by 4 block: 0 to 16.
        inputs = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
        if self.rotate:
            # a slow import, which upright digits do not need
            from torchvision.transforms import InterpolationMode
            from torchvision.transforms.functional import rotate  # a slow import

            # interpolation of numbers in [0, 1] leaves them there but for rounding
            inputs = rotate(inputs, self.rotate, InterpolationMode.BILINEAR).clamp(0, 1)
        if self.flatten:
            inputs = inputs.flatten(1)
        targets = torch.from_numpy(labels).long()

        train, rest = train_test_split(
            np.arange(len(labels)), test_size=0.4, random_state=self.seed, stratify=labels
        )
        validation, test = train_test_split(
            rest, test_size=0.5, random_state=self.seed, stratify=labels[rest]
        )
        return Splits(
            *(TensorRows(inputs[rows], targets[rows]) for rows in (train, validation, test))
        )
