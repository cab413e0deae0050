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

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.file_recorder import hash_file
from lt_ckpt.laid_out_files import Place, pwrite
from lt_ckpt.layout import TensorLayout, TensorRegion
from lt_ckpt.llama_tensors import EMBED, HEAD, MASTER_WEIGHTS, tensor_shapes
from lt_ckpt.nxd.layout import rank_path, rank_tensors
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import info_path, lay_out, tensor_path
from lt_ckpt.nxd.zero1 import MASTER_WEIGHTS_KEY, STATE_KEY, shard_rows
from lt_ckpt.nxd.zero1_writer import MOMENTS, build_state_tree, encode_step, slice_rows
from lt_ckpt.records import FileRecords, SliceRecord, TensorRecord, TensorRecords
from lt_ckpt.shards import Shard
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import write_pt
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

WEIGHTS = "weights"
CAST_WEIGHTS = "cast_weights"
"""Group of the weights used in forward and backward, if the optimizer updates master weights instead."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Tensor of a file: key, spec, the shard with its first rows, and regions."""

    key: str
    group: str
    spec: TensorSpec
    data: Shard | None
    regions: tuple[TensorRegion, ...] = ()


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
        if self.options.layout != "v2" or self.options.tag:
            raise CheckpointError("nxd: a training checkpoint must have layout v2 and no tag (its folder is the tag)")
        for name, size in (("dp", self.dp), ("tp", self.options.tp), ("pp", self.options.pp)):
            rank = getattr(self, f"{name}_rank")
            if not 0 <= rank < size:
                raise CheckpointError(f"nxd: {name}_rank = {rank}: must be from 0 to {size - 1}")
        numbered = [key for keys in self.param_group_keys for key in keys]
        expected = optimizer_state_keys(self.config, self.options, self.tp_rank, self.pp_rank)
        if sorted(numbered) != sorted(expected) or len(self.param_group_keys) != len(self.param_group_settings):
            differing = sorted(set(numbered) ^ set(expected))
            raise CheckpointError(
                f"nxd: the {len(self.param_group_keys)} param groups with {len(self.param_group_settings)} settings "
                f"must name each tensor of the rank once{f'; {differing[0]} is not in both' if differing else ''}"
            )

    def model_tensors(self) -> tuple[TensorLayout, ...]:
        """Return the tensors of this rank's model file, in its order."""
        return rank_tensors(self.config, self.options, self.tp_rank, self.pp_rank)

    def optimizer_state_tensors(self) -> tuple[TensorLayout, ...]:
        """Return the tensors with optimizer state."""
        keys = set(optimizer_state_keys(self.config, self.options, self.tp_rank, self.pp_rank))
        return tuple(tensor for tensor in self.model_tensors() if tensor.key in keys)

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[FileRecords, TensorRecords]:
        """Write this rank's files (see `lt_ckpt.save.RankFileWriter`).

        Raises:
            CheckpointError: A tensor is missing, unknown, or has another shape or dtype than the others of its kind.
        """
        writes_model = self.dp_rank == 0
        weights = {tensor.key: tensor for tensor in self.model_tensors()} if writes_model else {}
        states = {tensor.key: tensor for tensor in self.optimizer_state_tensors()} if writes_model or self.zero1 else {}
        shards_by_group = _group_by_name(shards, self.slots)
        _check_names(shards_by_group, set(weights), set(states), self.slots)
        records = _TensorRecordBuilder(self.config, has_master_weights=MASTER_WEIGHTS in shards_by_group)
        for kind in ("model", "optim"):
            files.make_folders(folder / kind)
        written: list[str] = []
        if weights:
            entries = [self._model_entry(tensor, shards_by_group[WEIGHTS][key]) for key, tensor in weights.items()]
            path = rank_path(self.options, self.tp_rank, self.pp_rank)
            placed = self._lay_out(folder / path, OrderedDict((entry.key, entry.spec) for entry in entries))
            for entry in entries:
                _write_entry(folder, entry, placed[entry.key], records)
            written += _files_of(folder, path)
        if states:
            dp_rank = self.dp_rank if self.zero1 else 0
            path = rank_path(self.options, self.tp_rank, self.pp_rank, kind="optim", dp_rank=dp_rank)
            tree, entries_by_kind = self._optimizer_entries(states, shards_by_group)
            placed = self._lay_out(folder / path, tree)
            for number, key in enumerate(key for keys in self.param_group_keys for key in keys):
                states_of_key = placed[STATE_KEY if STATE_KEY in placed else "state"][number]
                pwrite(states_of_key["step"], memoryview(encode_step(self.step)))
                for kind, entries_by_key in entries_by_kind.items():
                    place = placed[MASTER_WEIGHTS_KEY][number] if kind == MASTER_WEIGHTS else states_of_key[kind]
                    _write_entry(folder, entries_by_key[key], place, records)
            written += _files_of(folder, path)
        if (self.dp_rank, self.tp_rank, self.pp_rank) == (0, 0, 0):
            for name, content in (("scheduler.pt", self.scheduler_state), ("user_content.pt", self.user_content)):
                if content:
                    write_pt(folder / name, dict(content))
                    written.append(name)
        for name in written:
            descriptor = files.open_for_reading(folder / name)
            try:
                files.fsync(descriptor)
            finally:
                os.close(descriptor)
        for parent in sorted({(folder / name).parent for name in written}):
            files.fsync_folder(parent)
        return {name: hash_file(folder / name) for name in written}, records.records

    def _lay_out(self, path: Path, tree: Any) -> Any:
        return lay_out(path, tree, xser=self.options.xser, tensor_files=TensorFiles())

    def _model_entry(self, tensor: TensorLayout, shard: Shard) -> _Entry:
        _check_rows(shard, tensor, 0, tensor.shape[0])
        return _Entry(tensor.key, WEIGHTS, TensorSpec(shard.dtype, tensor.shape), shard, tensor.regions)

    def _optimizer_entries(
        self, states: Mapping[str, TensorLayout], shards_by_group: Mapping[str, Mapping[str, Shard]]
    ) -> tuple[Mapping[str, Any], dict[str, dict[str, _Entry]]]:
        """Return the tree of the optimizer file, and kind → NxD's key → tensor."""
        dp, dp_rank = (self.dp, self.dp_rank) if self.zero1 else (1, 0)
        kinds = (*self.slots, *([MASTER_WEIGHTS] if MASTER_WEIGHTS in shards_by_group else []))
        found: dict[str, dict[str, _Entry]] = {kind: {} for kind in kinds}
        for kind in kinds:
            for key, tensor in states.items():
                first, n_rows, stored = shard_rows(tensor.shape[0], dp, dp_rank)
                shard = shards_by_group[kind].get(key)
                if shard is None and n_rows:
                    raise CheckpointError(f"nxd: {kind}/{key}: rows {first} to {first + n_rows} are missing")
                if shard is not None:
                    _check_rows(shard, tensor, first, n_rows)
                dtype = self.dtypes[kind] if shard is None else shard.dtype
                spec = TensorSpec(dtype, (stored, *tensor.shape[1:]))
                regions = slice_rows(tensor, first, n_rows).regions if n_rows else ()
                found[kind][key] = _Entry(key, kind, spec, shard, regions)
        numbered = [states[key] for keys in self.param_group_keys for key in keys]
        specs = {kind: {key: entry.spec for key, entry in entries.items()} for kind, entries in found.items()}
        without_zero1 = not self.zero1 and MASTER_WEIGHTS not in kinds
        tree = build_state_tree(
            numbered,
            specs,
            self.param_group_settings,
            [len(keys) for keys in self.param_group_keys],
            without_zero1=without_zero1,
        )
        return tree, found


def _files_of(folder: Path, path: str) -> list[str]:
    """Return a file and, of an xser one, those beside it."""
    found = [path, *([info_path(path)] if (folder / info_path(path)).exists() else [])]
    tensors = (folder / tensor_path(path, 0)).parent
    return [*found, *(p.relative_to(folder).as_posix() for p in sorted(tensors.glob("*.pt")))]


def _write_entry(folder: Path, entry: _Entry, place: Place, records: "_TensorRecordBuilder") -> None:
    """Write the rows of a tensor into its room, whose rest is zeros, and record them."""
    path, byte_offset = place
    if entry.data is not None:
        pwrite(place, entry.data.bytes().data)
    records.add(entry, path.relative_to(folder).as_posix(), byte_offset)


class _TensorRecordBuilder:
    """Builder of the tensor records of a rank manifest."""

    def __init__(self, config: ModelConfig, *, has_master_weights: bool) -> None:
        self._shapes, self._tied = tensor_shapes(config), config.tie_word_embeddings
        self._groups = {WEIGHTS: CAST_WEIGHTS, MASTER_WEIGHTS: WEIGHTS} if has_master_weights else {}
        self.records: TensorRecords = {}

    def add(self, entry: _Entry, file: str, begin: int) -> None:
        """Add a tensor of a file whose bytes begin at `begin`."""
        row_bytes = item_bytes(entry.spec.dtype) * prod(entry.spec.shape[1:])
        for region in entry.regions:
            assert region.shape[1:] == entry.spec.shape[1:], "a region consists of whole rows of the stored tensor"
            at = begin + region.stored_offset[0] * row_bytes
            slice_record = SliceRecord(
                file=file, key=entry.key, byte_offset=at, offset=region.offset, shape=region.shape, xxh3_128=""
            )
            members = self.records.setdefault(self._groups.get(entry.group, entry.group), {})
            name = EMBED if self._tied and region.name == HEAD else region.name
            record = members.get(name)
            if record is None:
                record = TensorRecord(dtype=entry.spec.dtype, shape=self._shapes[name], slices=())
            if record.dtype != entry.spec.dtype:
                raise CheckpointError(f"nxd: {entry.group}/{name}: has two dtypes on one rank")
            members[name] = replace(record, slices=(*record.slices, slice_record))


def _group_by_name(shards: Iterable[Shard], slots: Sequence[str]) -> dict[str, dict[str, Shard]]:
    """Return group → NxD's key → shard; shards without elements are left out."""
    found: dict[str, dict[str, Shard]] = {kind: {} for kind in (WEIGHTS, *slots)}
    for shard in shards:
        members = found.setdefault(shard.group, {})
        if shard.name in members:
            raise CheckpointError(f"nxd: {shard.group}/{shard.name}: duplicate")
        if prod(shard.shape):
            members[shard.name] = shard
    return found


def _check_names(
    shards_by_group: Mapping[str, Mapping[str, Shard]], weights: set[str], states: set[str], slots: Sequence[str]
) -> None:
    """Check that all weights are given, and no tensor that no file would hold."""
    for kind, members in shards_by_group.items():
        known = weights if kind == WEIGHTS else states if kind in (*slots, MASTER_WEIGHTS) else set[str]()
        unknown = sorted(set(members) - known)
        if unknown:
            raise CheckpointError(f"nxd: {kind}/{unknown[0]}: not a tensor of this rank")
    missing = sorted(weights - set(shards_by_group[WEIGHTS]))
    if missing:
        raise CheckpointError(f"nxd: {WEIGHTS}/{missing[0]}: is missing")


def _check_rows(shard: Shard, tensor: TensorLayout, first: int, n_rows: int) -> None:
    zeros = (0,) * (len(tensor.shape) - 1)
    expected = (tensor.shape, (first, *zeros), (n_rows, *tensor.shape[1:]))
    if (shard.global_shape, shard.offset, shard.shape) != expected:
        raise CheckpointError(
            f"nxd: {shard.group}/{shard.name}: is at {list(shard.offset)} of shape {list(shard.shape)} in "
            f"{list(shard.global_shape)}, this rank has {list(expected[2])} at {list(expected[1])} in "
            f"{list(expected[0])}"
        )
