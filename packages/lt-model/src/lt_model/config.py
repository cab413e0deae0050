"""Shape of a decoder: a frozen dataclass, validated when it is made.

`ModelConfig` holds what decides the architecture and the initial weights, and nothing about training. What differs
between families is a field; every default is Llama's. `family` names a row of `families.FAMILIES`, which `hf.py` needs
to read and write the config.json of `transformers`; the decoder never reads it. What the family cannot express is
refused here, so that every model can be exported. `to_dict`/`from_dict` use our own field names (manifests, recipes).
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, NoReturn

from lt_model.errors import ModelError
from lt_model.families import FAMILIES

CHOICES: Mapping[str, tuple[str, ...]] = {
    "norm": ("rms", "rms_plus_one", "layer"),
    "norm_place": ("pre", "post", "both"),
    "qk_norm": ("none", "head", "full"),
    "activation": ("silu", "gelu", "gelu_tanh"),
    "init_residual": ("auto", "depth", "flat"),
    "router_score": ("softmax", "sigmoid"),
}
"""Values of the fields that are one of a few words."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Change of the rotary frequencies for longer contexts; formulas in `rope.py`.

    Attributes:
        kind: "linear", "llama3" (Llama 3.1) or "yarn" (arXiv:2309.00071).
        factor: factor by which long wavelengths (linear: all) are stretched, > 0.
        low_freq_factor: llama3: wavelengths longer than original / low_freq_factor are stretched fully.
        high_freq_factor: llama3: wavelengths shorter than original / high_freq_factor stay; > low_freq_factor.
        original_max_position_embeddings: the context length (tokens) before stretching; not for linear.
        beta_fast: yarn: wavelengths with more rotations in the original context stay.
        beta_slow: yarn: those with fewer are stretched fully; at most beta_fast.
        truncate: yarn: whether the two limits are rounded outwards to whole pairs.
        magnitude: yarn: factor of cosines and sines; 0: 0.1 ln(factor) + 1.
        score_magnitude: yarn: latent attention multiplies its scores by (0.1 score_magnitude ln(factor) + 1)^2.
    """

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 0.0
    score_magnitude: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCALING_FIELDS:
            raise ModelError(f"rope_scaling.kind = {self.kind!r}: not one of {', '.join(SCALING_FIELDS)}")
        for field in fields(self):
            if field.type == "float":
                check = _float if "magnitude" in field.name else _positive_float
                object.__setattr__(self, field.name, check(f"rope_scaling.{field.name}", getattr(self, field.name)))
        check_size("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            low = f"rope_scaling.low_freq_factor = {self.low_freq_factor}"
            raise ModelError(f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be greater than {low}")
        if self.beta_fast < self.beta_slow:
            slow = f"rope_scaling.beta_slow = {self.beta_slow}"
            raise ModelError(f"rope_scaling.beta_fast = {self.beta_fast} must be at least {slow}")
        for field in fields(self):  # what the kind does not read has one value, so that equal models are equal
            if field.name not in ("kind", "factor", *SCALING_FIELDS[self.kind]):
                object.__setattr__(self, field.name, field.default)

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn" or self.magnitude:
            return self.magnitude or 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return (0.1 * self.score_magnitude * math.log(max(1.0, self.factor)) + 1.0) ** 2


SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "magnitude", "score_magnitude"),
    ),
}
"""Fields of `RopeScaling` that a kind reads, besides the factor."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What may differ between layers.

    Attributes:
        sliding: attention sees the last `sliding_window` positions only, with the angles of `sliding_rope_theta`.
        rope: queries and keys are rotated by their positions.
        experts: the feed-forward layer is a mixture of experts.
    """

    sliding: bool = False
    rope: bool = True
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of a layer: the first `width` numbers of each head are rotated."""

    theta: float
    width: int
    scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder.

    Attributes:
        vocab_size: number of token ids; no default, because the data decides it.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        n_heads: query heads.
        n_kv_heads: key/value heads; divides `n_heads` (equal: multi-head, 1: multi-query attention).
        n_layers: transformer blocks.
        max_position_embeddings: longest context (tokens) of the model.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: their change for longer contexts, or None.
        norm_eps: epsilon inside the square root of the norms.
        tie_word_embeddings: True when the output head is the input embedding.
        family: row of `families.FAMILIES`: how files spell this model.
        head_dim: width of a head; 0: hidden_size / n_heads. `head_width` is the number.
        layers: kinds of layers, repeated or cut to `n_layers`.
        sliding_window: positions that a sliding layer sees, its own included; 0: all earlier ones.
        sliding_rope_theta: rotary base of sliding layers, without scaling; 0: they rotate as the others do.
        rotary_fraction: share of each head that is rotated.
        norm: RMSNorm, RMSNorm with the weight 1 + w, or LayerNorm with bias.
        norm_place: norms before attention and feed-forward layer, after them, or both.
        parallel_residual: both read the same residual stream, and their outputs are added together.
        qkv_bias: queries, keys and values have a bias; likewise o_bias and mlp_bias.
        o_bias: see there.
        mlp_bias: see there.
        qk_norm: norm of queries and keys before their rotation: none, of each head, or of all heads together.
        activation: of the feed-forward layer.
        gated: down(activation(gate) * up), else down(activation(up)).
        embed_scale: factor of the embeddings; 0: sqrt(hidden_size).
        residual_scale: factor of what each branch adds to the residual stream.
        attention_scale: factor of the scores; 0: 1 / sqrt(head width).
        logits_divisor: logits are divided by it.
        attention_softcap: scores s become cap tanh(s / cap); 0: none.
        logits_softcap: the same for logits.
        init_std: standard deviation of initial weights.
        init_residual: o_proj and down_proj start with init_std / sqrt(2 n_layers) ("depth") or init_std ("flat");
            "auto": depth for norm_place "pre" alone, as under the others their scale is normalized away.
        kv_rank: width from which keys and values are made, in latent attention (arXiv:2405.04434); 0: plain attention.
        q_rank: width from which its queries are made; 0: from the stream itself.
        nope_width: numbers of a head's query and key that are not rotated, in latent attention.
        rope_width: numbers after them that are rotated, in neighboring pairs; all heads share those of the key.
        value_width: numbers of a head's value, in latent attention.
        n_experts: experts of a layer that has them; 0: no layer has.
        experts_per_token: the experts that compute a token, those with the largest router scores.
        expert_size: inner width of an expert.
        router_score: how scores follow from products: softmax over the experts, or the sigmoid of each.
        selection_bias: a number per expert is added to the scores for the choice, and to nothing else.
        n_groups: groups of adjacent experts; those of a token are all in `top_groups` of them, whose two best scores
            have the largest sums.
        top_groups: see there.
        normalize_top_k: the scores of a token's experts are divided by their sum.
        expert_scale: factor of these scores, after that.
        shared_expert_size: inner width of an expert that computes every token; 0: there is none.
        shared_expert_gate: the shared expert's output is multiplied by the sigmoid of a product.
        router_aux_loss_coef: what a file says of transformers' own balancing loss; kept for exports, not used.
        expert_bias: router and experts have biases.
        glu_limit: experts compute gate sigmoid(1.702 gate) (up + 1), with gates clamped to at most this and ups to this
            from both sides; 0: as feed-forward layers do.
        sinks: each head has a score beside those of its keys, which takes its share of the softmax.

    Raises:
        ModelError: a field of the wrong type or sign, sizes that do not divide, or what `family` cannot express.
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
    family: str = "llama"
    head_dim: int = 0
    layers: tuple[LayerKind, ...] = (LayerKind(),)
    sliding_window: int = 0
    sliding_rope_theta: float = 0.0
    rotary_fraction: float = 1.0
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    norm_place: Literal["pre", "post", "both"] = "pre"
    parallel_residual: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float = 0.0
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    init_std: float = 0.02
    init_residual: Literal["auto", "depth", "flat"] = "auto"
    kv_rank: int = 0
    q_rank: int = 0
    nope_width: int = 0
    rope_width: int = 0
    value_width: int = 0
    n_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    n_groups: int = 1
    top_groups: int = 1
    normalize_top_k: bool = False
    expert_scale: float = 1.0
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    router_aux_loss_coef: float = 0.0
    expert_bias: bool = False
    glu_limit: float = 0.0
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ModelError(f"rope_scaling = {self.rope_scaling!r}: must be a RopeScaling or None")
        self._check_latent()
        self._check_heads()
        self._check_layers()
        self._check_experts()
        self._check_family()
        self._check_kinds()

    def _check_latent(self) -> None:
        widths = ("nope_width", "rope_width", "value_width")
        if self.kv_rank and self.n_kv_heads != self.n_heads:
            self._refuse("n_kv_heads", f"latent attention has as many as n_heads = {self.n_heads}")
        for name in widths if self.kv_rank else (*widths, "q_rank"):
            if (getattr(self, name) > 0) != (self.kv_rank > 0):
                self._refuse(name, f"must be {'at least 1' if self.kv_rank else '0'} for kv_rank = {self.kv_rank}")

    def _check_heads(self) -> None:
        is_whole = self.head_dim == 0 and not self.kv_rank
        if (is_whole or FAMILIES[self.family].has_whole_heads) and self.hidden_size % self.n_heads:
            raise ModelError(
                f"hidden_size = {self.hidden_size} is not a multiple of n_heads = {self.n_heads}: "
                "every head needs the same width; change one of them"
            )
        if FAMILIES[self.family].has_own_head_dim:
            object.__setattr__(self, "head_dim", self.head_width)
        elif self.head_dim * self.n_heads == self.hidden_size:
            object.__setattr__(self, "head_dim", 0)
        elif self.head_dim and "head_dim" not in FAMILIES[self.family].keys:
            self._refuse("head_dim", f"family = {self.family!r} has hidden_size / n_heads; leave it out")
        if self.attention_scale == self.head_width**-0.5:
            object.__setattr__(self, "attention_scale", 0.0)
        if self.head_width % 2 and not self.kv_rank:
            name = "head_dim" if self.head_dim else "hidden_size / n_heads"
            raise ModelError(
                f"{name} = {self.head_width} is odd: rotary embeddings rotate pairs of numbers, "
                "so the head width must be even"
            )
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_width:
            share = f"{self.rotary_width} of a head's {self.head_width} numbers would be rotated"
            name = "rope_width" if self.kv_rank else "rotary_fraction"
            self._refuse(name, f"{share}; it must be an even number of them")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}: "
                "every key/value head serves the same number of query heads"
            )

    def _check_layers(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, tuple | list) else ()
        if not layers or not all(isinstance(kind, LayerKind) for kind in layers):
            self._refuse("layers", "must be LayerKinds, at least one")
        kinds = [layers[index % len(layers)] for index in range(self.n_layers)]
        if not any(kind.sliding for kind in kinds) and (self.sliding_window or self.sliding_rope_theta):
            name = "sliding_window" if self.sliding_window else "sliding_rope_theta"
            self._refuse(name, "no layer of this model has a window; leave it out")
        if not self.sliding_window and not self.sliding_rope_theta:
            kinds = [replace(kind, sliding=False) for kind in kinds]
        period = next(n for n in range(1, self.n_layers + 1) if all(a == b for a, b in zip(kinds, kinds[n:])))  # noqa: B905
        object.__setattr__(self, "layers", tuple(kinds[:period]))

    def _check_experts(self) -> None:
        if self.has_experts != any(kind.experts for kind in self.layers):
            has = "no layer" if self.has_experts else "a layer"
            self._refuse("n_experts", f"{has} of this model has experts; change layers")
        for name in ("experts_per_token", "expert_size"):
            if (getattr(self, name) > 0) != self.has_experts:
                wanted = "at least 1" if self.has_experts else "0"
                self._refuse(name, f"must be {wanted} for n_experts = {self.n_experts}")
        if self.experts_per_token > self.n_experts:
            self._refuse("experts_per_token", f"there are n_experts = {self.n_experts}")
        if self.shared_expert_size and not self.has_experts:
            self._refuse("shared_expert_size", "must be 0 for n_experts = 0")
        if self.shared_expert_gate and self.has_experts and not self.shared_expert_size:
            self._refuse("shared_expert_gate", "there is no shared expert; set shared_expert_size")
        n_experts, n_groups, top_groups = max(1, self.n_experts), self.n_groups, self.top_groups
        if n_groups < 1 or n_experts % n_groups or (n_groups > 1 and n_experts // n_groups < 2):
            self._refuse("n_groups", f"n_experts = {self.n_experts} must be equal groups of at least 2")
        if not 1 <= top_groups <= n_groups or top_groups * (n_experts // n_groups) < self.experts_per_token:
            needed = f"experts_per_token = {self.experts_per_token}"
            self._refuse("top_groups", f"must be at most n_groups = {n_groups}, and have {needed}")
        is_counted = FAMILIES[self.family].keys.get("shared_expert_size") == "n_shared_experts"
        size, shared = self.expert_size, self.shared_expert_size
        if is_counted and self.has_experts and (not shared or shared % size):
            self._refuse("shared_expert_size", f"must be a multiple of expert_size = {size}")

    def _check_family(self) -> None:
        row = FAMILIES[self.family]
        for field in fields(self):
            if field.name in row.fixed:
                wanted = row.fixed[field.name]
            elif field.default is MISSING or field.name in (*_ANY_FAMILY, *row.keys, *row.other_fields):
                continue
            else:
                wanted = field.default
            if getattr(self, field.name) != wanted:
                self._refuse(field.name, f"a model of family = {self.family!r} has {wanted!r}; change one of them")
        for key in set(row.keys.values()):
            names = [name for name, other in row.keys.items() if other == key]
            if len({getattr(self, name) for name in names}) > 1:
                raise ModelError(f"{' and '.join(names)} differ: family = {self.family!r} has one setting for them")
        if row.has_two_ropes and self.rope_scaling is not None and not self.rope_scaling.truncate:
            raise ModelError(f"rope_scaling.truncate = false: transformers ignores it in family = {self.family!r}")
        if "n_kv_heads" not in row.keys and self.n_kv_heads != self.n_heads:
            self._refuse("n_kv_heads", f"family = {self.family!r} has as many as n_heads")
        scale, has_number = self.attention_scale, row.keys.get("attention_scale") == "query_pre_attn_scalar"
        if has_number and scale and (scale < 1e-9 or max(1, round(scale**-2)) ** -0.5 != scale):
            self._refuse("attention_scale", f"family = {self.family!r} has 1 / sqrt of a whole number")

    def _check_kinds(self) -> None:
        """Check that the family can say which layers slide and which are rotated."""
        row, slides = FAMILIES[self.family], {kind.sliding for kind in self.layers}
        has_experts = [self.layer(index).experts for index in range(self.n_layers)]
        if "glu_limit" in row.keys and not self.glu_limit:
            self._refuse("glu_limit", f"family = {self.family!r} clamps its experts; take a number above 0")
        if row.dense_layers == "first" and has_experts != sorted(has_experts):
            self._refuse("layers", f"those without experts are the first of family = {self.family!r}")
        kinds = {replace(kind, experts=kind.experts and not row.dense_layers) for kind in self.layers}
        n_kinds = len(kinds) if row.sliding in ("", "all") else len({kind.experts for kind in kinds})
        if n_kinds > 1:
            self._refuse("layers", f"the layers of family = {self.family!r} are all alike")
        if row.sliding != "nope" and not all(kind.rope for kind in self.layers):
            self._refuse("layers", f"all layers of family = {self.family!r} have rotary positions")
        if row.sliding == "pattern" and True in slides and not self.sliding_window:
            self._refuse("sliding_window", f"family = {self.family!r} cannot do without its window")
        if (self.sliding_rope_theta > 0) != (row.has_two_ropes and True in slides):
            wanted = "a number above 0" if row.has_two_ropes else "0"
            self._refuse("sliding_rope_theta", f"family = {self.family!r} needs {wanted}")

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise ModelError(f"{name} = {getattr(self, name)!r}: {problem}")

    @property
    def has_experts(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return self.n_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have a feed-forward layer of `intermediate_size`."""
        return not all(self.layer(index).experts for index in range(self.n_layers))

    @property
    def head_width(self) -> int:
        """Width of the query and the key of one attention head."""
        return self.nope_width + self.rope_width if self.kv_rank else self.head_dim or self.hidden_size // self.n_heads

    @property
    def head_value_width(self) -> int:
        """Width of the value of one attention head."""
        return self.value_width or self.head_width

    @property
    def rotary_width(self) -> int:
        """Numbers of each head that are rotated."""
        return self.rope_width or int(self.head_width * self.rotary_fraction)

    def layer(self, index: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layers[index % len(self.layers)]

    def window(self, index: int) -> int:
        """Return the positions that a layer sees, its own included; 0: all earlier ones."""
        return self.sliding_window if self.layer(index).sliding else 0

    def rope(self, index: int) -> Rope | None:
        """Return the rotary positions of a layer, or None."""
        kind = self.layer(index)
        if not kind.rope:
            return None
        if kind.sliding and self.sliding_rope_theta:
            return Rope(theta=self.sliding_rope_theta, width=self.rotary_width, scaling=None)
        return Rope(theta=self.rope_theta, width=self.rotary_width, scaling=self.rope_scaling)

    def features(self) -> dict[str, Any]:
        """Return what an implementation of Llama 2 and 3 alone would compute wrongly: field to value."""
        found = {name: getattr(self, name) for name in _FEATURES if getattr(self, name) != _default(name)}
        if self.head_width * self.n_heads == self.hidden_size:
            found.pop("head_dim", None)
        if self.rope_scaling is not None and self.rope_scaling.kind != "llama3":
            found["rope_scaling.kind"] = self.rope_scaling.kind
        if not all(kind.rope for kind in self.layers):
            found["layers"] = "some without rotary positions"
        return found

    def check_features(self, implementation: str, lacks: Collection[str] | None = None) -> None:
        """Check that an implementation has all features of this model.

        Args:
            implementation: its name, for the message.
            lacks: fields of `features` that it does not read; None: all.

        Raises:
            ModelError: it lacks one; names the field, its value and the family.
        """
        for name, value in self.features().items():
            if lacks is None or name in lacks:
                raise ModelError(
                    f"{name} = {value!r} of family = {self.family!r} is not supported by {implementation} yet"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under our own field names (JSON-ready); `from_dict` reads them back.

        Fields that Llama 2 and 3 do not need are left out where they have their default.
        """
        found = asdict(self).items()
        values = {name: value for name, value in found if name in _LLAMA or getattr(self, name) != _default(name)}
        if self.layers != _default("layers"):
            values["layers"] = list(values["layers"])
        if self.rope_scaling is not None:
            kind = self.rope_scaling.kind
            names = ("factor", *SCALING_FIELDS[kind], *(("kind",) if kind != "llama3" else ()))
            values["rope_scaling"] = {name: values["rope_scaling"][name] for name in names}
        return values

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
            scaling, layers = known.get("rope_scaling"), known.get("layers")
            if isinstance(scaling, Mapping):
                known["rope_scaling"] = RopeScaling(**_check_keys(RopeScaling, scaling, f"{source}: rope_scaling"))
            if isinstance(layers, list | tuple):
                known["layers"] = tuple(
                    LayerKind(**_check_keys(LayerKind, kind, f"{source}: layers"))
                    if isinstance(kind, Mapping)
                    else kind
                    for kind in layers
                )
            return cls(**known)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from error


_LLAMA = tuple(field.name for field in fields(ModelConfig))[:11]
_ANY_FAMILY = (*_LLAMA, "family", "head_dim", "layers", "init_std", "init_residual")
"""Fields that every family can express, or that `_check_family` checks by rules of their own."""
_FEATURES = tuple(
    field.name
    for field in fields(ModelConfig)
    if field.name not in (*_LLAMA, "family", "layers", "init_std", "init_residual", "router_aux_loss_coef")
)


def _default(name: str) -> Any:
    return ModelConfig.__dataclass_fields__[name].default


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


def _float(name: str, value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _positive_float(name, value)


def _optional_size(name: str, value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool | float) else check_size(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ModelError(f"{name} = {value!r}: must be true or false")
    return value


def _word(name: str, value: object) -> object:
    choices = CHOICES.get(name, tuple(FAMILIES))
    if value not in choices:
        raise ModelError(f"{name} = {value!r}: not one of {', '.join(choices)}")
    return value


_TYPES: Mapping[str, Callable[[str, object], object]] = {"int": _optional_size, "float": _float, "bool": _flag}
_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    **{field.name: _TYPES[field.type] for field in fields(ModelConfig) if field.type in _TYPES},
    **dict.fromkeys(_LLAMA[:7], check_size),
    **dict.fromkeys(("rope_theta", "norm_eps", "rotary_fraction", "residual_scale"), _positive_float),
    **dict.fromkeys(("logits_divisor", "init_std", "expert_scale"), _positive_float),
    **dict.fromkeys((*CHOICES, "family"), _word),
}
"""Field of `ModelConfig` to the function that returns its value, or raises ModelError."""


def _check_keys(cls: type, values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return `values`; raise ModelError unless its keys are fields of `cls` with all required ones."""
    names = {field.name for field in fields(cls)}
    required = {field.name for field in fields(cls) if field.default is MISSING}
    if unknown := sorted(set(values) - names):
        raise ModelError(f"{source}: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(names))}")
    if missing := sorted(required - set(values)):
        raise ModelError(f"{source}: field {missing[0]!r} is missing")
    return values
