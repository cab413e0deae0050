"""Symbolic links in place of outputs: only the link is replaced or the job refused, and what it names is untouched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, Tokenizer, TokenStore, prepare
from lt_data.storage import atomic_folder, remove_tree

Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def victim(fast_path: Path) -> Path:
    folder = fast_path / "victim"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis/a.tex").write_text("years of work")
    return folder


@pytest.fixture
def text(fast_path: Path) -> Path:
    path = fast_path / "text.txt"
    path.write_text("a quick brown fox")
    return path


@pytest.fixture
def short(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "engine": "hf"}


def test_a_tree_that_is_a_link_is_unlinked(victim: Path, contents: Contents, fast_path: Path) -> None:
    before = contents(victim)
    link = fast_path / "link"
    link.symlink_to(victim)
    remove_tree(link)
    assert not link.is_symlink()
    (fast_path / "tree").mkdir()
    (fast_path / "tree/inner").symlink_to(victim)
    remove_tree(fast_path / "tree")
    assert not (fast_path / "tree").exists()
    assert contents(victim) == before


@pytest.mark.parametrize("name", ["", "/store", "/store/shards", "/lock", "/journal", "/sources.side"])
@pytest.mark.parametrize("no_resume", [False, True])
def test_a_link_in_the_build_folder_stops_the_job(
    fast_path: Path, victim: Path, text: Path, short: dict[str, Any], contents: Contents, name: str, no_resume: bool
) -> None:
    out = fast_path / "out"
    target = victim if name in ("", "/store", "/store/shards") else victim / "thesis/a.tex"
    link = Path(f"{out}.building{name}")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    before = contents(victim)
    with pytest.raises(DataError, match=rf"{link}: a symbolic link; remove it"):
        prepare([text], out=out, no_resume=no_resume, **short)
    assert contents(victim) == before
    assert link.is_symlink()
    assert not out.exists()


@pytest.mark.parametrize("relative", [False, True])
def test_overwriting_a_link_to_a_store_replaces_the_link(
    fast_path: Path, text: Path, short: dict[str, Any], contents: Contents, relative: bool
) -> None:
    out, elsewhere = fast_path / "out", fast_path / "elsewhere"
    prepare([text], out=elsewhere, **short)
    before = contents(elsewhere)
    out.symlink_to("elsewhere" if relative else elsewhere)
    text.write_text("another text")
    manifest = prepare([text], out=out, overwrite=True, **short)
    assert not out.is_symlink()
    assert TokenStore(out).manifest == manifest
    assert contents(elsewhere) == before
    assert sorted(path.name for path in fast_path.iterdir()) == ["elsewhere", "out", "text.txt"]


@pytest.mark.parametrize("target", ["nowhere", "empty"])
def test_a_link_to_no_store_is_refused_before_the_work(
    fast_path: Path, text: Path, short: dict[str, Any], tokenizer: Tokenizer, target: str
) -> None:
    (fast_path / "empty").mkdir()
    (fast_path / "out").symlink_to(target)
    with pytest.raises(DataError, match=r"out: exists and is not a token store; choose another folder"):
        prepare([text], out=fast_path / "out", overwrite=True, **short)
    with pytest.raises(DataError, match=r"out: a symbolic link; remove it, or give the folder that it names"):
        tokenizer.save(fast_path / "out")
    assert sorted(path.name for path in fast_path.iterdir()) == ["empty", "out", "text.txt"]


def test_an_atomic_folder_replaces_a_link(fast_path: Path, victim: Path, contents: Contents) -> None:
    before = contents(victim)
    (fast_path / "out").symlink_to(victim)
    with atomic_folder(fast_path / "out", overwrite=True) as building:
        (building / "new").touch()
    assert contents(fast_path / "out") == {"new": b""}
    assert not (fast_path / "out").is_symlink()
    assert contents(victim) == before
    assert sorted(path.name for path in fast_path.iterdir()) == ["out", "victim"]
