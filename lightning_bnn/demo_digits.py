"""The digits of the demo: one network, fitted in four ways, and the report that compares them.

The network is an MLP of 200-200 ReLU units. Plain Adam gives one set of weights, variational
inference a Gaussian of them, SG-MCMC draws along four chains, a deep ensemble ten networks that
started apart. The last three have no settings but their length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.data import Digits
from lightning_bnn.lightning import pl
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.nets import MLP
from lightning_bnn.posteriors import DrawsPosterior, Posterior
from lightning_bnn.report import Report, report_posteriors
from lightning_bnn.strategies import SGMCMC, DeepEnsemble, VariationalBNN

__all__ = ["compare", "evaluate", "fit_chains", "fit_ensemble", "fit_plain", "fit_variational"]

EPOCHS, CHAIN_EPOCHS, ENSEMBLE_EPOCHS = 60, 130, 80
SHIFTS = {"turned by 30°": 30.0, "turned by 90°": 90.0}


def digits_net() -> nn.Module:
    """The network of all four."""
    return MLP(64, [200, 200], 10)


def make_variational() -> VariationalBNN:
    """Mean field at the temperature that the validation digits choose.

    At T = 1 mean field keeps too much noise in 55,000 weights for 1,078 examples, and underfits. A
    cold posterior is the usual remedy; it is not the Bayes posterior.
    """
    return VariationalBNN(digits_net(), likelihood=Categorical(), temperature="validation")


def fit_variational(
    seed: int = 0, epochs: int = EPOCHS, callbacks: Sequence[pl.Callback] = ()
) -> Posterior:
    """Fit the digits by variational inference.

    Args:
        seed: Decides the start, the noise and the order of the batches.
        epochs: How often every digit is seen.
        callbacks: What else the trainer calls.
    """
    pl.seed_everything(seed, verbose=False)
    bnn = make_variational()
    trainer = make_trainer(
        epochs, "Digits, variational", callbacks=callbacks, limit_val_batches=None
    )
    trainer.fit(bnn, Digits())
    return bnn.posterior()


class PlainClassifier(pl.LightningModule):
    """The same network without anything Bayesian, to compare with."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.net = digits_net()
        self.epochs = epochs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Adam with a cosine."""
        optimizer = Adam(self.parameters(), lr=5e-3)
        return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, self.epochs)}


def fit_plain(seed: int = 0, epochs: int = EPOCHS) -> Posterior:
    """Train the digits' network by plain Adam: a posterior of one draw."""
    pl.seed_everything(seed, verbose=False)
    module = PlainClassifier(epochs)
    make_trainer(epochs, "Digits, plain Adam").fit(module, Digits())
    return DrawsPosterior(module.net, Categorical(), [dict(module.net.named_parameters())])


def fit_chains(seed: int = 0, epochs: int = CHAIN_EPOCHS) -> Posterior:
    """Sample the Bayes posterior by four chains of SGHMC, which find all numbers by themselves."""
    pl.seed_everything(seed, verbose=False)
    bnn = SGMCMC(digits_net(), likelihood=Categorical())
    make_trainer(epochs, "Digits, SG-MCMC", callbacks=[SampleCollector()]).fit(bnn, Digits())
    return bnn.posterior()


def fit_ensemble(seed: int = 0, epochs: int = ENSEMBLE_EPOCHS) -> Posterior:
    """Train ten networks as one program."""
    pl.seed_everything(seed, verbose=False)
    ensemble = DeepEnsemble(digits_net(), likelihood=Categorical(), members=10)
    make_trainer(epochs, "Digits, deep ensemble").fit(ensemble, Digits())
    return ensemble.posterior()


def compare(posteriors: Mapping[str, Posterior]) -> Report:
    """The calibration report of posteriors on the test digits, with turned digits as shift.

    Temperatures are fitted on the validation digits. Digits on their side are the harder shift:
    they have ink in the outer columns, which are blank in upright ones. No gradient ever moved
    the weights there, and a plain network is surer of such digits than of upright ones, with one
    in ten right.

    Args:
        posteriors: What to compare, by name.
    """
    turned = {name: Digits(rotate=degrees) for name, degrees in SHIFTS.items()}
    return report_posteriors(
        posteriors, Digits(), ood=turned, title="Handwritten digits, four ways"
    )


def unseen_digits() -> tuple[Tensor, Tensor]:
    """The 360 digits that had no say in any fit."""
    data = Digits()
    data.setup()
    inputs, targets = data.splits.test.tensors
    return inputs, targets


def evaluate(
    posterior: Posterior, inputs: Tensor, targets: Tensor, draws: int | None = None
) -> dict[str, float]:
    """The metrics of a posterior on some digits."""
    metrics = posterior.likelihood.metrics()
    metrics.update(posterior.predict(inputs, draws), targets)
    return {name: float(value) for name, value in metrics.compute().items()}


class FitProgress(pl.Callback):
    """A bar of the epochs of a fit; where the output is no terminal, one line at its end.

    Args:
        title: What is fitted.
    """

    def __init__(self, title: str) -> None:
        self.progress = Progress(
            TextColumn(f"{title:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        self.task = self.progress.add_task("", total=trainer.max_epochs)
        self.progress.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Move it by one epoch."""
        self.progress.advance(self.task)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave it as it is."""
        self.progress.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Give the terminal back."""
        self.progress.stop()


def make_trainer(
    epochs: int, title: str = "", callbacks: Sequence[pl.Callback] = (), **options: Any
) -> pl.Trainer:
    """A trainer that leaves nothing behind, and does not validate unless told.

    Args:
        epochs: How many.
        title: What is fitted, for a bar of its epochs; no bar if empty.
        callbacks: What else it calls.
        **options: Of the trainer.
    """
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "limit_val_batches": 0,
        "callbacks": [*([FitProgress(title)] if title else []), *callbacks],
    }
    return pl.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **{**quiet, **options})
