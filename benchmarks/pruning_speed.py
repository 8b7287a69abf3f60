"""What removing half of a network's units saves: floating-point operations, time and space.

``python -m benchmarks.pruning_speed`` takes a Gaussian posterior over a network, removes half of
the units of each layer with ``pruned(0.5, unit="channel", scope="layer")``, which leaves zeros (the
*masked* posterior), and takes them out with ``compact()`` (the *compact* one). Nothing is trained:
the means are those of the initialisation, the standard deviations are random, from a fixed seed.
Speed does not depend on these values, because ``scope="layer"`` removes the same number of units of
each layer whatever they are; with one threshold for all layers they would decide which layer
becomes how small. What the pruned network predicts is not the question here.

Masked and compact take turns in one process, and the order rotates. Three things are timed:

* forward pass: that of the mean network;
* prediction, new draws: ``posterior.predict`` with a seed that it has not just seen, so that the
  draws are made too, as for the first batch of a data set;
* prediction, same draws: with draws that it has kept, as for every further batch.

The difference is the largest one between an output of the compact and of the masked network, over
the largest absolute output of the masked one: that of the mean networks, or of the worst of a few
draws. A seed means other noise for a smaller Gaussian, so the draws are made once, with one seed,
from the masked posterior, kept as a ``DrawsPosterior``, and that is made compact.

Floating-point operations are those that ``torch.utils.flop_counter`` knows: of matrix products and
convolutions. In resnet18 the channels that meet in a residual sum go together; it is shown and not
judged. (The results of the first release left these channels as they were.)
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from benchmarks import options as shared
from benchmarks.figures import cell, figures
from benchmarks.interleaved import Entry, interleave, time_bare
from benchmarks.peers.contender import Contender
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.nets import MLP
from lightning_bnn.posteriors import DrawsPosterior, GaussianPosterior, WeightPosterior
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.pruning import compact, mean_network, prune
from lightning_bnn.pruning.command import stored_bytes
from lightning_bnn.stacked import call_network

__all__ = ["main"]

FRACTION = 0.5
ROUNDS = 18
COMPARED_DRAWS = 3
DIFFERENCE_BAR, FLOPS_BAR, TIME_BAR = 1e-5, 0.60, 1.0
MASKED, COMPACT = "masked", "compact"
FORWARD, NEW, KEPT = "forward pass", "prediction, new draws", "prediction, same draws"


def make_cnn(widths: Sequence[int] = (64, 128, 256), hidden: int = 256) -> nn.Module:
    """For 3x32x32: two convolutions at each width, then pooling; two linear layers at the end."""
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    features = before * (32 // 2 ** len(widths)) ** 2
    head = [nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers, *head)


@dataclass(frozen=True)
class Network:
    """One network, the batch it sees, and whether its figures are judged.

    Attributes:
        name: The key in the JSON output.
        title: The heading of the table.
        make_net: Builds it.
        input_shape: The shape of one example.
        batch_size: Examples in a batch.
        steps: Timed forward passes in a turn, unless the command line says otherwise.
        draws: Draws of a prediction; few enough that a posterior keeps them for the next batch.
        judged: Whether there are bars.
    """

    name: str
    title: str
    make_net: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch_size: int
    steps: int
    draws: int
    judged: bool = True

    def inputs(self) -> Tensor:
        """The one random batch."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.batch_size, *self.input_shape, generator=generator)


NETWORKS = (
    Network(
        "mlp", "MLP 784-1200-1200-10, batch 128", partial(MLP, 784, [1200, 1200], 10), (784,),
        batch_size=128, steps=48, draws=16,
    ),
    Network(
        "cnn", "CNN of widths 64, 128 and 256 on 3x32x32, batch 32", make_cnn, (3, 32, 32),
        batch_size=32, steps=6, draws=16,
    ),
    Network(
        "resnet18", "resnet18 on 3x32x32, batch 32", partial(resnet18, num_classes=10),
        (3, 32, 32), batch_size=32, steps=12, draws=8, judged=False,
    ),
)  # fmt: skip


def make_posterior(network: Network) -> GaussianPosterior:
    """Means from the initialisation, random standard deviations, used BatchNorm statistics."""
    torch.manual_seed(0)
    net = network.make_net()
    with torch.no_grad():
        net.train()(network.inputs())  # running means that are not zero
    mean = {name: parameter.detach() for name, parameter in net.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    sd = {name: 0.02 * torch.rand(t.shape, generator=generator) for name, t in mean.items()}
    return GaussianPosterior(net, Categorical(), mean, sd)


def count_flops(net: nn.Module, inputs: Tensor) -> int:
    """Floating-point operations of matrix products and convolutions in a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(inputs)
    return int(counter.get_total_flops())


def count_parameters(posterior: WeightPosterior) -> int:
    """How many parameters its network has."""
    return sum(parameter.numel() for parameter in posterior.net.parameters())


def count_bytes(posterior: WeightPosterior) -> int:
    """The size of a saved posterior."""
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior")
        return stored_bytes(Path(folder) / "posterior")


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest absolute value expected, of the worst row.

    >>> difference(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, -4.0]]))
    1.75
    """
    apart, scale = (found - expected).abs().flatten(1), expected.abs().flatten(1)
    return float((apart.amax(1) / scale.amax(1)).max())  # NaN if anything is NaN


@torch.no_grad()
def compare(masked: WeightPosterior, small: WeightPosterior, inputs: Tensor) -> dict[str, float]:
    """How far the compact network's outputs are from the masked one's: mean network and draws."""
    sample = masked.sample(COMPARED_DRAWS, torch.Generator().manual_seed(2))
    stored = DrawsPosterior(masked.net, masked.likelihood, unstack(sample), masked.fixed)
    smaller = compact(stored)
    if count_parameters(smaller) != count_parameters(small):
        raise RuntimeError("the draws of the masked posterior lose other units than it does")
    means = [mean_network(posterior)(inputs)[None] for posterior in (small, masked)]
    draws = [run_draws(posterior, inputs) for posterior in (smaller, stored)]
    return {"mean_network": difference(*means), "draws": difference(*draws)}


def run_draws(posterior: DrawsPosterior, inputs: Tensor) -> Tensor:
    """The outputs of all draws, one after another."""
    draws = unstack(posterior.sample(COMPARED_DRAWS))
    net, fixed = posterior.net, posterior.fixed
    return torch.stack([call_network(net, {**fixed, **draw}, inputs) for draw in draws])


def make_forward(network: Network, posterior: WeightPosterior) -> Callable[[], Tensor]:
    """A forward pass of the mean network."""
    net, inputs = mean_network(posterior), network.inputs()
    return torch.no_grad()(lambda: net(inputs).sum())


def make_new(network: Network, posterior: WeightPosterior) -> Callable[[], Tensor]:
    """A prediction that makes its draws: the seed is another each time."""
    inputs, seeds = network.inputs(), itertools.count(1)
    return lambda: posterior.predict(inputs, network.draws, seed=next(seeds)).mean.sum()


def make_kept(network: Network, posterior: WeightPosterior) -> Callable[[], Tensor]:
    """A prediction with draws that are there: the step of a turn that is not timed makes them."""
    inputs = network.inputs()
    return lambda: posterior.predict(inputs, network.draws, seed=0).mean.sum()


def make_turn(step: Callable[[], Tensor], passes: int) -> Callable[[int], float]:
    """A turn of so many forward passes, of which a step takes ``passes``; one step at least."""
    return lambda steps: time_bare(step, max(1, steps // passes))


def make_entries(network: Network, posteriors: dict[str, WeightPosterior]) -> list[Entry]:
    """What takes turns: the masked and the compact posterior, in each of the three ways."""
    ways = {
        FORWARD: (make_forward, 1),
        NEW: (make_new, network.draws),
        KEPT: (make_kept, network.draws),
    }
    return [
        Entry(Contender(name, "", make), way, MASKED, make_turn(make(network, posterior), passes))
        for way, (make, passes) in ways.items()
        for name, posterior in posteriors.items()
    ]


def measure(network: Network, steps: int, rounds: int, warm_up: int) -> dict[str, Any]:
    """Prune one network and compare the compact posterior with the masked one."""
    whole, inputs = make_posterior(network), network.inputs()
    masked = prune(whole, FRACTION, unit="channel", scope="layer")
    posteriors: dict[str, WeightPosterior] = {MASKED: masked, COMPACT: compact(masked)}
    sizes = {
        "parameters": {name: count_parameters(one) for name, one in posteriors.items()},
        "flops": {name: count_flops(one.net, inputs) for name, one in posteriors.items()},
        "bytes": {name: count_bytes(one) for name, one in posteriors.items()},
    }
    found: dict[str, Any] = {
        "title": network.title,
        "batch_size": network.batch_size,
        "steps": steps,
        "draws": network.draws,
        **{what: {**size, "share": size[COMPACT] / size[MASKED]} for what, size in sizes.items()},
        "difference": compare(masked, posteriors[COMPACT], inputs),
    }
    found["bytes"]["unpruned"] = count_bytes(whole)
    del whole
    entries = make_entries(network, posteriors)
    interleave(entries, steps, rounds, warm_up)
    found["times"] = summarise(entries)
    found["modes"] = {name: one.mode for name, one in posteriors.items()}
    found["bars"] = judge(found) if network.judged else []
    return found


def summarise(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """The times of both, and the ratio of compact to masked: median and quartiles over rounds."""
    failed = [entry for entry in entries if not entry.seconds]
    if failed:
        raise RuntimeError(f"{failed[0].contender.name}, {failed[0].mode}: {failed[0].reason}")
    times: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = figures(entry, entries)
        row = times.setdefault(entry.mode, {})
        row[f"{entry.contender.name}_ms"] = known["step_ms"]
        if entry.contender.name == COMPACT:
            row |= {"ratio": known["ratio"], "quartiles": known["quartiles"]}
    return times


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of one network: the same outputs, fewer operations, less time."""
    apart, share = found["difference"], found["flops"]["share"]
    ratio = found["times"][FORWARD]["ratio"]
    bars = [
        (
            "difference of the mean networks, of the largest output",
            apart["mean_network"],
            "at most",
            DIFFERENCE_BAR,
        ),
        (
            "difference of the draws, of the largest output",
            apart["draws"],
            "at most",
            DIFFERENCE_BAR,
        ),
        ("share of FLOPs left", share, "at most", FLOPS_BAR),
        ("time of a forward pass to the masked one's", ratio, "below", TIME_BAR),
    ]
    return [
        {
            "bar": bar,
            "value": value,
            "limit": limit,
            "how": how,
            "passed": value < limit if how == "below" else value <= limit,
        }
        for bar, value, how, limit in bars
    ]


def print_table(found: dict[str, Any]) -> None:
    """Print the figures of one network, and the bars if it has any."""
    print(f"\n{found['title']}: {FRACTION:.0%} of the units of each layer that can lose them")
    print(f"  {'':30}{MASKED:>16}{COMPACT:>16}   compact / masked")
    words = {"parameters": "parameters", "flops": "FLOPs, forward pass", "bytes": "bytes on disk"}
    for what, name in words.items():
        size = found[what]
        print(f"  {name:30}{size[MASKED]:16,}{size[COMPACT]:16,}   {size['share']:.2f}")
    for mode, row in found["times"].items():
        sides = [statistics.median(row[f"{name}_ms"]) for name in (MASKED, COMPACT)]
        name = mode if mode == FORWARD else f"{mode} ({found['draws']})"
        print(f"  {name:30}" + "".join(f"{ms:13.2f} ms" for ms in sides) + f"   {cell(row)}")
    apart = found["difference"]
    print(
        f"  outputs differ by {apart['mean_network']:.1e} (mean network) and {apart['draws']:.1e} "
        f"({COMPARED_DRAWS} draws) of the largest\n"
        f"  unpruned: {found['bytes']['unpruned']:,} bytes on disk; draws run "
        + ", ".join(f"{name} {mode}" for name, mode in found["modes"].items())
    )
    for bar in found["bars"]:
        word = "pass" if bar["passed"] else "FAIL"
        print(f"    {word}  {bar['value']:.3g} ({bar['how']} {bar['limit']:g})  {bar['bar']}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    default = ", ".join(f"{network.steps} on {network.name}" for network in NETWORKS)
    parser = shared.make_parser(
        "pruning_speed",
        __doc__,
        quick="few rounds of short turns",
        rounds=ROUNDS,
        steps="timed forward passes in a turn, and about as many draws of predictions (default "
        f"{default}; a third of it with --quick)",
        only=[network.name for network in NETWORKS],
    )
    options = shared.parse(parser, arguments)
    setting = shared.settle(options)
    results = {}
    for network in NETWORKS:
        if options.only and network.name not in options.only:
            continue
        steps = options.steps or max(1, network.steps // 3 if options.quick else network.steps)
        results[network.name] = measure(network, steps, options.rounds, options.warm_up)
        print_table(results[network.name])
        sys.stdout.flush()
    versions = shared.versions(["lightning-bnn"])
    found = {**setting, "fraction": FRACTION, "versions": versions, "networks": results}
    shared.write(options.json, "pruning_speed", arguments, found)


if __name__ == "__main__":
    main()
