"""A finished curve: the fraction to take, its plain numbers, and the files it is written to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.histogram import snr_histogram
from lightning_bnn.pruning.result import PruneCurve, PruningResult, check_curve_name

INFINITY, NAN = float("inf"), float("nan")


def made(losses: list[float]) -> PruneCurve:
    """A curve with these NLLs at 0 %, 10 %, 20 % and so on of ten weights."""
    results = tuple(
        PruningResult(0.1 * i, i, 10, 0.5 * i if i else None, {"nll": loss}, {"w": 0.1 * i})
        for i, loss in enumerate(losses)
    )
    ratios = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return PruneCurve(results, snr_histogram({"w": ratios}), "weight", "global", 0)


def test_best_is_the_largest_fraction_that_loses_little_enough() -> None:
    curve = made([0.5, 0.49, 0.52, 0.61, 0.53])
    for tolerance, expected in ((0.0, 1), (0.025, 2), (0.031, 4), (9.0, 4)):
        assert curve.best(tolerance) is curve.results[expected]
    assert made([0.5]).best(0.0).fraction == 0
    assert made([0.5, 0.5]).best(0.0).fraction == 0.1  # no loss is not too much
    assert made([0.5, 0.6, INFINITY, NAN]).best(0.2).fraction == 0.1


def test_best_of_a_posterior_that_scores_nothing_is_to_remove_nothing() -> None:
    assert made([NAN, NAN]).best(1.0).fraction == 0


@pytest.mark.parametrize("tolerance", [-0.1, NAN, -INFINITY])
def test_best_refuses_a_tolerance_below_zero(tolerance: float) -> None:
    with pytest.raises(ConfigurationError, match=f"tolerance= is 0 or more; got {tolerance}"):
        made([0.5]).best(tolerance)


def test_best_names_the_scores_where_there_is_no_loss() -> None:
    results = (PruningResult(0.0, 0, 1, None, {"z_score": 2.0, "my_score": 1.0}),)
    own = PruneCurve(results, made([0.5]).histogram, "weight", "global", 0)
    with pytest.raises(ConfigurationError, match=r"'nll'.*\['my_score', 'z_score'\]"):
        own.best(0.1)


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    results = tuple(
        PruningResult(fraction, 0, 1, INFINITY, {"nll": value, "ece": other})
        for fraction, value, other in [(0, 0.5, -INFINITY), (0.5, INFINITY, NAN)]
    )
    curve = PruneCurve(results, snr_histogram({"w": torch.ones(1)}), "weight", "global", 0)
    block = json.loads(json.dumps(curve.to_dict(), allow_nan=False))
    assert [one["scores"] for one in block["results"]] == [
        {"nll": 0.5, "ece": None}, {"nll": None, "ece": None}
    ]  # fmt: skip
    assert [one["threshold"] for one in block["results"]] == [None, None]
    assert str(curve).splitlines()[-1].split() == ["50", "%", "1", "–", "–", "–"]


def test_a_layer_that_a_result_does_not_name_has_no_share() -> None:
    curve = made([0.5, 0.6])
    bare = PruneCurve(
        (curve.results[0], PruningResult(0.5, 5, 10, 1.0, {"nll": 0.6})),
        curve.histogram, "channel", "layer", 3,
    )  # fmt: skip
    block = bare.to_dict()
    assert block["histogram"]["layers"][0]["removed"] == [0.0, None]
    assert (block["unit"], block["scope"], block["protected"]) == ("channel", "layer", 3)
    # the curve keeps its own numbers to itself
    assert "removed" not in curve.histogram.to_dict()["layers"][0]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml"), ("curve.pdf", b"%PDF")],
)
def test_the_figure_is_written_as_its_ending_says(name: str, begins: bytes, tmp_path: Path) -> None:
    path = made([0.5, 0.6]).save(tmp_path / "new" / "folder" / name)
    assert path == tmp_path / "new" / "folder" / name
    assert path.read_bytes().startswith(begins)


def test_the_numbers_are_written_as_json(tmp_path: Path) -> None:
    curve = made([0.5, INFINITY])
    path = curve.save(str(tmp_path / "curve.json"))
    assert json.loads(path.read_text()) == curve.to_dict()


@pytest.mark.parametrize("name", ["curve.txt", "curve", "curve.png.zip", ".png", "curve.PNG"])
def test_other_endings_are_refused_before_a_folder_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\.png, \.svg, \.pdf .*\.json .*; got '") as got:
        made([0.5]).save(tmp_path / "new" / name)
    assert name in str(got.value)
    assert not list(tmp_path.iterdir())


def test_addresses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"local file; got the URL 's3://a/curve.png'"):
        check_curve_name("s3://a/curve.png")
    assert check_curve_name(Path("a/curve.pdf")) == Path("a/curve.pdf")
