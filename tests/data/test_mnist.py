import gzip

import numpy as np
import pytest
import torch
import torchvision

from lightning_bnn.data import MNIST
from lightning_bnn.errors import ConfigurationError, DataError


def loaded(folder, **options):
    data = MNIST(folder, **{"validation": 10, **options})
    data.setup()
    return data


def unpack(folder):
    for path in (folder / "MNIST" / "raw").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_are_those_of_the_files(mnist_dir, mnist_arrays, packed):
    if not packed:
        unpack(mnist_dir)
    data = loaded(mnist_dir, normalise=False)
    images = torch.cat([data.splits.train.tensors[0], data.splits.validation.tensors[0]])
    labels = torch.cat([data.splits.train.tensors[1], data.splits.validation.tensors[1]])
    expected = torch.from_numpy(mnist_arrays["train-images-idx3-ubyte"])
    assert torch.equal(images, expected[:, None].float() / 255)
    assert labels.tolist() == mnist_arrays["train-labels-idx1-ubyte"].tolist()
    test_images, test_labels = data.splits.test.tensors
    expected = torch.from_numpy(mnist_arrays["t10k-images-idx3-ubyte"])
    assert torch.equal(test_images, expected[:, None].float() / 255)
    assert test_labels.tolist() == mnist_arrays["t10k-labels-idx1-ubyte"].tolist()
    assert (data.num_data, len(data.splits.validation)) == (40, 10)


def test_torchvision_reads_the_same(mnist_dir):
    unpack(mnist_dir)
    reference = torchvision.datasets.MNIST(mnist_dir, train=False)
    images, labels = loaded(mnist_dir, normalise=False).splits.test.tensors
    assert torch.equal((images[:, 0] * 255).round().byte(), reference.data)
    assert torch.equal(labels, reference.targets)


def test_normalise_and_flatten(mnist_dir):
    plain = loaded(mnist_dir, normalise=False).splits.test.tensors[0]
    normalised = loaded(mnist_dir).splits.test.tensors[0]
    assert torch.allclose(normalised, (plain - 0.1307) / 0.3081, atol=1e-6)
    flat = loaded(mnist_dir, flatten=True)
    assert flat.input_shape == (784,)
    assert torch.equal(flat.splits.test.tensors[0], normalised.flatten(1))


def test_missing_files_are_named(mnist_dir, monkeypatch):
    raw = mnist_dir / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    expected = rf"expected {raw}/t10k-labels-idx1-ubyte\.gz, which is not there"
    with pytest.raises(ConfigurationError, match=expected) as caught:
        loaded(mnist_dir)
    assert "download=True" in str(caught.value)
    assert "LIGHTNING_BNN_DATA" in str(caught.value)
    assert "train-images" not in str(caught.value)
    monkeypatch.delenv("LIGHTNING_BNN_DATA", raising=False)
    with pytest.raises(ConfigurationError, match=r"MNIST/raw/train-images.*LIGHTNING_BNN_DATA"):
        loaded(None)


def test_download_only_when_asked_and_needed(mnist_dir, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torchvision.datasets, "MNIST", lambda root, download: asked.append((root, download))
    )
    MNIST(mnist_dir, download=True).prepare_data()
    MNIST(tmp_path / "empty").prepare_data()
    assert asked == []
    MNIST(tmp_path / "empty", download=True).prepare_data()
    assert asked == [(tmp_path / "empty", True)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-12],
        lambda whole: b"no archive",
        lambda whole: gzip.compress(gzip.decompress(whole)[:-1]),
        lambda whole: gzip.compress(b"\x00\x00\x08\x03\x00\x00"),
        lambda whole: gzip.compress(b""),
    ],
)
def test_damaged_files_are_named(mnist_dir, damage):
    path = mnist_dir / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz is damaged"):
        loaded(mnist_dir)


def test_images_and_labels_of_different_files(mnist_dir, mnist_arrays):
    raw = mnist_dir / "MNIST" / "raw"
    short = mnist_arrays["t10k-labels-idx1-ubyte"].tobytes()[:7]
    header = bytes([0, 0, 8, 1]) + np.array([7], dtype=">u4").tobytes()
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + short))
    with pytest.raises(DataError, match=r"lengths \[20, 7\]"):
        loaded(mnist_dir)
