"""The cost of a prediction with many draws, where one pass of the plain network is 1.

``python -m benchmarks.predict_step`` predicts with a Gaussian posterior over all weights of the MLP
(30 draws, 10,000 inputs) and over the last layer of resnet18 (32 draws), beside torch-uncertainty
and lightning-uq-box if they are installed, in one interleaved run. The table gives the median over
the rounds of the ratio to one pass of the plain network over the same inputs, and its quartiles.
Before that it takes the peak memory after the first batches of the MLP's inputs and after all.

See ``benchmarks/README.md`` for how to install the peers and read the table.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import cell, figures, print_bars, verdict
from benchmarks.interleaved import BARE, Entry, build, fewer_steps, interleave
from benchmarks.options import choose, make_parser, parse, settle, versions, write
from benchmarks.peers.contender import Contender, Problem, Step, mlp, resnet

__all__ = ["main"]

MEMORY_BAR = 1.1


@dataclass(frozen=True)
class Network(Problem):
    """One network and what is predicted with it.

    Attributes:
        batches: Over so many batches a step goes.
        draws: How many draws are mixed.
        bayesian: What the names of the Bayesian weights begin with.
        peers: Whether the peers can do the same.
    """

    batches: int = 1
    draws: int = 30
    bayesian: str = ""
    peers: bool = True

    def all_inputs(self) -> list[Tensor]:
        """The batches of one step."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batches, self.batch_size, *self.input_shape)
        return list(torch.randn(shape, generator=generator))


NETWORKS = (
    Network(
        "mlp", "MLP 784-400-400-10, 30 draws, 10,000 inputs in batches of 500", mlp, (784,), 500,
        steps=30, bar=32.0, batches=20, draws=30,
    ),
    Network(
        "resnet18", "resnet18 on 3x64x64, last layer Bayesian, 32 draws, batch 32", resnet,
        (3, 64, 64), 32, steps=4, bar=1.2, draws=32, bayesian="fc.", peers=False,
    ),
)  # fmt: skip


def make_plain(network: Network) -> Step:
    net, batches = network.make_net().eval(), network.all_inputs()

    @torch.no_grad()
    def step() -> Any:
        return sum(net(inputs).softmax(-1).sum() for inputs in batches)

    return step


def make_posterior(network: Network) -> Any:
    from lightning_bnn import GaussianPosterior
    from lightning_bnn.likelihoods import Categorical

    net = network.make_net()
    chosen = {n: p.detach() for n, p in net.named_parameters() if n.startswith(network.bayesian)}
    sd = {name: torch.full_like(mean, 0.05) for name, mean in chosen.items()}
    return GaussianPosterior(net, Categorical(), chosen, sd)


def make_ours(network: Network) -> Step:
    posterior, batches = make_posterior(network), network.all_inputs()
    return lambda: sum(posterior.predict(one, network.draws).mean.sum() for one in batches)


def make_torch_uncertainty(network: Network) -> Step:
    from torch_uncertainty.models.mlp import bayesian_mlp

    model = bayesian_mlp(784, 10, hidden_dims=[400, 400], num_samples=network.draws).eval()
    batches = network.all_inputs()

    @torch.no_grad()
    def step() -> Any:  # it gives the draws of a batch one after another, along the batch's axis
        outputs = (model(inputs).unflatten(0, (network.draws, -1)) for inputs in batches)
        return sum(one.softmax(-1).mean(0).sum() for one in outputs)

    return step


def make_lightning_uq_box(network: Network) -> Step:
    from lightning_uq_box.uq_methods import BNN_VI_ELBO_Classification
    from torch import nn

    module = BNN_VI_ELBO_Classification(
        network.make_net(),
        criterion=nn.CrossEntropyLoss(),
        task="multiclass",
        num_mc_samples_test=network.draws,
    ).eval()
    batches = network.all_inputs()

    @torch.no_grad()
    def step() -> Any:
        return sum(module.predict_step(inputs)["pred"].sum() for inputs in batches)

    return step


PLAIN = Contender("plain pass", "torch", make_plain)
OURS = Contender("lightning-bnn", "lightning_bnn", make_ours)
PEERS = (
    Contender("torch-uncertainty", "torch_uncertainty", make_torch_uncertainty),
    Contender("lightning-uq-box", "lightning_uq_box", make_lightning_uq_box),
)


def peak() -> float:
    """The largest memory that this process has held so far, in the unit of the system."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def memory_growth(network: Network) -> float:
    """The peak memory after all batches over that after the first two."""
    posterior, batches = make_posterior(network), network.all_inputs()
    peaks = []
    for inputs in batches:
        posterior.predict(inputs, network.draws).mean.sum()
        peaks.append(peak())
    return peaks[-1] / peaks[min(1, len(peaks) - 1)]


def measure(
    network: Network, contenders: Sequence[Contender], steps: int, rounds: int, warm_up: int
) -> dict[str, Any]:
    """Let all take turns on one network; print its table and give the same as data."""
    taking_part = [one for one in contenders if network.peers or one not in PEERS]
    entries: list[Entry] = []
    for contender in (PLAIN, *taking_part):
        entry = build(contender, BARE, network)
        entry.baseline = PLAIN.name
        if contender is not PLAIN and network.bar > 2:
            entry.run = fewer_steps(entry.run, network.draws)
        entries.append(entry)
    interleave(entries, steps, rounds, warm_up)
    rows = {entry.contender.name: figures(entry, entries) for entry in entries}
    plain_ms = statistics.median(rows[PLAIN.name]["step_ms"])
    print(f"\n{network.title}: ratio to one pass of the plain network, median [quartiles]")
    print(f"  {PLAIN.name:24}1 = {plain_ms:.1f} ms")
    for name, row in rows.items():
        if name != PLAIN.name:
            print(f"  {name:24}{cell(row)}")
    text = f"{OURS.name}, {network.draws} draws to one pass"
    bars = [verdict(text, rows.get(OURS.name, {}).get("ratio"), network.bar)]
    print_bars(bars)
    return {"title": network.title, "steps": steps, "contenders": rows, "bars": bars}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(
        "predict_step",
        __doc__,
        quick="few rounds of short turns",
        rounds=15,
        steps="timed plain passes in a turn; of a prediction with all its draws at least one",
        only=[contender.name for contender in (OURS, *PEERS)],
    )
    options = parse(parser, arguments)
    chosen, absent = choose((OURS, *PEERS), options)
    setting = settle(options)
    growth = memory_growth(NETWORKS[0])  # first: the peak of a process never falls
    bars = [verdict("peak memory after all batches to that after two", growth, MEMORY_BAR)]
    print_bars(bars, "memory")
    networks = {}
    for network in NETWORKS:
        steps = options.steps or (max(1, network.steps // 2) if options.quick else network.steps)
        networks[network.name] = measure(network, chosen, steps, options.rounds, options.warm_up)
        sys.stdout.flush()
    for name, reason in absent.items():
        print(f"  {name:24}{reason}")
    found = versions(contender.name for contender in chosen)
    result = {**setting, "versions": found, "memory": bars, "absent": absent, "networks": networks}
    write(options.json, "predict_step", arguments, result)


if __name__ == "__main__":
    main()
