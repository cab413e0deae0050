"""Attention backends by name. All compute softmax(q k^T / sqrt(K)) v over what a position may see.

A position sees itself and earlier positions, or only those of its own document. What a backend needs to know of the
documents (a dense bias, a block mask, where documents begin) is made once per forward pass by its `mask` and handed to
every layer's `attend`. "reference" spells the formula out: the oracle that the others are tested against.

`BACKENDS` is the one table: what each does and needs. Asking for one that cannot run is an error that says why and
names those that can; nothing is replaced silently. "auto" takes, in this order,

- on the CPU: torch's fused attention where rows are one document each, else "split" (measured by
  `tools/bench/model.py`: with documents of 256 and 32 tokens 2.6 to 11 times as fast as a dense mask);
- on CUDA, in bf16 or fp16: cuDNN before flash where rows are one document each; else "varlen" where torch has it; in
  other dtypes and without it "sdpa". This order follows published figures; it has not been measured by us;
- elsewhere: "sdpa".

Shapes: B batch, T query tokens, S key tokens (S >= T; the last T of them are the queries' own), H query heads, G
key/value heads (G divides H), K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lt_model.documents import (
    Documents,
    find_documents,
    flash_attn_attention,
    split_attention,
    varlen_attention,
    varlen_documents,
)
from lt_model.errors import ModelError
from lt_model.flex import flex_backend, flex_mask
from lt_model.sdpa import document_bias, reference_attention, sdpa_attention, sdpa_with

__all__ = [
    "BACKENDS",
    "Attention",
    "Backend",
    "attention_backend",
    "document_bias",
    "obstacle",
    "reference_attention",
    "sdpa_attention",
    "usable_backends",
]

# (q_BTHK, k_BSGK, v_BSGK, mask) -> out_BTHK. A mask of None is causal.
Attention = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute attention, and what it needs.

    Attributes:
        name: what recipes call it.
        summary: what it is, in a line.
        attend: the function; its last argument is what `mask` returned.
        make_mask: (doc_ids [B, T] or None, device, dtype) -> what `attend` takes; None where every earlier key is seen.
        devices: kinds of devices that it runs on; all when empty.
        dtypes: dtypes of the queries that it takes; all when empty.
        module: a module that has to be there, or None.
        remedy: what to do when the module is not there.
        compiles: False where torch.compile would compile anew for every batch with documents.
    """

    name: str
    summary: str
    attend: Attention
    make_mask: Callable[[Tensor | None, torch.device, torch.dtype], Any]
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    module: str | None = None
    remedy: str = ""
    compiles: bool = True

    def mask(self, doc_ids_BT: Tensor | None, device: torch.device, dtype: torch.dtype) -> Any:
        """Return what `attend` is to be given, from the documents' numbers; those may lie on the CPU.

        Raises:
            ModelError: the backend cannot run on this device, in this dtype, or with these documents.
        """
        _require(self.name, device.type, dtype)
        return self.make_mask(doc_ids_BT, device, dtype)


def _dense(doc_ids_BT: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    return document_bias(doc_ids_BT, dtype, device)


def _no_documents(doc_ids_BT: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
    if find_documents(doc_ids_BT, device) is not None:
        raise ModelError(
            "attention = 'flash' cannot keep the documents of a row apart: torch's flash kernel takes no mask; take "
            "'varlen', 'flex' or 'sdpa', or train without a document mask"
        )


def _auto_mask(doc_ids_BT: Tensor | None, device: torch.device, dtype: torch.dtype) -> Documents | Tensor | None:
    if device.type == "cpu":
        return find_documents(doc_ids_BT, device)
    if device.type == "cuda" and obstacle("varlen", "cuda", dtype) is None:
        return varlen_documents(doc_ids_BT, device)
    return document_bias(doc_ids_BT, dtype, device)


_fastest_sdpa = sdpa_with("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def _auto_attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Documents | Tensor | None) -> Tensor:
    if isinstance(mask, Documents):
        attend = split_attention if q_BTHK.device.type == "cpu" else varlen_attention
        return attend(q_BTHK, k_BSGK, v_BSGK, mask)
    attend = _fastest_sdpa if q_BTHK.device.type == "cuda" else sdpa_attention
    return attend(q_BTHK, k_BSGK, v_BSGK, mask)


_TABLE = (
    Backend(
        name="auto",
        summary="the fastest that can run, by device and documents",
        attend=_auto_attend,
        make_mask=_auto_mask,
        compiles=False,
    ),
    Backend(name="reference", summary="the formula, for tests", attend=reference_attention, make_mask=_dense),
    Backend(
        name="sdpa", summary="torch's fused attention, dense document mask", attend=sdpa_attention, make_mask=_dense
    ),
    Backend(
        name="cudnn",
        summary="torch's fused attention with cuDNN's kernel",
        attend=sdpa_with("CUDNN_ATTENTION"),
        make_mask=_dense,
        devices=("cuda",),
        dtypes=_HALVES,
    ),
    Backend(
        name="flash",
        summary="torch's fused attention with its flash kernel; one document per row",
        attend=sdpa_with("FLASH_ATTENTION"),
        make_mask=_no_documents,
        devices=("cuda",),
        dtypes=_HALVES,
    ),
    Backend(
        name="split",
        summary="torch's fused attention, document by document",
        attend=split_attention,
        make_mask=lambda ids, device, _: find_documents(ids, device),
        compiles=False,
    ),
    Backend(
        name="varlen",
        summary="torch's kernel for documents of any length",
        attend=varlen_attention,
        make_mask=lambda ids, device, _: varlen_documents(ids, device),
        devices=("cuda",),
        dtypes=_HALVES,
        module="torch.nn.attention.varlen",
        remedy="it came with torch 2.10",
    ),
    Backend(
        name="flex",
        summary="torch's flex_attention, compiled, block mask of the documents",
        attend=flex_backend,
        make_mask=lambda ids, device, _: flex_mask(ids, device),
        devices=("cuda",),
        dtypes=(*_HALVES, torch.float32),
    ),
    Backend(
        name="flash-attn",
        summary="the package flash-attn",
        attend=flash_attn_attention,
        make_mask=lambda ids, device, _: find_documents(ids, device),
        devices=("cuda",),
        dtypes=_HALVES,
        module="flash_attn",
        remedy="pip install flash-attn",
    ),
)
BACKENDS: Mapping[str, Backend] = MappingProxyType({backend.name: backend for backend in _TABLE})


def attention_backend(
    name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Backend:
    """Return the backend called `name`.

    Args:
        name: a key of `BACKENDS`.
        device: where it is to run; asked for only when given.
        dtype: of the queries; asked for only when given.

    Raises:
        ModelError: no such backend, or one that cannot run here; the message says why and names those that can.
    """
    if name not in BACKENDS:
        raise ModelError(f"attention = {name!r} is unknown; the backends are {', '.join(BACKENDS)}")
    _require(name, None if device is None else torch.device(device).type, dtype)
    return BACKENDS[name]


def obstacle(name: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Return why the backend cannot run on such a device in such a dtype, or None where it can; None is not asked."""
    backend = BACKENDS[name]
    if device_type is not None and backend.devices and device_type not in backend.devices:
        return f"it runs on {' and '.join(backend.devices)}, not on {device_type}"
    if dtype is not None and backend.dtypes and dtype not in backend.dtypes:
        return f"it takes {', '.join(str(one)[6:] for one in backend.dtypes)}, not {str(dtype)[6:]}"
    if backend.module is not None and find_spec(backend.module) is None:
        return f"{backend.module} is not there (torch {torch.__version__}): {backend.remedy}"
    return None


def usable_backends(device_type: str | None, dtype: torch.dtype | None) -> list[str]:
    """Return the names of the backends that can run on such a device in such a dtype."""
    return [name for name in BACKENDS if obstacle(name, device_type, dtype) is None]


def _require(name: str, device_type: str | None, dtype: torch.dtype | None) -> None:
    why = obstacle(name, device_type, dtype)
    if why is not None:
        raise ModelError(
            f"attention = {name!r} cannot run here: {why}; those that can are "
            f"{', '.join(usable_backends(device_type, dtype))}"
        )
