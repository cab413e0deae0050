"""The compile key, and `lt train precompile` with a tool in place of AWS's that runs the same command."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lt_model import preset
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load
from lt_trainer.config.section import leaves
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer_neuron import precompile as precompiling
from lt_trainer_neuron.cli.env import app as env_app
from lt_trainer_neuron.cli.precompile import app as precompile_app
from lt_trainer_neuron.compile_cache import CompileCacheError
from lt_trainer_neuron.compile_key import (
    KEY_OPTIMIZER_FIELDS,
    KEY_OPTIONS,
    NotCompiledError,
    check_compiled,
    compile_key,
    diff_keys,
    keys_folder,
    write_key,
)
from lt_trainer_neuron.environment import neuron_env
from lt_trainer_neuron.options import NeuronOptions

MODEL = preset("llama2-7b", vocab_size=32000)
FREE = ("optimizer.lr=5e-4", "schedule.max_steps=777", "run.seed=3", "checkpoint.interval=5", "run.dir=elsewhere/run")
NOT_IN_THE_GRAPHS = {
    "backend", "cpu_dtype", "num_neuroncores", "save_xser", "compile_key", "compile_cache", "cc_flags", "max_inflight",
    "malloc_arenas",
}  # fmt: skip
"""cc_flags are there as the variable that they become."""


def recipe(*sets: str) -> Recipe:
    base = {
        "run": {"engine": "neuron"},
        "data": {"synthetic": True, "document_mask": False},
        "model": {"preset": "llama2-7b", "vocab_size": 32000},
        "batch": {"global_batch_size": 1024, "micro_batch_size": 1},
        "parallel": {"tp": 8},
    }
    return load(base=base, overrides=sets).recipe


def key(*sets: str) -> dict[str, object]:
    made = recipe(*sets)
    return compile_key(made, MODEL, neuron_env(made, {}))


@pytest.mark.parametrize(
    "change",
    [
        "data.seq_len=2048",
        "batch.micro_batch_size=2",
        "batch.global_batch_size=512",
        "parallel.n_nodes=2",
        "parallel.tp=4",
        "parallel.pp=2",
        "parallel.sequence_parallel=true",
        "optimizer.beta2=0.9",
        "optimizer.grad_clip=0.5",
        "optimizer.weight_decay=0.2",
        "engine.neuron.zero1=false",
        "engine.neuron.precision=downcast",
        "engine.neuron.flash_attention=true",
        "engine.neuron.nxd_grad_norm=true",
        "engine.neuron.cc_flags=--model-type=transformer -O1",
    ],
)
def test_what_changes_a_graph_changes_the_key(change: str) -> None:
    found = diff_keys(key(change), [key("data.seq_len=1024", "parallel.tp=2"), key()])
    assert found
    assert all("precompiled with" in line for line in found)
    assert diff_keys(key(change, *FREE), [key(), key(change)]) == []


def test_every_option_is_in_the_key_or_known_to_be_in_no_graph() -> None:
    """An option that is added later must be put in one of the two."""
    assert set(leaves(NeuronOptions)) <= set(KEY_OPTIONS) | NOT_IN_THE_GRAPHS
    assert not set(KEY_OPTIONS) & NOT_IN_THE_GRAPHS
    refused = {"momentum", "nesterov", "adjust_lr", "newton_schulz_steps", "newton_schulz_dtype", "weights_dtype"}
    refused |= {f"lr_scale.{role}" for role in ("embedding", "head", "norm", "matrices")}  # test_checks.py
    assert set(leaves(OptimizerOptions)) == {*KEY_OPTIMIZER_FIELDS, "lr", *refused}


def test_a_run_warns_refuses_or_passes(tmp_path: Path) -> None:
    sets = [f"engine.neuron.compile_cache={tmp_path / 'cache'}"]
    made = recipe(*sets)
    environ = neuron_env(made, {})
    told = check_compiled(made, MODEL, environ)
    assert f"{tmp_path / 'cache'} (this cache has no precompiled graphs)" in told
    strict = recipe(*sets, "engine.neuron.compile_key=error")
    with pytest.raises(NotCompiledError, match="run lt train precompile with this recipe first") as caught:
        check_compiled(strict, MODEL, environ)
    assert caught.value.exit_code == 64
    assert check_compiled(recipe(*sets, "engine.neuron.compile_key=ignore"), MODEL, environ) == ""
    assert check_compiled(strict, MODEL, environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}) == ""
    folder = keys_folder(made, environ)
    path = write_key(folder, compile_key(made, MODEL, environ))
    assert path == write_key(folder, compile_key(made, MODEL, environ))
    assert check_compiled(strict, MODEL, environ) == ""
    other = recipe(*sets, "engine.neuron.compile_key=error", "engine.neuron.zero1=false")
    with pytest.raises(NotCompiledError, match="zero1: precompiled with true, now false"):
        check_compiled(other, MODEL, environ)
    for damaged in ("not json", '{"format": 2, "key": {}}'):
        path.write_text(damaged)
        with pytest.raises(CompileCacheError, match="cannot read the compile key"):
            check_compiled(strict, MODEL, environ)


def test_the_keys_of_a_bucket_lie_beside_the_run() -> None:
    made = recipe("run.dir=runs/a", "engine.neuron.compile_cache=s3://bucket/cache")
    assert keys_folder(made, neuron_env(made, {})) == Path("runs/lt-compile-keys")
    assert keys_folder(made, neuron_env(made, {}) | {"NEURON_COMPILE_CACHE_URL": "/c"}) == Path("/c/lt-compile-keys")


TOOL = """#!{python}
import json, os, sys
from pathlib import Path
cache = Path(os.environ["NEURON_COMPILE_CACHE_URL"])
module = cache / "neuronxcc-2.23.6484.0+0" / "MODULE_1+0"
module.mkdir(parents=True, exist_ok=True)
(cache / "told.json").write_text(json.dumps(dict(arguments=sys.argv[1:], flags=os.environ["NEURON_CC_FLAGS"])))
if os.environ.get("FAILS") == "graph":
    (module / "model.log").write_text("Failed compilation: too many instructions")
else:
    (module / "model.done").write_text("")
sys.exit(3 if os.environ.get("FAILS") == "script" else 0)
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a cache of its own, on a machine whose Neuron packages are there."""
    tool = tmp_path / "bin" / "neuron_parallel_compile"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(precompiling, "require_installed", lambda: None)
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nengine = "neuron"\n[data]\nsynthetic = true\n[model]\npreset = "llama2-7b"\nvocab_size = 32000\n'
        "[batch]\nglobal_batch_size = 64\nmicro_batch_size = 1\n[parallel]\ntp = 8\nn_nodes = 2\n"
        f'[engine.neuron]\ncompile_cache = "{tmp_path / "cache"}"\n'
    )
    return path


def test_the_same_recipe_is_traced_under_the_tool_and_its_key_noted(run_file: Path, tmp_path: Path) -> None:
    sets = ["--set", "data.document_mask=false"]
    done = CliRunner().invoke(precompile_app, [str(run_file), *sets, "--", "--nnodes=2", "--node_rank=0"])
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads((tmp_path / "cache" / "told.json").read_text())
    launch = ["-P", "-m", "torch.distributed.run", "--nproc-per-node", "32", "--nnodes=2", "--node_rank=0"]
    rank = ["--no-python", sys.executable, "-P", "-u", "-m", "lt_trainer_neuron.graph_extraction"]
    assert told["arguments"] == [sys.executable, *launch, *rank, str(run_file), "--steps", "3", *sets]
    assert told["flags"] == "--model-type=transformer"
    resolved = load(run_file, overrides=["data.document_mask=false", "engine.neuron.compile_key=error"])
    environ = neuron_env(resolved.recipe, {})
    assert check_compiled(resolved.recipe, MODEL, environ) == ""
    changed = load(run_file, overrides=["engine.neuron.compile_key=error"])
    with pytest.raises(NotCompiledError, match="document_mask: precompiled with false, now true"):
        check_compiled(changed.recipe, MODEL, environ)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ([], []),
        (['data.validation="held-out"'], ["--validate"]),
        (['evaluation.tasks=["piqa"]'], ["--evaluate"]),
        (['data.validation="held-out"', "evaluation.stores=true"], ["--validate", "--evaluate"]),
    ],
)
def test_what_the_run_computes_beside_steps_is_traced_too(
    run_file: Path, tmp_path: Path, sets: list[str], told: list[str]
) -> None:
    values = ["data.synthetic=false", 'data.store="store"', *sets]
    done = CliRunner().invoke(precompile_app, [str(run_file), *(word for value in values for word in ("--set", value))])
    assert done.exit_code == 0, (done.output, done.exception)
    arguments = json.loads((tmp_path / "cache" / "told.json").read_text())["arguments"]
    assert [word for word in arguments if word in ("--validate", "--evaluate")] == told


@pytest.mark.parametrize(("fails", "told"), [("script", "exited with 3"), ("graph", "1 graphs in .* too many instr")])
def test_no_key_is_noted_where_a_graph_has_not_compiled(
    fails: str, told: str, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", fails)
    done = CliRunner().invoke(precompile_app, [str(run_file)])
    assert isinstance(done.exception, CompileCacheError)
    with pytest.raises(CompileCacheError, match=told):
        raise done.exception
    assert not (tmp_path / "cache" / "lt-compile-keys").exists()


def test_only_trainium_is_compiled_beforehand(run_file: Path) -> None:
    done = CliRunner().invoke(precompile_app, [str(run_file), "--set", "engine.neuron.backend=cpu"])
    assert isinstance(done.exception, RecipeError)
    assert "only graphs for Trainium" in str(done.exception)


def test_env_prints_each_value_with_its_reason(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    shown = CliRunner().invoke(env_app, [str(run_file)])
    assert shown.exit_code == 0, shown.exception
    assert 'MALLOC_ARENA_MAX=7  (yours; the recipe says "64")' in shown.output
    assert "FI_PROVIDER=efa\n    2 nodes communicate over EFA" in shown.output
    lines = CliRunner().invoke(env_app, [str(run_file), "--export"]).output.splitlines()
    assert "export MALLOC_ARENA_MAX=7" in lines
    values = json.loads(CliRunner().invoke(env_app, [str(run_file), "--json"]).output)
    assert len(values) == len(lines)
    assert {"name", "value", "reason", "recipe_value"} == set(values[0])
