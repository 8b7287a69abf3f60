"""Laplace approximations as a strategy: what is asked for, what is kept, what cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    DrawsPosterior,
    LaplaceBNN,
    LaplacePosterior,
    Posterior,
    compact,
    laplace,
    prune,
    sparsity,
    support,
)
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from lightning_bnn.posteriors.laplace import standard_points
from lightning_bnn.priors import Laplace, Learned, Normal, StudentT
from lightning_bnn.report import report_posteriors
from lightning_bnn.selection import last_layer
from tests.contract.toys.laplace import Laplace as LaplaceNoise
from tests.nets import make_data, mlp
from tests.trainers import quiet_trainer

DATA = make_data("mlp", "classification")
INPUTS = DATA.tensors[0]
STRUCTURES = ("diagonal", "kron", "full", "low rank")


def fit(bnn: LaplaceBNN, epochs: int = 2, **options: Any) -> Any:
    trainer = quiet_trainer(max_epochs=epochs, **options)
    trainer.fit(bnn, DataLoader(DATA, batch_size=16, shuffle=True), DataLoader(DATA, batch_size=48))
    return trainer


def make(**options: Any) -> LaplaceBNN:
    torch.manual_seed(0)
    return LaplaceBNN(mlp(3), Categorical(), seed=0, **options)


def test_the_curvature_is_taken_at_the_best_weights_by_validation() -> None:
    bnn = make()
    fit(bnn, epochs=15)
    assert bnn.best is not None
    posterior = bnn.posterior()
    assert isinstance(posterior, LaplacePosterior)
    net = mlp(3)
    net.load_state_dict({**posterior.mean})
    nll = nn.functional.cross_entropy(net(INPUTS), DATA.tensors[1]).detach()
    assert float(nll) == pytest.approx(float(bnn.best.nll[0]), abs=1e-5)
    again = laplace(net, DataLoader(DATA, batch_size=48), Categorical())
    variance = again.covariance.variance()
    torch.testing.assert_close(posterior.covariance.variance(), variance, rtol=1e-3, atol=1e-6)
    assert bnn.log_evidence() == pytest.approx(again.log_evidence, rel=1e-5)


def test_before_the_end_of_a_fit_the_posterior_is_the_network() -> None:
    bnn = make(predict_draws=7)
    assert isinstance(bnn.posterior(), DrawsPosterior)
    assert bnn.prior_precisions() == {}
    with pytest.raises(ConfigurationError, match=r"end of a fit\. Call Trainer\.fit"):
        bnn.log_evidence()
    trainer = fit(bnn)
    assert trainer.predict(bnn, DataLoader(DATA, batch_size=48))[0].draws == 7
    with torch.no_grad():
        bnn.weights.add_(1)
    with pytest.raises(ConfigurationError, match="changed after their curvature"):
        bnn.posterior()


def test_scales_are_given_or_found() -> None:
    assert make().scales == "one"
    assert make(prior=Normal()).scales == "given"
    found = {}
    for scales in ("given", "one", "per tensor"):
        bnn = make(prior=Normal(0.0, 2.0), scales=scales)
        fit(bnn)
        found[scales] = (bnn.log_evidence(), set(bnn.prior_precisions().values()))
    assert found["given"][1] == {0.25}
    assert len(found["one"][1]) == 1
    assert len(found["per tensor"][1]) == 4
    assert found["given"][0] < found["one"][0] < found["per tensor"][0]


@pytest.mark.parametrize("scales", ["given", "one", "per tensor"])
def test_a_learned_noise_is_found_with_the_scales(scales: Any, tmp_path: Path) -> None:
    data = make_data("mlp", "regression")
    torch.manual_seed(0)
    bnn = LaplaceBNN(mlp(2), Gaussian(0.3, learn=True), Normal(), scales=scales, seed=0)
    quiet_trainer(max_epochs=2).fit(bnn, DataLoader(data, batch_size=16))
    posterior, learned = bnn.posterior(), bnn.likelihood_of(0)
    noise = [one.log_scale.exp().item() for one in (posterior.likelihood, learned)]
    assert (noise[0] == noise[1]) is (scales == "given")
    if scales != "given":
        assert noise[0] == pytest.approx(noise[1] * bnn.finished["noise"].item(), rel=1e-6)

    # the evidence is that of the noise and of the scales that were found
    net = mlp(2)
    for name, value in bnn.current_draws().items():
        net.get_parameter(name).data.copy_(value[0])
    prior = {name: Normal(0.0, value**-0.5) for name, value in bnn.prior_precisions().items()}
    again = laplace(net, DataLoader(data, batch_size=16), Gaussian(noise[0]), prior)
    assert again.log_evidence == pytest.approx(bnn.log_evidence(), rel=1e-5)

    inputs = data.tensors[0]
    expected = posterior.predict(inputs)
    assert expected.aleatoric.sqrt().mean().item() == pytest.approx(noise[0], rel=1e-5)
    posterior.save(tmp_path / "posterior")
    loaded = Posterior.load(tmp_path / "posterior", net=mlp(2)).predict(inputs)
    torch.testing.assert_close(loaded.variance, expected.variance)


@pytest.mark.filterwarnings("ignore:The validation NLL is lowest at the end")
@pytest.mark.parametrize("predictive", ["linearised", "draws"])
def test_the_scale_with_the_lowest_validation_nll(
    predictive: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no worse than any of 13 scales that are given, by passes of their own."""
    bnn = make(prior=Normal(0.0, 2.0), scales="validation", predictive=predictive)
    with caplog.at_level("INFO"):
        fit(bnn, epochs=10)
    assert "have the lowest validation NLL (" in caplog.text
    [precision] = set(bnn.prior_precisions().values())
    found = bnn.posterior()
    assert isinstance(found, LaplacePosterior)
    net = mlp(3)
    net.load_state_dict(dict(found.mean))

    def nll(**options: Any) -> float:
        posterior = laplace(net, [DATA.tensors], Categorical(), predictive=predictive, **options)
        return -float(posterior.predict(INPUTS).log_prob(DATA.tensors[1]).mean())

    given = {s: nll(prior=Normal(0.0, s)) for s in torch.logspace(-2, 2, 13).tolist()}
    own = nll(prior=Normal(0.0, precision**-0.5))
    assert own < min(given.values()) + (1e-3 if predictive == "linearised" else 2e-2)
    again = nll(prior=Normal(0.0, 2.0), scales="validation", validation=[DATA.tensors])
    assert again == pytest.approx(own, abs=1e-4 if predictive == "linearised" else 2e-2)


def test_a_scale_at_the_end_of_the_range_is_a_warning() -> None:
    """Frequencies that the mode fits exactly: any spread of the weights makes them flatter."""
    net = nn.Linear(4, 3).double()
    with torch.no_grad():
        net.bias.copy_(torch.tensor([0.5, 0.25, 0.25]).log())
    exact = [(torch.zeros(4, 4).double(), torch.tensor([0, 0, 1, 2]))]
    with pytest.warns(UserWarning, match=r"end of the range.* smaller scale .* by 100 or more"):
        laplace(net, exact, Categorical(), Normal(), scales="validation", validation=exact)


@pytest.mark.filterwarnings("ignore:The validation NLL is lowest at the end")
def test_validation_data_are_asked_for() -> None:
    bnn = make(scales="validation")
    with pytest.raises(ConfigurationError, match=r"no validation data\. Pass val_dataloaders="):
        quiet_trainer(max_epochs=1).fit(bnn, DataLoader(DATA, batch_size=16))
    late = make(scales="validation")  # none that has been read before the end of the fit
    fit(late, epochs=1, num_sanity_val_steps=0, check_val_every_n_epoch=2)
    assert len(set(late.prior_precisions().values())) == 1


def test_a_checkpoint_has_the_curvature_and_a_longer_fit_takes_it_anew(tmp_path: Path) -> None:
    bnn = make()
    trainer = fit(bnn)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = LaplaceBNN.load_from_checkpoint(tmp_path / "end.ckpt")
    assert loaded.log_evidence() == bnn.log_evidence()
    one, other = (each.posterior().predict(INPUTS).outputs for each in (bnn, loaded))
    assert torch.equal(one, other)
    resumed = make()
    fit_on = quiet_trainer(max_epochs=4)
    fit_on.fit(resumed, DataLoader(DATA, batch_size=16), ckpt_path=tmp_path / "end.ckpt")
    assert resumed.log_evidence() != bnn.log_evidence()
    done = make()  # a fit with nothing left to do keeps it
    loader = DataLoader(DATA, batch_size=16)
    quiet_trainer(max_epochs=2).fit(done, loader, ckpt_path=tmp_path / "end.ckpt")
    assert done.log_evidence() == bnn.log_evidence()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_fit_that_was_cut_off_before_the_pass_takes_it_when_resumed(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    bnn, resumed = make(restore_best=False), make(restore_best=False)
    fit(bnn, callbacks=[saver], enable_checkpointing=True)
    again = ModelCheckpoint(tmp_path / "again", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(max_epochs=2, callbacks=[again], enable_checkpointing=True)
    trainer.fit(resumed, DataLoader(DATA, 16, shuffle=True), ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.log_evidence() == bnn.log_evidence()


class Power(Exception):
    """A cut."""


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("validated", [True, False])
def test_a_fit_that_dies_in_the_pass_repeats_only_the_pass(
    validated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint of the last step: by steps, or at the end of the last validation."""

    def run(folder: str, **options: Any) -> LaplaceBNN:
        bnn = make(scales="per tensor")
        every: Any = {"save_on_train_epoch_end": False}
        every = every if validated else {"every_n_train_steps": 1}
        saver = ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1, **every)
        trainer = quiet_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True)
        rows = DataLoader(DATA, batch_size=16, shuffle=True)
        trainer.fit(bnn, rows, DataLoader(DATA, 48) if validated else None, **options)
        return bnn

    undisturbed = run("a")
    finish, steps = LaplaceBNN.finish, []

    def cut(self: LaplaceBNN, batches: Any) -> Any:
        def first() -> Any:
            yield next(batches)
            raise Power

        return finish(self, first())

    with monkeypatch.context() as patch:
        patch.setattr(LaplaceBNN, "finish", cut)
        with pytest.raises(Power):
            run("b")
    monkeypatch.setattr(LaplaceBNN, "on_train_batch_end", lambda *_: steps.append(1))
    resumed = run("c", ckpt_path=tmp_path / "b" / "step=6.ckpt")
    assert not steps
    assert resumed.log_evidence() == undisturbed.log_evidence()
    for name, tensor in undisturbed.finished.items():
        assert torch.equal(resumed.finished[name], tensor), name


def test_the_network_and_random_numbers_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True),
                        nn.Linear(8, 3)).train()  # fmt: skip
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    posterior = laplace(net, DataLoader(DATA, batch_size=16), Categorical(), structure="diagonal")
    assert net.training
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    state = torch.get_rng_state()  # a loader takes a random number whenever it is iterated over
    one = posterior.predict(INPUTS).outputs
    assert torch.equal(posterior.predict(INPUTS[:5]).outputs, one[:, :5])
    assert torch.equal(torch.get_rng_state(), state)


def test_uncertainty_varies_and_grows_away_from_the_data() -> None:
    x = torch.linspace(-1, 1, 64)[:, None]
    bnn = LaplaceBNN(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), Gaussian(0.1))
    trainer = quiet_trainer(max_epochs=30)
    trainer.fit(bnn, DataLoader(TensorDataset(x, x.sin()), batch_size=16))
    spread = bnn.posterior().predict(torch.tensor([[0.0], [0.5], [3.0]])).epistemic.flatten()
    assert spread[2] > 5 * spread[:2].max()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_pruned_compacted_saved_and_reported(structure: str, tmp_path: Path) -> None:
    net = mlp(3)
    posterior = laplace(net, DataLoader(DATA, batch_size=16), Categorical(), structure=structure)
    pruned = prune(posterior, 0.5, unit="channel")
    assert sparsity(pruned) > 0.2
    before, after = posterior.moments().variance, pruned.moments().variance
    for name, kept in support(pruned).items():
        assert torch.equal(after[name], before[name] * kept), name
    small = compact(pruned)
    assert small.net[0].out_features == 8
    small.save(tmp_path)
    loaded = Posterior.load(tmp_path, net)
    for one, other in ((small, pruned), (loaded, pruned)):
        a, b = (each.predict(INPUTS, draws=40).outputs for each in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    page = report_posteriors({"laplace": pruned}, DataLoader(DATA, batch_size=16), draws=8)
    assert page.numbers["models"][0]["scalars"]["nll"] > 0


def test_linearised_predictions_have_the_moments_of_linearised_draws() -> None:
    """f(w*) + J(w − w*) over 4,000 draws: variances within 12 %, 5 standard errors of 2.2 %."""
    posterior = laplace(mlp(3), DataLoader(DATA, batch_size=16), Categorical())
    draws = posterior.sample(4_000, torch.Generator().manual_seed(0))
    mean, root = posterior.output_gaussian(INPUTS[:4])
    deltas = {name: draws[name] - value for name, value in posterior.mean.items()}

    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(posterior.net, weights, (INPUTS[:4],))

    jacobian = torch.func.jacrev(run)(posterior.mean)
    change = sum(
        torch.einsum("bfp,sp->sbf", jacobian[n].flatten(2), deltas[n].flatten(1)) for n in deltas
    )
    covariance = torch.einsum("sbf,sbg->bfg", change, change) / 4_000
    torch.testing.assert_close(root @ root.mT, covariance, rtol=0.12, atol=0.05)
    torch.testing.assert_close(mean, run({**posterior.mean}))
    outputs = posterior.predict(INPUTS[:4], draws=16).outputs
    torch.testing.assert_close(outputs.mean(0), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.var(0, unbiased=False), (root @ root.mT).diagonal(0, 1, 2),
                               rtol=1e-3, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("at", [0.5, 50.0])
def test_of_gaussian_noise_the_linearised_predictive_is_in_closed_form(
    at: float, structure: Any
) -> None:
    """Also in tails that no point of a mixture reaches: densities to 1e-4, at 1 and at 4 sd."""
    torch.manual_seed(0)
    inputs = torch.randn(30, 1)
    posterior = laplace(nn.Linear(1, 1), [(inputs, 2 * inputs)], Gaussian(0.1), Normal(), structure)
    x = torch.tensor([[at]])
    row = torch.tensor([at, 1.0]).double()
    variance = float(row @ posterior.covariance_matrix() @ row)
    mean, sd = posterior.net(x).detach(), (variance + 0.1**2) ** 0.5
    normal, predictive = torch.distributions.Normal(mean, sd), posterior.predict(x)
    for far in (1, 4):
        density = predictive.log_prob(mean + far * sd)
        torch.testing.assert_close(density, normal.log_prob(mean + far * sd)[0], rtol=1e-4, atol=0)
    assert float(predictive.epistemic) == pytest.approx(variance, rel=1e-4)
    assert float(predictive.aleatoric) == pytest.approx(0.1**2)
    mixed = predictive.mix([predictive, posterior.likelihood.predictive(mean[None])])
    share = 1 / (1 + predictive.draws)
    assert float(mixed.epistemic) == pytest.approx((1 - share) * variance, rel=1e-4)


@pytest.mark.parametrize("far", [0.0, 2.0, 4.0])
def test_of_noise_that_the_outputs_give_the_tails_are_those_of_an_integral(far: float) -> None:
    """Over an uncertain mean and an uncertain raw scale, which are independent; to 0.01 nats."""
    likelihood, sd = HeteroscedasticGaussian(), torch.tensor([3.0, 0.5])
    points = standard_points(32, 2, seed=0).float()
    made = likelihood.mixture(torch.tensor([[0.0, -2.0]]), sd.diag()[None], points)
    raw = torch.linspace(-6, 6, 2001)
    scale = nn.functional.softplus(sd[1] * raw - 2) + likelihood.minimum_scale
    wide, y = (sd[0] ** 2 + scale**2).sqrt(), torch.tensor([[far * 3.0]])
    density = torch.distributions.Normal(0.0, wide).log_prob(y[0]) - 0.5 * raw**2
    exact = density.logsumexp(0) - (-0.5 * raw**2).logsumexp(0)
    assert float(made.log_prob(y)) == pytest.approx(float(exact), abs=0.01)


@pytest.mark.parametrize("likelihood", [Gaussian(0.1), HeteroscedasticGaussian()])
def test_correlated_outputs_keep_their_moments(likelihood: Likelihood) -> None:
    """Points and independent errors together have the covariance of the outputs."""
    torch.manual_seed(0)
    mean, root = torch.randn(3, 4), torch.randn(3, 4, 4)
    root[0] = torch.eye(4) * 2  # nothing is left for the points, but of raw scales
    made: Any = likelihood.mixture(mean, root, standard_points(64, 4, seed=0).float())
    covariance, outputs = root @ root.mT, made.outputs - mean
    found = torch.einsum("sbf,sbg->bfg", outputs, outputs) / 64
    means = made.means.shape[-1]
    found[:, range(means), range(means)] += made.spread[0]
    torch.testing.assert_close(found, covariance, rtol=1e-3, atol=1e-4)
    assert made.means[:, 0].var(0).max() < 1e-6


def test_two_training_loaders_are_refused_before_the_fit() -> None:
    bnn = make(num_data=48, split=lambda batch: batch["one"])
    loaders = dict.fromkeys(("one", "two"), DataLoader(DATA, batch_size=16))
    with pytest.raises(ConfigurationError, match="needs one data loader, by itself"):
        quiet_trainer(max_epochs=1).fit(bnn, loaders)
    assert bnn.global_step == 0


def test_a_second_fit_takes_its_curvature_anew() -> None:
    """As many steps as the first had are no sign that it is done."""
    bnn, other = make(restore_best=False), DataLoader(DATA, batch_size=16)
    fit(bnn)
    before = bnn.log_evidence()
    quiet_trainer(max_epochs=2).fit(bnn, other)
    assert isinstance(bnn.posterior(), LaplacePosterior)
    assert bnn.log_evidence() != before


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_read_from_a_file_predicts_the_same_numbers(structure: Any, tmp_path: Path) -> None:
    posterior = laplace(mlp(3), [DATA.tensors], Categorical(), structure=structure)
    posterior.save(tmp_path / "posterior")
    read = Posterior.load(tmp_path / "posterior", mlp(3))
    assert torch.equal(read.predict(INPUTS).outputs, posterior.predict(INPUTS).outputs)


def test_first_examples_without_curvature_do_not_stop_a_fit() -> None:
    """They have no label here; that of all data says what is wrong."""
    targets = DATA.tensors[1].clone()
    targets[:2] = -1
    bnn = LaplaceBNN(mlp(3), Categorical(ignore_index=-1))
    with pytest.warns(UserWarning, match="Of the first examples: The curvature is 0"):
        quiet_trainer(max_epochs=1).fit(bnn, DataLoader(TensorDataset(INPUTS, targets), 16))
    assert bnn.log_evidence() < 0


@pytest.mark.parametrize(("count", "axes"), [(1, 3), (2, 1), (5, 4), (32, 10)])
def test_points_of_a_standard_normal(count: int, axes: int) -> None:
    points = standard_points(count, axes, seed=3)
    assert points.shape == (count, axes)
    assert torch.equal(points, standard_points(count, axes, seed=3))
    assert points.isfinite().all()
    if count > 1:
        assert points.mean(0).abs().max() < 1e-12
        torch.testing.assert_close(points.square().mean(0), torch.ones(axes).double())


class Tied(nn.Module):
    """A weight that is used by its layer, and once more."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 3), use

    def forward(self, inputs: Tensor) -> Tensor:
        if self.use == "elsewhere":
            return self.last(nn.functional.linear(inputs, self.first.weight, self.first.bias))
        if self.use == "too":
            return self.last(nn.functional.linear(self.first(inputs), self.first.weight))
        return self.last(self.first(self.first(inputs)))


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("elsewhere", "'first' is not called"),
        ("too", "'first' has weights that are used in another way, too"),
        ("twice", "'first' is called several times"),
    ],
)
def test_layers_that_have_no_factors_are_named_before_the_fit(use: str, words: str) -> None:
    bnn = LaplaceBNN(Tied(use), Categorical())
    with pytest.raises(ConfigurationError, match=words):
        fit(bnn)
    assert bnn.global_step == 0
    posterior = laplace(Tied(use), DataLoader(DATA, 16), Categorical(), structure="diagonal")
    assert posterior.predict(INPUTS).epistemic.isfinite().all()


class Centred(nn.Module):
    """Examples that depend on the others of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(inputs - inputs.mean(0)))


class Kinked(LaplaceNoise):
    """Says nothing of its curvature, and automatic differentiation finds none."""

    hessian_columns = Likelihood.hessian_columns


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LaplaceBNN(nn.Linear(2000, 2000), Gaussian(), structure="full"), "GB of memory"),
        (lambda: LaplaceBNN(nn.LayerNorm(3), Gaussian()), r"'weight' is a weight of 'net' \(Layer"),
        (lambda: LaplaceBNN(nn.Conv2d(4, 4, 1, groups=2), Gaussian()), "convolutions without gro"),
        (
            lambda: make(structure="low"),
            "'diagonal', 'kron', 'full' or 'low rank'; got 'low'",
        ),
        (lambda: make(rank=3), "rank= is for structure='low rank'; got rank=3 with 'kron'"),
        (lambda: make(structure="low rank", rank=0), "rank= is a whole number"),
        (
            lambda: laplace(mlp(3), [DATA.tensors], Categorical(), scales="validation"),
            r"by the NLL of other data than the loader's\. Pass them as validation=",
        ),
        (
            lambda: laplace(mlp(3), [DATA.tensors], Categorical(), validation=[DATA.tensors]),
            "validation= is for scales='validation'; got scales='one'",
        ),
        (
            lambda: laplace(
                mlp(3),
                [DATA.tensors],
                Categorical(),
                scales="validation",
                validation=iter([DATA.tensors]),
            ),
            "an iterator gives its batches once",
        ),
        (
            lambda: laplace(
                mlp(3), [DATA.tensors], Categorical(), scales="validation", validation=[]
            ),
            "no validation NLL without data",
        ),
        (lambda: make(prior=Laplace()), "needs a prior that is Gaussian; got Laplace"),
        (lambda: make(prior={"*.bias": StudentT(), "*": Normal()}), "got StudentT"),
        (lambda: make(scales="auto"), "scales= is 'given', 'one', 'per tensor' or 'validation'"),
        (lambda: make(predictive="probit"), "predictive= is 'linearised' or 'draws'"),
        (lambda: LaplaceBNN(mlp, Categorical()), r"net= is a torch\.nn\.Module"),  # type: ignore
        (lambda: laplace(mlp(3), [], Categorical()), "loader gave no batch"),
        (
            lambda: laplace(nn.Linear(4, 1), [(INPUTS, INPUTS[:, :1])], Kinked()),
            "curvature is 0 for all weights: Kinked has no second derivative",
        ),
        (lambda: laplace(Centred(), [DATA.tensors], Categorical(), structure="diagonal"), "alone"),
    ],
)
def test_what_cannot_work_says_so(make: Any, words: str) -> None:
    with pytest.raises((ConfigurationError, DataError), match=words):
        make()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_curvature_that_is_not_finite_names_the_tensor(structure: Any) -> None:
    """An infinite input stops at the Hardtanh: what goes into the next layer is finite."""
    inputs = INPUTS.clone()
    inputs[3] = torch.inf
    net = nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(), nn.Linear(3, 3))
    with pytest.raises(NonFiniteError, match=r"curvature of '0\.weight' is not finite"):
        laplace(net, [(inputs, DATA.tensors[1])], Categorical(), structure=structure)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_has_any_precision(structure: Any, precision: str) -> None:
    """In half precision weights are rounded, but the curvature of them is that of float32.

    Inputs that Lightning rounds change it by their rounding: to 5 %.
    """
    bnn = make(structure=structure, scales="per tensor" if structure == "kron" else "one")
    trainer = fit(bnn, precision=precision)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    posterior = bnn.posterior()
    assert isinstance(posterior, LaplacePosterior)
    assert {t.dtype for t in posterior.covariance.tensors.values()} == {dtype}
    net = mlp(3).to(dtype)
    net.load_state_dict(dict(posterior.mean))
    inputs = INPUTS.to(dtype)
    again = laplace(net, [(inputs, DATA.tensors[1])], Categorical(), structure=structure,
                    scales=bnn.scales)  # fmt: skip
    variance = again.covariance.variance()
    torch.testing.assert_close(posterior.covariance.variance(), variance, rtol=0.05, atol=1e-4)
    outputs = posterior.predict(inputs).outputs
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs, again.predict(inputs).outputs, rtol=0.05, atol=0.05)
    [tested] = trainer.test(bnn, DataLoader(DATA, batch_size=16), verbose=False)
    assert 0 < tested["test_nll"] < 2


def test_half_precision_learned_scales_and_other_likelihoods() -> None:
    data = make_data("mlp", "regression")
    torch.manual_seed(0)
    bnn = LaplaceBNN(
        mlp(4), HeteroscedasticGaussian(), Normal(scale=Learned()), bayesian=last_layer, seed=0
    )
    trainer = quiet_trainer(max_epochs=2, precision="bf16-true")
    trainer.fit(bnn, DataLoader(data, batch_size=16))
    assert bnn.posterior().predict(INPUTS).variance.isfinite().all()
    assert bnn.inferred == ["2.weight", "2.bias"]
    assert bnn.point_estimates == ["0.weight", "0.bias"]
