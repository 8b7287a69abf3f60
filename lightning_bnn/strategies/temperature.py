r"""A temperature chosen on validation data, within one fit.

The fit begins at T = 1, the Bayes posterior, and stays there for half of its length. Then T falls
in stages, 0.3, 0.1, 0.03, 0.01, as long as each stage ends with a lower validation NLL than the
one before it, by 0.002 nats at least. At the first that does not, the weights go back to the end of
the best stage, and the rest of the fit is trained at its T. So a fit whose T = 1 is best loses a
twelfth of its steps, and no fit is longer than it would be. What is chosen is a setting like any
other that is tuned on validation data: unless it is 1, the result is not the Bayes posterior.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["TemperatureSearch"]

_LADDER = (1.0, 0.3, 0.1, 0.03, 0.01)
_MATTERS = 0.002  # nats: for less, the temperature that is nearer to Bayes stays
_FIRST, _EACH = 0.5, 0.08  # the shares of a fit that the first stage and each further one take


class TemperatureSearch:
    """Which temperature is tried, what was found of the earlier ones, and which is best.

    Attributes:
        scores: The validation NLL at the end of each stage, by its temperature, in order.
        best: The temperature of the best stage so far.
        chosen: The temperature that was chosen; None while the search goes on.
        kept: Tensors at the end of the best stage so far.

    Example:
        >>> search = TemperatureSearch()
        >>> for step, nll in [(40, 0.5), (50, 0.4), (60, 0.3), (70, 0.35)]:
        ...     better = search.score(step, nll, total=100)
        ...     print(better, search.temperature, search.chosen)
        None 1.0 None
        True 0.3 None
        True 0.1 None
        False 0.3 0.3
        >>> search.scores
        {1.0: 0.4, 0.3: 0.3, 0.1: 0.35}
    """

    def __init__(self) -> None:
        self.scores: dict[float, float] = {}
        self.best = _LADDER[0]
        self.chosen: float | None = None
        self.kept: dict[str, Tensor] = {}
        self._last = 0  # the step of the last round of validation

    @property
    def temperature(self) -> float:
        """T in the next step."""
        return _LADDER[len(self.scores)] if self.chosen is None else self.chosen

    def score(self, step: int, nll: float, total: float) -> bool | None:
        """Note a round of validation: the end of a stage, if the stage was long enough.

        Args:
            step: The steps taken so far.
            nll: The validation NLL.
            total: The steps of the fit.

        Returns:
            Whether this stage is the best so far; None if it goes on, or the search is over.
        """
        if self.chosen is not None or step <= self._last:
            return None
        interval, self._last = step - self._last, step
        if step < (_FIRST + _EACH * len(self.scores)) * total:
            return None
        better = not self.scores or nll < self.scores[self.best] - _MATTERS
        self.best = self.temperature if better else self.best
        self.scores[self.temperature] = nll
        # there must be time for another round
        if not better or len(self.scores) == len(_LADDER) or step + interval > total:
            self.chosen = self.best
        return better

    def __str__(self) -> str:
        tried = ", ".join(f"{nll:.4g} at T = {t:g}" for t, nll in self.scores.items())
        said = f"T = {self.best:g} was chosen on the validation data (NLL {tried})"
        if self.best == 1:
            return f"{said}: it is the Bayes posterior's."
        return f"{said}; it is not the Bayes posterior, which is T = 1."

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What was found so far; it is plain tensors and numbers."""
        return {
            "scores": self.scores,
            "best": self.best,
            "chosen": self.chosen,
            "last": self._last,
            "kept": self.kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.scores, self.best = dict(state["scores"]), state["best"]
        self.chosen, self._last = state["chosen"], state["last"]
        with torch.inference_mode(False):
            self.kept = {name: tensor.clone() for name, tensor in state["kept"].items()}
