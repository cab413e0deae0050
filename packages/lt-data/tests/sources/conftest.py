"""Datasets in the place of the hub's, an S3 file system, and PDF files."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Callable[[dict[str, bytes]], None]:
    """Writes files that `datasets` finds as those of the hub: a folder org/name here goes before it."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("lt_data.sources.hub._loaded", {})
    commit = SimpleNamespace(sha=COMMIT)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, revision: commit)

    def write(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)

    return write


@pytest.fixture
def s3(moto, aws, monkeypatch) -> Iterator[Any]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    import fsspec

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**aws, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{moto}"}.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3")
    yield filesystem
    type(filesystem).clear_instance_cache()


def _pdf(pages: list[str]) -> bytes:
    """A PDF by hand: one line of text per page, and a table of objects with their true offsets."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {len(objects)} 0 R >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode("latin-1")


@pytest.fixture(scope="session")
def make_pdf() -> Callable[[list[str]], bytes]:
    return _pdf
