"""Special and added tokens are those that transformers' AutoTokenizer reads from the same files."""

import json
import tempfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lt_data import DataError, Tokenizer, prepare

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = ["<pad>x<tool> y<|eos|>", "a <unk>the<|bos|> quick<image><pad>"]
KNOWN, NEW = ["<|bos|>", "<|eos|>", "the"], ["<pad>", "<tool>", "<unk>", "<image>"]


def read_both(
    tokenizer: Tokenizer, config: dict, special_map: dict
) -> tuple[Tokenizer, "transformers.PreTrainedTokenizerFast"]:
    files = {
        **tokenizer.files,
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}).encode(),
        "special_tokens_map.json": json.dumps(special_map).encode(),
    }
    with tempfile.TemporaryDirectory() as folder:
        Tokenizer(files).save(f"{folder}/tokenizer")
        theirs = transformers.AutoTokenizer.from_pretrained(f"{folder}/tokenizer")
    return Tokenizer(files), theirs


def added(content: str, *, special: bool, lstrip: bool) -> dict[str, object]:
    flags = {"single_word": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": special, "lstrip": lstrip, **flags}


BOOLEANS, NAMES = st.booleans(), ["bos_token", "eos_token", "unk_token", "image_token"]
ADDED = st.builds(added, st.sampled_from(KNOWN + NEW), special=BOOLEANS, lstrip=BOOLEANS)
NAMED = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["<|bos|>", "<|eos|>"]) | st.none())
EXTRA = st.lists(st.sampled_from(KNOWN + NEW), unique=True)
OLD = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
SWAPPED = {"bos_token": {"content": "<|eos|>", **dict.fromkeys(("lstrip", "rstrip"), False)}, "eos_token": "<|bos|>"}
PAD = [added("<pad>", special=True, lstrip=False)]


@settings(max_examples=40)
@example(named=OLD, special_map=SWAPPED, decoder=None, extra=[])
@example(named=OLD, special_map=SWAPPED, decoder=PAD, extra=[])
@example(named={"bos_token": "", "eos_token": ""}, special_map=OLD, decoder=None, extra=[])
@example(named={**OLD, "pad_token": "<pad>"}, special_map={}, decoder=PAD, extra=["<tool>"])
@given(
    named=NAMED,
    special_map=NAMED,
    decoder=st.none() | st.lists(ADDED, unique_by=lambda token: token["content"], max_size=3),
    extra=EXTRA,
)
def test_ids_and_names_are_those_of_auto_tokenizer(tokenizer, named, special_map, decoder, extra):
    config = {**named, "additional_special_tokens": extra}
    if decoder is not None:
        config["added_tokens_decoder"] = {str(300 + i): token for i, token in enumerate(decoder)}
    ours, theirs = read_both(tokenizer, config, special_map)
    for name in ("bos", "eos", "pad"):
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_token_id"), name
    assert ours.vocab_size == len(theirs)
    assert ours.tokens_by_id() == {number: token for token, number in theirs.get_vocab().items()}
    for text in TEXTS:
        assert ours.encode(text, special_tokens_as="ids").tolist() == theirs.encode(text, add_special_tokens=False)
        text_ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text).tolist() == text_ids


def test_the_rule_of_qwen2_is_that_of_its_class(texts):
    ours = Tokenizer.train(texts, vocab_size=300, split="qwen2")
    model = json.loads(ours.definition)["model"]
    theirs = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    for text in [*texts, "in 2023 cafe\u0301 東京 🦊 don't\r\n\n  x\t1234567"]:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    backend = Tokenizer.from_bytes({"tokenizer.json": theirs.backend_tokenizer.to_str().encode()})
    assert (ours.has_split("qwen2"), backend.has_split("qwen2"), ours.has_split("llama3")) == (True, True, False)


def test_prepare_says_which_models_read_other_ids(tokenizer, texts, tmp_path):
    for split, n_notices in (("llama3", 1), ("qwen2", 0)):
        said = []
        made = Tokenizer.train(texts, vocab_size=300, split=split)
        prepare([{"text": "a"}], tokenizer=made, out=tmp_path / split, notify=said.append)
        assert len(said) == n_notices, said
    with pytest.raises(DataError, match="split = 'gpt9': choose llama3 or qwen2"):
        Tokenizer.train(texts, vocab_size=300, split="gpt9")
