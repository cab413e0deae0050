"""The recipe: sources and their precedence, origins, presets, engine sections, checks, and both ways of writing it."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_model import PRESETS, ModelConfig, RopeScaling
from lt_trainer import engine as engine_module
from lt_trainer.config.model_section import ModelOptions
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import engine_options, from_dict, is_default, load, model_config, to_dict, to_toml
from lt_trainer.config.section import Section, leaves, option, unflatten
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.toml import dump

STORE = {"data": {"store": "stores/train"}}


class FakeOptions(Section, table="engine.fake"):
    depth: int = option(2, "how deep")
    label: str = option("x", "a name")


class FakeSpec:
    name = "fake"
    options = FakeOptions
    capabilities: ClassVar[frozenset[str]] = frozenset()


@pytest.fixture
def only_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with one engine, called fake; lt's own engines are not installed."""
    monkeypatch.setattr(engine_module, "engine_names", lambda: ["fake"])
    monkeypatch.setattr(engine_module, "engine_spec", {"fake": FakeSpec}.__getitem__)


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 64
    return str(caught.value)


def test_later_sources_win_field_by_field_and_origins_say_so(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nstore = "stores/train"\n\n[optimizer]\nlr = 1e-3\nbeta1 = 0.5\nbeta2 = 0.6\nweight_decay = 0.0\n'
    )
    resolved = load(
        path,
        base={"optimizer": {"lr": 9e-3, "eps": 1e-6}, "run": {"seed": 7}},
        base_name="quickstart",
        hyperparameters={"BETA1": "0.7", "BETA2": "0.8"},
        overrides=["optimizer.beta2=.8", "optimizer.beta2=.9", "data.document_mask=false"],
    )
    default, made = OptimizerOptions(), resolved.recipe.optimizer
    changed = {name: value for name, value in vars(made).items() if value != getattr(default, name)}
    assert changed == {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.7, "beta2": 0.9, "eps": 1e-6}
    assert (resolved.recipe.run.seed, resolved.recipe.data.document_mask) == (7, False)
    origins = {name: origin for name, origin in resolved.origins.items() if not is_default(origin)}
    assert origins == {
        "run.seed": "quickstart",
        "data.store": str(path),
        "data.document_mask": "--set",
        "optimizer.lr": str(path),
        "optimizer.weight_decay": str(path),
        "optimizer.beta1": "hyperparameter BETA1",
        "optimizer.beta2": "--set",
        "optimizer.eps": "quickstart",
    }
    assert resolved.is_given("optimizer.lr")
    assert not resolved.is_given("optimizer.grad_clip")
    lines = to_toml(resolved.recipe, resolved.origins).splitlines()
    assert {"beta2 = 0.9  # --set", f'store = "stores/train"  # {path}', "grad_clip = 1.0  # default"} <= {*lines}


def test_every_field_has_an_origin_and_a_description() -> None:
    resolved = load(base=STORE)
    assert set(leaves(Recipe)) <= set(resolved.origins)
    assert all(field.description for field in leaves(Recipe, entry="NAME").values())


def test_store_is_required() -> None:
    assert message_of(load).startswith('data.store = "": a run needs data; set data.store to a token store (lt data ')


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[model]\nhiden_size = 512\n", "model.hiden_size = 512 (RUN): unknown field; did you mean model.hidden_size?"),
        ("[optimizer]\nseq_len = 5\n", "optimizer.seq_len = 5 (RUN): unknown field; did you mean data.seq_len?"),
        ("[batch]\nzzz = 5\n", "batch.zzz = 5 (RUN): unknown field; there are batch.global_batch_size, batch.micro"),
        ("[model]\nn_experts = 8\n", "model.n_experts = 8 (RUN): a part of the architecture, not a field; write it in"),
        ("[model]\nshape = '8 experts'\n", 'model.shape = "8 experts" (RUN): not JSON: Extra data'),
        ("batch = 5\n", "batch = 5 (RUN): not a value but a section; set its fields"),
        ('[optimizer]\nlr = "1e-x"\n', 'optimizer.lr = "1e-x" (RUN): must be a valid number'),
        (
            '[data.validation_sets.web]\nstroe = "b"\n',
            'data.validation_sets.web.stroe = "b" (RUN): unknown field; did you mean data.validation_sets.web.store?',
        ),
        ("[data.validation_sets.web]\n", "data.validation_sets.web.store is missing"),
    ],
)
def test_unknown_keys_and_wrong_types(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    assert message_of(load, path).replace(str(path), "RUN").startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert message_of(load, path).startswith(f"cannot read {path}: No such file or directory")
    for content, words in {
        b"[a\n": f"{path} is not valid TOML: ",
        b"\xff": f"{path} is not text in UTF-8; ",
        b"a = b\n": f"{path} is not valid TOML: Invalid value",
        b"a = \n": f"{path} is not valid TOML: Invalid value",
    }.items():
        path.write_bytes(content)
        message = message_of(load, path)
        assert message.startswith(words)
        assert message.endswith("; strings need quotes") == (content == b"a = b\n")


def test_malformed_sets() -> None:
    for text, problem in (("optimizer.lr", "missing ="), ("=3", "missing name")):
        assert message_of(load, base=STORE, overrides=[text]).startswith(f"--set {text}: {problem}; write section.fiel")


def test_heads_of_latent_attention_have_widths_of_their_own() -> None:
    shape = {
        **{"family": "deepseek_v3", "kv_rank": 16, "nope_width": 8, "rope_width": 4, "value_width": 6},
        **{"router_score": "sigmoid", "selection_bias": True},
    }
    given = {"hidden_size": 72, "n_heads": 8, "n_kv_heads": 8}
    options = ModelOptions(**given, shape=json.dumps(shape))
    assert (options.hidden_size, options.n_heads) == (72, 8)
    with pytest.raises(ValueError, match="the head size must be an even number"):
        ModelOptions(**given, shape=json.dumps({**shape, "kv_rank": 0}))


def test_a_preset_fills_what_is_not_given_also_of_a_section_made_in_python() -> None:
    resolved = load(base=STORE, overrides=["model.preset=llama3-8b", "data.seq_len=128"])
    config = PRESETS["llama3-8b"]
    assert model_config(resolved.recipe, config.vocab_size) == config
    assert not resolved.is_given("model.n_layers")
    assert resolved.origins["model.vocab_size"] == "default"
    given = load(base={"data": {"store": "x"}, "model": {"preset": "llama3-8b", "n_layers": 12}})
    assert (given.recipe.model.hidden_size, given.recipe.model.n_layers) == (4096, 12)
    assert (given.origins["model.hidden_size"], given.origins["model.n_layers"]) == ("preset llama3-8b", "base")
    made = ModelOptions(preset="llama3-8b", n_layers=2)
    assert (made.hidden_size, made.n_layers, made.vocab_size) == (4096, 2, 0)


def test_llama_config_takes_the_vocabulary_of_the_data_or_one_that_agrees() -> None:
    recipe = load(base=STORE, overrides=["data.seq_len=256"]).recipe
    assert model_config(recipe, 1000) == ModelConfig(vocab_size=1000, max_position_embeddings=256)
    scaled = load(base=STORE, overrides=["model.rope_scaling.factor=8", "model.max_position_embeddings=8192"]).recipe
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert model_config(scaled, 9).rope_scaling == scaling
    assert model_config(scaled, 9).max_position_embeddings == 8192
    recipe = load(base=STORE, hyperparameters={"VOCAB_SIZE": "32000"}).recipe
    assert message_of(model_config, recipe, 1000).startswith("model.vocab_size = 32000: the data's tokenizer has 1000")


@pytest.mark.usefixtures("only_fake")
def test_an_installed_engine_gets_its_own_options() -> None:
    base = {**STORE, "engine": {"fake": {"label": "y"}}}
    resolved = load(base=base, overrides=["run.engine=fake", "engine.fake.depth=5"])
    assert resolved.recipe.engine == {"fake": FakeOptions(depth=5, label="y")}
    assert resolved.origins["engine.fake.depth"] == "--set"
    assert resolved.origins["engine.fake.label"] == "base"
    assert resolved.unchecked == ()
    assert load(base=STORE, overrides=["run.engine=fake"]).recipe.engine == {"fake": FakeOptions()}
    assert message_of(load, base=STORE, overrides=["run.engine=fake", "engine.fake.dpth=5"]) == (
        "engine.fake.dpth = 5 (--set): unknown field; did you mean engine.fake.depth?"
    )


@pytest.mark.usefixtures("only_fake")
def test_an_engine_that_is_not_installed_stays_raw_and_is_reported() -> None:
    base = {**STORE, "engine": {"neuron": {"zero1": False, "sub": {"a": [1, "b"]}}}}
    resolved = load(base=base, overrides=["engine.neuron.depth=5", "engine.neuron.on=False"])
    assert resolved.recipe.engine["neuron"] == {"zero1": False, "sub": {"a": [1, "b"]}, "depth": 5, "on": False}
    assert resolved.unchecked == ("engine.gpu", "engine.neuron")
    assert resolved.origins["engine.neuron.sub.a"] == "base"
    assert from_dict(json.loads(json.dumps(to_dict(resolved.recipe)))) == resolved.recipe
    assert engine_options(Recipe(engine={"fake": {"depth": 4}}), "fake", FakeOptions) == FakeOptions(depth=4)
    assert message_of(load, base=STORE, overrides=["run.engine=gup"]) == (
        'run.engine = "gup" (--set): unknown engine; installed here: fake; lt has "gpu", which runs on '
        'NVIDIA and AMD GPUs and on CPUs, and "neuron" for AWS Trainium'
    )
    assert ": unknown engine" in message_of(load, base={**STORE, "engine": {"gup": {"x": 1}}})


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("run.dir='x'", "run.dir", "x"),
        ('run.dir="a b"', "run.dir", "a b"),
        ("run.dir=3", "run.dir", "3"),
        ("data.store=s3://b/k?v=1", "data.store", "s3://b/k?v=1"),
        ("optimizer.lr=.5", "optimizer.lr", 0.5),
        ("batch.global_batch_size=1_024", "batch.global_batch_size", 1024),
        ("data.document_mask=False", "data.document_mask", False),
        ("metrics.sinks=wandb,tensorboard", "metrics.sinks", ("wandb", "tensorboard")),
        ('metrics.sinks=["wandb"]', "metrics.sinks", ("wandb",)),
        ("metrics.sinks=", "metrics.sinks", ()),
    ],
)
def test_the_text_of_a_value(text: str, name: str, value: Any) -> None:
    found = load(base=STORE, overrides=[text]).recipe.value(name)
    assert (found, type(found)) == (value, type(value))


def test_sections_with_chosen_names_come_from_every_source_and_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\nstore = "a"\n[data.validation_sets.web]\nstore = "b"\n[data.validation_sets.code]\nstore = "c"\n'
    )
    resolved = load(path, overrides=["data.validation_sets.books-2.store=d", "data.validation_sets.code.store=e"])
    found = {name: entry.store for name, entry in resolved.recipe.data.validation_sets.items()}
    assert list(found.items()) == [("books-2", "d"), ("code", "e"), ("web", "b")]
    assert resolved.origins["data.validation_sets.web.store"] == str(path)
    assert resolved.origins["data.validation_sets.code.store"] == "--set"


word = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True)
number = st.floats(1e-12, 1e6)


VALUES = {
    **dict.fromkeys(("run.dir", "data.store", "data.tokenizer", "engine.fake.label"), word),
    **dict.fromkeys(("optimizer.eps", "model.rope_theta"), number),
    "run.seed": st.integers(0, 2**63 - 1),
    "metrics.profile_ranks": st.lists(st.integers(0, 99), min_size=1, unique=True),
}


@given(st.fixed_dictionaries(VALUES), st.dictionaries(name, word, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_recipe_is_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], sets: dict[str, str]
) -> None:
    values |= {f"data.validation_sets.{key}.store": value for key, value in sets.items()}
    values |= {"run.engine": "fake", "metrics.profile_steps": 1}
    path = tmp_path_factory.mktemp("toml") / "recipe.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "engine_names", lambda: ["fake"])
        patch.setattr(engine_module, "engine_spec", {"fake": FakeSpec}.__getitem__)
        resolved = load(base=unflatten(values))
        path.write_text(to_toml(resolved.recipe, resolved.origins), encoding="utf-8", newline="")
        assert load(path).recipe == resolved.recipe
        assert from_dict(json.loads(json.dumps(to_dict(resolved.recipe)))) == resolved.recipe


@pytest.mark.parametrize("value", ["\x1b[2J", "\x7f\x9b", "a\nb = 1", "\u2028", 'q"\\q', "\U0001f600"])
def test_no_text_of_a_recipe_is_a_terminals_or_another_line(value: str) -> None:
    text = dump({"a.b": value}, {"a.b": value})
    assert text.count("\n") == 2
    assert not any(char in text for char in "\x1b\x7f\x9b\u2028")
    assert tomllib.loads(text) == {"a": {"b": value}}


def test_missing_fields_of_an_older_recipe_take_their_defaults_and_unknown_ones_are_refused() -> None:
    assert from_dict({"data": {"store": "x"}}) == load(base={"data": {"store": "x"}}).recipe
    assert "run.sede = 1 (the manifest): " in message_of(from_dict, {"run": {"sede": 1}}, source="the manifest")


def test_importing_and_resolving_a_recipe_loads_nothing_heavy() -> None:
    program = (
        "import sys; from lt_trainer.config.recipe import load, to_toml;"
        "to_toml(load(base={'data': {'store': 'x'}}, overrides=['model.preset=tiny-2m', 'data.seq_len=64']).recipe);"
        "print([m for m in ('torch', 'numpy', 'typer', 'rich', 'tokenizers', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
