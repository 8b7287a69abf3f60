import gzip

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


def test_images_and_labels_are_those_that_torchvision_reads(mnist_dir):
    packed = loaded(mnist_dir, normalise=False).splits
    unpack(mnist_dir)
    unpacked = loaded(mnist_dir, normalise=False).splits
    for splits in (packed, unpacked):
        parts = (splits.train, splits.validation, splits.test)
        assert [len(part) for part in parts] == [40, 10, 20]
        for train, rows in ((True, parts[:2]), (False, parts[2:])):
            reference = torchvision.datasets.MNIST(mnist_dir, train=train)
            images, labels = (torch.cat(c) for c in zip(*(r.tensors for r in rows), strict=True))
            assert torch.equal(images, reference.data[:, None].float() / 255)
            assert torch.equal(labels, reference.targets)


def test_normalise_and_flatten(mnist_dir):
    plain = loaded(mnist_dir, normalise=False).splits.test.tensors[0]
    normalised = loaded(mnist_dir).splits.test.tensors[0]
    assert torch.allclose(normalised, (plain - 0.1307) / 0.3081, atol=1e-6)
    flat = loaded(mnist_dir, flatten=True)
    assert flat.input_shape == (784,)
    assert torch.equal(flat.splits.test.tensors[0], normalised.flatten(1))


def test_missing_files_are_named(mnist_dir):
    raw = mnist_dir / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    expected = rf"Expected {raw}/t10k-labels-idx1-ubyte\.gz, .*LIGHTNING_BNN_DATA.*download=True"
    with pytest.raises(ConfigurationError, match=expected):
        loaded(mnist_dir)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-12],
        lambda whole: b"no archive",
        lambda whole: gzip.compress(gzip.decompress(whole)[:-1]),
        lambda whole: gzip.compress(b""),
    ],
)
def test_damaged_files_are_named(mnist_dir, damage):
    path = mnist_dir / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz is damaged"):
        loaded(mnist_dir)
