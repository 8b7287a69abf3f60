r"""The posterior of a last linear layer in closed form: a full Gaussian for each output.

The weights of output j, its bias included, are
:math:`w_j \sim N(\mu_j, \sum_r \delta_{rj}\delta_{rj}^\top)`, independent of those of other
outputs. The network is affine in them, so that its output at the weights :math:`\delta_r` is
:math:`\varphi^\top\delta_{rj}`, and with the noise σ the predictive is
:math:`N(\varphi^\top\mu_j,\ \sigma_j^2 + \sum_r(\varphi^\top\delta_{rj})^2)` exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_kind, check_tensors
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import move_data_to_device
from lightning_bnn.likelihoods import Gaussian, Likelihood
from lightning_bnn.network import in_network_order, in_precision_of
from lightning_bnn.posteriors.base import Blobs
from lightning_bnn.posteriors.moments import Moments, at_least_float32
from lightning_bnn.posteriors.weights import (
    CHUNK,
    Change,
    Correlations,
    WeightPosterior,
    Weights,
    changed,
)
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import check_seed
from lightning_bnn.storage.store import Stored

__all__ = ["LinearPosterior"]


class LinearPosterior(WeightPosterior):
    """A Gaussian over the last layer of a network, which predicts in closed form.

    Args:
        net: A network whose output is that of its last layer, an ``nn.Linear``.
        likelihood: A ``Gaussian``.
        mean: The means of the layer's weight, and of its bias if it has one, by name.
        deviations: The same with a leading axis: δ.
        fixed: The network's other tensors.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> posterior = LinearPosterior(net, Gaussian(1.0), {"weight": torch.full((1, 1), 2.0)},
        ...                             {"weight": torch.full((1, 1, 1), 3.0)})
        >>> predictive = posterior.predict(torch.ones(1, 1))
        >>> predictive.mean, predictive.aleatoric, predictive.epistemic
        (tensor([[2.]]), tensor([[1.]]), tensor([[9.]]))
    """

    kind = "linear"
    likelihood: Gaussian

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        deviations: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_kind("likelihood", likelihood, Gaussian, "a Gaussian, which has the closed form")
        ordered = in_network_order(net, mean, "mean")
        self._means = {name: tensor.detach().clone() for name, tensor in ordered.items()}
        check_tensors("deviations", deviations)
        shapes = {name: list(one.shape[1:]) for name, one in deviations.items()}
        counts = {len(one) if one.ndim else 0 for one in deviations.values()}
        if (
            shapes != {name: list(one.shape) for name, one in self._means.items()}
            or len(counts) > 1
        ):
            raise ConfigurationError(
                "mean and deviations need the same names and shapes, those of deviations with one "
                f"leading axis; got {_shapes(mean)} and {_shapes(deviations)}."
            )
        super().__init__(net, likelihood, self._means, fixed)
        self.deviations = {name: deviations[name].detach().clone() for name in self._means}

    @torch.no_grad()
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive of a batch: in closed form, or with a number of draws as a mixture."""
        if draws is not None:
            return super().predict(inputs, draws, seed)
        check_seed(seed)  # it decides nothing here
        inputs = move_data_to_device(inputs, self.device)
        inputs = in_precision_of({**self.fixed, **self._means}, self.net, inputs)
        mean = self.outputs({name: one[None] for name, one in self._means.items()}, inputs)
        spread = at_least_float32(self.outputs(self.deviations, inputs)).square().sum(0, True)
        return self.likelihood.predictive(mean).widened(spread)

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        first = next(iter(self.deviations.values()))
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            noise = first.new_empty(size, *first.shape[:2])
            for row in noise:  # one draw after another: the chunk does not change the numbers
                row.normal_(generator=generator)
            yield {
                name: self._means[name]
                + torch.stack([torch.einsum("rj,rj...->j...", z, one) for z in noise])
                for name, one in self.deviations.items()
            }

    def moments(self) -> Moments:
        """Mean and variance of each weight by itself."""
        mean = {name: at_least_float32(one) for name, one in self._means.items()}
        wide = {name: at_least_float32(one) for name, one in self.deviations.items()}
        return Moments(mean, {name: one.square().sum(0) for name, one in wide.items()})

    @property
    def correlations(self) -> Correlations:
        """Known."""
        return "known"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, (P, P), in float64."""
        wide = {name: one.double().cpu() for name, one in self.deviations.items()}
        # a deviation moves the weights of one output, independent of others
        rows = []
        for output in range(len(next(iter(self._means.values())))):
            alone = []
            for one in wide.values():
                moved = torch.zeros_like(one)
                moved[:, output] = one[:, output]
                alone.append(moved.flatten(1))
            rows.append(torch.cat(alone, 1))
        root = torch.cat(rows)
        return root.T @ root

    @property
    def mean(self) -> Weights:
        """The means, by name."""
        return self._means

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return next(iter(self._means.values())).device

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same with every stored tensor changed."""
        groups = {name: changed(change, group) for name, group in self.blobs().items()}
        groups.setdefault("fixed", {})
        return type(self)(net or self.net, self.likelihood, **groups).made_from(self, net)

    def blobs(self) -> Blobs:
        """The tensors to save."""
        return {"mean": self._means, "deviations": self.deviations, **super().blobs()}

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs`."""
        mean, deviations = (stored.load(f"{prefix}{name}") for name in ("mean", "deviations"))
        return cls(net, likelihood, mean, deviations, stored.load_if_present(f"{prefix}fixed"))


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return f"{ {name: list(one.shape) for name, one in tensors.items()}!s:.200}"
