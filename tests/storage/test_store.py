import ast
import hashlib
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import lightning_bnn
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.storage import files, store
from tests.storage.faults import FAULTS, failing, files_of, forge, lost_reply

FIELDS = {"step": 7, "rate": 1e-5, "names": ["é", "b"], "nested": {"none": None, "yes": True}}


def draws(value=0.0):
    return {
        "draw-0": {"weight": torch.full((2, 3), value), "bias": torch.arange(3)},
        "draw-1": {"weight": torch.full((2, 3), value + 1), "bias": torch.arange(3) + 1},
    }


def save(directory, value=0.0, **changes):
    store.write(directory, **{"kind": "draws", "blobs": draws(value), "fields": FIELDS, **changes})


def load_all(stored):
    return {name: stored.load(name) for name in stored.blob_names}


def assert_holds(directory, blobs, fields=FIELDS):
    """Compare exactly, order and dtype included."""
    stored = store.read(directory)
    assert stored.fields == fields
    loaded = load_all(stored)
    assert list(loaded) == stored.blob_names == list(blobs)
    for name, tensors in blobs.items():
        assert list(loaded[name]) == list(tensors)
        for key, tensor in tensors.items():
            assert loaded[name][key].dtype == tensor.dtype
            assert loaded[name][key].shape == tensor.shape
            assert torch.equal(loaded[name][key], tensor)


def blob_path(directory, name="draw-0"):
    (path,) = (Path(directory) / "blobs").glob(f"{name}-*.safetensors")
    return path


# Round trips


def test_round_trip_and_overwrite(place):
    save(place)
    assert_holds(place, draws())
    one_draw = {"draw-1": draws()["draw-1"]}
    save(place, blobs=one_draw, fields={"step": 8})
    assert_holds(place, one_draw, {"step": 8})
    files = fsspec.core.url_to_fs(str(place))[0]
    assert len(files.ls(fsspec.core.url_to_fs(str(place))[1] + "/blobs")) == 1


def test_manifest_can_be_read_without_this_package(tmp_path):
    save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    assert manifest["format"] == "lightning_bnn.posterior"
    assert manifest["version"] == 1
    assert manifest["kind"] == "draws"
    assert manifest["fields"] == FIELDS
    assert manifest["written_by"]["torch"] == str(torch.__version__)
    assert manifest["written_by"]["lightning_bnn"][0].isdigit()
    names = {"manifest.json"}
    for entry in manifest["blobs"]:
        assert list(entry) == ["name", "file", "bytes", "sha256", "tensors"]
        data = (tmp_path / "blobs" / entry["file"]).read_bytes()
        assert entry["bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["file"] == f"{entry['name']}-{entry['sha256'][:16]}.safetensors"
        assert entry["tensors"]["weight"] == {"dtype": "float32", "shape": [2, 3]}
        assert entry["tensors"]["bias"] == {"dtype": "int64", "shape": [3]}
        names.add(f"blobs/{entry['file']}")
    digest = manifest.pop("sha256")
    text = json.dumps(manifest, separators=(",", ":"))
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert files_of(tmp_path).keys() == names


def test_tensors_of_every_kind(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    shared = torch.arange(6.0)
    tensors = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(4),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(3, 0, 2),
        "scalar": torch.tensor(2.5),
        "shared": shared,
        "shared again": shared,
        "shared part": shared[2:4],
        "shared view": shared.view(2, 3),
        "negative view": torch.view_as_complex(torch.tensor([[1.0, 2.0]])).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "not a number": torch.tensor([float("inf"), -0.0]),
        "a.name/with ünusual\ncharacters": torch.ones(1),
        "": torch.ones(1),
        **{f"as {name}": torch.tensor([0, 1]).to(getattr(torch, name)) for name in store.CODES},
    }
    for blobs in ({"all": tensors}, {"none": {}}, {}):
        save(tmp_path, blobs=blobs)
        assert_holds(tmp_path, blobs)


def test_a_damaged_posterior_can_be_written_over(tmp_path):
    for path in (blob_path, lambda directory: directory / "manifest.json"):
        save(tmp_path)
        path(tmp_path).write_bytes(path(tmp_path).read_bytes()[:50])
        save(tmp_path)
        assert_holds(tmp_path, draws())


def test_permissions_follow_the_umask(tmp_path):
    # Others of the group must be able to read a posterior; temporary files are often private.
    old = os.umask(0o022)
    try:
        save(tmp_path / "p")
    finally:
        os.umask(old)
    for name in files_of(tmp_path / "p"):
        assert (tmp_path / "p" / name).stat().st_mode & 0o777 == 0o644


def test_leftovers_of_crashes_are_removed_and_files_of_others_stay(tmp_path):
    save(tmp_path)
    others = ["notes.txt", "blobs/mine.safetensors", "blobs/.tmp-mine", ".tmp-0"]
    temporary = ["blobs/.tmp-0123456789abcdef", ".tmp-0123456789abcdef"]
    for name in (*others, *temporary, "blobs/gone-0123456789abcdef.safetensors"):
        (tmp_path / name).write_text("text")
    save(tmp_path, 5.0)
    assert len(files_of(tmp_path)) == 3 + len(others)
    assert set(others) <= files_of(tmp_path).keys()


def test_writers_at_the_same_time_leave_one_of_them(tmp_path):
    contents = [draws(float(index)) for index in range(4)]

    def work(index):
        for _ in range(3):
            save(tmp_path, blobs=contents[index], fields={"writer": index})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    last = store.read(tmp_path).fields["writer"]
    assert_holds(tmp_path, contents[last], {"writer": last})
    assert len(files_of(tmp_path)) == 3


# What cannot be written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"a": [torch.ones(1)]}}, "fields cannot be kept as JSON.*Tensor"),
        ({"fields": {"a": float("nan")}}, "fields cannot be kept as JSON"),
        ({"blobs": {"a/b": {}}}, "'a/b'"),
        ({"blobs": {"a\n": {}}}, "blob name"),
        (
            {"blobs": {"good": {"w": torch.ones(9)}, "b": {"w": torch.ones(1) * 1j}}},
            "'w' is torch.complex64; the dtypes",
        ),
    ],
)
def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path, changes, message):
    save(tmp_path / "old")
    before = files_of(tmp_path / "old")
    for place in ("old", "new"):
        with pytest.raises(ConfigurationError, match=message):
            save(tmp_path / place, **changes)
    assert files_of(tmp_path / "old") == before
    assert not files_of(tmp_path / "new")


def test_a_file_or_another_programs_manifest_is_not_written_over(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ConfigurationError, match="not of a posterior"):
        save(tmp_path)
    with pytest.raises(ConfigurationError, match="is a file"):
        save(tmp_path / "manifest.json")
    assert files_of(tmp_path) == {"manifest.json": b'{"name": "a web page"}'}


def test_locations_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (save, store.read):
        with pytest.raises(ConfigurationError, match="drops a slash"):
            call(Path("s3://bucket/posterior"))
        with pytest.raises(ConfigurationError, match="nosuchprotocol"):
            call("nosuchprotocol://bucket/posterior")
    assert not files_of(tmp_path)


# Failures in the middle of a write


@pytest.mark.parametrize(("function", "error"), FAULTS)
@pytest.mark.parametrize("existing", [True, False])
def test_a_failing_call_leaves_old_or_new(tmp_path, function, error, existing):
    kept = {"kept": {"w": torch.ones(3)}}  # of both posteriors: a failure must not take it away
    for fail_at in range(20):
        place = tmp_path / str(fail_at)
        if existing:
            save(place, blobs=kept | draws())
        before = files_of(place)
        try:
            with failing(function, error, fail_at):
                save(place, blobs=kept | draws(5.0))
        except type(error):
            if files_of(place) != before:  # the last step: the new manifest is in place
                assert_holds(place, kept | draws(5.0))
                assert len(files_of(place)) == 4
        else:
            assert fail_at > 3
            return
    pytest.fail("the failing call was never passed")


@pytest.mark.parametrize("arrived", [False, True])
def test_remote_manifest_put_that_raises(arrived):
    """A lost reply must not cost the new posterior its blobs."""
    place = "memory://store-lost/p"
    save(place)
    with lost_reply("manifest.json", arrived):
        save(place, 5.0)
    assert_holds(place, draws(5.0 if arrived else 0.0))
    memory = fsspec.filesystem("memory")
    assert len(memory.ls("/store-lost/p/blobs")) == 2
    memory.rm("/store-lost", recursive=True)


def test_remote_order_is_blobs_manifest_then_removal(monkeypatch):
    memory = fsspec.filesystem("memory")
    save("memory://store-order/p")
    steps = []
    for name in ("pipe_file", "rm_file"):
        real = getattr(type(memory), name)

        def noting(self, path, *rest, name=name, real=real, **options):
            steps.append((name, path.split("/")[-1][:6]))
            return real(self, path, *rest, **options)

        monkeypatch.setattr(type(memory), name, noting)
    save("memory://store-order/p", 5.0)
    assert steps[:3] == [("pipe_file", "draw-0"), ("pipe_file", "draw-1"), ("pipe_file", "manife")]
    assert sorted(steps[3:]) == [("rm_file", "draw-0"), ("rm_file", "draw-1")]
    monkeypatch.undo()
    memory.rm("/store-order", recursive=True)


# Damage


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.builds(
    lambda shape, name: torch.ones(shape).to(getattr(torch, name)),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(sorted(store.CODES)),
)
TENSOR_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
BLOBS = st.dictionaries(
    st.from_regex(store.BLOB_NAME, fullmatch=True).filter(lambda name: len(name) < 40),
    st.dictionaries(TENSOR_NAMES, TENSORS, max_size=3),
    max_size=3,
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    blobs=BLOBS,
    fields=st.dictionaries(st.text(), JSON, max_size=3),
    place=st.integers(0, 2**32),
    truncate=st.booleans(),
)
# Digits beyond a float's precision: the altered number is the same number.
@example(blobs={}, fields={"x": 0.1 + 0.2}, place=8 * 100, truncate=False)
def test_any_posterior_comes_back_and_any_damage_is_found(tmp_path, blobs, fields, place, truncate):
    save(tmp_path, blobs=blobs, fields=fields)
    assert_holds(tmp_path, blobs, fields)
    files = files_of(tmp_path)
    offset = place % (8 * sum(map(len, files.values())))
    for name, data in sorted(files.items()):
        if offset < 8 * len(data):
            damaged = bytearray(data)
            if truncate:
                del damaged[offset // 8 :]
            else:
                damaged[offset // 8] ^= 1 << offset % 8
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(PosteriorFormatError):
                load_all(store.read(tmp_path))
            (tmp_path / name).write_bytes(data)
            return
        offset -= 8 * len(data)


@pytest.mark.parametrize(
    ("written", "altered"),
    [
        (b'"rate":1e-05', b'"rate":1E-05'),
        (rb"\u00e9", rb"\u00E9"),
        (b'{"format"', b'{ "format"'),
        (b'"step":7', b'"step":8'),
    ],
)
def test_altered_manifest(tmp_path, written, altered):
    save(tmp_path)
    path = tmp_path / "manifest.json"
    data = path.read_bytes()
    assert data.count(written) == 1
    path.write_bytes(data.replace(written, altered))
    with pytest.raises(PosteriorFormatError, match="altered"):
        store.read(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON.*0 bytes.*truncated"),
        (b"[" * 200_000, "not JSON"),
        (b"[1, 2]", "expected the format 'lightning_bnn.posterior'"),
        (b'{"name":"a web page"}', "not of a posterior"),
        (b'{"format":"lightning_bnn.posterior","version":3}', "3.*reads up to version 2.*Update"),
        (b'{"format":"lightning_bnn.posterior","version":"1"}', "version '1'"),
        (b'{"format":"lightning_bnn.posterior","version":1}', "altered"),
    ],
)
def test_manifests_that_are_not(tmp_path, data, message):
    save(tmp_path)
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(PosteriorFormatError, match=message):
        store.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("kind", value) for value in (None, 3)),
        *(("fields", value) for value in (None, [])),
        *(("blobs", value) for value in (None, 3, ["text"], [[]], {"a": 1})),
        ("blobs.name", []),
        # a place outside of the folder, or no file name at all
        *(("blobs.file", f"{place}-0123456789abcdef.safetensors") for place in ("../a", "/etc/a")),
        *(("blobs.file", value) for value in ("..\\a-0123456789abcdef.safetensors", "passwd", 3)),
        ("blobs.file", "a-0123456789abcdef.safetensors\n"),
        *(("blobs.bytes", value) for value in ("12", None, 1.5, True)),
        ("blobs.sha256", 3),
        *(("blobs.tensors", value) for value in ([], None)),
    ],
)
def test_forged_manifests_are_refused(tmp_path, key, value):
    """With a good hash, as a stranger's program could write it."""
    save(tmp_path)
    inside = key.removeprefix("blobs.")

    def change(manifest):
        (manifest if inside == key else manifest["blobs"][0])[inside] = value

    forge(tmp_path / "manifest.json", change)
    with pytest.raises(PosteriorFormatError, match="good hash but wrong contents"):
        store.read(tmp_path)
    forge(tmp_path / "manifest.json", lambda manifest: manifest.pop(key.partition(".")[0]))
    with pytest.raises(PosteriorFormatError, match=r"wrong contents \(it has no "):
        store.read(tmp_path)


def test_damaged_and_strange_blobs(tmp_path):
    save(tmp_path)
    stored, path = store.read(tmp_path), blob_path(tmp_path)
    data = path.read_bytes()
    size = len(data)
    for wrong, told in (
        (data[:-5], f"{size - 5} of another"),
        (data[:-1] + b"\x55", f"{size} of another"),
        (data + bytes(9), f"more than {size}"),
    ):
        path.write_bytes(wrong)
        message = f"{path.name} is damaged: expected {size} bytes.*found {told}"
        with pytest.raises(PosteriorFormatError, match=message):
            stored.load("draw-0")
    os.truncate(path, 2**36)  # 64 GB of zeros that take no room: not read to the end
    with pytest.raises(PosteriorFormatError, match=f"found more than {size}"):
        stored.load("draw-0")
    stored.load("draw-1")  # each is read alone
    path.unlink()
    with pytest.raises(PosteriorFormatError, match=f"{path.name} is missing.*again"):
        stored.load("draw-0")
    with pytest.raises(PosteriorFormatError, match=r"no blob 'mean'; it has \['draw-0'"):
        stored.load("mean")
    pickled = pickle.dumps({"w": 1})
    sealed = {"bytes": len(pickled), "sha256": hashlib.sha256(pickled).hexdigest()}
    wide = {"weight": {"dtype": "float64", "shape": [2, 3]}}
    for contents, changes, message in (
        (data, {"tensors": wide}, r"promises .*float64.*has .*float32"),
        (data, {"tensors": {"weight": 3}}, "wrong contents .*expected to be an object; got 3"),
        (data, {"bytes": size - 1}, f"found more than {size - 1}"),
        (pickled, sealed, "not written by this package"),
    ):
        save(tmp_path)
        path.write_bytes(contents)
        forge(
            tmp_path / "manifest.json",
            lambda manifest, changes=changes: manifest["blobs"][0].update(changes),
        )
        with pytest.raises(PosteriorFormatError, match=message):
            store.read(tmp_path).load("draw-0")


# Not a posterior at all


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_places_without_a_posterior(tmp_path):
    for place in (tmp_path / "nowhere", "memory://nowhere/p"):
        with pytest.raises(PosteriorFormatError, match=r"does not exist\. Pass the directory"):
            store.read(place)
    torch.save({"bomb": Bomb()}, tmp_path / "a.ckpt")
    (tmp_path / "manifest.pkl").write_bytes(pickle.dumps(Bomb()))
    for place, held in (("", "with .*'a.ckpt'"), ("a.ckpt", "a file"), ("manifest.pkl", "a file")):
        with pytest.raises(PosteriorFormatError, match=f"is .*{held}.*manifest.json.*never loaded"):
            store.read(tmp_path / place)


def test_package_has_no_unpickling():
    """No module of the package names pickle or torch.load; readers trust only manifests."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "torch.load"}
    for path in Path(lightning_bnn.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in forbidden):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            else:
                continue
            assert not forbidden & {*names, *(name.split(".")[0] for name in names)}, path


def test_a_local_path_is_absolute_from_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = files.open_directory("p")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    made.put("a", b"text")
    assert (tmp_path / "p" / "a").read_bytes() == b"text"
    with pytest.raises(ConfigurationError, match="got an empty text"):
        files.open_directory("")
