"""Manifest of a checkpoint, and the COMMIT file that makes it valid.

`manifest.json` holds everything but the tensors' bytes: step, recipe, model, layout, optimizer, scalars, data position,
files and tensors with their hashes. `COMMIT` is written last and holds the manifest's hash, so a folder with a matching
COMMIT is complete, and each byte in it can be verified. No pickle: a checkpoint is JSON and safetensors.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from lt_ckpt import json_objects
from lt_ckpt.errors import CheckpointError
from lt_ckpt.file_names import check_name
from lt_ckpt.records import (
    FileRecords,
    OptimizerRecord,
    TensorRecords,
    check_optimizer_slots,
    parse_files,
    parse_tensors,
    validate_records,
)

VERSION = 2
MAX_MANIFEST_BYTES = 2**31
Scalar = int | float | str | bool


@dataclass(frozen=True, kw_only=True)
class _Description:
    step: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    created_at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata(_Description):
    """Checkpoint metadata: step, recipe, model, data state and everything else besides tensors.

    Attributes:
        step: Optimizer steps taken.
        recipe: The run's recipe as plain JSON values.
        model: `lt_model.ModelConfig.to_dict()`, or empty.
        scalars: Scalar state by name; types are preserved, also inf and nan.
        data: Position in the data stream as plain JSON values, or None.
        layout: Parallelism of the saving ranks (degrees), for reports; reading does not need it.
        optimizer: The optimizer whose state the checkpoint holds, or None.
        created_at: Seconds since 1970 in UTC.
        tokenizer_files: File name → content; stored in the folder `tokenizer/`. A named chat template is
            `additional_chat_templates/NAME.jinja`, as beside other tokenizers.
        hf_files: `config.json` and `generation_config.json` of the model that this one came from, with what `model`
            does not say (token ids, sampling); stored in the folder `hf/`. Where the two disagree, `model` counts.
    """

    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    hf_files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.tokenizer_files, *self.hf_files):
            check_name(name, "metadata: a file of the tokenizer or the model")


class Segment(NamedTuple):
    """Range of a file that has a hash: a slice by its key, or what stands in front of the slices."""

    key: str
    byte_offset: int
    n_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(_Description):
    """Content of `manifest.json`: what `CheckpointMetadata` says, and the files.

    Attributes:
        world_size: Number of ranks that wrote it.
        files: Every file besides manifest.json and COMMIT.
        tensors: Group → name → record.
    """

    world_size: int
    files: FileRecords
    tensors: TensorRecords

    @property
    def n_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.n_bytes for record in self.files.values())

    def segments(self) -> dict[str, list[Segment]]:
        """Return file → the ranges that have a hash, in order: its header, or all of it, then its slices."""
        found = {name: [Segment("", 0, file.hashed_bytes, file.xxh3_128)] for name, file in self.files.items()}
        for members in self.tensors.values():
            for record in members.values():
                for piece in record.slices:
                    n_bytes = record.slice_bytes(piece)
                    if n_bytes and piece.xxh3_128:  # otherwise the file is one segment
                        found[piece.file].append(Segment(piece.key, piece.byte_offset, n_bytes, piece.xxh3_128))
        return {name: sorted(parts, key=lambda part: part.byte_offset) for name, parts in found.items()}

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return json_objects.dumps({"format": "lt-checkpoint", "version": VERSION, **vars(self)}, "the manifest")

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "CheckpointManifest":
        """Parse a manifest.json and check that its records add up; a `CheckpointError` names the file."""
        fields = json_objects.loads(raw, source)
        found = fields.pop("format", None), fields.pop("version", None)
        if found != ("lt-checkpoint", VERSION):
            raise CheckpointError(
                f"{source}: is {found[0]} version {found[1]}, not lt-checkpoint version {VERSION}; use the version of "
                "lt-ckpt that wrote it"
            )
        with json_objects.translate_format_errors(source):
            optimizer = fields["optimizer"]
            if optimizer is not None:
                optimizer = OptimizerRecord(name=optimizer["name"], slots=tuple(optimizer["slots"]))
            fields |= {"files": parse_files(fields["files"]), "tensors": parse_tensors(fields["tensors"])}
            manifest = cls(**{**fields, "optimizer": optimizer})
            validate_records(manifest.files, manifest.tensors, source)
            check_optimizer_slots(manifest.optimizer, manifest.tensors, source)
        return manifest


def make_commit(manifest: bytes, step: int) -> bytes:
    """Return the content of COMMIT for a manifest's bytes."""
    digest = xxhash.xxh3_128_hexdigest(manifest)
    return json_objects.dumps({"step": step, "n_bytes": len(manifest), "xxh3_128": digest}, "COMMIT")


def parse_committed(manifest: bytes, commit: bytes, folder: str) -> CheckpointManifest:
    """Return the manifest of a checkpoint whose COMMIT matches it; `folder` is for messages."""
    parsed = CheckpointManifest.from_bytes(manifest, f"{folder}/manifest.json")
    if commit != make_commit(manifest, parsed.step):
        raise CheckpointError(f"{folder}/COMMIT: does not match manifest.json; one of the two is damaged")
    return parsed
