"""What looks closely at some steps of one rank: torch's profiler, and the history of CUDA memory.

The loop calls `boundary` before each step; windows open and close there. A trace lies in
`<run>/profile/steps-00000011-00000013-rank00000.json.gz` and opens in https://ui.perfetto.dev or chrome://tracing; a
memory history lies in `<run>/memory/` and opens in https://docs.pytorch.org/memory_viz. Both are written beside their
place and renamed. A window that a stop signal cuts off leaves nothing.

Cost: none outside the windows. In one, the profiler notes every operation (tens of per cent on a CPU), and the end of
it waits for the device. The memory history is kept from the start of the run to its step: a few per cent of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lt_trainer.sections import MetricsOptions
from lt_trainer_gpu.refusals import check_memory_history

MEMORY_ENTRIES = 200_000
"""Allocations and frees that a memory history holds; older ones are forgotten."""


class Instruments:
    """The profiler and the memory history of one rank.

    Args:
        options: what the recipe wants.
        out: the run directory.
        rank: this rank.
        device: what it computes on.

    Raises:
        RecipeError: a memory history is wanted, and there is no CUDA device.
    """

    def __init__(self, options: MetricsOptions, *, out: Path, rank: int, device: torch.device) -> None:
        self._options, self._out, self._rank = options, out, rank
        self._on_gpu = device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        self._profiled = 0
        self._first = options.profile_start_step
        self._profiles = bool(options.profile_steps) and rank in options.profile_ranks
        self._snapshot_step, self._on_oom = options.memory_snapshot_step, options.memory_snapshot_on_oom
        check_memory_history(options, device.type)
        if self._snapshot_step or self._on_oom:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES, stacks="python")

    def boundary(self, step: int) -> list[Path]:
        """Step number `step`, counted from 1, comes next: open and close windows.

        Returns:
            The files that were finished.
        """
        done = []
        if self._profiler is not None:
            self._profiled += 1
            self._profiler.step()
            if self._profiled >= self._options.profile_steps:
                done += self._stop()
        if self._profiles and step == self._first:
            self._start()
        if self._snapshot_step and step == self._snapshot_step + 1:
            done.append(self._dump_memory(f"step-{self._snapshot_step:08}"))
            self._snapshot_step = 0
            if not self._on_oom:
                torch.cuda.memory._record_memory_history(enabled=None)
        return done

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Write the memory history when the device runs out of memory inside the context; the error goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self._on_oom:
                self._dump_memory("out-of-memory")
            raise

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiled = 0
        # There is one cycle, whose events are kept either way; without acc_events torch 2.11 warns of losing them.
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def _stop(self) -> list[Path]:
        profiler, self._profiler, self._profiles = self._profiler, None, False
        assert profiler is not None
        profiler.stop()
        name = f"steps-{self._first:08}-{self._first + self._profiled - 1:08}-rank{self._rank:05}.json.gz"
        return [_write(self._out / "profile" / name, profiler.export_chrome_trace)]

    def _dump_memory(self, when: str) -> Path:
        path = self._out / "memory" / f"{when}-rank{self._rank:05}.pickle"
        return _write(path, torch.cuda.memory._dump_snapshot)


def _write(path: Path, write: Callable[[str], object]) -> Path:
    """Have a file written under a hidden name and give it its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp{path.suffix}")
    write(str(temporary))
    os.replace(temporary, path)
    return path
