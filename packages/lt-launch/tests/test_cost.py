"""What help costs: which modules it loads."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from lt_launch.catalog import COMMANDS, installed_commands

HEAVY = (
    "torch",
    "numpy",
    "boto3",
    "fsspec",
    "matplotlib",
    "rich",
    "tokenizers",
    "safetensors",
    "transformers",
)

MODULES = """
import json, sys
from lt_launch.__main__ import main
code = main(sys.argv[1:])
sys.stderr.write(json.dumps([code, sorted(sys.modules)]))
"""


def loaded(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", MODULES, *arguments], capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stderr)
    assert code == 0, done.stderr
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_lt_alone_loads_no_other_package_of_ours(arguments: list[str]) -> None:
    modules = loaded(*arguments)
    assert sorted(modules & set(HEAVY)) == []
    assert sorted(module for module in modules if module.startswith("lt_")) == ["lt_launch"]


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() & installed_commands().keys()))
def test_help_of_one_command_loads_its_own_package_and_nothing_heavy(name: str) -> None:
    modules = loaded(name, "--help")
    assert sorted(modules & set(HEAVY)) == []
    own = COMMANDS[name].install.partition("[")[0].replace("-", "_")
    adding = {entry.value.partition(".")[0] for entry in entry_points(group=f"lt.commands.{name}")}
    assert sorted(module for module in modules if module.startswith("lt_")) == sorted({"lt_launch", own} | adding)
