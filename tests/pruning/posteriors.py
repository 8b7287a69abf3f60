"""Small posteriors of every kind, all of one network; and Gaussians over any network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_bnn import (
    DrawsPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
)
from lightning_bnn.likelihoods import Categorical, Gaussian, Likelihood


def network() -> nn.Module:
    """A convolution (18 weights), BatchNorm and a linear head (24 weights)."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def like(net: nn.Module, seed: int, *lead: int) -> dict[str, Tensor]:
    """A normal number for each parameter, in the network's order."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*lead, *parameter.shape, generator=noise)
        for name, parameter in net.named_parameters()
    }


def gaussian(seed: int = 0) -> GaussianPosterior:
    net = network()
    sd = {name: tensor.exp() for name, tensor in like(net, seed + 1).items()}
    return GaussianPosterior(net, Gaussian(0.3), like(net, seed), sd)


def low_rank(seed: int = 0, rank: int = 4, scale: float = 0.7) -> LowRankPosterior:
    net = network()
    variance = {name: tensor.square() for name, tensor in like(net, seed + 1).items()}
    deviations = like(net, seed + 2, rank) if rank else None
    return LowRankPosterior(net, Gaussian(0.3), like(net, seed), variance, deviations, scale=scale)


def draws(seed: int = 0, count: int = 6, chains: int = 2) -> DrawsPosterior:
    """With BatchNorm's statistics, one of which counts, in each draw."""
    net, sets = network(), []
    for index in range(count):
        statistics = {
            "1.running_mean": torch.full((2,), float(index)),
            "1.num_batches_tracked": torch.tensor(index),
        }
        sets.append({**like(net, 100 * seed + index), **statistics})
    return DrawsPosterior(net, Gaussian(0.3), sets, chains=chains)


def ensemble() -> MixturePosterior:
    """Members that are single draws."""
    return MixturePosterior([draws(seed, 1, 1) for seed in range(3)])


def multi_swag() -> MixturePosterior:
    return MixturePosterior([low_rank(seed) for seed in range(3)])


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics that are not those of a new network."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            noise = torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
            buffer.copy_(0.5 + noise.abs() if "var" in name else noise)
    return net


def gaussian_of(
    net: nn.Module, fixed: tuple[str, ...] = (), seed: int = 0, likelihood: Likelihood | None = None
) -> GaussianPosterior:
    """Over all parameters but the fixed ones, with ratios from about 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    own = {name: p for name, p in randomised(net, seed).named_parameters() if name not in fixed}
    mean = {name: noise(p) for name, p in own.items()}
    sd = {name: 0.1 + noise(p).abs() for name, p in own.items()}
    return GaussianPosterior(net, likelihood or Categorical(), mean, sd)


KINDS: dict[str, Callable[[], Posterior]] = {
    "gaussian": gaussian,
    "low_rank": low_rank,
    "diagonal": lambda: low_rank(rank=0),
    "draws": draws,
    "ensemble": ensemble,
    "multi_swag": multi_swag,
}
