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

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_bnn.data.in_memory import (
    InMemoryDataModule,
    Splits,
    data_folder,
    missing_files,
    training_size,
)
from lightning_bnn.data.tensors import TensorRows

__all__ = ["CIFAR10", "ImageTransform", "crop_and_flip", "read_mosaic"]

BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LABELS = "labels_train_then_test_uint8.npy"
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_SCALE = (0.2470, 0.2435, 0.2616)
TILE = 32


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


def read_mosaic(path: Path) -> Tensor:
    """Read a picture of 32 by 32 tiles, row by row, as bytes of shape (tiles, 3, 32, 32).

    Args:
        path: A picture that Pillow can read.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "mosaic.webp")
        ...     Image.new("RGB", (3 * 32, 2 * 32)).save(path, lossless=True)
        ...     read_mosaic(path).shape
        torch.Size([6, 3, 32, 32])
    """
    from PIL import Image  # only for this layout

    with Image.open(path) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB")))
    rows, columns = pixels.shape[0] // TILE, pixels.shape[1] // TILE
    tiles = pixels.reshape(rows, TILE, columns, TILE, 3)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, TILE, TILE)


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
        ConfigurationError: If files are missing or damaged, or ``validation`` leaves nothing to
            train on.

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
        if self.download and not self._has_mosaics():
            from torchvision import datasets  # a slow import

            datasets.CIFAR10(self._folder(), download=True)  # it looks for the files itself

    def load(self) -> Splits:
        """Read the images, from whichever layout is there."""
        read = self._read_mosaics if self._has_mosaics() else self._read_batches
        images, labels, test_images, test_labels = read()
        size = training_size(len(images), self.validation)
        training = ImageTransform(self.augment, self.normalise)
        evaluation = ImageTransform(False, self.normalise)
        return Splits(
            train=TensorRows(images[:size], labels[:size], transform=training),
            validation=TensorRows(images[size:], labels[size:], transform=evaluation),
            test=TensorRows(test_images, test_labels, transform=evaluation),
        )

    def _folder(self) -> Path:
        return data_folder(self.data_dir, "cifar10", f"cifar-10-batches-py/{BATCHES[0]}")

    def _has_mosaics(self) -> bool:
        return (self._folder() / LABELS).is_file()

    def _read_batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from torchvision import datasets  # a slow import

        try:
            train, test = (datasets.CIFAR10(self._folder(), train=part) for part in (True, False))
        except RuntimeError as error:  # torchvision compares checksums before it reads
            raise missing_files(
                "CIFAR10",
                [self._folder() / "cifar-10-batches-py"],
                f"Or pass download=True to fetch them. (torchvision: {error} Mosaics would lie "
                f"beside {(self._folder() / LABELS).as_posix()}.)",
            ) from error
        images, test_images = (
            torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test)
        )
        return images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)

    def _read_mosaics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        folder = self._folder()
        images = torch.cat([read_mosaic(folder / f"{name}.webp") for name in BATCHES])
        test_images = read_mosaic(folder / "test_batch.webp")
        labels = torch.from_numpy(np.load(folder / LABELS, allow_pickle=False)).long()
        return images, labels[: len(images)], test_images, labels[len(images) :]
