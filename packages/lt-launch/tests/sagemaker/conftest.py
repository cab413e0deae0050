"""Golden files of this folder, a store, and what boto3 needs to call a service of this machine."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_test_helpers.stores import make_stores

DATA = Path(__file__).parent / "data"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares text with a file of `data/`; LT_WRITE_GOLDEN=1 writes it, to be looked at before it is committed."""

    def compare(name: str, text: str) -> None:
        path = DATA / name
        if os.environ.get("LT_WRITE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a small packed token store."""
    root = tmp_path_factory.mktemp("data")
    make_stores(root, {"store": 60})
    return root


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that no service knows, and `tmp_path` as working directory."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LT_LAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
