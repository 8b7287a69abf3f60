"""Posteriors and networks by name, from objects or from folders.

A saved posterior says how its network is made, if it is of known layers. Any other network has to
be given, on the command line by ``--config FILE``. A ``config.yaml`` that lies beside a posterior
is never used by itself: making what it names can run any code, and it may be somebody else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import fsspec
import yaml
from torch import nn

from lightning_bnn.errors import ConfigurationError, LightningBNNError, PosteriorFormatError
from lightning_bnn.lightning import pl
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import DrawsPosterior, Posterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.selection import look_in_current_folder, named_function
from lightning_bnn.storage.files import absolute, open_directory
from lightning_bnn.storage.manifest import MANIFEST
from lightning_bnn.strategies.base import Strategy

__all__ = [
    "find_configuration", "folder_of", "instantiate", "load_configured", "load_posterior",
    "make_posterior", "name_all", "path_names", "read_configuration",
]  # fmt: skip

Path = str | os.PathLike[str]


def path_names(paths: Sequence[Path]) -> list[str]:
    """Short names for folders: as few of their last parts as tell them apart.

    A last part called ``posterior`` says nothing and is left out.

    Example:
        >>> path_names(["runs/vi/posterior", "runs/chains/posterior"])
        ['vi', 'chains']
        >>> path_names(["a/version_0", "b/version_0"])
        ['a/version_0', 'b/version_0']
    """
    parts = []
    for path in paths:
        # "." is named as its folder is; a URL is not of the working directory
        text = os.fspath(path)
        folders = (text if "://" in text else os.path.abspath(text)).strip("/").split("/")
        parts.append(folders[:-1] if len(folders) > 1 and folders[-1] == "posterior" else folders)
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(folders[-length:]) for folders in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigurationError(
        f"The folders {[os.fspath(path) for path in paths]} are not different from each other. "
        "Name each once, or pass a mapping from names to folders."
    )


def name_all(values: Any, what: str) -> dict[str, Any]:
    """A mapping as it is; names for a list of folders, or for a single one.

    Example:
        >>> name_all(["runs/vi", "runs/chains"], "compare")
        {'vi': 'runs/vi', 'chains': 'runs/chains'}
    """
    if isinstance(values, Mapping):
        return dict(values)
    paths = values if isinstance(values, (list, tuple)) else [values]
    wrong = [type(path).__name__ for path in paths if not isinstance(path, (str, os.PathLike))]
    if wrong:
        raise ConfigurationError(
            f"{what}= is a mapping from names to posteriors, networks or folders, or a list of "
            f"folders; got {wrong[0]} without a name. Pass {what}={{'ensemble': posterior}}."
        )
    return dict(zip(path_names(paths), paths, strict=True))


def make_posterior(
    value: Any, name: str, net: nn.Module | None, likelihood: Likelihood | None
) -> Posterior:
    """A posterior from itself, a strategy, a plain network, or a folder.

    Args:
        value: One of these.
        name: Its name, for errors.
        net: The network of a folder whose file cannot make it.
        likelihood: The likelihood of a plain network.

    Raises:
        ConfigurationError: It is something else, or something is missing.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> len(make_posterior(nn.Linear(1, 1), "net", None, Gaussian()))
        1
    """
    if isinstance(value, Posterior):
        return value
    if isinstance(value, Strategy):
        return value.posterior()
    if isinstance(value, nn.Module):
        if likelihood is None:
            raise ConfigurationError(
                f"{name!r} is a network, and nothing says how its outputs give targets. Pass "
                "likelihood=, such as Categorical()."
            )
        return DrawsPosterior(value, likelihood, [network_tensors(value)])
    if isinstance(value, (str, os.PathLike)):
        return load_posterior(value, net, likelihood)
    raise ConfigurationError(
        f"{name!r} is expected to be a posterior, a network or the folder of a posterior; got "
        f"{type(value).__name__}."
    )


def load_posterior(
    path: Path,
    net: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    load: Callable[..., Posterior] = Posterior.load,
    *,
    net_first: bool = False,
) -> Posterior:
    """The posterior in a folder, with the network that its file makes or with a given one.

    Args:
        path: A folder or an fsspec URL of the posterior, or of the run that holds it in
            ``posterior``.
        net: The network, where the file cannot make it, as it cannot one of the user's own.
        likelihood: The likelihood to go with ``net``, where it is one of the user's own.
        load: Reads the folder; the command line passes one that opens launched runs as well.
        net_first: Whether ``net`` was given for this posterior: then it is taken if it fits,
            whatever the file says.

    Raises:
        PosteriorFormatError: There is no posterior, or it is damaged or of another network.
        ConfigurationError: No network is known.
    """
    path = folder_of(path)
    # ours are read from the manifest itself, which cannot name one of the user's own
    if type(likelihood).__module__.startswith("lightning_bnn."):
        likelihood = None
    choices = [None] if net is None else [net, None] if net_first else [None, net]
    errors: dict[bool, LightningBNNError] = {}
    for choice in choices:
        try:
            return load(path, choice, likelihood)
        except (ConfigurationError, PosteriorFormatError) as error:
            errors[choice is None] = error
    problem = errors.get(False, errors[True])  # of the given network, if there is one
    file = find_configuration(path) if isinstance(errors[True], ConfigurationError) else None
    if file is None:
        raise problem
    raise ConfigurationError(
        f"{problem} There is {file}, which is not used by itself, as it can run any code: on the "
        f"command line, pass --config {file} if you trust it."
    ) from problem


def load_configured(
    path: Path, configuration: Path | None, load: Callable[..., Posterior] = Posterior.load
) -> Posterior:
    """The posterior in a folder, with the network of the user's own configuration if it is given.

    Args:
        path: The folder or URL.
        configuration: A YAML file that the user has named, or None.
        load: Reads the folder.
    """
    if configuration is None:
        return load_posterior(path, load=load)
    strategy = instantiate(read_configuration(configuration), "model", configuration)
    return load_posterior(path, strategy.net, strategy.likelihood, load, net_first=True)


def folder_of(path: Path) -> str:
    """The folder of a posterior, or that in the folder of the run that left it."""
    given = os.fspath(path).rstrip("/") or "/"
    for folder, name in ((given, MANIFEST), (f"{given}/posterior", MANIFEST), (given, "run.json")):
        try:
            if open_directory(folder).get(name, 1) is not None:
                return folder  # run.json: a launched run
        except OSError as error:
            raise ConfigurationError(f"The folder {given} cannot be read ({error}).") from error
    raise PosteriorFormatError(
        f"There is no posterior in {given}: expected {MANIFEST} in it or in its folder "
        "'posterior'. Name the folder that Posterior.save or `lightning-bnn fit` wrote, such as "
        "runs/version_0."
    )


def find_configuration(path: Path) -> str | None:
    """Where a ``config.yaml`` lies, in a folder or in the one above; it is not read."""
    name = absolute(path).rstrip("/") or "/"
    parent = name.rpartition("/")[0] or "/"
    for folder in [name] if parent.endswith(":/") else [name, parent]:  # "s3:/" is no folder
        with suppress(OSError):  # one above that may not be listed
            if "config.yaml" in open_directory(folder).names():
                return f"{folder}/config.yaml"
    return None


def read_configuration(path: Path) -> dict[str, Any]:
    """The content of a YAML file that the user has named; it may name modules beside it, too.

    Raises:
        ConfigurationError: There is no such file, it cannot be read, or it is no mapping.
    """
    look_in_current_folder()
    try:
        with fsspec.open(os.fspath(path), "r", encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ConfigurationError(f"There is no configuration {os.fspath(path)}.") from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ImportError, ValueError) as error:
        raise ConfigurationError(
            f"The configuration {os.fspath(path)} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{os.fspath(path)} is expected to be a YAML mapping; got {type(content).__name__}."
        )
    return content


def instantiate(content: Mapping[str, Any], part: str, path: Path) -> Any:
    """The strategy (``"model"``) or the data module (``"data"``) that a configuration describes.

    Args:
        content: A whole configuration of a fit; for data also just ``class_path`` and
            ``init_args``.
        part: ``"model"`` or ``"data"``.
        path: Where it was read, for errors.

    Raises:
        ConfigurationError: The part is missing or cannot be made.
    """
    # slow imports that few reports need
    from jsonargparse import ArgumentError, ArgumentParser

    import lightning_bnn.data  # makes short names of its classes known
    import lightning_bnn.nets  # noqa: F401 (the same of networks)

    described = content.get(part, content if "class_path" in content else None)
    if described is None:
        raise ConfigurationError(
            f"{os.fspath(path)} has no {part}: expected class_path and init_args, or a "
            f"configuration of a fit with {part!r}; got {sorted(content)}."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy if part == "model" else pl.LightningDataModule, part)
    try:
        with isolated_random_state():  # a network is initialised, and its values are not used
            parsed = parser.parse_object({part: described})
            key = f"{part}.init_args.bayesian"
            if (function := named_function(parsed.get(key))) is not None:
                parsed[key] = function
            return parser.instantiate_classes(parsed)[part]
    except ArgumentError as error:
        raise ConfigurationError(f"The {part} of {os.fspath(path)} is wrong: {error}") from error
