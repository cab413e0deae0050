"""The fast engine gives the ids of `tokenizers`, or is not used, and the store says which and why."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare
from lt_data.tokenizing.encode import Encoder, encode_documents
from lt_data.tokenizing.engine_selection import EngineChoice, HfEngine, choose_engine, make_engine
from lt_data.tokenizing.gigatoken_engine import GigatokenEngine
from lt_data.tokenizing.parity import describe_difference, difficult_texts, sample_text
from lt_data.tokenizing.tokenizer import LLAMA3_SPLIT_REGEX, SpecialTokensAs

pytest.importorskip("gigatoken", reason="needs lt-data[fast]")

# Letters of Unicode 17 (2025), which `tokenizers` takes for unassigned: as punctuation, which goes on to the line end.
NEW_LETTERS = "\U00016ea0\U00016ebb"


@pytest.fixture(scope="session")
def telling() -> Tokenizer:
    """A tokenizer that has learned to join what it takes for punctuation with the line end."""
    return Tokenizer.from_bytes(dict(_merged("\u00bb", "\u010a")))


def _merged(*pair: str) -> Sequence[tuple[str, bytes]]:
    """A byte-level tokenizer whose only merge is that pair of byte letters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in plain else next(others)) for byte in range(256)]
    model = {
        "version": "1.0",
        "added_tokens": [{"id": 257, "content": "<|end|>", "special": True, "normalized": False}],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT_REGEX}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate([*letters, "".join(pair)])},
            "merges": [list(pair)],
        },
    }
    for token in model["added_tokens"]:
        token |= {"single_word": False, "lstrip": False, "rstrip": False}
    config = {"bos_token": None, "eos_token": "<|end|>"}
    return [("tokenizer.json", json.dumps(model).encode()), ("tokenizer_config.json", json.dumps(config).encode())]


@pytest.mark.parametrize("mode", ["text", "ids"])
def test_difficult_texts_give_equal_ids(tokenizer: Tokenizer, mode: SpecialTokensAs) -> None:
    fast = make_engine(tokenizer, "gigatoken", special_tokens_as=mode)
    texts = difficult_texts(tokenizer)
    assert sum(map(len, texts)) > 10_000
    assert any("<|eos|>" in text for text in texts)
    assert describe_difference(fast, HfEngine(tokenizer, special_tokens_as=mode), texts) == ""


@settings(max_examples=60)
@given(
    st.lists(
        st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("a '1\n.\u16bb<|eos|>" + NEW_LETTERS))),
        max_size=4,
    )
)
def test_any_texts_give_equal_ids(tokenizer: Tokenizer, texts: list[str]) -> None:
    for mode in ("text", "ids"):
        fast = _engine(tokenizer, mode)
        right = tokenizer.encode_batch(texts, special_tokens_as=mode)
        assert [ids.tolist() for ids in fast.encode(texts)] == [ids.tolist() for ids in right]


_engines: dict[str, object] = {}


def _engine(tokenizer: Tokenizer, mode: SpecialTokensAs) -> HfEngine:
    if mode not in _engines:
        _engines[mode] = make_engine(tokenizer, "gigatoken", special_tokens_as=mode)
    return _engines[mode]  # type: ignore[return-value]


def test_code_points_that_the_engines_see_differently_go_to_the_reference(telling: Tokenizer) -> None:
    texts = ["plain", f"{NEW_LETTERS}\n", "\u00e9t\u00e9 \u6771", "", NEW_LETTERS[0]]
    right = [ids.tolist() for ids in telling.encode_batch(texts)]
    assert right[1][-1] == 256  # the last byte of the letter and the line end are one token
    bare = [ids.tolist() for ids in GigatokenEngine(telling.files, special_tokens_as="text").encode(texts)]
    if bare == right:
        pytest.skip("this gigatoken has the Unicode tables of this tokenizers: nothing to tell apart")
    engine = make_engine(telling, "gigatoken", special_tokens_as="text")
    assert [ids.tolist() for ids in engine.encode(texts)] == right
    assert getattr(engine, "n_fallback_texts") == 2  # noqa: B009


def test_special_strings_are_text_or_ids(tokenizer: Tokenizer) -> None:
    texts = ["a<|eos|>b", "<|bos|>", "<|bos|>x<|eos|>"]
    for engine in ("hf", "gigatoken"):
        encoder = Encoder(tokenizer, bos=True, eos=True, engine=engine, special_tokens_as="text")
        as_text = encoder.encode(texts)
        assert np.flatnonzero(as_text.tokens <= 1).size == 6  # what the policy adds
        assert as_text.special_strings == {"<|bos|>": 2, "<|eos|>": 2}
        as_ids = Encoder(tokenizer, bos=True, eos=True, engine=engine, special_tokens_as="ids").encode(texts)
        a, b, x = (int(ids[0]) for ids in tokenizer.encode_batch(["a", "b", "x"]))
        # What a document brings along is not added again.
        assert as_ids.tokens.tolist() == [0, a, 1, b, 1, 0, 1, 0, x, 1]
        assert as_ids.lengths.tolist() == [5, 2, 3]
        assert as_ids.special_strings == as_text.special_strings


def test_auto_takes_the_fast_engine_after_a_check(tokenizer: Tokenizer, texts: list[str]) -> None:
    choice = choose_engine(tokenizer, requested="auto", special_tokens_as="text", texts=texts, check_bytes=20_000)
    assert (choice.name, choice.requested) == ("gigatoken", "auto")
    assert 20_000 <= choice.checked_bytes < 20_000 + max(len(text.encode()) for text in texts)
    assert EngineChoice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice
    small = choose_engine(tokenizer, requested="auto", special_tokens_as="text", texts=texts, check_bytes=10**9)
    assert (small.name, small.checked_bytes) == ("hf", 0)
    assert "less than 1000000000 bytes" in small.reason
    named = choose_engine(tokenizer, requested="gigatoken", special_tokens_as="text", texts=["a"])
    assert (named.name, named.checked_bytes) == ("gigatoken", 1)
    assert choose_engine(tokenizer, requested="hf", special_tokens_as="text", texts=texts).reason == "requested"


@pytest.mark.parametrize(("n_tokens", "n_tried"), [(0, 0), (256, 256), (1000, 300)])
def test_special_and_added_tokens_are_tried_one_by_one_up_to_a_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n_tokens: int, n_tried: int
) -> None:
    """All 256 of Llama 3; a tokenizer with thousands is not compared for minutes."""
    half = n_tokens // 2
    monkeypatch.setattr(tokenizer, "special_strings", tuple(f"<|special_{n:04}|>" for n in range(half)))
    monkeypatch.setattr(tokenizer, "added_strings", tuple(f"<|added_{n:04}|>" for n in range(n_tokens - half)))
    names = [*tokenizer.special_strings, *tokenizer.added_strings]
    texts = difficult_texts(tokenizer)
    assert [name for name in names if any(f"1{name}1" in text for text in texts)] == names[:n_tried]


class Wrong(GigatokenEngine):
    """Differs in one id of texts that hold a word."""

    word = "\u6771"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        ids = super().encode(texts)
        return [np.append(i, np.uint32(5)) if self.word in text else i for text, i in zip(texts, ids, strict=True)]


def test_auto_takes_the_reference_when_ids_differ(
    tokenizer: Tokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_data.tokenizing.engine_selection.GigatokenEngine", Wrong)
    monkeypatch.setattr(Wrong, "word", "fox")  # in the text given alone
    choice = choose_engine(tokenizer, requested="auto", special_tokens_as="text", texts=texts, check_bytes=20_000)
    assert choice.name == "hf"
    assert "gigatoken returns other ids than tokenizers for the given text: id " in choice.reason
    with pytest.raises(DataError, match=r"engine = 'gigatoken': gigatoken returns other ids.*--engine"):
        choose_engine(tokenizer, requested="gigatoken", special_tokens_as="text", texts=texts)
    monkeypatch.setattr(Wrong, "word", "rock'n'roll")  # in the difficult texts alone
    choice = choose_engine(tokenizer, requested="auto", special_tokens_as="text", texts=["a" * 100], check_bytes=100)
    assert "for difficult text: id " in choice.reason


@pytest.mark.parametrize(
    ("ids", "place"), [([7, 8, 9], None), ([7, 8, 5], 2), ([6, 8, 9], 0), ([7, 8], 2), ([7, 8, 9, 9], 3), ([], 0)]
)
def test_every_difference_is_seen(ids: list[int], place: int | None) -> None:
    class Fixed:
        def __init__(self, ids: list[int]) -> None:
            self.ids = np.array(ids, np.uint32)

        def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [self.ids if text == "last" else self.ids[:0] for text in texts]

    found = describe_difference(Fixed(ids), Fixed([7, 8, 9]), ["first", "last"])
    assert found == ("" if place is None else f"id {place} of 3 of the text 'last'")


def test_a_difference_that_comes_later_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_data.tokenizing.engine_selection.GigatokenEngine", Wrong)
    monkeypatch.setattr(Wrong, "word", "later")
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_BYTES", 1000)
    documents = [Document(text="first " * 50, source=str(i)) for i in range(20)]
    documents += [Document(text="it comes later " * 70, source="last")]
    encoder = Encoder(tokenizer, bos=False, eos=False, engine="gigatoken")
    encoder.check_bytes = 2000
    with pytest.raises(DataError, match=r"gigatoken returns other ids than tokenizers for id .*engine='hf'"):
        list(encode_documents(documents, encoder, 1))
    assert sample_text(["a", "xy" * 3000, "b"]) == "xy" * 1000


def test_without_gigatoken(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    choice = choose_engine(tokenizer, requested="auto", special_tokens_as="text", texts=["a" * 9], check_bytes=9)
    assert choice.name == "hf"
    assert 'pip install "lt-data[fast]"' in choice.reason
    with pytest.raises(DataError, match=r"gigatoken is not installed.*pip install"):
        choose_engine(tokenizer, requested="gigatoken", special_tokens_as="text", texts=["a"])


def test_a_tokenizer_of_an_unknown_kind_goes_to_the_reference(tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.files["tokenizer.json"])
    model["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    odd = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})
    choice = choose_engine(odd, requested="auto", special_tokens_as="text", texts=["a" * 9], check_bytes=9)
    assert choice.name == "hf"
    assert "kind" in choice.reason or "cannot read" in choice.reason


def test_memory_of_the_fast_engine_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GigatokenEngine(tokenizer.files, special_tokens_as="text")
    before = engine._tokenizer
    engine.encode(["small"])
    assert engine._tokenizer is before
    monkeypatch.setattr("lt_data.tokenizing.gigatoken_engine._memory_bytes", lambda: engine._reload_at_bytes + 1)
    assert engine.encode(["fox"])[0].tolist() == tokenizer.encode_batch(["fox"])[0].tolist()
    assert engine._tokenizer is not before
    assert engine.encode(["fox"])[0].tolist() == tokenizer.encode_batch(["fox"])[0].tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_stores_of_both_engines_have_the_same_bytes(
    tmp_path: Path, tokenizer: Tokenizer, texts: list[str], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_BYTES", 20_000)
    monkeypatch.setattr(Encoder, "check_bytes", 30_000)
    documents = [Document(text=text, source=str(i)) for i, text in enumerate([*texts, NEW_LETTERS + "\n<|eos|>"])]
    fingerprints: dict[str, str] = {}
    for engine in ("hf", "auto", "gigatoken"):
        out = tmp_path / engine
        manifest = prepare(
            documents, tokenizer=tokenizer, out=out, workers=workers if engine == "auto" else 1, engine=engine
        )
        assert manifest.engine["name"] == ("hf" if engine == "hf" else "gigatoken")
        assert TokenStore(out).manifest.engine["requested"] == engine
        assert manifest.special_strings == {"<|eos|>": 1}
        fingerprints[engine] = manifest.fingerprint
    assert len(set(fingerprints.values())) == 1


def test_what_is_no_engine(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"engine = 'fast': choose 'auto', 'hf', 'gigatoken'"):
        Encoder(tokenizer, bos=False, eos=False, engine="fast")
    with pytest.raises(DataError, match=r"special_tokens_as = 'both': choose 'text' or 'ids'"):
        Encoder(tokenizer, bos=False, eos=False, special_tokens_as="both")  # type: ignore[arg-type]
    for values in ({"name": "hf"}, {"name": "x", "version": "1", "requested": "auto", "reason": ""}):
        with pytest.raises(DataError, match="engine"):
            EngineChoice.from_dict(values)
