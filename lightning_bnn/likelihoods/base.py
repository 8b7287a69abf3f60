"""What every likelihood has in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bnn.checks import check_kind
from lightning_bnn.errors import DataError
from lightning_bnn.metrics import classification_metrics, regression_metrics
from lightning_bnn.mixtures import Predictive, at_least_float32, full_precision

__all__ = ["Likelihood", "check_likelihood", "mixed_outputs", "single_columns"]

METRICS = {"classification": classification_metrics, "regression": regression_metrics}


class Likelihood(nn.Module):
    """The distribution of the targets given the network's outputs.

    A new likelihood names its ``predictive_type``, which knows the density; the rest has a default.
    ``log_prob`` has no control flow that depends on data, so it runs under ``torch.func.vmap``;
    it computes in float32 at least, whatever autocast made of the outputs. What it cannot check
    there, ``check`` does.

    Attributes:
        predictive_type: The class of the predictive, which takes the outputs.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Categorical, Likelihood
        >>> likelihood: Likelihood = Categorical()
        >>> likelihood.log_prob(torch.zeros(3, 4), torch.tensor([0, 1, 3]))  # -log 4 each
        tensor([-1.3863, -1.3863, -1.3863])
        >>> likelihood.predictive(torch.zeros(5, 3, 4))  # five draws
        CategoricalPredictive(draws=5, examples=3, outputs=(4,))
    """

    predictive_type: ClassVar[type[Predictive]]

    @property
    def task(self) -> str:
        """Either "classification" or "regression"."""
        return self.predictive_type.task

    def predictive(self, outputs: Tensor) -> Predictive:
        """Mixture over draws, from outputs with a leading axis of draws, ``(S, B, ...)``."""
        return self.predictive_type(outputs)

    def mixture(self, mean: Tensor, root: Tensor, points: Tensor) -> Predictive:
        """The predictive where outputs are Gaussian; by default the mixture over points of it.

        Args:
            mean: Their mean, ``(B, ...)``.
            root: A root of their covariance, ``(B, F, F)`` with F outputs.
            points: Points of N(0, I), ``(S, F)``.
        """
        return self.predictive(mixed_outputs(mean, root, points))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of each example's targets, summed over its outputs.

        Args:
            outputs: What the network gave for a batch, ``(B, ...)``.
            targets: What the data loader gave for it.

        Returns:
            One number per example, of shape ``(B,)``.
        """
        return self.predictive(outputs.unsqueeze(0)).component_log_prob(targets).squeeze(0)

    def log_prior(self, outputs: Tensor) -> Tensor:
        """The log density of a prior of the noise, a number; by default there is none.

        It is of what the likelihood learns, or of the noise that the outputs give. It is a term of
        the energy beside the prior of the weights, divided by N in the mean energy, and no part of
        ``log_prob``, which is what metrics and ``train_nll`` show. As that it runs under ``vmap``.

        Args:
            outputs: What the network gave for a batch, ``(B, ...)``; what depends on them is a mean
                over the batch, and so an estimate of that over all examples.
        """
        return outputs.new_zeros(())

    @property
    def has_prior(self) -> bool:
        """Whether :meth:`log_prior` says something."""
        return type(self).log_prior is not Likelihood.log_prior

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """Yield the columns of a root of the Hessian of −log p in the outputs.

        For each example their outer products sum to its Hessian, or, where that may have negative
        eigenvalues, to its mean over targets (the Fisher information). They are given one at a
        time, so that memory does not grow with the square of the number of outputs. By default
        they are found by automatic differentiation, and negative eigenvalues count as 0. Override
        it where there is a closed form, and where −log p has kinks, such as an absolute value.

        Args:
            outputs: What the network gave for a batch, ``(B, ...)``.
            targets: What the data loader gave for it.

        Yields:
            A tensor in the shape of the outputs.

        Example:
            >>> import torch
            >>> from lightning_bnn.likelihoods import Poisson
            >>> [root] = Poisson().hessian_columns(torch.zeros(2, 1), torch.ones(2, 1))
            >>> root                                              # the square root of the rate
            tensor([[1.],
                    [1.]])
        """
        event = outputs.shape[1:]

        def energy(flat: Tensor, target: Tensor) -> Tensor:
            return -self.log_prob(flat.view(1, *event), target[None])[0]

        flat = full_precision(outputs.detach()).reshape(len(outputs), -1)
        # twice backwards: forward derivatives are missing for some functions
        hessian = torch.func.jacrev(torch.func.jacrev(energy))
        hessians = torch.func.vmap(hessian)(flat, targets)
        values, vectors = torch.linalg.eigh(hessians)
        roots = (vectors * values.clamp(min=0).sqrt()[:, None]).to(at_least_float32(outputs).dtype)
        for column in roots.unbind(-1):
            yield column.reshape(outputs.shape)

    def standard_residuals(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Residuals over a learned scale of the noise; None where there is no such scale.

        With it a likelihood writes :meth:`widened`, and Laplace approximations find the scale by
        the evidence: −log p is half the square of these, and the logarithm of the scale.

        Args:
            outputs: What the network gave for a batch, ``(B, ...)``.
            targets: What the data loader gave for it.
        """
        return None

    def widened(self, factor: float) -> Likelihood:
        """A copy whose learned scale of the noise is that of this one times a number."""
        raise NotImplementedError(f"{type(self).__name__} has no learned scale of the noise")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that targets and network fit; costs one pass over the targets.

        Args:
            outputs: What the network gave for a batch, ``(B, ...)``, without an axis of draws.
            targets: What the data loader gave for it.

        Raises:
            DataError: The shape, dtype or values of the targets, or the size of the outputs, are
                not what this likelihood needs.
        """
        self.check_tensors(outputs, targets)
        self.predictive(outputs.unsqueeze(0)).align(targets)
        self.check_finite(targets)

    def metrics(self) -> MetricCollection:
        """New metrics that suit this likelihood, updated with ``(predictive, targets)``."""
        return METRICS[self.task]()

    def config(self) -> dict[str, Any]:
        """Constructor arguments, as JSON can hold them; learned values are in ``state_dict``."""
        return {}

    def extra_repr(self) -> str:
        """Show the constructor arguments."""
        return ", ".join(f"{name}={value}" for name, value in self.config().items())

    # ------------------------------------------------------------ for `check` of a subclass

    def check_tensors(self, outputs: Any, targets: Any) -> None:
        """Raise a DataError unless both are tensors, and the outputs a floating-point batch."""
        kind = type(self).__name__
        for name, value in (("the network's outputs", outputs), ("the targets", targets)):
            if not isinstance(value, Tensor):
                raise DataError(
                    f"{kind} expected {name} to be one tensor, got {type(value).__name__}. "
                    "Wrap the network, or change the data loader, so that it gives a tensor."
                )
        if outputs.ndim == 0 or not outputs.is_floating_point():
            raise DataError(
                f"{kind} expected floating-point outputs, one row per example, got "
                f"{outputs.dtype} of shape {tuple(outputs.shape)}."
            )

    def check_finite(self, targets: Tensor) -> None:
        """Raise a DataError unless targets are finite numbers."""
        if targets.dtype == torch.bool:
            raise DataError(
                f"{type(self).__name__} expected targets that are real numbers, got "
                f"{targets.dtype}. Convert them with targets.float()."
            )
        # in every training step: one operation, and the rest only to say what is wrong
        if not math.isfinite(targets.sum().item()):
            fix = "Drop or fill in such examples before training."
            self.check_values(targets.isfinite(), targets, "finite targets", fix)

    def check_values(self, good: Tensor, targets: Tensor, expected: str, fix: str) -> None:
        """Raise a DataError that shows the first bad target, unless all are good."""
        if bool(good.all()):
            return
        bad = (~good).nonzero()
        index = tuple(bad[0].tolist())
        raise DataError(
            f"{type(self).__name__} expected {expected}; {len(bad)} of {targets.numel()} are not, "
            f"the first being {targets[index].item()} at index {index}. {fix}"
        )


def mixed_outputs(mean: Tensor, root: Tensor, points: Tensor) -> Tensor:
    """The mean plus a root of the covariance times points, ``(S, B, ...)``.

    Example:
        >>> import torch
        >>> mixed_outputs(torch.ones(1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([[3.0]]))
        tensor([[[7.]]])
    """
    errors = torch.einsum("sf,bgf->sbg", points.to(root), root)
    return mean + errors.view(len(points), *mean.shape)


def single_columns(roots: Tensor) -> Iterator[Tensor]:
    """The columns of diagonal matrices, one for each example; each is 0 but for one output.

    Args:
        roots: The diagonals, in the shape of a batch of outputs.

    Example:
        >>> import torch
        >>> [column.tolist() for column in single_columns(torch.tensor([[2.0, 3.0]]))]
        [[[2.0, 0.0]], [[0.0, 3.0]]]
    """
    flat = roots.flatten(1) if roots.ndim > 1 else roots[:, None]
    for index in range(flat.shape[1]):
        column = torch.zeros_like(flat)
        column[:, index] = flat[:, index]
        yield column.view(roots.shape)


def check_likelihood(likelihood: Any) -> None:
    """Raise unless it is one."""
    what = "an object of lightning_bnn.likelihoods, such as Categorical()"
    check_kind("likelihood", likelihood, Likelihood, what)
