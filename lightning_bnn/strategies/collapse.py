"""Whether the KL has pushed a network to its prior, so that it has learned nothing.

At T = 1 most weights of a wide network lie at their prior, and its predictions are good: that alone
is no fault. It is one if the predictions are none. So weights at the prior are only the suspicion;
what decides are the predictions of training examples. Each is compared with what it says of other
examples' targets: the *concordance* is the share of such pairs in which the example's own target is
the likelier one. It is near 1 for a network that has learned, whatever the likelihood, and one half
for one whose predictions do not depend on its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.predictive import Predictive
from lightning_bnn.target import each_tensor

__all__ = ["concordant_pairs", "explain_collapse", "is_suspicious"]

_MOST = 0.5  # of all weights
_ALL = 0.99  # of a layer's
_CONCORDANCE = 0.6
_OTHERS = 16


def is_suspicious(at_prior: Mapping[str, Tensor]) -> bool:
    """Whether most weights are at their prior, or all of a tensor with more than one axis.

    Args:
        at_prior: By name, which weights are.

    Example:
        >>> is_suspicious({"weight": torch.tensor([[True, True]]), "bias": torch.zeros(9).bool()})
        True
    """
    flat = torch.cat([one.flatten() for one in at_prior.values()])
    return float(flat.float().mean()) > _MOST or bool(_layers(at_prior))


def concordant_pairs(predictive: Predictive, targets: Any) -> tuple[int, int]:
    """In how many pairs an example's own target is likelier than another's, and less likely.

    Args:
        predictive: The predictions of a batch.
        targets: Its targets.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> targets = torch.arange(3.0)[:, None]
        >>> concordant_pairs(Gaussian(1.0).predictive(targets[None]), targets)
        (6, 0)
        >>> concordant_pairs(Gaussian(1.0).predictive(torch.ones(1, 3, 1)), targets)
        (2, 2)
    """
    own = predictive.log_prob(targets)
    wins = losses = 0
    for shift in range(1, min(_OTHERS + 1, len(own))):
        other = predictive.log_prob(each_tensor(lambda t: t.roll(shift, 0), targets))  # noqa: B023
        wins += int((own > other).sum())
        losses += int((own < other).sum())
    return wins, losses


def explain_collapse(at_prior: Mapping[str, Tensor], wins: int, losses: int) -> str | None:
    """What is wrong, and what helps; None where the network has learned something.

    Args:
        at_prior: By name, which weights are at their prior.
        wins: Pairs as :func:`concordant_pairs` counts them.
        losses: The same.
    """
    if wins + losses == 0 or wins / (wins + losses) >= _CONCORDANCE:
        return None
    flat = torch.cat([one.flatten() for one in at_prior.values()])
    layers = _layers(at_prior)
    named = f" and all of {layers[:3]}" if layers else ""
    return (
        f"The KL has pushed {float(flat.float().mean()):.0%} of the weights to their prior{named}, "
        "and the network predicts no better than a constant: of training examples and others, the "
        f"own target was the likelier in {wins / (wins + losses):.0%} of pairs (a constant: 50 %). "
        f"The prior of {len(flat):,} weights outweighs the data. Take fewer weights (a smaller "
        "network, or fewer Bayesian layers with bayesian=), a prior that fits them (learned, or a "
        "smaller scale), more data, or a smaller initial_scale= and more epochs. "
        "temperature='validation' weighs the prior less, and is no longer Bayes. If the inputs say "
        "nothing about the targets, this is right."
    )


def _layers(at_prior: Mapping[str, Tensor]) -> list[str]:
    """The tensors of weights, not of biases, that have nothing but their prior."""
    return [
        name for name, one in at_prior.items() if one.dim() > 1 and float(one.float().mean()) > _ALL
    ]
