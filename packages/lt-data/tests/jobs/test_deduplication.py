"""Exact deduplication: the documents of a Python set, left out by masks, also over units."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lt_data
from lt_data import DataError, TokenStore
from lt_data.preparation.deduplication import HASH_DTYPE, find_repeated
from lt_data.store.manifest import Selection

VALUES = st.sampled_from([bytes([i]) * 16 for i in range(0, 256, 15)]) | st.integers(0, 5).map(
    lambda n: bytes(15) + bytes([n])  # these differ in the last byte only, and may end in zeros
)


@pytest.mark.parametrize("n_ranges", [1, 3, 16])
@given(parts=st.lists(st.lists(VALUES, max_size=9), max_size=8))
def test_what_is_repeated_is_what_a_set_has(n_ranges, parts):
    seen, expected = set[bytes](), []
    for part in parts:
        expected.append([value in seen or seen.add(value) for value in part])
    found = find_repeated([np.array(part, HASH_DTYPE) for part in parts], n_ranges)
    assert [mask.tolist() for mask in found] == [[bool(value) for value in part] for part in expected]


def test_duplicates_of_other_units_are_left_out(tmp_path, texts, tokenizer):
    """The documents and counts of a store of one process, of files of which the last has nothing new."""
    sources = tmp_path / "sources"
    sources.mkdir()
    parts = (texts[:20], texts[10:30] + texts[10:13], texts[25:60], texts[:9])
    for number, part in enumerate(parts):
        lines = [json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(part)]
        (sources / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    selection = Selection(drop_duplicates=True, min_characters=5)
    options: dict[str, Any] = {"tokenizer": tokenizer, "engine": "hf", "selection": selection, "shard_tokens": 2000}
    options["keep"] = ["n:int"]
    lt_data.prepare([sources], out=tmp_path / "units", unit_bytes=30_000, **options)
    lt_data.prepare([sources], out=tmp_path / "one", unit_bytes=2**40, **options)
    units, one = TokenStore(tmp_path / "units"), TokenStore(tmp_path / "one")
    assert len(units.manifest.parts) > 2
    assert any(shard.mask for shard in units.manifest.shards)
    assert not units.manifest.parts[-1].shards
    assert [ids.tolist() for ids in units] == [ids.tolist() for ids in one]
    for name in ("documents", "tokens", "text_bytes", "read", "left_out", "skipped", "selection", "kept"):
        assert getattr(units.manifest, name) == getattr(one.manifest, name), name
    for index in range(len(one)):
        assert units.document_columns(index) == one.document_columns(index)
        paths = [str(store.document_source(index)).partition(".jsonl")[0] for store in (units, one)]
        assert paths[0] == paths[1]
    found = [lt_data.pack(store, seq_len=64) for store in (units, one)]
    for name in ("row_offsets", "document", "start", "length", "valid"):
        assert np.array_equal(*(getattr(each, name) for each in found)), name
    assert lt_data.verify(units) == []
    joined = lt_data.join(tmp_path / "joined", [units.folder, one.folder])
    assert joined.documents == 2 * len(one)
    assert lt_data.verify(TokenStore(tmp_path / "joined")) == []
    with pytest.raises(DataError, match=r"drop_duplicates, but it does not keep the hashes .*; prepare all sources"):
        lt_data.append(units.folder, [sources])
