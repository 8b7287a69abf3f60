"""What pruning by signal to noise would cost a model, as a part of its report.

The curve is that of :func:`lightning_bnn.pruning.prune_curve`, on the data of the report and with
as many draws. A model whose weights have no variance (a plain network, a single draw) gets a
sentence that says so in place of a curve.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.plain import plain

__all__ = ["Batches", "check_pruning", "pruning_block"]


class Batches:
    """Batches of (inputs, targets) that can be read once for each fraction.

    Args:
        read: Starts a new pass over the data.

    Example:
        >>> import torch
        >>> batches = Batches(lambda: iter([(torch.zeros(2), torch.ones(2))]))
        >>> len(list(batches)), len(list(batches))
        (1, 1)
    """

    def __init__(self, read: Callable[[], Iterator[tuple[Any, Tensor]]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return self._read()


def pruning_block(
    posterior: Posterior, loader: Any, fractions: Sequence[float], draws: int | None = None
) -> dict[str, Any]:
    """The numbers of a curve as JSON holds them, or why there is none.

    Args:
        posterior: The model.
        loader: The data of the report: batches of (inputs, targets), as often as they are read.
        fractions: The shares of weights to remove.
        draws: Draws of each prediction; by default what suits the posterior.

    Returns:
        ``PruneCurve.to_dict()``; ``{"unavailable": reason}`` where no weight has a variance.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or cannot be reached.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(3, 1)
        >>> draws = [{n: torch.randn_like(p) for n, p in net.named_parameters()} for _ in range(4)]
        >>> data = [(torch.randn(5, 3), torch.randn(5, 1))]
        >>> block = pruning_block(DrawsPosterior(net, Gaussian(), draws), data, [0.0, 0.5])
        >>> [(one["removed"], one["remaining"]) for one in block["results"]]
        [(0, 3), (2, 1)]
    """
    from lightning_bnn.pruning.curve import check_fractions, prune_curve
    from lightning_bnn.pruning.signal import signal_to_noise

    chosen = check_fractions(fractions)
    if not isinstance(posterior, WeightPosterior):
        return {"unavailable": f"A {type(posterior).__name__} has no weights to prune."}
    try:
        signal_to_noise(posterior)
    except ConfigurationError as error:
        return {"unavailable": str(error)}
    with isolated_random_state(0):
        curve = prune_curve(posterior, loader, chosen, draws=draws)
    made: dict[str, Any] = plain(curve.to_dict())
    return made


def check_pruning(posterior: Posterior, fractions: Sequence[float]) -> None:
    """Try the largest fraction before any work is done.

    Whether it can be reached depends on the sizes of the layers alone. A posterior that has no
    variances, or none yet, passes.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or cannot be reached.
    """
    from lightning_bnn.pruning.curve import check_fractions
    from lightning_bnn.pruning.masks import pruning_masks
    from lightning_bnn.pruning.signal import signal_to_noise

    largest = max(check_fractions(fractions))
    if not isinstance(posterior, WeightPosterior):
        return
    try:
        signal_to_noise(posterior)
    except ConfigurationError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which layers it saves is said when it is done
        pruning_masks(posterior, largest)
