"""Meta's and torchtitan's names of Llama tensors, and Meta's order of query and key rows.

Meta rotates neighboring rows of a head by one angle, Hugging Face rows that are half a head apart. So row 2i + j of a
head in Meta's matrix (j is 0 or 1) is row j * head_dim / 2 + i in Hugging Face's. This is a box after all: seen as an
array of pairs of rows, Meta's matrix has the even rows in its left half and the odd ones in its right half, and each
half of a head is a block of it.

Pure; cost: two regions per head.
"""

from collections.abc import Iterator
from dataclasses import replace

from lt_ckpt.copy_plan import StoredSlice
from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import TensorLayout, TensorRegion
from lt_ckpt.shards import Box
from lt_ckpt.source import StoredArray
from lt_ckpt.tensorfile import TensorSpec
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
}
DIALECTS = {"meta": _META, "titan": _TITAN}
"""Meta's names (also torchtitan's until 2025), and torchtitan's since."""


def dialect_key(name: str, dialect: str) -> str:
    """Return a dialect's key of a model tensor; `hf` is the identity."""
    if dialect == "hf":
        return name
    names = DIALECTS[dialect]
    if name in names:
        return names[name]
    prefix, layer, rest = name.removeprefix("model.").split(".", 2)
    return f"{prefix}.{layer}.{names[rest]}"


def is_rope_permuted(parameter: ParamSpec) -> bool:
    """Return True if Meta stores the tensor's rows in another order."""
    return parameter.kind in ("q_proj", "k_proj")


def meta_tensor_layout(parameter: ParamSpec, box: Box, key: str, head_dim: int) -> TensorLayout:
    """Return the layout of a box of whole heads, or of any tensor without heads, as Meta stores it.

    A tensor with permuted rows is described as an array of pairs of rows (see `view_as_row_pairs`).
    """
    offset, shape = box
    if not is_rope_permuted(parameter):
        zeros = (0,) * len(shape)
        return TensorLayout(
            key=key,
            shape=shape,
            regions=(TensorRegion(name=parameter.name, offset=offset, shape=shape, stored_offset=zeros),),
        )
    (first, column), (rows, width), half = offset, shape, head_dim // 2
    regions = tuple(
        TensorRegion(
            name=parameter.name,
            offset=(first + head * head_dim + odd * half, column),
            shape=(half, width),
            stored_offset=(head * half, odd * width),
        )
        for head in range(rows // head_dim)
        for odd in (0, 1)
    )
    return TensorLayout(key=key, shape=(rows // 2, 2 * width), regions=regions)


def view_as_row_pairs(array: StoredArray, where: str) -> StoredArray:
    """Return a matrix as an array of pairs of its rows."""
    if array.array_shape is not None or len(array.spec.shape) != 2 or array.spec.shape[0] % 2:
        raise CheckpointError(
            f"{where}: must be a contiguous matrix with an even number of rows; save it after .contiguous()"
        )
    rows, width = array.spec.shape
    return replace(array, spec=TensorSpec(array.spec.dtype, (rows // 2, 2 * width)))


def split_chunk_into_row_pairs(chunk: StoredSlice, n_columns: int, item_bytes: int) -> Iterator[StoredSlice]:
    """Yield the parts of a chunk of a matrix as slices of the array of pairs of its rows.

    A chunk may begin and end at any row and column. Its even and its odd rows are each a box of the pairs; the last row
    of an odd number of rows is half a pair, a slice of its own.

    Args:
        chunk: A box of the matrix, stored as an array of its own.
        n_columns: Columns of the matrix.
        item_bytes: Bytes per element.

    Raises:
        CheckpointError: The chunk is part of a larger array.
    """
    if chunk.array_shape is not None or chunk.transposed:
        raise CheckpointError(f"{chunk.file}: a chunk must be contiguous")
    (row, column), (rows, width) = chunk.offset, chunk.shape
    pairs = rows // 2
    for i in range(2 if pairs else 0):
        yield replace(
            chunk,
            offset=((row + i) // 2, (row + i) % 2 * n_columns + column),
            shape=(pairs, width),
            array_shape=(pairs, 2 * width),
            array_offset=(0, i * width),
        )
    if rows % 2:
        last = row + rows - 1
        yield replace(
            chunk,
            byte_offset=chunk.byte_offset + (rows - 1) * width * item_bytes,
            offset=(last // 2, last % 2 * n_columns + column),
            shape=(1, width),
        )
