"""Records and posteriors on a real S3 server, a process of its own on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from lightning_bnn.errors import ConfigurationError, FencedError
from lightning_bnn.launch import Attempt, load_run
from lightning_bnn.launch.member import run_attempt
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.files import open_directory
from tests.launch.programs import fit_by_hand, make_data, make_ensemble, make_net, same_weights
from tests.launch.s3_server import BUCKET, s3_server

pytest.importorskip("s3fs", reason="s3fs is not installed (the extra 's3')")
pytest.importorskip("moto", reason="moto is not installed (the extra 'test')")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield f"s3://{BUCKET}"


@pytest.fixture
def storage(bucket: str) -> str:
    return f"{bucket}/{uuid4()}"


def test_one_of_many_creates(storage: str) -> None:
    def create(number: int) -> bool:
        return open_directory(storage).create("folder/one", f"writer {number}".encode())

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(create, range(8)))
    assert sum(told) == 1
    assert open_directory(storage).get("folder/one") == f"writer {told.index(True)}".encode()


def test_a_zombie_cannot_commit(storage: str) -> None:
    records, unit = RunRecords(storage), Unit((0,))
    records.begin({"units": [[0]], "seed": 0})
    records.grant(unit, 1)
    records.grant(unit, 2)
    with pytest.raises(FencedError, match="attempt 2 has taken its place"):
        records.commit(unit, 1, {})
    records.commit(unit, 2, {"loss": 1.0})
    records.grant(unit, 3)
    with pytest.raises(FencedError, match="attempt 2 has done so before"):
        records.commit(unit, 3, {"loss": 2.0})
    assert RunRecords(storage).committed(unit) == {"attempt": 2, "result": {"loss": 1.0}}
    with pytest.raises(ConfigurationError, match="seed=0; this one has seed=1"):
        records.begin({"units": [[0]], "seed": 1})


def test_an_attempt_from_beginning_to_posterior(storage: str) -> None:
    records, unit = RunRecords(storage), Unit((0,))
    records.begin({"units": [[0]], "seed": 0})
    records.grant(unit, 1)
    recipe = Factories(make_ensemble, make_data, {"max_epochs": 3})
    # a checkpoint after each batch: they go through S3 too
    run_attempt(recipe, Attempt(storage, unit, 1, checkpoint_seconds=0))
    posterior = load_run(storage).posterior(make_net())
    by_hand = fit_by_hand(make_ensemble, 0, max_epochs=3)
    assert same_weights(posterior, by_hand)
    assert not open_directory(f"{records.folder(unit, 1)}/checkpoints").names()
