"""Document filter: documents read = stored + left out, against a plain model."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer, TokenStore, prepare
from lt_data.store.manifest import DocumentTotals, Selection

limits = st.one_of(st.none(), st.integers(1, 12))
texts = st.lists(
    st.one_of(st.sampled_from(["", "a", "the fox", "a<|eos|>b", "1234567"]), st.text(max_size=20)), max_size=25
)


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    bounds: dict[str, int | None] = {}
    for unit in ("characters", "tokens"):
        least, most = draw(limits), draw(limits)
        if least is not None and most is not None and least > most:
            least, most = most, least
        bounds |= {f"min_{unit}": least, f"max_{unit}": most}
    return Selection(**bounds, drop_duplicates=draw(st.booleans()))


def model(
    given: list[str], tokenizer: Tokenizer, selection: Selection
) -> tuple[list[list[int]], dict[str, DocumentTotals], DocumentTotals, dict[str, int]]:
    """Documents of the store, what is left out, what was read, and special strings: one document after the other."""
    kept: list[list[int]] = []
    out: dict[str, DocumentTotals] = {}
    read = DocumentTotals()
    special: Counter[str] = Counter()
    seen: set[str] = set()
    for text in given:
        ids = [0, *tokenizer.encode_batch([text])[0].tolist(), 1]
        n_bytes = len(text.encode())
        encoded = DocumentTotals(documents=1, text_bytes=n_bytes, tokens=len(ids))
        if not text:
            reason, amount = "empty", DocumentTotals(documents=1)
        elif selection.min_characters is not None and len(text) < selection.min_characters:
            reason, amount = "too few characters", DocumentTotals(documents=1, text_bytes=n_bytes)
        elif selection.max_characters is not None and len(text) > selection.max_characters:
            reason, amount = "too many characters", DocumentTotals(documents=1, text_bytes=n_bytes)
        elif selection.drop_duplicates and text in seen:
            reason, amount = "duplicate", DocumentTotals(documents=1, text_bytes=n_bytes)
        else:
            seen.add(text)
            if selection.min_tokens is not None and len(ids) < selection.min_tokens:
                reason, amount = "too few tokens", encoded
            elif selection.max_tokens is not None and len(ids) > selection.max_tokens:
                reason, amount = "too many tokens", encoded
            else:
                kept.append(ids)
                special.update({s: text.count(s) for s in tokenizer.special_strings if s in text})
                read += encoded
                continue
        read += amount
        out[reason] = out.get(reason, DocumentTotals()) + amount
    return kept, out, read, dict(special)


def check(store: TokenStore, given: list[str], tokenizer: Tokenizer, selection: Selection) -> None:
    kept, out, read, special = model(given, tokenizer, selection)
    manifest = store.manifest
    assert [store[i].tolist() for i in range(store.n_documents)] == kept
    assert dict(manifest.left_out) == out
    assert manifest.read == read
    assert manifest.special_strings == special
    assert manifest.text_bytes == read.text_bytes - sum(amount.text_bytes for amount in out.values())
    assert (manifest.documents, manifest.tokens) == (len(kept), sum(map(len, kept)))
    assert manifest.selection == selection


@given(given=texts, selection=selections(), shard_tokens=st.integers(1, 60), batch=st.integers(1, 40))
def test_any_documents_and_selection(tokenizer, memory, given, selection, shard_tokens, batch):
    out = Path(tempfile.mkdtemp(dir=memory)) / "store"
    documents = [Document(text=text, source=str(i)) for i, text in enumerate(given)]
    options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "selection": selection}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lt_data.tokenizing.encode._BATCH_DOCUMENTS", batch)
        if model(given, tokenizer, selection)[0]:
            prepare(documents, out=out, shard_tokens=shard_tokens, **options)
            check(TokenStore(out), given, tokenizer, selection)
        else:
            with pytest.raises(DataError, match="no text in the documents given"):
                prepare(documents, out=out, shard_tokens=shard_tokens, **options)


@given(given=st.lists(texts, max_size=4), selection=selections(), unit_bytes=st.integers(1, 300))
def test_any_units(tokenizer, memory, given, selection, unit_bytes):
    folder = Path(tempfile.mkdtemp(dir=memory))
    (folder / "in").mkdir()
    for number, file in enumerate(given):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in file)
        (folder / f"in/{number}.jsonl").write_text(lines, encoding="utf-8")
    every = [text for file in given for text in file]
    kept, _, read, _ = model(every, tokenizer, selection)
    options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "unit_bytes": unit_bytes}
    if not kept:
        with pytest.raises(DataError, match="no text in"):
            prepare([folder / "in"], out=folder / "store", selection=selection, **options)
        return
    manifest = prepare([folder / "in"], out=folder / "store", selection=selection, **options)
    store = TokenStore(folder / "store")
    assert [store[i].tolist() for i in range(store.n_documents)] == kept
    assert (manifest.read.documents, manifest.read.text_bytes) == (read.documents, read.text_bytes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_tokens": 0}, "min_tokens = 0: at least 1"),
        ({"max_characters": -1}, "max_characters = -1: at least 1"),
        (
            {"min_characters": 5, "max_characters": 4},
            "min_characters = 5, max_characters = 4: no document satisfies both",
        ),
    ],
)
def test_selections_that_cannot_be(options, said):
    with pytest.raises(DataError, match=said):
        Selection(**options)
