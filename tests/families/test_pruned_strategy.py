"""VariationalBNN.prune: zeros that stay, whatever trains, saves or loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_bnn import Posterior, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal, ScaleMixture
from lightning_bnn.selection import without_normalisation
from tests.nets import loader, make_data, mlp
from tests.trainers import quiet_trainer

BATCH = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))


def make_bnn(net: nn.Module | None = None, **options: Any) -> VariationalBNN:
    torch.manual_seed(0)
    options = {"prior": Normal(0.1, 0.7), "num_data": 48, "seed": 4, **options}
    return VariationalBNN(net or mlp(3), Categorical(), initial_scale=0.2, **options)


def some_masks(bnn: VariationalBNN, share: float = 0.5) -> dict[str, Tensor]:
    shapes = {name: bnn.net.get_parameter(name).shape for name in ("0.weight", "2.weight")}
    return {name: torch.rand(shape) > share for name, shape in shapes.items()}


def fit(bnn: VariationalBNN, **options: Any) -> Any:
    trainer = quiet_trainer(**{"max_epochs": 2, **options})
    trainer.fit(bnn, loader(make_data("mlp", "classification")))
    return trainer


def assert_zero(bnn: VariationalBNN, masks: dict[str, Tensor]) -> None:
    """In everything that the strategy gives, and nowhere else."""
    posterior = bnn.posterior()
    drawn, current = posterior.sample(3), bnn.current_draws()
    for name, keep in masks.items():
        for found in (posterior.mean[name], posterior.sd[name], *drawn[name], *current[name]):
            assert torch.equal(found != 0, keep), name
            assert not found[~keep].signbit().any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draws": 2},
        {"estimator": "flipout"},
        {"estimator": "local"},
        {"family": MeanField("softplus")},
        {"prior": ScaleMixture()},
        {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9)},
    ],
    ids=str,
)
def test_training_goes_on_without_what_was_pruned(options: Any) -> None:
    """Not a bit of the parked numbers moves, by gradient or by momentum; the others do."""
    bnn = make_bnn(**options)
    trainer = fit(bnn, accumulate_grad_batches=2)
    masks = some_masks(bnn)
    bnn.prune(masks)
    assert_zero(bnn, masks)
    for parameter, state in trainer.optimizers[0].state.items():
        for tensor in state.values():
            if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                assert not tensor[~bnn.family.keep].any()
                assert tensor[bnn.family.keep].any()
    before = bnn.family.mean.detach().clone(), bnn.family.rho.detach().clone()
    # the same optimizer and its state go on
    trainer.fit_loop.max_epochs = 4
    trainer.fit_loop.epoch_progress.current.completed = 2
    fit(bnn, accumulate_grad_batches=2)
    for parameter, old in zip((bnn.family.mean, bnn.family.rho), before, strict=True):
        changed = parameter.detach() != old
        assert not changed[~bnn.family.keep].any()
        assert changed[bnn.family.keep].float().mean() > 0.9
    assert_zero(bnn, masks)


def test_momentum_does_not_move_it() -> None:
    """The steps of one optimizer before and after, without a trainer in between."""
    bnn = make_bnn(scheduler=None)
    trainer = fit(bnn)
    (optimizer,) = trainer.optimizers
    bnn.loss(BATCH).backward()
    bnn.prune(some_masks(bnn))  # a gradient is there already
    old = bnn.family.mean.detach().clone()
    optimizer.step()
    changed = bnn.family.mean.detach() != old
    assert not changed[~bnn.family.keep].any()
    assert changed[bnn.family.keep].all()


@pytest.mark.parametrize("estimator", ["weight", "flipout", "local"])
def test_the_loss_is_that_of_the_remaining_weights(estimator: Any) -> None:
    """A pruned input is an input that is not there: the same loss as with zeros for it."""
    bnn = make_bnn(estimator=estimator).double()
    masks = {"0.weight": torch.ones(16, 4), "2.weight": torch.ones(3, 16)}
    masks["0.weight"][:, 2] = 0
    bnn.prune(masks)
    inputs = BATCH[0].double()
    state = bnn.noise.get_extra_state()
    one = bnn.loss((inputs, BATCH[1]))
    bnn.noise.set_extra_state(state)
    inputs[:, 2] = 100.0  # no weight reads it
    assert bnn.loss((inputs, BATCH[1])).item() == one.item()
    assert torch.equal(bnn(inputs), bnn(inputs.index_fill(1, torch.tensor(2), -3.0)))
    keep = bnn.family.keep
    q = torch.distributions.Normal(bnn.family.mean[keep], bnn.family.sd()[keep])
    p = torch.distributions.Normal(torch.full_like(q.mean, 0.1), 0.7)
    kl = torch.distributions.kl_divergence(q, p).sum()
    torch.testing.assert_close(bnn._last[1], kl.detach(), rtol=1e-10, atol=0)
    data = (inputs, BATCH[1])
    outputs = bnn.posterior().predict(inputs, 32).outputs
    likelihood = torch.stack([Categorical().log_prob(o, BATCH[1]).sum() for o in outputs]).mean()
    torch.testing.assert_close(bnn.elbo(data), likelihood - kl.detach(), rtol=1e-10, atol=0)


# -------------------------------------------------------------------- point estimates and buffers


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("estimator", ["weight", "local"])
@pytest.mark.parametrize("choice", [without_normalisation, "3.*", None])
def test_a_whole_unit_with_its_batch_norm(choice: Any, estimator: Any, tmp_path: Path) -> None:
    """What is Bayesian, a point estimate or a buffer: all is zero, and stays so."""
    bnn = make_bnn(normalised(), bayesian=choice, estimator=estimator)
    trainer = fit(bnn)
    unit = torch.arange(8) != 5
    names = ("0.bias", "1.weight", "1.bias", "1.running_mean")
    masks = {"0.weight": unit[:, None].expand(8, 4), **dict.fromkeys(names, unit)}
    bnn.prune(masks)
    assert {name: keep.tolist() for name, keep in bnn.masks().items()} == {
        name: keep.tolist() for name, keep in masks.items()
    }
    (optimizer,) = trainer.optimizers
    bnn.train()
    for _ in range(2):  # with the momentum of before
        optimizer.zero_grad()
        bnn.loss(BATCH).backward()
        optimizer.step()
    trainer = fit(bnn)
    trainer.save_checkpoint(tmp_path / "pruned.ckpt")
    plain = make_bnn(normalised(), bayesian=choice, estimator=estimator)
    loaded = make_bnn(normalised(), bayesian=choice, estimator=estimator)
    state = torch.load(tmp_path / "pruned.ckpt", weights_only=True)["state_dict"]
    loaded.load_state_dict(state)
    assert torch.equal(loaded.eval()(BATCH[0]), bnn.eval()(BATCH[0]))
    for one in (bnn, loaded):
        posterior, current = one.posterior(), one.current_draws()
        drawn = {**posterior.fixed, **{n: t[0] for n, t in posterior.sample(1).items()}}
        for name, keep in masks.items():
            for found in (drawn[name], current[name][0]):
                assert not found[~keep].any(), name
                assert found[keep].any(), name
    # an input that would wake the unit changes nothing
    assert torch.isfinite(bnn(100 * BATCH[0])).all()
    loaded.load_state_dict(plain.state_dict())  # from before the pruning
    assert loaded.masks() == {}
    assert loaded.others.keep is None


def test_point_estimates_that_are_gone_have_no_prior_energy() -> None:
    bnn = make_bnn(normalised(), bayesian="3.*")
    keep = torch.rand(8, 4) > 0.5
    bnn.prune({"0.weight": keep})
    own = dict(bnn.net.named_parameters())
    loss = bnn.loss(BATCH)
    energy, kl = bnn._last
    left = [own["0.weight"][keep], own["0.bias"], own["1.weight"], own["1.bias"]]
    prior = torch.distributions.Normal(0.1, 0.7)
    points = -prior.log_prob(torch.cat([tensor.flatten() for tensor in left])).sum()
    torch.testing.assert_close(loss, energy + (kl + points) / 48)
    loss.backward()
    assert not own["0.weight"].grad[~keep].any()  # type: ignore[index]


# -------------------------------------------------------------------- masks


def test_masks_only_shrink_and_may_be_numbers() -> None:
    bnn = make_bnn()
    first, second = some_masks(bnn), some_masks(bnn)
    bnn.prune(first)
    bnn.prune({name: mask.float() for name, mask in second.items()})
    for name, keep in bnn.masks().items():
        assert torch.equal(keep, first[name] & second[name])


def test_bad_masks() -> None:
    bnn = make_bnn()
    with pytest.raises(ConfigurationError, match=r"masks names '9\.weight'"):
        bnn.prune({"9.weight": torch.ones(3)})
    with pytest.raises(ConfigurationError, match=r"masks has '0.weight' in the shape \[4, 16\]"):
        bnn.prune({"0.weight": torch.ones(4, 16)})
    with pytest.raises(ConfigurationError, match=r"mask of '0.bias' holds other numbers"):
        bnn.prune({"0.weight": torch.ones(16, 4), "0.bias": torch.full((16,), 0.5)})
    assert bnn.masks() == {}
    assert bnn.family.keep is None


class PruneByHand(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.prune(some_masks(pl_module))


def test_pruning_by_hand_in_a_fit_whose_weights_are_averaged(tmp_path: Path) -> None:
    """The averaged copy has no masks: it would bring the weights back."""
    with pytest.raises(ConfigurationError, match="in a fit whose weights EMAWeightAveraging"):
        fit(make_bnn(), callbacks=[EMAWeightAveraging(), PruneByHand()])
    bnn = make_bnn()
    trainer = fit(bnn, callbacks=[WeightAveraging()])
    masks = some_masks(bnn)
    bnn.prune(masks)  # the fit is over
    assert_zero(bnn, masks)
    trainer.save_checkpoint(tmp_path / "pruned.ckpt")  # with the average as the weights
    again = make_bnn()
    again.load_state_dict(torch.load(tmp_path / "pruned.ckpt", weights_only=False)["state_dict"])
    assert_zero(again, masks)


def test_an_unpruned_strategy_saves_what_it_always_did() -> None:
    assert not any("keep" in name for name in make_bnn(normalised()).state_dict())


# -------------------------------------------------------------------- torch.nn.utils.prune


def test_a_network_that_torch_has_pruned(tmp_path: Path) -> None:
    """Its parameter is called weight_orig; the mask is a buffer, applied before each forward."""
    net = mlp(3)
    prune.random_unstructured(net[0], "weight", amount=0.5)
    net(BATCH[0])
    bnn = make_bnn(net)
    assert bnn.family.layout.names[:2] == ["0.bias", "0.weight_orig"]
    fit(bnn)
    posterior = bnn.posterior()
    predicted = posterior.predict(BATCH[0]).outputs
    keep = torch.rand(16, 4) > 0.5
    bnn.prune({"0.weight_orig": keep})
    fit(bnn)
    assert torch.equal(bnn.posterior().mean["0.weight_orig"] != 0, keep)
    posterior.save(tmp_path / "posterior")
    other = mlp(3)
    prune.identity(other[0], "weight")
    loaded = Posterior.load(tmp_path / "posterior", other)
    torch.testing.assert_close(loaded.predict(BATCH[0]).outputs, predicted)
