"""Options of the Trainium engine: names, defaults, what they refuse, and how they are found from a recipe."""

from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

import pytest

from lt_trainer.config.fields import leaves
from lt_trainer.config.recipe import from_dict, load, to_dict
from lt_trainer.errors import RecipeError
from lt_trainer_neuron import SPEC, NeuronOptions

STORE = {"data": {"store": "stores/train"}}


def test_names_and_defaults() -> None:
    assert asdict(NeuronOptions()) == {
        "backend": "nxd",
        "graph_scope": "micro_batch",
        "cpu_dtype": "float32",
        "num_neuroncores": 32,
        "qkv_linear": False,
        "kv_size_multiplier": 1,
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
    sets = ["run.engine=neuron", "engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=4"]
    resolved = load(base=STORE, overrides=sets)
    assert resolved.recipe.engine == {"neuron": NeuronOptions(qkv_linear=True, kv_size_multiplier=4)}
    assert resolved.unchecked == ()
    assert resolved.origins["engine.neuron.kv_size_multiplier"] == "--set"
    assert resolved.origins["engine.neuron.zero1"] == "default"
    assert from_dict(to_dict(resolved.recipe)) == resolved.recipe


REFUSED = [
    (
        {"kv_size_multiplier": 4},
        "engine.neuron.kv_size_multiplier = 4, engine.neuron.qkv_linear = False: key/value heads can only be "
        "replicated with qkv_linear; set engine.neuron.qkv_linear to true or "
        "engine.neuron.kv_size_multiplier to 1",
    ),
    (
        {"fuse_qkv": True},
        "engine.neuron.fuse_qkv = True, engine.neuron.qkv_linear = False: has no effect without qkv_linear; "
        "set engine.neuron.qkv_linear to true or engine.neuron.fuse_qkv to false",
    ),
    (
        {"cc_flags": "--cache_dir=/x"},
        "engine.neuron.cc_flags = '--cache_dir=/x': the compiler's cache is set by "
        "engine.neuron.compile_cache; remove --cache_dir and set engine.neuron.compile_cache",
    ),
    (
        {"cpu_dtype": "float64"},
        "engine.neuron.cpu_dtype = 'float64', engine.neuron.backend = 'nxd': has an effect only with the cpu "
        "backend; set engine.neuron.precision instead",
    ),
    ({"num_neuroncores": 0}, "engine.neuron.num_neuroncores = 0: must be at least 1; use 1 or more"),
    (
        {"precision": "bf16"},
        "engine.neuron.precision = 'bf16': not one of the choices; "
        "use one of 'bf16_sr', 'downcast', 'fp32_master_weights' (did you mean 'bf16_sr'?)",
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
        load(base=STORE, overrides=["engine.neuron.kv_size_multiplir=2"])
    assert str(caught.value) == (
        "engine.neuron.kv_size_multiplir = '2' (--set): unknown field; did you mean engine.neuron.kv_size_multiplier?"
    )
