"""The sentence of each verdict, with its figures computed by hand."""

import pytest

from lightning_bnn.report.sections.reliability import class_headline


def class_numbers(
    label, observed, temperature=1.0, after=(0.4, 0.01, 0.2), verdict_after="calibrated", ece=0.05
):
    names = ("nll", "ece", "brier")
    return {
        "verdict": {"label": label, "clustered": False},
        "invalid": {"count": 0, "impossible": 0},
        "scalars": {"ece": ece},
        "reliability": {
            "width": {
                "edges": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
                "count": [0, 10, 100, 100, 300],
                "stated": [None, 0.3, 0.5, 0.7, 0.9],
                "observed": [None, *observed],
                "lower": [None, 0.0, 0.4, 0.6, 0.87],
                "upper": [None, 0.8, 0.6, 0.8, 0.93],
            }
        },
        "temperature": {
            "value": temperature,
            "verdict_after": verdict_after,
            "before": {"nll": 0.5, "ece": 0.05, "brier": 0.3},
            "after": dict(zip(names, after, strict=True)),
        },
    }


@pytest.mark.parametrize(
    ("numbers", "level", "text"),
    [
        (
            class_numbers("calibrated", [0.3, 0.5, 0.7, 0.9]),
            "good",
            "well calibrated: no gap is beyond what 719 examples allow.",
        ),
        (  # two bins: (100 * 0.2 + 300 * 0.04) / 400 = 8 points
            class_numbers("over-confident", [0.3, 0.5, 0.5, 0.86], 1.04),
            "bad",
            "over-confident by 8 points between 0.6 and 1; temperature 1.04 would mend it "
            "(ECE 0.050 to 0.010).",
        ),
        (  # two runs, since the bin between is right
            class_numbers("over-confident", [0.3, 0.3, 0.7, 0.86], 1.5),
            "bad",
            "over-confident by 20 points between 0.4 and 0.6 and by 4 points between 0.8 and 1; "
            "temperature 1.50 would mend it (ECE 0.050 to 0.010).",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.5, 0.9], temperature=0.9),
            "bad",
            "over-confident by 20 points between 0.6 and 0.8; no single temperature mends it.",
        ),
        (
            class_numbers("under-confident", [0.9, 0.7, 0.7, 0.9], 0.71, verdict_after=None),
            "warn",
            "under-confident by 24 points between 0.2 and 0.6; temperature 0.71 would help "
            "(ECE 0.050 to 0.010).",
        ),
        (
            class_numbers("miscalibrated", [0.3, 0.7, 0.7, 0.8]),
            "bad",
            "miscalibrated: over-confident by 10 points between 0.8 and 1 and under-confident by "
            "20 points between 0.4 and 0.6.",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.7, 0.86], None, (None, None, None)),
            "bad",
            "over-confident by 4 points between 0.8 and 1; no single temperature mends it.",
        ),
        (
            class_numbers("over-confident", [0.3, 0.5, 0.7, 0.865], 1.03, ece=0.006),
            "note",
            "over-confident by less than a point on average: too small to matter "
            "(temperature 1.03).",
        ),
        (  # small on average, but not in the bin that shows it
            class_numbers("over-confident", [0.3, 0.5, 0.5, 0.9], 1.03, ece=0.006),
            "bad",
            "over-confident by 20 points between 0.6 and 0.8; temperature 1.03 would mend it "
            "(ECE 0.050 to 0.010).",
        ),
    ],
)
def test_classes(numbers, level, text):
    assert class_headline(numbers, "719 examples") == (level, text)


@pytest.mark.parametrize(
    ("temperature", "after", "verdict_after", "words"),
    [
        (1.6, (0.4, 0.04, 0.2), "over-confident", "1.60 would help (ECE 0.050 to 0.040)"),
        (1.6, (0.4, 0.06, 0.2), "miscalibrated", "no single temperature mends it"),
    ],
)
def test_what_a_temperature_would_do(temperature, after, verdict_after, words):
    observed = [0.3, 0.5, 0.7, 0.86]
    numbers = class_numbers("over-confident", observed, temperature, after, verdict_after)
    assert class_headline(numbers, "")[1].endswith(f"{words}.")


def test_too_few_examples_to_say_mended():
    numbers = class_numbers("over-confident", [0.3, 0.5, 0.7, 0.6], 1.6)
    numbers["reliability"]["width"]["lower"][4] = 0.65  # half a width of 14 points in most rows
    assert "would help" in class_headline(numbers, "")[1]


def test_dependent_rows_are_judged_on_the_whole():
    numbers = class_numbers("calibrated", [0.3, 0.5, 0.7, 0.8])
    numbers["verdict"]["clustered"] = True
    assert class_headline(numbers, "90 statements")[1] == (
        "neither over- nor under-confident on the whole, as far as 90 statements show."
    )
