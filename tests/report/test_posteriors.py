"""Reports of posteriors and networks, and how they are found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DeepEnsemble, DrawsPosterior, Posterior, VariationalBNN
from lightning_bnn.data import Digits
from lightning_bnn.errors import ConfigurationError, DataError, PosteriorFormatError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.report import report, report_posteriors
from lightning_bnn.report.networks import (
    find_configuration,
    instantiate,
    load_configured,
    load_posterior,
    name_all,
    path_names,
    read_configuration,
)
from tests.callbacks.test_calibration_report import flat


def net(outputs: int = 3, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def draws(count: int = 3, likelihood: Any = None, outputs: int = 3) -> DrawsPosterior:
    states = [dict(net(outputs, seed).named_parameters()) for seed in range(count)]
    return DrawsPosterior(net(outputs), likelihood or Categorical(), states)


def data(count: int = 60, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def test_same_as_from_arrays() -> None:
    posterior, plain = draws(), net(seed=5)
    strange = torch.randn(25, 4, generator=torch.Generator().manual_seed(3)) * 2
    made = report_posteriors(
        {"draws": posterior, "plain": plain},
        DataLoader(data(), batch_size=16),
        ood={"far": DataLoader(strange, batch_size=10)},
        validation=DataLoader(data(40, seed=1), batch_size=16),
    )

    def predicted(x: Any) -> dict[str, Any]:
        alone = Categorical().predictive(plain(x)[None].detach())
        return {"draws": posterior.predict(x), "plain": alone}

    wanted = report(
        predicted(data().tensors[0]),
        data().tensors[1],
        ood={"far": predicted(strange)},
        validation=(predicted(data(40, seed=1).tensors[0]), data(40, seed=1).tensors[1]),
    )
    assert flat(made.numbers) == pytest.approx(flat(wanted.numbers), abs=1e-5)
    assert [block["draws"] for block in made.numbers["models"]] == [3, 1]


def test_data_modules() -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made = report_posteriors(
        {"net": linear}, Digits(), ood={"turned": Digits(rotate=90)}, likelihood=Categorical()
    )
    (block,) = made.numbers["models"]
    assert block["temperature"]["fitted_on"] == "validation"
    assert block["shift"]["turned"]["examples"] == made.numbers["data"]["examples"] == 360
    assert block["sections"][-1]["figures"][0]["pictures"][0]["image"].startswith("data:image/png")


def test_draws_and_single_posteriors() -> None:
    loader = DataLoader(data(), batch_size=16)
    made = report_posteriors(draws(3), loader, draws=2)
    assert made.numbers["models"][0]["draws"] == 2
    assert made.numbers["models"][0]["name"] == "posterior"
    bnn = VariationalBNN(net(), Categorical(), num_data=60)
    made = report_posteriors({"bnn": bnn, "ensemble": DeepEnsemble(net(), Categorical())}, loader)
    assert [block["name"] for block in made.numbers["models"]] == ["bnn", "ensemble"]


def test_numbers() -> None:
    inputs = torch.linspace(-1, 1, 40)[:, None]
    posterior = DrawsPosterior(
        nn.Linear(1, 1), Gaussian(0.3), [dict(nn.Linear(1, 1).named_parameters()) for _ in "abc"]
    )
    loader = DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=7)
    made = report_posteriors({"line": posterior}, loader, validation=loader)
    assert made.numbers["task"] == "regression"
    assert made.numbers["models"][0]["fit"] is not None


# -------------------------------------------------------------------- bad input


def test_says_what_is_wrong() -> None:
    loader = DataLoader(data(), batch_size=16)
    with pytest.raises(ConfigurationError, match="at least one model"):
        report_posteriors({}, loader)
    with pytest.raises(ConfigurationError, match=r"'net' is a network.*likelihood="):
        report_posteriors({"net": net()}, loader)
    with pytest.raises(ConfigurationError, match=r"'a' predicts a Cat.*'b' a Gaussian"):
        report_posteriors({"a": draws(), "b": draws(1, Gaussian(), 1)}, loader)
    with pytest.raises(ConfigurationError, match=r"3 classes.*'b'.*5 classes"):
        report_posteriors({"a": draws(), "b": draws(1, None, 5)}, loader)
    wrong = DataLoader(torch.zeros(8, 7), batch_size=4)
    with pytest.raises(DataError, match=r"ood\['letters'\].*\(4, 7\).*\(4,\)"):
        report_posteriors({"a": draws()}, loader, ood={"letters": wrong})
    with pytest.raises(DataError, match=r"data, tried on 'a'.*\(2, 7\)"):
        report_posteriors({"a": draws()}, [(torch.zeros(2, 7), torch.zeros(2).long())])
    with pytest.raises(DataError, match="data is empty"):
        report_posteriors({"a": draws()}, [])
    with pytest.raises(DataError, match=r"dict with \['x', 'y'\].*loader of pairs"):
        report_posteriors({"a": draws()}, [{"x": torch.zeros(2, 4), "y": torch.zeros(2)}])
    with pytest.raises(ConfigurationError, match=r"'a' is expected to be a posterior.*int"):
        report_posteriors({"a": 3}, loader)
    with pytest.raises(ConfigurationError, match="got Sequential without a name"):
        report_posteriors([net()], loader)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(8, 4), data(), iter([0]), [DataLoader(data()), DataLoader(data())], 3, "x.yaml"],
    ids=["tensor", "dataset", "iterator", "loaders", "number", "text"],
)
def test_what_is_no_loader(wrong: Any) -> None:
    loader = DataLoader(data(), batch_size=16)
    for what, options in (
        ("data", {"data": wrong}),
        (r"ood\['far'\]", {"data": loader, "ood": {"far": wrong}}),
        ("validation", {"data": loader, "validation": wrong}),
    ):
        text = rf"{what} is expected.*got {type(wrong).__name__}.*DataLoader"
        with pytest.raises(ConfigurationError, match=text):
            report_posteriors({"a": draws()}, **options)


# -------------------------------------------------------------------- folders


MODEL: dict[str, Any] = {
    "class_path": "lightning_bnn.VariationalBNN",
    "init_args": {
        "net": {
            "class_path": "lightning_bnn.nets.MLP",
            "init_args": {"inputs": 4, "hidden": [8], "outputs": 3},
        },
        "likelihood": "lightning_bnn.likelihoods.Categorical",
        "bayesian": "lightning_bnn.selection.last_layer",
    },
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run: its posterior, and its configuration beside it."""
    strategy = instantiate({"model": MODEL}, "model", "here")
    strategy.posterior().save(tmp_path / "run" / "posterior")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": MODEL}))
    return tmp_path / "run"


def test_a_folder_of_known_layers_has_its_network(saved: Path) -> None:
    assert find_configuration(saved / "posterior") == str(saved / "config.yaml")
    for path in (saved / "posterior", saved, str(saved) + "/", f"file://{saved}"):
        assert isinstance(load_posterior(path), Posterior)
    made = report_posteriors([saved / "posterior"], DataLoader(data(), batch_size=16))
    assert made.numbers["models"][0]["name"] == "run"


def test_the_file_knows_the_network_better_than_who_compares_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    assert "ReLU" in repr(load_posterior(saved, other).net)
    monkeypatch.setattr("lightning_bnn.posteriors.weights.network_recipe", lambda net: None)
    load_posterior(saved).save(saved / "posterior")
    assert "Tanh" in repr(load_posterior(saved, other).net)  # the network that was given
    with pytest.raises(ConfigurationError, match=r"another network.*pass --config .*if you trust"):
        load_posterior(saved, nn.Linear(4, 3))


def test_the_users_configuration_is_believed_where_it_fits(saved: Path, tmp_path: Path) -> None:
    layers = {**MODEL["init_args"]["net"]["init_args"], "activation": "torch.nn.Tanh"}
    for hidden, expected in (([8], "Tanh"), ([9], "ReLU")):  # of another posterior to compare
        net = {"class_path": "lightning_bnn.nets.MLP", "init_args": {**layers, "hidden": hidden}}
        mine = {**MODEL, "init_args": {**MODEL["init_args"], "net": net}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": mine}))
        assert expected in repr(load_configured(saved, tmp_path / "mine.yaml").net)


def test_a_folder_without_a_configuration(saved: Path) -> None:
    network = load_posterior(saved).net
    (saved / "config.yaml").unlink()
    assert isinstance(load_posterior(saved / "posterior"), Posterior)  # of known layers
    found = load_posterior(saved / "posterior", network)
    found.save("memory://without-configuration")
    assert isinstance(load_posterior("memory://without-configuration", network), Posterior)
    assert find_configuration(saved / "posterior") is None


def test_a_folder_without_a_posterior(tmp_path: Path) -> None:
    with pytest.raises(PosteriorFormatError, match=r"no posterior in .*manifest\.json"):
        load_posterior(tmp_path)
    with pytest.raises(ConfigurationError, match="nothing://x"):
        load_posterior("nothing://x")


def test_a_likelihood_of_ones_own(tmp_path: Path) -> None:
    class Own(Categorical):
        pass

    posterior = draws(2, Own())
    posterior.save(tmp_path / "own")
    found = load_posterior(tmp_path / "own", net(), Own())
    assert type(found.likelihood) is Own


def test_names() -> None:
    assert path_names(["runs/a/posterior", "runs/b/posterior"]) == ["a", "b"]
    assert path_names(["/x/runs/a/"]) == ["a"]
    assert path_names(["posterior"]) == [Path.cwd().name]
    assert path_names(["."]) == [Path.cwd().name]
    assert path_names(["s3://bucket/a/v0", "s3://bucket/b/v0"]) == ["a/v0", "b/v0"]
    with pytest.raises(ConfigurationError, match="not different"):
        path_names(["runs/a", "runs/a"])
    assert name_all("runs/a", "compare") == {"a": "runs/a"}
    with pytest.raises(ConfigurationError, match="compare="):
        name_all([net()], "compare")


def test_files_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    for content, message in (
        (None, "There is no configuration"), (b"\xff\xfe\x00", "cannot be read"),
        (b"a: [", "cannot be read"), (b"- 1", "mapping; got list"),
    ):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            read_configuration(file)
    with pytest.raises(ConfigurationError, match=r"has no data.*\['trainer'\]"):
        instantiate({"trainer": {}}, "data", file)
    with pytest.raises(ConfigurationError, match=r"data of .*some\.yaml is wrong"):
        instantiate({"class_path": "lightning_bnn.data.Nothing"}, "data", file)
    with pytest.raises(ConfigurationError, match=r"data of .*some\.yaml is wrong"):
        instantiate({"class_path": "os.system"}, "data", file)
    before = torch.get_rng_state()
    instantiate({"model": MODEL}, "model", file)
    assert torch.equal(before, torch.get_rng_state())
