import json
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer
from lt_data.tokenizing.encode import encode_documents
from lt_data.tokenizing.encoder import Encoder


def edited(tokenizer: Tokenizer, **changes: object) -> dict[str, bytes]:
    """The files of a tokenizer with some keys of tokenizer.json replaced."""
    model = json.loads(tokenizer.files["tokenizer.json"]) | changes
    return {**tokenizer.files, "tokenizer.json": json.dumps(model).encode()}


@given(st.lists(st.text(), max_size=5))
def test_every_text_comes_back(tokenizer, texts):
    encoded = tokenizer.encode_batch(texts)
    assert [ids.dtype for ids in encoded] == [np.uint32] * len(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_truncation_padding_and_templates_of_the_file_have_no_effect(tokenizer, texts):
    changed = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    loaded = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": changed.to_str().encode()})
    for ours, plain in zip(loaded.encode_batch(texts), tokenizer.encode_batch(texts), strict=True):
        assert ours.tolist() == plain.tolist()


def test_save_and_load(tokenizer, tmp_path):
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


def test_names_of_special_tokens(tokenizer):
    model = tokenizer.files["tokenizer.json"]
    old = {"tokenizer.json": model, "special_tokens_map.json": b'{"eos_token": {"content": "<|eos|>"}}'}
    assert (Tokenizer.from_bytes(old).bos_id, Tokenizer.from_bytes(old).eos_id) == (None, 1)
    both = {**old, "tokenizer_config.json": b'{"eos_token": "<|bos|>", "bos_token": null, "pad_token": "fo"}'}
    with pytest.raises(DataError, match="pad_token 'fo' is not in the vocabulary"):
        Tokenizer.from_bytes(both)
    for decoder, eos in (("", 1), (', "added_tokens_decoder": {}', 0)):
        both["tokenizer_config.json"] = f'{{"eos_token": "<|bos|>", "bos_token": null{decoder}}}'.encode()
        assert (Tokenizer.from_bytes(both).bos_id, Tokenizer.from_bytes(both).eos_id) == (None, eos)
    both["tokenizer_config.json"] = b'{"added_tokens_decoder": {"300": {"text": "<x>"}}}'
    with pytest.raises(DataError, match=r"a special or added token has another form .*; save the tokenizer again"):
        Tokenizer.from_bytes(both)
    for content, message in ((b"{", "not JSON"), (b"[]", "holds a list, not an object")):
        both["tokenizer_config.json"] = content
        with pytest.raises(DataError, match=rf"tokenizer_config\.json: .*{message}.*; save the tokenizer again"):
            Tokenizer.from_bytes(both)


def test_what_is_no_tokenizer(tmp_path):
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


def test_tokenizers_of_other_libraries(tokenizer, texts):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token="<|bos|>", eos_token="<|eos|>")
    for source, bos in ((tokenizer, 0), (theirs, None), (fast, 0)):
        loaded = Tokenizer.load(source)
        assert (loaded.bos_id, loaded.vocab_size) == (bos, 300)
        assert pickle.loads(pickle.dumps(loaded)).sha256 == loaded.sha256
        assert [loaded.encode(text).tolist() for text in texts] == [
            ids.tolist() for ids in tokenizer.encode_batch(texts)
        ]
    with pytest.raises(DataError, match="tokenizer: a int; give a path"):
        Tokenizer.load(3)


def test_a_regular_expression_that_backtracks_without_end_is_an_error(tokenizer, capfd):
    """The library panics: an exception of pyo3 that is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = json.loads(tokenizer.files["tokenizer.json"])
    bad = Tokenizer.from_bytes(
        edited(
            tokenizer,
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split, *model["pre_tokenizer"]["pretokenizers"][1:]]},
        )
    )
    texts = ["fine", "a" * 40 + "b", "fine too"]
    with pytest.raises(DataError, match=r"fails on a text .*retry-limit-in-match over"):
        bad.encode(texts[1])
    documents = [Document(text=text, source=f"x.jsonl:{i}") for i, text in enumerate(texts)]
    encoder = Encoder(bad, bos=True, eos=True, engine="hf")
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: tokenizer .* leave the document out, or choose another tokenizer"
    ):
        list(encode_documents(documents, encoder))
    capfd.readouterr()
