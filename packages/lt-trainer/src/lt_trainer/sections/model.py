"""`[model]`: the Llama to train."""

from dataclasses import dataclass, field

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import above_zero, at_least, wrong


@dataclass(frozen=True, kw_only=True)
class RopeScalingOptions:
    """The Llama-3.1 rule that stretches rotary wavelengths; a factor of 1 means no stretching."""

    factor: float = option(1.0, "how much long wavelengths are stretched; 1 = not at all")
    low_freq_factor: float = option(1.0, "wavelengths above original context / this are stretched in full")
    high_freq_factor: float = option(4.0, "wavelengths below original context / this stay as they are")
    original_max_position_embeddings: int = option(8192, "original context, before stretching", unit="tokens")

    def __post_init__(self) -> None:
        section = "model.rope_scaling"
        check_types(self, section)
        at_least(self, section, 1, "factor", "original_max_position_embeddings")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            names, problem = "low_freq_factor high_freq_factor", "must hold 0 < low_freq_factor < high_freq_factor"
            raise wrong(self, section, names, problem, "Llama 3.1 uses 1 and 4")
        others = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        changed = [name for name in others if getattr(self, name) != getattr(RopeScalingOptions, name)]
        if self.factor == 1 and changed:
            problem = "has no effect when model.rope_scaling.factor is 1"
            remedy = "set model.rope_scaling.factor (Llama 3.1 uses 8) or leave the section out"
            raise wrong(self, section, " ".join(changed), problem, remedy)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The Llama to train. In a recipe file, fields that are not written take the values of `preset`, if given."""

    preset: str = option("", "name of a preset (see `lt model list`); fields given beside it win")
    vocab_size: int = option(0, "vocabulary size; must agree with the data; 0 = the data's", hp="VOCAB_SIZE")
    hidden_size: int = option(768, "width of the residual stream", hp="HIDDEN_SIZE")
    intermediate_size: int = option(2072, "width inside the feed-forward blocks", hp="INTERMEDIATE_SIZE")
    n_heads: int = option(12, "attention heads", hp="N_HEADS")
    n_kv_heads: int = option(12, "key and value heads", hp="N_KV_HEADS")
    n_layers: int = option(12, "transformer blocks", hp="N_LAYERS")
    max_position_embeddings: int = option(0, "longest context the model claims; 0 = data.seq_len", unit="tokens")
    rope_theta: float = option(10000.0, "base of the rotary wavelengths")
    norm_eps: float = option(1e-5, "epsilon of the RMS norms")
    tie_word_embeddings: bool = option(False, "one matrix for input embedding and output head")
    rope_scaling: RopeScalingOptions = field(default_factory=RopeScalingOptions)
    init_from: str = option(
        "",
        "model to start from: a folder or file in any format that `lt ckpt` reads, or hf://org/name@revision; fields "
        "of this section that are not written take its values",
    )
    init_config: str = option("", "config.json of init_from, where its format carries none")
    init_any_tokenizer: bool = option(False, "start also where the ids of the data stand for other tokens than there")
    resize_vocab: bool = option(
        False,
        "give init_from's model the data's vocabulary: new rows are the mean of the others, last rows go",
    )

    def __post_init__(self) -> None:
        check_types(self, "model")
        at_least(self, "model", 0, "vocab_size", "max_position_embeddings")
        at_least(self, "model", 1, "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        above_zero(self, "model", "rope_theta", "norm_eps")
        if self.hidden_size % (2 * self.n_heads):
            problem = "every head needs an even share of the hidden size"
            remedy = f"use a hidden size that is a multiple of {2 * self.n_heads}, or another number of heads"
            raise wrong(self, "model", "hidden_size n_heads", problem, remedy)
        if self.n_heads % self.n_kv_heads:
            problem = "every key/value head must serve equally many attention heads"
            remedy = f"set model.n_kv_heads (N_KV_HEADS) to a divisor of {self.n_heads}"
            raise wrong(self, "model", "n_heads n_kv_heads", problem, remedy)
        self._check_preset_was_used()
        self._check_start()

    def _check_preset_was_used(self) -> None:
        """Only `load` fills in a preset; made by hand, its name alone would silently train the default shape."""
        if not self.preset:
            return
        from lt_model import PRESETS

        shape = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers")
        config = PRESETS.get(self.preset)
        if config is None:
            raise wrong(self, "model", "preset", "unknown preset", f"the presets are {', '.join(PRESETS)}")
        untouched = all(getattr(self, name) == getattr(ModelOptions, name) for name in shape)
        if untouched and any(getattr(self, name) != getattr(config, name) for name in shape):
            remedy = 'make the recipe with load(base={"model": {"preset": ...}}), or leave the preset out'
            raise wrong(self, "model", "preset", "the preset has no effect: every size is the default one", remedy)

    def _check_start(self) -> None:
        """What concerns the model to start from has no effect without one."""
        if not self.init_from:
            for name in ("init_config", "init_any_tokenizer", "resize_vocab"):
                if getattr(self, name):
                    problem = "has no effect without model.init_from"
                    raise wrong(self, "model", name, problem, "name the model to start from, or leave it out")
        elif self.preset:
            problem = "the model to start from brings its own architecture"
            raise wrong(self, "model", "preset init_from", problem, "leave one of the two out")
