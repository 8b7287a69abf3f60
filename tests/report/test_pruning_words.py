"""What the results of pruning are said to mean, and what they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_bnn.report.pruning_words import about_pruning, pruning_sentence

INTERVALS: dict[str, tuple[float | None, float | None]] = {
    "accuracy": (0.96, 0.98),
    "nll": (0.09, 0.11),
    "rmse": (0.9, 1.1),
}


def block(
    scores: Sequence[dict[str, float | None]], fractions: Sequence[float], **options: Any
) -> dict[str, Any]:
    results = [{"fraction": f, "scores": s} for f, s in zip(fractions, scores, strict=True)]
    return {"unit": "weight", "total": 1234567, "results": results, **options}


def of_classes(*pairs: tuple[float, float | None]) -> list[dict[str, float | None]]:
    return [{"accuracy": accuracy, "nll": nll, "ece": 0.5} for accuracy, nll in pairs]


def test_the_largest_share_that_stays_and_the_first_that_does_not() -> None:
    scores = of_classes((0.97, 0.1), (0.9712, 0.1), (0.965, 0.1093), (0.955, 0.1))
    made = pruning_sentence(block(scores, (0, 0.5, 0.9, 0.995)), "classes", INTERVALS)
    assert made == (
        "with 90% of 1,234,567 weights removed, error 3.50% instead of 3.00% and NLL 0.109 "
        "instead of 0.100: none above the 95% interval of the whole model; with 99.5%, error "
        "4.50% and NLL 0.100: error above it."
    )


def test_a_better_share_after_a_worse_one_is_not_claimed() -> None:
    scores = of_classes((0.97, 0.1), (0.97, 0.2), (0.97, 0.1))
    made = pruning_sentence(block(scores, (0, 0.5, 0.9)), "classes", INTERVALS)
    assert made is not None
    assert made.startswith("already with 50% of 1,234,567 weights removed")
    assert "90%" not in made
    assert made.endswith("NLL above the 95% interval of the whole model.")


def test_the_order_of_the_results_does_not_matter() -> None:
    scores = of_classes((0.97, 0.1), (0.9712, 0.1), (0.5, 3.0))
    fractions = (0, 0.5, 0.9)
    forth = pruning_sentence(block(scores, fractions), "classes", INTERVALS)
    back = pruning_sentence(block(scores[::-1], fractions[::-1]), "classes", INTERVALS)
    assert forth == back


def test_a_score_that_is_not_finite_is_never_good() -> None:
    made = pruning_sentence(block(of_classes((0.97, None)), (0.5,)), "classes", INTERVALS)
    assert made == (
        "already with 50% of 1,234,567 weights removed, error 3.00% and NLL not finite: NLL above "
        "the 95% interval of the whole model."
    )


def test_regression_and_units() -> None:
    scores: list[dict[str, float | None]] = [{"rmse": 1.0, "nll": 0.1}, {"rmse": 12345.6, "nll": 0}]
    made = pruning_sentence(block(scores, (0, 0.25), unit="channel"), "numbers", INTERVALS)
    assert made == (
        "already with 25% of 1,234,567 units removed, RMSE 12,346 instead of 1.00 and NLL 0.00 "
        "instead of 0.100: RMSE above the 95% interval of the whole model."
    )


@pytest.mark.parametrize("fractions", [(0,), ()])
def test_nothing_removed_says_nothing(fractions: tuple[float, ...]) -> None:
    scores = of_classes((0.97, 0.1))[: len(fractions)]
    assert pruning_sentence(block(scores, fractions), "classes", INTERVALS) is None


def test_without_an_interval_nothing_is_claimed_of_it() -> None:
    scores = of_classes((0.97, 0.1), (0.5, 0.9))
    unknown: dict[str, tuple[float | None, float | None]] = {"nll": (None, None)}
    made = pruning_sentence(block(scores, (0, 0.5)), "classes", unknown)
    assert made == (
        "with 50% of 1,234,567 weights removed, error 50.00% instead of 3.00% and NLL 0.900 "
        "instead of 0.100."
    )


def test_lines() -> None:
    reason = pruning_sentence({"unavailable": "one draw has no variance."}, "classes", INTERVALS)
    assert reason == "no pruning by signal to noise: one draw has no variance."
    blocks = [{"name": "a", "pruning": {"text": None}}, {"name": "b", "pruning": {"text": reason}}]
    assert list(about_pruning(blocks)) == [("b", "note", reason)]
