r"""The evidence of a Laplace approximation, and the scales of the prior that maximise it.

With d weights at their mode :math:`w^*`, H the curvature of the data and P the prior's precision,

.. math:: \log p(D) \approx \log p(D\mid w^*) + \log p(w^*) + \tfrac d2\log 2\pi
          - \tfrac12\log\det(H + P),

which is exact for a linear network with Gaussian noise. As a function of factors c on the
precisions (one, or one for each tensor t of :math:`d_t` weights) it is, with
:math:`q_t = \sum P (w^* - m)^2`,

.. math:: F(c) = \tfrac12\sum_t (d_t \log c_t - c_t q_t) - \tfrac12 \log\det(H + cP) + \text{const}.

One factor is found on a line. Several are found by MacKay's (1992) steps
:math:`c_t = \gamma_t / q_t`, :math:`\gamma_t = d_t - \mathrm{tr}_t(\Sigma c P)`, or, where that
would lower F, by the step :math:`c_t = d_t / (q_t + \mathrm{tr}_t(\Sigma P))` of
expectation-maximisation, which never does.

A learned scale of Gaussian noise has the same trouble as the scales of the prior, and worse: at the
mode it is the size of the residuals of the training data, which is too small where the network has
as many weights as there are examples. With n targets, whose squared residuals sum to R in units of
the noise, and one factor s on its variance, H becomes H/s and the evidence, with one factor c,

.. math:: F(c, s) = \text{const} - \tfrac12\Big[c\,q + \tfrac Rs + n\log s
          + \sum_i\log\big(1 + \tfrac{\lambda_i}{s\,c}\big)\Big],

with λ the eigenvalues of :math:`P^{-1/2} H P^{-1/2}`. At a given :math:`\kappa = s c` the best s is
:math:`(\kappa q + R)/n`, so that κ is found on a line. At the optimum :math:`s = R/(n-\gamma)`:
the noise is that of the residuals, corrected by the number γ of weights that the data determine.

Where the evidence is not trusted, one factor may be chosen by the NLL of validation data instead.
What follows of it is no evidence: such data are seen, and a model that is compared by its evidence
must not be chosen by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.optimize import minimize_scalar

from lightning_bnn.curvature.base import Curvature
from lightning_bnn.errors import NonFiniteError
from lightning_bnn.lightning import rank_zero_warn

__all__ = ["Scales", "best_noise", "best_precisions", "evidence", "validated_precisions"]

Scales = Literal["given", "one", "per tensor", "validation"]

_FACTORS = (-18.0, 18.0)  # the logarithms of the smallest and of the largest
_GRID = 73
_VALIDATION_FACTORS = (math.log(1e-4), math.log(1e4))
_VALIDATION_GRID = 17  # two for each power of ten
_STEPS = 200
_TOLERANCE = 1e-6


def evidence(
    curvature: Curvature,
    precisions: Sequence[float],
    squares: Sequence[float],
    log_likelihood: float,
) -> float:
    """The logarithm of p(D), in nats.

    Args:
        curvature: H.
        precisions: P of each tensor.
        squares: Σ (w* − m)² of each tensor.
        log_likelihood: log p(D | w*).

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.curvature.diagonal import Diagonal
        >>> net = nn.Linear(1, 1)
        >>> nothing = Diagonal(net, dict(net.named_parameters()))
        >>> evidence(nothing, [1.0, 1.0], [0.0, 0.0], -1.0)        # without data no volume is lost
        -1.0
    """
    # the constants of the prior and of the volume cancel, and so does det P
    cost = sum(p * q for p, q in zip(precisions, squares, strict=True))
    return log_likelihood - 0.5 * cost - 0.5 * curvature.log_determinant(precisions)


def best_precisions(
    curvature: Curvature, precisions: Sequence[float], squares: Sequence[float], scales: Scales
) -> list[float]:
    """The precisions that maximise the evidence, as the given ones times factors.

    Args:
        curvature: H.
        precisions: P of each tensor.
        squares: Σ (w* − m)² of each tensor.
        scales: ``"given"``: as they are; ``"one"``: one factor for all; ``"per tensor"``.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.curvature.diagonal import Diagonal
        >>> net = nn.Linear(1, 1, bias=False)
        >>> curvature = Diagonal(net, dict(net.named_parameters()))
        >>> _ = curvature.squares.fill_(1e9)                       # the weight is known: it is 0.5
        >>> [round(p, 3) for p in best_precisions(curvature, [1.0], [0.25], "one")]
        [4.0]
    """
    if scales == "given":
        return list(precisions)
    factor = _best_factor(curvature, precisions, squares)
    found = [factor * p for p in precisions]
    return found if scales == "one" else _per_tensor(curvature, found, squares)


def best_noise(
    curvature: Curvature,
    precisions: Sequence[float],
    squares: Sequence[float],
    residuals: float,
    count: float,
) -> float:
    """The factor on the variance of the noise that, with the best one on P, maximises the evidence.

    Args:
        curvature: H, with the noise as it is.
        precisions: P of each tensor.
        squares: Σ (w* − m)² of each tensor.
        residuals: Σ of the squared residuals, in units of the noise.
        count: The number of residuals.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.curvature.diagonal import Diagonal
        >>> net = nn.Linear(1, 1, bias=False)
        >>> curvature = Diagonal(net, dict(net.named_parameters()))
        >>> _ = curvature.squares.fill_(1e9)                  # one weight is known: R / (n - 1)
        >>> round(best_noise(curvature, [1.0], [0.25], residuals=10.0, count=11.0), 3)
        1.0
    """
    eigenvalues = curvature.spectrum(precisions).double().cpu().numpy()
    cost = sum(p * q for p, q in zip(precisions, squares, strict=True))

    def loss(log_ratio: float) -> float:
        ratio = math.exp(log_ratio)
        volume = float(np.log1p(eigenvalues / ratio).sum())
        return 0.5 * (count * math.log(ratio * cost + residuals) + volume)

    return (math.exp(_lowest(loss)) * cost + residuals) / count


def validated_precisions(
    precisions: Sequence[float], nll: Callable[[Sequence[float]], float]
) -> tuple[list[float], float]:
    """The given precisions times the factor that has the lowest validation NLL, and that NLL.

    It is looked for on a grid of the logarithm, and then between the neighbours of the best.

    Args:
        precisions: P of each tensor.
        nll: The validation NLL with some precisions. Those that are not finite count as infinite.

    Example:
        >>> [found], nll = validated_precisions([2.0], lambda each: math.log(each[0] / 50) ** 2)
        >>> round(found)
        50
    """

    def loss(log_factor: float) -> float:
        value = nll([math.exp(log_factor) * p for p in precisions])
        return value if math.isfinite(value) else math.inf

    grid = np.linspace(*_VALIDATION_FACTORS, _VALIDATION_GRID)
    losses = [loss(one) for one in grid]
    best = int(np.argmin(losses))
    if math.isinf(losses[best]):
        raise NonFiniteError(
            "The validation NLL is not finite at any scale of the prior. Check the validation data."
        )
    if best in (0, _VALIDATION_GRID - 1):
        wanted = "smaller" if best else "larger"
        rank_zero_warn(
            f"The validation NLL is lowest at the end of the range, or beyond: a {wanted} scale of "
            f"the prior, by {math.exp(abs(grid[best]) / 2):.0f} or more, than the one of the fit. "
            + ("The predictions then hardly differ from those of the mode." if best else ""),
            category=UserWarning,
        )
    bounds = grid[max(0, best - 1)], grid[min(_VALIDATION_GRID - 1, best + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 0.03})
    lowest, chosen = min((float(found.fun), found.x), (losses[best], grid[best]))
    return [math.exp(chosen) * p for p in precisions], lowest


def _best_factor(
    curvature: Curvature, precisions: Sequence[float], squares: Sequence[float]
) -> float:
    eigenvalues = curvature.spectrum(precisions).double().cpu().numpy()
    cost = sum(p * q for p, q in zip(precisions, squares, strict=True))

    def loss(log_factor: float) -> float:
        factor = math.exp(log_factor)
        return 0.5 * (factor * cost + float(np.log1p(eigenvalues / factor).sum()))

    return math.exp(_lowest(loss))


def _lowest(loss: Callable[[float], float]) -> float:
    """Where a function of the logarithm of a factor is lowest."""
    grid = np.linspace(*_FACTORS, _GRID)
    best = int(np.argmin([loss(one) for one in grid]))
    bounds = grid[max(0, best - 1)], grid[min(_GRID - 1, best + 1)]
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return float(found.x)


def _per_tensor(
    curvature: Curvature, precisions: Sequence[float], squares: Sequence[float]
) -> list[float]:
    sizes = curvature.layout.sizes
    smallest, largest = ([math.exp(end) * p for p in precisions] for end in _FACTORS)

    def value(now: Sequence[float]) -> float:
        return evidence(curvature, now, squares, 0.0)

    now = list(precisions)
    best = value(now)
    for _ in range(_STEPS):
        variances = curvature.covariance(now).variance().split(sizes)
        traces = [float(variance.double().sum()) for variance in variances]
        for mackay in (True, False):
            proposed = []
            for p, q, trace, size, least, most in zip(
                now, squares, traces, sizes, smallest, largest, strict=True
            ):
                top, bottom = (size - p * trace, q) if mackay else (size, q + trace)
                ratio = max(top, 0.0) / bottom if bottom > 0 else math.inf
                proposed.append(min(max(ratio, least), most))
            reached = value(proposed)
            if reached >= best:
                break
        moved = max(abs(math.log(new / old)) for new, old in zip(proposed, now, strict=True))
        if reached < best:  # by rounding only
            return now
        now, best = proposed, reached
        if moved < _TOLERANCE:
            break
    return now
