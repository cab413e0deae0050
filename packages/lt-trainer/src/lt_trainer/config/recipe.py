"""Recipe resolution: merges sources by precedence and records the origin of every field.

`load` merges sources field by field, later ones overriding earlier ones:

    defaults < preset < base < run TOML < upper-case hyperparameters < --set a.b=c

It returns a `ResolvedRecipe`: the recipe, the origin of every field, and the engine sections that could not be checked
because the engine's package is not installed here. A preset fills model fields that no source gives. Unknown keys,
wrong types and contradictions raise `RecipeError`s that name field, value, source and remedy.

`schedule.max_steps` may be given in epochs and `schedule.warmup_steps` as a percentage (`run_length`).

Paths in a recipe (`data.store`, `data.validation`, `run.dir`) are relative to the current directory, not to the file.

Cost: milliseconds; neither numpy nor torch is imported, and only the specs of engines that are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lt_trainer.config.fields import build, flatten, leaf_values, leaves, named_section_leaves, suggest
from lt_trainer.config.run_length import parse_run_length, steps_from_epochs, steps_from_fraction
from lt_trainer.config.sections.checkpoint import CheckpointOptions
from lt_trainer.config.sections.model import ModelOptions
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.config.sections.run import RunOptions
from lt_trainer.config.sections.schedule import ScheduleOptions
from lt_trainer.config.sources import (
    DEFAULT,
    Assignment,
    coerce_assignments,
    drop_empty_tables,
    engine_tables,
    hyperparameter_assignments,
    parse_set_option,
    read_toml,
    unflatten,
)
from lt_trainer.config.toml import dump
from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from lt_model import LlamaConfig


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """Recipe with the origin of each field."""

    recipe: Recipe
    origins: Mapping[str, str]
    """By dotted name: "default", "preset tiny-2m", "init_from PATH", "run.toml:12", "hyperparameter LEARNING_RATE",
    "--set"."""
    unchecked: tuple[str, ...] = ()
    """Engine sections ("engine.neuron") left raw, because the engine's package is not installed."""

    def is_given(self, name: str) -> bool:
        """Return True if a source gave this field, rather than a default, a preset or `init_from`."""
        origin = self.origins[name]
        return origin != DEFAULT and not origin.startswith(("preset ", "init_from "))


def load(
    path: str | Path | None = None,
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    base_name: str = "base",
) -> ResolvedRecipe:
    """Resolve a recipe from its sources.

    Args:
        path: Run TOML, or None.
        hyperparameters: Upper-case names and their values, usually strings (see `read_hyperparameters`).
        overrides: Overrides such as "optimizer.lr=1e-3".
        base: Nested tables under the file, for programs that start from a recipe of their own.
        base_name: Name of `base` in errors and origins.

    Raises:
        RecipeError: unreadable file, unknown key, wrong type, contradiction, or no data.store.
    """
    merged = {name: Assignment(value, base_name) for name, value in flatten(base or {}).items()}
    if path is not None:
        merged |= read_toml(Path(path))
    merged |= hyperparameter_assignments(hyperparameters or {}, leaves(Recipe))
    merged |= dict(parse_set_option(text) for text in overrides)
    resolved = _resolve(merged)
    if not resolved.recipe.data.source_kind:
        raise RecipeError(
            "a run needs data",
            values={"data.store": ""},
            origins=resolved.origins,
            remedy="set data.store to a token store (create one: lt data prepare SOURCE... --tokenizer PATH --out "
            "STORE), or data.synthetic to true for random ids",
        )
    return resolved


def _resolve(merged: Mapping[str, Assignment]) -> ResolvedRecipe:
    """Validate the merged assignments against the schema and construct the recipe."""
    core = {name: given for name, given in merged.items() if name.partition(".")[0] != "engine"}
    core = drop_empty_tables(core, Recipe)
    schema = leaves(Recipe) | named_section_leaves(Recipe, core)
    in_words = {
        name: number for name, given in core.items() if (number := parse_run_length(name, given.value)) is not None
    }
    values = coerce_assignments({name: given for name, given in core.items() if name not in in_words}, schema)
    origins = {name: core[name].source if name in core else DEFAULT for name in schema}
    _resolve_run_lengths(in_words, values, origins)
    _fill_from_preset(values, origins)
    _fill_from_pretrained(values, origins)
    of_engines = {name: given for name, given in merged.items() if name.partition(".")[0] == "engine"}
    engines = engine_tables(of_engines, values.get("run.engine", RunOptions.engine), origins["run.engine"])
    origins |= engines.origins
    try:
        recipe = build(Recipe, values, engine=engines.options)
    except RecipeError as exc:
        raise exc.with_origins(origins) from None
    return ResolvedRecipe(recipe=recipe, origins=origins, unchecked=engines.unchecked)


def _resolve_run_lengths(in_words: Mapping[str, Fraction], values: dict[str, Any], origins: dict[str, str]) -> None:
    """Convert run lengths in words ("3 epochs", "1%") to steps."""
    for name in ("schedule.max_steps", "schedule.warmup_steps"):  # in this order: a percentage is of max_steps
        if name not in in_words:
            continue
        if name == "schedule.max_steps":
            try:
                values[name], description = steps_from_epochs(in_words[name], values)
            except RecipeError as exc:
                raise exc.with_origins(origins) from exc
        else:
            max_steps = values.get("schedule.max_steps", ScheduleOptions.max_steps)
            values[name] = steps_from_fraction(in_words[name], max_steps)
            description = f"{float(100 * in_words[name]):g} % of {max_steps:,}"
        origins[name] = f"{origins[name]}: {description}"


def _fill_from_preset(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill model fields that no source gave from the preset; the vocabulary stays the data's."""
    name = values.get("model.preset", "")
    if not name:
        return
    from lt_model import PRESETS

    if name not in PRESETS:
        similar = suggest(name, PRESETS)
        hint = f"did you mean {similar}? " if similar else ""
        raise RecipeError(
            "unknown preset",
            values={"model.preset": name},
            origins=origins,
            remedy=f"{hint}the presets are {', '.join(PRESETS)}",
        )
    preset = _model_values(PRESETS[name])
    del preset["model.vocab_size"]
    for dotted, value in preset.items():
        if dotted not in values:
            values[dotted] = value
            origins[dotted] = f"preset {name}"


def _fill_from_pretrained(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill model fields that no source gave from the pretrained model or the run's checkpoint."""
    given = {leaf: values[f"model.{leaf}"] for leaf in leaves(ModelOptions) if f"model.{leaf}" in values}
    own = ("preset", "init_from", "init_config", "allow_tokenizer_mismatch", "resize_vocab")
    wanted = {leaf for leaf in leaves(ModelOptions) if leaf not in own and not leaf.startswith("rope_scaling.")}
    if not given.get("init_from") or not wanted - given.keys():
        return  # the recipe has all fields
    from lt_trainer.config.architecture import read_architecture

    try:
        config, where = read_architecture(
            given,
            Path(values.get("run.dir", RunOptions.dir)),
            values.get("checkpoint.resume", CheckpointOptions.resume),
        )
    except RecipeError as exc:
        raise exc.with_origins(origins) from exc
    for dotted, value in _model_values(config).items():
        if dotted not in values and not (dotted == "model.vocab_size" and given.get("resize_vocab")):
            values[dotted] = value
            origins[dotted] = f"init_from {where}"


def _model_values(config: "LlamaConfig") -> dict[str, Any]:
    """Return the fields of `[model]` that describe `config`, by dotted name."""
    plain = {f"model.{name}": value for name, value in config.to_dict().items() if name != "rope_scaling"}
    return plain | (leaf_values(config.rope_scaling, "model.rope_scaling.") if config.rope_scaling else {})


def engine_options(recipe: Recipe, name: str, options: type[T]) -> T:
    """Return an engine's options as its class, also if the recipe has them as a raw table.

    Raises:
        RecipeError: the raw table does not fit the class.
    """
    given = recipe.engine.get(name, {})
    if isinstance(given, options):
        return given
    assert isinstance(given, Mapping), given
    prefix = f"engine.{name}."
    assignments = {dotted: Assignment(value, "recipe") for dotted, value in flatten(given, prefix).items()}
    return build(options, coerce_assignments(assignments, leaves(options, prefix)), prefix)


def _values(recipe: Recipe) -> dict[str, Any]:
    """Return all values of the recipe by dotted name, with engine options."""
    values = leaf_values(recipe)
    for name, options in recipe.engine.items():
        prefix = f"engine.{name}."
        values |= flatten(options, prefix) if isinstance(options, Mapping) else leaf_values(options, prefix)
    return values


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to nested tables of plain values, for JSON."""
    return unflatten(
        {name: list(value) if isinstance(value, tuple) else value for name, value in _values(recipe).items()}
    )


def from_dict(table: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Construct a recipe from nested tables, as from `to_dict`; missing fields take their defaults.

    Raises:
        RecipeError: unknown key, wrong type or contradiction; names `source`.
    """
    return _resolve({name: Assignment(value, source) for name, value in flatten(table).items()}).recipe


def to_toml(recipe: Recipe, origins: Mapping[str, str] | None = None) -> str:
    """Convert a recipe to TOML that `load` reads back to an equal one, with `origins` as comments."""
    return dump(_values(recipe), origins)


def llama_config(recipe: Recipe, vocab_size: int) -> "LlamaConfig":
    """Return the architecture of a recipe, for data with `vocab_size` token ids.

    Raises:
        RecipeError: the recipe has another vocabulary size than the data.
    """
    from lt_model import LlamaConfig, RopeScaling

    model = recipe.model
    if model.init_from and model.vocab_size > vocab_size:
        vocab_size = model.vocab_size  # a pretrained model may have padded or additional rows
    elif model.vocab_size not in (0, vocab_size):
        raise RecipeError(
            f"the data's tokenizer has {vocab_size} ids",
            values={"model.vocab_size": model.vocab_size},
            remedy="set model.resize_vocab to true to add the missing rows, or prepare the data with the model's "
            "tokenizer"
            if model.init_from
            else f"remove model.vocab_size (VOCAB_SIZE), set it to {vocab_size}, or prepare the data again",
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
        rope_scaling=None if scaling.factor == 1 else RopeScaling(**leaf_values(scaling)),
        norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
    )
