"""Storage: files that are there whole or not at all, stored tensors, and streams of draws."""

from lightning_bnn.storage.files import Files, absolute, open_directory, write_atomic
from lightning_bnn.storage.store import Stored, read, write
from lightning_bnn.storage.stream import DrawStream, StoredDraws

__all__ = [
    "DrawStream",
    "Files",
    "Stored",
    "StoredDraws",
    "absolute",
    "open_directory",
    "read",
    "write",
    "write_atomic",
]
