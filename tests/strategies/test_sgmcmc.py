"""SG-MCMC as a strategy: stacked chains, starts, warm-up, schedules, clipping, bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import LambdaCallback
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, DrawsPosterior
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import GaussianPosterior, MixturePosterior
from lightning_bnn.priors import Laplace, Normal
from lightning_bnn.random import member_seed
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT, Cyclical, Polynomial
from tests.nets import NETS, loader, make_data, mlp
from tests.trainers import quiet_trainer

SAMPLERS = [SGLD, PSGLD, SGHMC, SGNHT, BAOA]


def batch_norm_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make(**options: Any) -> SGMCMC:
    defaults: dict[str, Any] = {"sampler": partial(SGLD, lr=0.01), "seed": 7, "mode": "stacked"}
    net = options.pop("net", None) or batch_norm_net()
    likelihood = options.pop("likelihood", None) or Categorical()
    return SGMCMC(net, likelihood, Normal(0.0, 1.0), **{**defaults, **options})


def fit(bnn: SGMCMC, steps: int = 50, batch_size: int = 16, **options: Any) -> Any:
    data = make_data("mlp", "classification")
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **options)
    torch.manual_seed(0)  # decides the order of the data
    trainer.fit(bnn, loader(data, shuffle=True, batch_size=batch_size))
    return trainer


# -------------------------------------------------------------------- chains


@pytest.mark.parametrize("mode", ["stacked", "loop"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_stacked_chains_equal_single_ones(sampler: Any, mode: Any) -> None:
    """Eight at once and one by one: weights, running statistics, 50 steps, the same batches.

    In float64, because chains of one start drift apart from rounding alone.
    """
    make_sampler = partial(sampler, lr=0.003)
    together = make(chains=8, sampler=make_sampler, mode=mode)
    fit(together, precision="64-true")
    found = together.current_draws()
    assert found["1.running_mean"].std(0).min() > 0
    for number in range(8) if sampler is SGHMC else (0, 7):
        alone = make(chains=[number], sampler=make_sampler)
        fit(alone, precision="64-true")
        for name, value in alone.current_draws().items():
            torch.testing.assert_close(found[name][number], value[0], rtol=1e-8, atol=1e-9)


def test_one_chain_is_an_ordinary_run() -> None:
    """The same weights as the sampler gives on the network itself, to rounding."""
    bnn = make(chains=1, net=NETS["mlp"][0](3))
    net = NETS["mlp"][0](3)
    net.load_state_dict(bnn.net.state_dict())
    data = make_data("mlp", "classification")
    quiet_trainer(max_epochs=2).fit(bnn, loader(data))
    sampler = SGLD(net.parameters(), lr=0.01, num_data=48, seed=member_seed(7, 0))
    for _ in range(2):
        for inputs, targets in loader(data):
            sampler.zero_grad()
            energy = nn.functional.cross_entropy(net(inputs), targets)
            energy = energy + sum(0.5 * p.square().sum() for p in net.parameters()) / 48
            energy.backward()
            sampler.step()
    own = dict(net.named_parameters())
    for name, value in bnn.current_draws().items():
        torch.testing.assert_close(value[0], own[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prior", [Normal(0.2, 0.5), Laplace(0.1, 0.3), Normal(loc="pretrained")])
@pytest.mark.parametrize("bayesian", [None, "3.*"])
def test_gradients_equal_autograds(prior: Any, bayesian: Any) -> None:
    """Of every chain's weights, against plain autograd on its own network, in float64."""
    net = batch_norm_net().double()
    inputs, targets = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    bnn = SGMCMC(
        net, Categorical(), prior, chains=3, bayesian=bayesian, num_data=40, warm_up=1,
        mode="stacked",
    )  # fmt: skip
    draws = {name: tensor.clone() for name, tensor in bnn.current_draws().items()}
    bnn.loss((inputs, targets)).backward()
    found = bnn.bank.layout.views(bnn.weights.grad)
    if bnn.bank.points is not None:
        found |= bnn.bank.point_layout.views(bnn.bank.points.grad)
    for chain in range(3):
        weights = {
            name: tensor[chain].clone().requires_grad_(name in found)
            for name, tensor in draws.items()
        }
        outputs = torch.func.functional_call(net, weights, (inputs,))
        energy = nn.functional.cross_entropy(outputs, targets)
        for name, parameter in net.named_parameters():
            loc = parameter.detach() if prior.loc == "pretrained" else prior.loc
            energy = energy - prior.log_prob(weights[name], loc, prior.scale).sum() / 40
        names = list(found)
        by_autograd = torch.autograd.grad(energy, [weights[name] for name in names])
        for name, gradient in zip(names, by_autograd, strict=True):
            torch.testing.assert_close(found[name][chain], gradient, rtol=1e-10, atol=1e-12)


def test_gradients_accumulate_as_one_large_batch() -> None:
    ends = []
    for batch_size, accumulate in ((8, 2), (16, 1)):
        bnn = make(net=NETS["mlp"][0](3), chains=2, start=lambda: plain_mlp())
        data = make_data("mlp", "classification")
        trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(bnn, loader(data, batch_size=batch_size))
        assert trainer.global_step == 6
        ends.append(bnn.weights.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def plain_mlp() -> nn.Module:
    return NETS["mlp"][0](3)


# -------------------------------------------------------------------- where chains start


def test_around_keeps_pretrained_weights_in_chain_0_and_perturbs_the_others() -> None:
    net = batch_norm_net()
    draws = make(net=net, chains=3, spread=0.5).current_draws()
    own = net.state_dict()
    assert all(torch.equal(draws[name][0], own[name]) for name in draws)
    change = (draws["0.weight"][1] - own["0.weight"]).square().mean().sqrt()
    size = own["0.weight"].square().mean().sqrt()
    assert 0.3 < change / size < 0.7
    assert not torch.equal(draws["0.weight"][1], draws["0.weight"][2])


def test_reset_gives_each_chain_new_values_and_the_seed_decides() -> None:
    first = make(chains=2, start="reset").weights
    assert torch.equal(first, make(chains=2, start="reset").weights)
    assert not torch.equal(first, make(chains=2, start="reset", seed=8).weights)
    assert not torch.equal(first[0], first[1])
    before = torch.get_rng_state()
    make(chains=2, start="reset")
    assert torch.equal(before, torch.get_rng_state())


def test_chains_start_from_a_fitted_ensemble() -> None:
    nets = [batch_norm_net() for _ in range(3)]
    for index, net in enumerate(nets):
        nn.init.constant_(net[0].weight, index)
        net[1].running_mean.fill_(index + 0.5)
    members = [dict(net.state_dict()) for net in nets]
    draws = DrawsPosterior(nets[0], Categorical(), members)
    parts = [DrawsPosterior(nets[0], Categorical(), [member]) for member in members]
    for start in (nets, draws, MixturePosterior(parts)):
        bnn = make(net=nets[0], chains=3, start=start)
        found = bnn.current_draws()
        assert found["0.weight"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        assert found["1.running_mean"][:, 0].tolist() == [0.5, 1.5, 2.5]
        alone = make(net=nets[0], chains=[2], start=nets[2:] if start is nets else start)
        assert torch.equal(alone.weights[0], bnn.weights[2])


def test_chains_start_from_a_gaussian_posterior() -> None:
    net = plain_mlp()
    own = {name: value.detach() for name, value in net.named_parameters()}
    sd = {name: torch.full_like(value, 0.01) for name, value in own.items()}
    bnn = make(net=net, chains=4, start=GaussianPosterior(net, Categorical(), own, sd))
    spread = bnn.weights.detach().std(0).mean()
    assert 0.005 < spread < 0.015


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ([batch_norm_net(), nn.Linear(4, 3)], "chain 1 is another one: tensor 0 is '0.weight'"),
        ([batch_norm_net()], "1 networks for 2 chains"),
        (lambda: nn.Linear(4, 3), "chain 0 is another one"),
        (lambda: 3, "gave int for chain 0"),
        ("somewhere", "start= is 'around'"),
        (batch_norm_net(), "start= is 'around'"),
    ],
)
def test_bad_starts(start: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(chains=2, start=start)


# -------------------------------------------------------------------- warm-up and schedules


def test_warm_up_takes_the_first_steps_and_the_schedule_waits() -> None:
    bnn = make(
        chains=2,
        start="around",
        warm_up=10,
        warm_up_optimizer=partial(SGD, lr=0.5),
        sampler=partial(SGLD, lr=0.1),
        scheduler=partial(Polynomial, offset=1.0, power=1.0),
    )
    plain = make(chains=2, spread=0.1)
    optimizer = SGD([plain.weights], lr=0.5)
    data = make_data("mlp", "classification")
    plain.target.num_data = 48
    batches = list(loader(data))
    for step in range(10):
        optimizer.zero_grad()
        plain.loss(batches[step % 3]).backward()
        optimizer.step()

    rates: list[float] = []
    sampling: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            sampling.append(module.sampling)
            if trainer.global_step == 10:
                torch.testing.assert_close(module.weights, plain.weights, rtol=1e-5, atol=1e-6)

    trainer = quiet_trainer(max_steps=14, max_epochs=-1, callbacks=[Watch()])
    trainer.fit(bnn, loader(data))
    assert sampling == [False] * 10 + [True] * 4
    assert rates[9] == 0.1
    assert rates[10:] == pytest.approx([0.1 / 2, 0.1 / 3, 0.1 / 4, 0.1 / 5])


def test_cyclical_schedule_tells_sampling_steps_and_cycles() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append((module.sampling, module.ended_cycle))

    bnn = make(scheduler=partial(Cyclical, cycle_length=4, exploration=0.5), warm_up=1)
    fit(bnn, steps=10, callbacks=[Watch()])
    cycle = [(False, False), (False, False), (True, False), (True, True)]
    assert seen == [(False, False), *cycle, *cycle, (False, False)]


def test_points_and_the_likelihood_are_trained_in_the_warm_up_and_then_held() -> None:
    data = make_data("mlp", "regression")
    net = NETS["mlp"][0](2)
    bnn = SGMCMC(
        net, Gaussian(0.5, learn=True), Normal(0.0, 1.0), partial(SGLD, lr=1e-3), chains=2,
        bayesian="2.*", warm_up=6, mode="stacked", seed=1,
    )  # fmt: skip
    snapshots: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            scale = bnn.likelihood.log_scale.detach().clone()
            snapshots.append(
                (bnn.bank.points.detach().clone(), bnn.weights.detach().clone(), scale)
            )

    quiet_trainer(max_steps=12, max_epochs=-1, callbacks=[Watch()]).fit(bnn, loader(data))
    points, weights, scales = zip(*snapshots, strict=True)
    assert not torch.equal(points[0], points[5])
    assert not torch.equal(scales[0], scales[5])
    assert torch.equal(points[5], points[-1])
    assert torch.equal(scales[5], scales[-1])
    assert not torch.equal(weights[5], weights[-1])
    assert set(bnn.current_draws()) == set(dict(net.named_parameters()))


# -------------------------------------------------------------------- HMC in a trainer


def test_hmc_runs_as_the_sampler_and_needs_full_batches() -> None:
    data = make_data("mlp", "classification")
    bnn = make(chains=4, net=plain_mlp(), sampler=partial(HMC, lr=0.05, leapfrog_steps=5))
    before = bnn.weights.detach().clone()
    trainer = quiet_trainer(max_epochs=5)
    trainer.fit(bnn, DataLoader(data, batch_size=48, shuffle=True))
    assert trainer.global_step == 5
    assert not torch.equal(before, bnn.weights)
    alone = make(net=plain_mlp(), sampler=partial(HMC, lr=0.05))
    with pytest.raises(DataError, match=r"all 48 training examples.*batch has 16.*batch_size=48"):
        quiet_trainer(max_epochs=1).fit(alone, loader(data))
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches"):
        quiet_trainer(max_epochs=1, accumulate_grad_batches=2).fit(
            alone, DataLoader(data, batch_size=48)
        )


class FunctionalDropout(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(inputs, 0.5, self.training))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), "changes '0.running_mean'"),
        (nn.Sequential(nn.Dropout(), nn.Linear(4, 3)), "is random"),
        (FunctionalDropout(4, 3), "is random"),
    ],
)
def test_hmc_refuses_an_energy_that_is_not_that_of_the_weights(net: Any, why: str) -> None:
    bnn = make(net=net, sampler=partial(HMC, lr=0.05))
    with pytest.raises(ConfigurationError, match=why):
        fit(bnn, batch_size=48)


def test_hmc_that_stands_still_is_noticed_and_its_loss_is_of_what_is_kept() -> None:
    bnn = make(net=plain_mlp(), chains=2, sampler=partial(HMC, lr=1e4, adapt_steps=0))
    with pytest.warns(
        UserWarning, match=r"less than one in ten transitions in the chains \[0, 1\]"
    ):
        trainer = fit(bnn, steps=4, batch_size=48, log_every_n_steps=1)
    assert trainer.callback_metrics["train_loss"] < 10
    assert trainer.callback_metrics["acceptance"] < 0.1


def fit_hmc(chains: Any, steps: int = 40, ckpt: Any = None, save: Any = None) -> SGMCMC:
    """HMC that is given no number, with a checkpoint at a step."""
    bnn = make(net=plain_mlp(), chains=chains, mode="loop", sampler=partial(HMC, leapfrog_steps=4))
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=save and [save])
    data = make_data("mlp", "classification")
    trainer.fit(bnn, DataLoader(data, batch_size=48), ckpt_path=ckpt)
    return bnn


class SaveAt(Callback):
    def __init__(self, step: int, path: Any) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_hmc_without_numbers_warms_up_adapts_and_moves_each_chain_as_alone() -> None:
    """Of 40 steps 10 warm up and 8 adapt; chain 3 alone is the fourth of six, to the bit."""
    together, alone = fit_hmc(6), fit_hmc([3])
    assert together.settling_steps == 18
    assert torch.equal(together.weights[3], alone.weights[0])
    assert torch.equal(together.sampler.lr_scale[3], alone.sampler.lr_scale[0])
    assert len(together.sampler.lr_scale.unique()) == 6
    accepted = together.trainer.callback_metrics["acceptance"]
    assert accepted > 0.4


@pytest.mark.parametrize("step", [10, 24, 26, 32])
def test_hmc_resumes_exactly_in_each_of_its_phases(step: int, tmp_path: Any) -> None:
    """In the warm-up, at its end, in the adaptation and after it."""
    path = tmp_path / "run.ckpt"
    whole = fit_hmc(3, save=SaveAt(step, path))
    resumed = fit_hmc(3, ckpt=path)
    assert torch.equal(whole.weights, resumed.weights)
    assert torch.equal(whole.sampler.lr_scale, resumed.sampler.lr_scale)


def test_hmc_goes_on_with_its_steps_when_a_trainer_fits_again() -> None:
    bnn = fit_hmc(2, steps=20)
    found, trainer = bnn.sampler.lr_scale, bnn.trainer
    trainer.fit_loop.epoch_loop.max_steps = 25
    trainer.fit(bnn, DataLoader(make_data("mlp", "classification"), batch_size=48))
    assert torch.equal(found, bnn.sampler.lr_scale)
    assert not bnn.sampler.adapting


def test_minibatches_are_refused_before_the_warm_up() -> None:
    with pytest.raises(DataError, match=r"(?s)batch has 16.*batch_size=48.*SGHMC"):
        fit(make(net=plain_mlp(), sampler=HMC), steps=40)


def test_draws_count_once_the_step_size_of_hmc_is_settled() -> None:
    seen: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(module.sampling)

    sampler = partial(HMC, lr=0.01, leapfrog_steps=2, adapt_steps=3)
    fit(make(net=plain_mlp(), sampler=sampler), steps=6, batch_size=48, callbacks=[Watch()])
    assert seen == [False] * 3 + [True] * 3


# -------------------------------------------------------------------- bad input


def test_a_nan_in_one_chain_is_found_and_named() -> None:
    bnn = make(net=plain_mlp(), chains=3)
    with torch.no_grad():
        bnn.weights[1, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="energy of chain 1 is not finite at step 0"):
        fit(bnn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chains": 0}, "chains= is how many"),
        ({"chains": [1, 1]}, "each once"),
        ({"seed": -1}, "seed="),
        ({"warm_up": -1}, "warm_up="),
        ({"spread": -0.1}, "spread="),
        ({"sampler": partial(SGLD, lr=0.1, temperature=0.5)}, "Pass temperature= to SGMCMC"),
        ({"sampler": partial(SGLD, lr=0.1, seed=3)}, "Pass seed= to SGMCMC"),
        ({"sampler": 0.1}, "sampler= makes a sampler"),
        ({"likelihood": Gaussian(1.0, learn=True)}, "learns .*log_scale.*Pass warm_up="),
        ({"mode": "fast"}, "mode="),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_an_optimizer_is_not_a_sampler() -> None:
    with pytest.raises(ConfigurationError, match="warm_up_optimizer="):
        fit(make(sampler=lambda parameters, **_: SGD(parameters, lr=0.1)))


def test_weight_decay_in_the_warm_up_is_refused() -> None:
    optimizer = partial(SGD, lr=0.1, weight_decay=0.1)
    with pytest.raises(ConfigurationError, match="counts the prior twice"):
        fit(make(warm_up=5, warm_up_optimizer=optimizer))


# -------------------------------------------------------------------- Lightning's own


@pytest.mark.filterwarnings("ignore:The weights are torch.bfloat16")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_run(precision: Any) -> None:
    bnn = make(chains=2, net=plain_mlp(), sampler=partial(SGHMC, lr=1e-3))
    data = make_data("mlp", "classification")
    quiet_trainer(max_epochs=1, precision=precision).fit(bnn, loader(data))
    assert bnn.weights.isfinite().all()


def test_temperature_and_loss_are_logged() -> None:
    trainer = fit(make(chains=2, sampler=partial(SGHMC, lr=1e-3)), log_every_n_steps=5)
    assert {"train_loss", "temperature"} <= set(trainer.callback_metrics)


def test_where_a_chain_starts_and_its_noise_have_nothing_in_common() -> None:
    """In float64 both come from PyTorch's generator; with one seed they would be the same."""
    net = nn.Linear(300, 1, bias=False).double()
    sampler = partial(SGLD, lr=0.1)
    bnn = SGMCMC(net, Gaussian(1.0), None, sampler, [1], num_data=10, seed=3, spread=1.0)
    moved = (bnn.weights - net.weight).detach().flatten()
    sampler = bnn.configure_optimizers()
    noise = sampler.streams[0].fill_(torch.empty(300, dtype=torch.float64))
    assert abs(torch.corrcoef(torch.stack([moved, noise]))[0, 1]) < 0.3  # 5 standard errors


def test_a_second_fit_does_not_repeat_the_noise_of_the_first() -> None:
    bnn = make(net=plain_mlp(), chains=2)
    fit(bnn, steps=3)
    first = bnn.configure_optimizers().streams[0].state_dict()["lanes"]
    fresh = make(net=plain_mlp(), chains=2).configure_optimizers().streams[0].state_dict()["lanes"]
    assert not torch.equal(first, fresh)


def test_a_trainer_that_fits_again_goes_on_sampling_without_a_new_warm_up() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append((module.sampling, trainer.optimizers[0].taken > 4))

    bnn = make(net=plain_mlp(), warm_up=4, sampler=partial(SGHMC, lr=1e-3))
    data = make_data("mlp", "classification")
    trainer = quiet_trainer(max_epochs=2, callbacks=[Watch()])
    trainer.fit(bnn, loader(data))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(bnn, loader(data))
    assert seen == [(False, False)] * 4 + [(True, True)] * 8


@pytest.mark.parametrize("start", ["around", "reset"])
def test_weights_that_nothing_trains_stay_the_networks_own(start: Any) -> None:
    net = plain_mlp()
    draws = make(net=net, chains=3, bayesian="2.*", start=start).current_draws()
    assert all(torch.equal(one, net[0].weight) for one in draws["0.weight"])
    assert not torch.equal(draws["2.weight"][1], draws["2.weight"][2])


def test_a_learned_likelihood_does_not_depend_on_the_number_of_chains() -> None:
    """Its gradient is the mean over chains, and it is clipped too."""
    gradients = []
    for chains in (1, 4):
        net = NETS["mlp"][0](2)
        net.load_state_dict({k: torch.full_like(v, 0.1) for k, v in net.state_dict().items()})
        bnn = make(
            net=net, chains=chains, spread=0.0, warm_up=5, likelihood=Gaussian(0.5, learn=True),
            num_data=48,
        )  # fmt: skip
        bnn.loss(make_data("mlp", "regression")[:16]).backward()
        gradients.append(bnn.likelihood.log_scale.grad.clone())
        bnn.configure_gradient_clipping(None, 1e-3, "norm")  # type: ignore[arg-type]
        assert bnn.likelihood.log_scale.grad.abs() <= 1e-3
    torch.testing.assert_close(*gradients)


def test_a_schedule_that_reaches_zero() -> None:
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
    for sampler in SAMPLERS:
        bnn = make(net=plain_mlp(), sampler=partial(sampler, lr=1e-3), scheduler=cosine)
        fit(bnn, steps=12, log_every_n_steps=1)
        assert bnn.weights.isfinite().all()


def test_low_precision_weights_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="bf16-mixed"):
        fit(make(net=plain_mlp()), steps=1, precision="bf16-true")


def test_chains_start_where_stored_chains_ended() -> None:
    net = nn.Linear(1, 1, bias=False)
    draws = [{"weight": torch.full((1, 1), float(value))} for value in range(6)]
    stored = DrawsPosterior(net, Gaussian(1.0), draws, chains=2)
    bnn = SGMCMC(net.double(), Gaussian(1.0), chains=2, start=stored)
    assert bnn.weights.flatten().tolist() == [4.0, 5.0]
    assert bnn.weights.dtype == torch.float64


def test_a_warm_up_is_resumed_where_there_are_validation_data(tmp_path: Path) -> None:
    """The sanity check comes before the training data are known, and ends no warm-up."""
    data = DataLoader(make_data("mlp", "classification"), batch_size=16)

    def run(saved: Path | None, **options: Any) -> SGMCMC:
        torch.manual_seed(0)
        bnn = SGMCMC(mlp(3), Categorical(), seed=7)
        trainer = quiet_trainer(max_epochs=4, **options)
        trainer.fit(bnn, data, data, ckpt_path=saved)
        return bnn

    def save(trainer: Any, bnn: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = run(None, callbacks=[LambdaCallback(on_train_epoch_end=save)])
    resumed = run(tmp_path / "0.ckpt")
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
