"""The passes over all weights that are worth a compiled program of their own."""
