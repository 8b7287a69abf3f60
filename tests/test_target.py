"""The mean energy by hand, and the number of training examples."""

import math

import pytest
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from scipy import stats
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import BoundPrior, Laplace, Normal
from lightning_bnn.strategies.resume import ResumableLoader
from lightning_bnn.target import Target, count_examples, prior_power, split_batch


def bound(prior=None):
    net = nn.Linear(2, 1).double()
    return BoundPrior(prior or Normal(0.5, 2.0), net, dict(net.named_parameters()))


def test_mean_energy_by_hand():
    target = Target(Gaussian(0.3), bound({"weight": Laplace(), "bias": Normal(0.5, 2.0)}), 50)
    weights = torch.tensor([0.2, -1.0, 3.0], dtype=torch.float64)
    outputs = torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64)
    targets = torch.tensor([[1.1], [1.0], [0.0]], dtype=torch.float64)
    data = -stats.norm(outputs.numpy(), 0.3).logpdf(targets.numpy()).mean()
    prior = -(stats.laplace.logpdf([0.2, -1.0]).sum() + stats.norm(0.5, 2).logpdf(3.0))
    assert target.data_energy(outputs[None], targets).item() == pytest.approx(data, rel=1e-12)
    assert target.mean_energy(weights, outputs, targets).item() == pytest.approx(
        data + prior / 50, rel=1e-12
    )


def test_batches_of_equal_size_average_to_the_energy_of_all():
    """Over an epoch U/N is estimated without bias: the mean over batches is the whole."""
    target = Target(Categorical(), bound(), 12)
    weights = torch.randn(3, dtype=torch.float64)
    outputs, labels = torch.randn(12, 4, dtype=torch.float64), torch.randint(4, (12,))
    whole = target.mean_energy(weights, outputs, labels)
    log_prob = -nn.functional.cross_entropy(outputs, labels, reduction="sum")
    exact = (-log_prob + target.prior.energy(weights)) / 12
    batches = [
        target.mean_energy(weights, *batch)
        for batch in zip(outputs.split(3), labels.split(3), strict=True)
    ]
    torch.testing.assert_close(whole, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.stack(batches).mean(), exact, rtol=1e-12, atol=0)


def test_num_data_may_come_later():
    target = Target(Gaussian(1.0), bound())
    with pytest.raises(ConfigurationError, match=r"not known yet.*Trainer\.fit.*num_data="):
        target.mean_energy(torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, 1))
    target.num_data = 7
    assert target.num_data == 7
    with pytest.raises(ConfigurationError, match="at least 1; got 0"):
        target.num_data = 0
    assert target.num_data == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0}, "num_data= .* at least 1; got 0"),
        ({"num_data": -3}, "got -3"),
        ({"temperature": -0.1}, "temperature= .* got -0.1"),
        ({"temperature": math.nan}, "temperature= .* got nan"),
        ({"temperature": math.inf}, "temperature= .* got inf"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Target(Gaussian(1.0), bound(), **options)


def test_split_batch():
    inputs, targets = torch.zeros(2, 3), torch.ones(2)
    for batch in ((inputs, targets), [inputs, targets], [{"x": inputs}, targets]):
        assert split_batch(batch)[1] is targets
    for batch, said in (
        ((inputs, inputs, targets), "tuple of length 3"),
        (inputs, "Tensor of length 2"),
        ({"x": inputs, "y": targets}, "dict of length 2"),
        (None, "NoneType"),
    ):
        with pytest.raises(DataError, match=rf"pair \(inputs, targets\); got {said}.*split="):
            split_batch(batch)


# ---------------------------------------------------------------- N

DATA = TensorDataset(torch.arange(20.0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


class MeasuredStream(Stream):
    def __len__(self):
        return 20


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA), 20),
        (DataLoader(DATA, batch_size=6, shuffle=True, drop_last=True), 20),
        (DataLoader(Subset(DATA, range(5))), 5),
        (DataLoader(DATA, sampler=SubsetRandomSampler(range(8))), 8),
        (DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(8)), 3, False)), 8),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=9)), 20),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 20, num_samples=90)), 20),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=4, rank=1)), 20),
        (DataLoader(MeasuredStream()), 20),
    ],
    ids=lambda value: "" if isinstance(value, int) else type(value.sampler).__name__,
)
def test_number_of_examples(loader, expected):
    assert count_examples(loader, None) == expected
    assert count_examples(loader, None, world_size=4) == expected
    assert count_examples(ResumableLoader(loader, seed=1), None) == expected


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SubsetRandomSampler(range(8)), 8),
        (WeightedRandomSampler([1.0] * 20, num_samples=90), 20),
        (RandomSampler(DATA), 20),
    ],
)
def test_lightnings_wrapper_of_a_sampler_under_ddp(sampler, expected):
    wrapped = DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
    loader = DataLoader(DATA, sampler=wrapped)
    assert count_examples(loader, None, world_size=2) == expected
    batches = DataLoader(DATA, batch_sampler=BatchSampler(wrapped, 3, False))
    assert count_examples(batches, None, world_size=2) == expected


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [(1, 2)], {"a": DataLoader(DATA)}])
def test_data_without_a_length(loader):
    kind = {DataLoader: "Stream"}.get(type(loader), type(loader).__name__)
    with pytest.raises(ConfigurationError, match=rf"\({kind}\) have no length. Pass num_data="):
        count_examples(loader, None)
    assert count_examples(loader, 20) == 20
    assert count_examples(loader, 10, world_size=2) == 10


@pytest.mark.parametrize(
    ("share", "world_size", "wrong"),
    [(10, 2, True), (7, 3, True), (6, 3, True), (5, 4, True), (20, 2, False), (8, 3, False)],
)
def test_the_share_of_a_rank_is_not_the_number_of_examples(share, world_size, wrong):
    loader = DataLoader(DATA)
    assert count_examples(loader, share) == share
    if not wrong:
        assert count_examples(loader, share, world_size) == share
        return
    with pytest.raises(
        ConfigurationError, match=f"num_data={share} .* {world_size} ranks; .* has 20 .*=20"
    ):
        count_examples(loader, share, world_size)


def test_all_of_a_tiny_data_set_is_not_a_share():
    assert count_examples(DataLoader(DATA), 20, world_size=1) == 20
    assert count_examples(DataLoader(Subset(DATA, [0])), 1, world_size=2) == 1


def test_what_a_temperature_tempers_is_named() -> None:
    with pytest.raises(ConfigurationError, match="tempers= is 'likelihood' or 'posterior'"):
        prior_power("prior", 0.5, own="likelihood")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="temperature=0 leaves no posterior"):
        prior_power("posterior", 0.0, own="likelihood")
