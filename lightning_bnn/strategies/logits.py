"""Notice a network that ends with a softmax or a sigmoid, where the likelihood takes logits.

It trains all the same, so that nobody is told: the likelihood makes probabilities of probabilities,
which are then all close to one another. False alarms are next to impossible. For classes, 32 rows
in turn must be nonnegative and sum to one, which logits do by chance with a probability below
10⁻⁴ a row. For labels, logits may well lie between 0 and 1 when training begins; so it is the graph
that is looked at, whether the last thing computed was a sigmoid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.likelihoods import Bernoulli, Categorical, Likelihood

__all__ = ["LogitsCheck"]

_ROWS = 32
# operations that change no value, and the one that keeps probabilities off 0 and 1
_SAME = {
    *("Alias", "Clamp", "Clone", "Cat", "Expand", "Permute", "ReshapeAlias", "Select", "Slice"),
    *("Split", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView"),
    *("Unsqueeze", "View"),
}


class LogitsCheck:
    """Warns once if the outputs that it is shown are probabilities.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     LogitsCheck().look(Categorical(), torch.full((32, 2), 0.5))
        >>> "are probabilities already" in str(said[0].message)
        True
    """

    def __init__(self) -> None:
        self._rows: int | None = 0  # so far probabilities; None: it is known

    def look(self, likelihood: Likelihood, outputs: Tensor) -> None:
        """Look at the outputs of one network for a batch."""
        if self._rows is None:
            return
        kind = type(likelihood)  # one derived from it may well take probabilities
        if kind is Categorical:
            values = outputs.detach().float()
            tolerance = max(1e-4, torch.finfo(outputs.dtype).eps)
            sums = values.sum(1)
            if not bool((values >= 0).all()) or not bool(((sums - 1).abs() < tolerance).all()):
                self._rows = None
                return
            self._rows += sums.numel()
            if self._rows < _ROWS:
                return
            classes = outputs.shape[1]
            most = math.e / (math.e + classes - 1)
            last, cost = "softmax", f"none of {classes} classes could get more than {most:.0%}"
        elif kind is Bernoulli:
            if outputs.grad_fn is None:
                return  # in evaluation nothing can be told
            if not _ends_with_sigmoid(outputs):
                self._rows = None
                return
            last, cost = "sigmoid", "every probability would lie between 50% and 73%"
        else:
            self._rows = None
            return
        self._rows = None
        rank_zero_warn(
            f"The network's outputs are probabilities already, as of a {last} at its end. "
            f"{kind.__name__} takes logits and computes the {last} itself: {cost}. "
            f"Take the {last} off the network.",
            category=UserWarning,
        )


def _ends_with_sigmoid(outputs: Tensor) -> bool:
    node = outputs.grad_fn
    while node is not None:
        name = node.name().partition("Backward")[0]
        if name not in _SAME:
            return name == "Sigmoid"
        node = node.next_functions[0][0] if node.next_functions else None
    return False
