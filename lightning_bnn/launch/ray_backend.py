"""Ray as a backend: a task for a unit on one device, Ray Train for one on several.

Before the first member starts, the backend checks that the cluster is not open to strangers, that
some node has what a unit needs (Ray itself would wait for ever), and that every node can make a
member, can write to the storage and has the versions of the driver.

**Several devices.** A task that needs nothing itself runs Ray Train for one attempt and waits for
it. Every rank runs :func:`~lightning_bnn.launch.member.attempt_outcome`; the first one tells of the
progress, saves and commits. Ray Train itself neither retries nor keeps checkpoints: both belong to
the launcher. It reserves its workers with a placement group, and if its own processes are killed,
these workers end but the group may stay, with all that it has reserved, as long as the driver
lives. So whoever gives an attempt up removes its group, which is found by the memory that it asks
for (see :func:`group_memory`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import secrets
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch.backend import Attempt, Backend, Handle, Outcome
from lightning_bnn.launch.member import Place, attempt_outcome
from lightning_bnn.launch.recipe import Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.lightning import PACKAGE, LightningEnvironment, pl
from lightning_bnn.native.library import noise_source
from lightning_bnn.storage.files import open_directory

__all__ = ["RankError", "RayBackend", "group_memory", "judge", "remove_groups"]

# Attempts that wait in Ray at a time; the rest waits in the driver.
_OUTSTANDING = 1000
_COMPARED = ("torch", "pytorch-lightning", "lightning-bnn", "ray")
_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # a relative path in a factory means the same as on one device
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # a rank whose host is gone without a word: by default it would be waited for ten minutes
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    # a process more for each unit, for warnings that nobody here would heed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_TOKEN = "~/.ray/auth_token"  # where Ray keeps the token that it makes
_NOISE = "noise"  # beside the versions: where it comes from
_DDP = (None, "auto", "ddp", "ddp_find_unused_parameters_true")


@dataclass(frozen=True)
class _Job:
    """What a worker has to know of the cluster."""

    needs: Mapping[str, float]
    versions: Mapping[str, str]
    devices: int
    avoid: str | None = None


class RayBackend(Backend):
    """Runs attempts on a cluster of Ray, or on one that it starts on this machine.

    A cluster that was joined before is used as it is, and so is the one that the environment names
    (``RAY_ADDRESS``, which Ray sets in its own jobs). The processes of Ray listen on all interfaces
    of a machine, so that whoever reaches one could run any code: a cluster is refused that answers
    a call without a token. One that is started here has a token unless ``RAY_AUTH_MODE`` says
    otherwise; the file that Ray keeps it in is made readable by its owner alone.

    Args:
        resources: What each device of a unit needs, such as ``{"GPU": 0.5, "CPU": 2}``; by default
            one CPU.
        devices: The number of devices of a unit.
        address: A cluster to join; ``"local"`` to start one in any case.
        allow_open_cluster: Use a cluster without authentication.

    Example:
        >>> RayBackend({"GPU": 0.5, "CPU": 2, "TPU": 1}).options
        {'num_cpus': 2, 'num_gpus': 0.5, 'resources': {'TPU': 1}}
    """

    def __init__(
        self,
        resources: Mapping[str, float] | None = None,
        devices: int = 1,
        address: str | None = None,
        allow_open_cluster: bool = False,
    ) -> None:
        self.needs = {"CPU": 1, **(resources or {})}
        self.devices = check_whole("devices", devices, 1)
        self.address, self.allow_open_cluster = address, allow_open_cluster
        _check_resources(self.needs, self.devices)
        others = {name: n for name, n in self.needs.items() if name not in ("CPU", "GPU")}
        self.options: dict[str, Any] = {
            "num_cpus": self.needs["CPU"],
            "num_gpus": self.needs.get("GPU", 0),
            **({"resources": others} if others else {}),
        }
        self._attempts: dict[Handle, Attempt] = {}

    def open(self, recipe: Recipe) -> None:
        """Join the cluster or start one, and see that the recipe can run there."""
        self.ray = _require_ray()
        self._connect()
        self._check_feasible()
        self._recipe = self._send(recipe)  # travels once, not with each attempt
        self._job = _Job(self.needs, _versions(), self.devices)
        # the workers of Ray Train have the resources; what waits for them needs none
        function, needs = _run_distributed, {"num_cpus": 0}
        if self.devices == 1:
            function, needs = _run_task, self.options
        self._task, self._options = self.ray.remote(function), {**needs, **_worker_options()}

    def check_storage(self, storage: str) -> None:
        """Ask every node whether it can make a member and write to the storage."""
        _check_nodes(self.ray, storage, self._recipe)

    def submit(self, attempt: Attempt, avoid: str | None) -> Handle:
        """Start a task for an attempt; Ray lets it wait until there is room."""
        if avoid is not None and self._devices(avoid) < self.devices:
            avoid = None  # nothing else would do
        away = {} if avoid is None else {"label_selector": _away_from(avoid)}
        task = self._task.options(**self._options, **away)  # all at once: they cannot be added to
        handle: Handle = task.remote(self._recipe, attempt, replace(self._job, avoid=avoid))
        self._attempts[handle] = attempt
        return handle

    def wait(self, handles: Sequence[Handle], seconds: float) -> dict[Handle, Outcome]:
        """Wait for tasks to end."""
        wait = partial(self.ray.wait, list(handles), fetch_local=False)
        ready, _ = wait(num_returns=1, timeout=seconds)
        if ready:  # and whatever else is there by now
            ready, _ = wait(num_returns=len(handles), timeout=0)
        return {handle: self._outcome(handle) for handle in ready}

    def _outcome(self, handle: Handle) -> Outcome:
        attempt = self._attempts.pop(handle)
        try:
            outcome: Outcome = self.ray.get(handle)
            return outcome
        except self.ray.exceptions.RayTaskError as error:  # before our part in it began
            text = _last_line(error)
        except self.ray.exceptions.RayError as error:  # a worker or a node that died
            text = str(error).strip().split("\n")[0] or repr(error)
        self._clear(attempt)
        return Outcome(error=text)

    def cancel(self, handle: Handle) -> None:
        """End a task, and free what Ray Train has reserved for it."""
        with suppress(Exception):  # already over, or its node is gone
            self.ray.cancel(handle, force=True)
        self._clear(self._attempts.pop(handle))

    def _clear(self, attempt: Attempt) -> None:
        if self.devices > 1:
            # it may be handed to the very worker that is being killed
            task = self.ray.remote(_sweep).options(num_cpus=0, max_retries=-1)
            with suppress(Exception):  # Ray may be gone, and all groups with it
                task.remote(group_memory(attempt, self.needs))

    def room(self) -> int:
        """Many on one device; on several, as many as fit, for each is processes that wait."""
        if self.devices == 1:
            return _OUTSTANDING
        # a few more make a cluster grow
        return self._devices() // self.devices + (8 if _can_grow() else 1)

    # ---------------------------------------------------------------- before anything runs

    def _connect(self) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        mode = os.environ.get("RAY_AUTH_MODE", "").lower()
        joined = self.ray.is_initialized()
        starts = address == "local" and not joined
        # a cluster that is started here without a mode has a token: Ray makes one by itself
        if not self.allow_open_cluster and mode != "token" and (mode or not starts):
            raise _open_cluster(f"RAY_AUTH_MODE is {mode!r}")
        if not joined:
            if _close_token():
                warnings.warn(
                    f"{_TOKEN} was readable by other users of this machine, who may have the token "
                    "of the cluster; now only you can read it. If they are not to be trusted, make "
                    "a new one (ray get-auth-token --generate, after removing the file) and start "
                    "the cluster again.",
                    stacklevel=6,
                )
            options = {"include_dashboard": False} if starts else {}
            self.ray.init(address=address, log_to_driver=False, **options)
            _close_token()  # Ray may have written it, and lets everyone read it
        if not self.allow_open_cluster and (answer := _answer_to_a_stranger(self.ray)) is not None:
            if not joined:
                self.ray.shutdown()
            raise _open_cluster(answer)

    def _check_feasible(self) -> None:
        """Raise unless the nodes can ever give what a member asks for.

        Where a cluster can grow, what its nodes may be is not known here, and nothing is said.
        """
        if self._devices() >= self.devices or _can_grow():
            return
        wanted = ", ".join(f"{name} {n:g}" for name, n in self.needs.items() if n)
        each = f"each of its {self.devices} devices needs" if self.devices > 1 else "it needs"

        def shown(name: str) -> bool:
            return ":" not in name and "memory" not in name  # Ray's own marks

        nodes = [
            ", ".join(f"{name} {n:g}" for name, n in node["Resources"].items() if shown(name))
            for node in self._nodes()
        ]
        raise LaunchError(
            f"No member can ever run: {each} {wanted}, and the nodes of the cluster have: "
            f"{'; '.join(nodes)}. Ask for less with resources= or devices=, or add nodes."
        )

    def _nodes(self) -> list[Any]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _devices(self, avoid: str | None = None) -> int:
        """How many devices the nodes have room for when they are idle, without one to avoid."""
        nodes = [node["Resources"] for node in self._nodes() if node["NodeID"] != avoid]
        needs = [(name, amount) for name, amount in self.needs.items() if amount]
        return sum(
            min((int(node.get(name, 0) / amount + 1e-9) for name, amount in needs), default=1)
            for node in nodes
        )

    def _send(self, recipe: Recipe) -> Any:
        """Put a recipe into the object store, or name what cannot be sent."""
        try:
            return self.ray.put(recipe)
        except Exception as error:  # of any kind: it may be raised by the object itself
            for name, value in vars(recipe).items():
                try:
                    self.ray.cloudpickle.dumps(value)
                except Exception as reason:
                    raise ConfigurationError(
                        f"{name} cannot be sent to a worker: {reason}. Make such objects inside of "
                        "the function, where they are used."
                    ) from error
            raise


def _open_cluster(why: str) -> LaunchError:
    return LaunchError(
        f"The cluster of Ray has no token authentication ({why}), and "
        "its processes listen on all interfaces: whoever reaches them can run any code. "
        "Start every process of it with RAY_AUTH_MODE=token and one token, or pass "
        "allow_open_cluster=True (--allow-open-cluster) if nobody else can reach it."
    )


def _answer_to_a_stranger(ray: Any) -> str | None:
    """What the head of the cluster answers to a call without a token; None if it refuses it.

    The setting of this process says nothing of that: an open cluster takes any token.
    """
    import grpc  # comes with the extra

    address = ray.get_runtime_context().gcs_address
    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
        root, key, certificate = (Path(os.environ[name]).read_bytes() for name in names)
        credentials = grpc.ssl_channel_credentials(root, key, certificate)
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    with channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=10.0)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return None
            return f"{address} did not refuse a call without a token, but said: {error.code().name}"
    return f"{address} answers calls without a token"


def _close_token() -> bool:
    """Let only its owner read the file of the token; whether others could."""
    token = Path(_TOKEN).expanduser()
    try:
        readable = bool(token.stat().st_mode & 0o077)
        if readable:
            token.chmod(0o600)
    except OSError:  # there is none, or it is not ours to change
        return False
    return readable


def _away_from(node: str) -> dict[str, str]:
    return {"ray.io/node-id": f"!{node}"}


def _require_ray() -> Any:
    """The module ``ray``, which is an extra, or an error that names it."""
    try:
        import ray  # an extra
    except ImportError as error:
        raise ConfigurationError(
            "launch needs Ray, which is not installed. Install lightning-bnn[ray]."
        ) from error
    return ray


def _check_resources(needs: Mapping[str, float], devices: int) -> None:
    for name, amount in needs.items():
        check_number(f"resources[{name!r}]", amount, positive=False)
    gpu = needs.get("GPU", 0)
    if gpu > 1:
        raise ConfigurationError(
            f"resources['GPU'] is what one device of a member takes, at most 1; got {gpu}. "
            "For a member on several GPUs use devices=."
        )
    if devices > 1 and 0 < gpu < 1:
        raise ConfigurationError(
            f"Each of the {devices} devices of a member needs a GPU of its own: NCCL refuses two "
            f"ranks on one; got resources['GPU']={gpu}. Use 1, or devices=1."
        )


def _can_grow() -> bool:
    """Whether an autoscaler may add nodes: that of ``ray up`` in a cloud, or of KubeRay."""
    if "RAY_USAGE_STATS_KUBERAY_IN_USE" in os.environ:
        return True
    file = os.path.expanduser("~/ray_bootstrap_config.yaml")
    if not os.path.exists(file):
        return False
    with open(file) as text:
        # the machines of onprem.yaml are as many as they are
        return bool(yaml.safe_load(text)["provider"]["type"] != "local")


def _worker_options() -> dict[str, Any]:
    """Workers import the Lightning that the driver has imported, and compile if it does."""
    variables = {"LIGHTNING_BNN_LIGHTNING": PACKAGE}
    if (compiles := os.environ.get("LIGHTNING_BNN_COMPILE")) is not None:
        variables["LIGHTNING_BNN_COMPILE"] = compiles
    return {"max_retries": 0, "runtime_env": {"env_vars": variables}}


def _versions() -> dict[str, str]:
    """The versions that driver and workers must share, and the source of their noise."""
    versions = {_NOISE: noise_source()}
    for name in _COMPARED:
        with suppress(importlib.metadata.PackageNotFoundError):  # shipped as a module
            versions[name] = importlib.metadata.version(name)
    return versions


def _other_version(driver: Mapping[str, str]) -> str | None:
    """In which package this process differs from the driver, in words; None if in none."""
    for package, version in _versions().items():
        wanted = driver.get(package, version)
        if version != wanted and package == _NOISE:
            return (
                f"noise from another source, {version}, and the driver has {wanted}: with one seed "
                "they give other numbers. Results would depend on where a member runs. Install a C "
                "compiler on all nodes and the driver, or launch with LIGHTNING_BNN_COMPILE=0 in "
                "the environment to do without on all of them."
            )
        if version != wanted:
            return (
                f"{package} {version}, and the driver has {wanted}. Results would depend on where "
                "a member runs. Install the same on all nodes."
            )
    return None


def _check_nodes(ray: Any, storage: str, recipe: Any, patience: float = 120.0) -> None:
    """Ask every node whether it can make a member, has our versions and can use the storage."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # an extra

    run_file = open_directory(storage).get("run.json")
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(_inspect).options(
                num_cpus=0, scheduling_strategy=here, **_worker_options()
            )
            name = f"{node.get('NodeManagerHostname', '?')} ({node['NodeManagerAddress']})"
            asked[task.remote(storage, _versions(), run_file, recipe)] = name
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience, fetch_local=True)
    for handle in ready:  # others are busy or just gone; a unit that fails there is tried elsewhere
        try:
            problem = ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            problem = (
                f"cannot make a member of this run: {_last_line(error)}. Install what is missing "
                "there, or ship it with the job: --working-dir for your own modules, a wheel in "
                "py_modules for this package."
            )
        except ray.exceptions.RayError:
            continue  # the node has died since
        if problem is not None:
            raise LaunchError(f"The node {asked[handle]} {problem}")


def _inspect(
    storage: str, driver: Mapping[str, str], run_file: bytes | None, recipe: Any
) -> str | None:
    """What is wrong with a node; that it could read the recipe is shown by its coming here."""
    if (other := _other_version(driver)) is not None:
        return f"has {other}"
    files, name = open_directory(storage), f".probe-{secrets.token_hex(8)}"
    try:
        files.put(name, b"probe")
        run = files.get("run.json")
        files.remove(name)
    except Exception as error:  # each kind of remote storage has errors of its own
        return (
            f"cannot write to storage={storage!r}: {type(error).__name__}: {error}. Use storage "
            "that every node reaches, such as NFS or an object store."
        )
    if run != run_file:
        return (
            f"sees another storage={storage!r} than the driver: its own disk or memory. Use "
            "storage that all nodes share, such as NFS or an object store."
        )
    return None


def _last_line(error: BaseException) -> str:
    r"""What an error of Ray is about: the cause comes after the traceback of the worker.

    Example:
        >>> _last_line(RuntimeError("at a line\n\nKeyError: 'name'\n"))
        "KeyError: 'name'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


# -------------------------------------------------------------------- in a worker


def _place(needs: Mapping[str, float]) -> Place:
    """Where a worker of Ray is, and what it was given."""
    import ray  # an extra

    gpus = ray.get_gpu_ids()
    facts = {
        "node": ray.get_runtime_context().get_node_id(),
        "device": "gpu " + ",".join(map(str, gpus)) if gpus else "cpu",
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    return Place(facts, max(1, int(needs["CPU"])), needs.get("GPU", 0) > 0)


def _run_task(recipe: Recipe, attempt: Attempt, job: _Job) -> Outcome:
    """Train a unit on one device."""
    return _outcome_here(recipe, attempt, job.versions, _place(job.needs))


def _outcome_here(
    recipe: Recipe, attempt: Attempt, versions: Mapping[str, str], place: Place
) -> Outcome:
    if (other := _other_version(versions)) is not None:
        # of a node that is newer than the check of all nodes; it may go better elsewhere
        return Outcome(error=f"{os.uname().nodename} has {other}", node=place.facts.get("node"))
    return attempt_outcome(recipe, attempt, place)


# -------------------------------------------------------------------- several devices


class RankError(Exception):
    """Holds the outcome of one rank; the rank's exception may not survive the way back."""


def _run_distributed(recipe: Recipe, attempt: Attempt, job: _Job) -> Outcome:
    """Train a unit on several devices, in a worker of Ray that has none of them itself."""
    import ray.train  # an extra
    from ray.train.torch import TorchConfig, TorchTrainer  # an extra

    train: Any = ray.train  # what a type checker sees there are the classes of its first version
    records, unit = RunRecords(attempt.storage), attempt.unit
    if (done := records.committed(unit)) is not None:
        return Outcome(dict(done["result"]))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    needs, avoid, gpu = job.needs, job.avoid, job.needs.get("GPU", 0) > 0
    earlier = (replace(attempt, number=number) for number in range(1, attempt.number))
    remove_groups([group_memory(one, needs) for one in earlier])  # of a driver that could not
    # the first try of Ray Train to start its workers waits a minute; with a node to avoid there
    # may be no other left by then, and the next attempt avoids none
    failures = {"max_failures": 0, "controller_failure_limit": -1 if avoid is None else 0}
    if "max_preemption_failures" in {field.name for field in fields(train.FailureConfig)}:
        failures["max_preemption_failures"] = 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            partial(_run_rank, recipe, attempt, job),
            torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
            scaling_config=train.ScalingConfig(
                num_workers=job.devices,
                use_gpu=gpu,
                resources_per_worker={**needs, "memory": group_memory(attempt, needs)},
                label_selector=None if avoid is None else _away_from(avoid),
            ),
            run_config=train.RunConfig(
                name=f"{unit.name}-{attempt.number:04d}-{os.urandom(4).hex()}",
                storage_path=folder,  # of this node alone: all that matters goes to our storage
                failure_config=train.FailureConfig(**failures),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            return judge(error)
    if (done := records.committed(unit)) is None:
        return Outcome(error="all ranks have ended, and there is no result")
    return Outcome(dict(done["result"]))


# Ray's own RayDDPStrategy and RayLightningEnvironment are of ``lightning.pytorch`` wherever that is
# installed, and a trainer of ``pytorch_lightning`` refuses them: these are of the one that is used.


class _RankStrategy(pl.strategies.DDPStrategy):
    """DDP on the device that Ray Train gave to this rank."""

    @property
    def root_device(self) -> torch.device:
        from ray.train.torch import get_device  # an extra

        device: torch.device = get_device()
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class _RankEnvironment(LightningEnvironment):
    """Who a rank is, as Ray Train says."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self._context = context

    def world_size(self) -> int:
        return int(self._context.get_world_size())

    def global_rank(self) -> int:
        return int(self._context.get_world_rank())

    def local_rank(self) -> int:
        return int(self._context.get_local_rank())

    def node_rank(self) -> int:
        return int(self._context.get_node_rank())

    def set_world_size(self, size: int) -> None:
        """Ray Train has decided it."""

    def set_global_rank(self, rank: int) -> None:
        """Ray Train has decided it."""

    def teardown(self) -> None:
        """Ray Train ends its own processes."""


def _run_rank(recipe: Recipe, attempt: Attempt, job: _Job) -> None:
    """Run an attempt in one rank."""
    from ray import train  # an extra

    def make_strategy(asked: Any) -> Any:
        if asked not in _DDP:
            raise ConfigurationError(
                f"trainer= has strategy={asked!r}; a member on several devices is trained by DDP. "
                f"Leave it out, or use {', '.join(filter(None, _DDP))}."
            )
        return _RankStrategy(find_unused_parameters=asked == "ddp_find_unused_parameters_true")

    context, place = train.get_context(), _place(job.needs)
    device = f"{context.get_world_size()} x {place.facts['device'].split()[0]}"
    place = replace(
        place,
        facts={**place.facts, "device": device},
        rank=context.get_world_rank(),
        strategy=make_strategy,
        plugins=(_RankEnvironment(context),),
    )
    outcome = _outcome_here(recipe, attempt, job.versions, place)
    if outcome.result is None:
        raise RankError(outcome)


def judge(error: Exception) -> Outcome:
    """The outcome of an attempt whose ranks did not all come to the end.

    A rank that was killed is the cause of whatever the others say of their connections, and it
    may go better next time. Otherwise the first mistake counts, wherever it was made.

    Example:
        >>> from ray.train import WorkerGroupError
        >>> lost = RankError(Outcome(error="RuntimeError: connection closed by peer"))
        >>> nan = RankError(Outcome(error="NonFiniteError: the loss is nan", final=True))
        >>> outcome = judge(WorkerGroupError("", {0: lost, 1: nan}))
        >>> outcome.error, outcome.final
        ('rank 1: NonFiniteError: the loss is nan', True)
        >>> judge(WorkerGroupError("", {0: nan, 1: OSError("killed")})).final
        False
    """
    failures: Mapping[int, Any] = getattr(error, "worker_failures", None) or {}
    if not failures:
        return Outcome.of_error(getattr(error, "controller_failure", None) or error)
    outcomes = []
    for rank, failure in failures.items():
        if not isinstance(failure, RankError):
            text = f"rank {rank}: {str(failure).strip() or repr(failure)}"
            return Outcome(error=text.split("\n")[0])
        (outcome,) = failure.args
        outcomes.append(replace(outcome, error=f"rank {rank}: {outcome.error}"))
    # what others raise because the first rank did tells nothing of the kind of error
    causes = [outcome for outcome in outcomes if "On the first rank: " not in str(outcome.error)]
    mistakes = [outcome for outcome in causes if outcome.final]
    return mistakes[0] if mistakes else replace((causes or outcomes)[0], final=False)


def group_memory(attempt: Attempt, needs: Mapping[str, float]) -> int:
    """The bytes of memory that each rank of an attempt asks for: the mark of its placement group.

    Ray Train makes the group itself and gives it no name, and without a dashboard Ray tells of a
    group only its state and what it reserves; a resource of our own would have to be known to the
    nodes beforehand. So what is reserved has to tell whose it is: a few megabytes more or less,
    another number for every attempt.

    Example:
        >>> from lightning_bnn.launch.units import Unit
        >>> first, second = (group_memory(Attempt("runs/a", Unit((0,)), n), {}) for n in (1, 2))
        >>> first != second, max(first, second) <= 2**24
        (True, True)
    """
    digest = hashlib.sha256(f"{attempt.storage} {attempt.unit.name} {attempt.number}".encode())
    return int(needs.get("memory", 0)) + 1 + int.from_bytes(digest.digest()[:3], "big")


def remove_groups(memory: Collection[int]) -> int:
    """Remove the placement groups that reserve one of these amounts of memory for each rank.

    Returns:
        How many there were.
    """
    import ray  # an extra
    from ray.util.placement_group import PlacementGroup, placement_group_table  # an extra

    removed = 0
    for name, group in placement_group_table().items():
        marks = {int(bundle.get("memory", 0)) for bundle in group["bundles"].values()}
        if group["state"] != "REMOVED" and marks & set(memory):
            identity = ray.PlacementGroupID(bytes.fromhex(name))
            ray.util.remove_placement_group(PlacementGroup(identity))
            removed += 1
    return removed


def _sweep(memory: int, seconds: float = 30.0) -> None:
    """Remove what an attempt that was given up has reserved, and what it reserves while it dies."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        remove_groups([memory])
        time.sleep(1.0)
