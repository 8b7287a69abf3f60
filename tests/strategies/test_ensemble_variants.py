"""Variants of ensembles in fits: values by hand, members alone, resume, chunks, bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import DeepEnsemble, Posterior
from lightning_bnn.bank import View
from lightning_bnn.ensembles import MemberBatch, RandomPriorFunction
from lightning_bnn.ensembles.bootstrap import bootstrap_means, bootstrap_weights
from lightning_bnn.ensembles.randomise import draw_offsets, noisy_targets
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal
from tests.nets import TokenEmbedding, make_data
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")

NOISE, SCALE, EXAMPLES = 0.5, 0.8, 48
VARIANTS: dict[str, dict[str, Any]] = {
    "independent_batches": {"independent_batches": True},
    "bootstrap": {"bootstrap": True},
    "targets and anchors": {"randomise": "targets and anchors"},
    "anchors": {"randomise": "anchors"},
    "adversarial": {"adversarial": 0.05},
    "prior_function": {"prior_function": 2.0},
    "all": {
        "independent_batches": True,
        "bootstrap": True,
        "randomise": "targets and anchors",
        "adversarial": 0.05,
        "prior_function": 2.0,
    },
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def make(members: Any = 3, net: Any = build, **options: Any) -> DeepEnsemble:
    defaults: dict[str, Any] = {"seed": 5, "mode": "stacked", "optimizer": partial(SGD, lr=0.05)}
    return DeepEnsemble(
        net, Gaussian(NOISE), Normal(0.0, SCALE), members, **{**defaults, **options}
    )


def data() -> TensorDataset:
    return TensorDataset(*(tensor.double() for tensor in make_data("mlp", "regression").tensors))


def shuffled(workers: int = 0) -> DataLoader:
    return DataLoader(data(), batch_size=10, shuffle=True, num_workers=workers)


def fit(ensemble: DeepEnsemble, steps: int = 7, loader: Any = None, **options: Any) -> None:
    torch.manual_seed(options.pop("order", 1))
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **options)
    ckpt = options.get("ckpt")
    trainer.fit(ensemble, shuffled() if loader is None else loader, ckpt_path=ckpt)


class Batches:
    """A loader of a user's own: Lightning takes a list for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


# -------------------------------------------------------------------- the same as alone, resumed


@pytest.mark.parametrize("name", VARIANTS)
def test_a_member_alone_is_trained_as_beside_others(name: str) -> None:
    together, alone = make(4, **VARIANTS[name]), make([2], **VARIANTS[name])
    start = {n: t.clone() for n, t in together.current_draws().items()}
    fit(together)
    fit(alone)
    found, expected = together.current_draws(), alone.current_draws()
    assert found.keys() == expected.keys()
    for key in found:
        torch.testing.assert_close(found[key][2:3], expected[key])
    weights = [key for key in found if key.endswith("3.weight") and "prior" not in key]
    assert not torch.equal(found[weights[0]], start[weights[0]])


@pytest.mark.parametrize(
    ("name", "workers"), [("bootstrap", 0), ("adversarial", 0), ("all", 0), ("all", 2)]
)
def test_resume_is_bit_equal(name: str, workers: int, tmp_path: Path) -> None:
    """With a root seed that only the checkpoint knows, from the middle of an epoch of 5 batches."""

    def run(seed: int, ckpt: Path | None) -> DeepEnsemble:
        torch.manual_seed(seed)
        ensemble = make(seed=None, **VARIANTS[name])
        saver = ModelCheckpoint(
            tmp_path / str(seed), "{step}", every_n_train_steps=1, save_top_k=-1
        )
        trainer = quiet_trainer(max_epochs=3, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(ensemble, shuffled(workers), ckpt_path=ckpt)
        return ensemble

    whole = run(1, None)
    resumed = run(2, tmp_path / "1" / "step=7.ckpt")
    for key, tensor in whole.current_draws().items():
        assert torch.equal(tensor, resumed.current_draws()[key]), key
    if whole.input_range is not None and resumed.input_range is not None:
        assert torch.equal(whole.input_range.extent, resumed.input_range.extent)


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_and_the_loop_give_the_same(name: str) -> None:
    whole, others = make(5, **VARIANTS[name]), [{"chunk": 2}, {"mode": "loop"}]
    fit(whole)
    for options in others:
        part = make(5, **options, **VARIANTS[name])
        fit(part)
        for key, tensor in whole.current_draws().items():
            torch.testing.assert_close(tensor, part.current_draws()[key])


# -------------------------------------------------------------------- energies by hand


def batch_of(own: bool) -> MemberBatch:
    inputs, targets = data().tensors
    indices = (
        torch.stack([torch.randperm(EXAMPLES)[:9] for _ in range(3)])
        if own
        else (torch.randperm(EXAMPLES)[:9])
    )
    return MemberBatch((inputs[indices], targets[indices]), indices)


def no_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def by_hand(
    ensemble: DeepEnsemble, inputs: Tensor, targets: Tensor, shares: Any, offsets: Any
) -> Tensor:
    """The energies of all members from inputs and targets of their own, by plain PyTorch."""
    energies = []
    for m in range(3):
        net = no_norm()
        net.load_state_dict({n: t[m] for n, t in ensemble.current_draws().items()})
        log_prob = torch.distributions.Normal(net(inputs[m]), NOISE).log_prob(targets[m]).sum(1)
        flat = torch.cat([p.flatten() for p in net.parameters()]) - offsets[m]
        prior = torch.distributions.Normal(0.0, SCALE).log_prob(flat).sum()
        energies.append(-(shares[m] * log_prob).mean() - prior / EXAMPLES)
    return torch.stack(energies)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("options", [{"bootstrap": True}, {"randomise": "targets and anchors"}])
def test_energies_are_those_of_the_formula(own: bool, options: dict[str, Any]) -> None:
    ensemble = make(net=no_norm, num_data=EXAMPLES, independent_batches=own, **options)
    batch = batch_of(own)
    (inputs, targets), indices = batch
    seeds = ensemble._seeds()
    shares, offsets = torch.ones(3, 9), torch.zeros(3, 1)
    if "bootstrap" in options:
        shares = bootstrap_weights(seeds, indices, bootstrap_means(seeds, EXAMPLES))
        assert shares.std() > 0.5
    else:
        moved = noisy_targets(NOISE, targets, seeds, indices)
        offsets = draw_offsets(ensemble.prior, seeds, ensemble.weights)
        assert 0.3 < (moved - targets).std() < 0.7
        assert 0.6 < offsets.std() < 1.0
        targets = moved
    inputs = inputs.expand(3, *inputs.shape[-2:])
    targets = targets.expand(3, *targets.shape[-2:])
    expected = by_hand(ensemble, inputs, targets, shares, offsets)
    torch.testing.assert_close(ensemble.energies(batch), expected)


@pytest.mark.parametrize("own", [False, True])
def test_adversarial_energies_are_those_of_the_formula(own: bool) -> None:
    ensemble = make(net=no_norm, num_data=EXAMPLES, independent_batches=own, adversarial=0.1)
    everything = data().tensors[0]
    assert ensemble.input_range is not None
    ensemble.input_range.update(everything.expand(3, -1, -1) if own else everything)
    batch = batch_of(own)
    inputs, targets = (t.expand(3, *t.shape[-2:]).clone() for t in batch.batch)
    inputs.requires_grad_()
    plain = partial(by_hand, ensemble, shares=torch.ones(3, 9), offsets=torch.zeros(3, 1))
    (gradient,) = torch.autograd.grad(plain(inputs, targets).sum(), inputs)
    extent = everything.amax(0) - everything.amin(0)
    moved = inputs.detach() + 0.1 * extent * gradient.sign()
    expected = (plain(inputs, targets) + plain(moved, targets)) / 2
    found = ensemble.energies(batch)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.energies(batch), expected.detach())
    # each member's gradient is of its own energy, with x' held constant
    found.sum().backward()
    h, direction = 1e-6, torch.randn_like(ensemble.weights)
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            ensemble.bank.weights += sign * h * direction
            ends.append((plain(inputs, targets) + plain(moved, targets)) / 2)
            ensemble.bank.weights -= sign * h * direction
    assert ensemble.weights.grad is not None
    slope = (ensemble.weights.grad * direction).sum(1)
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------- what a fit uses


class Watched(DeepEnsemble):
    """Keeps what it was trained with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[Tensor, Tensor | None]] = []
        self.batches: list[Any] = []

    def view(self, rows: slice, batch: MemberBatch) -> View:
        view = super().view(rows, batch)
        assert batch.indices is not None
        self.seen.append((batch.indices, view.counts))
        return view

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


def watched(**options: Any) -> Watched:
    return Watched(no_norm, Gaussian(NOISE), Normal(), members=3, seed=5, mode="stacked", **options)


@pytest.mark.parametrize("own", [False, True])
def test_an_example_has_the_same_weights_in_every_epoch(own: bool) -> None:
    """And they are those of the function, for the length of the data set."""
    ensemble = watched(bootstrap=True, independent_batches=own, num_data=77)
    quiet_trainer(max_epochs=3).fit(ensemble, shuffled())
    seeds = ensemble._seeds()
    whole = bootstrap_weights(seeds, torch.arange(EXAMPLES), bootstrap_means(seeds, EXAMPLES))
    torch.testing.assert_close(whole.mean(1), torch.ones(3).double())
    times = torch.zeros(3, EXAMPLES)
    for indices, shares in ensemble.seen:
        own_indices = indices.expand(3, indices.shape[-1])
        assert shares is not None
        assert torch.equal(shares, whole.gather(1, own_indices))
        times.scatter_add_(1, own_indices, torch.ones(own_indices.shape))
    assert torch.equal(times, torch.full((3, EXAMPLES), 3.0))


def test_inputs_belong_to_the_indices() -> None:
    ensemble = watched(independent_batches=True)
    quiet_trainer(max_epochs=1).fit(ensemble, shuffled(workers=2))
    inputs, targets = data().tensors
    for (x, y), indices in ensemble.batches:
        assert torch.equal(x, inputs[indices])
        assert torch.equal(y, targets[indices])
        assert not torch.equal(indices[0], indices[1])
    assert ensemble.batch_size(ensemble.batches[0]) == 10


def test_a_loader_of_the_users_own_gives_each_member_other_data() -> None:
    """Each member is then trained as an ensemble of one on its data."""
    inputs, targets = data().tensors
    parts = [inputs.view(3, 4, 4, 4), targets.view(3, 4, 4, 2)]  # member, batch, example
    own = [MemberBatch((parts[0][:, b], parts[1][:, b])) for b in range(4)]
    together = make(net=no_norm, independent_batches=True, num_data=16)
    fit(together, loader=Batches(own))
    for m in range(3):
        alone = make([m], net=no_norm, num_data=16)
        fit(alone, loader=Batches([(parts[0][m, b], parts[1][m, b]) for b in range(4)]))
        torch.testing.assert_close(together.weights[m], alone.weights[0])


def test_all_follows_from_the_seed_as_it_stands() -> None:
    """A checkpoint or rank 0 may change it after the ensemble was made."""
    options = {"bootstrap": True, "randomise": "targets and anchors", "num_data": EXAMPLES}
    batch, changed, other = batch_of(False), make(**options), make(seed=6, **options)
    changed.energies(batch)
    with torch.no_grad():
        changed.weights.copy_(other.weights)
    assert not torch.allclose(changed.energies(batch), other.energies(batch))
    changed.seed = 6
    torch.testing.assert_close(changed.energies(batch), other.energies(batch))


# -------------------------------------------------------------------- prior functions


@pytest.mark.parametrize("net", [build, build()])
def test_prior_functions_are_fixed_and_differ(net: Any, tmp_path: Path) -> None:
    ensemble = make(net=net, prior_function=2.5)
    before = {n: t.clone() for n, t in ensemble.current_draws().items()}
    fit(ensemble)
    after = ensemble.current_draws()
    assert isinstance(ensemble.net, RandomPriorFunction)
    for key in before:
        if key.startswith("prior_net"):
            assert torch.equal(before[key], after[key]), key
    for key in ("prior_net.0.weight", "net.0.weight"):
        assert not torch.equal(before[key][0], before[key][1])
    assert not torch.equal(before["prior_net.0.weight"], before["net.0.weight"])
    assert torch.equal(after["scale"], torch.full((3,), 2.5).double())
    if isinstance(net, nn.Module):
        assert all(p.requires_grad for p in net.parameters()), "yours stays as it is"

    posterior = ensemble.posterior()
    posterior.save(tmp_path / "posterior")
    loaded = Posterior.load(tmp_path / "posterior", RandomPriorFunction(build(), build()))
    x = data().tensors[0]
    torch.testing.assert_close(loaded.predict(x).outputs, posterior.predict(x).outputs)
    member = RandomPriorFunction(build(), build())
    # what members have in common (BatchNorm in the prior function) is in the network itself
    member.load_state_dict({**ensemble.net.state_dict(), **{n: t[1] for n, t in after.items()}})
    torch.testing.assert_close(posterior.predict(x).outputs[1], member.eval()(x))


def test_priors_by_name_are_of_the_networks_own_names() -> None:
    prior = {"*.bias": Normal(0.0, 3.0), "*": Normal(0.0, 0.5)}
    ensemble = DeepEnsemble(no_norm, Gaussian(), prior, members=2, prior_function=1.0)
    assert [scale for *_, scale in ensemble.prior.segments()] == [0.5, 3.0, 0.5, 3.0]


# -------------------------------------------------------------------- bad input


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adversarial": 0.0}, "adversarial= is a share"),
        ({"adversarial": "0.1"}, "adversarial= is a share.*got '0.1'"),
        ({"prior_function": "x"}, "positive number; got 'x'"),
        ({"prior_function": -1.0}, "positive number; got -1.0"),
        ({"randomise": "targets"}, "randomise= is"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize("name", ["bootstrap", "targets and anchors", "independent_batches"])
@pytest.mark.parametrize("batch_size", [8, None])
def test_data_without_indices(name: str, batch_size: int | None) -> None:
    rows = Stream() if batch_size else data()
    loader = DataLoader(rows, batch_size=batch_size)
    with pytest.raises(DataError, match=r"needs a DataLoader that makes batches from indices"):
        fit(make(num_data=48, **VARIANTS[name]), loader=loader)


def test_a_loader_that_does_not_shuffle() -> None:
    with pytest.raises(ConfigurationError, match="does not shuffle"):
        fit(make(independent_batches=True), loader=DataLoader(data(), batch_size=10))


def test_token_ids_cannot_be_moved() -> None:
    ensemble = DeepEnsemble(lambda: TokenEmbedding(3), Categorical(), adversarial=0.01)
    tokens = DataLoader(make_data("embedding", "classification"), batch_size=16)
    with pytest.raises(DataError, match=r"got torch\.int64"):
        fit(ensemble, loader=tokens)


@pytest.mark.parametrize("name", ["all", "bootstrap"])
def test_inputs_that_are_not_finite_are_blamed(name: str) -> None:
    rows = data()
    rows.tensors[0][:] = torch.nan
    loader = DataLoader(rows, batch_size=10, shuffle=True)
    with pytest.raises(NonFiniteError, match="inputs hold NaN"):
        fit(make(**VARIANTS[name]), loader=loader)
