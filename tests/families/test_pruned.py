"""A family that was pruned against one that never had the pruned weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence

from lightning_bnn.families.mean_field import MeanField
from lightning_bnn.families.pruned import KeptTensors
from lightning_bnn.priors import BoundPrior, Laplace, Normal, Prior, ScaleMixture, StudentT
from lightning_bnn.random import NormalStream
from tests.native.compiler import needs_compiler

SHAPES = {"a": (6, 5), "b": (7,), "c": (4, 3)}
PRIORS = {"normal": Normal, "laplace": Laplace, "student": StudentT, "mixture": ScaleMixture}


class Holder(nn.Module):
    """Some tensors, for priors to be bound to."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def made(tensors: dict[str, Tensor], prior: Any, form: Any = "exp") -> tuple[MeanField, BoundPrior]:
    own = dict(Holder(tensors).named_parameters())
    return MeanField(form).bind(own, 0.2), BoundPrior(prior, Holder(tensors), own)


def pair(
    prior: Any, form: Any = "exp", dtype: torch.dtype = torch.float64
) -> tuple[MeanField, BoundPrior, MeanField, BoundPrior, Tensor]:
    """A pruned family and its prior, those of the remaining weights alone, and what remains."""
    tensors = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    family, bound = made(tensors, prior, form)
    keep = torch.rand(family.layout.size) > 0.6
    views = family.layout.views(keep)
    fresh, fresh_bound = made({n: t[views[n]] for n, t in tensors.items()}, prior, form)
    with torch.no_grad():
        family.rho.add_(0.3 * torch.randn_like(family.rho))
        family.mean.add_(0.1 * torch.randn_like(family.mean))  # away from a pretrained centre
        fresh.rho.copy_(family.rho[keep])
        fresh.mean.copy_(family.mean[keep])
    family.prune(keep, bound)
    return family, bound, fresh, fresh_bound, keep


def flat(draw: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in draw.values()])


@pytest.mark.parametrize("form", ["exp", "softplus"])
@pytest.mark.parametrize("loc", [0.0, 0.3, "pretrained"])
@pytest.mark.parametrize("kind", PRIORS)
def test_equals_a_family_of_the_remaining_weights(kind: str, loc: Any, form: str) -> None:
    family, bound, fresh, fresh_bound, keep = pair(PRIORS[kind](loc=loc, scale=0.7), form)
    space, fresh_space = family.workspace(), fresh.workspace()
    space.noise.normal_()
    fresh_space.noise.copy_(space.noise[keep])
    pull = torch.randn_like(family.mean)
    draw, kl = family.draw_in(space, bound)
    (0.3 * kl + (flat(draw) * pull).sum()).backward()
    other, fresh_kl = fresh.draw_in(fresh_space, fresh_bound)
    (0.3 * fresh_kl + (flat(other) * pull[keep]).sum()).backward()
    assert kl.item() == pytest.approx(fresh_kl.item(), rel=1e-10)
    assert torch.equal(flat(draw)[keep], flat(other))
    zero = flat(draw)[~keep]
    assert not zero.any()
    assert not zero.signbit().any()
    for gradient, expected in zip(
        (family.mean.grad, family.rho.grad), (fresh.mean.grad, fresh.rho.grad), strict=True
    ):
        torch.testing.assert_close(gradient[keep], expected, rtol=1e-10, atol=1e-12)
        assert not gradient[~keep].any()
    # the KL by ordinary autograd, which other estimators use
    sd = family.sd()
    plain = family.kl(torch.addcmul(family.mean, sd, space.noise), bound)
    by_autograd = torch.autograd.grad(plain, (family.mean, family.rho))
    family.zero_grad()
    family.draw_in(space, bound)[1].backward()
    assert plain.item() == pytest.approx(kl.item(), rel=1e-10)
    torch.testing.assert_close(family.mean.grad, by_autograd[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(family.rho.grad, by_autograd[1], rtol=1e-10, atol=1e-12)


def test_several_priors_in_one_vector() -> None:
    """Each stretch is compressed by itself; one that is pruned away altogether adds nothing."""
    priors: dict[str, Prior] = {"a": Laplace(0.1, 0.4), "b": Normal("pretrained"), "*": StudentT()}
    family, bound, fresh, fresh_bound, keep = pair(priors)
    space, fresh_space = family.workspace(), fresh.workspace()
    space.noise.normal_()
    fresh_space.noise.copy_(space.noise[keep])
    kl, fresh_kl = family.draw_in(space, bound)[1], fresh.draw_in(fresh_space, fresh_bound)[1]
    assert kl.item() == pytest.approx(fresh_kl.item(), rel=1e-10)
    only_b = {name: torch.full(shape, name == "b") for name, shape in SHAPES.items()}
    family.prune(family.layout.flatten(only_b), bound)
    mean, sd = (family.layout.views(t.detach())["b"] for t in (family.mean, family.sd()))
    b = family.layout.views(keep)["b"]
    centre = family.layout.views(bound.pretrained)["b"][b]
    normal = torch.distributions.Normal
    expected = kl_divergence(normal(mean[b], sd[b]), normal(centre, torch.ones_like(centre)))
    assert family.draw_in(space, bound)[1].item() == pytest.approx(expected.sum().item(), rel=1e-10)


@needs_compiler
@pytest.mark.parametrize("loc", [0.0, 0.3])
def test_the_compiled_draw(loc: float) -> None:
    """20,000 weights, 95% of them pruned, in float32, each number to rounding.

    Every weight adds to the KL with an error of at most 5e-7 nats, parked ones too.
    """
    mean = 0.3 * torch.randn(200, 100)
    family, bound = made({"w": mean}, Normal(loc, 0.7))
    with torch.no_grad():
        family.rho.add_(0.3 * torch.randn_like(family.rho))
    keep = torch.rand(20_000) > 0.95
    m, s = (t.detach()[keep].double().numpy() for t in (family.mean, family.sd()))
    family.prune(keep, bound)
    space, noise = family.workspace(), NormalStream(3)
    family.draw_noise(space, noise, bound)
    assert space.key is not None
    draw, kl = family.draw_in(space, bound)
    pull = torch.randn(20_000)
    pull[~keep] = torch.nan  # what the network says of them must not matter
    (flat(draw) * pull).nansum().backward(retain_graph=True)
    assert not family.mean.grad[~keep].any()
    assert not family.rho.grad[~keep].any()
    expected = np.sum(((m - loc) ** 2 + s**2) / (2 * 0.7**2) - np.log(s / 0.7) - 0.5)
    assert kl.item() == pytest.approx(expected, abs=5e-7 * 20_000)
    w = draw["w"].detach().flatten()
    assert not w[~keep].any()
    assert not w[~keep].signbit().any()
    assert w[keep].all()
    step = w[keep].double().numpy() - m
    np.testing.assert_allclose(family.mean.grad[keep].numpy(), pull[keep].numpy(), rtol=1e-6)
    wanted = pull[keep].numpy() * step
    np.testing.assert_allclose(family.rho.grad[keep].numpy(), wanted, rtol=1e-4, atol=1e-6)
    family.zero_grad()
    kl.backward()
    assert not family.mean.grad[~keep].any()
    assert not family.rho.grad[~keep].any()
    wanted = s**2 / 0.7**2 - 1
    np.testing.assert_allclose(family.rho.grad[keep].numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_what_was_pruned_stays_and_the_given_mask_is_not_shared() -> None:
    family, bound = made({"w": torch.randn(4)}, Normal(0.5, 2.0))
    first = torch.tensor([True, False, True, True])
    family.prune(first, bound)
    first[0] = False
    assert family.keep is not None
    assert family.keep.tolist() == [True, False, True, True]
    family.prune(torch.tensor([True, True, False, True]), bound)
    assert family.keep.tolist() == [True, False, False, True]
    assert family.mean[~family.keep].tolist() == [0.5, 0.5]
    torch.testing.assert_close(family.sd()[~family.keep], torch.full((2,), 2.0))


def test_the_state_dict_has_the_mask_only_once_pruned_and_a_module_follows_it() -> None:
    tensors = {"w": torch.randn(3)}
    (plain, bound), (pruned, _) = made(tensors, Normal()), made(tensors, Normal())
    assert list(plain.state_dict()) == ["mean", "rho"]
    pruned.prune(torch.tensor([True, False, True]), bound)
    assert list(pruned.state_dict()) == ["mean", "rho", "keep"]
    other, _ = made(tensors, Normal())
    other.load_state_dict(pruned.state_dict())
    assert other.keep is not None
    assert torch.equal(other.keep, pruned.keep)
    assert other.keep is not pruned.keep
    other.load_state_dict({"rho": torch.zeros(3)}, strict=False)
    assert other.keep is None  # the numbers of the pruned weights came from elsewhere
    other.load_state_dict(pruned.state_dict())
    nn.ModuleDict({"f": other}).load_state_dict({}, strict=False)
    assert other.keep is not None
    other.load_state_dict(plain.state_dict())
    assert other.keep is None
    with pytest.raises(RuntimeError, match="size mismatch for keep"):
        plain.load_state_dict({**pruned.state_dict(), "keep": torch.ones(4, dtype=torch.bool)})


def test_copies_and_other_dtypes() -> None:
    family, bound = made({"w": torch.randn(3)}, Laplace())
    family.prune(torch.tensor([True, False, True]), bound)
    twin = copy.deepcopy(family).double()
    twin.prune(torch.tensor([False, True, True]), bound)
    assert family.keep is not None
    assert family.keep.tolist() == [True, False, True]
    assert twin.keep is not None
    assert twin.keep.dtype == torch.bool
    space = twin.workspace()
    space.noise.normal_()
    assert twin.draw_in(space, bound)[0]["w"].count_nonzero() == 1
    assert twin.to("meta").keep.device.type == "meta"  # type: ignore[union-attr]


def test_tensors_that_lie_elsewhere() -> None:
    kept = KeptTensors({"a": torch.zeros(2), "b": torch.zeros(1)})
    assert kept.zeroed({"a": torch.ones(2)}) == {}
    kept.restrict(torch.tensor([False, True, True]))
    own = torch.ones(2, requires_grad=True)
    (zeroed,) = kept.zeroed({"a": own, "b": torch.ones(1)}).values()
    zeroed.sum().backward()
    assert zeroed.tolist() == own.grad.tolist() == [0.0, 1.0]  # type: ignore[union-attr]
