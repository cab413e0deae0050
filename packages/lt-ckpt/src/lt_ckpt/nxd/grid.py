"""Finding an NxD checkpoint on disk: its folder, its version, and its grid of rank files.

NxD saves under a tag, with the file `checkpoint` first and `done` last; its converter writes a bare `model` folder
without either; version 1 has a folder (or, as xser, a file) per rank and no tags. What is given may be any of these: a
`model` folder, that above it, or the one of the tags. Of several finished tags, the one with the highest step in its
name counts; times of files, which a copy changes, do not.

Cost: one listing per folder.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions, Version
from lt_ckpt.records import BEGUN, DONE

_V1 = re.compile(r"tp_rank_([0-9]{2,})_pp_rank_([0-9]{2,})")
_V2 = re.compile(r"dp_rank_([0-9]{2,})_tp_rank_([0-9]{2,})_pp_rank_([0-9]{2,})\.pt")
_EXPERTS = re.compile(r"dp_rank_[0-9]{2,}_ep_rank_[0-9]{2,}_tp_rank_[0-9]{2,}_pp_rank_[0-9]{2,}\.pt")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        root: The folder above `model` (v2), or that of the ranks (v1).
        layout: Which version's paths it has.
        tag: The name of `root`, where it has the markers of a tag.
        tp: Tensor-parallel degree, by the names of the files.
        pp: Pipeline stages.
        bare: Version 1 with a file, not a folder, per rank.
        passed_over: Tags beside it that are not finished or older, the newest first.
    """

    root: Path
    layout: Version
    tag: str = ""
    tp: int
    pp: int
    bare: bool = False
    passed_over: tuple[str, ...] = ()

    def path(self, tp_rank: int, pp_rank: int) -> str:
        """Path of a rank's model file, from `root`."""
        return rank_path(NxdOptions(layout=self.layout, xser=self.bare), tp_rank, pp_rank)


def find(path: str | os.PathLike[str], *, tag: str = "") -> Found:
    """Finds the checkpoint that a path means.

    Args:
        path: A folder: of tags, of one tag, `model` itself, or of version 1.
        tag: Which tag of a folder of tags.

    Raises:
        CheckpointError: There is none, it is not finished, a rank's file is missing, or which is meant is not clear.
    """
    folder = Path(os.path.abspath(path))
    with storage("looking for an NxD checkpoint", folder):
        names = sorted(os.listdir(folder))
        if any(_V1.fullmatch(name) for name in names):
            return _version_1(folder, names)
        if folder.name == "model" and any(_V2.fullmatch(name) or _EXPERTS.fullmatch(name) for name in names):
            return _version_2(folder.parent)
        if (folder / "model").is_dir():
            return _version_2(folder)
        tags = [name for name in names if (folder / name / "model").is_dir()]
        if tag:
            if tag not in tags:
                raise CheckpointError(f"{folder}: has no tag {tag!r}; it has {', '.join(tags) or 'none'}")
            return _version_2(folder / tag)
        chosen, passed_over = _newest(folder, tags)
        return _version_2(folder / chosen, passed_over)


def _markers(folder: Path) -> set[str]:
    return {name for name in (BEGUN, DONE) if (folder / name).is_file()}


def _newest(folder: Path, tags: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Returns the finished tag of the highest step, and the others."""

    def steps(tag: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall("[0-9]+", tag))

    ordered = sorted(tags, key=lambda tag: (steps(tag), tag), reverse=True)
    finished = [tag for tag in ordered if len(_markers(folder / tag)) != 1]
    if not finished:
        unfinished = f": {', '.join(ordered)} lack the marker {DONE!r}" if ordered else ""
        raise CheckpointError(
            f"{folder}: no finished NxD checkpoint here{unfinished}; expected rank files in model/, TAG/model/ or "
            "tp_rank_00_pp_rank_00/"
        )
    if len(finished) > 1 and steps(finished[0]) == steps(finished[1]):
        raise CheckpointError(
            f"{folder}: the tags {finished[0]} and {finished[1]} do not tell which is newer; give the folder of one"
        )
    return finished[0], tuple(tag for tag in ordered if tag != finished[0])


def _version_2(root: Path, passed_over: tuple[str, ...] = ()) -> Found:
    markers = _markers(root)
    if len(markers) == 1:
        (lacking,) = {BEGUN, DONE} - markers
        raise CheckpointError(
            f"{root}: the marker {lacking!r} is missing: saving it was not finished, or removing it; use another "
            "checkpoint"
        )
    folder = root / "model"
    names = os.listdir(folder)
    if any(_EXPERTS.fullmatch(name) for name in names):
        raise CheckpointError(f"{folder}: is cut by experts (ep_rank); only Llama is known, which has none")
    ranks = [tuple(map(int, match.groups())) for name in names if (match := _V2.fullmatch(name))]
    if any(rank[0] for rank in ranks):
        raise CheckpointError(
            f"{folder}: model files of several data-parallel ranks; keep only those of dp_rank_00 there"
        )
    tp, pp = _grid(folder, [rank[1:] for rank in ranks], "dp_rank_00_tp_rank_{:02d}_pp_rank_{:02d}.pt")
    return Found(root=root, layout="v2", tag=root.name if markers else "", tp=tp, pp=pp, passed_over=passed_over)


def _version_1(root: Path, names: list[str]) -> Found:
    ranks = [match for name in names if (match := _V1.fullmatch(name))]
    tp, pp = _grid(root, [tuple(map(int, match.groups())) for match in ranks], "tp_rank_{:02d}_pp_rank_{:02d}")
    kinds = {(root / match[0]).is_file() for match in ranks}
    if len(kinds) > 1:
        raise CheckpointError(f"{root}: some ranks are files and some folders; these are two checkpoints")
    return Found(root=root, layout="v1", tp=tp, pp=pp, bare=kinds.pop())


def _grid(folder: Path, ranks: list[tuple[int, ...]], name: str) -> tuple[int, int]:
    """Returns the degrees that the ranks make, all of which must be there."""
    if not ranks:
        raise CheckpointError(f"{folder}: no rank file here, none like {name.format(0, 0)}")
    tp, pp = (max(rank[axis] for rank in ranks) + 1 for axis in (0, 1))
    there = set(ranks)
    every = ((tp_rank, pp_rank) for tp_rank in range(tp) for pp_rank in range(pp))  # never all: a name may be nonsense
    missing = next((rank for rank in every if rank not in there), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder / name.format(*missing)}: is missing; the other files are of tp {tp} and pp {pp}; copy it too"
        )
    return tp, pp


def find_optimizer(found: Found) -> int:
    """Returns over how many data-parallel ranks the optimizer's state is cut (ZeRO-1).

    Raises:
        CheckpointError: There is none, or a rank's file is missing.
    """
    folder = found.root / "optim"
    if found.layout == "v1" or not folder.is_dir():
        raise CheckpointError(f"{found.root}: has no optimizer state (no folder optim in it)")
    with storage("looking for optimizer states", folder):
        names = os.listdir(folder)
    ranks = {tuple(map(int, match.groups())) for name in names if (match := _V2.fullmatch(name))}
    if not ranks:
        raise CheckpointError(f"{folder}: has no file like {rank_path(NxdOptions(), 0, 0, kind='optim')}")
    dp, tp, pp = (max(rank[axis] for rank in ranks) + 1 for axis in range(3))
    if (tp, pp) != (found.tp, found.pp):
        raise CheckpointError(f"{folder}: is of tp {tp} and pp {pp}, the model of tp {found.tp} and pp {found.pp}")
    every = ((d, t, p) for d in range(dp) for t in range(tp) for p in range(pp))
    missing = next((rank for rank in every if rank not in ranks), None)
    if missing is not None:
        d, t, p = missing
        name = rank_path(NxdOptions(), t, p, kind="optim", dp_rank=d)
        raise CheckpointError(f"{found.root / name}: is missing; the other files are of {dp} data-parallel ranks")
    return dp
