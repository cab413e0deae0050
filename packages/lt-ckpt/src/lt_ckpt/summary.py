"""Summary of a checkpoint or a model in any format for `lt-ckpt inspect`. Reads headers only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any

from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.checksums import describe_checksums
from lt_ckpt.folders import TOKENIZER
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec

MAX_SHOWN_FILES = 4


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Summary of a group of tensors: number, elements, bytes, and the elements of each dtype."""

    tensors: int
    elements: int
    n_bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """Summary of a checkpoint.

    Attributes:
        path: Its folder.
        step: Optimizer steps taken.
        created_at: ISO time in UTC.
        world_size: Ranks that wrote it.
        n_files: Listed files.
        n_bytes: Their bytes.
        groups: Group → summary.
        tokenizer: Names of the tokenizer's files.
        model: The model's configuration.
        layout: Parallelism of the saving ranks.
        optimizer: Its name and slots, or empty.
        scalars: Typed scalar state.
        data: Position in the data stream, or None.
        recipe: The run's recipe.
    """

    path: str
    step: int
    created_at: str
    world_size: int
    n_files: int
    n_bytes: int
    groups: dict[str, GroupSummary]
    tokenizer: list[str]
    model: dict[str, Any]
    layout: dict[str, Any]
    optimizer: dict[str, Any]
    scalars: dict[str, Any]
    data: dict[str, Any] | None
    recipe: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines of text."""
        lines = [
            f"{self.path}",
            f"step        {self.step}",
            f"saved       {self.created_at} by {self.world_size} rank{'' if self.world_size == 1 else 's'}",
            f"size        {format_bytes(self.n_bytes)} in {self.n_files} files",
        ]
        lines += _group_lines(self.groups)
        if self.tokenizer:
            lines.append(f"tokenizer   {', '.join(self.tokenizer)}")
        for title, values in (
            ("model", self.model),
            ("layout", self.layout),
            ("optimizer", self.optimizer),
            ("scalars", self.scalars),
        ):
            if values:
                lines.append(f"{title:<11} {' '.join(f'{key}={value}' for key, value in values.items())}")
        if self.data is not None:
            lines.append(f"{'data':<11} {' '.join(f'{key}={value}' for key, value in self.data.items())}")
        return lines


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """Summary of a model in any format: `format_info` from its reader, `config` its config.json.

    `checksums` tells which files have some.
    """

    path: str
    format: str
    groups: dict[str, GroupSummary]
    checksums: str
    files: list[str]
    format_info: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines of text."""
        lines = [f"{self.path}", f"format      {self.format}", *_group_lines(self.groups)]
        lines.append(f"checksums   {self.checksums}")
        for title, values in (("format_info", self.format_info), ("config", self.config)):
            if values:
                lines.append(f"{title:<11} {' '.join(f'{key}={value}' for key, value in values.items())}")
        shown = ", ".join(self.files[:MAX_SHOWN_FILES]) + (", ..." if len(self.files) > MAX_SHOWN_FILES else "")
        return [*lines, f"files       {len(self.files)}: {shown}"]


def _group_lines(groups: Mapping[str, GroupSummary]) -> list[str]:
    return [
        f"{name:<11} {group.tensors} tensors, {group.elements:,} elements, {', '.join(group.dtypes)}, "
        f"{format_bytes(group.n_bytes)}"
        for name, group in groups.items()
    ]


def tensor_lines(groups: Mapping[str, Mapping[str, TensorSpec]]) -> list[str]:
    """Return a line per tensor: name, dtype, shape, bytes."""
    return [
        f"{'' if group == 'weights' else f'{group}/'}{name} {s.dtype} {list(s.shape)} {format_bytes(s.n_bytes)}"
        for group, specs in groups.items()
        for name, s in specs.items()
    ]


def format_bytes(n_bytes: int) -> str:
    """Format bytes for reading, in powers of ten: `4.2 GB`."""
    value, unit = float(n_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{n_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def summarize_checkpoint(checkpoint: Checkpoint) -> CheckpointSummary:
    """Summarize a checkpoint."""
    manifest = checkpoint.manifest
    return CheckpointSummary(
        path=str(checkpoint.path),
        step=manifest.step,
        created_at=datetime.fromtimestamp(manifest.created_at, UTC).isoformat(timespec="seconds"),
        world_size=manifest.world_size,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
        groups={group: _summarize_group(checkpoint.specs(group)) for group in checkpoint.groups},
        tokenizer=[name.split("/", 1)[1] for name in manifest.files if name.startswith(f"{TOKENIZER}/")],
        model=manifest.model,
        layout=manifest.layout,
        optimizer=manifest.optimizer.to_json() if manifest.optimizer else {},
        scalars=manifest.scalars,
        data=manifest.data,
        recipe=manifest.recipe,
    )


def summarize_source(source: Source) -> SourceSummary:
    """Summarize a model in any format."""
    stored = {s.file for group in source.groups.values() for slices in group.locations.values() for s in slices}
    return SourceSummary(
        path=str(source.path),
        format=source.format,
        groups={name: _summarize_group(group.specs) for name, group in source.groups.items()},
        checksums=describe_checksums(source),
        files=sorted(stored | set(source.aux_files) | set(source.other_files)),
        format_info=dict(source.format_info),
        config=dict(source.config or {}),
    )


def _summarize_group(specs: Mapping[str, TensorSpec]) -> GroupSummary:
    dtypes: Counter[str] = Counter()
    for spec in specs.values():
        dtypes[spec.dtype] += prod(spec.shape)
    return GroupSummary(
        tensors=len(specs),
        elements=dtypes.total(),
        n_bytes=sum(spec.n_bytes for spec in specs.values()),
        dtypes=dict(dtypes),
    )
