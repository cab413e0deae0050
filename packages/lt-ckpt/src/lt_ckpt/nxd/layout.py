"""NxD's files as data: which key holds which model tensors, how they are cut, and on which stage they lie.

NxD's keys are Hugging Face's, with gate and up joined, and query, key and value in some of its attention layers. A
rank's share of a tensor is one box: rows for vocabulary- and column-parallel layers, columns for row-parallel ones. The
GQA layer, for fewer key/value heads K than ranks T, repeats those m times (K x m = T), so that each rank has one, and
gives it the query heads that belong to it. On trn1 the K heads are repeated as a whole: rank t holds head t mod K and
share (t mod K) x m + t div K of the query heads, of T equal shares; the output projection's columns go with them.

Pure. Cost: one object per tensor and rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lt_ckpt.layout import FileLayout, Layout, Placed, part, stacked, whole
from lt_ckpt.models import shapes_of
from lt_ckpt.nxd.options import NxdOptions, Qkv, check_cut
from lt_ckpt.shards import Box, Ints
from lt_model import LlamaConfig

Kind = Literal["vocab", "column", "row", "replicated"]
DIMS: Mapping[Kind, int | None] = {"vocab": 0, "column": 0, "row": 1, "replicated": None}
"""Kind of layer → the dimension of its weight that is cut."""

Heads = Literal["", "query", "key_value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A key of NxD and what it is made of; in a layer, names are those below `model.layers.N.`.

    Attributes:
        key: NxD's name.
        kind: The kind of layer that cuts it.
        names: The model tensors, one below the other.
        heads: Which heads' order decides the rank's share of each, in the GQA layer; "": rank t has share t.
    """

    key: str
    kind: Kind
    names: tuple[str, ...]
    heads: tuple[Heads, ...]


def _rule(key: str, kind: Kind, *names: str, heads: tuple[Heads, ...] = ()) -> Rule:
    names = names or (key,)
    return Rule(key=key, kind=kind, names=names, heads=heads or ("",) * len(names))


_Q, _K, _V, _O = (f"self_attn.{x}_proj.weight" for x in "qkvo")
_OUT = _rule(_O, "row")
_GQA_OUT = _rule(_O, "row", heads=("query",))

FIRST = (_rule("model.embed_tokens.weight", "vocab"),)
"""On the first stage."""

ATTENTION: Mapping[Qkv, tuple[Rule, ...]] = {
    "separate": (_rule(_Q, "column"), _rule(_K, "column"), _rule(_V, "column"), _OUT),
    "coalesced": (_rule("self_attn.qkv_proj.weight", "column", _Q, _K, _V), _OUT),
    "gqa": (
        _rule("self_attn.qkv_proj.weight_q", "column", _Q, heads=("query",)),
        _rule("self_attn.qkv_proj.weight_k", "column", _K, heads=("key_value",)),
        _rule("self_attn.qkv_proj.weight_v", "column", _V, heads=("key_value",)),
        _GQA_OUT,
    ),
    "gqa_fused": (
        _rule("self_attn.qkv_proj.weight_qkv", "column", _Q, _K, _V, heads=("query", "key_value", "key_value")),
        _GQA_OUT,
    ),
}
"""On a layer's stage, by attention layer."""

LAYER = (
    _rule("mlp.gate_up_proj.weight", "column", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _rule("mlp.down_proj.weight", "row"),
    _rule("input_layernorm.weight", "replicated"),
    _rule("post_attention_layernorm.weight", "replicated"),
)
"""On a layer's stage, whatever the attention layer."""

LAST = (_rule("model.norm.weight", "replicated"), _rule("lm_head.weight", "column"))
"""On the last stage."""


def stages(n_layers: int, pp: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Returns the layers of each stage.

    The layers are cut into `pp * chunks` runs, as equal as can be, the longer ones at the end; run c goes to stage
    c mod pp.
    """
    n_runs = pp * chunks
    least, longer = divmod(n_layers, n_runs)
    sizes = [least + (run >= n_runs - longer) for run in range(n_runs)]
    starts = [sum(sizes[:run]) for run in range(n_runs)]
    runs = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tuple(tuple(layer for run in runs[stage::pp] for layer in run) for stage in range(pp))


def rank_path(options: NxdOptions, tp_rank: int, pp_rank: int, *, kind: str = "model", dp_rank: int = 0) -> str:
    """Returns the path of a rank's file, from the root of the checkpoint; `kind` is `model` or `optim` (v2)."""
    rank = f"tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}"
    if options.layout == "v1":
        return rank if options.xser else f"{rank}/checkpoint.pt"
    folder = f"{options.tag}/{kind}" if options.tag else kind
    return f"{folder}/dp_rank_{dp_rank:02d}_{rank}.pt"


def rank_rules(config: LlamaConfig, options: NxdOptions, pp_rank: int) -> Iterator[tuple[str, Rule]]:
    """Yields the rules of a stage's tensors in file order, with the prefix of their names."""
    if pp_rank == 0:
        yield from (("", rule) for rule in FIRST)
    for layer in (options.stage_layers or stages(config.n_layers, options.pp, options.virtual_pp))[pp_rank]:
        yield from ((f"model.layers.{layer}.", rule) for rule in (*ATTENTION[options.qkv], *LAYER))
    if pp_rank == options.pp - 1:
        yield from (("", rule) for rule in LAST)


def nxd_layout(config: LlamaConfig, options: NxdOptions) -> Layout:
    """Returns the model files of an NxD checkpoint: a file per stage and tensor-parallel rank.

    The head of a tied model is stored like any other: NxD keeps both copies.

    Raises:
        CheckpointError: The model cannot be cut so.
    """
    check_cut(config, options)
    shapes = shapes_of(config)
    return Layout(
        files=tuple(
            FileLayout(
                path=rank_path(options, tp_rank, pp_rank),
                tensors=_tensors(config, options, shapes, tp_rank, pp_rank),
            )
            for pp_rank in range(options.pp)
            for tp_rank in range(options.tp)
        )
    )


def rank_tensors(config: LlamaConfig, options: NxdOptions, tp_rank: int, pp_rank: int) -> tuple[Placed, ...]:
    """Returns the tensors of one rank's model file, as in `nxd_layout`.

    Raises:
        CheckpointError: The model cannot be cut so.
    """
    check_cut(config, options)
    return _tensors(config, options, shapes_of(config), tp_rank, pp_rank)


def _tensors(
    config: LlamaConfig, options: NxdOptions, shapes: Mapping[str, Ints], tp_rank: int, pp_rank: int
) -> tuple[Placed, ...]:
    return tuple(
        _placed(prefix, rule, shapes, config.n_kv_heads, options, tp_rank)
        for prefix, rule in rank_rules(config, options, pp_rank)
    )


def _placed(
    prefix: str, rule: Rule, shapes: Mapping[str, Ints], kv_heads: int, options: NxdOptions, tp_rank: int
) -> Placed:
    key, names = prefix + rule.key, [prefix + name for name in rule.names]
    dim = DIMS[rule.kind]
    if dim is None:
        return whole(names[0], shapes[names[0]], key)
    boxes: list[Box] = []
    for name, heads in zip(names, rule.heads, strict=True):
        share, count = _share(heads, kv_heads, options, tp_rank)
        boxes.append(part(shapes[name], dim, share, count, name))
    return stacked(key, list(zip(names, boxes, strict=True)))


def _share(heads: Heads, kv_heads: int, options: NxdOptions, tp_rank: int) -> tuple[int, int]:
    """Returns which of how many equal shares a rank has."""
    repeats, trn1 = options.kv_multiplier, options.head_order == "trn1"
    if heads == "key_value":
        return (tp_rank % kv_heads if trn1 else tp_rank // repeats), kv_heads
    if heads == "query" and trn1:
        return tp_rank % kv_heads * repeats + tp_rank // kv_heads, options.tp
    return tp_rank, options.tp
