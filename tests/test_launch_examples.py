"""Pipelines of examples/launch: what a stage makes is used, and what continues starts from weights of an earlier stage.

Trainium's precompile stage runs as it is written, with a tool in place of AWS's: the key that it leaves is the key that
the train stage asks for.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from lt_launch.job import Stage
from lt_launch.profile import Profile
from lt_launch.run_file import RunOverrides, read_run_file
from lt_test_helpers.runs import run
from lt_trainer.config.recipe import from_dict, load, model_config, to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer_neuron.compile_key import check_compiled
from lt_trainer_neuron.environment import neuron_env

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCHES = {path.name: path for path in (EXAMPLES / "launch").glob("*.toml")}
RUN_FILES = [name for name, path in LAUNCHES.items() if {"job", "stages"} & tomllib.loads(path.read_text()).keys()]
CONTINUED = [name for name in RUN_FILES if "continued" in LAUNCHES[name].read_text().lower()]


def read_stages(name: str) -> dict[str, Stage]:
    pipeline = read_run_file(LAUNCHES[name], Profile(), RunOverrides()).pipeline
    return {stage.name: stage for stage in pipeline.stages}


def recipe_of(stage: Stage) -> Recipe:
    return from_dict(tomllib.loads(stage.job.recipe))


def products(stage: Stage) -> list[PurePosixPath]:
    """What the stage makes: its outputs and its run directory."""
    return [PurePosixPath(stage.job.cwd, name) for name in (*stage.outputs, stage.job.run_dir) if name]


def names(stage: Stage, word: str, product: PurePosixPath) -> bool:
    """Whether a word of the stage is a product, or the folder of one."""
    path = PurePosixPath(stage.job.cwd, word)
    return bool(word) and path in (product, *product.parents) and path not in PurePosixPath(stage.job.cwd, "x").parents


def uses(stage: Stage, product: PurePosixPath) -> bool:
    """Whether a stage's command, inputs or recipe name a product."""
    words = [word for text in stage.job.argv for word in text.split()] + list(stage.inputs)
    if stage.job.recipe:
        recipe = recipe_of(stage)
        words += [recipe.model.init_from, recipe.data.store, recipe.data.validation]
    return any(names(stage, word, product) for word in words)


def test_there_are_examples_that_continue() -> None:
    assert CONTINUED == ["continued.toml"]


@pytest.mark.parametrize("name", RUN_FILES)
def test_what_a_stage_makes_is_used_by_one_that_follows(name: str) -> None:
    stages = read_stages(name)
    for stage in stages.values():
        followers = [other for other in stages.values() if stage.name in other.after]
        unused = {str(one) for one in products(stage) if not any(uses(other, one) for other in followers)}
        assert not followers or not unused, (stage.name, unused)


@pytest.mark.parametrize("name", CONTINUED)
def test_what_continues_starts_from_what_an_earlier_stage_has_made(name: str) -> None:
    stages = read_stages(name)
    trained = [stage for stage in stages.values() if stage.job.recipe]
    assert trained
    for stage in trained:
        made = [path for other in stage.after for path in products(stages[other])]
        assert any(names(stage, recipe_of(stage).model.init_from, path) for path in made), stage.name


def test_llama3_70b_has_the_settings_of_the_trainium_example() -> None:
    launched, example = (
        {
            f"{section}.{field}": value
            for section, table in to_dict(load(path).recipe).items()
            for field, value in table.items()
        }
        for path in (LAUNCHES["llama3-70b.toml"], EXAMPLES / "neuron" / "llama3-70b-tp32-pp8.toml")
    )
    neuron = {name: table.pop("engine.neuron") for name, table in (("launched", launched), ("example", example))}
    differing = {name for name in launched if launched[name] != example[name]}
    assert differing == {"run.dir", "model.preset", "model.init_from", "data.synthetic", "data.store"}
    apart = {name for name in neuron["launched"] if neuron["launched"][name] != neuron["example"][name]}
    assert apart == {"compile_cache", "compile_key"}


TOOL = """#!{python}
import json, os, sys
from pathlib import Path
assert "NEURON_EXTRACT_GRAPHS_ONLY" not in os.environ  # the tool sets it, for the ranks that it starts
cache = Path(os.environ["NEURON_COMPILE_CACHE_URL"])
cache.mkdir()
(cache / "arguments.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", CONTINUED)
def test_precompile_compiles_the_graphs_of_the_train_stage(name: str, tmp_path: Path) -> None:
    stages = read_stages(name)
    assert not [stage.name for stage in stages.values() if "NEURON_EXTRACT_GRAPHS_ONLY" in stage.job.env]
    precompile, train = stages["precompile"].job, recipe_of(stages["train"])
    assert "precompile" in stages["train"].after
    assert precompile.nodes == stages["train"].job.nodes == train.parallel.n_nodes
    assert not precompile.recipe, "the recipe is an argument of lt train precompile"

    packages, commands, cwd = tmp_path / "packages", tmp_path / "bin", tmp_path / "cwd"
    (packages / "neuronx_distributed" / "parallel_layers").mkdir(parents=True)
    for folder in ("neuronx_distributed", "neuronx_distributed/parallel_layers"):
        (packages / folder / "__init__.py").touch()
    commands.mkdir()
    (commands / "neuron_parallel_compile").write_text(TOOL.format(python=sys.executable))
    (commands / "neuron_parallel_compile").chmod(0o755)
    cwd.mkdir()
    for given in stages["precompile"].inputs:
        (cwd / given).write_bytes(LAUNCHES[given].read_bytes())
    environ = {
        **os.environ,
        "PATH": os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(packages),
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
    }
    third = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    done = subprocess.run(precompile.argv, cwd=cwd, env=environ | third, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arguments = " ".join(json.loads((tmp_path / "cache" / "arguments.json").read_text()))
    assert "--nproc-per-node 32 --nnodes 16 --node-rank 3 --master-addr node-0 --master-port 29500" in arguments

    model = model_config(train, train.model.vocab_size)
    assert train.engine["neuron"].compile_key == "error"  # raises where no key fits
    assert check_compiled(train, model, environ | neuron_env(train, environ)) == ""


SMALL = [
    "model.vocab_size=128", "model.hidden_size=64", "model.intermediate_size=96", "model.n_heads=8",
    "model.n_kv_heads=2", "model.n_layers=2", "model.max_position_embeddings=32", "data.synthetic=true",
    "data.store=", "data.seq_len=32", "batch.global_batch_size=2", "schedule.max_steps=2", "schedule.warmup_steps=1",
    "parallel.n_nodes=1", "parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false",
    "engine.neuron.backend=cpu", "engine.neuron.num_neuroncores=1", "engine.neuron.qkv_linear=false",
    "engine.neuron.kv_size_multiplier=1", "engine.neuron.fuse_qkv=false", "engine.neuron.flash_attention=false",
]  # fmt: skip
"""Overrides that make a model for one CPU of the recipe for 70B."""


@pytest.mark.slow
def test_training_goes_on_from_the_weights_that_convert_has_made(tmp_path: Path) -> None:
    """With convert's own options, on a small model: its losses are those of a start from the model itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = LlamaConfig(
        **sizes, **heads, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "Meta-Llama-3-70B")
    convert = " ".join(read_stages("continued.toml")["convert"].job.argv)
    for option, value in (
        ("--tp 32", "--tp 4"),
        ("--pp 8", "--pp 2"),
        ("--kv-size-multiplier 4", "--kv-size-multiplier 2"),
    ):
        assert option in convert
        convert = convert.replace(option, value)
    programs = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    subprocess.run(convert.split(), cwd=tmp_path, env=programs | {"OMP_NUM_THREADS": "1"}, check=True)

    def losses(name: str, weights: str) -> list[float]:
        sets = [*SMALL, f"model.init_from={weights}", f"run.dir={tmp_path / name}"]
        assert run(load(LAUNCHES["llama3-70b.toml"], overrides=sets)) == 0
        return [row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in row]

    released = losses("released", str(tmp_path / "Meta-Llama-3-70B"))
    assert losses("converted", str(tmp_path / "Llama-3-70B-nxd")) == released
    assert losses("random", "")[0] != released[0]
