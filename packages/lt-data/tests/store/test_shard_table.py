"""Shard entries as columns are the entries."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError
from lt_data.store.manifest import ShardFile
from lt_data.store.shard_table import ShardTable

_hashes = st.integers(0, 9).map(lambda n: hashlib.sha256(bytes([n])).hexdigest())
_shards = st.builds(
    ShardFile,
    name=st.sampled_from(["00000", "00001", "é", "shard-7"]),
    tokens=st.integers(0, 2**50),
    documents=st.integers(0, 2**40),
    sha256=_hashes,
    idx_sha256=_hashes,
    src_sha256=_hashes | st.just(""),
)


@given(st.lists(_shards, max_size=9), st.booleans())
def test_a_table_has_the_entries_it_was_made_of(shards: list[ShardFile], has_columns: bool) -> None:
    if has_columns:
        shards = [replace(shard, arrow_sha256=shard.sha256, arrow_bytes=7) for shard in shards]
    table = ShardTable.decode(memoryview(ShardTable.of(shards).encode()), len(shards))
    assert table == tuple(shards)
    assert tuple(shards) == table
    assert table[1:] == tuple(shards[1:])
    assert (table.tokens.tolist(), table.documents.tolist()) == (
        [shard.tokens for shard in shards],
        [shard.documents for shard in shards],
    )
    flat = replace(table, numbered=True, has_columns=False)
    assert [*flat] == [
        replace(shard, name=f"{i:05d}", src_sha256="", arrow_sha256="", arrow_bytes=0) for i, shard in enumerate(shards)
    ]
    with pytest.raises(IndexError):
        table[len(shards)]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_table_of_another_number_is_refused(n: int) -> None:
    digest = hashlib.sha256().hexdigest()
    shards = [ShardFile(name=f"{i}", tokens=i, documents=1, sha256=digest, idx_sha256=digest) for i in range(2)]
    content = ShardTable.of(shards).encode()
    with pytest.raises(DataError, match=f"not a table of {n} shards"):
        ShardTable.decode(memoryview(content), n)


@pytest.mark.parametrize("name", ["../00000", "a/b", ""])
def test_a_name_that_leads_out_is_refused(name: str) -> None:
    digest = hashlib.sha256().hexdigest()
    content = ShardTable.of([ShardFile(name="x", tokens=1, documents=1, sha256=digest, idx_sha256=digest)]).encode()
    with pytest.raises(DataError, match="not a table of 1 shards"):
        ShardTable.decode(memoryview(content[:-2] + name.encode() + b"\n"), 1)
