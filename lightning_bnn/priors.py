r"""Priors over weights: Normal, Laplace, Student-t and Blundell's scale mixture.

A prior is a density for each weight, with a location and a scale. The energy that strategies
use is :math:`-\log p(w)`, summed over all weights, never averaged. Variational inference needs
its expectation under a Gaussian :math:`q = N(\mu, \sigma^2)`; Normal and Laplace have it in
closed form,

* Normal: :math:`\frac{(\mu-m)^2+\sigma^2}{2s^2} + \log s + \tfrac12\log 2\pi`,
* Laplace: :math:`\frac1s\left[\sigma\sqrt{2/\pi}\,e^{-d^2/2\sigma^2}
  + d\,\mathrm{erf}(d/\sqrt2\sigma)\right] + \log 2s` with :math:`d=\mu-m`,

and the others are estimated with the draw of the step.

With ``fan_in=True`` the scale of a weight tensor is divided by the square root of its number
of inputs, so that one number suits layers of every width; vectors (biases, normalisation) and
embeddings keep the scale as it is. With ``loc="pretrained"`` the prior is centred on the
weights that the network had when the strategy was made. A posterior as the prior
(:class:`~lightning_bnn.PosteriorPrior`) has a location and a scale of each weight, and may couple
them (:mod:`lightning_bnn.coupling`).

``Normal(scale=Learned())`` is a hierarchical prior: every tensor (or layer) has a scale of its own,
which is inferred with the weights (:mod:`lightning_bnn.hyperprior`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bnn.checks import check_flag, check_number, check_option
from lightning_bnn.coupling import Coupling
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.hyperprior import Group, GroupScales
from lightning_bnn.selection import FlatLayout

__all__ = [
    "BoundPrior",
    "Laplace",
    "Learned",
    "Normal",
    "Prior",
    "PriorLike",
    "ScaleMixture",
    "StudentT",
    "check_prior",
]

Location = float | Literal["pretrained"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Learned:
    r"""A scale that is inferred with the weights, for :class:`Normal`.

    The precision τ = 1/scale² of a group of weights has the prior Gamma(shape, rate). It counts as
    much as 2·shape more weights in the group, of the mean square rate/shape. A single weight, such
    as the bias of one output, has a Student-t prior with 2·shape degrees of freedom and the scale
    √(rate/shape).

    Args:
        shape: Shape of the Gamma prior of the precision.
        rate: Its rate. The defaults are worth two weights of the size 0.3: little against any
            matrix, wide enough for a bias alone, and no reason for a small tensor to vanish.
        by: What shares a scale: each ``"tensor"``, or the tensors of a ``"layer"`` (a submodule).

    Example:
        >>> Normal(scale=Learned())
        Normal(loc=0.0, scale=Learned(shape=1.0, rate=0.1, by='tensor'), fan_in=False)
    """

    def __init__(
        self, shape: float = 1.0, rate: float = 0.1, by: Literal["tensor", "layer"] = "tensor"
    ) -> None:
        self.shape = check_number("shape", shape)
        self.rate = check_number("rate", rate)
        check_option("by", by, ("tensor", "layer"))
        self.by = by

    def __repr__(self) -> str:
        return f"Learned(shape={self.shape!r}, rate={self.rate!r}, by={self.by!r})"


class Prior(ABC):
    """A density for each weight; write ``log_prob`` and it works in every strategy.

    Args:
        loc: Location, or ``"pretrained"`` for the weights that the network starts with.
        scale: Scale, a positive number; 1 by default, and to be given with a location that is
            another number than 0. Of :class:`Normal` also :class:`Learned`.
        fan_in: Divide the scale of a weight tensor by the square root of its fan-in.
    """

    can_learn_scale = False

    def __init__(
        self, loc: Location = 0.0, scale: float | Learned | None = None, fan_in: bool = False
    ) -> None:
        number = isinstance(loc, (int, float)) and math.isfinite(loc)
        if not number and not (isinstance(loc, str) and loc == "pretrained"):
            raise ConfigurationError(f"A prior's loc is a number or 'pretrained'; got {loc!r}.")
        if scale is None and number and loc != 0:
            kind = type(self).__name__
            raise ConfigurationError(
                f"{kind}({loc}) would be a prior around {loc}: the location comes first. For the "
                f"scale {loc} write {kind}(0.0, {loc}); for the location, give the scale, too."
            )
        self.loc: Location = loc
        if isinstance(scale, Learned) and not self.can_learn_scale:
            raise ConfigurationError(
                f"{type(self).__name__} takes a scale that is a number; got {scale!r}. Only Normal "
                "has a learned scale: pass prior=Normal(scale=Learned())."
            )
        self.scale: float | Learned = (
            scale
            if isinstance(scale, Learned)
            else check_number("scale", 1.0 if scale is None else scale)
        )
        self.fan_in = check_flag("fan_in", fan_in)

    @abstractmethod
    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The log density of each weight."""

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, loc: Tensor | float, scale: float
    ) -> Tensor:
        """Σ E[−log p(w)] under q = N(mean, sd²); by default its estimate at ``draw``."""
        return -self.log_prob(draw, loc, scale).sum()

    def add_energy_gradients(
        self,
        mean_gradient: Tensor,
        sd_gradient: Tensor,
        weight: Tensor,
        mean: Tensor,
        sd: Tensor,
        noise: Tensor,
        loc: Tensor | float,
        scale: float,
    ) -> None:
        """Add ``weight`` times the gradient of :meth:`expected_energy`, in place.

        ``noise`` is the draw's (draw − mean)/sd, so that the gradient goes through the draw.
        """
        if type(self).expected_energy is Prior.expected_energy:  # the estimate at the draw
            slope = self.slope(torch.addcmul(mean, sd, noise), loc, scale).mul_(weight)
            mean_gradient.add_(slope)
            sd_gradient.addcmul_(slope, noise)
            return
        with torch.enable_grad():
            mean = mean.detach().requires_grad_()
            sd = sd.detach().requires_grad_()
            draw = torch.addcmul(mean, sd, noise)
            energy = self.expected_energy(mean, sd, draw, loc, scale)
            by_mean, by_sd = torch.autograd.grad(energy, (mean, sd), materialize_grads=True)
        mean_gradient.addcmul_(by_mean, weight)
        sd_gradient.addcmul_(by_sd, weight)

    def slope(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The derivative of each weight's −log p, as a new tensor."""
        with torch.enable_grad():
            weights = weights.detach().requires_grad_()
            energy = -self.log_prob(weights, loc, scale).sum()
            if not energy.requires_grad:  # a flat prior
                return torch.zeros_like(weights)
            (by_weights,) = torch.autograd.grad(energy, weights)
        return by_weights

    def energy(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """−log p(w), summed over the last axis."""
        return -self.log_prob(weights, loc, scale).sum(-1)

    def add_energy_gradient(
        self, gradient: Tensor, weight: Tensor, weights: Tensor, loc: Tensor | float, scale: float
    ) -> None:
        """Add ``weight`` times the gradient of :meth:`energy`, in place."""
        gradient.addcmul_(self.slope(weights, loc, scale), weight)

    def precision(self, scale: float) -> float | None:
        """The second derivative of −log p, where it is the same everywhere; else None."""
        return None

    def gaussian(
        self, net: nn.Module, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Of a Gaussian with a location and a scale for each weight: its mean and its precision.

        Its other methods then get tensors as ``loc`` and ``scale``.

        Args:
            net: The network.
            tensors: All weights that have this prior, by name.

        Returns:
            In float64, the flat mean (P,), and the precision: (P,), or a matrix (P, P).
        """
        return None

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of the density of each weight, in float64.

        Args:
            shape: That of the draws.
            loc: The location, a number or a tensor that broadcasts to them, like the scale.
            scale: The scale.
            generator: Where the noise comes from.
        """
        raise ConfigurationError(
            f"{type(self).__name__} does not know how to draw weights. Write its "
            "sample(shape, loc, scale, generator), or use Normal, Laplace, StudentT or "
            "ScaleMixture."
        )

    def tempered(self, scale: float, power: float) -> tuple[Prior, float]:
        """A prior and a scale whose density is p(w)^power, normalised if that has a closed form."""
        return _Power(self, power), scale

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class _Power(Prior):
    """A prior to a power, not normalised: each energy times the power."""

    def __init__(self, prior: Prior, power: float) -> None:
        self.prior, self.power = prior, power
        self.loc, self.scale, self.fan_in = prior.loc, prior.scale, prior.fan_in

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        return self.power * self.prior.log_prob(weights, loc, scale)

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, loc: Tensor | float, scale: float
    ) -> Tensor:
        return self.power * self.prior.expected_energy(mean, sd, draw, loc, scale)

    def add_energy_gradients(
        self, mean_gradient: Tensor, sd_gradient: Tensor, weight: Tensor, *where: Any
    ) -> None:
        self.prior.add_energy_gradients(mean_gradient, sd_gradient, self.power * weight, *where)

    def energy(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        return self.power * self.prior.energy(weights, loc, scale)

    def add_energy_gradient(self, gradient: Tensor, weight: Tensor, *where: Any) -> None:
        self.prior.add_energy_gradient(gradient, self.power * weight, *where)


def _standard_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    kind = {"dtype": torch.float64, "device": generator.device}
    return torch.randn(*shape, generator=generator, **kind)  # type: ignore[call-overload]


PriorLike = Prior | Mapping[str, Prior]


class Normal(Prior):
    """A Gaussian prior N(loc, scale²); with ``scale=Learned()`` the scale is inferred, too.

    Example:
        >>> Normal(0.0, 0.1)
        Normal(loc=0.0, scale=0.1, fan_in=False)
    """

    can_learn_scale = True

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The log density of each weight."""
        return -0.5 * ((weights - loc) / scale) ** 2 - math.log(scale) - _HALF_LOG_TWO_PI

    def energy(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """−log p(w), summed over the last axis in one pass."""
        centred = weights - loc if isinstance(loc, Tensor) or loc != 0.0 else weights
        constant = weights.shape[-1] * (math.log(scale) + _HALF_LOG_TWO_PI)
        # several times faster than a product and a sum
        squares = torch.linalg.vector_norm(centred, dim=-1).square()
        return squares / (2 * scale**2) + constant

    def add_energy_gradient(
        self,
        gradient: Tensor,
        weight: Tensor,
        weights: Tensor,
        loc: Tensor | float,
        scale: float | Tensor,
    ) -> None:
        """The closed form by hand: one pass, and nothing allocated for a prior around 0.

        A learned scale has a leading axis of sets, as ``weight`` has.
        """
        precision = weight / scale**2
        gradient.addcmul_(weights, precision)
        if isinstance(loc, Tensor) or loc != 0.0:
            gradient.sub_(loc * precision)

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, loc: Tensor | float, scale: float
    ) -> Tensor:
        """Σ E[−log p(w)] in closed form."""
        centred = mean - loc if isinstance(loc, Tensor) or loc != 0.0 else mean
        squares = torch.dot(centred, centred) + torch.dot(sd, sd)
        constant = mean.numel() * (math.log(scale) + _HALF_LOG_TWO_PI)
        return squares / (2 * scale**2) + constant

    def add_energy_gradients(
        self,
        mean_gradient: Tensor,
        sd_gradient: Tensor,
        weight: Tensor,
        mean: Tensor,
        sd: Tensor,
        noise: Tensor,
        loc: Tensor | float,
        scale: float | Tensor,
    ) -> None:
        """The closed form by hand: two passes over the weights and nothing allocated."""
        self.add_energy_gradient(mean_gradient, weight, mean, loc, scale)
        sd_gradient.addcmul_(sd, weight / scale**2)

    def precision(self, scale: float) -> float | None:
        """1/scale²."""
        return scale**-2

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of the density of each weight, in float64."""
        return loc + scale * _standard_normal(shape, generator)

    def tempered(self, scale: float, power: float) -> tuple[Prior, float]:
        """A Gaussian of another width."""
        return self, scale / math.sqrt(power)


class Laplace(Prior):
    """A Laplace (double exponential) prior; its variance is 2·scale².

    Example:
        >>> Laplace(0.0, 0.1).log_prob(torch.tensor([0.0]), 0.0, 0.5)
        tensor([-0.])
    """

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The log density of each weight."""
        return -(weights - loc).abs() / scale - math.log(2 * scale)

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, loc: Tensor | float, scale: float
    ) -> Tensor:
        """Σ E[−log p(w)] in closed form: the mean of a folded Gaussian."""
        distance = mean - loc
        ratio = distance / sd
        folded = sd * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio**2)
        folded = folded + distance * torch.erf(ratio / math.sqrt(2))
        return folded.sum() / scale + mean.numel() * math.log(2 * scale)

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of the density of each weight, in float64: differences of two exponentials."""
        one, other = torch.empty(2, *shape, dtype=torch.float64, device=generator.device)
        difference = one.exponential_(generator=generator) - other.exponential_(generator=generator)
        return loc + scale * difference

    def tempered(self, scale: float, power: float) -> tuple[Prior, float]:
        """A Laplace density of another width."""
        return self, scale / power


class StudentT(Prior):
    """A Student-t prior: heavy tails that let a few weights be large.

    Args:
        loc: Location, or ``"pretrained"``.
        scale: Scale, a positive number; 1 by default.
        df: Degrees of freedom, positive.
        fan_in: Divide the scale of a weight tensor by the square root of its fan-in.

    Example:
        >>> StudentT(df=3.0)
        StudentT(loc=0.0, scale=1.0, fan_in=False, df=3.0)
    """

    def __init__(
        self, loc: Location = 0.0, scale: float | None = None, df: float = 4.0, fan_in: bool = False
    ) -> None:
        super().__init__(loc, scale, fan_in)
        self.df = check_number("df", df)

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The log density of each weight."""
        df = self.df
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
        constant -= 0.5 * math.log(df * math.pi) + math.log(scale)
        return constant - 0.5 * (df + 1) * torch.log1p(((weights - loc) / scale) ** 2 / df)

    def slope(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """By hand: (ν+1) d / (ν s² + d²) with d = w − m."""
        distance = weights - loc
        below = torch.addcmul(distance.new_tensor(self.df * scale**2), distance, distance)
        return distance.mul_(self.df + 1).div_(below)

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of the density of each weight, in float64: Gaussians of random precisions."""
        normal = _standard_normal(shape, generator)
        gamma = torch._standard_gamma(torch.full_like(normal, self.df / 2), generator=generator)
        return loc + scale * normal / (2 * gamma / self.df).sqrt()


class ScaleMixture(Prior):
    """The prior of Bayes by Backprop (Blundell et al., 2015): two Gaussians of one centre.

    Args:
        loc: Location of both, or ``"pretrained"``.
        scale: Standard deviation of the wide part; 1 by default.
        narrow: Standard deviation of the narrow part, as a share of ``scale``.
        mix: Weight of the wide part, between 0 and 1.
        fan_in: Divide both scales of a weight tensor by the square root of its fan-in.

    Example:
        >>> ScaleMixture(scale=1.0, narrow=0.0025, mix=0.5).mix
        0.5
    """

    def __init__(
        self,
        loc: Location = 0.0,
        scale: float | None = None,
        narrow: float = 0.0025,
        mix: float = 0.5,
        fan_in: bool = False,
    ) -> None:
        super().__init__(loc, scale, fan_in)
        self.narrow = check_number("narrow", narrow, positive=False)
        self.mix = check_number("mix", mix, positive=False)
        if not (0 < narrow < 1 and 0 < mix < 1):
            raise ConfigurationError(
                "ScaleMixture expected narrow= (a share of scale) and mix= between 0 and 1; got "
                f"{narrow} and {mix}. For one Gaussian use Normal."
            )

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """The log density of each weight."""
        square = (weights - loc) ** 2
        wide_log = math.log(self.mix) - math.log(scale) - square / (2 * scale**2)
        # logaddexp by hand: softplus stays finite where both terms underflow
        return wide_log + F.softplus(self._odds(square, scale)) - _HALF_LOG_TWO_PI

    def _odds(self, square: Tensor, scale: float) -> Tensor:
        """The log odds that a weight at such a squared distance is of the narrow part."""
        at_centre = math.log1p(-self.mix) - math.log(self.mix) - math.log(self.narrow)
        return at_centre - square * (self.narrow**-2 - 1) / (2 * scale**2)

    def slope(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        """By hand: d (r/s₂² + (1 − r)/s₁²), d = w − m, r the chance of the narrow part."""
        distance = weights - loc
        chance = torch.sigmoid_(self._odds(distance * distance, scale))
        return distance.mul_(chance.mul_(self.narrow**-2 - 1).add_(1)).div_(scale**2)

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of the density of each weight, in float64."""
        normal = _standard_normal(shape, generator)
        wide = torch.rand(normal.shape, generator=generator, device=normal.device) < self.mix
        return loc + scale * torch.where(wide, normal, self.narrow * normal)


class BoundPrior(nn.Module):
    """A prior, or priors by name pattern, laid along the flat vector of a network's weights.

    Neighbouring tensors with the same prior and scale become one segment, so that the usual
    case, one prior for all weights, costs one operation whatever the number of layers. A tensor
    with a learned scale is a segment of its own.

    Args:
        prior: One prior, or a mapping from shell-style name patterns to priors; the first
            pattern that matches a name decides, and every name must match one.
        net: The network, for the fan-in of its weights.
        tensors: The weights it is bound to, with the values they start with.

    Attributes:
        names: The names of the weights, in their order.
        sizes: How many numbers each has.
        learned: The scales that are learned, or None.
        located: The names of those whose prior has numbers for each weight.
        coupling: What couples weights, or None.
        power: What the density is raised to where a temperature says so (see
            :mod:`lightning_bnn.target`); 1 by default.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> bound = BoundPrior({"*.bias": Laplace(), "*": Normal(fan_in=True)},
        ...                    nn.Sequential(net), {"0.weight": net.weight, "0.bias": net.bias})
        >>> [(start, stop, scale) for start, stop, _, _, scale in bound.segments()]
        [(0, 8, 0.5), (8, 10, 1.0)]
        >>> bound.power = 4.0
        >>> [scale for *_, scale in bound.segments()]
        [0.25, 0.25]
    """

    pretrained: Tensor
    scales: Tensor
    learned: GroupScales | None
    coupling: Coupling | None

    def __init__(self, prior: PriorLike, net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        layout = FlatLayout(tensors)
        self.names, self.sizes = layout.names, layout.sizes
        # a scale of 0 stands for one of each weight, in a buffer
        self._segments: list[tuple[int, int, Prior, float]] = []
        # 1/scale² of each tensor (None where it is learned, 1 where each weight has its own), and
        # whether all are Gaussians around 0
        self._precisions: list[float | None] = []
        self._around_zero = True
        groups: dict[tuple[int, str], Group] = {}
        sizes: list[int] = []
        fans: list[float] = []
        start = 0
        matched = {name: _match(prior, name) for name in layout.names}
        located = self._locate(matched, net, tensors)
        self.located = [name for name, one in matched.items() if id(one) in located]
        for name, size in zip(layout.names, layout.sizes, strict=True):
            chosen = matched[name]
            fan = fan_in(net, name) if chosen.fan_in else 1
            self._around_zero &= type(chosen) is Normal and chosen.loc == 0.0
            begin, scale = start, 1 / math.sqrt(fan)
            if isinstance(chosen.scale, Learned):
                group = _group(groups, chosen, chosen.scale, name)
                group.tensors.append(len(sizes))
                sizes.append(size)
                fans.append(float(fan))
                self._precisions.append(None)
            else:
                scale = 0.0 if id(chosen) in located else chosen.scale / math.sqrt(fan)
                self._precisions.append(scale**-2 if scale else 1.0)
                if self._segments and self._segments[-1][2:] == (chosen, scale):
                    begin = self._segments.pop()[0]
            self._segments.append((begin, start + size, chosen, scale))
            start += size
        self.learned = GroupScales(list(groups.values()), sizes, fans) if groups else None
        self._power = 1.0

    def _locate(
        self, matched: Mapping[str, Prior], net: nn.Module, tensors: Mapping[str, Tensor]
    ) -> set[int]:
        """Make the buffers of priors with numbers for each weight; give the ids of these priors.

        Buffers: a resumed run must find the prior where the first run put it.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
        places = dict(zip(self.names, torch.arange(len(flat)).split(self.sizes), strict=True))
        scales = torch.ones_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        located, coupled = set(), []
        for one in {id(prior): prior for prior in matched.values()}.values():
            own = {name: tensors[name] for name, prior in matched.items() if prior is one}
            given = one.gaussian(net, own)
            if given is None:
                continue
            located.add(id(one))
            mean, precision = given
            where = torch.cat([places[name] for name in own])
            if precision.dim() == 2:
                coupled.append((where, precision))
                precision = precision.diagonal()
            flat[where.to(flat.device)] = mean.to(flat)
            scales[where.to(flat.device)] = precision.rsqrt().to(scales)
        centred = located or any(prior.loc == "pretrained" for prior in matched.values())
        self.register_buffer("pretrained", flat if centred else None)
        self.register_buffer("scales", scales if located else None)
        self.coupling = Coupling(coupled, like=scales) if coupled else None
        return located

    def segments(self) -> list[tuple[int, int, Prior, Tensor | float, Any]]:
        """(start, stop, prior, loc, scale) of each stretch of the flat vector, to its power.

        A scale is a number, or a tensor of one for each weight. A learned one is given at the
        precision τ = 1; of coupled weights it is that given the others.
        """
        return [
            (a, b, prior, self.pretrained[a:b] if isinstance(prior.loc, str) else prior.loc, scale)
            for a, b, prior, scale in self._tempered()
        ]

    def _tempered(self) -> list[tuple[int, int, Prior, Any]]:
        segments: list[tuple[int, int, Prior, Any]] = [
            (a, b, prior, scale or self.scales[a:b]) for a, b, prior, scale in self._segments
        ]
        if self.power == 1:
            return segments
        return [(a, b, *prior.tempered(s, self.power)) for a, b, prior, s in segments]

    @property
    def power(self) -> float:
        """What the density is raised to."""
        return self._power

    @power.setter
    def power(self, power: float) -> None:
        self._power = power
        if self.learned is not None:
            self.learned.power = power

    def energy(self, weights: Tensor, keep: Tensor | None = None) -> Tensor:
        """−log p(w), summed over the last axis of flat weights; leading axes stay.

        Args:
            weights: The flat weights.
            keep: Which of them count, a boolean vector; all by default.
        """
        parts = []
        for a, b, prior, loc, scale in self._fixed_segments():
            (some,), centre, scale = _kept(keep, a, b, loc, scale, weights)
            parts.append(prior.energy(some, centre, scale))
        if self.learned is not None:
            parts.append(self.learned.energy(self.squares(keep, weights), self._counts(keep)))
        if self.coupling is not None:
            parts.append(self.coupling.energy(self._centred(weights, keep), self.power))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def add_energy_gradient(self, gradient: Tensor, weight: Tensor, weights: Tensor) -> None:
        """Add ``weight`` times the gradient of :meth:`energy`, in place."""
        weight = weight[..., None]
        scales = self._current_scales(None, weights)
        for (a, b, prior, loc, _), scale in zip(self.segments(), scales, strict=True):
            prior.add_energy_gradient(gradient[..., a:b], weight, weights[..., a:b], loc, scale)
        if self.coupling is not None:
            self.coupling.add_gradient(gradient, weight * self.power, self._centred(weights))

    def precisions(self, weights: Tensor) -> list[float | Tensor] | None:
        """1/scale² of each tensor where all have Gaussians around 0, else None.

        A learned one depends on the weights and has their leading axes.
        """
        if not self._around_zero:
            return None
        fixed = [None if value is None else self.power * value for value in self._precisions]
        if self.learned is None:
            return [value for value in fixed if value is not None]
        learned = iter(self.learned.precisions(self.squares(None, weights)).unbind(-1))
        return [next(learned) if value is None else value for value in fixed]

    def gaussian_precisions(self, weights: Tensor) -> list[float]:
        """1/scale² of each tensor, around any location; a learned one is E[τ | w].

        Where each weight has its own it is 1, and they are :meth:`weight_precisions`.

        Args:
            weights: The flat weights, (P,).

        Raises:
            ConfigurationError: A prior is no Gaussian.

        Example:
            >>> net = nn.Linear(4, 1)
            >>> own = dict(net.named_parameters())
            >>> bound = BoundPrior(Normal(1.0, 0.5, fan_in=True), net, own)
            >>> bound.gaussian_precisions(torch.zeros(5))
            [16.0, 4.0]
        """
        for _, _, prior, scale in self._tempered():
            if prior.precision(scale) is None:
                raise ConfigurationError(
                    f"A Laplace approximation needs a prior that is Gaussian; got {prior!r}. Pass "
                    "prior=Normal(0.0, 1.0), or leave prior= out."
                )
        learned: list[float] = []
        if self.learned is not None:
            learned = self.learned.precisions(self.squares(None, weights)).tolist()
        rest = iter(learned)
        return [next(rest) if own is None else self.power * own for own in self._precisions]

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, keep: Tensor | None = None
    ) -> Tensor:
        """Σ E[−log p(w)] under N(mean, sd²), in closed form where the prior has one.

        Of a q with correlations :meth:`correlation_energy` comes to it. Where scales are learned it
        is a bound of it, with q(τ) at its optimum.

        Args:
            mean: The flat means.
            sd: The standard deviations.
            draw: A draw, for priors without a closed form.
            keep: Which weights count, a boolean vector; all by default.
        """
        parts = []
        for a, b, prior, loc, scale in self._fixed_segments():
            some, centre, scale = _kept(keep, a, b, loc, scale, mean, sd, draw)
            parts.append(prior.expected_energy(some[0], some[1], some[2], centre, scale))
        if self.learned is not None:
            parts.append(self.learned.energy(self.squares(keep, mean, sd), self._counts(keep)))
        if self.coupling is not None:
            parts.append(self.coupling.energy(self._centred(mean, keep), self.power))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def correlation_energy(
        self, step: Tensor, keep: Tensor | None = None, groups: Tensor | None = None
    ) -> Tensor | None:
        """What the prior's couplings add to E[−log p(w)] where weights of q are correlated.

        It is ½ tr(B Σ), Σ the covariance of q and B what couples weights, estimated without bias
        at a draw; None if the prior couples none.

        Args:
            step: The draw less the mean of q.
            keep: Which weights count, a boolean vector; all by default.
            groups: Where weights move in groups that are independent, the group of each: with the
                standard deviations as the step it is exact.
        """
        if self.coupling is None:
            return None
        step = step if keep is None else step.masked_fill(~keep, 0)
        if groups is not None:
            return self.power * self.coupling.quadratic_within(step, groups)
        return self.power * self.coupling.quadratic(step)

    def _centred(self, weights: Tensor, keep: Tensor | None = None) -> Tensor:
        """Weights less their location; 0 where they are not kept."""
        centred = weights - self.pretrained
        return centred if keep is None else centred.masked_fill(~keep, 0)

    def weight_precisions(self) -> Tensor | None:
        """The second derivatives of −log p by weight, 1 where a tensor has one for all; (P,).

        None: all tensors have one for all of their weights.
        """
        if self.scales is None:
            return None
        return self.scales.pow(-2)

    def deviations(self, noise: Tensor) -> Tensor:
        """Draws of Gaussian priors less their location, of standard normal ``noise`` (..., P)."""
        drawn = torch.empty_like(noise)
        for a, b, _, _, scale in self.segments():
            drawn[..., a:b] = noise[..., a:b] * scale
        if (coupling := self.coupling) is not None:
            at = coupling.places
            scales = self.scales[at] / math.sqrt(self.power)
            drawn[..., at] = coupling.correlate(noise[..., at], scales, self.power)
        return drawn

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of the prior, (count, P), in float64; learned scales are drawn, too.

        Example:
            >>> net = nn.Linear(100, 1, bias=False)
            >>> bound = BoundPrior(Normal(0.0, 0.5), net, {"weight": net.weight})
            >>> bound.sample(2, torch.Generator().manual_seed(0)).std(1)
            tensor([0.5278, 0.4703], dtype=torch.float64)
        """
        place = generator.device
        learned: Any = iter(())
        if self.learned is not None:
            learned = iter(self.learned.sample(count, generator).rsqrt()[..., None].unbind(-2))
        parts = []
        for a, b, prior, loc, scale in self.segments():
            scale = next(learned) if isinstance(prior.scale, Learned) else scale
            where = [one.to(place) if isinstance(one, Tensor) else one for one in (loc, scale)]
            parts.append(prior.sample((count, b - a), where[0], where[1], generator))
        drawn = torch.cat(parts, 1)
        if (coupling := self.coupling) is not None:
            at = coupling.places
            noise = _standard_normal((count, len(at)), generator).to(at.device)
            scales = self.scales[at] / math.sqrt(self.power)
            centred = coupling.correlate(noise, scales, self.power)
            drawn[:, at.to(place)] = (self.pretrained[at] + centred).to(drawn)
        return drawn

    def energy_at_mode(self) -> float:
        """−log p at the locations, where these priors are largest: a constant of the energy."""
        total = 0.0
        for a, b, prior, loc, scale in self._fixed_segments():
            mode = torch.as_tensor(loc, dtype=torch.get_default_dtype()).expand(b - a)
            total += float(prior.energy(mode, loc, scale))
        if self.learned is not None:
            total += float(self.learned.energy(torch.zeros(len(self.learned.sizes))))
        return total + (0.0 if self.coupling is None else float(self.coupling.constant))

    def add_energy_gradients(
        self,
        mean_gradient: Tensor,
        sd_gradient: Tensor,
        weight: Tensor,
        mean: Tensor,
        sd: Tensor,
        noise: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        """Add ``weight`` times the gradient of :meth:`expected_energy`, in place.

        Of weights that are not kept the numbers mean nothing.
        """
        scales = self._current_scales(keep, mean, sd)
        for (a, b, prior, loc, _), scale in zip(self.segments(), scales, strict=True):
            prior.add_energy_gradients(
                mean_gradient[a:b], sd_gradient[a:b], weight, mean[a:b], sd[a:b], noise[a:b],
                loc, scale,
            )  # fmt: skip
        if self.coupling is not None:
            self.coupling.add_gradient(mean_gradient, weight * self.power, self._centred(mean))

    # ---------------------------------------------------------------- scales that are learned

    def fitted_scales(
        self, weights: Tensor, sd: Tensor | None = None, keep: Tensor | None = None
    ) -> dict[str, Tensor]:
        """By name, the learned scales that fit flat weights: 1/√E[τ | w], of the leading axes.

        Args:
            weights: The flat weights, or their means.
            sd: The standard deviations, of weights that have some.
            keep: Which weights count, a boolean vector; all by default.

        Example:
            >>> net = nn.Linear(100, 1, bias=False)
            >>> bound = BoundPrior(Normal(scale=Learned()), net, {"weight": net.weight})
            >>> bound.fitted_scales(torch.full((100,), 0.2))
            {'weight': tensor(0.2029)}
        """
        if self.learned is None:
            return {}
        flats = (weights,) if sd is None else (weights, sd)
        counts = self._counts(keep)
        precisions = self.learned.expected_precisions(self.squares(keep, *flats), counts)
        return dict(zip(self.learned.names, precisions.rsqrt().unbind(-1), strict=True))

    def draw_scales(self, weights: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """By name, a draw of each learned scale from its conditional given flat weights.

        With draws of the weights' posterior, (draws, P), they are draws of the joint posterior.

        Args:
            weights: The flat weights; leading axes stay.
            generator: Where the noise comes from, of the CPU, where the scales will be.

        Example:
            >>> net = nn.Linear(100, 1, bias=False)
            >>> bound = BoundPrior(Normal(scale=Learned()), net, {"weight": net.weight})
            >>> draws = torch.full((5, 100), 0.2)
            >>> bound.draw_scales(draws, torch.Generator().manual_seed(0))["weight"].shape
            torch.Size([5])
        """
        if self.learned is None:
            return {}
        precisions = self.learned.draw_precisions(self.squares(None, weights).cpu(), generator)
        scales = precisions.rsqrt().to(weights.dtype).unbind(-1)
        return dict(zip(self.learned.names, scales, strict=True))

    def squares(self, keep: Tensor | None, weights: Tensor, sd: Tensor | None = None) -> Tensor:
        """Σ (w − m)² of each tensor with a learned scale, (..., tensors); with ``sd`` expected."""
        dtype = torch.promote_types(weights.dtype, torch.float32)
        parts = []
        for a, b, _, loc, _ in self._learned_segments():
            (some, *spread), centre, _ = _kept(
                keep, a, b, loc, 1.0, weights, *(() if sd is None else (sd,))
            )
            centred = some - centre if isinstance(centre, Tensor) or centre != 0.0 else some
            sums = [
                # in one order whatever the leading axes are: a chain moves as it would alone
                torch.linalg.vector_norm(flat, dim=-1, dtype=dtype).square()
                for flat in (centred, *spread)
            ]
            parts.append(sums[0] if len(sums) == 1 else sums[0] + sums[1])
        return torch.stack(parts, -1)

    def _counts(self, keep: Tensor | None) -> list[int] | None:
        if keep is None:
            return None
        return [int(keep[a:b].sum()) for a, b, *_ in self._learned_segments()]

    def _current_scales(self, keep: Tensor | None, *flats: Tensor) -> list[Any]:
        """The scale of each segment at flat weights: a number, or if learned a tensor (..., 1)."""
        if self.learned is None:
            return [scale for _, _, _, scale in self._tempered()]
        precisions = self.learned.precisions(self.squares(keep, *flats), self._counts(keep))
        learned = iter(precisions.rsqrt()[..., None].unbind(-2))
        return [
            next(learned) if isinstance(prior.scale, Learned) else scale
            for _, _, prior, scale in self._tempered()
        ]

    def _fixed_segments(self) -> list[tuple[int, int, Prior, Tensor | float, Any]]:
        return [one for one in self.segments() if not isinstance(one[2].scale, Learned)]

    def _learned_segments(self) -> list[tuple[int, int, Prior, Tensor | float, Any]]:
        return [one for one in self.segments() if isinstance(one[2].scale, Learned)]


def _group(groups: dict[tuple[int, str], Group], prior: Prior, scale: Learned, name: str) -> Group:
    """The group of a tensor, by its own name or by that of its layer."""
    layer = name.rpartition(".")[0]
    key = id(prior), name if scale.by == "tensor" else layer
    if key not in groups:
        groups[key] = Group(name, scale.shape, scale.rate)
    elif (several := f"{layer}.*".removeprefix(".")) not in {g.name for g in groups.values()}:
        groups[key].name = several
    return groups[key]


def _kept(
    keep: Tensor | None, start: int, stop: int, loc: Tensor | float, scale: Any, *flats: Tensor
) -> tuple[list[Tensor], Tensor | float, Any]:
    """A stretch of flat vectors, of the location and of the scale, without what is not kept."""
    parts = [flat[..., start:stop] for flat in flats]
    if keep is None:
        return parts, loc, scale
    chosen = keep[start:stop]
    loc, scale = (one[chosen] if isinstance(one, Tensor) else one for one in (loc, scale))
    return [part[..., chosen] for part in parts], loc, scale


def fan_in(net: nn.Module, name: str) -> int:
    """The number of inputs that a weight tensor sums over; 1 for vectors and embeddings.

    Any other tensor is read as PyTorch's layers have it, (outputs, inputs, ...). A parameter of
    another meaning, such as a class token, is better given a prior by its name.

    Example:
        >>> fan_in(nn.Conv2d(3, 8, 5), "weight"), fan_in(nn.Conv2d(3, 8, 5), "bias")
        (75, 1)
    """
    owner = net.get_submodule(name.rpartition(".")[0])
    weight = net.get_parameter(name)
    if weight.dim() < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return 1
    inputs = max(1, weight.shape[1:].numel())
    if isinstance(owner, _TRANSPOSED):  # (in, out/groups, ...): each output sums over in/groups
        inputs = weight.shape[0] // owner.groups * weight.shape[2:].numel()
    return inputs


def check_prior(prior: PriorLike, names: Iterable[str]) -> None:
    """Raise unless it is a prior, or a mapping each pattern of which has something to match.

    Args:
        prior: What a user gave as a prior.
        names: The trainable parameters of the whole network.

    Example:
        >>> check_prior({"*.bais": Laplace(), "*": Normal()}, ["0.weight", "0.bias"])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: The prior's pattern '*.bais' matches no ...
    """
    if isinstance(prior, Prior):
        return
    if not isinstance(prior, Mapping) or not all(
        isinstance(pattern, str) and isinstance(one, Prior) for pattern, one in prior.items()
    ):
        raise ConfigurationError(
            "prior= is a prior such as Normal(0.0, 1.0), or a mapping from name patterns to "
            f"priors; got {prior!r}."
        )
    names = list(names)
    for pattern in prior:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"The prior's pattern {pattern!r} matches no trainable parameter of the network. "
                f"Their names begin with {names[:3]}; patterns are shell-style, as in 'fc.*'."
            )
    if "*" in prior and list(prior)[-1] != "*":
        raise ConfigurationError(
            f"The prior's pattern {list(prior)[-1]!r} comes after '*', which matches every name, "
            "and would never be used. Put '*' last."
        )


def _match(prior: PriorLike, name: str) -> Prior:
    if isinstance(prior, Prior):
        return prior
    for pattern, candidate in prior.items():
        if fnmatchcase(name, pattern):
            return candidate
    raise ConfigurationError(
        f"No prior for the parameter {name!r}: it matches none of the patterns {list(prior)}. "
        "Add a last pattern '*' for the rest."
    )
