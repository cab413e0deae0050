"""Documents to ids: order, documents that are ids already, engines that agree or are an error."""

import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare
from lt_data.tokenizing.encode import encode_documents
from lt_data.tokenizing.encoder import Encoder
from lt_data.tokenizing.engine import GigatokenEngine


def encoded(documents: Sequence[Document], encoder: Encoder) -> list[list[int]]:
    found: list[list[int]] = []
    for _, batch in encode_documents(documents, encoder):
        assert batch.lengths.sum() == batch.tokens.size
        found += [part.tolist() for part in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])]
    return found


@given(st.lists(st.one_of(st.text(max_size=12), st.lists(st.integers(0, 299), max_size=6)), max_size=12))
def test_texts_and_ids_in_any_mixture(tokenizer, content):
    documents = [Document(text=c) if isinstance(c, str) else Document(ids=np.array(c, np.int64)) for c in content]
    known = [tokenizer.encode(c).tolist() if isinstance(c, str) else c for c in content]
    around = [[*([0] if ids[0] != 0 else []), *ids, *([1] if ids[-1] != 1 else [])] if ids else [] for ids in known]
    assert encoded(documents, Encoder(tokenizer, bos=True, eos=True, engine="hf")) == around
    plain = Encoder(tokenizer, bos=False, eos=False, engine="hf")
    assert encoded(documents, plain) == known
    batches = [batch for batch, _ in encode_documents(documents, plain)]
    sizes = [size for batch in batches for size in batch.text_sizes]
    assert sizes == [len(c.encode()) for c in content if isinstance(c, str)]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 300], r"jsonl:3: id 300 at position 1 is not in the vocabulary.*\(0 to 299\)"),
        ([5, -1], r"jsonl:3: id -1 at position 1"),
        ([0.5], r"jsonl:3: ids of shape \(1,\) and type float64"),
        ([True], r"type bool"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (["a"], r"a list of whole numbers"),
    ],
)
def test_ids_that_are_none_of_the_tokenizer(tokenizer, ids, message):
    with pytest.raises(DataError, match=message):
        encoded([Document(ids=[5]), Document(ids=ids, source="jsonl:3")], Encoder(tokenizer, bos=False, eos=False))


@pytest.fixture(scope="module")
def llama2(texts) -> Tokenizer:
    """As Llama 2's: three special tokens, 256 bytes, then pieces; a space is U+2581, also before the text."""
    learnt = tokenizers.Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    learnt.train_from_iterator(texts * 2, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(learnt.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = {piece: i for i, piece in enumerate(letters)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer({"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()})


@pytest.mark.parametrize("mode", ["text", "ids"])
@pytest.mark.parametrize("kind", ["tokenizer", "llama2"])
def test_the_fast_engine_gives_equal_ids(request, texts, kind, mode):
    pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    special, other = tokenizer.special_strings[-2:]
    tried = [*texts, f"a{special}b", special, f"{special}x{other}", "", " ", " " * 999 + "\n" * 99, "a" * 3000]
    fast = Encoder(tokenizer, bos=True, eos=True, engine="auto", special_tokens_as=mode)
    right = Encoder(tokenizer, bos=True, eos=True, engine="hf", special_tokens_as=mode)
    assert (fast.engine["name"], right.engine["name"]) == ("gigatoken", "hf")
    found, expected = fast.encode(tried), right.encode(tried)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.special_strings == expected.special_strings == {special: 3, other: 1}


@pytest.mark.parametrize("where", ["first", "later"])
def test_other_ids_of_the_fast_engine_are_an_error(tokenizer, monkeypatch, where):
    pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    real = GigatokenEngine._encode

    def wrong(engine: GigatokenEngine, texts: Sequence[str]) -> list[np.ndarray]:
        return [ids + ("zebra" in text) for ids, text in zip(real(engine, texts), texts, strict=True)]

    monkeypatch.setattr(GigatokenEngine, "_encode", wrong)
    encoder = Encoder(tokenizer, bos=False, eos=False)
    if where == "later":
        monkeypatch.setattr("lt_data.tokenizing.engine._FIRST_CHARACTERS", 5)
        encoder = Encoder(tokenizer, bos=False, eos=False)
        encoder.encode(["the first", "fox"])
    with pytest.raises(DataError, match=r"other ids than tokenizers for the text .*zebra.*\(--engine hf\)"):
        encoder.encode(["a fox", "it is a zebra", "it is a zebra"])


def test_which_engine_is_taken(tokenizer, monkeypatch):
    model = json.loads(tokenizer.files["tokenizer.json"])
    model["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    odd = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})
    assert Encoder(odd, bos=False, eos=False).engine["name"] == "hf"
    with pytest.raises(DataError, match=r'engine = "gigatoken": cannot read this tokenizer'):
        Encoder(odd, bos=False, eos=False, engine="gigatoken")
    with pytest.raises(DataError, match=r"engine = 'fast': choose 'auto', 'hf', 'gigatoken'"):
        Encoder(tokenizer, bos=False, eos=False, engine="fast")
    with pytest.raises(DataError, match=r"special_tokens_as = 'both': choose 'text' or 'ids'"):
        Encoder(tokenizer, bos=False, eos=False, special_tokens_as="both")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert Encoder(tokenizer, bos=False, eos=False).engine["name"] == "hf"
    with pytest.raises(DataError, match=r"not installed.*pip install"):
        Encoder(tokenizer, bos=False, eos=False, engine="gigatoken")


def test_memory_of_the_fast_engine_is_bounded(tokenizer, monkeypatch):
    pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    engine = GigatokenEngine(tokenizer, "text")
    before = engine._gigatoken
    engine.encode(["small"])
    assert engine._gigatoken is before
    monkeypatch.setattr("lt_data.tokenizing.engine._memory_bytes", lambda: engine._reload_at_bytes + 1)
    for _ in range(2):
        assert engine.encode(["fox"])[0].tolist() == tokenizer.encode("fox").tolist()
    assert engine._gigatoken is not before


def test_stores_of_both_engines_have_the_same_bytes(tmp_path, tokenizer, texts):
    pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    made = {}
    for engine in ("hf", "auto"):
        documents = [Document(text=text) for text in texts]
        manifest = prepare(documents, tokenizer=tokenizer, out=tmp_path / engine, engine=engine)
        assert TokenStore(tmp_path / engine).manifest.engine["name"] == ("hf" if engine == "hf" else "gigatoken")
        made[engine] = manifest.fingerprint
    assert len(set(made.values())) == 1
