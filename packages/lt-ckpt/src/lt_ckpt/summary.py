"""Summary of a checkpoint or a model in any format for `lt-ckpt inspect`: plain JSON values. Reads headers only."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from math import prod
from typing import Any

from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.checksums import describe_checksums
from lt_ckpt.folders import TOKENIZER
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec

MAX_SHOWN_FILES = 4


def summarize_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint's manifest says, as plain JSON values."""
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "created_at": datetime.fromtimestamp(manifest.created_at, UTC).isoformat(timespec="seconds"),
        "world_size": manifest.world_size,
        "n_files": len(manifest.files) + 2,
        "n_bytes": manifest.n_bytes,
        "groups": {group: _summarize_group(checkpoint.specs(group)) for group in checkpoint.groups},
        "tokenizer": [name.split("/", 1)[1] for name in manifest.files if name.startswith(f"{TOKENIZER}/")],
        "model": manifest.model,
        "layout": manifest.layout,
        "optimizer": vars(manifest.optimizer) if manifest.optimizer else {},
        "scalars": manifest.scalars,
        "data": manifest.data,
        "recipe": manifest.recipe,
    }


def summarize_source(source: Source) -> dict[str, Any]:
    """Return a model's format, tensors, checksums, files and configuration, as plain JSON values."""
    return {
        "path": str(source.path),
        "format": source.format,
        "groups": {name: _summarize_group(group.specs) for name, group in source.groups.items()},
        "checksums": describe_checksums(source),
        "files": sorted(source.files() | set(source.aux_files)),
        "format_info": dict(source.format_info),
        "config": dict(source.config),
    }


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of text of a summary; the recipe is left out."""
    lines = [summary["path"]]
    for title, value in summary.items():
        if title == "groups":
            lines += [
                f"{name:<11} {group['tensors']} tensors, {group['elements']:,} elements, {', '.join(group['dtypes'])}, "
                f"{format_bytes(group['n_bytes'])}"
                for name, group in value.items()
            ]
        elif title not in ("path", "recipe") and value not in (None, {}, []):
            text = format_bytes(value) if title == "n_bytes" else value
            if isinstance(value, list):
                text = f"{len(value)}: {', '.join(value[:MAX_SHOWN_FILES])}{', ...' * (len(value) > MAX_SHOWN_FILES)}"
            elif isinstance(value, Mapping):
                text = " ".join(f"{key}={item}" for key, item in value.items())
            lines.append(f"{title:<11} {text}")
    return lines


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


def _summarize_group(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the number of tensors, elements, bytes, and the elements of each dtype."""
    dtypes: Counter[str] = Counter()
    for spec in specs.values():
        dtypes[spec.dtype] += prod(spec.shape)
    n_bytes = sum(spec.n_bytes for spec in specs.values())
    return {"tensors": len(specs), "elements": dtypes.total(), "n_bytes": n_bytes, "dtypes": dict(dtypes)}
