"""What a change has to run: packages that it touches, what stands on them, and never less."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from affected_packages import READ_BY_TESTS, CiPlan, changed_paths, plan_ci
from members import ROOT, ToolError, dependents, read_members, sibling_dependencies, topological_order
from small_workspace import git, write_package

MEMBERS = read_members()


def test_a_source_concerns_the_package_and_all_that_stand_on_it(small_workspace_dir: Path) -> None:
    members = read_members(small_workspace_dir)
    source = "packages/{}/src/{}/x.py"
    assert plan_ci([source.format("lt-base", "lt_base")], members).packages == ("lt-base", "lt-mid", "lt-top")
    assert plan_ci([source.format("lt-mid", "lt_mid")], members).packages == ("lt-mid", "lt-top")
    assert plan_ci([source.format("lt-top", "lt_top")], members).packages == ("lt-top",)
    assert plan_ci(["packages/lt-base/pyproject.toml"], members).packages == ("lt-base", "lt-mid", "lt-top")


def test_tests_and_texts_of_a_package_concern_it_alone(small_workspace_dir: Path) -> None:
    members = read_members(small_workspace_dir)
    for path in ("tests/test_x.py", "README.md", "CHANGELOG.md"):
        assert plan_ci([f"packages/lt-base/{path}"], members) == CiPlan(packages=("lt-base",), workspace=True)


@pytest.mark.parametrize("path", ["uv.lock", "pyproject.toml", "tools/a.py", ".github/workflows/ci.yml", ".ci/run"])
def test_what_all_share_concerns_all(path: str) -> None:
    assert plan_ci([path], MEMBERS).packages == tuple(MEMBERS)


def test_texts_of_the_workspace_concern_no_package() -> None:
    assert plan_ci(["README.md", "LICENSE"], MEMBERS) == CiPlan(packages=(), workspace=True)
    assert plan_ci([], MEMBERS) == CiPlan(packages=(), workspace=False)


@pytest.mark.parametrize("path", ["newthing/a.py", "packages/lt-new/src/a.py", "packages/loose.py", "run.sh"])
def test_a_path_that_no_rule_knows_is_an_error(path: str) -> None:
    with pytest.raises(ToolError, match=path):
        plan_ci([path], MEMBERS)


def test_every_file_of_the_workspace_is_known() -> None:
    """A new folder that CI does not know cannot be committed."""
    paths = git("ls-files", "-z", cwd=ROOT).split("\0")
    assert plan_ci([path for path in paths if path], MEMBERS).packages == tuple(MEMBERS)


def test_folders_that_packages_read_in_their_tests_are_known() -> None:
    """A package whose tests read examples/, containers/ or docs/ is tested when those change."""
    found: set[tuple[str, str]] = set()
    for name in MEMBERS:
        for path in (ROOT / "packages" / name / "tests").rglob("*.py"):
            text = path.read_text()
            read_here = set(re.findall(r'"((?:constraints|examples|containers|docs)/)', text))
            read_here |= {f"{folder}/" for folder in re.findall(r'/ "(constraints|examples|containers|docs)"', text)}
            others = re.findall(r'/ "(lt-[a-z-]+)" / "(\w+)"', text)
            read_here |= {
                f"packages/{other}/{folder}/" for other, folder in others if other in MEMBERS and other != name
            }
            for folder in read_here:
                assert name in READ_BY_TESTS.get(folder, ()), f"{path.relative_to(ROOT)} reads {folder}"
                found.add((folder, name))
    assert found == {(folder, name) for folder, names in READ_BY_TESTS.items() for name in names}


def test_what_tests_of_another_package_read_concerns_both() -> None:
    assert plan_ci(["packages/lt-ckpt/tests/data/nxd/a"], MEMBERS).packages == ("lt-ckpt", "lt-trainer-neuron")
    assert plan_ci(["packages/lt-ckpt/README.md"], MEMBERS).packages == ("lt-ckpt",)


def test_a_file_that_moves_concerns_where_it_was_too(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """Git would show a rename by its new path alone."""
    (small_workspace_dir / "packages/lt-side/src/lt_side/long.py").write_text(
        "\n".join(f"x{i} = {i}" for i in range(50))
    )
    commit()
    git("tag", "before", cwd=small_workspace_dir)
    git("mv", "packages/lt-side/src/lt_side/long.py", "packages/lt-top/src/lt_top/long.py", cwd=small_workspace_dir)
    commit()
    assert plan_ci(changed_paths("before", root=small_workspace_dir), read_members(small_workspace_dir)).packages == (
        "lt-side",
        "lt-top",
    )


def test_a_package_or_folder_that_is_gone_concerns_all(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """Its name is known to no rule any more; a new one of that kind stays an error."""
    (small_workspace_dir / "old").mkdir()
    (small_workspace_dir / "old" / "a.py").write_text("")
    commit()
    for folder in ("packages/lt-side", "old"):
        git("tag", "--force", "before", cwd=small_workspace_dir)
        shutil.rmtree(small_workspace_dir / folder)
        commit()
        members = read_members(small_workspace_dir)
        removed = changed_paths("before", root=small_workspace_dir, removed=True)
        assert removed == changed_paths("before", root=small_workspace_dir)
        assert plan_ci(removed, members, removed=removed).packages == ("lt-base", "lt-mid", "lt-top")
        with pytest.raises(ToolError, match=folder):
            plan_ci(removed, members)
    (small_workspace_dir / "packages/lt-top/README.md").write_text("")
    commit()
    git("tag", "--force", "before", cwd=small_workspace_dir)
    (small_workspace_dir / "packages/lt-top/README.md").unlink()
    commit()
    removed = changed_paths("before", root=small_workspace_dir, removed=True)
    assert plan_ci(removed, read_members(small_workspace_dir), removed=removed).packages == ("lt-top",), (
        "what is known stays what it is"
    )


def test_what_main_did_since_does_not_count(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    git("switch", "--quiet", "-c", "work", cwd=small_workspace_dir)
    (small_workspace_dir / "packages/lt-side/src/lt_side/x.py").write_text("x = 1\n")
    commit()
    git("switch", "--quiet", "main", cwd=small_workspace_dir)
    (small_workspace_dir / "packages/lt-base/src/lt_base/x.py").write_text("x = 1\n")
    commit()
    git("switch", "--quiet", "work", cwd=small_workspace_dir)
    assert plan_ci(changed_paths("main", root=small_workspace_dir), read_members(small_workspace_dir)).packages == (
        "lt-side",
    )


def test_a_base_that_is_not_there_is_an_error(small_workspace_dir: Path) -> None:
    with pytest.raises(ToolError, match="fetch-depth"):
        changed_paths("origin/nothing", root=small_workspace_dir)


def test_a_folder_without_pyproject_is_no_package(small_workspace_dir: Path) -> None:
    (small_workspace_dir / "packages" / "lt-loose").mkdir()
    (small_workspace_dir / "packages" / "lt-loose" / "a.py").write_text("")
    with pytest.raises(ToolError, match="lt-loose has no pyproject"):
        read_members(small_workspace_dir)


def test_order_and_dependants_of_the_real_packages() -> None:
    order = topological_order(MEMBERS)
    for name, member in MEMBERS.items():
        assert all(order.index(sibling) < order.index(name) for sibling in sibling_dependencies(member, MEMBERS))
    assert dependents(["lt-data"], MEMBERS) >= {"lt-data", "lt-trainer", "lt-trainer-gpu", "lt-trainer-neuron"}
    assert "lt-ckpt" not in dependents(["lt-data"], MEMBERS)


def test_a_ring_has_no_order(small_workspace_dir: Path) -> None:
    write_package(small_workspace_dir, "lt-base", "lt-top>=0.1,<0.2")
    with pytest.raises(ToolError, match="dependency cycle: lt-base, lt-mid, lt-top"):
        topological_order(read_members(small_workspace_dir))


def test_the_command_writes_what_github_reads() -> None:
    command = [sys.executable, ROOT / "tools" / "affected_packages.py", "--github", "packages/lt-trainer-gpu/README.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: json.loads(value) for name, value in values.items()} == {
        "packages": ["lt-trainer-gpu"],
        "workspace": True,
    }
