"""Golden stores in tests/data: they stay readable, and the same text gives the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest

from lt_data import Document, RowReader, Stream, TokenStore, open_pack, pack, prepare
from lt_data.packing.packs import verify_packs
from lt_data.store.manifest import Selection

GOLDEN = Path(__file__).parent / "data" / "store-v1"
TEXTS = ["The first document.\n", "Second: ümläut, 東京, 🦊.", "", "x", "A literal <|eos|> is text. " * 3]
GOLDEN_SELECTION = GOLDEN.with_name("store-v1-selection")
SELECTED_TEXTS = [*TEXTS[:4], "x", "y", TEXTS[4], TEXTS[4] * 3]
SELECTION = Selection(max_characters=200, min_tokens=4, drop_duplicates=True)


@pytest.fixture
def golden() -> TokenStore:
    return TokenStore(GOLDEN)


def test_is_whole(golden):
    golden.verify()
    assert verify_packs(golden) == 2
    assert golden.manifest.fingerprint == "0f39bb6e7dabdbfbe684c8841d45af2c5c1e2ad6d9319c576fd2abf7ff5a6f48"
    assert golden.manifest.special_strings == {"<|eos|>": 3}


@pytest.mark.parametrize(
    ("folder", "texts", "selection"), [(GOLDEN, TEXTS, Selection()), (GOLDEN_SELECTION, SELECTED_TEXTS, SELECTION)]
)
def test_the_same_text_gives_the_same_bytes(tmp_path, folder, texts, selection):
    documents = [Document(text=text, source=str(i)) for i, text in enumerate(texts)]
    tokenizer = TokenStore(folder).tokenizer()
    store = tmp_path / "store"
    prepare(documents, tokenizer=tokenizer, out=store, shard_tokens=30, engine="hf", selection=selection)
    for mode in ("bfd", "concat"):
        pack(TokenStore(store), seq_len=16, mode=mode)
    written = {path.relative_to(store) for path in store.rglob("*") if path.is_file()}
    assert written == {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    for path in sorted(written - {Path("manifest.json")}):
        assert (store / path).read_bytes() == (folder / path).read_bytes(), path
    old, new = (json.loads((path / "manifest.json").read_bytes()) for path in (folder, store))
    for manifest in (old, new):
        manifest["engine"].pop("version")  # of `tokenizers`, whichever is installed
        manifest.pop("checksum")
    assert json.dumps(old) == json.dumps(new)


def test_gives_the_same_rows(golden):
    reader = RowReader(golden, open_pack(golden, seq_len=16))
    wanted = {"store": "0f39bb6e7dabdbfb", "pack": "bfd-16:45fc7f85c399a07b", "document_mask": "on"}
    assert reader.fingerprint == wanted
    batch = Stream(reader, global_batch_size=4, seed=5).next()
    assert batch.row_ids.tolist() == [0, 3, 1, 2]
    assert batch.valid_tokens == 57
    assert np.array_equal(batch.rows.input_ids[0, :16], golden[1][:16])
