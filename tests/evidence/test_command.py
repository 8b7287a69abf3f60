"""``lightning-bnn compare`` in process: the table, stacking on validation data, the figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lightning_bnn import DrawsPosterior, PolynomialRegression, Posterior, average
from lightning_bnn.cli import main
from lightning_bnn.data import ToyRegression
from lightning_bnn.evidence.command import compare, comparison_figure, table
from lightning_bnn.likelihoods import Gaussian, Poisson
from lightning_bnn.posteriors import Evidence
from tests.trainers import quiet_trainer

DATA = {"batch_size": 32, "train_size": 40, "validation_size": 48, "noise": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three polynomials, and a posterior whose evidence nobody knows."""
    made = tmp_path_factory.mktemp("compare")
    for order in (5, 1, 3):
        bnn = PolynomialRegression(order)
        quiet_trainer(max_epochs=1).fit(bnn, ToyRegression(**DATA))
        bnn.posterior().save(made / f"order{order}")
    net = nn.Linear(1, 1)
    draw = {name: tensor.detach() for name, tensor in net.named_parameters()}
    DrawsPosterior(net, Gaussian(0.1), [draw]).save(made / "draws")
    described = {"class_path": "lightning_bnn.data.ToyRegression", "init_args": DATA}
    (made / "data.yaml").write_text(yaml.safe_dump(described))
    return made


def command(*words: str | Path) -> int:
    return main(["compare", *map(str, words)])


def of(folder: Path, *names: str) -> list[str]:
    return [word for name in names for word in ("--posterior", str(folder / name))]


def test_the_table_and_the_figure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, names = tmp_path / "compare.png", ("order5", "order1", "order3")
    words = [*of(folder, *names), "--data", str(folder / "data.yaml"), "--out", str(out)]
    assert command(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "log", "p(D|M)", "p(M|D)", "stacking"]
    posteriors = {name: Posterior.load(folder / name) for name in names}
    made = average(posteriors)
    for line, name, weight in zip(lines[1:4], names, made.weights, strict=True):
        evidence = posteriors[name].evidence
        assert line.startswith(f"{name}")
        assert f"{evidence.value:.2f} (closed form)  {weight:.3f}" in line
    loader = ToyRegression(**DATA)
    loader.setup("validate")
    stacked = average(posteriors, "stacking", data=loader.val_dataloader())
    shown = [float(line.split("  ")[-1].split(" ±")[0]) for line in lines[1:4]]
    assert shown == pytest.approx(stacked.weights, abs=6e-4)
    assert lines[4] == f"The figure is in {out}"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_what_is_not_known_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = of(folder, "order1", "order3", "draws")
    out = tmp_path / "compare.svg"
    assert command(*words, "--name", "a", "--name", "b", "--name", "$c$", "--out", out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["$c$", "-", "-", "-"]
    assert "Not known is the evidence of $c$" in lines[4]
    assert "<svg" in out.read_text()


def test_orders_are_the_axis_where_all_models_have_one(folder: Path) -> None:
    posteriors = {name: Posterior.load(folder / name) for name in ("order5", "order1", "order3")}
    rows = compare(posteriors)
    assert [row["order"] for row in rows] == [5, 1, 3]
    left, right = comparison_figure(rows).axes
    assert left.get_xlabel() == right.get_xlabel() == "order of the polynomial"
    line = left.lines[0]
    assert list(line.get_xdata()) == [1, 3, 5]
    expected = [posteriors[f"order{order}"].evidence.value for order in (1, 3, 5)]
    np.testing.assert_allclose(line.get_ydata(), expected)
    posteriors["draws"] = Posterior.load(folder / "draws")
    posteriors["order1"].evidence = Evidence(1.0, 0.3, "ELBO")
    rows = compare(posteriors)
    left, _ = comparison_figure(rows).axes
    assert [label.get_text() for label in left.get_xticklabels()] == [
        "order5", "order1", "order3", "draws",
    ]  # fmt: skip
    assert left.get_legend().get_texts()[0].get_text() == "a lower bound (ELBO)"
    assert "at least 1.00 ± 0.30 (ELBO)" in table(rows)
    probabilities = [row["probability"][0] for row in rows]
    assert np.nansum(probabilities) == pytest.approx(1)
    assert np.isnan(probabilities[3])
    comparison_figure(compare({"draws": posteriors["draws"]}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--posterior", "nowhere"], "nowhere"),
        (["--out", "compare.html"], "ends in one of"),
        (["--out", "/proc/no/compare.png"], "--out cannot be written"),
        (["--name", "one"], "--name is given once"),
        (["--data", "none.yaml"], "no configuration none.yaml"),
    ],
)
def test_bad_words(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*of(folder, "order1", "order3"), *words) == 1
    assert message in capsys.readouterr().err


def test_models_of_different_tasks_are_refused(folder: Path, tmp_path: Path, capsys) -> None:
    net = nn.Linear(1, 1)
    draw = {name: torch.zeros_like(tensor) for name, tensor in net.named_parameters()}
    DrawsPosterior(net, Poisson(), [draw]).save(tmp_path)
    assert command(*of(folder, "order1"), "--posterior", tmp_path) == 1
    assert "one task" in capsys.readouterr().err
