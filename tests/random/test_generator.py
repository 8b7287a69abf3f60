"""The noise generator: its own stream, kept in the state dict."""

import copy
import io
import pickle

import pytest
import torch

from lightning_bnn.random import NoiseGenerator


def numbers(noise, count=5):
    return noise.stream.fill_(torch.empty(count))


def test_seed_decides_and_the_global_generator_does_not():
    first = numbers(NoiseGenerator(7))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    noise = NoiseGenerator(7)
    assert torch.equal(numbers(noise), first)
    noise.stream.integer()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(numbers(NoiseGenerator(8)), first)


def test_without_a_seed_the_global_generator_decides():
    torch.manual_seed(5)
    first, second = NoiseGenerator(), NoiseGenerator()
    torch.manual_seed(5)
    assert NoiseGenerator().stream.seed == first.stream.seed != second.stream.seed


def test_fills_in_place_with_standard_normal_numbers():
    tensor = torch.empty(40_000, dtype=torch.float64)
    filled = NoiseGenerator(0).stream.fill_(tensor)
    assert filled is tensor
    # the mean and the variance each within 5 standard errors: a false alarm in 10⁶
    assert abs(tensor.mean()) < 5 / 200
    assert abs(tensor.var() - 1) < 5 * (2 / 40_000) ** 0.5


def test_state_dict_goes_on_where_it_was():
    noise = NoiseGenerator(3)
    numbers(noise)
    noise.stream.integer()
    file = io.BytesIO()
    torch.save(noise.state_dict(), file)
    file.seek(0)
    other = NoiseGenerator(99)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.stream.seed == 3
    assert torch.equal(numbers(noise), numbers(other))
    assert noise.stream.integer() == other.stream.integer()
    assert noise.stream.key() == other.stream.key()


def test_the_state_is_a_snapshot():
    noise = NoiseGenerator(3)
    state = noise.state_dict()
    first = numbers(noise)
    noise.load_state_dict(state)
    assert torch.equal(numbers(noise), first)
    noise.load_state_dict(state)
    assert torch.equal(numbers(noise), first)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_independent(clone):
    noise = NoiseGenerator(3)
    numbers(noise)
    other = clone(noise)
    first = numbers(noise)
    assert torch.equal(numbers(other), first)
    assert noise.stream.integer() == other.stream.integer()


def test_integers_seed_a_generator():
    values = [NoiseGenerator(seed).stream.integer() for seed in range(50)]
    assert len(set(values)) == 50
    assert all(0 <= value < 2**63 for value in values)
    torch.Generator().manual_seed(max(values))


def test_a_state_of_an_accelerator_that_is_not_there():
    kind = "xpu" if torch.cuda.is_available() else "cuda"
    noise = NoiseGenerator(1)
    numbers(noise)
    state = {**noise.get_extra_state(), "seed": 4, "device": kind}
    noise.set_extra_state(state)
    assert torch.equal(numbers(noise), numbers(NoiseGenerator(4)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_move_to_an_accelerator():
    noise = NoiseGenerator(4)
    first = noise.stream.fill_(torch.empty(5, device="cuda"))
    other = NoiseGenerator(1)
    other.load_state_dict(noise.state_dict())
    assert torch.equal(
        noise.stream.fill_(torch.empty(5, device="cuda")),
        other.stream.fill_(torch.empty(5, device="cuda")),
    )
    assert torch.equal(first, NoiseGenerator(4).stream.fill_(torch.empty(5, device="cuda")))
