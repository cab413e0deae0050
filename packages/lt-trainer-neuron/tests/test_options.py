"""Options of the Trainium engine: names, defaults, what they refuse, and how they are found from a recipe."""

import re
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from lt_trainer.errors import RecipeError
from lt_trainer.fields import leaves
from lt_trainer.recipe import from_dict, load, to_dict
from lt_trainer_neuron import SPEC, NeuronOptions

STORE = {"data": {"store": "stores/train"}}


def test_names_and_defaults() -> None:
    assert asdict(NeuronOptions()) == {
        "backend": "nxd",
        "graph": "micro_batch",
        "cpu_dtype": "float32",
        "num_neuroncores": 32,
        "qkv_linear": False,
        "kv_replicator": 1,
        "fuse_qkv": False,
        "zero1": True,
        "precision": "bf16_sr",
        "nxd_grad_norm": False,
        "selective_checkpointing": True,
        "flash_attention": False,
        "save_xser": True,
        "compile_key": "warn",
        "compile_cache": "",
        "cc_flags": "--model-type=transformer",
        "max_inflight": 3,
        "malloc_arenas": 64,
    }
    assert all(leaf.help for leaf in leaves(NeuronOptions).values())


def test_the_engine_is_found_by_its_entry_point() -> None:
    (entry,) = entry_points(group="lt.engines", name="neuron")
    assert entry.load() is SPEC
    assert (SPEC.name, SPEC.options, SPEC.capabilities) == ("neuron", NeuronOptions, frozenset({"document_mask"}))


def test_a_recipe_gets_typed_options_with_origins() -> None:
    sets = ["run.engine=neuron", "engine.neuron.qkv_linear=true", "engine.neuron.kv_replicator=4"]
    resolved = load(base=STORE, sets=sets)
    assert resolved.recipe.engine == {"neuron": NeuronOptions(qkv_linear=True, kv_replicator=4)}
    assert resolved.unchecked == ()
    assert resolved.origins["engine.neuron.kv_replicator"] == "--set"
    assert resolved.origins["engine.neuron.zero1"] == "default"
    assert from_dict(to_dict(resolved.recipe)) == resolved.recipe


REFUSED = [
    (
        {"kv_replicator": 4},
        "engine.neuron.kv_replicator = 4, engine.neuron.qkv_linear = False: key/value heads are only replicated by "
        "qkv_linear; set engine.neuron.qkv_linear to true or engine.neuron.kv_replicator to 1",
    ),
    (
        {"fuse_qkv": True},
        "engine.neuron.fuse_qkv = True, engine.neuron.qkv_linear = False: there is nothing to fuse without qkv_linear; "
        "set engine.neuron.qkv_linear to true or engine.neuron.fuse_qkv to false",
    ),
    (
        {"cc_flags": "--cache_dir=/x"},
        "engine.neuron.cc_flags = '--cache_dir=/x': the compiler's cache has an option of its own; "
        "take --cache_dir out and set engine.neuron.compile_cache",
    ),
    (
        {"cpu_dtype": "float64"},
        "engine.neuron.cpu_dtype = 'float64', engine.neuron.backend = 'nxd': only the cpu backend has a choice of "
        "dtypes; set engine.neuron.precision instead",
    ),
    ({"num_neuroncores": 0}, "engine.neuron.num_neuroncores = 0: must be at least 1; use 1 or more"),
    (
        {"precision": "bf16"},
        "engine.neuron.precision = 'bf16': not one of the choices; "
        "use one of 'bf16_sr', 'downcast', 'fp32_master' (did you mean 'bf16_sr'?)",
    ),
    (
        {"zero1": 1},
        "engine.neuron.zero1 = 1: expected true or false; write true or false",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_refused_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        NeuronOptions(**values)
    assert str(caught.value) == message


def test_an_unknown_option_names_its_source() -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=STORE, sets=["engine.neuron.kv_replicatr=2"])
    assert str(caught.value) == (
        "engine.neuron.kv_replicatr = '2' (--set): unknown field; did you mean engine.neuron.kv_replicator?"
    )


def test_the_readme_lists_every_option_with_its_default() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, flags=re.MULTILINE))
    shown = {name: value.strip().strip("`") for name, value in rows.items()}
    defaults = {name: _as_toml(value) for name, value in asdict(NeuronOptions()).items()}
    assert shown == {**defaults, "compile_cache": "compiler's default"}


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
