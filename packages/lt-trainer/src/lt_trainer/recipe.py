"""The recipe as it is read: from which sources, which of them wins, and where each part came from.

`load` lays sources over each other, later ones winning, field by field:

    defaults < preset < base < run TOML < upper-case hyperparameters < --set a.b=c

and returns a `Resolved`: the recipe, the origin of every field, and the names of engine sections that could not be
checked because the engine's package is not installed here. A preset fills the model fields that no source gives.
Unknown keys, wrong types and values that contradict each other are `RecipeError`s that name field, value, source and
remedy.

`schedule.max_steps` may be given in epochs and `schedule.warmup_steps` as a share (`horizon.py`).

Paths in a recipe (`data.store`, `data.validation`, `run.out`) are relative to the current directory, not to the file.

Cost: milliseconds; neither numpy nor torch is imported, and of the engines only the specs of those that are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lt_trainer.errors import RecipeError
from lt_trainer.fields import build, entry_leaves, flatten, leaves, suggest, values_of
from lt_trainer.horizon import epoch_steps, share_steps, spelled
from lt_trainer.resolve import (
    DEFAULT,
    Given,
    engine_tables,
    from_hyperparameters,
    from_set,
    from_toml,
    nested,
    typed,
    without_empty_tables,
)
from lt_trainer.sections import (
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    GuardOptions,
    MetricsOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    Recipe,
    RopeScalingOptions,
    RunOptions,
    ScheduleOptions,
)
from lt_trainer.toml import dump

if TYPE_CHECKING:
    from lt_model import LlamaConfig

__all__ = [
    "BatchOptions",
    "CheckpointOptions",
    "DataOptions",
    "GuardOptions",
    "MetricsOptions",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "Recipe",
    "Resolved",
    "RopeScalingOptions",
    "RunOptions",
    "ScheduleOptions",
    "engine_options",
    "from_dict",
    "llama_config",
    "load",
    "to_dict",
    "to_toml",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe and where each of its fields came from."""

    recipe: Recipe
    origins: Mapping[str, str]
    """By dotted name: "default", "preset tiny-2m", "init_from PATH", "run.toml:12", "hyperparameter LEARNING_RATE",
    "--set"."""
    unchecked: tuple[str, ...] = ()
    """Engine sections ("engine.neuron") left raw, because the package that knows their options is not installed."""

    def given(self, name: str) -> bool:
        """Whether some source gave this field, rather than a default, a preset or the model to start from."""
        origin = self.origins[name]
        return origin != DEFAULT and not origin.startswith(("preset ", "init_from "))


def load(
    path: str | Path | None = None,
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    base_name: str = "base",
) -> Resolved:
    """Resolve a recipe from its sources.

    Args:
        path: Run TOML, or None.
        hyperparameters: Upper-case names and their values, usually strings (see `lt_trainer.hyperparameters.read`).
        sets: Overrides such as "optimizer.lr=1e-3".
        base: Nested tables under the file, for programs that start from a recipe of their own.
        base_name: How errors and origins call `base`.

    Raises:
        RecipeError: unreadable file, unknown key, wrong type, contradiction, or no data.store.
    """
    merged = {name: Given(value, base_name) for name, value in flatten(base or {}).items()}
    if path is not None:
        merged |= from_toml(Path(path))
    merged |= from_hyperparameters(hyperparameters or {}, leaves(Recipe))
    merged |= dict(from_set(text) for text in sets)
    resolved = _resolve(merged)
    if not resolved.recipe.data.kind:
        raise RecipeError(
            "a run needs data",
            values={"data.store": ""},
            origins=resolved.origins,
            remedy="set data.store to a token store (make one: lt data prepare SOURCE... --tokenizer PATH --out STORE)"
            ", or data.synthetic to true for random rows",
        )
    return resolved


def _resolve(merged: Mapping[str, Given]) -> Resolved:
    """Check the winning assignments against the schema and make the recipe."""
    core = {name: given for name, given in merged.items() if name.partition(".")[0] != "engine"}
    core = without_empty_tables(core, Recipe)
    schema = leaves(Recipe) | entry_leaves(Recipe, core)
    in_words = {name: number for name, given in core.items() if (number := spelled(name, given.value)) is not None}
    values = typed({name: given for name, given in core.items() if name not in in_words}, schema)
    origins = {name: core[name].source if name in core else DEFAULT for name in schema}
    _count_steps(in_words, values, origins)
    _fill_from_preset(values, origins)
    _fill_from_pretrained(values, origins)
    of_engines = {name: given for name, given in merged.items() if name.partition(".")[0] == "engine"}
    engines = engine_tables(of_engines, values.get("run.engine", RunOptions.engine), origins["run.engine"])
    origins |= engines.origins
    try:
        recipe = build(Recipe, values, engine=engines.made)
    except RecipeError as exc:
        raise exc.located(origins) from None
    return Resolved(recipe=recipe, origins=origins, unchecked=engines.unchecked)


def _count_steps(in_words: Mapping[str, Fraction], values: dict[str, Any], origins: dict[str, str]) -> None:
    """Give lengths that are written in words ("3 epochs", "1%") as numbers of updates."""
    for name in ("schedule.max_steps", "schedule.warmup_steps"):  # in this order: a share is one of max_steps
        if name not in in_words:
            continue
        if name == "schedule.max_steps":
            try:
                values[name], told = epoch_steps(in_words[name], values)
            except RecipeError as exc:
                raise exc.located(origins) from exc
        else:
            most = values.get("schedule.max_steps", ScheduleOptions.max_steps)
            values[name], told = share_steps(in_words[name], most), f"{float(100 * in_words[name]):g} % of {most:,}"
        origins[name] = f"{origins[name]}: {told}"


def _fill_from_preset(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Give the model fields that no source gave the values of the preset; the vocabulary stays the data's."""
    name = values.get("model.preset", "")
    if not name:
        return
    from lt_model import PRESETS

    if name not in PRESETS:
        near = suggest(name, PRESETS)
        hint = f"did you mean {near}? " if near else ""
        raise RecipeError(
            "unknown preset",
            values={"model.preset": name},
            origins=origins,
            remedy=f"{hint}the presets are {', '.join(PRESETS)}",
        )
    found = _model_values(PRESETS[name])
    del found["model.vocab_size"]
    for dotted, value in found.items():
        if dotted not in values:
            values[dotted] = value
            origins[dotted] = f"preset {name}"


def _fill_from_pretrained(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Give the model fields that no source gave the values of the model to start from, or of the run's checkpoint."""
    given = {leaf: values[f"model.{leaf}"] for leaf in leaves(ModelOptions) if f"model.{leaf}" in values}
    own = ("preset", "init_from", "init_config", "init_any_tokenizer", "resize_vocab")
    wanted = {leaf for leaf in leaves(ModelOptions) if leaf not in own and not leaf.startswith("rope_scaling.")}
    if not given.get("init_from") or not wanted - given.keys():
        return  # a recipe that was written out in full says it all
    from lt_trainer.pretrained import architecture

    try:
        config, where = architecture(
            given,
            Path(values.get("run.out", RunOptions.out)),
            values.get("checkpoint.resume", CheckpointOptions.resume),
        )
    except RecipeError as exc:
        raise exc.located(origins) from exc
    for dotted, value in _model_values(config).items():
        if dotted not in values and not (dotted == "model.vocab_size" and given.get("resize_vocab")):
            values[dotted] = value
            origins[dotted] = f"init_from {where}"


def _model_values(config: "LlamaConfig") -> dict[str, Any]:
    """The fields of `[model]` that describe `config`, by dotted name."""
    plain = {f"model.{name}": value for name, value in config.to_dict().items() if name != "rope_scaling"}
    return plain | (values_of(config.rope_scaling, "model.rope_scaling.") if config.rope_scaling else {})


def engine_options(recipe: Recipe, name: str, options: type[T]) -> T:
    """The options of engine `name` as its own class, also for a recipe that was made where the class was unknown.

    Raises:
        RecipeError: the recipe holds a raw table that does not fit the class.
    """
    given = recipe.engine.get(name, {})
    if isinstance(given, options):
        return given
    assert isinstance(given, Mapping), given
    prefix = f"engine.{name}."
    assignments = {dotted: Given(value, "recipe") for dotted, value in flatten(given, prefix).items()}
    return build(options, typed(assignments, leaves(options, prefix)), prefix)


def _values(recipe: Recipe) -> dict[str, Any]:
    """Every value of the recipe by dotted name, engine options included."""
    values = values_of(recipe)
    for name, options in recipe.engine.items():
        prefix = f"engine.{name}."
        values |= flatten(options, prefix) if isinstance(options, Mapping) else values_of(options, prefix)
    return values


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested tables of plain values, for JSON."""
    return nested({name: list(value) if isinstance(value, tuple) else value for name, value in _values(recipe).items()})


def from_dict(table: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """The recipe from nested tables, as `to_dict` makes them; missing fields take their defaults.

    Raises:
        RecipeError: unknown key, wrong type or contradiction, naming `source`.
    """
    return _resolve({name: Given(value, source) for name, value in flatten(table).items()}).recipe


def to_toml(recipe: Recipe, origins: Mapping[str, str] | None = None) -> str:
    """The whole recipe as TOML, which `load` reads back to an equal recipe; `origins` are written as comments."""
    return dump(_values(recipe), origins)


def llama_config(recipe: Recipe, vocab_size: int) -> "LlamaConfig":
    """The model that a recipe describes, for data with `vocab_size` token ids.

    Raises:
        RecipeError: the recipe gives another vocabulary size than the data has.
    """
    from lt_model import LlamaConfig, RopeScaling

    model = recipe.model
    if model.init_from and model.vocab_size > vocab_size:
        vocab_size = model.vocab_size  # more rows than the data has ids: models are often padded, or had more tokens
    elif model.vocab_size not in (0, vocab_size):
        raise RecipeError(
            f"the tokenizer of the data has {vocab_size} ids",
            values={"model.vocab_size": model.vocab_size},
            remedy="set model.resize_vocab to true, which adds the rows that are missing, or prepare the data with the "
            "model's own tokenizer"
            if model.init_from
            else f"leave model.vocab_size (VOCAB_SIZE) out or set it to {vocab_size}, or prepare the data anew",
        )
    scaling = model.rope_scaling
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        n_layers=model.n_layers,
        max_position_embeddings=model.max_position_embeddings or recipe.data.seq_len,
        rope_theta=model.rope_theta,
        rope_scaling=None if scaling.factor == 1 else RopeScaling(**values_of(scaling)),
        norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
    )
