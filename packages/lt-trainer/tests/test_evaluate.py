"""`lt train evaluate` on stores: each number against the definition, document by document; resume; refusals."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lt_ckpt import open_source
from lt_ckpt.formats import ConvertOptions, convert_checkpoint
from lt_data import DataError, Tokenizer, TokenStore, prepare
from lt_trainer.errors import RunDirError
from lt_trainer.evaluation.scorer import EvaluationError
from lt_trainer.run_directory.evaluation_results import find_results
from lt_trainer.run_directory.jsonl import read_jsonl

torch = pytest.importorskip("torch")

from lt_trainer.cli.evaluate import evaluate  # noqa: E402
from lt_trainer.cli.sample import generate_text  # noqa: E402
from lt_trainer.evaluation.local_model import load_model  # noqa: E402

SEQ_LEN = 32


def run(model: Path, out: Path | None, *stores: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    chosen = {"device": "cpu", "dtype": "float32", "seq_len": SEQ_LEN, **options}
    evaluate(model, stores=stores, **chosen, out=out, echo=lines.append)
    return lines


def document_losses(model: Path, store: TokenStore) -> list[tuple[float, int]]:
    """Loss and labels of each document by the definition: pieces of a row's length, one after the other."""
    llama, found = load_model(model, dtype="float64").model, []
    for index in range(store.n_documents):
        ids, total, labels = store[index].astype(np.int64), 0.0, 0
        for first in range(0, len(ids), SEQ_LEN):
            inputs, targets = ids[first : first + SEQ_LEN], ids[first + 1 : first + SEQ_LEN + 1]
            if targets.size:
                with torch.no_grad():
                    log_probs = llama(torch.from_numpy(inputs[: targets.size])[None])[0].log_softmax(dim=-1).numpy()
                total -= float(log_probs[np.arange(targets.size), targets].sum())
                labels += targets.size
        found.append((total, labels))
    return found


def test_losses_are_those_of_each_document(model: Path, little_data: Path, tmp_path: Path) -> None:
    store = TokenStore(little_data / "validation")
    wanted = document_losses(model, store)
    lines = run(model, tmp_path / "out", little_data / "validation", dtype="float64", micro_batch_size=3)
    (description, record) = read_jsonl(tmp_path / "out" / "results.jsonl")
    assert (description["seq_len"], description["dtype"]) == (SEQ_LEN, "float64")
    whole, *groups = record["results"]
    loss_sum, tokens = sum(loss for loss, _ in wanted), sum(n for _, n in wanted)
    n_bytes = sum(file.stat().st_size for file in (little_data / "text-validation").iterdir())
    numbers = {"documents": 5, "tokens": tokens, "text_bytes": n_bytes, "loss_sum": loss_sum}
    numbers |= {"loss": loss_sum / tokens, "perplexity": math.exp(loss_sum / tokens)}
    numbers["bits_per_byte"] = loss_sum / math.log(2) / n_bytes
    assert {name: whole[name] for name in numbers} == pytest.approx(numbers, rel=1e-12)
    by_group: dict[tuple[str, str], list[float]] = {}
    for index, ((loss, n), length) in enumerate(zip(wanted, store.lengths.tolist(), strict=True)):
        source = store.document_source(index)
        assert source is not None
        low = 1 << (length.bit_length() - 1)
        for key in (("source", source.path), ("length", f"{low}-{2 * low - 1}")):
            by_group[key] = [a + b for a, b in zip(by_group.get(key, [0, 0, 0.0]), (1, n, loss), strict=True)]
    assert {(g["group"], g["name"]): [g["documents"], g["tokens"], g["loss_sum"]] for g in groups} == {
        key: pytest.approx(sums, rel=1e-12) for key, sums in by_group.items()
    }
    assert len(by_group) > 6
    assert f"loss {whole['loss']:.4g}" in lines[0]


def test_a_selection_bias_stays_in_float32_whatever_the_dtype(model: Path, tmp_path: Path) -> None:
    """In bfloat16 its steps of 0.001 would be lost, and with them which experts a token has."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "pad_token_id": None}
    latent = {**sizes, "num_key_value_heads": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    theirs = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(vocab_size=config.vocab_size, bos_token_id=None, eos_token_id=None, **latent)
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    wanted = 1 + 0.001 * torch.arange(8)
    theirs.get_buffer(name).copy_(wanted)
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    theirs.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="bfloat16").model
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(dict(loaded.named_buffers())[name], wanted)


def test_a_repeated_command_computes_only_what_is_missing_or_changed(
    model: Path, little_data: Path, tmp_path: Path
) -> None:
    """A store and a model are known by their content, wherever they are."""
    out, store, moved = tmp_path / "out", tmp_path / "store", tmp_path / "moved"
    shutil.copytree(little_data / "validation", store)
    shutil.copytree(model, moved)
    first = run(model, out, store)
    again = run(moved, out, store, little_data / "train")
    assert again[: len(first)] == first
    assert [record["name"] for record in read_jsonl(out / "results.jsonl")[1:]] == [str(store), f"{little_data}/train"]
    shutil.rmtree(store)
    shutil.copytree(little_data / "train", store)
    assert run(model, out, store)[0] != first[0]
    with pytest.raises(RunDirError, match="has results with dtype = 'float32', not 'bfloat16'; pass another --out"):
        run(model, out, store, dtype="bfloat16")
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunDirError, match="has results with weights = "):
        run(moved, out, store)


def test_results_of_a_checkpoint_are_in_its_run_directory(model: Path, little_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    convert_checkpoint(open_source(model), tmp_path / "run" / "checkpoints", ConvertOptions(format="lt"))
    folder = next(path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
    assert not run(folder, None, little_data / "validation")[-1].startswith("results"), "no run directory: only printed"
    (tmp_path / "run" / ".lt-run").touch()
    for source in (folder, tmp_path / "run"):
        lines = run(source, None, little_data / "validation")
        (results,) = find_results(tmp_path / "run")
        assert results.folder == tmp_path / "run" / "evaluation" / "step-00000000-float32"
        assert lines[-1] == f"results: {results.folder}"
    assert results.description["weights"] == load_model(model).weights_sha256 == load_model(folder).weights_sha256
    assert len(read_jsonl(results.folder / "results.jsonl")) == 2


def test_what_cannot_be_evaluated_is_refused_with_a_remedy(model: Path, little_data: Path, tmp_path: Path) -> None:
    store = little_data / "validation"
    other = Tokenizer.train(["zeta eta theta iota kappa zeta theta"] * 20, vocab_size=280)
    prepare([little_data / "text-validation"], tokenizer=other, out=tmp_path / "other")
    for told, stores, options in (
        ("nothing to evaluate; pass --tasks NAMES or --store STORE", [], {}),
        (r"--seq-len 65: the context of .* has 64 tokens", [store], {"seq_len": 65}),
        (r"has no pack bfd-64.*make it with: lt data pack .* --seq-len 64", [store], {"seq_len": 0}),
        ("another tokenizer than that of ", [tmp_path / "other"], {}),
    ):
        with pytest.raises((EvaluationError, DataError), match=told):
            run(model, tmp_path / "out", *stores, **options)
    assert not (tmp_path / "out").exists()


def test_a_sample_ends_at_the_context_length_and_takes_device_and_dtype(model: Path) -> None:
    loaded = load_model(model, device="auto", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    text = generate_text(loaded, "alpha beta", max_new_tokens=10**6, **options)
    assert len(loaded.tokenizer.encode_batch([text])[0]) > 0
    with pytest.raises(ValueError, match=r"no room in the context of .*: shorten it to at most 63 tokens, from \d+"):
        generate_text(loaded, "alpha beta gamma " * 40, max_new_tokens=5, **options)
