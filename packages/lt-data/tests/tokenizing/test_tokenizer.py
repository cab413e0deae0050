import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Tokenizer, train_bpe


def edited(tokenizer: Tokenizer, **changes: object) -> dict[str, bytes]:
    """The files of a tokenizer with some keys of tokenizer.json replaced."""
    model = json.loads(tokenizer.files["tokenizer.json"]) | changes
    return {**tokenizer.files, "tokenizer.json": json.dumps(model).encode()}


def test_trained_one(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert tokenizer.vocab_size == 300
    assert tokenizer.special_strings == ("<|bos|>", "<|eos|>")
    assert tokenizer.decode([0, *tokenizer.encode_batch(["fox"])[0], 1]) == "<|bos|>fox<|eos|>"
    assert tokenizer.decode(np.array([0, 1], np.uint16), skip_special_tokens=True) == ""


def test_a_merge_without_the_prefix_of_its_model_is_an_error(tokenizer: Tokenizer) -> None:
    """The library would cut within a character, which ends the process with signal 6."""
    model = json.loads(tokenizer.files["tokenizer.json"])["model"] | {"continuing_subword_prefix": "2"}
    with pytest.raises(DataError, match="a merge lacks the model's continuing_subword_prefix"):
        Tokenizer.from_bytes(edited(tokenizer, model=model))
    small = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "ab": 2}, "continuing_subword_prefix": "##"}
    whole = edited(tokenizer, model=small | {"merges": [["a", "##b"]]}, added_tokens=[], post_processor=None)
    files = {"tokenizer.json": whole["tokenizer.json"]}
    assert Tokenizer.from_bytes(files).vocab_size == 3


@given(st.lists(st.text(), max_size=5))
def test_every_text_comes_back(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode_batch(texts)
    assert [ids.dtype for ids in encoded] == [np.uint32] * len(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_special_strings_in_text_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(["a<|eos|>b<|bos|>"])[0]
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids) == "a<|eos|>b<|bos|>"


def test_digits_are_split_by_three() -> None:
    tokenizer = train_bpe(["1234567"] * 100, vocab_size=280)
    assert [tokenizer.decode([i]) for i in tokenizer.encode_batch(["1234567"])[0]] == ["123", "456", "7"]


def test_truncation_padding_and_templates_of_the_file_have_no_effect(tokenizer: Tokenizer, texts: list[str]) -> None:
    changed = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    loaded = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": changed.to_str().encode()})
    for ours, plain in zip(loaded.encode_batch(texts), tokenizer.encode_batch(texts), strict=True):
        assert ours.tolist() == plain.tolist()


def test_training_is_deterministic(texts: list[str], tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int, str]] = []
    again = train_bpe(iter(texts), vocab_size=300, progress=lambda *report: seen.append(report))
    assert again.files == tokenizer.files
    assert again.sha256 == tokenizer.sha256
    assert seen[-1] == (sum(map(len, texts)), 0, "characters")


def test_training_is_the_same_in_another_process(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    code = (
        "import json, lt_data; texts = json.load(open('texts.json')); "
        "print(lt_data.train_bpe(texts, vocab_size=300).sha256)"
    )
    environment = {"PYTHONHASHSEED": "77", "TOKENIZERS_PARALLELISM": "true"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert run.stdout.strip() == tokenizer.sha256


@pytest.mark.parametrize("vocab_size", [0, 257])
def test_vocabulary_too_small(vocab_size: int) -> None:
    with pytest.raises(DataError, match=rf"vocab_size = {vocab_size}: at least 258"):
        train_bpe(["a"], vocab_size=vocab_size)


def test_no_text_to_train_on() -> None:
    with pytest.raises(DataError, match="no text"):
        train_bpe(["", ""], vocab_size=300)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tok")
    for path in (tmp_path / "tok", tmp_path / "tok" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.files == tokenizer.files
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.name == "tok"
    (tmp_path / "alone.json").write_bytes(tokenizer.files["tokenizer.json"])
    alone = Tokenizer.load(tmp_path / "alone.json")
    assert (alone.bos_id, alone.eos_id, alone.vocab_size) == (None, None, 300)
    assert alone.sha256 != tokenizer.sha256


def test_save_touches_nothing_that_is_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="not an empty folder"):
        tokenizer.save(tmp_path)
    with pytest.raises(DataError, match="not an empty folder"):
        tokenizer.save(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_hash_is_over_names_and_contents(tokenizer: Tokenizer) -> None:
    other = {**tokenizer.files, "special_tokens_map.json": b"{}"}
    assert Tokenizer.from_bytes(other).sha256 != tokenizer.sha256
    assert Tokenizer.from_bytes(dict(reversed(tokenizer.files.items()))).sha256 == tokenizer.sha256


def test_names_of_special_tokens(tokenizer: Tokenizer) -> None:
    model = tokenizer.files["tokenizer.json"]
    old = {"tokenizer.json": model, "special_tokens_map.json": b'{"eos_token": {"content": "<|eos|>"}}'}
    assert (Tokenizer.from_bytes(old).bos_id, Tokenizer.from_bytes(old).eos_id) == (None, 1)
    both = {**old, "tokenizer_config.json": b'{"eos_token": "<|bos|>", "bos_token": null, "pad_token": "fo"}'}
    with pytest.raises(DataError, match="pad_token 'fo' is not in the vocabulary"):
        Tokenizer.from_bytes(both)
    both["tokenizer_config.json"] = b'{"eos_token": "<|bos|>", "bos_token": null}'
    assert (Tokenizer.from_bytes(both).bos_id, Tokenizer.from_bytes(both).eos_id) == (None, 0)
    for content, message in ((b"{", "not JSON"), (b"[]", "holds a list, not an object"), (b"[" * 99_999, "nested")):
        both["tokenizer_config.json"] = content
        with pytest.raises(DataError, match=rf"tokenizer_config\.json: .*{message}.*; save the tokenizer again"):
            Tokenizer.from_bytes(both)


def test_vocab_size_counts_holes(tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.files["tokenizer.json"])["model"]
    model["vocab"]["far"] = 999
    assert Tokenizer.from_bytes(edited(tokenizer, model=model)).vocab_size == 1000


def test_dropout_is_refused(tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.files["tokenizer.json"])["model"] | {"dropout": 0.1}
    with pytest.raises(DataError, match="dropout"):
        Tokenizer.from_bytes(edited(tokenizer, model=model))


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no tokenizer at {tmp_path}"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer at .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    for content in (b"", b"{}", b"\xff", b"[1]"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
            Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        Tokenizer.from_bytes({"vocab.txt": b""})


def test_transformers_loads_the_same_tokenizer(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    code = """
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("tok", local_files_only=True)
texts = json.load(open("texts.json"))
ids = [tokenizer(text, add_special_tokens=True)["input_ids"] for text in texts]
decoded = [tokenizer.decode(row) for row in ids]
print(json.dumps([ids, decoded, tokenizer.bos_token_id, tokenizer.eos_token_id]))
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "USE_TORCH": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 0, run.stderr
    ids, decoded, bos, eos = json.loads(run.stdout)
    assert ids == [row.tolist() for row in tokenizer.encode_batch(texts)]
    assert decoded == texts
    assert (bos, eos) == (0, 1)
