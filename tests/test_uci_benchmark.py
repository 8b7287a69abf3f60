"""The UCI benchmark on made-up data: units, standard errors, the choice of epochs, tables."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import uci, uci_ensemble, uci_single
from benchmarks.published import DEEP_ENSEMBLE, SOURCES, Figure, published
from benchmarks.uci_ensemble import MEMBERS, Recipe, SplitBatches, score, stack_splits, train
from lightning_bnn.data.uci import standard_split
from lightning_bnn.errors import NonFiniteError

ROWS = 60
SHORT = (Recipe(1), Recipe(3))


def write_set(folder: Path, name: str, rows: int = ROWS) -> np.ndarray:
    """A made-up set in the files of a UCI set: two features, and a target with a large unit."""
    random = np.random.default_rng(0)
    features = random.normal(size=(rows, 2))
    target = 40 + 30 * features[:, :1] + 5 * random.normal(size=(rows, 1))
    values = np.hstack([features, target])
    (folder / name).mkdir(parents=True)
    np.savetxt(folder / name / "data.txt", values)
    (folder / name / "index_features.txt").write_text("0\n1\n")
    (folder / name / "index_target.txt").write_text("2\n")
    return values


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_set(tmp_path, "yacht")
    write_set(tmp_path, "bostonHousing")
    return tmp_path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(uci_ensemble, "RECIPES", SHORT)
    monkeypatch.setattr(uci_ensemble, "BATCH_SIZE", 16)
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    yield
    logger.setLevel(level)  # the program silences it; other tests read it


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on loaders
def test_stacked_splits_train_as_splits_one_by_one(data_dir: Path) -> None:
    together = stack_splits("yacht", [0, 4], data_dir)
    ensemble = train(together, hidden=6, recipe=Recipe(2))
    scores = score(ensemble, together)
    for index, split in enumerate([0, 4]):
        alone = stack_splits("yacht", [split], data_dir)
        single = train(alone, hidden=6, recipe=Recipe(2))
        members = ensemble.weights[MEMBERS * index : MEMBERS * (index + 1)]
        torch.testing.assert_close(single.weights, members, rtol=1e-4, atol=1e-5)
        assert score(single, alone)[0] == pytest.approx(scores[index], rel=1e-4)
    # splits differ in data, members in start and order: else equality would say little
    assert len({tuple(row) for row in ensemble.weights.tolist()}) == 2 * MEMBERS


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scores_are_in_the_unit_of_the_target(data_dir: Path) -> None:
    values = np.loadtxt(data_dir / "yacht" / "data.txt")
    data = stack_splits("yacht", [0, 3], data_dir)
    ensemble = train(data, hidden=6, recipe=Recipe(3))
    found = score(ensemble, data)[1]

    rows, test = standard_split(ROWS, 3)
    mean, scale = values[rows].mean(0), values[rows].std(0)
    inputs = (values[test][:, :2] - mean[:2]) / scale[:2]
    densities, means = [], []
    for member in range(MEMBERS, 2 * MEMBERS):
        weights = {n: t[member].double().numpy() for n, t in ensemble.current_draws().items()}
        features = np.maximum(inputs @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
        loc, raw = (
            (features @ weights[f"{head}.weight"].T + weights[f"{head}.bias"])[:, 0]
            for head in ("mean", "scale")
        )
        loc = loc * scale[2] + mean[2]
        sd = (np.log1p(np.exp(raw)) + uci_ensemble.MINIMUM_SCALE) * scale[2]
        z = (values[test][:, 2] - loc) / sd
        densities.append(np.exp(-0.5 * z**2) / (sd * math.sqrt(2 * math.pi)))
        means.append(loc)
    log_likelihood = np.log(np.mean(densities, 0)).mean()
    rmse = np.sqrt(np.square(values[test][:, 2] - np.mean(means, 0)).mean())
    assert found == pytest.approx((log_likelihood, rmse), rel=1e-5)
    assert rmse > 2  # far from the standardised figure, which is below 1


def test_batches_are_of_the_members_own_split_in_an_order_of_its_own(data_dir: Path) -> None:
    data = stack_splits("yacht", [2, 5], data_dir)
    numbers = [MEMBERS * split + member for split in (2, 5) for member in range(MEMBERS)]
    loader = SplitBatches(data, numbers, batch_size=16)
    first, second = list(loader), list(loader)
    assert len(first) == len(loader) == 54 // 16
    for (inputs, targets), indices in first:
        assert inputs.shape == (2 * MEMBERS, 16, 2)
        for member in range(2 * MEMBERS):
            split = member // MEMBERS
            assert torch.equal(inputs[member], data.inputs[split, indices[member]])
            assert torch.equal(targets[member], data.targets[split, indices[member]])
    orders = torch.cat([batch.indices for batch in first], dim=1)  # type: ignore[misc]
    assert all(len(set(order)) == 48 for order in orders.tolist())  # no row twice in an epoch
    again = torch.cat([batch.indices for batch in second], dim=1)  # type: ignore[misc]
    assert len({tuple(order) for order in [*orders.tolist(), *again.tolist()]}) == 4 * MEMBERS


def test_validation_rows_are_training_rows_and_test_rows_stay_unseen(data_dir: Path) -> None:
    values = np.loadtxt(data_dir / "yacht" / "data.txt")
    rows, test = standard_split(ROWS, 1)
    data = stack_splits("yacht", [1], data_dir, validation=0.2)
    fitted, held_out = rows[:-11], rows[-11:]
    assert data.inputs.shape == (1, 43, 2)
    scale = values[fitted].std(0)
    expected = (values[held_out] - values[fitted].mean(0)) / scale
    np.testing.assert_allclose(data.held_out_inputs[0], expected[:, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(data.held_out_targets[0], expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert data.target_scales == pytest.approx([scale[2]])

    final = stack_splits("yacht", [1], data_dir)
    expected = (values[test] - values[rows].mean(0)) / values[rows].std(0)
    np.testing.assert_allclose(final.held_out_targets[0], expected[:, 2:], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_split_gets_the_recipe_that_validates_best(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(recipe: Recipe, data: uci_ensemble.StackedSplits) -> list[uci_ensemble.Score]:
        final = data.inputs.shape[1] == 54
        better = {0: 1, 1: 3, 2: 1}  # the epochs that validate best, by split
        return [
            uci_ensemble.Score(100.0 * split + recipe.epochs, 0.5)
            if final
            else uci_ensemble.Score(float(better[split] == recipe.epochs), 0.5)
            for split in data.splits
        ]

    monkeypatch.setattr(uci_ensemble, "train", lambda data, hidden, recipe: recipe)
    monkeypatch.setattr(uci_ensemble, "score", made_up)
    results = uci_ensemble.run_ensemble("yacht", [0, 1, 2], data_dir)
    assert [one["split"] for one in results] == [0, 1, 2]
    first, second = map(str, SHORT)
    assert [one["recipe"] for one in results] == [first, second, first]
    assert [one["log_likelihood"] for one in results] == [1.0, 103.0, 201.0]
    assert results[1]["validation"] == {first: 0.0, second: 1.0}

    # a large set has recipes of its own
    monkeypatch.setattr(uci_ensemble, "LARGE", 53)
    monkeypatch.setattr(uci_ensemble, "LARGE_RECIPES", (Recipe(2), Recipe(3, 4.0)))
    results = uci_ensemble.run_ensemble("yacht", [1], data_dir)
    assert results[0]["recipe"] == "3 epochs, prior 4 and 0.3"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_recipe_decides_epochs_and_priors(data_dir: Path) -> None:
    data = stack_splits("yacht", [0], data_dir)
    ensemble = train(data, hidden=6, recipe=Recipe(2, 4.0, 1.0))
    assert ensemble.trainer.current_epoch == 2
    found = {(prior.scale, scale) for _, _, prior, _, scale in ensemble.prior.segments()}
    assert found == {(4.0, 4 / 2**0.5), (4.0, 4 / 6**0.5), (4.0, 4.0), (1.0, 1 / 6**0.5)}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_member_that_diverges_ends_the_run(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = stack_splits("yacht", [0, 1], data_dir)
    data.targets[1] = torch.nan
    monkeypatch.setattr(uci_ensemble.HeteroscedasticGaussian, "check", lambda *arguments: None)
    with pytest.raises(NonFiniteError, match=r"Members \[5, 6, 7, 8, 9\] diverged"):
        train(data, hidden=3, recipe=Recipe(1))


def test_the_program_prints_tables_and_keeps_its_figures(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data_dir)
    arguments = ["--method", "ensemble", "--sets", "yacht", "boston", "--splits", "2"]
    uci.main([*arguments, "--data-dir", str(data_dir), "--json", "new/figures.json"])

    text = Path("new/figures.json").read_text()
    assert str(data_dir) not in text
    result = json.loads(text)
    assert result["command"] == (
        "python -m benchmarks.uci --method ensemble --sets yacht boston --splits 2 "
        "--data-dir DIR --json new/figures.json"
    )
    assert {"torch", "pytorch-lightning", "lightning-bnn"} <= set(result["versions"])
    yacht = result["sets"]["yacht"]
    values = [one["log_likelihood"] for one in yacht["splits"]]
    assert yacht["log_likelihood"]["mean"] == pytest.approx(np.mean(values))
    assert yacht["log_likelihood"]["spread"] == pytest.approx(np.std(values, ddof=1) / 2**0.5)
    assert set(yacht["splits"][0]["validation"]) == set(map(str, SHORT))

    out = capsys.readouterr().out.splitlines()
    (heading,) = {line for line in out if line.startswith("  set")}
    assert heading.split("  ")[-1] == "deep ensemble 2017 (sd)"
    rows = [line.split() for line in out if line.startswith("  yacht")]
    assert [row[2:] for row in rows] == [
        ["-1.63±0.02", "-1.55±0.12", "-1.25±0.01", "-1.18±0.21"],
        ["1.02±0.05", "1.11±0.38", "0.67±0.05", "1.58±0.48"],
    ]
    here = yacht["log_likelihood"]
    assert rows[0][1] == f"{here['mean']:.2f}±{here['spread']:.2f}"
    assert "of 2 sets" in out[-1]


# ---------------------------------------------------------------- methods of one network


@pytest.mark.parametrize("noise", uci_single.LIKELIHOODS)
def test_one_networks_scores_are_in_the_unit_of_the_target(data_dir: Path, noise: str) -> None:
    values = np.loadtxt(data_dir / "yacht" / "data.txt")
    data = uci_single.read("yacht", 3, data_dir)
    posterior = uci_single.train("laplace", data, uci_single.Recipe(noise, 4))
    found = uci_single.score(posterior, data)

    rows, test = standard_split(ROWS, 3)
    mean, scale = values[rows].mean(0), values[rows].std(0)
    inputs = torch.tensor((values[test][:, :2] - mean[:2]) / scale[:2]).float()
    predictive = posterior.predict(inputs)
    means = predictive.means.double().numpy()[..., 0] * scale[2] + mean[2]
    sd = predictive.scales.double().expand(predictive.means.shape).numpy()[..., 0] * scale[2]
    z = (values[test][:, 2] - means) / sd
    log_likelihood = np.log(np.mean(np.exp(-0.5 * z**2) / (sd * math.sqrt(2 * math.pi)), 0)).mean()
    rmse = np.sqrt(np.square(values[test][:, 2] - means.mean(0)).mean())
    assert found == pytest.approx((log_likelihood, rmse), rel=1e-4)
    assert rmse > 2  # far from the standardised figure, which is below 1


@pytest.mark.parametrize("method", uci_single.STRATEGIES)
def test_a_recipe_decides_likelihood_and_length(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fits: list[tuple[str, str, int | None]] = []

    def fit(trainer: uci_single.pl.Trainer, strategy: uci_single.Strategy, loader: object) -> None:
        likelihood = type(strategy.likelihood).__name__
        fits.append((type(strategy).__name__, likelihood, trainer.max_epochs))

    monkeypatch.setattr(uci_single.pl.Trainer, "fit", fit)
    data = uci_single.read("yacht", 0, data_dir)  # 54 rows, two batches
    for noise, steps in (("one noise", 6), ("noise of inputs", 1)):
        uci_single.train(method, data, uci_single.Recipe(noise, steps))
    name = uci_single.STRATEGIES[method].__name__
    assert fits == [(name, "Gaussian", 3), (name, "HeteroscedasticGaussian", 1)]


@pytest.mark.parametrize("large", [False, True])
def test_one_network_chooses_on_validation_rows_and_is_trained_anew_on_all(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    Recipe = uci_single.Recipe
    recipes = (Recipe("one noise", 1), Recipe("one noise", 2))
    monkeypatch.setattr(uci_single, "LARGE_RECIPES" if large else "RECIPES", recipes)
    monkeypatch.setattr(uci_single, "LARGE", 53 if large else 54)
    seen: list[tuple[int, int, int]] = []

    def made_up(recipe: Recipe, data: uci_single.UCIRegression) -> uci_ensemble.Score:
        held_out = len(data.splits.validation)
        seen.append((len(data.splits.train), held_out, recipe.steps))
        better = {0: 1, 1: 2}[data.split]  # the steps that validate best, by split
        return uci_ensemble.Score(
            float(better == recipe.steps) if held_out else 10.0 * data.split + recipe.steps, 0.5
        )

    monkeypatch.setattr(uci_single, "train", lambda method, data, recipe: recipe)
    monkeypatch.setattr(uci_single, "score", made_up)
    results = uci_single.run_single("laplace", "yacht", [0, 1], data_dir)
    assert [one["log_likelihood"] for one in results] == [1.0, 12.0]
    assert [one["recipe"] for one in results] == [str(recipe) for recipe in recipes]
    assert results[1]["validation"] == {str(recipes[0]): 0.0, str(recipes[1]): 1.0}
    chosen = [(43, 11, 1), (43, 11, 2)]
    assert seen == [*chosen, (54, 0, 1), *chosen, (54, 0, 2)]

    # with one recipe there is nothing to choose
    seen.clear()
    monkeypatch.setattr(uci_single, "LARGE_RECIPES" if large else "RECIPES", recipes[1:])
    (result,) = uci_single.run_single("laplace", "yacht", [0], data_dir)
    assert (result["recipe"], result["validation"]) == (str(recipes[1]), {})
    assert seen == [(54, 0, 2)]


@pytest.mark.parametrize("method", uci_single.STRATEGIES)
def test_the_program_runs_methods_of_one_network(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    monkeypatch.chdir(data_dir)
    recipes = tuple(uci_single.Recipe(noise, 2) for noise in uci_single.LIKELIHOODS)
    monkeypatch.setattr(uci_single, "RECIPES", recipes)
    arguments = ["--method", method, "--sets", *uci.SEVEN, "--splits", "1", "--json", "f.json"]
    uci.main([*arguments[:3], "yacht", "boston", *arguments[-4:], "--data-dir", str(data_dir)])
    result = json.loads(Path("f.json").read_text())
    assert (
        set(result["sets"])
        == set(result["at_least_published_deep_ensemble"])
        == {"yacht", "boston"}
    )
    (split,) = result["sets"]["yacht"]["splits"]
    assert set(split["validation"]) == set(map(str, recipes))
    assert math.isfinite(split["log_likelihood"])
    assert uci_single.STRATEGIES[method].__name__ in result["settings"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("log-likelihood at least")


def test_one_split_has_no_standard_error() -> None:
    assert uci.mean_and_error([2.5]) == Figure(2.5, None)
    assert uci.cell(Figure(2.5, None)) == "2.50"


def test_the_bar_counts_the_seven_sets(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {name: published(DEEP_ENSEMBLE, "log_likelihood", name) for name in uci.NAMES}
    verdicts = uci.judge(figures)
    assert all(verdicts.values())  # as good counts as reached
    uci.print_verdict(verdicts)
    assert capsys.readouterr().out.startswith("\npass  log-likelihood at least the deep ensemble")

    # the other two sets do not make up for three of the seven
    short = verdicts | dict.fromkeys(("boston", "wine", "power"), False)
    uci.print_verdict(short)
    out = capsys.readouterr().out
    assert out.startswith("\nFAIL")
    assert "on 4 of 7 sets (at least 5); not on boston, power, wine" in out

    uci.print_verdict(verdicts, bar=False)  # one network is not judged by five
    assert capsys.readouterr().out.startswith("\nlog-likelihood at least")

    uci.print_verdict({"boston": True, "wine": False})
    assert capsys.readouterr().out.startswith("\nlog-likelihood at least")  # no verdict on a part


def test_every_published_row_has_every_set() -> None:
    for source in SOURCES:
        assert set(source.log_likelihood) == set(source.rmse) == set(uci.NAMES)


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"Expected .*yacht/data.txt.* not there. Pass data_dir="):
        uci.main(["--sets", "yacht", "--data-dir", str(tmp_path / "nowhere")])
    for arguments, message in (
        (["--sets", "bsoton"], "invalid choice: 'bsoton'"),
        (["--method", "prayer"], "invalid choice: 'prayer'"),
        (["--splits", "21"], "--splits is 1 to 20; got 21"),
    ):
        with pytest.raises(SystemExit):
            uci.main(arguments)
        assert message in capsys.readouterr().err
