"""The recipe: sources and their precedence, origins, presets, engine sections, checks, and both ways of writing it."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lt_model import PRESETS, LlamaConfig, RopeScaling
from lt_trainer import engine as engine_module
from lt_trainer.errors import RecipeError
from lt_trainer.fields import leaves, option
from lt_trainer.recipe import (
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    MetricsOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    Recipe,
    RopeScalingOptions,
    RunOptions,
    ScheduleOptions,
    engine_options,
    from_dict,
    llama_config,
    load,
    to_dict,
    to_toml,
)

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


# ---- sources ----------------------------------------------------------------------------------------------------------


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
        sets=["optimizer.beta2=.9", "data.document_mask=false"],
    )
    optimizer = resolved.recipe.optimizer
    assert dataclasses.asdict(optimizer) == {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "beta1": 0.7,
        "beta2": 0.9,
        "eps": 1e-6,
        "grad_clip": 1.0,
    }
    assert resolved.recipe.run.seed == 7
    assert resolved.recipe.data.document_mask is False
    assert {name: resolved.origins[f"optimizer.{name}"] for name in dataclasses.asdict(optimizer)} == {
        "lr": f"{path}:5",
        "weight_decay": f"{path}:8",
        "beta1": "hyperparameter BETA1",
        "beta2": "--set",
        "eps": "quickstart",
        "grad_clip": "default",
    }
    assert resolved.origins["data.document_mask"] == "--set"
    assert resolved.given("optimizer.lr")
    assert not resolved.given("optimizer.grad_clip")


def test_the_last_set_wins() -> None:
    assert load(base=STORE, sets=["run.seed=1", "run.seed=2"]).recipe.run.seed == 2


def test_every_field_has_an_origin_and_a_description() -> None:
    resolved = load(base=STORE)
    assert set(leaves(Recipe)) <= set(resolved.origins)
    assert all(leaf.help for leaf in leaves(Recipe).values())


def test_store_is_required() -> None:
    assert message_of(load) == (
        "data.store = '' (default): a run needs data; set data.store to a token store "
        "(make one: lt data prepare SOURCE... --tokenizer PATH --out STORE)"
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
            "batch.zzz = 5 (RUN:2): unknown field; the fields of [batch] are batch.global_batch, batch.micro_batch",
        ),
        (
            "qqqq = 5\n",
            "qqqq = 5 (RUN:1): unknown field; the sections are batch, checkpoint, data, engine, metrics, model, "
            "model.rope_scaling, optimizer, parallel, run, schedule",
        ),
        (
            "[zzzzzz]\n",
            "zzzzzz = {} (RUN:1): unknown field; the sections are batch, checkpoint, data, engine, metrics, model, "
            "model.rope_scaling, optimizer, parallel, run, schedule",
        ),
        (
            "batch = 5\n",
            "batch = 5 (RUN:1): this is a section, not a value; "
            "set one of its fields: batch.global_batch, batch.micro_batch",
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
            "run.seed = True (RUN:2): expected a whole number; write it in digits, without quotes or a decimal point",
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
        f"the recipe {path} is not UTF-8 text (invalid start byte at byte 0); save it as UTF-8"
    )


@pytest.mark.parametrize(
    ("text", "problem"), [("optimizer.lr", "there is no ="), ("=3", "there is no name"), ("", "there is no name")]
)
def test_malformed_sets(text: str, problem: str) -> None:
    assert message_of(load, base=STORE, sets=[text]) == (
        f"--set {text}: {problem}; write section.field=value, for example --set optimizer.lr=1e-3"
    )


def test_a_set_value_may_hold_equals_signs() -> None:
    assert load(sets=["data.store=s3://b/k?v=1"]).recipe.data.store == "s3://b/k?v=1"


# ---- checks -----------------------------------------------------------------------------------------------------------

CHECKS = [
    (RunOptions, {"out": ""}, "run.out = '': a run needs a directory; set run.out to one, such as runs/run"),
    (RunOptions, {"seed": -1}, "run.seed = -1: must lie in [0, 2**63); use a small whole number such as 0"),
    (ModelOptions, {"vocab_size": -1}, "model.vocab_size = -1: must be at least 0; use 0 or more"),
    (ModelOptions, {"n_layers": 0}, "model.n_layers = 0: must be at least 1; use 1 or more"),
    (ModelOptions, {"norm_eps": 0}, "model.norm_eps = 0.0: must be greater than 0; the default is 1e-05"),
    (
        ModelOptions,
        {"n_heads": 7, "n_kv_heads": 7},
        "model.hidden_size = 768, model.n_heads = 7: every head needs an even share of the hidden size; "
        "use a hidden size that is a multiple of 14, or another number of heads",
    ),
    (
        ModelOptions,
        {"n_kv_heads": 5},
        "model.n_heads = 12, model.n_kv_heads = 5: every key/value head must serve equally many attention heads; "
        "set model.n_kv_heads (N_KV_HEADS) to a divisor of 12",
    ),
    (
        RopeScalingOptions,
        {"factor": 8, "low_freq_factor": 4},
        "model.rope_scaling.low_freq_factor = 4.0, model.rope_scaling.high_freq_factor = 4.0: "
        "must hold 0 < low_freq_factor < high_freq_factor; Llama 3.1 uses 1 and 4",
    ),
    (
        RopeScalingOptions,
        {"high_freq_factor": 5},
        "model.rope_scaling.high_freq_factor = 5.0: has no effect when model.rope_scaling.factor is 1; "
        "set model.rope_scaling.factor (Llama 3.1 uses 8) or leave the section out",
    ),
    (DataOptions, {"seq_len": 1}, "data.seq_len = 1: must be at least 2; use 2 or more"),
    (
        DataOptions,
        {"tokenizer": ""},
        "data.tokenizer = '': the name is empty; leave it out to use the store's tokenizer",
    ),
    (
        BatchOptions,
        {"global_batch": 256, "micro_batch": 6},
        "batch.global_batch = 256, batch.micro_batch = 6: the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 256 such as 4",
    ),
    (
        BatchOptions,
        {"global_batch": 2, "micro_batch": 4},
        "batch.global_batch = 2, batch.micro_batch = 4: the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 2 such as 2",
    ),
    (OptimizerOptions, {"lr": 0}, "optimizer.lr = 0.0: must be greater than 0; the default is 0.0016"),
    (OptimizerOptions, {"beta1": 1}, "optimizer.beta1 = 1.0: must lie in [0, 1); the default is 0.9"),
    (OptimizerOptions, {"beta2": -0.1}, "optimizer.beta2 = -0.1: must lie in [0, 1); the default is 0.95"),
    (OptimizerOptions, {"grad_clip": -1}, "optimizer.grad_clip = -1.0: must be at least 0; use 0 or more"),
    (
        ScheduleOptions,
        {"max_steps": 100},
        "schedule.warmup_steps = 500, schedule.max_steps = 100: the warm-up is longer than the run; "
        "set schedule.warmup_steps (WARMUP_STEPS) to at most 100",
    ),
    (
        ScheduleOptions,
        {"kind": "constant", "min_lr": 0},
        "schedule.min_lr = 0.0, schedule.kind = 'constant': a constant schedule has no final learning rate; "
        "leave schedule.min_lr (MIN_LR) out, or set schedule.kind to cosine or linear",
    ),
    (
        ParallelOptions,
        {"sequence_parallel": True},
        "parallel.sequence_parallel = True, parallel.tp = 1: sequence parallelism has no effect without tensor "
        "parallelism; set parallel.tp above 1 or parallel.sequence_parallel to false",
    ),
    (CheckpointOptions, {"keep_last": 0}, "checkpoint.keep_last = 0: must be at least 1; use 1 or more"),
    (MetricsOptions, {"log_interval": 0}, "metrics.log_interval = 0: must be at least 1; use 1 or more"),
    (
        Recipe,
        {"optimizer": OptimizerOptions(lr=1e-4)},
        "schedule.min_lr = 0.0004, optimizer.lr = 0.0001: the final learning rate is above the highest one; "
        "set schedule.min_lr (MIN_LR) to at most 0.0001; a tenth of it is usual",
    ),
    (
        Recipe,
        {"metrics": MetricsOptions(eval_interval=5)},
        "metrics.eval_interval = 5, data.validation = '': there is nothing to evaluate on; "
        "set data.validation to a token store, or leave metrics.eval_interval out",
    ),
    (
        Recipe,
        {"model": ModelOptions(max_position_embeddings=2048)},
        "data.seq_len = 4096, model.max_position_embeddings = 2048: rows are longer than the longest context of the "
        "model; set data.seq_len (SEQ_LEN) to at most 2048, or model.max_position_embeddings to 0",
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), CHECKS)
def test_contradictions_name_fields_values_and_remedy(cls: type, values: dict[str, Any], message: str) -> None:
    assert message_of(cls, **values) == message


def test_load_adds_the_sources_to_the_same_messages() -> None:
    assert message_of(load, base=STORE, hyperparameters={"GLOBAL_BATCH_SIZE": "6"}) == (
        "batch.global_batch = 6 (hyperparameter GLOBAL_BATCH_SIZE), batch.micro_batch = 4 (default): "
        "the global batch must be a whole number of micro-batches; "
        "set batch.micro_batch (MICRO_BATCH_SIZE) to a divisor of 6 such as 3"
    )
    assert message_of(load, base=STORE, sets=["optimizer.lr=1e-4"]).startswith(
        "schedule.min_lr = 0.0004 (default), optimizer.lr = 0.0001 (--set): the final learning rate"
    )


def test_a_constant_schedule_ignores_the_default_min_lr() -> None:
    resolved = load(base=STORE, sets=["schedule.kind=constant", "optimizer.lr=1e-4"])
    assert resolved.recipe.schedule.min_lr == 4e-4


def test_data_parallel_and_accumulation() -> None:
    parallel = ParallelOptions(tp=2, pp=2, cp=2, dp_replicate=2)
    assert parallel.data_parallel(64) == 8
    assert Recipe(parallel=parallel).accumulation(64) == 256 // (4 * 8)
    assert ParallelOptions(dp_shard=4, dp_replicate=2).data_parallel(8) == 8
    assert message_of(parallel.data_parallel, 24) == (
        "parallel.tp = 2, parallel.pp = 2, parallel.cp = 2, parallel.dp_replicate = 2, parallel.dp_shard = 0: these "
        "degrees need a multiple of 16 ranks, and the run has 24; start a multiple of 16 ranks, or change the degrees "
        "(dp_shard = 0 takes what remains)"
    )
    assert "these degrees need 4 ranks, and the run has 8" in message_of(ParallelOptions(dp_shard=4).data_parallel, 8)
    assert message_of(Recipe().accumulation, 48) == (
        "batch.global_batch = 256, batch.micro_batch = 4: 48 data parallel ranks take 192 rows at a time, which does "
        "not divide the global batch; set batch.global_batch (GLOBAL_BATCH_SIZE) to a multiple of 192, or micro_batch lower"
    )


# ---- presets and the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_what_is_not_given(name: str) -> None:
    resolved = load(base=STORE, sets=[f"model.preset={name}", "data.seq_len=128"])
    config = PRESETS[name]
    assert llama_config(resolved.recipe, config.vocab_size) == config
    assert resolved.origins["model.n_layers"] == f"preset {name}"
    assert not resolved.given("model.n_layers")
    assert resolved.origins["model.vocab_size"] == "default"


def test_fields_beside_a_preset_win() -> None:
    resolved = load(base={"data": {"store": "x"}, "model": {"preset": "llama3-8b", "n_layers": 12}})
    assert resolved.recipe.model.n_layers == 12
    assert resolved.recipe.model.hidden_size == 4096
    assert resolved.origins["model.n_layers"] == "base"


def test_unknown_preset() -> None:
    assert message_of(load, base=STORE, sets=["model.preset=llama2-7"]) == (
        "model.preset = 'llama2-7' (--set): unknown preset; did you mean llama2-7b? the presets are "
        + ", ".join(PRESETS)
    )


def test_naming_a_preset_by_hand_without_its_values_is_refused() -> None:
    assert message_of(ModelOptions, preset="llama2-7b") == (
        "model.preset = 'llama2-7b': the preset has no effect: every size is the default one; "
        'make the recipe with load(base={"model": {"preset": ...}}), or leave the preset out'
    )
    assert ModelOptions(preset="litespark-default").hidden_size == 768


def test_llama_config_takes_the_vocabulary_of_the_data() -> None:
    recipe = load(base=STORE, sets=["data.seq_len=256"]).recipe
    assert llama_config(recipe, 1000) == LlamaConfig(vocab_size=1000, max_position_embeddings=256)
    scaled = load(base=STORE, sets=["model.rope_scaling.factor=8", "model.max_position_embeddings=8192"]).recipe
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert llama_config(scaled, 9).rope_scaling == scaling
    assert llama_config(scaled, 9).max_position_embeddings == 8192


def test_a_vocabulary_that_does_not_agree() -> None:
    recipe = load(base=STORE, hyperparameters={"VOCAB_SIZE": "32000"}).recipe
    assert llama_config(recipe, 32000).vocab_size == 32000
    assert message_of(llama_config, recipe, 1000) == (
        "model.vocab_size = 32000: the tokenizer of the data has 1000 ids; "
        "leave model.vocab_size (VOCAB_SIZE) out or set it to 1000, or prepare the data anew"
    )


# ---- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_fake")
def test_an_installed_engine_gets_its_own_options() -> None:
    resolved = load(base={**STORE, "engine": {"fake": {"label": "y"}}}, sets=["run.engine=fake", "engine.fake.depth=5"])
    assert resolved.recipe.engine == {"fake": FakeOptions(depth=5, label="y")}
    assert resolved.origins["engine.fake.depth"] == "--set"
    assert resolved.origins["engine.fake.label"] == "base"
    assert resolved.unchecked == ()
    assert load(base=STORE, sets=["run.engine=fake"]).recipe.engine == {"fake": FakeOptions()}


@pytest.mark.usefixtures("only_fake")
def test_wrong_options_of_an_installed_engine() -> None:
    assert message_of(load, base=STORE, sets=["run.engine=fake", "engine.fake.dpth=5"]) == (
        "engine.fake.dpth = '5' (--set): unknown field; did you mean engine.fake.depth?"
    )
    assert message_of(load, base=STORE, sets=["engine.fake.depth=x"]).startswith(
        "engine.fake.depth = 'x' (--set): expected a whole number"
    )


@pytest.mark.usefixtures("only_fake")
def test_an_engine_that_is_not_installed_stays_raw_and_is_reported() -> None:
    base = {**STORE, "engine": {"neuron": {"zero1": False, "sub": {"a": [1, "b"]}}}}
    resolved = load(base=base, sets=["engine.neuron.depth=5", "engine.neuron.name=abc", "engine.neuron.rate=1e-3"])
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
    assert message_of(load, base=STORE, sets=["run.engine=gup"]) == (
        "run.engine = 'gup' (--set): no such engine; installed here: fake; lt has gpu, neuron"
    )
    assert message_of(load, base=STORE, sets=["engine.gup.x=1"]) == (
        "engine.gup.x = '1' (--set): not an option of an engine; "
        "write engine.<name>.<option>; the names are fake, gpu, neuron"
    )
    assert "not an option of an engine" in message_of(load, base=STORE, sets=["engine.fake=1"])
    assert "not an option of an engine" in message_of(load, base={**STORE, "engine": {"gup": {}}})


def test_engine_options_turns_a_raw_table_into_the_class() -> None:
    assert engine_options(Recipe(), "fake", FakeOptions) == FakeOptions()
    assert engine_options(Recipe(engine={"fake": {"depth": 4}}), "fake", FakeOptions) == FakeOptions(depth=4)
    made = FakeOptions(depth=9)
    assert engine_options(Recipe(engine={"fake": made}), "fake", FakeOptions) is made
    wrong = Recipe(engine={"fake": {"depht": 4}})
    assert message_of(engine_options, wrong, "fake", FakeOptions) == (
        "engine.fake.depht = 4 (recipe): unknown field; did you mean engine.fake.depth?"
    )


# ---- writing ----------------------------------------------------------------------------------------------------------

word = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
positive = st.floats(1e-12, 1e6)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Valid recipes, in every field."""
    kv, group, half = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 64))
    heads = kv * group
    seq_len = draw(st.integers(2, 10**6))
    kind = draw(st.sampled_from(["cosine", "linear", "constant"]))
    max_steps = draw(st.integers(1, 10**7))
    lr = draw(positive)
    micro = draw(st.integers(1, 64))
    tp = draw(st.integers(1, 64))
    validation = draw(st.just("") | word)
    scaling = draw(
        st.just(RopeScalingOptions())
        | st.builds(
            RopeScalingOptions, factor=st.floats(1.5, 64), original_max_position_embeddings=st.integers(1, 10**6)
        )
    )
    return Recipe(
        run=RunOptions(out=draw(word), seed=draw(st.integers(0, 2**63 - 1))),
        model=ModelOptions(
            vocab_size=draw(st.integers(0, 10**6)),
            hidden_size=2 * half * heads,
            intermediate_size=draw(st.integers(1, 10**5)),
            n_heads=heads,
            n_kv_heads=kv,
            n_layers=draw(st.integers(1, 200)),
            max_position_embeddings=draw(st.just(0) | st.integers(seq_len, 2 * 10**6)),
            rope_theta=draw(positive),
            norm_eps=draw(positive),
            tie_word_embeddings=draw(st.booleans()),
            rope_scaling=scaling,
        ),
        data=DataOptions(
            store=draw(word),
            validation=validation,
            seq_len=seq_len,
            pack=draw(st.sampled_from(["bfd", "concat"])),
            document_mask=draw(st.booleans()),
            shuffle=draw(st.booleans()),
            tokenizer=draw(word),
        ),
        batch=BatchOptions(global_batch=micro * draw(st.integers(1, 64)), micro_batch=micro),
        optimizer=OptimizerOptions(
            lr=lr,
            weight_decay=draw(st.floats(0, 10)),
            beta1=draw(st.floats(0, 1, exclude_max=True)),
            beta2=draw(st.floats(0, 1, exclude_max=True)),
            eps=draw(positive),
            grad_clip=draw(st.floats(0, 100)),
        ),
        schedule=ScheduleOptions(
            kind=kind,
            max_steps=max_steps,
            warmup_steps=draw(st.integers(0, max_steps)),
            **({} if kind == "constant" else {"min_lr": draw(st.floats(0, lr))}),
        ),
        parallel=ParallelOptions(
            n_nodes=draw(st.integers(1, 64)), tp=tp, sequence_parallel=draw(st.booleans()) and tp > 1
        ),
        checkpoint=CheckpointOptions(interval=draw(st.integers(0, 10**6)), resume=draw(st.booleans())),
        metrics=MetricsOptions(eval_interval=draw(st.integers(1, 9)) if validation else 0),
        engine={
            "fake": FakeOptions(
                depth=draw(st.integers(-9, 9)), label=draw(st.text(st.characters(exclude_categories=["Cs"])))
            )
        },
    )


@given(recipe=recipes())
@settings(max_examples=60, deadline=None)
def test_recipe_to_toml_and_back(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("toml") / "recipe.toml"
    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, engine="fake"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "engine_names", lambda: ["fake"])
        patch.setattr(engine_module, "engine_spec", {"fake": FakeSpec}.__getitem__)
        path.write_text(to_toml(recipe), encoding="utf-8", newline="")
        assert load(path).recipe == recipe
        assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_a_preset_survives_writing() -> None:
    recipe = load(base=STORE, sets=["model.preset=tiny-2m", "data.seq_len=64"]).recipe
    assert from_dict(to_dict(recipe)) == recipe


def test_toml_with_origins_is_readable() -> None:
    resolved = load(base=STORE, sets=["optimizer.lr=5e-3"])
    lines = to_toml(resolved.recipe, resolved.origins).splitlines()
    assert "lr = 0.005  # --set" in lines
    assert 'store = "stores/train"  # base' in lines
    assert "beta1 = 0.9  # default" in lines


def test_missing_fields_of_an_older_recipe_take_their_defaults_and_unknown_ones_are_refused() -> None:
    assert from_dict({"data": {"store": "x"}}) == load(base={"data": {"store": "x"}}).recipe
    assert message_of(from_dict, {"run": {"sede": 1}}, source="the checkpoint's manifest") == (
        "run.sede = 1 (the checkpoint's manifest): unknown field; did you mean run.seed?"
    )


def test_a_recipe_does_not_change_with_the_mapping_it_was_made_from() -> None:
    table: dict[str, Any] = {"fake": {"depth": 1}}
    recipe = Recipe(engine=table)
    table["other"] = {}
    assert recipe.engine == {"fake": {"depth": 1}}


def test_importing_and_resolving_a_recipe_loads_nothing_heavy() -> None:
    program = (
        "import sys; from lt_trainer.recipe import load, to_toml;"
        "to_toml(load(base={'data': {'store': 'x'}}, sets=['model.preset=tiny-2m', 'data.seq_len=64']).recipe);"
        "print([m for m in ('torch', 'numpy', 'typer', 'rich', 'tokenizers', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
