"""Recipe resolution: merges sources by precedence and records the origin of every field.

`load` merges sources field by field, later ones overriding earlier ones:

    defaults < preset, pretrained model < base < run TOML < upper-case hyperparameters < --set a.b=c

Model fields that no source gives are those of the preset, or of the pretrained model (`model.init_from`). A model on a
hub is not read before the run opens: until then its fields have the origin "from hf://...", and `complete` fills them.
`schedule.max_steps` may be given in epochs and `schedule.warmup_steps` as a percentage (`run_length`).

An engine registers the section `[engine.NAME]` as `options` of its spec; the section of an engine that is not installed
stays a raw table. Paths in a recipe are relative to the current directory, not to the file.

Cost: under 10 ms; neither numpy nor torch is imported, and only the specs of engines that are named.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.hyperparameters import hyperparameter_values
from lt_trainer.config.run_length import parse_run_length, steps_from_epochs, steps_from_fraction
from lt_trainer.config.section import Given, Section, Text, build, default_of, flatten, leaves, parse_text, unflatten
from lt_trainer.config.sections import (
    CheckpointOptions,
    ModelOptions,
    Recipe,
    RunOptions,
    architecture_values,
    preset_values,
)
from lt_trainer.config.toml import dump
from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from lt_model import LlamaConfig

S = TypeVar("S", bound=Section)

DEFAULT = "default"
ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}
"""Engines that a recipe may name even if their package is not installed here, with that package."""
HUB_PREFIX, PENDING = "hf://", "from hf://"
_NOT_ARCHITECTURE = ("preset", "init_from", "init_config", "allow_tokenizer_mismatch", "resize_vocab")


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """Recipe with the origin of each field."""

    recipe: Recipe
    origins: Mapping[str, str]
    """By dotted name: "default", "preset tiny-2m", "init_from PATH", "from hf://...", "run.toml",
    "hyperparameter LEARNING_RATE", "--set"."""
    unchecked: tuple[str, ...] = ()
    """Engine sections ("engine.neuron") left raw, because the engine's package is not installed."""

    def is_given(self, name: str) -> bool:
        """Return True if a source gave this field, rather than a default, a preset or a pretrained model."""
        origin = self.origins[name]
        return origin != DEFAULT and not origin.startswith(("preset ", "init_from ", PENDING))

    @property
    def pending(self) -> set[str]:
        """Fields whose values stand on a hub; `complete` reads them."""
        return {name for name, origin in self.origins.items() if origin.startswith(PENDING)}

    def to_dict(self) -> dict[str, Any]:
        """Return the known values as nested tables of plain values, for JSON."""
        return unflatten({name: value for name, value in values_of(self.recipe).items() if name not in self.pending})


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
    given = {name: Given(value, base_name) for name, value in flatten(base or {}).items()}
    if path is not None:
        given |= {name: Given(value, str(path)) for name, value in flatten(read_toml(Path(path))).items()}
    for name, (value, source) in hyperparameter_values(hyperparameters or {}).items():
        given[name] = Given(parse_text(value) if isinstance(value, str) else value, source)
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            remedy = "write section.field=value, for example --set optimizer.lr=1e-3"
            raise RecipeError(f"--set {text}: missing {'=' if name.strip() else 'name'}", remedy=remedy)
        given[name.strip()] = Given(parse_text(value), "--set")
    resolved = _resolve(given)
    if not resolved.recipe.data.source_kind:
        raise RecipeError(
            "a run needs data",
            values={"data.store": ""},
            remedy="set data.store to a token store (create one: lt data prepare SOURCE... --tokenizer PATH --out "
            "STORE), or data.synthetic to true for random ids",
        )
    return resolved


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of a user.

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_bytes().decode())
    except OSError as exc:
        raise RecipeError(f"cannot read {path}: {exc.strerror}", remedy="give the path of a TOML file") from exc
    except ValueError as exc:
        raise RecipeError(f"{path} is not valid TOML: {exc}", remedy="strings need quotes") from exc


def _resolve(given: dict[str, Given]) -> ResolvedRecipe:
    """Check the merged values and make the recipe."""
    of_engines = {name.partition(".")[2]: given.pop(name) for name in list(given) if name.split(".")[0] == "engine"}
    lengths = {}
    for name in ("schedule.max_steps", "schedule.warmup_steps"):
        length = parse_run_length(name, given[name].value) if name in given else None
        if length is not None:
            lengths[name] = (length, given.pop(name).source)
    given |= _architecture(given)
    if lengths:
        given |= _steps(given, lengths)
    engine = str(given["run.engine"].value) if "run.engine" in given else default_of(RunOptions, "engine")
    engines = _engines(of_engines, engine, given)
    unchecked = tuple(f"engine.{name}" for name, options in engines.items() if not isinstance(options, Section))
    origins = {name: source for name, (_, source) in given.items()}
    origins |= {f"engine.{name}": source for name, (_, source) in of_engines.items()}
    pending = {name for name, source in origins.items() if source.startswith(PENDING)}
    known = {name: value for name, value in given.items() if name not in pending}
    recipe = build(Recipe, known | {"engine": Given(engines, "")})
    found = {name: origins.get(name, DEFAULT) for name in values_of(recipe)}
    return ResolvedRecipe(recipe=recipe, origins=found, unchecked=unchecked)


def _steps(given: Mapping[str, Given], lengths: Mapping[str, tuple[Any, str]]) -> dict[str, Given]:
    """Convert run lengths in words ("3 epochs", "1%") to steps."""
    longest = {"schedule.max_steps": Given(2**62, "")} if "schedule.max_steps" in lengths else {}
    no_warmup = {"schedule.warmup_steps": Given(0, "")} if "schedule.warmup_steps" in lengths else {}
    known = {name: value for name, value in given.items() if not value.source.startswith(PENDING)}
    recipe = build(Recipe, known | longest | no_warmup)
    max_steps, steps = recipe.schedule.max_steps, dict[str, Given]()
    if longest:
        epochs, source = lengths["schedule.max_steps"]
        try:
            max_steps, text = steps_from_epochs(epochs, recipe.data, recipe.batch)
        except RecipeError as exc:
            raise exc.with_origins({name: origin for name, (_, origin) in given.items()}) from exc
        steps["schedule.max_steps"] = Given(max_steps, f"{source}: {text}")
    if no_warmup:
        share, source = lengths["schedule.warmup_steps"]
        text = f"{source}: {float(100 * share):g} % of {max_steps:,}"
        steps["schedule.warmup_steps"] = Given(steps_from_fraction(share, max_steps), text)
    return steps


def _architecture(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return the model fields that no source gave, of the preset, the pretrained model or the run's checkpoint."""
    own = {name.partition(".")[2]: value.value for name, value in given.items() if name.startswith("model.")}
    preset, address = own.get("preset"), own.get("init_from")
    if isinstance(preset, str) and preset:
        try:
            values, source = preset_values(preset), f"preset {preset}"
        except RecipeError as exc:
            raise RecipeError(exc.problem, values={"model.preset": preset}, remedy=exc.remedy).with_origins(
                {"model.preset": given["model.preset"].source}
            ) from None
    elif isinstance(address, str) and address:
        wanted = {name for name in leaves(ModelOptions) if name not in _NOT_ARCHITECTURE} - own.keys()
        if not {name for name in wanted if not name.startswith("rope_scaling.")}:
            return {}  # the recipe has all fields
        run = build(RunOptions, _inside(given, "run"), "run")
        resume = build(CheckpointOptions, _inside(given, "checkpoint"), "checkpoint").resume
        found = _from_checkpoint(Path(run.dir)) if resume else None
        if found is None and address.startswith(HUB_PREFIX) and not own.get("init_config"):
            values, source = dict.fromkeys(wanted), f"from {address}"
        else:
            try:
                config, where = found or (_from_pretrained(address, str(own.get("init_config", ""))), address)
            except RecipeError as exc:
                raise exc.with_origins({"model.init_from": given["model.init_from"].source}) from exc
            values, source = architecture_values(config), f"init_from {where}"
        if str(own.get("resize_vocab", "")).lower() in ("true", "1"):
            values.pop("vocab_size", None)
    else:
        return {}
    return {f"model.{name}": Given(value, source) for name, value in values.items() if name not in own}


def _inside(given: Mapping[str, Given], table: str) -> dict[str, Given]:
    return {name.partition(".")[2]: value for name, value in given.items() if name.startswith(f"{table}.")}


def _from_checkpoint(out: Path) -> tuple[LlamaConfig, str] | None:
    """Return the architecture of the newest readable checkpoint of a run, and its path; None if there is none."""
    from lt_ckpt import Checkpoint, CheckpointError, list_steps
    from lt_model import LlamaConfig

    for _, path in list_steps(out / "checkpoints"):  # newest first
        try:
            return LlamaConfig.from_dict(Checkpoint.open(path).manifest.model), str(path)
        except CheckpointError:
            continue  # damaged: resuming reports it and uses an older one
    return None


def _from_pretrained(address: str, config: str) -> LlamaConfig:
    """Return the architecture of a pretrained model."""
    from lt_ckpt import load_model_config
    from lt_model import config_from_hf

    with as_recipe_error(address):
        return config_from_hf(dict(load_model_config(address, config=config or None)))


@contextmanager
def as_recipe_error(address: str) -> Iterator[None]:
    """Translate errors of lt-ckpt and lt-model into RecipeErrors of `model.init_from`."""
    from lt_ckpt import CheckpointError
    from lt_model import ModelError

    try:
        yield
    except (CheckpointError, ModelError) as exc:
        raise RecipeError(str(exc), values={"model.init_from": address}) from exc


def complete(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe with what stands outside of it, read when a run opens: called once, by whatever opens it.

    These are the fields of a pretrained model on a hub, and the name of the tokenizer of the data.

    Raises:
        RecipeError: the model cannot be read, or its architecture contradicts the recipe.
    """
    recipe, origins = resolved.recipe, dict(resolved.origins)
    pending = {name.removeprefix("model.") for name in resolved.pending}
    if pending:
        model = recipe.model
        values = architecture_values(_from_pretrained(model.init_from, model.init_config))
        filled = {name: value for name, value in values.items() if name in pending}
        origins |= {f"model.{name}": f"init_from {model.init_from}" for name in filled}
        given = {name: value for name, value in flatten(model.model_dump()).items() if name not in pending}
        sections = {name: getattr(recipe, name) for name in Recipe.model_fields}
        recipe = Recipe(**{**sections, "model": ModelOptions(**unflatten(given | filled))})
        origins = {name: DEFAULT if text.startswith(PENDING) else text for name, text in origins.items()}
    is_stored = recipe.data.source_kind in ("store", "mixture")  # with other rows a tokenizer has no effect
    name = _tokenizer_name(recipe.data) if is_stored and origins.get("data.tokenizer", DEFAULT) == DEFAULT else ""
    if name:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": name})})
        origins["data.tokenizer"] = "the store's"
    return replace(resolved, recipe=recipe, origins=origins)


def _tokenizer_name(data: DataOptions) -> str:
    """Return the name of the tokenizer of the first store; "" if there is none here."""
    from lt_data import DataError, TokenStore

    for path in data.store_paths().values():
        try:
            return TokenStore.open(path).manifest.tokenizer.name
        except DataError:
            break  # reported where the data is opened
    return ""


def _engines(given: Mapping[str, Given], selected: str, recipe: Mapping[str, Given]) -> dict[str, Any]:
    """Make the section of the selected and each mentioned engine; a raw table if its package is not installed.

    Raises:
        RecipeError: an engine that is neither installed nor part of lt, or an invalid option of an installed one.
    """
    from lt_trainer.engine import engine_names, engine_spec

    installed = engine_names()
    allowed = sorted({*installed, *ENGINE_PACKAGES})
    if selected not in allowed:
        raise RecipeError(
            "unknown engine",
            values={"run.engine": selected},
            origins={"run.engine": recipe["run.engine"].source},
            remedy=f"installed here: {', '.join(installed) or 'none'}; lt has {', '.join(ENGINE_PACKAGES)}",
        )
    tables: dict[str, dict[str, Given]] = {selected: {}}
    for dotted, value in given.items():
        name, _, option = dotted.partition(".")
        if value.value == {} and not option and (not name or name in allowed):
            continue
        if not option or name not in allowed:
            raise RecipeError(
                "not an engine option",
                values={f"engine.{dotted}": value.value},
                origins={f"engine.{dotted}": value.source},
                remedy=f"write engine.<name>.<option>; the names are {', '.join(allowed)}",
            )
        tables.setdefault(name, {})[option] = value
    return {
        name: build(engine_spec(name).options, table, f"engine.{name}")
        if name in installed
        else unflatten({option: _parse_raw(value.value) for option, value in table.items()})
        for name, table in tables.items()
    }


def _parse_raw(value: Any) -> Any:
    """Parse a value of unknown type as TOML; if it is not TOML, it stays text."""
    try:
        return tomllib.loads(f"value = {value}")["value"] if isinstance(value, Text) else value
    except ValueError:
        return str(value)


def engine_options(recipe: Recipe, name: str, options: type[S]) -> S:
    """Return an engine's options as its class, also if the recipe has them as a raw table.

    Raises:
        RecipeError: the raw table does not fit the class.
    """
    given = recipe.engine.get(name, {})
    if isinstance(given, options):
        return given
    return build(options, {key: Given(value, "recipe") for key, value in flatten(given).items()}, f"engine.{name}")


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Return all values of the recipe by dotted name, with engine options, as plain JSON values."""
    return {name: value for name, value in flatten(recipe.model_dump(mode="json")).items() if value != {}}


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to nested tables of plain values, for JSON."""
    return unflatten(values_of(recipe))


def from_dict(table: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Construct a recipe from nested tables, as from `to_dict`; missing fields take their defaults.

    Raises:
        RecipeError: unknown key, wrong type or contradiction; names `source`.
    """
    return _resolve({name: Given(value, source) for name, value in flatten(table).items()}).recipe


def to_toml(recipe: Recipe, origins: Mapping[str, str] | None = None) -> str:
    """Convert a recipe to TOML that `load` reads back to an equal one, with `origins` as comments.

    Of a field that a model on a hub has, only the origin is written.
    """
    pending = {name for name, origin in (origins or {}).items() if origin.startswith(PENDING)}
    return dump({name: None if name in pending else value for name, value in values_of(recipe).items()}, origins)


def llama_config(recipe: Recipe, vocab_size: int) -> LlamaConfig:
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
    same = set(LlamaConfig.__dataclass_fields__) & set(ModelOptions.model_fields) - {"rope_scaling"}
    return LlamaConfig(
        **{name: getattr(model, name) for name in same}
        | {
            "vocab_size": vocab_size,
            "max_position_embeddings": model.max_position_embeddings or recipe.data.seq_len,
            "rope_scaling": RopeScaling(**model.rope_scaling.model_dump()) if model.rope_scaling.factor != 1 else None,
        }
    )
