"""Llama under the names of Meta, which torchtitan has too, and with Meta's order of query and key rows.

Meta turns neighbouring rows of a head by one angle, Hugging Face rows that are half a head apart. So row 2i + j of a
head in Meta's matrix (j is 0 or 1) is row j * head_dim / 2 + i in Hugging Face's. This is a box after all: seen as an
array of pairs of rows, Meta's matrix has the even rows in its left half and the odd ones in its right half, and each
half of a head is a block of it.

Pure; cost: two pieces per head.
"""

from collections.abc import Iterator
from dataclasses import replace

from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import Piece, Placed
from lt_ckpt.plan import Stored
from lt_ckpt.shards import Box
from lt_ckpt.source import Held
from lt_ckpt.tensorfile import TensorSpec
from lt_model.params import Parameter

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
"""Meta's names (torchtitan had the same until 2025), and torchtitan's since."""


def key_of(name: str, dialect: str) -> str:
    """Returns a dialect's name of a model tensor; `hf` is a dialect too."""
    if dialect == "hf":
        return name
    names = DIALECTS[dialect]
    if name in names:
        return names[name]
    prefix, layer, rest = name.removeprefix("model.").split(".", 2)
    return f"{prefix}.{layer}.{names[rest]}"


def is_turned(parameter: Parameter) -> bool:
    """Tells whether Meta has the rows of a tensor in another order."""
    return parameter.kind in ("q_proj", "k_proj")


def placed(parameter: Parameter, box: Box, key: str, head_dim: int) -> Placed:
    """Describes a box of whole heads, or of any tensor without heads, as Meta stores it.

    A tensor whose rows are turned is described as an array of pairs of rows (see `in_pairs`).
    """
    offset, shape = box
    if not is_turned(parameter):
        zeros = (0,) * len(shape)
        return Placed(key=key, shape=shape, pieces=(Piece(name=parameter.name, offset=offset, shape=shape, at=zeros),))
    (first, column), (rows, width), half = offset, shape, head_dim // 2
    pieces = tuple(
        Piece(
            name=parameter.name,
            offset=(first + head * head_dim + odd * half, column),
            shape=(half, width),
            at=(head * half, odd * width),
        )
        for head in range(rows // head_dim)
        for odd in (0, 1)
    )
    return Placed(key=key, shape=(rows // 2, 2 * width), pieces=pieces)


def in_pairs(held: Held, where: str) -> Held:
    """Returns a matrix as an array of pairs of its rows."""
    if held.whole is not None or len(held.spec.shape) != 2 or held.spec.shape[0] % 2:
        raise CheckpointError(
            f"{where}: must be a contiguous matrix with an even number of rows; save it after .contiguous()"
        )
    rows, width = held.spec.shape
    return replace(held, spec=TensorSpec(held.spec.dtype, (rows // 2, 2 * width)))


def chunk_in_pairs(chunk: Stored, n_columns: int, item_bytes: int) -> Iterator[Stored]:
    """Yields the parts of a chunk of a matrix as parts of the array of pairs of its rows.

    A chunk may begin and end at any row and column. Its even and its odd rows are each a box of the pairs; the last row
    of an odd number of rows is a pair's half, and so one of its own.

    Args:
        chunk: A box of the matrix, stored as an array of its own.
        n_columns: Columns of the matrix.
        item_bytes: Bytes per element.

    Raises:
        CheckpointError: The chunk is stored as a part of something.
    """
    if chunk.whole is not None or chunk.transposed:
        raise CheckpointError(f"{chunk.file}: a chunk must be contiguous")
    (row, column), (rows, width) = chunk.offset, chunk.shape
    pairs = rows // 2
    for i in range(2 if pairs else 0):
        yield replace(
            chunk,
            offset=((row + i) // 2, (row + i) % 2 * n_columns + column),
            shape=(pairs, width),
            whole=(pairs, 2 * width),
            at=(0, i * width),
        )
    if rows % 2:
        last = row + rows - 1
        yield replace(
            chunk,
            begin=chunk.begin + (rows - 1) * width * item_bytes,
            offset=(last // 2, last % 2 * n_columns + column),
            shape=(1, width),
        )
