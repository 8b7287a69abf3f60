"""Fits of deep ensembles: exact resume, other runs' checkpoints, precision, the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from lightning_bnn import DeepEnsemble, Posterior
from lightning_bnn.cli import main
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP
from lightning_bnn.priors import Normal
from tests.nets import loader, make_data, mlp
from tests.processes import ROOT
from tests.strategies.ensembles import cnn, fit, make
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"mode": "loop"}], ids=str)
def test_a_resumed_fit_is_bit_equal(
    options: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    """From the middle of an epoch and from its end; BatchNorm, dropout, a schedule, a seed."""
    ends = []
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for name in (None, "step=2", "step=3", "step=4"):
        ensemble = make(dropout_net, scheduler=scheduler, seed=7 if name is None else 8, **options)
        place = tmp_path / (name or "first")
        saver = ModelCheckpoint(place, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=3 * accumulate, callbacks=[saver], enable_checkpointing=True,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        torch.manual_seed(0 if name is None else 5)
        data = make_data("mlp", "classification")
        path = None if name is None else tmp_path / "first" / f"{name}.ckpt"
        trainer.fit(ensemble, loader(data, shuffle=True, batch_size=12), ckpt_path=path)
        assert ensemble.seed == 7
        ends.append({key: value.clone() for key, value in ensemble.state_dict().items()})
    for end in ends[1:]:
        assert all(
            torch.equal(end[key], value) for key, value in ends[0].items() if "net." not in key
        )


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_precisions_run(precision: Any, chunk: int | None) -> None:
    ensemble = make(partial(mlp, 3), chunk=chunk)
    before = ensemble.weights.detach().clone()
    trainer = fit(ensemble, 3, precision=precision, gradient_clip_val=1.0)
    trainer.test(ensemble, loader(make_data("mlp", "classification")), verbose=False)
    assert ensemble.weights.isfinite().all()
    assert not torch.equal(before, ensemble.weights.float())


def half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(("build", "options"), [(partial(mlp, 3), {"chunk": 2}), (cnn, {})])
def test_small_gradients_of_half_precision_do_not_vanish_in_chunks(
    build: Any, options: dict[str, Any]
) -> None:
    """They are about 1e-8, below what float16 can tell from 0 without the loss scale."""
    inputs = make_data("mlp", "regression").tensors[0]
    data = TensorDataset(inputs, torch.sin(inputs[:, :3]))
    ends = []
    for more in ({"mode": "stacked"}, {"mode": "loop", **options}):
        ensemble = DeepEnsemble(
            build, Gaussian(3e3), Normal(0.0, 1e6), members=3, seed=0,
            optimizer=partial(SGD, lr=1e5), **more,
        )  # fmt: skip
        before = ensemble.weights.detach().clone()
        fit(ensemble, 1, data=data, plugins=[half_precision()])
        ends.append(ensemble.weights.detach() - before)
    assert (ends[0] != 0).float().mean() > 0.8
    assert (ends[0] - ends[1]).norm() < 0.05 * ends[0].norm()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_loss_scales_are_taken_away_once_from_members_with_own_optimizers(
    clip: float | None,
) -> None:
    ends = []
    for optimizer in (partial(SGD, lr=0.1), [partial(SGD, lr=0.1)] * 3):
        ensemble = make(partial(mlp, 3), optimizer=optimizer)
        fit(
            ensemble, 4, accumulate_grad_batches=2, gradient_clip_val=clip,
            plugins=[half_precision()],
        )  # fmt: skip
        ends.append(ensemble.weights.detach().clone())
    assert torch.equal(*ends)
    whole = make(partial(mlp, 3), optimizer=partial(SGD, lr=0.1))
    fit(whole, 4, accumulate_grad_batches=2, gradient_clip_val=clip)
    torch.testing.assert_close(ends[1], whole.weights.detach(), rtol=0.02, atol=2e-3)


def test_a_fused_optimizer_cannot_be_clipped_in_half_precision() -> None:
    ensemble = make(partial(mlp, 3), optimizer=partial(Adam, lr=0.1, fused=True))
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=0.5 .* fused Adam"):
        fit(ensemble, 1, gradient_clip_val=0.5, plugins=[half_precision()])


def test_the_command_line_gives_each_member_an_optimizer(tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "configs" / "digits_ensemble.yaml").read_text())
    made = [{"class_path": "torch.optim.Adam", "init_args": {"lr": rate}} for rate in (0.01, 0.02)]
    content["model"]["init_args"].update(members=2, optimizer=made)
    content["trainer"].update(
        max_epochs=1, limit_train_batches=3, limit_val_batches=1, log_every_n_steps=1, callbacks=[],
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    content["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    assert main(["fit", "--config", str(config)]) == 0
    run = tmp_path / "digits_ensemble" / "version_0"
    assert len(Posterior.load(run / "posterior", MLP(inputs=64, hidden=[100], outputs=10))) == 2
