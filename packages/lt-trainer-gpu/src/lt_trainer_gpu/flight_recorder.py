"""Torch's flight recorder: the last collectives that each rank began, kept in memory and written when the run hangs.

Torch reads its settings from the environment when the process group is made. The names are those that the libraries of
torch 2.9, 2.11 and 2.15 know; what the person has set stays.

Our watchdog ends a hanging run before NCCL's own would, so it asks for the dump itself (`dump`), and says in words
which collective came last: ranks that have counted differently have parted there. The file is torch's pickle; for
NCCL's, `python -m torch.distributed.flight_recorder.fr_trace` compares the ranks (gloo's lack the groups that it
wants). Open such files only where you trust who wrote them.

Cost: some hundred nanoseconds per collective and 2000 entries of memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

ENTRIES = 2000
PREFIX = "rank_"
OWN_PREFIX = "collectives_rank_"
"""Of the files that torch writes when a collective takes longer than its own timeout."""
NCCL_NAMES = ("nccl", "nccl2")
"""What the backend for CUDA calls itself where a recorder of its own stands beside NCCL's (torch 2.15)."""


def variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set so that torch records collectives and, on its own timeout, writes them to a file per rank.

    Args:
        folder: where to; torch makes no folder, so it must be there when the time comes.
        environ: what is set already, which stays.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.absolute() / OWN_PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in wanted.items() if name not in environ}


def dump(folder: Path, *, rank: int, on_gpu: bool) -> str:
    """Write what this rank's collectives were; for a thread other than the one that hangs.

    Args:
        folder: where to; it is made.
        rank: this rank.
        on_gpu: whether the collectives are NCCL's, not gloo's.

    Returns:
        What to read, as a sentence.
    """
    data = _trace(on_gpu)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PREFIX}{rank}"
    path.write_bytes(data)
    said = f"the last collectives of this rank are in {path}; the newest of each group: {_newest(data)}"
    command = f"python -m torch.distributed.flight_recorder.fr_trace {folder} -p {PREFIX}"
    return f"{said}; with those of all ranks there, `{command}` says where they part" if on_gpu else said


def _newest(data: bytes) -> str:
    """The collective that was begun last in each group of ranks, in words."""
    entries = pickle.loads(data)["entries"] if data else []  # noqa: S301 - this process has made it a moment ago
    newest = {tuple(entry["process_group"]): entry for entry in sorted(entries, key=lambda entry: entry["record_id"])}
    said = []
    for group, entry in sorted(newest.items()):
        what = f"{entry['profiling_name']} of {entry['input_sizes']}"
        done = "done" if entry["retired"] or entry["state"] == "completed" else "not done"
        said.append(f"number {entry['collective_seq_id']} of group {' '.join(group)}, {what}, {done}")
    return "; ".join(said) or "none"


def _trace(on_gpu: bool) -> bytes:
    from torch._C import _distributed_c10d as c10d

    record = c10d._dump_fr_trace
    if not on_gpu:
        return record()
    of_nccl = getattr(c10d, "_dump_nccl_trace", None)  # not in builds without CUDA
    found = [] if of_nccl is None else [of_nccl()]
    if "backend" in (record.__doc__ or ""):  # since torch 2.15: one recorder per backend
        found += [record(backend=name) for name in NCCL_NAMES]
    return max(found, key=len, default=b"")  # all but one are empty shells
