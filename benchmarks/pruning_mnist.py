"""Weight pruning by signal-to-noise on MNIST, beside table 2 of Blundell et al. (2015).

``python -m benchmarks.pruning_mnist --data-dir DIR`` trains a ReLU network 784-1200-1200-10 (2.4
million weights) by mean-field variational inference, removes growing shares of its weights, those
of the smallest |mean|/sd first, and prints the test error of what is left beside the published
figures. No data augmentation. Predictions are mixtures of draws.

The prior is a Student-t of few degrees of freedom and a small scale, close to p(w) ∝ 1/|w|: it
pulls weights that are not needed to zero and leaves large ones alone. The posterior is cold, and
inputs and hidden units are dropped at random while training, not when predicting.

All settings come from trials on the last 10,000 training images, with the 50,000 others as training
data (``--validation``). An interrupted run goes on from the last checkpoint in ``--run``.

Bars: an error of at most 1.35 % with nothing removed, at most 0.10 points more with 95 % removed,
and at most 0.20 more with 98 %.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from benchmarks.options import versions, write
from benchmarks.uci import without_place
from lightning_bnn import Posterior, VariationalBNN
from lightning_bnn.data import MNIST
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.nets import MLP
from lightning_bnn.priors import StudentT
from lightning_bnn.pruning import PruneCurve, prune, prune_curve
from lightning_bnn.pruning.command import stored_bytes

__all__ = ["main"]

# test error in per cent by the share removed, after 600 epochs
PUBLISHED = {0.0: 1.24, 0.5: 1.24, 0.75: 1.24, 0.95: 1.29, 0.98: 1.39}
AT_MOST = 1.35
MORE_AT_MOST = {0.95: 0.10, 0.98: 0.20}
PRIOR_SCALE = 1e-3
DEGREES_OF_FREEDOM = 0.2
TEMPERATURE = 0.04
INITIAL_SCALE = 0.01
LEARNING_RATE = 1.5e-3
BATCH_SIZE = 256
INPUT_DROPOUT = 0.2
DROPOUT = 0.25
EPOCHS = 80


def make_network(input_dropout: float, dropout: float) -> nn.Module:
    """The network with He initialisation and biases of zero, and dropout while it trains."""
    layers: list[nn.Module] = [nn.Dropout(input_dropout)]
    for module in MLP(784, [1200, 1200], 10):
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
        layers.append(module)
        if isinstance(module, nn.ReLU):
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def make_strategy(options: argparse.Namespace, steps: int) -> VariationalBNN:
    return VariationalBNN(
        make_network(options.input_dropout, options.dropout),
        Categorical(),
        StudentT(0.0, options.prior_scale, options.degrees_of_freedom),
        temperature=options.temperature,
        initial_scale=options.initial_scale,
        optimizer=partial(Adam, lr=options.learning_rate, fused=True),
        scheduler=partial(CosineAnnealingLR, T_max=steps),
        scheduler_interval="step",
        seed=options.seed,
    )


def train(options: argparse.Namespace, data: MNIST) -> tuple[Posterior, bool]:
    """Fit, going on from a checkpoint where there is one. Was there one?"""
    pl.seed_everything(options.seed, verbose=False)
    bnn = make_strategy(options, options.epochs * len(data.train_dataloader()))
    keep = ModelCheckpoint(options.run, "fit", every_n_epochs=5, enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        precision=options.precision,
        logger=False,
        limit_val_batches=0,
        callbacks=[keep],
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    last = options.run / "fit.ckpt"
    resumed = last.exists()
    trainer.fit(bnn, data, ckpt_path=str(last) if resumed else None)
    return bnn.posterior(), resumed


def error(curve: PruneCurve, place: int) -> float:
    """The error of one result in per cent."""
    return 100 * (1 - curve.results[place].scores["accuracy"])


def print_table(curve: PruneCurve) -> None:
    print("\nremoved   weights left   error %   published %   NLL      ECE")
    for place, result in enumerate(curve.results):
        print(
            f"{result.fraction:7.0%}   {result.remaining:12,}   {error(curve, place):7.2f}   "
            f"{PUBLISHED[result.fraction]:11.2f}   {result.scores['nll']:.4f}   "
            f"{result.scores['ece']:.4f}"
        )


def judge(errors: dict[float, float]) -> dict[str, bool]:
    """Which bars hold.

    >>> judge({0.0: 1.30, 0.95: 1.42, 0.98: 1.45})
    {'0%': True, '95%': False, '98%': True}
    """
    verdict = {"0%": errors[0.0] <= AT_MOST}
    for share, more in MORE_AT_MOST.items():
        # errors are whole numbers of test images: no difference is lost to rounding
        verdict[f"{share:.0%}"] = round(errors[share] - errors[0.0], 6) <= more
    return verdict


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pruning_mnist",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR",
        help="the folder that holds MNIST/raw (default $LIGHTNING_BNN_DATA/mnist)",
    )  # fmt: skip
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--prior-scale", type=float, default=PRIOR_SCALE)
    parser.add_argument("--initial-scale", type=float, default=INITIAL_SCALE)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--input-dropout", type=float, default=INPUT_DROPOUT)
    parser.add_argument("--dropout", type=float, default=DROPOUT, help="of hidden units")
    parser.add_argument("--degrees-of-freedom", type=float, default=DEGREES_OF_FREEDOM)
    parser.add_argument(
        "--precision", default="bf16-mixed",
        help="the trainer's; 32-true where the processor has no fast bfloat16",
    )  # fmt: skip
    parser.add_argument("--draws", type=int, default=64, help="draws of a prediction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--validation", action="store_true",
        help="train on 50,000 images and measure on the 10,000 others, not on the test images",
    )  # fmt: skip
    parser.add_argument(
        "--run", type=Path, default=Path("runs/pruning_mnist"), metavar="DIR",
        help="where the checkpoint and the posteriors go, and where a run goes on",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "draws"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, prune, print the table, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    warnings.simplefilter("ignore")  # Lightning's advice on loaders
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = MNIST(
        options.data_dir,
        batch_size=options.batch_size,
        validation=10_000 if options.validation else 0,
        normalise=False,
        flatten=True,
    )
    try:
        data.setup("fit")
    except ConfigurationError as problem:
        raise SystemExit(f"benchmarks.pruning_mnist: {problem}") from problem
    begin = time.perf_counter()
    posterior, resumed = train(options, data)
    seconds = time.perf_counter() - begin
    measured = data.val_dataloader() if options.validation else data.test_dataloader()
    # large batches: so many draws are not kept from one to the next
    loader = DataLoader(measured.dataset, batch_size=2000, collate_fn=measured.collate_fn)
    curve = prune_curve(posterior, loader, tuple(PUBLISHED), draws=options.draws)
    curve.save(options.run / "curve.png")
    print_table(curve)
    errors = {result.fraction: error(curve, i) for i, result in enumerate(curve.results)}
    verdicts = judge(errors)
    for bar, held in verdicts.items():
        print(f"{'pass' if held else 'FAIL'}  error with {bar} removed")
    sizes: dict[str, Any] = {}
    for share in (0.0, *MORE_AT_MOST):
        folder = options.run / f"posterior_{share:.0%}".rstrip("%")
        prune(posterior, share).save(folder)
        sizes[f"{share:.0%}"] = stored_bytes(folder)
    dense = sizes["0%"]
    for share, size in sizes.items():
        print(f"on disk with {share} removed: {size:,} bytes ({size / dense:.1%})")
    result = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions(["lightning-bnn"]),
        "settings": {
            name: getattr(options, name)
            for name in (
                *("epochs", "batch_size", "learning_rate", "prior_scale", "initial_scale"),
                *("temperature", "degrees_of_freedom", "input_dropout", "dropout", "precision"),
                *("draws", "seed", "validation"),
            )
        },
        "seconds": round(seconds, 1),
        "went_on_from_a_checkpoint": resumed,  # then the seconds are of the rest only
        "errors": {f"{share:.0%}": round(value, 4) for share, value in errors.items()},
        "published": {f"{share:.0%}": value for share, value in PUBLISHED.items()},
        "bars_hold": verdicts,
        "bytes_on_disk": sizes,
        "curve": curve.to_dict(),
    }
    write(options.json, "pruning_mnist", without_place(arguments), result)


if __name__ == "__main__":
    main()
