from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_bnn.diagnostics import to_arviz
from lightning_bnn.diagnostics.chains import watch
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.diagnostics.statistics import require_arviz
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
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
    for name, array in (*watched.function.items(), *watched.weights.items()):
        if name != "log_likelihood":
            np.testing.assert_array_equal(group[name].values, array)
    likelihood = data["log_likelihood"]["target"]
    assert likelihood.dims == ("chain", "draw", "example")
    np.testing.assert_array_equal(likelihood.values, watched.function["log_likelihood"])
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
        np.testing.assert_array_equal(data["posterior"][stored], watched[name])
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
