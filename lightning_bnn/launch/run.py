"""``launch``: many members or chains on a cluster of Ray, and one posterior at the end."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch import nn

from lightning_bnn.diagnostics import Diagnosis
from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch import cluster
from lightning_bnn.launch.chains import diagnose_chains, training_data
from lightning_bnn.launch.claims import claim_run
from lightning_bnn.launch.driver import Driver
from lightning_bnn.launch.member import Attempt, check_trainer_options
from lightning_bnn.launch.recipe import Factories, Recipe, check_sendable
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.results import MemberResult
from lightning_bnn.launch.stored import Kind, StoredRun
from lightning_bnn.launch.tasks import driver_options, make_submit
from lightning_bnn.launch.units import Unit, plan_units
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import MixturePosterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.strategies.base import Strategy

__all__ = ["LaunchedRun", "launch", "launch_recipe"]

OnFailure = Literal["raise", "skip"]


def launch(
    make_bnn: Callable[..., Any],
    make_datamodule: Callable[..., Any],
    members: int,
    *,
    storage: str | os.PathLike[str],
    trainer: Mapping[str, Any] | Callable[..., Mapping[str, Any]],
    stack: int = 1,
    resources: Mapping[str, float] | None = None,
    devices: int = 1,
    seed: int = 0,
    on_failure: OnFailure = "raise",
    min_members: int = 1,
    retries: int = 3,
    checkpoint_seconds: float = 60.0,
    lost_after: float = 120.0,
    address: str | None = None,
    allow_open_cluster: bool = False,
) -> LaunchedRun:
    """Train many members or chains with Ray, each by a ``Trainer.fit`` of its own.

    It returns when everything was checked and the first members are on their way. Started again
    with the same ``storage``, it runs what is missing and nothing else. A program that comes to its
    end waits for the run; one that ends by an error or by Ctrl-C cancels it.

    Args:
        make_bnn: Makes a strategy, in the process that trains it. It may take ``members``, a list
            of numbers to hand on (``DeepEnsemble(..., members=members)``,
            ``SGMCMC(..., chains=members)``), and ``seed``, the root of all seeds. One that takes
            neither is called with torch, NumPy and Python seeded by the number of the member.
        make_datamodule: Makes a data module or a training loader. Of ``members``, ``seed`` and
            ``folder`` it is given those that it takes without a default: the seed of a split stays
            its own.
        members: How many members, or chains, in all.
        storage: A directory that all nodes share, or an fsspec URL such as ``s3://bucket/run``.
        trainer: Options of ``pl.Trainer``, or a function that gives them.
        stack: How many members one task trains side by side; the last may have fewer.
        resources: What each device of a task needs, such as ``{"GPU": 0.5, "CPU": 2}``; by default
            one CPU.
        devices: On how many devices each member is trained, by DDP through Ray Train.
        seed: The root of all seeds. A member is the same wherever and in whatever order it runs.
        on_failure: ``"raise"``: when all others are done, raise if a member failed or diverged.
            ``"skip"``: go on without it.
        min_members: With ``"skip"``, the least number of members to go on with.
        retries: How often in a row a member is tried again without having got any further.
        checkpoint_seconds: The least time between two checkpoints of a member.
        lost_after: Seconds without a sign of life after which a member is started elsewhere.
        address: The cluster to join; by default that of ``RAY_ADDRESS``, or a new one on this
            machine.
        allow_open_cluster: Use a cluster that listens beyond this machine without authentication.

    Returns:
        The run, whose results come with :meth:`LaunchedRun.as_completed`.

    Raises:
        ConfigurationError: Something that was asked for cannot be.
        LaunchError: The cluster cannot run it.
    """
    recipe = Factories(make_bnn, make_datamodule, trainer)
    if stack > 1 and not recipe.takes_members:
        raise ConfigurationError(
            f"stack={stack} puts several members into one strategy, so make_bnn has to be told "
            "which: give it the argument members, and hand it on."
        )
    return launch_recipe(
        recipe,
        members,
        parts={"make_bnn": make_bnn, "make_datamodule": make_datamodule, "trainer": trainer},
        storage=storage,
        stack=stack,
        resources=resources,
        devices=devices,
        seed=seed,
        on_failure=on_failure,
        min_members=min_members,
        retries=retries,
        checkpoint_seconds=checkpoint_seconds,
        lost_after=lost_after,
        address=address,
        allow_open_cluster=allow_open_cluster,
    )


def launch_recipe(
    recipe: Recipe,
    members: int,
    *,
    parts: Mapping[str, Any],
    storage: str | os.PathLike[str],
    stack: int,
    resources: Mapping[str, float] | None,
    devices: int,
    seed: int,
    on_failure: OnFailure,
    min_members: int,
    retries: int,
    checkpoint_seconds: float,
    lost_after: float,
    address: str | None,
    allow_open_cluster: bool,
) -> LaunchedRun:
    """The work of :func:`launch`, for any recipe; ``parts`` are what a user would know it by."""
    units = plan_units(members, stack)
    _check_options(on_failure, min_members, members, retries, devices, seed)
    for name, value, least in (
        ("checkpoint_seconds", checkpoint_seconds, 0.0),
        ("lost_after", lost_after, 1.0),
    ):
        if not isinstance(value, (int, float)) or not value >= least:
            raise ConfigurationError(
                f"{name}= is a number of seconds, at least {least:g}; got {value!r}."
            )
    check_trainer_options(recipe.trainer_options())
    needs, devices = dict(resources or {}), int(devices)
    cluster.task_options(needs)
    ray = cluster.require_ray()
    records = RunRecords(storage)
    cluster.connect(address, allow_open_cluster)
    cluster.check_feasible(needs, devices)
    check_sendable(ray, recipe, parts)
    description = {
        "units": [list(unit.members) for unit in units],
        "seed": int(seed),
        "devices": devices,
        **recipe.description(),
    }
    try:
        records.begin(description)
    except OSError as error:
        raise ConfigurationError(
            f"storage={str(storage)!r} cannot be written: {type(error).__name__}: {error}. Name a "
            "directory or a URL that this machine and all nodes can write to."
        ) from error
    threads = max(1, int(needs.get("CPU", 1)))
    template = Attempt(
        recipe,
        records.storage,
        units[0],
        0,
        int(seed),
        threads,
        needs.get("GPU", 0) > 0,
        checkpoint_seconds,
        progress_seconds=min(5.0, lost_after / 4) or 5.0,
        versions=cluster.own_versions(),
    )
    release = claim_run(records)
    try:
        run = LaunchedRun(records, recipe, seed, on_failure, min_members)
        missing = run.missing()
        _say_if_others(run, recipe)
        travelled = ray.put(recipe)
        if missing:
            cluster.check_nodes(records.storage, travelled, records.files.get("run.json"))
        submit = make_submit(ray, travelled, needs, devices)
        driver = Driver(
            ray, records, missing, template, submit, retries, lost_after,
            stop_early=on_failure == "raise", release=release,
            **driver_options(ray, records, needs, devices),
        )  # fmt: skip
        run._begin(driver)
    except BaseException:
        release()
        raise
    return run


def _say_if_others(run: LaunchedRun, recipe: Recipe) -> None:
    """Warn where members that are done were trained for another time than is asked for now."""
    options = recipe.trainer_options()
    for name in ("max_epochs", "max_steps"):
        asked = options.get(name)
        for unit, result in run.committed().items():
            was = result.get("asked", {}).get(name)
            if asked not in (None, -1) and was not in (None, -1, asked):
                warnings.warn(
                    f"{run.storage}: {unit} is done and was trained with {name}={was}; the "
                    f"{name}={asked} of now is for members that are not done. Use another storage= "
                    "to train all of them so.",
                    stacklevel=4,
                )
                return


def _check_options(
    on_failure: Any, min_members: Any, members: int, retries: Any, devices: Any, seed: Any
) -> None:
    if on_failure not in ("raise", "skip"):
        raise ConfigurationError(f"on_failure= is 'raise' or 'skip'; got {on_failure!r}.")
    for name, value, least in (
        ("min_members", min_members, 1),
        ("retries", retries, 0),
        ("devices", devices, 1),
        ("seed", seed, 0),
    ):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < least:
            raise ConfigurationError(f"{name}= is a whole number, at least {least}; got {value!r}.")
    if min_members > members:
        raise ConfigurationError(
            f"min_members={min_members} of members={members} can never be reached."
        )


class LaunchedRun(StoredRun):
    """A run that is under way; made by :func:`launch`.

    Attributes:
        storage: Where it is stored.
    """

    def __init__(
        self,
        records: RunRecords,
        recipe: Recipe,
        seed: int,
        on_failure: OnFailure,
        min_members: int,
    ) -> None:
        super().__init__(records.storage)
        self.recipe, self.seed = recipe, seed
        self.on_failure, self.min_members = on_failure, min_members
        self._driver: Driver | None = None
        self._ended: dict[int, MemberResult] = {}
        self._lock = threading.Lock()
        self._template: Strategy | None = None

    def missing(self) -> list[Unit]:
        """The units that are not done yet."""
        done = self.committed()
        return [unit for unit in self.units() if unit not in done]

    def _begin(self, driver: Driver) -> None:
        self._driver = driver
        for result in super().results():  # of earlier starts
            driver.results.put(result)
        driver.start()

    # ---------------------------------------------------------------- results

    def as_completed(self) -> Iterator[MemberResult]:
        """Yield the result of each member as it ends; those of earlier starts come first.

        At the end, if members are missing and the run may not go on without them, it raises.
        Ctrl-C ends the run; starting it again goes on with it.

        Raises:
            LaunchError: Members failed or diverged.
        """
        assert self._driver is not None
        try:
            while (found := self._driver.results.get()) is not None:
                if isinstance(found, LaunchError):
                    raise found
                if isinstance(found, BaseException):
                    raise LaunchError(f"The driver of the run failed: {found!r}") from found
                with self._lock:
                    self._ended[found.member] = found
                yield found
        except KeyboardInterrupt:
            self.cancel()
            raise
        self._driver.results.put(None)  # for another reader
        self._driver.join()
        self._judge()

    def wait(self) -> list[MemberResult]:
        """Wait for all members and give their results in the order of their numbers.

        Raises:
            LaunchError: Members failed or diverged.
        """
        for _ in self.as_completed():
            pass
        return [self._ended[member] for member in sorted(self._ended)]

    def cancel(self) -> None:
        """End the run; what is done stays, and what is not goes on when it is launched again."""
        assert self._driver is not None
        self._driver.cancel()
        self._driver.join()

    def _judge(self) -> None:
        bad = [result for result in self._ended.values() if not result.ok]
        good = len(self._ended) - len(bad)
        cut = self.members - len(self._ended)
        if not bad and not cut:
            return
        if self.on_failure == "skip" and not cut and good >= self.min_members:
            return
        if not bad:
            raise LaunchError(
                f"The run was cancelled: {good} members are done and {cut} are not. All that is "
                f"done is in {self.storage}; launching again runs only what is missing."
            )
        first = bad[0]
        said = f"; member {first.member} {first.status}: {(first.error or '').rstrip('.')}"
        fix = (
            f"At least min_members={self.min_members} are needed."
            if self.on_failure == "skip"
            else "With on_failure='skip' the run goes on without them."
        )
        again = (
            "a member of a stack that has diverged stays so"
            if all(result.status == "diverged" for result in bad) and not cut
            else "launching again runs only what is missing"
        )
        raise LaunchError(
            f"{good} members are done and {len(bad) + cut} are not{said}. {fix} All that is done "
            f"is in {self.storage}; {again}."
        )

    # ---------------------------------------------------------------- the posterior

    def posterior(
        self,
        net: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        kind: Kind = "posterior",
        running: bool = False,
    ) -> MixturePosterior:
        """Wait for all members, then give the mixture over them, read from the storage.

        Args:
            net: The architecture; by default what ``make_bnn`` makes.
            likelihood: As above.
            kind: ``"swag"`` for the Gaussians that SWAG has made of each member.
            running: Do not wait: take what there is, with the draws of chains so far.
        """
        if not running:
            self.wait()
        if net is None:
            if self._template is None:
                with isolated_random_state(seed=0):
                    self._template = self.recipe.build_strategy([0], self.seed)
            net, likelihood = self._template.net, likelihood or self._template.likelihood
        return super().posterior(net, likelihood, kind, running)

    def diagnose(self, inputs: Any = None, **options: Any) -> Diagnosis:
        """R-hat and ESS over all chains so far, also while they run.

        Args:
            inputs: Where to watch predictions: a loader, a batch or a tensor. By default some of
                the training data.
            options: As for :meth:`lightning_bnn.Posterior.diagnose`.
        """
        posterior = self.posterior(running=True)
        if inputs is None and "weights" not in options:
            with isolated_random_state(seed=0), tempfile.TemporaryDirectory() as folder:
                inputs = training_data(self.recipe.build([0], self.seed, folder).data)
        return diagnose_chains(posterior, self.members, inputs, **options)
