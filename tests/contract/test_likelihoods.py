"""What every likelihood does: train, measure, predict, report, save and load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import Posterior, VariationalBNN
from lightning_bnn.report import report_posteriors
from tests.contract.cases import LIKELIHOODS
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.parametrize("name", LIKELIHOODS)
OUTPUTS = {"Categorical": 3, "HeteroscedasticGaussian": 2}
INPUTS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def targets(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "Categorical":
        return torch.randint(3, (64,), generator=generator)
    values = INPUTS.sum(1, keepdim=True) + 0.3 * torch.randn(64, 1, generator=generator)
    if name == "Bernoulli":
        return (values > 0).float()
    return values.exp().clamp(max=20).round() if name == "Poisson" else values


def test_it_works_everywhere(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    likelihood = LIKELIHOODS[name]()
    net = nn.Linear(3, OUTPUTS.get(name, 1))
    data = TensorDataset(INPUTS, targets(name))
    bnn = VariationalBNN(net, likelihood, predict_draws=3)
    before = bnn.elbo(data.tensors).item()
    trainer = quiet_trainer(max_epochs=30)
    trainer.fit(bnn, DataLoader(data, batch_size=16))
    assert bnn.elbo(data.tensors).item() > before
    (metrics,) = trainer.test(bnn, DataLoader(data, batch_size=16), verbose=False)
    assert metrics
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())

    posterior = bnn.posterior()
    predictive = posterior.predict(INPUTS, draws=4)
    total = predictive.entropy if predictive.task == "classification" else predictive.variance
    assert torch.allclose(predictive.aleatoric + predictive.epistemic, total, atol=1e-5)
    made = report_posteriors({"model": posterior}, DataLoader(data, batch_size=16), draws=4)
    assert made.numbers["models"][0]["scalars"]["nll"] == pytest.approx(
        -float(predictive.log_prob(data.tensors[1]).mean()), rel=1e-4
    )
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, net, likelihood=likelihood)
    assert torch.equal(loaded.predict(INPUTS, draws=4).outputs, predictive.outputs)
