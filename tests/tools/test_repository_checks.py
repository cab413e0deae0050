"""Each guard, with the mistake that it is there for."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from changelog import add_entry, cut_release, find_missing_entries, parse_sections, release_notes, unreleased_section
from check_dependencies import find_undeclared_imports
from check_ranges import find_range_problems, next_breaking_version
from ci_gate import find_failed_jobs
from members import ROOT, ToolError, read_members, sibling_dependencies
from packaging.version import Version
from sibling_imports import find_missing_names, find_sibling_imports
from small_workspace import git, replace_text, write_package

MEMBERS = read_members()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_the_packages_here_pass() -> None:
    assert find_range_problems(MEMBERS) == []
    assert [text for member in MEMBERS.values() for text in find_undeclared_imports(member, MEMBERS)] == []


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("lt-base>=0.2,<0.3", "excludes lt-base 0.1.0 of this workspace; write >=0.1.0,<0.2"),
        ("lt-base>=0.1", "needs a lower and an upper bound; write >=0.1,<0.2"),
        ("lt-base<0.2", "needs a lower and an upper bound"),
        ("lt-base", "needs a lower and an upper bound"),
        ("lt-base>=0.1,<0.3", "allows breaking versions; write >=0.1,<0.2"),
        ("lt-base[gpu]>=0.1,<0.2", "lt-base has no extra gpu; it has cli"),
    ],
)
def test_a_range_that_does_not_hold(small_workspace_dir: Path, requirement: str, message: str) -> None:
    write_package(small_workspace_dir, "lt-mid", requirement)
    found = find_range_problems(read_members(small_workspace_dir))
    assert len(found) >= 1
    assert any(message in text and text.startswith(f"lt-mid: {requirement.partition('>')[0][:7]}") for text in found)


def test_a_version_that_a_sibling_excludes(small_workspace_dir: Path) -> None:
    """What uv does not notice: the sibling moves on, the range stays."""
    write_package(small_workspace_dir, "lt-base", version="0.2.0")
    (text,) = find_range_problems(read_members(small_workspace_dir))
    assert text.startswith("lt-mid: lt-base<0.2,>=0.1: excludes lt-base 0.2.0")


def test_two_ranges_for_the_same_sibling(small_workspace_dir: Path) -> None:
    replace_text(small_workspace_dir / "packages/lt-mid/pyproject.toml", '"typer>=0.26"', '"lt-base[cli]>=0.1.1,<0.2"')
    write_package(small_workspace_dir, "lt-base", version="0.1.1")
    (text,) = find_range_problems(read_members(small_workspace_dir))
    assert "elsewhere lt-mid requires lt-base<0.2,>=0.1; use one range" in text


@pytest.mark.parametrize(("version", "after"), [("0.3.1", "0.4"), ("0.0.9", "0.1"), ("1.2.0", "2"), ("10.0", "11")])
def test_the_next_version_that_may_break(version: str, after: str) -> None:
    assert next_breaking_version(Version(version)) == Version(after)


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
def test_an_undeclared_dependency(small_workspace_dir: Path, statement: str) -> None:
    """In the workspace's environment all of these work."""
    (small_workspace_dir / "packages/lt-mid/src/lt_mid/x.py").write_text(statement + "\n")
    members = read_members(small_workspace_dir)
    (text,) = find_undeclared_imports(members["lt-mid"], members, small_workspace_dir)
    assert text.startswith("packages/lt-mid/src/lt_mid/x.py:")
    assert "lt-mid does not declare" in text


def test_what_is_declared_may_be_imported(small_workspace_dir: Path) -> None:
    """Dependencies, extras, the extras of siblings that are asked for, the standard library, and types."""
    replace_text(small_workspace_dir / "packages/lt-base/pyproject.toml", 'cli = ["typer>=0.26"]', 'cli = ["PyYAML"]')
    replace_text(small_workspace_dir / "packages/lt-mid/pyproject.toml", '"lt-base>=', '"lt-base[cli]>=')
    (small_workspace_dir / "packages/lt-mid/src/lt_mid/x.py").write_text(
        "import json\nimport lt_base.x\nimport typer\nimport yaml\nfrom lt_mid import go\nfrom . import y\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import requests\n"
    )
    members = read_members(small_workspace_dir)
    assert find_undeclared_imports(members["lt-mid"], members, small_workspace_dir) == []
    replace_text(small_workspace_dir / "packages/lt-mid/pyproject.toml", '"lt-base[cli]>=', '"lt-base>=')
    members = read_members(small_workspace_dir)
    (text,) = find_undeclared_imports(members["lt-mid"], members, small_workspace_dir)
    assert "imports yaml" in text


IMPORTING_SOURCE = """
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
LAZY_EXPORT_SOURCE = """
_MODULES = {"later": "deep"}
def go(): ...
def __getattr__(name): ...
"""


def test_a_name_that_the_oldest_sibling_does_not_have_is_missed(small_workspace_dir: Path) -> None:
    """`import lt_mid` alone would notice none of these."""
    base, mid = small_workspace_dir / "packages/lt-base/src/lt_base", small_workspace_dir / "packages/lt-mid/src/lt_mid"
    (mid / "x.py").write_text(IMPORTING_SOURCE)
    (base / "__init__.py").write_text(LAZY_EXPORT_SOURCE)
    (base / "deep.py").write_text("if True:\n    one = 1\n")
    assert find_missing_names(mid, {"lt_base": base}) == [
        "lt_mid/x.py:4: lt_base.deep has no two",
        "lt_mid/x.py:8: no module lt_base.gone",
        "lt_mid/x.py:9: lt_base has no lost",
        "lt_mid/x.py:10: no module lt_base.away",
    ]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_all_that_packages_take_from_each_other_is_there(name: str) -> None:
    member = MEMBERS[name]
    roots = {MEMBERS[sibling].module: MEMBERS[sibling].source_dir for sibling in sibling_dependencies(member, MEMBERS)}
    assert find_missing_names(member.source_dir, roots) == []
    assert bool(roots) is bool(find_sibling_imports(member.source_dir, set(roots)))


LAYERS = [
    *(("lt_data", "file_names", "lt_model"), ("lt_model", "presets", "lt_data"), ("lt_ckpt", "errors", "lt_trainer")),
    *(("lt_trainer", "engine", "lt_trainer_gpu"), ("lt_trainer", "engine", "torch")),
    *(("lt_trainer_gpu", "options", "lt_trainer_neuron"), ("lt_launch", "errors", "lt_trainer_gpu")),
    *(("lt_data", "file_names", "torch"), ("lt_model", "config", "numpy"), ("lt_launch", "errors", "boto3")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "module", "imported"), LAYERS)
def test_each_import_across_the_layers(tmp_path: Path, package: str, module: str, imported: str) -> None:
    _layers(tmp_path, package, module, imported)


def test_every_package_stands_in_a_layer() -> None:
    (layers,) = [c for c in CONTRACTS if c["type"] == "layers" and "containers" not in c]
    named = [name.strip() for layer in layers["layers"] for name in layer.split("|")]
    assert sorted(named) == sorted(member.module for member in MEMBERS.values())


def test_an_import_across_the_layers(tmp_path: Path) -> None:
    """The contracts of the workspace on its own sources, with one line added to lt-data in a copy."""
    _layers(tmp_path, *LAYERS[0])


def _layers(tmp_path: Path, package: str, module: str, imported: str) -> None:
    program = Path(sys.executable).with_name("lint-imports")
    for name, member in MEMBERS.items():
        for path in member.source_dir.rglob("*.py"):
            copy = tmp_path / "src" / path.relative_to(member.source_dir.parent)
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


def test_a_forgotten_changelog(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    source = small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py"
    replace_text(source, "...", "print(1)")
    commit()
    members = list(read_members(small_workspace_dir).values())
    (text,) = find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir)
    assert text.startswith("packages/lt-mid/src changed and packages/lt-mid/CHANGELOG.md has no new entry")
    replace_text(small_workspace_dir / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- It prints.\n")
    commit()
    assert find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("# Changelog of", "# The changelog of"), ("- The first version.", "- The first version, by us.")],
)
def test_a_change_of_the_changelog_that_tells_nothing(
    small_workspace_dir: Path, commit: Callable[..., None], old: str, new: str
) -> None:
    """Another heading, or another word in a release that is out."""
    replace_text(small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    replace_text(small_workspace_dir / "packages/lt-mid/CHANGELOG.md", old, new)
    commit()
    assert (
        len(
            find_missing_entries(
                "lt-mid-v0.1.0", list(read_members(small_workspace_dir).values()), root=small_workspace_dir
            )
        )
        == 1
    )


def test_a_new_file_and_a_lost_one_are_changes_of_the_sources(
    small_workspace_dir: Path, commit: Callable[..., None]
) -> None:
    (small_workspace_dir / "packages/lt-base/src/lt_base/new.py").write_text("")
    (small_workspace_dir / "packages/lt-side/src/lt_side/__init__.py").unlink()
    commit()
    found = find_missing_entries(
        "lt-mid-v0.1.0", list(read_members(small_workspace_dir).values()), root=small_workspace_dir
    )
    assert [text.split()[0] for text in found] == ["packages/lt-base/src", "packages/lt-side/src"]


def test_a_change_that_nobody_can_notice_says_so(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """All commits that touch the sources must; one that does not is enough to ask for an entry."""
    source = small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py"
    replace_text(source, "A package.", "One package.")
    commit("Better words\n\nChangelog: none")
    members = list(read_members(small_workspace_dir).values())
    assert find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir) == []
    replace_text(source, "...", "print(1)")
    commit("More")
    assert len(find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir)) == 1


def test_a_merge_of_main_does_not_have_to_say_so(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """A merge that resolves a conflict touches the sources, too."""
    source = small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py"
    git("switch", "--quiet", "-c", "work", cwd=small_workspace_dir)
    replace_text(source, "A package.", "One package.")
    commit("Better words\n\nChangelog: none")
    git("switch", "--quiet", "main", cwd=small_workspace_dir)
    replace_text(source, "...", "print(1)")
    replace_text(small_workspace_dir / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- It prints.\n")
    commit("More")
    git("switch", "--quiet", "work", cwd=small_workspace_dir)
    git("merge", "--quiet", "--no-commit", "--no-ff", "main", cwd=small_workspace_dir)
    replace_text(source, "One package.", "One package")
    commit("Merge")
    assert (
        find_missing_entries("main", list(read_members(small_workspace_dir).values()), root=small_workspace_dir) == []
    )


def test_a_change_of_the_public_names_is_never_silent(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """Neither by the trailer, nor because nothing of the sources changed: programs and extras stand in pyproject."""
    with (small_workspace_dir / "packages/lt-mid/API.txt").open("a") as file:
        file.write("function lt_mid.stop\n")
    commit("A name\n\nChangelog: none")
    members = list(read_members(small_workspace_dir).values())
    (text,) = find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir)
    assert text == (
        "packages/lt-mid/API.txt changed and packages/lt-mid/CHANGELOG.md has no new entry; "
        "add a line under its top heading"
    )
    replace_text(small_workspace_dir / "packages/lt-mid/CHANGELOG.md", "pending.\n", "pending.\n- `stop`.\n")
    commit()
    assert find_missing_entries("lt-mid-v0.1.0", members, root=small_workspace_dir) == []


def test_a_release_in_the_same_change_tells_too(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    changelog = small_workspace_dir / "packages/lt-mid/CHANGELOG.md"
    replace_text(small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    replace_text(changelog, "pending.\n", "pending.\n- It prints.\n")
    changelog.write_text(cut_release(changelog.read_text(), version="0.1.1", release_date=date(2026, 3, 4)))
    commit()
    assert (
        find_missing_entries(
            "lt-mid-v0.1.0", list(read_members(small_workspace_dir).values()), root=small_workspace_dir
        )
        == []
    )


def test_cutting_a_changelog() -> None:
    body = "### Added\n\n- One\n  more line.\n- Two.\n"
    text = f"# C\n\nWords.\n\n## [Unreleased]\n\n{body}\n## [0.1.0] - 2026-01-02\n\n- Old.\n"
    after = cut_release(text, version="0.2.0", release_date=date(2026, 3, 4))
    assert after == text.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n")
    assert [s.name for s in parse_sections(after)] == ["Unreleased", "0.2.0", "0.1.0"]
    assert parse_sections(after)[1].entries == ["One more line.", "Two."]
    assert release_notes(after, version="0.2.0") == body
    with pytest.raises(ToolError, match="no unreleased entries"):
        cut_release(after, version="0.3.0", release_date=date(2026, 3, 5))
    with pytest.raises(ToolError, match=r"0\.1\.0 is already released"):
        cut_release(text, version="0.1.0", release_date=date(2026, 3, 5))
    with pytest.raises(ToolError, match=r"no release 9"):
        release_notes(after, version="9")


@pytest.mark.parametrize("heading", ["## 0.1.0 - 2026-01-02", "## [0.1.0] - 2026-01-02 (late)", "##[0.1.0]"])
def test_a_heading_of_another_form_does_not_join_two_releases(heading: str) -> None:
    """Its entries would be told as those of the release above."""
    text = f"# C\n\n## [Unreleased]\n\n- New.\n\n{heading}\n\n### Added\n\n- Old.\n"
    with pytest.raises(ToolError, match=re.escape(f"write '{heading}' as ## [VERSION]")):
        cut_release(text, version="0.2.0", release_date=date(2026, 3, 4))


@pytest.mark.parametrize("heading", ["## [0.1.0]", "## [0.1.0] - soon", "## [0.1.0] - 2026-13-02"])
def test_a_release_without_a_date_is_not_read_over(heading: str) -> None:
    with pytest.raises(ToolError, match=r"## \[0\.1\.0\] needs a date"):
        cut_release(
            f"# C\n\n## [Unreleased]\n\n- New.\n\n{heading}\n\n- Old.\n", version="0.2.0", release_date=date(2026, 3, 4)
        )


def test_an_entry_goes_to_the_end_of_what_is_pending() -> None:
    text = "# C\n\n## [0.1.0] - unreleased\n\n### Added\n\n- One.\n\n## [0.0.1] - 2026-01-02\n\n- Old.\n"
    assert add_entry(text, "- Two.") == text.replace("- One.\n", "- One.\n- Two.\n")
    empty = "# C\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n\n- Old.\n"
    after = add_entry(empty, "- Two.")
    assert after == empty.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Changed\n\n- Two.\n")
    top = unreleased_section(after)
    assert top is not None
    assert top.entries == ["Two."]


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_the_changelogs_here_can_be_cut(name: str) -> None:
    text = (MEMBERS[name].folder / "CHANGELOG.md").read_text()
    top = unreleased_section(text)
    assert top is None or top.name in ("Unreleased", str(MEMBERS[name].version))
    assert parse_sections(text)[0].body


def _needs(**results: str) -> dict[str, object]:
    outputs = {"packages": '["lt-data"]', "workspace": "true"}
    return {
        job: {"result": result, "outputs": outputs if job == "plan" else {}}
        for job, result in {"plan": "success", "package": "success", "workspace": "success", **results}.items()
    }


def test_the_gate_passes_only_what_ran_and_passed() -> None:
    assert find_failed_jobs(_needs()) == []
    for job in ("plan", "package", "workspace"):
        for result in ("failure", "cancelled", "skipped"):
            assert find_failed_jobs(_needs(**{job: result})) != [], (job, result)
    nothing = _needs(package="skipped", workspace="skipped")
    assert find_failed_jobs(nothing) != []
    nothing["plan"] = {"result": "success", "outputs": {"packages": "[]", "workspace": "false"}}
    assert find_failed_jobs(nothing) == []
    assert find_failed_jobs({"plan": nothing["plan"]}) != []
    assert find_failed_jobs({**_needs(), "other": {"result": "failure"}}) == ["other: failure; expected success"]


def test_git_knows_the_trailer(small_workspace_dir: Path) -> None:
    """The trailer is git's own notion: it has to stand in the last paragraph of the message."""
    git("commit", "--quiet", "--allow-empty", "-m", "A\n\nChangelog: none\n\nMore words.", cwd=small_workspace_dir)
    trailer = git("log", "-1", "--format=%(trailers:key=Changelog,valueonly)", cwd=small_workspace_dir)
    assert trailer.strip() == ""
