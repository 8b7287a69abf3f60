r"""Classes: :math:`p(y = k | f) = \mathrm{softmax}(f)_k`."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood, check_all, check_outputs
from lightning_bnn.metrics import classification_metrics
from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.predictive.categorical import categorical_log_prob, check_class_shapes

__all__ = ["Categorical"]


class Categorical(Likelihood):
    """One of K classes, from K logits.

    Outputs are ``(B, K)``, or ``(B, K, *positions)`` with the class axis second, as in torch's
    cross entropy; targets are class indices ``(B, *positions)`` of an integer dtype. Metrics:
    accuracy, nll, brier, ece.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Categorical
        >>> likelihood = Categorical()
        >>> outputs, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
        >>> likelihood.log_prob(outputs, targets)
        tensor([-0.2395])
        >>> likelihood.check(outputs, torch.tensor([3]))
        Traceback (most recent call last):
        lightning_bnn.errors.DataError: Categorical expected classes from 0 to 2, ...
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the classes, summed over positions; ``(B,)``."""
        check_class_shapes(outputs, targets)
        return categorical_log_prob(outputs, targets)

    def predictive(self, outputs: Tensor) -> CategoricalPredictive:
        """Mixture of softmax distributions from ``(S, B, K, *positions)`` logits."""
        return CategoricalPredictive(outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for integer class indices between 0 and K - 1 in the right shape."""
        check_outputs("Categorical", outputs, targets)
        check_class_shapes(outputs, targets)
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(
                f"Categorical expected class indices of an integer dtype, got {targets.dtype}. "
                "Convert them with targets.long()."
            )
        classes = outputs.shape[1]
        if classes < 2:
            raise DataError(
                f"Categorical expected at least 2 logits per example, got {classes}. Give the "
                "network's last layer one output per class, or use Bernoulli() for yes or no."
            )
        # in every training step: one operation, and the rest only to say what is wrong
        if targets.numel() == 0 or all(0 <= int(end) < classes for end in targets.aminmax()):
            return
        check_all(
            "Categorical",
            (targets >= 0) & (targets < classes),
            targets,
            f"classes from 0 to {classes - 1}, as the network gives {classes} logits",
            "Number the classes from 0, or give the network's last layer more outputs.",
        )

    def metrics(self) -> MetricCollection:
        """Accuracy, negative log likelihood, Brier's score, expected calibration error."""
        return classification_metrics()
