r"""Variational dropout: Gaussian noise in proportion to each weight, of a learned rate.

A weight is :math:`w = \mu(1 + \sqrt{\alpha}\,\varepsilon)`, a Gaussian of the mean μ and the
standard deviation :math:`\sigma = \sqrt\alpha\,|\mu|`; μ and log σ are the parameters. Under the
prior :math:`p(|w|) \propto 1/|w|`, which has no scale, the KL depends on α alone:

.. math::
    \mathrm{KL}(\alpha) = \mathbb{E}\log|z| + \tfrac12(\gamma + \log 2),\quad
    z\sim N(\alpha^{-1/2}, 1),

here 0 at α → ∞, where the weight is noise around 0. It is approximated by

.. math::
    \mathrm{KL} \approx k_1\big(1 - \mathrm{sigmoid}(k_2 + k_3\log\alpha)\big)
    + \tfrac12\log(1 + \alpha^{-1}),

with :math:`k = (0.63576, 1.87320, 1.48695)`, to 0.01 nats at every α. (Kingma, Salimans and
Welling, 2015, *Variational Dropout and the Local Reparameterization Trick*; Molchanov, Ashukha and
Vetrov, 2017, *Variational Dropout Sparsifies Deep Neural Networks*.) The prior cannot be
normalised, so that an ELBO is one up to a constant.

Many weights end as noise. The posterior is a Gaussian one, with the signal-to-noise ratio
:math:`|\mu|/\sigma = \alpha^{-1/2}`, and what prunes by it prunes by α: log α > 3, the rule of the
paper, is a ratio below 0.22.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families.base import Family
from lightning_bnn.families.mean_field import MeanField
from lightning_bnn.priors import BoundPrior

__all__ = ["VariationalDropout", "dropout_kl"]

_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695
_MOST = 20.0  # log α, beyond which a weight is nothing but noise
_PRUNED = 3.0  # log α


def dropout_kl(log_alpha: Tensor) -> Tensor:
    """The approximate KL of each weight, in nats.

    Example:
        >>> dropout_kl(torch.tensor([-10.0, 0.0, 10.0]))
        tensor([5.6358e+00, 4.3124e-01, 2.2733e-05])
    """
    return _K1 * torch.sigmoid(-_K2 - _K3 * log_alpha) + 0.5 * F.softplus(-log_alpha)


class VariationalDropout(MeanField):
    """Independent Gaussians under a prior without scale, of which many end as noise around 0.

    The prior of the strategy is that of point estimates only. Noise of each example,
    ``estimator="local"``, is what the papers use.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import VariationalBNN
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> bnn = VariationalBNN(
        ...     nn.Linear(2, 1), Gaussian(0.1), bayesian="weight", family=VariationalDropout(),
        ...     estimator="local", num_data=100)
        >>> bnn.loss((torch.randn(8, 2), torch.randn(8, 1))).backward()
        >>> bnn.family.log_alpha().shape
        torch.Size([2])
    """

    draw = Family.draw  # the fast step of the mean field has the KL from another prior

    def __init__(self) -> None:
        super().__init__("exp")

    def log_alpha(self) -> Tensor:
        """Log α of each weight, flat; at most 20."""
        least = torch.exp(2 * self.rho.detach() - _MOST)  # of μ², where the KL is flat
        return 2 * self.rho - torch.log(torch.maximum(self.mean.square(), least))

    def kl(self, draw: Tensor, prior: BoundPrior) -> Tensor:
        """The KL in nats from the prior without scale, summed over what is not pruned."""
        if prior.power != 1:
            raise ConfigurationError(
                "The prior of VariationalDropout() has no scale, and none is left of it at another "
                "power. Pass tempers='likelihood', or another family."
            )
        log_alpha = self.log_alpha()
        return dropout_kl(log_alpha if self.keep is None else log_alpha[self.keep]).sum()

    def kept_weights(self, log_alpha: float = _PRUNED) -> dict[str, Tensor]:
        """Masks by name of the weights that are not mostly noise, for ``prune`` of the strategy.

        Args:
            log_alpha: What is above it is left out.

        Example:
            >>> family = VariationalDropout().bind({"w": torch.tensor([1.0, 0.01])}, 0.1)
            >>> family.kept_weights()
            {'w': tensor([ True, False])}
        """
        return self.layout.views(self.log_alpha().detach() <= log_alpha)

    def at_prior(self, prior: BoundPrior) -> None:
        """Not known: the prior has no scale."""

    def sharpen(self, ratio: float, prior: BoundPrior | None) -> None:
        """1/σ² is what the data say."""
        super().sharpen(ratio, None)

    @torch.no_grad()
    def prune(self, keep: Tensor, prior: BoundPrior) -> None:
        """Take weights out for good: flat ``keep`` is False there. Those pruned before stay so."""
        self.restrict(keep)
