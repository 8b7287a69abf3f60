"""Other libraries in :mod:`benchmarks.defaults`, with their own defaults.

torch-uncertainty's variational layers, deep ensemble, MC dropout and SWAG, and lightning-uq-box's
variational inference and MC dropout, through their own routines and trainers, with Adam at 1e-3.
What they ask for and have no default of:

* five members as ours; dropout of 0.2 after each activation; 16 draws of a prediction;
* one draw of the weights in a step of torch-uncertainty's VI, the KL weighed by 1/N;
* its SWAG begins after three quarters of the epochs and takes each, on images only: it has none
  for networks that give a distribution;
* a tenth of the epochs with squared errors in lightning-uq-box's regressions.

lightning-uq-box's ensemble is what the user has trained one by one, and its SWAG asks for a rate
and a frequency: neither is here. For regression torch-uncertainty uses its own perceptron.

Each library is imported inside of its functions: none is required.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.defaults_sets import Problem
from benchmarks.peers.contender import replace_layers
from lightning_bnn.data import TensorRows, collate_rows
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive, Predictive

__all__ = ["PEERS", "Peer"]

MEMBERS, DRAWS, DROPOUT = 5, 16, 0.2

Predict = Callable[[Tensor], Predictive]


class Peer(NamedTuple):
    """A method of another library: ``prepare`` gives what trains, and then what predicts."""

    distribution: str
    import_name: str
    prepare: Callable[[Problem], tuple[Callable[[], None], Predict]]
    tasks: tuple[str, ...] = ("classification", "regression")


def with_dropout(net: nn.Module) -> nn.Module:
    """Dropout after each activation, in place."""
    for name, layer in list(net.named_children()):
        if isinstance(layer, nn.ReLU):
            setattr(net, name, nn.Sequential(layer, nn.Dropout(DROPOUT)))
        else:
            with_dropout(layer)
    return net


# ---------------------------------------------------------------- torch-uncertainty


def torch_uncertainty(method: str, problem: Problem) -> tuple[Callable[[], None], Predict]:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.losses import DistributionNLLLoss, ELBOLoss
    from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine
    from torch_uncertainty.transforms import RepeatTarget

    regression = problem.task == "regression"
    model = _tu_model(method, problem, regression)
    loss: nn.Module = DistributionNLLLoss() if regression else nn.CrossEntropyLoss()
    if method == "vi":
        size = len(problem.splits.train)
        family = "normal" if regression else None
        loss = ELBOLoss(None, loss, kl_weight=1 / size, num_samples=1, dist_family=family)
    options: dict[str, Any] = {
        "loss": loss,
        "is_ensemble": True,
        "optim_recipe": torch.optim.Adam(model.parameters(), lr=1e-3),
        "format_batch_fn": RepeatTarget(MEMBERS) if method == "ensemble" else None,
    }
    if regression:
        routine: Any = RegressionRoutine(model, 1, dist_family="normal", **options)
    else:
        routine = ClassificationRoutine(model, problem.outputs, **options)
    trainer = TUTrainer(
        max_epochs=problem.epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    flat = (_flat(part) for part in (problem.splits.train, problem.splits.validation))
    train_rows, val_rows = (
        partial(DataLoader, rows, problem.batch_size, collate_fn=collate_rows) for rows in flat
    )

    def train() -> None:
        trainer.fit(routine, train_rows(shuffle=True), val_rows())
        routine.eval()

    @torch.no_grad()
    def predict(inputs: Tensor) -> Predictive:
        outputs = routine(inputs)
        if regression:
            means, scales = (outputs[name].reshape(-1, len(inputs), 1) for name in ("loc", "scale"))
            return GaussianPredictive(means, scales)
        return CategoricalPredictive(outputs.unflatten(0, (-1, len(inputs))))

    return train, predict


def _flat(part: TensorRows) -> TensorRows:
    """Rows whose target is a number, without an axis of its own."""
    inputs, targets = part.tensors
    return TensorRows(inputs, targets.flatten())


def _tu_model(method: str, problem: Problem, regression: bool) -> nn.Module:
    from torch_uncertainty.methods import SWAG, StochasticModel, deep_ensembles, mc_dropout
    from torch_uncertainty.models.mlp import bayesian_mlp, mlp

    task: Any = problem.task
    if regression:
        columns = problem.splits.train.tensors[0].shape[1]
        perceptron: dict[str, Any] = {"hidden_dims": [50], "dist_family": "normal"}
        if method == "vi":
            return bayesian_mlp(columns, 1, num_samples=DRAWS, **perceptron)
        rate = DROPOUT if method == "dropout" else 0.0
        net: nn.Module = mlp(columns, 1, dropout_rate=rate, **perceptron)
    else:
        net = problem.net()
    if method == "vi":
        replace_layers(net, _bayes_linear, _bayes_conv2d)
        return StochasticModel(net, num_samples=DRAWS)
    if method == "ensemble":
        return deep_ensembles(net, num_estimators=MEMBERS, task=task, probabilistic=regression)
    if method == "dropout":
        net = net if regression else with_dropout(net)
        return mc_dropout(net, DRAWS, on_batch=False, task=task, probabilistic=regression)
    return SWAG(net, cycle_start=int(0.75 * problem.epochs), cycle_length=1)


def _bayes_linear(layer: nn.Linear) -> nn.Module:
    from torch_uncertainty.layers.bayesian import BayesLinear

    return BayesLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)


def _bayes_conv2d(layer: nn.Conv2d) -> nn.Module:
    from torch_uncertainty.layers.bayesian import BayesConv2d

    return BayesConv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, stride=layer.stride,
        padding=layer.padding, dilation=layer.dilation, groups=layer.groups,
        bias=layer.bias is not None,
    )  # fmt: skip


# ---------------------------------------------------------------- lightning-uq-box


def lightning_uq_box(method: str, problem: Problem) -> tuple[Callable[[], None], Predict]:
    from lightning.pytorch import LightningDataModule, Trainer
    from lightning_uq_box import uq_methods

    regression = problem.task == "regression"
    loss: nn.Module = uq_methods.NLL() if regression else nn.CrossEntropyLoss()
    more = {"burnin_epochs": problem.epochs // 10} if regression else {}
    kind = "Regression" if regression else "Classification"
    if method == "vi":
        make = getattr(uq_methods, f"BNN_VI_ELBO_{kind}")
        module = make(problem.net(), criterion=loss, **more)
    else:
        make = getattr(uq_methods, f"MCDropout{kind}")
        module = make(with_dropout(problem.net()), DRAWS, loss, **more)
    rows = problem.data()
    rows.setup()

    class Dictionaries(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return _dictionaries(rows.train_dataloader(), shuffle=True)

        def val_dataloader(self) -> DataLoader:
            return _dictionaries(rows.val_dataloader())

    trainer = Trainer(
        max_epochs=problem.epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    def train() -> None:
        trainer.fit(module, Dictionaries())
        module.eval()
        if method == "dropout":
            module.activate_dropout()

    draws = module.hparams.get("num_mc_samples_test", DRAWS)

    @torch.no_grad()
    def predict(inputs: Tensor) -> Predictive:
        outputs = torch.stack([module(inputs) for _ in range(draws)])
        if regression:  # a mean and the logarithm of a variance
            return GaussianPredictive(outputs[..., :1], outputs[..., 1:].div(2).exp())
        return CategoricalPredictive(outputs)

    return train, predict


def _dictionaries(loader: DataLoader, shuffle: bool = False) -> DataLoader:
    """The same rows in batches as lightning-uq-box wants them."""

    def collate(batch: Any) -> dict[str, Tensor]:
        inputs, targets = loader.collate_fn(batch)
        return {"input": inputs, "target": targets}

    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, shuffle=shuffle, collate_fn=collate
    )


def _peer(library: Any, method: str, *tasks: str) -> Peer:
    distribution = library.__name__.replace("_", "-")
    more = {"tasks": tasks} if tasks else {}
    return Peer(distribution, library.__name__, partial(library, method), **more)


PEERS: dict[str, Peer] = {
    "tu-vi": _peer(torch_uncertainty, "vi"),
    "tu-ensemble": _peer(torch_uncertainty, "ensemble"),
    "tu-dropout": _peer(torch_uncertainty, "dropout"),
    "tu-swag": _peer(torch_uncertainty, "swag", "classification"),
    "uq-vi": _peer(lightning_uq_box, "vi"),
    "uq-dropout": _peer(lightning_uq_box, "dropout"),
}
