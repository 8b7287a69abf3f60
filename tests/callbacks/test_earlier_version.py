"""A checkpoint of version 0.1, with the state of callbacks as it was written there, is resumed.

``before/callbacks.ckpt`` was saved after step 30 of 48, before the callbacks had their turn, and
``before/end.pt`` is what they had at the end of that fit.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.likelihoods import Gaussian
from tests.callbacks.fits import Plain, fit, loader

BEFORE = Path(__file__).parent / "before"


def test_callbacks_resume_from_a_checkpoint_of_an_earlier_version() -> None:
    likelihood = Gaussian(0.5)
    swag = SWAGMoments(0.5, rank=3, lr=0.02, every_n_steps=3, net="body", likelihood=likelihood)
    collector = SampleCollector(burn_in=4, every=5, refresh_batch_norm=2)
    checkpoint, batches = BEFORE / "callbacks.ckpt", loader(shuffle=False)
    fit(Plain(), swag, collector, ckpt=checkpoint, batches=batches, max_epochs=8)
    end = torch.load(BEFORE / "end.pt")
    moments, draws = swag.moments, collector.posterior(likelihood)
    assert (swag.snapshots, collector.steps) == (8, end["steps"])
    torch.testing.assert_close(moments.mean, end["mean"])
    torch.testing.assert_close(moments.variance, end["variance"])
    torch.testing.assert_close(torch.stack(moments.deviations), end["deviations"])
    for name, tensor in draws.sample(len(draws)).items():
        torch.testing.assert_close(tensor, end["draws"][name])
