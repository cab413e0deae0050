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
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from lt_ckpt import Checkpoint, CheckpointError, ConvertOptions, Source, convert_checkpoint, list_steps, open_source
from lt_ckpt.integrity import verify as verify_checkpoint
from lt_trainer.evaluation.weight_hashes import hash_tensor

MODEL_FOLDER, WEIGHT_HASHES = "model", "weights.json"


def step_folder(step: int) -> str:
    """Return the bundle's folder of the weights of an earlier step."""
    return f"checkpoints/step-{step:08}"


def verified_checkpoints(run: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints of a run by increasing step, the last one the final, and why others cannot be released."""
    found: dict[int, Checkpoint] = {}
    problems: list[str] = []
    for step, path in list_steps(run / "checkpoints"):  # one that was moved aside comes after that of its step
        report = verify_checkpoint(path) if step not in found else None
        if report is not None and report.is_loadable:
            found[step] = Checkpoint.open(path)
        elif report is not None:
            problems += [f"{problem}; remove this checkpoint" for problem in report.problems]
    if not found:
        problems.append(f"RUN = {run}: no committed checkpoint that verifies; train until one is saved")
    return [found[step] for step in sorted(found)], problems


def release_weights(bundle: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Export the checkpoints, the last one as the model, and write the hashes of their tensors.

    Raises:
        CheckpointError: The export failed, or it differs from its checkpoint.
    """
    hashes: dict[str, dict[str, str]] = {}
    for checkpoint in checkpoints:
        folder = MODEL_FOLDER if checkpoint is checkpoints[-1] else step_folder(checkpoint.step)
        (bundle / folder).parent.mkdir(exist_ok=True)
        source = replace(open_source(checkpoint.path), is_verified=True)  # by `verified_checkpoints`
        convert_checkpoint(source, bundle / folder, ConvertOptions(format="hf"))
        hashes[folder] = hash_tensors(source, open_source(bundle / folder).weights.specs)
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
    for name in names:
        spec = source.weights.specs[name]
        found[name] = hash_tensor(spec.dtype, spec.shape, source.read(name).data)
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
        different = sorted({name for name, _ in actual.items() ^ stated[folder].items()})
        problems += [f"{folder}: tensor {name} is not, bit for bit, that of the run's checkpoint" for name in different]
    return problems
