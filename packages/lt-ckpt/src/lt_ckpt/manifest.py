"""Manifest of a checkpoint, and the COMMIT file that makes it valid.

`manifest.json` holds everything but the tensors' bytes: step, recipe, model, layout, optimizer, typed scalars, data
position, files and tensors with their hashes. `COMMIT` is written last and holds the manifest's hash, so a folder with
a matching COMMIT is complete, and each byte in it can be verified. No pickle: a checkpoint is JSON and safetensors.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lt_ckpt import strict_json
from lt_ckpt.errors import CheckpointError
from lt_ckpt.records import (
    HF_FILE,
    TOKENIZER_FILE,
    FileRecords,
    OptimizerRecord,
    TensorRecords,
    check_optimizer_slots,
    files_from_json,
    files_to_json,
    tensors_from_json,
    tensors_to_json,
    validate_records,
)

FORMAT, VERSION = "lt-checkpoint", 1
MAX_MANIFEST_BYTES = 2**31
Scalar = int | float | str | bool


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Checkpoint metadata: step, recipe, model, data state and everything else besides tensors.

    Attributes:
        step: Optimizer steps taken.
        recipe: The run's recipe as plain JSON values.
        model: `lt_model.LlamaConfig.to_dict()`, or empty.
        scalars: Scalar state by name; types are preserved, also inf and nan.
        data: Position in the data stream as plain JSON values, or None.
        tokenizer_files: File name → content; stored in the folder `tokenizer/`. A named chat template is
            `additional_chat_templates/NAME.jinja`, as beside other tokenizers.
        hf_files: `config.json` and `generation_config.json` of the model that this one came from, with what `model`
            does not say (token ids, sampling); stored in the folder `hf/`. Where the two disagree, `model` counts.
        layout: Parallelism of the saving ranks (degrees), for reports; reading does not need it.
        optimizer: The optimizer whose state the checkpoint holds, or None.
        created_at: Seconds since 1970 in UTC.
    """

    step: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    hf_files: Mapping[str, bytes] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise CheckpointError(f"metadata: step must be a non-negative integer, is {self.step!r}")
        for name, value in self.scalars.items():
            if type(value) not in (int, float, str, bool):
                raise CheckpointError(f"metadata: scalars[{name!r}] must be int, float, str or bool, is {type(value)}")
        for name in self.tokenizer_files:
            if not TOKENIZER_FILE.fullmatch(f"tokenizer/{name}") or name.endswith(".tmp"):
                raise CheckpointError(f"metadata: {name!r} is not a plain file name for the tokenizer")
        for name, data in self.hf_files.items():
            if not HF_FILE.fullmatch(f"hf/{name}"):
                raise CheckpointError(f"metadata: hf_files has {name!r}, not config.json or generation_config.json")
            strict_json.loads(data, f"metadata: hf_files: {name}")


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Content of `manifest.json`.

    Attributes:
        step: Optimizer steps taken.
        world_size: Number of ranks that wrote it.
        created_at: Seconds since 1970 in UTC.
        recipe: The run's recipe.
        model: The model's configuration, see `CheckpointMetadata.model`.
        layout: Parallelism of the saving ranks.
        optimizer: The optimizer and its slots, or None: no optimizer state.
        scalars: Typed scalar state.
        data: Position in the data stream, or None.
        files: Every file besides manifest.json and COMMIT.
        tensors: Group → name → record.
    """

    step: int
    world_size: int
    created_at: float
    recipe: dict[str, Any]
    model: dict[str, Any]
    layout: dict[str, Any]
    optimizer: OptimizerRecord | None
    scalars: dict[str, Scalar]
    data: dict[str, Any] | None
    files: FileRecords
    tensors: TensorRecords

    @property
    def n_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.n_bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return strict_json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "world_size": self.world_size,
                "created_at": self.created_at,
                "model": self.model,
                "recipe": self.recipe,
                "layout": self.layout,
                "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
                "scalars": {name: _scalar_to_json(value) for name, value in self.scalars.items()},
                "data": self.data,
                "files": files_to_json(self.files),
                "tensors": tensors_to_json(self.tensors),
            },
            "the manifest",
        )

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "CheckpointManifest":
        """Parse and check a manifest.json; a `CheckpointError` names file and field."""
        obj = strict_json.loads(raw, source)
        strict_json.check_format_version(obj, FORMAT, VERSION, source)
        manifest = cls(
            step=strict_json.get_count(obj, "step", source),
            world_size=strict_json.get_count(obj, "world_size", source),
            created_at=strict_json.get_field(obj, "created_at", float, source),
            model=strict_json.get_field(obj, "model", dict, source),
            recipe=strict_json.get_field(obj, "recipe", dict, source),
            layout=strict_json.get_field(obj, "layout", dict, source),
            optimizer=None
            if obj.get("optimizer") is None
            else OptimizerRecord.from_json(strict_json.get_field(obj, "optimizer", dict, source), source),
            scalars={
                name: _scalar_from_json(value, f"{source}: scalars[{name!r}]")
                for name, value in strict_json.get_field(obj, "scalars", dict, source).items()
            },
            data=None if obj.get("data") is None else strict_json.get_field(obj, "data", dict, source),
            files=files_from_json(strict_json.get_field(obj, "files", dict, source), source),
            tensors=tensors_from_json(strict_json.get_field(obj, "tensors", dict, source), source),
        )
        validate_records(manifest.files, manifest.tensors, source)
        check_optimizer_slots(manifest.optimizer, manifest.tensors, source)
        return manifest


def _scalar_to_json(value: Scalar) -> Any:
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _scalar_from_json(value: Any, where: str) -> Scalar:
    if isinstance(value, dict) and value.get("float") in ("inf", "-inf", "nan") and len(value) == 1:
        return float(value["float"])
    if isinstance(value, int | float | str):
        return value
    raise CheckpointError(f"{where}: must be int, float, str or bool, is {type(value).__name__}")


def make_commit(manifest: bytes, step: int) -> bytes:
    """Return the content of COMMIT for a manifest's bytes."""
    return strict_json.dumps(
        {
            "format": "lt-checkpoint-commit",
            "version": 1,
            "step": step,
            "manifest_bytes": len(manifest),
            "manifest_xxh3_128": xxhash.xxh3_128_hexdigest(manifest),
        },
        "COMMIT",
    )


def check_commit(commit: bytes, manifest: bytes, source: str) -> int:
    """Check that a COMMIT file matches these manifest bytes; return its step."""
    obj = strict_json.loads(commit, source)
    strict_json.check_format_version(obj, "lt-checkpoint-commit", 1, source)
    step = strict_json.get_count(obj, "step", source)
    if commit != make_commit(manifest, step):
        raise CheckpointError(f"{source}: does not match manifest.json; one of the two is damaged")
    return step
