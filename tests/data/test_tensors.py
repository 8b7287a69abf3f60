import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_bnn.data import TensorRows, collate_rows

INPUTS = torch.arange(22.0).reshape(11, 2)
TARGETS = torch.arange(11)


def batches(loader):
    return [(inputs, targets) for inputs, targets in loader]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4, "shuffle": True, "num_workers": 1},
    ],
)
def test_batches_equal_those_of_a_tensor_dataset(options):
    got, expected = (
        batches(
            DataLoader(
                dataset,
                collate_fn=collate,
                generator=torch.Generator().manual_seed(5),
                **options,
            )
        )
        for dataset, collate in (
            (TensorRows(INPUTS, TARGETS), collate_rows),
            (TensorDataset(INPUTS, TARGETS), None),
        )
    )
    assert len(got) == len(expected) == (2 if "drop_last" in options else 3)
    for (inputs, targets), (expected_inputs, expected_targets) in zip(got, expected, strict=True):
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(targets, expected_targets)
        assert torch.equal(inputs[:, 0], 2.0 * targets)  # rows stay together


def test_transform_sees_the_inputs_of_a_batch_only():
    rows = TensorRows(INPUTS, TARGETS, transform=lambda inputs: inputs + len(inputs))
    inputs, targets = next(iter(DataLoader(rows, batch_size=4, collate_fn=collate_rows)))
    assert torch.equal(inputs, INPUTS[:4] + 4)
    assert torch.equal(targets, TARGETS[:4])
    assert torch.equal(rows[2][0], INPUTS[2] + 1)


def test_subsets_and_concatenations():
    rows = TensorRows(INPUTS, TARGETS)
    loader = DataLoader(Subset(rows, [9, 1, 4]), batch_size=2, collate_fn=collate_rows)
    assert [targets.tolist() for _, targets in loader] == [[9, 1], [4]]
    loader = DataLoader(ConcatDataset([rows, rows]), batch_size=12, collate_fn=collate_rows)
    assert [targets.tolist() for _, targets in loader] == [[*range(11), 0], [*range(1, 11)]]


def test_forgetting_the_collate_function_is_an_error():
    # Inputs and targets of one shape: as a plain tuple they would be stacked on each other.
    loader = DataLoader(TensorRows(torch.zeros(4, 1), torch.ones(4, 1)), batch_size=2)
    with pytest.raises(TypeError, match="GatheredRows"):
        next(iter(loader))


def test_single_rows_end_with_an_index_error():
    rows = TensorRows(INPUTS, TARGETS)
    assert [int(target) for _, target in rows] == list(range(11))
    assert int(rows[-1][1]) == 10
