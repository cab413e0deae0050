"""The compiler's cache: what state each entry is in, what is taken out and what never is."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_trainer_neuron.cli.neuron_cache import app
from lt_trainer_neuron.compile_cache import CompileCacheError, cache_url, local_cache_folder, remove_entries, scan_cache

COMPILER = "neuronxcc-2.23.6484.0+3b612583"
NEFF = b"\x00" * 1000
LOG = "Failed compilation with ['neuronx-cc', ...]: [LUR015] Compiler generated too many instructions\nmore\n"
GRAPH = "model.hlo_module.pb"
LOCK = f"{GRAPH}.lock"


def entry(cache: Path, name: str, files: dict[str, bytes | str], compiler: str = COMPILER) -> Path:
    folder = cache / compiler / name
    folder.mkdir(parents=True)
    for file, content in {GRAPH: b"graph", "compile_flags.json": "[]", **files}.items():
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    cache = tmp_path / "cache"
    entry(cache, "MODULE_1+d41d8cd9", {"model.neff": NEFF, "model.done": ""})
    entry(cache, "MODULE_2+d41d8cd9", {"model.log": LOG})
    entry(cache, "MODULE_3+d41d8cd9", {LOCK: ""})
    entry(cache, "MODULE_4+d41d8cd9", {})
    entry(cache, "MODULE_5+d41d8cd9", {"model.neff": b"False"})
    entry(cache, "MODULE_6+d41d8cd9", {"model.neff": NEFF, LOCK: ""})
    entry(cache, "MODULE_7+d41d8cd9", {"model.neff": NEFF, "model.done": ""}, "neuronxcc-2.16.372.0+4a9b2326")
    (cache / "lt-compile-keys").mkdir()
    (cache / "lt-compile-keys" / "0123456789abcdef.json").write_text("{}")
    return cache


def states(cache: Path) -> dict[str, str]:
    return {found.path.name.removesuffix("+d41d8cd9"): found.state for found in scan_cache(cache)}


def test_each_state_is_known_by_its_files(cache: Path) -> None:
    assert states(cache) == {
        "MODULE_1": "compiled",
        "MODULE_2": "failed",
        "MODULE_3": "stale lock",
        "MODULE_4": "not compiled",
        "MODULE_5": "failed",
        "MODULE_6": "compiled",
        "MODULE_7": "compiled",
    }
    (failed,) = [found for found in scan_cache(cache) if found.path.name.startswith("MODULE_2")]
    assert failed.error_message.endswith("Compiler generated too many instructions")
    assert failed.n_bytes == len(LOG) + len(b"graph") + len("[]")
    assert failed.compiler == "2.23.6484.0+3b612583"


def test_nothing_goes_while_a_process_compiles_or_where_the_compiler_did_not_write(cache: Path) -> None:
    path = cache / COMPILER / "MODULE_3+d41d8cd9" / LOCK
    blocking = [found for found in scan_cache(cache) if found.state in ("failed", "stale lock")]
    program = (
        f"import fcntl, sys; f = open({str(path)!r}); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert states(cache)["MODULE_3"] == "compiling"
        with pytest.raises(CompileCacheError, match="is being compiled by another process"):
            remove_entries(blocking)
        holder.stdin.close() if holder.stdin else None
    assert states(cache)["MODULE_3"] == "stale lock"
    (cache / COMPILER / "MODULE_5+d41d8cd9" / "notes.txt").write_text("mine")
    with pytest.raises(CompileCacheError, match=r"notes\.txt was not written by the compiler"):
        remove_entries(blocking)
    assert len(states(cache)) == 7


def test_only_what_is_in_the_way_is_taken_out(cache: Path, tmp_path: Path) -> None:
    run, recipe = CliRunner(), tmp_path / "run.toml"
    recipe.write_text(f'[run]\nengine = "neuron"\n[data]\nstore = "x"\n[engine.neuron]\ncompile_cache = "{cache}"\n')
    shown = run.invoke(app, ["list", "--failed", "--cache", str(cache)])
    assert shown.exit_code == 1
    assert shown.output.count("MODULE_") == 3
    assert "too many instructions" in shown.output
    dry = run.invoke(app, ["clean", "--cache", str(cache), "--dry-run"])
    assert dry.exit_code == 0
    assert "3 would be removed, 4 kept" in dry.output
    assert len(states(cache)) == 7
    done = run.invoke(app, ["clean", "--cache", str(cache)])
    assert done.exit_code == 0, done.output
    assert set(states(cache)) == {"MODULE_1", "MODULE_4", "MODULE_6", "MODULE_7"}
    assert (cache / "lt-compile-keys" / "0123456789abcdef.json").exists()
    assert run.invoke(app, ["list", "--failed", "--cache", str(cache)]).exit_code == 0
    listed = run.invoke(app, ["list", str(recipe)])
    assert "3 compiled, 1 not compiled" in listed.output


def test_the_cache_is_found_as_the_compiler_finds_it() -> None:
    assert cache_url({}) == "/var/tmp/neuron-compile-cache"
    assert cache_url({"NEURON_COMPILE_CACHE_URL": "/fsx/cache"}) == "/fsx/cache"
    flags = "--model-type=transformer --cache_dir=/flag -O1"
    assert cache_url({"NEURON_COMPILE_CACHE_URL": "/fsx/cache", "NEURON_CC_FLAGS": flags}) == "/flag"
    assert local_cache_folder("file:///a/b") == Path("/a/b")
    with pytest.raises(CompileCacheError, match="is not a local folder"):
        local_cache_folder("s3://bucket/cache")
    with pytest.raises(CompileCacheError, match="No such file"):
        scan_cache(Path("/nowhere/at/all"))
