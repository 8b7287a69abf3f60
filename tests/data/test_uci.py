import numpy as np
import pytest

from lightning_bnn.data import UCIRegression
from lightning_bnn.data.uci import standard_split
from lightning_bnn.errors import ConfigurationError


def loaded(folder, **options):
    data = UCIRegression("yacht", data_dir=folder, **options)
    data.setup()
    return data


@pytest.mark.parametrize("rows", [10, 15, 308])
def test_standard_splits_follow_the_published_recipe(rows):
    random = np.random.RandomState(1)
    for split in range(20):
        order = random.choice(range(rows), rows, replace=False)
        train, test = standard_split(rows, split)
        assert np.array_equal(np.concatenate([train, test]), order)
        assert len(train) == round(0.9 * rows)


def test_rows_are_standardised_by_the_training_rows(uci_dir, uci_values):
    data = loaded(uci_dir, split=3)
    train, test = standard_split(30, 3)
    for rows, part in ((train, data.splits.train), (test, data.splits.test)):
        inputs, targets = part.tensors
        for column in (0, 2):
            values = uci_values[:, column]
            expected = (values[rows] - values[train].mean()) / values[train].std()
            assert inputs[:, column].numpy() == pytest.approx(expected, abs=1e-5)
        back = targets[:, 0].numpy() * data.target_scale + data.target_mean
        assert back == pytest.approx(uci_values[rows, 4], abs=1e-4)
    assert data.target_mean == pytest.approx(uci_values[train, 4].mean())
    assert data.target_scale == pytest.approx(uci_values[train, 4].std())
    assert (data.num_data, data.input_shape, data.num_outputs) == (27, (3,), 1)


def test_a_constant_column_becomes_zero(uci_dir, uci_values):
    # 0.998 thirty times has a deviation of 1e-16, not 0: the case that scaling must not divide by.
    assert uci_values[:, 1].std() > 0
    inputs, _ = loaded(uci_dir).splits.train.tensors
    assert inputs[:, 1].abs().max() < 1e-6


def test_validation_rows_come_out_of_training(uci_dir, uci_values):
    data = loaded(uci_dir, validation=0.1)
    train, test = standard_split(30, 0)
    sizes = [len(getattr(data.splits, part)) for part in ("train", "validation", "test")]
    assert sizes == [24, 3, 3]
    # The held-out rows take no part in the standardisation.
    assert data.target_mean == pytest.approx(uci_values[train[:24], 4].mean())
    held_out = data.splits.validation.tensors[1][:, 0].numpy()
    back = held_out * data.target_scale + data.target_mean
    assert back == pytest.approx(uci_values[train[24:], 4], abs=1e-4)
    test_targets = data.splits.test.tensors[1][:, 0].numpy() * data.target_scale + data.target_mean
    assert test_targets == pytest.approx(uci_values[test, 4], abs=1e-4)


def test_missing_files_are_named(uci_dir):
    (uci_dir / "yacht" / "index_target.txt").unlink()
    expected = str(uci_dir / "yacht" / "index_target.txt")
    with pytest.raises(ConfigurationError, match=f"Expected {expected}, not.*LIGHTNING_BNN_DATA"):
        loaded(uci_dir)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "iris"}, "name= is 'bostonHousing'.* got 'iris'"),
        ({"name": "yacht", "split": 20}, "0 to 19; got split=20"),
        ({"name": "protein-tertiary-structure", "split": 5}, "0 to 4; got split=5"),
        ({"name": "yacht", "split": -1}, "split= is a whole number, at least 0; got -1"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        UCIRegression(**options)


def test_validation_must_leave_rows_to_train_on(uci_dir):
    for share in (0.99, 1.0):
        with pytest.raises(ConfigurationError, match="how many of the 27 training examples"):
            loaded(uci_dir, validation=share)
    with pytest.raises(
        ConfigurationError, match=r"validation= is a number of at least 0; got -0.1"
    ):
        loaded(uci_dir, validation=-0.1)
