"""The manifest of a checkpoint, and the COMMIT file that makes it one.

`manifest.json` holds everything but the tensors' bytes: step, recipe, model, layout, small typed state, data position,
files and tensors with their hashes. `COMMIT` is written last and holds the manifest's hash, so a folder with a COMMIT
that matches is complete, and each byte in it can be checked. No pickle: a checkpoint is JSON and safetensors.
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
    TOKENIZER_FILE,
    Files,
    Tensors,
    check,
    files_from_json,
    files_to_json,
    tensors_from_json,
    tensors_to_json,
)

FORMAT, VERSION = "lt-checkpoint", 1
MAX_MANIFEST_BYTES = 2**31
Small = int | float | str | bool


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a checkpoint says besides its tensors.

    Attributes:
        step: Optimizer steps taken.
        recipe: The run's recipe as plain JSON values.
        model: `lt_model.LlamaConfig.to_dict()`, or empty.
        small: Small state by name; the types survive, also inf and nan.
        data: Position in the data stream as plain JSON values, or None.
        tokenizer_files: File name → content; stored in the folder `tokenizer/`.
        layout: How the ranks held the tensors (degrees), for people and reports; reading does not need it.
        created_at: Seconds since 1970 in UTC.
    """

    step: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Small] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise CheckpointError(f"meta: step must be a non-negative integer, is {self.step!r}")
        for name, value in self.small.items():
            if type(value) not in (int, float, str, bool):
                raise CheckpointError(f"meta: small[{name!r}] must be int, float, str or bool, is {type(value)}")
        for name in self.tokenizer_files:
            if not TOKENIZER_FILE.fullmatch(f"tokenizer/{name}") or name.endswith(".tmp"):
                raise CheckpointError(f"meta: {name!r} is not a plain file name for the tokenizer")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's content, as `manifest.json` says it.

    Attributes:
        step: Optimizer steps taken.
        world: Number of ranks that wrote it.
        created_at: Seconds since 1970 in UTC.
        recipe: The run's recipe.
        model: The model's configuration, see `Meta.model`.
        layout: How the ranks held the tensors.
        small: Small typed state.
        data: Position in the data stream, or None.
        files: Every file besides manifest.json and COMMIT.
        tensors: Group → name → record.
    """

    step: int
    world: int
    created_at: float
    recipe: dict[str, Any]
    model: dict[str, Any]
    layout: dict[str, Any]
    small: dict[str, Small]
    data: dict[str, Any] | None
    files: Files
    tensors: Tensors

    @property
    def n_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.n_bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the content of manifest.json."""
        return strict_json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "world": self.world,
                "created_at": self.created_at,
                "model": self.model,
                "recipe": self.recipe,
                "layout": self.layout,
                "small": {name: _small_to_json(value) for name, value in self.small.items()},
                "data": self.data,
                "files": files_to_json(self.files),
                "tensors": tensors_to_json(self.tensors),
            },
            "the manifest",
        )

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "Manifest":
        """Reads and checks the content of a manifest.json; a `CheckpointError` names file and field."""
        obj = strict_json.loads(raw, source)
        strict_json.check_version(obj, FORMAT, VERSION, source)
        manifest = cls(
            step=strict_json.count(obj, "step", source),
            world=strict_json.count(obj, "world", source),
            created_at=strict_json.field(obj, "created_at", float, source),
            model=strict_json.field(obj, "model", dict, source),
            recipe=strict_json.field(obj, "recipe", dict, source),
            layout=strict_json.field(obj, "layout", dict, source),
            small={
                name: _small_from_json(value, f"{source}: small[{name!r}]")
                for name, value in strict_json.field(obj, "small", dict, source).items()
            },
            data=None if obj.get("data") is None else strict_json.field(obj, "data", dict, source),
            files=files_from_json(strict_json.field(obj, "files", dict, source), source),
            tensors=tensors_from_json(strict_json.field(obj, "tensors", dict, source), source),
        )
        check(manifest.files, manifest.tensors, source)
        return manifest


def _small_to_json(value: Small) -> Any:
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _small_from_json(value: Any, where: str) -> Small:
    if isinstance(value, dict) and value.get("float") in ("inf", "-inf", "nan") and len(value) == 1:
        return float(value["float"])
    if isinstance(value, int | float | str):
        return value
    raise CheckpointError(f"{where}: must be int, float, str or bool, is {type(value).__name__}")


def commit_bytes(manifest: bytes, step: int) -> bytes:
    """Returns the content of COMMIT for a manifest's bytes."""
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
    """Checks that a COMMIT file is the one of these manifest bytes and returns the step it names."""
    obj = strict_json.loads(commit, source)
    strict_json.check_version(obj, "lt-checkpoint-commit", 1, source)
    step = strict_json.count(obj, "step", source)
    if commit != commit_bytes(manifest, step):
        raise CheckpointError(f"{source}: does not match manifest.json; one of the two is damaged")
    return step
