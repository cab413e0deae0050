"""`[model]`: Llama architecture and initial weights."""

from dataclasses import dataclass, field

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least, require_positive


@dataclass(frozen=True, kw_only=True)
class RopeScalingOptions:
    """Llama-3.1 scaling of rotary wavelengths; a factor of 1 means none."""

    factor: float = option(1.0, "factor by which long wavelengths are scaled; 1 = none")
    low_freq_factor: float = option(1.0, "wavelengths above original context / this are scaled fully")
    high_freq_factor: float = option(4.0, "wavelengths below original context / this are not scaled")
    original_max_position_embeddings: int = option(8192, "context length before scaling", unit="tokens")

    def __post_init__(self) -> None:
        section = "model.rope_scaling"
        check_types(self, section)
        require_at_least(self, section, 1, "factor", "original_max_position_embeddings")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            names, problem = "low_freq_factor high_freq_factor", "must be 0 < low_freq_factor < high_freq_factor"
            raise field_error(self, section, names, problem, "Llama 3.1 uses 1 and 4")
        others = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        changed = [name for name in others if getattr(self, name) != getattr(RopeScalingOptions, name)]
        if self.factor == 1 and changed:
            problem = "has no effect when model.rope_scaling.factor is 1"
            remedy = "set model.rope_scaling.factor (Llama 3.1 uses 8), or remove the section"
            raise field_error(self, section, " ".join(changed), problem, remedy)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Llama architecture and initial weights.

    In a recipe file, missing fields take the values of `preset`.
    """

    preset: str = option("", "preset (see `lt model list`); fields that are given override it")
    vocab_size: int = option(0, "vocabulary size; must match the data; 0 = the data's", hyperparameter="VOCAB_SIZE")
    hidden_size: int = option(768, "width of the residual stream", hyperparameter="HIDDEN_SIZE")
    intermediate_size: int = option(2072, "width inside the feed-forward blocks", hyperparameter="INTERMEDIATE_SIZE")
    n_heads: int = option(12, "attention heads", hyperparameter="N_HEADS")
    n_kv_heads: int = option(12, "key and value heads", hyperparameter="N_KV_HEADS")
    n_layers: int = option(12, "transformer blocks", hyperparameter="N_LAYERS")
    max_position_embeddings: int = option(
        0, "maximum context length in the model's config; 0 = data.seq_len", unit="tokens"
    )
    rope_theta: float = option(10000.0, "base of the rotary wavelengths")
    norm_eps: float = option(1e-5, "epsilon of the RMS norms")
    tie_word_embeddings: bool = option(False, "share the matrix of input embedding and output head")
    rope_scaling: RopeScalingOptions = field(default_factory=RopeScalingOptions)
    init_from: str = option(
        "",
        "pretrained model: a folder or file in any format that `lt ckpt` reads, or hf://org/name@revision; missing "
        "fields of this section take its values",
    )
    init_config: str = option("", "config.json of init_from, if its format has none")
    allow_tokenizer_mismatch: bool = option(
        False,
        "allow data whose token ids differ from those of init_from",
        former_name="init_any_tokenizer",
    )
    resize_vocab: bool = option(
        False,
        "resize init_from's vocabulary to the data's: new rows are the mean of the others, surplus rows are dropped",
    )

    def __post_init__(self) -> None:
        check_types(self, "model")
        require_at_least(self, "model", 0, "vocab_size", "max_position_embeddings")
        require_at_least(self, "model", 1, "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        require_positive(self, "model", "rope_theta", "norm_eps")
        if self.hidden_size % (2 * self.n_heads):
            problem = "the head size must be an even number"
            remedy = f"use a hidden size that is a multiple of {2 * self.n_heads}, or another number of heads"
            raise field_error(self, "model", "hidden_size n_heads", problem, remedy)
        if self.n_heads % self.n_kv_heads:
            problem = "n_heads must be a multiple of n_kv_heads"
            remedy = f"set model.n_kv_heads (N_KV_HEADS) to a divisor of {self.n_heads}"
            raise field_error(self, "model", "n_heads n_kv_heads", problem, remedy)
        self._check_preset_applied()
        self._check_init_from()

    def _check_preset_applied(self) -> None:
        """Raise if the preset was not applied: only `load` does so, else the default shape would be trained."""
        if not self.preset:
            return
        from lt_model import PRESETS

        shape = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        config = PRESETS.get(self.preset)
        if config is None:
            raise field_error(self, "model", "preset", "unknown preset", f"the presets are {', '.join(PRESETS)}")
        untouched = all(getattr(self, name) == getattr(ModelOptions, name) for name in shape)
        if untouched and any(getattr(self, name) != getattr(config, name) for name in shape):
            remedy = 'create the recipe with load(base={"model": {"preset": ...}}), or remove the preset'
            raise field_error(self, "model", "preset", "the preset was not applied: every size is the default", remedy)

    def _check_init_from(self) -> None:
        """Raise if an option of `init_from` is given without it."""
        if not self.init_from:
            for name in ("init_config", "allow_tokenizer_mismatch", "resize_vocab"):
                if getattr(self, name):
                    problem = "has no effect without model.init_from"
                    raise field_error(self, "model", name, problem, "set model.init_from, or remove it")
        elif self.preset:
            problem = "the pretrained model has its own architecture"
            raise field_error(self, "model", "preset init_from", problem, "remove one of the two")
