"""The noise generator: its own stream, kept in the state dict."""

import io

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


def test_state_dict_resumes():
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


def test_a_state_of_an_accelerator_that_is_not_there():
    kind = "xpu" if torch.cuda.is_available() else "cuda"
    noise = NoiseGenerator(1)
    numbers(noise)
    state = {**noise.get_extra_state(), "seed": 4, "device": kind}
    noise.set_extra_state(state)
    assert torch.equal(numbers(noise), numbers(NoiseGenerator(4)))
