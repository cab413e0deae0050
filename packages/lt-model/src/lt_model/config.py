"""Shape of a decoder: a frozen dataclass, validated when it is made.

`ModelConfig` holds what decides the architecture and nothing about training. `hf.py` reads and writes the config.json
of `transformers`; `to_dict`/`from_dict` use our own field names (manifests, recipes).
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lt_model.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Parameters of the "llama3" scaling of low rotary frequencies (Llama 3.1; formula in `rope.py`).

    Attributes:
        factor: factor by which wavelengths beyond the low-frequency limit are stretched, > 0.
        low_freq_factor: wavelengths longer than original / low_freq_factor are stretched fully.
        high_freq_factor: wavelengths shorter than original / high_freq_factor are kept; > low_freq_factor.
        original_max_position_embeddings: the context length (tokens) before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            object.__setattr__(self, name, _positive_float(f"rope_scaling.{name}", getattr(self, name)))
        check_size("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be greater than "
                f"rope_scaling.low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder.

    Attributes:
        vocab_size: number of token ids; no default, because the data decides it.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward layer.
        n_heads: query heads; `hidden_size` is divided among them.
        n_kv_heads: key/value heads; divides `n_heads` (equal: multi-head, 1: multi-query attention).
        n_layers: transformer blocks.
        max_position_embeddings: longest context (tokens) of the model.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: the llama3 scaling, or None.
        norm_eps: epsilon inside the square root of RMSNorm.
        tie_word_embeddings: True when the output head is the input embedding.

    Raises:
        ModelError: a field of the wrong type or sign, or sizes that do not divide.
    """

    vocab_size: int
    hidden_size: int = 768
    intermediate_size: int = 2072
    n_heads: int = 12
    n_kv_heads: int = 12
    n_layers: int = 12
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _INT_FIELDS:
            check_size(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            object.__setattr__(self, name, _positive_float(name, getattr(self, name)))
        if not isinstance(self.tie_word_embeddings, bool):
            raise ModelError(f"tie_word_embeddings = {self.tie_word_embeddings!r}: must be true or false")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ModelError(f"rope_scaling = {self.rope_scaling!r}: must be a RopeScaling or None")
        if self.hidden_size % self.n_heads:
            raise ModelError(
                f"hidden_size = {self.hidden_size} is not a multiple of n_heads = {self.n_heads}: "
                "every head needs the same width; change one of them"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"hidden_size / n_heads = {self.head_dim} is odd: rotary embeddings rotate pairs of numbers, "
                "so the head width must be even"
            )
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}: "
                "every key/value head serves the same number of query heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.n_heads

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under our own field names (JSON-ready); `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "model config") -> ModelConfig:
        """Build a config from our own field names.

        Args:
            values: field name to value; `rope_scaling` may be a mapping.
            source: origin of the values, for error messages.

        Raises:
            ModelError: an unknown or missing field, or a value that `ModelConfig` rejects.
        """
        known = dict(_check_keys(cls, values, source))
        try:
            scaling = known.get("rope_scaling")
            if isinstance(scaling, Mapping):
                known["rope_scaling"] = RopeScaling(**_check_keys(RopeScaling, scaling, f"{source}: rope_scaling"))
            return cls(**known)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from error


_INT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_heads",
    "n_kv_heads",
    "n_layers",
    "max_position_embeddings",
)


_MAX_SIZE = 2**31 - 1
_MAX_SIZES = {"n_layers": 2**16}
"""Largest sizes: far above every model, and small enough that whatever walks over the layers ends."""


def check_size(name: str, value: object) -> int:
    """Return a whole number of a model or batch; raise ModelError if it is below 1 or absurdly large."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} = {reprlib.repr(value)}: must be a whole number of at least 1")
    if value > _MAX_SIZES.get(name, _MAX_SIZE):
        raise ModelError(f"{name} = {reprlib.repr(value)}: must be at most {_MAX_SIZES.get(name, _MAX_SIZE)}")
    return value


def _positive_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ModelError(f"{name} = {reprlib.repr(value)}: must be a finite number greater than 0")
    return float(value)


def _check_keys(cls: type, values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return `values`; raise ModelError unless its keys are fields of `cls` with all required ones."""
    from dataclasses import MISSING

    names = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is MISSING}
    if unknown := sorted(set(values) - names):
        raise ModelError(f"{source}: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(names))}")
    if missing := sorted(required - set(values)):
        raise ModelError(f"{source}: field {missing[0]!r} is missing")
    return values
