"""Where data sets are looked for, and what is said when they are not there.

One rule for all: ``data_dir=`` is the folder of the data set itself; without it the folder is
``$LIGHTNING_BNN_DATA/<set>``, with ``<set>`` one of ``uci``, ``mnist``, ``cifar10``. So one root
folder serves every configuration of a machine, and no configuration has to name it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_bnn.errors import ConfigurationError

__all__ = ["DATA_VARIABLE", "data_folder", "missing_files"]

DATA_VARIABLE = "LIGHTNING_BNN_DATA"


def data_folder(data_dir: str | Path | None, name: str, expected: str) -> Path:
    """Return the folder of a data set: ``data_dir``, or ``$LIGHTNING_BNN_DATA/<name>``.

    Args:
        data_dir: The folder as the user gave it, or None to use the environment variable.
        name: The folder's name below the root that the environment variable gives.
        expected: A file that the folder should hold, for the error message.

    Raises:
        ConfigurationError: If neither ``data_dir`` nor the environment variable is given.

    Example:
        >>> data_folder("somewhere/yachts", "uci", "yacht/data.txt").as_posix()
        'somewhere/yachts'
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise ConfigurationError(
            f"No folder to look for {expected} in: data_dir is None and the environment variable "
            f"{DATA_VARIABLE} is not set. Pass data_dir=, the folder that holds {expected}, or set "
            f"{DATA_VARIABLE} to a root folder that holds {name}/{expected}."
        )
    return Path(root).expanduser() / name


def missing_files(what: str, missing: Sequence[Path], fixes: str) -> ConfigurationError:
    """Return the error for files that are not there: which ones, and what would help.

    Args:
        what: The name of the data set.
        missing: The files that were looked for and not found.
        fixes: Further ways out, as a sentence, besides ``data_dir`` and the environment variable.

    Example:
        >>> print(missing_files("MNIST", [Path("here/images.gz")], "Or pass download=True."))
        MNIST: expected here/images.gz, which is not there. Pass data_dir=, or set the environment
        variable LIGHTNING_BNN_DATA to the root folder of your data sets. Or pass download=True.
    """
    files = ", ".join(path.as_posix() for path in missing)
    verb = "which is" if len(missing) == 1 else "which are"
    return ConfigurationError(
        f"{what}: expected {files}, {verb} not there. Pass data_dir=, or set the environment "
        f"variable {DATA_VARIABLE} to the root folder of your data sets. {fixes}".rstrip()
    )
