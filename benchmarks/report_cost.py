"""What a calibration report costs in a fit, apart from the predictions that it is about.

``python -m benchmarks.report_cost`` runs the demo's variational fit of the digits, validated after
each epoch, without the callback ``CalibrationReport`` and with it in three settings: as it comes
(one page after the fit), a page every ten epochs as well, and a page after every epoch. All take
turns in one process, and the order rotates. Prediction draws that a report causes (time inside of
``WeightPosterior.predict``) do not count, but are printed beside it. The cost is measured twice,
each time as a share of the whole time of the fit without the callback in the same round, so that it
is what the callback adds to an epoch on average, as a share of the epoch's time:

* in its hooks: the time inside of the callback's own methods;
* by difference: the time of the whole ``Trainer.fit`` less that of the fit without the callback. It
  would show a cost that lies elsewhere, and is much noisier.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks import options as shared
from lightning_bnn import demo_digits
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.data import Digits
from lightning_bnn.posteriors import WeightPosterior

__all__ = ["main"]

BAR = 0.05
ROUNDS = 9
WITHOUT, DEFAULT = "no callback", "a page after the fit (default)"
SETTINGS: dict[str, Callable[[Path], list[pl.Callback]]] = {
    WITHOUT: lambda folder: [],
    DEFAULT: lambda folder: [CalibrationReport(folder)],
    "a page every 10 epochs": lambda folder: [CalibrationReport(folder, every_n_epochs=10)],
    "a page every epoch": lambda folder: [CalibrationReport(folder, every_n_epochs=1)],
}


@dataclass
class Turns:
    """What one setting took in each counted round.

    Attributes:
        fit: Seconds of the whole fit.
        predicting: Seconds of it inside of ``WeightPosterior.predict``.
        hooks: Seconds inside of the callback's methods, apart from predictions.
        pages: How many pages a fit wrote.
    """

    fit: list[float] = field(default_factory=list)
    predicting: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)
    pages: int = 0


@contextmanager
def predictions_timed() -> Iterator[list[float]]:
    """Collect the seconds of every call of ``WeightPosterior.predict``."""
    original = WeightPosterior.predict
    seconds: list[float] = []

    def timed(self: WeightPosterior, *arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *arguments, **more)
        finally:
            seconds.append(time.perf_counter() - start)

    WeightPosterior.predict = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        WeightPosterior.predict = original  # type: ignore[method-assign]


def clock_hooks(callback: pl.Callback, predicting: list[float]) -> list[float]:
    """Collect the seconds of every call of a callback's hooks, apart from predictions in it."""
    seconds: list[float] = []

    def clocked(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            before, start = len(predicting), time.perf_counter()
            try:
                return hook(*arguments, **more)
            finally:
                took = time.perf_counter() - start
                seconds.append(took - sum(predicting[before:]))

        return call

    for name in vars(pl.Callback):
        own = getattr(type(callback), name)
        if not name.startswith("_") and callable(own) and own is not getattr(pl.Callback, name):
            setattr(callback, name, clocked(getattr(callback, name)))
    return seconds


def take_turn(setting: str, epochs: int) -> tuple[float, float, float, int]:
    """One fit: its seconds, those of its predictions and hooks, and how many pages it wrote."""
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        bnn = demo_digits.make_variational()
        callbacks = SETTINGS[setting](Path(folder))
        trainer = demo_digits.make_trainer(epochs, callbacks=callbacks, limit_val_batches=None)
        data = Digits()
        data.setup()
        gc.collect()  # no setting pays for another's garbage
        with predictions_timed() as predicting:
            hooks = [clock_hooks(callback, predicting) for callback in callbacks]
            start = time.perf_counter()
            trainer.fit(bnn, data)
            seconds = time.perf_counter() - start
        pages = len(list(Path(folder).rglob("*.html")))
        return seconds, sum(predicting), sum(map(sum, hooks)), pages


def measure(settings: Sequence[str], epochs: int, rounds: int, warm_up: int) -> dict[str, Turns]:
    """Let all settings take turns, the order rotating from round to round."""
    turns = {setting: Turns() for setting in settings}
    for number in range(-warm_up, rounds):
        shift = number % len(settings)
        for setting in [*settings[shift:], *settings[:shift]]:
            fit, predicting, hooks, pages = take_turn(setting, epochs)
            if number >= 0:
                turns[setting].fit.append(fit)
                turns[setting].predicting.append(predicting)
                turns[setting].hooks.append(hooks)
                turns[setting].pages = pages
    return turns


def costs(turns: Turns, without: Turns) -> list[float]:
    """Per round: the time that the callback added apart from predictions, over the plain fit's."""
    rounds = zip(turns.fit, turns.predicting, without.fit, without.predicting, strict=True)
    return [
        ((fit - predicting) - (plain - plain_predicting)) / plain
        for fit, predicting, plain, plain_predicting in rounds
    ]


def summarise(turns: dict[str, Turns], epochs: int) -> dict[str, Any]:
    """The figures of every setting, as they go into the JSON file."""
    without = turns[WITHOUT]
    rows: dict[str, Any] = {}
    for setting, own in turns.items():
        rows[setting] = {
            "pages": own.pages,
            "fit_seconds": own.fit,
            "predicting_seconds": own.predicting,
            "epoch_milliseconds": 1e3 * statistics.median(own.fit) / epochs,
        }
        if setting != WITHOUT:
            shares = costs(own, without)
            added = [x - y for x, y in zip(own.predicting, without.predicting, strict=True)]
            in_hooks = [hook / plain for hook, plain in zip(own.hooks, without.fit, strict=True)]
            rows[setting] |= {
                "cost": statistics.median(in_hooks),
                "costs": in_hooks,
                "difference": statistics.median(shares),
                "differences": shares,
                "page_milliseconds": 1e3 * statistics.median(own.hooks) / max(own.pages, 1),
                "added_predictions": statistics.median(added) / statistics.median(without.fit),
            }
    return rows


def judge(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar, on the median of the rounds, for both ways to measure."""
    ways = {"cost": "in the hooks", "difference": "by difference"}
    return [
        {
            "bar": f"{DEFAULT}, {words}",
            "value": rows[DEFAULT][way],
            "limit": BAR,
            "passed": rows[DEFAULT][way] <= BAR,
        }
        for way, words in ways.items()
        if DEFAULT in rows
    ]


def print_table(rows: dict[str, Any], bars: Sequence[dict[str, Any]]) -> None:
    plain = rows[WITHOUT]["epoch_milliseconds"]
    print(f"an epoch without the callback: {plain:.1f} ms, validation included")
    heads = f"{'in hooks':>9} {'[quartiles]':>18} {'difference':>11} {'[quartiles]':>18}"
    print(f"  {'':32} {heads} {'pages':>6} {'ms a page':>10} {'draws':>7}")
    for setting, row in rows.items():
        if setting == WITHOUT:
            continue
        lower, _, upper = quartiles(row["costs"])
        print(f"  {setting:32} {row['cost']:9.2%} [{lower:7.2%}, {upper:7.2%}]", end=" ")
        lower, _, upper = quartiles(row["differences"])
        print(
            f"{row['difference']:11.2%} [{lower:7.2%}, {upper:7.2%}] {row['pages']:6d} "
            f"{row['page_milliseconds']:10.1f} {row['added_predictions']:7.2%}"
        )
    print("  apart from prediction draws; draws: what these add, as a share of the fit too")
    for bar in bars:
        word = "pass" if bar["passed"] else "FAIL"
        print(f"  {word}  {bar['value']:.2%} (at most {bar['limit']:.0%})  {bar['bar']}")


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median and upper quartile; of one value, that value."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = shared.make_parser(
        "report_cost",
        __doc__,
        quick="fewer rounds",
        rounds=ROUNDS,
        steps=f"epochs of a fit (default {demo_digits.EPOCHS})",
        only=[name for name in SETTINGS if name != WITHOUT],
    )
    options = shared.parse(parser, arguments)
    epochs = options.steps or demo_digits.EPOCHS
    torch.set_num_threads(1)  # as the demo does
    setting = shared.settle(options, epochs=epochs)
    chosen = [name for name in SETTINGS if name == WITHOUT or name in (options.only or SETTINGS)]
    rows = summarise(measure(chosen, epochs, options.rounds, options.warm_up), epochs)
    bars = judge(rows)
    print_table(rows, bars)
    found = {**setting, "versions": shared.versions(["lightning-bnn"]), "settings": rows}
    shared.write(options.json, "report_cost", arguments, {**found, "bars": bars})


if __name__ == "__main__":
    main()
