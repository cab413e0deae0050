"""Attention backends by name; all compute masked softmax(q k^T / sqrt(K)) v.

A position attends to itself and earlier positions, or only those of its own document, or of those the last so many (a
window). Scores may be capped, and a head may have a sink: a score of nothing, which takes its share of the softmax.
These are features that a backend has or not (`attention_features`), and a model needs or not. The backend's mask
(a dense bias, a block mask, cu_seqlens on the device) is built once per forward pass and window by `make_mask` and
passed to every layer's `attend`. "reference" is the plain formula: the oracle that the others are tested against.

`BACKENDS` is their table. A backend that cannot run raises an error with the reason and the backends that can; there is
no silent fallback. "auto" selects, in this order,

- on the CPU: torch's fused attention where rows are one document each, else "split" (with
  documents of 256 and 32 tokens 2.6 to 11 times as fast as a dense mask), whose cost is linear in a row with a window;
- on CUDA, in bf16 or fp16: cuDNN before flash where rows are one document each; else "varlen" where torch has it; in
  other dtypes and without it "sdpa". On an H200 cuDNN takes two thirds of flash's time (docs/benchmarks/gpu.md);
- elsewhere: "sdpa".

Shapes: B batch, T query tokens, S key tokens (S >= T; the last T of them are the queries' own), H query heads, G
key/value heads (G divides H), K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_model.attention_features import ATTENTION_LACKS
from lt_model.documents import (
    DocumentBoundaries,
    SplitMask,
    VarlenMetadata,
    flash_attn_attention,
    split_attention,
    torch_varlen_metadata,
    varlen_attention,
    varlen_metadata,
)
from lt_model.errors import ModelError
from lt_model.flex import flex_mask, flex_mask_attention
from lt_model.sdpa import document_bias, make_sdpa_attention, reference_attention, sdpa_attention, window_bias

if TYPE_CHECKING:
    from lt_model.config import ModelConfig

AttentionFn = Callable[..., Tensor]
"""(q_BTHK, k_BSGK, v_BSGK, mask) -> out_BTHK. A mask of None is causal. With the features, `softcap` (a number) and
`sinks` (a score per head) are keywords."""
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """Attention implementation with its requirements.

    Attributes:
        name: its name in recipes.
        summary: a line about it.
        attend: the function; its last argument is the result of `make_mask`.
        mask_factory: (boundaries, device, dtype, window) -> what `attend` takes where a row has several documents, or
            the model a window.
        device_types: the device types it runs on; all when empty.
        dtypes: the dtypes of queries it supports; all when empty.
        required_module: module that must be importable, or None.
        install_hint: how to get the module.
        always_masks: None does not mean causal to `attend`.
        supports_compile: False where torch.compile would recompile for every batch with documents.
    """

    name: str
    summary: str
    attend: AttentionFn
    mask_factory: Callable[[DocumentBoundaries, torch.device, torch.dtype, int], Any]
    always_masks: bool = False
    device_types: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    required_module: str | None = None
    install_hint: str = ""
    supports_compile: bool = True

    def make_mask(
        self,
        boundaries: DocumentBoundaries | None,
        device: torch.device,
        dtype: torch.dtype,
        window: int = 0,
        shape: tuple[int, int, int] = (0, 0, 0),
    ) -> Any:
        """Return the mask for `attend`; None (causal) without window and documents, or with one document per row.

        Args:
            boundaries: document boundaries; one document per row when absent.
            device: of the queries.
            dtype: of the queries.
            window: keys that a query sees, its own included; 0: all earlier ones.
            shape: rows, queries and keys in a row, where `boundaries` are absent.

        Raises:
            ModelError: the backend cannot run on this device, in this dtype, or with these documents.
        """
        _check_available(self.name, device.type, dtype)
        n_rows, n_tokens, n_keys = shape
        if boundaries is None and n_tokens < n_keys:
            return window_bias(n_tokens, n_keys, window, device, dtype) if 0 < window < n_keys else None
        boundaries = boundaries or DocumentBoundaries.one_per_row(n_rows, n_tokens)
        window = window if window < boundaries.row_length else 0
        if not window and not self.always_masks and boundaries.is_one_per_row:
            return None
        return self.mask_factory(boundaries, device, dtype, window)

    def for_model(self, config: ModelConfig) -> AttentionBackend:
        """Return the backend with the features of a model.

        Raises:
            ModelError: it lacks one; names the backends that have it.
        """
        for name in (name for name in config.features() if name in ATTENTION_LACKS[self.name]):
            able = ", ".join(other for other, lacks in ATTENTION_LACKS.items() if name not in lacks)
            config.check_features(f"attention = {self.name!r} (take {able})", (name,))
        by_formula = bool(config.attention_softcap or config.sinks)
        attend = partial(self.attend, softcap=config.attention_softcap) if config.attention_softcap else self.attend
        factory = self.mask_factory
        if self.name == "auto" and (by_formula or config.head_value_width != config.head_width):
            factory = partial(_auto_mask, needs_flex=True, by_formula=by_formula)
        always_masks = by_formula and self.name in ("auto", "flex")
        return replace(self, attend=attend, mask_factory=factory, always_masks=always_masks)


def _reject_documents(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> None:
    raise ModelError(
        "attention = 'flash' cannot keep the documents of a row apart: torch's flash kernel takes no mask; take "
        "'varlen', 'flex' or 'sdpa', or train without a document mask"
    )


def _split_mask(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> SplitMask:
    return SplitMask(boundaries.lengths(), window)


def _auto_mask(
    boundaries: DocumentBoundaries,
    device: torch.device,
    dtype: torch.dtype,
    window: int,
    *,
    needs_flex: bool = False,
    by_formula: bool = False,
) -> Any:
    """Return the mask of the fastest kernel; `needs_flex`: CUDA's others lack a feature, `by_formula`: the CPU's do."""
    if device.type == "cuda" and needs_flex:
        return flex_mask(boundaries, device, window)
    if device.type == "cuda" and unavailable_reason("varlen", "cuda", dtype) is None:
        return torch_varlen_metadata(boundaries, device, window)
    if (device.type == "cpu" or window) and not by_formula:  # in blocks: no [T, T] tensor for a window
        return _split_mask(boundaries, device, dtype, window)
    return document_bias(boundaries, device, dtype, window)


_auto_sdpa_attention = make_sdpa_attention("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def _auto_attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Any, **options: Any) -> Tensor:
    if options or not isinstance(mask, SplitMask | VarlenMetadata | Tensor | None):
        return flex_mask_attention(q_BTHK, k_BSGK, v_BSGK, mask, **options)
    if isinstance(mask, SplitMask):
        return split_attention(q_BTHK, k_BSGK, v_BSGK, mask)
    if isinstance(mask, VarlenMetadata):
        return varlen_attention(q_BTHK, k_BSGK, v_BSGK, mask)
    attend = _auto_sdpa_attention if q_BTHK.device.type == "cuda" else sdpa_attention
    return attend(q_BTHK, k_BSGK, v_BSGK, mask)


_BACKEND_LIST = (
    AttentionBackend(
        name="auto",
        summary="the fastest that can run, by device and documents",
        attend=_auto_attend,
        mask_factory=_auto_mask,
        supports_compile=False,
    ),
    AttentionBackend(
        name="reference",
        summary="the formula, for tests",
        attend=reference_attention,
        mask_factory=document_bias,
    ),
    AttentionBackend(
        name="sdpa",
        summary="torch's fused attention, dense document mask",
        attend=sdpa_attention,
        mask_factory=document_bias,
    ),
    AttentionBackend(
        name="cudnn",
        summary="torch's fused attention with cuDNN's kernel",
        attend=make_sdpa_attention("CUDNN_ATTENTION"),
        mask_factory=document_bias,
        device_types=("cuda",),
        dtypes=_HALF_DTYPES,
    ),
    AttentionBackend(
        name="flash",
        summary="torch's fused attention with its flash kernel; one document per row",
        attend=make_sdpa_attention("FLASH_ATTENTION"),
        mask_factory=_reject_documents,
        device_types=("cuda",),
        dtypes=_HALF_DTYPES,
    ),
    AttentionBackend(
        name="split",
        summary="torch's fused attention, document by document",
        attend=split_attention,
        mask_factory=_split_mask,
        supports_compile=False,
    ),
    AttentionBackend(
        name="varlen",
        summary="torch's kernel for documents of any length",
        attend=varlen_attention,
        mask_factory=lambda boundaries, device, _, window: torch_varlen_metadata(boundaries, device, window),
        device_types=("cuda",),
        dtypes=_HALF_DTYPES,
        required_module="torch.nn.attention.varlen",
        install_hint="it came with torch 2.10",
    ),
    AttentionBackend(
        name="flex",
        summary="torch's flex_attention, compiled, block mask of the documents",
        attend=flex_mask_attention,
        mask_factory=lambda boundaries, device, _, window: flex_mask(boundaries, device, window),
        device_types=("cuda",),
        dtypes=(*_HALF_DTYPES, torch.float32),
    ),
    AttentionBackend(
        name="flash-attn",
        summary="the package flash-attn",
        attend=flash_attn_attention,
        mask_factory=lambda boundaries, device, _, window: varlen_metadata(boundaries, device, window),
        device_types=("cuda",),
        dtypes=_HALF_DTYPES,
        required_module="flash_attn",
        install_hint="pip install flash-attn",
    ),
)
BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType({backend.name: backend for backend in _BACKEND_LIST})


def attention_backend(
    name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> AttentionBackend:
    """Return the backend called `name`.

    Args:
        name: a key of `BACKENDS`.
        device: where it runs; not checked when absent.
        dtype: of the queries; not checked when absent.

    Raises:
        ModelError: no such backend, or one that cannot run here; the message has the reason and the backends that can.
    """
    if name not in BACKENDS:
        raise ModelError(f"attention = {name!r}: unknown; the backends are {', '.join(BACKENDS)}")
    _check_available(name, None if device is None else torch.device(device).type, dtype)
    return BACKENDS[name]


def unavailable_reason(name: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Return the reason why a backend cannot run on this device type in this dtype, or None if it can.

    An argument of None is not checked.
    """
    backend = BACKENDS[name]
    if device_type is not None and backend.device_types and device_type not in backend.device_types:
        return f"it runs on {' and '.join(backend.device_types)}, not on {device_type}"
    if dtype is not None and backend.dtypes and dtype not in backend.dtypes:
        return f"it takes {', '.join(str(supported)[6:] for supported in backend.dtypes)}, not {str(dtype)[6:]}"
    if backend.required_module is not None and find_spec(backend.required_module) is None:
        return f"{backend.required_module} is not available (torch {torch.__version__}): {backend.install_hint}"
    return None


def available_backends(device_type: str | None, dtype: torch.dtype | None) -> list[str]:
    """Return the names of the backends that can run on the device type in the dtype."""
    return [name for name in BACKENDS if unavailable_reason(name, device_type, dtype) is None]


def _check_available(name: str, device_type: str | None, dtype: torch.dtype | None) -> None:
    reason = unavailable_reason(name, device_type, dtype)
    if reason is not None:
        raise ModelError(
            f"attention = {name!r} cannot run here: {reason}; those that can are "
            f"{', '.join(available_backends(device_type, dtype))}"
        )
