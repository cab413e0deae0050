"""Meta's and torchtitan's names of Llama tensors, torchtitan's of Qwen 3, and Meta's order of query and key rows.

Meta rotates neighboring rows of a head by one angle, Hugging Face rows that are half a head apart. So row 2i + j of a
head in Meta's matrix (j is 0 or 1) is row j * head_dim / 2 + i in Hugging Face's: every second row of a head is a
slice with twice the stride.

Pure; cost: two slices per head.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.source import TensorGroup
from lt_ckpt.stored_slices import StoredSlice
from lt_model.params import ParamSpec

_META = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_TITAN = {
    **_META,
    "lm_head.weight": "lm_head.weight",
    **{f"self_attn.{x}_proj.weight": f"attention.qkv_linear.w{x}.weight" for x in "qkv"},
    **{f"self_attn.{x}_norm.weight": f"attention.{x}_norm.weight" for x in "qk"},
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.experts.gate_proj": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.experts.up_proj": "moe.routed_experts.inner_experts.w3_EFD",
}
_EXPERTS = {f"mlp.experts.{x}_proj": f"moe.experts.w{n}" for n, x in enumerate(("gate", "down", "up"), start=1)}
DIALECTS = {"meta": _META, "titan": _TITAN, "titan, early": _TITAN | _EXPERTS}
"""Meta's names (also torchtitan's until 2025), torchtitan's since, and those before 0.3 of experts."""


def dialect_key(name: str, dialect: str) -> str:
    """Return a dialect's key of a model tensor."""
    names = DIALECTS[dialect]
    if name in names:
        return names[name]
    prefix, layer, rest = name.removeprefix("model.").split(".", 2)
    return f"{prefix}.{layer}.{names[rest]}"


def unpermute_rows(stored: StoredSlice, head_dim: int, item: int) -> Iterator[StoredSlice]:
    """Yield a slice of a matrix in Meta's order as slices of the matrix in Hugging Face's.

    Args:
        stored: Slice of the matrix; it may begin and end at any row.
        head_dim: Rows of a head.
        item: Bytes per element.
    """
    (begin, column), (n_rows, width), half = stored.offset, stored.shape, head_dim // 2
    row_step, column_step = stored.strides or (width, 1)
    for head in range(begin // head_dim, -(-(begin + n_rows) // head_dim)):
        for odd in (0, 1):
            start = head * head_dim + odd  # row 2i + odd of the head is row `start + 2i`
            first, end = (max(0, -(-(row - start) // 2)) for row in (begin, begin + n_rows))
            end = min(end, half)
            if first < end:
                skipped = start + 2 * first - begin
                yield StoredSlice(
                    file=stored.file,
                    byte_offset=stored.byte_offset + skipped * row_step * item,
                    offset=(head * head_dim + odd * half + first, column),
                    shape=(end - first, width),
                    strides=(2 * row_step, column_step),
                )


def unpermute_group(group: TensorGroup, parameters: Iterable[ParamSpec], head_dim: int) -> TensorGroup:
    """Return a group of tensors in Meta's order as one in Hugging Face's."""
    locations = dict(group.locations)
    for parameter in parameters:
        if parameter.kind in ("q_proj", "k_proj"):
            item = item_bytes(group.specs[parameter.name].dtype)
            slices = locations[parameter.name]
            locations[parameter.name] = tuple(part for s in slices for part in unpermute_rows(s, head_dim, item))
    return replace(group, locations=locations)
