"""Discovery of an NxD checkpoint on disk: its folder, its version, and its grid of rank files.

NxD saves under a tag, with the file `checkpoint` first and `done` last; its converter writes a bare `model` folder
without either; version 1 has a folder (or, as xser, a file) per rank and no tags. The path may be any of these: a
`model` folder, its parent, or the folder of tags. Of several finished tags, the one with the highest step in its name
counts; file times, which a copy changes, do not.

Cost: one listing per folder.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import LayoutVersion, NxdOptions
from lt_ckpt.records import NXD_BEGIN_MARKER, NXD_DONE_MARKER

_V1 = re.compile(r"tp_rank_([0-9]{2,})_pp_rank_([0-9]{2,})")
_V2 = re.compile(r"dp_rank_([0-9]{2,})_tp_rank_([0-9]{2,})_pp_rank_([0-9]{2,})\.pt")
_V2_FILE = "dp_rank_{:02d}_tp_rank_{:02d}_pp_rank_{:02d}.pt"


@dataclass(frozen=True, kw_only=True)
class NxdFiles:
    """NxD checkpoint on disk.

    Attributes:
        root: The folder above `model` (v2), or that of the ranks (v1).
        layout: Version of its paths.
        tag: The name of `root` if it has the markers of a tag.
        tp: Tensor-parallel degree, by the names of the files.
        pp: Pipeline stages.
        file_per_rank: Version 1 with a file, not a folder, per rank.
        skipped_tags: Sibling tags that are unfinished or older, newest first.
    """

    root: Path
    layout: LayoutVersion
    tag: str = ""
    tp: int
    pp: int
    file_per_rank: bool = False
    skipped_tags: tuple[str, ...] = ()

    def model_file(self, tp_rank: int, pp_rank: int) -> str:
        """Return the path of a rank's model file, relative to `root`."""
        return rank_path(NxdOptions(layout=self.layout, xser=self.file_per_rank), tp_rank, pp_rank)


def find_nxd_files(path: str | os.PathLike[str]) -> NxdFiles:
    """Find the checkpoint of a path.

    Args:
        path: A folder: of tags, of one tag, `model` itself, or of version 1.

    Raises:
        CheckpointError: There is none, it is unfinished, a rank's file is missing, or the choice is ambiguous.
    """
    folder = Path(os.path.abspath(path))
    with translate_os_errors("looking for an NxD checkpoint", folder):
        names = sorted(os.listdir(folder))
        if any(_V1.fullmatch(name) for name in names):
            return _find_v1(folder, names)
        if folder.name == "model" and any(map(_V2.fullmatch, names)):
            return _find_v2(folder.parent)
        if (folder / "model").is_dir():
            return _find_v2(folder)
        tags = [name for name in names if (folder / name / "model").is_dir()]
        chosen, skipped_tags = _newest_finished_tag(folder, tags)
        return _find_v2(folder / chosen, skipped_tags)


def _list_markers(folder: Path) -> set[str]:
    return {name for name in (NXD_BEGIN_MARKER, NXD_DONE_MARKER) if (folder / name).is_file()}


def _newest_finished_tag(folder: Path, tags: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Return the finished tag of the highest step, and the others."""

    def steps(tag: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall("[0-9]+", tag))

    ordered = sorted(tags, key=lambda tag: (steps(tag), tag), reverse=True)
    finished = [tag for tag in ordered if len(_list_markers(folder / tag)) != 1]
    if not finished:
        unfinished = f": {', '.join(ordered)} lack the marker {NXD_DONE_MARKER!r}" if ordered else ""
        raise CheckpointError(
            f"{folder}: no finished NxD checkpoint here{unfinished}; expected rank files in model/, TAG/model/ or "
            "tp_rank_00_pp_rank_00/"
        )
    if len(finished) > 1 and steps(finished[0]) == steps(finished[1]):
        raise CheckpointError(
            f"{folder}: tags {finished[0]} and {finished[1]}: neither is newer by its name; give the folder of one"
        )
    return finished[0], tuple(tag for tag in ordered if tag != finished[0])


def _find_v2(root: Path, skipped_tags: tuple[str, ...] = ()) -> NxdFiles:
    markers = _list_markers(root)
    if len(markers) == 1:
        (missing,) = {NXD_BEGIN_MARKER, NXD_DONE_MARKER} - markers
        raise CheckpointError(
            f"{root}: the marker {missing!r} is missing: its save or its removal was not finished; use another "
            "checkpoint"
        )
    folder = root / "model"
    names = os.listdir(folder)
    if any(int(match[1]) for name in names if (match := _V2.fullmatch(name))):
        raise CheckpointError(
            f"{folder}: model files of several data-parallel ranks; keep only those of dp_rank_00 there"
        )
    _, tp, pp = _infer_degrees(folder, names, _V2, _V2_FILE)
    return NxdFiles(root=root, layout="v2", tag=root.name if markers else "", tp=tp, pp=pp, skipped_tags=skipped_tags)


def _find_v1(root: Path, names: list[str]) -> NxdFiles:
    _, tp, pp = _infer_degrees(root, names, _V1, "tp_rank_{1:02d}_pp_rank_{2:02d}")
    kinds = {(root / name).is_file() for name in names if _V1.fullmatch(name)}
    if len(kinds) > 1:
        raise CheckpointError(f"{root}: some ranks are files and some folders; these are two checkpoints")
    return NxdFiles(root=root, layout="v1", tp=tp, pp=pp, file_per_rank=kinds.pop())


def _infer_degrees(folder: Path, names: list[str], pattern: re.Pattern[str], template: str) -> tuple[int, int, int]:
    """Return the degrees (dp, tp, pp) of the ranks in a folder, all of which must exist."""
    ranks = {(0, *map(int, match.groups()))[-3:] for name in names if (match := pattern.fullmatch(name))}
    if not ranks:
        raise CheckpointError(f"{folder}: no rank file here, none like {template.format(0, 0, 0)}")
    dp, tp, pp = (max(axis) + 1 for axis in zip(*ranks, strict=True))
    # lazily, so no `product`: a rank in a name may be huge
    expected = ((d, t, p) for d in range(dp) for t in range(tp) for p in range(pp))
    missing = next((rank for rank in expected if rank not in ranks), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder / template.format(*missing)}: is missing; the other files are of dp {dp}, tp {tp} and pp {pp}; "
            "copy it too"
        )
    return dp, tp, pp


def has_optimizer_files(nxd_files: NxdFiles) -> bool:
    """Return True if a checkpoint has the folder of optimizer states."""
    return nxd_files.layout == "v2" and (nxd_files.root / "optim").is_dir()


def optimizer_dp_degree(nxd_files: NxdFiles) -> int:
    """Return the number of data-parallel ranks over which the optimizer state is sharded (ZeRO-1).

    Raises:
        CheckpointError: There is none, or a rank's file is missing.
    """
    folder = nxd_files.root / "optim"
    if not has_optimizer_files(nxd_files):
        raise CheckpointError(f"{nxd_files.root}: has no optimizer state (no folder optim in it)")
    with translate_os_errors("looking for optimizer states", folder):
        return _infer_degrees(folder, os.listdir(folder), _V2, _V2_FILE)[0]
