"""Launched members are those of serial runs with the same seeds, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import RichProgressBar

from lightning_bnn import AveragePosterior, MixturePosterior, Posterior
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch import launch, load_run
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.native import library
from lightning_bnn.posteriors import LowRankPosterior
from tests.launch.programs import (
    fit_by_hand,
    make_chains,
    make_data,
    make_dropout,
    make_ensemble,
    make_net,
    make_variational,
    same_weights,
)
from tests.launch.simulated import Threads
from tests.native.compiler import needs_compiler

pytestmark = pytest.mark.usefixtures("local_ray")

start = partial(launch, allow_open_cluster=True, seed=0)
TRAINER: dict[str, Any] = {"max_epochs": 3}


def test_members_equal_those_trained_by_hand(tmp_path: Path) -> None:
    run = start(make_ensemble, make_data, 4, storage=tmp_path, trainer=TRAINER)
    results = list(run.as_completed())
    assert sorted(result.member for result in results) == [0, 1, 2, 3]
    assert all(result.ok and result.attempt == 1 and result.steps == 12 for result in results)
    by_hand = [fit_by_hand(make_ensemble, member, max_epochs=3) for member in range(4)]
    posterior = run.posterior()
    for mine, theirs in zip(posterior.components, by_hand, strict=True):
        assert same_weights(mine, theirs)
    inputs = torch.randn(5, 2)
    expected = MixturePosterior(by_hand).predict(inputs)
    assert torch.equal(posterior.predict(inputs).outputs, expected.outputs)
    # each result says where its member is
    for result in results:
        one = Posterior.load(str(result.uri), make_net())
        assert same_weights(one, by_hand[result.member])


def test_chains_equal_those_run_by_hand_draw_for_draw(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {**TRAINER, "callbacks": [SampleCollector(every=2, dirpath="draws")]}

    run = start(make_chains, make_data, 4, storage=tmp_path, trainer=options())
    results = run.wait()
    assert [result.member for result in results] == [0, 1, 2, 3]
    posterior = run.posterior()
    for member, mine in enumerate(posterior.components):
        callbacks = [SampleCollector(every=2)]
        theirs = fit_by_hand(make_chains, member, max_epochs=3, callbacks=callbacks)
        assert len(mine) == len(theirs) == 6  # type: ignore[arg-type]
        assert same_weights(mine, theirs, count=6)
    # across chains of different tasks
    diagnosis = run.diagnose(torch.randn(8, 2))
    assert (diagnosis.chains, diagnosis.draws) == (4, 6)


def test_restarts_of_a_strategy_without_numbers_and_swag(tmp_path: Path) -> None:
    trainer = {**TRAINER, "callbacks": [SWAGMoments(start=0, lr=None)]}
    run = start(make_variational, make_data, 2, storage=tmp_path, trainer=trainer)
    run.wait()
    first, second = run.posterior().components
    assert not same_weights(first, second)
    by_hand = fit_by_hand(make_variational, 1, max_epochs=3)
    assert torch.equal(second.mean["0.weight"], by_hand.mean["0.weight"])  # type: ignore[attr-defined]
    swag = run.posterior(kind="swag")
    assert all(isinstance(part, LowRankPosterior) for part in swag.components)


def test_members_without_a_posterior_over_weights_are_averaged(tmp_path: Path) -> None:
    run = launch(
        make_dropout, make_data, 2, storage=tmp_path, trainer=TRAINER, backend=Threads(), seed=0
    )
    run.wait()
    posterior = run.posterior()
    assert isinstance(posterior, AveragePosterior)
    assert posterior.weights == [0.5, 0.5]
    inputs = torch.randn(5, 2)
    by_hand = AveragePosterior(
        [fit_by_hand(make_dropout, member, max_epochs=3) for member in (0, 1)]
    )
    assert torch.equal(posterior.predict(inputs).outputs, by_hand.predict(inputs).outputs)
    assert len(posterior.predict(inputs, draws=6).outputs) == 6
    # it is a posterior as all others: read from the run, and saved by itself
    stored = load_run(tmp_path).posterior(make_net())
    stored.save(tmp_path / "saved")
    loaded = Posterior.load(tmp_path / "saved")
    assert torch.equal(loaded.predict(inputs).outputs, posterior.predict(inputs).outputs)


def test_a_stack_gives_every_member_the_same_weight(tmp_path: Path) -> None:
    trainer = {**TRAINER, "callbacks": [SWAGMoments(start=0, lr=None)]}
    run = start(make_ensemble, make_data, 5, stack=2, storage=tmp_path, trainer=trainer)
    results = run.wait()
    assert [result.member for result in results] == [0, 1, 2, 3, 4]
    assert len({result.uri for result in results}) == 5
    assert [unit.members for unit in run.units()] == [(0, 1), (2, 3), (4,)]
    assert len(run.posterior().components) == 5
    assert len(run.posterior(kind="swag").components) == 5
    # the last is alone in its unit, so that it is what it would be by hand
    by_hand = fit_by_hand(make_ensemble, 4, max_epochs=3)
    assert same_weights(run.posterior().components[4], by_hand)


def test_a_run_that_is_done_is_read_and_not_run_again(tmp_path: Path) -> None:
    go = partial(start, make_ensemble, make_data, storage=tmp_path)
    trainer = {**TRAINER, "log_every_n_steps": 1}
    run = go(2, trainer=trainer)
    results = run.wait()
    folder = tmp_path / "units" / "00000" / "attempt-0001"
    assert (folder / "logs" / "metrics.csv").is_file()
    assert not list(folder.rglob("*.ckpt"))  # gone with the commit
    # from its storage, without Ray
    stored = load_run(tmp_path)
    assert stored.results() == results
    assert same_weights(stored.posterior(make_net()), run.posterior(), count=2)
    with pytest.raises(ConfigurationError, match="no posterior of the kind 'swag'"):
        stored.posterior(make_net(), kind="swag")
    # what is another run is refused
    with pytest.raises(ConfigurationError, match=r"holds a run with seed=0; this one has seed=1"):
        launch(make_ensemble, make_data, 2, storage=tmp_path, trainer=trainer, seed=1,
               allow_open_cluster=True)  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"bnn='tests.*make_ensemble'"):
        start(make_chains, make_data, 2, storage=tmp_path, trainer=trainer)
    with pytest.raises(ConfigurationError, match="units="):
        go(2, stack=2, trainer=trainer)
    # the same again runs nothing, and with more members only those
    again = go(2, trainer=trainer)
    assert again.missing() == []
    assert [result.member for result in again.as_completed()] == [0, 1]
    more = go(3, trainer=trainer)
    assert more.missing() == [Unit((2,))]
    assert [result.member for result in more.wait()] == [0, 1, 2]
    assert [RunRecords(tmp_path).attempts(unit) for unit in more.units()] == [[1], [1], [1]]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"resources": {"GPU": 1}}, LaunchError, r"it needs CPU 1, GPU 1, .* have: CPU 2"),
        ({"resources": {"CPU": 64}}, LaunchError, "it needs CPU 64"),
        ({"devices": 5}, LaunchError, "each of its 5 devices needs CPU 1"),
        ({"resources": {"GPU": 2}}, ConfigurationError, "use devices="),
        ({"resources": {"CPU": -1}}, ConfigurationError, "at least 0; got -1"),
        ({"on_failure": "ignore"}, ConfigurationError, "'raise' or 'skip'; got 'ignore'"),
        ({"min_members": 3}, ConfigurationError, "min_members=3 of members=2"),
        ({"retries": -1}, ConfigurationError, "retries= is a whole number, at least 0"),
        ({"stack": 0}, ConfigurationError, "stack= is a whole number"),
        ({"lost_after": 0}, ConfigurationError, "lost_after= is a number greater than 0; got 0"),
        ({"trainer": {"devices": 2}}, ConfigurationError, "trainer= has devices=2, which the"),
        ({"storage": "/proc/no"}, ConfigurationError, "'/proc/no' cannot be written: FileNotFound"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    options = {"storage": tmp_path, "trainer": TRAINER, **options}
    with pytest.raises(error, match=match):
        start(make_ensemble, make_data, 2, **options)
    assert not list(tmp_path.iterdir())


def test_where_the_driver_has_no_data_and_other_epochs_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "data"

    def make_stored_data() -> Any:
        assert file.read_text() == "here"
        return make_data()

    file.write_text("here")
    # as in a configuration of a fit on one machine
    trainer = {**TRAINER, "devices": 1, "num_nodes": 1, "callbacks": [RichProgressBar()]}
    go = partial(start, make_ensemble, make_stored_data, 2, storage=tmp_path / "run")
    run = go(trainer=trainer)
    run.wait()
    file.unlink()
    assert len(run.posterior().components) == 2
    with pytest.warns(UserWarning, match=r"member 0 is done and was trained with max_epochs=3"):
        again = go(trainer={**trainer, "max_epochs": 9})
    assert [result.steps for result in again.wait()] == [12, 12]


def test_a_stack_needs_to_know_its_members(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give it the argument members"):
        start(make_variational, make_data, 4, stack=2, storage=tmp_path, trainer=TRAINER)

    def forgets(members: list[int], seed: int) -> Any:
        return make_ensemble([0, 1], seed)

    run = start(forgets, make_data, 4, stack=2, storage=tmp_path / "run", trainer=TRAINER)
    with pytest.raises(LaunchError, match=r"asked for the members \[2, 3\] and made .* \[0, 1\]"):
        run.wait()


def test_an_open_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has no token authentication"):
        launch(make_ensemble, make_data, 1, storage=tmp_path, trainer=TRAINER)


@needs_compiler
def test_a_run_resumed_with_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = library.noise_source()
    go = partial(
        launch, make_ensemble, make_data, storage=tmp_path, backend=Threads(), trainer=TRAINER
    )
    go(members=1).wait()
    assert [result["noise"] for result in load_run(tmp_path).committed().values()] == [noise]
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    library.load.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"member 0 is done .* noise from compiled .* PyTorch"):
            run = go(members=2)
        run.wait()
    finally:
        library.load.cache_clear()
    noises = [result["noise"] for result in load_run(tmp_path).committed().values()]
    assert noises == [noise, "PyTorch"]
