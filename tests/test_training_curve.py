"""The same recipe in `transformers` and torch: 300 steps of a small model on real text, loss by loss.

The reference is transformers' model, torch's AdamW, LambdaLR and clip_grad_norm_, written as its users write them. It
starts from the same checkpoint and reads the same rows. In float64 the first steps must agree to the last digits; in
float32 two runs drift apart, and how far is measured on the reference itself: with its batch in halves and quarters,
which is the same sum in another order (with another number of threads it repeats itself bit for bit at this size).
"""

import math
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import NoFloat32
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from lt_data import RowReader, Stream, Tokenizer, TokenStore, open_pack, pack, prepare
from lt_data.sources.reader import read_documents
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import load
from lt_trainer.run_directory.jsonl import read_jsonl

STEPS, WARMUP, ROWS, SEQ_LEN = 300, 30, 8, 64
LR, MIN_LR, WEIGHT_DECAY, BETAS, EPS, GRAD_CLIP = 3e-3, 3e-4, 0.1, (0.9, 0.95), 1e-8, 1.0
MODULES = ("argparse", "ast", "calendar", "configparser", "datetime", "difflib", "doctest", "inspect", "optparse")

ModeFactory = Callable[[], AbstractContextManager[object]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some modules of the standard library, as text."""
    root = tmp_path_factory.mktemp("curve")
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        (root / "text").mkdir(exist_ok=True)
        (root / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.train((document.text for document in read_documents([root / "text"])), vocab_size=512)
    prepare([root / "text"], tokenizer=tokenizer, out=root / "store")
    pack(TokenStore(root / "store"), seq_len=SEQ_LEN, mode="concat")
    torch.manual_seed(0)
    config = HFConfig(
        vocab_size=TokenStore(root / "store").vocab_size,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    for name, data in TokenStore(root / "store").tokenizer().files.items():
        (root / "model" / name).write_bytes(data)
    return root


def reference_losses(
    root: Path, steps: int, *, dtype: torch.dtype, mode: ModeFactory = nullcontext, parts: int = 1
) -> np.ndarray:
    """The losses of transformers' model, its batch in so many micro-batches."""
    with mode():
        model = LlamaForCausalLM.from_pretrained(root / "model", dtype=dtype, attn_implementation="sdpa")
    undecayed = [p for name, p in model.named_parameters() if "norm" in name or "embed" in name]
    decayed = [p for name, p in model.named_parameters() if not ("norm" in name or "embed" in name)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    def factor(step: int) -> float:
        update = step + 1
        if update <= WARMUP:
            return update / WARMUP
        progress = (update - WARMUP) / (STEPS - WARMUP)
        return (MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * progress)) / 2) / LR

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    tokens = TokenStore(root / "store")
    reader = RowReader(tokens, open_pack(tokens, seq_len=SEQ_LEN, mode="concat"), document_mask=False)
    stream = Stream(reader, global_batch_size=ROWS, seed=0)
    losses = []
    for _ in range(steps):
        rows = stream.next().rows
        ids, labels = (torch.from_numpy(np.asarray(x, dtype=np.int64)) for x in (rows.input_ids, rows.labels))
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
            with mode():
                logits = model(input_ids=part).logits
            loss = cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
            loss = loss / (labels != -100).sum()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return np.array(losses)


def lt_losses(root: Path, out: Path, steps: int, dtype: str) -> np.ndarray:
    """The losses of our run, which has two micro-batches where the reference has one batch."""
    base = {
        "run": {"dir": str(out)},
        "model": {"init_from": str(root / "model")},
        "data": {"store": str(root / "store"), "seq_len": SEQ_LEN, "packing": "concat", "document_mask": False},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": ROWS // 2},
        "optimizer": {
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "eps": EPS,
            "grad_clip": GRAD_CLIP,
        },
        "schedule": {"kind": "cosine", "max_steps": STEPS, "warmup_steps": WARMUP, "min_lr": MIN_LR},
        "checkpoint": {"interval": 0},
        "metrics": {"log_interval": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": dtype}},
    }
    code = run(load(base=base), environ={}, stop_after_step=steps if steps < STEPS else 0)
    assert code == (75 if steps < STEPS else 0)
    return np.array([record["loss"] for record in read_jsonl(out / "metrics.jsonl") if "loss" in record])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_first_steps_in_float64(store, tmp_path) -> None:
    """Forward, backward, clipping, AdamW with its two groups and the warm-up are the same arithmetic."""
    expected = reference_losses(store, 12, dtype=torch.float64, mode=NoFloat32)
    found = lt_losses(store, tmp_path / "run", 12, "float64")
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_300_steps_stay_within_the_noise(store, tmp_path) -> None:
    expected = reference_losses(store, STEPS, dtype=torch.float32)
    again = [reference_losses(store, STEPS, dtype=torch.float32, parts=parts) for parts in (2, 4)]
    found = lt_losses(store, tmp_path / "run", STEPS, "float32")
    assert len(found) == STEPS
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-6)
    assert expected[-20:].mean() < expected[0] - 2, "it learns"
    spread = max(np.abs(other - expected).max() for other in again)
    apart = np.abs(found - expected)
    assert spread > 0, "the reference repeats itself exactly: there is no noise to compare with"
    assert apart.max() <= 3 * spread
    late = slice(STEPS // 2, None)
    assert abs((found - expected)[late].mean()) <= 3 * max(np.abs(other - expected)[late].mean() for other in again)
