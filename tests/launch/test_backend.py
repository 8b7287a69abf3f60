"""The contract of a backend: which errors are final, and runs without Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn.commands.status import main as status
from lightning_bnn.errors import ConfigurationError, FencedError, LaunchError, NonFiniteError
from lightning_bnn.launch import (
    LaunchedRun,
    MemberResult,
    Outcome,
    launch,
    load_posterior,
    load_run,
)
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.faults import Poison, Raise, attempt_number
from tests.launch.programs import (
    fit_by_hand,
    make_data,
    make_ensemble,
    make_net,
    same_weights,
)
from tests.launch.simulated import Threads

start = partial(launch, make_ensemble, make_data, seed=0)


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (KeyError("name"), True),
        (ConfigurationError("cannot be"), True),
        (NonFiniteError("the loss is nan"), True),
        (RuntimeError("CUDA out of memory"), False),
        (FencedError("given up"), False),
    ],
    ids=repr,
)
def test_mistakes_are_final_and_accidents_are_not(error: Exception, final: bool) -> None:
    outcome = Outcome.of_error(error)
    assert outcome.result is None
    assert outcome.final is final
    assert type(error).__name__ in str(outcome.error)


def test_a_run_on_another_backend_is_the_same(tmp_path: Path) -> None:
    run = start(2, storage=tmp_path, trainer={"max_epochs": 2}, backend=Threads())
    posterior = run.posterior()
    for member, component in enumerate(posterior.components):
        assert same_weights(component, fit_by_hand(make_ensemble, member, max_epochs=2))
    inputs = torch.randn(5, 2)
    for again in (load_run(tmp_path).posterior(make_net()), load_posterior(tmp_path, make_net())):
        assert torch.equal(again.predict(inputs).mean, posterior.predict(inputs).mean)
    uri = str(run.wait()[1].uri)
    assert same_weights(load_posterior(uri, make_net()), posterior.components[1])


# ------------------------------------------------------------------------------- members that fail


def poisoned_trainer(members: list[int], step: int = 3) -> dict[str, Any]:
    callbacks = [Poison(step, row=members.index(1))] if 1 in members else []
    return {"max_epochs": 2, "callbacks": callbacks}


def test_one_member_that_diverges_is_not_tried_again_and_the_others_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, unit = RunRecords(tmp_path), Unit((1,))

    def go(**options: Any) -> LaunchedRun:
        given = {"trainer": poisoned_trainer, "backend": Threads(), **options}
        return start(3, storage=tmp_path, **given)

    run = go(on_failure="skip")
    results = run.wait()
    assert [result.status for result in results] == ["done", "failed", "done"]
    assert [result.attempt for result in results] == [1, 1, 1]
    assert "NonFiniteError" in str(results[1].error)
    with pytest.warns(UserWarning, match=r"is of 2 of 3 members; none is there of 1\."):
        assert len(run.posterior().components) == 2
    # anybody can read why, with the whole traceback beside it
    assert status(["--storage", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 3 members done, 1 failed"
    assert any(line.startswith("member 1 failed: ") and "NonFiniteError" in line for line in lines)
    error = (Path(records.folder(unit, 1)) / "error.txt").read_text()
    assert "Traceback" in error
    assert "NonFiniteError" in error
    # started again, it is the only one that runs
    for options in ({"on_failure": "skip", "min_members": 3}, {}):
        with pytest.raises(LaunchError, match="2 members are done and 1 are not; member 1 failed"):
            go(**options).wait()
    assert [len(records.attempts(unit)) for unit in records.units()] == [1, 3, 1]
    with pytest.warns(UserWarning, match="is of 2 of 3 members"):
        assert len(load_run(tmp_path).posterior(make_net()).components) == 2
    # mended, it is done, and nothing is said of before
    assert [result.ok for result in go(trainer={"max_epochs": 2}).wait()] == [True] * 3
    assert status(["--storage", str(tmp_path)]) == 0
    assert "failed" not in capsys.readouterr().out


def test_divergence_in_the_first_step_does_not_end_the_run(tmp_path: Path) -> None:
    trainer = partial(poisoned_trainer, step=0)
    run = start(3, storage=tmp_path, trainer=trainer, backend=Threads())
    with pytest.raises(LaunchError, match=r"2 members are done and 1 are not"):
        run.wait()
    assert [result.member for result in load_run(tmp_path).results()] == [0, 2]


@pytest.mark.filterwarnings("ignore::UserWarning")  # which says that it has diverged
def test_a_stack_with_a_diverged_member_gives_the_others(tmp_path: Path) -> None:
    go = partial(start, 4, stack=2, storage=tmp_path, trainer=poisoned_trainer)
    run = go(on_failure="skip", backend=Threads())
    results = run.wait()
    assert [result.status for result in results] == ["done", "diverged", "done", "done"]
    assert results[1].uri is None
    assert [result.attempt for result in results] == [1, 1, 1, 1]
    assert len(run.posterior().components) == 3
    # it is done, with what it gave
    with pytest.raises(LaunchError, match=r"member 1 diverged: its weights are not finite"):
        go(backend=Threads()).wait()
    assert RunRecords(tmp_path).attempts(Unit((0, 1))) == [1]


def make_mistake(members: list[int], seed: int) -> Any:
    return make_ensemble(members, seed=seed, no_such_option=1)  # type: ignore[call-arg]


def test_a_mistake_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    run = launch(make_mistake, make_data, 5, storage=tmp_path, trainer={}, backend=Threads())
    results: list[MemberResult] = []
    with pytest.raises(LaunchError, match=r"member 0 failed: TypeError.*no_such_option"):
        results.extend(run.as_completed())
    assert [(one.member, one.status, one.attempt) for one in results] == [(0, "failed", 1)]
    text = (Path(RunRecords(tmp_path).folder(Unit((0,)), 1)) / "error.txt").read_text()
    assert "in make_mistake" in text
    assert "no_such_option" in text


def stumbling_trainer(members: list[int], folder: str) -> dict[str, Any]:
    errors = {1: RuntimeError("an accident"), 2: OSError("the disk is full")}
    number = attempt_number(folder)
    callbacks = [Raise(number, errors[number])] if number in errors else []
    return {"max_epochs": 1, "callbacks": callbacks}


def test_accidents_are_tried_again_and_leave_their_errors(tmp_path: Path) -> None:
    run = start(1, storage=tmp_path, trainer=stumbling_trainer, retries=2, backend=Threads())
    (result,) = run.wait()
    assert (result.attempt, result.steps) == (3, 4)
    folders = [Path(RunRecords(tmp_path).folder(Unit((0,)), attempt)) for attempt in (1, 2, 3)]
    assert "RuntimeError: an accident" in (folders[0] / "error.txt").read_text()
    assert "OSError: the disk is full" in (folders[1] / "error.txt").read_text()
    assert not (folders[2] / "error.txt").exists()
