"""Variants of ensembles: what each member sees, each one option of ``DeepEnsemble``.

* ``independent_batches``: every member sees the data in an order of its own
  (:mod:`lightning_bnn.ensembles.batches`).
* ``bootstrap``: examples count differently for each member
  (:mod:`lightning_bnn.ensembles.bootstrap`).
* ``randomise``: anchors, and targets with noise (:mod:`lightning_bnn.ensembles.randomise`).
* ``adversarial``: inputs moved against the member (:mod:`lightning_bnn.ensembles.adversarial`).

All that is random is a function of the root seed and the member's number, so that a member alone
is trained as it is beside others, and nothing of it needs a place in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.ensembles.adversarial import (
    InputRange,
    check_adversarial,
    check_inputs,
    fast_gradient_sign,
)
from lightning_bnn.ensembles.batches import (
    MemberBatch,
    MemberBatches,
    as_member_batch,
    has_indices,
    subset_indices,
    tensors_of,
)
from lightning_bnn.ensembles.bootstrap import bootstrap_means, bootstrap_weights
from lightning_bnn.ensembles.randomise import (
    AnchoredPrior,
    Randomise,
    check_randomise,
    draw_offsets,
    noisy_targets,
)
from lightning_bnn.flat import FlatPrior
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.random import member_seed
from lightning_bnn.strategies.resume import ResumableLoader
from lightning_bnn.strategies.stacked_members import StackedMembers, each_tensor

__all__ = ["EnsembleVariants"]


class EnsembleVariants(StackedMembers):
    """Stacked members each of which may see other data; see the module for the options."""

    seed: int

    def _choose_variants(
        self,
        independent_batches: bool,
        adversarial: float | None,
        bootstrap: bool,
        randomise: Randomise | None,
    ) -> None:
        """Check and keep the options; called once by a constructor."""
        if adversarial is not None:
            check_adversarial(adversarial)
        if randomise is not None:
            check_randomise(randomise, self.likelihood, self.prior)
        self.independent_batches, self.bootstrap = bool(independent_batches), bool(bootstrap)
        self.adversarial, self.randomise = adversarial, randomise
        self.input_range = None if adversarial is None else InputRange(int(independent_batches))
        self._statistics = {name for name, _ in self.net.named_buffers()}
        self._kept: dict[str, tuple[Any, Tensor]] = {}
        self._examples: int | Tensor | None = None  # how many, or the indices of a part
        self._subset = b""

    @property
    def _indexed(self) -> str | None:
        """The option that needs the examples' indices, if one does."""
        if self.bootstrap:
            return "bootstrap=True"
        noisy = self.randomise == "targets and anchors"
        return "randomise='targets and anchors'" if noisy else None

    # ---------------------------------------------------------------- what follows from the seed

    def _keep(self, name: str, key: Any, make: Any) -> Tensor:
        """A tensor that is made anew only where what it depends on has changed."""
        key = (self.seed, self.weights.device, key)
        if name not in self._kept or self._kept[name][0] != key:
            self._kept[name] = (key, make())
        return self._kept[name][1]

    def _member_seeds(self, purpose: str) -> list[int]:
        return [member_seed(self.seed, number, purpose) for number in self.member_numbers]

    def _seeds(self) -> Tensor:
        """The members' seeds of all that is computed by hashing, (M,)."""
        device = self.weights.device
        return self._keep(
            "seeds", None, lambda: torch.tensor(self._member_seeds("variant"), device=device)
        )

    def _offsets(self) -> Tensor:
        weights = self.weights.detach()
        return self._keep(
            "offsets", weights.dtype, lambda: draw_offsets(self.prior, self._seeds(), weights)
        )

    def _means(self) -> Tensor:
        examples = self.target.num_data if self._examples is None else self._examples
        key = examples if isinstance(examples, int) else self._subset
        return self._keep("means", key, lambda: bootstrap_means(self._seeds(), examples))

    # ---------------------------------------------------------------- what members see

    def energies(self, batch: Any) -> Tensor:
        """The mean energy of every member, (M,), estimated on a batch."""
        seen = as_member_batch(batch, self.members, self.independent_batches, self._indexed)
        if self.input_range is not None:
            self.input_range.update(check_inputs(self.split(seen.batch)[0]))
        return super().energies(seen)

    def _prior_of(self, rows: slice) -> FlatPrior:
        if self.randomise is None:
            return self.prior
        return AnchoredPrior(self.prior, self._offsets()[rows])

    def _inputs_of(self, rows: slice, batch: MemberBatch) -> tuple[Any, bool]:
        inputs = self.split(batch.batch)[0]
        if self.independent_batches:
            return each_tensor(lambda tensor: tensor[rows], inputs), True
        return inputs, False

    def inputs_of(self, batch: Any, row: int) -> Any:
        """The inputs that a member sees of a training batch."""
        if not isinstance(batch, MemberBatch):
            return super().inputs_of(batch, row)
        inputs, separate = self._inputs_of(slice(row, row + 1), batch)
        return each_tensor(lambda tensor: tensor[0], inputs) if separate else inputs

    def _targets_of(self, rows: slice, batch: MemberBatch) -> Any:
        targets = self.split(batch.batch)[1]
        if self.independent_batches:
            targets = each_tensor(lambda tensor: tensor[rows], targets)
        if self.randomise == "targets and anchors":
            assert isinstance(self.likelihood, Gaussian)
            indices = self._indices_of(rows, batch)
            return noisy_targets(self.likelihood, targets, self._seeds()[rows], indices)
        if self.independent_batches:
            return targets
        return super()._targets_of(rows, batch.batch)

    def _shares_of(self, rows: slice, batch: MemberBatch) -> Tensor | None:
        if not self.bootstrap:
            return None
        indices = self._indices_of(rows, batch)
        shares = bootstrap_weights(self._seeds()[rows], indices, self._means()[rows])
        return shares.to(torch.promote_types(self.weights.dtype, torch.float32))

    def _indices_of(self, rows: slice, batch: MemberBatch) -> Tensor:
        assert batch.indices is not None
        return batch.indices[rows] if self.independent_batches else batch.indices

    def _data_energy_of(
        self,
        rows: slice,
        batch: Any,
        tensors: Mapping[str, Tensor],
        learned: Tensor | None,
        inputs: Any,
        own_inputs: bool,
    ) -> Tensor:
        if self.adversarial is None or self.input_range is None:
            return super()._data_energy_of(rows, batch, tensors, learned, inputs, own_inputs)
        if not own_inputs:
            inputs = inputs.expand(rows.stop - rows.start, *inputs.shape)
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            real = super()._data_energy_of(rows, batch, tensors, learned, inputs, True)
            total = real.sum()
        # the graph is needed again, unless nobody asks for gradients
        (gradient,) = torch.autograd.grad(total, inputs, retain_graph=torch.is_grad_enabled())
        extent = self.input_range.extent
        extent = extent[rows, None] if own_inputs else extent
        moved = fast_gradient_sign(inputs, gradient, self.adversarial, extent)
        # running statistics are those of the real inputs: the others go to copies
        copies = {n: t.clone() if n in self._statistics else t for n, t in tensors.items()}
        other = super()._data_energy_of(rows, batch, copies, learned, moved, True)
        return (real if torch.is_grad_enabled() else real.detach()).add(other) / 2

    # ---------------------------------------------------------------- batches

    def _resumable(self, loader: Any, seed: int) -> Any:
        made = super()._resumable(loader, seed)
        wanted = self.trainer.training and (self.independent_batches or self._indexed is not None)
        if wanted and isinstance(made, ResumableLoader) and has_indices(made.loader):
            orders = (lambda: self._member_seeds("order")) if self.independent_batches else None
            made.opener = MemberBatches(made.loader, orders)
        return made

    def on_train_epoch_start(self) -> None:
        """Find N, and how many examples there are indices of: a trainer may load other data."""
        super().on_train_epoch_start()
        loader: Any = self.trainer.train_dataloader
        known = isinstance(loader, ResumableLoader) and has_indices(loader.loader)
        self._examples = len(loader.dataset) if known else None
        if known and self.bootstrap and (part := subset_indices(loader.loader)) is not None:
            self._examples, self._subset = part, part.numpy().tobytes()

    def _blame(self, batch: Any, otherwise: str) -> str:
        return super()._blame(batch.batch if isinstance(batch, MemberBatch) else batch, otherwise)

    def _size_of(self, batch: Any) -> int | None:
        """The number of examples that each member sees in a batch."""
        if not isinstance(batch, MemberBatch):
            return super()._size_of(batch)
        if not self.independent_batches:
            return super()._size_of(batch.batch)
        return next((tensor.shape[1] for tensor in tensors_of(batch.batch)), None)
