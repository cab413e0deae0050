"""The documentation site, built strictly: links lead where they should, nothing is loaded from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lt_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_to_pages_of_the_site_or_become_text(site: ModuleType) -> None:
    known = {
        "README.md": "index.md",
        "packages/lt-data/README.md": "packages/lt-data.md",
        "docs/guides/launch.md": "guides/launch.md",
    }
    text = (
        "[a](packages/lt-data) [b](docs/guides/launch.md#x) [c](tests/conftest.py) [d](https://x.org) [e](nowhere.md)"
    )
    assert site.rewrite_links(text, "README.md", known) == (
        "[a](packages/lt-data.md) [b](guides/launch.md#x) c [d](https://x.org) [e](nowhere.md)"
    )
    back = "[r](../../README.md) ![p](../images/report.png) [p](../../packages/lt-data/README.md)\n    [code](../x.md)"
    both = "    [code](../x.md)\n\n[r](../../README.md)\n\n```\n[r](../../README.md)\n```\n\n[r](../../README.md)"
    assert site.rewrite_links(both, "docs/guides/launch.md", known) == (
        "    [code](../x.md)\n\n[r](../index.md)\n\n```\n[r](../../README.md)\n```\n\n[r](../index.md)"
    )
    assert site.rewrite_links(back, "docs/guides/launch.md", known) == (
        "[r](../index.md) ![p](../images/report.png) [p](../packages/lt-data.md)\n    [code](../x.md)"
    )


def test_every_page_stands_in_the_navigation(site: ModuleType) -> None:
    known = site.find_pages()
    assert set(known) >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(site.PACKAGES) == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    shown = set(re.findall(r"[\w./-]+\.md", repr(site.build_navigation(known))))
    assert shown == set(known.values()) - set(site.UNLISTED) | {f"api/{name}.md" for name in site.PACKAGES}


def test_the_reference_has_every_name_that_a_package_exports(site: ModuleType) -> None:
    import lt_data
    import lt_trainer

    for module in (lt_data, lt_trainer):
        names = {name.rpartition(".")[2] for name in site.exported_names(module.__name__.replace("_", "-"))}
        assert names == set(module.__all__)


def test_it_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="NO MKDOCS: the site is not built; sync the dev group")
    pytest.importorskip("mkdocstrings", reason="NO MKDOCSTRINGS: the site is not built; sync the dev group")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        assert not re.search(r"^(?:[-*]|\d+\.) ", page.read_text(), re.MULTILINE), f"{page.name}: a list shown as text"
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text())
        assert loaded == [], page
        # Code that Markdown takes for text: in a list it has to stand four spaces in.
        assert not re.search(r"<(?:p|li)>\s*(?:lt|uv|pip|python3?|```)[ \w]* (?:--|\w+ )", page.read_text()), page
    reference = (tmp_path / "site" / "api" / "lt-data.html").read_text()
    assert 'id="lt_data.packing.packs.pack"' in reference
    assert "Raises" in reference
