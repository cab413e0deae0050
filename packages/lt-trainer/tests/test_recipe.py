"""The recipe: sources and their precedence, origins, presets, engine sections, checks, and both ways of writing it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lt_model import PRESETS, LlamaConfig, RopeScaling
from lt_trainer import engine as engine_module
from lt_trainer.config.fields import leaves, option
from lt_trainer.config.recipe import engine_options, from_dict, llama_config, load, to_dict
from lt_trainer.config.sections.model import ModelOptions
from lt_trainer.config.sections.optimizer import OptimizerOptions
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RecipeError

STORE = {"data": {"store": "stores/train"}}


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
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
        overrides=["optimizer.beta2=.9", "data.document_mask=false"],
    )
    optimizer = resolved.recipe.optimizer
    changed = {name: value for name, value in vars(optimizer).items() if value != getattr(OptimizerOptions(), name)}
    assert changed == {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "beta1": 0.7,
        "beta2": 0.9,
        "eps": 1e-6,
    }
    assert resolved.recipe.run.seed == 7
    assert resolved.recipe.data.document_mask is False
    origins = {name: origin for name, origin in resolved.origins.items() if name.startswith("optimizer.")}
    assert origins.keys() == {name for name in leaves(Recipe) if name.startswith("optimizer.")}
    assert {name.partition(".")[2]: origin for name, origin in origins.items() if origin != "default"} == {
        "lr": f"{path}:5",
        "weight_decay": f"{path}:8",
        "beta1": "hyperparameter BETA1",
        "beta2": "--set",
        "eps": "quickstart",
    }
    assert resolved.origins["data.document_mask"] == "--set"
    assert resolved.is_given("optimizer.lr")
    assert not resolved.is_given("optimizer.grad_clip")


def test_the_last_set_wins() -> None:
    assert load(base=STORE, overrides=["run.seed=1", "run.seed=2"]).recipe.run.seed == 2


def test_every_field_has_an_origin_and_a_description() -> None:
    resolved = load(base=STORE)
    assert set(leaves(Recipe)) <= set(resolved.origins)
    assert all(leaf.help for leaf in leaves(Recipe).values())


def test_store_is_required() -> None:
    assert message_of(load) == (
        "data.store = '' (default): a run needs data; set data.store to a token store (create one: lt data prepare "
        "SOURCE... --tokenizer PATH --out STORE), or data.synthetic to true for random ids"
    )


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[model]\nhiden_size = 512\n",
            "model.hiden_size = 512 (RUN:2): unknown field; did you mean model.hidden_size?",
        ),
        ("[optimizer]\nseq_len = 5\n", "optimizer.seq_len = 5 (RUN:2): unknown field; did you mean data.seq_len?"),
        (
            "[batch]\nzzz = 5\n",
            "batch.zzz = 5 (RUN:2): unknown field; the fields of [batch] are batch.global_batch_size, "
            "batch.micro_batch_size",
        ),
        (
            "qqqq = 5\n",
            "qqqq = 5 (RUN:1): unknown field; the sections are batch, batch.ramp, checkpoint, data, engine, "
            "evaluation, fault_tolerance, metrics, model, model.rope_scaling, optimizer, optimizer.lr_scale, parallel, "
            "run, schedule",
        ),
        (
            "[zzzzzz]\n",
            "zzzzzz = {} (RUN:1): unknown field; the sections are batch, batch.ramp, checkpoint, data, engine, "
            "evaluation, fault_tolerance, metrics, model, model.rope_scaling, optimizer, optimizer.lr_scale, parallel, "
            "run, schedule",
        ),
        (
            "batch = 5\n",
            "batch = 5 (RUN:1): not a value but a section; set one of its fields: batch.global_batch_size, "
            "batch.micro_batch_size",
        ),
        (
            "[run]\nseed = { a = 1 }\n",
            "run.seed.a = 1 (RUN:2): run.seed takes a value, not a table; write run.seed = ...",
        ),
        (
            '[optimizer]\nlr = "1e-3"\n',
            "optimizer.lr = '1e-3' (RUN:2): expected a number; write it like 0.001 or 1e-3, without quotes",
        ),
        (
            "[run]\nseed = true\n",
            "run.seed = True (RUN:2): expected an integer; write it in digits, without quotes or a decimal point",
        ),
    ],
)
def test_unknown_keys_and_wrong_types(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    assert message_of(load, path).replace(str(path), "RUN") == message


def test_an_empty_known_section_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[optimizer]\n[engine]\n[data]\nstore = "x"\n')
    assert load(path).recipe.optimizer == OptimizerOptions()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert message_of(load, path) == (
        f"cannot read the recipe {path}: No such file or directory; give the path of a readable TOML file"
    )
    path.write_text("[a\n")
    assert message_of(load, path).startswith(f"the recipe {path} is not valid TOML: ")
    path.write_bytes(b"\xff")
    assert message_of(load, path) == (
        f"the recipe {path} is not UTF-8 (invalid start byte at byte 0); save it as UTF-8"
    )


@pytest.mark.parametrize(
    ("text", "problem"), [("optimizer.lr", "missing ="), ("=3", "missing name"), ("", "missing name")]
)
def test_malformed_sets(text: str, problem: str) -> None:
    assert message_of(load, base=STORE, overrides=[text]) == (
        f"--set {text}: {problem}; write section.field=value, for example --set optimizer.lr=1e-3"
    )


def test_a_set_value_may_hold_equals_signs() -> None:
    assert load(overrides=["data.store=s3://b/k?v=1"]).recipe.data.store == "s3://b/k?v=1"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_what_is_not_given(name: str) -> None:
    resolved = load(base=STORE, overrides=[f"model.preset={name}", "data.seq_len=128"])
    config = PRESETS[name]
    assert llama_config(resolved.recipe, config.vocab_size) == config
    assert resolved.origins["model.n_layers"] == f"preset {name}"
    assert not resolved.is_given("model.n_layers")
    assert resolved.origins["model.vocab_size"] == "default"


def test_fields_beside_a_preset_win() -> None:
    resolved = load(base={"data": {"store": "x"}, "model": {"preset": "llama3-8b", "n_layers": 12}})
    assert resolved.recipe.model.n_layers == 12
    assert resolved.recipe.model.hidden_size == 4096
    assert resolved.origins["model.n_layers"] == "base"


def test_unknown_preset() -> None:
    assert message_of(load, base=STORE, overrides=["model.preset=llama2-7"]) == (
        "model.preset = 'llama2-7' (--set): unknown preset; did you mean llama2-7b? the presets are "
        + ", ".join(PRESETS)
    )


def test_naming_a_preset_by_hand_without_its_values_is_refused() -> None:
    assert message_of(ModelOptions, preset="llama2-7b") == (
        "model.preset = 'llama2-7b': the preset was not applied: every size is the default; create the recipe with "
        'load(base={"model": {"preset": ...}}), or remove the preset'
    )
    assert ModelOptions(preset="litespark-default").hidden_size == 768


def test_llama_config_takes_the_vocabulary_of_the_data() -> None:
    recipe = load(base=STORE, overrides=["data.seq_len=256"]).recipe
    assert llama_config(recipe, 1000) == LlamaConfig(vocab_size=1000, max_position_embeddings=256)
    scaled = load(base=STORE, overrides=["model.rope_scaling.factor=8", "model.max_position_embeddings=8192"]).recipe
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert llama_config(scaled, 9).rope_scaling == scaling
    assert llama_config(scaled, 9).max_position_embeddings == 8192


def test_a_vocabulary_that_does_not_agree() -> None:
    recipe = load(base=STORE, hyperparameters={"VOCAB_SIZE": "32000"}).recipe
    assert llama_config(recipe, 32000).vocab_size == 32000
    assert message_of(llama_config, recipe, 1000) == (
        "model.vocab_size = 32000: the data's tokenizer has 1000 ids; remove model.vocab_size (VOCAB_SIZE), set it "
        "to 1000, or prepare the data again"
    )


@pytest.mark.usefixtures("only_fake")
def test_an_installed_engine_gets_its_own_options() -> None:
    resolved = load(
        base={**STORE, "engine": {"fake": {"label": "y"}}}, overrides=["run.engine=fake", "engine.fake.depth=5"]
    )
    assert resolved.recipe.engine == {"fake": FakeOptions(depth=5, label="y")}
    assert resolved.origins["engine.fake.depth"] == "--set"
    assert resolved.origins["engine.fake.label"] == "base"
    assert resolved.unchecked == ()
    assert load(base=STORE, overrides=["run.engine=fake"]).recipe.engine == {"fake": FakeOptions()}


@pytest.mark.usefixtures("only_fake")
def test_wrong_options_of_an_installed_engine() -> None:
    assert message_of(load, base=STORE, overrides=["run.engine=fake", "engine.fake.dpth=5"]) == (
        "engine.fake.dpth = '5' (--set): unknown field; did you mean engine.fake.depth?"
    )
    assert message_of(load, base=STORE, overrides=["engine.fake.depth=x"]).startswith(
        "engine.fake.depth = 'x' (--set): expected an integer"
    )


@pytest.mark.usefixtures("only_fake")
def test_an_engine_that_is_not_installed_stays_raw_and_is_reported() -> None:
    base = {**STORE, "engine": {"neuron": {"zero1": False, "sub": {"a": [1, "b"]}}}}
    resolved = load(base=base, overrides=["engine.neuron.depth=5", "engine.neuron.name=abc", "engine.neuron.rate=1e-3"])
    assert resolved.recipe.engine["neuron"] == {
        "zero1": False,
        "sub": {"a": [1, "b"]},
        "depth": 5,
        "name": "abc",
        "rate": 0.001,
    }
    assert resolved.unchecked == ("engine.gpu", "engine.neuron")
    assert resolved.origins["engine.neuron.sub.a"] == "base"
    again = from_dict(json.loads(json.dumps(to_dict(resolved.recipe))))
    assert again == resolved.recipe


@pytest.mark.usefixtures("only_fake")
def test_unknown_engines() -> None:
    assert message_of(load, base=STORE, overrides=["run.engine=gup"]) == (
        "run.engine = 'gup' (--set): unknown engine; installed here: fake; lt has gpu, neuron"
    )
    assert message_of(load, base=STORE, overrides=["engine.gup.x=1"]) == (
        "engine.gup.x = '1' (--set): not an engine option; write engine.<name>.<option>; the names are fake, gpu, "
        "neuron"
    )
    assert "not an engine option" in message_of(load, base=STORE, overrides=["engine.fake=1"])
    assert "not an engine option" in message_of(load, base={**STORE, "engine": {"gup": {}}})


def test_engine_options_turns_a_raw_table_into_the_class() -> None:
    assert engine_options(Recipe(), "fake", FakeOptions) == FakeOptions()
    assert engine_options(Recipe(engine={"fake": {"depth": 4}}), "fake", FakeOptions) == FakeOptions(depth=4)
    made = FakeOptions(depth=9)
    assert engine_options(Recipe(engine={"fake": made}), "fake", FakeOptions) is made
    wrong = Recipe(engine={"fake": {"depht": 4}})
    assert message_of(engine_options, wrong, "fake", FakeOptions) == (
        "engine.fake.depht = 4 (recipe): unknown field; did you mean engine.fake.depth?"
    )
