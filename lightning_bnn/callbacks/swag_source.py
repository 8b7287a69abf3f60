"""Where snapshots of SWAG come from: a strategy of this package, or any LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.callbacks.draw_rule import strategy_of
from lightning_bnn.ensembles import MemberBatch
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors.batch_norm import training_batch_norm
from lightning_bnn.posteriors.weights import Weights
from lightning_bnn.target import split_batch

__all__ = ["SnapshotSource"]


@dataclass
class SnapshotSource:
    """The network in a module, its weights as they stand, and what they mean.

    Args:
        module: A strategy, which knows its network and likelihood, or any LightningModule.
        net_name: The name of the attribute of a LightningModule that is the network, or
            ``"self"``.
        given: The likelihood of a LightningModule.

    Example:
        >>> from lightning_bnn import SGMCMC
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> source = SnapshotSource(SGMCMC(nn.Linear(2, 1), Gaussian(0.1), chains=3), None, None)
        >>> {name: tuple(tensor.shape) for name, tensor in source.weights().items()}
        {'weight': (3, 1, 2), 'bias': (3, 1)}
    """

    module: pl.LightningModule
    net_name: str | None
    given: Likelihood | None

    def __post_init__(self) -> None:
        self.strategy: Any = strategy_of(self.module)
        name = type(self.module).__name__
        if self.strategy is not None:
            if self.net_name is not None or self.given is not None:
                raise ConfigurationError(
                    f"{name} has a network and a likelihood of its own. Leave net= and likelihood= "
                    "of SWAGMoments out."
                )
            return
        children = [child for child, _ in self.module.named_children()]
        if not self.net_name:
            raise ConfigurationError(
                f"SWAGMoments needs to know which part of {name} is the network. Pass net= with "
                f"the name of an attribute, such as {(children or ['model'])[0]!r}, or net='self' "
                "if the module itself is."
            )
        if not isinstance(self.given, Likelihood):
            raise ConfigurationError(
                f"SWAGMoments needs to know how the outputs of {name}'s network give targets. Pass "
                "likelihood= with one of lightning_bnn.likelihoods, such as Categorical(); got "
                f"{self.given!r}."
            )
        try:
            _ = self.net
        except AttributeError as error:
            raise ConfigurationError(
                f"net={self.net_name!r} is no module of {name}; it has {children}, and is itself "
                "net='self'."
            ) from error

    @property
    def net(self) -> nn.Module:
        """The network."""
        if self.strategy is not None:
            net: nn.Module = self.strategy.net
            return net
        assert self.net_name is not None
        return self.module.get_submodule("" if self.net_name == "self" else self.net_name)

    def current(self) -> Weights:
        """All that the module has of the network, with a leading axis of members."""
        if self.strategy is not None:
            draws: Weights = self.strategy.current_draws()
            return draws
        return {name: tensor.detach()[None] for name, tensor in network_tensors(self.net).items()}

    def weights(self, names: Sequence[str] | None = None) -> Weights:
        """The weights that are averaged, in the network's order.

        Those of the given names, or all that are trained.
        """
        current = self.current()
        if names is None:
            # a strategy freezes the network, whose weights its own stand in for; what members
            # differ in without training it (a prior function) is not in its layout
            layout = getattr(self.strategy, "_layout", None)
            trained = set(current if layout is None else layout.names)
            names = [
                name
                for name, parameter in self.net.named_parameters()
                if name in trained and (self.strategy is not None or parameter.requires_grad)
            ]
        if not names:
            raise ConfigurationError(
                "SWAGMoments averages weights that are trained, and no parameter of the network "
                "has requires_grad=True."
            )
        kinds = {current[name].dtype for name in names}
        if len(kinds) > 1:
            raise ConfigurationError(
                "SWAGMoments needs weights of one floating-point dtype; got "
                f"{sorted(str(kind) for kind in kinds)}. Convert the network with net.float()."
            )
        return {name: current[name] for name in names}

    def snapshot(self, names: Sequence[str] | None, step: int) -> tuple[list[str], Tensor]:
        """The names of the averaged weights, and a flat copy of them on the CPU, (members, P).

        It is of the weights' dtype, or float32 where that has fewer digits.
        """
        weights = self.weights(names)
        self.check_finite(weights, step)
        flat = torch.cat([tensor.flatten(1) for tensor in weights.values()], dim=1)
        dtype = torch.promote_types(flat.dtype, torch.float32)
        return list(weights), flat.to("cpu", dtype, copy=True)

    def surroundings(self, members: int) -> dict[str, Any]:
        """What belongs to a snapshot beside its weights, as copies on the CPU.

        The buffers, what the likelihood of each member has learned, which members are left, and
        the names of the BatchNorm layers that are in training mode.
        """
        current = self.current()
        buffers = {name: current[name] for name, _ in self.net.named_buffers() if name in current}
        learned = [self.likelihood(place).state_dict() for place in range(members)]
        return {
            "buffers": _copy_to_cpu(buffers),
            "learned": [_copy_to_cpu(one) for one in learned],
            "alive": self.alive(members),
            "batch_norm": training_batch_norm(self.net),
        }

    def alive(self, members: int) -> list[int]:
        """The places of the members that were not dropped."""
        alive = getattr(self.strategy, "alive", None)
        kept = alive.tolist() if isinstance(alive, Tensor) else [True] * members
        return [place for place, good in enumerate(kept) if good]

    def number(self, place: int) -> int:
        """The number of the member at a place, as the strategy counts them."""
        for name in ("member_numbers", "chain_numbers"):
            if numbers := getattr(self.strategy, name, None):
                return int(numbers[place])
        return place

    def likelihood(self, place: int) -> Likelihood:
        """How outputs of a member give targets, with what it has learned so far."""
        if self.strategy is None:
            assert self.given is not None
            return self.given
        own = getattr(self.strategy, "member_likelihood", None)
        chosen: Likelihood = self.strategy.likelihood if own is None else own(place)
        return chosen

    def inputs(self, batch: Any, place: int) -> Any:
        """The inputs that a member sees of a training batch."""
        own = getattr(self.module, "split", None)
        split = own if callable(own) else split_batch
        if not isinstance(batch, MemberBatch):
            return split(batch)[0]
        inputs = split(batch.batch)[0]
        if not self.strategy.independent_batches:
            return inputs
        return tree_map(lambda leaf: leaf[place] if isinstance(leaf, Tensor) else leaf, inputs)

    def check_finite(self, weights: Weights, step: int) -> None:
        """Raise a NonFiniteError unless the weights that count are finite.

        A strategy that drops members does so in its next step, when it sees their energy: there it
        is enough that one is good.
        """
        bad: dict[int, str] = {}
        for name, tensor in weights.items():
            good = tensor.isfinite().reshape(len(tensor), -1).all(1).tolist()
            bad = {**{place: name for place, one in enumerate(good) if not one}, **bad}
        counting = self.alive(len(next(iter(weights.values()))))
        fallen = [place for place in counting if place in bad]
        if not fallen or (hasattr(self.strategy, "alive") and len(fallen) < len(counting)):
            return
        raise NonFiniteError(
            f"{bad[fallen[0]]!r} of member {self.number(fallen[0])} is not finite after step "
            f"{step}, and the snapshot was not taken. The moments are those of the snapshots "
            "before it. Lower the learning rate of the averaging phase (lr=), or clip gradients."
        )


def _copy_to_cpu(tensors: Weights) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
