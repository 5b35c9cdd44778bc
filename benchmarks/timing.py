"""Times engines on one workload, interleaved in one process, and their memory.

A round runs one step of each engine in turn, so that a slow moment of the machine hits all of them;
figures are medians over the rounds, and a ratio is the median of the ratios within a round. On a
GPU the memory of an engine is what it holds between its steps and the allocator's peak in one; on a
CPU it is measured in a process of its own (memory.py).
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.engines import PLAIN, Engine, Loop, leave
from benchmarks.workloads import Workload

LEAST_ROUNDS = 5
UNCOMPILED = "compile=True: the model runs uncompiled"


class Deadline:
    """When no more is begun."""

    def __init__(self, minutes: float | None = None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() > self._end


class Meter:
    """The memory of engines that take turns on one device, in MiB; nothing on a CPU."""

    def __init__(self, device: str) -> None:
        self._on = device == "cuda"
        self.held: dict[str, float] = {}
        self.peaks: dict[str, float] = {}

    @contextmanager
    def turn(self, name: str, counts: bool) -> Iterator[None]:
        """What is allocated within belongs to this engine."""
        if not self._on:
            yield
            return
        before, held = torch.cuda.memory_allocated(), self.held.get(name, 0.0)
        torch.cuda.reset_peak_memory_stats()
        yield
        self.held[name] = held + (torch.cuda.memory_allocated() - before) / 2**20
        if counts:
            within = (torch.cuda.max_memory_allocated() - before) / 2**20
            self.peaks[name] = max(self.peaks.get(name, 0.0), held + within)


class Race:
    """The engines of a case, and what became of each."""

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload, self._device = workload, device
        self._meter = Meter(device)
        self._loops: dict[str, Loop] = {}
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def enter(self, name: str, engine: Engine) -> None:
        """Build an engine and warm it up; one that cannot says why and is left out."""
        reason = None
        with warnings.catch_warnings(record=True) as seen, self._meter.turn(name, counts=False):
            warnings.simplefilter("always")
            try:
                self._loops[name] = engine.build(self._workload, self._device)
                self.seconds[name] = []
                for _ in range(2 * engine.warm_up):
                    next(self._loops[name])
                wait(self._device)
            except Exception as error:
                reason = told(error)
        if reason is not None:
            self._leave(name, reason)
        notes = [str(w.message) for w in seen if UNCOMPILED in str(w.message)]
        if notes:
            self.notes[name] = notes[0]

    def round(self) -> None:
        """One step of each."""
        for name, loop in list(self._loops.items()):
            reason = None
            try:
                self.seconds[name].append(self._step(name, loop))
            except Exception as error:
                reason = told(error)
            if reason is not None:
                self._leave(name, reason)

    def _step(self, name: str, loop: Loop) -> float:
        next(loop)
        wait(self._device)
        with self._meter.turn(name, counts=True):
            start = time.perf_counter()
            next(loop)
            wait(self._device)
            return time.perf_counter() - start

    def _leave(self, name: str, reason: str) -> None:
        """Out of the handler: the error held the frames, and they the tensors."""
        self.failed[name] = reason
        self.seconds.pop(name, None)
        loop: Any = self._loops.pop(name, None)
        if loop is not None:
            loop.close()
        free(self._device)

    def end(self) -> None:
        """Let all engines go."""
        for loop in self._loops.values():
            loop.close()  # type: ignore[attr-defined]
        self._loops.clear()
        leave()
        torch._dynamo.reset()
        free(self._device)

    @property
    def peaks(self) -> dict[str, float]:
        """MiB of each engine, on a GPU."""
        return self._meter.peaks


def race(
    workload: Workload, device: str, engines: Mapping[str, Engine], rounds: int, deadline: Deadline
) -> list[dict[str, Any]]:
    """One row for each engine that the time was enough for."""
    with workload.products():
        running = Race(workload, device)
        try:
            for name, engine in engines.items():
                if not deadline.passed or name == PLAIN:
                    running.enter(name, engine)
            for done in range(rounds):
                if done >= LEAST_ROUNDS and deadline.passed:
                    break
                running.round()
        finally:
            running.end()
    return [*_measured(running, workload, engines), *_failures(running, workload)]


def _measured(
    running: Race, workload: Workload, engines: Mapping[str, Engine]
) -> Iterator[dict[str, Any]]:
    for name, seconds in running.seconds.items():
        if not seconds:
            continue
        base = engines[name].base
        row = {
            **_of(workload),
            "engine": name,
            "milliseconds": round(1e3 * statistics.median(seconds), 4),
            "ratio": _ratio(seconds, running.seconds.get(PLAIN)),
            "base": base,
            "over_base": _ratio(seconds, running.seconds.get(base or "")),
            "rounds": len(seconds),
            "peak_mib": running.peaks.get(name),
        }
        yield row | ({"note": running.notes[name]} if name in running.notes else {})


def _failures(running: Race, workload: Workload) -> Iterator[dict[str, Any]]:
    for name, reason in running.failed.items():
        yield {**_of(workload), "engine": name, "failed": reason}


def _of(workload: Workload) -> dict[str, Any]:
    return {"model": workload.model, "lot": workload.lot, "precision": workload.precision}


def told(error: Exception) -> str:
    """Its kind and its first line."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {text[:200]}"


def _ratio(ours: list[float], theirs: list[float] | None) -> float | None:
    """Each round compares neighbours in time; the median ignores slow moments."""
    if not theirs or len(theirs) != len(ours):
        return None
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Give back what is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
