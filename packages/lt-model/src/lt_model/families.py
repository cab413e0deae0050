"""Model families of `transformers` as rows: what is fixed, the keys of config.json, the names of tensors in files.

A row is data alone, in `families.json`; `hf.py` reads and writes config.json by it, `ModelConfig` refuses what it
cannot express, and lt-ckpt converts tensors by it. To add a family: a row there and a case in
`tests/helpers/family_models.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

COMMON_KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "init_std": "initializer_range",
}
"""Field of `ModelConfig` to key of config.json, where the row names no other."""
COMMON_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
"""What an absent key means to transformers, where the row names nothing else; sizes of a model mean nothing."""
COMMON_REQUIRED: Mapping[str, Any] = {"clip_qkv": None, "is_causal": True, "per_layer_config": None}
"""Keys with one supported value in every family."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of one number."""
DENSE_KEYS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "listed": ("decoder_sparse_step", "mlp_only_layers"),
    "first": ("first_k_dense_replace",),
}
"""Keys that say which layers have no experts, by `Family.dense_layers`."""
COMMON_IGNORED = frozenset(
    "_name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label "  # noqa: SIM905
    "is_encoder_decoder label2id model_type output_attentions output_hidden_states pad_token_id "
    "problem_type quantization_config return_dict torch_dtype transformers_version use_cache".split()
)
DROPOUTS = tuple(f"{place}_dropout" for place in ("attention", "hidden", "residual", "embedding"))
DROPOUTS += ("resid_pdrop", "embd_pdrop")
"""Keys that must be 0 for training, and change nothing else."""
SLIDING_KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("layer_types",),
    "all": ("sliding_window",),
    "last": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "pattern": ("sliding_window", "layer_types"),
    "nope": ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"),
}
"""Keys that say which layers slide, by `Family.sliding`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to a family.

    Attributes:
        architecture: class of transformers.
        since: the oldest transformers with the family.
        other_types: further `model_type`s of its files, which name `architecture` in `architectures`.
        fixed: fields of `ModelConfig` with one value in the whole family.
        own_keys: field to key of config.json, beyond `COMMON_KEYS` or in place of it; None: it has no key.
        defaults: what an absent key means, beyond `COMMON_DEFAULTS`.
        required: keys with one supported value, beyond `COMMON_REQUIRED`.
        ignored: keys without effect on a decoder's output, beyond `COMMON_IGNORED`.
        sliding: which layers slide where a file does not list them: none, all, those from `max_window_layers` on, all
            but each `period`-th, or those without rotary positions, which are each `period`-th.
        period: see there.
        period_key: key of the period, or "" where it is the same in every file.
        has_whole_heads: hidden_size is a multiple of n_heads, whatever a head's width is.
        has_own_head_dim: a head's width does not follow from hidden_size and n_heads.
        has_two_ropes: sliding layers have a rotary base of their own, and no scaling.
        local_theta_key: key of that base before transformers 5, or "".
        dense_layers: which layers may lack experts: none, those listed and all but each n-th, or the first ones.
        has_extra_layers: files may have layers beyond the model's, which predict further tokens and are not read.
        partial_key: key of the rotated share of a head before transformers 5, or "" where all is rotated.
        has_our_names_in_modules: transformers' modules have our names, and `renames` is of files alone.
        has_transposed_experts: files have experts as [experts, in, out], gates and ups in alternate columns, and so
            their biases.
        has_torchtitan_names: torchtitan has names for all of the family's tensors, and rows in transformers' order.
        renames: part of our tensor names to part of theirs, in order.
        fused: their tensor of a layer to ours, which it has one below the other ("rows"), or head by head ("heads").
    """

    architecture: str
    since: str
    other_types: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own_keys: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    sliding: Literal["", "all", "last", "pattern", "nope"] = ""
    period: int = 1
    period_key: str = ""
    has_whole_heads: bool = False
    has_own_head_dim: bool = False
    has_two_ropes: bool = False
    local_theta_key: str = ""
    dense_layers: Literal["", "listed", "first"] = ""
    has_extra_layers: bool = False
    has_our_names_in_modules: bool = False
    has_transposed_experts: bool = False
    has_torchtitan_names: bool = False
    partial_key: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[tuple[str, ...], Literal["rows", "heads"]]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """Field to key of config.json."""
        return {name: key for name, key in {**COMMON_KEYS, **self.own_keys}.items() if key is not None}

    @cached_property
    def other_fields(self) -> frozenset[str]:
        """Fields that are read from several keys."""
        found = {
            "sliding_window": self.sliding,
            "sliding_rope_theta": self.has_two_ropes,
            "rotary_fraction": self.partial_key,
        }
        return frozenset(name for name, is_read in found.items() if is_read)

    @property
    def theta_key(self) -> str:
        """Key of the rotary base before transformers 5."""
        return "rotary_emb_base" if self.partial_key == "rotary_pct" else "rope_theta"

    @property
    def read_keys(self) -> frozenset[str]:
        """Every key of config.json that decides the model."""
        found = {*self.keys.values(), "rope_parameters", "rope_scaling", self.theta_key}
        found |= {self.partial_key or "partial_rotary_factor", "original_max_position_embeddings", "head_dim"}
        found |= {*DENSE_KEYS[self.dense_layers], *SLIDING_KEYS[self.sliding], self.period_key, self.local_theta_key}
        if "n_experts" in self.keys:
            found |= {*EXPERT_COUNTS}
        return frozenset(found - self.ignored - {""})


def _family(row: Mapping[str, Any]) -> Family:
    lists = {
        "other_types": tuple(row.get("other_types", ())),
        "ignored": frozenset(row.get("ignored", ())),
        "renames": tuple((ours, theirs) for ours, theirs in row.get("renames", ())),
        "fused": {key: (tuple(parts), order) for key, (parts, order) in row.get("fused", {}).items()},
    }
    return Family(**{**row, **lists})


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, Family] = {name: _family(row) for name, row in _ROWS.items()}
"""Families by transformers' model_type."""
