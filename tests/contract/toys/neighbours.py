"""A strategy whose posterior has no weights: draws are the targets of near training examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.strategies import Strategy


class NeighboursPosterior(Posterior):
    """Each draw is the target of one of the nearest training examples."""

    kind = "toy neighbours"

    def __init__(self, likelihood: Likelihood, inputs: Tensor, targets: Tensor) -> None:
        super().__init__(likelihood)
        self.inputs, self.targets = inputs, targets

    def predict(self, inputs: Tensor, draws: int | None = None, seed: int = 0) -> Predictive:
        generator = torch.Generator().manual_seed(seed)
        near = torch.cdist(inputs.flatten(1), self.inputs).argsort(1)[:, :8]
        chosen = torch.randint(near.shape[1], (draws or 8, len(near)), generator=generator)
        return self.likelihood.predictive(self.targets[near.gather(1, chosen.T).T])

    def blobs(self) -> dict[str, Mapping[str, Tensor]]:
        return {"examples": {"inputs": self.inputs, "targets": self.targets}}

    @classmethod
    def from_stored(
        cls, stored: Any, entry: Any, net: Any, likelihood: Likelihood, prefix: str
    ) -> NeighboursPosterior:
        return cls(likelihood, **stored.load(f"{prefix}examples"))


class Neighbours(Strategy):
    """Trains the network as a point estimate, and remembers the training data."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = self.split(batch)
        return self.target.data_energy(self.net(inputs)[None], targets)[0]

    def finish(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        inputs, targets = zip(*(self.split(batch) for batch in batches), strict=True)
        return {"inputs": torch.cat(inputs).flatten(1), "targets": torch.cat(targets)}

    def posterior(self) -> NeighboursPosterior:
        return NeighboursPosterior(self.likelihood, **self.finished)


CONTRACT = "strategy", Neighbours
