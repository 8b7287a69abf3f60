r"""The target: what the posterior is.

The energy of weights :math:`w` given N examples is

.. math:: U(w) = -\sum_i \log p(y_i\mid x_i, w) - \log p(w),

and everything trains on the *mean energy* :math:`U/N`, estimated on a minibatch of n as
:math:`-\frac1n\sum\log p(y\mid x,w) - \frac1N\log p(w)`. Learning rates then mean what they
mean in ordinary training, and averaging gradients over DDP ranks or accumulated batches is
right as it is.

**Temperature.** T has two meanings, and ``tempers=`` of a strategy says which one. T = 1 is the
Bayes posterior in both, and T < 1 is surer than Bayes.

=====================  ======================================  ===================================
``tempers``            the posterior is proportional to        linear regression: its precision
=====================  ======================================  ===================================
``"likelihood"``       :math:`p(D\mid w)^{1/T}\,p(w)`          :math:`X^\top X/(T\sigma^2) + 1/s^2`
``"posterior"``        :math:`(p(D\mid w)\,p(w))^{1/T}`        :math:`(X^\top X/\sigma^2 + 1/s^2)/T`
=====================  ======================================  ===================================

The first counts each example 1/T times and leaves the prior as it is: the weighted KL of
variational inference, whose default it is. The second, the cold posterior exp(−U/T), leaves the
mode where it is and scales every variance (of a Gaussian posterior) by T: the default of
``SGMCMC``. Each is the other with the prior to a power, :func:`prior_power`: variational inference
minimises :math:`E_q[-\log p(D\mid w)] + T\,\mathrm{KL}(q\,\|\,p^{c})` with c = 1 or 1/T, a sampler
draws from :math:`\exp(-[-\log p(D\mid w) - c\log p(w)]/T)` with c = T or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bnn.checks import check_number, check_option, check_whole
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.flat import FlatPrior
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.stacked import StackedModule

__all__ = [
    "KeySplit", "Keys", "Split", "Target", "Tempers", "count_examples", "count_overfit",
    "each_tensor", "make_split", "prior_power", "split_batch",
]  # fmt: skip

# samplers that draw from the whole data set, however many examples they draw
_WHOLE = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)


class Target:
    """What the posterior is: a likelihood, a prior, N training examples and a temperature T.

    It is the one place that computes the mean energy of a minibatch, for K sets of weights at once.

    Args:
        likelihood: How outputs of the network give targets.
        prior: The prior, bound to a flat vector of weights; None for a flat one.
        num_data: N; may be set later, when the training data are known.
        temperature: T; 1 is the Bayes posterior.
        point_prior: The prior of trained weights that are point estimates, if there are any.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import BoundPrior, Normal
        >>> net = nn.Linear(1, 1)
        >>> prior = BoundPrior(Normal(), net, dict(net.named_parameters()))
        >>> target = Target(Gaussian(1.0), prior, num_data=100)
        >>> outputs, targets = torch.zeros(3, 5, 1), torch.zeros(5, 1)    # three sets of weights
        >>> target.mean_energy(torch.zeros(3, 2), outputs, targets).shape
        torch.Size([3])
    """

    def __init__(
        self,
        likelihood: Likelihood,
        prior: FlatPrior | None = None,
        num_data: int | None = None,
        temperature: float = 1.0,
        point_prior: FlatPrior | None = None,
    ) -> None:
        self.likelihood = likelihood
        self.prior = prior
        self.point_prior = point_prior
        self.temperature = check_number("temperature", temperature, positive=False)
        self._num_data: int | None = None
        self._log_prob = StackedModule(_LogProb(likelihood), "stacked")
        self._log_prior = StackedModule(_LogPrior(likelihood), "stacked")
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
        self._num_data = check_whole("num_data", value, 1)

    @property
    def knows_num_data(self) -> bool:
        """Whether N is known yet."""
        return self._num_data is not None

    def data_energy(
        self,
        outputs: Tensor,
        targets: Any,
        own_targets: bool = False,
        counts: Tensor | None = None,
        learned: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """−(1/n)Σ log p(y|x, w) of a minibatch for K sets of weights, (K,).

        Args:
            outputs: The outputs of the network with each set of weights, (K, B, ...).
            targets: The targets, (B, ...).
            own_targets: Whether each set has targets of its own, (K, B, ...).
            counts: How much each example counts for each set, (K, B); by default 1.
            learned: What the likelihood of each set has learned, by name, (K, ...); by default
                what the likelihood itself holds.
        """
        if len(outputs) == 1 and learned is None and counts is None:  # nothing to stack
            one = each_tensor(lambda tensor: tensor[0], targets) if own_targets else targets
            return -self.likelihood.log_prob(outputs[0], one).mean()[None]
        log_prob = self._log_probs(outputs, targets, own_targets, learned)
        return -(log_prob if counts is None else log_prob * counts).mean(1)

    def mean_energy(
        self,
        weights: Tensor,
        outputs: Tensor,
        targets: Any,
        own_targets: bool = False,
        counts: Tensor | None = None,
        learned: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The minibatch estimate of U/N for K sets of weights, (K,); of one set, a number.

        Args:
            weights: Flat weights, (K, P), or (P,) of one set, whose outputs are (B, ...).
            outputs: As for :meth:`data_energy`.
            targets: As for :meth:`data_energy`.
            own_targets: As for :meth:`data_energy`.
            counts: As for :meth:`data_energy`.
            learned: As for :meth:`data_energy`.
        """
        if weights.dim() == 1:
            return self.mean_energy(weights[None], outputs[None], targets)[0]
        data = self.data_energy(outputs, targets, own_targets, counts, learned)
        for energy in (
            None if self.prior is None else self.prior.energy(weights),
            self.noise_energy(outputs, learned),
        ):
            data = data if energy is None else self.add_prior(data, energy)
        return data

    def noise_energy(
        self, outputs: Tensor, learned: Mapping[str, Tensor] | None = None
    ) -> Tensor | None:
        """−log p of the noise for K sets of weights, (K,); None if it has no prior.

        Args:
            outputs: As for :meth:`data_energy`.
            learned: As for :meth:`data_energy`.
        """
        if not self.likelihood.has_prior:
            return None
        if len(outputs) == 1 and learned is None:
            return -self.likelihood.log_prior(outputs[0])[None]
        if learned is None:
            return -torch.func.vmap(self.likelihood.log_prior)(outputs)
        named = {f"likelihood.{name}": tensor for name, tensor in learned.items()}
        return -self._log_prior(named, (outputs,), own_inputs=True)

    def add_prior(self, data_energy: Tensor, prior_energy: Tensor) -> Tensor:
        """The mean energy from that of the data and −log p(w)."""
        return data_energy + prior_energy / self.num_data

    def _log_probs(
        self,
        outputs: Tensor,
        targets: Any,
        own_targets: bool,
        learned: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """The log density of each example under each set of weights, (K, B)."""
        as_predicted = type(self.likelihood).log_prob is Likelihood.log_prob
        if learned is None and as_predicted and not own_targets:  # K sets are K draws
            return self.likelihood.predictive(outputs).component_log_prob(targets)
        if not own_targets:
            targets = each_tensor(lambda t: t.expand(len(outputs), *t.shape), targets)
        if learned is None:
            flat = each_tensor(lambda target: target.flatten(0, 1), targets)
            return self.likelihood.log_prob(outputs.flatten(0, 1), flat).view(outputs.shape[:2])
        named = {f"likelihood.{name}": tensor for name, tensor in learned.items()}
        try:
            return self._log_prob(named, (outputs, targets), own_inputs=True)
        except Exception:
            if self._log_prob.mode == "loop":
                raise
            # it reads values, which only a loop can do; if it is at fault itself, that says so
            self._log_prob.mode = "loop"
            return self._log_prob(named, (outputs, targets), own_inputs=True)


Tempers = Literal["likelihood", "posterior"]


def prior_power(tempers: Tempers, temperature: float, own: Tempers) -> float:
    """What the prior is raised to, so that a method which tempers one thing tempers another.

    Args:
        tempers: What a user wants T to temper.
        temperature: T.
        own: What the method tempers with the prior as it is.

    Example:
        >>> prior_power("posterior", 0.1, own="likelihood")    # a cold posterior by a weighted KL
        10.0
        >>> prior_power("likelihood", 0.1, own="posterior")    # a tempered likelihood, sampled
        0.1
        >>> prior_power("posterior", 0.1, own="posterior")
        1.0
    """
    check_option("tempers", tempers, ("likelihood", "posterior"))
    if tempers == own:
        return 1.0
    if temperature == 0:
        raise ConfigurationError(
            f"temperature=0 leaves no posterior of tempers={tempers!r}. Pass a positive "
            f"temperature, or tempers={own!r}."
        )
    return 1 / temperature if tempers == "posterior" else temperature


class _LogProb(nn.Module):
    """A likelihood's log density as the forward pass of a module, to run with other parameters."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, outputs: Tensor, targets: Any) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)


class _LogPrior(_LogProb):
    """The same of the noise's log prior."""

    def forward(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        return self.likelihood.log_prior(outputs)


def each_tensor(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Change every tensor of inputs or targets; most often it is one tensor, which is quicker."""
    if isinstance(values, Tensor):
        return change(values)
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, values)


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
        "tuple of tensors or a mapping of keyword arguments. For another form pass split=, such as "
        "split='labels' or a function of the batch."
    )


Split = Callable[[Any], tuple[Any, Any]]
Keys = str | int | Sequence[str | int]


@dataclass(frozen=True)
class KeySplit:
    """Inputs and targets of a batch by their keys in a mapping, or their places in a tuple.

    Args:
        inputs: The key of the inputs; several are keyword arguments of the network; None for all
            but the targets.
        targets: The key of the targets.

    Example:
        >>> KeySplit(None, "labels")({"ids": 1, "mask": 2, "labels": 3})
        ({'ids': 1, 'mask': 2}, 3)
        >>> KeySplit(0, 2)(("image", "path", "class"))
        ('image', 'class')
    """

    inputs: Keys | None
    targets: str | int

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch."""
        return self.inputs_of(batch), self._at(batch, self.targets)

    def inputs_of(self, batch: Any) -> Any:
        """The inputs alone, where a batch may have no targets."""
        if self.inputs is None:
            return {key: value for key, value in batch.items() if key != self.targets}
        if isinstance(self.inputs, str | int):
            return self._at(batch, self.inputs)
        return {key: self._at(batch, key) for key in self.inputs}

    @staticmethod
    def _at(batch: Any, key: str | int) -> Any:
        try:
            return batch[key]
        except (KeyError, IndexError, TypeError):
            held = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(f"split= names {key!r}, which a batch does not have: {held}.") from None


def make_split(split: Split | Keys | None) -> Split:
    """How batches are split, from what a user gave as ``split=``.

    Example:
        >>> make_split(("x", "y"))({"x": 1, "y": 2})
        (1, 2)
    """
    if split is None:
        return split_batch
    if isinstance(split, str):
        return KeySplit(None, split)
    if callable(split):
        return split
    if isinstance(split, Sequence) and len(split) == 2 and isinstance(split[1], str | int):
        return KeySplit(split[0], split[1])
    raise ConfigurationError(
        "split= is the key of the targets in a batch, a pair of the keys of inputs and targets, or "
        f"a function from a batch to (inputs, targets); got {split!r:.80}."
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


def count_overfit(loader: Any, num_data: int, batches: float, world_size: int = 1) -> int:
    """N where a trainer's ``overfit_batches`` trains on the first batches only.

    Args:
        loader: The training data.
        num_data: The number of all examples.
        batches: How many batches each rank sees.
        world_size: The number of ranks.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> count_overfit(DataLoader(range(10), batch_size=4), 10, batches=2)
        8
    """
    owners = (loader, getattr(loader, "batch_sampler", None))
    size = next((n for each in owners if (n := getattr(each, "batch_size", None))), None)
    if size is None:
        raise ConfigurationError(
            "overfit_batches trains on the first batches only, and the size of these batches is "
            "not known. Pass num_data=, the number of examples in them."
        )
    return int(min(num_data, batches * size * world_size))


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
