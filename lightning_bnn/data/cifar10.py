"""CIFAR-10: 60,000 colour images of 32 by 32 pixels in ten classes.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The folder is laid out as
torchvision leaves it: ``cifar-10-batches-py/data_batch_1`` and so on.

Images stay bytes in memory and become floats a batch at a time: as floats they would take 740 MB.
Augmentation is the usual one for this set: a random crop after padding by 4 black pixels, and a
random horizontal flip. Each image has its own, drawn for a whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_bnn.data.in_memory import InMemoryDataModule, Splits, check_files, data_folder
from lightning_bnn.data.tensors import TensorRows, hold_out
from lightning_bnn.errors import DataError

__all__ = ["CIFAR10", "ImageTransform", "crop_and_flip"]

CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_SCALE = (0.2470, 0.2435, 0.2616)


def crop_and_flip(
    images: Tensor, padding: int = 4, generator: torch.Generator | None = None
) -> Tensor:
    """Shift each image by up to ``padding`` pixels each way, zeros coming in; mirror half of them.

    Args:
        images: Batch, channels, height, width.
        padding: The largest shift.
        generator: Source of the noise; torch's global generator if None.

    Example:
        >>> import torch
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> crop_and_flip(images, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """
    count, _, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator)
    flipped = torch.randint(2, (count, 1, 1, 1), generator=generator).bool()
    # A view of every window of the padded images: only the chosen ones are ever copied.
    windows = pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(count), :, top, left]
    return torch.where(flipped, crops.flip(3), crops)


@dataclass(frozen=True)
class ImageTransform:
    """From bytes to floats, for a batch: augment, scale to [0, 1], normalise.

    Attributes:
        augment: Whether to crop and flip at random (:func:`crop_and_flip`).
        normalise: Whether to subtract the channel means and divide by the channel scales.

    Example:
        >>> import torch
        >>> bytes_ = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
        >>> ImageTransform(augment=False, normalise=False)(bytes_).unique()
        tensor([1.])
    """

    augment: bool
    normalise: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images as floats."""
        pixels = (crop_and_flip(images) if self.augment else images).float().div_(255)
        if self.normalise:
            mean, scale = (torch.tensor(v).reshape(3, 1, 1) for v in (CHANNEL_MEAN, CHANNEL_SCALE))
            pixels.sub_(mean).div_(scale)
        return pixels


class CIFAR10(InMemoryDataModule):
    """CIFAR-10: inputs of shape (3, 32, 32), targets 0 to 9.

    Args:
        data_dir: The folder that holds ``cifar-10-batches-py``;
            ``$LIGHTNING_BNN_DATA/cifar10`` if None.
        batch_size: Examples per batch.
        validation: How many of the 50,000 training images to hold out: the last ones.
        augment: Crop and flip the training images at random. The noise comes from torch's global
            generator.
        normalise: Subtract the channel means of the training pixels and divide by their standard
            deviations; without it, pixels are in [0, 1].
        download: Fetch the files (through torchvision) if they are not there.
        num_workers: Worker processes per loader.

    Raises:
        ConfigurationError: If files are missing, or ``validation`` leaves nothing to train on.
        DataError: If a file is damaged.

    Example:
        >>> data = CIFAR10(data_dir="no/such/folder", augment=False)
        >>> data.num_classes
        10
        >>> data.setup()
        Traceback (most recent call last):
            ...
        lightning_bnn.errors.ConfigurationError: CIFAR10: expected
        no/such/folder/cifar-10-batches-py, ...
    """

    num_classes: int = 10

    def __init__(
        self,
        data_dir: str | Path | None = None,
        batch_size: int = 128,
        validation: int = 5_000,
        augment: bool = True,
        normalise: bool = True,
        download: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.data_dir = data_dir
        self.validation = validation
        self.augment = augment
        self.normalise = normalise
        self.download = download

    def prepare_data(self) -> None:
        """Download the files, if that was asked for and they are not there."""
        if self.download:
            from torchvision import datasets  # a slow import

            datasets.CIFAR10(self._folder(), download=True)  # it looks for the files itself

    def load(self) -> Splits:
        """Read the images."""
        train, validation = hold_out(self.validation, *self._read(train=True))
        plain = ImageTransform(False, self.normalise)
        return Splits(
            TensorRows(*train, transform=ImageTransform(self.augment, self.normalise)),
            TensorRows(*validation, transform=plain),
            TensorRows(*self._read(train=False), transform=plain),
        )

    def _folder(self) -> Path:
        return data_folder(self.data_dir, "cifar10", "cifar-10-batches-py/data_batch_1")

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        from torchvision import datasets  # a slow import

        fix = "Or pass download=True to fetch them."
        check_files("CIFAR10", [self._folder() / "cifar-10-batches-py"], fix)
        try:
            rows = datasets.CIFAR10(self._folder(), train=train)
        except RuntimeError as error:  # torchvision compares checksums before it reads
            raise DataError(f"CIFAR10 in {self._folder()}: {error} {fix}") from error
        images = torch.from_numpy(rows.data).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(rows.targets)
