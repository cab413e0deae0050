"""Options of a neuronx-distributed (NxD) checkpoint, and checks that a model can be sharded so.

`NxdOptions` holds the choices; `check_sharding` refuses those that do not fit a model, before anything is read or
written: NxD's own converter silently drops half of the query heads for some of them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from lt_ckpt.errors import CheckpointError
from lt_model import ModelConfig

Qkv = Literal["separate", "coalesced", "gqa", "gqa_fused"]
LayoutVersion = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True)
class NxdOptions:
    """Choices of an NxD checkpoint.

    Attributes:
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        virtual_pp: Chunks of layers per stage (interleaved schedule).
        kv_size_multiplier: Repetitions of each key/value head, so that every rank has one.
        qkv: `separate` q_proj, k_proj, v_proj; `coalesced`: one qkv_proj.weight; `gqa`: weight_q, weight_k, weight_v of
            NxD's GQA layer (qkv_linear); `gqa_fused`: its weight_qkv (fuse_qkv).
        layout: `v1`: tp_rank_00_pp_rank_00/checkpoint.pt; `v2`: model/dp_rank_00_tp_rank_00_pp_rank_00.pt.
        xser: Every tensor in a file of its own.
        tag: Folder of a v2 checkpoint in its root, with the markers `checkpoint` and `done`; empty: none, as NxD's
            converter writes.
        stage_layers: The layers of each stage, if other than NxD's default partition (its `pipeline_cuts`).
    """

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    kv_size_multiplier: int = 1
    qkv: Qkv = "separate"
    layout: LayoutVersion = "v2"
    xser: bool = False
    tag: str = ""
    stage_layers: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "virtual_pp", "kv_size_multiplier"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} = {value!r}: must be a whole number of at least 1")
        for name, known in (("qkv", Qkv), ("layout", LayoutVersion)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise CheckpointError(f"{name} = {value!r}: must be one of {', '.join(get_args(known))}")
        if self.tag and (not self.tag.isprintable() or "/" in self.tag or self.tag.startswith(".")):
            raise CheckpointError(f"tag = {self.tag!r}: must be the plain name of a folder")
        if self.tag and self.layout == "v1":
            raise CheckpointError(f"tag = {self.tag!r}: layout v1 has no tags; leave it out or choose v2")

    @property
    def is_gqa(self) -> bool:
        """True for NxD's GQA layer, which repeats key/value heads and orders the query heads after them."""
        return self.qkv in ("gqa", "gqa_fused")


def check_sharding(config: ModelConfig, options: NxdOptions) -> None:
    """Refuse options that do not fit the model.

    Raises:
        CheckpointError: Names the tensor and the remedy.
    """
    tp, heads, kv_heads, repeats = options.tp, config.n_heads, config.n_kv_heads, options.kv_size_multiplier
    attention = "model.layers.0.self_attn"
    if heads % tp:  # rows of other tensors: `shard_box`
        raise CheckpointError(f"{attention}.q_proj.weight: {heads} query heads do not divide by tp {tp}")
    repeat = f"kv_size_multiplier {tp // kv_heads}"
    remedy = repeat if tp % kv_heads == 0 else f"a tp that is a multiple of {kv_heads}"
    where = f"{attention}.k_proj.weight"
    if options.is_gqa:
        if kv_heads * repeats != tp:
            raise CheckpointError(
                f"{where}: with qkv_linear, kv heads times kv_size_multiplier must be tp, but {kv_heads} x {repeats} "
                f"is not {tp}; choose {remedy}, or leave out qkv_linear"
            )
    elif repeats > 1:
        raise CheckpointError(f"{where}: kv_size_multiplier {repeats} needs qkv_linear; add it, or leave it out")
    elif kv_heads % tp:
        raise CheckpointError(
            f"{where}: {kv_heads} kv heads do not divide by tp {tp}; choose qkv_linear with {remedy}, or a tp that "
            f"divides {kv_heads}"
        )
    elif options.qkv == "coalesced" and heads != kv_heads:
        raise CheckpointError(
            f"{where}: coalesce_qkv is for models with as many kv heads as query heads, not {kv_heads} and {heads}; "
            "leave it out"
        )
    if not options.stage_layers and options.pp * options.virtual_pp > config.n_layers:
        raise CheckpointError(
            f"model.layers.{config.n_layers}: {options.pp} stages of {options.virtual_pp} chunks need at least "
            f"{options.pp * options.virtual_pp} layers, the model has {config.n_layers}; choose a smaller pp"
        )
