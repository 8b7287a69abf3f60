"""The benchmark of the defaults, on a few made-up rows: what is measured, kept and judged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import defaults, defaults_sets
from benchmarks.defaults import Job, judge, main, measure, run_all, summarise
from benchmarks.defaults_methods import Fitted, score
from lightning_bnn.errors import NonFiniteError
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder as the program expects it, with random images and a linear regression."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        raw = root / "mnist" / "MNIST" / "raw"
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte", pixels)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    letters = random.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    write_idx(root / defaults_sets.LETTERS, letters)
    (root / "cifar10").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        mosaic = random.integers(0, 256, (64, 128, 3), dtype=np.uint8)  # 2 by 4 tiles
        Image.fromarray(mosaic).save(root / "cifar10" / f"{name}.webp", lossless=True)
    labels = np.arange(48, dtype=np.uint8) % 10
    np.save(root / "cifar10" / "labels_train_then_test_uint8.npy", labels)
    yacht = root / "uci" / "yacht"
    yacht.mkdir(parents=True)
    inputs = random.normal(size=(120, 2))
    targets = 30 + 10 * inputs.sum(1) + random.normal(size=120)
    np.savetxt(yacht / "data.txt", np.column_stack([inputs, targets]))
    (yacht / "index_features.txt").write_text("0\n1\n")
    (yacht / "index_target.txt").write_text("2\n")
    return root


def test_the_program_measures_keeps_and_resumes(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(defaults.METHODS, "swag", _diverges)  # type: ignore[arg-type]
    file = tmp_path / "new" / "kept.json"
    words = ["--quick", "--data-dir", str(data_dir), "--sets", "yacht", "--workers", "0"]
    words += ["--json", str(file), "--only", "adam", "sgmcmc", "rmap", "hmc", "swag"]
    main(words)
    text = file.read_text()
    assert str(data_dir) not in text
    kept = json.loads(text)
    assert kept["command"].startswith("python -m benchmarks.defaults --quick --data-dir DIR")
    assert {"torch", "lightning-bnn"} <= set(kept["versions"])
    runs = kept["runs"]
    assert list(runs) == [f"yacht {name} 0" for name in ("adam", "sgmcmc", "swag", "rmap", "hmc")]
    for name in ("adam", "sgmcmc", "rmap", "hmc"):
        run = runs[f"yacht {name} 0"]
        assert "error" not in run, run["error"]
        assert set(run["scores"]) == {"nll", "rmse", "coverage"}
        assert run["seconds"] > 0
        assert not run["diverged"]
    assert len(runs["yacht sgmcmc 0"]["temperatures"]) == 4
    assert runs["yacht sgmcmc 0"]["rhat"] >= runs["yacht sgmcmc 0"]["median_rhat"]
    assert runs["yacht swag 0"]["error"] == "NonFiniteError: the energy is not finite"
    assert runs["yacht swag 0"]["diverged"]
    assert runs["yacht hmc 0"]["settings"]["batch_size"] == "all"
    # in units of the target: the noise has a standard deviation of 1, the targets of 14
    assert 0.5 < runs["yacht hmc 0"]["scores"]["rmse"] < 14

    out = capsys.readouterr().out
    assert "| method | NLL | RMSE | coverage of 90 % |" in out
    assert "| *PBP 2015* | 1.630±0.020 | 1.020±0.050 |" in out
    assert "FAIL  swag: nothing diverged or failed; yacht" in out
    assert "One seed has no standard error" in out

    # the same again: only what failed is measured
    asked: list[str] = []
    monkeypatch.setattr(defaults, "measure", lambda job: asked.append(job.key) or measure(job))
    main(words)
    assert asked == ["yacht swag 0"]
    again = json.loads(file.read_text())["runs"]
    assert again["yacht adam 0"] == runs["yacht adam 0"]


def _diverges(problem: Any) -> Fitted:
    raise NonFiniteError("the energy is not finite")


class Killer:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@pytest.mark.slow
def test_a_process_that_dies_is_recorded() -> None:
    records: dict[str, dict[str, Any]] = {}
    job = Job("digits", "adam", 0, Killer())  # type: ignore[arg-type]
    run_all([job], 1, lambda job, record: records.update({job.key: record}))
    assert records["digits adam 0"]["error"] == "the process ended with exit code 3"
    assert summarise(records)["digits"]["adam"]["scores"] == {}


def test_each_set_gives_inputs_of_its_network(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TRAIN", 24), ("VALIDATION", 10), ("TEST", 6), ("OUTSIDE", 7)):
        monkeypatch.setattr(defaults_sets, name, value)
    sizes = {"mnist-cnn": (24, 10, 6, 7), "mnist-mlp": (24, 10, 6, 7), "cifar10": (24, 10, 6, 7)}
    for name in ("digits", *sizes, "yacht"):
        problem = defaults_sets.load(name, 1, data_dir)
        splits = problem.splits
        parts = (splits.train, splits.validation, splits.test)
        outside = () if problem.outside is None else (len(problem.outside),)
        if name in sizes:
            assert (*map(len, parts), *outside) == sizes[name]
        for part in parts:
            assert problem.net()(part.tensors[0][:3]).shape == (3, problem.outputs)
        if problem.outside is not None:
            assert problem.outside.shape[1:] == splits.test.tensors[0].shape[1:]
            assert problem.outside.dtype == splits.test.tensors[0].dtype
        seen = {tuple(row.flatten().tolist()) for row in splits.train.tensors[0]}
        others = [row for part in parts[1:] for row in part.tensors[0]]
        shared = sum(tuple(row.flatten().tolist()) in seen for row in others)
        assert shared <= (5 if name == "digits" else 0)  # scikit-learn has some twice
        another = defaults_sets.load(name, 2, data_dir).splits.train.tensors[0]
        assert not torch.equal(another, splits.train.tensors[0])


def test_scores_are_in_the_unit_of_the_target(data_dir: Path) -> None:
    problem = defaults_sets.load("yacht", 0, data_dir)
    fitted = Fitted(lambda x: GaussianPredictive(torch.zeros(1, len(x), 1), torch.ones(())), 0, 0)
    found = score(fitted, problem)
    values = np.loadtxt(data_dir / "uci" / "yacht" / "data.txt")[:, 2]
    order = np.random.RandomState(1).choice(120, 120, replace=False)
    fitted_rows = values[order[:97]]  # a tenth of the 108 is for validation
    errors = values[order[108:]] - fitted_rows.mean()
    scale = fitted_rows.std()
    nll = 0.5 * np.mean((errors / scale) ** 2) + 0.5 * math.log(2 * math.pi) + math.log(scale)
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)
    assert found["coverage"] == pytest.approx(np.mean(np.abs(errors / scale) <= 1.6449))


def test_one_network_is_doubted_by_its_entropy() -> None:
    problem = defaults_sets.load("digits", 0, None, quick=True)
    assert problem.outside is not None
    turned = problem.outside

    def outputs(inputs: torch.Tensor, draws: int) -> torch.Tensor:
        """Sure of upright digits; of turned ones unsure, or sure of another class in each draw."""
        strange = inputs.shape == turned.shape and torch.equal(inputs, turned)
        logits = torch.zeros(draws, len(inputs), 10)
        for draw in range(draws):
            logits[draw, :, draw if strange else 0] = 9.0 if draws > 1 or not strange else 1.0
        return logits

    for draws in (1, 3):
        fitted = Fitted(lambda x, n=draws: CategoricalPredictive(outputs(x, n)), 0, 0)
        found = score(fitted, problem)
        assert found["auroc"] == found["auroc_entropy"] == 1.0
    # the same doubt in each draw is not the weights' doubt
    fitted = Fitted(lambda x: CategoricalPredictive(outputs(x, 1).expand(3, -1, -1)), 0, 0)
    found = score(fitted, problem)
    assert found["auroc_entropy"] == 1.0
    assert found["auroc"] < 1


def test_bars() -> None:
    def run(nll: float, **more: Any) -> dict[str, Any]:
        return {"scores": {"nll": nll}, "cpu_seconds": 2.0, "diverged": False, **more}

    runs = {f"digits adam {seed}": run(nll) for seed, nll in enumerate((1.0, 2.0, 3.0))}
    # paired: 0.1, 0.1 and 0.5 above, 0.23 on average, with a standard error of 0.13
    runs |= {f"digits vi {s}": run(nll) for s, nll in enumerate((1.1, 2.1, 3.5))}
    hot = {"temperatures": [0.95, 1.2]}
    runs |= {f"digits sgmcmc {s}": run(nll, **hot) for s, nll in enumerate((0.9, 1.9, 3.0))}
    summary = summarise(runs)
    row = summary["digits"]["vi"]
    assert row["nll_less_adam"] == pytest.approx({"mean": 0.7 / 3, "spread": 0.4 / 3})
    assert row["cost"] == 1
    held = {bar["bar"]: bar["passed"] for bar in judge(summary)}
    assert held == {
        "vi: NLL at most plain Adam's on every set": True,  # within twice its error
        "vi: NLL below plain Adam's on most sets": False,
        "vi: nothing diverged or failed": True,
        "sgmcmc: NLL at most plain Adam's on every set": True,
        "sgmcmc: NLL below plain Adam's on most sets": True,
        "sgmcmc: temperature within 10 % of T": False,
        "sgmcmc: nothing diverged or failed": True,
    }
    runs["digits vi 2"] = run(3.2)  # 0.13 above, 0.03 its standard error
    bars = judge(summarise(runs))
    assert not bars[0]["passed"]
    assert bars[0]["where"] == "digits (+0.133)"


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--sets", "yacht", "--data-dir", str(tmp_path)], "expected uci/yacht in"),
        (["--sets", "digits", "--seeds", "9"], "--seeds is 1 to 5; got 9"),
        (["--sets", "digits", "--only", "prayer"], "invalid choice: 'prayer'"),
        (["--sets", "digits", "--workers", "-1"], "--workers is at least 0; got -1"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
