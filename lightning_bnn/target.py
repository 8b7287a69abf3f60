r"""The target: what the posterior is.

The energy of weights :math:`w` given N examples is

.. math:: U(w) = -\sum_i \log p(y_i\mid x_i, w) - \log p(w),

and everything trains on the *mean energy* :math:`U/N`, estimated on a minibatch of n as
:math:`-\frac1n\sum\log p(y\mid x,w) - \frac1N\log p(w)`. Learning rates then mean what they
mean in ordinary training, and averaging gradients over DDP ranks or accumulated batches is
right as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.priors import BoundPrior

__all__ = ["Target", "count_examples", "split_batch"]

# samplers that draw from the whole data set, however many examples they draw
_WHOLE = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class Target:
    """A likelihood, a prior, the number of training examples N and a temperature T.

    Args:
        likelihood: How outputs of the network give targets.
        prior: The prior, bound to a flat vector of weights.
        num_data: N; may be set later, when the training data are known.
        temperature: T; 1 is the Bayes posterior.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        prior: BoundPrior,
        num_data: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigurationError(
                f"temperature= is at least 0 (1 is the Bayes posterior); got {temperature}."
            )
        self.likelihood = likelihood
        self.prior = prior
        self.temperature = float(temperature)
        self._num_data: int | None = None
        if num_data is not None:
            self.num_data = num_data

    @property
    def num_data(self) -> int:
        """N, the number of training examples."""
        if self._num_data is None:
            raise ConfigurationError(
                "The number of training examples is not known yet: it is found when Trainer.fit "
                "starts. Outside of a trainer pass num_data=."
            )
        return self._num_data

    @num_data.setter
    def num_data(self, value: int) -> None:
        if value < 1:
            raise ConfigurationError(
                f"num_data= is the number of training examples, at least 1; got {value}."
            )
        self._num_data = value

    def data_energy(self, outputs: Tensor, targets: Any) -> Tensor:
        """−(1/n)Σ log p(y|x, w) of a minibatch."""
        return -self.likelihood.log_prob(outputs, targets).mean()

    def mean_energy(self, weights: Tensor, outputs: Tensor, targets: Any) -> Tensor:
        """The minibatch estimate of U(w)/N, for a flat vector of weights."""
        return self.data_energy(outputs, targets) + self.prior.energy(weights) / self.num_data


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A batch's inputs and targets: a pair, as most data loaders give it.

    Example:
        >>> import torch
        >>> split_batch([torch.zeros(2, 3), torch.ones(2)])[1]
        tensor([1., 1.])
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    kind = type(batch).__name__
    size = f" of length {len(batch)}" if isinstance(batch, Sized) else ""
    raise DataError(
        f"A batch must be a pair (inputs, targets); got {kind}{size}. Inputs may be a tensor, a "
        "tuple of tensors or a mapping of keyword arguments. For another form, override split()."
    )


def count_examples(loader: Any, num_data: int | None, world_size: int = 1) -> int:
    """N: ``num_data`` if it is given, else the length of the loader's data set.

    A sampler that keeps to a subset counts as the data; the share that a distributed sampler
    gives to one rank does not.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> count_examples(DataLoader(range(10)), None)
        10
    """
    found = _dataset_length(loader)
    if num_data is None:
        if found is None:
            data = getattr(loader, "dataset", loader)
            why = (
                "have no length"
                if not hasattr(loader, "dataset") or _length(data) is None
                else "come in whole batches, or by a sampler that may keep to a part of them"
            )
            raise ConfigurationError(
                "The likelihood is scaled by the number of training examples, and the training "
                f"data ({type(data).__name__}) {why}. Pass num_data=."
            )
        return found
    shares = () if found is None else (found // world_size, -(-found // world_size))
    if num_data in shares and num_data != found:
        raise ConfigurationError(
            f"num_data={num_data} is the share of one of {world_size} ranks; the data set has "
            f"{found} examples, and N counts all of them. Pass num_data={found}, or leave it out."
        )
    return num_data


def _dataset_length(loader: Any) -> int | None:
    # With batch_sampler= a loader's own sampler means nothing; else both are the same object.
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    # Under DDP Lightning puts the user's sampler inside a distributed one.
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    if isinstance(inner, SubsetRandomSampler):
        return len(inner.indices)
    if hasattr(loader, "batch_size") and batches is None and not isinstance(inner, BatchSampler):
        return None  # batch_size=None: an item may be an example or a whole batch
    try:
        length = len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None
    if isinstance(inner, _WHOLE) or _length(inner) in (None, length):
        return length
    return None  # a sampler of the user's own may keep to a part of the data


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
