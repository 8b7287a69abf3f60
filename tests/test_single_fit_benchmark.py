"""The benchmark of methods of one fit: what is measured, kept and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import single_fit
from benchmarks.single_fit import judge, main, summarise


def test_the_program_measures_keeps_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "kept.json"
    words = ["--quick", "--sets", "digits", "--workers", "0", "--json", str(file), "--only"]
    words += ["adam", "ivon-loop", "pairs-laplace-last"]
    words += ["pairs-dropout"]
    main(words)
    runs = json.loads(file.read_text())["runs"]
    assert list(runs) == [f"digits {name} 0" for name in (words[8:])]
    for name in ("adam", "ivon-loop"):
        run = runs[f"digits {name} 0"]
        assert "error" not in run, run["error"]
        assert {"nll", "accuracy", "ece", "auroc"} <= set(run["scores"])
        assert run["scores"]["nll"] < 2.4
    for name in ("pairs-laplace-last", "pairs-dropout"):
        assert "error" not in runs[f"digits {name} 0"], runs[f"digits {name} 0"]["error"]
    assert runs["digits pairs-laplace-last 0"]["found"]["ours"]["nll"] < 2.4
    assert runs["digits pairs-dropout 0"]["found"]["plain"]["ratio"] == 1
    out = capsys.readouterr().out
    assert "| adam |" in out
    assert "### digits: Laplace of one network" in out
    assert "MC dropout: a draw costs at most the plain network" in out

    asked: list[str] = []
    monkeypatch.setattr(single_fit, "run", lambda job: asked.append(job.key) or {})
    main(words)
    assert asked == []


def record(nll: float, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"scores": {"nll": nll}, "cpu_seconds": seconds, "diverged": False, **more}


def test_the_cost_is_that_of_all_epochs() -> None:
    runs = {"digits adam 0": record(1.0, share=0.5), "digits ivon 0": record(1.0, 8.0)}
    rows = summarise(runs)["digits"]
    assert rows["ivon"]["cost"] == 2  # plain Adam would have taken 4 seconds
    assert rows["adam"]["cost"] == 0.5


def pairs(ours: float, same: float, seconds: float) -> dict[str, Any]:
    theirs = {"nll": 0.100, "fit_seconds": 1.0, "predict_seconds": 1.0}
    return {
        "found": {
            "ours": {"nll": ours, "fit_seconds": seconds, "predict_seconds": 0.5},
            "ours, its precision": {"nll": same},
            "laplace-torch": theirs,
            "laplace-torch, draws": {"nll": 0.103},
        }
    }


def test_bars() -> None:
    runs = {
        "digits pairs-laplace-last 0": pairs(0.104, 0.107, 1.4),
        # without laplace-torch nothing is judged
        "digits pairs-laplace-kron 0": {"found": {"ours": {"nll": 0.1}}},
        "digits pairs-dropout 0": {"found": {"ours": {"ratio": 1.1}}},
        "mnist-mlp pairs-ivon 0": {"found": {"lightning-bnn, IVON": {"ratio": 1.1}}},
    }
    for seed, less in enumerate((0.01, -0.02, 0.02)):  # 0.003 on average, its error 0.012
        runs[f"digits ivon-opt {seed}"] = record(1.0)
        runs[f"digits ivon-loop {seed}"] = record(1.0 + less)
        runs[f"digits ivon {seed}"] = record(1.03 + less)  # 0.033 above
    held = {bar["bar"]: bar["passed"] for bar in judge(runs, summarise(runs))}
    start = "digits, Laplace last: NLL of"
    assert held == {
        f"{start} ours at most that of laplace-torch + 0.005": True,
        f"{start} ours, its precision at most that of laplace-torch + 0.005": False,
        f"{start} ours at most that of laplace-torch, draws + 0.005": True,
        f"{start} ours, its precision at most that of laplace-torch, draws + 0.005": True,
        "digits, Laplace last: at most its time": True,
        "digits, MC dropout: a draw costs at most the plain network": False,
        "digits, ivon-loop: NLL at most ivon-opt's": True,
        "digits, ivon: NLL at most ivon-opt's": False,
        "IVON: a step costs at most 1.15 of plain Adam's": True,
    }


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--data-dir", str(tmp_path)], "expected mnist in --data-dir"),
        (["--sets", "digits", "--seeds", "9"], "--seeds is 1 to 5; got 9"),
        (["--sets", "digits", "--only", "prayer"], "invalid choice: 'prayer'"),
        (["--sets", "digits", "--workers", "-1"], "--workers is at least 0; got -1"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
