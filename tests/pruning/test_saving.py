"""Where a pruned posterior goes, and what it weighs there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_bnn import Posterior
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors.draws import create_stream
from lightning_bnn.pruning import prune
from lightning_bnn.pruning.saving import refuse_to_replace, save_with_configuration, stored_bytes
from tests.pruning.posteriors import KINDS, gaussian, like, network


@pytest.fixture
def memory() -> Iterator[str]:
    """An address that is no folder of the machine."""
    yield "memory://test-saving"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/test-saving"):
        filesystem.rm("/test-saving", recursive=True)


def weight(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_new_and_empty_folders_may_be_written_to(tmp_path: Path, memory: str) -> None:
    refuse_to_replace(str(tmp_path))
    refuse_to_replace(str(tmp_path / "not" / "there"))
    refuse_to_replace(memory)
    assert not list(tmp_path.iterdir())  # it only looks


def test_what_a_folder_holds_is_named(tmp_path: Path, memory: str) -> None:
    for name in ("c", "a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigurationError, match=r"new or empty folder; .* holds a, b, c\. Name"):
        refuse_to_replace(f"{tmp_path}/")
    for name in ("e", "d"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=r"holds a, b, c, d, \.\.\.\. Name another"):
        refuse_to_replace(str(tmp_path))
    with fsspec.open(f"{memory}/deep/file", "w") as file:
        file.write("something")
    with pytest.raises(ConfigurationError, match="memory://test-saving holds deep"):
        refuse_to_replace(memory)


def test_files_and_places_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    for text in ("", "something"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"file\.txt is a file\. Name another"):
            refuse_to_replace(str(file))
    with pytest.raises(ConfigurationError, match=r"nothing://x cannot be read \(ValueError"):
        refuse_to_replace("nothing://x")


def test_the_configuration_is_copied_byte_by_byte(tmp_path: Path, memory: str) -> None:
    content = "model: # Zürich\r\n  class_path: x\n".encode()
    (tmp_path / "fit.yaml").write_bytes(content)
    pruned = prune(gaussian(), 0.5)
    save_with_configuration(pruned, f"{memory}/far/", str(tmp_path / "fit.yaml"))
    # from there to a folder of the machine that is new
    folder = tmp_path / "new" / "near"
    save_with_configuration(pruned, str(folder), f"{memory}/far/config.yaml")
    assert (folder / "config.yaml").read_bytes() == content
    inputs = torch.randn(3, 1, 4, 4)
    for place in (f"{memory}/far", folder):
        loaded = Posterior.load(place, network())
        # stacked or in a loop, as each measures: the same but for rounding
        found, expected = loaded.predict(inputs, 4).mean, pruned.predict(inputs, 4).mean
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_files_of_a_posterior_are_counted_and_no_other(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save(tmp_path)
    expected = weight(tmp_path)
    for other in ("config.yaml", "run.log", "checkpoints/last.ckpt"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text("something else")
    assert stored_bytes(tmp_path) == stored_bytes(f"{tmp_path}/") == expected


def test_draws_that_came_one_by_one_are_counted_with_their_records(
    tmp_path: Path, memory: str
) -> None:
    net = network()
    weights = like(net, 0, 2)  # two chains
    stream = create_stream(tmp_path, net, Gaussian(0.3), weights)
    for step in (1, 2, 3):
        stream.append(step, {name: tensor + step for name, tensor in weights.items()})
    assert len(list((tmp_path / "records").iterdir())) == 3
    assert stored_bytes(tmp_path) == weight(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            with fsspec.open(f"{memory}/{path.relative_to(tmp_path)}", "wb") as file:
                file.write(path.read_bytes())
    assert stored_bytes(memory) == weight(tmp_path)
