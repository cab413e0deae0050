"""Each guard, with the mistake that it is there for."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from changelog import cut, missing_entries, notes, pending, sections, with_entry
from check_ranges import next_breaking, problems
from declared import undeclared
from gate import verdict
from members import ROOT, ToolError, read, siblings
from packaging.version import Version
from small_workspace import edit, git, write_package
from taken import missing, taken

REAL = read()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_the_packages_here_pass() -> None:
    assert problems(REAL) == []
    assert [text for member in REAL.values() for text in undeclared(member, REAL)] == []


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("lt-base>=0.2,<0.3", "excludes lt-base 0.1.0, which stands here; write >=0.1.0,<0.2"),
        ("lt-base>=0.1", "needs a floor and a cap, as >=0.1,<0.2"),
        ("lt-base<0.2", "needs a floor and a cap"),
        ("lt-base", "needs a floor and a cap"),
        ("lt-base>=0.1,<0.3", "admits versions that may break; write >=0.1,<0.2"),
        ("lt-base[gpu]>=0.1,<0.2", "lt-base has no extra gpu; it has cli"),
    ],
)
def test_a_range_that_does_not_hold(small: Path, requirement: str, message: str) -> None:
    write_package(small, "lt-mid", requirement)
    found = problems(read(small))
    assert len(found) >= 1
    assert any(message in text and text.startswith(f"lt-mid: {requirement.partition('>')[0][:7]}") for text in found)


def test_a_version_that_a_sibling_excludes(small: Path) -> None:
    """What uv does not notice: the sibling moves on, the range stays."""
    write_package(small, "lt-base", version="0.2.0")
    (text,) = problems(read(small))
    assert text.startswith("lt-mid: lt-base<0.2,>=0.1: excludes lt-base 0.2.0")


def test_two_ranges_for_the_same_sibling(small: Path) -> None:
    edit(small / "packages/lt-mid/pyproject.toml", '"typer>=0.26"', '"lt-base[cli]>=0.1.1,<0.2"')
    write_package(small, "lt-base", version="0.1.1")
    (text,) = problems(read(small))
    assert "elsewhere lt-mid says lt-base<0.2,>=0.1; say the same everywhere" in text


@pytest.mark.parametrize(("version", "after"), [("0.3.1", "0.4"), ("0.0.9", "0.1"), ("1.2.0", "2"), ("10.0", "11")])
def test_the_next_version_that_may_break(version: str, after: str) -> None:
    assert next_breaking(Version(version)) == Version(after)


@pytest.mark.parametrize(
    "statement",
    [
        "import requests",
        "def f():\n    from requests.adapters import HTTPAdapter",
        'import importlib\nimportlib.import_module("requests")',
        "try:\n    import requests\nexcept ImportError:\n    pass",
        "import lt_side",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import requests",
    ],
)
def test_an_undeclared_dependency(small: Path, statement: str) -> None:
    """In the workspace's environment all of these work."""
    (small / "packages/lt-mid/src/lt_mid/x.py").write_text(statement + "\n")
    members = read(small)
    (text,) = undeclared(members["lt-mid"], members, small)
    assert text.startswith("packages/lt-mid/src/lt_mid/x.py:")
    assert "lt-mid does not declare" in text


def test_what_is_declared_may_be_imported(small: Path) -> None:
    """Dependencies, extras, the extras of siblings that are asked for, the standard library, and types."""
    edit(small / "packages/lt-base/pyproject.toml", 'cli = ["typer>=0.26"]', 'cli = ["PyYAML"]')
    edit(small / "packages/lt-mid/pyproject.toml", '"lt-base>=', '"lt-base[cli]>=')
    (small / "packages/lt-mid/src/lt_mid/x.py").write_text(
        "import json\nimport lt_base.x\nimport typer\nimport yaml\nfrom lt_mid import go\nfrom . import y\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import requests\n"
    )
    members = read(small)
    assert undeclared(members["lt-mid"], members, small) == []
    edit(small / "packages/lt-mid/pyproject.toml", '"lt-base[cli]>=', '"lt-base>=')
    members = read(small)
    (text,) = undeclared(members["lt-mid"], members, small)
    assert "imports yaml" in text


TAKES = """
from typing import TYPE_CHECKING
from lt_base import go, later
from lt_base.deep import one, two
if TYPE_CHECKING:
    from lt_base import Typed
def f():
    import lt_base.gone
    from lt_base import deep, lost
    import_module("lt_base.away")
"""
LAZY = """
_MODULES = {"later": "deep"}
def go(): ...
def __getattr__(name): ...
"""


def test_a_name_that_the_oldest_sibling_does_not_have_is_missed(small: Path) -> None:
    """`import lt_mid` alone would notice none of these."""
    base, mid = small / "packages/lt-base/src/lt_base", small / "packages/lt-mid/src/lt_mid"
    (mid / "x.py").write_text(TAKES)
    (base / "__init__.py").write_text(LAZY)
    (base / "deep.py").write_text("if True:\n    one = 1\n")
    assert missing(mid, {"lt_base": base}) == [
        "lt_mid/x.py:4: lt_base.deep has no two",
        "lt_mid/x.py:8: there is no module lt_base.gone",
        "lt_mid/x.py:9: lt_base has no lost",
        "lt_mid/x.py:10: there is no module lt_base.away",
    ]


@pytest.mark.parametrize("name", sorted(REAL))
def test_all_that_packages_take_from_each_other_is_there(name: str) -> None:
    member = REAL[name]
    roots = {REAL[sibling].module: REAL[sibling].source for sibling in siblings(member, REAL)}
    assert missing(member.source, roots) == []
    assert bool(roots) is bool(taken(member.source, set(roots)))


LAYERS = [
    *(("lt_data", "names", "lt_model"), ("lt_model", "presets", "lt_data"), ("lt_ckpt", "errors", "lt_trainer")),
    *(("lt_trainer", "schedule", "lt_trainer_gpu"), ("lt_trainer", "schedule", "torch")),
    *(("lt_trainer_gpu", "options", "lt_trainer_neuron"), ("lt_launch", "errors", "lt_trainer_gpu")),
    *(("lt_data", "names", "torch"), ("lt_model", "config", "numpy"), ("lt_launch", "errors", "boto3")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "module", "imported"), LAYERS)
def test_each_import_across_the_layers(tmp_path: Path, package: str, module: str, imported: str) -> None:
    _layers(tmp_path, package, module, imported)


def test_every_package_stands_in_a_layer() -> None:
    (layers,) = [c for c in CONTRACTS if c["type"] == "layers"]
    named = [name.strip() for layer in layers["layers"] for name in layer.split("|")]
    assert sorted(named) == sorted(member.module for member in REAL.values())


def test_an_import_across_the_layers(tmp_path: Path) -> None:
    """The contracts of the workspace on its own sources, with one line added to lt-data in a copy."""
    _layers(tmp_path, *LAYERS[0])


def _layers(tmp_path: Path, package: str, module: str, imported: str) -> None:
    program = Path(sys.executable).with_name("lint-imports")
    for name, member in REAL.items():
        for path in member.source.rglob("*.py"):
            copy = tmp_path / "src" / path.relative_to(member.source.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        assert (tmp_path / "src" / name.replace("-", "_")).is_dir()
    command = [program, "--no-cache", "--config", ROOT / "pyproject.toml"]
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": ""}
    changed = tmp_path / "src" / package / f"{module}.py"
    changed.write_text(f"{changed.read_text()}\nimport {imported}\n")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{package}.{module} -> {imported}" in done.stdout


def test_a_forgotten_changelog(small: Path, commit: Callable[..., None]) -> None:
    source = small / "packages/lt-mid/src/lt_mid/__init__.py"
    edit(source, "...", "print(1)")
    commit()
    members = list(read(small).values())
    (text,) = missing_entries("lt-mid-v0.1.0", members, root=small)
    assert text.startswith("packages/lt-mid/src changed and packages/lt-mid/CHANGELOG.md tells nothing new")
    edit(small / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- It prints.\n")
    commit()
    assert missing_entries("lt-mid-v0.1.0", members, root=small) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("# Changelog of", "# The changelog of"), ("- The first version.", "- The first version, by us.")],
)
def test_a_change_of_the_changelog_that_tells_nothing(
    small: Path, commit: Callable[..., None], old: str, new: str
) -> None:
    """Another heading, or another word in a release that is out."""
    edit(small / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    edit(small / "packages/lt-mid/CHANGELOG.md", old, new)
    commit()
    assert len(missing_entries("lt-mid-v0.1.0", list(read(small).values()), root=small)) == 1


def test_a_new_file_and_a_lost_one_are_changes_of_the_sources(small: Path, commit: Callable[..., None]) -> None:
    (small / "packages/lt-base/src/lt_base/new.py").write_text("")
    (small / "packages/lt-side/src/lt_side/__init__.py").unlink()
    commit()
    found = missing_entries("lt-mid-v0.1.0", list(read(small).values()), root=small)
    assert [text.split()[0] for text in found] == ["packages/lt-base/src", "packages/lt-side/src"]


def test_a_change_that_nobody_can_notice_says_so(small: Path, commit: Callable[..., None]) -> None:
    """All commits that touch the sources must; one that does not is enough to ask for an entry."""
    source = small / "packages/lt-mid/src/lt_mid/__init__.py"
    edit(source, "A package.", "One package.")
    commit("Better words\n\nChangelog: none")
    members = list(read(small).values())
    assert missing_entries("lt-mid-v0.1.0", members, root=small) == []
    edit(source, "...", "print(1)")
    commit("More")
    assert len(missing_entries("lt-mid-v0.1.0", members, root=small)) == 1


def test_a_merge_of_main_does_not_have_to_say_so(small: Path, commit: Callable[..., None]) -> None:
    """A merge that resolves a conflict touches the sources, too."""
    source = small / "packages/lt-mid/src/lt_mid/__init__.py"
    git("switch", "--quiet", "-c", "work", cwd=small)
    edit(source, "A package.", "One package.")
    commit("Better words\n\nChangelog: none")
    git("switch", "--quiet", "main", cwd=small)
    edit(source, "...", "print(1)")
    edit(small / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- It prints.\n")
    commit("More")
    git("switch", "--quiet", "work", cwd=small)
    git("merge", "--quiet", "--no-commit", "--no-ff", "main", cwd=small)
    edit(source, "One package.", "One package")
    commit("Merge")
    assert missing_entries("main", list(read(small).values()), root=small) == []


def test_a_change_of_the_public_names_is_never_silent(small: Path, commit: Callable[..., None]) -> None:
    """Neither by the trailer, nor because nothing of the sources changed: programs and extras stand in pyproject."""
    with (small / "packages/lt-mid/API.txt").open("a") as file:
        file.write("function lt_mid.stop\n")
    commit("A name\n\nChangelog: none")
    members = list(read(small).values())
    (text,) = missing_entries("lt-mid-v0.1.0", members, root=small)
    assert text == (
        "packages/lt-mid/API.txt changed and packages/lt-mid/CHANGELOG.md tells nothing new: "
        "add a line under its top heading"
    )
    edit(small / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- `stop`.\n")
    commit()
    assert missing_entries("lt-mid-v0.1.0", members, root=small) == []


def test_a_release_in_the_same_change_tells_too(small: Path, commit: Callable[..., None]) -> None:
    changelog = small / "packages/lt-mid/CHANGELOG.md"
    edit(small / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    edit(changelog, "pending.\n", "pending.\n- It prints.\n")
    changelog.write_text(cut(changelog.read_text(), version="0.1.1", when=date(2026, 3, 4)))
    commit()
    assert missing_entries("lt-mid-v0.1.0", list(read(small).values()), root=small) == []


def test_cutting_a_changelog() -> None:
    body = "### Added\n\n- One\n  more line.\n- Two.\n"
    text = f"# C\n\nWords.\n\n## [Unreleased]\n\n{body}\n## [0.1.0] - 2026-01-02\n\n- Old.\n"
    after = cut(text, version="0.2.0", when=date(2026, 3, 4))
    assert after == text.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n")
    assert [s.name for s in sections(after)] == ["Unreleased", "0.2.0", "0.1.0"]
    assert sections(after)[1].entries == ["One more line.", "Two."]
    assert notes(after, version="0.2.0") == body
    with pytest.raises(ToolError, match="nothing is pending"):
        cut(after, version="0.3.0", when=date(2026, 3, 5))
    with pytest.raises(ToolError, match=r"0\.1\.0 is released already"):
        cut(text, version="0.1.0", when=date(2026, 3, 5))
    with pytest.raises(ToolError, match=r"no release 9"):
        notes(after, version="9")


@pytest.mark.parametrize("heading", ["## 0.1.0 - 2026-01-02", "## [0.1.0] - 2026-01-02 (late)", "##[0.1.0]"])
def test_a_heading_of_another_form_does_not_join_two_releases(heading: str) -> None:
    """Its entries would be told as those of the release above."""
    text = f"# C\n\n## [Unreleased]\n\n- New.\n\n{heading}\n\n### Added\n\n- Old.\n"
    with pytest.raises(ToolError, match=re.escape(f"write '{heading}' as ## [VERSION]")):
        cut(text, version="0.2.0", when=date(2026, 3, 4))


@pytest.mark.parametrize("heading", ["## [0.1.0]", "## [0.1.0] - soon", "## [0.1.0] - 2026-13-02"])
def test_a_release_without_a_date_is_not_read_over(heading: str) -> None:
    with pytest.raises(ToolError, match=r"## \[0\.1\.0\] needs a date"):
        cut(f"# C\n\n## [Unreleased]\n\n- New.\n\n{heading}\n\n- Old.\n", version="0.2.0", when=date(2026, 3, 4))


def test_an_entry_goes_to_the_end_of_what_is_pending() -> None:
    text = "# C\n\n## [0.1.0] - unreleased\n\n### Added\n\n- One.\n\n## [0.0.1] - 2026-01-02\n\n- Old.\n"
    assert with_entry(text, "- Two.") == text.replace("- One.\n", "- One.\n- Two.\n")
    empty = "# C\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n\n- Old.\n"
    after = with_entry(empty, "- Two.")
    assert after == empty.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Changed\n\n- Two.\n")
    top = pending(after)
    assert top is not None
    assert top.entries == ["Two."]


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_changelogs_here_can_be_cut(name: str) -> None:
    text = (REAL[name].folder / "CHANGELOG.md").read_text()
    top = pending(text)
    assert top is None or top.name in ("Unreleased", str(REAL[name].version))
    assert sections(text)[0].body


def _needs(**results: str) -> dict[str, object]:
    outputs = {"packages": '["lt-data"]', "workspace": "true"}
    return {
        job: {"result": result, "outputs": outputs if job == "plan" else {}}
        for job, result in {"plan": "success", "package": "success", "workspace": "success", **results}.items()
    }


def test_the_gate_passes_only_what_ran_and_passed() -> None:
    assert verdict(_needs()) == []
    for job in ("plan", "package", "workspace"):
        for result in ("failure", "cancelled", "skipped"):
            assert verdict(_needs(**{job: result})) != [], (job, result)
    nothing = _needs(package="skipped", workspace="skipped")
    assert verdict(nothing) != []
    nothing["plan"] = {"result": "success", "outputs": {"packages": "[]", "workspace": "false"}}
    assert verdict(nothing) == []
    assert verdict({"plan": nothing["plan"]}) != []
    assert verdict({**_needs(), "other": {"result": "failure"}}) == ["other: failure, where it should be success"]


def test_git_knows_the_trailer(small: Path) -> None:
    """The trailer is git's own notion: it has to stand in the last paragraph of the message."""
    git("commit", "--quiet", "--allow-empty", "-m", "A\n\nChangelog: none\n\nMore words.", cwd=small)
    trailer = git("log", "-1", "--format=%(trailers:key=Changelog,valueonly)", cwd=small)
    assert trailer.strip() == ""
