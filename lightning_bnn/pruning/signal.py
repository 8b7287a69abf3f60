r"""The signal-to-noise ratio of each weight under a posterior: |mean| / standard deviation.

It says how many standard deviations a weight lies from zero. A weight whose ratio is low carries
little information: whether it is there or not hardly changes what the network computes (Blundell,
Cornebise, Kavukcuoglu and Wierstra, 2015, *Weight Uncertainty in Neural Networks*, section 5.1;
Graves, 2011, *Practical Variational Inference for Neural Networks*).

Mean and variance are those of the weight by itself:

- mean field: its own :math:`\mu` and :math:`\sigma^2`;
- low rank (SWAG): :math:`\bar w` and :math:`s\,(\tfrac12 v + \tfrac12\sum_r D_r^2/(R-1))`, or
  :math:`s\,v` without deviations;
- n draws: their mean, and their variance with n − 1;
- a mixture of K: by the law of total variance, :math:`\bar m = \tfrac1K\sum_k m_k` and
  :math:`\tfrac1K\sum_k v_k + \tfrac1K\sum_k (m_k - \bar m)^2`; a mixture of single draws (the
  members of an ensemble) is the same as these draws.

A weight that is zero in every draw (0/0) has the ratio 0; one that is not zero and does not vary
has infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import (
    DrawsPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
)

__all__ = ["Moments", "moments", "separate", "signal_to_noise"]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """Mean and variance of every parameter that varies, by name, in the network's order."""

    mean: Weights
    variance: Weights


def moments(posterior: Posterior) -> Moments:
    """Mean and variance of each weight by itself.

    Draws on the disk are read one at a time; sums over draws are made in float64. All is given back
    in the dtype of the posterior, at least in float32. A single draw has the variance 0.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> draws = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
        >>> found = moments(DrawsPosterior(nn.Linear(1, 1, bias=False), Gaussian(0.1), draws))
        >>> found.mean["weight"].item(), found.variance["weight"].item()
        (2.0, 2.0)
    """
    if isinstance(posterior, GaussianPosterior):
        mean, sd = mean_and_sd(posterior)
        return Moments(mean, {name: tensor.square() for name, tensor in sd.items()})
    if isinstance(posterior, LowRankPosterior):
        return _of_low_rank(posterior)
    if isinstance(posterior, DrawsPosterior):
        return _of_draws(posterior)
    if isinstance(posterior, MixturePosterior):
        return _of_mixture(posterior)
    raise ConfigurationError(
        f"The moments of a {type(posterior).__name__} are not known; expected a posterior of "
        "draws, a Gaussian, a low-rank Gaussian or a mixture of these."
    )


def signal_to_noise(posterior: Posterior) -> Weights:
    """The ratio of |mean| to standard deviation of every weight that varies, by name.

    For a mixture it is that of the mixture as a whole.

    Raises:
        ConfigurationError: No weight has a variance: a single draw, or a plain network.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> posterior = GaussianPosterior(
        ...     nn.Linear(2, 1, bias=False), Gaussian(0.1),
        ...     mean={"weight": torch.tensor([[-3.0, 0.0]])},
        ...     sd={"weight": torch.tensor([[2.0, 0.0]])})
        >>> signal_to_noise(posterior)["weight"]
        tensor([[1.5000, 0.0000]])
    """
    mean, sd = mean_and_sd(posterior)
    check_varies(posterior, sd, "weight")
    return {name: ratio(mean[name], sd[name]) for name in mean}


def mean_and_sd(posterior: Posterior) -> tuple[Weights, Weights]:
    """Mean and standard deviation of every parameter that varies, at least in float32."""
    if isinstance(posterior, GaussianPosterior):
        names, mean, sd = posterior._varying(), posterior.mean, posterior.sd
        return {name: _wide(mean[name]) for name in names}, {
            name: _wide(sd[name]) for name in names
        }
    found = moments(posterior)
    return found.mean, {name: variance.sqrt() for name, variance in found.variance.items()}


def ratio(mean: Tensor, sd: Tensor) -> Tensor:
    """|mean| / sd, where 0/0 is 0.

    Example:
        >>> ratio(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, 4.0]))
        tensor([0.0000,    inf, 0.2500])
    """
    mean, sd = _wide(mean), _wide(sd)
    return (mean.abs() / sd).masked_fill_((mean == 0) & (sd == 0), 0.0)


def _wide(tensor: Tensor) -> Tensor:
    """At least in float32: the square of a number such as 1e-4 is zero in float16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_varies(posterior: Posterior, spread: Mapping[str, Tensor], what: str) -> None:
    """Raise unless one of these standard deviations or variances is above zero.

    Args:
        posterior: Whose they are.
        spread: Standard deviations or variances, by name.
        what: What is looked at, in the singular.
    """
    if any(bool((tensor > 0).any()) for tensor in spread.values()):
        return
    if isinstance(posterior, DrawsPosterior) and len(posterior) == 1:
        why = "it holds a single draw"
    elif isinstance(posterior, DrawsPosterior):
        why = f"all of its {len(posterior)} draws are the same there"
    else:
        why = "all standard deviations are 0"
    raise ConfigurationError(
        f"The signal-to-noise ratio needs a posterior with variances, but no {what} of this "
        f"{type(posterior).__name__} varies: {why}. Use variational inference, SWAG, at least two "
        "draws of a chain, or an ensemble of at least two members."
    )


def separate(posterior: Posterior) -> list[Posterior]:
    """The posteriors that are pruned by themselves: the components of a mixture, or it alone.

    Where every component has variances of its own (MultiSWAG), a weight may be worth much in one
    and nothing in another. Where one has none (the members of an ensemble, each a single draw),
    only the mixture as a whole has a ratio.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net, one = nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}
        >>> gaussian = GaussianPosterior(net, Gaussian(0.1), one, one)
        >>> point = DrawsPosterior(net, Gaussian(0.1), [one])
        >>> len(separate(MixturePosterior([gaussian, gaussian])))
        2
        >>> len(separate(MixturePosterior([gaussian, point])))
        1
    """
    parts = posterior.components if isinstance(posterior, MixturePosterior) else []
    return parts if len(parts) > 1 and all(map(_has_variances, parts)) else [posterior]


def _has_variances(posterior: Posterior) -> bool:
    """Whether there is a variance without the other components; no draw is read for it."""
    if isinstance(posterior, DrawsPosterior):
        return len(posterior) > 1
    if isinstance(posterior, MixturePosterior):
        return len(posterior.components) > 1 or _has_variances(posterior.components[0])
    _, sd = mean_and_sd(posterior)
    return any(bool((tensor > 0).any()) for tensor in sd.values())


def _of_low_rank(posterior: LowRankPosterior) -> Moments:
    names, mean, deviations = posterior._varying(), posterior.mean, posterior.deviations
    variance = posterior.variance
    for name in names:
        diagonal = _wide(variance[name])
        if posterior.rank:
            squares = torch.zeros_like(diagonal)
            for column in deviations[name]:  # no copy of all of them
                deviation = _wide(column)
                squares.addcmul_(deviation, deviation)
            diagonal = 0.5 * diagonal + squares.mul_(0.5 / (posterior.rank - 1))
        variance[name] = posterior.scale * diagonal
    means = {name: _wide(mean[name]) for name in names}
    return Moments(means, {name: variance[name] for name in names})


def _of_draws(posterior: DrawsPosterior) -> Moments:
    running = _Running(posterior._varying())
    for index in range(len(posterior)):
        running.add(posterior._draws[index])
    return running.result(max(1, len(posterior) - 1))


def _of_mixture(posterior: MixturePosterior) -> Moments:
    running = _Running(posterior._varying())
    for component in posterior.components:
        found = moments(component)
        running.add({**component.fixed, **found.mean}, found.variance)
    count = len(posterior.components)
    points = all(isinstance(c, DrawsPosterior) and len(c) == 1 for c in posterior.components)
    return running.result(count - 1 if points and count > 1 else count)


class _Running:
    """Sums over draws or components by the updates of Welford (1962), in float64."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self._count = list(names), 0
        self._mean: Weights = {}
        self._squares: Weights = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(
        self, values: Mapping[str, Tensor], variance: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take one more set of values, each with a variance of its own if it has one."""
        self._count += 1
        for name in self._names:
            value = values[name].double()
            if name not in self._mean:
                self._mean[name], self._squares[name] = value.clone(), torch.zeros_like(value)
                self._dtypes[name] = torch.promote_types(values[name].dtype, torch.float32)
            else:
                step = value - self._mean[name]
                self._mean[name].add_(step, alpha=1 / self._count)
                self._squares[name].addcmul_(step, value - self._mean[name])
            if variance is not None and name in variance:
                self._squares[name].add_(variance[name])

    def result(self, divisor: int) -> Moments:
        """The mean, and the sum of squares over ``divisor``."""
        types = self._dtypes
        mean = {name: tensor.to(types[name]) for name, tensor in self._mean.items()}
        squares = self._squares.items()
        variance = {name: (tensor / divisor).to(types[name]) for name, tensor in squares}
        return Moments(mean, variance)
