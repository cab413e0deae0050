"""What importing costs, what is exported, and that the README's program runs."""

import ast
import doctest
import json
import re
import subprocess
import sys
import typing
from importlib.metadata import requires
from pathlib import Path

import numpy as np
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
        "import lt_data; dir(lt_data); lt_data.DataError; lt_data.SourceOptions",
        "import lt_data.cli",
        "import sys; sys.argv = ['lt-data', '--version']; from lt_data.__main__ import main; main()",
        "import sys; sys.argv = ['lt-data', '--help']; from lt_data.__main__ import main; main()",
    ],
)
def test_importing_loads_nothing_heavy(code):
    assert not loaded_after(code) & (HEAVY - ({"rich", "concurrent.futures"} if "--help" in code else {"rich"}))


def test_nothing_ever_loads_torch():
    assert "torch" not in loaded_after(f"from lt_data import {', '.join(lt_data.__all__)}")


def test_what_the_base_install_brings():
    """A reader of a format needs its extra, which its error names; the base is small."""
    needed = [re.split(r"[^\w-]", line)[0] for line in requires("lt-data") or () if "extra ==" not in line]
    assert set(needed) == {"fsspec", "huggingface-hub", "numpy", "tokenizers"}
    extras = set(re.findall(r"extra == '([\w-]+)'", "\n".join(requires("lt-data") or ()).replace('"', "'")))
    assert extras == {"cli", "datasets", "fast", "parquet", "pdf", "plot", "ray", "s3", "torch", "zstd"}


def test_exports():
    assert dir(lt_data) == sorted(lt_data.__all__)
    for name in lt_data.__all__:
        value = getattr(lt_data, name)
        # A function must not be hidden by a module of its name.
        assert type(value).__name__ != "module", name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lt_data.nonsense  # pyright: ignore[reportAttributeAccessIssue]


def test_what_public_functions_return_is_public_too():
    for function in (lt_data.prepare, lt_data.pack, lt_data.RowReader.read_rows, lt_data.RowReader.read_token_rows):
        assert typing.get_type_hints(function)["return"].__name__ in lt_data.__all__
    assert typing.get_type_hints(lt_data.Stream.next)["return"] is lt_data.StreamBatch


def test_exports_for_type_checkers_are_the_same():
    tree = ast.parse((ROOT / "src/lt_data/__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        (alias.name, node.module) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {(name, f"lt_data.{module}") for name, module in lt_data._MODULES.items()}
    assert imported == lazy
    assert sorted(name for name, _ in lazy) == sorted(lt_data.__all__)


def requires_of_extras() -> list[str]:
    """Modules of the extras but `cli`, by the names of their packages."""
    lines = [line for line in requires("lt-data") or () if "extra ==" in line and "cli" not in line]
    return [re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines]


def test_readme_program_runs_in_an_empty_folder(tmp_path):
    program, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    example = ROOT.parents[1] / "examples/data/library.py"
    assert not example.exists() or example.read_text(encoding="utf-8").endswith(program)
    blocked = [*requires_of_extras(), "torch"]  # what the line that installs it, 'lt-data[cli]', does not bring
    program = f"import sys\nsys.modules |= dict.fromkeys({blocked!r})\n{program}"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("(8, 64) ") == 3


@pytest.mark.parametrize("name", lt_data.__all__)
def test_the_example_of_each_public_name_runs(name, texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lt_data.prepare(iter(texts), tokenizer=tokenizer, out="store")
    store = lt_data.TokenStore("store")
    rows = lt_data.RowReader(store, lt_data.pack(store, seq_len=64))
    known = {"np": np, "Path": Path, "tokenizer": tokenizer, "store": store, "rows": rows}
    known |= {name: getattr(lt_data, name) for name in lt_data.__all__}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(lt_data, name), name, module=False, globs=known)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
