"""What a run directory says: metrics by step, events, checkpoints."""

from pathlib import Path
from typing import Any

from lt_ckpt import Checkpoint, find_latest_valid
from lt_trainer.run_directory.jsonl import read_jsonl


def read_losses(run: Path, field: str = "loss") -> dict[int, float]:
    """Return the losses, or another metric, by step; of a step that was run again the last one."""
    path = run / "metrics.jsonl"
    return {row["step"]: row[field] for row in read_jsonl(path) if field in row} if path.exists() else {}


def read_step_metrics(run: Path) -> dict[int, list[tuple[float, float, int]]]:
    """Return loss, norm and tokens of each step, as often as it was run."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    for row in read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else ():
        if "grad_norm" in row:
            found.setdefault(row["step"], []).append((row["loss"], row["grad_norm"], row["valid_tokens"]))
    return found


def read_events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds."""
    path = run / "events.jsonl"
    return [event for event in read_jsonl(path) if event["event"] in kinds] if path.exists() else []


def latest_checkpoint(run: Path) -> Checkpoint:
    """Return the newest checkpoint, after checking that it is valid."""
    found, rejected = find_latest_valid(run / "checkpoints")
    assert found is not None
    assert not rejected
    return found


def checkpoint_hashes(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the hashes of the slices of each tensor."""
    return {
        f"{group}/{name}": [piece.xxh3_128 for piece in record.slices]
        for group, tensors in checkpoint.manifest.tensors.items()
        for name, record in tensors.items()
    }


def assert_bit_equal(run: Path, reference: Path) -> None:
    """Assert that a run has the bits of one that nothing interrupted: each step whenever it was run, the last state."""
    wanted, found = ({step: set(told) for step, told in read_step_metrics(one).items()} for one in (reference, run))
    assert found == wanted
    assert all(len(told) == 1 for told in wanted.values())
    assert checkpoint_hashes(latest_checkpoint(run)) == checkpoint_hashes(latest_checkpoint(reference))
