"""The passes over all weights that are worth compiling."""
