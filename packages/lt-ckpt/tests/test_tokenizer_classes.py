"""transformers' AutoTokenizer reads the ids that were trained on from the export of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lt_ckpt import CheckpointMetadata, begin_save, commit_save, write_rank_files
from lt_ckpt.__main__ import main
from lt_ckpt.hf.tokenizer_classes import adapt_tokenizer, describe_other_ids
from lt_model import ModelConfig, config_from_hf, param_specs
from lt_model.families import FAMILIES

TEXTS = [
    "in 2023 the fox  don't 1234567",
    "cafe\u0301 café 東京 🦊 \u00a0x\r\n\n  y\t",
    "a<|bos|>b<|eos|> <|endoftext|>c<|padding|>",
]
CLASSES = ("PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast")
NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def train(split: str) -> bytes:
    """Return a small tokenizer.json that divides text as a class does, or by lines ("other")."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "other":
        lines = pre_tokenizers.Split("\n", behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        byte_level = pre_tokenizers.Sequence([lines, plain])
    elif split == "Qwen2Tokenizer":
        byte_level = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = byte_level
    if split in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(NAMES.values())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer.to_str().encode()


@pytest.fixture(scope="module")
def trained() -> dict[str, bytes]:
    return {split: train(split) for split in ("other", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")}


def write(folder: Path, files: dict[str, bytes], model_type: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def has_same_ids(read, definition: bytes) -> bool:
    expected = tokenizers.Tokenizer.from_buffer(definition)
    if len(read) != expected.get_vocab_size():
        return False
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        if read.encode(text, add_special_tokens=False) != ids:
            return False
    return True


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_tokenizer_reads_the_ids_of_training(tmp_path, trained, model_type):
    for split, definition in trained.items():
        for number, tokenizer_class in enumerate((*CLASSES, None)):
            about = {"tokenizer_class": tokenizer_class, **NAMES} if tokenizer_class else NAMES
            files = {"tokenizer.json": definition, "tokenizer_config.json": json.dumps(about).encode()}
            exported = adapt_tokenizer(files, model_type)
            folder = write(tmp_path / f"{split}-{number}", exported, model_type)
            note = describe_other_ids(exported, model_type)
            read = AutoTokenizer.from_pretrained(folder)
            assert has_same_ids(read, definition) == (not note), (split, tokenizer_class, type(read))
            assert has_same_ids(PreTrainedTokenizerFast.from_pretrained(folder), definition)
            assert bool(note) == (model_type == "qwen2" and split != "Qwen2Tokenizer")


def test_files_that_are_right_stay_as_they_are(trained):
    names = {**NAMES, "unk_token": None, "pad_token": None}
    for tokenizer_class in CLASSES:
        split = tokenizer_class.removesuffix("Fast")
        definition = trained.get(split, trained["other"])
        about = {"tokenizer_class": tokenizer_class, **names}
        files = {"tokenizer.json": definition, "tokenizer_config.json": json.dumps(about).encode()}
        assert adapt_tokenizer(files, "llama") == files
    assert adapt_tokenizer({"tokenizer.model": b"x"}, "qwen2") == {"tokenizer.model": b"x"}
    assert describe_other_ids({}, "qwen2") == ""


def test_a_class_with_its_own_code_reads_the_added_tokens_of_the_configuration(tmp_path, trained):
    definition = json.loads(trained["Qwen2Tokenizer"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append({"id": 300, "content": "<tool>", "special": True, **flags})
    raw = json.dumps(definition).encode()
    for n_listed, note in ((2, True), (3, False)):
        decoder = {str(token.pop("id")): token for token in json.loads(raw)["added_tokens"][:n_listed]}
        about = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<|bos|>", "added_tokens_decoder": decoder}
        files = {"tokenizer.json": raw, "tokenizer_config.json": json.dumps(about).encode()}
        qwen2 = AutoTokenizer.from_pretrained(write(tmp_path / f"qwen2-{n_listed}", files, "qwen2"))
        assert bool(describe_other_ids(files, "qwen2")) == note == ("<tool>" not in qwen2.get_vocab())
        read = AutoTokenizer.from_pretrained(write(tmp_path / str(n_listed), adapt_tokenizer(files, "qwen3"), "qwen3"))
        assert read.convert_tokens_to_ids("<tool>") == 300


SHAPE = {
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def save_run(toy, root: Path, model: ModelConfig, files: dict[str, bytes]) -> Path:
    """Save a checkpoint as a run does, with weights of ones."""
    weights = {p.name: np.ones(p.shape, "<f4") for p in param_specs(model)}
    state = {("weights", name): ("F32", value) for name, value in weights.items()}
    tmp = begin_save(root, step=7, world_size=1)
    write_rank_files(tmp, rank=0, shards=toy.shards(state, 0, 1))
    metadata = CheckpointMetadata(step=7, model=model.to_dict(), tokenizer_files=files)
    return commit_save(tmp, world_size=1, metadata=metadata)


def test_an_export_says_how_to_load_its_tokenizer(tmp_path, toy, trained, monkeypatch, capsys):
    swapped = {"bos_token": "<|eos|>", "eos_token": {"content": "<|bos|>"}}
    files = {
        "tokenizer.json": trained["other"],
        "tokenizer_config.json": json.dumps({"tokenizer_class": "GPT2Tokenizer", **NAMES}).encode(),
        "special_tokens_map.json": json.dumps(swapped).encode(),
    }
    for family, n_notes in (("qwen3", 0), ("qwen2", 1)):
        model = config_from_hf({"model_type": family, **SHAPE})
        checkpoint = save_run(toy, tmp_path / family, model, files)
        out = tmp_path / f"{family}-hf"
        monkeypatch.setattr("sys.argv", ["lt-ckpt", "export", str(checkpoint), "--out", str(out)])
        assert main() == 0
        lines = capsys.readouterr().out.splitlines()
        notes = [line for line in lines if line.startswith("note: ") and "PreTrainedTokenizerFast" in line]
        assert len(notes) == n_notes, lines
        read = (PreTrainedTokenizerFast if notes else AutoTokenizer).from_pretrained(out)
        assert has_same_ids(read, trained["other"])
        written = json.loads((out / "config.json").read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (read.bos_token_id, read.eos_token_id) == (1, 0)
