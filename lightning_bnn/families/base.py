"""The contract of a variational family: a distribution over a flat vector of weights.

A family is one file: it makes its parameters from the network's own weights, draws by
reparameterisation, knows its KL from a prior, and says what posterior it leaves behind.
:class:`~lightning_bnn.VariationalBNN` does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families.pruned import Kept
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import NormalStream
from lightning_bnn.selection import FlatLayout

__all__ = ["Family"]


class Family(Kept, ABC):
    """A variational distribution q over a network's Bayesian weights as one flat vector.

    Attributes:
        layout: Which stretch of the flat vector is which tensor.
        mean: The flat mean of q.
        can_prune: Whether weights can be taken out in a fit.
    """

    mean: Tensor
    can_prune = False
    factorised = False  # whether weights are independent, with ``sd()``: for per-example noise

    def bind(self, tensors: Mapping[str, Tensor], initial_scale: float = 0.01) -> Self:
        """Make the parameters of q for these weights.

        Args:
            tensors: The Bayesian weights by name; their values become the mean.
            initial_scale: The standard deviation that every weight starts with.
        """
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            raise ConfigurationError(
                "The Bayesian weights lie in one flat vector and need one floating-point dtype; "
                f"got {sorted(map(str, dtypes))}. Convert the network with net.float(), or freeze "
                "the odd ones with requires_grad_(False)."
            )
        self.layout = FlatLayout(tensors)
        self._noise: dict[int, Tensor] = {}
        self.setup(self.layout.flatten(tensors), check_number("initial_scale", initial_scale))
        return self

    def begin(self, initial_scale: float) -> None:
        """Begin with another standard deviation of each weight, unless q has changed meanwhile.

        A family that knows how does so: a fit knows its length later than q is made.
        """

    # ---------------------------------------------------------------- what a family adds

    @abstractmethod
    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make the parameters: a mean ``flat``, and this standard deviation of each weight."""

    @abstractmethod
    def rsample(self, noise: Tensor) -> Tensor:
        """A flat draw of q, differentiable, from standard normal ``noise``."""

    @abstractmethod
    def kl(self, draw: Tensor, prior: BoundPrior) -> Tensor:
        """KL(q‖p) in nats, summed over all weights; or an unbiased estimate of it at a draw."""

    @abstractmethod
    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> WeightPosterior:
        """Q as it stands; ``fixed`` are the network's other tensors."""

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers a draw takes; by default one for each weight."""
        return self.layout.size

    def prune(self, keep: Tensor, prior: BoundPrior) -> None:
        """Take weights out for good; a family says how, if it can."""
        raise ConfigurationError(
            f"Weights of {type(self).__name__} cannot be pruned while training, because they "
            "depend on each other. Prune the posterior after the fit."
        )

    def per_weight(self) -> list[Tensor]:
        """The parameters whose last axis is that of the flat weights; by default all.

        What an optimizer keeps of them is cleared where weights are pruned.
        """
        return list(self.parameters())

    def sharpen(self, ratio: float, prior: BoundPrior | None) -> None:
        """Where q is about to be, as the data come to count ``ratio`` times what they did.

        A family that knows says so, and a new temperature needs fewer steps of training.

        Args:
            ratio: The old temperature over the new one.
            prior: The prior, which counts what it did; None if it, too, counts ``ratio`` times.
        """

    def at_prior(self, prior: BoundPrior) -> Tensor | None:
        """Which weights the data have left at their prior, flat and boolean; None: not known."""
        return None

    # ---------------------------------------------------------------- a training step

    def draw(
        self, index: int, stream: NormalStream, prior: BoundPrior, fresh: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One draw by name, and the KL; both differentiable once.

        A family may override it with something faster.

        Args:
            index: Which of the draws of a training step.
            stream: Where noise comes from.
            prior: The prior.
            fresh: Whether to take new noise; if not, that of the last time serves again.
        """
        if fresh or index not in self._noise:
            empty = torch.empty(self.noise_size, dtype=self.mean.dtype, device=self.mean.device)
            self._noise[index] = stream.fill_(empty)
        weights = self.rsample(self._noise[index])
        return self.layout.views(self.masked(weights)), self.kl(weights, prior)
