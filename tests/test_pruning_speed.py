"""The benchmark of pruned networks runs, and judges as it says; no test looks at a time."""

import json
import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import pruning_speed
from benchmarks.interleaved import Entry
from benchmarks.peers.contender import Contender
from benchmarks.pruning_speed import COMPACT, FORWARD, KEPT, MASKED, NEW, Network
from lightning_bnn.nets import MLP
from lightning_bnn.pruning import compact, prune


class Residual(nn.Module):
    """The units of two layers meet in a sum, and go together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 8), nn.Linear(8, 8)
        self.outer, self.last = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.first(inputs)
        return self.last(first + self.outer(self.inner(first).relu()))


TINY = (
    Network("mlp", "an MLP", partial(MLP, 6, [8, 8], 10), (6,), 4, steps=2, draws=2),
    Network(
        "cnn", "a CNN", partial(pruning_speed.make_cnn, (4, 4, 8), 6), (3, 32, 32), 2,
        steps=1, draws=2,
    ),
    Network(
        "residual", "a residual network", Residual, (4,), 4, steps=1, draws=2, judged=False,
    ),
)  # fmt: skip


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pruning_speed, "NETWORKS", TINY)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_tiny")
def test_it_measures_every_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "figures.json"
    pruning_speed.main(["--quick", "--rounds", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m benchmarks.pruning_speed --quick --rounds 2")
    assert {"python", "torch", "lightning-bnn"} <= set(result["versions"])
    assert list(result["networks"]) == ["mlp", "cnn", "residual"]
    for found in result["networks"].values():
        assert set(found["times"]) == {FORWARD, NEW, KEPT}
        for row in found["times"].values():
            assert len(row["masked_ms"]) == len(row["compact_ms"]) == 2
            assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
        assert set(found["difference"]) == {"mean_network", "draws"}
        assert max(found["difference"].values()) < 1e-5
        for what in ("parameters", "flops", "bytes"):
            size = found[what]
            assert size["share"] == size[COMPACT] / size[MASKED] < 1, what
        assert found["modes"].keys() == {MASKED, COMPACT}
        assert set(found["modes"].values()) <= {"loop", "stacked"}
    mlp, cnn, residual = result["networks"].values()
    assert (mlp["parameters"][MASKED], mlp["parameters"][COMPACT]) == (218, 98)
    # two for each multiplication: 4 examples through 6-8-8-10 and 6-4-4-10
    assert (mlp["flops"][MASKED], mlp["flops"][COMPACT]) == (8 * 192, 8 * 80)
    assert mlp["bytes"]["unpruned"] >= mlp["bytes"][MASKED]
    assert (residual["parameters"][MASKED], residual["parameters"][COMPACT]) == (274, 110)
    assert [len(found["bars"]) for found in (mlp, cnn, residual)] == [4, 4, 0]
    assert all(bar["passed"] for found in (mlp, cnn) for bar in found["bars"][:3])
    out = capsys.readouterr().out
    assert "a residual network: 50% of the units" in out
    assert "share of FLOPs left" in out


def figures(
    apart: float = 1e-5, drawn: float = 1e-5, share: float = 0.6, ratio: float = 0.99
) -> Any:
    return {
        "difference": {"mean_network": apart, "draws": drawn},
        "flops": {"share": share},
        "times": {FORWARD: {"ratio": ratio}},
    }


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (figures(), [True, True, True, True]),
        (figures(apart=1.1e-5), [False, True, True, True]),
        (figures(drawn=float("nan")), [True, False, True, True]),
        (figures(share=0.61), [True, True, False, True]),
        (figures(ratio=1.0), [True, True, True, False]),
    ],
)
def test_bars(found: Any, passed: list[bool]) -> None:
    bars = pruning_speed.judge(found)
    assert [bar["passed"] for bar in bars] == passed
    assert [bar["limit"] for bar in bars] == [1e-5, 1e-5, 0.6, 1.0]


def test_the_difference_is_that_of_the_worst_draw_on_its_own_scale() -> None:
    expected = torch.tensor([[100.0, -50.0], [1.0, -2.0]])
    found = expected + torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    assert pruning_speed.difference(found, expected) == pytest.approx(0.25)
    found[0, 1] = torch.nan
    assert math.isnan(pruning_speed.difference(found, expected))


def test_a_network_that_computes_something_else_is_noticed() -> None:
    network = TINY[0]
    masked = prune(pruning_speed.make_posterior(network), 0.5, unit="channel", scope="layer")
    small = compact(masked)
    assert max(pruning_speed.compare(masked, small, network.inputs()).values()) < 1e-6
    small.mean["1.weight"][0, 0] += 1.0
    assert pruning_speed.compare(masked, small, network.inputs())["mean_network"] > 1e-3
    with pytest.raises(RuntimeError, match="lose other units"):
        pruning_speed.compare(masked, masked, network.inputs())


def test_ratios_are_formed_within_a_round() -> None:
    sides = {MASKED: [4.0, 2.0, 8.0], COMPACT: [1.0, 1.0, 2.0]}
    entries = [
        Entry(Contender(name, "", print), FORWARD, MASKED, seconds=seconds)
        for name, seconds in sides.items()
    ]
    row = pruning_speed.summarise(entries)[FORWARD]
    assert (row["ratio"], row["quartiles"]) == (0.25, [0.25, 0.375])
    assert (row["masked_ms"], row["compact_ms"]) == ([4e3, 2e3, 8e3], [1e3, 1e3, 2e3])
    entries[1].seconds, entries[1].reason = [], "failed: no such luck"
    with pytest.raises(RuntimeError, match="compact, forward pass: failed: no such luck"):
        pruning_speed.summarise(entries)
