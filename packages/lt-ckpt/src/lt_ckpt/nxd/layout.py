"""NxD's files as data: the model tensors of each key, their sharding, and their stage.

NxD's keys are Hugging Face's, with gate and up joined, and query, key and value in some of its attention layers; those
of biases (`qkv_proj.bias_q`, `qkv_proj.bias_qkv`) are the weights' with another first word. A
rank's share of a tensor is one box: rows for vocabulary- and column-parallel layers, columns for row-parallel ones. The
GQA layer, for fewer key/value heads K than ranks T, repeats those m times (K x m = T), so that each rank has one, and
gives it the query heads of that head. On trn1 the K heads are repeated as a whole: rank t holds head t mod K and share
(t mod K) x m + t div K of the query heads, of T equal shares; the output projection's columns follow them.

Pure. Cost: one object per tensor and rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lt_ckpt.layout import FileLayout, Layout, TensorLayout, shard_box, stack_rows, whole_tensor
from lt_ckpt.llama_tensors import param_specs, tensor_shapes
from lt_ckpt.nxd.options import NxdOptions, Qkv, check_sharding
from lt_ckpt.shards import Box
from lt_model import ModelConfig
from lt_model.params import NORM_NAMES, ParamSpec

Heads = Literal["", "query", "key_value"]


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Key of NxD and its model tensors; in a layer, names are those below `model.layers.N.`.

    Attributes:
        key: NxD's name.
        names: The model tensors, stacked along dim 0; empty: the one of that name.
        heads: Heads whose order determines the rank's share of each, in the GQA layer; empty: rank t has share t.
    """

    key: str
    names: tuple[str, ...] = ()
    heads: tuple[Heads, ...] = ()


def _with_biases(*weights: ShardingRule) -> tuple[ShardingRule, ...]:
    """Return the rules of a module, whose biases follow its weights and are sharded like their rows."""
    biases = [
        replace(
            rule, key=rule.key.replace("weight", "bias"), names=tuple(n.replace("weight", "bias") for n in rule.names)
        )
        for rule in weights
    ]
    return (*weights, *biases)


_Q, _K, _V, _O = (f"self_attn.{x}_proj.weight" for x in "qkvo")
_OUT = _with_biases(ShardingRule(_O))
_GQA_OUT = _with_biases(ShardingRule(_O, heads=("query",)))

FIRST_STAGE_RULES = (ShardingRule("model.embed_tokens.weight"),)
"""Rules of the first stage."""

ATTENTION_RULES: Mapping[Qkv, tuple[ShardingRule, ...]] = {
    "separate": (*(rule for name in (_Q, _K, _V) for rule in _with_biases(ShardingRule(name))), *_OUT),
    "coalesced": (*_with_biases(ShardingRule("self_attn.qkv_proj.weight", (_Q, _K, _V))), *_OUT),
    "gqa": (
        *_with_biases(
            ShardingRule("self_attn.qkv_proj.weight_q", (_Q,), heads=("query",)),
            ShardingRule("self_attn.qkv_proj.weight_k", (_K,), heads=("key_value",)),
            ShardingRule("self_attn.qkv_proj.weight_v", (_V,), heads=("key_value",)),
        ),
        *_GQA_OUT,
    ),
    "gqa_fused": (
        *_with_biases(
            ShardingRule("self_attn.qkv_proj.weight_qkv", (_Q, _K, _V), heads=("query", "key_value", "key_value"))
        ),
        *_GQA_OUT,
    ),
}
"""Rules of a layer's attention, by kind of attention layer."""

LACKS = ("norm", "norm_place", "gated", "n_experts")
"""Fields of `ModelConfig.features` that give tensors for which no program of NxD has a name.

In checkpoints of lt-trainer-neuron such norms and matrices, but for experts, have the names of the model.
"""

MLP_RULES: Mapping[bool, tuple[ShardingRule, ...]] = {
    is_gated: (*_with_biases(rule), *_with_biases(ShardingRule("mlp.down_proj.weight")))
    for is_gated, rule in {
        True: ShardingRule("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        False: ShardingRule("mlp.up_proj.weight"),
    }.items()
}
"""Rules of a feed-forward layer, by whether it is gated."""

HEAD_NORM_RULES = tuple(rule for which in "qk" for rule in _with_biases(ShardingRule(f"self_attn.{which}_norm.weight")))
LAYER_NORM_RULES = tuple(
    rule
    for name in dict.fromkeys(filter(None, (*NORM_NAMES["pre"], *NORM_NAMES["both"])))
    for rule in _with_biases(ShardingRule(f"{name}.weight"))
)
"""Rules of a layer's norms."""

LAST_STAGE_RULES = (*_with_biases(ShardingRule("model.norm.weight")), ShardingRule("lm_head.weight"))
"""Rules of the last stage."""


def layers_per_stage(n_layers: int, pp: int, virtual_pp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stage.

    The layers are split into `pp * virtual_pp` runs, as equal as possible, the longer ones at the end; run c goes to
    stage c mod pp.
    """
    n_runs = pp * virtual_pp
    base_size, n_longer = divmod(n_layers, n_runs)
    sizes = [base_size + (run >= n_runs - n_longer) for run in range(n_runs)]
    starts = [sum(sizes[:run]) for run in range(n_runs)]
    runs = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tuple(tuple(layer for run in runs[stage::pp] for layer in run) for stage in range(pp))


def rank_path(options: NxdOptions, tp_rank: int, pp_rank: int, *, kind: str = "model", dp_rank: int = 0) -> str:
    """Return the path of a rank's file, relative to the checkpoint; `kind` is `model` or `optim` (v2)."""
    rank = f"tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}"
    if options.layout == "v1":
        return rank if options.xser else f"{rank}/checkpoint.pt"
    folder = f"{options.tag}/{kind}" if options.tag else kind
    return f"{folder}/dp_rank_{dp_rank:02d}_{rank}.pt"


def rank_rules(config: ModelConfig, options: NxdOptions, pp_rank: int) -> Iterator[tuple[str, ShardingRule]]:
    """Yield the rules of a stage's tensors in file order, with the prefix of their names."""
    there = tensor_shapes(config)
    for prefix, rule in _stage_rules(config, options, pp_rank):
        if prefix + (rule.names or (rule.key,))[0] in there:
            yield prefix, rule


def _stage_rules(config: ModelConfig, options: NxdOptions, pp_rank: int) -> Iterator[tuple[str, ShardingRule]]:
    if pp_rank == 0:
        yield from (("", rule) for rule in FIRST_STAGE_RULES)
    for layer in (options.stage_layers or layers_per_stage(config.n_layers, options.pp, options.virtual_pp))[pp_rank]:
        rules = (*ATTENTION_RULES[options.qkv], *HEAD_NORM_RULES, *MLP_RULES[config.gated])
        yield from ((f"model.layers.{layer}.", rule) for rule in (*rules, *LAYER_NORM_RULES))
    if pp_rank == options.pp - 1:
        yield from (("", rule) for rule in LAST_STAGE_RULES)


def nxd_layout(config: ModelConfig, options: NxdOptions) -> Layout:
    """Return the model files of an NxD checkpoint: a file per stage and tensor-parallel rank.

    The head of a tied model is stored like any other: NxD keeps both tensors.

    Raises:
        CheckpointError: The options do not fit the model.
    """
    return tuple(
        FileLayout(path=rank_path(options, *rank), tensors=rank_tensors(config, options, *rank))
        for rank in ((tp_rank, pp_rank) for pp_rank in range(options.pp) for tp_rank in range(options.tp))
    )


def rank_tensors(config: ModelConfig, options: NxdOptions, tp_rank: int, pp_rank: int) -> tuple[TensorLayout, ...]:
    """Return the tensors of one rank's model file, as in `nxd_layout`.

    Raises:
        CheckpointError: The options do not fit the model.
    """
    check_sharding(config, options)
    table = {parameter.name: parameter for parameter in param_specs(replace(config, tie_word_embeddings=False))}
    return tuple(
        _tensor_layout(prefix, rule, table, config.n_kv_heads, options, tp_rank)
        for prefix, rule in rank_rules(config, options, pp_rank)
    )


def _tensor_layout(
    prefix: str, rule: ShardingRule, table: Mapping[str, ParamSpec], kv_heads: int, options: NxdOptions, tp_rank: int
) -> TensorLayout:
    key, names = prefix + rule.key, [prefix + name for name in rule.names or (rule.key,)]
    dim = table[names[0]].tp_dim
    if dim is None:
        return whole_tensor(names[0], table[names[0]].shape, key)
    boxes: list[Box] = []
    for name, heads in zip(names, rule.heads or ("",) * len(names), strict=True):
        share, count = _rank_share(heads, kv_heads, options, tp_rank)
        boxes.append(shard_box(table[name].shape, dim, share, count, name))
    return stack_rows(key, list(zip(names, boxes, strict=True)))


def _rank_share(heads: Heads, kv_heads: int, options: NxdOptions, tp_rank: int) -> tuple[int, int]:
    """Return a rank's share of a tensor, and the number of equal shares."""
    if heads == "key_value":
        return tp_rank % kv_heads, kv_heads
    if heads == "query":
        return tp_rank % kv_heads * options.kv_size_multiplier + tp_rank // kv_heads, options.tp
    return tp_rank, options.tp
