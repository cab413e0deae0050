"""Every version of torch that the packages name is tested by one command."""

from pathlib import Path

import pytest
from check_ranges import lower_bound
from members import ROOT, read_members
from older_torch import VERSIONS, environment_commands, find_torch_tests, pytest_commands

from lt_trainer_gpu.checks import COMPILE_TORCH_VERSIONS

MEMBERS = read_members()


def test_each_package_is_tested_with_the_oldest_torch_that_it_allows() -> None:
    oldest: dict[str, str] = {}
    for member in MEMBERS.values():
        for requirement in (one for group in member.requirements.values() for one in group if one.name == "torch"):
            oldest[member.name] = str(lower_bound(requirement))
    assert len(oldest) == 5
    assert all(name in VERSIONS[version].packages for name, version in oldest.items()), oldest


def test_each_version_that_may_compile_is_tested_compiled() -> None:
    """The newest, which is the lock's, by tools/slow.py."""
    *older, _ = (f"{major}.{minor}" for major, minor in COMPILE_TORCH_VERSIONS)
    assert [name for name, version in VERSIONS.items() if version.compiled] == older


def test_bases_are_tested_where_they_touch_torch() -> None:
    files = {str(Path(path).relative_to(ROOT)) for path in find_torch_tests(MEMBERS["lt-data"])}
    assert "packages/lt-data/tests/streaming/test_torch_adapter.py" in files
    assert len(files) < 10
    assert find_torch_tests(MEMBERS["lt-model"]) == [str(ROOT / "packages/lt-model/tests")]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_environment_has_this_version(version: str, tmp_path: Path) -> None:
    """2.9 from the lock's group for Trainium, others in place of the lock's newest."""
    sync, *installs = environment_commands(version, "3.12")
    assert sync[:2] == ["uv", "sync"]
    assert "--locked" in sync
    if version == "2.9":
        assert (sync[-1], installs) == ("neuron", [])
    else:
        assert [one[-1] for one in installs] == [f"torch=={version}.*"]
    commands = pytest_commands(version, MEMBERS, tmp_path)
    assert {command[0] for command in commands} == {str(tmp_path / "bin" / "python")}
    assert len(commands) == len(VERSIONS[version].packages) + len(VERSIONS[version].compiled)
