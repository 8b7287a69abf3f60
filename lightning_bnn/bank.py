r"""A bank: K sets of one network's weights, trained side by side.

The weights that a strategy infers are one flat (K, P) parameter, so that an optimizer or a sampler
moves all sets at once; other trained weights (point estimates) and what each set's likelihood
learns are two more. Every set has buffers of its own, such as BatchNorm's running statistics. The
sets never touch each other: their mean energies

.. math::
    \bar U(w_k) = -\tfrac1n\sum_i\log p(y_i\mid x_i,w_k) - \tfrac1N\log p(w_k)

are summed, so that the gradient of a set is its own; gradients are clipped by set; and a set that
has diverged is marked in ``alive`` and takes no further part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_whole, is_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.flat import FlatPrior, KeptMemory, energies_in_chunks, split_weights
from lightning_bnn.network import network_tensors
from lightning_bnn.selection import FlatLayout
from lightning_bnn.stacked import Mode, StackedModule
from lightning_bnn.target import Target, each_tensor

__all__ = ["Bank", "View", "check_ids"]

DataEnergy = Callable[[Any, bool, Mapping[str, Tensor]], Tensor]


@dataclass
class View:
    """What some sets of a bank see of a batch.

    Args:
        inputs: The inputs; with ``own_inputs`` every tensor has a leading axis of sets.
        targets: The targets; with ``own_targets`` likewise.
        own_inputs: Whether each set has inputs of its own.
        own_targets: Whether each set has targets of its own.
        counts: How much each example counts for each set, (k, B); by default 1.
        prior: The prior of these sets, where it is not that of the target.
        attack: Computes the data energy in another way, from a function that gives it at inputs.
        watch: Gets the outputs of these sets at the inputs, once.
    """

    inputs: Any
    targets: Any
    own_inputs: bool = False
    own_targets: bool = False
    counts: Tensor | None = None
    prior: FlatPrior | None = None
    attack: Callable[[DataEnergy, Any, bool, Mapping[str, Tensor]], Tensor] | None = None
    watch: Callable[[Tensor], None] | None = None


class Bank(nn.Module):
    """K sets of one network's weights.

    Args:
        net: The network.
        stacked: All its parameters and saved buffers, with a leading axis of sets.
        ids: The number of each set: member 3 is member 3 wherever it is trained.
        names: The parameters that the strategy infers.
        points: Other parameters that are trained, as point estimates.
        learned: What the likelihood learns, for each set to have its own.
        mode: How sets run: ``"stacked"``, ``"loop"`` or ``"auto"``.
        chunk: The most sets that run at a time, to bound memory; by default all.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> stacked = {name: tensor.repeat(3, *[1] * tensor.dim())
        ...            for name, tensor in network_tensors(net).items()}
        >>> bank = Bank(net, stacked, ids=[0, 1, 2], names=["weight", "bias"])
        >>> len(bank), bank.weights.shape, bank(torch.zeros(5, 2)).shape
        (3, torch.Size([3, 3]), torch.Size([3, 5, 1]))
    """

    alive: Tensor
    points: nn.Parameter | None
    learned: nn.Parameter | None

    def __init__(
        self,
        net: nn.Module,
        stacked: Mapping[str, Tensor],
        ids: Sequence[int],
        names: Sequence[str],
        points: Sequence[str] = (),
        learned: Mapping[str, Tensor] | None = None,
        mode: Mode = "auto",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.ids = list(ids)
        self.chunk = None if chunk is None else check_whole("chunk", chunk, 1)
        own = dict(net.named_parameters())
        self.layout = FlatLayout({name: own[name] for name in names})
        self.weights = nn.Parameter(_flat_rows(stacked, self.layout))
        self.point_layout = FlatLayout({name: own[name] for name in points})
        rows = nn.Parameter(_flat_rows(stacked, self.point_layout)) if points else None
        self.register_parameter("points", rows)
        learned = learned or {}
        self.learned_layout = FlatLayout(learned)
        row = self.learned_layout.flatten(learned) if learned else None
        rows = None if row is None else nn.Parameter(row.repeat(len(self.ids), 1))
        self.register_parameter("learned", rows)
        self.register_buffer("alive", torch.ones(len(self.ids), dtype=torch.bool))
        # each set has buffers of its own, and frozen parameters where sets differ in them
        trained = {*names, *points}
        self.buffer_names = [
            name
            for name in network_tensors(net)
            if name not in trained and not (name in own and _all_equal(stacked[name], own[name]))
        ]
        for index, name in enumerate(self.buffer_names):
            self.register_buffer(f"buffer_{index}", stacked[name].clone())
        self.stack = StackedModule(net, mode)
        self._convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in net.modules())
        self._memory, self._row_memory, self._point_memory = (KeptMemory() for _ in range(3))
        self._data_energies: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.ids)

    # ---------------------------------------------------------------- the sets as they stand

    def own_tensors(self) -> dict[str, Tensor]:
        """The buffers, and frozen parameters, that each set has of its own."""
        return {
            name: self.get_buffer(f"buffer_{index}") for index, name in enumerate(self.buffer_names)
        }

    def current(self) -> dict[str, Tensor]:
        """Weights and buffers of all sets with a leading axis of sets, as views."""
        points = {}
        if self.points is not None:
            points = self.point_layout.views(self.points.detach())
        return {**self.layout.views(self.weights.detach()), **points, **self.own_tensors()}

    def forward(self, inputs: Any) -> Tensor:
        """The outputs of the network with every set of weights, (K, batch, ...)."""
        return self.stack(self.current(), inputs)

    def stacked_parameters(self) -> list[nn.Parameter]:
        """The parameters with a leading axis of sets."""
        return [p for p in (self.weights, self.points, self.learned) if p is not None]

    def finite(self) -> Tensor:
        """Which sets have finite weights, (K,)."""
        finite = torch.ones_like(self.alive)
        for parameter in self.stacked_parameters():
            finite &= parameter.detach().isfinite().all(1)
        return finite

    # ---------------------------------------------------------------- the energy

    def energies(
        self,
        target: Target,
        view: Callable[[slice], View],
        check: Callable[[Tensor, Any], None] = lambda outputs, targets: None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """The mean energy of every set, (K,), estimated on a batch.

        Args:
            target: What is to be approximated.
            view: Gives what the sets in some rows see of the batch.
            check: Looks at the outputs of one set and its targets.
            loss_scale: The loss is multiplied by it (half precision), and so are gradients that
                are computed in chunks, for the small ones not to vanish.
        """
        self._data_energies = []
        run = partial(self._energies_of, target, view, check)
        chunk = self.chunk or len(self)
        if self._convolves and self.stack.mode == "loop":
            # what a convolution keeps for its backward pass is much larger than its weights: used
            # at once, as one network does, it is still in the caches and its memory serves again
            chunk = 1
        # parameters of the likelihood itself would get no gradient in chunks
        shared = self.learned is None and any(
            p.requires_grad for p in target.likelihood.parameters()
        )
        if chunk >= len(self) or shared:
            return run(slice(0, len(self)), *self.stacked_parameters())
        return energies_in_chunks(
            run, chunk, self._memory, *self.stacked_parameters(), scale=loss_scale
        )

    def _energies_of(
        self,
        target: Target,
        view: Callable[[slice], View],
        check: Callable[[Tensor, Any], None],
        rows: slice,
        weights: Tensor,
        *others: Tensor,
    ) -> Tensor:
        """The mean energies of the sets in ``rows``, whose parameters are given."""
        seen = view(rows)
        prior = target.prior if seen.prior is None else seen.prior
        assert prior is not None
        rest = list(others)
        points = rest.pop(0) if self.points is not None else None
        learned = self.learned_layout.views(rest.pop(0)) if self.learned is not None else None
        # one set without an axis of sets: stacking would copy its weights and their gradient
        single = len(weights) == 1 and not seen.own_inputs and seen.prior is None
        single = single and seen.attack is None
        if single:
            weights, points = weights.view(-1), None if points is None else points.view(-1)
        tensors, prior_energy = split_weights(weights, self.layout, prior, self._row_memory)
        if points is not None:
            assert target.point_prior is not None
            more, point_energy = split_weights(
                points, self.point_layout, target.point_prior, self._point_memory
            )
            tensors, prior_energy = {**tensors, **more}, prior_energy + point_energy
        place = rows.start if single else rows
        tensors |= {name: tensor[place] for name, tensor in self.own_tensors().items()}

        noise_energies: list[Tensor] = []

        def data_energy(inputs: Any, own_inputs: bool, tensors: Mapping[str, Tensor]) -> Tensor:
            if single:
                outputs = self.stack.single(tensors, inputs)[None]
            else:
                outputs = self.stack(tensors, inputs, own_inputs=own_inputs)
            first = each_tensor(lambda t: t[0], seen.targets) if seen.own_targets else seen.targets
            check(outputs[0], first)
            if seen.watch is not None:
                seen.watch(outputs.detach())
                seen.watch = None  # what follows is an attack's
            if (noise := target.noise_energy(outputs, learned)) is not None:
                noise_energies.append(noise)
            return target.data_energy(outputs, seen.targets, seen.own_targets, seen.counts, learned)

        if seen.attack is None:
            energy = data_energy(seen.inputs, seen.own_inputs, tensors)
        else:
            energy = seen.attack(data_energy, seen.inputs, seen.own_inputs, tensors)
        self._data_energies.append(energy.detach())
        if noise_energies:
            prior_energy = prior_energy + torch.stack(noise_energies).mean(0)
        return target.add_prior(energy, prior_energy)

    @property
    def data_energies(self) -> Tensor:
        """What the data have in the energies that were computed last, (K,); empty before."""
        return torch.cat(self._data_energies) if self._data_energies else torch.empty(0)

    # ---------------------------------------------------------------- gradients

    def total(self, energies: Tensor) -> Tensor:
        """The sum over the sets that are alive: what is minimised."""
        if self.alive.device.type == "cpu" and self.alive.numpy().all():  # fewer operations
            return energies.sum()
        return torch.where(self.alive, energies, 0.0).sum()

    def drop_gradients(self) -> None:
        """Take away the gradients of sets that are not alive, which may not be finite."""
        for parameter in self.stacked_parameters():
            if parameter.grad is not None:
                parameter.grad.masked_fill_(~self.alive[:, None], 0.0)

    def clip(self, limit: float, algorithm: str | None) -> None:
        """Clip gradients in place: by value, or by the norm of each set's own gradient.

        Example:
            >>> bank = Bank(nn.Linear(1, 1), {"weight": torch.zeros(2, 1, 1),
            ...             "bias": torch.zeros(2, 1)}, ids=[0, 1], names=["weight", "bias"])
            >>> bank.weights.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
            >>> bank.clip(1.0, "norm")
            >>> bank.weights.grad
            tensor([[0.6000, 0.8000],
                    [0.3000, 0.4000]])
        """
        clip_rows(
            [p.grad for p in self.stacked_parameters() if p.grad is not None], limit, algorithm
        )


def clip_rows(gradients: Sequence[Tensor], limit: float, algorithm: str | None) -> None:
    """Clip in place, by value or by the norm of each row over all tensors."""
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([gradient.norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale[:, None])


def check_ids(ids: int | Sequence[int], noun: str = "members") -> list[int]:
    """The numbers of members (or chains): 0 to K − 1, or those that are given.

    Example:
        >>> check_ids(3), check_ids([5])
        ([0, 1, 2], [5])
    """
    given: Any = ids
    several = range(int(given)) if is_whole(given) and given < 2**31 else given
    if not isinstance(several, Sequence) or isinstance(several, str):
        several = []
    numbers = [int(number) for number in several if is_whole(number)]
    if not numbers or len(set(numbers)) < len(several) or min(numbers) < 0:
        raise ConfigurationError(
            f"{noun}= is how many {noun} run, at least 1, or a list of their numbers, each once; "
            f"got {ids!r}."
        )
    return numbers


def _flat_rows(stacked: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """Stacked tensors as one (K, P) tensor; all must have one floating dtype."""
    first = layout.names[0]
    for name in layout.names:
        if stacked[name].dtype != stacked[first].dtype:
            raise ConfigurationError(
                "The stacked weights lie in one tensor and need one floating-point dtype; "
                f"{first!r} is {stacked[first].dtype}, {name!r} is {stacked[name].dtype}. Convert "
                "the network with net.float(), or freeze the odd ones with requires_grad_(False)."
            )
    return torch.cat([stacked[name].flatten(1) for name in layout.names], dim=1)


def _all_equal(stacked: Tensor, own: Tensor) -> bool:
    """Whether every row of a stack has the values of the network."""
    return torch.equal(stacked, own.detach().expand_as(stacked))
