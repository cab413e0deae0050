"""NxD files of one rank of a training program, written into a checkpoint of ours.

The checkpoint's folder is an NxD tag: `model/` and `optim/` with a file per rank, `checkpoint` and `done`, so that
NxD's own loader accepts it; our manifest, hashes and COMMIT are beside them, so that it is verified, kept, uploaded,
resumed and converted like any other checkpoint. The manifest records for every model tensor which bytes of which file
hold which box of it, by the names that all engines use: `weights` are those that the optimizer updates, so the fp32
master weights if there are any, and then the model files' rounded ones are `cast_weights`; a tied head is a replica of
the embedding. Both are derived from the layout (`nxd/layout.py`): a file's tensor consists of boxes of rows, and those
of a ZeRO-1 shard are sliced once more along the rows (`zero1.py`, `zero1_writer.py`).

Model files are written by data-parallel rank 0; states by all data-parallel ranks, without ZeRO-1 by rank 0 too. What
several ranks hold alike (norms, repeated key/value heads) is in the files of all of them; the first rank's is the
tensor's slice, the others' are replicas.

Cost: the rank's bytes written once, and read once for their hashes; the manifest has an entry per tensor, rank and
kind of state.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.integrity import hash_file
from lt_ckpt.laid_out_files import Place, pwrite
from lt_ckpt.layout import TensorLayout, slice_rows
from lt_ckpt.llama_tensors import EMBED, HEAD, MASTER_WEIGHTS, tensor_shapes
from lt_ckpt.nxd.layout import rank_path, rank_tensors
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import info_path, lay_out, tensor_path
from lt_ckpt.nxd.zero1 import shard_rows
from lt_ckpt.nxd.zero1_writer import MOMENTS, build_state_tree, lay_out_state
from lt_ckpt.records import FileRecords, TensorRecord, TensorRecords
from lt_ckpt.shards import Shard
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import write_pt
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

WEIGHTS = "weights"
CAST_WEIGHTS = "cast_weights"
"""Group of the weights used in forward and backward, if the optimizer updates master weights instead."""


def optimizer_state_keys(config: ModelConfig, options: NxdOptions, tp_rank: int, pp_rank: int) -> tuple[str, ...]:
    """Return the keys of a rank's tensors with optimizer state, in the order of its model file."""
    shared = config.tie_word_embeddings and options.pp == 1
    keys = (tensor.key for tensor in rank_tensors(config, options, tp_rank, pp_rank))
    return tuple(key for key in keys if not (shared and key == HEAD))


@dataclass(frozen=True, kw_only=True)
class NxdRankWriter:
    """Writer of one rank's files of an NxD checkpoint, for `lt_ckpt.write_rank_files`.

    Its shards are tensors by NxD's keys, as the rank holds them: `global_shape` is the shape of the tensor-parallel
    rank's tensor, `offset` and `shape` some of its rows. `weights` has all tensors of the rank's model file, whole, and
    only on data-parallel rank 0; the slots and, where there are any, `master` have the rows of this rank's ZeRO-1 shard
    (`lt_ckpt.nxd.zero1.shard_rows`), without ZeRO-1 all rows and only on rank 0. A head that is tied on the only stage
    has no state of its own.

    Attributes:
        config: The model.
        options: Degrees and choices: layout v2, without a tag.
        dp: Data-parallel degree.
        dp_rank: This rank's data-parallel rank.
        tp_rank: Its tensor-parallel rank.
        pp_rank: Its stage.
        zero1: Whether the state is sharded over the data-parallel ranks.
        step: Optimizer steps taken.
        slots: The optimizer's slots, each of the shape of its weight; torch's AdamW by default.
        dtypes: Kind of state → dtype of tensors that are only padding on this rank.
        param_group_settings: The optimizer's settings (lr, betas, eps, weight_decay), a mapping per param group.
        param_group_keys: NxD's keys of each param group; each of the rank's tensors with state is in one of them.
        scheduler_state: Content of `scheduler.pt`; not written if empty.
        user_content: Content of `user_content.pt`; not written if empty.
    """

    config: ModelConfig
    options: NxdOptions
    dp: int = 1
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    zero1: bool = True
    step: int = 0
    slots: Sequence[str] = MOMENTS
    dtypes: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys((*MOMENTS, MASTER_WEIGHTS), "F32"))
    param_group_settings: Sequence[Mapping[str, Any]] = ({},)
    param_group_keys: Sequence[Sequence[str]] = ()
    scheduler_state: Mapping[str, Any] = field(default_factory=dict)
    user_content: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.options.layout, self.options.tag) == ("v2", ""), "the checkpoint's folder is the tag"
        expected = optimizer_state_keys(self.config, self.options, self.tp_rank, self.pp_rank)
        assert sorted(self._numbered_keys()) == sorted(expected), "param groups: not the rank's tensors"

    def _numbered_keys(self) -> list[str]:
        """Return NxD's keys of the tensors with optimizer state, in the order of their numbers."""
        return [key for keys in self.param_group_keys for key in keys]

    def model_tensors(self) -> tuple[TensorLayout, ...]:
        """Return the tensors of this rank's model file, in its order."""
        return rank_tensors(self.config, self.options, self.tp_rank, self.pp_rank)

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[FileRecords, TensorRecords]:
        """Write this rank's files (see `lt_ckpt.save.RankFileWriter`)."""
        shards = list(shards)
        waiting = {(shard.group, shard.name): shard for shard in shards if prod(shard.shape)}
        assert len(waiting) == sum(prod(shard.shape) > 0 for shard in shards), "a tensor is given twice"
        has_masters = any(shard.group == MASTER_WEIGHTS for shard in shards)
        tensors = {tensor.key: tensor for tensor in self.model_tensors()}
        records = _TensorRecordBuilder(self.config, folder, has_master_weights=has_masters)
        written: list[str] = []
        if self.dp_rank == 0:
            found = {key: _take(waiting, WEIGHTS, tensor, 0, tensor.shape[0]) for key, tensor in tensors.items()}
            specs = OrderedDict((key, TensorSpec(shard.dtype, shard.shape)) for key, shard in found.items())
            path = rank_path(self.options, self.tp_rank, self.pp_rank)
            placed = lay_out(folder / path, specs, xser=self.options.xser, tensor_files=TensorFiles())
            for key, shard in found.items():
                records.write(placed[key], shard, tensors[key])
            written += _files_of(folder, path)
        if self.dp_rank == 0 or self.zero1:
            written += self._write_state(folder, waiting, tensors, records)
        assert not waiting, f"no file holds {next(iter(waiting))}"
        if (self.dp_rank, self.tp_rank, self.pp_rank) == (0, 0, 0):
            for name, content in (("scheduler.pt", self.scheduler_state), ("user_content.pt", self.user_content)):
                if content:
                    write_pt(folder / name, dict(content))
                    written.append(name)
        for name in written:
            with open(folder / name, "rb") as file:
                files.fsync(file.fileno())
        for parent in sorted({(folder / name).parent for name in written}):
            files.fsync_folder(parent)
        return {name: hash_file(folder / name) for name in written}, records.records

    def _write_state(
        self,
        folder: Path,
        waiting: dict[tuple[str, str], Shard],
        tensors: Mapping[str, TensorLayout],
        records: "_TensorRecordBuilder",
    ) -> list[str]:
        """Write the optimizer's file; return its paths."""
        dp, dp_rank = (self.dp, self.dp_rank) if self.zero1 else (1, 0)
        kinds = (*self.slots, *([MASTER_WEIGHTS] if records.has_master_weights else []))
        numbered = [tensors[key] for key in self._numbered_keys()]
        found: dict[tuple[str, int], tuple[Shard, TensorLayout]] = {}
        specs: dict[str, dict[str, TensorSpec]] = {kind: {} for kind in kinds}
        for number, tensor in enumerate(numbered):
            first, n_rows, stored = shard_rows(tensor.shape[0], dp, dp_rank)
            for kind in kinds:
                dtype = self.dtypes.get(kind, "")
                if n_rows:
                    shard = _take(waiting, kind, tensor, first, n_rows)
                    found[kind, number], dtype = (shard, slice_rows(tensor, first, n_rows)), shard.dtype
                specs[kind][tensor.key] = TensorSpec(dtype, (stored, *tensor.shape[1:]))
        tree = build_state_tree(
            numbered,
            specs,
            self.param_group_settings,
            [len(keys) for keys in self.param_group_keys],
            without_zero1=not self.zero1 and not records.has_master_weights,
        )
        path = rank_path(self.options, self.tp_rank, self.pp_rank, kind="optim", dp_rank=dp_rank)
        placed = lay_out_state(folder / path, tree, self.step, xser=self.options.xser, tensor_files=TensorFiles())
        for kind in kinds:  # kind by kind, so that a group's slices follow the tensors
            for number in range(len(numbered)):
                if (kind, number) in found:
                    records.write(placed[kind, number], *found[kind, number])
        return _files_of(folder, path)


def _take(waiting: dict[tuple[str, str], Shard], group: str, tensor: TensorLayout, first: int, n_rows: int) -> Shard:
    """Take the shard with these rows of a tensor."""
    shard = waiting.pop((group, tensor.key))
    zeros = (0,) * (len(tensor.shape) - 1)
    expected = tensor.shape, (first, *zeros), (n_rows, *tensor.shape[1:])
    assert (shard.global_shape, shard.offset, shard.shape) == expected, (group, tensor.key, shard.shape, expected)
    return shard


def _files_of(folder: Path, path: str) -> list[str]:
    """Return a file and, of an xser one, those beside it."""
    found = [path, *([info_path(path)] if (folder / info_path(path)).exists() else [])]
    tensors = (folder / tensor_path(path, 0)).parent
    return [*found, *(p.relative_to(folder).as_posix() for p in sorted(tensors.glob("*.pt")))]


class _TensorRecordBuilder:
    """Builder of the tensor records of a rank manifest, which also writes the tensors' bytes."""

    def __init__(self, config: ModelConfig, folder: Path, *, has_master_weights: bool) -> None:
        self._shapes, self._tied, self._folder = tensor_shapes(config), config.tie_word_embeddings, folder
        self._groups = {WEIGHTS: CAST_WEIGHTS, MASTER_WEIGHTS: WEIGHTS} if has_master_weights else {}
        self.has_master_weights = has_master_weights
        self.records: TensorRecords = {}

    def write(self, place: Place, shard: Shard, rows: TensorLayout) -> None:
        """Write a shard, which has these rows, into its room, whose rest is zeros, and record it."""
        pwrite(place, shard.bytes().data)
        path, begin = place
        row_bytes = item_bytes(shard.dtype) * prod(rows.shape[1:])
        members = self.records.setdefault(self._groups.get(shard.group, shard.group), {})
        for region in rows.regions:
            assert region.shape[1:] == rows.shape[1:], "a region consists of whole rows of the stored tensor"
            piece = StoredSlice(
                file=path.relative_to(self._folder).as_posix(),
                key=shard.name,
                byte_offset=begin + region.stored_offset[0] * row_bytes,
                offset=region.offset,
                shape=region.shape,
            )
            name = EMBED if self._tied and region.name == HEAD else region.name
            record = members.get(name, TensorRecord(dtype=shard.dtype, shape=self._shapes[name], slices=()))
            assert record.dtype == shard.dtype, f"{shard.group}/{name}: has two dtypes on one rank"
            members[name] = replace(record, slices=(*record.slices, piece))
