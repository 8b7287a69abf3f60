r"""Strategies whose members are stacked: the energy of every member, and nothing between them.

The trainable weights of M members are one (M, P) parameter, what their likelihoods learn another
one, and each member has buffers of its own. The loss is the sum over members of

.. math::
    \bar U(w_m) = -\tfrac1n\sum_i\log p(y_i\mid x_i,w_m) - \tfrac1N\log p(w_m),

so that the gradient of a member is its own. Gradients are clipped by member, and a member whose
energy is not finite is dropped while the others go on. A variant says by small methods what each
member sees: its inputs, its targets, how much an example counts, its prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_bnn.ensembles.options import check_whole
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.flat import FlatPrior, KeptMemory, energies_in_chunks, split_weights
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import network_tensors
from lightning_bnn.priors import BoundPrior, Normal, Prior, check_prior
from lightning_bnn.selection import FlatLayout, select
from lightning_bnn.stacked import Mode, StackedModule
from lightning_bnn.strategies.base import Strategy, batch_size
from lightning_bnn.strategies.members import clip_by_row, flatten_rows
from lightning_bnn.target import Target

__all__ = ["StackedMembers", "all_equal", "each_tensor"]


class StackedMembers(Strategy):
    """A strategy that trains M sets of weights of one network side by side.

    Args:
        net: The network.
        likelihood: How outputs of the network give targets; what it learns, each member learns.
        prior: One prior for all weights, or a mapping from name patterns to priors.
        numbers: The numbers of the members.
        begin: Gives all parameters and saved buffers of the network, with a leading axis of
            members: where they start.
        num_data: The number of training examples; found from the training data if left out.
        chunk: The most members that run at a time; by default all.
        mode: How members run: ``"stacked"``, ``"loop"`` or ``"auto"``.
        scheduler_interval: Whether a scheduler steps each ``"epoch"`` or each ``"step"``.
    """

    drops_diverged = True
    learned: nn.Parameter | None

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | None,
        numbers: Sequence[int],
        begin: Callable[[nn.Module], Mapping[str, Tensor]],
        num_data: int | None,
        chunk: int | None,
        mode: Mode,
        scheduler_interval: Literal["epoch", "step"],
    ) -> None:
        super().__init__(net, likelihood, num_data, scheduler_interval=scheduler_interval)
        if chunk is not None:
            check_whole("chunk", chunk, 1)
        self.member_numbers, self.chunk = list(numbers), chunk
        prior = Normal() if prior is None else prior
        own = dict(self.net.named_parameters())
        tensors = {name: own[name] for name in select(self.net)}
        check_prior(prior, tensors)
        stacked = begin(self.net)
        self._layout = FlatLayout(tensors)
        self.weights = nn.Parameter(flatten_rows(stacked, self._layout))
        self.prior = BoundPrior(prior, self.net, tensors)
        self.target = Target(self.likelihood, self.prior, num_data)
        # each member has buffers of its own, and frozen parameters where members differ in them
        others = [name for name in network_tensors(self.net) if name not in tensors]
        same = {name for name in others if name in own and all_equal(stacked[name], own[name])}
        self._own_names = [name for name in others if name not in same]
        for index, name in enumerate(self._own_names):
            self.register_buffer(f"member_buffer_{index}", stacked[name].clone())
        self.register_buffer("alive", torch.ones(self.members, dtype=torch.bool))
        learned = dict(self.likelihood.named_parameters())
        self._learned_layout = FlatLayout(learned)
        row = self._learned_layout.flatten(learned) if learned else None
        rows = None if row is None else nn.Parameter(row.repeat(self.members, 1))
        self.register_parameter("learned", rows)
        self.requires_grad_(False)  # the stacked tensors stand in for the network's own
        for parameter in self._stacked_parameters():
            parameter.requires_grad_(True)
        self._stack = StackedModule(self.net, mode)
        self._convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.net.modules())
        self._noise = StackedModule(_LogProb(self.likelihood), "stacked")
        self._memory, self._row_memory = KeptMemory(), KeptMemory()

    @property
    def members(self) -> int:
        """M, the number of members."""
        return len(self.member_numbers)

    @property
    def ids(self) -> list[int]:
        """The numbers of the members."""
        return self.member_numbers

    @property
    def alive(self) -> Tensor:
        """Which members have not been dropped, boolean, (M,); a buffer."""
        alive: Any = self.__getattr__("alive")  # where modules look up buffers
        return alive

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that training changes."""
        return self._layout.names

    def _stacked_parameters(self) -> list[nn.Parameter]:
        return [self.weights] if self.learned is None else [self.weights, self.learned]

    def _own_tensors(self) -> dict[str, Tensor]:
        return {
            name: self.get_buffer(f"member_buffer_{index}")
            for index, name in enumerate(self._own_names)
        }

    # ---------------------------------------------------------------- the energy

    def energies(self, batch: Any) -> Tensor:
        """The mean energy of every member, (M,), estimated on a batch."""
        run = partial(self._energies_of, batch)
        chunk = self.chunk or self.members
        if self._convolves and self._stack.mode == "loop":
            # what a convolution keeps for its backward pass is much larger than its weights: used
            # at once, as one network does, it is still in the caches and its memory serves again
            chunk = 1
        if chunk >= self.members:
            return run(slice(0, self.members), *self._stacked_parameters())
        scaler = self._loss_scaler()
        scale = 1.0 if scaler is None else scaler.get_scale()
        return energies_in_chunks(
            run, chunk, self._memory, *self._stacked_parameters(), scale=scale
        )

    def _loss_scaler(self) -> Any:
        """What multiplies the loss in half precision, for its gradients not to vanish."""
        if self._trainer is None:
            return None
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _energies_of(
        self, batch: Any, rows: slice, weights: Tensor, learned: Tensor | None = None
    ) -> Tensor:
        """The mean energies of the members in ``rows``, whose weights are given."""
        prior = self._prior_of(rows)
        tensors, prior_energy = split_weights(weights, self._layout, prior, self._row_memory)
        tensors |= {name: tensor[rows] for name, tensor in self._own_tensors().items()}
        inputs, own_inputs = self._inputs_of(rows, batch)
        data_energy = self._data_energy_of(rows, batch, tensors, learned, inputs, own_inputs)
        return data_energy + prior_energy / self.target.num_data

    def _data_energy_of(
        self,
        rows: slice,
        batch: Any,
        tensors: Mapping[str, Tensor],
        learned: Tensor | None,
        inputs: Any,
        own_inputs: bool,
    ) -> Tensor:
        """The mean data energies of some members at given inputs, (m,)."""
        targets = self._targets_of(rows, batch)
        outputs = self._stack(tensors, inputs, own_inputs=own_inputs)
        self.check("train", outputs[0], each_tensor(lambda target: target[0], targets))
        log_prob = self._log_prob(outputs, targets, learned)
        shares = self._shares_of(rows, batch)
        return -(log_prob if shares is None else log_prob * shares).mean(1)

    def _prior_of(self, rows: slice) -> FlatPrior:
        """The prior of some members."""
        return self.prior

    def _inputs_of(self, rows: slice, batch: Any) -> tuple[Any, bool]:
        """What some members see, and whether each has inputs of its own, with a leading axis."""
        return self.split(batch)[0], False

    def _targets_of(self, rows: slice, batch: Any) -> Any:
        """The targets of some members, with a leading axis of members."""
        count = rows.stop - rows.start
        return each_tensor(lambda t: t.expand(count, *t.shape), self.split(batch)[1])

    def _shares_of(self, rows: slice, batch: Any) -> Tensor | None:
        """How much each example counts for each of some members, (m, B); None for 1 each."""
        return None

    def _log_prob(self, outputs: Tensor, targets: Any, learned: Tensor | None) -> Tensor:
        """The log density of each example for each member, (m, B)."""
        if learned is not None:
            views = self._learned_layout.views(learned).items()
            named = {f"likelihood.{name}": tensor for name, tensor in views}
            try:
                return self._noise(named, (outputs, targets), own_inputs=True)
            except Exception:
                if self._noise.mode == "loop":
                    raise
                # it reads values, which only a loop can do; if it is at fault itself, that says so
                self._noise.mode = "loop"
                return self._noise(named, (outputs, targets), own_inputs=True)
        flat = each_tensor(lambda target: target.flatten(0, 1), targets)
        return self.likelihood.log_prob(outputs.flatten(0, 1), flat).view(outputs.shape[:2])

    def loss(self, batch: Any) -> Tensor:
        """The sum of the members' mean energies: each member's gradient is its own."""
        return self._sum_of_alive(self.energies(batch))

    def _sum_of_alive(self, energies: Tensor) -> Tensor:
        return torch.where(self.alive, energies, 0.0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The summed energies of a batch; members whose own is not finite are dropped."""
        energies = self.energies(batch)
        self._drop_diverged(energies.detach(), batch, batch_idx)
        loss = self._sum_of_alive(energies)
        mean = loss.detach() / self.alive.sum()
        self.log("train_loss", mean, prog_bar=True, batch_size=self._size_of(batch))
        return loss

    def _size_of(self, batch: Any) -> int | None:
        """The number of examples in a batch, for weighting logged means."""
        return batch_size(batch)

    def _drop_diverged(self, energies: Tensor, batch: Any, batch_idx: int) -> None:
        bad = ~energies.isfinite()
        if self.trainer.world_size > 1:  # not finite on one rank: dropped on all
            bad = self.trainer.strategy.reduce(bad.float(), reduce_op="sum") > 0
        fallen = bad & self.alive
        if not fallen.any():
            return
        names = ", ".join(str(self.member_numbers[k]) for k in fallen.nonzero().flatten().tolist())
        where = f"at step {self.global_step} (epoch {self.current_epoch}, batch {batch_idx})"
        if torch.equal(fallen, self.alive):
            culprit = self._blame(
                batch,
                "Inputs and targets are finite: lower the learning rate or clip gradients.",
            )
            raise NonFiniteError(
                f"The energy of member {names} is not finite {where}, and no other member is left. "
                f"{culprit} The weights are those of the last step; the checkpoints before it are "
                "good."
            )
        self.alive.logical_and_(~fallen)
        rank_zero_warn(
            f"The energy of member {names} is not finite {where}: dropped. The other "
            f"{int(self.alive.sum())} go on untouched. A lower learning rate or gradient clipping "
            "may keep all."
        )

    def on_after_backward(self) -> None:
        """Take away the gradients of dropped members, which may not be finite."""
        if not self.alive.all():
            for parameter in self._stacked_parameters():
                if parameter.grad is not None:
                    parameter.grad[~self.alive] = 0.0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each member's gradient by itself."""
        if gradient_clip_val:
            own_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
            if own_scale and self._loss_scaler() is not None:
                raise ConfigurationError(
                    f"gradient_clip_val={gradient_clip_val} cannot be kept: a fused "
                    f"{type(optimizer).__name__} takes the loss scale of half precision away only "
                    "in its step. Pass fused=False to it."
                )
            gradients = [p.grad for p in self._stacked_parameters() if p.grad is not None]
            clip_by_row(gradients, gradient_clip_val, gradient_clip_algorithm)

    # ---------------------------------------------------------------- the members as they stand

    def current_draws(self) -> dict[str, Tensor]:
        """The weights and buffers of all members as they stand, with a leading axis of members.

        They are views: copy what must outlive the next step. Dropped members are among them.
        """
        return {**self._layout.views(self.weights.detach()), **self._own_tensors()}

    def forward(self, inputs: Any) -> Tensor:
        """The outputs of every member's network, (M, batch, ...)."""
        return self._stack(self.current_draws(), inputs)


class _LogProb(nn.Module):
    """A likelihood's log density as the forward pass of a module, to run with other parameters."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, outputs: Tensor, targets: Any) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)


def each_tensor(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Change every tensor of a batch's part; most often it is one tensor, which is quicker."""
    if isinstance(values, Tensor):
        return change(values)
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, values)


def all_equal(stacked: Tensor, own: Tensor) -> bool:
    """Whether every row of a stack has the same values, those given."""
    return torch.equal(stacked, own.detach().expand_as(stacked))
