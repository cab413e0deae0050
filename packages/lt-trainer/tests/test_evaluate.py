"""`lt train evaluate` on stores: each number against the definition, document by document; resume; refusals."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lt_ckpt import open_source
from lt_ckpt.formats import ConvertOptions, convert_checkpoint
from lt_data import DataError, RowReader, TokenStore, open_pack, prepare, train_bpe
from lt_model import LlamaConfig
from lt_trainer.config.recipe import from_dict
from lt_trainer.engine import StepBatch, Topology, World
from lt_trainer.errors import RunDirError
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError
from lt_trainer.evaluation.store_losses import StoreGroups, evaluate_store
from lt_trainer.run_directory.evaluation_results import find_results, read_results
from lt_trainer.run_directory.jsonl import read_jsonl

torch = pytest.importorskip("torch")

from lt_trainer.cli.evaluate import EvaluateOptions, evaluate  # noqa: E402
from lt_trainer.cli.sample import generate_text  # noqa: E402
from lt_trainer.evaluation.local_model import load_model  # noqa: E402
from lt_trainer.torch import cpu_multiplies_bfloat16  # noqa: E402

SEQ_LEN = 32


def run(model: Path, out: Path | None, *stores: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    chosen = EvaluateOptions(stores=stores, **{"device": "cpu", "dtype": "float32", "seq_len": SEQ_LEN, **options})
    evaluate(model, chosen, out=out, echo=lines.append)
    return lines


def document_losses(model: Path, store: TokenStore) -> list[tuple[float, int]]:
    """Loss and labels of each document by the definition: pieces of a row's length, one after the other."""
    llama, found = load_model(model, dtype="float64").model, []
    for index in range(store.n_documents):
        ids, total, labels = store.document(index).astype(np.int64), 0.0, 0
        for first in range(0, len(ids), SEQ_LEN):
            inputs, targets = ids[first : first + SEQ_LEN], ids[first + 1 : first + SEQ_LEN + 1]
            if not targets.size:
                continue
            with torch.no_grad():
                log_probs = llama(torch.from_numpy(inputs)[None])[0].log_softmax(dim=-1).numpy()
            total -= float(log_probs[np.arange(targets.size), targets].sum())
            labels += targets.size
        found.append((total, labels))
    return found


def test_losses_are_those_of_each_document_by_source_and_by_length(
    model: Path, little_data: Path, tmp_path: Path
) -> None:
    store = TokenStore.open(little_data / "validation")
    wanted = document_losses(model, store)
    lines = run(model, tmp_path / "out", little_data / "validation", dtype="float64", micro_batch_size=3)
    (description, record) = read_jsonl(tmp_path / "out" / "results.jsonl")
    assert description["seq_len"] == SEQ_LEN
    assert description["dtype"] == "float64"
    assert (record["kind"], record["name"]) == ("store", str(little_data / "validation"))
    whole, *groups = record["results"]
    loss_sum, tokens = sum(loss for loss, _ in wanted), sum(n for _, n in wanted)
    assert whole["documents"] == store.n_documents == 5
    assert whole["tokens"] == tokens
    assert whole["loss"] == pytest.approx(loss_sum / tokens, rel=1e-12)
    assert whole["perplexity"] == pytest.approx(math.exp(loss_sum / tokens), rel=1e-12)
    n_bytes = sum(file.stat().st_size for file in (little_data / "text-validation").iterdir())
    assert whole["text_bytes"] == n_bytes
    assert whole["bits_per_byte"] == pytest.approx(loss_sum / math.log(2) / n_bytes, rel=1e-12)
    sources = {Path(loss["name"]).name: loss for loss in groups if loss["group"] == "source"}
    assert sorted(sources) == [f"{i:03}.txt" for i in range(5)]
    for index in range(5):
        source = store.document_source(index)
        assert source is not None
        found = sources[Path(source.path).name]
        assert (found["documents"], found["tokens"]) == (1, wanted[index][1])
        assert found["loss_sum"] == pytest.approx(wanted[index][0], rel=1e-12)
        assert found["text_bytes"] == (little_data / "text-validation" / f"{Path(source.path).name}").stat().st_size
    by_length: dict[str, list[float]] = {}
    for (loss, n), length in zip(wanted, store.lengths.tolist(), strict=True):
        low = 1 << (length.bit_length() - 1)
        sums = by_length.setdefault(f"{low}-{2 * low - 1}", [0.0, 0.0])
        sums[0], sums[1] = sums[0] + loss, sums[1] + n
    lengths = {loss["name"]: [loss["loss_sum"], loss["tokens"]] for loss in groups if loss["group"] == "length"}
    assert lengths == {name: [pytest.approx(loss, rel=1e-12), n] for name, (loss, n) in by_length.items()}
    assert len(lengths) > 1
    assert any(f"{whole['loss']:.4f}" in line and "validation" in line for line in lines)


class OneOfTwo:
    """A model of the fake engine on one of two data-parallel ranks, whose exchange is the test's."""

    def __init__(self, engine: Any, rank: int, all_gather: Any) -> None:
        self.engine, self.topology = engine, Topology(rank=rank, world_size=2, dp_rank=rank, dp_size=2)
        self.control: Any = type("Control", (), {"all_gather": staticmethod(all_gather)})

    def score(self, batch: StepBatch) -> PositionScores:
        return self.engine.score(batch)


def test_two_data_parallel_ranks_have_the_numbers_of_one(fake_engine, little_data: Path) -> None:
    store = TokenStore.open(little_data / "validation")
    reader = RowReader(store, open_pack(store, seq_len=SEQ_LEN))
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        n_heads=1,
        n_kv_heads=1,
        n_layers=1,
        max_position_embeddings=64,
    )
    engine = fake_engine.open(from_dict({"data": {"store": "unused"}}), config, World())
    shape = BatchShape(micro_batch_size=2, seq_len=SEQ_LEN)
    groups = StoreGroups(store, 0, 1)
    halves = [StoreGroups(store, rank, 2) for rank in range(2)]
    one = evaluate_store(engine, reader, groups, shape, name="s")
    given: list[Any] = []
    n_batches: list[tuple[int, int]] = []
    for rank in (0, 1):
        sent = OneOfTwo(engine, rank, lambda value: given.append(value) or [value])
        evaluate_store(sent, reader, halves[rank], shape, name="s", on_batch=lambda *numbers: n_batches.append(numbers))
    two = evaluate_store(OneOfTwo(engine, 0, lambda value: given), reader, halves[0], shape, name="s")
    assert [loss.loss_sum for loss in two] == pytest.approx([loss.loss_sum for loss in one], rel=1e-12)
    assert [replace(loss, loss_sum=0.0) for loss in two] == [replace(loss, loss_sum=0.0) for loss in one]
    half = -(-reader.n_rows // 4)
    assert n_batches == [(i, half) for i in range(1, half + 1)] * 2


def test_a_repeated_command_computes_only_what_is_missing(
    model: Path, little_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lt_trainer.cli.evaluate as module

    first = run(model, tmp_path / "out", little_data / "validation")
    evaluated: list[str] = []

    def counted(*args: Any, name: str, **options: Any) -> Any:
        evaluated.append(name)
        return evaluate_store(*args, name=name, **options)

    monkeypatch.setattr(module, "evaluate_store", counted)
    again = run(model, tmp_path / "out", little_data / "validation", little_data / "train")
    assert again[: len(first)] == first
    assert evaluated == [str(little_data / "train")]
    assert len(read_jsonl(tmp_path / "out" / "results.jsonl")) == 3
    with pytest.raises(RunDirError, match="has results with dtype = 'float32', not 'bfloat16'; pass another --out"):
        run(model, tmp_path / "out", little_data / "validation", dtype="bfloat16")


def test_results_of_a_changed_store_do_not_count(model: Path, little_data: Path, tmp_path: Path) -> None:
    """A store is known by its content; the newest results of a name are the ones that count."""
    store, moved = tmp_path / "store", tmp_path / "moved"
    shutil.copytree(little_data / "validation", store)
    shutil.copytree(model, moved)
    run(model, tmp_path / "out", store)
    run(moved, tmp_path / "out", store)
    assert len(read_jsonl(tmp_path / "out" / "results.jsonl")) == 2, "the same weights elsewhere"
    shutil.rmtree(store)
    shutil.copytree(little_data / "train", store)
    run(model, tmp_path / "out", store)
    found = read_results(tmp_path / "out").units
    assert [(unit.kind, unit.name) for unit in found] == [("store", str(store))]
    assert found[0].results[0]["documents"] == 40
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunDirError, match="has results with weights = "):
        run(moved, tmp_path / "out", store)


def test_results_of_a_checkpoint_are_in_its_run_directory(model: Path, little_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    made = convert_checkpoint(open_source(model), tmp_path / "run" / "checkpoints", ConvertOptions(format="lt"))
    folder = next(path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
    assert made
    assert run(folder, None, little_data / "validation")[-1].endswith("tokens"), "no run directory: only printed"
    (tmp_path / "run" / ".lt-run").touch()
    for source in (folder, tmp_path / "run"):
        lines = run(source, None, little_data / "validation")
        (results,) = find_results(tmp_path / "run")
        assert results.folder == tmp_path / "run" / "evaluation" / "step-00000000-float32"
        assert lines[-1] == f"results: {results.folder}"
    assert results.description["weights"] == load_model(model).weights_sha256 == load_model(folder).weights_sha256
    assert len(read_jsonl(results.folder / "results.jsonl")) == 2
    (results.folder / "results.jsonl").write_text('{"kind": "task"}\n')
    with pytest.raises(RunDirError, match=r"not results of lt train evaluate \('weights'\)"):
        run(folder, None, little_data / "validation")


def test_what_cannot_be_evaluated_is_refused_with_a_remedy(model: Path, little_data: Path, tmp_path: Path) -> None:
    store = little_data / "validation"
    with pytest.raises(EvaluationError, match="nothing to evaluate; pass --tasks NAMES or --store STORE"):
        run(model, None)
    with pytest.raises(EvaluationError, match=r"--seq-len 65: .* has a context of 64 tokens; pass at most that"):
        run(model, None, store, seq_len=65)
    with pytest.raises(DataError, match=r"has no pack bfd-64.*make it with: lt data pack .* --seq-len 64"):
        run(model, None, store, seq_len=0)
    with pytest.raises(EvaluationError, match="device 'tpu' cannot be used here"):
        run(model, None, store, device="tpu")
    other = train_bpe(["zeta eta theta iota kappa zeta theta"] * 20, vocab_size=280)
    prepare([little_data / "text-validation"], tokenizer=other, out=tmp_path / "other")
    with pytest.raises(EvaluationError, match=r"another tokenizer than that of .*: id \d+ is .* in the store and"):
        run(model, None, tmp_path / "other")
    with pytest.raises(EvaluationError, match="dtype 'int8': unknown; pass one of auto, float32"):
        run(model, None, store, dtype="int8")
    assert not (tmp_path / "out").exists()


def test_a_sample_ends_at_the_context_length_and_takes_device_and_dtype(model: Path) -> None:
    assert load_model(model, dtype="auto").dtype == (torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32)
    loaded = load_model(model, device="auto", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    text = generate_text(loaded, "alpha beta", max_new_tokens=10**6, **options)
    assert len(loaded.tokenizer.encode_batch([text])[0]) > 0
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens and .* a context of 64; shorten it to at most 63"):
        generate_text(loaded, "alpha beta gamma " * 40, max_new_tokens=5, **options)


def test_samples_are_kept_with_all_that_made_them(model: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from lt_trainer.cli.commands import app

    words = ["sample", str(model), "--prompt", "alpha", "--samples", "2", "--max-new-tokens", "5", "--seed", "3"]
    words += ["--device", "cpu", "--out", str(tmp_path / "samples.jsonl")]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    first, second, *again = read_jsonl(tmp_path / "samples.jsonl")
    assert again == [first, second]
    assert done.output == f"alpha{first['text']}\nalpha{second['text']}\n"
    assert (first["prompt"], first["seed"], second["seed"], first["top_k"]) == ("alpha", 3, 4, 50)
    assert first["weights"] == load_model(model).weights_sha256
