"""When weights are pruned, and how many by then."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from lightning_bnn.callbacks.pruning_schedule import PruningRule, check_places, resolve
from lightning_bnn.errors import ConfigurationError

# -------------------------------------------------------------------- the rule


def positions(rule: PruningRule, until: int) -> list[int]:
    """Where it prunes, if every position from 0 is looked at."""
    return [place for place in range(until + 1) if rule.due(place, place - 1)]


@pytest.mark.parametrize(
    ("begin", "end", "every", "expected"),
    [
        (10, 50, 15, [25, 40, 50]),  # the last distance is a shorter one
        (10, 50, 20, [30, 50]),
        (10, 50, 40, [50]),
        (10, 50, 1000, [50]),
        (10, 13, 1, [11, 12, 13]),
        (0, 4, 2, [2, 4]),
    ],
)
@pytest.mark.parametrize("shape", ["cubic", "linear"])
def test_pruning_comes_after_each_distance_and_at_the_end(
    shape: Any, begin: int, end: int, every: int, expected: list[int]
) -> None:
    rule = PruningRule(shape, 0.8, begin, end, every)
    assert positions(rule, 100) == expected
    assert rule.share(expected[-1]) == 0.8


def test_the_shares_are_those_of_the_formulas() -> None:
    cubic, linear = (PruningRule(shape, 0.8, 10, 50, 10) for shape in ("cubic", "linear"))
    places = [20, 30, 40, 50]
    wanted = [0.8 * (1 - (3 / 4) ** 3), 0.8 * (1 - (1 / 2) ** 3), 0.8 * (1 - (1 / 4) ** 3), 0.8]
    assert [cubic.share(place) for place in places] == pytest.approx(wanted, abs=1e-15)
    assert [linear.share(place) for place in places] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    for rule in (cubic, linear):
        assert rule.share(0) == rule.share(10) == 0.0
        assert rule.share(49) < 0.8
        assert rule.share(50) == rule.share(10**6) == 0.8


@pytest.mark.parametrize("begin", [0, 7])
def test_once_takes_all_at_the_beginning(begin: int) -> None:
    rule = PruningRule("once", 0.95, begin, begin, 1)
    assert positions(rule, 100) == [begin]
    assert rule.share(begin) == 0.95
    assert rule.due(begin + 50, begin - 1)
    assert not rule.due(begin + 50, begin)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(["cubic", "linear"]),
    fraction=st.floats(0, 1, exclude_max=True),
    begin=st.integers(0, 40),
    length=st.integers(1, 60),
    every=st.integers(1, 70),
    strides=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_the_share_only_rises_and_ends_at_the_fraction(
    shape: Any, fraction: float, begin: int, length: int, every: int, strides: list[int]
) -> None:
    """Whichever positions are looked at, as long as one is at or after the end."""
    rule = PruningRule(shape, fraction, begin, begin + length, every)
    place, seen, shares = 0, -1, [0.0]
    for stride in itertools.islice(itertools.cycle(strides), begin + length + 1):
        if rule.due(place, seen):
            assert place > begin
            shares.append(rule.share(place))
        place, seen = place + stride, place
    assert shares == sorted(shares)
    assert shares[-1] == fraction
    assert len(shares) <= 1 + math.ceil(length / every)


# -------------------------------------------------------------------- where it begins and ends


@pytest.mark.parametrize("place", [-0.1, 1.1, -1, True, "0.5", math.nan])
@pytest.mark.parametrize("name", ["start", "end"])
def test_places_that_are_none(name: str, place: Any) -> None:
    places: Any = {"start": 0.25, "end": 0.75, name: place}
    with pytest.raises(ConfigurationError, match=f"^{name}= is a share of training, from 0.0 to"):
        check_places(places["start"], places["end"], "cubic")


@pytest.mark.parametrize(("start", "end"), [(0.9, 0.5), (0.5, 0.5), (3, 3), (4, 2)])
def test_an_end_that_is_not_after_the_start(start: Any, end: Any) -> None:
    message = f"start= comes before end=; got {start} and {end}.* larger one to end="
    with pytest.raises(ConfigurationError, match=message):
        check_places(start, end, "linear")
    check_places(start, end, "once")  # which has no end


# -------------------------------------------------------------------- the rule for a fit


def fit_of(
    max_epochs: int | None = 10,
    max_steps: int = -1,
    batches: float = 20,
    accumulate: int = 1,
    callbacks: tuple[Any, ...] = (),
    automatic: bool = True,
) -> tuple[Any, Any]:
    """What a rule is made from: a trainer and a module."""
    trainer = SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
    )
    return trainer, SimpleNamespace(automatic_optimization=automatic)


def made(start: Any, end: Any, every: int | None = None, shape: Any = "cubic", **fit: Any) -> Any:
    rule = resolve(shape, 0.9, start, end, every, *fit_of(**fit))
    assert (rule.shape, rule.fraction) == (shape, 0.9)
    return rule.begin, rule.end, rule.every, rule.unit


@pytest.mark.parametrize(
    ("start", "end", "fit", "expected"),
    [
        (0.5, 0.9, {}, (100, 180, 2, "steps")),
        (5, 9, {}, (100, 180, 2, "steps")),
        (5, 0.9, {}, (100, 180, 2, "steps")),
        (0.0, 1.0, {}, (0, 200, 4, "steps")),
        (0.29, 0.57, {"batches": 10}, (29, 57, 1, "steps")),  # 0.29 · 100 is less than 29
        (0.5, 0.9, {"batches": 7, "accumulate": 2}, (20, 36, 1, "steps")),  # 4 steps an epoch
        (2, 3, {"batches": 7, "accumulate": 2}, (8, 12, 1, "steps")),
        (0.5, 0.9, {"max_epochs": -1, "max_steps": 100}, (50, 90, 1, "steps")),
        (0.5, 0.9, {"max_steps": 100}, (50, 90, 1, "steps")),  # what ends first
        (0.5, 0.9, {"max_steps": 1000}, (100, 180, 2, "steps")),
        (0.5, 0.9, {"max_epochs": -1, "max_steps": 50, "batches": math.inf}, (25, 45, 1, "steps")),
        (2, 4, {"max_epochs": -1}, (40, 80, 1, "steps")),  # a fit without an end
    ],
)
def test_places_become_steps(start: Any, end: Any, fit: Any, expected: Any) -> None:
    assert made(start, end, **fit) == expected


def test_there_are_at_most_50_prunings_unless_told() -> None:
    for batches in (1, 3, 7, 100, 999):
        rule = resolve("linear", 0.9, 0.0, 1.0, None, *fit_of(batches=batches))
        assert min(50, 10 * batches) / 2 <= len(positions(rule, 10 * batches)) <= 50
    assert made(0.5, 0.9, every=7) == (100, 180, 7, "steps")


def test_once_needs_no_end() -> None:
    assert made(0.5, 0.1, shape="once") == (100, 100, 1, "steps")
    assert made(1.0, 0.9, shape="once") == (200, 200, 1, "steps")
    assert made(2, 1, shape="once", batches=math.inf) == (2, 2, 1, "epochs")


@pytest.mark.parametrize(
    "fit",
    [
        {"batches": math.inf},
        {"callbacks": (GradientAccumulationScheduler({2: 4}),)},
        {"automatic": False},
        {"batches": math.inf, "max_epochs": -1},
    ],
)
def test_epochs_are_counted_where_their_steps_are_not_known(fit: Any) -> None:
    assert made(2, 6, **fit) == (2, 6, 1, "epochs")
    with pytest.raises(
        ConfigurationError, match="every_n_steps=5 needs training data with a length"
    ):
        made(2, 6, every=5, **fit)
    message = r"start=0.5 cannot be told in steps.* Pass start= and end= as numbers of epochs \(int"
    with pytest.raises(ConfigurationError, match=message):
        made(0.5, 0.9, **fit)


@pytest.mark.parametrize(
    ("start", "end", "shape", "fit", "message"),
    [
        (5, 11, "cubic", {}, "end after 220 steps, and this fit ends after 200"),
        (11, 1, "once", {}, "end after 220 steps, and this fit ends after 200"),
        (5, 11, "cubic", {"batches": math.inf}, "end after 11 epochs, and this fit ends after 10"),
        (0.5, 0.51, "cubic", {"max_epochs": 2}, "begin after 20 and end after 20 steps"),
        (9, 0.9, "linear", {}, "begin after 180 and end after 180 steps"),
    ],
)
def test_a_fit_that_is_too_short(start: Any, end: Any, shape: Any, fit: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(start, end, shape=shape, **fit)
