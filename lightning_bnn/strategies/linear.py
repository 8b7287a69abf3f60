r"""Bayesian linear regression in closed form, on inputs or on what a network makes of them.

The last layer of a network, an ``nn.Linear``, has a posterior in closed form; all before it stays
as it is. With the layer's N inputs as rows of Φ (a column of ones for the bias), the noise σ and a
prior N(0, S),

.. math::
    \Sigma = (\Phi^\top\Phi/\sigma^2 + S^{-1})^{-1}, \quad \mu = \Sigma\Phi^\top y/\sigma^2, \quad
    p(y) = N(y;\ 0,\ \sigma^2 I + \Phi S\Phi^\top), \quad
    p(y_*) = N(\varphi^\top\mu,\ \sigma^2 + \varphi^\top\Sigma\varphi).

What is not given is found by maximising the evidence p(y), with MacKay's updates (1992, *Bayesian
Interpolation*): for the prior :math:`N(0, 1/\alpha)` of all weights, and each noise scale,

.. math::
    \gamma = \sum_i\frac{\lambda_i}{\lambda_i + \alpha\sigma^2}, \qquad
    \alpha \leftarrow \frac{\gamma}{|\mu|^2}, \qquad
    \sigma^2 \leftarrow \frac{|y - \Phi\mu|^2}{N - \gamma},

λ the eigenvalues of ΦᵀΦ. One pass over the training data keeps the triangular factor R of a QR
decomposition of [Φ y], in float64 and over all processes: memory is d × d whatever N is. The sums
RᵀR would lose what is smaller than 10⁻⁸ of the largest features; R loses what is smaller than
10⁻¹⁶ of them. Outputs are independent given α and S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import Unpack

from lightning_bnn.checks import check_kind, check_whole
from lightning_bnn.curvature.base import check_room
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import Polynomial
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import Evidence, LinearPosterior, PosteriorPrior, WeightPosterior
from lightning_bnn.posteriors.prior import starting_network
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior, Learned, Normal
from lightning_bnn.selection import last_layer
from lightning_bnn.strategies.base import DataOptions, Strategy

__all__ = [
    "BayesianLinear", "ClosedForm", "DataFactor", "PolynomialRegression", "solve", "triangle",
]  # fmt: skip

_ROUNDS, _CLOSE = 10_000, 1e-10
_NOT_FINITE = (
    "The features or the targets of the training data hold NaN or infinity, or numbers whose "
    "squares are too large. Standardise them, or drop such examples."
)
_APART = 1e-6  # the largest correlation between outputs that is one of rounding
_LARGEST = 1e12  # α times the mean square of what the features explain


@dataclass
class DataFactor:
    """What the data say: the blocks of the factor R of [Φ y].

    Attributes:
        features: Of Φ, (d, d).
        targets: Qᵀy, (d, k).
        rest: The sum of squares of what no weights explain of each output, (k,).
        count: N.

    Example:
        >>> one = torch.ones(3, 1, dtype=torch.float64)
        >>> DataFactor.of(triangle(torch.cat([one, 2 * one], 1)), 1, 3).features.abs()
        tensor([[1.7321]], dtype=torch.float64)
    """

    features: Tensor
    targets: Tensor
    rest: Tensor
    count: float

    @classmethod
    def of(cls, factor: Tensor, size: int, count: float) -> DataFactor:
        """From the whole factor, of d = ``size`` features."""
        rest = factor[size:, size:].square().sum(0)
        return cls(factor[:size, :size], factor[:size, size:], rest, count)


def triangle(rows: Tensor) -> Tensor:
    """R of a QR decomposition of rows; a square of zeros and less where there are few.

    Example:
        >>> triangle(torch.tensor([[3.0], [4.0]])).abs()
        tensor([[5.]])
    """
    width = rows.shape[1]
    missing = rows.new_zeros(max(0, width - len(rows)), width)
    return torch.linalg.qr(torch.cat([rows, missing]), mode="r")[1]


@dataclass
class ClosedForm:
    """The posterior: Σ of output j is V diag(sd[:, j]²) Vᵀ, with V the basis.

    Attributes:
        mean: μ, (d, k).
        basis: V, (d, d); where outputs have priors of their own, one for each, (k, d, d).
        sd: (d, k).
        noise: σ of each output, (k,).
        alpha: The precision of the prior over that which was given; 1 where one was.
        log_evidence: log p(y), in nats, summed over the outputs.
    """

    mean: Tensor
    basis: Tensor
    sd: Tensor
    noise: Tensor
    alpha: float
    log_evidence: float


def solve(
    data: DataFactor,
    precision: Tensor | None,
    noise: Tensor | None,
    shared: bool = True,
    centre: Tensor | None = None,
) -> ClosedForm:
    """The posterior, in float64.

    Args:
        data: What the data say.
        precision: 1/s² of each weight, (d,); or a matrix for each output, (k, d, d); None: one for
            all is found.
        noise: σ of each output, (k,); None: it is found.
        shared: Whether all outputs have the same σ, where it is found.
        centre: The mean of the prior, (d, k); by default 0.

    Example:
        >>> one = torch.ones(3, 1, dtype=torch.float64)
        >>> data = DataFactor.of(triangle(torch.cat([one, 2 * one], 1)), 1, 3)
        >>> found = solve(data, one[0], one[0])
        >>> mean, variance = found.mean.item(), found.sd.square().item()
        >>> round(mean, 9), round(variance, 9)                       # 6 / (3 + 1), 1 / (3 + 1)
        (1.5, 0.25)
    """
    targets = data.targets if centre is None else data.targets - data.features @ centre
    outputs, alpha = targets.shape[1], 1.0
    unknown = precision is None
    root = precision_root(torch.ones_like(data.features[0]) if precision is None else precision)
    left, s, right = torch.linalg.svd(data.features @ root)
    s = s.T if s.dim() == 2 else s[:, None]
    values, basis = s.square(), root @ right.mT
    each = left if left.dim() == 3 else left.expand(outputs, *left.shape)
    along = torch.einsum("jdr,dj->rj", each, targets)
    squares = along.square().sum(0) + data.rest
    floor = squares.mean() / data.count  # the mean square of a target
    floor = floor if bool(floor > 0) else torch.ones_like(floor)
    variance = squares / data.count if noise is None else noise.square()
    if noise is None:
        variance = (variance.mean().expand(outputs) if shared else variance).clamp(1e-12 * floor)
    for _ in range(_ROUNDS if unknown or noise is None else 1):
        kept = values / (values + alpha * variance)
        size = (along * s / (values + alpha * variance)).square().sum()
        residual = (along * (1 - kept)).square().sum(0) + data.rest
        effective = kept.sum(0)
        before = torch.cat([variance, variance.new_tensor([alpha])])
        if unknown and bool(effective.sum() > 0):
            alpha = min(float(effective.sum() / size.clamp(min=1e-300)), _LARGEST / float(floor))
        if noise is None:
            left_over = data.count - effective
            pooled = residual.sum() / left_over.sum() if shared else residual / left_over
            variance = pooled.expand(outputs).clamp(1e-12 * floor)
        now = torch.cat([variance, variance.new_tensor([alpha])])
        if bool(((now - before).abs() <= _CLOSE * before).all()):
            break
    shrunk = alpha * variance / (values + alpha * variance)
    mean = along * s / (values + alpha * variance)
    residual = (along * shrunk).square().sum(0) + data.rest
    evidence = -0.5 * (
        data.count * (2 * math.pi * variance).log().sum()
        + torch.log1p(values / (alpha * variance)).sum()
        + (residual / variance).sum()
        + alpha * mean.square().sum()
    )
    sd = (values / variance + alpha).rsqrt()
    each = basis if basis.dim() == 3 else basis.expand(outputs, *basis.shape)
    mean = torch.einsum("jdr,rj->dj", each, mean)
    mean = mean if centre is None else mean + centre
    return ClosedForm(mean, basis, sd, variance.sqrt(), alpha, float(evidence))


def precision_root(precision: Tensor) -> Tensor:
    """R with R Rᵀ the inverse of a precision: (d,), or matrices (k, d, d).

    Example:
        >>> precision_root(torch.tensor([4.0]))
        tensor([[0.5000]])
    """
    if precision.dim() == 1:
        return precision.rsqrt().diag()
    lower = torch.linalg.cholesky(precision)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower.mT, eye.expand_as(lower), upper=True)


class BayesianLinear(Strategy):
    """Linear regression in closed form: the last layer of a network, or all of a linear one.

    A fit takes one step, whatever ``max_epochs`` says, which goes over the training data once.
    Train the network before, by any means, or use it for its features: nothing but the last layer
    is changed. Inputs and targets that are standardised suit the prior.

    Args:
        net: A network whose output is that of its last layer, an ``nn.Linear``, such as
            ``nn.Linear(5, 1)`` or ``nn.Sequential(features, nn.Linear(64, 1))``.
        likelihood: A ``Gaussian``: its scale is found by the evidence if it is learned (the
            default), else taken as it is.
        prior: The prior of the layer's weights, a ``Normal`` around 0, or the posterior of an
            earlier fit (see :class:`~lightning_bnn.PosteriorPrior`); None: one scale of all is
            found by the evidence.
        predict_draws: Draws in validation, test and prediction; None: the closed form.
        **data: ``split`` and ``output`` (see :class:`DataOptions`).

    Example:
        >>> bnn = BayesianLinear(nn.Linear(2, 1), prior=Normal(0.0, 2.0))
        >>> bnn.posterior().predict(torch.tensor([[1.0, 1.0]])).epistemic    # before any data
        tensor([[12.]])
    """

    defaults: ClassVar[Mapping[str, str]] = {
        "likelihood": "Gaussian(learn=True)",
        "prior": "Normal, its scale by the evidence",
    }
    predicts_with_samples = False
    likelihood: Gaussian

    def __init__(
        self,
        net: nn.Module,
        likelihood: Gaussian | None = None,
        prior: Normal | WeightPosterior | None = None,
        predict_draws: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        likelihood = Gaussian(learn=True) if likelihood is None else likelihood
        check_kind("likelihood", likelihood, Gaussian, "a Gaussian, which has the closed form")
        chosen = PosteriorPrior(prior) if isinstance(prior, WeightPosterior) else prior
        if chosen is not None and not isinstance(chosen, PosteriorPrior):
            check_kind("prior", chosen, Normal, "a Normal, which has the closed form")
            if chosen.loc != 0.0 or isinstance(chosen.scale, Learned):
                raise ConfigurationError(
                    f"prior= is a Normal around 0 with a scale that is known; got {prior!r}. Leave "
                    "it out to have the scale found by the evidence."
                )
        net = starting_network(net, prior)
        super().__init__(net, likelihood, None, predict_draws=predict_draws, **data)
        self.automatic_optimization = False
        self._names = last_layer(self.net)
        self._path = self._names[0].rpartition(".")[0] if self._names else ""
        if not isinstance(self._layer, nn.Linear):
            raise ConfigurationError(
                "net= ends in an nn.Linear, whose posterior is found in closed form; the last "
                f"layer with weights is {type(self._layer).__name__}. Pass "
                "nn.Sequential(net, nn.Linear(features, outputs))."
            )
        check_room(
            f"The posterior of {self._size:,} features", 8 * 8 * self._size**2,
            self._layer.weight.device, "Pass fewer features, or VariationalBNN.",
        )  # fmt: skip
        own = {name: self.net.get_parameter(name) for name in self._names}
        self.net.requires_grad_(False)
        for tensor in own.values():
            tensor.requires_grad_(True)
        # of the prior, in float64: (d,), or (k, d, d) with a mean (d, k)
        self._precision: Tensor | None = None
        self._centre: Tensor | None = None
        if isinstance(chosen, PosteriorPrior):
            mean, precision = chosen.gaussian(self.net, own)
            self._precision, self._centre = self._by_output(mean, precision)
        elif chosen is not None:
            given = BoundPrior(chosen, self.net, own).precisions(torch.zeros(1)) or []
            sizes = torch.tensor([tensor[0].numel() for tensor in own.values()])
            self._precision = torch.tensor(given, dtype=torch.float64).repeat_interleave(sizes)

    def _by_output(self, mean: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """Of flat weights, the precision matrix of each output, and the means."""
        outputs, size = self._layer.out_features, self._layer.in_features
        at = torch.arange(outputs * size).view(outputs, size)
        if self._layer.bias is not None:
            at = torch.cat([at, outputs * size + torch.arange(outputs)[:, None]], 1)
        if precision.dim() == 1:
            return torch.diag_embed(precision[at]), mean[at].T
        scale = precision.diagonal().rsqrt()
        between = (precision * scale[:, None] * scale)[at.flatten()][:, at.flatten()]
        between = between.view(*at.shape, *at.shape).abs().amax((1, 3)).fill_diagonal_(0)
        if bool((between > _APART).any()):
            raise ConfigurationError(
                "The posterior that is the prior correlates weights of different outputs, which "
                f"{type(self).__name__} keeps apart. Pass PosteriorPrior(posterior, "
                "covariance='diagonal'), or use LaplaceBNN(structure='full')."
            )
        return torch.stack([precision[row][:, row] for row in at]), mean[at].T

    # ---------------------------------------------------------------- the fit

    def loss(self, batch: Any) -> Tensor:
        """The NLL of a batch at the mean of the weights; nothing is trained by it."""
        inputs, targets = self.split(batch)
        return self.target.data_energy(self.net(inputs)[None], targets)[0]

    def configure_optimizers(self) -> Any:
        """One that moves nothing: the trainer counts its step."""
        return SGD([self.net.get_parameter(self._names[0])], lr=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        """Take the one step, with the whole of the training data."""
        if self._finished_at is None:
            self.optimizers().step()  # type: ignore[union-attr]
            self._finish()
        self.trainer.should_stop = True

    @torch.no_grad()
    def finish(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """Sum over the training data, on all processes, and solve."""
        training = self.net.training
        self.net.eval()
        data = self._read(batches)
        self.net.train(training)
        learned, outputs = self.likelihood.log_scale, self._layer.out_features
        example = data.targets.new_zeros(1, 1, outputs)
        noise = self.likelihood.predictive(example).aleatoric[0].sqrt()
        precision, centre = (
            None if one is None else one.to(example) for one in (self._precision, self._centre)
        )
        found = solve(
            data,
            precision,
            None if learned is not None else noise.double(),
            learned is None or learned.dim() == 0 or learned.numel() == 1,
            centre,
        )
        if learned is not None:
            log_noise = found.noise.log()
            learned.copy_(log_noise[0] if learned.numel() == 1 else log_noise)
        for name, tensor in self._by_name(found.mean.T).items():
            self.net.get_parameter(name).copy_(tensor)
        return {
            "basis": found.basis,
            "sd": found.sd,
            "alpha": torch.tensor(found.alpha),
            "log_evidence": torch.tensor(found.log_evidence, dtype=torch.float64),
        }

    def _read(self, batches: Iterable[Any]) -> DataFactor:
        """The factor of the features and targets of all processes."""
        size, outputs = self._size, self._layer.out_features
        width = size + outputs
        factor = torch.zeros(width, width, dtype=torch.float64, device=self.device)
        count, seen, waiting = 0, [], [factor]
        handle = self._layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            for batch in batches:
                inputs, targets = self.split(batch)
                seen.clear()
                predicted = self.net(inputs)
                self.check("train", predicted, targets)
                if not bool(predicted.isfinite().all()):
                    raise DataError(_NOT_FINITE)
                if len(seen) != 1 or not torch.equal(predicted, self._layer(seen[0])):
                    raise ConfigurationError(
                        "The output of net= is not that of its last layer, used once, so that it "
                        "is not linear in the layer's weights. Pass nn.Sequential(features, "
                        "nn.Linear(...))."
                    )
                rows = seen[0].double().flatten(0, -2)  # of each position of a sequence
                if self._layer.bias is not None:
                    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
                waiting.append(torch.cat([rows, targets.reshape(-1, outputs).double()], 1))
                count += len(rows)
                if sum(map(len, waiting)) > 3 * width:  # or many small decompositions would be slow
                    waiting = [triangle(torch.cat(waiting))]
        finally:
            handle.remove()
        factor = triangle(torch.cat(waiting))
        if self.trainer.world_size > 1:
            strategy = self.trainer.strategy
            factor = triangle(strategy.all_gather(factor).flatten(0, 1))
            count = int(strategy.reduce(factor.new_tensor(count), reduce_op="sum"))
        if not bool(factor.isfinite().all()):
            raise DataError(_NOT_FINITE)
        return DataFactor.of(factor, size, count)

    @property
    def _layer(self) -> Any:
        return self.net.get_submodule(self._path)

    @property
    def _size(self) -> int:
        return self._layer.in_features + (self._layer.bias is not None)

    def _by_name(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (..., outputs, d) as the layer's weight and bias."""
        weight = self.net.get_parameter(self._names[0])
        size = self._layer.in_features
        tensors = [rows[..., :size].to(weight)]
        if self._layer.bias is not None:
            tensors.append(rows[..., size].to(weight))
        return dict(zip(self._names, tensors, strict=True))

    # ---------------------------------------------------------------- what it leaves behind

    @torch.no_grad()
    def posterior(self) -> LinearPosterior:
        """The posterior; before the fit the prior, of scale 1 where it is not known."""
        layer, size = self._layer, self._size
        if self.finished:
            basis, sd = self.finished["basis"], self.finished["sd"]
            mean = {name: self.net.get_parameter(name).data for name in self._names}
        else:
            sd = torch.ones(size, layer.out_features, dtype=torch.float64)
            basis = precision_root(sd[:, 0] if self._precision is None else self._precision)
            centre = torch.zeros_like(sd) if self._centre is None else self._centre
            mean = self._by_name(centre.T)
        matched = "jdr,rj->rjd" if basis.dim() == 3 else "dr,rj->rjd"
        deviations = torch.einsum(matched, basis, sd)
        fixed = {k: v for k, v in network_tensors(self.net).items() if k not in mean}
        made = LinearPosterior(self.net, self.likelihood, mean, self._by_name(deviations), fixed)
        if self.finished:
            made.evidence = Evidence(self.log_evidence(), 0.0, "closed form")
        return made

    def _predict(self, inputs: Any) -> Predictive:
        """In closed form, unless a number of draws is given."""
        with self.snapshot() as posterior:
            return posterior.predict(inputs, draws=self.predict_draws)

    @property
    def trained(self) -> list[str]:
        """The names of the last layer's parameters."""
        return self._names

    def log_evidence(self) -> float:
        """Log p(y) of the training targets, in nats, with what was found by maximising it.

        Example:
            >>> BayesianLinear(nn.Linear(2, 1)).log_evidence()
            Traceback (most recent call last):
            lightning_bnn.errors.ConfigurationError: The evidence is known after a fit. ...
        """
        if "log_evidence" not in self.finished:
            raise ConfigurationError("The evidence is known after a fit. Call trainer.fit first.")
        return float(self.finished["log_evidence"])


class PolynomialRegression(BayesianLinear):
    """Polynomial regression in closed form; its evidence chooses the order.

    Args:
        order: The highest total degree of a term.
        inputs: Numbers in one example.
        outputs: Numbers in one target.
        likelihood: As for :class:`BayesianLinear`, like the rest.
        prior: The prior of the coefficients, the constant included.
        predict_draws: Draws in validation, test and prediction; None: the closed form.
        **data: ``split`` and ``output``.

    Example:
        >>> PolynomialRegression(order=3).posterior().varying
        ['1.weight', '1.bias']
    """

    def __init__(
        self,
        order: int = 3,
        inputs: int = 1,
        outputs: int = 1,
        likelihood: Gaussian | None = None,
        prior: Normal | WeightPosterior | None = None,
        predict_draws: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        terms = Polynomial(inputs, order)
        net = nn.Sequential(terms, nn.Linear(terms.features, check_whole("outputs", outputs, 1)))
        super().__init__(net, likelihood, prior, predict_draws, **data)
