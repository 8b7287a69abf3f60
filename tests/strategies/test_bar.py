"""What the progress bar says of a fit: its phase, and what was taken."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, LaplaceBNN, VariationalBNN
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.samplers import HMC, SGLD, Cyclical
from tests.nets import EXAMPLES, make_data
from tests.trainers import quiet_trainer


class Shown(Callback):
    """Notes what the bar would show after each step."""

    def __init__(self) -> None:
        self.texts: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.texts.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module))


def shown(bnn: Any, *callbacks: Any, size: int = 16, bar: Any = TQDMProgressBar) -> list[str]:
    rows = DataLoader(make_data("mlp", "classification"), batch_size=size)
    noted = Shown()
    trainer = quiet_trainer(
        max_epochs=2, enable_progress_bar=True, callbacks=[*callbacks, bar(), noted]
    )
    trainer.fit(bnn, rows, rows)
    assert all("train_loss" in texts for texts in noted.texts)
    names = ("phase", "draws", "kl_weight", "snapshots")
    return [", ".join(f"{k} {t[k]}" for k in names if k in t) for t in noted.texts]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_warm_up_burn_in_and_draws(bar: Any) -> None:
    sampler = partial(SGLD, lr=1e-4)
    bnn = SGMCMC(nn.Linear(4, 3), Categorical(), sampler=sampler, warm_up=2, chains=2)
    assert shown(bnn, SampleCollector(burn_in=4), bar=bar) == [
        *("phase warm-up 1/2, draws 0", "phase burn-in 2/4, draws 0", "phase burn-in 3/4, draws 0"),
        *("draws 0", "draws 2", "draws 4"),
    ]


def test_adaptation_exploration_kl_and_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(4, 3)
    hmc = SGMCMC(net, Categorical(), sampler=partial(HMC, lr=1e-4, adapt_steps=2))
    assert shown(hmc, size=EXAMPLES) == ["phase adapting", ""]
    cycles = partial(Cyclical, cycle_length=3, exploration=0.5)
    cyclical = SGMCMC(net, Categorical(), sampler=partial(SGLD, lr=1e-4), scheduler=cycles)
    assert shown(cyclical).count("phase exploring") == 4
    assert shown(VariationalBNN(net, Categorical(), kl_warmup=4)) == [
        *("kl_weight 0.25", "kl_weight 0.50", "kl_weight 0.75", "", "", "")
    ]
    swag = SWAGMoments(start=0.0, rank=0, every_n_steps=2)
    texts = shown(VariationalBNN(net, Categorical()), swag)
    assert texts[-1] == "snapshots 3"
    assert "snapshots=3" in capsys.readouterr().out.replace(" ", "")


class PlainModule(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def phase(self) -> str:
        return "of the user's own"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_draws_of_a_module_that_is_no_strategy() -> None:
    assert shown(PlainModule(), SampleCollector(burn_in=5))[-2:] == ["draws 0", "draws 1"]


@pytest.mark.filterwarnings("ignore:The validation NLL is lowest at the end")
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_curvature_pass(bar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning draws no bar after the last step: what this hook asks for is what it shows."""
    seen: list[str] = []
    update = bar.on_train_epoch_end

    def note(self: Any, trainer: Any, module: Any) -> None:
        update(self, trainer, module)
        seen.append(self.get_metrics(trainer, module).get("phase", ""))

    monkeypatch.setattr(bar, "on_train_epoch_end", note)
    shown(LaplaceBNN(nn.Linear(4, 3), Categorical(), scales="validation"), bar=bar)
    curvature = [f"curvature {i}/3" for i in (1, 2, 3)]
    assert seen[:5] == ["", "", *curvature]  # two epochs, and the pass
    assert len(seen) >= 22
    assert seen[5:] == [f"prior scale {i}" for i in range(1, len(seen) - 4)]
