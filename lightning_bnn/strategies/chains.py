"""Small parts of the SG-MCMC strategy: which chains, and what a sampler may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers import Sampler
from lightning_bnn.strategies.members import clip_by_row as clip_by_chain
from lightning_bnn.strategies.members import flatten_rows as flatten_chains
from lightning_bnn.strategies.members import member_numbers

__all__ = [
    "SamplerFactory",
    "chain_numbers",
    "check_sampler",
    "clip_by_chain",
    "flatten_chains",
    "make_sampler",
]

SamplerFactory = Callable[[Iterable[nn.Parameter]], Sampler]


def chain_numbers(chains: int | Sequence[int]) -> list[int]:
    """The numbers of the chains: 0 to K − 1, or those that are given.

    Example:
        >>> chain_numbers(3), chain_numbers([5])
        ([0, 1, 2], [5])
    """
    return member_numbers(chains, "chains")


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
