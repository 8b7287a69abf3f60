import math

import pytest
import torch

from lightning_bnn.data import ToyRegression, toy_curve


def loaded(**options):
    data = ToyRegression(**options)
    data.setup()
    return data


def test_the_curve_at_points_worked_out_by_hand():
    x = torch.tensor([0.0, 0.125, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = [0.0, 0.125 + 0.3 * math.sqrt(0.5) + 0.3, 0.25 + 0.3, 0.5, 1.0]
    assert toy_curve(x).tolist() == pytest.approx(expected, abs=1e-12)
    # ε shifts the sines and the value: at x = 0, ε = 1/8 the sines are those of x = 1/8.
    shifted = toy_curve(torch.zeros(1, dtype=torch.float64), 0.125)
    assert shifted.item() == pytest.approx(0.3 * math.sqrt(0.5) + 0.3 + 0.125, abs=1e-12)


def test_inputs_are_uniform_on_the_support():
    inputs, targets = loaded(train_size=4000).splits.train.tensors
    assert inputs.shape == targets.shape == (4000, 1)
    assert inputs.min() >= 0
    assert inputs.max() <= 0.5
    # Kolmogorov-Smirnov distance: above 0.0308 once in a thousand seeds at this size.
    sorted_inputs = inputs.squeeze(1).sort().values / 0.5
    steps = torch.arange(1, 4001) / 4000
    assert (sorted_inputs - steps).abs().max() < 0.0308


def test_the_noise_is_the_papers():
    inputs, targets = loaded(train_size=4000).splits.train.tensors
    inputs, targets = inputs.double(), targets.double()
    # To first order y is the curve plus its slope in ε times ε, so that the ratio is ε again
    # where the slope is large. 4.4 standard errors each: about 1e-5 of seeds fail.
    slope = 1 + 0.6 * math.pi * torch.cos(2 * math.pi * inputs)
    slope += 1.2 * math.pi * torch.cos(4 * math.pi * inputs)
    steep = slope.abs() > 4
    noise = ((targets - toy_curve(inputs)) / slope)[steep]
    count = len(noise)
    assert count > 500
    assert noise.mean().abs() < 4.4 * 0.02 / math.sqrt(count) + 0.0015  # curvature's share
    assert noise.std() / 0.02 == pytest.approx(1, abs=4.4 / math.sqrt(2 * count))


def test_splits_differ_and_do_not_depend_on_each_others_sizes():
    small, large = loaded(train_size=10), loaded(train_size=300)
    assert torch.equal(small.splits.test.tensors[0], large.splits.test.tensors[0])
    splits = (large.splits.train, large.splits.validation, large.splits.test)
    assert [len(part) for part in splits] == [300, 256, 256]
    firsts = {part.tensors[0][0].item() for part in splits}
    assert len(firsts) == 3
    assert not torch.equal(loaded(seed=1).splits.test.tensors[0], small.splits.test.tensors[0])


def test_predicting_runs_over_the_page():
    data = loaded(grid_points=15, batch_size=15)
    ((inputs, targets),) = data.predict_dataloader()
    assert torch.equal(inputs, data.grid(15))
    assert (inputs[0].item(), inputs[-1].item()) == pytest.approx((-0.2, 1.2))
    assert torch.equal(targets, toy_curve(inputs))
