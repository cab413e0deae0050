"""What one rank of a training program saves as files of NxD, in a checkpoint of ours.

The checkpoint's folder is a tag of NxD's: `model/` and `optim/` with a file per rank, `checkpoint` and `done`, so that
NxD's own loader takes it; our manifest, hashes and COMMIT lie beside them, so that it is verified, kept, sent, resumed
and converted as any other checkpoint. The manifest says of every tensor of the model which bytes of which file hold
which box of it, by the names that all engines use: `weights` are those that the optimizer updates, so fp32 masters
where there are any, and then the model files' rounded ones are `cast_weights`; a tied head is a copy of the embedding.
Both are derived from the layout (`nxd/layout.py`): a file's tensor is made of boxes of rows, and those of a ZeRO-1
shard are cut once more along the rows (`zero.py`, `zero_out.py`).

Model files are written by the data-parallel rank 0; states by all data-parallel ranks, without ZeRO-1 by rank 0 too.
What several ranks have alike (norms, repeated key/value heads) is in the files of all of them; the first rank's is the
tensor's slice, the others' are copies.

Cost: the rank's bytes once, hashed on their way; the manifest has a line per tensor, rank and kind of state.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hashed import Ledger
from lt_ckpt.layout import Piece, Placed
from lt_ckpt.models import EMBED, HEAD, shapes_of
from lt_ckpt.nxd.layout import rank_path, rank_tensors
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import XserWriter, tensor_path
from lt_ckpt.nxd.zero import MASTER, shard_rows
from lt_ckpt.nxd.zero_out import MOMENTS, rows_of, state_tree, step_bytes
from lt_ckpt.records import Files, Slice, TensorRecord, Tensors
from lt_ckpt.shards import Shard
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter, write_pt
from lt_model import LlamaConfig

WEIGHTS = "weights"
CAST = "cast_weights"
"""Group of the weights that the layers compute with, where those that the optimizer updates are others."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file: what it is, its bytes (a shard, or known ones, then zeros), and the boxes it is made of."""

    key: str
    group: str
    spec: TensorSpec
    data: Shard | bytes | None
    pieces: tuple[Piece, ...] = ()


def stateful_keys(config: LlamaConfig, options: NxdOptions, tp_rank: int, pp_rank: int) -> tuple[str, ...]:
    """Returns the keys of a rank's tensors that the optimizer has a state of, in the order of its model file."""
    shared = config.tie_word_embeddings and options.pp == 1
    keys = (tensor.key for tensor in rank_tensors(config, options, tp_rank, pp_rank))
    return tuple(key for key in keys if not (shared and key == HEAD))


@dataclass(frozen=True, kw_only=True)
class NxdPart:
    """The place of one rank in an NxD checkpoint, as `lt_ckpt.write_part` takes it.

    Its shards are tensors by NxD's keys, as the rank holds them: `global_shape` is the shape of the tensor-parallel
    rank's tensor, `offset` and `shape` some of its rows. `weights` has all tensors of the rank's model file, whole, and
    only on data-parallel rank 0; `exp_avg`, `exp_avg_sq` and, where there are any, `master` have the rows of this
    rank's ZeRO-1 shard (`lt_ckpt.nxd.zero.shard_rows`), without ZeRO-1 all rows and only on rank 0. A head that is tied
    on the only stage has no state of its own.

    Attributes:
        config: The model.
        options: How it is cut: layout v2, without a tag.
        dp: Data-parallel degree.
        dp_rank: This rank's place among the data-parallel ranks.
        tp_rank: Its place among the tensor-parallel ranks.
        pp_rank: Its stage.
        zero1: Whether the state is cut over the data-parallel ranks.
        step: Updates that the optimizer has made.
        dtypes: Kind of state → dtype of what has padding alone on this rank.
        settings: The optimizer's settings (lr, betas, eps, weight_decay), a mapping per group of parameters.
        groups: NxD's keys of each of these groups; each of the rank's tensors that has a state is in one of them.
        scheduler: What `scheduler.pt` holds; none is written when empty.
        user_content: What `user_content.pt` holds.
    """

    config: LlamaConfig
    options: NxdOptions
    dp: int = 1
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    zero1: bool = True
    step: int = 0
    dtypes: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys((*MOMENTS, MASTER), "F32"))
    settings: Sequence[Mapping[str, Any]] = ({},)
    groups: Sequence[Sequence[str]] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    user_content: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options.layout != "v2" or self.options.tag:
            raise CheckpointError("nxd: a training checkpoint is of layout v2, and its folder is the tag")
        for name, size in (("dp", self.dp), ("tp", self.options.tp), ("pp", self.options.pp)):
            rank = getattr(self, f"{name}_rank")
            if not 0 <= rank < size:
                raise CheckpointError(f"nxd: {name}_rank {rank} is not one of {size}")
        numbered = [key for keys in self.groups for key in keys]
        wanted = stateful_keys(self.config, self.options, self.tp_rank, self.pp_rank)
        if sorted(numbered) != sorted(wanted) or len(self.groups) != len(self.settings):
            unlike = sorted(set(numbered) ^ set(wanted))
            raise CheckpointError(
                f"nxd: the {len(self.groups)} groups of parameters with {len(self.settings)} settings must name each "
                f"tensor of the rank once{f'; {unlike[0]} is not in both' if unlike else ''}"
            )

    def tensors(self) -> tuple[Placed, ...]:
        """The tensors of this rank's model file, in its order."""
        return rank_tensors(self.config, self.options, self.tp_rank, self.pp_rank)

    def stateful(self) -> tuple[Placed, ...]:
        """Those that the optimizer has a state of."""
        keys = set(stateful_keys(self.config, self.options, self.tp_rank, self.pp_rank))
        return tuple(tensor for tensor in self.tensors() if tensor.key in keys)

    def write(self, folder: Path, shards: Iterable[Shard]) -> tuple[Files, Tensors]:
        """Writes this rank's files (see `lt_ckpt.save.PartFiles`).

        Raises:
            CheckpointError: A tensor is missing, unknown or of another shape or dtype than the others of its kind.
        """
        writing = self.dp_rank == 0
        weights = {tensor.key: tensor for tensor in self.tensors()} if writing else {}
        states = {tensor.key: tensor for tensor in self.stateful()} if writing or self.zero1 else {}
        given = _by_name(shards)
        _require_names(given, set(weights), set(states))
        ledger, tensors = Ledger(folder), _Found(self.config, masters=MASTER in given)
        for kind in ("model", "optim"):
            files.make_folders(folder / kind)
        if weights:
            entries = [self._whole(tensor, given[WEIGHTS][key]) for key, tensor in weights.items()]
            tree = OrderedDict((entry.key, entry.spec) for entry in entries)
            self._file(folder, rank_path(self.options, self.tp_rank, self.pp_rank), tree, entries, ledger, tensors)
        if states:
            dp_rank = self.dp_rank if self.zero1 else 0
            path = rank_path(self.options, self.tp_rank, self.pp_rank, kind="optim", dp_rank=dp_rank)
            self._file(folder, path, *self._state(states, given), ledger, tensors)
        for kind in ("model", "optim"):
            files.fsync_folder(folder / kind)
        if (self.dp_rank, self.tp_rank, self.pp_rank) == (0, 0, 0):
            for name, content in (("scheduler.pt", self.scheduler), ("user_content.pt", self.user_content)):
                if content:
                    write_pt(folder / name, dict(content), create=ledger.create)
        return ledger.files, tensors.records

    def _whole(self, tensor: Placed, shard: Shard) -> _Entry:
        _require_rows(shard, tensor, 0, tensor.shape[0])
        return _Entry(tensor.key, WEIGHTS, TensorSpec(shard.dtype, tensor.shape), shard, tensor.pieces)

    def _state(
        self, states: Mapping[str, Placed], given: Mapping[str, Mapping[str, Shard]]
    ) -> tuple[Mapping[str, Any], list[_Entry]]:
        """The tree of the file of states, and its tensors in order."""
        dp, dp_rank = (self.dp, self.dp_rank) if self.zero1 else (1, 0)
        kinds = (*MOMENTS, *([MASTER] if MASTER in given else []))
        found: dict[str, dict[str, _Entry]] = {kind: {} for kind in kinds}
        for kind in kinds:
            for key, tensor in states.items():
                first, held, stored = shard_rows(tensor.shape[0], dp, dp_rank)
                shard = given[kind].get(key)
                if shard is None and held:
                    raise CheckpointError(f"nxd: {kind}/{key}: rows {first} to {first + held} are missing")
                if shard is not None:
                    _require_rows(shard, tensor, first, held)
                dtype = self.dtypes[kind] if shard is None else shard.dtype
                spec = TensorSpec(dtype, (stored, *tensor.shape[1:]))
                pieces = rows_of(tensor, first, held).pieces if held else ()
                found[kind][key] = _Entry(key, kind, spec, shard, pieces)
        numbered = [states[key] for keys in self.groups for key in keys]
        specs = {kind: {key: entry.spec for key, entry in entries.items()} for kind, entries in found.items()}
        plain = not self.zero1 and MASTER not in kinds
        tree = state_tree(numbered, specs, self.settings, [len(keys) for keys in self.groups], plain=plain)
        entries: list[_Entry] = []
        for tensor in numbered:
            entries.append(_Entry(tensor.key, "", TensorSpec("F32", ()), step_bytes(self.step)))
            entries += [found[kind][tensor.key] for kind in MOMENTS]
        entries += [found[MASTER][tensor.key] for tensor in numbered if MASTER in kinds]
        return tree, entries

    def _file(
        self,
        folder: Path,
        path: str,
        tree: Mapping[str, Any],
        entries: Sequence[_Entry],
        ledger: Ledger,
        tensors: "_Found",
    ) -> None:
        """Writes a file, and notes which boxes of the model its tensors hold."""
        opens = XserWriter if self.options.xser else TorchWriter
        writer = opens.of_tree(folder / path, tree, create=ledger.create)
        try:
            for entry in entries:
                for block in _blocks(entry):
                    writer.append(block)
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        begins = writer.begins if isinstance(writer, XserWriter) else writer.records.begins
        for number, (entry, begin) in enumerate(zip(entries, begins, strict=True)):
            tensors.note(entry, tensor_path(path, number) if self.options.xser else path, begin)


class _Found:
    """Which boxes of the model's tensors lie where, as a part list has it."""

    def __init__(self, config: LlamaConfig, *, masters: bool) -> None:
        self._shapes, self._tied = shapes_of(config), config.tie_word_embeddings
        self._groups = {WEIGHTS: CAST, MASTER: WEIGHTS} if masters else {}
        self.records: Tensors = {}

    def note(self, entry: _Entry, file: str, begin: int) -> None:
        """Takes a tensor of a file whose bytes begin there."""
        row_bytes = item_bytes(entry.spec.dtype) * prod(entry.spec.shape[1:])
        for piece in entry.pieces:
            assert piece.shape[1:] == entry.spec.shape[1:], "a box is made of whole rows of the stored tensor"
            at = begin + piece.at[0] * row_bytes
            made = Slice(file=file, key=entry.key, begin=at, offset=piece.offset, shape=piece.shape, xxh3_128="")
            members = self.records.setdefault(self._groups.get(entry.group, entry.group), {})
            name = EMBED if self._tied and piece.name == HEAD else piece.name
            record = members.get(name)
            if record is None:
                record = TensorRecord(dtype=entry.spec.dtype, shape=self._shapes[name], slices=())
            if record.dtype != entry.spec.dtype:
                raise CheckpointError(f"nxd: {entry.group}/{name}: has two dtypes on one rank")
            members[name] = replace(record, slices=(*record.slices, made))


def _by_name(shards: Iterable[Shard]) -> dict[str, dict[str, Shard]]:
    """Group → NxD's key → shard; shards without elements are left out."""
    found: dict[str, dict[str, Shard]] = {kind: {} for kind in (WEIGHTS, *MOMENTS)}
    for shard in shards:
        members = found.setdefault(shard.group, {})
        if shard.name in members:
            raise CheckpointError(f"nxd: {shard.group}/{shard.name}: is given twice")
        if prod(shard.shape):
            members[shard.name] = shard
    return found


def _require_names(given: Mapping[str, Mapping[str, Shard]], weights: set[str], states: set[str]) -> None:
    """Checks that all weights are there, and that nothing is there that no file would get."""
    for kind, members in given.items():
        known = weights if kind == WEIGHTS else states if kind in (*MOMENTS, MASTER) else set[str]()
        unknown = sorted(set(members) - known)
        if unknown:
            raise CheckpointError(f"nxd: {kind}/{unknown[0]}: this rank writes no such tensor")
    lacking = sorted(weights - set(given[WEIGHTS]))
    if lacking:
        raise CheckpointError(f"nxd: {WEIGHTS}/{lacking[0]}: is missing")


def _require_rows(shard: Shard, tensor: Placed, first: int, held: int) -> None:
    zeros = (0,) * (len(tensor.shape) - 1)
    wanted = (tensor.shape, (first, *zeros), (held, *tensor.shape[1:]))
    if (shard.global_shape, shard.offset, shard.shape) != wanted:
        raise CheckpointError(
            f"nxd: {shard.group}/{shard.name}: is at {list(shard.offset)} of shape {list(shard.shape)} in "
            f"{list(shard.global_shape)}, this rank has {list(wanted[2])} at {list(wanted[1])} in {list(wanted[0])}"
        )


def _blocks(entry: _Entry) -> Iterator[np.ndarray]:
    """The bytes of a tensor: its rows, then rows of zeros as padding."""
    if isinstance(entry.data, bytes):
        yield np.frombuffer(entry.data, np.uint8)
        return
    n_bytes = entry.spec.n_bytes
    if entry.data is not None:
        yield entry.data.bytes()
        n_bytes -= entry.data.n_bytes
    for start in range(0, n_bytes, files.BLOCK_BYTES):
        yield np.zeros(min(files.BLOCK_BYTES, n_bytes - start), np.uint8)
