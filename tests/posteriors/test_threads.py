"""Concurrent readers of one posterior get the answers that one reader gets, and change nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_bnn import (
    AveragePosterior,
    GaussianPosterior,
    Posterior,
    WeightPosterior,
    mc_dropout,
)
from lightning_bnn.exchange import call_with
from lightning_bnn.likelihoods import Categorical
from tests.nets import SequenceLSTM, SequenceTransformer, make_data
from tests.posteriors.test_contract import INPUTS, KINDS, all_tensors

THREADS, TIMES = 8, 12


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Counts(nn.Module):
    """A network that changes its buffers when it is run, also to predict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs) + self.runs
        self.runs += 1
        self.last = hidden.mean(0)
        return self.head(hidden)


class Leaves(nn.Module):
    """A network that leaves what it computed on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = self.body(inputs).tanh()
        return self.head(self.hidden)


def gaussian(net: nn.Module, chosen: str = "") -> GaussianPosterior:
    mean = {name: p.detach() for name, p in net.named_parameters() if name.startswith(chosen)}
    sd = {name: 0.1 + tensor.abs() for name, tensor in mean.items()}
    return GaussianPosterior(net, Categorical(), mean, sd)


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 3))


CASES: dict[str, tuple[Callable[[], Posterior], Any]] = {
    **{name: (make, INPUTS) for name, make in KINDS.items()},
    "convolutions": (lambda: gaussian(conv_net()), make_data("resnet", "regression").tensors[0]),
    "a head": (lambda: gaussian(conv_net(), "3."), make_data("resnet", "regression").tensors[0]),
    "dropout": (
        lambda: mc_dropout(nn.Sequential(nn.Dropout2d(0.5), conv_net()), Categorical()),
        make_data("resnet", "regression").tensors[0],
    ),
    "average": (
        lambda: AveragePosterior([KINDS["gaussian"](), KINDS["linear"](), KINDS["draws"]()]),
        INPUTS,
    ),
    "transformer": (
        lambda: gaussian(SequenceTransformer(3)), make_data("lstm", "regression").tensors[0]
    ),
    "lstm": (lambda: gaussian(SequenceLSTM(3)), make_data("lstm", "regression").tensors[0]),
    "resnet18": (
        lambda: gaussian(torchvision.models.resnet18(num_classes=3), "fc."),
        make_data("resnet", "regression").tensors[0],
    ),
    "leaves": (lambda: gaussian(Leaves()), INPUTS),
    "counts": (lambda: gaussian(Counts()), INPUTS),
    "counts, head": (lambda: gaussian(Counts(), "head."), INPUTS),
}  # fmt: skip


def in_threads(work: Callable[[int], None]) -> None:
    """Run a function with the number of each thread, all at the same time."""
    errors: list[BaseException] = []
    gate = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            gate.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_threads_predict_what_one_thread_predicts(name: str, mode: str) -> None:
    if name in ("lstm", "counts") and mode == "stacked":
        pytest.skip("what it does has no batching rule")
    torch.manual_seed(0)
    make, inputs = CASES[name]
    posterior = make()
    for one in posterior.components if isinstance(posterior, WeightPosterior) else ():
        one.mode = mode
    before = [tensor.clone() for tensor in all_tensors(posterior)]
    seeds = range(3)
    batches = [inputs, inputs[:4].clone(), inputs[1:5] * 2]
    if mode == "auto":
        expected = None
    else:
        expected = [[posterior.predict(x, 9, seed).outputs for seed in seeds] for x in batches]
    found: dict[tuple[int, int], list[Tensor]] = {}

    def work(number: int) -> None:
        for turn in range(TIMES if "resnet" not in name else 3):
            batch, seed = (number + turn) % 3, (number * turn) % 3
            outputs = posterior.predict(batches[batch], 9, seed).outputs
            found.setdefault((batch, seed), []).append(outputs)

    in_threads(work)
    if expected is None:  # what was measured holds from then on
        expected = [[posterior.predict(x, 9, seed).outputs for seed in seeds] for x in batches]
    for (batch, seed), outputs in found.items():
        assert all(torch.equal(one, expected[batch][seed]) for one in outputs), (batch, seed)
    assert all(map(torch.equal, before, all_tensors(posterior)))


def test_one_draw_lets_no_thread_wait_for_another() -> None:
    """There is nothing to measure with it, so that how the network runs would never be known."""
    gate = threading.Barrier(2, timeout=5)

    class Meets(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            # first the network is busy for a while, so that the other thread makes a spare; then
            # each waits for the other, which is in here too
            time.sleep(0.1) if len(inputs) == 1 else gate.wait()
            return super().forward(inputs)

    posterior = gaussian(Meets(3, 3))
    posterior.predict(INPUTS[:1], draws=1)
    for inputs in (INPUTS[:1], INPUTS):
        threads = [threading.Thread(target=posterior.predict, args=(inputs, 1)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not gate.broken


def test_a_network_is_exchanged_by_one_thread_at_a_time() -> None:
    """Also where it is changed in between, and where threads call each other's networks."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    own = {name: tensor.clone() for name, tensor in net.named_parameters()}
    row = torch.tensor([[1.0, 2.0]])

    def work(number: int) -> None:
        for turn in range(200):
            value = float(number * 1000 + turn)
            outputs = call_with(net, {"0.weight": torch.full((2, 2), value)}, [row])
            assert outputs.item() == pytest.approx(3 * value * own["1.weight"].sum().item())

    in_threads(work)
    assert all(torch.equal(tensor, own[name]) for name, tensor in net.named_parameters())
    net[1].weight = nn.Parameter(torch.ones(1, 2))  # spares made before are of no use any more
    own["1.weight"] = torch.ones(1, 2)
    in_threads(work)
    net.eval()
    seen: list[bool] = []
    net[0].register_forward_hook(lambda module, inputs, outputs: seen.append(module.training))
    in_threads(work)
    assert not any(seen)
