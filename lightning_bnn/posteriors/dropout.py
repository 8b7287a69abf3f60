r"""The posterior of a network with dropout: one draw is one mask.

Of T draws, draw t has at each dropout layer l the noise :math:`m_{tl}`, a function of the seed, t
and l, which holds for every example and every batch:

.. math:: p(y\mid x) = \tfrac1T\sum_t p\big(y\mid f(x;\ m_{t1},\dots,m_{tL})\big).

So a draw is a function: its values at two inputs may be compared, and those at one input do not
depend on what else is in the batch. BatchNorm and all else is in evaluation mode. (Gal and
Ghahramani, 2016, *Dropout as a Bayesian Approximation*.)

All draws have the same weights. So they run as one batch of draws times examples, and what comes
before the first dropout layer runs once for all of them. A first pass shows whether that gives the
outputs of a draw alone; where it does not (examples that see each other, inputs without a common
axis of examples), draws run one after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import Self

from lightning_bnn.checks import check_device, check_kind, check_whole
from lightning_bnn.dropout import (
    NOISES,
    SHARING,
    Change,
    DropoutLayer,
    Factors,
    Places,
    add_noise,
    check_called,
    multiply,
    noise_shape,
    own_layers,
    place_of,
    places_of,
    row_count,
)
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.exchange import exclusive
from lightning_bnn.lightning import move_data_to_device
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import (
    copy_network,
    in_network_order,
    in_precision_of,
    network_tensors,
)
from lightning_bnn.posteriors.base import Blobs, Posterior
from lightning_bnn.posteriors.weights import CACHE_BYTES, CHUNK, network_fields, stored_network
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import seeded_generator
from lightning_bnn.random.hashing import split_mix, stream_seeds, uniforms
from lightning_bnn.stacked import call_network
from lightning_bnn.storage.manifest import Form
from lightning_bnn.storage.store import Stored

__all__ = ["DropoutPosterior", "mc_dropout"]

_EXPANDED, _REPEATED, _ALONE = range(3)  # the ways to run draws, from the fastest


def mc_dropout(trained_net: nn.Module, likelihood: Likelihood) -> DropoutPosterior:
    """A trained network's own dropout layers as a posterior.

    These are ``nn.Dropout``, ``Dropout1d``, ``2d``, ``3d``, ``AlphaDropout``,
    ``FeatureAlphaDropout`` and torchvision's ``StochasticDepth``, with their rates. Dropout that is
    no layer of its own cannot be seen, and is off: in attention's weights, in ``nn.LSTM``, or as a
    function in a ``forward``.

    Args:
        trained_net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> posterior = mc_dropout(net, Gaussian(0.1))
        >>> posterior.predict(torch.ones(4, 2), draws=16).mean.shape
        torch.Size([4, 1])
        >>> mc_dropout(nn.Linear(2, 1), Gaussian(0.1))
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: Linear has no dropout layer ...
    """
    check_kind("trained_net", trained_net, nn.Module, "a torch.nn.Module")
    layers = own_layers(trained_net)
    if not any(layer.rate for layer in layers):
        kind = type(trained_net).__name__
        what = "only dropout layers whose rate is 0" if layers else "no dropout layer"
        raise ConfigurationError(
            f"{kind} has {what} to draw masks for (nn.Dropout and the like; dropout within "
            "attention or nn.LSTM, or as a function, cannot be seen). Train it with "
            "MCDropoutBNN(net, likelihood), which inserts dropout, or train one with nn.Dropout "
            "layers."
        )
    return DropoutPosterior(trained_net, likelihood, [one for one in layers if one.rate])


class DropoutPosterior(Posterior):
    """A network whose draws are masks of its dropout layers.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        layers: Where dropout is, and of what kind.
        weights: Parameters and buffers by name; the network's own serve for those left out.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> layers = [DropoutLayer("2", 0.5, "bernoulli", "features")]
        >>> posterior = DropoutPosterior(net, Gaussian(0.1), layers)
        >>> posterior
        DropoutPosterior(Sequential, dropout at 1 layer, Gaussian(scale=0.1, learn=False))
        >>> inputs = torch.randn(9, 2)
        >>> all_of_them, some = posterior.predict(inputs), posterior.predict(inputs[:3])
        >>> torch.allclose(all_of_them.outputs[:, :3], some.outputs, atol=1e-6)
        True
    """

    kind = "dropout"
    form: ClassVar[Form] = {
        "layers": [
            {
                "name": str,
                "rate": float,
                "noise": frozenset(NOISES),
                "shared": frozenset(SHARING),
            }
        ]
    }

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        layers: Sequence[DropoutLayer],
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_kind("net", net, nn.Module, "a torch.nn.Module")
        super().__init__(likelihood)
        self.net = copy_network(net).eval().requires_grad_(False)
        given = {} if weights is None else in_network_order(self.net, weights, "weights")
        own = network_tensors(self.net)
        for name, tensor in given.items():
            own[name].data = tensor.detach().clone()
        modules = {name for name, _ in self.net.named_modules()}
        check_kind("layers", layers, Sequence, "a list of DropoutLayer")
        for layer in layers:
            check_kind("layers", layer, DropoutLayer, "a list of DropoutLayer")
            if layer.name not in modules or not 0 <= layer.rate < 1:
                raise ConfigurationError(
                    f"A dropout layer is a module of the network with a rate from 0 to below 1; "
                    f"got {layer.name!r} with {layer.rate}."
                )
        self.layers = list(layers)
        self._places: Places | None = None
        self._way = _EXPANDED
        self._checked = -1  # which way was seen to give the outputs of a draw alone
        self._noise: _Noise | None = None

    @property
    def rates(self) -> dict[str, float]:
        """The rate of each dropout layer, by the name of its module."""
        return {layer.name: layer.rate for layer in self.layers}

    def facts(self) -> list[str]:
        """The network, and at how many layers it has dropout."""
        count = len(self.layers)
        return [type(self.net).__name__, f"dropout at {count} layer{'s' if count != 1 else ''}"]

    @torch.no_grad()
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive mixture of a batch of inputs.

        The same seed gives the same masks, so that batch after batch is seen by the same
        functions. Floating-point inputs are converted to the network's precision.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
            draws: How many masks are mixed; 32 by default.
            seed: Decides the masks.
        """
        count = check_whole("draws", self.default_draws if draws is None else draws, 1)
        inputs = move_data_to_device(inputs, self.device)
        inputs = in_precision_of(network_tensors(self.net), self.net, inputs)
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        noise = self._noise  # looked at once: another thread may replace it
        if noise is None or (noise.seed, noise.count) != (seed, count):
            noise = self._noise = _Noise(seed, count, self.device)
        with exclusive(self.net) as net:
            places = self._places = self._places or self._look(net, inputs)
            outputs = [
                self._outputs(net, inputs, places, noise, range(start, min(start + CHUNK, count)))
                for start in range(0, count, CHUNK)
            ]
        return self.likelihood.predictive(torch.cat(outputs))

    # ---------------------------------------------------------------- running draws

    def _look(self, net: nn.Module, inputs: Any) -> Places:
        """Where examples lie in what each layer gets; along the first axis, if it cannot be run."""
        try:
            places = places_of(net, self.layers, inputs)
        except Exception:  # of a network's own code: any. Run as it is, it raises its own.
            return [[] for _ in self.layers]
        check_called(net, self.layers, places)
        return places

    def _outputs(
        self, net: nn.Module, inputs: Any, places: Places, noise: _Noise, draws: range
    ) -> Tensor:
        """The outputs of some draws, (draws, batch, ...), in the fastest way that is right."""
        for way in range(self._way, _ALONE) if len(draws) > 1 else ():
            try:
                outputs = self._together(net, inputs, places, noise, draws, way)
                if self._checked != way:
                    alone = self._alone(net, inputs, places, noise, draws[-1])
                    if not _same(outputs[-1], alone):
                        continue
            except Exception:  # of a network's own code: any. Draw by draw it raises its own.
                continue
            self._way = self._checked = way
            return outputs
        outputs = torch.stack([self._alone(net, inputs, places, noise, draw) for draw in draws])
        if len(draws) > 1:
            self._way = _ALONE
        return outputs

    def _alone(
        self, net: nn.Module, inputs: Any, places: Places, noise: _Noise, draw: int
    ) -> Tensor:
        """The outputs of one draw, (batch, ...)."""

        def change(index: int, call: int, values: Tensor) -> Tensor:
            axis = place_of(places[index], call).axis
            factors = noise.of(self.layers[index], index, call, values, axis, range(draw, draw + 1))
            return multiply(values, *(one[0] for one in factors))

        return self._run(net, inputs, change)

    def _together(
        self, net: nn.Module, inputs: Any, places: Places, noise: _Noise, draws: range, way: int
    ) -> Tensor:
        """The outputs of several draws, which lie along the axis of examples, in one pass."""
        count, rows = len(draws), row_count(inputs)
        if rows is None:
            raise _Misfit
        if way == _REPEATED:
            inputs = tree_map(partial(_repeated, rows=rows, count=count), inputs)

        def change(index: int, call: int, values: Tensor) -> Tensor:
            place = place_of(places[index], call)
            axis = place.axis
            if axis is None:
                raise _Misfit
            examples = values.shape[axis]
            if way == _EXPANDED and examples == rows * place.each:
                values = values.unflatten(axis, (1, examples))  # the same in all draws so far
            else:
                values = values.unflatten(axis, (count, -1))
            like = values.select(axis, 0)
            factors = noise.of(self.layers[index], index, call, like, axis, draws)
            noisy = multiply(values, *(one.movedim(0, axis) for one in factors))
            return noisy.flatten(axis, axis + 1)

        outputs = self._run(net, inputs, change)
        if len(outputs) != count * rows:
            raise _Misfit
        return outputs.unflatten(0, (count, rows))

    def _run(self, net: nn.Module, inputs: Any, change: Change) -> Tensor:
        """One pass, which may change buffers: copies of them."""
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with add_noise(net, self.layers, change):
            return call_network(net, buffers, inputs)

    # ---------------------------------------------------------------- moving, saving, loading

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        self._noise = None
        both = (self.net, self.likelihood)
        self.net, self.likelihood = move_data_to_device(both, check_device(device))
        return self

    def entry(self) -> dict[str, Any]:
        """The dropout layers."""
        names = self.form["layers"][0]
        return {"layers": [{key: getattr(layer, key) for key in names} for layer in self.layers]}

    def blobs(self) -> Blobs:
        """The network's parameters and buffers."""
        return {"weights": network_tensors(self.net)}

    def manifest_fields(self) -> dict[str, Any]:
        """The network's names and shapes, and how to make it."""
        return network_fields(self.net)

    @classmethod
    def from_manifest(cls, stored: Stored, net: Any, likelihood: Likelihood | None) -> Posterior:
        """The posterior of a manifest, if the network is one of the same names and shapes."""
        return super().from_manifest(stored, stored_network(stored, net), likelihood)

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`."""
        layers = [
            DropoutLayer(**{key: layer[key] for key in cls.form["layers"][0]})
            for layer in entry["layers"]
        ]
        return cls(net, likelihood, layers, stored.load(f"{prefix}weights"))


class _Misfit(Exception):
    """Draws do not lie where they should: the network cannot run several in one pass."""


class _Noise:
    """The noise of all draws of a seed; what was made is kept for the next batch, within limits.

    A number is a function of the seed, the draw, the layer, which call of it, and its place in the
    noise of an example.
    """

    def __init__(self, seed: int, count: int, device: torch.device) -> None:
        self.seed, self.count, self._bytes = seed, count, 0
        root = seeded_generator(seed).initial_seed()  # an error says what a seed is
        self._seeds = split_mix(root, count).to(device)
        self._kept: dict[Any, Factors] = {}

    def of(
        self, layer: DropoutLayer, index: int, call: int, values: Tensor, axis: int | None,
        draws: range,
    ) -> Factors:  # fmt: skip
        """What a layer does with its inputs in some draws, each (draws, ...)."""
        shape = noise_shape(layer, values.shape, axis)
        key = (index, call, draws, values.dtype, *shape)
        if key not in self._kept:
            seeds = stream_seeds(stream_seeds(self._seeds[draws.start : draws.stop], index), call)
            places = torch.arange(math.prod(shape), device=seeds.device)
            uniform = uniforms(seeds, places).view(-1, *shape)
            made = layer.factors(uniform)
            factors = tuple(one.to(values.dtype) for one in made)
            self._bytes += sum(one.nbytes for one in factors)
            if self._bytes > CACHE_BYTES:
                return factors
            self._kept[key] = factors
        return self._kept[key]


def _repeated(leaf: Any, rows: int | None, count: int) -> Any:
    """A tensor of examples once for each draw."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.ndim == 0 or len(leaf) != rows:
        raise _Misfit
    return leaf.repeat(count, *[1] * (leaf.ndim - 1))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether outputs are the same to rounding."""
    if one.shape != other.shape:
        return False
    least = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return bool((one - other).abs().max() <= least * other.abs().max())
