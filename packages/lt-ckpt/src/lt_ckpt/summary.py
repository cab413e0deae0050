"""A checkpoint, or a model in another format, in a few lines: what `lt-ckpt inspect` shows. Reads headers only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from typing import Any

from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.folders import TOKENIZER
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec

SHOWN_FILES = 4


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """A group of tensors: how many, their elements and bytes, and the elements of each dtype."""

    tensors: int
    elements: int
    n_bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a checkpoint holds.

    Attributes:
        path: Its folder.
        step: Optimizer steps taken.
        created_at: ISO time in UTC.
        world: Ranks that wrote it.
        n_files: Listed files.
        n_bytes: Their bytes.
        groups: Group → summary.
        tokenizer: Names of the tokenizer's files.
        model: The model's configuration.
        layout: How the ranks held the tensors.
        small: Small typed state.
        data: Position in the data stream, or None.
        recipe: The run's recipe.
    """

    path: str
    step: int
    created_at: str
    world: int
    n_files: int
    n_bytes: int
    groups: dict[str, GroupSummary]
    tokenizer: list[str]
    model: dict[str, Any]
    layout: dict[str, Any]
    small: dict[str, Any]
    data: dict[str, Any] | None
    recipe: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns the text form, a line each."""
        made = [
            f"{self.path}",
            f"step        {self.step}",
            f"saved       {self.created_at} by {self.world} rank{'' if self.world == 1 else 's'}",
            f"size        {size(self.n_bytes)} in {self.n_files} files",
        ]
        made += _group_lines(self.groups)
        if self.tokenizer:
            made.append(f"tokenizer   {', '.join(self.tokenizer)}")
        for title, values in (("model", self.model), ("layout", self.layout), ("small", self.small)):
            if values:
                made.append(f"{title:<11} {' '.join(f'{key}={value}' for key, value in values.items())}")
        if self.data is not None:
            made.append(f"{'data':<11} {' '.join(f'{key}={value}' for key, value in self.data.items())}")
        return made


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """What a model in any format holds: `about` is what was found out about the format, `config` its config.json."""

    path: str
    format: str
    groups: dict[str, GroupSummary]
    files: list[str]
    about: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns the text form, a line each."""
        made = [f"{self.path}", f"format      {self.format}", *_group_lines(self.groups)]
        for title, values in (("about", self.about), ("config", self.config)):
            if values:
                made.append(f"{title:<11} {' '.join(f'{key}={value}' for key, value in values.items())}")
        shown = ", ".join(self.files[:SHOWN_FILES]) + (", ..." if len(self.files) > SHOWN_FILES else "")
        return [*made, f"files       {len(self.files)}: {shown}"]


def _group_lines(groups: Mapping[str, GroupSummary]) -> list[str]:
    return [
        f"{name:<11} {group.tensors} tensors, {group.elements:,} elements, {', '.join(group.dtypes)}, "
        f"{size(group.n_bytes)}"
        for name, group in groups.items()
    ]


def tensor_lines(groups: Mapping[str, Mapping[str, TensorSpec]]) -> list[str]:
    """Returns a line for every tensor: name, dtype, shape, bytes."""
    return [
        f"{name if group == 'weights' else f'{group}/{name}'} {spec.dtype} {list(spec.shape)} {size(spec.n_bytes)}"
        for group, specs in groups.items()
        for name, spec in specs.items()
    ]


def size(n_bytes: int) -> str:
    """Returns bytes as a person reads them, in powers of ten: `4.2 GB`."""
    value, unit = float(n_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{n_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def summarize(checkpoint: Checkpoint) -> Summary:
    """Returns what a checkpoint holds."""
    manifest = checkpoint.manifest
    return Summary(
        path=str(checkpoint.path),
        step=manifest.step,
        created_at=datetime.fromtimestamp(manifest.created_at, UTC).isoformat(timespec="seconds"),
        world=manifest.world,
        n_files=len(manifest.files) + 2,
        n_bytes=manifest.n_bytes,
        groups={group: _summed(checkpoint.specs(group)) for group in checkpoint.groups},
        tokenizer=[name.split("/", 1)[1] for name in manifest.files if name.startswith(f"{TOKENIZER}/")],
        model=manifest.model,
        layout=manifest.layout,
        small=manifest.small,
        data=manifest.data,
        recipe=manifest.recipe,
    )


def summarize_source(source: Source) -> SourceSummary:
    """Returns what a model in any format holds."""
    stored = {place.file for group in source.groups.values() for places in group.places.values() for place in places}
    return SourceSummary(
        path=str(source.path),
        format=source.format,
        groups={name: _summed(group.specs) for name, group in source.groups.items()},
        files=sorted(stored | set(source.small)),
        about=dict(source.about),
        config=dict(source.config or {}),
    )


def _summed(specs: Mapping[str, TensorSpec]) -> GroupSummary:
    dtypes: Counter[str] = Counter()
    for spec in specs.values():
        dtypes[spec.dtype] += prod(spec.shape)
    return GroupSummary(
        tensors=len(specs),
        elements=dtypes.total(),
        n_bytes=sum(spec.n_bytes for spec in specs.values()),
        dtypes=dict(dtypes),
    )
