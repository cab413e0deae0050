"""The section `[model]`: architecture and initial weights."""

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from lt_trainer.config.section import PathText, Section, flatten, option, suggest, unflatten
from lt_trainer.errors import RecipeError
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_model import ModelConfig


class RopeScalingOptions(Section, table="model.rope_scaling"):
    """`[model.rope_scaling]`: scaling of rotary wavelengths; a factor of 1 means none."""

    needs = (("low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow", "factor"),)

    kind: Literal["linear", "llama3", "yarn"] = option("llama3", "rule of scaling, as in transformers")
    factor: float = option(1.0, "factor by which long wavelengths are scaled; 1 = none", ge=1)
    low_freq_factor: float = option(1.0, "wavelengths above original context / this are scaled fully", gt=0)
    high_freq_factor: float = option(4.0, "wavelengths below original context / this are not scaled", gt=0)
    original_max_position_embeddings: int = option(8192, "context length before scaling", unit="tokens", ge=1)
    beta_fast: float = option(32.0, "yarn: turns in that context above which a wavelength is not scaled", gt=0)
    beta_slow: float = option(1.0, "yarn: turns below which it is scaled fully", gt=0)
    truncate: bool = option(True, "yarn: round both limits to whole pairs")
    magnitude: float = option(0.0, "yarn: factor of cosines and sines; 0 = by its rule", ge=0)
    score_magnitude: float = option(0.0, "yarn: scores of latent attention times (0.1 * this * ln(factor) + 1)^2", ge=0)

    def check(self) -> None:
        """Check the order of the factors."""
        if self.low_freq_factor >= self.high_freq_factor:
            raise self.wrong("low_freq_factor high_freq_factor", "low_freq_factor must be below high_freq_factor")


class ModelOptions(Section, table="model"):
    """Architecture and initial weights; missing fields take the values of `preset`, `config` or `init_from`."""

    needs = (("init_config allow_tokenizer_mismatch resize_vocab", "init_from"),)

    preset: str = option("", "preset (see `lt model list`); fields that are given override it")
    config: PathText = option("", "config.json, a folder with one, or hf://org/name@revision; with random weights")
    vocab_size: int = option(0, "ids, as many as the data's; 0 = the data's", hyperparameter="VOCAB_SIZE", ge=0)
    hidden_size: int = option(768, "width of the residual stream", hyperparameter="HIDDEN_SIZE", ge=1)
    intermediate_size: int = option(2072, "width of feed-forward blocks", hyperparameter="INTERMEDIATE_SIZE", ge=1)
    n_heads: int = option(12, "attention heads", hyperparameter="N_HEADS", ge=1)
    n_kv_heads: int = option(12, "key and value heads", hyperparameter="N_KV_HEADS", ge=1)
    n_layers: int = option(12, "transformer blocks", hyperparameter="N_LAYERS", ge=1)
    head_dim: int = option(0, "width of a head; 0 = hidden_size / n_heads", ge=0)
    max_position_embeddings: int = option(0, "maximum context length; 0 = data.seq_len", unit="tokens", ge=0)
    rope_theta: float = option(10000.0, "base of the rotary wavelengths", gt=0)
    sliding_window: int = option(0, "tokens that sliding layers see; 0 = all", unit="tokens", ge=0)
    norm_eps: float = option(1e-5, "epsilon of the norms", gt=0)
    tie_word_embeddings: bool = option(False, "share the matrix of input embedding and output head")
    rope_scaling: RopeScalingOptions = RopeScalingOptions()
    init_std: float = option(0.02, "standard deviation of initial weights", gt=0)
    init_residual: Literal["auto", "depth", "flat"] = option(
        "auto", "o_proj and down_proj: depth = init_std / sqrt(2 n_layers), flat = init_std, auto = by the family"
    )
    shape: str = option("", "JSON of all else that a preset, config or init_from says of the architecture")
    init_from: PathText = option("", "pretrained model in any format of `lt ckpt`, or hf://org/name@revision")
    init_config: PathText = option("", "config.json of init_from, if its format has none")
    allow_tokenizer_mismatch: bool = option(False, "allow data whose token ids differ from those of init_from")
    resize_vocab: bool = option(False, "fit init_from's vocabulary to the data's: new rows are the mean of the others")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if unknown := {name: value for name, value in values.items() if name not in cls.model_fields}:
            from lt_model import ModelConfig  # which help does not load

            if wrong := {name: value for name, value in unknown.items() if name in ModelConfig.__dataclass_fields__}:
                remedy = "write it into a config.json, and name that in model.config"
                raise RecipeError("a part of the architecture, not a field", values=wrong, remedy=remedy)
        if isinstance(preset := values.get("preset"), str) and preset:
            return unflatten(preset_values(preset) | flatten(values))
        return values

    def check(self) -> None:
        """Check the sizes of the heads, and that the rest of the shape can be read."""
        try:
            shape = json.loads(self.shape or "{}")
        except ValueError as exc:
            raise self.wrong("shape", f"not JSON: {exc}") from exc
        is_latent = isinstance(shape, dict) and shape.get("kv_rank")  # heads of other widths, by ModelConfig's checks
        if not self.head_dim and not is_latent and self.hidden_size % (2 * self.n_heads):
            remedy = f"use a multiple of {2 * self.n_heads}, or another number of heads"
            raise self.wrong("hidden_size n_heads", "the head size must be an even number", remedy)
        if self.n_heads % self.n_kv_heads:
            *others, last = (str(number) for number in range(1, self.n_heads + 1) if self.n_heads % number == 0)
            remedy = f"set model.n_kv_heads to {', '.join(others)} or {last}"
            raise self.wrong("n_heads n_kv_heads", "n_heads must be a multiple of n_kv_heads", remedy)
        for one, other in (("preset", "init_from"), ("config", "init_from"), ("preset", "config")):
            if getattr(self, one) and getattr(self, other):
                raise self.wrong(f"{one} {other}", "each has an architecture of its own", "remove one of them")


def architecture_values(config: "ModelConfig") -> dict[str, Any]:
    """Return the fields of `[model]` that describe `config`, by name within the section."""
    values = {"head_dim": config.head_dim, "sliding_window": config.sliding_window, "shape": ""}
    values |= {name: value for name, value in config.to_dict().items() if value is not None}
    shape = {name: values.pop(name) for name in sorted(values.keys() - ModelOptions.model_fields.keys())}
    return flatten(values | ({"shape": json.dumps(shape)} if shape else {}))


def preset_values(name: str) -> dict[str, Any]:
    """Return the fields of `[model]` that a preset sets; the vocabulary stays the data's.

    Raises:
        RecipeError: there is no such preset.
    """
    from lt_model import PRESETS

    if name not in PRESETS:
        similar = suggest(name, PRESETS)
        meant = f"did you mean {format_value(similar)}? " if similar else ""
        raise RecipeError("unknown preset", values={"preset": name}, remedy=f"{meant}`lt model list` shows all presets")
    return {field: value for field, value in architecture_values(PRESETS[name]).items() if field != "vocab_size"}
