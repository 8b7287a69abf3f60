"""The public names, frozen: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import lightning_bnn

PUBLIC = {
    "lightning_bnn": [
        "AveragePosterior",
        "average",
        "BayesianLinear",
        "LinearPosterior",
        "PolynomialRegression",
        "DeepEnsemble",
        "DrawsPosterior",
        "DropoutPosterior",
        "GaussianPosterior",
        "IVON",
        "IVONBNN",
        "LaplaceBNN",
        "LaplacePosterior",
        "LowRankPosterior",
        "MCDropoutBNN",
        "MixturePosterior",
        "Moments",
        "Posterior",
        "PosteriorPrior",
        "Predictive",
        "SGMCMC",
        "StackedModule",
        "Strategy",
        "Target",
        "VariationalBNN",
        "WeightPosterior",
        "compact",
        "diagnose",
        "laplace",
        "masked",
        "mc_dropout",
        "mean_network",
        "prune",
        "prune_curve",
        "signal_to_noise",
        "sparsity",
        "support",
        "to_arviz",
    ],
    "lightning_bnn.likelihoods": [
        "Bernoulli",
        "Categorical",
        "Gaussian",
        "HeteroscedasticGaussian",
        "Likelihood",
        "Poisson",
    ],
    "lightning_bnn.priors": [
        "BoundPrior",
        "Laplace",
        "Learned",
        "Normal",
        "Prior",
        "PriorLike",
        "ScaleMixture",
        "StudentT",
        "check_prior",
    ],
    "lightning_bnn.callbacks": [
        "CalibrationReport",
        "ChainMonitor",
        "PredictionWriter",
        "SNRPruning",
        "SWAGMoments",
        "SampleCollector",
    ],
    "lightning_bnn.ensembles": ["MemberBatch", "RandomPriorFunction"],
    "lightning_bnn.diagnostics": [
        "Diagnosis",
        "Statistics",
        "diagnose",
        "rank_figure",
        "to_arviz",
        "trace_figure",
    ],
    "lightning_bnn.launch": [
        "Attempt",
        "Backend",
        "LaunchedRun",
        "MemberResult",
        "Outcome",
        "StoredRun",
        "attempt_outcome",
        "launch",
        "load_posterior",
        "load_run",
        "unit_seed",
    ],
    "lightning_bnn.pruning": [
        "PruneCurve",
        "PruningResult",
        "compact",
        "export_network",
        "masked",
        "mean_network",
        "prune",
        "prune_curve",
        "pruning_masks",
        "signal_to_noise",
        "sparsity",
        "support",
    ],
    "lightning_bnn.report": ["Report", "Section", "report", "report_posteriors"],
    "lightning_bnn.optimizers": ["IVON", "NaturalGradient"],
    "lightning_bnn.samplers": [
        "BAOA",
        "HMC",
        "PSGLD",
        "SGHMC",
        "SGLD",
        "SGNHT",
        "Cyclical",
        "MomentumSampler",
        "Polynomial",
        "Sampler",
    ],
    "lightning_bnn.errors": [
        "CheckpointError",
        "ConfigurationError",
        "DataError",
        "FencedError",
        "LaunchError",
        "LightningBNNError",
        "NonFiniteError",
        "PosteriorFormatError",
    ],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    assert sorted(importlib.import_module(name).__all__) == sorted(PUBLIC[name])


def test_every_module_keeps_its_promises() -> None:
    """Each name in ``__all__`` is there."""
    for found in pkgutil.walk_packages(lightning_bnn.__path__, "lightning_bnn."):
        module = importlib.import_module(found.name)
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{found.name}.{name}"
