"""Where members and chains start: new initial values for a network's own architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_bnn.checks import call_function
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.network import copy_network, describe, first_difference, network_tensors
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior
from lightning_bnn.posteriors.prior import posterior_of
from lightning_bnn.random import isolated_random_state, member_seed

__all__ = [
    "Start",
    "build_network",
    "differs_in_size",
    "is_untrained",
    "reset_network",
    "start_at_prior",
    "start_members",
]

Start = Literal["around", "reset"] | WeightPosterior | Sequence[nn.Module] | Callable[[], nn.Module]


def reset_network(net: nn.Module, seed: int, option: str = "start") -> nn.Module:
    """A copy of a network with new initial values, as its modules' ``reset_parameters`` give them.

    Frozen parameters keep their values.

    Args:
        net: The network.
        seed: Decides the new values.
        option: The option that takes a factory instead, for the error of a module that cannot.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> torch.equal(reset_network(net, 0).weight, reset_network(net, 0).weight)
        True
        >>> torch.equal(reset_network(net, 0).weight, reset_network(net, 1).weight)
        False
    """
    fresh = copy_network(net)
    frozen = {n: p.detach().clone() for n, p in fresh.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.fill_(torch.nan)  # what no reset reaches, stays so
    with isolated_random_state(seed):
        # children first: a module may initialise its children in a way of its own
        for _, module in reversed(list(fresh.named_modules())):
            reset = _reset_of(module)
            if reset is not None:
                reset()
    for name, module in fresh.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not (parameter.requires_grad and parameter.isnan().any()):
                continue
            reason = "no" if _reset_of(module) is None else f"{key!r} is not reached by its"
            raise ConfigurationError(
                f"The module {name or 'net'!r} ({type(module).__name__}) has parameters of its "
                f"own but {reason} reset_parameters(), so it cannot be initialised anew. Pass a "
                f"function that builds the network: {option}=lambda: MyNet(...)."
            )
    with torch.no_grad():
        for name, value in frozen.items():
            fresh.get_parameter(name).copy_(value)
    return fresh


def build_network(
    factory: object, root: int, number: int, option: str = "net", noun: str = "member"
) -> nn.Module:
    """The network of one member, as a function builds it under the member's seed.

    Example:
        >>> build_network(lambda: nn.Linear(2, 1), root=0, number=3)
        Linear(in_features=2, out_features=1, bias=True)
    """
    with isolated_random_state(member_seed(root, number, "start")):
        made = call_function(option, factory) if callable(factory) else factory
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"{option}= gave {type(made).__name__} for {noun} {number}; expected a network, or a "
            "function that builds one, such as lambda: MyNet(...)."
        )
    return made


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return reset if callable(reset) else None


def start_members(
    net: nn.Module,
    start: Start,
    members: Sequence[int],
    seed: int,
    spread: float,
    noun: str = "chain",
    option: str = "start",
) -> dict[str, Tensor]:
    """Every parameter and saved buffer of a network, stacked over members.

    Args:
        net: The network.
        start: ``"around"``: the network's own values, in all members but number 0 perturbed;
            ``"reset"``: new initial values in each; a posterior: draws of it; a list of one
            network for each member; or a function that builds a network.
        members: The members' numbers, which with ``seed`` decide their random values.
        seed: The root seed.
        spread: The size of the perturbation, in units of each tensor's root mean square.
        noun: What a member is called in errors.
        option: The option that a network comes from, in errors.

    Example:
        >>> start_members(nn.Linear(2, 1), "around", range(3), seed=0, spread=0.1)["bias"].shape
        torch.Size([3, 1])
    """
    if isinstance(start, WeightPosterior):
        return _from_posterior(net, start, members, seed)
    named = start if isinstance(start, str) else ""
    if named == "around":
        chosen = [
            _perturbed(net, member, member_seed(seed, member, "start"), spread)
            for member in members
        ]
        return _stack(chosen)
    if named == "reset":
        networks = [
            reset_network(net, member_seed(seed, member, "start"), option) for member in members
        ]
    elif isinstance(start, Sequence) and not isinstance(start, str):
        networks = list(start)
        if len(networks) != len(members):
            raise ConfigurationError(
                f"start= has {len(networks)} networks for {len(members)} {noun}s; give one for "
                "each."
            )
    elif callable(start) and not isinstance(start, nn.Module):
        networks = [build_network(start, seed, member, option, noun) for member in members]
        _check_built(networks, noun, option)
    else:
        raise ConfigurationError(
            "start= is 'around', 'reset', a posterior, a list of networks, or a function that "
            f"builds one; got {start!r:.80}."
        )
    for member, network in zip(members, networks, strict=True):
        difference = first_difference(describe(net), describe(network))
        if difference:
            raise ConfigurationError(
                f"The network that {option}= gives for {noun} {member} is another one: "
                f"{difference} in it. All {noun}s need one architecture."
            )
        _check_unsaved(net, network, f"{noun} {member}")
    return _stack([network_tensors(network) for network in networks])


def _check_built(networks: Sequence[nn.Module], noun: str, option: str) -> None:
    """A function that builds networks gives another one in each call."""
    if len(set(map(id, networks))) < len(networks):
        raise ConfigurationError(
            f"The function in {option}= gave the same network twice; build a new one in each call: "
            f"{option}=lambda: MyNet(...)."
        )
    built = [list(network.parameters()) for network in networks]
    pairs = [pair for other in built[1:] for pair in zip(built[0], other, strict=False)]
    if pairs and all(one.shape == two.shape and one.equal(two) for one, two in pairs):
        rank_zero_warn(
            f"The function in {option}= gave the same weights to all {noun}s, which then "
            "differ only by chance in training. If it sets a seed, take that out: each "
            f"{noun} is built with a seed of its own."
        )


def _check_unsaved(net: nn.Module, network: nn.Module, which: str) -> None:
    """What is not saved with a network is not a member's own: it must be as in ``net``."""
    saved = network_tensors(net)
    others = dict(network.named_buffers())
    for name, buffer in net.named_buffers():
        other = others.get(name)
        if name in saved or (other is not None and buffer.equal(other.to(buffer))):
            continue
        raise ConfigurationError(
            f"The buffer {name!r} of the network of {which} has other values than that of the "
            "first network, and it is not saved with the network. Register it with "
            "persistent=True, so that each keeps its own."
        )


def _stack(members: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([m[name].detach() for m in members]) for name in members[0]}


def _perturbed(net: nn.Module, member: int, seed: int, spread: float) -> dict[str, Tensor]:
    tensors = {name: tensor.detach() for name, tensor in network_tensors(net).items()}
    if member == 0 or spread == 0:
        return tensors
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator)
            size = spread * parameter.detach().double().square().mean().sqrt()
            tensors[name] = tensors[name] + (size.cpu() * noise).to(parameter)
    return tensors


def _from_posterior(
    net: nn.Module, start: WeightPosterior, members: Sequence[int], seed: int
) -> dict[str, Tensor]:
    difference = first_difference(describe(net), describe(start.net))
    if difference:
        raise ConfigurationError(
            f"The posterior in start= is of another network: {difference} in it."
        )
    own = network_tensors(net)
    drawn = _draws_of(start, members, seed)
    return {name: tensor.to(own[name]) for name, tensor in drawn.items()}


def start_at_prior(
    net: nn.Module, prior: object, stacked: dict[str, Tensor], members: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Where members start, with draws of the posteriors that are priors in their places.

    Args:
        net: The network.
        prior: What a user gave as a prior.
        stacked: Where they start otherwise.
        members: The members' numbers.
        seed: The root seed.

    Returns:
        The same, or, if a posterior is among the priors, new tensors.
    """
    drawn: dict[int, dict[str, Tensor]] = {}
    started = {}
    for name, tensor in stacked.items():
        posterior = posterior_of(prior, name, net)
        if posterior is not None:
            if id(posterior) not in drawn:
                drawn[id(posterior)] = _draws_of(posterior, members, seed)
            started[name] = drawn[id(posterior)][name].to(tensor)
    return {**stacked, **started} if started else stacked


def _draws_of(start: WeightPosterior, members: Sequence[int], seed: int) -> dict[str, Tensor]:
    """Draws for each member, with what is the same in all draws."""
    return _stack(
        [
            {**start.fixed, **_draw_of(start, member, member_seed(seed, member, "start"))}
            for member in members
        ]
    )


def _draw_of(start: WeightPosterior, member: int, seed: int) -> dict[str, Tensor]:
    """Member k takes the k-th of stored draws or of a mixture's components, else a draw of its own.

    Only its own number decides, not how many others there are.
    """
    generator = torch.Generator(start.device).manual_seed(seed)
    if isinstance(start, MixturePosterior):
        component = start.components[member % len(start.components)]
        return {**component.fixed, **_draw_of(component, member // len(start.components), seed)}
    if isinstance(start, DrawsPosterior):
        # chains continue where they are; members of an ensemble are draws of one chain
        last = len(start) - start.chains if start.chains > 1 else 0
        index = last + member % (start.chains if start.chains > 1 else len(start))
        picked = next(islice(start.draws(len(start), generator, chunk=1), index, None))
    else:
        picked = start.sample(1, generator)
    return {name: tensor[0] for name, tensor in picked.items()}


def differs_in_size(net: nn.Module, fresh: Mapping[str, Tensor]) -> bool:
    """Whether a network's tensors differ in size from new initial values of the same, (K, ...).

    Random initial values of 64 numbers or more differ in their root mean square by some percent.
    """
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, new in fresh.items():
        old = own[name].detach()
        if name.endswith("num_batches_tracked") and old > 0:
            return True
        if not old.is_floating_point() or old.numel() < 64:
            continue
        sizes = [float(values.double().square().mean().sqrt()) for values in (old, new)]
        if max(sizes) > 1.3 * min(sizes):
            return True
    return False


def is_untrained(net: nn.Module) -> bool:
    """Whether a network's weights are of the size of new initial values, as far as can be told.

    A network that cannot be initialised anew counts as trained.

    Example:
        >>> net = nn.Linear(8, 16)
        >>> trained = nn.Linear(8, 16)
        >>> _ = trained.weight.data.mul_(3)
        >>> is_untrained(net), is_untrained(trained)
        (True, False)
    """
    try:
        fresh = reset_network(net, seed=0)
    except ConfigurationError:
        return False
    return not differs_in_size(net, _stack([network_tensors(fresh)]))
