"""MNIST: 70,000 handwritten digits of 28 by 28 pixels, kept in memory as one tensor.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.
The folder is laid out as torchvision leaves it, ``MNIST/raw/train-images-idx3-ubyte`` and so on;
the files may also still be packed (``.gz``), and are then read without unpacking. Downloading is
torchvision's.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.data.files import data_folder, missing_files
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits, training_size
from lightning_bnn.data.tensors import TensorRows
from lightning_bnn.errors import DataError

__all__ = ["MNIST", "read_idx"]

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
PIXEL_MEAN, PIXEL_SCALE = 0.1307, 0.3081


def read_idx(path: Path) -> Tensor:
    """Read an array of bytes in the idx format, packed (``.gz``) or not.

    The format: two zero bytes, the type (8: unsigned bytes), the number of axes, their lengths as
    big-endian 32-bit integers, and the values.

    Args:
        path: The file.

    Raises:
        DataError: If the file is damaged, or not of this format.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels")
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 1, 4]))
        ...     read_idx(path)
        tensor([7, 1, 4], dtype=torch.uint8)
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Fetch it again.") from error
    start = 4 + 4 * content[3] if len(content) > 3 else 4
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise DataError(
            f"{path} should be an idx file of unsigned bytes, starting with the bytes 00 00 08 and "
            f"a header of {start} bytes; got {len(content)} bytes that start with "
            f"{content[:3].hex(' ') or 'nothing'}. Fetch it again."
        )
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path} should hold {math.prod(shape)} values (shape {shape}) after its header; got "
            f"{len(content) - start}. Fetch it again."
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


class MNIST(InMemoryDataModule):
    """MNIST: inputs of shape (1, 28, 28), targets 0 to 9.

    Args:
        data_dir: The folder that holds ``MNIST/raw``; ``$LIGHTNING_BNN_DATA/mnist`` if None.
        batch_size: Examples per batch.
        validation: How many of the 60,000 training images to hold out: the last ones.
        normalise: Subtract the mean of the training pixels (0.1307) and divide by their standard
            deviation (0.3081); without it, pixels are in [0, 1].
        flatten: Give inputs of shape (784,) instead.
        download: Fetch the files (through torchvision) if they are not there.
        num_workers: Worker processes per loader.

    Raises:
        ConfigurationError: If files are missing, or ``validation`` leaves nothing to train on.
        DataError: If a file is damaged.

    Example:
        >>> data = MNIST(data_dir="no/such/folder", batch_size=128)
        >>> data.num_classes
        10
        >>> data.setup()
        Traceback (most recent call last):
            ...
        lightning_bnn.errors.ConfigurationError: MNIST: expected
        no/such/folder/MNIST/raw/train-images-idx3-ubyte(.gz), ...
    """

    num_classes: int = 10

    def __init__(
        self,
        data_dir: str | Path | None = None,
        batch_size: int = 128,
        validation: int = 10_000,
        normalise: bool = True,
        flatten: bool = False,
        download: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.data_dir = data_dir
        self.validation = validation
        self.normalise = normalise
        self.flatten = flatten
        self.download = download

    def prepare_data(self) -> None:
        """Download what is missing, if that was asked for."""
        if self.download and None in self._find().values():
            from torchvision import datasets

            datasets.MNIST(self._folder(), download=True)

    def load(self) -> Splits:
        """Read the four files and convert the pixels to float, once."""
        found = self._find()
        missing = [path.with_name(path.name + "(.gz)") for path in found if found[path] is None]
        if missing:
            raise missing_files("MNIST", missing, "Or pass download=True to fetch them.")
        arrays = [read_idx(path) for path in found.values() if path is not None]
        images, labels, test_images, test_labels = arrays
        size = training_size(len(images), self.validation)
        inputs, targets = self._pixels(images), labels.long()
        return Splits(
            train=TensorRows(inputs[:size], targets[:size]),
            validation=TensorRows(inputs[size:], targets[size:]),
            test=TensorRows(self._pixels(test_images), test_labels.long()),
        )

    def _folder(self) -> Path:
        return data_folder(self.data_dir, "mnist", f"MNIST/raw/{FILES[0]}.gz")

    def _find(self) -> dict[Path, Path | None]:
        found: dict[Path, Path | None] = {}
        for name in FILES:
            plain = self._folder() / "MNIST" / "raw" / name
            both = (plain, plain.with_name(name + ".gz"))
            found[plain] = next((path for path in both if path.is_file()), None)
        return found

    def _pixels(self, images: Tensor) -> Tensor:
        pixels = images.float().div_(255)
        if self.normalise:
            pixels.sub_(PIXEL_MEAN).div_(PIXEL_SCALE)
        return pixels.flatten(1) if self.flatten else pixels.unsqueeze(1)
