r"""Deep ensembles: many networks trained side by side as one program.

Every member m is trained by an ordinary optimizer on the mean energy of its own weights,

.. math::
    \bar U(w_m) = -\tfrac1n\sum_i\log p(y_i\mid x_i,w_m) - \tfrac1N\log p(w_m),

from initial values of its own, and the members are draws of one posterior whose predictive
distribution is the mixture of theirs. (Lakshminarayanan et al., 2017, *Simple and Scalable
Predictive Uncertainty Estimation using Deep Ensembles*.) The weights of all M members are one
(M, P) parameter, run through the network as a stack (see :mod:`lightning_bnn.stacked`) or in a
loop, whichever is faster. The loss is the sum over members, gradients are clipped by member, and a
member whose energy is not finite is dropped: no member touches another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import Unpack

from lightning_bnn.bank import DataEnergy, View, check_ids
from lightning_bnn.checks import check_flag, check_whole
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
from lightning_bnn.ensembles.optimizers import (
    MemberOptimizers,
    check_factories,
    make_optimizer,
    make_schedulers,
)
from lightning_bnn.ensembles.pilot import HELD_OUT, NoisePilot, held_out, pilot_steps
from lightning_bnn.ensembles.prior_function import start_both, with_prior_function
from lightning_bnn.ensembles.randomise import (
    AnchoredPrior,
    Randomise,
    check_randomise,
    draw_offsets,
    noisy_targets,
)
from lightning_bnn.ensembles.snapshots import SnapshotStore, cycle_ends, cycle_factor
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.initialise import (
    Start,
    build_network,
    differs_in_size,
    is_untrained,
    start_at_prior,
    start_members,
)
from lightning_bnn.lightning import (
    StochasticWeightAveraging,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bnn.likelihoods import Gaussian, Likelihood
from lightning_bnn.mixtures import reshape_targets
from lightning_bnn.network import plain_network, warn_if_compiled
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior
from lightning_bnn.posteriors.prior import GivenPrior, starting_network
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import member_seed, random_seed
from lightning_bnn.selection import select
from lightning_bnn.stacked import Mode
from lightning_bnn.strategies.bank_strategy import BankStrategy
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory
from lightning_bnn.strategies.best_weights import BestWeights
from lightning_bnn.strategies.resume import ResumableLoader
from lightning_bnn.strategies.schedule import (
    NamedSchedule,
    SchedulerFactory,
    check_scheduler,
    fit_schedules,
    steps_of_fit,
)
from lightning_bnn.target import each_tensor

__all__ = ["DeepEnsemble"]

NetworkFactory = Callable[[], nn.Module]

_SPREAD = 0.1
_LEARNED = "(learned by the likelihood)"  # no name of a network's tensor


class DeepEnsemble(BankStrategy):
    """An ensemble of networks as one Lightning module.

    Args:
        net: A function that builds the network, called once for each member, and again for its
            prior function if it has one; or a network, each member of which starts as ``start``
            says. Yours stays as it is.
        likelihood: How outputs of the network give targets. What it learns, each member learns
            for itself.
        prior: One prior for all weights, or a mapping from name patterns to priors. A posterior is
            one, too (see :class:`~lightning_bnn.PosteriorPrior`).
        members: How many members are trained side by side, or their numbers: ``members=[3]``
            trains alone what would be the fourth of ``members=10``.
        start: Where the members of a network start. ``"reset"``: at new initial values;
            ``"around"``: at its weights, all members but number 0 perturbed; ``"auto"``: reset,
            and at draws of a posterior where that is the prior; a posterior: at its draws; or a
            list of networks. But for ``"reset"`` and ``"auto"``, a function in ``net`` is called
            once.
        num_data: The number of training examples; found from the training data if left out.
        independent_batches: Whether each member sees the training data in an order of its own;
            by default all share each batch, which is faster. A loader that yields
            :class:`~lightning_bnn.ensembles.MemberBatch` gives each member what it likes, with
            this option on.
        chunk: The most members that run at a time, to bound memory; by default all.
        mode: How members run: ``"stacked"``, ``"loop"``, or ``"auto"``: whichever is faster on
            the first batch.
        optimizer: Makes the optimizer from parameters; by default Adam, at the rate of
            :func:`lightning_bnn.strategies.schedule.peak_rate`. A list has one for each member.
        scheduler: ``"auto"``, ``"cosine"``, None or what makes a learning-rate scheduler from an
            optimizer (see :class:`~lightning_bnn.strategies.base.Strategy`); a list has one for
            each member.
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        adversarial: ε of adversarial training, a share of each input's range, such as 0.01 (see
            :mod:`lightning_bnn.ensembles.adversarial`).
        bootstrap: Whether examples count differently for each member, by fixed weights that are
            N times a draw of Dirichlet(1, ..., 1) (see :mod:`lightning_bnn.ensembles.bootstrap`).
        randomise: Randomised MAP. ``"targets and anchors"``: each member's prior is centred at a
            draw of it, and its targets carry noise of the likelihood's size; on a linear model
            the members are then draws of the exact posterior. The size is that of
            ``Gaussian(scale)``; with ``Gaussian(learn=True)`` a pilot finds it, in the first
            two fifths of the fit (see
            :mod:`lightning_bnn.ensembles.pilot`). ``"anchors"``: the former only, which is not
            exact: the spread is too small (see :mod:`lightning_bnn.ensembles.randomise`).
        prior_function: β, to add β times a fixed random network to each member (see
            :class:`~lightning_bnn.ensembles.RandomPriorFunction`, which the members then are).
        snapshots: Train in so many cycles of the learning rate and keep the members at the end of
            each (see :mod:`lightning_bnn.ensembles.snapshots`).
        restore_best: Whether each member goes back to its best weights by validation when a fit
            ends, as if it had been trained alone with early stopping. Members are scored one by
            one, by their negative log likelihood on the (first) validation data; without these,
            with ``snapshots=`` or with a callback that averages weights, nothing is restored. It
            is done before a checkpoint of the end of the last epoch is written; such a checkpoint
            has the last weights, too, from which a longer fit resumes exactly.
        seed: The root of all members' seeds; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see
            :class:`~lightning_bnn.strategies.base.DataOptions`).

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import Normal
        >>> ensemble = DeepEnsemble(
        ...     lambda: nn.Linear(2, 1), Gaussian(0.1), Normal(0.0, 1.0), members=4, num_data=100)
        >>> ensemble.energies((torch.randn(8, 2), torch.randn(8, 1))).shape
        torch.Size([4])
        >>> len(ensemble.posterior())
        4
    """

    def __init__(
        self,
        net: nn.Module | NetworkFactory,
        likelihood: Likelihood,
        prior: GivenPrior | None = None,
        members: int | Sequence[int] = 5,
        start: Start | Literal["auto"] = "auto",
        num_data: int | None = None,
        independent_batches: bool = False,
        chunk: int | None = None,
        mode: Mode = "auto",
        optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None,
        scheduler: NamedSchedule | SchedulerFactory | Sequence[SchedulerFactory] | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        adversarial: float | None = None,
        bootstrap: bool = False,
        randomise: Randomise | None = None,
        prior_function: float | None = None,
        snapshots: int | None = None,
        restore_best: bool = True,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        ids = check_ids(members)
        root = random_seed() if seed is None else check_whole("seed", seed, 0)
        factory = None if isinstance(net, nn.Module) else net
        auto = isinstance(start, str) and start == "auto"
        if isinstance(start, str) and start == "auto":
            start = "reset"
        reset = isinstance(start, str) and start == "reset"
        built = factory is not None and reset
        # where members start around one network, it must not depend on which of them are trained
        nets = [
            net if isinstance(net, nn.Module) else build_network(net, root, number)
            for number in (ids if built else [0])
        ]
        warn_if_compiled(nets[0])
        nets = [plain_network(one) for one in nets]
        if not reset:
            nets[0] = starting_network(nets[0], prior)
        begin = partial(
            start_members,
            members=ids,
            spread=_SPREAD,
            noun="member",
            option="net" if reset else "start",
        )
        template, stacked = nets[0], begin(nets[0], start=nets if built else start, seed=root)
        if factory is None and reset and differs_in_size(template, stacked):
            rank_zero_warn(
                f"start='reset' starts the members at the initial values of PyTorch's layers, and "
                f"the weights of {type(template).__name__} are of another size: trained, or "
                "initialised in another way. Pass start='around' to start from trained weights, or "
                "a function that builds the network to have its own initial values."
            )
        if prior_function is not None:
            fixed = begin(
                template,
                start="reset" if factory is None else factory,
                seed=member_seed(root, 0, "prior function"),
                option="net",
            )
            template = with_prior_function(template, prior_function)
            stacked = start_both(template, stacked, fixed)
            if isinstance(prior, Mapping):
                prior = {f"net.{pattern}": chosen for pattern, chosen in prior.items()}
        begun = stacked
        if auto:
            stacked = start_at_prior(template, prior, stacked, ids, root)
        super().__init__(
            template, likelihood, num_data, scheduler_interval=scheduler_interval, **data
        )
        check_factories("optimizer", optimizer, len(ids))
        check_schedulers(scheduler, len(ids))
        learned = dict(self.likelihood.named_parameters())
        names = select(self.net)
        self._build_bank(
            stacked, prior, ids, names, num_data, learned=learned, mode=mode, chunk=chunk
        )
        self.likelihood.requires_grad_(False)  # each member has its own in the bank
        if built:
            _check_pretrained(self.prior, self.weights.detach())
        if adversarial is not None:
            check_adversarial(adversarial)
        if randomise is not None:
            check_randomise(randomise, self.likelihood, self.prior)
        if snapshots is not None and scheduler not in (None, "auto"):
            raise ConfigurationError(
                "snapshots= has a learning-rate schedule of its own, cosine cycles; leave "
                "scheduler= out."
            )
        self.pilot: NoisePilot | None = None
        if randomise == "targets and anchors" and self.bank.learned is not None:
            if snapshots is not None:
                raise ConfigurationError(
                    "randomise='targets and anchors' with Gaussian(learn=True) begins with a "
                    "pilot, and snapshots= has cycles over the whole fit. Give the noise, as "
                    "Gaussian(scale=0.1), or leave snapshots= out."
                )
            self.pilot = NoisePilot(*self.bank.learned.shape)
        self.seed = root
        self.independent_batches = check_flag("independent_batches", independent_batches)
        self.bootstrap = check_flag("bootstrap", bootstrap)
        self.adversarial, self.randomise = adversarial, randomise
        self.input_range = None if adversarial is None else InputRange(int(independent_batches))
        self._statistics = {name for name, _ in self.net.named_buffers()}
        self._kept: dict[str, tuple[Any, Tensor]] = {}
        self._examples: int | Tensor | None = None  # how many, or the indices of a part
        self._optimizers, self._schedulers = optimizer, scheduler
        given = None if isinstance(start, str) else start
        if stacked is not begun:
            self._untrained = False
        elif factory is None and reset:
            self._untrained = True
        elif isinstance(given, WeightPosterior):
            self._untrained = False
        elif isinstance(given, Sequence):
            self._untrained = is_untrained(given[0])
        self.snapshots = None if snapshots is None else SnapshotStore(snapshots, self._state())
        if check_flag("restore_best", restore_best) and snapshots is None:
            self.best = BestWeights(len(ids))
        self._optimizer_names: list[str] = []
        self._cycle_ends: list[int] = []
        self._cycle_start = 0

    @property
    def members(self) -> int:
        """K, the number of members."""
        return len(self.bank)

    # ---------------------------------------------------------------- what members see

    # All that is random is a function of the root seed and the member's number, so that a member
    # alone is trained as it is beside others, and nothing of it needs a place in a checkpoint.

    def energies(self, batch: Any) -> Tensor:
        """The mean energy of every member, (K,), estimated on a batch."""
        seen = as_member_batch(batch, self.members, self.independent_batches, self._indexed)
        if self.input_range is not None:
            self.input_range.update(check_inputs(self.split(seen.batch)[0]))
        return super().energies(seen)

    def view(self, rows: slice, batch: MemberBatch) -> View:
        """What the members in some rows see of a batch."""
        inputs, targets = self.split(batch.batch)
        own, indices = self.independent_batches, batch.indices
        if own:
            inputs, targets, indices = (
                each_tensor(lambda tensor: tensor[rows], part)
                for part in (inputs, targets, indices)
            )
        seen = View(inputs, targets, own_inputs=own, own_targets=own)
        if self.bootstrap:
            assert indices is not None
            seen.counts = self._counts(rows, indices)
        if self.piloting:
            assert self.pilot is not None
            assert indices is not None
            self._hold_out(self.pilot, rows, seen, indices)
        elif self.randomise is not None:
            seen.prior = AnchoredPrior(self.prior, self._offsets()[rows])
        if self.randomise == "targets and anchors" and not self.piloting:
            assert isinstance(self.likelihood, Gaussian)
            assert indices is not None
            noise = None if self.pilot is None else self.pilot.noise
            scale = self.likelihood.initial_scale if noise is None else noise[rows]
            seen.targets = noisy_targets(scale, targets, self._seeds()[rows], indices)
            seen.own_targets = True
        if self.adversarial is not None:
            seen.attack = partial(self._attack, rows)
        return seen

    # ---------------------------------------------------------------- the pilot

    @property
    def piloting(self) -> bool:
        """Whether the noise of targets is still to be found."""
        return self.pilot is not None and self.pilot.running

    def _hold_out(self, pilot: NoisePilot, rows: slice, seen: View, indices: Tensor) -> None:
        """Leave examples out of what members learn from, and let the pilot see their residuals."""
        held = held_out(self._seeds()[rows], indices)
        counts = (~held).to(torch.promote_types(self.weights.dtype, torch.float32)) / (1 - HELD_OUT)
        seen.counts = counts if seen.counts is None else seen.counts * counts

        def watch(outputs: Tensor) -> None:
            shape = outputs.shape if seen.own_targets else outputs.shape[1:]
            pilot.add(rows, outputs - reshape_targets(seen.targets, shape), held)

        seen.watch = watch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The summed energies of a batch, each checked; in the pilot also the residuals."""
        loss = super().training_step(batch, batch_idx)
        if self.pilot is None:
            return loss
        if self.pilot.noise is None:
            together = partial(self.trainer.strategy.reduce, reduce_op="sum")
            one = self.trainer.world_size == 1
            self.pilot.end_step(self.global_step, (lambda sums: sums) if one else together)
        else:
            self.log("noise_sd", self.pilot.noise.mean().float())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Where the pilot is over, hold its noise and begin a schedule for the rest of the fit."""
        pilot = self.pilot
        if pilot is None or not pilot.running or self.global_step < pilot.steps:
            return
        assert self.bank.learned is not None
        noise, learned = pilot.end(), self.bank.learned.detach().double().exp().cpu()
        if noise.isinf().any():
            rank_zero_warn(
                "The pilot of randomise='targets and anchors' held out no example of "
                f"{self.target.num_data}: the noise is that of the training residuals, which is "
                "too small. Give it, as Gaussian(scale=0.1)."
            )
        noise = torch.where(noise.isinf(), learned, noise)
        with torch.no_grad():
            self.bank.learned.copy_(noise.log())
        pilot.noise = noise
        if self.best is not None:
            self.best = BestWeights(self.members)
        self.trainer.strategy.setup_optimizers(self.trainer)  # rates and schedules begin anew
        fit_schedules(self.trainer, self.lr)
        shown = "; ".join(", ".join(f"{sd:.3g}" for sd in row) for row in noise.tolist())
        rank_zero_info(
            f"A pilot of {pilot.steps} steps found the noise {shown} (sd) of the targets, for the "
            f"members {self.ids}, which go on with it."
        )

    def phase(self) -> dict[str, str]:
        """The pilot in the progress bar."""
        if self.pilot is None or not self.pilot.running:
            return {}
        return {"phase": f"pilot {self.global_step}/{self.pilot.steps}"}

    def _counts(self, rows: slice, indices: Tensor) -> Tensor:
        """How much examples count for the members in some rows, by their bootstrap weights."""
        counts = bootstrap_weights(self._seeds()[rows], indices, self._means()[rows])
        return counts.to(torch.promote_types(self.weights.dtype, torch.float32))

    def _attack(
        self,
        rows: slice,
        data_energy: DataEnergy,
        inputs: Tensor,
        own_inputs: bool,
        tensors: Mapping[str, Tensor],
    ) -> Tensor:
        """The mean of the data energies at the inputs and at inputs moved against each member."""
        assert self.input_range is not None
        assert self.adversarial is not None
        if not own_inputs:
            inputs = inputs.expand(rows.stop - rows.start, *inputs.shape)
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            real = data_energy(inputs, True, tensors)
            total = real.sum()
        # the graph is needed again, unless nobody asks for gradients
        (gradient,) = torch.autograd.grad(total, inputs, retain_graph=torch.is_grad_enabled())
        extent = self.input_range.extent
        extent = extent[rows, None] if own_inputs else extent
        moved = fast_gradient_sign(inputs, gradient, self.adversarial, extent)
        # running statistics are those of the real inputs: the others go to copies
        copies = {n: t.clone() if n in self._statistics else t for n, t in tensors.items()}
        other = data_energy(moved, True, copies)
        return (real if torch.is_grad_enabled() else real.detach()).add(other) / 2

    @property
    def _indexed(self) -> str | None:
        """The option that needs the examples' indices, if one does."""
        if self.bootstrap:
            return "bootstrap=True"
        noisy = self.randomise == "targets and anchors"
        return "randomise='targets and anchors'" if noisy else None

    def _keep(self, name: str, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made anew only where what it depends on has changed."""
        key = (self.seed, self.weights.device, key)
        if name not in self._kept or self._kept[name][0] != key:
            self._kept[name] = (key, make())
        return self._kept[name][1]

    def _member_seeds(self, purpose: str) -> list[int]:
        return [member_seed(self.seed, number, purpose) for number in self.ids]

    def _seeds(self) -> Tensor:
        """The members' seeds of all that is computed by hashing, (K,)."""
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
        key = examples if isinstance(examples, int) else examples.numpy().tobytes()
        return self._keep("means", key, lambda: bootstrap_means(self._seeds(), examples))

    def inputs_of(self, batch: Any, row: int) -> Any:
        """The inputs that the member in a row sees of a training batch."""
        if not isinstance(batch, MemberBatch):
            return super().inputs_of(batch, row)
        inputs = super().inputs_of(batch.batch, row)
        return each_tensor(lambda t: t[row], inputs) if self.independent_batches else inputs

    def blame(self, batch: Any) -> str:
        """Which part of a batch is not finite; if none is, what to do."""
        return super().blame(batch.batch if isinstance(batch, MemberBatch) else batch)

    def batch_size(self, batch: Any) -> int | None:
        """The number of examples that each member sees in a batch."""
        if not isinstance(batch, MemberBatch):
            return super().batch_size(batch)
        if not self.independent_batches:
            return super().batch_size(batch.batch)
        return next((tensor.shape[1] for tensor in tensors_of(batch.batch)), None)

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
            self._examples = part

    # ---------------------------------------------------------------- members that diverge

    # all members predict: nothing of the NLL is left to chance once they are trained
    predicts_with_samples = False
    drops_diverged = True

    def on_diverged(self, rows: list[int], where: str, batch: Any) -> None:
        """Say which members were dropped; stop where none is left."""
        names = ", ".join(str(self.ids[row]) for row in rows)
        left = int(self.alive.sum())
        if not left:
            raise NonFiniteError(
                f"The energy of member {names} is not finite {where}, and no other member is left. "
                f"{self.blame(batch)} The weights are those of the last step; the checkpoints "
                "before it are good."
            )
        rank_zero_warn(
            f"The energy of member {names} is not finite {where}: dropped. The other {left} go on "
            "untouched. A lower learning rate or gradient clipping may keep all."
        )

    # ---------------------------------------------------------------- stepping

    def configure_optimizers(self) -> Any:
        """One optimizer for all members, or one for each, and their schedules."""
        layouts = (self.bank.layout, self.bank.learned_layout)
        stacked = list(zip(self.bank.stacked_parameters(), layouts, strict=False))
        schedules = self._chosen_schedule(self._schedulers, self._optimizers)
        adam: Any = self._adam(schedules)
        if self.snapshots is not None:
            adam = self._default_optimizer  # each cycle is annealed
            schedules = partial(LambdaLR, lr_lambda=lambda step: self._cycle_factor(step))
        optimizer = make_optimizer(
            self._optimizers,
            adam,
            stacked,
            one_each=isinstance(schedules, Sequence),
        )
        each = optimizer.members if isinstance(optimizer, MemberOptimizers) else [optimizer]
        for one in each:
            self._refuse_weight_decay(one)
        self._optimizer_names = [type(one).__name__ for one in each]
        self._compare_with_saved()
        interval = "step" if self.snapshots is not None else self._interval(schedules)
        make = None if schedules is None else partial(make_schedulers, schedules)
        return self._with_schedule(optimizer, make, interval)

    def on_after_backward(self) -> None:
        """Take away the gradients of dropped members, and show each optimizer its own."""
        if not self.reads_are_free(self.alive) or not self.alive.all():
            self.bank.drop_gradients()
        if self.pilot is not None and not self.pilot.running:
            assert self.bank.learned is not None
            if self.bank.learned.grad is not None:  # held; replicas expect that there is a gradient
                self.bank.learned.grad.zero_()
        optimizer = self.optimizers(use_pl_optimizer=False)
        if isinstance(optimizer, MemberOptimizers) and self._loss_scaler() is not None:
            optimizer.hand_out_gradients()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One step, and a snapshot if it ends a cycle."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.snapshots is None or len(self.snapshots) == self.snapshots.cycles:
            return
        # here, because a checkpoint of this step is made before on_train_batch_end
        if self.global_step + 1 - self._cycle_start >= self._cycle_ends[len(self.snapshots)]:
            state = self._state()
            if self.trainer.world_size > 1:  # ranks have running statistics of their own
                state = self.trainer.strategy.broadcast(state)
            self.snapshots.keep(state)

    def _cycle_factor(self, step: int) -> float:
        # asked for the first step before the number of steps is known
        return cycle_factor(step, self._cycle_ends) if self._cycle_ends else 1.0

    # ---------------------------------------------------------------- what it leaves behind

    def _state(self) -> dict[str, Tensor]:
        """All that a member has of its own, with a leading axis of members."""
        learned = {} if self.bank.learned is None else {_LEARNED: self.bank.learned.detach()}
        return {**self.current_draws(), **learned}

    def posterior(self) -> WeightPosterior:
        """The members that have not diverged, with equal weights; all their snapshots, if any.

        Where the likelihood learns, the members differ in it: then a mixture of them.
        """
        states, rows = self._states(), self._good_rows()
        if self.bank.learned is None:
            draws = [
                {name: tensor[row] for name, tensor in state.items()}
                for state in states
                for row in rows
            ]
            return DrawsPosterior(self.net, self.likelihood, draws)
        return MixturePosterior([self._member(row, [state]) for state in states for row in rows])

    def member_posteriors(self) -> dict[int, WeightPosterior]:
        """By number, each member that has not diverged, with all its snapshots, if any."""
        states = self._states()
        return {self.ids[row]: self._member(row, states) for row in self._good_rows()}

    def _states(self) -> list[dict[str, Tensor]]:
        """All that members have of their own: now, or at their snapshots."""
        kept = self.snapshots.snapshots() if self.snapshots is not None else []
        return kept or [self._state()]

    def _good_rows(self) -> list[int]:
        """The rows of the members that have not diverged."""
        # the last step may have been the one that made a member diverge
        good = self.alive & self.bank.finite()
        if not good.any():
            raise NonFiniteError(
                f"No member is left: the weights of the members {self.ids}, or what "
                "their likelihoods learned, are not finite. Train again with a lower learning rate "
                "or with gradient clipping."
            )
        rows: list[int] = good.nonzero().flatten().tolist()
        return rows

    def _member(self, row: int, states: Sequence[Mapping[str, Tensor]]) -> WeightPosterior:
        draws = [{name: tensor[row] for name, tensor in state.items()} for state in states]
        if self.bank.learned is None:
            return DrawsPosterior(self.net, self.likelihood, draws)
        parts = [
            DrawsPosterior(self.net, self._likelihood_with(draw.pop(_LEARNED)), [draw])
            for draw in draws
        ]
        return parts[0] if len(parts) == 1 else MixturePosterior(parts)

    def likelihood_of(self, row: int) -> Likelihood:
        """The likelihood with what the member in a row has learned."""
        if self.bank.learned is None:
            return self.likelihood
        return self._likelihood_with(self.bank.learned.detach()[row])

    def _likelihood_with(self, learned: Tensor) -> Likelihood:
        likelihood = deepcopy(self.likelihood)
        with torch.no_grad():
            for name, value in self.bank.learned_layout.views(learned).items():
                likelihood.get_parameter(name).copy_(value)
        return likelihood

    def _predict(self, inputs: Any) -> Predictive:
        """With all members, each once."""
        assert self._snapshot is not None
        return self._snapshot.predict(inputs)

    # ---------------------------------------------------------------- best weights by validation

    def scored_rows(self) -> list[int] | None:
        """The members that validation predicts with; none where a callback averages weights."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        averaging = WeightAveraging | StochasticWeightAveraging
        if self.piloting or any(isinstance(callback, averaging) for callback in callbacks):
            return None
        return self._good_rows()

    def _finish(self) -> None:
        self._restore_best()
        super()._finish()

    def go_back_to_best(self) -> list[int]:
        """Train on from the best weights of each member by validation; return who went back."""
        rows = self._better_before()
        if self.best is not None and rows.any():
            self.best.take(self.bank, rows)
        return [self.ids[row] for row in rows.nonzero().flatten().tolist()]

    def _better_before(self) -> Tensor:
        """Which members were better before the last round of validation; ranks agree on what."""
        best = self.best
        if best is None:
            return torch.zeros(self.members, dtype=torch.bool)
        worse = (best.rounds_since_best > 0) & (best.epoch >= 0) & ~best.exchanged
        rows = worse & self.alive.cpu()
        if rows.any() and self.trainer.world_size > 1:  # ranks have running statistics of their own
            best.load_state_dict(self.trainer.strategy.broadcast(best.state_dict()))
        return rows

    def _restore_best(self) -> None:
        """Go back to the best weights of each member that was better before the last round."""
        best, rows = self.best, self._better_before()
        if best is None or not rows.any():
            return
        best.exchange(self.bank, rows)
        restored = ", ".join(
            f"{self.ids[row]} (epoch {best.epoch[row]}, validation NLL {best.nll[row]:.4g}; "
            f"{best.last_nll[row]:.4g} at the end)"
            for row in rows.nonzero().flatten().tolist()
        )
        rank_zero_info(
            f"Restored the best weights by validation of member {restored}. Pass "
            "restore_best=False to keep the last ones."
        )

    # ---------------------------------------------------------------- fits and checkpoints

    def setup(self, stage: str) -> None:
        """Forget what is known of an earlier fit."""
        super().setup(stage)
        self._optimizer_names, self._cycle_ends = [], []

    def on_fit_start(self) -> None:
        """Let all ranks have one root seed."""
        super().on_fit_start()
        self.seed = self.trainer.strategy.broadcast(self.seed)

    def on_train_start(self) -> None:
        """Find N, and where cycles end."""
        super().on_train_start()
        if self.pilot is not None and self.pilot.running:  # rates fall to 0 at its end, too
            self.pilot.steps = self.pilot.steps or pilot_steps(steps_of_fit(self.trainer))
            fit_schedules(self.trainer, self.lr, self.pilot.steps)
        if self.snapshots is None:
            return
        if not self._saved:
            self.snapshots.clear()
        self._cycle_start = self._saved.get("cycle_start", self.global_step)
        total = self.trainer.estimated_stepping_batches - self._cycle_start
        if getattr(self.trainer, "fast_dev_run", False):  # too short for all of them, but a trial
            total = max(total, self.snapshots.cycles)
        self._cycle_ends = cycle_ends(total, self.snapshots.cycles)
        self._compare_with_saved()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the pilot stands, or what it found."""
        super().on_save_checkpoint(checkpoint)
        if self.pilot is not None:
            checkpoint["lightning_bnn"]["pilot"] = self.pilot.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Know what a pilot found, or where it stands."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lightning_bnn", {}).get("pilot")
        if self.pilot is not None and saved is not None:
            self.pilot.load_state_dict(saved)

    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to resume, as far as it is known yet."""
        known: dict[str, Any] = {}
        if self._optimizer_names:
            known["optimizer"] = self._optimizer_names
        if self._cycle_ends:
            known |= {"cycle_start": self._cycle_start, "cycle_ends": self._cycle_ends}
        return {
            **super().facts(),
            **known,
            "snapshots": None if self.snapshots is None else self.snapshots.cycles,
            "independent_batches": self.independent_batches,
            "adversarial": self.adversarial,
            "bootstrap": self.bootstrap,
            "randomise": self.randomise,
        }


def check_schedulers(scheduler: Any, members: int) -> None:
    """Raise unless it is the name of a schedule, None, a factory, or one for each member."""
    if isinstance(scheduler, str):
        check_scheduler(scheduler)
    else:
        check_factories("scheduler", scheduler, members)


def _check_pretrained(prior: BoundPrior, weights: Tensor) -> None:
    """Raise if a prior is centred on pretrained weights that each member has others of."""
    for start, stop, chosen, loc, _ in prior.segments():
        own = weights[:, start:stop]
        if chosen.loc == "pretrained" and not torch.equal(own, torch.as_tensor(loc).expand_as(own)):
            raise ConfigurationError(
                "A prior with loc='pretrained' is centred on the network's first weights, and "
                "net= gives each member others. Pass the pretrained network itself with "
                "start='around', or give the weights that differ a prior of their own by name."
            )
