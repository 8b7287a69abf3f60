"""Storage: files that are there whole or not at all, stored tensors, and streams of draws."""
