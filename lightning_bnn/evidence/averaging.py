r"""Averaging over models, by their evidence or by their predictions of held-out data.

*By evidence*, Bayes' rule over models: :math:`p(M\mid D)\propto p(D\mid M)\,p(M)`. It is right if
one of the models is true, and comes to a single model as the data grow.

*Stacking* (Yao et al., 2018) chooses the weights that predict best, true model or not:

.. math:: \max_{\varepsilon}\ \frac1n\sum_{i=1}^n \log\sum_k \varepsilon_k\, p_k(y_i\mid x_i),

a concave problem, on data that no model was trained on: held-out rows, or rows of a K-fold
cross-validation, each scored by a fit without it. With :math:`g_k` the derivatives at the found
weights, no other weights score better by more than :math:`\max_k g_k - 1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize

from lightning_bnn.checks import check_option, check_whole, numbers_of
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.posteriors import AveragePosterior, Evidence, Posterior
from lightning_bnn.target import Keys, Split, make_split

__all__ = [
    "average", "known_evidences", "log_scores", "model_probabilities", "stacking_weights",
]  # fmt: skip

Weights = Literal["evidence", "stacking", "equal"]
Array = NDArray[np.float64]
_ROUNDS, _CLOSE = 1000, 1e-6  # of EM, after the optimizer; nats
_TINY = 1e-12


def average(
    posteriors: Sequence[Posterior] | Mapping[str, Posterior],
    weights: Weights | Sequence[float] = "evidence",
    log_evidence: Sequence[float | Evidence] | None = None,
    prior: Sequence[float] | None = None,
    data: Iterable[Any] | None = None,
    draws: int | None = None,
    split: Split | Keys | None = None,
) -> AveragePosterior:
    """One posterior that averages over models, of different networks, too.

    Args:
        posteriors: At least one, of one task; of any kinds and networks.
        weights: ``"evidence"``: p(M|D); ``"stacking"``: what predicts ``data`` best; ``"equal"``;
            or the weights themselves.
        log_evidence: For ``"evidence"``, log p(D|M) of each model; by default what the posteriors
            know. Bounds (of variational inference) count as if they were the evidence; a warning
            says so where only some are bounds.
        prior: For ``"evidence"``, p(M); by default all the same.
        data: For ``"stacking"``, a loader of data that no model was trained on.
        draws: For ``"stacking"``, of each posterior; by default what suits it.
        split: For ``"stacking"``, how a batch gives inputs and targets, where it is no pair.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import PolynomialRegression
        >>> parts = [PolynomialRegression(order).posterior() for order in (1, 2)]
        >>> made = average(parts, "evidence", log_evidence=[-12.0, -10.0])
        >>> [round(weight, 3) for weight in made.weights]
        [0.119, 0.881]
        >>> average(parts)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: The evidence of model 0, ... is not known. ...
    """
    parts = list(posteriors.values()) if isinstance(posteriors, Mapping) else posteriors
    models = AveragePosterior(parts)  # which checks them
    chosen = models.components
    named = isinstance(weights, str)
    if named:
        check_option("weights", weights, ("evidence", "stacking", "equal"))
    for name, value, of in (
        ("log_evidence", log_evidence, "evidence"),
        ("prior", prior, "evidence"),
        ("data", data, "stacking"),
        ("draws", draws, "stacking"),
        ("split", split, "stacking"),
    ):
        if value is not None and not (named and weights == of):
            raise ConfigurationError(f"{name}= is for weights={of!r}; got weights={weights!r:.80}.")
    if not isinstance(weights, str):
        return AveragePosterior(chosen, weights)
    if weights == "equal":
        return models
    if weights == "evidence":
        evidences = known_evidences(chosen, log_evidence)
        bounds = [index for index, one in enumerate(evidences) if one.is_bound]
        if 0 < len(bounds) < len(evidences):
            rank_zero_warn(
                f"The evidence of the models {bounds} is a lower bound, that of the others is not: "
                "the former weigh too little. Pass log_evidence= for them, or take "
                "weights='stacking'."
            )
        found, _ = model_probabilities(evidences, prior)
    else:
        if data is None:
            raise ConfigurationError(
                "weights='stacking' are those that predict held-out data best. Pass data=, a "
                "loader of data that no model was trained on."
            )
        found, _ = stacking_weights(log_scores(chosen, data, draws, split), resamples=0)
    return AveragePosterior(chosen, found.tolist())


def known_evidences(
    posteriors: Sequence[Posterior], given: Sequence[float | Evidence] | None = None
) -> list[Evidence]:
    """The evidence of each model, as given or as its posterior knows it.

    Raises:
        ConfigurationError: That of a model is not known.
    """
    if given is not None:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        found = [
            one if isinstance(one, Evidence) else Evidence(value)
            for one in (given if several else [])
            for value in numbers_of([one[0] if isinstance(one, Evidence) else one])
        ]
        good = len(found) == len(posteriors) and all(np.isfinite(one.value) for one in found)
        if not good:
            raise ConfigurationError(
                f"log_evidence= is a list of finite numbers, in nats, one for each of "
                f"{len(posteriors)} models; got {given!r:.80}."
            )
        return found
    found = []
    for index, posterior in enumerate(posteriors):
        if posterior.evidence is None:
            raise ConfigurationError(
                f"The evidence of model {index}, a {type(posterior).__name__}, is not known. It is "
                "after a fit of BayesianLinear, PolynomialRegression or LaplaceBNN, as a bound of "
                "VariationalBNN or IVONBNN with evidence_draws=; draws, ensembles and dropout have "
                "none. Pass log_evidence=, set posterior.evidence (see lightning_bnn.evidence."
                "annealed_importance), or use weights='stacking'."
            )
        found.append(posterior.evidence)
    return found


def model_probabilities(
    evidences: Sequence[Evidence], prior: Sequence[float] | None = None
) -> tuple[Array, Array]:
    """p(M|D) of each model, and its standard error by those of the evidences (delta method).

    Args:
        evidences: log p(D|M).
        prior: p(M), positive numbers in proportion; by default all the same.

    Example:
        >>> probabilities, errors = model_probabilities([Evidence(-10.0), Evidence(-12.0, 0.1)])
        >>> probabilities.round(3), errors.round(3)
        (array([0.881, 0.119]), array([0.01, 0.01]))
    """
    several = isinstance(evidences, Sequence) and len(evidences) > 0
    if not several or not all(isinstance(one, Evidence) for one in evidences):
        raise ConfigurationError(f"evidences= is a list of Evidence; got {evidences!r:.80}.")
    values, errors = np.array([(one.value, one.error) for one in evidences]).T
    if prior is not None:
        given = np.array(numbers_of(prior))
        if len(given) != len(values) or not (given >= 0).all() or not 0 < given.sum() < np.inf:
            raise ConfigurationError(
                f"prior= is p(M), one number from 0 on for each of {len(values)} models; got "
                f"{prior!r:.80}."
            )
        with np.errstate(divide="ignore"):  # a model of prior 0
            values = values + np.log(given)
    relative = np.exp(values - values.max())
    found = relative / relative.sum()
    slopes = np.diag(found) - np.outer(found, found)
    return found, np.sqrt(slopes**2 @ errors**2)


@torch.no_grad()
def log_scores(
    posteriors: Sequence[Posterior],
    data: Iterable[Any],
    draws: int | None = None,
    split: Split | Keys | None = None,
) -> Array:
    """Log p(y|x) of each example under each model, (examples, models).

    Args:
        posteriors: The models.
        data: A loader; it is read once, so that it may shuffle.
        draws: Of each posterior; by default what suits it.
        split: How a batch gives inputs and targets, where it is no pair of them.
    """
    posteriors, splits, rows = AveragePosterior(posteriors).components, make_split(split), []
    if not isinstance(data, Iterable) or isinstance(data, torch.Tensor):
        raise ConfigurationError(f"data= is a loader of held-out data; got {type(data).__name__}.")
    for inputs, targets in map(splits, data):
        columns, labelled = [], None
        for posterior in posteriors:
            own = targets.to(posterior.device)
            predictive = posterior.predict(inputs, draws)
            labelled = predictive.labelled(own)
            columns.append(predictive.log_prob(own).double().cpu())
        batch = torch.stack(columns, 1)
        rows.append(batch if labelled is None else batch[labelled.cpu()])
    scores: Array = torch.cat(rows).numpy() if rows else np.zeros((0, len(posteriors)))
    return _checked_scores(scores)


def _checked_scores(log_scores: ArrayLike) -> Array:
    try:
        scores = np.asarray(log_scores, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        scores = np.zeros(0)
    if scores.ndim != 2 or not scores.size:
        raise DataError(
            "log scores are numbers (examples, models), at least one of each; got "
            f"{log_scores!r:.200}."
        )
    if np.isnan(scores).any() or np.isposinf(scores).any() or np.isneginf(scores.max(1)).any():
        raise DataError(
            "Each example needs a positive and finite density under at least one model, and NaN "
            "under none. Look for targets that no model can give, or that are not finite."
        )
    return scores


def stacking_weights(
    log_scores: ArrayLike, resamples: int = 100, seed: int = 0
) -> tuple[Array, Array]:
    """The weights of the mixture with the best mean log score, and their standard errors.

    Args:
        log_scores: log p_k(y_i|x_i) of examples that model k was not trained on, (n, K).
        resamples: Bootstrap resamples of the examples, for the errors; 0: they are NaN.
        seed: Of the bootstrap.

    Example:
        >>> scores = np.log([[0.8, 0.1], [0.8, 0.1], [0.1, 0.8]])
        >>> weights, errors = stacking_weights(scores)
        >>> weights.round(3)
        array([0.714, 0.286])
    """
    scores = _checked_scores(log_scores)
    densities = np.exp(scores - scores.max(1, keepdims=True))
    count = len(densities)
    found = _maximise(densities, np.full(count, 1 / count))
    if not check_whole("resamples", resamples, 0):
        return found, np.full(len(found), np.nan)
    chance = np.random.default_rng(check_whole("seed", seed, 0))
    draws = chance.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    again = [_maximise(densities[shares > 0], shares[shares > 0]) for shares in draws]
    return found, np.std(again, axis=0)


def _maximise(densities: Array, shares: Array) -> Array:
    """The weights with the largest Σ shares · log(densities @ weights)."""
    models = densities.shape[1]

    def negative(weights: Array) -> tuple[float, Array]:
        mixture = np.maximum(densities @ weights, 1e-300)
        return -float(shares @ np.log(mixture)), -(densities.T @ (shares / mixture))

    start = np.full(models, 1 / models)
    found = minimize(
        negative, start, jac=True, bounds=[(0, 1)] * models, method="SLSQP",
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 500},
    )  # fmt: skip
    weights = np.maximum(found.x, 0) / np.maximum(found.x, 0).sum() if found.success else start
    if negative(weights)[0] > negative(start)[0]:
        weights = start
    weights = np.maximum(weights, _TINY) / np.maximum(weights, _TINY).sum()
    for _ in range(_ROUNDS):  # EM, which only gets better, for what rounding has left
        slopes = -negative(weights)[1]
        if slopes.max() - 1 < _CLOSE:
            break
        weights = weights * slopes
    weights = np.where(weights > 10 * _TINY, weights, 0)
    return weights / weights.sum()
