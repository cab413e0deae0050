"""Recipe resolution: merges sources by precedence and records the origin of every field.

`load` merges sources field by field, later ones overriding earlier ones:

    defaults < preset, pretrained model < base < run TOML < upper-case hyperparameters < --set a.b=c

Model fields that no source gives are those of the preset, or of the pretrained model (`model.init_from`). A model on a
hub is not read before the run opens: until then its fields have the origin "from hf://...", and `complete` fills them.
That of `model.config` is read once: with the commit in its address it stands in the run's recipe from then on.
`schedule.max_steps` may be given in epochs and `schedule.warmup_steps` as a percentage (`run_length`).

An engine registers the section `[engine.NAME]` as `options` of its spec; the section of an engine that is not installed
stays a raw table. Paths in a recipe are relative to the current directory, not to the file.

Cost: under 10 ms; neither numpy nor torch is imported, and only the specs of engines that are named.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.hyperparameters import hyperparameter_values
from lt_trainer.config.model_section import ModelOptions, architecture_values, preset_values
from lt_trainer.config.run_length import steps_from_words
from lt_trainer.config.section import (
    Given,
    Section,
    build,
    default_of,
    flatten,
    inside,
    leaves,
    parse_text,
    unflatten,
    unknown_field,
)
from lt_trainer.config.sections import CheckpointOptions, MoeOptions, Recipe, RunOptions
from lt_trainer.errors import RecipeError, as_recipe_error
from lt_trainer.toml import Text, dump, toml_value

if TYPE_CHECKING:
    from lt_model import ModelConfig

S = TypeVar("S", bound=Section)

DEFAULT = "default"
ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}
"""Engines that a recipe may name even if their package is not installed here, with that package."""
_LT_ENGINES = '"gpu", which runs on NVIDIA and AMD GPUs and on CPUs, and "neuron" for AWS Trainium'
HUB_PREFIX, PENDING = "hf://", "from hf://"
_OF_OTHER_FAMILIES = ("rope_scaling.", "head_dim", "sliding_window", "init_std", "init_residual", "shape")
"""Beginnings of model fields that Llama does without: a recipe that gives all others need not read the model."""
_NOT_ARCHITECTURE = ("preset", "config", "init_from", "init_config", "allow_tokenizer_mismatch", "resize_vocab")


def is_default(origin: str) -> bool:
    """Return True if a value with this origin is a default, which may follow from other fields."""
    return origin == DEFAULT or origin.startswith(f"{DEFAULT}: ")


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """Recipe with the origin of each field."""

    recipe: Recipe
    origins: Mapping[str, str]
    """By dotted name: "default", "default: 5 % of schedule.max_steps", "preset tiny-2m", "init_from PATH",
    "from hf://...", "run.toml", "hyperparameter LEARNING_RATE", "--set"."""

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Engine sections ("engine.neuron") left raw, because the engine's package is not installed."""
        return tuple(f"engine.{name}" for name, table in self.recipe.engine.items() if not isinstance(table, Section))

    def is_given(self, name: str) -> bool:
        """Return True if a source gave this field, rather than a default, a preset or a pretrained model."""
        origin = self.origins[name]
        from_model = origin.startswith(("preset ", "init_from ", "config ", PENDING))
        return not is_default(origin) and not from_model

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
    reads_data: bool = True,
) -> ResolvedRecipe:
    """Resolve a recipe from its sources.

    Args:
        path: Run TOML, or None.
        hyperparameters: Upper-case names and their values, usually strings (see `read_hyperparameters`).
        overrides: Overrides such as "optimizer.lr=1e-3".
        base: Nested tables under the file, for programs that start from a recipe of their own.
        base_name: Name of `base` in errors and origins.
        reads_data: Count epochs in the data; without, a run of epochs has no known length (`run_length`).

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
    resolved = _resolve(given, reads_data=reads_data)
    if not resolved.recipe.data.source_kind:
        remedy = "set data.store to a token store (lt data prepare makes one), or data.synthetic to true for random ids"
        raise RecipeError("a run needs data", values={"data.store": ""}, remedy=remedy)
    return resolved


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of a user.

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    remedy = "give the path of a TOML file"
    try:
        text = Path(path).read_bytes().decode()
    except OSError as exc:
        raise RecipeError(f"cannot read {path}: {exc.strerror}", remedy=remedy) from exc
    except UnicodeDecodeError as exc:
        raise RecipeError(f"{path} is not text in UTF-8", remedy=remedy) from exc
    try:
        return tomllib.loads(text)
    except ValueError as exc:
        remedy = "strings need quotes" if _is_bare_text(text, str(exc)) else ""
        raise RecipeError(f"{path} is not valid TOML: {exc}", remedy=remedy) from exc


def _is_bare_text(text: str, message: str) -> bool:
    """Return True if the place that an error of TOML names has text where a value should be."""
    place = re.search(r"Invalid value \(at line (\d+), column (\d+)\)", message)
    if place is None:
        return False
    line, column = text.split("\n")[int(place[1]) - 1], int(place[2]) - 1
    return re.match(r"[A-Za-z/~.]", line[column:]) is not None


def _resolve(given: Mapping[str, Given], *, reads_data: bool = True) -> ResolvedRecipe:
    """Check the merged values and make the recipe."""
    try:
        filled = {**given, **_architecture(given)}
        filled |= steps_from_words(filled, reads_data=reads_data)
        known = {name: value for name, value in filled.items() if not value.source.startswith(PENDING)}
        engines = Given(_engines(known), "")
        known = {name: value for name, value in known.items() if name.partition(".")[0] != "engine"}
        recipe = build(Recipe, known | {"engine": engines})
    except RecipeError as exc:
        raise exc.with_origins({name: source for name, (_, source) in given.items()}) from exc
    preset = recipe.model.preset
    origins = {f"model.{name}": f"preset {preset}" for name in (preset_values(preset) if preset else ())}
    origins |= {name: f"{DEFAULT}: {rule}" for name, rule in recipe.derived_defaults.items()}
    origins |= {name: source for name, (_, source) in filled.items()}
    return ResolvedRecipe(recipe=recipe, origins={name: origins.get(name, DEFAULT) for name in values_of(recipe)})


def _architecture(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return the model fields that no source gave: those of the run's checkpoint, or of the model that it names."""
    own = inside(given, "model")
    addresses = {name: value for name, value in own.items() if name in ("config", "init_from", "init_config")}
    field, address, config_file = _model_address(build(ModelOptions, addresses, "model"))
    missing = {name for name in leaves(ModelOptions) if name not in _NOT_ARCHITECTURE} - own.keys()
    if not address or all(name.startswith(_OF_OTHER_FAMILIES) for name in missing):
        return {}  # written out
    resume = build(CheckpointOptions, inside(given, "checkpoint"), "checkpoint").resume
    run_dir, is_on_hub = Path(build(RunOptions, inside(given, "run"), "run").dir), address.startswith(HUB_PREFIX)
    origin = f"{field} {address}"
    if resume and is_on_hub and field == "config":
        recorded = _recorded_from(run_dir, origin, {f"model.{name}" for name in missing})
        if recorded:
            return recorded | {"model.config": recorded["model.config"]._replace(source=own["config"].source)}
    config = _from_checkpoint(run_dir) if resume else None
    if config is not None and not is_on_hub and _recorded_value(run_dir, f"model.{field}") != address:
        _from_pretrained(field, address, config_file)  # not used, but a wrong one is no earlier run's
    if config is None and is_on_hub and not config_file:
        return {f"model.{name}": Given(None, f"from {address}") for name in missing}
    if config is None:
        config, _ = _from_pretrained(field, address, config_file)
    _check_n_layers(config, own.get("n_layers"), field, address)
    values = architecture_values(config)
    if "resize_vocab" in own and str(own["resize_vocab"].value).lower() == "true":
        values.pop("vocab_size")
    return {f"model.{name}": Given(values[name], origin) for name in missing & values.keys()}


def _check_n_layers(config: ModelConfig, n_layers: Given | None, field: str, address: str) -> None:
    """Refuse another number of layers where those of the model at `address` are listed one by one."""
    from lt_model.presets import override

    if n_layers is not None and str(n_layers.value).isdecimal():
        with as_recipe_error(address, f"model.{field}"):
            override(config, n_layers=int(n_layers.value))


def _model_address(model: ModelOptions) -> tuple[str, str, str]:
    """Return the field that names another model's architecture, its value, and the config.json if it is a file."""
    if model.init_from:
        return "init_from", model.init_from, model.init_config
    address = model.config
    file = Path(address, "config.json") if Path(address).is_dir() else Path(address)
    return "config", address, "" if address.startswith(HUB_PREFIX) else str(file)


def _recorded_from(out: Path, origin: str, names: set[str]) -> dict[str, Given]:
    """Return those of these fields that the recipe of a run has from `origin`, and its `model.config`.

    There are none where the run's recipe has one of them from elsewhere.
    """
    try:
        record = json.loads((out / "recipe.json").read_bytes())
        values, origins = flatten(record["recipe"]), dict(record["origins"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # of no run yet, or damaged: opening the run says so
    found = {name: Given(values[name], origin) for name in names if origins.get(name) == origin}
    is_whole = found and all(origins.get(name, DEFAULT) == DEFAULT for name in names - found.keys())
    return found | {"model.config": Given(values["model.config"], origin)} if is_whole else {}


def _recorded_value(out: Path, name: str) -> Any:
    """Return the value of a field in the recipe of a run; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: opening the run says so
        return flatten(json.loads((out / "recipe.json").read_bytes())["recipe"]).get(name)
    return None


def _from_checkpoint(out: Path) -> ModelConfig | None:
    """Return the architecture of the newest readable checkpoint of a run; None if there is none."""
    from lt_ckpt import Checkpoint, CheckpointError, list_steps
    from lt_model import ModelConfig

    for _, path in list_steps(out / "checkpoints"):  # newest first
        with suppress(CheckpointError):  # damaged: resuming reports it and uses an older one
            return ModelConfig.from_dict(Checkpoint.open(path).manifest.model)
    return None


def _from_pretrained(field: str, address: str, config: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a pretrained model or `model.config`, and its address, on a hub with the commit."""
    from lt_ckpt.formats import open_source, read_config
    from lt_ckpt.hub.address import Address
    from lt_ckpt.hub.model import fetch_config
    from lt_model import config_from_hf
    from lt_model.hf import check_trainable

    with as_recipe_error(address, f"model.{field}"):
        if address.startswith(HUB_PREFIX) and not config:
            values, about = fetch_config(address)
            pinned = str(replace(Address.parse(address), revision=about["revision"]))
        else:
            pinned = address
            values = read_config(Path(config)) if config else dict(open_source(address, verify=False).config)
        check_trainable(values, address)
        return config_from_hf(values), pinned


def complete(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe with what stands outside of it, read when a run opens: called once, by whatever opens it.

    These are the fields of a pretrained model on a hub, and the name of the tokenizer of the data.

    Raises:
        RecipeError: the model cannot be read, or its architecture contradicts the recipe.
    """
    from lt_data import DataError, TokenStore

    model, pending, origins = resolved.recipe.model, resolved.pending, resolved.origins
    if pending:
        field, address, file = _model_address(model)
        config, pinned = _from_pretrained(field, address, file)
        filled = {
            f"model.{name}": Given(value, f"{field} {address}") for name, value in architecture_values(config).items()
        }
        known = {name: Given(value, origins[name]) for name, value in values_of(resolved.recipe).items()}
        known = {name: value for name, value in known.items() if name not in pending}
        _check_n_layers(config, known.get("model.n_layers"), field, address)
        if field == "config":
            known["model.config"] = Given(pinned, origins["model.config"])
        resolved = _resolve(known | {name: value for name, value in filled.items() if name in pending})
    data = resolved.recipe.data
    if data.source_kind in ("store", "mixture") and resolved.origins["data.tokenizer"] == DEFAULT:
        with suppress(DataError):  # reported where the data is opened
            name = TokenStore(next(iter(data.store_paths().values()))).manifest.tokenizer.name
            recipe = resolved.recipe.model_copy(update={"data": data.model_copy(update={"tokenizer": name})})
            return replace(resolved, recipe=recipe, origins={**resolved.origins, "data.tokenizer": "the store's"})
    return resolved


def _engines(given: Mapping[str, Given]) -> dict[str, Any]:
    """Make the section of the selected and each mentioned engine; a raw table if its package is not installed.

    Raises:
        RecipeError: an engine that is neither installed nor part of lt, or an invalid option of an installed one.
    """
    from lt_trainer.engine import engine_names, engine_spec

    if "engine" in given and given["engine"].value != {}:
        values = {"engine": given["engine"].value}
        raise RecipeError("not a value but a section", values=values, remedy="set its fields")
    installed, selected = engine_names(), given.get("run.engine", Given(default_of(RunOptions, "engine"), "")).value
    tables: dict[str, dict[str, Given]] = {str(selected): {}}
    for name, value in inside(given, "engine").items():
        engine, _, option = name.partition(".")
        if not option and value.value != {}:
            raise _engine_value_error(name, value.value, str(selected))
        tables.setdefault(engine, {}).update({option: value} if option else {})
    for name in tables.keys() - {*installed, *ENGINE_PACKAGES}:
        field = "run.engine" if name == selected else f"engine.{name}"
        remedy = f"installed here: {', '.join(installed) or 'none'}; lt has {_LT_ENGINES}"
        raise RecipeError("unknown engine", values={field: name}, remedy=remedy)
    return {
        name: build(engine_spec(name).options, table, f"engine.{name}")
        if name in installed
        else unflatten({k: toml_value(v) if isinstance(v, Text) else v for k, (v, _) in table.items()})
        for name, table in tables.items()
    }


def _engine_value_error(name: str, value: Any, selected: str) -> RecipeError:
    """Return the error about `engine.NAME` with a value: an engine has a section, and an option is in one."""
    from lt_trainer.engine import engine_names, engine_spec

    installed = engine_names()
    if name in {*installed, *ENGINE_PACKAGES} or selected not in installed:
        return RecipeError("not a value but a section", values={f"engine.{name}": value}, remedy="set its fields")
    options = engine_spec(selected).options
    meant = unknown_field(f"engine.{selected}.{name}", value, options, leaves(options, f"engine.{selected}."))
    return RecipeError(meant.problem, values={f"engine.{name}": value}, remedy=meant.remedy)


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

    Of a field that a model on a hub has, only the origin is written. The default name of the tokenizer is left out: it
    stands for any store's.
    """
    pending = {name for name, origin in (origins or {}).items() if origin.startswith(PENDING)}
    values = {name: None if name in pending else value for name, value in values_of(recipe).items()}
    name, origin = recipe.data.tokenizer, (origins or {}).get("data.tokenizer", DEFAULT)
    if name == default_of(DataOptions, "tokenizer") and origin == DEFAULT:
        del values["data.tokenizer"]
    return dump(values, origins)


def check_features(model: ModelConfig, implementation: str, lacks: Collection[str] | None = None) -> None:
    """Refuse a model with features that an implementation lacks; arguments as of `ModelConfig.check_features`.

    Raises:
        RecipeError: names the field, its value and the family.
    """
    from lt_model import ModelError

    try:
        model.check_features(implementation, lacks)
    except ModelError as exc:
        raise RecipeError(str(exc)) from exc


def model_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """Return the architecture of a recipe, for data with `vocab_size` token ids.

    Raises:
        RecipeError: the recipe has another vocabulary size than the data.
    """
    from lt_model import ModelConfig, ModelError

    model = recipe.model
    if (model.init_from or model.config) and model.vocab_size > vocab_size:
        vocab_size = model.vocab_size  # a pretrained model may have padded or additional rows
    elif model.vocab_size not in (0, vocab_size):
        remedy = "set model.resize_vocab to true to add the missing rows" if model.init_from else "remove it"
        problem = f"the data's tokenizer has {vocab_size} ids"
        raise RecipeError(problem, values={"model.vocab_size": model.vocab_size}, remedy=remedy)
    same = set(ModelConfig.__dataclass_fields__) & set(ModelOptions.model_fields)
    values: dict[str, Any] = {name: getattr(model, name) for name in same} | {"vocab_size": vocab_size}
    values["max_position_embeddings"] = model.max_position_embeddings or recipe.data.seq_len
    values["rope_scaling"] = model.rope_scaling.model_dump() if model.rope_scaling.factor != 1 else None
    try:
        config = ModelConfig.from_dict({**json.loads(model.shape or "{}"), **values}, "model")
    except (ModelError, ValueError) as exc:
        raise RecipeError(str(exc), remedy="change the fields of [model]") from exc
    for table, options, names in (("moe", recipe.moe, MoeOptions.model_fields), ("parallel", recipe.parallel, ("ep",))):
        for name in () if config.has_experts else names:
            if (value := getattr(options, name)) != default_of(type(options), name):
                raise RecipeError("this model has no experts", values={f"{table}.{name}": value}, remedy="remove it")
    return config
