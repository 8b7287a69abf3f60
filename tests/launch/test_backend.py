"""The contract of a backend: which errors are final, and runs without Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn.commands.status import main as status
from lightning_bnn.errors import ConfigurationError, FencedError, LaunchError, NonFiniteError
from lightning_bnn.launch import Outcome, launch, load_posterior, load_run
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.faults import Poison, Raise
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
        (TypeError("no such option"), True),
        (ConfigurationError("cannot be"), True),
        (NonFiniteError("the loss is nan"), True),
        (KeyError("name"), True),
        (OSError("the disk is full"), False),
        (RuntimeError("CUDA out of memory"), False),
        (MemoryError(), False),
        (FencedError("given up"), False),
    ],
    ids=repr,
)
def test_mistakes_are_final_and_accidents_are_not(error: Exception, final: bool) -> None:
    outcome = Outcome.of_error(error)
    assert outcome.result is None
    assert outcome.final is final
    assert type(error).__name__ in str(outcome.error)


def test_a_member_that_diverges_in_its_first_step_says_nothing_of_the_others() -> None:
    assert Outcome.of_error(TypeError(), early=True).early
    assert not Outcome.of_error(NonFiniteError(), early=True).early


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


def failing_trainer(members: list[int]) -> dict[str, Any]:
    faults: dict[int, list[Any]] = {
        1: [Poison(3)],
        2: [Raise(2, ValueError("3 columns were expected; got 5"))],
    }
    return {"max_epochs": 1, "callbacks": faults.get(members[0], [])}


def test_status_says_why_members_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(3, storage=tmp_path, trainer=failing_trainer, backend=Threads())
    with pytest.raises(LaunchError, match="1 members are done and 2 are not"):
        run.wait()
    assert status(["--storage", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 3 members done, 2 failed"
    assert any(line.startswith("member 1 failed: ") and "NonFiniteError" in line for line in lines)
    assert "member 2 failed: ValueError: 3 columns were expected; got 5" in lines
    # the whole traceback lies beside it
    error = Path(RunRecords(tmp_path).folder(Unit((2,)), 1)) / "error.txt"
    assert "Traceback" in error.read_text()
    # launched again, they are tried again, and nothing is said of before
    calm = start(3, storage=tmp_path, trainer={"max_epochs": 1}, backend=Threads())
    assert [result.ok for result in calm.wait()] == [True] * 3
    assert status(["--storage", str(tmp_path)]) == 0
    assert "failed" not in capsys.readouterr().out
