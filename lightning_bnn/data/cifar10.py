"""CIFAR-10: 60,000 colour images of 32 by 32 pixels in ten classes.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. Two layouts are read:

* torchvision's: ``cifar-10-batches-py/data_batch_1`` to ``5``, ``test_batch`` (what
  ``download=True`` leaves);
* mosaics: ``data_batch_1.webp`` to ``5`` and ``test_batch.webp``, each one lossless WebP picture
  of 32 by 32 tiles in row-major order (100 by 100 tiles in the full set), with the labels of the
  training and then the test images in ``labels_train_then_test_uint8.npy``.

Images stay bytes in memory and become floats a batch at a time: as floats they would take 740 MB.
Augmentation is the usual one for this set: a random crop after padding by 4 black pixels, and a
random horizontal flip. Each image has its own, drawn for a whole batch at once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_bnn.checks import check_flag, check_path, check_whole
from lightning_bnn.data import in_memory
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
from lightning_bnn.data.tensors import TensorRows
from lightning_bnn.errors import DataError

__all__ = ["CIFAR10", "crop_and_flip", "prepare_images"]

BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LABELS = "labels_train_then_test_uint8.npy"
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_SCALE = (0.2470, 0.2435, 0.2616)
TILE = 32


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to 4 pixels each way, zeros moving in; mirror half of them.

    Args:
        images: Batch, channels, height, width.

    Example:
        >>> import torch
        >>> crop_and_flip(torch.ones(2, 3, 32, 32, dtype=torch.uint8)).shape
        torch.Size([2, 3, 32, 32])
    """
    count, _, height, width = images.shape
    top, left = torch.randint(9, (2, count))
    flipped = torch.randint(2, (count, 1, 1, 1)).bool()
    # A view of every window of the padded images: only the chosen ones are ever copied.
    windows = pad(images, (4,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(count), :, top, left]
    return torch.where(flipped, crops.flip(3), crops)


def prepare_images(images: Tensor, augment: bool, normalise: bool) -> Tensor:
    """From bytes to floats, for a batch: augment, scale to [0, 1], normalise.

    Args:
        images: Batch, channels, height, width.
        augment: Whether to crop and flip at random (:func:`crop_and_flip`).
        normalise: Whether to subtract the channel means and divide by the channel scales.

    Example:
        >>> import torch
        >>> bytes_ = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
        >>> prepare_images(bytes_, augment=False, normalise=False).unique()
        tensor([1.])
    """
    pixels = (crop_and_flip(images) if augment else images).float().div_(255)
    if normalise:
        mean, scale = (torch.tensor(v).reshape(3, 1, 1) for v in (CHANNEL_MEAN, CHANNEL_SCALE))
        pixels.sub_(mean).div_(scale)
    return pixels


class CIFAR10(InMemoryDataModule):
    """CIFAR-10: inputs of shape (3, 32, 32), targets 0 to 9.

    Args:
        data_dir: The folder that holds ``cifar-10-batches-py`` or the mosaics;
            ``$LIGHTNING_BNN_DATA/cifar10`` if None.
        batch_size: Examples per batch.
        validation: How many of the 50,000 training images to hold out: the last ones.
        augment: Crop and flip the training images at random. The noise comes from torch's global
            generator.
        normalise: Subtract the channel means of the training pixels and divide by their standard
            deviations; without it, pixels are in [0, 1].
        download: Fetch the files (through torchvision) if neither layout is there.
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
        lightning_bnn.errors.ConfigurationError: Expected
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
        if data_dir is not None:
            check_path("data_dir", data_dir)
        self.data_dir = data_dir
        self.validation = check_whole("validation", validation, 0)
        self.augment = check_flag("augment", augment)
        self.normalise = check_flag("normalise", normalise)
        self.download = check_flag("download", download)

    def prepare_data(self) -> None:
        """Download the files, if that was asked for and they are not there."""
        if self.download and not self._has_mosaics():
            from torchvision import datasets  # a slow import

            datasets.CIFAR10(self._folder(), download=True)  # it looks for the files itself

    def load(self) -> Splits:
        """Read the images, from whichever layout is there."""
        read = self._read_mosaics if self._has_mosaics() else self._read_batches
        images, labels, test_images, test_labels = read()
        size = in_memory.training_size(len(images), self.validation)
        training = partial(prepare_images, augment=self.augment, normalise=self.normalise)
        evaluation = partial(training, augment=False)
        return Splits(
            train=TensorRows(images[:size], labels[:size], transform=training),
            validation=TensorRows(images[size:], labels[size:], transform=evaluation),
            test=TensorRows(test_images, test_labels, transform=evaluation),
        )

    def _folder(self) -> Path:
        return in_memory.data_folder(self.data_dir, f"cifar10/cifar-10-batches-py/{BATCHES[0]}")

    def _has_mosaics(self) -> bool:
        return (self._folder() / LABELS).is_file()

    def _read_batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from torchvision import datasets  # a slow import

        fix = f"Mosaics would lie beside {LABELS} there. Or pass download=True to fetch the files."
        in_memory.check_files([self._folder() / "cifar-10-batches-py"], fix)
        try:
            train, test = (datasets.CIFAR10(self._folder(), train=part) for part in (True, False))
        except RuntimeError as error:  # torchvision compares checksums before it reads
            raise DataError(f"{self._folder()}: {error}") from error
        images, test_images = (
            torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test)
        )
        return images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)

    def _read_mosaics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from PIL import Image  # only for this layout

        def tiles(name: str) -> Tensor:
            """The tiles of a mosaic, row by row: (tiles, 3, 32, 32)."""
            with Image.open(self._folder() / f"{name}.webp") as picture:
                pixels = torch.from_numpy(np.array(picture.convert("RGB")))
            grid = pixels.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
            return grid.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()

        images, test_images = torch.cat([tiles(name) for name in BATCHES]), tiles("test_batch")
        labels = torch.from_numpy(np.load(self._folder() / LABELS)).long()
        return images, labels[: len(images)], test_images, labels[len(images) :]
