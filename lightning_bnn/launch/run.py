"""``launch``: many members or chains on a cluster, and one posterior at the end."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import nn

from lightning_bnn.checks import check_number, check_option, check_whole
from lightning_bnn.diagnostics import Diagnosis
from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch.backend import Attempt, Backend
from lightning_bnn.launch.driver import Driver
from lightning_bnn.launch.member import check_trainer_options
from lightning_bnn.launch.ray_backend import RayBackend
from lightning_bnn.launch.recipe import Factories, Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.stored import Kind, MemberResult, StoredRun, diagnose_chains
from lightning_bnn.launch.units import Unit, plan_units
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.native.library import noise_source
from lightning_bnn.posteriors import AveragePosterior, MixturePosterior
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
    backend: Backend | None = None,
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
            ``"skip"``: continue without it.
        min_members: With ``"skip"``, the least number of members to continue with.
        retries: How often in a row a member is tried again without having got any further.
        checkpoint_seconds: The least time between two checkpoints of a member.
        lost_after: Seconds without a sign of life after which a member is started elsewhere.
        address: The cluster to join; by default that of ``RAY_ADDRESS``, or a new one on this
            machine.
        allow_open_cluster: Use a cluster that listens beyond this machine without authentication.
        backend: Runs the members in place of Ray (see :mod:`lightning_bnn.launch.backend`);
            ``resources``, ``devices``, ``address`` and ``allow_open_cluster`` are then not used.

    Returns:
        The run, whose results come with :meth:`LaunchedRun.as_completed`.

    Raises:
        ConfigurationError: Something that was asked for cannot be.
        LaunchError: The cluster cannot run it.
    """
    recipe = Factories(make_bnn, make_datamodule, trainer)
    if check_whole("stack", stack, 1) > 1 and not recipe.takes_members:
        raise ConfigurationError(
            f"stack={stack} puts several members into one strategy, so make_bnn has to be told "
            "which: give it the argument members, and hand it on."
        )
    return launch_recipe(
        recipe,
        backend or RayBackend(resources, devices, address, allow_open_cluster),
        members,
        storage=storage,
        stack=stack,
        seed=seed,
        on_failure=on_failure,
        min_members=min_members,
        retries=retries,
        checkpoint_seconds=checkpoint_seconds,
        lost_after=lost_after,
    )


def launch_recipe(
    recipe: Recipe,
    backend: Backend,
    members: int,
    *,
    storage: str | os.PathLike[str],
    stack: int,
    seed: int,
    on_failure: OnFailure,
    min_members: int,
    retries: int,
    checkpoint_seconds: float,
    lost_after: float,
) -> LaunchedRun:
    """The work of :func:`launch`, for any recipe and any backend."""
    units = plan_units(members, stack)
    seed = check_whole("seed", seed, 0)
    check_whole("retries", retries, 0)
    check_option("on_failure", on_failure, ("raise", "skip"))
    check_number("checkpoint_seconds", checkpoint_seconds, positive=False)
    check_number("lost_after", lost_after)
    if check_whole("min_members", min_members, 1) > members:
        raise ConfigurationError(
            f"min_members={min_members} of members={members} can never be reached."
        )
    check_trainer_options(recipe.trainer_options())
    records = RunRecords(storage)
    backend.open(recipe)
    run_facts = {"units": [list(unit.members) for unit in units], "seed": seed}
    try:
        records.begin({**run_facts, "devices": backend.devices, **recipe.description()})
    except OSError as error:
        raise ConfigurationError(
            f"storage={str(storage)!r} cannot be written: {type(error).__name__}: {error}. Name a "
            "directory or a URL that this machine and all nodes can write to."
        ) from error
    progress_seconds = min(5.0, lost_after / 4)
    template = Attempt(records.storage, units[0], 0, seed, checkpoint_seconds, progress_seconds)
    release = records.claim()
    try:
        run = LaunchedRun(records, recipe, seed, on_failure, min_members)
        _warn_if_others(run, recipe)
        if missing := run.missing():
            backend.check_storage(records.storage)
        stop_early = on_failure == "raise"
        driver = Driver(
            backend, records, missing, template, retries, lost_after, stop_early, release
        )
        run._begin(driver)
    except BaseException:
        release()
        raise
    return run


def _warn_if_others(run: LaunchedRun, recipe: Recipe) -> None:
    """Warn where members that are done were trained otherwise than those to come will be."""
    for unit, result in run.committed().items():
        was = result.get("noise", noise_source())  # version 0.1 has none
        if was != noise_source():
            warnings.warn(
                f"{run.storage}: {unit} is done and was trained with noise from {was}; that of "
                f"this process is from {noise_source()}, and with one seed they give other "
                "numbers. Members that are not done will not be those of a run without a restart. "
                "For the same, launch where there is a C compiler as there was then, or with "
                "LIGHTNING_BNN_COMPILE=0 if there was none.",
                stacklevel=4,
            )
            break
    for name in ("max_epochs", "max_steps"):
        asked = recipe.trainer_options().get(name)
        for unit, result in run.committed().items():
            was = result.get("asked", {}).get(name)
            if not {None, -1} & {asked, was} and was != asked:
                warnings.warn(
                    f"{run.storage}: {unit} is done and was trained with {name}={was}; "
                    f"{name}={asked} is for members that are not done.",
                    stacklevel=4,
                )
                return


class LaunchedRun(StoredRun):
    """A run that is under way; made by :func:`launch`."""

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
        self._driver: Driver
        self._ended: dict[int, MemberResult] = {}
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

    def as_completed(self) -> Iterator[MemberResult]:
        """Yield the result of each member as it ends; those of earlier starts come first.

        At the end it raises if members are missing that the run needs. Ctrl-C cancels the run;
        launching it again resumes it.

        Raises:
            LaunchError: Members failed or diverged.
        """
        try:
            while (result := self._driver.results.get()) is not None:
                if isinstance(result, LaunchError):
                    raise result
                if isinstance(result, BaseException):
                    raise LaunchError(f"The driver of the run failed: {result!r}") from result
                self._ended[result.member] = result
                yield result
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
        """End the run; what is done stays, and launching it again resumes the rest."""
        self._driver.cancel()
        self._driver.join()

    def _judge(self) -> None:
        bad = [result for result in self._ended.values() if not result.ok]
        good = len(self._ended) - len(bad)
        cut = self.members - len(self._ended)  # by cancel()
        if not cut and (not bad or (self.on_failure == "skip" and good >= self.min_members)):
            return
        if not bad:
            raise LaunchError(
                f"The run was cancelled: {good} members are done and {cut} are not. Launch it "
                f"again with storage={self.storage!r} to run only what is missing."
            )
        first, fix = bad[0], "With on_failure='skip' the run continues without them."
        if self.on_failure == "skip":
            fix = f"At least min_members={self.min_members} are needed."
        raise LaunchError(
            f"{good} members are done and {len(bad) + cut} are not; member {first.member} "
            f"{first.status}: {(first.error or '').rstrip('.')}. {fix} Launching again with "
            f"storage={self.storage!r} runs only what is missing."
        )

    def posterior(
        self,
        net: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        kind: Kind = "posterior",
        running: bool = False,
    ) -> MixturePosterior | AveragePosterior:
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
                inputs = self.recipe.build([0], self.seed, folder).training_data()
        return diagnose_chains(posterior, self.members, inputs, **options)
