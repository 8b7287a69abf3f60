"""``lightning-bnn launch`` from a configuration, and what it says of chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.cli import main as command_line
from lightning_bnn.commands.launch import ConfigurationRecipe, main, read_recipe
from lightning_bnn.commands.status import main as status
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch import LaunchedRun, launch, load_run
from lightning_bnn.launch.run import launch_recipe
from lightning_bnn.launch.saving import member_ids
from lightning_bnn.launch.stored import diagnose_chains
from lightning_bnn.nets import MLP
from lightning_bnn.posteriors import MixturePosterior
from tests.launch.faults import wait_for
from tests.launch.programs import Slowly, fit_by_hand, make_chains, make_data, make_ensemble
from tests.launch.simulated import Threads

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def chains(tmp_path: Path) -> str:
    """The place of a configuration of chains that take no time."""
    configuration = yaml.safe_load((CONFIGS / "toy_sghmc.yaml").read_text())
    options = configuration["model"]["init_args"]
    sampler = {"class_path": "lightning_bnn.samplers.SGHMC", "init_args": {"lr": 5e-4}}
    options |= {"warm_up": 5, "sampler": sampler}
    trainer = configuration["trainer"]
    trainer |= {"max_epochs": 30, "check_val_every_n_epoch": 30}
    trainer["callbacks"] = trainer["callbacks"][:1]
    trainer["callbacks"][0]["init_args"] = {"burn_in": 10, "every": 5, "dirpath": "draws"}
    place = tmp_path / "chains.yaml"
    place.write_text(yaml.safe_dump(configuration))
    return str(place)


@pytest.mark.usefixtures("local_ray")
def test_chains_from_a_configuration(
    chains: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = str(tmp_path / "run")
    words = ["--config", chains, "--members", "2", "--storage", storage, "--allow-open-cluster"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "member 0 done in" in said
    assert "member 1 done in" in said
    assert "2 chains of 10 draws" in said
    assert "R-hat" in said
    assert f"The posterior of 2 members is in {storage}" in said
    components = load_run(storage).posterior(MLP(1, [20, 20], 1, torch.nn.Tanh)).components
    assert [len(one) for one in components] == [10, 10]
    # the same from any machine; and once more, nothing is left to do
    assert status(["--storage", storage, "--diagnose", "--config", chains]) == 0
    assert "2 chains of 10 draws" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert command_line(["test", "--config", chains, "--posterior", storage]) == 0
    assert "test_nll" in capsys.readouterr().out
    assert main(words) == 0
    records = load_run(storage).records
    assert [records.attempts(unit) for unit in records.units()] == [[1], [1]]


def test_report_and_prune_take_the_storage_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trainer.max_epochs", "1", "--trainer.callbacks", "null"]
    recipe, seed, _ = read("digits_ensemble", *options)
    storage, data = str(tmp_path / "run"), str(CONFIGS / "data" / "digits.yaml")
    run = launch_recipe(
        recipe, Threads(), 2, storage=storage, stack=2, seed=seed, on_failure="raise",
        min_members=1, retries=0, checkpoint_seconds=60.0, lost_after=60.0,
    )  # fmt: skip
    run.records.files.put("config.yaml", recipe.text.encode())
    run.wait()
    given = ["--posterior", storage, "--data", data]
    page = str(tmp_path / "report.html")
    assert command_line(["report", *given, "--out", page]) == 0, capsys.readouterr().err
    small = str(tmp_path / "small")
    assert command_line(["prune", *given, "--fraction", "0.5", "--out", small]) == 0
    assert f"The pruned posterior is in {small}" in capsys.readouterr().out
    assert command_line(["report", "--posterior", small, "--data", data, "--out", page]) == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "the configuration names none. Pass --members N"),
        (["--members", "2", "--stack", "2"], "--stack 2: the strategy of the configuration trains"),
        (["--members", "0"], "members= is a whole number, at least 1; got 0"),
    ],
)
def test_what_is_refused(words: list[str], match: str, tmp_path: Path) -> None:
    config = ["--config", str(CONFIGS / "digits_vi.yaml"), "--storage", str(tmp_path / "run")]
    with pytest.raises(ConfigurationError, match=match):
        main([*config, *words])
    assert not (tmp_path / "run").exists()


def slow_trainer(members: list[int]) -> dict[str, Any]:
    seconds = 0.0 if members[0] == 0 else 0.5
    return {
        "max_epochs": 50,
        "callbacks": [SampleCollector(burn_in=0, every=1, dirpath="draws"), Slowly(seconds)],
    }


@pytest.mark.usefixtures("local_ray")
def test_chains_are_compared_while_they_run(tmp_path: Path) -> None:
    run = launch(
        make_chains, make_data, 3, storage=tmp_path, trainer=slow_trainer, seed=0,
        allow_open_cluster=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(_drawn(run)) >= 2, "draws of two chains")
        diagnosis = run.diagnose()
        assert diagnosis.chains == 2
        assert 4 <= diagnosis.draws < 200
        assert any("1 of 3 chains have fewer than 4 draws" in note for note in diagnosis.notes)
        with pytest.raises(ConfigurationError, match=r"pass --config FILE.* launched from"):
            status(["--storage", str(tmp_path), "--diagnose"])
    finally:
        run.cancel()


def _drawn(run: LaunchedRun) -> list[int]:
    """How many draws the chains have that have some."""
    try:
        components = run.posterior(running=True).components
    except ConfigurationError:
        return []
    return [len(one) for one in components if len(one) >= 4]  # type: ignore[arg-type]


def test_members_that_are_no_chains() -> None:
    posterior = MixturePosterior([fit_by_hand(make_ensemble, 0, max_epochs=1)])
    with pytest.raises(ConfigurationError, match=r"No member of the run has 4 draws.*no chains"):
        diagnose_chains(posterior, 1, torch.zeros(3, 2))


# ------------------------------------------------------------------------------- the recipe


def read(name: str, *options: str) -> tuple[ConfigurationRecipe, int, int | None]:
    return read_recipe(["--config", str(CONFIGS / f"{name}.yaml"), *options])


def test_an_ensemble_trains_the_members_that_it_is_told_to(tmp_path: Path) -> None:
    recipe, seed, members = read("digits_ensemble", "--trainer.max_epochs", "2")
    assert (recipe.ids_option, seed, members) == ("members", 0, 10)
    parts = recipe.build([3, 4], 7, str(tmp_path))
    assert member_ids(parts.strategy) == (3, 4)
    assert parts.strategy.seed == 7  # type: ignore[attr-defined]
    assert parts.trainer["max_epochs"] == 2
    assert "devices" not in parts.trainer  # a default: the launcher decides it


def test_chains_and_restarts(tmp_path: Path) -> None:
    recipe, _, chains = read("digits_sgmcmc")
    assert (recipe.ids_option, chains) == ("chains", 4)
    assert member_ids(recipe.build([5], 0, str(tmp_path)).strategy) == (5,)
    recipe, _, members = read("digits_vi", "--model.init_args.seed", "3")
    assert (recipe.ids_option, members) == (None, None)
    first, second = (recipe.build([0], 0, str(tmp_path)).strategy for _ in range(2))
    assert first.noise.stream.seed != second.noise.stream.seed  # type: ignore[attr-defined]


def test_what_must_not_change_between_two_starts() -> None:
    first, _, _ = read("digits_ensemble")
    longer, _, _ = read("digits_ensemble", "--trainer.max_epochs", "99")
    more, _, _ = read("digits_ensemble", "--model.init_args.members", "3")
    other, _, _ = read("digits_ensemble", "--data.init_args.batch_size", "32")
    assert first.description() == longer.description() == more.description()
    assert first.description() != other.description()


def test_without_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match="launch needs a strategy, and none is named"):
        read_recipe([])
