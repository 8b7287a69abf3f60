"""Files that version 0.1.0 wrote still load, predict the same, and resume to the same end.

What they were made with is in ``cases.py``. Numbers that are only read must be equal bit for bit.
What is computed from them may differ by TOLERANCE: where kernels are chosen by the processor, or
sums have another order, the last bits of float32 differ. A lost mask, a lost generator or an
optimizer's lost state changes predictions here by 1e-3 or more.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD

from lightning_bnn import SGMCMC, DrawsPosterior, Posterior, cli
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch import StoredRun, launch, load_run
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.samplers import SGLD
from tests.launch.conftest import local_ray  # noqa: F401
from tests.release_0_1.cases import (
    EXPECTED,
    FILES,
    FITS,
    POSTERIORS,
    Plain,
    checkpoint,
    launched_data,
    launched_members,
    launched_trainer,
    mean_weights,
    mlp,
    predictions,
)

TOLERANCE = 2e-5


def expected(prefix: str) -> dict[str, Tensor]:
    """The numbers that version 0.1.0 gave under a name."""
    kept = load_file(EXPECTED)
    return {key.removeprefix(prefix): kept[key] for key in kept if key.startswith(prefix)}


def assert_close(found: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, kept[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def can_compile() -> bool:
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    return compiler is not None and os.environ.get("LIGHTNING_BNN_COMPILE") != "0"


# -------------------------------------------------------------------- posteriors


def load(name: str) -> Posterior:
    """A kept posterior, or that of a kept run."""
    if name.startswith("launched"):
        return load_run(FILES / name).posterior(POSTERIORS[name]())
    return Posterior.load(FILES / name, POSTERIORS[name]())


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_loads_predicts_and_is_saved_again(name: str, tmp_path: Path) -> None:
    posterior = load(name)
    kept = expected(f"posterior.{name}.")
    for key, weight in mean_weights(posterior).items():
        assert torch.equal(weight, kept[f"weights.{key}"]), key
    assert_close(predictions(posterior), kept)
    posterior.save(tmp_path)
    again = Posterior.load(tmp_path, POSTERIORS[name]())
    assert type(again) is type(posterior)
    assert_close(predictions(again), kept)


@pytest.mark.parametrize(("name", "version"), [("gaussian", 1), ("sparse", 2)])
def test_both_versions_of_the_storage_are_here(name: str, version: int) -> None:
    assert json.loads((FILES / name / "manifest.json").read_text())["version"] == version


def test_a_compact_posterior_takes_the_small_network_too() -> None:
    posterior = Posterior.load(FILES / "compact", mlp(10))
    assert_close(predictions(posterior), expected("posterior.compact."))


# -------------------------------------------------------------------- checkpoints


@pytest.mark.filterwarnings("ignore:The chains sampled at another temperature")
@pytest.mark.parametrize("name", FITS)
def test_a_checkpoint_resumes_to_the_same_end(name: str, tmp_path: Path) -> None:
    fit = FITS[name]
    if fit.compiled and not can_compile():
        pytest.skip("its noise was made by the compiled generator, and there is no C compiler")
    if name == "sghmc":
        # with the draws after the checkpoint, which are dropped and taken again
        shutil.copytree(FILES / "stream", tmp_path / "stream")
    module, callbacks = fit.run(tmp_path, checkpoint(name, tmp_path))
    kept, found = expected(f"fit.{name}."), fit.end(module, callbacks)
    assert found.keys() == {key for key in kept if not key.startswith("loaded_")}
    assert_close(found, kept)


@pytest.mark.parametrize("name", [name for name, fit in FITS.items() if fit.module is not Plain])
def test_a_checkpoint_loads_into_a_strategy(name: str, tmp_path: Path) -> None:
    fit = FITS[name]
    path = checkpoint(name, tmp_path)
    strategy: Any = fit.module.load_from_checkpoint(path, **fit.options(), weights_only=True)
    if isinstance(strategy, SGMCMC):  # which 0.1 gave without the draws that it had collected
        states = unstack(strategy.current_draws())
        found = predictions(DrawsPosterior(strategy.net, strategy.likelihood, states, chains=2))
    else:
        found = predictions(strategy.posterior())
    assert_close({f"loaded_{key}": t for key, t in found.items()}, expected(f"fit.{name}."))


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("psgld", {"sampler": partial(SGLD, lr=1e-3)}, "sampler='PSGLD'"),
        ("sghmc", {"chains": [0, 3]}, r"chains=\[0, 1\]"),
        ("variants", {"members": [0, 3]}, r"members=\[0, 1\]"),
        ("snapshots", {"snapshots": 2}, "snapshots=3"),
        ("snapshots", {"optimizer": partial(SGD, lr=0.1)}, r"optimizer=\['Adam'\]"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    name: str, other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fit = FITS[name]
    changed = replace(fit, options=lambda: {**fit.options(), **other})
    with pytest.raises(ConfigurationError, match=said):
        changed.run(tmp_path, checkpoint(name, tmp_path))


# -------------------------------------------------------------------- launched runs


@pytest.mark.parametrize("name", ["launched_members", "launched_chains"])
def test_the_storage_of_a_launched_run_is_read(name: str, capsys: pytest.CaptureFixture) -> None:
    run = StoredRun(FILES / name)
    results = run.results()
    assert [(one.member, one.status, one.attempt, one.steps) for one in results] == [
        (member, "done", 1, 4) for member in (0, 1)
    ]
    for one in results:
        assert Posterior.load(str(one.uri), mlp())
    cli.main(["status", "--storage", str(FILES / name), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert [unit["state"] for unit in said["units"]] == ["done"] * len(run.units())


def test_swag_of_launched_members_is_read() -> None:
    posterior = StoredRun(FILES / "launched_members").posterior(mlp(), kind="swag")
    assert_close(predictions(posterior), expected("launched_swag."))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_launched_run_that_was_broken_off_is_finished(tmp_path: Path) -> None:
    """From its checkpoint, whose weights are not those of a run that begins anew."""
    storage = tmp_path / "run"
    shutil.copytree(FILES / "launched_broken", storage)
    run = launch(
        launched_members, launched_data, 1, storage=storage, trainer=launched_trainer(),
        allow_open_cluster=True,
    )  # fmt: skip
    (result,) = run.wait()
    assert result.status == "done"
    assert result.attempt > 1
    kept = expected("launched_broken.")
    assert_close(predictions(run.posterior()), kept)
    swag = predictions(run.posterior(kind="swag"))
    assert_close({f"swag_{key}": tensor for key, tensor in swag.items()}, kept)
