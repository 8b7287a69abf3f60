"""The summary of real documents: which sentences there are, and what they say."""

import math

import pytest
import torch

from lightning_bnn.predictive import CategoricalPredictive
from tests.report.predictions import (
    class_data,
    class_statistics,
    document_of,
    outside_of,
    regression_data,
    regression_statistics,
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


def test_an_over_confident_model():
    data = class_data(count=2000, sharpen=2.0, draws=1)
    numbers = document_of({"net": class_statistics(*data)})
    level, text = found(numbers, "over-confident by", "would mend it")
    assert level == "bad"
    assert "temperature 2" in text or "temperature 1.9" in text


def test_errors_of_the_surest_answers():
    models = {"net": class_statistics(*class_data(count=1000))}
    numbers = document_of(models, risk=0.1)
    coverage = numbers["models"][0]["scalars"]["coverage_at_risk"]
    assert found(numbers, "surest")[1] == (
        f"the {100 * coverage:.0f}% it is surest of had at most 10% errors here."
    )
    five = document_of({f"{i}": models["net"] for i in range(5)}, risk=0.1)
    assert "surest" not in str(lines(five))
    few = document_of({"net": class_statistics(*class_data(count=60))}, risk=0.1)
    assert few["models"][0]["scalars"]["coverage_at_risk"] > 0
    assert "surest" not in str(lines(few))


def test_no_or_all_answers_may_be_given():
    hopeless = class_statistics(torch.zeros(1, 50, 2), torch.arange(50) % 2)
    text = "even the answers it is surest of had more than 5% errors here."
    assert found(document_of({"net": hopeless}), text)[0] == "warn"
    easy = class_statistics(9 * torch.eye(2).repeat(25, 1)[None], torch.arange(50) % 2)
    assert "surest" not in str(lines(document_of({"net": easy})))


@pytest.mark.parametrize(
    ("scale", "level", "words"),
    [
        (0.01, "good", "letters: told apart (AUROC"),
        (0.5, "warn", "partly"),
        (1.0, "bad", "not told apart"),
    ],
)
def test_shift(scale, level, words):
    foreign = scale * class_data(count=300, seed=8)[0]
    outside = {"net": {"letters": outside_of(CategoricalPredictive(foreign))}}
    numbers = document_of({"net": class_statistics(*class_data(count=300))}, outside)
    line = next(line for line in numbers["summary"] if line["text"].startswith("letters: "))
    assert (line["model"], line["level"]) == ("net", level)
    assert words in line["text"]
    areas = {k: v["auroc"] for k, v in numbers["models"][0]["shift"]["letters"]["by"].items()}
    best = max(areas, key=areas.get)
    assert f"{areas[best]:.2f}" in line["text"]
    assert best.replace("_", " ") in line["text"]


def test_shift_of_several_models():
    logits, targets = class_data(count=300)
    flat, other = class_data(count=50, seed=8)[0] * 0.01, class_data(count=50, seed=8)[0]
    flat[0, :2] = math.nan
    foreign = {"a": flat, "b": other, "c": 0.8 * other, "d": 50 * other[:1].expand(3, -1, -1)}
    models = {name: class_statistics(logits, targets) for name in foreign}
    outside = {
        name: {"letters": outside_of(CategoricalPredictive(foreign[name]))} for name in models
    }
    numbers = document_of(models, outside)
    best = {
        block["name"]: max(by["auroc"] for by in block["shift"]["letters"]["by"].values())
        for block in numbers["models"]
    }
    assert found(numbers, "letters: told apart by a (AUROC 1.00")[0] == "good"
    low, high = sorted(f"{best[name]:.2f}" for name in "bc")
    assert found(numbers, f"letters: not told apart by b and c (AUROC {low} to {high}")[0] == "bad"
    worst = "letters: taken for more familiar than the data of the report by d"
    assert found(numbers, f"{worst} (AUROC {best['d']:.2f}")[0] == "bad"
    assert found(numbers, "letters: 2 predictions not finite")[0] == "bad"


def test_few_foreign_examples_decide_nothing():
    outside = {"net": {"letters": outside_of(CategoricalPredictive(torch.zeros(3, 9, 4)))}}
    numbers = document_of({"net": class_statistics(*class_data(count=300))}, outside)
    level, text = found(numbers, "letters: told apart")
    assert level == "note"
    assert text.endswith("; 9 examples cannot say much.")


def test_where_the_uncertainty_comes_from():
    """Agreeing draws leave it in the data; a model that is wrong is not asked."""
    logits, targets = class_data(count=2000, draws=1)
    agreeing = document_of({"net": class_statistics(logits.expand(4, -1, -1), targets)})
    assert found(agreeing, "own account 0% of its uncertainty is about its weights", "little")
    loud = 30 * torch.randn(8, 300, 4, generator=torch.Generator().manual_seed(0)).double()
    torn = document_of({"net": class_statistics(loud, targets[:300])})
    assert "own account" not in str(lines(torn))
    means = class_data(count=2000, draws=1)[0] + 2 * loud[:, :1] / 30
    spread = means + 2 * torch.randn(8, 2000, 4, generator=torch.Generator().manual_seed(1))
    drawn = torch.multinomial(
        spread.softmax(2).mean(0), 1, generator=torch.Generator().manual_seed(2)
    )[:, 0]
    some = document_of({"net": class_statistics(spread, drawn)})
    scalars = some["models"][0]["scalars"]
    share = f"{100 * scalars['epistemic'] / scalars['entropy']:.0f}%"
    assert found(some, f"{share} of its uncertainty is about its weights", "would help.")


@pytest.mark.parametrize(("kept", "collapsed"), [(0.1, True), (0.9, False)])
def test_an_accuracy_that_has_collapsed_comes_first(kept, collapsed):
    """As after a pruning that went too far: such a model is often under-confident, too."""
    logits, targets = class_data(count=400, classes=4)
    shift = torch.arange(400) >= 400 * kept
    pruned = torch.where(shift[:, None], logits.roll(1, 1), logits)
    whole = class_statistics(3 * logits, targets)
    numbers = document_of({"whole": whole, "pruned": class_statistics(pruned / 9, targets)})
    first = numbers["summary"][0]
    assert ("accuracy has collapsed" in first["text"]) == collapsed, first
    if collapsed:
        assert (first["model"], first["level"]) == ("pruned", "bad")
        assert "with whole. How it is calibrated" in first["text"]


def test_comparison():
    logits, targets = class_data(count=400)
    noisy = logits + 2 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    models = {"good": class_statistics(logits, targets), "noisy": class_statistics(noisy, targets)}
    numbers = document_of(models)
    clear = [
        row["label"]
        for row in numbers["comparison"]["rows"]
        if row["values"][0]["best"] and not row["values"][1]["tied"]
    ]
    assert "NLL" in clear
    text = found(numbers, "clearly best")[1]
    assert text.startswith(f"clearly best of 9 rows: good in {len(clear)} ({clear[0]}, ")
    equal = document_of({"a": models["good"], "b": models["good"]})
    assert found(equal, "no model is clearly best in any row")


def test_validation_predictions_that_are_not_finite():
    logits, targets = class_data(count=300)
    other = class_statistics(logits.where(torch.arange(300)[:, None] >= 20, math.nan), targets)
    models = {"net": class_statistics(logits, targets)}
    numbers = document_of(models, validation={"net": other})
    assert found(numbers, "20 validation predictions not finite")[0] == "bad"


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
    numbers = document_of(models)
    assert lines(numbers, "three")[0] == (
        "bad",
        "3 predictions not finite and left out: number 4, 9, 17.",
    )
    assert lines(numbers, "one")[0][1] == "1 prediction not finite and left out: number 5."
    assert "number 0, 1, 2, 3, 4, ..." in lines(numbers, "many")[0][1]
    assert numbers["models"][2]["invalid"]["examples"] == list(range(20))
    assert "100 examples" in lines(numbers, "none")[0][1]
    assert found(numbers, "only the 50 examples that every model could predict")[0] == "warn"


def test_impossible_targets():
    logits = torch.tensor([[[0.9, 0.1], [1.0, 0.0]]]).log().repeat(1, 10, 1)
    numbers = document_of({"net": class_statistics(logits, torch.tensor([0, 1] * 10))})
    assert found(numbers, "10 targets had probability 0", "infinite")[0] == "bad"
    assert numbers["models"][0]["scalars"]["nll"] is None


def test_few_examples_are_said_to_be_few():
    few = document_of({"net": class_statistics(*class_data(count=40))})
    level, text = found(few, "40 examples would show only gaps above about", "in a bin")
    assert level == "note"
    assert int(text.split("about ")[1].split()[0]) > 10
    assert "would be seen" not in str(lines(few))  # said once
    wrong = document_of({"net": class_statistics(*class_data(count=100, sharpen=5))})
    assert found(wrong, "with 100 examples, only gaps above", "in a single bin")[0] == "warn"
    many = document_of({"net": class_statistics(*class_data(count=8000), batch=8000)})
    assert "only gaps" not in str(lines(many))
    numbers = document_of({"net": regression_statistics(*regression_data(count=40))})
    assert found(numbers, "40 examples would show only gaps", "in the 90% interval")


def test_several_rows_an_example():
    numbers = document_of({"net": regression_statistics(*regression_data(count=100, outputs=2))})
    assert found(numbers, "100 examples have several rows each: verdicts and intervals allow")
    assert "200 outputs" in lines(numbers, "net")[0][1]


def test_one_draw_is_not_praised_for_what_it_cannot_say():
    """It is surer of the foreign inputs: mutual information, 0 everywhere, is not the best."""
    logits, targets = class_data(count=200, draws=1)
    outside = {"net": {"letters": outside_of(CategoricalPredictive(5 * logits))}}
    numbers = document_of({"net": class_statistics(logits, targets)}, outside)
    assert "mutual information" not in found(numbers, "letters: taken for more familiar")[1]
