"""The errors of this package: what was expected, what came, and how to fix it.

Every error raised on purpose derives from :class:`LightningBNNError` and from the built-in
error that a reader would expect, so that ``except ValueError`` keeps working.
"""

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "FencedError",
    "LaunchError",
    "LightningBNNError",
    "NonFiniteError",
    "PosteriorFormatError",
]


class LightningBNNError(Exception):
    """Base class of every error that this package raises on purpose."""


class CheckpointError(LightningBNNError, ValueError):
    """A checkpoint of a fit that is damaged."""


class ConfigurationError(LightningBNNError, ValueError):
    """An option, a prior, a selection of weights or a network that cannot work as asked."""


class DataError(LightningBNNError, ValueError):
    """Inputs, targets or network outputs that do not fit the likelihood."""


class FencedError(LightningBNNError, RuntimeError):
    """An attempt at a member whose place another attempt has taken: what it did is not wanted."""


class LaunchError(LightningBNNError, RuntimeError):
    """Members of a launched run that failed for good, or a cluster that cannot run them."""


class NonFiniteError(LightningBNNError, ArithmeticError):
    """A NaN or an infinity where training cannot go on."""


class PosteriorFormatError(LightningBNNError, ValueError):
    """A stored posterior that is damaged, unknown, or of another network."""
