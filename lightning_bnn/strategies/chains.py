"""Small parts of the SG-MCMC strategy: which chains, what a sampler may be, clipping by chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers import Sampler
from lightning_bnn.selection import FlatLayout

__all__ = ["SamplerFactory", "chain_numbers", "check_sampler", "clip_by_chain", "flatten_chains"]

SamplerFactory = Callable[[Iterable[nn.Parameter]], Sampler]


def chain_numbers(chains: int | Sequence[int]) -> list[int]:
    """The numbers of the chains: 0 to K − 1, or those that are given.

    Example:
        >>> chain_numbers(3), chain_numbers([5])
        ([0, 1, 2], [5])
    """
    if isinstance(chains, Integral) and not isinstance(chains, bool):
        chains = range(int(chains))
    several: Any = chains if isinstance(chains, Sequence) and not isinstance(chains, str) else []
    numbers = [int(number) for number in several if isinstance(number, Integral)]
    if not numbers or len(set(numbers)) < len(several) or min(numbers) < 0:
        raise ConfigurationError(
            "chains= is how many chains run, at least 1, or a list of their numbers, each once; "
            f"got {chains!r}."
        )
    return numbers


def check_sampler(sampler: Any) -> None:
    """Raise unless it can make a sampler; what the strategy adds must not be in it already."""
    if sampler is not None and not callable(sampler):
        raise ConfigurationError(
            f"sampler= makes a sampler, as partial(SGLD, lr=1e-3) does; got {sampler!r:.80}."
        )
    given = getattr(sampler, "keywords", {})
    for name, harmless in (("temperature", 1.0), ("num_data", None), ("seed", None)):
        if name in given and given[name] != harmless:
            raise ConfigurationError(
                f"sampler= has {name}={given[name]!r}; the strategy sets it. Pass {name}= to "
                "SGMCMC instead."
            )


def make_sampler(factory: Any, weights: nn.Parameter, **added: Any) -> Sampler:
    """The sampler of the chains' weights, with what the strategy adds."""
    try:
        sampler = factory([weights], **added)
    except TypeError as error:
        raise ConfigurationError(
            f"sampler= could not be called with parameters and {sorted(added)}: {error}. Pass "
            "partial(SGHMC, lr=1e-3) or the like; a function of your own must hand **options on."
        ) from error
    if not isinstance(sampler, Sampler):
        raise ConfigurationError(
            "sampler= makes one of lightning_bnn.samplers, as partial(SGLD, lr=1e-3) does; "
            f"got {type(sampler).__name__}. For an ordinary optimizer see warm_up_optimizer=."
        )
    return sampler


def flatten_chains(stacked: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """Stacked tensors as one (K, P) tensor; all must have one floating dtype."""
    kinds = {name: stacked[name].dtype for name in layout.names}
    odd = next((n for n, kind in kinds.items() if kind != kinds[layout.names[0]]), None)
    if odd is not None:
        raise ConfigurationError(
            "The chains' weights lie in one tensor and need one floating-point dtype; "
            f"{layout.names[0]!r} is {kinds[layout.names[0]]}, {odd!r} is {kinds[odd]}. Convert "
            "the network with net.float(), or freeze the odd ones with requires_grad_(False)."
        )
    return torch.cat([stacked[name].flatten(1) for name in layout.names], dim=1)


def clip_by_chain(gradients: Sequence[Tensor], limit: float, algorithm: str | None) -> None:
    """Clip in place, by value or by the norm of each chain's gradient over all tensors.

    Example:
        >>> gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> clip_by_chain([gradient], 1.0, "norm")
        >>> gradient
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([gradient.norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale[:, None])
