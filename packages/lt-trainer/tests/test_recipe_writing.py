"""Recipe to TOML and JSON and back, for random valid recipes and for a few chosen ones."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_trainer import engine as engine_module
from lt_trainer.config.fields import option
from lt_trainer.config.recipe import from_dict, load, to_dict, to_toml
from lt_trainer.config.sections.batch import BatchOptions, RampOptions
from lt_trainer.config.sections.checkpoint import CheckpointOptions
from lt_trainer.config.sections.data import DataOptions, SourceOptions, ValidationOptions
from lt_trainer.config.sections.metrics import MetricsOptions
from lt_trainer.config.sections.model import ModelOptions, RopeScalingOptions
from lt_trainer.config.sections.optimizer import OptimizerOptions
from lt_trainer.config.sections.parallel import ParallelOptions
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.config.sections.run import RunOptions
from lt_trainer.config.sections.schedule import ScheduleOptions
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


word = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
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
    named = draw(st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True), word, max_size=3))
    phases = draw(st.lists(st.integers(1, 10**9), max_size=3, unique=True).map(sorted)) if named else []
    weights = st.floats(0, 1e6)
    sources = {
        name: SourceOptions(
            store=store,
            weight=draw(weights),
            phase_weights=tuple(draw(weights) for _ in phases),
            max_epochs=draw(st.integers(0, 9)),
        )
        for name, store in named.items()
    }
    batch = micro * draw(st.integers(2, 64))
    start = draw(st.sampled_from([0, micro * (batch // micro - 1)]))
    scaling = draw(
        st.just(RopeScalingOptions())
        | st.builds(
            RopeScalingOptions, factor=st.floats(1.5, 64), original_max_position_embeddings=st.integers(1, 10**6)
        )
    )
    return Recipe(
        run=RunOptions(dir=draw(word), seed=draw(st.integers(0, 2**63 - 1))),
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
            store="" if named else draw(word),
            mixture=sources,
            phase_rows=tuple(phases),
            validation_sets={name: ValidationOptions(store=store) for name, store in named.items()},
            validation=validation,
            seq_len=seq_len,
            packing=draw(st.sampled_from(["bfd", "concat"])),
            document_mask=draw(st.booleans()),
            shuffle=draw(st.booleans()),
            tokenizer=draw(word),
        ),
        batch=BatchOptions(
            global_batch_size=batch,
            micro_batch_size=micro,
            ramp=RampOptions(start=start, tokens=draw(st.integers(1, 10**9)) if start else 0),
        ),
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
        metrics=MetricsOptions(validation_interval=draw(st.integers(1, 9)) if validation else 0),
        engine={
            "fake": FakeOptions(
                depth=draw(st.integers(-9, 9)),
                label=draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
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
    recipe = load(base=STORE, overrides=["model.preset=tiny-2m", "data.seq_len=64"]).recipe
    assert from_dict(to_dict(recipe)) == recipe


def test_toml_with_origins_is_readable() -> None:
    resolved = load(base=STORE, overrides=["optimizer.lr=5e-3"])
    lines = to_toml(resolved.recipe, resolved.origins).splitlines()
    assert "lr = 0.005  # --set" in lines
    assert 'store = "stores/train"  # base' in lines
    assert "beta1 = 0.9  # default" in lines


def test_missing_fields_of_an_older_recipe_take_their_defaults_and_unknown_ones_are_refused() -> None:
    assert from_dict({"data": {"store": "x"}}) == load(base={"data": {"store": "x"}}).recipe
    with pytest.raises(RecipeError) as caught:
        from_dict({"run": {"sede": 1}}, source="the manifest")
    assert str(caught.value) == "run.sede = 1 (the manifest): unknown field; did you mean run.seed?"


def test_a_recipe_does_not_change_with_the_mapping_it_was_made_from() -> None:
    table: dict[str, Any] = {"fake": {"depth": 1}}
    recipe = Recipe(engine=table)
    table["other"] = {}
    assert recipe.engine == {"fake": {"depth": 1}}


def test_importing_and_resolving_a_recipe_loads_nothing_heavy() -> None:
    program = (
        "import sys; from lt_trainer.config.recipe import load, to_toml;"
        "to_toml(load(base={'data': {'store': 'x'}}, overrides=['model.preset=tiny-2m', 'data.seq_len=64']).recipe);"
        "print([m for m in ('torch', 'numpy', 'typer', 'rich', 'tokenizers', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
