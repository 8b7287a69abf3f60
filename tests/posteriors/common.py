"""What the tests of posteriors share."""

import torch
from torch import nn


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def weight_of(posterior, count, seed=0, chunk=8):
    """The single weight of each of some draws, as whole numbers."""
    pieces = [piece["weight"] for piece in posterior.draws(count, generator(seed), chunk)]
    return torch.cat(pieces).flatten().int().tolist()
