"""Kill a writer at every step of a stream's operations; run by test_stream.py.

Usage: python -m tests.storage.crash_stream DIRECTORY. Prints JSON: for each operation its steps
in order, and for each step and moment what a reader found afterwards. As in crash_store.py, system
calls are wrapped in forked children.
"""

import importlib.util
import json
import os
import shutil
import stat
import sys
from pathlib import Path

from tests.storage.crash_store import Steps, scenario, stand_in


class StreamSteps(Steps):
    """As for a store, with a folder of records beside the blobs."""

    def role(self, target):
        records = self.root / "records"
        if isinstance(target, int):
            status = os.fstat(target)
            if stat.S_ISDIR(status.st_mode):
                if records.exists() and os.path.samestat(records.stat(), status):
                    return "directory records"
                return super().role(target)
            parts = self.root.rglob(".tmp-*")
            target = next(path for path in parts if os.path.samestat(path.stat(), status))
        target = Path(target)
        if target == records:
            return "directory records"
        if target.parent == records:
            return "temporary record" if target.name.startswith(".tmp-") else "record"
        return super().role(target)


def weights(step):
    """Two chains, told apart by their values."""
    import torch

    return {"w": torch.tensor([[step, 0.0], [step, 1.0]]), "n": torch.tensor([step, step])}


def found(root):
    """The steps that a reader finds, or a description of the damage."""
    from lightning_bnn.errors import PosteriorFormatError
    from lightning_bnn.storage.stream import DrawStream

    try:
        stream = DrawStream.open(root)
        draws = stream.draws()
        for number, step in enumerate(stream.steps()):
            for chain in range(2):
                draw = draws[2 * number + chain]
                assert draw["w"].tolist() == [step, chain]
                assert draw["n"].item() == step
    except PosteriorFormatError as error:
        missing = "holds manifest.json" in str(error) or "does not exist" in str(error)
        return "nothing" if missing else f"broken: {error}"
    return stream.steps()


def leftovers(root):
    """The files that neither the head nor a record names."""
    named = {"manifest.json"}
    named |= {e["file"] for e in json.loads((root / "manifest.json").read_bytes())["blobs"]}
    for record in (root / "records").glob("0*.json"):
        named |= {record.name, json.loads(record.read_bytes())["blob"]["file"]}
    return sorted(p.name for p in root.rglob("*") if p.is_file() and p.name not in named)


def create(root):
    import torch

    from lightning_bnn.storage.stream import DrawStream

    fixed = {"c": torch.ones(3)}
    return DrawStream.create(root, fields={}, weights=weights(0), fixed=fixed)


def crash_in(root, before, operation):
    """Prepare a stream with the steps ``before`` (None: nothing) and crash in the operation."""
    from lightning_bnn.storage.stream import DrawStream

    def prepare():
        shutil.rmtree(root, ignore_errors=True)
        if before is not None:
            stream = create(root)
            for step in before:
                stream.append(step, weights(step))

    def operate():
        if operation == "create":
            create(root)
        elif operation == "append":
            DrawStream.open(root).append(9, weights(9))
        else:
            DrawStream.open(root).truncate(after_step=2)

    def outcome():
        first = found(root)
        if first == "nothing":
            stream = create(root)
        else:
            stream = DrawStream.open(root)
            stream.truncate(after_step=2)
        stream.append(7, weights(7))
        return {"found": first, "again": found(root), "leftovers": leftovers(root)}

    return scenario(root, StreamSteps, prepare, operate, outcome)


if __name__ == "__main__":
    base = Path(sys.argv[1])
    package = Path(importlib.util.find_spec("lightning_bnn").origin).parent
    stand_in("lightning_bnn", package)
    stand_in("lightning_bnn.storage", package / "storage")
    results = {
        "create": crash_in(base / "p", None, "create"),
        "first": crash_in(base / "p", [], "append"),
        "append": crash_in(base / "p", [1, 2], "append"),
        "truncate": crash_in(base / "p", [1, 2, 3, 4], "truncate"),
    }
    print(json.dumps(results))
