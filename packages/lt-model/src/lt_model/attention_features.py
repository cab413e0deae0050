"""What attention backends lack of the features that some models need; without torch, so that recipes are checked by it.

A feature is a field of `ModelConfig.features`: windows, capped scores, values of another width than keys, sinks.
"""

from __future__ import annotations

from collections.abc import Mapping

ATTENTION_LACKS: Mapping[str, tuple[str, ...]] = {
    "auto": (),
    "reference": (),
    "sdpa": ("attention_softcap", "sinks"),
    "cudnn": ("attention_softcap", "sinks", "value_width"),
    "flash": ("attention_softcap", "sinks", "value_width", "sliding_window"),
    "split": ("attention_softcap", "sinks"),
    "varlen": ("attention_softcap", "sinks", "value_width"),
    "flex": (),
    "flash-attn": ("sinks", "value_width"),
}
"""Attention backend to the features that it does not have."""
