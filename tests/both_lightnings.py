"""A user's program with one of the two Lightning packages; run with its name and a folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

PACKAGE = sys.argv[1] if __name__ == "__main__" else "pytorch_lightning"
pl = import_module(PACKAGE)  # before lightning_bnn, as `import lightning as L` is

import torch  # noqa: E402
from torch import nn  # noqa: E402

from lightning_bnn import SGMCMC, DeepEnsemble, Posterior, VariationalBNN  # noqa: E402
from lightning_bnn.callbacks import (  # noqa: E402
    CalibrationReport,
    PredictionWriter,
    SampleCollector,
    SNRPruning,
    SWAGMoments,
)
from lightning_bnn.cli import main  # noqa: E402
from lightning_bnn.data import Digits  # noqa: E402
from lightning_bnn.likelihoods import Categorical  # noqa: E402

NAMES = ("pytorch_lightning", "lightning.pytorch")


def trainer(folder: Path, *callbacks: object, **options: object) -> pl.Trainer:
    saver = import_module(f"{PACKAGE}.callbacks").ModelCheckpoint(folder, save_last=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(
        accelerator="cpu", callbacks=[saver, *callbacks], **{"max_epochs": 2, **quiet, **options}
    )


def fits(folder: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    callbacks = {
        "vi": [CalibrationReport(folder / "report"), SNRPruning(0.5)],
        "mcmc": [SampleCollector(burn_in=5, every=5)],
        "ensemble": [SWAGMoments(start=0.0, rank=0, every_n_steps=5)],
    }
    made = {
        "vi": lambda: VariationalBNN(net, Categorical()),
        "mcmc": lambda: SGMCMC(net, Categorical(), chains=2),
        "ensemble": lambda: DeepEnsemble(net, Categorical(), members=2),
    }
    for name, make in made.items():
        bnn = make()
        assert isinstance(bnn, pl.LightningModule)
        fitted = trainer(folder / name, *callbacks[name])
        fitted.fit(bnn, Digits())
        assert type(fitted.strategy.checkpoint_io).__name__ == "WholeCheckpointIO"
        fitted.test(bnn, Digits(), verbose=False)
        bnn.posterior().save(folder / name / "posterior")
        assert Posterior.load(folder / name / "posterior", net).predict(torch.zeros(1, 1, 8, 8))
        # a checkpoint of one package resumes in the other, too: see the test
        other = folder.parent / "first" / name / "last.ckpt"
        again = make()
        path = other if other.exists() else folder / name / "last.ckpt"
        trainer(folder / f"{name} again", *callbacks[name], max_epochs=3).fit(
            again, Digits(), ckpt_path=path
        )
        assert again.trainer.current_epoch == 3


def command(folder: Path) -> None:
    """The configuration names classes of the other package; they are read as those of this one."""
    other = NAMES[1 - NAMES.index(PACKAGE)]
    config = folder / "config.yaml"
    config.write_text(f"""
trainer:
  max_epochs: 1
  accelerator: cpu
  enable_progress_bar: false
  logger:
    class_path: {other}.loggers.CSVLogger
    init_args: {{save_dir: {folder}}}
  callbacks:
    - class_path: {other}.callbacks.LearningRateMonitor
model:
  class_path: lightning_bnn.VariationalBNN
  init_args:
    net: {{class_path: lightning_bnn.nets.MLP, init_args: {{inputs: 64, hidden: [8], outputs: 10}}}}
    likelihood: lightning_bnn.likelihoods.Categorical
data: lightning_bnn.data.Digits
""")
    assert main(["fit", "--config", str(config)]) == 0


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    place = Path(sys.argv[2])
    fits(place)
    command(place)
    assert PredictionWriter.__mro__[1].__module__.startswith(PACKAGE)
    used = {name for name in NAMES if name in sys.modules}
    assert used == {PACKAGE}, used
    print("all well")
