"""Weights of a release: checkpoints as Hugging Face folders, with a hash of each tensor.

    model/                     the final weights, config.json, generation_config.json, tokenizer
    checkpoints/step-N/        weights of earlier steps, likewise
    weights.json               folder → tensor → SHA-256 of dtype, shape and bytes *as the checkpoint has them*

The hashes are taken from the checkpoint, not from what was exported, so that `verify` shows that both are the same bits
where the checkpoint itself is no longer there. Checkpoints are verified before they are exported.
Cost: two reads of each checkpoint's weights.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lt_ckpt import Checkpoint, Source, compare, export_hf, list_steps, open_source
from lt_ckpt.errors import CheckpointError
from lt_ckpt.integrity import verify as verify_checkpoint
from lt_ckpt.source import TensorReader
from lt_trainer.evaluation.weight_hashes import hash_tensor
from lt_trainer.files import read_json

MODEL_FOLDER, WEIGHT_HASHES = "model", "weights.json"


def step_folder(step: int) -> str:
    """Return the bundle's folder of the weights of an earlier step."""
    return f"checkpoints/step-{step:08}"


def choose_checkpoints(run: Path, wanted: str) -> tuple[list[Checkpoint], list[str]]:
    """Choose the checkpoints of a run to release, by increasing step; the last one is the final.

    Args:
        run: The run directory.
        wanted: "all", "final", or steps separated by commas; the newest valid one is always the final.

    Returns:
        The checkpoints, verified, and the problems.
    """
    valid: dict[int, Checkpoint] = {}
    problems: list[str] = []
    rejected: list[str] = []
    steps: set[int] | None = None
    if wanted not in ("all", "final"):
        words = [word.strip() for word in wanted.split(",")]
        if not all(word.isdecimal() for word in words):
            return [], [f"--checkpoints = {wanted!r}: give all, final, or steps separated by commas"]
        steps = {int(word) for word in words}
    for step, path in list_steps(run / "checkpoints"):  # newest first
        if step in valid or (wanted == "final" and valid) or (steps is not None and valid and step not in steps):
            continue
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError as exc:
            rejected.append(str(exc))
            continue
        report = verify_checkpoint(path)
        if report.is_loadable:
            valid[step] = checkpoint
        else:
            rejected += report.problems
    if not valid:
        there = f": {'; '.join(rejected)}" if rejected else ""
        return [], [f"RUN = {run}: no committed checkpoint that verifies{there}; train until one is saved"]
    for step in sorted((steps or set()) - valid.keys()):
        problems.append(f"--checkpoints: the run has no valid checkpoint of step {step}; it has {sorted(valid)}")
    problems += [f"{reason}; remove it, or name the steps to release with --checkpoints" for reason in rejected]
    return [valid[step] for step in sorted(valid)], problems


def release_weights(bundle: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Export the checkpoints, the last one as the model, and write the hashes of their tensors.

    Raises:
        CheckpointError: The export failed, or it differs from its checkpoint.
    """
    hashes: dict[str, dict[str, str]] = {}
    (bundle / "checkpoints").mkdir()
    for checkpoint in checkpoints:
        folder = MODEL_FOLDER if checkpoint is checkpoints[-1] else step_folder(checkpoint.step)
        export_hf(checkpoint, bundle / folder)
        exported, saved = open_source(bundle / folder), open_source(checkpoint.path)
        different = [
            c.name for c in compare(exported, saved) if c.name in exported.groups["weights"].specs and not c.is_equal
        ]
        if different:
            raise CheckpointError(f"{folder}: the export of {checkpoint.path} differs in {', '.join(different)}")
        hashes[folder] = tensor_hashes(saved, list(exported.groups["weights"].specs))
    if len(checkpoints) == 1:
        (bundle / "checkpoints").rmdir()
    (bundle / WEIGHT_HASHES).write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def stated_hashes(bundle: Path) -> dict[str, str]:
    """Return the hash of each tensor of the final weights, as the release states it.

    Raises:
        ValueError: weights.json is no table of hashes.
    """
    stated: Any = read_json(bundle / WEIGHT_HASHES)
    hashes = stated.get(MODEL_FOLDER) if isinstance(stated, dict) else None
    if not isinstance(hashes, dict) or not all(isinstance(text, str) for text in hashes.values()):
        raise ValueError(f"{WEIGHT_HASHES}: {MODEL_FOLDER} is not a table of hashes")
    return hashes


def tensor_hashes(source: Source, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 over dtype, shape and bytes of each tensor of a model."""
    group = source.groups["weights"]
    found: dict[str, str] = {}
    with TensorReader(source.root) as reader:
        for name in names:
            spec = group.specs[name]
            found[name] = hash_tensor(spec.dtype, spec.shape, reader.read(group, name).data)
    return found


def find_weight_problems(bundle: Path, count: Callable[[str], None] = lambda folder: None) -> list[str]:
    """Compare the exported tensors with the hashes of the checkpoints' ones; return what differs."""
    problems: list[str] = []
    stated: Any = read_json(bundle / WEIGHT_HASHES)
    folders = [MODEL_FOLDER, *sorted(str(path.relative_to(bundle)) for path in bundle.glob("checkpoints/step-*"))]
    if sorted(stated) != sorted(folders):
        return [f"{WEIGHT_HASHES}: has {', '.join(sorted(stated))}, the bundle {', '.join(sorted(folders))}"]
    for folder in folders:
        try:
            source = open_source(bundle / folder)
            actual = tensor_hashes(source, list(source.groups["weights"].specs))
        except CheckpointError as exc:
            problems.append(f"{folder}: {exc}")
            continue
        for name in sorted(actual.keys() | stated[folder].keys()):
            if actual.get(name) != stated[folder].get(name):
                problems.append(f"{folder}: tensor {name} is not, bit for bit, that of the run's checkpoint")
        count(folder)
    return problems


def compare_with_checkpoint(bundle: Path, run: Path, steps: dict[str, int]) -> list[str]:
    """Compare the exported tensors with the checkpoints of a run that is still there; return what differs.

    Args:
        bundle: The release.
        run: The run directory.
        steps: Folder in the bundle → step.
    """
    problems: list[str] = []
    there = dict(reversed(list_steps(run / "checkpoints")))
    for folder, step in steps.items():
        if step not in there:
            problems.append(f"{folder}: {run} has no checkpoint of step {step} any more")
            continue
        exported = open_source(bundle / folder)
        for result in compare(exported, open_source(there[step])):
            if result.name in exported.groups["weights"].specs and not result.is_equal:
                problems.append(f"{folder}: tensor {result.name} differs from {there[step]}")
    return problems
