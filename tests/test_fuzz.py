"""Wrong arguments of public functions, classes and methods: they work, or the error is ours.

What is tried comes from the public names and their signatures, so that a new option is tried
without a line here. Only a required argument of a new name needs a valid value in ``VALID``.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bnn
from lightning_bnn import (
    AveragePosterior,
    DrawsPosterior,
    DropoutPosterior,
    GaussianPosterior,
    LaplacePosterior,
    LinearPosterior,
    LowRankPosterior,
    MixturePosterior,
)
from lightning_bnn import likelihoods as lk
from lightning_bnn.cli import main
from lightning_bnn.curvature.diagonal import DiagonalCovariance
from lightning_bnn.dropout import DropoutLayer
from lightning_bnn.errors import LightningBNNError
from lightning_bnn.exchange import call_with
from lightning_bnn.launch import launch
from lightning_bnn.posteriors import Evidence, MatrixNormalPosterior, RankOnePosterior
from lightning_bnn.posteriors.rank_one import factor_sides
from lightning_bnn.priors import Normal
from lightning_bnn.selection import FlatLayout
from lightning_bnn.target import Target
from tests.launch.simulated import Simulated

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "500"))
PACKAGE = str(Path(lightning_bnn.__file__).parent)

INPUTS, LABELS, NUMBERS = torch.ones(6, 2), torch.arange(6) % 3, torch.linspace(-1, 1, 6)[:, None]


def net(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: scale * (0.1 + p.detach().abs()) for name, p in net().named_parameters()}


def draws_posterior() -> DrawsPosterior:
    return DrawsPosterior(net(), lk.Gaussian(1.0), [tensors(k) for k in range(1, 9)], chains=2)


def gaussian_posterior() -> GaussianPosterior:
    return GaussianPosterior(net(), lk.Gaussian(1.0), tensors(), tensors(0.1))


def low_rank_posterior() -> LowRankPosterior:
    directions = {name: torch.stack([t, -t]) for name, t in tensors().items()}
    return LowRankPosterior(net(), lk.Gaussian(1.0), tensors(), tensors(0.1), directions)


def matrix_normal_posterior() -> MatrixNormalPosterior:
    roots = {"0.weight.rows": torch.eye(3), "0.weight.columns": torch.eye(2)}
    return MatrixNormalPosterior(net(), lk.Gaussian(1.0), tensors(), tensors(0.1), roots)


def laplace_posterior() -> LaplacePosterior:
    return LaplacePosterior(net(), lk.Gaussian(1.0), tensors(), covariance())


def covariance() -> DiagonalCovariance:
    layout = FlatLayout(tensors())
    return DiagonalCovariance(layout, {"sd": torch.full((layout.size,), 0.1)})


def dropout_posterior() -> DropoutPosterior:
    return DropoutPosterior(net(), lk.Gaussian(1.0), dropout_layers())


def dropout_layers() -> list[DropoutLayer]:
    return [DropoutLayer("2", 0.5, "bernoulli", "features")]


def linear_posterior() -> LinearPosterior:
    return LinearPosterior(net(), lk.Gaussian(1.0), last_tensors(), last_deviations())


def last_tensors() -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors().items() if name.startswith("2.")}


def last_deviations() -> dict[str, torch.Tensor]:
    return {name: torch.stack([one, -one]) for name, one in last_tensors().items()}


def sides() -> dict[str, torch.Tensor]:
    lengths = {k: n for name, one in tensors().items() for k, n in factor_sides(name, one.shape)}
    return {name: torch.ones(2, length) for name, length in lengths.items()}


def rank_one_posterior() -> RankOnePosterior:
    return RankOnePosterior(net(), lk.Gaussian(1.0), tensors(), sides(), sides())


POSTERIORS: dict[str, Callable[[], Any]] = {
    "draws": draws_posterior,
    "Gaussian": gaussian_posterior,
    "low rank": low_rank_posterior,
    "matrix normal": matrix_normal_posterior,
    "Laplace": laplace_posterior,
    "dropout": dropout_posterior,
    "linear": linear_posterior,
    "rank one": rank_one_posterior,
    "mixture": lambda: MixturePosterior([draws_posterior(), gaussian_posterior()]),
    "average": lambda: AveragePosterior([draws_posterior(), gaussian_posterior()], [0.3, 0.7]),
}
PREDICTIVES: dict[str, Callable[[], Any]] = {
    "Gaussian": lambda: lk.Gaussian(1.0).predictive(torch.randn(4, 6, 1)),
    "heteroscedastic": lambda: lk.HeteroscedasticGaussian().predictive(torch.randn(4, 6, 2)),
    "Poisson": lambda: lk.Poisson().predictive(torch.randn(4, 6, 1)),
    "Bernoulli": lambda: lk.Bernoulli().predictive(torch.randn(4, 6)),
    "Categorical": lambda: lk.Categorical().predictive(torch.randn(4, 6, 3)),
}
TARGETS = {"Bernoulli": LABELS % 2, "Categorical": LABELS, "Poisson": (LABELS % 3)[:, None]}

# a valid value for required arguments, by name: made anew for each call
VALID: dict[str, Callable[[], Any]] = {
    "chains": lambda: 2,
    "count": lambda: 3,
    "covariance": covariance,
    "components": lambda: [draws_posterior(), draws_posterior()],
    "data": lambda: [(INPUTS, NUMBERS)],
    "device": lambda: "cpu",
    "evidences": lambda: [Evidence(-1.0), Evidence(-2.0, 0.1)],
    "cycle_length": lambda: 10,
    "deviations": lambda: {k: torch.stack([t, -t]) for k, t in tensors().items()},
    "dirpath": lambda: "here",
    "directory": lambda: "here",
    "draws": lambda: [tensors(), tensors(2.0)],
    "factors": sides,
    "factor_sd": sides,
    "fraction": lambda: 0.5,
    "fractions": lambda: [0.0, 0.5],
    "function": lambda: lambda tensor: tensor,
    "change": lambda: lambda name, tensor: tensor,
    "inputs": lambda: INPUTS,
    "layers": dropout_layers,
    "level": lambda: 0.9,
    "likelihood": lambda: lk.Gaussian(1.0),
    "loader": lambda: DataLoader(TensorDataset(INPUTS, NUMBERS), 3),
    "log_scores": lambda: np.log([[0.5, 0.1], [0.2, 0.3]]),
    "lr": lambda: 1e-3,
    "masks": lambda: {"0.weight": torch.ones(3, 2)},
    "mean": tensors,
    "name": lambda: "yacht",
    "net": net,
    "num_data": lambda: 10,
    "number": lambda: 0,
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
    "params": lambda: [nn.Parameter(torch.zeros(2))],
    "posterior": draws_posterior,
    "posteriors": lambda: [draws_posterior(), gaussian_posterior()],
    "prior": lambda: Normal(0.0, 1.0),
    "prior_net": net,
    "q": lambda: 0.5,
    "sd": lambda: tensors(0.1),
    "shared": tensors,
    "targets": lambda: NUMBERS,
    "test": lambda: TensorDataset(INPUTS, NUMBERS),
    "trained_net": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)),
    "train": lambda: TensorDataset(INPUTS, NUMBERS),
    "variance": tensors,
    "weights": tensors,
}

# what only those call who write a new method, or what is no function of a user's arguments
SKIPPED = {
    "BoundPrior", "PriorLike", "check_prior", "MomentumSampler", "Moments", "MemberBatch",
    "Splits", "collate_rows", "toy_curve", "TensorRows", "PruneCurve", "PruningResult", "Diagnosis",
    "Statistics", "rank_figure", "trace_figure", "to_arviz", "export_network", "Strategy",
    "MeanScore", "Target", "DrawStream", "Sampler", "prior_scales",
    # a tuple, what takes seconds, and what calls a function of the user's
    "Evidence", "annealed_importance", "thermodynamic_integration", "log_scores",
}  # fmt: skip
OF_WRITERS = {
    "from_stored", "from_manifest", "from_stream", "from_collected", "made_from", "number_of",
    "entry", "blobs", "manifest_fields", "outputs", "map", "tensors", "draws", "align",
    "from_tensors", "from_covariance", "covariance_of", "average", "variance_over_draws", "alike",
    "widened",
}  # fmt: skip

WRONG: list[Any] = [
    None, True, False, "", "text", "cpu", b"", [], [1, 2], ["a"], (), {}, {"a": 1}, {1: "a"},
    0, 1, 2, 3, -1, 2**70, -(2**70), 0.0, 0.5, 1.5, -0.5, math.nan, math.inf, -math.inf, 1e300,
    1j, Path("somewhere"), Path("a/b.ckpt"), object(), len, nn.Linear, nn.Linear(2, 1),
    lk.Gaussian(1.0), Normal(0.0, 1.0), np.float32(0.5), np.int64(3), np.float64("nan"),
    np.zeros(3), torch.tensor(3), torch.tensor(0.5), torch.tensor(math.nan),
    torch.zeros(0), torch.zeros(2), torch.zeros(6), torch.zeros(3, 2), torch.ones(6, 5),
    torch.full((6, 2), math.nan), torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, dtype=bool),
    torch.full((6, 1), -3.0), torch.zeros(6, 1, dtype=torch.complex64), torch.zeros(2, 3, 4, 5),
    DataLoader(TensorDataset(INPUTS, NUMBERS), 2), TensorDataset(INPUTS, NUMBERS),
]  # fmt: skip


def entries() -> Iterator[tuple[str, Callable[[], Callable[..., Any]], inspect.Signature]]:
    """Name, maker and signature of all that is called."""
    for room in (
        "likelihoods", "priors", "samplers", "families", "callbacks", "data", "metrics", "pruning",
        "diagnostics", "ensembles", "posteriors", "strategies", "evidence",
    ):  # fmt: skip
        module = importlib.import_module(f"lightning_bnn.{room}")
        for name in getattr(module, "__all__", ["SGMCMC", "DeepEnsemble", "VariationalBNN"]):
            thing = getattr(module, name)
            if name not in SKIPPED and not inspect.isabstract(thing) and callable(thing):
                yield f"{room}.{name}", partial(lambda made: made, thing), inspect.signature(thing)
    yield "Target", lambda: Target, inspect.signature(Target)
    yield "launch", lambda: launch, inspect.signature(launch)
    load = lightning_bnn.Posterior.load
    yield "Posterior.load", lambda: load, inspect.signature(load)
    for what, kinds in (("posterior", POSTERIORS), ("predictive", PREDICTIVES)):
        for kind, make in kinds.items():
            made = make()
            for name in sorted(set(dir(type(made))) - OF_WRITERS):
                if name.startswith(("_", "component_")) or name == "load":
                    continue
                method = inspect.getattr_static(type(made), name)
                if isinstance(method, property) or not callable(getattr(type(made), name)):
                    continue
                bound = partial(lambda make, name: getattr(make(), name), make, name)
                yield f"{kind} {what}.{name}", bound, inspect.signature(getattr(made, name))


def options(signature: inspect.Signature) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # a schedule's last_epoch is PyTorch's, with PyTorch's error
    of_torch = {"last_epoch"}
    return [p for p in signature.parameters.values() if p.kind in named and p.name not in of_torch]


class Opened(Exception):
    """All arguments have passed."""


class NoCluster(Simulated):
    """Stops where a cluster would be asked: here only the check of arguments is."""

    def __init__(self) -> None:
        super().__init__(lambda *_: (0.0, None))

    def open(self, recipe: Any) -> None:
        raise Opened


LAUNCH: dict[str, Callable[[], Any]] = {
    "make_bnn": lambda: partial(lightning_bnn.VariationalBNN, net(), lk.Gaussian(1.0)),
    "make_datamodule": lambda: dict,
    "members": lambda: 2,
    "storage": lambda: "memory://fuzz",
    "trainer": lambda: {"max_epochs": 1},
    "backend": NoCluster,
}


def valid(entry: str, name: str) -> Any:
    if entry == "launch":
        return LAUNCH[name]()
    if entry == "Posterior.load" and name == "directory":
        draws_posterior().save("stored")
        return "stored"
    if name == "targets":
        return TARGETS.get(entry.split()[0], NUMBERS)
    if entry == "posteriors.LinearPosterior" and name in ("mean", "deviations"):
        return last_tensors() if name == "mean" else last_deviations()
    if name == "predictives":
        kind = entry.split(" predictive")[0]
        return [PREDICTIVES[kind](), PREDICTIVES[kind]()]
    if entry == "evidence.average" and name == "posteriors":
        known = VALID[name]()
        for one in known:
            one.evidence = Evidence(-1.0)
        return known
    return VALID[name]()


ENTRIES = {name: (make, signature) for name, make, signature in entries()}


def required(entry: str) -> list[str]:
    found = [p.name for p in options(ENTRIES[entry][1]) if p.default is inspect.Parameter.empty]
    added = {"launch": ["backend"], "samplers": ["num_data"], "pruning": ["fractions"]}.get(
        entry.partition(".")[0], []
    )
    return [*found, *(name for name in added if name in ENTRIES[entry][1].parameters)]


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised on purpose: by a ``raise`` in a file of this package."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        if trace.tb_frame.f_code is call_with.__code__:
            return True  # the user's own network says that it cannot take such inputs
        trace = trace.tb_next
    own_call = trace.tb_frame.f_code is call_with.__code__
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    kind = isinstance(error, LightningBNNError | ValueError | TypeError)
    return own_call or (kind and file.startswith(PACKAGE) and line.startswith("raise"))


def attempt(entry: str, changed: dict[str, Any]) -> None:
    """Call with wrong values; raise what is no error of ours."""
    given = {name: valid(entry, name) for name in required(entry)} | changed
    make = ENTRIES[entry][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make()(**given)
        except Opened:
            pass
        except Exception as error:
            if not is_ours(error):
                raise AssertionError(
                    f"{entry}({', '.join(f'{k}={v!r:.60}' for k, v in changed.items())}) gives "
                    f"{type(error).__name__}: {str(error)[:200]}"
                ) from error
            return
    for name, value in changed.items():
        asked = str(ENTRIES[entry][1].parameters[name].annotation)
        # with a backend of the user's own, options of Ray are not looked at
        number = (
            entry != "launch" and asked.startswith(("int", "float")) and isinstance(value, float)
        )
        assert not (number and math.isnan(value)), f"{entry}({name}=nan) is accepted"


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    entry = draw(st.sampled_from(sorted(ENTRIES)))
    names = [p.name for p in options(ENTRIES[entry][1]) if p.name != "backend"]
    if not names:
        return entry, {}
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    return entry, {name: draw(st.sampled_from(WRONG)) for name in chosen}


@pytest.mark.parametrize("entry", sorted(ENTRIES))
def test_valid_values_are_known(entry: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Else all that follows would look at nothing but one missing argument."""
    monkeypatch.chdir(tmp_path)
    if entry == "launch":
        return  # it needs a cluster
    given = {name: valid(entry, name) for name in required(entry)}
    ENTRIES[entry][0]()(**given)


@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(call=calls())
def test_wrong_arguments_work_or_are_refused_by_us(
    tmp_path_factory: pytest.TempPathFactory, call: tuple[str, dict[str, Any]]
) -> None:
    before = os.getcwd()
    os.chdir(tmp_path_factory.getbasetemp())
    try:
        attempt(*call)
    finally:
        os.chdir(before)


WORDS = ["", "x", "-1", "0", "nan", "1e999", "no/such/folder", "s3:", "--", "[", "{}", "null", "🂡"]


@pytest.mark.parametrize("command", ["report", "prune", "compare", "status", "launch"])
def test_words_of_the_command_line_work_or_are_refused(
    command: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(command)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    names = sorted(set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) - {"--help"})
    assert len(names) > 1
    gaussian_posterior().save(tmp_path / "posterior")
    for _ in range(40):
        words = [chance.choice(WORDS)] if chance.random() < 0.2 else []
        for name in chance.sample(names, min(3, len(names))):
            words += [name, chance.choice([*WORDS, "posterior"])]
        try:
            code = main([command, *words])
        except SystemExit as error:
            code = error.code
        assert code in (1, 2), words
