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

from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import DrawsPosterior, GaussianPosterior, WeightPosterior
from lightning_bnn.posteriors.moments import at_least_float32

__all__ = ["check_varies", "mean_and_sd", "ratio", "separate", "signal_to_noise"]

Weights = dict[str, Tensor]


def signal_to_noise(posterior: WeightPosterior) -> Weights:
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


def mean_and_sd(posterior: WeightPosterior) -> tuple[Weights, Weights]:
    """Mean and standard deviation of every parameter that varies, at least in float32."""
    if isinstance(posterior, GaussianPosterior):
        # not the root of the square, which is 0 for a very small number
        sd = posterior.sd
        deviations = {name: at_least_float32(sd[name]) for name in posterior.varying}
        return posterior.moments().mean, deviations
    moments = posterior.moments()
    return moments.mean, {name: variance.sqrt() for name, variance in moments.variance.items()}


def ratio(mean: Tensor, sd: Tensor) -> Tensor:
    """|mean| / sd, where 0/0 is 0.

    Example:
        >>> ratio(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, 4.0]))
        tensor([0.0000,    inf, 0.2500])
    """
    mean, sd = at_least_float32(mean), at_least_float32(sd)
    return (mean.abs() / sd).masked_fill_((mean == 0) & (sd == 0), 0.0)


def check_varies(posterior: WeightPosterior, spread: Mapping[str, Tensor], what: str) -> None:
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


def separate(posterior: WeightPosterior) -> Sequence[WeightPosterior]:
    """The posteriors that are pruned by themselves: the components of a mixture, or it alone.

    Where every component has variances of its own (MultiSWAG), a weight may be worth much in one
    and nothing in another. Where one has none (the members of an ensemble, each a single draw),
    only the mixture as a whole has a ratio.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import MixturePosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net, one = nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}
        >>> gaussian = GaussianPosterior(net, Gaussian(0.1), one, one)
        >>> point = DrawsPosterior(net, Gaussian(0.1), [one])
        >>> len(separate(MixturePosterior([gaussian, gaussian])))
        2
        >>> len(separate(MixturePosterior([gaussian, point])))
        1
    """
    parts = posterior.components
    return parts if len(parts) > 1 and all(part.has_variance for part in parts) else [posterior]
