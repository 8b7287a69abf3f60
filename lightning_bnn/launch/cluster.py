"""Start Ray or join it, and refuse what could never run or must not be trusted.

Everything here happens before the first member starts: whether the cluster is open to strangers,
whether what a unit needs is anywhere to be had, whether every node can write to the storage and has
the versions of the driver.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from collections.abc import Mapping
from typing import Any

import yaml

from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.storage.files import open_directory

__all__ = [
    "can_grow",
    "check_feasible",
    "check_nodes",
    "connect",
    "device_room",
    "last_line",
    "other_version",
    "own_versions",
    "require_ray",
    "task_options",
]

_COMPARED = ("torch", "pytorch-lightning", "lightning-bnn", "ray")


def require_ray() -> Any:
    """The module ``ray``, or an error that names the extra."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "launch needs Ray, which is not installed. Install lightning-bnn[ray]."
        ) from error
    return ray


def connect(address: str | None, allow_open_cluster: bool = False) -> None:
    """Join a cluster of Ray, or start one on this machine.

    A cluster that was joined before this call is used as it is, and so is the one that the
    environment names (``RAY_ADDRESS``, which Ray sets in its own jobs). The processes of Ray listen
    on all interfaces of a machine, so that whoever reaches one could run any code: a cluster
    without token authentication is refused. One that is started here has it unless
    ``RAY_AUTH_MODE`` says otherwise.

    Args:
        address: A cluster to join; ``"local"`` to start one in any case.
        allow_open_cluster: Go on with a cluster without authentication.

    Raises:
        LaunchError: The cluster has no authentication.
    """
    ray = require_ray()
    known = address or os.environ.get("RAY_ADDRESS") or "local"
    joins = ray.is_initialized() or known != "local"
    if not joins and not allow_open_cluster:
        _refuse_if_open("started")  # before it listens
    if not ray.is_initialized():
        options = {"include_dashboard": False} if known == "local" else {}
        ray.init(address=known, log_to_driver=False, **options)
    if joins and not allow_open_cluster:
        _refuse_if_open("joined")


def _refuse_if_open(done: str) -> None:
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "token" or (not mode and done == "started"):  # Ray then makes a token by itself
        return
    raise LaunchError(
        f"The cluster of Ray that is {done} has no token authentication (RAY_AUTH_MODE is "
        f"{mode or 'not set'!r}), and its processes listen on all interfaces: whoever reaches them "
        "can run any code. Start every process of it with RAY_AUTH_MODE=token and one token, or "
        "pass allow_open_cluster=True (--allow-open-cluster) if nobody else can reach it."
    )


def task_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """What a task asks of Ray.

    Example:
        >>> task_options({"GPU": 0.5, "CPU": 2, "TPU": 1})
        {'num_cpus': 2, 'num_gpus': 0.5, 'resources': {'TPU': 1}}
    """
    for name, amount in resources.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not number or not 0 <= amount < float("inf"):
            raise ConfigurationError(
                f"resources[{name!r}] is a number, at least 0; got {amount!r}."
            )
        if name == "GPU" and amount > 1:
            raise ConfigurationError(
                f"resources['GPU'] is what one device of a member takes, at most 1; got {amount}. "
                "For a member on several GPUs use devices=."
            )
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 1),
        "num_gpus": resources.get("GPU", 0),
        **({"resources": own} if own else {}),
    }


def check_feasible(resources: Mapping[str, float], devices: int = 1) -> None:
    """Raise unless the nodes can ever give what a member asks for.

    Ray itself would wait for ever. Where a cluster can grow, what its nodes may be is not known
    here, and nothing is said.
    """
    ray = require_ray()
    if devices > 1 and 0 < resources.get("GPU", 0) < 1:
        raise ConfigurationError(
            f"Each of the {devices} devices of a member needs a GPU of its own: NCCL refuses two "
            f"ranks on one; got resources['GPU']={resources['GPU']}. Use 1, or devices=1."
        )
    if device_room(resources) >= devices or can_grow():
        return
    wanted = _wanted(resources)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    said = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    each = f"each of its {devices} devices needs" if devices > 1 else "it needs"
    raise LaunchError(
        f"No member can ever run: {each} {said}, and the nodes of the cluster have: "
        f"{'; '.join(map(_said, nodes)) or 'nothing'}. Ask for less with resources= or devices=, "
        "or add nodes."
    )


def device_room(resources: Mapping[str, float], avoid: str | None = None) -> int:
    """How many devices that need these resources the nodes have room for when they are idle.

    Args:
        resources: What each needs.
        avoid: A node that does not count.
    """
    wanted = _wanted(resources)
    nodes = [
        node["Resources"]
        for node in require_ray().nodes()
        if node["Alive"] and node["NodeID"] != avoid
    ]
    room = [
        min((int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted.items()), default=1)
        for node in nodes
    ]
    return sum(room)


def _wanted(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in {"CPU": 1, **resources}.items() if amount}


def _said(node: Mapping[str, float]) -> str:
    """What a node has, without the marks that Ray adds to it."""
    marks = ("node:", "accelerator_type:", "memory", "object_store_memory")
    own = {name: amount for name, amount in node.items() if not name.startswith(marks)}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(own.items())) or "nothing"


def can_grow() -> bool:
    """Whether an autoscaler may add nodes: that of ``ray up`` in a cloud, or of KubeRay."""
    if "RAY_USAGE_STATS_KUBERAY_IN_USE" in os.environ:
        return True
    try:
        with open(os.path.expanduser("~/ray_bootstrap_config.yaml")) as file:
            provider = (yaml.safe_load(file) or {}).get("provider") or {}
    except FileNotFoundError:
        return False
    except (OSError, yaml.YAMLError):
        return True
    return provider.get("type") != "local"  # machines of one's own are as many as they are


def own_versions() -> dict[str, str]:
    """The versions that driver and workers must share.

    Example:
        >>> sorted(own_versions())[:2]
        ['lightning-bnn', 'pytorch-lightning']
    """
    found = {}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # shipped as a module, without its record
            found[name] = "unknown"
    return found


def other_version(driver: Mapping[str, str]) -> str | None:
    """In which package this process differs from the driver, in words; None if in none.

    Example:
        >>> other_version(own_versions()), other_version({"torch": "1.0"}) is None
        (None, False)
    """
    for package, version in own_versions().items():
        wanted = driver.get(package, "unknown")
        if "unknown" not in (version, wanted) and version != wanted:
            return (
                f"{package} {version}, and the driver has {wanted}. Results would depend on where "
                "a member runs. Install the same on all nodes."
            )
    return None


def check_nodes(storage: str, recipe: Any, run_file: bytes | None, patience: float = 60.0) -> None:
    """Ask every node for its versions, let it read what members are made of, and write a file.

    Args:
        storage: Where the run is stored.
        recipe: The reference of what makes the members, whose modules every node must have.
        run_file: What the driver has written as ``run.json``: every node must see the same.
        patience: For how many seconds to wait for an answer.

    Raises:
        LaunchError: A node cannot write there, sees another storage, or has other versions.
    """
    ray = require_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(_inspect).options(num_cpus=0, scheduling_strategy=here, max_retries=0)
            name = f"{node.get('NodeManagerHostname', '?')} ({node['NodeManagerAddress']})"
            asked[task.remote(storage, own_versions(), recipe)] = name
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience, fetch_local=True)
    for reference, name in asked.items():
        if reference not in ready:
            continue  # busy or just gone; a unit that fails there is tried again elsewhere
        try:
            said = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise LaunchError(
                f"The node {name} cannot make a member of this run: {last_line(error)}. Install "
                "what is missing there, or ship it with the job: --working-dir for your own "
                "modules, a wheel in py_modules for this package."
            ) from error
        except ray.exceptions.RayError:
            continue  # the node has died since
        if said["versions"] is not None:
            raise LaunchError(f"The node {name} has {said['versions']}")
        if said["problem"] is not None:
            raise LaunchError(
                f"The node {name} cannot write to storage={storage!r}: {said['problem']}. Use "
                "storage that every node reaches, such as NFS or an object store."
            )
        if run_file is not None and said["run"] != run_file:
            raise LaunchError(
                f"The node {name} sees another storage={storage!r} than the driver: its own disk "
                "or memory. Use storage that all nodes share, such as NFS or an object store."
            )


def last_line(error: BaseException) -> str:
    r"""What an error of Ray is about: the cause comes after the traceback of the worker.

    Example:
        >>> last_line(RuntimeError("at a line\n\nKeyError: 'name'\n"))
        "KeyError: 'name'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def _inspect(storage: str, driver: Mapping[str, str], recipe: Any) -> dict[str, Any]:
    """What a node says of itself; that it could read the recipe is shown by its coming here."""
    said: dict[str, Any] = {"versions": other_version(driver), "problem": None, "run": None}
    try:
        files = open_directory(storage)
        name = f".probe-{secrets.token_hex(8)}"
        files.put(name, b"probe")
        seen = files.get(name)
        files.remove(name)
        if seen != b"probe":
            said["problem"] = "what was written could not be read back"
        said["run"] = files.get("run.json")
    except Exception as error:
        said["problem"] = f"{type(error).__name__}: {error}"
    return said
