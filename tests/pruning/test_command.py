"""The command, in process, on posteriors of networks of digits that are made by hand."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import Tensor, nn

from lightning_bnn import GaussianPosterior, Posterior
from lightning_bnn.cli import main
from lightning_bnn.data import Digits
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.nets import MLP
from lightning_bnn.pruning import mean_network, prune, prune_curve
from lightning_bnn.report.networks import load_posterior

DATA = Path(__file__).parents[2] / "configs" / "data" / "digits.yaml"
DRAWS = 6
SHAPES = {"1.weight": (32, 64), "3.weight": (16, 32), "5.weight": (10, 16)}
MLP_PARTS = {"inputs": 64, "hidden": [32, 16], "outputs": 10}


class NoTestData(pl.LightningDataModule):
    def test_dataloader(self) -> list[Any]:
        return []


def described(name: str, **arguments: Any) -> dict[str, Any]:
    """A class or a function as YAML has it."""
    return {"class_path": name, "init_args": arguments}


def gaussian(net: nn.Module, seed: int = 1) -> GaussianPosterior:
    """Around the values of a network, with standard deviations from 0.01 to 0.09."""
    noise = torch.Generator().manual_seed(seed)
    mean = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    sd = {name: 0.01 + 0.08 * torch.rand(m.shape, generator=noise) for name, m in mean.items()}
    return GaussianPosterior(net, Categorical(), mean, sd)


def save(folder: Path, posterior: Posterior, net: dict[str, Any]) -> Path:
    """A run as ``lightning-bnn fit`` leaves it: a configuration, and the posterior below it."""
    content = {
        "seed_everything": 0,
        "model": described(
            "lightning_bnn.VariationalBNN", net=net, predict_draws=DRAWS,
            likelihood="lightning_bnn.likelihoods.Categorical",
        ),
        "data": described("lightning_bnn.data.Digits", batch_size=90),
        "trainer": {
            "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }  # fmt: skip
    posterior.save(folder / "posterior")
    (folder / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder


def command(*words: object) -> int:
    return main(["prune", *map(str, words)])


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def size(folder: Path) -> int:
    """The bytes of a posterior, without the configuration."""
    return sum(len(data) for name, data in files(folder).items() if name != "config.yaml")


def cells(printed: str, first: str) -> list[str]:
    """The cells of the one printed row that begins with a word."""
    (found,) = (line for line in printed.splitlines() if line.split()[:1] == [first])
    return found.split()


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """The test data, 360 of them."""
    data = Digits()
    data.setup()
    inputs, targets = data.splits.test.tensors
    return inputs, targets


@pytest.fixture(scope="module")
def posterior() -> GaussianPosterior:
    """Of a network that has learned a little."""
    data = Digits()
    data.setup()
    inputs, targets = data.splits.train.tensors
    torch.manual_seed(0)
    net = MLP(64, [32, 16], 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return gaussian(net)


@pytest.fixture(scope="module")
def run(posterior: GaussianPosterior, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "vi"
    return save(folder, posterior, described("lightning_bnn.nets.MLP", **MLP_PARTS))


@dataclass
class Outcome:
    """What a command has left: a folder with everything that was written, and what it printed."""

    folder: Path
    printed: str

    @property
    def small(self) -> Path:
        return self.folder / "small"


def outcome(folder: Path, *words: object) -> Outcome:
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert command(*words, "--out", folder / "small") == 0
    return Outcome(folder, printed.getvalue())


@pytest.fixture(scope="module")
def pruned(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Single weights, 90 % of them."""
    folder = tmp_path_factory.mktemp("pruned")
    return outcome(
        folder, "--posterior", run, "--fraction", 0.9, "--data", DATA, "--draws", DRAWS,
        "--figure", folder / "new" / "curve.json",
    )  # fmt: skip


@pytest.fixture(scope="module")
def compacted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Whole units, 25 % of them, and everything that can be written beside."""
    folder = tmp_path_factory.mktemp("compacted")
    return outcome(
        folder, "--posterior", run / "posterior", "--fraction", 0.25, "--unit", "channel",
        "--compact", "--data", run / "config.yaml", "--draws", 2, "--fractions", "0.125,0",
        "--figure", folder / "curve.png", "--report", folder / "page.html",
        "--export", folder / "net.pt2",
    )  # fmt: skip


# ------------------------------------------------------------------------------- single weights


def test_the_table_has_a_row_for_each_share_up_to_the_fraction(
    posterior: GaussianPosterior, pruned: Outcome
) -> None:
    curve = prune_curve(posterior, Digits(), (0, 0.5, 0.75, 0.9), draws=DRAWS)
    numbers = json.loads((pruned.folder / "new" / "curve.json").read_text())
    expected = curve.to_dict()
    # stacked or in a loop, as each measures: the scores are the same but for rounding
    for ours, theirs in zip(numbers["results"], expected["results"], strict=True):
        assert ours.pop("scores") == pytest.approx(theirs.pop("scores"), rel=1e-4)
    assert numbers == expected
    shown = "\n".join(pruned.printed.splitlines()[:6])
    assert shown.startswith(str(curve).splitlines()[0])
    assert [line.split()[:4] for line in shown.splitlines()[2:]] == [
        line.split()[:4] for line in str(curve).splitlines()[2:]
    ]
    assert "\n\nThe figure is in " in pruned.printed
    assert curve.results[0].scores["accuracy"] > 0.9  # the table is about something
    assert curve.results[0].scores["nll"] + 0.1 < curve.results[-1].scores["nll"]


def test_what_is_saved_is_the_pruned_posterior_and_each_layer_is_counted(
    posterior: GaussianPosterior, pruned: Outcome
) -> None:
    expected, loaded = prune(posterior, 0.9), load_posterior(pruned.small)
    assert isinstance(loaded, GaussianPosterior)
    for name, mean in expected.mean.items():
        assert torch.equal(loaded.mean[name], mean)
        assert torch.equal(loaded.sd[name], expected.sd[name])
    left = {name: int(expected.mean[name].count_nonzero()) for name in SHAPES}
    left["together"] = sum(left.values())
    sizes = {name: posterior.mean[name].numel() for name in SHAPES}
    sizes["together"] = sum(sizes.values())
    for name, size in sizes.items():
        row = [name, f"{size:,}", f"{left[name]:,}", f"{1 - left[name] / size:.2%}"]
        assert cells(pruned.printed, name) == row


def test_it_is_smaller_on_the_disk(run: Path, pruned: Outcome) -> None:
    before, after = size(run / "posterior"), size(pruned.small)
    assert after < 0.5 * before
    sizes = f"{after / 1e3:.1f} kB instead of {before / 1e3:.1f} kB ({after / before:.1%})."
    assert pruned.printed.endswith(f"It takes {sizes}\nThe pruned posterior is in {pruned.small}\n")
    assert not (pruned.small / "config.yaml").exists()  # which nobody has named


# --------------------------------------------------------------------------------- whole units


def test_units_are_taken_out_of_the_network(
    posterior: GaussianPosterior, compacted: Outcome, digits: tuple[Tensor, Tensor]
) -> None:
    zeroed = prune(posterior, 0.25, unit="channel")
    kept = [int(zeroed.mean[name].any(1).sum()) for name in ("1.weight", "3.weight")]
    assert sum(kept) == 36  # of 48 units
    loaded = load_posterior(compacted.small)
    widths = [(net.in_features, net.out_features) for net in list(loaded.net)[1::2]]
    assert widths == [(64, kept[0]), (kept[0], kept[1]), (kept[1], 10)]
    counts = [sum(p.numel() for p in one.net.parameters()) for one in (loaded, posterior)]
    sentence = f"The compact network has {counts[0]:,} of {counts[1]:,} parameters."
    assert sentence in compacted.printed
    assert "48 units by signal-to-noise ratio" in compacted.printed
    shares = re.findall(r"^ +([\d.]+) %", compacted.printed, re.MULTILINE)
    assert shares == ["0", "12.5", "25"]
    inputs, _ = digits
    torch.testing.assert_close(mean_network(loaded)(inputs), mean_network(zeroed)(inputs))


def test_the_exported_program_is_that_of_the_compact_network(
    posterior: GaussianPosterior, compacted: Outcome, digits: tuple[Tensor, Tensor]
) -> None:
    program = torch.export.load(compacted.folder / "net.pt2").module()
    zeroed = mean_network(prune(posterior, 0.25, unit="channel"))
    torch.testing.assert_close(program(digits[0][:7]), zeroed(digits[0][:7]))
    stored = sum(tensor.numel() for tensor in program.state_dict().values())
    assert stored == sum(p.numel() for p in load_posterior(compacted.small).net.parameters())
    assert f"The mean network is in {compacted.folder / 'net.pt2'}\n" in compacted.printed


def test_the_report_and_the_figure_lie_where_they_were_asked_for(compacted: Outcome) -> None:
    assert (compacted.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (compacted.folder / "page.html").read_text().startswith("<!doctype html>")
    numbers = json.loads((compacted.folder / "page.json").read_text())
    whole, rest = numbers["models"]
    assert (whole["name"], rest["name"]) == ("vi", "vi, 25 % removed")
    assert (whole["draws"], rest["draws"]) == (2, 2)
    assert whole["pruning"]["unit"] == "channel"  # as in the table
    accuracies = [block["scalars"]["accuracy"] for block in (whole, rest)]
    table = [float(line.split()[4]) for line in compacted.printed.splitlines() if " % " in line]
    assert accuracies == pytest.approx([table[0], table[-1]], abs=1e-4)
    for name, file in (("figure", "curve.png"), ("report", "page.html")):
        assert f"The {name} is in {compacted.folder / file}\n" in compacted.printed


# ------------------------------------------------------------------------------- other options


@pytest.fixture
def memory(run: Path) -> Iterator[str]:
    """The run at an address that is no folder of the machine."""
    address = "memory://test-command"
    for name, data in files(run).items():
        with fsspec.open(f"{address}/vi/{name}", "wb") as file:
            file.write(data)
    yield address
    fsspec.filesystem("memory").rm("/test-command", recursive=True)


def test_addresses(
    memory: str, posterior: GaussianPosterior, digits: tuple[Tensor, Tensor]
) -> None:
    words = ["--posterior", f"{memory}/vi", "--fraction", 0.5, "--scope", "layer",
             "--out", f"{memory}/small/"]  # fmt: skip
    assert command(*words) == 0
    loaded = load_posterior(f"{memory}/small").predict(digits[0], 2)
    expected = prune(posterior, 0.5, scope="layer").predict(digits[0], 2).mean
    torch.testing.assert_close(loaded.mean, expected)
    assert command(*words) == 1  # there is a posterior now


def test_a_posterior_without_configuration(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "far" / "away"
    shutil.copytree(run / "posterior", moved)
    words = ["--posterior", moved, "--fraction", 0.5, "--out", tmp_path / "small"]
    assert command(*words) == 0  # a network of known layers
    copied = tmp_path / "small" / "config.yaml"
    assert not copied.exists()
    shutil.rmtree(tmp_path / "small")
    assert command(*words, "--config", run / "config.yaml") == 0
    assert copied.read_bytes() == (run / "config.yaml").read_bytes()


# ------------------------------------------------------------------------------------ bad input


def placed(words: list[str], folder: Path) -> list[str]:
    """D stands for the file of the data, F for a folder."""
    places = {"D": str(DATA), "F": str(folder)}
    return [re.sub(r"^[DF](?=/|$)", lambda found: places[found[0]], word) for word in words]


WRONG_WORDS: list[tuple[list[str], str]] = [
    (["--fraction", "1"], "from 0 up to but not including 1, such as 0.95; got 1.0"),
    (["--data", "D", "--fractions", "0,1.5"], "got 1.5"),
    (["--fractions", "0,0.5"], "--fractions needs data: pass --data FILE"),
    (["--export", "F/x.pt2"], "--export needs data: pass --data FILE"),
    (["--data", "D", "--figure", "F/x.txt"], ".png, .svg, .pdf (the figure) or .json"),
    (["--data", "D", "--report", "F/x.pdf"], "such as 'report.html'; got"),
    (["--data", "D", "--export", "F/x.pt"], "that ends in .pt2 (torch.export) or .onnx; got"),
    (["--data", "D", "--figure", "D/x.png"], "--figure cannot be written to"),
    (["--out", "D/small"], "--out cannot be written to"),
    (["--out", "nothing://small"], "Protocol not known: nothing"),
]


@pytest.mark.parametrize(("given", "text"), WRONG_WORDS)
def test_wrong_words_are_refused_before_anything_is_read(
    given: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--posterior", tmp_path / "nowhere", "--fraction", 0.5]
    assert command(*words, *placed(given, tmp_path)) == 1
    said = capsys.readouterr()
    assert said.err.startswith("lightning-bnn prune: ")
    assert text in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(
    run: Path, pruned: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(pruned.small)
    assert command("--posterior", run, "--fraction", 0.5, "--out", pruned.small) == 1
    assert f"a new or empty folder; something is in {pruned.small}" in capsys.readouterr().err
    assert files(pruned.small) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--fraction", "0.9999"], "The largest fraction is 0.998"),
        (["--protect", "1.*", "--protect", "3.*", "5.*"], "leaves nothing to prune"),
        (["--data", "F/none.yaml"], "There is no configuration"),
        (["--data", "F/flat.yaml"], "has shape (10, 1)"),
        (["--data", "F/empty.yaml"], "is empty"),
        (["--data", "F/empty.yaml", "--export", "F/net.pt2"], "The test data of --data is empty"),
        (["--posterior", "F"], "There is no posterior in"),
    ],
)
def test_what_does_not_fit_the_posterior_leaves_nothing_behind(
    run: Path, tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = described("lightning_bnn.data.ToyRegression", batch_size=10)
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump(flat))
    (tmp_path / "empty.yaml").write_text(f"class_path: {__name__}.NoTestData\n")
    before = files(tmp_path)
    base = ["--posterior", run, "--fraction", 0.5, "--out", tmp_path / "small"]
    assert command(*base, *placed(words, tmp_path)) == 1
    assert text in capsys.readouterr().err
    assert files(tmp_path) == before
