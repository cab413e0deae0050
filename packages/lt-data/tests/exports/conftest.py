"""Stores whose rows and documents end at awkward places, in both widths of token."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from lt_data import Document, Tokenizer, TokenStore, prepare


@pytest.fixture(scope="session")
def wide_tokenizer() -> Tokenizer:
    """Seventy thousand ids: two bytes are not enough."""
    vocabulary = {f"w{i}": i for i in range(69_998)} | {"<s>": 69_998, "</s>": 69_999}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()
    return Tokenizer({"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": config}, name="wide")


@pytest.fixture
def wide_store(tmp_path, wide_tokenizer) -> TokenStore:
    """Forty documents of 1 to 300 ids, some above 65535, in shards of about 900."""
    rng = np.random.default_rng(11)
    lengths = [1, 300, *rng.integers(1, 200, size=38).tolist()]
    ids = [rng.integers(0, 69_998, size=length) for length in lengths]
    documents = [Document(ids=values, source=f"document {i}") for i, values in enumerate(ids)]
    out = tmp_path / "wide"
    prepare(documents, tokenizer=wide_tokenizer, out=out, bos=True, eos=True, shard_tokens=900)
    return TokenStore(out)
