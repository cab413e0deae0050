"""SHA-256 of each tensor of a model, and of all of them, independent of the format.

The hash of a tensor covers its dtype, shape and bytes; that of a model covers the names and hashes of its tensors. So
results of an evaluation name the weights that they are of, wherever these lie. Cost: a pass over the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any


def hash_tensor(dtype: str, shape: Sequence[int], data: Any) -> str:
    """Return the hash of a tensor; `dtype` as in safetensors, `data` its bytes in C order."""
    digest = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    digest.update(data)
    return digest.hexdigest()


def hash_weights(tensor_hashes: Mapping[str, str]) -> str:
    """Return the hash of a model with these tensors, by name."""
    lines = (f"{name} {digest}\n" for name, digest in sorted(tensor_hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
