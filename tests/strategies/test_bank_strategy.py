"""Members that do not touch each other: gradients, chunks, clipping, and one that diverges."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Laplace, Normal
from lightning_bnn.samplers import SGHMC, SGNHT
from tests.nets import loader, make_data, mlp
from tests.strategies.ensembles import (
    assert_member_equals,
    batch_norm_net,
    fit,
    make,
    networks,
    train_plainly,
)
from tests.trainers import quiet_trainer

NAN = float("nan")


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("prior", [Normal(0.0, 0.5), Normal(0.2, 0.5), Laplace(0.1, 0.3)], ids=repr)
@pytest.mark.parametrize("learn", [False, True])
def test_gradients_equal_autograds(prior: Any, learn: bool, chunk: int | None) -> None:
    """Of every member's weights and noise, on its own network, in float64."""
    inputs, targets = torch.randn(2, 9, 4, dtype=torch.float64)
    likelihood = Gaussian(0.5, learn=learn).double()
    ensemble = DeepEnsemble(
        lambda: mlp(4).double(), likelihood, prior, members=3, num_data=40, chunk=chunk, seed=0
    )
    energies = ensemble.energies((inputs, targets))
    (energies * torch.tensor([1.0, 2.0, 3.0])).sum().backward()  # each row by its own factor
    found = ensemble.bank.layout.views(ensemble.weights.grad)
    for member in range(3):
        weights = {
            k: v[member].clone().requires_grad_() for k, v in ensemble.current_draws().items()
        }
        start = likelihood.log_scale if learn else torch.tensor(0.5, dtype=torch.float64).log()
        scale = start.detach().clone().requires_grad_()
        outputs = torch.func.functional_call(mlp(4).double(), weights, (inputs,))
        energy = -torch.distributions.Normal(outputs, scale.exp()).log_prob(targets).sum(1).mean()
        for value in weights.values():
            energy = energy - prior.log_prob(value, prior.loc, prior.scale).sum() / 40
        torch.testing.assert_close(energies[member], energy, rtol=1e-10, atol=1e-12)
        expected = torch.autograd.grad((member + 1) * energy, [*weights.values(), scale])
        for name, gradient in zip(weights, expected, strict=False):
            torch.testing.assert_close(found[name][member], gradient, rtol=1e-9, atol=1e-11)
        if learn:
            torch.testing.assert_close(ensemble.bank.learned.grad[member, 0], expected[-1])


# -------------------------------------------------------------------- chunks


@pytest.mark.parametrize("mode", ["stacked", "loop"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunks_give_the_same_numbers(chunk: int, mode: Any) -> None:
    """In float64; running statistics too, which a second forward pass would move again."""
    states = []
    for size in (None, chunk):
        ensemble = make(chunk=size, mode=mode, members=5, optimizer=partial(SGD, lr=0.1))
        fit(ensemble, 6, precision="64-true", accumulate_grad_batches=2)
        states.append(ensemble.current_draws())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-11, atol=1e-12)
    assert states[1]["1.num_batches_tracked"].tolist() == [9] * 5  # three epochs of three batches


def test_no_more_than_a_chunk_is_held_at_once() -> None:
    """When the next chunk begins, nothing that the last one kept for its backward pass is left."""
    ensemble = make(partial(mlp, 3), members=5, chunk=2, num_data=48)
    held: weakref.WeakSet[Any] = weakref.WeakSet()
    seen: list[tuple[int, int]] = []

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            held.add(self)

    original = ensemble.bank._energies_of

    def watch(target: Any, view: Any, check: Any, rows: slice, *stacked: Tensor) -> Tensor:
        assert not held
        energies = original(target, view, check, rows, *stacked)
        seen.append((rows.stop - rows.start, len(held)))
        return energies

    ensemble.bank._energies_of = watch  # type: ignore[method-assign]
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        energies = ensemble.energies(make_data("mlp", "classification")[:16])
    assert [count for count, _ in seen] == [2, 2, 1]
    assert all(kept > 5 for _, kept in seen)  # it did look at what is kept
    assert not held
    energies.sum().backward()
    assert ensemble.weights.grad is not None


def test_two_energies_in_chunks_before_a_backward_pass_keep_their_gradients() -> None:
    data = make_data("mlp", "classification")
    gradients = []
    for chunk in (None, 2):
        ensemble = make(partial(mlp, 3), chunk=chunk, num_data=48)
        first, second = ensemble.energies(data[:16]), ensemble.energies(data[16:32])
        (first.sum() + 3 * second.sum()).backward()
        gradients.append(ensemble.weights.grad)
    torch.testing.assert_close(*gradients)


# -------------------------------------------------------------------- clipping


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_that_of_each_network_alone(algorithm: str) -> None:
    limit = {"norm": 0.5, "value": 0.05}[algorithm]
    clip = {
        "norm": partial(nn.utils.clip_grad_norm_, max_norm=limit),
        "value": partial(nn.utils.clip_grad_value_, clip_value=limit),
    }[algorithm]
    ensemble = make(optimizer=partial(SGD, lr=0.1))
    with torch.no_grad():
        ensemble.weights[1] *= 5
    plain = networks(ensemble, batch_norm_net)
    fit(
        ensemble, 5, precision="64-true", gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )  # fmt: skip
    data = make_data("mlp", "classification")
    for index, net in enumerate(plain):
        train_plainly(net.double(), partial(SGD, lr=0.1), data, 5, clip=clip)
        assert_member_equals(ensemble, index, net, rtol=1e-6, atol=1e-8)


# -------------------------------------------------------------------- a member that diverges


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_a_nan_in_one_member_leaves_the_others_bit_equal(mode: Any, chunk: int | None) -> None:
    class Poison(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    module.weights[1, 0] = NAN

    clipping = {"gradient_clip_val": 0.5}
    healthy, ill = (make(mode=mode, chunk=chunk) for _ in range(2))
    fit(healthy, 10, **clipping)
    message = r"energy of member 1 is not finite at step 4 \(epoch 1, batch 1\): dropped.*other 2"
    with pytest.warns(UserWarning, match=message):
        trainer = fit(ill, 10, callbacks=[Poison()], **clipping)
    assert ill.alive.tolist() == [True, False, True]
    good = healthy.current_draws()
    for name, tensor in ill.current_draws().items():
        assert torch.equal(tensor[0], good[name][0])
        assert torch.equal(tensor[2], good[name][2])
    assert ill.weights.grad[1].eq(0).all()
    assert trainer.callback_metrics["train_loss"].isfinite()
    posterior = ill.posterior()
    assert len(posterior) == 2
    inputs = make_data("mlp", "classification").tensors[0]
    with torch.no_grad():
        outputs = posterior.predict(inputs).outputs
        expected = DeepEnsemble.posterior(healthy).predict(inputs).outputs
    assert torch.equal(outputs, expected[[0, 2]])


def test_a_member_of_a_bad_learning_rate_is_dropped_and_stays_so(tmp_path: Any) -> None:
    rates = [partial(SGD, lr=rate) for rate in (0.1, 1e30, 0.1)]
    ensemble = make(partial(mlp, 3), optimizer=rates)
    with pytest.warns(UserWarning, match="energy of member 1 is not finite"):
        trainer = fit(ensemble, 8)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again = make(partial(mlp, 3), optimizer=rates)
    data = make_data("mlp", "classification")
    quiet_trainer(max_steps=9, max_epochs=-1).fit(
        again, loader(data), ckpt_path=tmp_path / "saved.ckpt"
    )
    assert len(again.posterior()) == 2
    assert again.weights[[0, 2]].isfinite().all()


def test_a_member_that_diverges_in_the_last_step_is_left_out_too() -> None:
    ensemble = make(partial(mlp, 3))
    with torch.no_grad():
        ensemble.weights[1, 3] = NAN
    assert len(ensemble.posterior()) == 2
    with torch.no_grad():
        ensemble.weights[:, 3] = NAN
    with pytest.raises(NonFiniteError, match=r"No member is left.*members \[0, 1, 2\]"):
        ensemble.posterior()


def test_the_last_member_to_diverge_ends_the_fit() -> None:
    ensemble = make(partial(mlp, 3), optimizer=partial(SGD, lr=1e30))
    with pytest.raises(NonFiniteError, match=r"member 0, 1, 2 is not finite at step \d+ .*lower"):
        fit(ensemble)


def test_bad_data_are_told_from_divergence() -> None:
    inputs = torch.randn(16, 4)
    inputs[3] = float("inf")
    data = TensorDataset(inputs, torch.zeros(16, dtype=torch.int64))
    ensemble = make(partial(mlp, 3))
    before = ensemble.weights.detach().clone()
    with pytest.raises(NonFiniteError, match="The batch's inputs hold NaN or infinity"):
        quiet_trainer(max_epochs=1).fit(ensemble, DataLoader(data, 16))
    assert torch.equal(before, ensemble.weights)


def test_a_likelihood_of_ones_own_needs_no_batching_rule() -> None:
    """Its log density runs on all members' outputs as on one long batch."""

    class Branching(Categorical):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if bool(outputs.detach().isfinite().all()):  # reads values, which vmap refuses
                return super().log_prob(outputs, targets)
            return outputs.sum(1)

    data = make_data("mlp", "classification")
    first = make(likelihood=Branching(), optimizer=partial(Adam, lr=0.01))
    second = make(optimizer=partial(Adam, lr=0.01))
    for ensemble in (first, second):
        fit(ensemble, 3, data=data)
    assert torch.equal(first.weights, second.weights)


# -------------------------------------------------------------------- checkpoints of other runs


def chains(**options: Any) -> SGMCMC:
    defaults = {"chains": 2, "sampler": partial(SGHMC, lr=1e-3), "seed": 7, "mode": "stacked"}
    return SGMCMC(mlp(3), Categorical(), **{**defaults, **options})


@pytest.mark.parametrize(
    ("build", "options", "name"),
    [
        (make, {"members": [0, 1, 4]}, r"members=\[0, 1, 2\]"),
        (make, {"members": 2}, r"members=\[0, 1, 2\]"),
        (make, {"optimizer": partial(SGD, lr=0.1)}, r"optimizer=\['Adam'\]"),
        (make, {"snapshots": 2}, "snapshots=None"),
        (make, {"bootstrap": True}, "bootstrap=False"),
        (chains, {"sampler": partial(SGNHT, lr=1e-3)}, "sampler='SGHMC'"),
        (chains, {"chains": [4, 7]}, r"chains=\[0, 1\]"),
        (chains, {"warm_up": 2}, "warm_up=0"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    build: Any, options: dict[str, Any], name: str, tmp_path: Any
) -> None:
    fit(build(), 3).save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(ConfigurationError, match=f"checkpoint was made with {name}"):
        quiet_trainer(max_steps=6, max_epochs=-1).fit(
            build(**options), loader(make_data("mlp", "classification")),
            ckpt_path=tmp_path / "saved.ckpt",
        )  # fmt: skip
