"""Parts of deep ensembles: what members see of the data, and the variants' pure functions."""

from lightning_bnn.ensembles.batches import MemberBatch
from lightning_bnn.ensembles.prior_function import RandomPriorFunction

__all__ = ["MemberBatch", "RandomPriorFunction"]
