"""What `compile = "auto"` decides from what a machine has, and compiled rows of several lengths."""

import numpy as np
import pytest
import torch

from lt_model.config import LayerKind, ModelConfig
from lt_model.families import FAMILIES
from lt_test_helpers.layouts import step_batch
from lt_trainer.errors import RecipeError
from lt_trainer_gpu import checks, computation
from lt_trainer_gpu.checks import parse_torch_version
from lt_trainer_gpu.compilation import choose_compile, find_missing_compiler
from lt_trainer_gpu.options import GpuOptions

PROVED = {"device_type": "cuda", "torch_version": "2.15.0+cu132", "missing_compiler": ""}


@pytest.mark.parametrize(
    ("conditions", "sets", "reason"),
    [
        ({}, {}, ""),
        ({"device_type": "cpu"}, {}, "auto compiles on cuda only, not on cpu"),
        ({"torch_version": "2.13.1"}, {}, "the parity tests with torch 2.13.1; they have with 2.11 or 2.14 or 2.15"),
        ({"missing_compiler": "Triton is not installed"}, {}, "eager, as Triton is not installed"),
        ({}, {"attention": "split"}, 'attention = "split" would be recompiled for every batch'),
    ],
)
def test_auto_compiles_with_a_proved_torch_and_a_compiler_and_else_says_why_not(
    conditions: dict, sets: dict, reason: str
) -> None:
    compiled, note = choose_compile(GpuOptions(**sets), **PROVED | conditions)
    assert compiled == (not reason)
    assert note.startswith("engine.gpu.compile = auto: " + ("eager, as " if reason else "compiled"))
    assert reason in note


@pytest.mark.parametrize("given", [True, False])
def test_what_is_given_is_kept_without_a_note(given: bool) -> None:
    assert choose_compile(GpuOptions(compile=given), **PROVED | {"device_type": "cpu"}) == (given, "")


def test_a_memory_budget_is_refused_where_auto_is_eager() -> None:
    options = GpuOptions(activation_checkpointing="memory_budget")
    assert choose_compile(options, **PROVED)[0]
    with pytest.raises(RecipeError, match=r'"memory_budget".* = "auto": .* not on cpu; set .*selective'):
        choose_compile(options, **PROVED | {"device_type": "cpu"})


def test_a_machine_without_triton_or_a_c_compiler_is_told(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("lt_trainer_gpu.compilation.find_spec", lambda name: None)
    assert find_missing_compiler() == "Triton is not installed"
    monkeypatch.setattr("lt_trainer_gpu.compilation.find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_missing_compiler() == "Triton finds no C compiler (gcc or clang) for its launchers"
    compiler = tmp_path / "clang"
    compiler.touch(mode=0o755)
    assert find_missing_compiler() == ""
    monkeypatch.setenv("CC", "absent-cc")
    assert find_missing_compiler() == "Triton finds no C compiler (absent-cc) for its launchers"


def test_the_run_records_what_was_chosen(open_on, config) -> None:
    device = open_on("cpu", config, "engine.gpu.compile=auto").device
    assert device.resolved["engine.gpu.compile"] is False
    assert device.resolved["engine.gpu.attention"] == "auto"
    assert device.notes == ["engine.gpu.compile = auto: eager, as auto compiles on cuda only, not on cpu"]


@pytest.mark.parametrize(
    ("fields", "dtype", "wanted"),
    [
        ({}, "bfloat16", "varlen"),
        ({"family": "mistral", "sliding_window": 8}, "bfloat16", "varlen"),
        ({"family": "mistral", "sliding_window": 8}, "float32", "flex"),
        ({"family": "gemma2", "attention_softcap": 5.0}, "bfloat16", "flex"),
        ({"family": "gemma2", "attention_softcap": 5.0}, "float64", "reference"),
    ],
)
def test_compiled_blocks_take_an_attention_with_the_features_of_the_model(recipe, fields, dtype, wanted) -> None:
    """Also where rows are one document each: on CUDA, a window never makes a mask of all pairs."""
    fixed = dict(FAMILIES[fields.get("family", "llama")].fixed)
    layers = {"layers": (LayerKind(sliding=True),)} if "sliding_window" in fields else {}
    config = ModelConfig(vocab_size=8, hidden_size=32, n_heads=4, n_kv_heads=4, **fixed | fields | layers)
    device, dtype = torch.device("cuda"), getattr(torch, dtype)
    for text, expected in (("true", wanted), ("false", wanted if len(fields) else "sdpa")):
        made = recipe(f"data.document_mask={text}")
        assert computation._choose_attention(made, config, True, device, dtype) == expected


@pytest.mark.parametrize("text", ["true", "True", "false", "auto"])
def test_the_option_is_a_word_or_a_bool(recipe, text: str) -> None:
    wanted = {"auto": "auto", "false": False}.get(text, True)
    assert recipe(f"engine.gpu.compile={text}").engine["gpu"].compile == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
def test_compiled_blocks_take_rows_of_several_lengths(open_on, config, monkeypatch) -> None:
    """With and without documents, in training and validation: the losses are the eager ones, graphs are reused."""
    from torch._dynamo.utils import counters

    passed = (parse_torch_version(torch.__version__),)
    monkeypatch.setattr(checks, "COMPILE_TORCH_VERSIONS", passed)
    rng = np.random.default_rng(0)

    def batch_of(length: int, documents: bool):
        shape = (1, 48 // length, length)
        ids = rng.integers(0, config.vocab_size, shape, dtype=np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy()
        doc_ids = (positions >= length // 2).astype(np.int32) if documents else np.zeros(shape, np.int32)
        return step_batch(
            input_ids=ids, labels=ids, position_ids=positions, doc_ids=doc_ids, valid_tokens=int(ids.size)
        )

    batches = [batch_of(length, documents) for length in (24, 16, 12, 8) for documents in (True, False)]

    def losses(compile: str):
        engine = open_on("cpu", config, f"engine.gpu.compile={compile}", "engine.gpu.dtype=float32")
        steps = [engine.fetch_metrics([engine.step(batch, 1e-3)])[0].loss for batch in batches]
        return [*steps, *(engine.validate([batch])[0] for batch in batches)], engine

    wanted, _ = losses("false")
    found, engine = losses("true")
    assert found == pytest.approx(wanted, rel=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    engine.step(batches[-1], 1e-3)
    engine.step(batch_of(6, True), 1e-3)
    assert counters["stats"]["unique_graphs"] == graphs
