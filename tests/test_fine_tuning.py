"""Training that starts from what `transformers` has made begins at the loss that `transformers` computes.

Everything is in float64, so that a head in the wrong order, a weight that was cast, or a mean row that is a little off
shows in the tenth digit.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import NoFloat32
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from lt_data import RowReader, Stream, TokenStore, open_pack, pack
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.run_directory.jsonl import read_jsonl

ROWS, SEQ_LEN = 4, 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def store(prepared: Path) -> Path:
    pack(TokenStore(prepared / "train"), seq_len=SEQ_LEN, mode="concat")
    return prepared / "train"


def make_model(folder: Path, store: Path, *, dtype: torch.dtype = torch.float32, **more: object) -> LlamaForCausalLM:
    """A model of transformers, saved with the tokenizer of the data; in float64."""
    torch.manual_seed(1)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokens = TokenStore(store)
    config = HFConfig(
        **({"vocab_size": tokens.vocab_size, "num_key_value_heads": 2, "max_position_embeddings": 128} | shape | more),
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    for name, data in tokens.tokenizer().files.items():
        (folder / name).write_bytes(data)
    with NoFloat32():  # the rotary frequencies are made with the model
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def first_rows(store: Path) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = TokenStore(store)
    reader = RowReader(tokens, open_pack(tokens, seq_len=SEQ_LEN, mode="concat"), document_mask=False)
    batch = Stream(reader, global_batch_size=ROWS, seed=0).next()
    return (torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in (batch.rows.input_ids, batch.rows.labels))


@pytest.fixture
def reference_loss(store: Path) -> Callable[[LlamaForCausalLM], float]:
    """The loss of a model of transformers over the run's first rows, in float64."""

    @torch.no_grad()
    def compute(model: LlamaForCausalLM) -> float:
        ids, labels = first_rows(store)
        with NoFloat32():
            logits = model(input_ids=ids).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))

    return compute


def first_loss(folder: Path, store: Path, out: Path, *sets: str) -> float:
    base = {
        "run": {"dir": str(out)},
        "model": {"init_from": str(folder)},
        "data": {"store": str(store), "seq_len": SEQ_LEN, "packing": "concat", "document_mask": False},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 2},
        "schedule": {"max_steps": 1, "warmup_steps": 0},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    assert run(load(base=base, overrides=sets), environ={}) == 0
    return next(record["loss"] for record in read_jsonl(out / "metrics.jsonl") if "loss" in record)


@pytest.mark.parametrize(
    "more",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 50000.0}, "rms_norm_eps": 1e-6},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"dtype": torch.bfloat16, "num_key_value_heads": 1},
    ],
    ids=["llama3-rope", "tied", "bfloat16"],
)
def test_the_first_loss_is_the_one_of_transformers(more, store, reference_loss, tmp_path) -> None:
    model = make_model(tmp_path / "model", store, **more)
    assert first_loss(tmp_path / "model", store, tmp_path / "run") == pytest.approx(reference_loss(model), rel=1e-10)


def test_added_tokens_start_as_the_mean_of_the_others(store, reference_loss, tmp_path) -> None:
    """A model that knows fewer tokens than the data has, as after tokens were added for continued pre-training."""
    vocab = TokenStore(store).vocab_size
    model = make_model(tmp_path / "model", store, vocab_size=vocab - 37)
    with NoFloat32():
        grown = LlamaForCausalLM(HFConfig(**(model.config.to_dict() | {"vocab_size": vocab}))).double().eval()
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = state[name]
        state[name] = torch.cat([old, old.mean(dim=0, keepdim=True).expand(37, -1)])
    grown.load_state_dict(state)
    found = first_loss(tmp_path / "model", store, tmp_path / "run", "model.resize_vocab=true")
    assert found == pytest.approx(reference_loss(grown), rel=1e-10)


def test_a_padded_vocabulary_is_kept(store, reference_loss, tmp_path) -> None:
    """Models often have more rows than their tokenizer has tokens; those rows are part of the softmax."""
    model = make_model(tmp_path / "model", store, vocab_size=TokenStore(store).vocab_size + 29)
    assert first_loss(tmp_path / "model", store, tmp_path / "run") == pytest.approx(reference_loss(model), rel=1e-10)


def test_in_float32_beside_transformers_as_it_is(store, tmp_path) -> None:
    make_model(tmp_path / "model", store)
    ids, labels = first_rows(store)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)(input_ids=ids).logits
    wanted = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))
    found = first_loss(tmp_path / "model", store, tmp_path / "run", "engine.gpu.dtype=float32")
    assert found == pytest.approx(wanted, rel=2e-6)
