"""Weights of a release: checkpoints as Hugging Face folders, with a hash of each tensor.

    model/                     the final weights, config.json, generation_config.json, tokenizer
    checkpoints/step-N/        weights of earlier steps, likewise
    weights.json               folder → tensor → SHA-256 of dtype, shape and bytes *as the checkpoint has them*

The hashes are taken from the checkpoint, not from what was exported, so that `verify` shows that both are the same bits
where the checkpoint itself is no longer there. Checkpoints are verified before they are exported.
Cost: two reads of each checkpoint's weights.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from lt_ckpt import Checkpoint, Source, export_hf, list_steps, open_source
from lt_ckpt.errors import CheckpointError
from lt_ckpt.integrity import verify as verify_checkpoint
from lt_ckpt.source import TensorReader
from lt_trainer.evaluation.weight_hashes import hash_tensor

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
    words = [word.strip() for word in wanted.split(",")]
    if wanted not in ("all", "final") and not all(word.isdecimal() for word in words):
        return [], [f"--checkpoints = {wanted!r}: give all, final, or steps separated by commas"]
    valid: dict[int, Checkpoint] = {}
    rejected: list[str] = []
    for step, path in list_steps(run / "checkpoints"):  # newest first
        if step not in valid and (not valid or wanted == "all" or str(step) in words):
            try:
                report = verify_checkpoint(path)
                if report.is_loadable:
                    valid[step] = Checkpoint.open(path)
                rejected += [] if report.is_loadable else report.problems
            except CheckpointError as exc:
                rejected.append(str(exc))
    if not valid:
        there = f": {'; '.join(rejected)}" if rejected else ""
        return [], [f"RUN = {run}: no committed checkpoint that verifies{there}; train until one is saved"]
    problems = [
        f"--checkpoints: the run has no valid checkpoint of step {step}; it has {sorted(valid)}"
        for step in sorted({int(word) for word in words if word.isdecimal()} - valid.keys())
    ]
    problems += [f"{reason}; remove it, or name the steps to release with --checkpoints" for reason in rejected]
    return [valid[step] for step in sorted(valid)], problems


def release_weights(bundle: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Export the checkpoints, the last one as the model, and write the hashes of their tensors.

    Raises:
        CheckpointError: The export failed, or it differs from its checkpoint.
    """
    hashes: dict[str, dict[str, str]] = {}
    for checkpoint in checkpoints:
        folder = MODEL_FOLDER if checkpoint is checkpoints[-1] else step_folder(checkpoint.step)
        (bundle / folder).parent.mkdir(exist_ok=True)
        export_hf(checkpoint, bundle / folder)
        hashes[folder] = hash_tensors(open_source(checkpoint.path), open_source(bundle / folder).weights.specs)
    (bundle / WEIGHT_HASHES).write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if problems := find_weight_problems(bundle, list(hashes)):
        raise CheckpointError("; ".join(problems))


def stated_hashes(bundle: Path) -> dict[str, dict[str, str]]:
    """Return folder → tensor → hash, as the release states it.

    Raises:
        ValueError: weights.json is no table of hashes.
    """
    return TypeAdapter(dict[str, dict[str, str]]).validate_json((bundle / WEIGHT_HASHES).read_bytes())


def hash_tensors(source: Source, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 over dtype, shape and bytes of each tensor of a model."""
    found: dict[str, str] = {}
    with TensorReader(source.root) as reader:
        for name in names:
            spec = source.weights.specs[name]
            found[name] = hash_tensor(spec.dtype, spec.shape, reader.read(source.weights, name).data)
    return found


def find_weight_problems(bundle: Path, folders: Sequence[str]) -> list[str]:
    """Compare the exported tensors with the hashes of the checkpoints' ones; return what differs."""
    stated = stated_hashes(bundle)
    if sorted(stated) != sorted(folders):
        return [f"{WEIGHT_HASHES}: has {', '.join(sorted(stated))}, the release {', '.join(sorted(folders))}"]
    problems: list[str] = []
    for folder in folders:
        try:
            source = open_source(bundle / folder)
            actual = hash_tensors(source, source.weights.specs)
        except CheckpointError as exc:
            problems.append(f"{folder}: {exc}")
            continue
        problems += [
            f"{folder}: tensor {name} is not, bit for bit, that of the run's checkpoint"
            for name in sorted(actual.keys() | stated[folder].keys())
            if actual.get(name) != stated[folder].get(name)
        ]
    return problems
