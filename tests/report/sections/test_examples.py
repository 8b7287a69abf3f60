"""The most uncertain rows against a full sort, and PNG against Pillow's reader."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.rows import make_rows
from lightning_bnn.report.sections.examples import Examples, data_uri, picture
from tests.report.predictions import class_data


def decoded(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    found = decoded(data_uri(pixels))
    np.testing.assert_array_equal(found.reshape(pixels.shape), pixels)


def test_values_beyond_0_and_1_are_stretched():
    image = torch.tensor([[[-2.0, 0.0, 2.0]]])
    assert picture(image).ravel().tolist() == [0, 128, 255]
    assert picture(torch.tensor([[[0.2, 0.4]]])).ravel().tolist() == [51, 102]
    assert picture(torch.full((1, 2, 2), 7.0)).ravel().tolist() == [0, 0, 0, 0]
    assert picture(torch.full((1, 1, 1), float("nan"))).ravel().tolist() == [0]


def test_large_pictures_are_shrunk():
    image = torch.zeros(3, 256, 128)
    image[:, :, 64:] = 1
    small = picture(image)
    assert small.shape == (64, 32, 3)
    assert small[0, 0].tolist() == [0, 0, 0]
    assert small[63, 31].tolist() == [255, 255, 255]


def test_the_most_uncertain_with_their_own_pictures():
    logits, targets = class_data(count=200)
    logits[:, 5] = float("nan")
    pictures = torch.arange(200).div(255).reshape(200, 1, 1, 1).expand(200, 1, 2, 2)
    found, other = Examples(keep=6), Examples(keep=6)
    order = np.random.default_rng(0).permutation(200)
    for place, index in enumerate(np.array_split(order, 9)):
        predictive = CategoricalPredictive(logits[:, index])
        rows = make_rows(predictive, targets[index], index, pictures[index])
        (found if place % 2 else other).add(rows)
    found.merge(other)
    p = logits.softmax(2).mean(0)
    entropy = torch.special.entr(p).sum(1).nan_to_num(nan=-1)
    expected = entropy.argsort(descending=True)[:6].tolist()
    entries = found.numbers(None, {})["uncertain"]
    document = {"data": {"class_names": None}}
    (figure,) = found.figures({"draws": 3}, document)
    assert [entry["example"] for entry in entries] == expected
    for entry, shown in zip(entries, figure.pictures, strict=True):
        assert entry["target"] == targets[entry["example"]]
        assert entry["entropy"] == pytest.approx(entropy[entry["example"]].item())
        assert shown.name == f"Example {entry['example']}"
        assert decoded(shown.image).tolist() == [[entry["example"]] * 2] * 2
    assert set(entries[0]) == {
        "example", "target", "predicted", "confidence", "entropy", "epistemic",
    }  # fmt: skip


def test_an_example_with_many_rows_is_shown_once():
    logits = torch.randn(1, 5, 3, 20, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.zeros(5, 20).long()
    found = Examples(keep=3)
    found.add(make_rows(CategoricalPredictive(logits), targets, np.arange(5)))
    most = torch.special.entr(logits[0].softmax(1)).sum(1).amax(1)
    expected = most.argsort(descending=True)[:3]
    assert [entry["example"] for entry in found.entries] == expected.tolist()
    np.testing.assert_allclose([entry["entropy"] for entry in found.entries], most[expected])
