"""MNIST: 70,000 handwritten digits of 28 by 28 pixels, kept in memory as one tensor.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.
The folder is laid out as torchvision leaves it, ``MNIST/raw/train-images-idx3-ubyte`` and so on;
the files may also still be packed (``.gz``), and are then read without unpacking. Downloading is
torchvision's.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.checks import check_flag, check_path, check_whole
from lightning_bnn.data import in_memory
from lightning_bnn.data.in_memory import InMemoryDataModule, Splits
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
        DataError: If the file is damaged.

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
        start = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
        values = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)
    except (EOFError, IndexError, RuntimeError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Fetch it again.") from error
    return values


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
        lightning_bnn.errors.ConfigurationError: Expected
        no/such/folder/MNIST/raw/train-images-idx3-ubyte.gz, ...
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
        if data_dir is not None:
            check_path("data_dir", data_dir)
        self.data_dir = data_dir
        self.validation = check_whole("validation", validation, 0)
        self.normalise = check_flag("normalise", normalise)
        self.flatten = check_flag("flatten", flatten)
        self.download = check_flag("download", download)

    def prepare_data(self) -> None:
        """Download what is missing, if that was asked for."""
        if self.download and not all(path.is_file() for path in self._files()):
            from torchvision import datasets  # a slow import

            datasets.MNIST(self._folder(), download=True)

    def load(self) -> Splits:
        """Read the four files and convert the pixels to float, once."""
        files = self._files()
        in_memory.check_files(files, "Or pass download=True to fetch them.")
        images, labels, test_images, test_labels = map(read_idx, files)
        size = in_memory.training_size(len(images), self.validation)
        inputs, targets = self._pixels(images), labels.long()
        return Splits(
            train=TensorRows(inputs[:size], targets[:size]),
            validation=TensorRows(inputs[size:], targets[size:]),
            test=TensorRows(self._pixels(test_images), test_labels.long()),
        )

    def _folder(self) -> Path:
        return in_memory.data_folder(self.data_dir, f"mnist/MNIST/raw/{FILES[0]}.gz")

    def _files(self) -> list[Path]:
        plain = [self._folder() / "MNIST" / "raw" / name for name in FILES]
        return [path if path.is_file() else path.with_name(path.name + ".gz") for path in plain]

    def _pixels(self, images: Tensor) -> Tensor:
        pixels = images.float().div_(255)
        if self.normalise:
            pixels.sub_(PIXEL_MEAN).div_(PIXEL_SCALE)
        return pixels.flatten(1) if self.flatten else pixels.unsqueeze(1)
