"""Small data sets in the layouts that the data modules read, made for these tests."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_bnn.data import CIFAR10, MNIST, Digits, ToyRegression, UCIRegression
from lightning_bnn.data.in_memory import InMemoryDataModule

MNIST_TRAIN, MNIST_TEST = 50, 20
MOSAIC_ROWS, MOSAIC_COLUMNS = 2, 3


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim])
    content = header + np.array(values.shape, dtype=">u4").tobytes() + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_uci(folder: Path, values: np.ndarray, features: list[int], target: int) -> None:
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", values)
    (folder / "index_features.txt").write_text("".join(f"{column}\n" for column in features))
    (folder / "index_target.txt").write_text(f"{target}\n")


@pytest.fixture
def uci_values() -> np.ndarray:
    """30 rows: three features, the second one constant; an unused column; the target."""
    random = np.random.default_rng(0)
    values = random.normal(loc=5.0, scale=3.0, size=(30, 5))
    values[:, 1] = 0.998
    return values


@pytest.fixture
def uci_dir(tmp_path: Path, uci_values: np.ndarray) -> Path:
    write_uci(tmp_path / "uci" / "yacht", uci_values, features=[0, 1, 2], target=4)
    return tmp_path / "uci"


@pytest.fixture
def mnist_arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    arrays = {}
    for part, size in (("train", MNIST_TRAIN), ("t10k", MNIST_TEST)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (size, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, size, np.uint8)
    return arrays


@pytest.fixture
def mnist_dir(tmp_path: Path, mnist_arrays: dict[str, np.ndarray]) -> Path:
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, values in mnist_arrays.items():
        write_idx(raw / f"{name}.gz", values)
    return tmp_path / "mnist"


@pytest.fixture
def cifar10_images() -> np.ndarray:
    """Six batches of six images, NHWC."""
    random = np.random.default_rng(2)
    return random.integers(0, 256, (6, MOSAIC_ROWS * MOSAIC_COLUMNS, 32, 32, 3), np.uint8)


@pytest.fixture
def cifar10_labels() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 10, (6, MOSAIC_ROWS * MOSAIC_COLUMNS), np.uint8)


@pytest.fixture
def cifar10_dir(tmp_path: Path, cifar10_images: np.ndarray, cifar10_labels: np.ndarray) -> Path:
    """The mosaic layout."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    names = [f"data_batch_{number}.webp" for number in range(1, 6)] + ["test_batch.webp"]
    for name, images in zip(names, cifar10_images, strict=True):
        picture = Image.new("RGB", (MOSAIC_COLUMNS * 32, MOSAIC_ROWS * 32))
        for number, image in enumerate(images):
            row, column = divmod(number, MOSAIC_COLUMNS)
            picture.paste(Image.fromarray(image), (column * 32, row * 32))
        picture.save(folder / name, lossless=True, exact=True)
    np.save(folder / "labels_train_then_test_uint8.npy", cifar10_labels.reshape(-1))
    return folder


@pytest.fixture
def cifar10_batches_dir(
    tmp_path: Path,
    cifar10_images: np.ndarray,
    cifar10_labels: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """torchvision's layout, with torchvision told the checksums of these small files."""
    from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10

    folder = tmp_path / "pickled" / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: dict[str, object]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    checked = [
        write(
            name, {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels}
        )
        for name, images, labels in zip(names, cifar10_images, cifar10_labels.tolist(), strict=True)
    ]
    name, checksum = write("batches.meta", {"label_names": [str(label) for label in range(10)]})
    monkeypatch.setattr(TorchvisionCIFAR10, "train_list", checked[:5])
    monkeypatch.setattr(TorchvisionCIFAR10, "test_list", checked[5:])
    monkeypatch.setattr(
        TorchvisionCIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum}
    )
    return tmp_path / "pickled"


@pytest.fixture(params=["Digits", "ToyRegression", "UCIRegression", "MNIST", "CIFAR10"])
def make_data(request: pytest.FixtureRequest) -> Callable[[], InMemoryDataModule]:
    """Each data module in turn, as a function that makes a fresh one."""

    def folder(name: str) -> Path:
        return request.getfixturevalue(name)

    return {
        "Digits": lambda: Digits(batch_size=16),
        "ToyRegression": lambda: ToyRegression(batch_size=16, train_size=40, grid_points=20),
        "UCIRegression": lambda: UCIRegression(
            "yacht", data_dir=folder("uci_dir"), validation=0.2, batch_size=4
        ),
        "MNIST": lambda: MNIST(folder("mnist_dir"), batch_size=16, validation=10),
        "CIFAR10": lambda: CIFAR10(folder("cifar10_dir"), batch_size=16, validation=6),
    }[request.param]
