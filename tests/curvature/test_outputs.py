"""The covariances of a linearised network's outputs, against dense Jacobians, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bnn import LaplacePosterior, laplace
from lightning_bnn.curvature import LinearisedNetwork, base, linear, outputs
from lightning_bnn.curvature.diagonal import DiagonalCovariance
from lightning_bnn.curvature.outputs import output_covariances
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal
from lightning_bnn.selection import FlatLayout

STRUCTURES = ("diagonal", "kron", "full", "low rank")
INPUTS = torch.randn(
    7, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)  # fmt: skip
NETWORKS: dict[str, Any] = {
    "mlp": lambda: [nn.Flatten(), nn.Linear(50, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)],
    "convolutions": lambda: [
        nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=False), nn.Flatten(),
        nn.Linear(2, 3),
    ],
    "sequence": lambda: [nn.Flatten(2), nn.Linear(25, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)],
    "norm": lambda: [nn.Flatten(), nn.LayerNorm(50), nn.Linear(50, 3)],
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*NETWORKS[name]()).double().eval()


def approximation(name: str, structure: Any) -> LaplacePosterior:
    targets = torch.arange(7) % 3
    return laplace(make(name), [(INPUTS, targets)], Categorical(), Normal(), structure)


def dense(posterior: LaplacePosterior) -> Tensor:
    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(posterior.net, weights, (INPUTS,))

    jacobian = torch.func.jacrev(run)(dict(posterior.mean))
    rows = torch.cat([jacobian[name].flatten(2) for name in posterior.mean], 2)
    half = posterior.covariance.project(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    return half @ half.mT


@pytest.mark.parametrize("numbers", [2**25, 60, 1], ids=["at once", "in blocks", "one by one"])
@pytest.mark.parametrize(
    ("name", "structure"),
    [(n, s) for n in NETWORKS for s in STRUCTURES if (n, s) != ("norm", "kron")],
)
def test_covariances_are_those_of_dense_jacobians(
    name: str, structure: Any, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, whatever is held at a time."""
    posterior = approximation(name, structure)
    for module in (outputs, linear):
        monkeypatch.setattr(module, "_NUMBERS", numbers)
    _, root = posterior.output_gaussian(INPUTS)
    torch.testing.assert_close(root @ root.mT, dense(posterior), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_pruned_has_no_variance(structure: Any) -> None:
    posterior = approximation("mlp", structure)
    masked = posterior.map(lambda name, tensor: tensor * (name != "1.bias"))
    kept = masked.output_gaussian(INPUTS)[1]
    assert not torch.allclose(kept, posterior.output_gaussian(INPUTS)[1])
    torch.testing.assert_close(kept @ kept.mT, _without_first_bias(posterior), rtol=1e-7, atol=1e-9)


def _without_first_bias(posterior: LaplacePosterior) -> Tensor:
    net = LinearisedNetwork(posterior.net, dict(posterior.mean), {})
    mean = net.outputs(INPUTS)
    bias = posterior.covariance.layout.views(torch.arange(posterior.covariance.layout.size))

    def whole(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[..., bias["1.bias"]] = 0
        return rows

    # at weights with a bias of 0, as the pruned network has them
    net.weights["1.bias"] = torch.zeros_like(net.weights["1.bias"])
    return output_covariances(posterior.covariance, net, INPUTS, mean, whole)


class Largest(TorchDispatchMode):
    """Notes the most numbers that a new tensor has."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // 8)
        return found


@pytest.mark.filterwarnings("ignore:The 3 leading eigenpairs")
@pytest.mark.parametrize("structure", ["diagonal", "low rank"])
@pytest.mark.parametrize("net", ["layers", "norm"])
def test_memory_does_not_grow_with_outputs_times_weights(
    structure: Any, net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 outputs of 2,000 weights for 2 inputs: 80,000 numbers for each example, and never 20,000.

    Of low rank 3 are 6 gradients: 12,000 numbers.
    """
    for module in (outputs, linear, base):
        monkeypatch.setattr(module, "_NUMBERS", 8_000)
    torch.manual_seed(0)
    layers = [nn.Linear(49, 40)] if net == "layers" else [nn.LayerNorm(49), nn.Linear(49, 40)]
    network = nn.Sequential(*layers).double()
    x = torch.randn(2, 49, dtype=torch.float64)
    rank = 3 if structure == "low rank" else None
    with Largest() as largest:
        posterior = laplace(network, [(x, torch.zeros(2, 40))], Gaussian(1.0), Normal(),
                            structure, rank=rank)  # fmt: skip
        posterior.output_gaussian(x)
    assert largest.numbers < 20_000


def test_too_many_outputs_say_so_with_the_gigabytes() -> None:
    net = nn.Linear(1, 200_000, bias=False)
    mean = {"weight": net.weight.detach()}
    covariance = DiagonalCovariance(FlatLayout(mean), {"sd": torch.ones(200_000)})
    posterior = LaplacePosterior(net, Gaussian(), mean, covariance)
    with pytest.raises(
        ConfigurationError, match=r"200,000 outputs .* needs 1,\d+\.\d GB .*'draws'"
    ):
        posterior.predict(torch.ones(2, 1))
