"""Draws on the disk as they are taken: whole at each moment, read when asked for, never lost."""

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from lightning_bnn import DrawsPosterior, MixturePosterior, Posterior
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors.draws import create_stream
from lightning_bnn.storage import blobs, files
from lightning_bnn.storage import stream as stream_module
from lightning_bnn.storage.stream import DrawStream
from tests.storage.faults import FullDisk, files_of


def weights(step, chains=2):
    """Each chain's weights are told by their values: step + chain / 10."""
    values = step + torch.arange(chains) / 10
    return {
        "0.weight": values[:, None, None].expand(chains, 4, 3),
        "1.running_mean": values[:, None].expand(chains, 4),
    }


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def stream_of(place, steps=(), likelihood=None, net=None, chains=2):
    net = network() if net is None else net
    stream = create_stream(place, net, likelihood or Gaussian(0.1), weights(0, chains))
    for step in steps:
        stream.append(step, weights(step, chains))
    return stream


def values(draws):
    return [round(draw["0.weight"][0, 0].item(), 3) for draw in draws]


# A posterior at each moment


def test_every_moment_is_a_posterior(place):
    net = network()
    stream = stream_of(place, net=net)
    with pytest.raises(PosteriorFormatError, match="holds no draw yet"):
        Posterior.load(place, network())
    expected = []
    for step in (5, 7, 30):
        stream.append(step, weights(step))
        expected += [step, step + 0.1]
        loaded = Posterior.load(place, network())
        assert type(loaded) is DrawsPosterior
        assert loaded.chains == 2
        assert len(loaded) == loaded.default_draws == len(expected)
        assert values(loaded._draws) == expected
        assert loaded.sample(len(expected))["1.running_mean"][:, 0].tolist() == pytest.approx(
            expected
        )
        # what does not vary is that of the network which the stream was made with
        assert torch.equal(loaded.fixed["0.bias"], net[0].bias)
        assert torch.equal(loaded.fixed["1.weight"], net[1].weight)
    assert stream.steps() == DrawStream.open(place).steps() == [5, 7, 30]
    assert len(stream) == 3


def test_draws_stay_on_the_disk_and_one_blob_is_held(tmp_path, monkeypatch):
    stream_of(tmp_path, range(1, 6))
    read, reads = blobs.read_blob, []

    def noting(*arguments, **options):
        reads.append(arguments[1]["file"][5:17])
        return read(*arguments, **options)

    monkeypatch.setattr(stream_module, "read_blob", noting)
    posterior = Posterior.load(tmp_path, network())
    assert reads == []
    inputs = torch.randn(3, 3)
    posterior.predict(inputs)
    assert [int(step) for step in reads] == [1, 2, 3, 4, 5]  # each once for both chains
    draws = posterior._draws
    held = [value for value in vars(draws).values() if isinstance(value, tuple)]
    assert len(held) == 1
    assert list(held[0][1]) == ["0.weight", "1.running_mean"]
    reads.clear()
    for count in range(1, 40, 7):
        assert posterior.sample(count)["0.weight"].shape[0] == count
    draws[0]["0.weight"].fill_(99.0)  # a copy: the next reader is not disturbed
    assert values(draws) == [step + chain / 10 for step in range(1, 6) for chain in range(2)]
    assert values(draws[2:4]) == [2.0, 2.1]
    assert values([draws[-1]]) == [5.1]
    with pytest.raises(IndexError):
        draws[10]


def test_the_streamed_posterior_predicts_as_one_in_memory(tmp_path):
    net = network()
    stream_of(tmp_path, [1, 2, 3], net=net)
    streamed = Posterior.load(tmp_path, network())
    held = DrawsPosterior(net, Gaussian(0.1), list(streamed._draws), chains=2)
    inputs = torch.randn(6, 3)
    for count in (None, 2, 6, 11):
        expected = held.predict(inputs, draws=count, seed=3).outputs
        assert torch.equal(streamed.predict(inputs, draws=count, seed=3).outputs, expected)


def test_a_hash_is_checked_once(tmp_path, monkeypatch):
    stream_of(tmp_path, [1, 2, 3])
    draws = DrawStream.open(tmp_path).draws()
    digest, hashed = hashlib.sha256, []

    def noting(data=b""):
        hashed.append(len(data))
        return digest(data)

    monkeypatch.setattr(blobs.hashlib, "sha256", noting)
    expected = values(draws)
    assert len(hashed) == 3
    assert values(draws) == values(draws.to("cpu")) == expected
    assert len(hashed) == 3
    assert values(DrawStream.open(tmp_path).draws()) == expected
    assert len(hashed) > 3


def test_several_threads_read_the_right_draws(tmp_path):
    both = threading.Barrier(2, timeout=30)

    class Together(stream_module.StoredDraws):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_last" and value is not None:
                both.wait()  # the other thread has put its own there

    stream = stream_of(tmp_path, [1, 2])
    draws = Together(stream.files, stream.draws()._entries, chains=2)
    with ThreadPoolExecutor(2) as pool:
        assert values(pool.map(draws.__getitem__, [0, 2])) == [1.0, 2.0]


def test_draws_of_chosen_steps(tmp_path):
    likelihood = Gaussian(0.5, learn=True)
    stream = stream_of(tmp_path, likelihood=likelihood)
    for step in (1, 2, 3):
        likelihood.log_scale.data.fill_(-float(step))
        stream.append(step, weights(step), likelihood.state_dict())
    posterior = DrawsPosterior.from_stream(stream, network(), likelihood, steps=[1, 2])
    assert values(posterior._draws) == [1, 1.1, 2, 2.1]
    assert posterior.likelihood.log_scale.item() == -2.0
    for missing in ([4], [1, 4], [4, 1]):
        with pytest.raises(PosteriorFormatError, match="no draws of step 4; it has 3 snapshots"):
            DrawsPosterior.from_stream(stream, network(), likelihood, steps=missing)
    with pytest.raises(PosteriorFormatError, match="no draws of step 4"):
        stream.fields(4)


@pytest.mark.parametrize("moment", ["records", "blobs"])
def test_opening_while_a_run_writes(tmp_path, monkeypatch, moment):
    """A draw that comes, and one that goes, between any two looks at the directory."""
    writer = stream_of(tmp_path, [1, 2])
    names, calls = files.LocalFiles.names, []

    def meanwhile(self, folder=""):
        found = names(self, folder)
        if folder == moment and not calls:
            calls.append(folder)
            writer.append(3, weights(3))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(files.LocalFiles, "names", meanwhile)
        assert DrawStream.open(tmp_path).steps() == [1, 2]
    assert writer.steps() == [1, 2, 3]

    for folder in ("records", "blobs"):  # the record is gone when it is read, or just after it

        def resumed(self, asked="", folder=folder):
            if asked != folder or not calls:
                return names(self, asked)
            calls.clear()
            found = names(self, asked) if asked == "records" else None
            writer.truncate(after_step=1)
            return names(self, asked) if found is None else found

        with monkeypatch.context() as patch:
            patch.setattr(files.LocalFiles, "names", resumed)
            assert DrawStream.open(tmp_path).steps() == [1]
        writer.append(2, weights(2))
        calls.append(folder)


def test_devices_and_copies(tmp_path):
    stream_of(tmp_path, [1, 2])
    posterior = Posterior.load(tmp_path, network())
    sent = pickle.loads(pickle.dumps(posterior))
    assert values(sent._draws) == values(posterior._draws) == [1.0, 1.1, 2.0, 2.1]
    assert posterior.device == torch.device("cpu")
    assert posterior.to("meta") is posterior
    assert posterior.device == torch.device("meta")
    assert posterior.sample(3, torch.Generator())["0.weight"].is_meta
    assert posterior.fixed["0.bias"].is_meta


@pytest.mark.parametrize("mixture", [False, True])
def test_saving_takes_one_draw_at_a_time(tmp_path, monkeypatch, mixture):
    stream_of(tmp_path / "a", [1, 2, 3])
    posterior = Posterior.load(tmp_path / "a", network())
    whole = MixturePosterior([posterior, posterior]) if mixture else posterior
    read, put, order = blobs.read_blob, files.LocalFiles.put, []

    def noting_read(*arguments, **options):
        order.append("read")
        return read(*arguments, **options)

    def noting_put(self, name, *pieces):
        if "draw-" in name:
            order.append("put")
        put(self, name, *pieces)

    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "read_blob", noting_read)
        patch.setattr(files.LocalFiles, "put", noting_put)
        whole.save(tmp_path / "b")
    assert order == ["read", "put", "put"] * (6 if mixture else 3)
    loaded = Posterior.load(tmp_path / "b", network())
    parts = loaded.components if mixture else [loaded]
    for part in parts:
        assert part.chains == 2
        assert values(part._draws) == values(posterior._draws)
        assert isinstance(part._draws, list)


def test_what_the_likelihood_learned_comes_with_the_last_draw(place):
    likelihood = Gaussian([0.5, 0.7, 0.2, 0.3], learn=True)
    stream = stream_of(place, likelihood=likelihood)
    for step in (1, 2):
        likelihood.log_scale.data.fill_(-float(step))
        stream.append(step, weights(step), likelihood.state_dict())
    assert Posterior.load(place, network()).likelihood.log_scale.tolist() == [-2.0] * 4
    stream.truncate(after_step=1)
    assert Posterior.load(place, network()).likelihood.log_scale.tolist() == [-1.0] * 4
    with pytest.raises(ConfigurationError, match=r"this one has"):
        stream.append(2, weights(2))


def test_fields_of_a_step(place):
    stream = stream_of(place)
    stream.append(3, weights(3), fields={"epoch": 2, "rate": 0.1})
    assert DrawStream.open(place).fields(3) == {"epoch": 2, "rate": 0.1}
    with pytest.raises(ConfigurationError, match="fields cannot be kept"):
        stream.append(4, weights(4), fields={"x": float("nan")})
    assert stream.steps() == [3]


# Truncating


def test_truncate_and_go_on(place):
    stream = stream_of(place, [10, 20, 30, 40])
    stream.truncate(after_step=25)
    assert stream.steps() == DrawStream.open(place).steps() == [10, 20]
    assert values(Posterior.load(place, network())._draws) == [10, 10.1, 20, 20.1]
    system, path = fsspec.core.url_to_fs(str(place))
    names = [Path(name).name for name in system.ls(f"{path}/blobs", detail=False)]
    assert sorted(name.partition("-")[0] for name in names) == ["draw", "draw", "fixed"]
    stream.append(30, weights(31))
    assert values(stream.draws())[-2:] == [31, 31.1]
    stream.truncate(after_step=100)
    assert stream.steps() == [10, 20, 30]
    stream.truncate(after_step=0)
    assert stream.steps() == DrawStream.open(place).steps() == []


def test_leftovers_of_crashes_are_removed_and_files_of_others_stay(tmp_path):
    stream = stream_of(tmp_path, [1, 2])
    before = files_of(tmp_path)
    others = ["notes.txt", "blobs/mine.safetensors", "records/notes.json"]
    lost = [
        "blobs/.tmp-0123456789abcdef",
        "records/.tmp-0123456789abcdef",
        "blobs/draw-000000000009-0123456789abcdef.safetensors",
    ]
    for name in others + lost:
        (tmp_path / name).write_text("text")
    assert DrawStream.open(tmp_path).steps() == [1, 2]
    assert len(Posterior.load(tmp_path, network())) == 4
    stream.truncate(after_step=2)
    assert files_of(tmp_path).keys() == before.keys() | set(others)


# What cannot be


def test_a_directory_with_draws_is_refused(place):
    stream_of(place)
    stream = stream_of(place)  # without draws there is nothing to lose
    stream.append(7, weights(7))
    message = r"holds draws: 1 snapshots, the last of step 7\. Resume with ckpt_path=, choose"
    with pytest.raises(ConfigurationError, match=message):
        stream_of(place)
    posterior = Posterior.load(place, network())
    with pytest.raises(ConfigurationError, match="which a save would remove"):
        posterior.save(place)
    assert DrawStream.open(place).steps() == [7]


def test_a_directory_with_something_else_is_refused(tmp_path):
    stream_of(tmp_path / "a", [1])
    Posterior.load(tmp_path / "a", network()).save(tmp_path / "b")
    for place in (tmp_path / "b", tmp_path / "b" / "manifest.json"):
        with pytest.raises(ConfigurationError, match="already holds a posterior or is a file"):
            stream_of(place)
    with pytest.raises(PosteriorFormatError, match=r"no stream of draws.*posterior\.save"):
        DrawStream.open(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(PosteriorFormatError, match="not of a posterior"):
        stream_of(tmp_path / "c")


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (4, {}, "holds the draws of step 5; the next must be of a later step, but got step 4"),
        (5, {}, "got step 5"),
        (6, {"0.weight": torch.zeros(3, 4, 3)}, r"have the tensors .*this one has .*\[3, 4, 3\]"),
        (6, {"0.weight": torch.zeros(2, 4, 3).half()}, "float16"),
        (6, {"0.bias": torch.zeros(2, 4)}, "'0.bias'"),
    ],
)
def test_snapshots_that_do_not_fit(tmp_path, step, change, message):
    stream = stream_of(tmp_path, [5])
    before = files_of(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        stream.append(step, {**weights(step), **change})
    assert files_of(tmp_path) == before


def test_another_run_cannot_mix_its_draws_in(tmp_path):
    first = stream_of(tmp_path)
    second = stream_of(tmp_path)
    second.append(1, weights(1))
    for call in (lambda: first.append(2, weights(2)), lambda: first.truncate(after_step=0)):
        with pytest.raises(ConfigurationError, match="taken by another run"):
            call()
    assert DrawStream.open(tmp_path).steps() == [1]


# Failures


@pytest.mark.parametrize("fail_at", [0, 1], ids=["blob", "record"])
def test_full_disk(tmp_path, monkeypatch, fail_at):
    stream = stream_of(tmp_path, [1, 2])
    before = files_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", FullDisk(fail_at).open, raising=False)
        with pytest.raises(OSError, match="No space left") as caught:
            stream.append(3, weights(3))
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert files_of(tmp_path) == before
    assert values(Posterior.load(tmp_path, network())._draws) == [1, 1.1, 2, 2.1]
    stream.append(3, weights(3))
    assert DrawStream.open(tmp_path).steps() == stream.steps() == [1, 2, 3]


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), KeyboardInterrupt()])
def test_a_failing_call_leaves_the_draw_or_not(tmp_path, monkeypatch, function, error):
    real = getattr(os, function)
    for fail_at in range(20):
        stream = stream_of(tmp_path / str(fail_at), [1])
        count = iter(range(100))

        def failing(*arguments, fail_at=fail_at, count=count):
            if next(count) == fail_at:
                raise error
            return real(*arguments)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, function, failing)
                stream.append(2, weights(2))
        except type(error):
            # what the writer believes is what a reader finds
            assert stream.steps() == DrawStream.open(tmp_path / str(fail_at)).steps()
            assert not any(".tmp-" in name for name in files_of(tmp_path / str(fail_at)))
        else:
            assert fail_at > 1
            assert stream.steps() == [1, 2]
            return
    pytest.fail("the failing call was never passed")


@pytest.mark.parametrize("arrived", [True, False])
def test_a_lost_reply_from_remote_storage(monkeypatch, arrived):
    memory = fsspec.filesystem("memory")
    stream = stream_of("memory://stream-lost", [1])
    pipe = type(memory).pipe_file

    def lossy(self, path, value, **options):
        if not path.endswith("2.json") or arrived:
            pipe(self, path, value, **options)
        if path.endswith("2.json"):
            raise OSError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", lossy)
        with pytest.raises(OSError, match="connection lost"):
            stream.append(2, weights(2))
    expected = [1, 2] if arrived else [1]
    assert stream.steps() == DrawStream.open("memory://stream-lost").steps() == expected
    assert len(memory.ls("/stream-lost/blobs")) == 1 + len(expected)
    memory.rm("/stream-lost", recursive=True)


# Damage


def test_any_flipped_bit_is_found(tmp_path):
    stream = DrawStream.create(tmp_path, fields={}, weights={"w": torch.ones(1, 2)})
    stream.append(1, {"w": torch.tensor([[1.5, 2.5]])})
    for name, data in files_of(tmp_path).items():
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(PosteriorFormatError):
                DrawStream.open(tmp_path).draws()[0]
        (tmp_path / name).write_bytes(data)
    assert DrawStream.open(tmp_path).draws()[0]["w"].tolist() == [1.5, 2.5]


def test_damaged_missing_and_strange_records(tmp_path):
    stream_of(tmp_path / "a", [1, 2, 3])
    stream_of(tmp_path / "b", [1, 2])
    record = tmp_path / "a" / "records" / "000000000002.json"
    good = record.read_bytes()
    for data, message in (
        (b"{", r"2.json is not JSON.*remove this record"),
        ((tmp_path / "b" / "records" / record.name).read_bytes(), "of another stream"),
        ((tmp_path / "a" / "records" / "000000000001.json").read_bytes(), "of another step: 1"),
    ):
        record.write_bytes(data)
        with pytest.raises(PosteriorFormatError, match=message):
            DrawStream.open(tmp_path / "a")
    stream = DrawStream.open(tmp_path / "a", last_step=1)
    assert (stream.steps(), stream.recorded_steps()) == ([1], [1, 2, 3])
    record.write_bytes(good)
    (blob,) = (tmp_path / "a" / "blobs").glob("draw-000000000002-*")
    blob.unlink()
    with pytest.raises(PosteriorFormatError, match=f"000000000002.json names blobs/{blob.name}"):
        Posterior.load(tmp_path / "a", network())
    record.unlink()
    assert DrawStream.open(tmp_path / "a").steps() == [1, 3]
    stream.truncate(after_step=1)
    assert stream.recorded_steps() == DrawStream.open(tmp_path / "a").steps() == [1]


# Crashes


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    run = subprocess.run(
        [
            sys.executable,
            *("-W", "ignore"),
            *("-m", "tests.storage.crash_stream"),
            str(tmp_path_factory.mktemp("crash")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("operation", ["create", "first", "append", "truncate"])
def test_kill_at_any_step_leaves_a_whole_stream(crashes, operation):
    expected = {
        "create": ["nothing", []],
        "first": [[], [9]],
        "append": [[1, 2], [1, 2, 9]],
        "truncate": [[1, 2, 3, 4], [1, 2, 3], [1, 2]],
    }[operation]
    states = [crash["found"] for crash in crashes[operation]["crashes"]]
    assert [state for i, state in enumerate(states) if state not in states[:i]] == expected
    assert states == sorted(states, key=expected.index)  # never back
    for crash in crashes[operation]["crashes"]:
        assert crash["signal"] == 9, crash
        kept = [step for step in crash["found"] if step != "nothing" and step in (1, 2)]
        assert crash["again"] == [*kept, 7], crash
        assert crash["leftovers"] == [], crash
    reached = {crash["point"].split("-")[0] for crash in crashes[operation]["crashes"]}
    if operation == "append":
        assert {
            *(f"{moment} write temporary blob" for moment in ("before", "middle")),
            *(f"{moment} write temporary record" for moment in ("before", "middle")),
            *("before replace blob draw", "before replace record"),
            *("before fsync directory blobs", "before fsync directory records"),
        } <= reached
    if operation == "truncate":
        assert {"before unlink record", "before unlink blob draw"} <= reached


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_everything_is_on_the_disk_before_it_is_relied_on(crashes):
    """A killed process keeps the page cache; a power cut does not, so the order is checked."""
    for operation in ("first", "append"):
        steps = [(name, role.split("-")[0]) for name, role in crashes[operation]["steps"]]
        expected = [
            ("fsync", "temporary blob"),
            ("replace", "blob draw"),
            ("fsync", "directory blobs"),
            ("fsync", "temporary record"),
            ("replace", "record"),
            ("fsync", "directory records"),
        ]
        order = [step for step in steps if step in expected]
        assert order == expected
        assert steps[-1] == expected[-1]
    assert ("mkdir", "directory records") in [tuple(s) for s in crashes["first"]["steps"]]
    steps = [(name, role.split("-")[0]) for name, role in crashes["truncate"]["steps"]]
    records = [i for i, step in enumerate(steps) if step == ("unlink", "record")]
    blob_steps = [i for i, step in enumerate(steps) if step == ("unlink", "blob draw")]
    assert len(records) == len(blob_steps) == 2
    assert ("fsync", "directory records") in steps[max(records) : min(blob_steps)]
