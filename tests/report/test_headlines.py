"""The sentence of each verdict, with its figures computed by hand."""

import pytest

from lightning_bnn.report.headlines import class_headline, number_headline, percent, points


def class_numbers(label, came, temperature=1.0, after_nll=0.4, after_ece=0.01):
    return {
        "verdict": {"label": label},
        "reliability": {
            "width": {
                "edges": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
                "count": [0, 10, 100, 100, 300],
                "stated": [None, 0.3, 0.5, 0.7, 0.9],
                "came": [None, *came],
                "lower": [None, 0.0, 0.4, 0.6, 0.87],
                "upper": [None, 0.8, 0.6, 0.8, 0.93],
            }
        },
        "temperature": {
            "value": temperature,
            "before": {"nll": 0.5, "ece": 0.05},
            "after": {"nll": after_nll, "ece": after_ece},
        },
    }


@pytest.mark.parametrize(
    ("numbers", "level", "text"),
    [
        (
            class_numbers("calibrated", [0.3, 0.5, 0.7, 0.9]),
            "good",
            "well calibrated: every bin lies within what 719 examples allow.",
        ),
        (
            class_numbers("calibrated", [0.3, 0.5, 0.7, 0.86]),
            "good",
            "well calibrated: no gap is beyond chance in 719 examples.",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.7, 0.86], temperature=1.62),
            "bad",
            "over-confident by 4 points above 0.8; temperature 1.6 would mend it "
            "(ECE 0.050 to 0.010).",
        ),
        (  # two bins: (100 * 0.2 + 300 * 0.04) / 400 = 8 points
            class_numbers("over-confident", [0.3, 0.5, 0.5, 0.86], 1.62, after_ece=0.06),
            "bad",
            "over-confident by 8 points above 0.6; temperature 1.6 would mend it "
            "(NLL 0.500 to 0.400).",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.5, 0.9], temperature=0.9),
            "bad",
            "over-confident by 20 points between 0.6 and 0.8; no single temperature mends it.",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.7, 0.9], temperature=1.2),
            "bad",
            "over-confident on the whole, though no single bin shows it; temperature 1.2 would "
            "mend it (ECE 0.050 to 0.010).",
        ),
        (
            class_numbers("under-confident", [0.9, 0.7, 0.7, 0.9], 0.71),
            "warn",
            "under-confident by 24 points between 0.2 and 0.6; temperature 0.71 would mend it "
            "(ECE 0.050 to 0.010).",
        ),
        (
            class_numbers("under-confident", [0.3, 0.5, 0.7, 0.95], 0.7, after_nll=0.6),
            "warn",
            "under-confident by 5 points above 0.8; no single temperature mends it.",
        ),
        (
            class_numbers("miscalibrated", [0.3, 0.7, 0.7, 0.8]),
            "bad",
            "miscalibrated: over-confident by 10 points above 0.8 and under-confident by 20 points "
            "between 0.4 and 0.6.",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.7, 0.86], None, None, None),
            "bad",
            "over-confident by 4 points above 0.8; no single temperature mends it.",
        ),
    ],
)
def test_classes(numbers, level, text):
    assert class_headline(numbers, "719 examples") == (level, text)


def test_a_bin_that_starts_at_zero():
    numbers = class_numbers("over-confident", [0.3, 0.5, 0.7, 0.9])
    curve = numbers["reliability"]["width"]
    curve["count"][0], curve["stated"][0], curve["came"][0] = 50, 0.15, 0.02
    curve["lower"][0], curve["upper"][0] = 0.05, 0.3
    assert class_headline(numbers, "")[1].startswith("over-confident by 13 points below 0.2;")


@pytest.mark.parametrize(
    ("label", "holds", "factor", "score", "level", "text"),
    [
        (
            "over-confident", 0.78, 1.43, 0.0, "bad",
            "intervals too narrow: the 90% interval holds 78%; widening by a factor 1.4 would "
            "mend it.",
        ),
        (
            "over-confident", 0.91, 0.99, 0.0, "bad",
            "intervals too narrow far out: the 90% interval holds 91%, but the largest errors go "
            "beyond.",
        ),
        (
            "under-confident", 0.972, 0.7, 0.0, "warn",
            "intervals too wide: the 90% interval holds 97%; narrowing by a factor 0.7 would "
            "mend it.",
        ),
        (
            "under-confident", 0.9, 1.0, 0.0, "warn",
            "intervals too wide: the 90% interval holds 90%, and large errors are rarer than "
            "stated.",
        ),
        (
            "biased", 0.85, 1.1, -0.31, "bad",
            "biased: predicts too high by 0.31 sd on average; the 90% interval holds 85%.",
        ),
        (
            "biased", 0.85, 1.1, 0.3, "bad",
            "biased: predicts too low by 0.3 sd on average; the 90% interval holds 85%.",
        ),
        (
            "miscalibrated", 0.9, 1.0, 0.0, "bad",
            "miscalibrated: the shape of the distribution is wrong; the 90% interval holds 90%.",
        ),
        (
            "calibrated", 0.895, 1.0, 0.0, "good",
            "well calibrated: the 90% interval holds 90%, and 400 examples show nothing amiss.",
        ),
    ],
)  # fmt: skip
def test_numbers(label, holds, factor, score, level, text):
    scalars = {"coverage_90": holds, "widening_90": factor, "mean_score": score}
    block = {"verdict": {"label": label}, "scalars": scalars}
    assert number_headline(block, "400 examples") == (level, text)


def test_no_rows():
    assert class_headline(class_numbers("unknown", [None] * 4), "")[0] == "note"


def test_shares_and_gaps():
    assert [percent(share) for share in (0.0, 0.004, 0.5, 0.995, 1.0)] == [
        "0%", "0.4%", "50%", "99.5%", "100%",
    ]  # fmt: skip
    assert [points(gap) for gap in (0.0, 0.0149, 0.02)] == [
        "less than 1 point", "1 point", "2 points",
    ]  # fmt: skip
