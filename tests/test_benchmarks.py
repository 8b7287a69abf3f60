"""The benchmarks run, and judge as they say. No test here looks at a measured time."""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from benchmarks import ensemble_step, predict_step, sgmcmc_step
from benchmarks.ensemble_peers.contender import Network as EnsembleNetwork
from benchmarks.sampler_peers.contender import Library, Network
from benchmarks.sgmcmc_step import PEERS, SEQUENTIAL, STACKED

TINY = Network(
    "tiny", "a linear map", partial(nn.Linear, 3, 2), (3,), batch_size=4, outputs=2,
    steps=1, stacked_bar=0.6, bars={"SGLD": 1.8}, below_peers=True,
)  # fmt: skip
REGRESSION = Network(
    "regression", "a regression", partial(nn.Linear, 3, 2), (3,), batch_size=4, outputs=2,
    steps=1, stacked_bar=0.6, regression=True,
)  # fmt: skip
CLASSES = EnsembleNetwork(
    "classes", "ten classes", partial(nn.Linear, 3, 10), (3,), batch_size=4, steps=1, bar=7.0,
    sequential_bar=1.05,
)  # fmt: skip
NUMBERS = EnsembleNetwork(
    "numbers", "a mean and a scale", partial(nn.Linear, 3, 2), (3,), batch_size=4, steps=1,
    bar=2.2, regression=True,
)  # fmt: skip


@pytest.fixture
def _networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sgmcmc_step, "NETWORKS", (TINY, REGRESSION))
    monkeypatch.setattr(ensemble_step, "NETWORKS", (CLASSES, NUMBERS))
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_networks")
def test_sgmcmc_step_measures_all_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "figures.json"
    only = ["--only", "lightning-bnn", "lightning-bnn, SGMCMC", "chains"]
    sgmcmc_step.main([*only, "--rounds", "2", "--steps", "1", "--json", str(file)])

    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m benchmarks.sgmcmc_step --only lightning-bnn")
    assert {"torch", "lightning-bnn"} <= set(result["versions"])
    rows = result["networks"]["tiny"]["contenders"]
    assert set(rows) == {"lightning-bnn", "lightning-bnn, SGMCMC", STACKED, SEQUENTIAL}
    for row, by_sampler in rows.items():
        for sampler in ("SGLD", "SGHMC"):
            assert len(by_sampler[sampler].get("step_ms", [])) == 2, (row, by_sampler[sampler])
    assert rows["lightning-bnn"]["SGLD"]["baseline"] == "plain SGD"
    assert rows[STACKED]["SGLD"]["baseline"] == f"{SEQUENTIAL} SGLD"
    assert set(result["networks"]["regression"]["contenders"]) == {STACKED, SEQUENTIAL}
    assert "a linear map: ratio to the plain SGD step" in capsys.readouterr().out


def test_a_library_that_fails_is_reported_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(network: Network, sampler: str) -> None:
        raise ValueError("no such luck")

    library = Library("broken", "torch", broken)
    entries = sgmcmc_step.prepare(TINY, [library], chains=False)
    sgmcmc_step.interleave(list(entries.values()), steps=1, rounds=1, warm_up=0)
    report = sgmcmc_step.report(TINY, entries, {"missing": "not installed"})
    assert report["contenders"]["broken"]["SGHMC"] == {"reason": "failed: no such luck"}
    assert len(report["plain"]["step_ms"]) == 1
    out = capsys.readouterr().out
    assert "failed: no such luck" in out
    assert "not installed" in out


def test_bars_are_judged_on_the_medians() -> None:
    table = {
        "lightning-bnn": {"SGLD": {"ratio": 1.5}},
        PEERS[0]: {"SGLD": {"ratio": 3.0}},
        PEERS[1]: {"SGLD": {"ratio": 1.2}},
        STACKED: {"SGLD": {"ratio": 0.7}, "SGHMC": {"ratio": 0.5}},
    }
    plain, peers, *stacked = sgmcmc_step.bars(TINY, table)
    assert (plain["value"], plain["limit"], plain["passed"]) == (1.5, 1.8, True)
    assert (peers["value"], peers["passed"]) == (1.25, False)
    assert f"({PEERS[1]}, 1.20); not measured: {PEERS[2]}" in peers["bar"]
    assert [bar["passed"] for bar in stacked] == [False, True]


def test_a_bar_without_its_figure_is_neither_passed_nor_failed() -> None:
    table = {"lightning-bnn": {"SGLD": {"reason": "failed: x"}}}
    assert [bar["passed"] for bar in sgmcmc_step.bars(TINY, table)] == [None, None]


@pytest.mark.usefixtures("_networks")
def test_ensemble_step_measures_all_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    only = ["one by one, Adam", "one by one, fused Adam", "lightning-bnn"]
    only += ["lightning-bnn, stacked", "lightning-bnn, loop"]
    ensemble_step.main(["--only", *only, "--rounds", "2", "--steps", "10", "--json", str(file)])

    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m benchmarks.ensemble_step --only 'one by one")
    assert result["members"] == 10
    for name, bars in (("classes", 2), ("numbers", 1)):
        rows = result["networks"][name]["contenders"]
        assert set(rows) == {"plain Adam", *only}
        for row in rows.values():
            assert len(row["bare loop"].get("step_ms", [])) == 2, row
        for row in ("plain Adam", "lightning-bnn"):
            assert len(rows[row]["Trainer.fit"].get("step_ms", [])) == 2, rows[row]
        assert len(result["networks"][name]["bars"]) == bars
    assert "ten classes: ratio to the plain Adam step" in capsys.readouterr().out


def test_one_by_one_is_the_time_of_ten_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes all of its steps before the next one begins, and a tenth of those of one."""
    calls: list[int] = []

    def time_bare(step: object, steps: int) -> float:
        calls.append(steps)
        return 0.5

    monkeypatch.setattr("benchmarks.interleaved.time_bare", time_bare)
    entries = ensemble_step.entries_of(CLASSES, [ensemble_step.ONE_BY_ONE])
    plain, _, sequential, _ = entries
    assert plain.run is not None
    assert sequential.run is not None
    assert plain.run(40) == 0.5
    assert sequential.run(40) == 5.0
    assert calls == [40, *[4] * 10]


def test_bars_of_ensembles_are_judged_on_the_medians() -> None:
    medians = {"lightning-bnn": 8.0, "one by one, Adam": 7.5}
    plain, sequential = ensemble_step.bars(CLASSES, medians)
    assert (plain["value"], plain["limit"], plain["passed"]) == (8.0, 7.0, False)
    assert sequential["value"] == pytest.approx(8.0 / 7.5)
    assert not sequential["passed"]
    assert [bar["passed"] for bar in ensemble_step.bars(CLASSES, {})] == [None, None]


def test_predict_step_measures_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = predict_step.Network(
        "tiny",
        "a tiny net",
        partial(nn.Linear, 3, 10),
        (3,),
        4,
        steps=2,
        bar=32.0,
        batches=2,
        draws=3,
    )
    monkeypatch.setattr(predict_step, "NETWORKS", (tiny,))
    file = tmp_path / "figures.json"
    predict_step.main(["--only", "lightning-bnn", "--rounds", "2", "--json", str(file)])
    logging.disable(logging.NOTSET)
    result = json.loads(file.read_text())
    rows = result["networks"]["tiny"]["contenders"]
    assert set(rows) == {"plain pass", "lightning-bnn"}
    assert rows["lightning-bnn"]["ratio"] > 0
    assert [bar["limit"] for bar in result["networks"]["tiny"]["bars"]] == [32.0]
    assert result["memory"][0]["limit"] == predict_step.MEMORY_BAR
    assert "a tiny net: ratio to one pass" in capsys.readouterr().out
