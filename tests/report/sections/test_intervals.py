"""The sentence of a regression follows its verdict, and says nothing that could not be shown."""

import pytest

from lightning_bnn.report.sections.intervals import regression_headline


@pytest.mark.parametrize(
    ("label", "holds", "factor", "score", "level", "text"),
    [
        (
            "over-confident", 0.78, 1.43, 0.0, "bad",
            "intervals too narrow: the 90% interval holds 78%; widening by a factor 1.43 would "
            "make the 90% interval hold 90%.",
        ),
        (
            "over-confident", 0.91, 0.99, 0.0, "bad",
            "intervals too narrow: the 90% interval holds 91%, but beyond it the errors are larger "
            "than stated.",
        ),
        (
            "under-confident", 0.972, 0.7, 0.0, "warn",
            "intervals too wide: the 90% interval holds 97%; narrowing by a factor 0.70 would "
            "make the 90% interval hold 90%.",
        ),
        (
            "under-confident", 0.9, 1.0, 0.0, "warn",
            "intervals too wide: the 90% interval holds 90%, but beyond it the errors are smaller "
            "than stated.",
        ),
        (
            "biased", 0.85, 1.1, -0.31, "bad",
            "biased: predicts too high by 0.310 sd on average; the 90% interval holds 85%.",
        ),
        (
            "biased", 0.0, 1.1, 100.0, "bad",
            "biased: predicts too low by 100 sd on average; the 90% interval holds 0%.",
        ),
        (
            "nothing found", 0.9, 1.0, 0.0, "note",
            "no miscalibration found, but 400 examples would show only gaps above about 15 points "
            "in the 90% interval.",
        ),
        (
            "calibrated", 0.895, 1.0, 0.0, "good",
            "well calibrated: the 90% interval holds 90%, and 400 examples show nothing amiss.",
        ),
    ],
)  # fmt: skip
def test_regressions(label, holds, factor, score, level, text):
    assert regression_headline(regression_numbers(label, holds, factor, score), "400 examples") == (
        level,
        text,
    )


def regression_numbers(label, holds, factor, score=0.0, **verdict):
    return {
        "verdict": {
            "label": label,
            "z": 9.0,
            "clustered": False,
            "spread_outside": [],
        }
        | verdict,
        "scalars": {"coverage_90": holds, "widening_90": factor, "mean_score": score},
        "pit": {"count": [200, 200], "lower": [170, 170], "upper": [230, 230]},
        "coverage": {"nominal": [0.5, 0.9], "lower": [0.4, 0.7], "upper": [0.6, 1.0]},
    }


def test_a_spread_that_does_not_follow_the_errors():
    numbers = regression_numbers("miscalibrated", 0.9, 1.0, spread_outside=[0, 9])
    assert regression_headline(numbers, "") == (
        "warn",
        "calibrated on average, but the stated spread does not follow the errors; the 90% interval "
        "holds 90%.",
    )
    numbers["pit"]["count"] = [160, 240]
    assert "the shape of the distribution is wrong" in regression_headline(numbers, "")[1]
    numbers = regression_numbers("over-confident", 0.9, 1.0, spread_outside=[3])
    assert "at some stated spreads the errors are larger" in regression_headline(numbers, "")[1]


def test_a_wrong_spread_too_small_to_matter():
    """z = (r² - 1) √(n/2) with r = 1.01 and n = 40,000: 2.84."""
    numbers = regression_numbers("over-confident", 0.897, 1.01)
    numbers["pit"]["count"], numbers["verdict"]["z"] = [20_000, 20_000], 2.84
    assert regression_headline(numbers, "") == (
        "note",
        "intervals too narrow by about 1.0%: too small to matter (the 90% interval holds 90%).",
    )
    numbers["verdict"]["clustered"] = True  # z says nothing of the size then
    assert regression_headline(numbers, "")[0] == "bad"
