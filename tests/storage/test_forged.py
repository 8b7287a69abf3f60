"""Files as a stranger could write them, hashes and all: an error of this package, and soon.

Every field of every kind of manifest and record is replaced by values that it cannot have, left
out, or accompanied by another. What is read then is either a posterior that predicts, or an error
that says what is wrong; never one of Python's or of torch's own, which nobody could act on.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from lightning_bnn import Posterior
from lightning_bnn.commands.status import main as status
from lightning_bnn.dropout import inserted_layers
from lightning_bnn.errors import LightningBNNError, PosteriorFormatError
from lightning_bnn.launch import load_run
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import (
    AveragePosterior,
    DrawsPosterior,
    DropoutPosterior,
    Evidence,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
)
from lightning_bnn.posteriors.draws import create_stream
from lightning_bnn.storage.files import open_directory
from lightning_bnn.storage.manifest import encode
from lightning_bnn.storage.stream import DrawStream

ROOT = "memory://forged"
deep: Any = 1
for _ in range(300):
    deep = [deep]
BAD = [None, "", "x", "../..", -1, 1.5, 1e308, 2**70, True, [], {}, [[]], {"x": {}}, deep]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def weights(lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {name: torch.rand(*lead, *p.shape) for name, p in net().named_parameters()}


def gaussian(scale: float = 0.1) -> GaussianPosterior:
    return GaussianPosterior(net(), Gaussian(scale, learn=True), weights(), weights())


def low_rank() -> LowRankPosterior:
    return LowRankPosterior(net(), Gaussian(0.1), weights(), weights(), weights((3,)), scale=0.5)


def draws() -> DrawsPosterior:
    last = {"2.weight", "2.bias"}
    sets = [{k: v for k, v in weights().items() if k in last} for _ in range(4)]
    sets[0]["2.weight"] = sets[0]["2.weight"] * 0
    return DrawsPosterior(net(), Gaussian(0.1), sets, chains=2)


def dropout() -> DropoutPosterior:
    return DropoutPosterior(net(), Gaussian(0.1), inserted_layers(net(), None, 0.2))


def average() -> AveragePosterior:
    made = AveragePosterior([gaussian(), dropout()], [0.25, 0.75])
    made.components[0].evidence = Evidence(-1.5, 0.1, "AIS")
    return made


def compact() -> GaussianPosterior:
    posterior = gaussian()
    larger = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    posterior.pruned_from = [[name, list(p.shape)] for name, p in larger.named_parameters()]
    return posterior


SAVED: dict[str, Callable[[], Posterior]] = {
    "gaussian": gaussian,
    "low rank": low_rank,
    "draws": draws,
    "compact": compact,
    "dropout": dropout,
    "average": average,
    "mixture": lambda: MixturePosterior([gaussian(), MixturePosterior([draws(), low_rank()])]),
}


def save_stream(folder: str) -> None:
    stream = create_stream(folder, net(), Gaussian(0.1, learn=True), weights((2,)))
    for step in (1, 2):
        stream.append(step, weights((2,)), Gaussian(0.1, learn=True).state_dict(), {"epoch": 0})
    stream.end()


def save_run(folder: str) -> None:
    records = RunRecords(folder)
    records.begin({"units": [[0, 1], [2]], "seed": 0})
    for unit in records.units():
        records.grant(unit, 1)
        place = f"{records.folder(unit, 1)}/draws"
        if len(unit.members) == 2:
            save_stream(place)
            places: Any = {
                str(id): {"place": "attempt-0001/draws", "chain": row}
                for row, id in enumerate(unit.members)
            }
        else:
            gaussian().save(f"{records.folder(unit, 1)}/posterior-00002")
            places = {"2": {"place": "attempt-0001/posterior-00002"}}
        result = {"members": {"posterior": places}, "attempt": 1, "metrics": {"loss": 0.5},
                  "steps": 3, "seconds": 1.0, "host": "h", "node": "n"}  # fmt: skip
        records.commit(unit, 1, result)


def use_posterior(folder: str) -> None:
    Posterior.load(folder).predict(torch.zeros(1, 2), 2)


def use_run(folder: str) -> None:
    run = load_run(folder)
    run.results()
    for unit in run.units():
        run.records.granted(unit)
    run.posterior(net()).predict(torch.zeros(1, 2), 2)


STREAM = ["manifest.json", "records/000000000001.json", "end.json"]
RUN = ["run.json", "units/00000/commit.json", "units/00000/lease.json"]
CASES: dict[str, tuple[Callable[[str], None], Callable[[str], None], list[str]]] = {
    **{
        name: (lambda folder, make=make: make().save(folder), use_posterior, ["manifest.json"])  # type: ignore[misc]
        for name, make in SAVED.items()
    },
    "stream": (save_stream, use_posterior, STREAM),
    "run": (save_run, use_run, RUN),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside of a JSON value; of lists, to the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in sorted({0, len(value) - 1}):
            yield from places(value[index], (*path, index))


def changed(body: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    made = copy.deepcopy(body)
    inside = made
    for key in path[:-1]:
        inside = inside[key]
    change(inside, path[-1])
    return made


def forgeries(body: Any, each: int) -> Iterator[tuple[str, Any]]:
    """With so many bad values for each field, other ones from field to field."""
    values = cycle(BAD)
    for path in places(body):
        for bad in islice(values, each):
            yield f"{path} = {bad!r:.20}", changed(body, path, _setting(bad))
        yield f"{path} left out", changed(body, path, operator.delitem)
    yield "and another", {**body, "another": 1}


def _setting(value: Any) -> Callable[[Any, Any], None]:
    return lambda inside, key: operator.setitem(inside, key, value)


@pytest.mark.filterwarnings("ignore:.*snapshots of the draws")  # what is lost is told of
@pytest.mark.filterwarnings("ignore:The posterior of the run")
@pytest.mark.parametrize(
    "each", [1, pytest.param(len(BAD), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("name", CASES)
def test_every_field_of_every_file(name: str, each: int) -> None:
    save, use, files = CASES[name]
    folder = f"{ROOT}/{name.replace(' ', '-')}"
    save(folder)
    use(folder)
    memory, count, refused, slowest = open_directory(folder), 0, 0, 0.0
    for file in files:
        good = memory.get(file)
        body = json.loads(good or b"")
        del body["sha256"]
        for what, forged in forgeries(body, each):
            if json.dumps(forged) == json.dumps(body):
                continue
            memory.file_system.pipe_file(f"{memory.root}/{file}", encode(forged))
            start = time.perf_counter()
            try:
                use(folder)
            except LightningBNNError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{file}: {what}: {type(error).__name__}: {error}") from error
            slowest = max(slowest, time.perf_counter() - start)
            count += 1
        memory.file_system.pipe_file(f"{memory.root}/{file}", good)
    assert count >= 30 * each
    assert refused > 0.4 * count  # others, as versions of packages, are not believed either
    assert slowest < 10
    fsspec.filesystem("memory").rm("/forged", recursive=True)


def forge(file: Path, path: tuple[Any, ...], value: Any) -> None:
    body = json.loads(file.read_bytes())
    del body["sha256"]
    file.write_bytes(encode(changed(body, path, _setting(value))))


LAYERS = {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}
NETWORK, FILE = ("fields", "network"), ("blobs", 0, "file")
LARGE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a number of 5,600 digits": ((*NETWORK, 0, 1), [2**62] * 300),
    "a product of a million numbers": ((*NETWORK, 0, 1), [2**62] * 10**6),
    "a long name": (FILE, "a" * 5000 + "-0123456789abcdef.safetensors"),
    "tensors without end": (NETWORK, [["x", []]] * 10**5),
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_is_large_is_refused_soon(kind: str, tmp_path: Path) -> None:
    gaussian().save(tmp_path)
    if kind == "tensors without end":  # and a network of as many
        recipe = {"of": "torch.nn.LSTM", "with": LAYERS}
        forge(tmp_path / "manifest.json", ("fields", "recipe"), recipe)
    forge(tmp_path / "manifest.json", *LARGE[kind])
    start = time.perf_counter()
    with pytest.raises(PosteriorFormatError):
        use_posterior(str(tmp_path))
    assert time.perf_counter() - start < 10


def test_a_blob_is_not_read_for_two(tmp_path: Path) -> None:
    gaussian().save(tmp_path)
    blobs = json.loads((tmp_path / "manifest.json").read_bytes())["blobs"]
    again = {**blobs[0], "name": "another"}
    forge(tmp_path / "manifest.json", ("blobs",), [*blobs, again])
    with pytest.raises(PosteriorFormatError, match="names a blob twice"):
        use_posterior(str(tmp_path))


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaussian().save(tmp_path)
    monkeypatch.chdir(tmp_path)
    os.unlink("manifest.json")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("manifest.json")
        with pytest.raises(PosteriorFormatError, match="is not a file"):
            use_posterior(str(tmp_path))


COMMIT = "attempt", "metrics", "own_metrics", "steps", "seconds", "host", "node", "device", "asked"


@pytest.mark.parametrize("field", COMMIT)
def test_status_of_any_commit(field: str, tmp_path: Path) -> None:
    save_run(str(tmp_path))
    commit = tmp_path / "units" / "00000" / "commit.json"
    good = commit.read_bytes()
    for bad in [*BAD[:-1], {"train_loss": "x"}, {"0": 3}, float("nan")]:
        commit.write_bytes(good)
        forge(commit, ("result", field), bad)
        for words in ([], ["--json"]):
            with suppress(LightningBNNError):
                status(["--storage", str(tmp_path), *words])


def test_a_commit_is_of_the_members_of_its_unit(tmp_path: Path) -> None:
    save_run(str(tmp_path))
    commit = tmp_path / "units" / "00002" / "commit.json"
    place = {"place": "attempt-0001/posterior-00002"}
    posterior = "result", "members", "posterior"
    forge(commit, posterior, {"2": {**place, "chain": 0}})
    with pytest.raises(PosteriorFormatError, match="holds no chains"):
        load_run(tmp_path).posterior(net())
    forge(commit, posterior, dict.fromkeys(map(str, range(10**4)), place))
    with pytest.raises(PosteriorFormatError, match="no member of"):
        load_run(tmp_path).posterior(net())


def test_places_outside_of_a_run_are_not_read(tmp_path: Path) -> None:
    save_run(str(tmp_path / "run"))
    gaussian().save(tmp_path / "else")
    commit = tmp_path / "run" / "units" / "00002" / "commit.json"
    body = json.loads(commit.read_bytes())
    del body["sha256"]
    places = ["../../../else", "../../..", "../..", "..", "attempt-0001/../../../../else",
              str(tmp_path / "else"), "attempt-0001", "attempt-0001/..",
              "attempt-0001/a/b"]  # fmt: skip
    for place in places:
        body["result"]["members"]["posterior"]["2"]["place"] = place
        commit.write_bytes(encode(body))
        with pytest.raises(PosteriorFormatError, match="place is expected to be"):
            load_run(tmp_path / "run").posterior(net())


# what is no file, or a file of another size than it says


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(40 * 2**30)


STRANGE: dict[str, Callable[[Path], None]] = {
    "40 GB": sparse,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.filterwarnings("ignore:.*snapshots of the draws", "ignore:The posterior of the run")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_of_that_size_is_not_read(kind: str, tmp_path: Path) -> None:
    save_stream(str(tmp_path / "s"))
    gaussian().save(tmp_path / "p")
    save_run(str(tmp_path / "r"))
    uses = {"s": use_posterior, "p": use_posterior, "r": use_run}
    paths = [
        path
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and "lock" not in path.name and "attempt" not in str(path)
    ]
    assert len(paths) > 10
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in paths:
        kept = path.rename(tmp_path / "kept")
        STRANGE[kind](path)
        try:
            use = path.relative_to(tmp_path).parts[0]
            with suppress(LightningBNNError, OSError):  # a folder is a record that is missing
                uses[use](str(tmp_path / use))
                assert kind == "folder", path
        finally:
            path.rmdir() if kind == "folder" else path.unlink()
            kept.rename(path)
    assert time.perf_counter() - start < 10
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in kilobytes
    assert grown < 600_000


def test_a_blob_that_was_altered_after_it_was_read_is_not_used(tmp_path: Path) -> None:
    stream = create_stream(tmp_path, net(), Gaussian(0.1), weights((1,)))
    for step in (1, 2):
        stream.append(step, weights((1,)))
    posterior = Posterior.load(tmp_path)
    expected = posterior.sample(2)["2.bias"]
    blob = next(tmp_path.glob("blobs/draw-000000000001-*"))
    good = blob.read_bytes()
    os.utime(blob)  # touched, but the same
    assert torch.equal(posterior.sample(2)["2.bias"], expected)
    times = blob.stat()
    blob.write_bytes(good[:-4] + b"\0\0\0\0")
    os.utime(blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(PosteriorFormatError, match="is damaged"):
        posterior.sample(2)
    blob.write_bytes(good)
    assert torch.equal(posterior.sample(2)["2.bias"], expected)


# what is lost


@pytest.mark.parametrize("lost", [1, 7, 13])
def test_a_lost_record_is_missed(lost: int, tmp_path: Path) -> None:
    stream = create_stream(tmp_path, net(), Gaussian(0.1), weights((2,)))
    for step in range(1, 14):
        stream.append(step, weights((2,)))
    assert len(Posterior.load(tmp_path)) == 26  # of a fit that has not ended
    stream.end()
    assert len(Posterior.load(tmp_path)) == 26
    (tmp_path / "records" / f"{lost:012d}.json").unlink()
    with pytest.warns(UserWarning, match=rf"12 of 13 snapshots.*numbers {lost - 1} \(from 0\)"):
        assert len(Posterior.load(tmp_path)) == 24
    again = DrawStream.open(tmp_path, last_step=lost - 1)  # a fit that resumes before it
    again.truncate(lost - 1)
    assert len(DrawStream.open(tmp_path)) == lost - 1
    again.append(lost, weights((2,)))
    assert len(DrawStream.open(tmp_path)) == lost


def test_a_lost_commit_is_missed(tmp_path: Path) -> None:
    save_run(str(tmp_path))
    assert len(load_run(tmp_path).posterior(net()).components) == 3
    (tmp_path / "units" / "00002" / "commit.json").unlink()
    with pytest.warns(UserWarning, match=r"is of 2 of 3 members; none is there of 2\."):
        assert len(load_run(tmp_path).posterior(net()).components) == 2


def test_a_reader_beside_writers_gets_one_posterior_or_the_other(tmp_path: Path) -> None:
    made, stop = [gaussian(), low_rank()], threading.Event()
    made[0].save(tmp_path)

    def write(posterior: Posterior) -> None:
        while not stop.is_set():
            posterior.save(tmp_path)

    writers = [threading.Thread(target=write, args=[posterior]) for posterior in made]
    for writer in writers:
        writer.start()
    try:
        kinds = {type(Posterior.load(tmp_path)) for _ in range(150)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert kinds <= {GaussianPosterior, LowRankPosterior}


def test_a_stream_of_a_large_network_makes_it(tmp_path: Path) -> None:
    """What it holds is in the blobs of its draws, not in those that its head names."""
    large = nn.Sequential(nn.Linear(1100, 1000))
    given = {name: p.detach()[None] for name, p in large.named_parameters()}
    stream = create_stream(tmp_path, large, Gaussian(0.1), given)
    stream.append(1, given)
    assert len(Posterior.load(tmp_path)) == 1
