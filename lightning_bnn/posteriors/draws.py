"""A posterior of stored draws: sets of weights, and of buffers where they vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors.base import (
    _CHUNK,
    Blobs,
    Posterior,
    Weights,
    in_network_order,
    load_if_stored,
)
from lightning_bnn.posteriors.store import Stored

__all__ = ["DrawsPosterior"]


class DrawsPosterior(Posterior):
    """Equally weighted sets of weights.

    Asked for as many draws as it holds, it gives each once, in order; for fewer, a random
    choice without repetition; for more, each equally often but for a random rest.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        draws: The sets of weights (and of buffers that vary), by name.
        fixed: Other parameters and buffers; the network's own values serve for those left out.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> draws = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
        >>> DrawsPosterior(net, Gaussian(0.1), draws).predict(torch.ones(1, 1)).mean
        tensor([[2.]])
    """

    kind = "draws"

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        draws: Sequence[Mapping[str, Tensor]],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        if not draws:
            raise ConfigurationError("A posterior of draws needs at least one draw; got none.")
        ordered = [in_network_order(net, draw, f"draw {i}") for i, draw in enumerate(draws)]
        names = list(ordered[0])
        for index, draw in enumerate(ordered):
            if list(draw) != names or not names:
                raise ConfigurationError(
                    "Every draw needs the same tensors, at least one; draw 0 has "
                    f"{names[:3]}, draw {index} has {list(draw)[:3]}."
                )
        super().__init__(net, likelihood, names, fixed)
        self._draws: list[Weights] = [
            {name: tensor.detach().clone() for name, tensor in draw.items()} for draw in ordered
        ]

    def __len__(self) -> int:
        return len(self._draws)

    @property
    def default_draws(self) -> int:
        """All of them."""
        return len(self._draws)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return next(iter(self._draws[0].values())).device

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = _CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        rounds, rest = divmod(count, len(self))
        order = list(range(len(self))) * rounds
        device = self.device if generator is None else generator.device
        extra = torch.randperm(len(self), generator=generator, device=device)[:rest]
        order += sorted(extra.tolist())
        for start in range(0, count, chunk):
            picked = [self._draws[index] for index in order[start : start + chunk]]
            yield {name: torch.stack([draw[name] for draw in picked]) for name in picked[0]}

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        self._draws = [{k: v.to(device) for k, v in draw.items()} for draw in self._draws]
        return super().to(device)

    def _own_blobs(self) -> Blobs:
        return {f"draw-{index:06d}": draw for index, draw in enumerate(self._draws)}

    @classmethod
    def _from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> DrawsPosterior:  # fmt: skip
        names = sorted(name for name in stored.blob_names if name.startswith(f"{prefix}draw-"))
        draws = [stored.load(name) for name in names]
        return cls(net, likelihood, draws, load_if_stored(stored, f"{prefix}fixed"))
