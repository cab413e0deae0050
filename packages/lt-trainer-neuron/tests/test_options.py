"""Options of the Trainium engine: names, defaults, what they refuse, and how they are found from a recipe."""

from importlib.metadata import entry_points
from typing import Any

import pytest

from lt_trainer.config.recipe import from_dict, load, to_dict
from lt_trainer.config.section import leaves
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.options import NeuronOptions
from lt_trainer_neuron.spec import SPEC

STORE = {"data": {"store": "stores/train"}}


def test_names_and_defaults() -> None:
    assert NeuronOptions().model_dump() == {
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
    assert all(field.description for field in leaves(NeuronOptions).values())


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
    ({"kv_size_multiplier": 4}, "engine.neuron.kv_size_multiplier = 4: has no effect with qkv_linear = False; set"),
    ({"fuse_qkv": True}, "engine.neuron.fuse_qkv = True: has no effect with qkv_linear = False; set qkv_linear"),
    ({"cc_flags": "--cache_dir=/x"}, "engine.neuron.cc_flags = '--cache_dir=/x': the compiler's cache is set by"),
    ({"cpu_dtype": "float64"}, "engine.neuron.cpu_dtype = 'float64': has no effect with backend = 'nxd'; set backend"),
    ({"num_neuroncores": 0}, "engine.neuron.num_neuroncores = 0: must be at least 1"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_refused_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        NeuronOptions(**values)
    assert str(caught.value).startswith(message)


def test_an_unknown_option_names_its_source() -> None:
    with pytest.raises(RecipeError) as caught:
        load(base=STORE, overrides=["engine.neuron.kv_size_multiplir=2"])
    assert str(caught.value) == (
        "engine.neuron.kv_size_multiplir = '2' (--set): unknown field; did you mean engine.neuron.kv_size_multiplier?"
    )
