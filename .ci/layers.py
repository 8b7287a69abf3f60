"""The layers of the package: what may import what. Part of ``make lint``.

Checked for every module: it imports only from its own room or from rooms below (a room is a folder
or a module at the top of the package), there is no cycle between rooms, no private name of another
module is read, and an import inside of a function has a comment that says why.

Usage: python .ci/layers.py [package folder]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# from the lowest to the highest; rooms of one line may import each other, but not in a circle
LAYERS = [
    ["errors", "lightning"],
    ["checks", "native"],
    ["random"],
    ["mixtures", "calibration", "network", "selection", "data", "nets"],
    ["metrics", "recipes"],
    ["likelihoods"],
    ["predictive"],
    ["coupling", "exchange", "hyperprior", "priors", "resize"],
    ["stacked_layers", "stacked", "flat", "shared_part", "dropout"],
    ["target"],
    ["bank", "curvature"],
    ["storage"],
    ["posteriors", "initialise"],
    ["families", "samplers", "ensembles"],
    ["optimizers"],
    ["strategies"],
    ["report", "pruning", "diagnostics", "evidence"],
    ["callbacks"],
    ["launch"],
    ["cli", "demo", "demo_digits"],
    ["commands", "__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room_of(module: str) -> str:
    """The room of a dotted module name: ``lightning_bnn.report.page`` is in ``report``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


class Module:
    """One file: what it imports, which private names it defines and reads."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        names = [root.name, *path.relative_to(root).with_suffix("").parts]
        self.name = ".".join(names[:-1] if names[-1] == "__init__" else names)
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines()
        self.only_typing = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        self.inside_functions = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for inner in ast.walk(node)
        }

    def imports(self, package: str) -> list[tuple[str, int, list[str]]]:
        """(module, line, names) of each import of the package's own modules."""
        found = []
        for node in ast.walk(self.tree):
            if id(node) in self.only_typing:
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                names = [alias.name for alias in node.names]
                if node.module == package:
                    found += [(f"{package}.{name}", node.lineno, []) for name in names]
                else:
                    found.append((str(node.module), node.lineno, names))
            elif isinstance(node, ast.Import):
                own = [a.name for a in node.names if a.name.split(".")[0] == package]
                found += [(name, node.lineno, []) for name in own]
        return found

    def late_imports(self) -> list[int]:
        """The lines of imports inside of functions without a comment on or above them."""
        return [
            node.lineno
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and id(node) in self.inside_functions
            and "#" not in self.lines[node.lineno - 1]
            and not self.lines[node.lineno - 2].lstrip().startswith("#")
        ]

    def private_definitions(self) -> set[str]:
        """Private names that the module gives to its functions, classes, attributes and itself."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_buffer":
                names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
        return {name for name in names if _private(name)}

    def private_reads(self) -> list[tuple[str, int]]:
        """Private attributes that are read of anything but ``self``, ``cls`` or ``super()``."""
        reads = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and _private(node.attr):
                owner = node.value
                itself = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                parent = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
                if not itself and not parent:
                    reads.append((node.attr, node.lineno))
        return reads


# private names of PyTorch, Lightning and the standard library that are read here
FOREIGN = {"_parameters", "_buffers", "_modules", "_version", "_trainer", "_fields", "_asdict"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def problems(root: Path) -> list[str]:
    """What is wrong in a package folder, a line each."""
    package = root.name
    modules = [Module(path, root) for path in sorted(root.rglob("*.py"))]
    owners: dict[str, set[str]] = {}
    for module in modules:
        for name in module.private_definitions():
            owners.setdefault(name, set()).add(module.name)
    found, arrows = [], {}
    for module in modules:
        here = room_of(module.name)
        if here != "__init__" and here not in LEVEL:
            found.append(f"{module.path}: the room {here!r} has no place in the layers")
            continue
        for target, line, names in module.imports(package):
            there = room_of(target)
            place = f"{module.path}:{line}"
            if here != "__init__" and there != here:
                arrows.setdefault((here, there), place)
                if LEVEL.get(there, len(LAYERS)) > LEVEL[here]:
                    found.append(f"{place}: {here} looks up to {there}")
            private = [name for name in names if _private(name)]
            if target != module.name and private:
                found.append(f"{place}: the private {private[0]} of {target}")
        for line in module.late_imports():
            found.append(f"{module.path}:{line}: an import inside of a function, without a reason")
        for name, line in module.private_reads():
            if name in owners and name not in FOREIGN and module.name not in owners[name]:
                found.append(f"{module.path}:{line}: reads {name}, private to {min(owners[name])}")
    return found + _cycles(arrows)


def _cycles(arrows: dict[tuple[str, str], str]) -> list[str]:
    """A line for each room that can be reached from itself."""
    below: dict[str, set[str]] = {}
    for here, there in arrows:
        below.setdefault(here, set()).add(there)
    found = []
    for room in below:
        seen, waiting = set(), list(below[room])
        while waiting:
            following = waiting.pop()
            if following not in seen:
                seen.add(following)
                waiting.extend(below.get(following, ()))
        if room in seen:
            found.append(f"{room} is part of a cycle between rooms")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_bnn"))
    print("\n".join(lines) or "layers: nothing looks up")
    sys.exit(bool(lines))
