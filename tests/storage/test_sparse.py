import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import GaussianPosterior, Posterior
from lightning_bnn.storage import sparse, store
from tests.storage.faults import files_of, forge

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
FAST = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def bits(tensor):
    return tensor.reshape(-1).view(BITS[tensor.dtype]).tolist()


def loop_encode(numbers):
    """The code by its definition, number by number."""
    values, gaps, zeros = [], [], 0
    for number in numbers:
        if number == 0:
            zeros += 1
            if zeros == 255:
                gaps.append(255)
                zeros = 0
        else:
            values.append(number)
            gaps.append(zeros)
            zeros = 0
    return values, gaps


def sparse_tensor(size, places):
    tensor = torch.zeros(size)
    tensor[torch.tensor(places, dtype=torch.long)] = torch.randn(len(places))
    return tensor


def random_tensor(size, share, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(size, generator=generator).to(dtype)
    tensor[torch.rand(size, generator=generator) >= share] = 0
    return tensor


def check(tensor, encoded):
    values, gaps = encoded
    assert (bits(values), gaps.tolist()) == loop_encode(bits(tensor))
    decoded = sparse.decode(values, gaps, tensor.shape)
    assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
    assert bits(decoded) == bits(tensor)


# The code


@FAST
@given(
    size=st.integers(1024, 4000),
    share=st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.3, 0.49]),
    dtype=st.sampled_from(list(BITS)),
    seed=st.integers(0, 1000),
)
def test_any_sparse_tensor_is_encoded_as_the_definition_says(size, share, dtype, seed):
    tensor = random_tensor(size, share, seed, dtype)
    if (encoded := sparse.encode(tensor)) is not None:
        check(tensor, encoded)
    else:
        assert share > 0.4  # half precision gains less


@pytest.mark.parametrize(
    "places",
    [
        *([], [0], [1999], [254], [255], [256], [509], [510], [0, 255, 510], [0, 256], [1744]),
        list(range(1000, 2000)),
    ],
)
def test_places_around_the_code_that_skips(places):
    tensor = sparse_tensor(2000, places)
    check(tensor, sparse.encode(tensor))


def test_every_bit_pattern_but_zero_is_a_value():
    special = [-0.0, 5e-324, -5e-324, float("inf"), float("-inf"), float("nan")]
    for dtype, whole in BITS.items():
        tensor = torch.zeros(30, 50, dtype=dtype)
        flat = tensor.view(-1).view(whole)
        lowest = torch.iinfo(whole).min
        nan = int(torch.tensor(float("nan"), dtype=dtype).view(whole))
        for place, pattern in enumerate([lowest, 1, lowest + 1, -1, nan + 1, nan + 5]):
            flat[17 * place] = pattern  # -0.0, denormals, NaNs with a payload and a sign
        tensor[20, : len(special)] = torch.tensor(special, dtype=torch.float64).to(dtype)
        values, gaps = sparse.encode(tensor)
        assert len(values) >= 10
        check(tensor, (values, gaps))


@pytest.mark.parametrize(
    ("tensor", "worth"),
    [
        (torch.zeros(42), False),  # the names would take as much
        (torch.zeros(43), True),
        (torch.zeros(0), False),
        (random_tensor(240, 0.1), True),
        (random_tensor(100, 0.4), False),  # three fifths, but for the names
        (torch.zeros(2000, dtype=torch.int64), False),
        (torch.zeros(2000, dtype=torch.bool), False),
        (torch.ones(2000), False),
        (-torch.zeros(2000), False),
        (random_tensor(20_000, 0.58), True),  # 5 bytes of 4: worth it below 3/5
        (random_tensor(20_000, 0.62), False),
        (random_tensor(20_000, 0.48, dtype=torch.float16), True),  # 3 bytes of 2: below 1/2
        (random_tensor(20_000, 0.52, dtype=torch.float16), False),
    ],
)
def test_only_what_saves_a_quarter_is_encoded(tensor, worth):
    encoded = sparse.encode(tensor)
    assert (encoded is not None) == worth
    if encoded is not None:
        size = sum(part.numel() * part.element_size() for part in encoded)
        assert size + 128 <= 0.75 * tensor.numel() * tensor.element_size()


# In a stored posterior


def write(directory, blobs):
    store.write(directory, kind="draws", blobs=blobs, fields={})


def read_manifest(directory):
    return json.loads((Path(directory) / "manifest.json").read_bytes())


def test_sparse_tensors_come_back_in_every_form(tmp_path):
    base = random_tensor(6000, 0.1)
    tensors = {
        "dense": torch.randn(2000),
        "transposed": base.reshape(60, 100).T,
        "expanded": torch.zeros(1).expand(2000),
        "parameter": nn.Parameter(base.reshape(2, 3, 1000)),
        "": base,
        "ü\n": base.double(),
    }
    write(tmp_path, {"b": tensors, "dense": {"w": torch.ones(3)}})
    loaded = store.read(tmp_path).load("b")
    assert list(loaded) == list(tensors)
    assert all(torch.equal(loaded[name], tensor.detach()) for name, tensor in tensors.items())
    body = read_manifest(tmp_path)
    assert body["version"] == 2
    assert body["blobs"][0]["sparse"] == {
        name: int(tensor.count_nonzero()) for name, tensor in tensors.items() if name != "dense"
    }
    assert "sparse" not in body["blobs"][1]


VALUES, GAPS = torch.ones(1), torch.tensor([5] + [255] * 7, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("values", "gaps", "changes", "message"),
    [
        (VALUES, GAPS, {}, None),
        (VALUES, None, {}, "not written by this package"),
        (torch.ones(2), GAPS, {}, "take 1 values, but there are 2"),
        (VALUES.int(), GAPS, {}, "not written by this package"),
        (VALUES.double(), GAPS, {}, "promises .*float32.*has .*float64"),
        (VALUES, GAPS[:-1], {}, "end after 1536 numbers.* has 2000"),
        (VALUES, GAPS, {"sparse": {"w": 1, "v": 1}}, "not written by this package"),
        # more numbers than any memory holds
        (VALUES, GAPS, {"tensors": {"w": {"dtype": "float32", "shape": [2**30, 2**32]}}}, "1791"),
    ],
)
def test_blobs_of_a_stranger(tmp_path, values, gaps, changes, message):
    write(tmp_path, {"b": {"w": sparse_tensor(2000, [5])}})
    stored = {".values.w": values, ".gaps.w": gaps}
    data = save({name: tensor for name, tensor in stored.items() if tensor is not None})
    digest = hashlib.sha256(data).hexdigest()
    entry = {
        "file": f"b-{digest[:16]}.safetensors",
        "bytes": len(data),
        "sha256": digest,
        **changes,
    }
    (tmp_path / "blobs" / entry["file"]).write_bytes(data)
    forge(tmp_path / "manifest.json", lambda body: body["blobs"][0].update(entry))
    stored = store.read(tmp_path)
    if message is None:
        assert stored.load("b")["w"].nonzero().tolist() == [[5]]
        return
    with pytest.raises(PosteriorFormatError, match=message):
        stored.load("b")


# Posteriors


def test_files_of_a_posterior_shrink_with_the_share_of_weights(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    sizes = {}
    for share in (1.0, 0.5, 0.02):
        mean = {name: random_tensor(p.shape, share) for name, p in net.named_parameters()}
        sd = {name: tensor.abs() for name, tensor in mean.items()}
        GaussianPosterior(net, Gaussian(0.1), mean, sd).save(tmp_path / str(share))
        sizes[share] = sum(len(data) for data in files_of(tmp_path / str(share)).values())
    assert sizes[0.02] <= 0.06 * sizes[1.0]
    assert sizes[0.5] <= 0.66 * sizes[1.0]
    loaded = Posterior.load(tmp_path / "0.02", net)
    for name, tensor in mean.items():
        assert torch.equal(loaded.mean[name], tensor)
        assert torch.equal(loaded.sd[name], sd[name])
