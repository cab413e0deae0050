"""A store that stays in S3 is exported as the one on the disk, byte for byte."""

from pathlib import Path
from typing import Any

import pytest

from lt_data import ExportOptions, TokenStore, export
from lt_data.remote.sending import upload


@pytest.mark.parametrize("to", ["hf", "smp", "megatron", "litespark"])
def test_an_export_from_s3(to: str, store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    upload(store.path, bucket.url)
    remote = TokenStore(bucket.url, cache=tmp_path / "cache")
    options = ExportOptions(to=to, seq_len=None if to == "megatron" else 64, file_bytes=20_000)
    assert export(remote, out=tmp_path / "b", options=options) == export(store, out=tmp_path / "a", options=options)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert files == sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*.*"))
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
