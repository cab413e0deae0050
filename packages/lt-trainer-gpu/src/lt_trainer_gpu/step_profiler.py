"""Profiler traces and CUDA memory snapshots of selected steps of one rank.

The loop calls `on_step_begin` before each step; windows open and close there. A trace is written to
`<run>/profile/steps-00000011-00000013-rank00000.json.gz` and opens in https://ui.perfetto.dev or chrome://tracing; a
memory snapshot is written to `<run>/memory/` and opens in https://docs.pytorch.org/memory_viz. Both are written to a
temporary name and renamed. A window that a stop signal interrupts writes no file.

Cost: none outside the windows. Inside one, the profiler records every operation (tens of percent on a CPU) and closing
it synchronizes. The memory history is recorded from the start of the run to its step: a few percent of host time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lt_trainer.config.sections import MetricsOptions, Recipe

MEMORY_HISTORY_ENTRIES = 200_000
"""Allocations and frees that a memory history holds; older ones are dropped."""


class StepProfiler:
    """Profiler and memory history of one rank; opened by `open` where `[metrics]` asks for them.

    Args:
        options: the recipe's metrics options.
        run_dir: the run directory.
        rank: this rank.
        device: the compute device.
    """

    def __init__(self, options: MetricsOptions, *, run_dir: Path, rank: int, device: torch.device) -> None:
        self._options, self._run_dir, self._rank = options, run_dir, rank
        self._on_gpu = device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        self._n_profiled_steps = 0
        self._start_step = options.profile_start_step
        self._profile_pending = bool(options.profile_steps) and rank in options.profile_ranks
        self._snapshot_step = options.memory_snapshot_step
        if self._snapshot_step or options.memory_snapshot_on_oom:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_HISTORY_ENTRIES, stacks="python")

    @classmethod
    def open(cls, recipe: Recipe, *, rank: int, device: torch.device) -> StepProfiler | None:
        """Return the profiler of a rank; None where nothing is asked for."""
        options = recipe.metrics
        if not (options.profile_steps or options.memory_snapshot_step or options.memory_snapshot_on_oom):
            return None
        return cls(options, run_dir=Path(recipe.run.dir), rank=rank, device=device)

    def on_step_begin(self, step: int) -> list[Path]:
        """Open and close windows before step `step`, counted from 1.

        Returns:
            The files written.
        """
        done = []
        if self._profiler is not None:
            self._n_profiled_steps += 1
            self._profiler.step()
            if self._n_profiled_steps >= self._options.profile_steps:
                done += self._stop()
        if self._profile_pending and step == self._start_step:
            self._start()
        if self._snapshot_step and step == self._snapshot_step + 1:
            done.append(self._dump_memory_snapshot(f"step-{self._snapshot_step:08}"))
            self._snapshot_step = 0
            if not self._options.memory_snapshot_on_oom:
                torch.cuda.memory._record_memory_history(enabled=None)
        return done

    def on_out_of_memory(self) -> None:
        """Write a memory snapshot, if asked for."""
        if self._options.memory_snapshot_on_oom:
            self._dump_memory_snapshot("out-of-memory")

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + self._on_gpu]
        self._n_profiled_steps = 0
        # There is one cycle and its events are kept anyway; acc_events silences torch 2.11's warning of losing them.
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def _stop(self) -> list[Path]:
        profiler, self._profiler, self._profile_pending = self._profiler, None, False
        assert profiler is not None
        profiler.stop()
        last_step = self._start_step + self._n_profiled_steps - 1
        name = f"steps-{self._start_step:08}-{last_step:08}-rank{self._rank:05}.json.gz"
        return [_write_atomic(self._run_dir / "profile" / name, profiler.export_chrome_trace)]

    def _dump_memory_snapshot(self, when: str) -> Path:
        path = self._run_dir / "memory" / f"{when}-rank{self._rank:05}.pickle"
        return _write_atomic(path, torch.cuda.memory._dump_snapshot)


def _write_atomic(path: Path, write: Callable[[str], object]) -> Path:
    """Write a file in a hidden folder beside `path`, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as folder:
        write(os.path.join(folder, path.name))
        os.replace(os.path.join(folder, path.name), path)
    return path
