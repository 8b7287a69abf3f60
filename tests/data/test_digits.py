import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.datasets import load_digits

from lightning_bnn.data import Digits


def loaded(**options):
    data = Digits(**options)
    data.setup()
    return data


def parts(data):
    return data.splits.train, data.splits.validation, data.splits.test


def rows_of(images, labels):
    flat = torch.cat([images.flatten(1).round(), labels[:, None]], dim=1)
    return sorted(map(tuple, flat.tolist()))


def test_the_splits_hold_every_image_once_scaled_to_one_in_equal_shares():
    data = loaded()
    images = torch.cat([part.tensors[0] for part in parts(data)])
    labels = torch.cat([part.tensors[1] for part in parts(data)])
    pixels, targets = map(torch.from_numpy, load_digits(return_X_y=True))
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert rows_of(images * 16, labels) == rows_of(pixels, targets)
    assert [len(part) for part in parts(data)] == [1078, 359, 360]
    for part, share in zip(parts(data), (0.6, 0.2, 0.2), strict=True):
        counts = torch.bincount(part.tensors[1]) - share * torch.bincount(targets)
        assert counts.abs().max() < 2  # equal shares of the classes


def test_the_seed_chooses_the_split():
    one, same, other = loaded(seed=0), loaded(seed=0), loaded(seed=1)
    for first, second in zip(parts(one), parts(same), strict=True):
        assert torch.equal(first.tensors[0], second.tensors[0])
    assert not torch.equal(one.splits.train.tensors[0], other.splits.train.tensors[0])


@pytest.mark.parametrize("degrees", [10.0, -45.0, 90.0, 137.5])
def test_other_angles_are_those_of_scipy(degrees):
    """SciPy interpolates in another way only where a pixel's neighbour lies outside the image."""
    before = loaded().splits.test.tensors[0].squeeze(1).numpy()
    after = loaded(rotate=degrees).splits.test.tensors[0].squeeze(1).numpy()
    padded = np.pad(before, ((0, 0), (4, 4), (4, 4)))
    turned = ndimage.rotate(padded, degrees, axes=(2, 1), reshape=False, order=1)
    # axes=(2, 1): from the columns to the rows, which is counter-clockwise as a picture is seen
    np.testing.assert_allclose(after, turned[:, 4:-4, 4:-4], atol=2e-5)


def test_turned_and_flat():
    flat, square = loaded(flatten=True, rotate=30), loaded(rotate=30)
    assert (flat.input_shape, square.input_shape) == ((64,), (1, 8, 8))
    assert torch.equal(flat.splits.train.tensors[0], square.splits.train.tensors[0].flatten(1))
    images = square.splits.train.tensors[0]
    assert (images.min(), images.max()) == (0, 1)
