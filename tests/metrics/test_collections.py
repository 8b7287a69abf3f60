"""The contract of every metric: adds up, resets, syncs over processes."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torchmetrics import MetricCollection

from lightning_bnn.metrics import classification_metrics, regression_metrics
from lightning_bnn.predictive import (
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
    Predictive,
)


def batch(kind: str, size: int, seed: int) -> tuple[Predictive, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "classification":
        logits = torch.randn(3, size, 4, generator=generator)
        return CategoricalPredictive(logits), torch.randint(4, (size,), generator=generator)
    outputs = torch.randn(3, size, 2, generator=generator)
    if kind == "regression":
        targets = torch.randn(size, 2, generator=generator)
        return GaussianPredictive(outputs, torch.tensor([0.5, 2.0])), targets
    return PoissonPredictive(outputs), torch.randint(5, (size, 2), generator=generator)


MAKE = {
    "classification": classification_metrics,
    "regression": regression_metrics,
    "count": regression_metrics,
}


def values(metrics: MetricCollection) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.compute().items()}


def whole(kind: str) -> dict[str, float]:
    first, second = batch(kind, 9, 0), batch(kind, 4, 1)
    metrics = MAKE[kind]()
    metrics.update(Predictive.concatenate([first[0], second[0]]), torch.cat([first[1], second[1]]))
    return values(metrics)


@pytest.mark.parametrize("kind", MAKE)
class TestEveryCollection:
    def test_batches_add_up_and_reset(self, kind):
        metrics = MAKE[kind]()
        metrics.update(*batch(kind, 9, 0))
        metrics.update(*batch(kind, 4, 1))
        assert values(metrics) == pytest.approx(whole(kind), rel=1e-5)
        metrics.reset()
        metrics.update(*batch(kind, 4, 1))
        fresh = MAKE[kind]()
        step = {name: value.item() for name, value in fresh(*batch(kind, 4, 1)).items()}
        assert values(metrics) == values(fresh) == pytest.approx(step)

    def test_states_reduce(self, kind):
        """What synchronising does, without processes: the states of two metrics joined."""
        first, second = MAKE[kind](), MAKE[kind]()
        first.update(*batch(kind, 9, 0))
        second.update(*batch(kind, 4, 1))
        for name, metric in first.items():
            metric.merge_state(second[name])
        assert values(first) == pytest.approx(whole(kind), rel=1e-5)


def test_equal_first_batch_does_not_merge_metrics():
    """A first batch on which two scores agree must not tie them together for ever."""
    metrics = classification_metrics()
    sure_and_right = CategoricalPredictive(torch.tensor([[[200.0, 0, 0, 0]]])), torch.tensor([0])
    metrics.update(*sure_and_right)
    assert values(metrics)["nll"] == values(metrics)["brier"] == 0
    metrics.update(*batch("classification", 9, 0))
    assert values(metrics)["nll"] != pytest.approx(values(metrics)["brier"], rel=0.1)


def worker(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    for kind in MAKE:
        metrics = MAKE[kind]()
        metrics.update(*batch(kind, (9, 4)[rank], rank))
        torch.save(values(metrics), f"{folder}/{kind}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_batches_of_different_sizes(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    for kind in MAKE:
        for rank in range(2):
            synced = torch.load(tmp_path / f"{kind}-{rank}.pt")
            assert synced == pytest.approx(whole(kind), rel=1e-5)
