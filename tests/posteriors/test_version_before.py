"""Posteriors that the version before wrote load, and give the same draws and predictions.

The files in ``version_before`` were written by it, with what it drew and predicted beside them: all
kinds, nested, pruned (format version 2), compact, and a stream of draws.
"""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from lightning_bnn import Posterior
from lightning_bnn.storage import store

FOLDER = Path(__file__).parent / "version_before"
EXPECTED = safetensors.torch.load_file(FOLDER / "expected.safetensors")


def network():
    return nn.Sequential(nn.Linear(3, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 2))


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in FOLDER.glob("*/manifest.json"))
)
def test_it_predicts_the_same(name, tmp_path):
    posterior = Posterior.load(FOLDER / name, network())
    posterior.mode = "loop"
    drawn = posterior.sample(4, torch.Generator().manual_seed(1)).values()
    weights = torch.cat([tensor.reshape(4, -1).float() for tensor in drawn], 1)
    assert torch.equal(weights, EXPECTED[f"{name}.weights"])
    predictive = posterior.predict(EXPECTED["inputs"], draws=6, seed=3)
    # another processor may round another way
    torch.testing.assert_close(predictive.outputs, EXPECTED[f"{name}.outputs"])
    torch.testing.assert_close(predictive.variance, EXPECTED[f"{name}.variance"])
    posterior.save(tmp_path)
    again = Posterior.load(tmp_path, network())
    again.mode = "loop"
    assert torch.equal(again.predict(EXPECTED["inputs"], 6, seed=3).outputs, predictive.outputs)


def test_both_versions_of_the_format_are_there():
    kinds = {path.parent.name for path in FOLDER.glob("*/manifest.json")}
    assert kinds == {"compact", "draws", "gaussian", "low_rank", "mixture", "pruned", "stream"}
    assert b'"version":2' in (FOLDER / "pruned" / "manifest.json").read_bytes()
    assert b'"version":1' in (FOLDER / "gaussian" / "manifest.json").read_bytes()
    assert "original" in store.read(FOLDER / "compact").fields
