"""The predictive mixtures against SciPy, NumPy and the identities that mixtures obey."""

import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import logsumexp, softmax

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import gaussian as mixture
from lightning_bnn.likelihoods import poisson as poisson_module
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    OrderedPredictive,
    PoissonPredictive,
    Predictive,
)
from tests.toy_likelihoods import GeometricPredictive, LogisticPredictive, OrdinalPredictive

DRAWS, BATCH = 5, 7


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gaussian(*event: int, draws: int = DRAWS, seed: int = 0) -> GaussianPredictive:
    means = 2 * randn(draws, BATCH, *event, seed=seed)
    return GaussianPredictive(means, randn(draws, BATCH, *event, seed=seed + 1).exp())


def close(actual: torch.Tensor, expected, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance)


EXAMPLES: list[Predictive] = [
    CategoricalPredictive(randn(DRAWS, BATCH, 3)),
    CategoricalPredictive(randn(DRAWS, BATCH, 3, 4, 2)),
    BernoulliPredictive(randn(DRAWS, BATCH)),
    BernoulliPredictive(randn(DRAWS, BATCH, 4)),
    gaussian(),
    gaussian(3),
    GaussianPredictive(randn(DRAWS, BATCH, 2), torch.tensor([0.5, 2.0])),
    PoissonPredictive(randn(DRAWS, BATCH)),
    PoissonPredictive(randn(DRAWS, BATCH, 2)),
    LogisticPredictive(randn(DRAWS, BATCH)),
    GeometricPredictive(randn(DRAWS, BATCH, 2)),
    OrdinalPredictive(randn(DRAWS, BATCH)),
]


@pytest.mark.parametrize("predictive", EXAMPLES, ids=repr)
class TestContract:
    def test_batch_axis_first(self, predictive):
        assert len(predictive) == BATCH
        assert predictive.draws == DRAWS
        assert f"draws={DRAWS}" in repr(predictive)
        part = predictive[2:5]
        for name in ("mean", "variance", "aleatoric", "epistemic", "entropy", "mutual_information"):
            torch.testing.assert_close(getattr(part, name), getattr(predictive, name)[2:5])

    def test_concatenate_undoes_split(self, predictive):
        parts = [predictive[piece] for piece in (slice(0, 3), slice(3, 4), slice(4, 7))]
        joined = Predictive.concatenate(parts)
        assert type(joined) is type(predictive)
        assert torch.equal(joined.outputs, predictive.outputs)
        assert torch.equal(joined.variance, predictive.variance)

    def test_mix_joins_draws_of_any_number(self, predictive):
        parts = [
            predictive.map(lambda tensor, piece=piece: tensor[piece])
            for piece in (slice(0, 1), slice(1, 5))
        ]
        mixed = Predictive.mix(parts)
        assert type(mixed) is type(predictive)
        assert mixed.draws == DRAWS
        for name in ("outputs", "mean", "variance", "entropy"):
            assert torch.equal(getattr(mixed, name), getattr(predictive, name))

    def test_moves_and_pickles(self, predictive):
        moved = predictive.to("meta")
        assert moved.outputs.device.type == "meta"
        again = pickle.loads(pickle.dumps(predictive))
        assert torch.equal(again.variance, predictive.variance)

    def test_mutual_information_is_not_negative(self, predictive):
        assert (predictive.mutual_information >= 0).all()
        same = predictive.map(lambda tensor: tensor[:1])
        twice = predictive.map(lambda tensor: tensor[:1].expand(4, *tensor.shape[1:]))
        close(same.mutual_information, 0.0)
        close(twice.mutual_information, 0.0, 1e-9)

    def test_bfloat16_is_computed_in_float32(self, predictive):
        low = predictive.map(lambda tensor: tensor.bfloat16())
        high = predictive.map(lambda tensor: tensor.bfloat16().float())
        assert low.outputs.dtype == torch.bfloat16
        for name in ("mean", "variance", "entropy"):
            assert getattr(low, name).dtype == torch.float32
            assert torch.equal(getattr(low, name), getattr(high, name))


class TestCategorical:
    @pytest.mark.parametrize("positions", [(), (4, 2)])
    def test_against_numpy(self, positions):
        logits = 3 * randn(DRAWS, BATCH, 3, *positions)
        predictive = CategoricalPredictive(logits)
        probabilities = softmax(logits.numpy(), axis=2)
        mean = probabilities.mean(0)
        total = stats.entropy(mean, axis=1)
        within = stats.entropy(probabilities, axis=2).mean(0)
        close(predictive.mean, mean)
        close(predictive.variance, mean * (1 - mean))
        close(predictive.entropy, total)
        close(predictive.aleatoric, within)
        close(predictive.epistemic, total - within)
        close(predictive.mutual_information, total - within)
        assert torch.equal(predictive.mode, predictive.mean.argmax(1))

    def test_log_prob_mixes_joint_densities(self):
        logits = randn(DRAWS, BATCH, 3, 4)
        targets = torch.randint(3, (BATCH, 4), generator=torch.Generator().manual_seed(1))
        probabilities = softmax(logits.numpy(), axis=2)
        observed = np.take_along_axis(probabilities, targets.numpy()[None, :, None], 2)[:, :, 0]
        expected = np.log(observed.prod(2).mean(0))
        close(CategoricalPredictive(logits).log_prob(targets), expected)

    def test_extreme_logits_stay_finite(self):
        predictive = CategoricalPredictive(torch.tensor([[[1e4, 0.0]], [[1e4, 0.0]]]))
        assert torch.equal(predictive.log_prob(torch.tensor([1])), torch.tensor([-1e4]))
        assert torch.equal(predictive.entropy, torch.zeros(1))


class TestBernoulli:
    def test_against_numpy(self):
        logits = 3 * randn(DRAWS, BATCH, 4)
        predictive = BernoulliPredictive(logits)
        probabilities = 1 / (1 + np.exp(-logits.numpy()))
        mean = probabilities.mean(0)
        total = stats.bernoulli(mean).entropy()
        within = stats.bernoulli(probabilities).entropy().mean(0)
        close(predictive.mean, mean)
        close(predictive.variance, mean * (1 - mean))
        close(predictive.entropy, total)
        close(predictive.aleatoric, within)
        close(predictive.epistemic, total - within)
        targets = (randn(BATCH, 4, seed=3) > 0).long()
        log_pmf = stats.bernoulli(probabilities).logpmf(targets.numpy()).sum(2)
        close(predictive.log_prob(targets), logsumexp(log_pmf, axis=0) - np.log(DRAWS))


def scipy_mixture(means, scales):
    return [stats.norm(m, s) for m, s in zip(means, scales, strict=True)]


class TestGaussian:
    def test_moments_follow_the_law_of_total_variance(self):
        predictive = gaussian(3)
        means, scales = predictive.means.numpy(), predictive.scales.numpy()
        second = (means**2 + scales**2).mean(0)
        close(predictive.mean, means.mean(0))
        close(predictive.aleatoric, (scales**2).mean(0))
        close(predictive.epistemic, ((means - means.mean(0)) ** 2).mean(0))
        close(predictive.variance, second - means.mean(0) ** 2)

    def test_log_prob_is_joint(self):
        predictive, targets = gaussian(3), randn(BATCH, 3, seed=9)
        log_pdf = stats.norm(predictive.means.numpy(), predictive.scales.numpy()).logpdf(targets)
        joint = logsumexp(log_pdf.sum(2), axis=0) - math.log(DRAWS)
        marginals = (logsumexp(log_pdf, axis=0) - math.log(DRAWS)).sum(1)
        close(predictive.log_prob(targets), joint)
        assert np.abs(joint - marginals).max() > 0.1

    def test_cdf_and_quantile_are_inverse(self):
        predictive = gaussian(3)
        for q in (1e-6, 0.05, 0.3, 0.5, 0.95, 1 - 1e-6):
            close(predictive.cdf(predictive.quantile(q)), q, 1e-13)
        targets = randn(BATCH, 3, seed=4)
        components = scipy_mixture(predictive.means.numpy(), predictive.scales.numpy())
        close(predictive.cdf(targets), np.mean([c.cdf(targets.numpy()) for c in components], 0))

    def test_interval_is_of_the_mixture(self):
        means = torch.tensor([[0.0], [10.0]], dtype=torch.float64)
        predictive = GaussianPredictive(means, torch.tensor(1.0))
        lower, upper = predictive.interval(0.9)
        # Each tail of 5% of the mixture is a tail of 10% of the component on its side.
        close(lower, stats.norm.ppf(0.1), 1e-9)
        close(upper, 10 + stats.norm.ppf(0.9), 1e-9)
        matched = predictive.mean + stats.norm.ppf(0.95) * predictive.variance.sqrt()
        assert (matched - upper).abs().item() > 1

    def test_one_draw_is_the_component(self):
        predictive = gaussian(2, draws=1)
        component = stats.norm(predictive.means[0].numpy(), predictive.scales[0].numpy())
        targets = randn(BATCH, 2, seed=5)
        assert torch.equal(predictive.mean, predictive.means[0])
        assert torch.equal(predictive.variance, predictive.scales[0].square())
        assert torch.equal(predictive.mutual_information, torch.zeros(BATCH, 2).double())
        z = torch.special.ndtri(torch.tensor(0.3, dtype=torch.float64))
        assert torch.equal(predictive.quantile(0.3), predictive.means[0] + predictive.scales[0] * z)
        close(predictive.quantile(0.3), component.ppf(0.3))
        close(predictive.entropy, component.entropy())
        close(predictive.log_prob(targets), component.logpdf(targets.numpy()).sum(1))
        z = (targets.numpy() - component.mean()) / component.std()
        crps = component.std() * (
            z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi)
        )
        close(predictive.crps(targets), crps)

    @pytest.mark.parametrize(
        ("means", "scales"),
        [
            ([0.0, 0.5, -1.0], [1.0, 1.0, 1.0]),
            ([0.0, 8.0], [1.0, 1.0]),
            ([0.0, 0.3], [10.0, 1e-3]),
            ([-40.0, 0.0, 3.0, 20.0], [1.0, 0.1, 5.0, 2.0]),
        ],
    )
    def test_entropy_against_adaptive_quadrature(self, means, scales):
        m, s = np.array(means), np.array(scales)

        def integrand(y):
            log_p = logsumexp(stats.norm.logpdf(y, m, s)) - np.log(len(m))
            return -np.exp(log_p) * log_p

        edges = np.unique(np.concatenate([m + k * s for k in (-10, -4, -1, 0, 1, 4, 10)]))
        expected = sum(
            integrate.quad(integrand, a, b, epsabs=1e-12, limit=200)[0]
            for a, b in itertools.pairwise(edges)
        )
        actual = mixture.mixture_entropy(torch.tensor(m)[:, None], torch.tensor(s)[:, None])
        close(actual, expected, 1e-8)

    def test_crps_against_numerical_integration(self):
        predictive, targets = gaussian(), randn(BATCH, seed=6)
        means, scales = predictive.means.numpy(), predictive.scales.numpy()
        for b, y in enumerate(targets.tolist()):

            def squared(z, b=b, y=y):
                return (stats.norm.cdf(z, means[:, b], scales[:, b]).mean() - (z >= y)) ** 2

            expected = sum(
                integrate.quad(squared, *ends, epsabs=1e-9, limit=200)[0]
                for ends in ((-60, y), (y, 60))
            )
            assert predictive.crps(targets)[b].item() == pytest.approx(expected, abs=1e-7)

    def test_chunks_do_not_change_the_numbers(self, monkeypatch):
        predictive, targets = gaussian(3), randn(BATCH, 3)
        parts = predictive.means, predictive.scales
        whole = predictive.crps(targets), mixture.mixture_entropy(*parts)
        monkeypatch.setattr(mixture, "BUDGET", 1)
        torch.testing.assert_close(predictive.crps(targets), whole[0])
        torch.testing.assert_close(mixture.mixture_entropy(*parts), whole[1])


class TestPoisson:
    rates = np.array([[0.3, 4.0, 60.0, 1000.0], [2.0, 4.5, 90.0, 1100.0], [0.1, 9.0, 50.0, 900.0]])

    def predictive(self) -> PoissonPredictive:
        return PoissonPredictive(torch.tensor(self.rates).log())

    def test_against_scipy(self):
        predictive, component = self.predictive(), stats.poisson(self.rates)
        targets = torch.tensor([1, 5, 70, 1050])
        log_pmf = component.logpmf(targets.numpy())
        close(predictive.log_prob(targets), logsumexp(log_pmf, axis=0) - np.log(3), 1e-11)
        # torch and SciPy differ by 4e-11 in the incomplete gamma function.
        close(predictive.cdf(targets), component.cdf(targets.numpy()).mean(0), 1e-9)
        close(predictive.cdf(torch.full((4,), -1)), 0.0)
        support = np.arange(2000)
        pmf = stats.poisson(self.rates[..., None]).pmf(support)
        close(predictive.mean, self.rates.mean(0))
        close(predictive.aleatoric, self.rates.mean(0))
        close(predictive.epistemic, self.rates.var(0))
        close(predictive.entropy, stats.entropy(pmf.mean(0), axis=1), 1e-7)
        within = stats.entropy(pmf, axis=2).mean(0)
        close(predictive.mutual_information, predictive.entropy.numpy() - within, 1e-7)

    @pytest.mark.parametrize("q", [1e-4, 0.05, 0.5, 0.95, 0.9999])
    def test_quantile_is_the_smallest_count_that_reaches_q(self, q):
        cdf = stats.poisson(self.rates[..., None]).cdf(np.arange(2000)).mean(0)
        close(self.predictive().quantile(q), (cdf >= q).argmax(1))

    def test_huge_rates(self):
        predictive = PoissonPredictive(torch.tensor([[20.0], [20.5]], dtype=torch.float64))
        lower, upper = predictive.interval(0.5)
        components = stats.poisson(np.exp([20.0, 20.5]))
        assert components.cdf(lower.item()).mean() >= 0.25 > components.cdf(lower.item() - 1).mean()
        assert components.cdf(upper.item()).mean() >= 0.75 > components.cdf(upper.item() - 1).mean()
        with pytest.raises(DataError, match=r"largest rate 8e\+08 are more than 65536"):
            _ = predictive.entropy

    def test_not_finite_is_not_a_hang(self):
        bad = PoissonPredictive(torch.tensor([[math.nan, 0.0], [1.0, math.inf]]))
        assert not bad.quantile(0.5).isfinite().any()
        with pytest.raises(DataError, match="Poisson mixture sums over the counts"):
            _ = bad.entropy


def test_bad_outputs_levels_and_joins():
    for shape in ((3,), (0, 3)):
        with pytest.raises(DataError, match=rf"draws S >= 1.*got {re.escape(str(shape))}"):
            BernoulliPredictive(randn(*shape))
    for level in (0.0, 1.0, 90):
        with pytest.raises(ConfigurationError, match=f"level= is a number between 0.*got {level}"):
            gaussian().interval(level)
        with pytest.raises(ConfigurationError, match=f"q= is a number between 0.*got {level}"):
            gaussian().quantile(level)
    labels, counts = BernoulliPredictive(randn(5, 2)), PoissonPredictive(randn(5, 2))
    for join, other, what in (
        (Predictive.concatenate, BernoulliPredictive(randn(4, 2)), "the same number of draws"),
        (Predictive.mix, BernoulliPredictive(randn(5, 3)), "the same examples"),
    ):
        with pytest.raises(DataError, match="empty list"):
            join([])
        for wrong in (other, counts):
            with pytest.raises(
                DataError, match=f"{what}.* got Bernoulli.* and {type(wrong).__name__}"
            ):
                join([labels, wrong])


@pytest.mark.parametrize("level", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("predictive", EXAMPLES[4:11], ids=repr)
def test_covers_agrees_with_interval(predictive, level):
    lower, upper = predictive.interval(level)
    step = 1.0 if predictive.discrete else 0.25
    for value in torch.arange(-12, 40, step, dtype=torch.float64):
        targets = torch.full_like(lower, value.item())
        expected = (targets >= lower) & (targets <= upper)
        assert torch.equal(predictive.covers(targets, level), expected)


class TestPoissonCrps:
    """Against the sum of (F(k) - 1[k >= y])^2 over the counts, with SciPy's F."""

    @staticmethod
    def expected(rates: np.ndarray, *targets) -> list[np.ndarray]:
        """Of rates of shape (S, B), for each array of B targets."""
        support = np.arange(int(rates.max() + 20 * rates.max() ** 0.5 + np.max(targets) + 60))
        cdf = np.stack([stats.poisson(r[:, None]).cdf(support).mean(0) for r in rates.T])
        return [((cdf - (support >= np.reshape(y, (-1, 1)))) ** 2).sum(1) for y in targets]

    @staticmethod
    def crps(rates: np.ndarray, targets) -> torch.Tensor:
        return PoissonPredictive(torch.tensor(rates).log()).crps(torch.tensor(targets))

    @pytest.mark.parametrize("draws", [1, 2, 30])
    @pytest.mark.parametrize("scale", [0.01, 1.0, 40.0, 150.0])
    def test_small_rates_are_exact(self, draws, scale):
        generator = np.random.default_rng(draws)
        rates = np.minimum(scale * generator.gamma(2, size=(draws, 12)), 250)
        targets = np.append(generator.poisson(rates[0])[:-3], [0, 1, 2000])
        close(self.crps(rates, targets), *self.expected(rates, targets), 1e-9)

    def test_large_rates(self):
        """Pairs with a rate above 250 are taken from a series: right to 1e-6 of the score."""
        rates = np.array(
            [
                [251.0, 260.0, 249.0, 1e3, 5e3, 9e4, 3e3, 300.0],
                [251.0, 240.0, 251.0, 1.1e3, 5.01e3, 9e4, 0.2, 1e-3],
                [251.0, 255.0, 900.0, 900.0, 5e2, 9.1e4, 0.1, 2e3],
            ]
        )
        every = np.stack([rates[0], rates[1], 1.02 * rates.mean(0), np.zeros(8)]).astype(np.int64)
        for targets, expected in zip(every, self.expected(rates, *every), strict=True):
            close(self.crps(rates, targets), expected, 1e-6)

    def test_the_series_meets_the_sum(self, monkeypatch):
        """The same pairs both ways, so that no step shows where one takes over from the other."""
        rates = np.random.default_rng(0).uniform(250, 400, (6, 9))
        targets = np.full(9, 320)
        series = self.crps(rates, targets)
        monkeypatch.setattr(poisson_module, "LARGEST_SUMMED", 1000.0)
        summed = self.crps(rates, targets)
        close(series, summed.numpy(), 1e-6)
        assert (series != summed).all()

    def test_a_sure_prediction_has_the_absolute_error(self):
        outputs = torch.full((2, 3), -math.inf, dtype=torch.float64)  # rates of 0
        close(PoissonPredictive(outputs).crps(torch.tensor([0, 1, 7])), [0, 1, 7])
        huge = PoissonPredictive(torch.tensor([[1e12]], dtype=torch.float64).log())
        close(huge.crps(torch.tensor([0])), 1e12, 1e-5)

    def test_a_bad_rate_spoils_only_its_own_example(self):
        rates = np.array([[3.0, np.nan, np.inf, 400.0], [4.0, 2.0, 3.0, np.nan]])
        crps = self.crps(rates, [2, 2, 2, 2])
        close(crps[:1], *self.expected(rates[:, :1], [2]), 1e-10)
        assert not crps[1:].isfinite().any()

    def test_shapes_dtypes_and_chunks(self, monkeypatch):
        outputs = randn(DRAWS, BATCH, 2, dtype=torch.float32)
        targets = torch.randint(5, (BATCH, 2), generator=torch.Generator().manual_seed(0))
        whole = PoissonPredictive(outputs).crps(targets)
        assert whole.shape == (BATCH, 2)
        assert whole.dtype == torch.float32
        assert PoissonPredictive(outputs.half()).crps(targets).dtype == torch.float32
        row = PoissonPredictive(outputs[:, :, :1]).crps(targets[:, 0])
        torch.testing.assert_close(row, whole[:, :1])
        monkeypatch.setattr(poisson_module, "BUDGET", 1)
        torch.testing.assert_close(PoissonPredictive(outputs).crps(targets), whole)
        large = PoissonPredictive(outputs + 7).crps(targets)
        monkeypatch.undo()
        torch.testing.assert_close(PoissonPredictive(outputs + 7).crps(targets), large)
        assert PoissonPredictive(outputs[:, :0]).crps(targets[:0]).shape == (0, 2)
        with pytest.raises(DataError, match="expected targets of shape"):
            PoissonPredictive(outputs).crps(targets[:, 0])


class TestInherited:
    """What a predictive gets that only describes its components, against SciPy."""

    outputs = randn(3, 4)
    logistic = LogisticPredictive(outputs)
    geometric = GeometricPredictive(outputs)

    def scipy(self, predictive):
        if predictive is self.logistic:
            return stats.logistic(self.outputs.numpy())
        return stats.geom(torch.sigmoid(self.outputs).numpy(), loc=-1)

    @pytest.mark.parametrize("q", [1e-4, 0.05, 0.5, 0.95, 0.9999])
    def test_quantiles(self, q):
        for predictive in (self.logistic, self.geometric):
            quantile, components = predictive.quantile(q).numpy(), self.scipy(predictive)
            assert (components.cdf(quantile).mean(0) >= q - 1e-12).all()
            below = quantile - (1 if predictive.discrete else 1e-9)
            assert (components.cdf(below).mean(0) < q).all()

    def test_moments_and_density(self):
        targets = torch.tensor([0, 1, 2, 5])
        for predictive in (self.logistic, self.geometric):
            components = self.scipy(predictive)
            close(predictive.mean, components.mean().mean(0))
            close(predictive.variance, components.var().mean(0) + components.mean().var(0))
            close(predictive.cdf(targets), components.cdf(targets.numpy()).mean(0))
        log_pdf = self.scipy(self.logistic).logpdf(targets.numpy())
        close(self.logistic.log_prob(targets), logsumexp(log_pdf, axis=0) - np.log(3))

    @pytest.mark.parametrize("target", [-3.0, 0.0, 2.0, 40.0])
    def test_crps(self, target):
        for predictive in (self.logistic, self.geometric):
            grid = np.arange(-60, 200, 1 if predictive.discrete else 2e-3)
            cdf = self.scipy(predictive).cdf(grid[:, None, None]).mean(1)
            squared = (cdf - (grid >= target)[:, None]) ** 2
            expected = squared.sum(0) * (grid[1] - grid[0])
            tolerance = 1e-6 if predictive.discrete else 2e-3
            close(predictive.crps(torch.full((4,), target)), expected, tolerance)

    def test_entropy_and_mutual_information(self):
        for predictive in (self.logistic, self.geometric):
            components = self.scipy(predictive)
            close(predictive.map(lambda t: t[:1]).entropy, components.entropy()[0], 1e-6)
            within = predictive.entropy - predictive.mutual_information
            close(within, components.entropy().mean(0), 1e-6)
        grid = np.arange(-60, 60, 1e-3)
        density = self.scipy(self.logistic).pdf(grid[:, None, None]).mean(1)
        close(self.logistic.entropy, -(density * np.log(density)).sum(0) * 1e-3, 1e-6)

    def test_closed_forms_agree_with_the_inherited_integrals(self):
        """The kinds that override them, asked through the base class."""
        means = randn(DRAWS, BATCH, 2)
        normal = GaussianPredictive(means, torch.tensor(1.0))
        for predictive in (normal, PoissonPredictive(means)):
            targets = torch.arange(2 * BATCH).reshape(BATCH, 2)
            close(OrderedPredictive.crps(predictive, targets), predictive.crps(targets), 1e-5)
            total, within = OrderedPredictive._entropies.func(predictive)
            close(total, predictive.entropy, 1e-5)
            close(total - within, predictive.mutual_information, 1e-5)

    def test_classes(self):
        predictive = OrdinalPredictive(self.outputs)
        p = np.diff(stats.logistic(self.outputs.numpy()[..., None]).cdf([-np.inf, -1, 1, np.inf]))
        close(predictive.mean, p.mean(0), 1e-7)
        targets = torch.tensor([0, 1, 2, 2])
        close(predictive.log_prob(targets), np.log(p.mean(0)[np.arange(4), targets]), 1e-7)
        assert torch.equal(predictive.hits(targets), predictive.mean.argmax(1) == targets)
