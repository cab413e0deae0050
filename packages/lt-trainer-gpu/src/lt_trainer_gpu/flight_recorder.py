"""Torch's flight recorder: each rank's last collectives, dumped when the run hangs.

Torch reads its settings from the environment when the process group is created. The names are those of torch 2.9, 2.11
and 2.15; variables that the user has set are kept.

Our watchdog ends a hanging run before NCCL's own would, so it requests the dump itself (`dump`). The file is torch's
pickle, of each rank's collectives by number: ranks whose counts differ diverged there. For NCCL's,
`python -m torch.distributed.flight_recorder.fr_trace` compares the ranks (gloo's lack the groups that it needs). Open
such files only from a trusted source.

Cost: some hundred nanoseconds per collective and 2000 entries of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lt_trainer.files import write_atomic

BUFFER_SIZE = 2000
DUMP_PREFIX = "rank_"
TIMEOUT_DUMP_PREFIX = "collectives_rank_"
"""Prefix of the files that torch writes when a collective exceeds its own timeout."""
NCCL_BACKENDS = ("nccl", "nccl2")
"""Names of the CUDA backends; "nccl2" has its own recorder beside NCCL's (torch 2.15)."""


def env_variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make torch record collectives and dump them per rank on timeout.

    Args:
        folder: destination; torch does not create it, so it must exist by then.
        environ: variables already set; they are kept.
    """
    variables = {
        "TORCH_FR_BUFFER_SIZE": str(BUFFER_SIZE),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.absolute() / TIMEOUT_DUMP_PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in variables.items() if name not in environ}


def dump(folder: Path, *, rank: int, on_gpu: bool) -> str:
    """Dump this rank's collectives to a file; call from a thread that does not hang.

    Args:
        folder: destination; created if absent.
        rank: this rank.
        on_gpu: whether the collectives are NCCL's, not gloo's.

    Returns:
        A sentence that names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{DUMP_PREFIX}{rank}", _dump_trace(on_gpu))
    text = f"the last collectives of this rank are in {folder / f'{DUMP_PREFIX}{rank}'}"
    command = f"python -m torch.distributed.flight_recorder.fr_trace {folder} -p {DUMP_PREFIX}"
    return f"{text}; once it has those of all ranks, `{command}` shows where they diverge" if on_gpu else text


def _dump_trace(on_gpu: bool) -> bytes:
    from torch._C import _distributed_c10d as c10d

    record = c10d._dump_fr_trace
    if not on_gpu:
        return record()
    dump_nccl = getattr(c10d, "_dump_nccl_trace", None)  # not in builds without CUDA
    traces = [] if dump_nccl is None else [dump_nccl()]
    if "backend" in (record.__doc__ or ""):  # since torch 2.15: one recorder per backend
        traces += [record(backend=name) for name in NCCL_BACKENDS]
    return max(traces, key=len, default=b"")  # all but one are empty
