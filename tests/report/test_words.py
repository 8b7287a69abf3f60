"""The summary of real documents: which sentences there are, and what they say."""

import math

import pytest
import torch

from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.numbers import report_numbers
from lightning_bnn.report.words import _listed, plural
from tests.report.predictions import (
    class_data,
    class_statistics,
    number_data,
    number_statistics,
    outside_of,
)


def lines(numbers, model="all"):
    return [
        (line["level"], line["text"])
        for line in numbers["summary"]
        if model == "all" or line["model"] == model
    ]


def found(numbers, *words):
    """The only sentence with these words, and its level."""
    hits = [entry for entry in lines(numbers) if all(word in entry[1] for word in words)]
    assert len(hits) == 1, (words, lines(numbers))
    return hits[0]


def test_a_calibrated_model():
    numbers = report_numbers({"net": class_statistics(*class_data(count=2000))})
    level, text = lines(numbers, "net")[0]
    assert level == "good"
    assert text == "well calibrated: every bin lies within what 2,000 examples allow."


def test_an_over_confident_model():
    data = class_data(count=2000, sharpen=2.0, draws=1)
    numbers = report_numbers({"net": class_statistics(*data)})
    level, text = found(numbers, "over-confident by", "would mend it")
    assert level == "bad"
    assert "temperature 2" in text or "temperature 1.9" in text
    assert found(numbers, "one set of weights")[0] == "note"


def test_answers_that_keep_the_errors_low():
    numbers = report_numbers({"net": class_statistics(*class_data(count=500))}, risk=0.1)
    coverage = numbers["models"][0]["scalars"]["coverage_at_risk"]
    assert f"only the {100 * coverage:.0f}% it is surest of" in found(numbers, "to 10%")[1]
    hopeless = class_statistics(torch.zeros(1, 50, 2), torch.arange(50) % 2)
    assert found(report_numbers({"net": hopeless}), "no share of the answers")[0] == "warn"
    easy = class_statistics(9 * torch.eye(2).repeat(25, 1)[None], torch.arange(50) % 2)
    assert "surest" not in str(lines(report_numbers({"net": easy})))


@pytest.mark.parametrize(
    ("scale", "level", "words"),
    [(0.01, "good", "told apart with AUROC"), (0.5, "warn", "partly"), (1.0, "bad", "not seen")],
)
def test_shift(scale, level, words):
    foreign = scale * class_data(count=300, seed=8)[0]
    outside = {"net": {"letters": outside_of(CategoricalPredictive(foreign))}}
    numbers = report_numbers({"net": class_statistics(*class_data(count=300))}, outside)
    line = next(line for line in numbers["summary"] if line["text"].startswith("letters: "))
    assert (line["model"], line["level"]) == ("net", level)
    assert words in line["text"]
    areas = {k: v["auroc"] for k, v in numbers["models"][0]["shift"]["letters"]["by"].items()}
    best = max(areas, key=areas.get)
    assert f"{areas[best]:.2f}" in line["text"]
    assert best.replace("_", " ") in line["text"]


def test_shift_of_several_models_and_broken_predictions():
    logits, targets = class_data(count=300)
    flat = class_data(count=50, seed=8)[0] * 0.01
    flat[0, :2] = math.nan
    models = {"a": class_statistics(logits, targets), "b": class_statistics(logits, targets)}
    outside = {
        "a": {"letters": outside_of(CategoricalPredictive(flat))},
        "b": {"letters": outside_of(CategoricalPredictive(logits))},
    }
    numbers = report_numbers(models, outside)
    assert found(numbers, "letters: told apart", "(a); b reaches 0.5")[0] == "good"
    assert found(numbers, "letters: 2 predictions not finite")[0] == "bad"


def test_where_the_uncertainty_comes_from():
    """Agreeing draws leave it in the data; draws that shout at each other do not."""
    logits, targets = class_data(count=300, draws=1)
    agreeing = report_numbers({"net": class_statistics(logits.expand(4, -1, -1), targets)})
    assert "100% of the uncertainty is in the data itself" in found(agreeing, "change little")[1]
    loud = 30 * torch.randn(8, 300, 4, generator=torch.Generator().manual_seed(0)).double()
    torn = report_numbers({"net": class_statistics(loud, targets)})
    assert "more training data would help." in found(torn, "is epistemic")[1]
    some = report_numbers({"net": number_statistics(*number_data(count=300, draws=8))})
    assert some["models"][0]["scalars"]["epistemic_share"] < 0.2
    assert found(some, "change little")


def test_comparison():
    logits, targets = class_data(count=400)
    noisy = logits + 2 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    models = {"good": class_statistics(logits, targets), "noisy": class_statistics(noisy, targets)}
    numbers = report_numbers(models)
    text = found(numbers, "rows; the NLL of good is clearly better than that of noisy.")[1]
    wins = sum(row["values"][0]["best"] for row in numbers["comparison"]["rows"])
    assert text.startswith(f"good is best in {wins} of 9 rows")
    equal = report_numbers({"a": models["good"], "b": models["good"]})
    assert found(equal, "the NLL of a is lowest, but not clearly")


def test_invalid_predictions_are_counted_and_named():
    logits, targets = class_data(count=100)
    damaged = logits.clone()
    damaged[0, [4, 9, 17]] = math.nan
    one = logits.clone()
    one[0, 5] = math.nan
    many = logits.clone()
    many[0, :50] = math.nan
    models = {
        "three": class_statistics(damaged, targets),
        "one": class_statistics(one, targets),
        "many": class_statistics(many, targets),
        "none": class_statistics(logits, targets),
    }
    numbers = report_numbers(models)
    assert lines(numbers, "three")[1] == (
        "bad",
        "3 predictions are not finite and left out: examples 4, 9 and 17.",
    )
    assert lines(numbers, "one")[1][1] == "1 prediction is not finite and left out: example 5."
    assert "examples 0, 1, 2, 3, 4, ..." in lines(numbers, "many")[1][1]
    assert numbers["models"][2]["invalid"]["examples"] == list(range(20))
    assert "100 examples" in lines(numbers, "none")[0][1]
    assert found(numbers, "only the 50 examples that every model could predict")[0] == "warn"


def test_impossible_targets():
    logits = torch.tensor([[[0.9, 0.1], [1.0, 0.0]]]).log().repeat(1, 10, 1)
    numbers = report_numbers({"net": class_statistics(logits, torch.tensor([0, 1] * 10))})
    assert found(numbers, "10 targets had probability 0", "infinite")[0] == "bad"
    assert numbers["models"][0]["scalars"]["nll"] is None


def test_classes_that_never_occur():
    logits, targets = class_data(count=200, classes=4)
    targets[targets == 2] = 1
    numbers = report_numbers({"net": class_statistics(logits, targets)})
    assert found(numbers, "class 2 never occurs in these data: nothing is said of it.")
    assert numbers["models"][0]["per_class"][2]["accuracy"] is None
    targets[targets == 3] = 1
    numbers = report_numbers(
        {"net": class_statistics(logits, targets)}, class_names=["ant", "bee", "cat", "dog"]
    )
    assert found(numbers, "classes cat and dog never occur", "of them")


def test_few_examples_are_said_to_be_few():
    few = report_numbers({"net": class_statistics(*class_data(count=40))})
    level, text = found(few, "with 40 examples, only gaps above about")
    assert level == "warn"
    assert int(text.split("about ")[1].split()[0]) > 10
    many = report_numbers({"net": class_statistics(*class_data(count=20_000), batch=20_000)})
    assert "only gaps" not in str(lines(many))
    numbers = report_numbers({"net": number_statistics(*number_data(count=40))})
    assert found(numbers, "with 40 examples, only gaps above about")


def test_several_rows_an_example_and_further_notes():
    numbers = report_numbers(
        {"net": number_statistics(*number_data(count=100, outputs=2))}, notes=["Made on a Monday."]
    )
    assert found(numbers, "each of the 100 examples has several rows")
    assert "200 outputs" in lines(numbers, "net")[0][1]
    assert numbers["summary"][-1] == {"model": None, "level": "note", "text": "Made on a Monday."}


def test_every_sentence_is_one():
    logits, targets = class_data(count=200)
    numbers = report_numbers({"a": class_statistics(logits, targets)})
    for line in numbers["summary"]:
        assert line["text"].endswith(".")
        assert "!" not in line["text"]
        assert line["level"] in ("good", "warn", "bad", "note")


def test_counts_and_lists():
    assert plural(2, "class") == "2 classes"
    assert _listed(["a"]) == "a"
    assert _listed(["a", "b"]) == "a and b"
    assert _listed(range(7)) == "0, 1, 2, 3, 4 and 2 more"


def test_one_draw_is_not_praised_for_what_it_cannot_say():
    """It is surer of the foreign inputs: mutual information, 0 everywhere, is not the best."""
    logits, targets = class_data(count=200, draws=1)
    outside = {"net": {"letters": outside_of(CategoricalPredictive(5 * logits))}}
    numbers = report_numbers({"net": class_statistics(logits, targets)}, outside)
    assert "mutual information" not in found(numbers, "letters: not seen as foreign")[1]
