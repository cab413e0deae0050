"""How a neuronx-distributed (NxD) checkpoint is cut, and which cuts cannot be right.

`NxdOptions` holds the choices, `check_cut` refuses those that a model does not admit, before anything is read or
written: NxD's own converter drops half of the query heads for some of them without a word.
Cost: nothing is computed.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from lt_ckpt.errors import CheckpointError
from lt_model import LlamaConfig

Qkv = Literal["separate", "coalesced", "gqa", "gqa_fused"]
HeadOrder = Literal["trn1", "trn2"]
Version = Literal["v1", "v2"]


@dataclass(frozen=True, kw_only=True)
class NxdOptions:
    """The choices of an NxD checkpoint.

    Attributes:
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        virtual_pp: Chunks of layers per stage (interleaved schedule).
        kv_multiplier: How often each key/value head is repeated, so that every rank has one.
        qkv: `separate` q_proj, k_proj, v_proj; `coalesced`: one qkv_proj.weight; `gqa`: weight_q, weight_k, weight_v of
            NxD's GQA layer (qkv_linear); `gqa_fused`: its weight_qkv (fuse_qkv).
        layout: `v1`: tp_rank_00_pp_rank_00/checkpoint.pt; `v2`: model/dp_rank_00_tp_rank_00_pp_rank_00.pt.
        xser: Every tensor in a file of its own.
        tag: Folder of a v2 checkpoint in its root, with the markers `checkpoint` and `done`; none when empty, as NxD's
            converter writes.
        head_order: Which heads go to which rank of a GQA layer. The order of trn1 is exact. That of trn2 is the one its
            layer asks for, never tried on hardware (NxD 0.18's converter writes another one).
        stage_layers: The layers of each stage, where they are not those of NxD's own cut (its `pipeline_cuts`).
    """

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    kv_multiplier: int = 1
    qkv: Qkv = "separate"
    layout: Version = "v2"
    xser: bool = False
    tag: str = ""
    head_order: HeadOrder = "trn1"
    stage_layers: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "virtual_pp", "kv_multiplier"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"nxd: {name} must be a whole number of at least 1, is {value!r}")
        for name, known in (("qkv", Qkv), ("layout", Version), ("head_order", HeadOrder)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise CheckpointError(f"nxd: {name} must be one of {', '.join(get_args(known))}, is {value!r}")
        if type(self.xser) is not bool:
            raise CheckpointError(f"nxd: xser must be true or false, is {self.xser!r}")
        if self.tag and (not self.tag.isprintable() or "/" in self.tag or self.tag.startswith(".")):
            raise CheckpointError(f"nxd: the tag must be the plain name of a folder, is {self.tag!r}")
        if self.tag and self.layout == "v1":
            raise CheckpointError(f"nxd: layout v1 has no tags; leave out {self.tag!r} or choose v2")

    @property
    def grouped(self) -> bool:
        """Whether attention is NxD's GQA layer, which repeats key/value heads and orders the query heads after them."""
        return self.qkv in ("gqa", "gqa_fused")


def check_cut(config: LlamaConfig, options: NxdOptions) -> None:
    """Refuses a cut that the model does not admit.

    Raises:
        CheckpointError: With the tensor and the remedy.
    """
    tp, heads, kv_heads, repeats = options.tp, config.n_heads, config.n_kv_heads, options.kv_multiplier
    attention = "model.layers.0.self_attn"
    for name, what, size in (
        ("model.embed_tokens.weight", "rows of the vocabulary", config.vocab_size),
        (f"{attention}.q_proj.weight", "query heads", heads),
        ("model.layers.0.mlp.gate_proj.weight", "rows of the feed-forward layer", config.intermediate_size),
    ):
        if size % tp:
            raise CheckpointError(f"{name}: {size} {what} do not divide by tp {tp}; choose a tp that divides {size}")
    remedy = f"kv_multiplier {tp // kv_heads}" if tp % kv_heads == 0 else f"a tp that is a multiple of {kv_heads}"
    if options.grouped:
        if kv_heads * repeats != tp:
            raise CheckpointError(
                f"{attention}.k_proj.weight: with qkv_linear, kv heads times kv_multiplier must be tp, but "
                f"{kv_heads} x {repeats} is not {tp}; choose {remedy}, or leave out qkv_linear"
            )
    elif repeats > 1:
        raise CheckpointError(
            f"{attention}.k_proj.weight: kv_multiplier {repeats} needs qkv_linear; "
            "add qkv_linear, or leave out kv_multiplier"
        )
    elif kv_heads % tp:
        raise CheckpointError(
            f"{attention}.k_proj.weight: {kv_heads} kv heads do not divide by tp {tp}; "
            f"choose qkv_linear with {remedy}, or a tp that divides {kv_heads}"
        )
    elif options.qkv == "coalesced" and heads != kv_heads:
        raise CheckpointError(
            f"{attention}.k_proj.weight: coalesce_qkv is for models with as many kv heads as query heads, not "
            f"{kv_heads} and {heads}; leave out coalesce_qkv"
        )
    _check_stages(config, options)


def _check_stages(config: LlamaConfig, options: NxdOptions) -> None:
    if options.stage_layers:
        found = sorted(layer for layers in options.stage_layers for layer in layers)
        if found != list(range(config.n_layers)) or len(options.stage_layers) != options.pp:
            raise CheckpointError(
                f"nxd: stage_layers must name each of the {config.n_layers} layers once, in {options.pp} stages; they "
                f"are {[list(layers) for layers in options.stage_layers]}"
            )
        return
    chunks = options.pp * options.virtual_pp
    if chunks > config.n_layers:
        raise CheckpointError(
            f"model.layers.{config.n_layers}: {options.pp} stages of {options.virtual_pp} chunks need at least "
            f"{chunks} layers, the model has {config.n_layers}; choose a smaller pp"
        )
