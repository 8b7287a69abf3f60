"""Temperature scaling against SciPy's optimiser, known temperatures and hopeless cases."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from lightning_bnn.calibration import temperature as module
from lightning_bnn.calibration.temperature import apply_temperature, fit_temperature, scaled


def simulate(count: int, classes: int, stated: float, seed: int = 0):
    """Log-probabilities that state the truth at a temperature of ``stated``, and targets."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.normal(size=(count, classes))
    truth = softmax(logits, axis=1).cumsum(1)
    targets = (generator.uniform(size=(count, 1)) > truth[:, :-1]).sum(1)
    return log_softmax(logits / stated, axis=1), targets


def nll(log_probabilities: np.ndarray, targets: np.ndarray, temperature: float) -> float:
    """The mean negative log likelihood, row by row."""
    rows = zip(log_softmax(log_probabilities / temperature, axis=1), targets, strict=True)
    return -sum(row[target] for row, target in rows) / len(targets)


class TestFit:
    @pytest.mark.parametrize("stated", [0.3, 1.0, 1.5, 4.0])
    @pytest.mark.parametrize("classes", [2, 10])
    def test_against_scipy(self, classes, stated):
        log_probabilities, targets = simulate(300, classes, stated)
        best = minimize_scalar(
            lambda log: nll(log_probabilities, targets, np.exp(log)),
            bounds=(np.log(0.01), np.log(100)),
            method="bounded",
            options={"xatol": 1e-10},
        )
        # A flat minimum: SciPy, which sees only values, finds it to the root of the rounding.
        assert fit_temperature(log_probabilities, targets) == pytest.approx(
            np.exp(best.x), rel=1e-6
        )

    @pytest.mark.parametrize("true", [0.5, 1.0, 1.6, 3.0])
    def test_recovers_a_known_temperature(self, true):
        """Of 100,000 examples, within 5 standard errors (false alarm 6e-7).

        The error of 1/T is 1 / sqrt(sum of the variances of the log-probabilities).
        """
        log_probabilities, targets = simulate(100_000, 5, 1 / true)
        p = softmax(log_probabilities / true, axis=1)
        mean = (p * log_probabilities).sum(1, keepdims=True)
        information = (p * (log_probabilities - mean) ** 2).sum()
        inverse = 1 / fit_temperature(log_probabilities, targets)
        assert abs(inverse - 1 / true) < 5 / np.sqrt(information)

    def test_hopeless_cases_stop_at_the_ends(self):
        stated = np.log([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
        assert fit_temperature(stated, np.array([0, 2])) == 0.01  # all right: colder is better
        assert fit_temperature(stated, np.array([2, 0])) == 100.0  # all wrong
        assert fit_temperature(np.log(np.full((4, 5), 0.2)), np.arange(4)) == 1  # nothing to scale
        assert np.isnan(fit_temperature(np.empty((0, 3)), np.empty(0, np.int64)))

    def test_classes_of_probability_zero(self):
        """They stay impossible at every temperature, so they might as well not be there."""
        log_probabilities, targets = simulate(200, 3, 1.7)
        wide = np.full((200, 5), -np.inf)
        wide[:, [0, 2, 3]] = log_probabilities
        expected = fit_temperature(log_probabilities, targets)
        assert fit_temperature(wide, np.array([0, 2, 3])[targets]) == pytest.approx(expected)

    def test_rows_whose_target_was_impossible_are_left_out(self):
        log_probabilities, targets = simulate(50, 3, 1.7)
        impossible = np.array([[0.0, -np.inf, -np.inf]])
        more = np.concatenate([impossible, log_probabilities])
        expected = fit_temperature(log_probabilities, targets)
        assert fit_temperature(more, np.array([1, *targets])) == expected
        assert np.isnan(fit_temperature(impossible, np.array([1])))


class TestApply:
    def test_one_for_each_row_and_impossible_classes(self):
        stated = np.log([[0.9, 0.1], [0.9, 0.1]])
        np.testing.assert_allclose(
            np.exp(apply_temperature(stated, np.array([1.0, 2.0]))), [[0.9, 0.1], [0.75, 0.25]]
        )
        many = apply_temperature(np.full((1, 3000), -np.log(3000)), 0.01)  # exp(-800) is 0
        np.testing.assert_allclose(many, -np.log(3000))
        result = apply_temperature(np.array([[0.0, -np.inf]]), 3.0)
        np.testing.assert_array_equal(result, [[0.0, -np.inf]])


def scores(log_probabilities: np.ndarray, targets: np.ndarray, bins: int) -> dict[str, float]:
    """The three scores, written out row by row and bin by bin."""
    loss = brier = gap = 0.0
    probabilities = np.exp(log_probabilities)
    confidence, hit = probabilities.max(1), probabilities.argmax(1) == targets
    for p, target in zip(probabilities, targets, strict=True):
        loss -= np.log(p[target])
        brier += sum((p[k] - (k == target)) ** 2 for k in range(len(p)))
    for index in range(bins):
        upper = 1.1 if index == bins - 1 else (index + 1) / bins
        inside = (confidence >= index / bins) & (confidence < upper)
        gap += abs((confidence[inside] - hit[inside]).sum())
    return {"nll": loss / len(hit), "ece": gap / len(hit), "brier": brier / len(hit)}


class TestScaled:
    @pytest.mark.parametrize("bins", [4, 15])
    def test_with_validation_data(self, bins):
        log_probabilities, targets = simulate(150, 4, 0.5)
        validation = simulate(100, 4, 0.5, seed=1)
        result = scaled(log_probabilities, targets, validation, np.arange(150), bins)
        value = fit_temperature(*validation)
        assert (result["value"], result["fitted_on"]) == (value, "validation")
        assert value == pytest.approx(2, rel=0.3)
        assert result["before"] == pytest.approx(scores(log_probabilities, targets, bins))
        after = log_softmax(log_probabilities / value, axis=1)
        assert result["after"] == pytest.approx(scores(after, targets, bins))
        assert result["after"]["nll"] < result["before"]["nll"]
        assert result["after"]["ece"] < result["before"]["ece"]

    def test_cross_fit_judges_each_half_by_the_other(self):
        """The halves, found by changing the targets of one example after the other."""
        log_probabilities, targets = simulate(40, 3, 1.0)
        examples = np.repeat(np.arange(20), 2)[::-1]
        base = module.cross_fitted(log_probabilities, targets, examples)
        sizes = []
        for example in range(20):
            changed, own = targets.copy(), examples == example
            changed[own] = (changed[own] + 1) % 3
            moved = module.cross_fitted(log_probabilities, changed, examples) != base
            assert not moved[own].any()  # an example is never judged by itself
            assert np.unique(examples[moved]).size == 10
            sizes.append(moved.sum())
        assert sizes == [20] * 20

    def test_cross_fit_does_not_leak(self):
        """Pure noise: a temperature that had seen its own rows would seem to help.

        Stated probabilities are true, so that every temperature but 1 is worse in expectation. On
        the same rows the fit always wins a little; judged by the other half it loses on average.
        The mean gain over 200 seeds is below 0 by several standard errors.
        """
        same, crossed = [], []
        for seed in range(200):
            log_probabilities, targets = simulate(30, 3, 1.0, seed)
            result = scaled(log_probabilities, targets, None, np.arange(30))
            before = result["before"]["nll"]
            same.append(before - nll(log_probabilities, targets, result["value"]))
            crossed.append(before - result["after"]["nll"])
        assert min(same) >= -1e-12
        assert np.mean(crossed) < -2 * np.std(crossed) / np.sqrt(200)

    def test_sorted_and_paired_data_do_not_fool_the_halves(self):
        """Over-confident examples first, or every second one: both halves get some of each."""
        sure, sure_targets = simulate(2000, 4, 0.3)
        unsure, unsure_targets = simulate(2000, 4, 3.0, seed=1)
        rows, targets = np.concatenate([sure, unsure]), np.append(sure_targets, unsure_targets)
        for order in (np.arange(4000), np.arange(4000).reshape(2, -1).T.ravel()):
            halves = np.unique(module.cross_fitted(rows[order], targets[order], np.arange(4000)))
            assert halves[1] / halves[0] < 1.2

    def test_too_little_to_fit_on(self):
        result = scaled(np.log([[0.7, 0.3]]), np.array([0]), None, np.array([5]))
        assert result["value"] == 0.01
        assert np.isnan(list(result["after"].values())).all()
        assert result["before"]["nll"] == pytest.approx(-np.log(0.7))
        nothing = np.empty((0, 2)), np.empty(0, np.int64)
        result = scaled(np.log([[0.7, 0.3]]), np.array([0]), nothing, np.array([5]))
        assert np.isnan([result["value"], *result["after"].values()]).all()

    def test_an_impossible_target_has_an_infinite_loss_before_and_after(self):
        log_probabilities, targets = simulate(20, 2, 1.0)
        log_probabilities[3] = [0.0, -np.inf]
        targets[3] = 1
        result = scaled(log_probabilities, targets, None, np.arange(20))
        assert result["before"]["nll"] == result["after"]["nll"] == np.inf
        assert np.isfinite([result["after"]["ece"], result["after"]["brier"]]).all()
