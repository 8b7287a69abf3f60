"""Pyro: the network as a PyroModule with Normal priors, ``AutoDiagonalNormal``, SVI."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    import pyro
    import pyro.distributions as dist
    from pyro import poutine
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroModule, PyroSample
    from pyro.nn.module import to_pyro_module_

    class Classifier(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.make_net()
            to_pyro_module_(self.net)
            for module in self.net.modules():
                for name, value in list(module.named_parameters(recurse=False)):
                    prior = dist.Normal(0.0, 0.1).expand(value.shape).to_event(value.dim())
                    setattr(module, name, PyroSample(prior))

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            logits = self.net(inputs)
            scale = NUM_DATA / len(inputs)
            with pyro.plate("examples", len(inputs)), poutine.scale(scale=scale):
                pyro.sample("targets", dist.Categorical(logits=logits), obs=targets)
            return logits

    pyro.clear_param_store()  # its parameters are global: the other network's would be found
    model = Classifier()
    guide = AutoDiagonalNormal(model, init_scale=0.05)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
    inputs, targets = problem.batch()

    def step() -> Any:
        return svi.step(inputs, targets)

    return step


CONTENDER = Contender("pyro-ppl", "pyro", make_step, slow=True)
