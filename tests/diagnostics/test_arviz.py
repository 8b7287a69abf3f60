from __future__ import annotations

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import nn

from lightning_bnn.diagnostics import rank_figure, to_arviz, trace_figure
from lightning_bnn.diagnostics.chains import watch
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.diagnostics.statistics import require_arviz
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from lightning_bnn.posteriors import DrawsPosterior
from tests.diagnostics.chains import chained, independent_draws
from tests.diagnostics.test_diagnosis import Named

INPUTS = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(30) % 3


def test_groups_and_coordinates() -> None:
    net = nn.Linear(2, 3)
    posterior = chained(net, Categorical(), independent_draws(net, 60), 3)
    data = to_arviz(posterior, (INPUTS, CLASSES), weights="*", examples=4)
    watched = watch(posterior, choose_examples((INPUTS, CLASSES), 4), "*")
    group = data["posterior"]
    assert set(group.data_vars) == {"prediction", "mean_log_likelihood", "weight", "bias"}
    assert group["prediction"].dims[:3] == ("chain", "draw", "example")
    assert group["example"].values.tolist() == [0, 10, 19, 29]
    for name, series in (*watched.function.items(), *watched.weights.items()):
        if name != "log_likelihood":
            np.testing.assert_array_equal(group[name].values, series.values)
    likelihood = data["log_likelihood"]["target"]
    assert likelihood.dims == ("chain", "draw", "example")
    np.testing.assert_array_equal(likelihood.values, watched.function["log_likelihood"].values)
    observed = data["observed_data"]["target"]
    assert observed.values.tolist() == CLASSES[[0, 10, 19, 29]].tolist()
    table = require_arviz().summary(data, var_names=["mean_log_likelihood", "bias"])
    assert list(table.index) == ["mean_log_likelihood", "bias[0]", "bias[1]", "bias[2]"]


def test_weights_with_names_that_are_taken(tmp_path: Path) -> None:
    arviz = require_arviz()
    net = Named()
    posterior = chained(net, Gaussian(), independent_draws(net, 20), 2)
    data = to_arviz(posterior, (INPUTS, torch.zeros(30)), "*", examples=6)
    names = {"prediction", "mean_log_likelihood", "weight.prediction", "weight.example",
             "weight.mean_log_likelihood", "weight.target", "a.b"}  # fmt: skip
    assert set(data["posterior"].data_vars) == names
    assert data["posterior"]["prediction"].shape == (2, 10, 6)
    watched = watch(posterior, None, "*").weights
    for size, name in enumerate(net.names, start=1):
        stored = name.replace("/", ".") if "/" in name else f"weight.{name}"
        assert data["posterior"][stored].shape == (2, 10, size)
        np.testing.assert_array_equal(data["posterior"][stored], watched[name].values)
    data.to_netcdf(str(tmp_path / "chains.nc"))
    again = arviz.from_netcdf(str(tmp_path / "chains.nc"))
    assert set(again["posterior"].data_vars) == names


def test_inputs_alone_and_weights_alone() -> None:
    net = nn.Linear(2, 2)
    posterior = chained(net, HeteroscedasticGaussian(), independent_draws(net, 20), 2)
    data = to_arviz(posterior, INPUTS)
    assert set(data["posterior"].data_vars) == {"prediction", "predicted_variance"}
    assert "log_likelihood" not in data
    assert "observed_data" not in data
    assert set(to_arviz(posterior, weights="bias")["posterior"].data_vars) == {"bias"}
    with pytest.raises(ConfigurationError, match="inputs="):
        to_arviz(posterior)


# -------------------------------------------------------------------- figures


def shifted(chains: int = 3) -> DrawsPosterior:
    """Of three biases, that of number 1 differs in the first chain."""
    net = nn.Linear(2, 3)
    draws = independent_draws(net, 40 * chains)
    for draw in draws[::chains]:
        draw["bias"][1] += 4
    return chained(net, Categorical(), draws, chains)


def titles(figure: Figure) -> list[str]:
    return list(dict.fromkeys(axes.get_title() for axes in figure.axes))


def test_traces_show_all_draws_of_each_chain_the_worst_first() -> None:
    posterior = shifted()
    figure = trace_figure(posterior, weights="bias", count=2)
    assert len(titles(figure)) == 2
    assert titles(figure)[0].startswith("bias[1], R-hat 1.")
    expected = [draw[1] for chunk in posterior.draws(120) for draw in chunk["bias"]]
    lines = [line for line in figure.axes[1].get_lines() if len(line.get_ydata()) == 40]
    for chain, line in enumerate(lines):
        np.testing.assert_allclose(line.get_ydata(), expected[chain::3])
    assert len(lines) == 3
    assert len({line.get_color() for line in lines}) == 3
    assert figure.axes[1].get_legend() is not None


def test_rank_bars_count_all_draws() -> None:
    figure = rank_figure(to_arviz(shifted(), weights="bias"), count=1)
    assert titles(figure)[0].startswith("bias[1], R-hat 1.")
    patches: Any = figure.axes[0].patches
    heights = np.array([bar.get_height() for bar in patches]).reshape(3, -1)
    np.testing.assert_allclose(heights.sum(1), heights.sum() / 3)
    assert heights[0, -1] > 3 * heights[1, -1]  # the chain that sits too high


def test_figures_render_without_clipping() -> None:
    before = pyplot.get_fignums()
    figure = trace_figure(shifted(9), INPUTS[:4], count=2)
    assert pyplot.get_fignums() == before  # pyplot does not keep it
    figure.savefig(BytesIO(), format="png", dpi=50)
    width, height = figure.canvas.get_width_height()
    for axes in figure.axes:
        box: Any = axes.get_tightbbox()
        assert min(box.x0, box.y0) > -1
        assert (box.x1 < width + 1, box.y1 < height + 1) == (True, True)


def test_constant_scalars_can_be_drawn() -> None:
    net = nn.Linear(2, 3)
    draws = [{"bias": torch.ones(3)} for _ in range(20)]
    posterior = chained(net, Categorical(), draws, 2)
    for draw in (trace_figure, rank_figure):
        assert titles(draw(posterior, weights="bias", count=1))[0] == "bias[0], constant"


def test_one_chain_has_a_trace_but_no_ranks() -> None:
    posterior = shifted(1)
    assert len(trace_figure(posterior, weights="bias", count=1).axes) == 2
    with pytest.raises(ConfigurationError, match="there is one chain"):
        rank_figure(posterior, weights="bias")


def test_drawing_libraries_are_imported_when_something_is_drawn() -> None:
    """Lightning may have imported them; without them our modules must import all the same."""
    code = """
import sys, pytorch_lightning, torch
unwanted = ("matplotlib", "arviz", "scipy.stats")  # each takes a good part of a second
for name in [*sys.modules, *unwanted]:
    if any(name == one or name.startswith(one + ".") for one in unwanted):
        sys.modules[name] = None
import lightning_bnn.callbacks, lightning_bnn.diagnostics
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
