"""The dropout layers of a network: where they are, what they do with noise, and running them.

* :mod:`~lightning_bnn.dropout.noise`: what a layer does with uniform numbers;
* :mod:`~lightning_bnn.dropout.layers`: a network's own layers, and those that are inserted;
* :mod:`~lightning_bnn.dropout.running`: a pass with noise, and where examples lie in it.
"""

from lightning_bnn.dropout.layers import input_features, inserted_layers, own_layers
from lightning_bnn.dropout.noise import (
    NOISES,
    SHARING,
    DropoutLayer,
    Factors,
    Noise,
    multiply,
    noise_shape,
)
from lightning_bnn.dropout.running import (
    Change,
    Place,
    Places,
    add_noise,
    check_called,
    place_of,
    places_of,
    row_count,
)

__all__ = [
    "NOISES",
    "SHARING",
    "Change",
    "DropoutLayer",
    "Factors",
    "Noise",
    "Place",
    "Places",
    "add_noise",
    "check_called",
    "input_features",
    "inserted_layers",
    "multiply",
    "noise_shape",
    "own_layers",
    "place_of",
    "places_of",
    "row_count",
]
