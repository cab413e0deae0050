"""What importing costs, what is exported, and that the README's program runs."""

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import lt_data

HEAVY = {"numpy", "tokenizers", "fsspec", "rich", "torch", "multiprocessing", "concurrent.futures"}
ROOT = Path(__file__).parents[1]


def loaded_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after some code."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, encoding="utf-8", check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import lt_data",
        "import lt_data; dir(lt_data); lt_data.DataError; lt_data.LeftOut",
        "import lt_data.cli",
        "import sys; sys.argv = ['lt-data', '--version']; from lt_data.__main__ import main; main()",
    ],
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    assert not loaded_after(code) & (HEAVY - {"rich"})


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['lt-data', '--help']; from lt_data.__main__ import main; main()"
    assert not loaded_after(code) & (HEAVY - {"rich", "concurrent.futures"})


def test_nothing_ever_loads_torch() -> None:
    names = ", ".join(lt_data.__all__)
    assert "torch" not in loaded_after(f"from lt_data import {names}")


def test_what_the_base_install_brings() -> None:
    """A reader of a format needs its extra, which its error names; the base is small."""
    needed = [re.split(r"[^\w-]", line)[0] for line in requires("lt-data") or () if "extra ==" not in line]
    assert set(needed) == {"fsspec", "huggingface-hub", "numpy", "tokenizers"}
    extras = set(re.findall(r"extra == '([\w-]+)'", "\n".join(requires("lt-data") or ()).replace('"', "'")))
    assert extras == {"cli", "datasets", "fast", "parquet", "pdf", "plot", "ray", "s3", "torch", "zstd"}


def test_exports() -> None:
    assert len(set(lt_data.__all__)) == len(lt_data.__all__)
    for name in lt_data.__all__:
        value = getattr(lt_data, name)
        assert name in dir(lt_data)
        # A function must not be hidden by a module of its name.
        assert type(value).__name__ != "module", name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lt_data.nonsense  # pyright: ignore[reportAttributeAccessIssue]


def test_exports_for_type_checkers_are_the_same() -> None:
    tree = ast.parse((ROOT / "src/lt_data/__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        (alias.name, node.module) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {(name, f"lt_data.{module}") for name, module in lt_data._MODULES.items()}
    assert imported == lazy
    assert {name for name, _ in lazy} == set(lt_data.__all__)


def test_only_one_module_imports_tokenizers() -> None:
    importing = [
        path.name
        for path in (ROOT / "src/lt_data").rglob("*.py")
        if re.search(r"^\s*(from|import) tokenizers\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert importing == ["tokenizer.py"]


def test_entry_point() -> None:
    (found,) = [entry for entry in entry_points(group="lt.commands") if entry.name == "data"]
    assert found.value == "lt_data.cli:app"


def test_readme_program_runs_in_an_empty_folder(tmp_path: Path) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("torch.Size([8, 64]) ") == 3
