"""Random numbers: seeds, the state of the global generators, streams and hashes.

* :mod:`~lightning_bnn.random.seeds`: the seed of a member or chain from one root seed;
* :mod:`~lightning_bnn.random.state`: save, restore and isolate the global generators;
* :mod:`~lightning_bnn.random.stream`: Gaussian noise from a stream that owns its state;
* :mod:`~lightning_bnn.random.hashing`: random numbers as a function of (member, example).
"""

from lightning_bnn.random.seeds import (
    check_seed,
    member_seed,
    mix_seeds,
    random_seed,
    seeded_generator,
)
from lightning_bnn.random.state import (
    isolated_random_state,
    random_state,
    restore_random_state,
)
from lightning_bnn.random.stream import NoiseGenerator, NormalStream

__all__ = [
    "NoiseGenerator",
    "NormalStream",
    "check_seed",
    "isolated_random_state",
    "member_seed",
    "mix_seeds",
    "random_seed",
    "random_state",
    "restore_random_state",
    "seeded_generator",
]
