"""Write the files of version 0.1.0 that ``test_files.py`` loads.

Run with version 0.1.0; kept to say how the files were made::

    git checkout <the release> && python -m tests.release_0_1.make

Later versions must load these files and must not write them anew.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_bnn import GaussianPosterior, Posterior
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import LaunchError
from lightning_bnn.launch import StoredRun, launch
from lightning_bnn.likelihoods import Bernoulli, Poisson
from tests.release_0_1 import cases
from tests.release_0_1.cases import (
    EXPECTED,
    FILES,
    FITS,
    POSTERIORS,
    Fit,
    mean_weights,
    predictions,
)


class Saver(pl.Callback):
    """Save one checkpoint in the midst of a fit."""

    def __init__(self, path: Path, fit: Fit) -> None:
        self.path, self.fit = path, fit

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.fit.saved_at and not self.fit.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == self.fit.saved_at and self.fit.at_epoch_end:
            trainer.save_checkpoint(self.path)


def make_fit(name: str, fit: Fit) -> dict[str, Tensor]:
    """Fit, save in the midst; what the undisturbed run gave, and the posteriors that it left."""
    path = FILES / f"{name}.ckpt"
    module, callbacks = fit.run(FILES, saver=Saver(path, fit))
    posteriors = {
        "variational": "gaussian", "hmc": "draws", "optimizers": "ensemble",
        "snapshots": "batch_norm", "multi_swag": "multi_swag", "plain_swag": "low_rank",
    }  # fmt: skip
    if name in posteriors:
        source: Any = next((c for c in callbacks if isinstance(c, SWAGMoments)), module)
        source.posterior().save(FILES / posteriors[name])
    found = fit.end(module, callbacks)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == fit.saved_at
    assert checkpoint["callbacks"].keys() == {one.state_key for one in callbacks}
    if fit.module is not cases.Plain:
        loaded: Any = fit.module.load_from_checkpoint(path, **fit.options())
        found |= {f"loaded_{key}": t for key, t in predictions(loaded.posterior()).items()}
    (FILES / f"{name}.ckpt.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    return {f"fit.{name}.{key}": tensor for key, tensor in found.items()}


def make_pruned() -> None:
    """Posteriors that were pruned, by single weights and by whole neurons."""
    for name, likelihood in (("sparse", Bernoulli()), ("compact", Poisson())):
        net = POSTERIORS[name]()
        mean = {key: p.detach() for key, p in net.named_parameters()}
        sd = {key: 0.1 + p.square() for key, p in mean.items()}
        posterior = GaussianPosterior(net, likelihood, mean, sd)
        if name == "sparse":
            posterior.pruned(0.997).save(FILES / name)
        else:
            posterior.pruned(0.5, unit="channel").compact().save(FILES / name)


class Breaking(pl.Callback):
    """Move the weights, which only a resumed run can know of, and end the fit by an error."""

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == 1:
            trainer.lightning_module.weights.data += 0.5
        if trainer.global_step == 3:
            raise RuntimeError("broken on purpose")


def make_launched() -> dict[str, Tensor]:
    """The storage of two launched runs, and of one that was broken off; what that one gave then."""
    import ray  # an optional extra

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False,
    )  # fmt: skip
    members, chains = cases.launched_trainer(), cases.launched_trainer()
    chains["callbacks"] = [SampleCollector(dirpath="draws")]
    start = partial(launch, make_datamodule=cases.launched_data, allow_open_cluster=True)
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/members"
        start(cases.launched_members, members=2, storage=place, trainer=members).wait()
        place = f"{folder}/chains"
        start(cases.launched_chains, members=2, stack=2, storage=place, trainer=chains).wait()
        place = f"{folder}/broken"
        broken = cases.launched_trainer()
        broken["callbacks"].append(Breaking())
        run = start(
            cases.launched_members, members=1, storage=place, trainer=broken, retries=0,
            checkpoint_seconds=0,
        )  # fmt: skip
        with suppress(LaunchError):
            run.wait()
        for name in ("members", "chains", "broken"):
            shutil.copytree(f"{folder}/{name}", FILES / f"launched_{name}")
        attempts = FILES / "launched_broken" / "units" / "00000"
        for unneeded in (*attempts.rglob("step-000000002-*"), *attempts.rglob("error.txt")):
            unneeded.unlink()
        run = start(cases.launched_members, members=1, storage=place, trainer=members)
        found = predictions(run.posterior()), predictions(run.posterior(kind="swag"))
    ray.shutdown()
    posterior = {f"launched_broken.{key}": tensor for key, tensor in found[0].items()}
    return posterior | {f"launched_broken.swag_{key}": t for key, t in found[1].items()}


def make(compiled: bool) -> None:
    """Make the fits whose noise is, or is not, of the compiled generator."""
    expected = load_file(EXPECTED) if EXPECTED.exists() else {}
    for name, fit in FITS.items():
        if fit.compiled == compiled:
            expected |= make_fit(name, fit)
    if compiled:
        make_pruned()
        expected |= make_launched()
        for name, net in POSTERIORS.items():
            posterior = Posterior.load(FILES / name, net())
            found = predictions(posterior)
            means = mean_weights(posterior)
            expected |= {f"posterior.{name}.{key}": tensor for key, tensor in found.items()}
            expected |= {f"posterior.{name}.weights.{key}": t for key, t in means.items()}
        run = StoredRun(FILES / "launched_members")
        swag = predictions(run.posterior(cases.mlp(), kind="swag"))
        expected |= {f"launched_swag.{key}": tensor for key, tensor in swag.items()}
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, EXPECTED)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make(sys.argv[1] == "compiled")
    else:
        shutil.rmtree(FILES, ignore_errors=True)
        FILES.mkdir()
        os.environ |= {
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }  # fmt: skip
        for kind, switch in (("plain", "0"), ("compiled", "1")):
            environment = {**os.environ, "LIGHTNING_BNN_COMPILE": switch}
            command = [sys.executable, "-m", "tests.release_0_1.make", kind]
            subprocess.run(command, env=environment, check=True)
        for lock in FILES.rglob(".*lock"):
            lock.unlink()
