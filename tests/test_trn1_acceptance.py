"""The acceptance run for a Trainium machine, played through without one.

Stand-ins take the place of the commands that it calls. They hand every option to the real command's parser and every
recipe to the engine's checks for a node of 32 cores, and leave the files that a run would. So a command or an option
that is not there, a recipe that the engine refuses and a slip in the shell are found here and not on a rented machine.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "trn1_acceptance.sh"

FAKE_LT_SCRIPT = """
import json, math, os, sys
from pathlib import Path

import typer

name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
if name == "python":
    if arguments[:1] == ["-"]:
        os.execv(sys.executable, [sys.executable, *arguments])  # the script's own checks of what runs have left
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        at = arguments.index("lt_trainer")
        name, arguments = "lt-train", arguments[at + 1:]
    else:
        sys.exit(0)
if name == "lt-train":
    from lt_trainer.cli.commands import app
else:
    from lt_ckpt.cli import app

command = typer.main.get_command(app)
context, rest = None, arguments
while hasattr(command, "get_command"):  # a group
    context = command.make_context(name, [rest[0]], parent=context)
    command, rest = command.get_command(context, rest[0]), rest[1:]
    assert command is not None, arguments
given = command.make_context(name, rest, parent=context).params  # exits with 2 where an option is not known
if name == "lt-ckpt" or arguments[0] == "neuron-cache":
    if arguments[0] == "export":
        Path(arguments[-1]).mkdir()
    sys.exit(0)

from lt_trainer.engine import World
from lt_trainer.config.recipe import model_config, load
from lt_trainer_neuron.checks import check_model
from lt_trainer_neuron.spec import SPEC

path = Path(next(argument for argument in arguments[1:] if argument.endswith(".toml")))
recipe = load(path).recipe
SPEC.check(recipe, World(rank=0, size=32, local_rank=0, local_size=32))
check_model(recipe, model_config(recipe, recipe.model.vocab_size))
key = Path(f"{path}.key")
if arguments[0] == "precompile":
    key.touch()
    graph = Path(os.environ["NEURON_COMPILE_CACHE_URL"], path.stem, "model.neff")
    graph.parent.mkdir(parents=True, exist_ok=True)
    graph.touch()
elif arguments[0] in ("torchrun", "run"):
    if recipe.engine["neuron"].compile_key == "error" and not key.exists():
        sys.exit(64)
    out = Path(recipe.run.dir)
    out.mkdir(parents=True, exist_ok=True)
    stops = "--stop-after-step" in arguments
    steps = range(1, recipe.schedule.max_steps + 1)
    rows = [json.dumps({"step": step, "loss": math.log(32000) + step / 1000}) for step in steps]
    (out / "metrics.jsonl").write_text("\\n".join(rows) + "\\n")
    if recipe.checkpoint.interval or stops:
        (out / "checkpoints" / f"step-{steps[-1]:09d}").mkdir(parents=True, exist_ok=True)
    sys.exit(1 if stops else 0)
"""


def test_every_command_and_recipe_of_the_acceptance_run_is_taken(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("lt-train", "lt-ckpt", "python"):
        (commands / name).write_text(f"#!{sys.executable}\n{FAKE_LT_SCRIPT}")
        (commands / name).chmod(0o755)
    (commands / "neuron-ls").write_text("#!/bin/sh\n")
    (commands / "neuron-ls").chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    out = tmp_path / "out"
    done = subprocess.run(["bash", str(SCRIPT), str(out)], env=environment, capture_output=True, text=True, check=False)
    told = [line.split() for line in (out / "summary.txt").read_text().splitlines() if not line.startswith("{")]
    failed = {words[1]: (out / f"{words[1]}.log").read_text()[-1500:] for words in told if words[0] == "FAILED"}
    assert not failed
    assert done.returncode == 0, done.stderr
    names = [words[1] for words in told[:-1]]
    assert len(names) == len(set(names)) > 30
    for step in ("refuses-without-key", "nothing-compiled-after-precompile", "losses-agree", "resume-is-exact"):
        assert step in names
