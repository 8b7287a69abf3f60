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
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_bnn.ensembles.options import build_network, check_factories, check_whole
from lightning_bnn.ensembles.prior_function import start_both, with_prior_function
from lightning_bnn.ensembles.randomise import Randomise
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.initialise import Start, start_members
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior, Prior
from lightning_bnn.random import member_seed
from lightning_bnn.stacked import Mode
from lightning_bnn.strategies.base import OptimizerFactory, SchedulerFactory
from lightning_bnn.strategies.members import (
    MemberOptimizers,
    make_optimizer,
    make_schedulers,
    member_numbers,
)
from lightning_bnn.strategies.snapshots import SnapshotStore, cycle_ends, cycle_factor
from lightning_bnn.strategies.stacked_members import all_equal
from lightning_bnn.strategies.variants import EnsembleVariants

__all__ = ["DeepEnsemble"]

NetworkFactory = Callable[[], nn.Module]

_SPREAD = 0.1
_LEARNED = "(learned by the likelihood)"  # no name of a network's tensor


class DeepEnsemble(EnsembleVariants):
    """An ensemble of networks as one Lightning module.

    Args:
        net: A function that builds the network, called once for each member, and again for its
            prior function if it has one; or a network, each member of which starts as ``start``
            says. Yours stays as it is.
        likelihood: How outputs of the network give targets. What it learns, each member learns
            for itself.
        prior: One prior for all weights, or a mapping from name patterns to priors.
        members: How many members are trained side by side, or their numbers: ``members=[3]``
            trains alone what would be the fourth of ``members=10``.
        start: Where the members of a network start. ``"reset"``: at new initial values;
            ``"around"``: at its weights, all members but number 0 perturbed; a posterior: at its
            draws; or a list of networks. But for ``"reset"``, a function in ``net`` is called
            once.
        num_data: The number of training examples; found from the training data if left out.
        independent_batches: Whether each member sees the training data in an order of its own;
            by default all share each batch, which is faster. A loader that yields
            :class:`~lightning_bnn.ensembles.MemberBatch` gives each member what it likes, with
            this option on.
        chunk: The most members that run at a time, to bound memory; by default all.
        mode: How members run: ``"stacked"``, ``"loop"``, or ``"auto"``: whichever is faster on
            the first batch.
        optimizer: Makes the optimizer from parameters; by default ``partial(Adam, lr=1e-3)``. A
            list has one for each member.
        scheduler: Makes a learning-rate scheduler from an optimizer; a list has one for each
            member.
        scheduler_interval: Whether the scheduler steps each ``"epoch"`` or each ``"step"``.
        adversarial: ε of adversarial training, a share of each input's range, such as 0.01 (see
            :mod:`lightning_bnn.ensembles.adversarial`).
        bootstrap: Whether examples count differently for each member, by fixed weights that are
            N times a draw of Dirichlet(1, ..., 1) (see :mod:`lightning_bnn.ensembles.bootstrap`).
        randomise: Randomised MAP. ``"targets and anchors"``: each member's prior is centred at a
            draw of it, and its targets carry noise of the likelihood's size; on a linear model
            the members are then draws of the exact posterior. ``"anchors"``: the former only,
            which is not exact: the spread is too small (see
            :mod:`lightning_bnn.ensembles.randomise`).
        prior_function: β, to add β times a fixed random network to each member (see
            :class:`~lightning_bnn.ensembles.RandomPriorFunction`, which the members then are).
        snapshots: Train in so many cycles of the learning rate and keep the members at the end of
            each (see :mod:`lightning_bnn.strategies.snapshots`).
        seed: The root of all members' seeds; by default ``seed_everything`` decides it.

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
        prior: Prior | Mapping[str, Prior] | None = None,
        members: int | Sequence[int] = 5,
        start: Start = "reset",
        num_data: int | None = None,
        independent_batches: bool = False,
        chunk: int | None = None,
        mode: Mode = "auto",
        optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None,
        scheduler: SchedulerFactory | Sequence[SchedulerFactory] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        adversarial: float | None = None,
        bootstrap: bool = False,
        randomise: Randomise | None = None,
        prior_function: float | None = None,
        snapshots: int | None = None,
        seed: int | None = None,
    ) -> None:
        numbers = member_numbers(members)
        if seed is not None:
            check_whole("seed", seed, 0)
        root = int(torch.randint(2**62, ()).item()) if seed is None else int(seed)
        factory = None if isinstance(net, nn.Module) else net
        built = factory is not None and start == "reset"
        # where members start around one network, it must not depend on which of them are trained
        nets = [
            net if isinstance(net, nn.Module) else build_network(net, root, number)
            for number in (numbers if built else [0])
        ]
        template = nets[0]
        begin: Callable[[nn.Module], Mapping[str, Tensor]] = partial(
            start_members,
            start=nets if built else start,
            members=numbers,
            seed=root,
            spread=_SPREAD,
            noun="member",
            option="net" if start == "reset" else "start",
        )
        if prior_function is not None:
            prior_functions = partial(
                start_members,
                start="reset" if factory is None else factory,
                members=numbers,
                seed=member_seed(root, 0, "prior function"),
                spread=_SPREAD,
                noun="member",
                option="net",
            )
            template = with_prior_function(template, prior_function)
            begin = partial(start_both, begin=begin, begin_prior=prior_functions)
            if isinstance(prior, Mapping):
                prior = {f"net.{pattern}": one for pattern, one in prior.items()}
        super().__init__(
            template, likelihood, prior, numbers, begin, num_data, chunk, mode, scheduler_interval
        )
        if built:
            _check_pretrained(self.prior, self.weights.detach())
        self.seed = root
        self._choose_variants(independent_batches, adversarial, bootstrap, randomise)
        self._check_options(optimizer, scheduler, snapshots)
        self._optimizers, self._schedulers = optimizer, scheduler
        self.snapshots = None if snapshots is None else SnapshotStore(snapshots, self._state())
        if self.snapshots is not None:
            # they are the same on all ranks, and too large to be handed out in each step
            kept = [f"snapshots.{name}" for name, _ in self.snapshots.named_buffers()]
            self._ddp_params_and_buffers_to_ignore = kept
        self._optimizer_names: list[str] = []
        self._cycle_ends: list[int] = []
        self._cycle_start = 0
        self._saved: dict[str, Any] | None = None

    def _check_options(self, optimizer: Any, scheduler: Any, snapshots: Any) -> None:
        check_factories("optimizer", optimizer, self.members)
        check_factories("scheduler", scheduler, self.members)
        if snapshots is not None and scheduler is not None:
            raise ConfigurationError(
                "snapshots= has a learning-rate schedule of its own, cosine cycles; leave "
                "scheduler= out."
            )

    # ---------------------------------------------------------------- stepping

    def configure_optimizers(self) -> Any:
        """One optimizer for all members, or one for each, and their schedules."""
        layouts = (self._layout, self._learned_layout)
        stacked = list(zip(self._stacked_parameters(), layouts, strict=False))
        schedules = self._schedulers
        if self.snapshots is not None:
            schedules = partial(LambdaLR, lr_lambda=lambda step: self._cycle_factor(step))
        optimizer = make_optimizer(
            self._optimizers,
            self._default_optimizer,
            stacked,
            one_each=isinstance(schedules, Sequence),
        )
        each = optimizer.members if isinstance(optimizer, MemberOptimizers) else [optimizer]
        for one in each:
            self._refuse_weight_decay(one)
        self._optimizer_names = [type(one).__name__ for one in each]
        self._compare_with_saved(("optimizer", self._optimizer_names))
        if schedules is None:
            return optimizer
        interval = "step" if self.snapshots is not None else self._scheduler_interval
        schedule = {"scheduler": make_schedulers(schedules, optimizer), "interval": interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_after_backward(self) -> None:
        """Let a scaler of the loss see the gradients of members with optimizers of their own."""
        super().on_after_backward()
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
        learned = {} if self.learned is None else {_LEARNED: self.learned.detach()}
        return {**self.current_draws(), **learned}

    def posterior(self) -> WeightPosterior:
        """The members that have not diverged, with equal weights; all their snapshots, if any.

        Where the likelihood learns, the members differ in it: then a mixture of them.
        """
        states, rows = self._states(), self._good_rows()
        if self.learned is None:
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
        return {self.member_numbers[row]: self._member(row, states) for row in self._good_rows()}

    def _states(self) -> list[dict[str, Tensor]]:
        """All that members have of their own: now, or at their snapshots."""
        kept = self.snapshots.snapshots() if self.snapshots is not None else []
        return kept or [self._state()]

    def _good_rows(self) -> list[int]:
        """The rows of the members that have not diverged."""
        # the last step may have been the one that made a member diverge
        good = self.alive.clone()
        for parameter in self._stacked_parameters():
            good &= parameter.detach().isfinite().all(1)
        if not good.any():
            raise NonFiniteError(
                f"No member is left: the weights of the members {self.member_numbers}, or what "
                "their likelihoods learned, are not finite. Train again with a lower learning rate "
                "or with gradient clipping."
            )
        rows: list[int] = good.nonzero().flatten().tolist()
        return rows

    def _member(self, row: int, states: Sequence[Mapping[str, Tensor]]) -> WeightPosterior:
        draws = [{name: tensor[row] for name, tensor in state.items()} for state in states]
        if self.learned is None:
            return DrawsPosterior(self.net, self.likelihood, draws)
        parts = [
            DrawsPosterior(self.net, self._likelihood_with(draw.pop(_LEARNED)), [draw])
            for draw in draws
        ]
        return parts[0] if len(parts) == 1 else MixturePosterior(parts)

    def member_likelihood(self, index: int) -> Likelihood:
        """The likelihood with what the member in row ``index`` has learned."""
        if self.learned is None:
            return self.likelihood
        return self._likelihood_with(self.learned.detach()[index])

    def _likelihood_with(self, learned: Tensor) -> Likelihood:
        likelihood = deepcopy(self.likelihood)
        with torch.no_grad():
            for name, value in self._learned_layout.views(learned).items():
                likelihood.get_parameter(name).copy_(value)
        return likelihood

    def _predict(self, inputs: Any) -> Predictive:
        """With all members, each once."""
        assert self._snapshot is not None
        return self._snapshot.predict(inputs)

    # ---------------------------------------------------------------- fits and checkpoints

    def setup(self, stage: str) -> None:
        """Forget the checkpoint of an earlier fit; one of this fit is loaded after this."""
        self._saved = None

    def on_fit_start(self) -> None:
        """Let all ranks have one root seed."""
        super().on_fit_start()
        self.seed = self.trainer.strategy.broadcast(self.seed)

    def on_train_start(self) -> None:
        """Find N, and where cycles end."""
        super().on_train_start()
        if self.snapshots is None:
            return
        saved = self._saved or {}
        if self._saved is None:
            self.snapshots.clear()
        self._cycle_start = saved.get("cycle_start", self.global_step)
        total = self.trainer.estimated_stepping_batches - self._cycle_start
        if getattr(self.trainer, "fast_dev_run", False):  # too short for all of them, but a trial
            total = max(total, self.snapshots.cycles)
        self._cycle_ends = cycle_ends(total, self.snapshots.cycles)
        self._compare_with_saved(("cycle_ends", self._cycle_ends))

    def _facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "members": self.member_numbers,
            "snapshots": None if self.snapshots is None else self.snapshots.cycles,
            "independent_batches": self.independent_batches,
            "adversarial": self.adversarial,
            "bootstrap": self.bootstrap,
            "randomise": self.randomise,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add how the members run: the other way would differ in the last bits."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_bnn"] |= {
            "members_mode": self._stack.mode,
            "seed": self.seed,
            "ensemble": {
                **self._facts(),
                "optimizer": self._optimizer_names,
                "cycle_start": self._cycle_start,
                "cycle_ends": self._cycle_ends,
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Run the members as the saved ones did."""
        super().on_load_checkpoint(checkpoint)
        own = checkpoint.get("lightning_bnn", {})
        self._saved = own.get("ensemble", {})
        self._compare_with_saved(*self._facts().items())
        if self._stack.mode == "auto":
            self._stack.mode = own.get("members_mode", "auto")
        self.seed = own.get("seed", self.seed)
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            self._saved = None

    def _compare_with_saved(self, *facts: tuple[str, Any]) -> None:
        for name, value in facts:
            saved = (self._saved or {}).get(name, value)
            if saved != value:
                raise ConfigurationError(
                    f"The checkpoint was made with {name}={saved!r}, this strategy has {value!r}. "
                    "Make them the same to go on, or start from the checkpoint's weights in a new "
                    "run."
                )


def _check_pretrained(prior: BoundPrior, weights: Tensor) -> None:
    """Raise if a prior is centred on pretrained weights that each member has others of."""
    for start, stop, chosen, loc, _ in prior.segments():
        own = weights[:, start:stop]
        if chosen.loc == "pretrained" and not all_equal(own, torch.as_tensor(loc)):
            raise ConfigurationError(
                "A prior with loc='pretrained' is centred on the network's first weights, and "
                "net= gives each member others. Pass the pretrained network itself with "
                "start='around', or give the weights that differ a prior of their own by name."
            )
