"""What does not vary runs once for a batch, where that is right, and gives the same numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn import GaussianPosterior
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors.weights import WeightPosterior

INPUTS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


class Body(nn.Linear):
    """A layer that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.runs = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(inputs).tanh()


class Net(nn.Module):
    """A body and a head; each case below is another way to put them together."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), self.make_head()

    def make_head(self) -> nn.Module:
        return nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


class DeepHead(Net):
    def make_head(self):
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


class AsksForDtype(Net):
    def forward(self, inputs):
        return self.head(self.body(inputs.to(self.head.weight.dtype)))


class Gated(nn.Linear):
    def forward(self, inputs, gate):
        return super().forward(inputs) * gate


class TwoInputs(Net):
    def make_head(self):
        return Gated(4, 4)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head(hidden, hidden.square())


class ByKeyword(Net):
    def forward(self, inputs):
        return self.head(input=self.body(inputs))


class PositionAndKeyword(TwoInputs):
    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head(hidden, gate=hidden)


class Scaled(Net):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class ScaledInPlace(Net):
    def forward(self, inputs):
        return super().forward(inputs).mul_(2)


class Residual(Net):
    def forward(self, inputs):
        hidden = self.body(inputs)
        return hidden + self.head(hidden)


class Ignores(Net):
    def forward(self, inputs):
        hidden = self.body(inputs)
        self.head(hidden)
        return hidden


class Twice(Net):
    def forward(self, inputs):
        return self.head(self.head(self.body(inputs)))


class Functional(Net):
    def forward(self, inputs):
        return F.linear(self.body(inputs), self.head.weight, self.head.bias)


class LooksAtWeight(Net):
    def forward(self, inputs):
        return self.head(self.body(inputs) * self.head.weight.detach().mean())


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(4, 4)
        self.middle.weight = self.head.weight

    def forward(self, inputs):
        return self.head(self.middle(self.body(inputs)))


class Noisy(Net):
    def forward(self, inputs):
        return self.head(F.dropout(self.body(inputs), 0.5, training=True))


class Keeps(Net):
    def forward(self, inputs):
        self.last = self.head(self.body(inputs))
        return self.last


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.head.register_forward_hook(double)


def double(module, arguments, outputs):
    return outputs * 2


class ChangesItsInputs(Net):
    def make_head(self):
        return AddsInPlace()


class AddsInPlace(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, inputs):
        return super().forward(inputs.add_(1.0))


class Middle(Net):
    def forward(self, inputs):
        return self.body(self.head(inputs))

    def make_head(self):
        return nn.Linear(3, 3)


def posterior(net: nn.Module, names: tuple[str, ...] = ("head.",), mode="loop") -> WeightPosterior:
    torch.manual_seed(0)
    chosen = {n: p.detach() for n, p in net.named_parameters() if n.startswith(names)}
    sd = {name: torch.full_like(tensor, 0.3) for name, tensor in chosen.items()}
    made = GaussianPosterior(net, Gaussian(0.1), chosen, sd)
    made.mode = mode
    made.net.body.runs = 0  # type: ignore[union-attr]
    return made


def by_hand(posterior: WeightPosterior, count: int) -> Tensor:
    """The outputs of each draw by itself, through the whole network."""
    weights = posterior.sample(count, torch.Generator().manual_seed(0))
    draws = [{name: t[i] for name, t in weights.items()} for i in range(count)]
    with torch.no_grad():
        return torch.stack(
            [
                torch.func.functional_call(posterior.net, {**posterior.fixed, **draw}, (INPUTS,))
                for draw in draws
            ]
        )


@pytest.mark.parametrize("mode", ["loop", "stacked", "auto"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", [Net, DeepHead, AsksForDtype, TwoInputs, ByKeyword])
def test_the_shared_part_runs_once(case, inference, mode):
    made = posterior(case(), mode=mode)
    with torch.inference_mode(inference):
        outputs = made.predict(INPUTS, draws=20).outputs
        assert made.net.body.runs == 1
        torch.testing.assert_close(outputs, by_hand(made, 20))
        made.net.body.runs = 0
        assert torch.equal(made.predict(INPUTS, draws=20).outputs, outputs)
        assert made.net.body.runs == 1
    assert made.mode != "auto"


def test_a_part_of_the_head_may_be_fixed():
    made = posterior(DeepHead(), ("head.2.weight",))
    torch.testing.assert_close(made.predict(INPUTS, 9).outputs, by_hand(made, 9))
    assert made.net.body.runs == 1 + 9  # those by hand


@pytest.mark.parametrize(
    "case",
    [
        *(PositionAndKeyword, Scaled, ScaledInPlace, Residual, Ignores, Twice, Functional),
        *(LooksAtWeight, Tied, Keeps, Hooked, ChangesItsInputs, Middle),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_where_it_would_be_wrong_the_whole_network_runs(case, inference):
    made = posterior(case())
    with torch.inference_mode(inference):
        outputs = made.predict(INPUTS, draws=10).outputs.clone()
    assert made.net.body.runs >= 10
    torch.testing.assert_close(outputs, by_hand(made, 10))
    made.net.body.runs = 0
    made.predict(INPUTS, draws=10)
    assert made.net.body.runs == 10  # it is not tried again
    if case is Keeps:
        assert type(made.net.last) is Tensor
        made.map(lambda name, tensor: tensor)  # the network can be copied


def test_noise_of_the_network_is_new_for_each_draw():
    made = posterior(Noisy())
    torch.manual_seed(3)
    outputs = made.predict(INPUTS, draws=4).outputs
    torch.manual_seed(3)
    torch.testing.assert_close(outputs, by_hand(made, 4))  # no number was lost to the trial


def test_threads_do_not_disturb_each_other():
    made = posterior(Net())
    inputs = [INPUTS + shift for shift in range(8)]
    expected = [made.predict(one, draws=10).outputs for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            predicted = list(pool.map(lambda one: made.predict(one, draws=10).outputs, inputs))
            assert all(map(torch.equal, predicted, expected))
