"""Statistics of stated uncertainty: whether what was stated is true as often as stated.

Everything here is a function of NumPy arrays in float64. It knows nothing of networks, posteriors
or pages, so that each number can be checked by itself against another implementation.
"""
