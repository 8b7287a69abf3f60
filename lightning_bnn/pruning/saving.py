"""A pruned posterior on the disk, with the configuration of its network beside it.

The configuration is what lets ``lightning-bnn report`` and ``lightning-bnn test`` make the network
of a posterior; a posterior in a new folder needs a copy of it.
"""

from __future__ import annotations

import os

import fsspec

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior
from lightning_bnn.storage.manifest import MANIFEST

__all__ = ["refuse_to_replace", "save_with_configuration", "stored_bytes"]

# What else lies in the folder (a log, a configuration) is not of the posterior.
_PARTS = ("blobs", "records")


def refuse_to_replace(directory: str) -> None:
    """Raise unless a folder or an fsspec URL is new or empty.

    Raises:
        ConfigurationError: It is a file, holds something, or cannot be read.

    Example:
        >>> refuse_to_replace("memory://saving-doc-new")
    """
    try:
        filesystem, name = fsspec.core.url_to_fs(directory)
        found = filesystem.exists(name)
        file = found and filesystem.isfile(name)
        names = filesystem.ls(name, detail=False) if found else []
    except Exception as error:  # what a file system of fsspec raises is its own
        raise ConfigurationError(
            f"The folder {directory} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if names:
        inside = sorted(entry.rstrip("/").rpartition("/")[2] for entry in names)
        holds = f"holds {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}"
        raise ConfigurationError(
            f"The pruned posterior is expected to go to a new or empty folder; {directory} "
            f"{'is a file' if file else holds}. Name another, or remove what is there."
        )


def save_with_configuration(posterior: Posterior, directory: str, configuration: str) -> None:
    """Save a posterior, and copy a ``config.yaml`` to it.

    Args:
        posterior: The posterior.
        directory: Folder or fsspec URL.
        configuration: File or fsspec URL of the configuration that describes its network.
    """
    posterior.save(directory)
    with fsspec.open(configuration, "rb") as file:
        content = file.read()
    with fsspec.open(f"{directory.rstrip('/')}/config.yaml", "wb") as file:
        file.write(content)


def stored_bytes(directory: str | os.PathLike[str]) -> int:
    """The bytes of all files of a stored posterior, its manifest included.

    Example:
        >>> import torch
        >>> from lightning_bnn.storage import store
        >>> blobs = {"0": {"w": torch.ones(1000)}}
        >>> store.write("memory://saving-doc-bytes", kind="draws", blobs=blobs, fields={})
        >>> 4000 < stored_bytes("memory://saving-doc-bytes") < 6000
        True
    """
    filesystem, name = fsspec.core.url_to_fs(os.fspath(directory))
    root = name.rstrip("/")
    total = int(filesystem.size(f"{root}/{MANIFEST}") or 0)
    for part in _PARTS:
        if filesystem.exists(f"{root}/{part}"):
            total += int(filesystem.du(f"{root}/{part}"))
    return total
