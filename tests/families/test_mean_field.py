"""The mean field: gradients formed by hand against autograd's through w = μ + σε."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Laplace as TorchLaplace
from torch.distributions import MixtureSameFamily, kl_divergence
from torch.distributions import Normal as TorchNormal
from torch.distributions import StudentT as TorchStudentT
from torch.distributions.categorical import Categorical
from torch.func import functional_call

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families.mean_field import MeanField, inverse_scale
from lightning_bnn.priors import BoundPrior, Laplace, Normal, ScaleMixture, StudentT

EXACT = {"rtol": 0, "atol": 1e-10}


def network(dtype=torch.float64):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def make(prior=None, form="exp", dtype=torch.float64, scale=0.2):
    net = network(dtype)
    tensors = dict(net.named_parameters())
    family = MeanField(form).bind(tensors, scale)
    with torch.no_grad():  # not all alike
        family.rho.add_(0.3 * torch.randn_like(family.rho))
    return net, family, BoundPrior(prior or Normal(), net, tensors)


def noisy_workspace(family, index=0):
    space = family.workspace(index)
    space.noise.normal_()
    return space


def independent_kl(prior, mean, sd, draw, loc, scale):
    """KL(q‖p) by torch.distributions: in closed form, or at the draw where there is none."""
    # tensors, because torch.distributions makes float32 of plain numbers
    loc = torch.as_tensor(loc, dtype=mean.dtype).expand_as(mean)
    scale = torch.full_like(mean, scale)
    q = TorchNormal(mean, sd)
    if isinstance(prior, Normal):
        return kl_divergence(q, TorchNormal(loc, scale)).sum()
    if isinstance(prior, Laplace):
        return kl_divergence(q, TorchLaplace(loc, scale)).sum()
    if isinstance(prior, StudentT):
        p = TorchStudentT(torch.full_like(mean, prior.df), loc, scale)
    else:
        shares = torch.tensor([prior.mix, 1 - prior.mix], dtype=mean.dtype)
        scales = scale[0] * torch.tensor([1.0, prior.narrow], dtype=mean.dtype)
        parts = TorchNormal(loc[:, None].expand(-1, 2), scales.expand(len(mean), 2))
        p = MixtureSameFamily(Categorical(shares.expand(len(mean), 2)), parts)
    # the entropy of q is known exactly; only E[−log p] is estimated
    return -q.entropy().sum() - p.log_prob(draw).sum()


def autograd_reference(net, family, space, prior, loc, scale, inputs, targets, weight):
    """The same loss by ordinary autograd, from leaves that share nothing with the family."""
    mean = family.mean.detach().clone().requires_grad_()
    rho = family.rho.detach().clone().requires_grad_()
    sd = rho.exp() if family.scale_form == "exp" else F.softplus(rho)
    draw = mean + sd * space.noise.clone()
    outputs = functional_call(net, family.layout.views(draw), inputs)
    kl = independent_kl(prior, mean, sd, draw, loc, scale)
    loss = F.mse_loss(outputs, targets) + weight * kl
    return loss, kl, *torch.autograd.grad(loss, (mean, rho))


def flat(draw):
    return torch.cat([part.reshape(-1) for part in draw.values()])


@pytest.mark.parametrize("form", ["exp", "softplus"])
@pytest.mark.parametrize("loc", [0.0, 0.3, "pretrained"])
@pytest.mark.parametrize(
    "kind", [Normal, Laplace, StudentT, lambda **k: ScaleMixture(narrow=0.2, mix=0.4, **k)]
)
def test_gradients_equal_autograds(kind, loc, form):
    prior = kind(loc=loc, scale=0.7)
    net, family, bound = make(prior, form)
    inputs, targets = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    weight = 0.01
    centre = bound.pretrained + 0.1 if loc == "pretrained" else loc
    if loc == "pretrained":
        bound.pretrained.add_(0.1)  # else the centre is the mean, and its slope is zero
    space = noisy_workspace(family)
    draw, kl = family.draw_in(space, bound)
    outputs = functional_call(net, draw, inputs)
    loss = F.mse_loss(outputs, targets) + weight * kl
    loss.backward()
    expected = autograd_reference(net, family, space, prior, centre, 0.7, inputs, targets, weight)
    found = (loss, kl, family.mean.grad, family.rho.grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
        assert other.abs().max() > 1e-4
    # flipout and local use ``kl``, by ordinary autograd
    torch.testing.assert_close(family.kl(family.rsample(space.noise), bound), kl, **EXACT)


def test_the_kl_is_a_sum_over_all_weights():
    """Ten times the weights, ten times the KL: nothing is averaged."""
    kls = []
    for width in (10, 100):
        net = nn.Linear(width, 1, bias=False)
        nn.init.constant_(net.weight, 0.5)
        tensors = dict(net.named_parameters())
        family = MeanField().bind(tensors, 0.1)
        _, kl = family.draw_in(noisy_workspace(family), BoundPrior(Normal(), net, tensors))
        kls.append(kl.item())
    one = (0.5**2 + 0.1**2) / 2 - math.log(0.1) - 0.5
    assert kls == pytest.approx([10 * one, 100 * one], rel=1e-5)


@pytest.mark.parametrize("reuse", ["noise", "draw", "both"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_workspace_used_again_before_backward_raises(reuse, layers):
    """Also where the network itself saves no weights: a single layer needs none of them."""
    net = network() if layers == 2 else nn.Linear(3, 2).double()
    tensors = dict(net.named_parameters())
    family, bound = MeanField().bind(tensors, 0.1), BoundPrior(Normal(), net, tensors)
    space = noisy_workspace(family)
    draw, kl = family.draw_in(space, bound)
    inputs = torch.randn(4, 3).double()
    loss = functional_call(net, draw, inputs).square().mean() + kl
    if reuse != "draw":
        space.noise.normal_()
    if reuse != "noise":
        family.draw_in(space, bound)
    with pytest.raises(RuntimeError, match=r"written over before backward|inplace operation"):
        loss.backward()
    assert family.mean.grad is None


def test_backward_twice_and_gradients_that_are_not_joined_views():
    _, family, bound = make()
    space = noisy_workspace(family)
    draw, kl = family.draw_in(space, bound)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    # an expanded scalar arrives as the gradient of each slice
    loss = scale * sum(part.sum() for part in draw.values()) + kl
    loss.backward(retain_graph=True)
    first = family.mean.grad.clone(), family.rho.grad.clone()
    torch.testing.assert_close(scale.grad, flat(draw).detach().sum())
    loss.backward()
    torch.testing.assert_close(family.mean.grad, 2 * first[0], **EXACT)
    torch.testing.assert_close(family.rho.grad, 2 * first[1], **EXACT)
    mean, sd = family.mean.detach(), family.sd().detach()
    torch.testing.assert_close(first[0], 2 + mean, **EXACT)
    torch.testing.assert_close(first[1], sd * (2 * space.noise + sd - 1 / sd), **EXACT)


def test_either_output_alone():
    _, family, bound = make()
    space = noisy_workspace(family)
    draw, kl = family.draw_in(space, bound)
    kl.backward(retain_graph=True)
    torch.testing.assert_close(family.mean.grad, family.mean.detach(), **EXACT)
    family.zero_grad()
    sum(view.sum() for view in draw.values()).backward()
    torch.testing.assert_close(family.mean.grad, torch.ones(32).double(), **EXACT)
    torch.testing.assert_close(family.rho.grad, family.sd().detach() * space.noise, **EXACT)


def test_gradients_that_somebody_keeps_stay_as_they_are():
    _, family, bound = make()
    kept, copies = [], []
    for _ in range(4):
        draw, kl = family.draw_in(noisy_workspace(family), bound)
        pair = torch.autograd.grad((flat(draw) * torch.randn(32).double()).sum() + kl,
                                   (family.mean, family.rho))  # fmt: skip
        kept.append(pair)
        copies.append([gradient.clone() for gradient in pair])
    for pair, saved in zip(kept, copies, strict=True):
        assert all(torch.equal(*both) for both in zip(pair, saved, strict=True))
    assert len(family.workspace().memory._rooms) <= 2


@pytest.mark.parametrize("form", ["exp", "softplus"])
@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 30.0])
def test_initial_scale(form, scale):
    family = MeanField(form).bind({"w": torch.zeros(3, dtype=torch.float64)}, scale)
    torch.testing.assert_close(family.sd(), torch.full((3,), scale).double(), rtol=1e-6, atol=0)
    assert inverse_scale(scale, form) == pytest.approx(family.rho[0].item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["exp", "softplus"])
def test_dtypes(dtype, form):
    net, family, bound = make(form=form, dtype=dtype)
    space = noisy_workspace(family)
    draw, kl = family.draw_in(space, bound)
    outputs = functional_call(net, draw, torch.randn(4, 3, dtype=dtype))
    (outputs.square().mean() + kl).backward()
    for tensor in (*draw.values(), kl, outputs, family.mean.grad, family.rho.grad, space.sd):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


def test_the_workspace_follows_the_family_and_is_kept():
    _, family, bound = make()
    space = family.workspace()
    assert family.workspace() is space
    assert family.workspace(2) is not space
    family.float()
    bound.float()
    assert family.workspace().noise.dtype == torch.float32
    family.draw_in(noisy_workspace(family), bound)


def test_a_workspace_made_in_inference_mode_serves_training():
    _, family, bound = make()
    with torch.inference_mode():
        _, kl = family.draw_in(noisy_workspace(family), bound)
        assert not kl.requires_grad
    draw, kl = family.draw_in(noisy_workspace(family), bound)
    (flat(draw).sum() + kl).backward()


@pytest.mark.parametrize(
    ("dtypes", "form", "scale", "message"),
    [
        ([torch.float, torch.double], "exp", 0.1, "dtype; got .*float32', 'torch.float64'.*freeze"),
        ([torch.int64], "exp", 0.1, r"got \['torch.int64'\]"),
        ([], "exp", 0.1, r"got \[\]"),
        ([torch.float], "exp", 0.0, "initial_scale= .* got 0.0"),
        ([torch.float], "log", 0.1, "'exp' or 'softplus'; got 'log'"),
    ],
)
def test_what_cannot_be(dtypes, form, scale, message):
    with pytest.raises(ConfigurationError, match=message):
        MeanField(form).bind({str(d): torch.zeros(2, dtype=d) for d in dtypes}, scale)
