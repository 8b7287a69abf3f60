import sys

import pytest
import torch
from torch import nn

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors import GaussianPosterior
from lightning_bnn.pruning import mean_network, prune
from lightning_bnn.pruning.export import export_network


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, first, second, scale=1.0):
        return scale * self.linear(first) - second


class Fixed(nn.Module):
    def forward(self, inputs):
        return inputs.view(4, -1)


class Branch(nn.Module):
    def forward(self, inputs):
        return inputs * 2 if inputs.sum() > 3 else inputs


class Noise(nn.Module):
    def forward(self, inputs):
        return inputs + torch.randn_like(inputs)


def pruned_posterior():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(4 * 4, 3),
    )
    mean = {name: torch.randn(p.shape) for name, p in net.named_parameters()}
    sd = {name: torch.rand(p.shape) for name, p in net.named_parameters()}
    fixed = {"1.running_mean": torch.randn(4), "1.running_var": torch.rand(4) + 0.5}
    return prune(GaussianPosterior(net, Categorical(), mean, sd, fixed), 0.5)


def by_hand(posterior, inputs):
    """The mean network's outputs, layer by layer from the posterior's own numbers."""
    mean, fixed = posterior.mean, posterior.fixed
    hidden = nn.functional.conv2d(inputs, mean["0.weight"], mean["0.bias"])
    centred = hidden - fixed["1.running_mean"].view(-1, 1, 1)
    hidden = centred / (fixed["1.running_var"].view(-1, 1, 1) + 1e-5).sqrt()
    hidden = hidden * mean["1.weight"].view(-1, 1, 1) + mean["1.bias"].view(-1, 1, 1)
    return hidden.clamp(min=0).flatten(1) @ mean["5.weight"].T + mean["5.bias"]


def test_both_formats_run_without_this_package(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    posterior = pruned_posterior()
    example = torch.full((3, 1, 4, 4), 0.123456789)
    assert export_network(posterior, tmp_path / "net.pt2", example) == tmp_path / "net.pt2"
    export_network(posterior, str(tmp_path / "new" / "net.onnx"), example)
    session = onnxruntime.InferenceSession(tmp_path / "new" / "net.onnx")
    mean = mean_network(posterior)
    for name in ("lightning_bnn", "pytorch_lightning", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it would fail
    program = torch.export.load(tmp_path / "net.pt2").module()
    for rows in (1, 2, 3, 64):
        batch = torch.randn(rows, 1, 4, 4)
        expected = by_hand(posterior, batch)
        torch.testing.assert_close(program(batch), expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(program(batch), mean(batch), rtol=1e-6, atol=1e-6)
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    # one file each, and the example, which may be private, in none of them
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.onnx"]
    number = example.flatten()[:4].numpy().tobytes()
    for path in (tmp_path / "net.pt2", tmp_path / "new" / "net.onnx"):
        assert number not in path.read_bytes()


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.randn(4, 5), torch.randn(4, 3)),
        [torch.randn(1, 5), torch.randn(1, 3)],
        {"first": torch.randn(4, 5), "second": torch.randn(3), "scale": 2.0},
    ],
    ids=["tuple", "one row", "mapping, no batch in one"],
)
def test_inputs_as_predict_takes_them(tmp_path, inputs):
    net = Two()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    path = export_network(net, tmp_path / "net.pt2", inputs)
    assert net.training
    assert net.linear.weight.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    program = torch.export.load(path).module()
    by_name = isinstance(inputs, dict)
    values = dict(inputs) if by_name else dict(zip(("first", "second"), inputs, strict=True))
    values["first"] = torch.randn(7, 5)
    if values["second"].ndim > 1:
        values["second"] = torch.randn(7, 3)
    found = program(**values) if by_name else program(*values.values())
    torch.testing.assert_close(found, net(**values))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Fixed(), "Fixed cannot be exported with an open batch size.*flatten"),
        (Branch(), "Branch cannot be exported.*branch on the values"),
        (Noise(), "not written.*random numbers.*not close"),
    ],
)
def test_networks_that_cannot_be_exported(tmp_path, net, message):
    path = tmp_path / "net.pt2"
    path.write_text("old")
    with pytest.raises(ConfigurationError, match=message):
        export_network(net, path, torch.randn(4, 4))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


class Slightly(nn.Module):
    """Not the network, but close to it."""

    def forward(self, inputs):
        return inputs * 1.001


def test_a_wrong_program_gets_no_file(tmp_path, monkeypatch):
    real = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda _, *args, **kw: real(Slightly(), *args, **kw)
    )
    with pytest.raises(ConfigurationError, match="not close"):
        export_network(nn.Identity(), tmp_path / "net.pt2", torch.randn(4, 3))
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_right_on_the_example_only_gets_no_file(tmp_path, monkeypatch):
    real = torch.export.export

    def fixed(net, args, kwargs, dynamic_shapes):
        return real(net, args, kwargs)

    monkeypatch.setattr(torch.export, "export", fixed)
    with pytest.raises(ConfigurationError, match=r"not written.*equal to 4"):
        export_network(nn.Linear(3, 2), tmp_path / "net.pt2", torch.randn(4, 3))
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigurationError, match=r"lightning-bnn\[export\].*onnxscript"):
        export_network(Branch(), tmp_path / "net.onnx", None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"path": "net.pt"}, ConfigurationError, "local file that ends in .*'net.pt'"),
        ({"path": "s3://bucket/net.pt2"}, ConfigurationError, "local file.*'s3://bucket/net.pt2'"),
        ({"example_inputs": None}, DataError, r"of the shapes \[\]"),
        ({"example_inputs": torch.zeros(0, 3)}, DataError, r"of the shapes \[\[0, 3\]\]"),
        ({"example_inputs": torch.zeros(2, 4)}, DataError, r"Linear fails .*\[\[2, 4\]\]"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, changes, error, message):
    monkeypatch.chdir(tmp_path)
    options = {"model": nn.Linear(3, 2), "path": "net.pt2", "example_inputs": torch.zeros(2, 3)}
    with pytest.raises(error, match=message):
        export_network(**{**options, **changes})
    assert not list(tmp_path.iterdir())
