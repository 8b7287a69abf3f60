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

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_bnn.checks import check_kind
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import WeightPosterior

__all__ = ["check_varies", "ratio", "separate", "signal_to_noise"]


def signal_to_noise(posterior: WeightPosterior) -> dict[str, Tensor]:
    """The ratio of |mean| to standard deviation of every weight that varies, by name.

    For a mixture it is that of the mixture as a whole.

    Raises:
        ConfigurationError: No weight has a variance: a single draw, or a plain network.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> posterior = GaussianPosterior(
        ...     nn.Linear(2, 1, bias=False), Gaussian(0.1),
        ...     mean={"weight": torch.tensor([[-3.0, 0.0]])},
        ...     sd={"weight": torch.tensor([[2.0, 0.0]])})
        >>> signal_to_noise(posterior)["weight"]
        tensor([[1.5000, 0.0000]])
    """
    check_posterior(posterior)
    moments = posterior.moments()
    check_varies(posterior, moments.variance, "weight")
    return {name: ratio(mean, moments.variance[name]) for name, mean in moments.mean.items()}


def ratio(mean: Tensor, variance: Tensor) -> Tensor:
    """|mean| / sd, where 0/0 is 0.

    Example:
        >>> import torch
        >>> ratio(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, 16.0]))
        tensor([0.0000,    inf, 0.2500])
    """
    return (mean.abs() / variance.sqrt()).masked_fill_((mean == 0) & (variance == 0), 0.0)


def check_varies(posterior: WeightPosterior, variance: Mapping[str, Tensor], what: str) -> None:
    """Raise unless one of these variances is above zero.

    Args:
        posterior: Whose they are.
        variance: Variances by name.
        what: What is looked at, in the singular.
    """
    if not any(bool((tensor > 0).any()) for tensor in variance.values()):
        raise ConfigurationError(
            f"No {what} of this {type(posterior).__name__} varies: all standard deviations are 0, "
            "as those of a single draw are. Use variational inference, SWAG, or at least two draws "
            "or members."
        )


def check_posterior(posterior: Any) -> None:
    """Raise unless it is a posterior over weights."""
    check_kind("posterior", posterior, WeightPosterior, "a posterior over the weights of a network")


def separate(posterior: WeightPosterior) -> Sequence[WeightPosterior]:
    """The posteriors that are pruned by themselves: those of a mixture, or it alone.

    Where every component has variances of its own (MultiSWAG), a weight may be worth much in one
    and nothing in another. Where one has none (the members of an ensemble, each a single draw),
    only the mixture as a whole has a ratio.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn import DrawsPosterior, GaussianPosterior, MixturePosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net, one = nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}
        >>> gaussian = GaussianPosterior(net, Gaussian(0.1), one, one)
        >>> point = DrawsPosterior(net, Gaussian(0.1), [one])
        >>> len(separate(MixturePosterior([gaussian, gaussian])))
        2
        >>> len(separate(MixturePosterior([gaussian, point])))
        1
    """
    check_posterior(posterior)
    components = posterior.components
    if len(components) > 1 and all(component.has_variance for component in components):
        return [leaf for component in components for leaf in separate(component)]
    return [posterior]
