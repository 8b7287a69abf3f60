"""What members see: orders of their own, indices, workers, samplers, resume and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bnn import DeepEnsemble
from lightning_bnn.data.tensors import TensorRows, collate_rows
from lightning_bnn.ensembles.batches import (
    MemberBatch,
    MemberBatches,
    as_member_batch,
    has_indices,
    subset_indices,
)
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.strategies.resume import ResumableLoader
from tests.nets import make_data
from tests.trainers import quiet_trainer

SEEDS = [31, 32, 33]
EXAMPLES = 23


class Numbered(Dataset):
    """Example i is (i, (10 i, 100 i)): what was fetched tells its index."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([10 * index, 100 * index])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class GlobalSampler(Sampler):
    """A sampler of a user's own, which draws from the global generator when it begins."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return EXAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(EXAMPLES).tolist()


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Numbered(), **{"batch_size": 5, "shuffle": True, **options})


def epoch_of(loader: DataLoader, seeds: list[int] | None = SEEDS, epoch: int = 0, rank: int = 0):
    opened = MemberBatches(loader, None if seeds is None else lambda: seeds)
    return list(opened(epoch, rank))


def check(batches: list[MemberBatch]) -> None:
    """What was fetched is what the indices say."""
    for (inputs, targets), indices in batches:
        assert indices.dtype == torch.int64
        assert torch.equal(inputs, indices)
        assert torch.equal(targets, torch.stack([10 * indices, 100 * indices], -1))


LOADERS = {
    "shuffle": lambda: shuffled(),
    "drop_last": lambda: shuffled(drop_last=True),
    "generator": lambda: shuffled(generator=torch.Generator().manual_seed(1)),
    "replacement": lambda: shuffled(
        shuffle=None, sampler=RandomSampler(range(EXAMPLES), replacement=True, num_samples=80)
    ),
    "weighted": lambda: shuffled(
        shuffle=None, sampler=WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES)
    ),
    "own sampler": lambda: shuffled(shuffle=None, sampler=GlobalSampler()),
    "batch_sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(RandomSampler(range(EXAMPLES)), 4, False)
    ),
    "workers": lambda: shuffled(num_workers=2, prefetch_factor=3),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_member_sees_an_order_of_its_own(name: str) -> None:
    loader = LOADERS[name]()
    batches = epoch_of(loader)
    check(batches)
    assert len(batches) == len(loader)
    orders = torch.cat([indices for _, indices in batches], dim=1)
    assert len(orders) == 3
    assert len({tuple(order.tolist()) for order in orders}) == 3
    if name not in ("replacement", "weighted", "drop_last"):
        assert all(sorted(order.tolist()) == list(range(EXAMPLES)) for order in orders)


@pytest.mark.parametrize("name", LOADERS)
def test_a_member_alone_sees_what_it_sees_beside_others(name: str) -> None:
    together = epoch_of(LOADERS[name](), epoch=2)
    torch.manual_seed(99)  # nothing but seed, epoch and rank decides
    alone = epoch_of(LOADERS[name](), SEEDS[1:2], epoch=2)
    for (_, these), (_, those) in zip(together, alone, strict=True):
        assert torch.equal(these[1:2], those)
    other_epoch = epoch_of(LOADERS[name](), SEEDS[1:2], epoch=3)
    assert not torch.equal(other_epoch[0].indices, alone[0].indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_of_shared_batches(workers: int) -> None:
    torch.manual_seed(3)
    plain = [inputs for inputs, _ in shuffled(num_workers=workers)]
    torch.manual_seed(3)
    batches = epoch_of(shuffled(num_workers=workers), None)
    check(batches)
    for inputs, (_, indices) in zip(plain, batches, strict=True):
        assert torch.equal(inputs, indices), "the loader's own order stays"


def test_a_pass_left_half_way_does_not_shift_the_next() -> None:
    loader = shuffled(num_workers=2, persistent_workers=True)
    used = next(iter(loader)) and loader._iterator  # its workers must not be taken over
    for seeds in (None, SEEDS):
        opened = MemberBatches(loader, None if seeds is None else lambda: SEEDS)
        for epoch in range(3):
            check(list(islice(opened(epoch, 0), 2)))
        batches = list(opened(3, 0))
        check(batches)
        assert len(batches) == 5
    assert loader._iterator is used, "the user's loader is left alone"


def test_rows_gathered_at_once() -> None:
    rows = TensorRows(torch.arange(20.0), torch.arange(20))
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate_rows)
    for (inputs, targets), indices in epoch_of(loader):
        assert inputs.shape == (3, 4)
        assert torch.equal(inputs, indices.float())
        assert torch.equal(targets, indices)


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_share_out_each_members_order(wrapped: bool) -> None:
    """Whatever the ranks' own random states are."""
    seen = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        options = {"num_replicas": 2, "rank": rank}
        sampler = (
            DistributedSamplerWrapper(SubsetRandomSampler(range(EXAMPLES)), **options)
            if wrapped
            else DistributedSampler(Numbered(), **options)
        )
        loader = shuffled(shuffle=None, sampler=sampler)
        batches = epoch_of(loader, rank=rank)
        check(batches)
        seen.append(torch.cat([indices for _, indices in batches], dim=1))
    for first, second in zip(*seen, strict=True):
        assert sorted({*first.tolist(), *second.tolist()}) == list(range(EXAMPLES))
        assert len({*first.tolist()} & {*second.tolist()}) <= 1, "one is repeated to fill up"
    assert not torch.equal(seen[0][0], seen[0][1])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seen", [1, 3])
def test_resume_goes_on_with_the_next_batches(own: bool, seen: int) -> None:
    def make(seed: int) -> ResumableLoader:
        loader = shuffled()
        return ResumableLoader(
            loader, seed, opener=MemberBatches(loader, (lambda: SEEDS) if own else None)
        )

    whole = make(1)
    earlier = list(whole)
    batches = iter(whole)
    for place in range(seen):
        assert not torch.equal(next(batches).indices, earlier[place].indices), "another epoch"
    state = whole.state_dict()
    rest = list(batches)
    resumed = make(2)
    resumed.load_state_dict(state)
    for (_, these), (_, those) in zip(rest, resumed, strict=True):
        assert torch.equal(these, those)


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    loader = shuffled()
    list(ResumableLoader(loader, 1, opener=MemberBatches(loader, lambda: SEEDS)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "loader",
    [
        lambda: shuffled(shuffle=False),
        lambda: DataLoader(Numbered(), batch_sampler=[list(range(EXAMPLES))] * 3),
        lambda: shuffled(
            shuffle=None,
            sampler=DistributedSampler(Numbered(), num_replicas=2, rank=0, shuffle=False),
        ),
    ],
)
def test_a_loader_that_does_not_shuffle(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"does not shuffle.*shuffle=True"):
        epoch_of(loader())
    assert len(epoch_of(loader(), SEEDS[:1])) == len(loader()), "a single member has no others"


def test_batches_of_several_sizes() -> None:
    class Ragged(GlobalSampler):
        def __iter__(self) -> Iterator[Any]:
            yield list(range(int(torch.randint(1, 20, ()))))

    with pytest.raises(ConfigurationError, match="one size; the batch sampler gave"):
        epoch_of(DataLoader(Numbered(), batch_sampler=Ragged()))


def test_collate_functions_that_lose_the_batch_axis() -> None:
    with pytest.raises(DataError, match=r"leading axis of 15; got \(2, 15\)"):
        epoch_of(shuffled(collate_fn=lambda items: torch.zeros(2, len(items))))


def test_what_is_no_tensor_stays() -> None:
    loader = shuffled(collate_fn=lambda items: {"x": torch.zeros(len(items)), "name": "a"})
    (batch, _), *_ = epoch_of(loader)
    assert batch["x"].shape == (3, 5)
    assert batch["name"] == "a"


def test_workers_that_answer_in_any_order() -> None:
    with pytest.raises(ConfigurationError, match="in_order=False"):
        MemberBatches(shuffled(num_workers=2, in_order=False), None)


def test_indices_that_are_no_numbers() -> None:
    loader = DataLoader({"a": 1, "b": 2}, batch_sampler=[["a"], ["b"]])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"whole numbers as indices; the sampler gave \['a'\]"):
        epoch_of(loader, None)


def test_which_loaders_have_indices() -> None:
    assert has_indices(shuffled())
    for loader in (DataLoader(Stream()), shuffled(batch_size=None), [1, 2]):
        assert not has_indices(loader)


def test_a_batch_is_checked() -> None:
    x, y = torch.zeros(3, 5, 2), torch.zeros(3, 5)
    own = MemberBatch((x, y), torch.zeros(3, 5, dtype=torch.int64))
    assert as_member_batch(own, 3, own=True, indexed="bootstrap=True") is own
    assert as_member_batch((x, y), 4, own=False, indexed=None).batch == (x, y)
    shared = MemberBatch((x, y), torch.arange(3))
    assert as_member_batch(shared, 7, own=False, indexed="bootstrap=True") is shared


@pytest.mark.parametrize(
    ("batch", "own", "indexed", "message"),
    [
        ((1, 2), True, None, "independent_batches=True needs .* got a batch of type tuple"),
        ((1, 2), False, "bootstrap=True", "bootstrap=True needs .* with indices; got .* tuple"),
        (MemberBatch((1, 2)), False, "randomise=", "randomise= needs .* with indices"),
        (MemberBatch((1, 2)), False, None, "without indices .* independent_batches=True"),
        (
            MemberBatch(torch.zeros(3, 2), torch.zeros(3, 2)),
            False,
            None,
            r"shape \(B,\) with independent_batches=False; got \(3, 2\)",
        ),
        (MemberBatch(torch.zeros(4, 2)), True, None, r"3 members; got leading axes \[\(4,\)\]"),
        (
            MemberBatch(torch.zeros(3, 2), torch.arange(2)),
            True,
            "bootstrap=True",
            r"shape \(M, B\) with independent_batches=True; got \(2,\)",
        ),
    ],
)
def test_bad_batches(batch: Any, own: bool, indexed: str | None, message: str) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        as_member_batch(batch, 3, own, indexed)


def test_a_part_of_the_data_is_known_on_every_rank() -> None:
    part = SubsetRandomSampler([9, 2, 5])
    for sampler in (part, DistributedSamplerWrapper(part, num_replicas=2, rank=1)):
        found = subset_indices(DataLoader(range(12), batch_size=2, sampler=sampler))
        assert found is not None
        assert found.tolist() == [9, 2, 5]
    assert subset_indices(DataLoader(range(12), sampler=RandomSampler(range(12)))) is None


class Described(DeepEnsemble):
    """Takes batches that hold other things than tensors."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        return batch["inputs"], batch["targets"]


@pytest.mark.parametrize("option", ["bootstrap", "independent_batches"])
def test_batches_may_hold_other_things_than_tensors(option: str) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        return {"count": len(rows), "note": None, "inputs": inputs, "targets": targets}

    options: dict[str, Any] = {option: True}
    ensemble = Described(lambda: nn.Linear(4, 3), Categorical(), members=3, **options)
    before = ensemble.weights.detach().clone()
    rows = DataLoader(
        make_data("mlp", "classification"), batch_size=16, shuffle=True, collate_fn=collate
    )
    quiet_trainer(max_epochs=1).fit(ensemble, rows)
    assert not torch.equal(before, ensemble.weights)
