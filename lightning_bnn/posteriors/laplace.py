r"""The Gaussian of a Laplace approximation, and its linearised predictive.

The posterior is :math:`N(w^*, \Sigma)` with a covariance of any structure
(:mod:`lightning_bnn.curvature`). Draws of it run through the network are the predictive of
``predictive="draws"``. Where Σ is wide, the network is not linear over it, and these draws predict
badly; the curvature, however, is that of the linearised network. ``predictive="linearised"``
predicts with the latter: the outputs have the Gaussian

.. math:: f(x) \sim N\big(f(x, w^*),\; J(x)\,\Sigma\,J(x)^\top\big),

and the likelihood makes a mixture of points of it. With z a few points of N(0, I) that have exactly
its mean and covariance (a scrambled Sobol sequence through the normal quantiles, standardised), the
components are :math:`f + (J\Sigma J^\top)^{1/2} z`: the mean and the variance of the outputs are
exact, and no Monte Carlo noise is in them. The same points serve all inputs. Where the noise is
Gaussian, errors that are independent between outputs are not sampled: their variance is added to
that of the components. So with one output the predictive is the Gaussian itself, tails included.

Daxberger et al. (2021), *Laplace Redux*; Immer, Korzepa and Bauer (2021), *Improving predictions of
Bayesian neural nets via local linearization*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine
from typing_extensions import Self

from lightning_bnn.checks import check_kind, check_option, check_tensors
from lightning_bnn.curvature import Covariance, LinearisedNetwork
from lightning_bnn.curvature.base import check_room
from lightning_bnn.curvature.linear import Way
from lightning_bnn.curvature.outputs import output_covariances
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.exchange import exclusive
from lightning_bnn.lightning import move_data_to_device
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order
from lightning_bnn.posteriors.base import Blobs, Evidence
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
from lightning_bnn.selection import FlatLayout
from lightning_bnn.storage.manifest import SHAPE, Form
from lightning_bnn.storage.store import Stored

__all__ = ["LaplacePosterior", "PredictiveKind", "standard_points"]

PredictiveKind = Literal["linearised", "draws"]


class LaplacePosterior(WeightPosterior):
    """A Gaussian around the mode of the weights, with the covariance of a Laplace approximation.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        mean: The mode of the weights that vary, by name.
        covariance: Their covariance.
        fixed: Other parameters and buffers; the network's own values serve for those left out.
        predictive: ``"linearised"`` or ``"draws"``.
        log_evidence: log p(D) of the approximation, in nats, if it is known.
        index: Where weights were taken out: by name, for each weight that is left its place among
            those of the covariance, counted from 1; 0 for one that is zero.

    Example:
        >>> from lightning_bnn.curvature.diagonal import DiagonalCovariance
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net, mean = nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[3.0]])}
        >>> covariance = DiagonalCovariance(FlatLayout(mean), {"sd": torch.tensor([0.5])})
        >>> posterior = LaplacePosterior(net, Gaussian(0.1), mean, covariance)
        >>> predictive = posterior.predict(torch.tensor([[2.0]]))
        >>> predictive.mean, predictive.epistemic
        (tensor([[6.]]), tensor([[1.]]))
    """

    kind = "laplace"
    form: ClassVar[Form] = {
        "structure": str,
        "predictive": str,
        "layout": [(str, SHAPE)],
    }

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        covariance: Covariance,
        fixed: Mapping[str, Tensor] | None = None,
        predictive: PredictiveKind = "linearised",
        log_evidence: float | None = None,
        index: Mapping[str, Tensor] | None = None,
    ) -> None:
        mean = in_network_order(net, mean, "mean")
        super().__init__(net, likelihood, mean, fixed)
        check_option("predictive", predictive, ("linearised", "draws"))
        self.predictive: PredictiveKind = predictive
        check_kind("covariance", covariance, Covariance, "a Covariance of the weights of mean=")
        if log_evidence is not None and not (
            isinstance(log_evidence, Real) and log_evidence == log_evidence
        ):
            raise ConfigurationError(
                f"log_evidence= is a number or None; got {log_evidence!r:.80}."
            )
        if log_evidence is not None:
            self.evidence = Evidence(log_evidence, 0.0, "Laplace")
        self.covariance = covariance
        self._layout = FlatLayout(mean)
        if index is not None:
            check_tensors("index", index)
        if not mean or not (index or covariance.layout.size == self._layout.size):
            raise ConfigurationError(
                f"mean= and covariance= are of the same weights, of one at least; got "
                f"{self._layout.size} and {covariance.layout.size}."
            )
        self._mean = self._layout.flatten(mean)
        self._index = None
        if index:
            self._index = self._layout.flatten(in_network_order(net, index, "index"))
        self._way: Way = "unknown"

    # ---------------------------------------------------------------- over weights

    @property
    def mean(self) -> Weights:
        """The means of the weights that vary, by name."""
        return self._layout.views(self._mean)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self._mean.device

    @property
    def log_evidence(self) -> float | None:
        """Log p(D) of the approximation, in nats, if it is known."""
        return None if self.evidence is None else self.evidence.value

    def facts(self) -> list[str]:
        """The network, what is inferred of it, and the structure of the covariance."""
        return [*super().facts(), self.covariance.structure]

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        for start in range(0, count, chunk):
            flat = self._mean.new_empty(min(chunk, count - start), self._layout.size)
            for row in flat:  # one draw after another: the chunk does not change the numbers
                deviation = self.covariance.deviation(at_least_float32(row), generator)
                row.copy_(self._mean + self._left(deviation))
            yield self._layout.views(flat)
            del flat, row  # before the next are made

    def _left(self, flat: Tensor) -> Tensor:
        """Of one number for each weight of the covariance, those of the weights that are left."""
        if self._index is None:
            return flat
        return torch.cat([flat.new_zeros(1), flat])[self._index]

    def moments(self) -> Moments:
        """Mean and variance of each weight by itself, at least in float32."""
        mean = self._layout.views(at_least_float32(self._mean))
        variance = self._layout.views(self._left(at_least_float32(self.covariance.variance())))
        names = self.varying
        return Moments({k: mean[k] for k in names}, {k: variance[k] for k in names})

    @property
    def correlations(self) -> Correlations:
        """Known, unless the structure is that of independent weights."""
        return "none" if self.covariance.structure == "diagonal" else "known"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, (P, P), in float64."""
        covariance = self.covariance.to("cpu", torch.float64)
        size = covariance.layout.size
        root = covariance.project(torch.eye(size, dtype=torch.float64))
        if self._index is not None:
            root = torch.cat([root.new_zeros(1, root.shape[1]), root])[self._index.cpu()]
        return root @ root.T

    def weight_blobs(self) -> Iterable[Mapping[str, Tensor]]:
        """The mean, and the places in the covariance; what is 0 in both is 0 in every draw."""
        index = torch.ones_like(self._mean) if self._index is None else self._index
        return [self.mean, self._layout.views(index), self.fixed]

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same with every mean changed, and the covariance of the weights that are left."""
        index = self._index
        if index is None:
            index = torch.arange(1, self._layout.size + 1, device=self.device)
        made = type(self)(
            net or self.net,
            self.likelihood,
            changed(change, self.mean),
            self.covariance.copy(),
            changed(change, self.fixed),
            self.predictive,
            index=changed(change, self._layout.views(index)),
        )
        return made.made_from(self, net)

    # ---------------------------------------------------------------- linearised predictions

    @torch.no_grad()
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive mixture of a batch of inputs.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
            draws: How many outputs are mixed for each input; by default 32.
            seed: Decides the draws, or the points of the Gaussian over outputs.
        """
        if self.predictive == "draws":
            return super().predict(inputs, draws, seed)
        count = self.number_of(draws)
        mean, root = self.output_gaussian(inputs)
        points = standard_points(count, root.shape[-1], seed).to(mean)
        with self._no_autocast():
            return self.likelihood.mixture(mean, root.to(mean), points)

    @torch.no_grad()
    def output_gaussian(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The Gaussian over the outputs of the linearised network, for each input by itself.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.

        Returns:
            The means, (B, ...), and symmetric roots of the covariances, (B, F, F) with F outputs.
        """
        inputs = move_data_to_device(inputs, self.device)
        with self._no_autocast(), exclusive(self.net) as net:
            linear = LinearisedNetwork(net, self.mean, self.fixed, self._way)
            mean = at_least_float32(linear.outputs(inputs))
            count = mean[0].numel() if len(mean) else 1
            check_room(
                f"The linearised predictive of {count:,} outputs for each of {len(mean):,} inputs",
                4 * len(mean) * count**2 * mean.element_size(), self.device,
                "Pass predictive='draws', or fewer inputs at a time.",
            )  # fmt: skip
            if not len(mean):
                return mean, mean.new_zeros(0, count, count)
            if linear.way == "unknown":
                linear.check(inputs, mean)
            whole = None if self._index is None else self._whole
            covariance = output_covariances(self.covariance, linear, inputs, mean, whole)
            self._way = linear.way
        values, vectors = torch.linalg.eigh(covariance)
        root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
        return mean, root

    def _no_autocast(self) -> torch.autocast:
        """A trainer of mixed precision evaluates under autocast, which rounds derivatives."""
        return torch.autocast(self.device.type, enabled=False)

    def _whole(self, rows: Tensor) -> Tensor:
        """Rows of the weights of the covariance, from rows of those that are left."""
        whole = rows.new_zeros(*rows.shape[:2], self.covariance.layout.size + 1)
        whole[..., self._index] = rows
        return whole[..., 1:]

    # ---------------------------------------------------------------- saving, loading

    def entry(self) -> dict[str, Any]:
        """The structure, how it predicts, and the layout of the covariance."""
        layout = self.covariance.layout
        return {
            "structure": self.covariance.structure,
            "predictive": self.predictive,
            "layout": [[n, [*shape]] for n, shape in zip(layout.names, layout.shapes, strict=True)],
        }

    def blobs(self) -> Blobs:
        """The mean, what the covariance is made of, and what is left of it."""
        index = {} if self._index is None else {"index": self._layout.views(self._index)}
        return {
            "mean": self.mean,
            "covariance": self.covariance.tensors,
            **index,
            **super().blobs(),
        }

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`."""
        check_option("structure", entry["structure"], tuple(Covariance.kinds))
        tensors = stored.load(f"{prefix}covariance")
        shapes = {n: torch.empty(shape, device="meta") for n, shape in entry["layout"]}
        covariance = Covariance.kinds[entry["structure"]](FlatLayout(shapes), tensors)
        fixed, index = (stored.load_if_present(f"{prefix}{key}") for key in ("fixed", "index"))
        mean = stored.load(f"{prefix}mean")
        return cls(net, likelihood, mean, covariance, fixed, entry["predictive"], index=index)


def standard_points(count: int, axes: int, seed: int) -> Tensor:
    """Points of N(0, I), evenly spread, (count, axes), in float64.

    Their mean is exactly 0 where there are several; their covariance is exactly I where there are
    at least twice as many as axes, and else only its diagonal.

    Example:
        >>> points = standard_points(8, 2, seed=0)
        >>> torch.allclose(points.T @ points / 8, torch.eye(2, dtype=torch.float64))
        True
    """
    seed = check_seed(seed) % 2**63
    if axes > SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(count, axes, generator=generator, dtype=torch.float64)
    else:
        uniform = SobolEngine(axes, scramble=True, seed=seed).draw(count, dtype=torch.float64)
        points = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    if count == 1:
        return points
    points = points - points.mean(0)
    if count >= 2 * axes:
        lower = torch.linalg.cholesky(points.T @ points / count)
        return torch.linalg.solve_triangular(lower, points.T, upper=False).T
    return points / points.square().mean(0).sqrt()
