"""Draws on the disk as they are taken: whole at each moment, read when asked for, never lost."""

import pickle
import re
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
from lightning_bnn.storage import files, store
from lightning_bnn.storage import stream as stream_module
from lightning_bnn.storage.stream import DrawStream
from tests.storage.faults import FAULTS, failing, files_of, forge, lost_reply


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


@pytest.fixture
def reads(monkeypatch):
    """The steps of the blobs that are read; negative where the hash is known to be good."""
    noted = []

    def noting(files, entry, stamp=None):
        step = int(re.search(r"draw-(\d+)", entry["file"])[1])
        noted.append(step if stamp is None else -step)
        return store.read_blob(files, entry, stamp)

    monkeypatch.setattr(stream_module, "read_blob", noting)
    return noted


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


def test_draws_stay_on_the_disk_and_one_blob_is_held(tmp_path, reads):
    stream_of(tmp_path, range(1, 4))
    posterior = Posterior.load(tmp_path, network())
    assert reads == []
    posterior.predict(torch.randn(3, 3))
    assert reads == [1, 2, 3]  # each once for both chains
    draws = posterior._draws
    held = [value for value in vars(draws).values() if isinstance(value, tuple)]
    assert len(held) == 1
    assert list(held[0][1]) == ["0.weight", "1.running_mean"]
    draws[5]["0.weight"].fill_(99.0)  # a copy: the next reader is not disturbed
    expected = [step + chain / 10 for step in range(1, 4) for chain in range(2)]
    assert values(draws) == values(draws.to("cpu")) == expected
    assert reads[3:] == [-1, -2, -3] * 2  # a hash is checked once
    assert values(draws[2:4]) == [2.0, 2.1]
    assert values([draws[-1]]) == [3.1]
    with pytest.raises(IndexError):
        draws[6]


def test_the_streamed_posterior_predicts_as_one_in_memory(tmp_path):
    net = network()
    stream_of(tmp_path, [1, 2, 3], net=net)
    streamed = Posterior.load(tmp_path, network())
    held = DrawsPosterior(net, Gaussian(0.1), list(streamed._draws), chains=2)
    inputs = torch.randn(6, 3)
    for count in (None, 2, 6, 11):
        expected = held.predict(inputs, draws=count, seed=3).outputs
        assert torch.equal(streamed.predict(inputs, draws=count, seed=3).outputs, expected)


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


def test_draws_of_chosen_steps_with_what_the_likelihood_had_learned(place):
    likelihood = Gaussian(0.5, learn=True)
    stream = stream_of(place, likelihood=likelihood)
    for step in (1, 2, 3):
        likelihood.log_scale.data.fill_(-float(step))
        stream.append(step, weights(step), likelihood.state_dict())
    assert Posterior.load(place, network()).likelihood.log_scale.item() == -3.0
    posterior = DrawsPosterior.from_stream(stream, network(), likelihood, steps=[1, 2])
    assert values(posterior._draws) == [1, 1.1, 2, 2.1]
    assert posterior.likelihood.log_scale.item() == -2.0
    for missing in ([4], [1, 4], [4, 1]):
        with pytest.raises(PosteriorFormatError, match="no draws of step 4; it has 3 snapshots"):
            DrawsPosterior.from_stream(stream, network(), likelihood, steps=missing)
    stream.truncate(after_step=1)
    assert Posterior.load(place, network()).likelihood.log_scale.item() == -1.0
    with pytest.raises(ConfigurationError, match="this one has"):
        stream.append(2, weights(2))


@pytest.mark.parametrize("folder", ["records", "blobs"])
@pytest.mark.parametrize(
    ("change", "before"), [("append", True), ("truncate", True), ("truncate", False)]
)
def test_opening_while_a_run_writes(tmp_path, monkeypatch, folder, change, before):
    """A draw that comes or goes just before or after a look at a folder."""
    writer = stream_of(tmp_path, [1, 2])
    names, calls = files.LocalFiles.names, []

    def meanwhile(self, asked=""):
        seen = names(self, asked)
        if asked == folder and not calls:
            calls.append(asked)
            writer.append(3, weights(3)) if change == "append" else writer.truncate(after_step=1)
            return seen if before else names(self, asked)
        return seen

    monkeypatch.setattr(files.LocalFiles, "names", meanwhile)
    gone = change == "truncate" and not (folder == "blobs" and before)
    assert DrawStream.open(tmp_path).steps() == ([1] if gone else [1, 2])


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
def test_saving_takes_one_draw_at_a_time(tmp_path, monkeypatch, reads, mixture):
    stream_of(tmp_path / "a", [1, 2])
    posterior = Posterior.load(tmp_path / "a", network())
    whole = MixturePosterior([posterior, posterior]) if mixture else posterior
    put = files.LocalFiles.put

    def noting_put(self, name, *pieces):
        if "draw-" in name:
            reads.append("put")
        put(self, name, *pieces)

    monkeypatch.setattr(files.LocalFiles, "put", noting_put)
    whole.save(tmp_path / "b")
    again = [-1, "put", "put", -2, "put", "put"] if mixture else []
    assert reads == [1, "put", "put", 2, "put", "put", *again]
    for part in Posterior.load(tmp_path / "b", network()).components:
        assert part.chains == 2
        assert isinstance(part._draws, list)
        assert values(part._draws) == values(posterior._draws)


def test_fields_of_a_step(tmp_path):
    stream = stream_of(tmp_path)
    stream.append(3, weights(3), fields={"epoch": 2, "rate": 0.1})
    assert DrawStream.open(tmp_path).fields(3) == {"epoch": 2, "rate": 0.1}
    with pytest.raises(PosteriorFormatError, match="no draws of step 4"):
        stream.fields(4)


# Truncating


def test_truncate_and_resume(place):
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


@pytest.mark.parametrize(("function", "error"), FAULTS)
def test_a_failing_call_leaves_the_draw_or_not(tmp_path, function, error):
    for fail_at in range(20):
        place = tmp_path / str(fail_at)
        stream = stream_of(place, [1])
        before, caught = files_of(place), None
        try:
            with failing(function, error, fail_at):
                stream.append(2, weights(2))
        except type(error) as raised:
            caught = raised
        # what the writer believes is what a reader finds
        assert stream.steps() == DrawStream.open(place).steps()
        assert len(files_of(place)) == len(before) + 2 * (len(stream) - 1)
        if function == "open" and caught is not None:
            assert str(place) in str(caught)  # which disk is full
        if caught is None:
            assert fail_at > 1
            assert len(stream) == 2
            return
    pytest.fail("the failing call was never passed")


@pytest.mark.parametrize("arrived", [True, False])
def test_a_lost_reply_from_remote_storage(arrived):
    stream = stream_of("memory://stream-lost", [1])
    with lost_reply("2.json", arrived):
        stream.append(2, weights(2))
    expected = [1, 2] if arrived else [1]
    assert stream.steps() == DrawStream.open("memory://stream-lost").steps() == expected
    memory = fsspec.filesystem("memory")
    assert len(memory.ls("/stream-lost/blobs")) == 1 + len(expected)
    memory.rm("/stream-lost", recursive=True)


# Damage


def test_any_flipped_bit_is_found(tmp_path):
    stream = DrawStream.create(tmp_path, fields={}, weights={"w": torch.ones(1, 2)})
    stream.append(1, {"w": torch.tensor([[1.5, 2.5]])})
    for name, data in files_of(tmp_path).items():
        for position in range(0, len(data), 5):
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
        ((tmp_path / "b" / "records" / record.name).read_bytes(), "stream is expected to be"),
        ((tmp_path / "a" / "records" / "000000000001.json").read_bytes(), "step is .*got 1"),
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
    with pytest.warns(UserWarning, match="2 of 3 snapshots .* numbers 1 .from 0. are missing"):
        assert DrawStream.open(tmp_path / "a").steps() == [1, 3]
    stream.truncate(after_step=1)
    assert stream.recorded_steps() == DrawStream.open(tmp_path / "a").steps() == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "../draw-000000000002-0123456789abcdef.safetensors"),
        ("file", 3),
        ("bytes", "many"),
        ("sha256", None),
    ],
)
def test_forged_records_are_refused(tmp_path, key, value):
    stream_of(tmp_path, [2])
    record = tmp_path / "records" / "000000000002.json"
    forge(record, lambda body: body["blob"].update({key: value}))
    with pytest.raises(PosteriorFormatError, match=r"2.json has a good hash but wrong contents"):
        DrawStream.open(tmp_path)
