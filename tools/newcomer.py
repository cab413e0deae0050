"""The ten things that a newcomer does, in a fresh clone, each command printed and its result looked at.

    uv run python tools/newcomer.py --out /tmp/newcomer               # minutes; only this folder is written
    uv run python tools/newcomer.py --out /tmp/newcomer --quick       # without the quickstart

Quickstart; own text; own recipe on two ranks; stop and resume, with the losses of a run that was never stopped;
evaluate; export, and open with transformers; convert to NxD's format and back; launch on Slurm where a cluster answers;
release, verify, and repeat from the release alone; read the report. Then a newcomer's mistakes: each has to be answered
in one sentence with exit code 64. The first thing that is not as the guides say ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
STOP_AFTER = 25
RECIPE = """\
[run]
dir = "{run}"

[model]
hidden_size = 64
intermediate_size = 192
n_layers = 2
n_heads = 4
n_kv_heads = 2
max_position_embeddings = 128

[data]
store = "store"
validation = "heldout-store"
seq_len = 128

[batch]
global_batch_size = 8
micro_batch_size = 2

[schedule]
max_steps = {steps}
warmup_steps = 5

[checkpoint]
interval = 20

[metrics]
log_interval = 1
"""
LICENSES = """\
[release]
name = "newcomer"
producer = "A Newcomer"
authors = ["A Newcomer"]

[licenses]
data = "CDLA-Permissive-2.0"
document = "CC-BY-4.0"

[[sources]]
path = "*"
license = "Apache-2.0"
redistribute = true
"""
MISTAKES = {
    "a store that is not there": "lt data stats nowhere",
    "a misspelt field": "lt train check run.toml --set optimizer.learning_rate=1",
    "a word for a number": "lt train check run.toml --set batch.micro_batch_size=many",
    "a text as a store": "lt data pack text --seq-len 128",
    "rows longer than the context": "lt train check run.toml --set data.seq_len=256",
    "an export into a folder that is there": "lt ckpt export runs/mine --out model",
    "a model that is not there": "lt train evaluate nowhere --tasks lt_copy --out nothing",
    "a release of no run": "lt release make nowhere --out nothing",
}


class NotAsSaid(Exception):
    """What a command did is not what the guides say."""


class Newcomer:
    """A folder with a clone of lt, and the commands run in it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.clone = out / "lt"
        self.environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")}
        self.environment["PATH"] = f"{self.clone / '.venv' / 'bin'}:{os.environ['PATH']}"

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command in the folder."""
        print(f"$ {command}", flush=True)
        return subprocess.Popen(
            shlex.split(command),
            cwd=self.out,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *, code: int = 0) -> str:
        """Run a command to its end and return what it printed."""
        return self.finish(self.start(command), code=code)

    def finish(self, process: subprocess.Popen[str], *, code: int) -> str:
        """Wait for a command and print the end of its output."""
        text, _ = process.communicate()
        print("".join(f"    {line}\n" for line in text.splitlines()[-6:]), end="", flush=True)
        expect(process.returncode == code, f"exit code {process.returncode} instead of {code}:\n{text}")
        expect("Traceback" not in text, f"a traceback:\n{text}")
        return text


def expect(condition: object, sentence: str) -> None:
    """Raise NotAsSaid unless the condition holds."""
    if not condition:
        raise NotAsSaid(sentence)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_losses(run: Path) -> dict[int, float]:
    """Return the loss of each step of a run; a step done twice counts as it was the last time."""
    return {r["step"]: r["loss"] for r in read_lines(run / "metrics.jsonl") if "loss" in r}


def clone(it: Newcomer) -> None:
    """A clone of what is committed, with the environment of its lock."""
    it.run(f"git clone -q {shlex.quote(str(ROOT))} {shlex.quote(str(it.clone))}")
    it.run(f"uv sync -q --locked --directory {shlex.quote(str(it.clone))}")
    expect("lt-trainer" in it.run("lt --version"), "lt --version does not name lt-trainer")


def quickstart(it: Newcomer) -> None:
    """The README's second command."""
    text = it.run("lt quickstart")
    expect("DIFFERENT" not in text, "the resume of the quickstart differs")
    expect(
        json.loads((it.out / "quickstart" / "summary.json").read_text())["resume"]["is_equal"], "not resumed equally"
    )


def own_text(it: Newcomer) -> None:
    """The guides of lt themselves, two of them held out."""
    (it.out / "text").mkdir()
    (it.out / "heldout").mkdir()
    for path in sorted((it.clone / "docs").rglob("*.md")):
        folder = "heldout" if path.name in ("launch.md", "data.md") else "text"
        shutil.copy(path, it.out / folder / f"{path.parent.name}-{path.name}")
    it.run("lt data train-tokenizer text --vocab-size 1000 --out tokenizer")
    for name, store in (("text", "store"), ("heldout", "heldout-store")):
        it.run(f"lt data prepare {name} --tokenizer tokenizer --out {store} --workers 2")
        it.run(f"lt data pack {store} --seq-len 128")
        it.run(f"lt data verify {store}")
    documents = len(list((it.out / "text").iterdir()))
    expect(f"documents            {documents}\n" in it.run("lt data stats store"), "stats counts other documents")


def own_recipe(it: Newcomer) -> None:
    """Planned, checked, and trained on two ranks without a stop."""
    (it.out / "run.toml").write_text(RECIPE.format(run="runs/mine", steps=STEPS))
    (it.out / "undisturbed.toml").write_text(RECIPE.format(run="runs/undisturbed", steps=STEPS))
    it.run("lt train plan run.toml --devices 2 --device h100")
    it.run("lt train check run.toml")
    expect(not (it.out / "runs").exists(), "check left something behind")
    it.run("lt train torchrun undisturbed.toml --nproc-per-node 2")
    expect(len(read_losses(it.out / "runs" / "undisturbed")) == STEPS, "not one loss for each step")


def stop_and_resume(it: Newcomer) -> None:
    """SIGTERM in the middle; the same command goes on, and no loss is another."""
    command = "lt train torchrun run.toml --nproc-per-node 2"
    run = it.out / "runs" / "mine"
    process = it.start(command)
    while process.poll() is None and (not (run / "metrics.jsonl").exists() or len(read_losses(run)) < STOP_AFTER):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    it.finish(process, code=75)
    stopped = len(read_losses(run))
    expect(STOP_AFTER <= stopped < STEPS, f"stopped after {stopped} steps")
    it.run("lt train watch runs/mine --once")
    it.run(command)
    expect(read_losses(run) == read_losses(it.out / "runs" / "undisturbed"), "a stopped run has other losses")
    it.run(f"lt data inspect --run runs/mine --step {STEPS}")


def evaluate(it: Newcomer) -> None:
    """Losses of the held-out store, and a task; the loss is that of validation."""
    it.run("lt train evaluate runs/mine --store heldout-store --tasks lt_copy --limit 10 --seq-len 128 --out results")
    found = {r["kind"]: r["results"] for r in read_lines(it.out / "results" / "results.jsonl") if "kind" in r}
    expect(found["task"][0]["n_items"] == 10, f"not ten items: {found['task']}")
    (whole,) = [r for r in found["store"] if r["group"] == "all"]
    validation = [r for r in read_lines(it.out / "runs" / "mine" / "metrics.jsonl") if "val_loss" in r][-1]
    expect(whole["tokens"] == validation["val_tokens"], "evaluation counts other tokens than validation")
    expect(abs(whole["loss"] - validation["val_loss"]) < 1e-5, f"the loss is {whole['loss']}, not that of {validation}")


def export(it: Newcomer) -> None:
    """A Hugging Face folder that equals the run and that transformers opens."""
    it.run("lt ckpt export runs/mine --out model")
    it.run("lt ckpt verify model --against runs/mine --logits")
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "t, m = AutoTokenizer.from_pretrained('model'), AutoModelForCausalLM.from_pretrained('model')",
        "ids = t('Once upon', return_tensors='pt', add_special_tokens=False).input_ids",
        "print('generated:', repr(t.decode(m.generate(ids, max_new_tokens=8, do_sample=False)[0])))",
    ]
    expect(
        "generated: 'Once upon" in it.run(shlex.join(["python", "-c", "\n".join(lines)])), "transformers generates else"
    )
    it.run('lt train sample model --prompt "Once upon" --max-new-tokens 8')


def convert(it: Newcomer) -> None:
    """To NxD's format for two ranks of tensor parallelism and back: the same weights."""
    it.run("lt ckpt convert model nxd --to nxd --tp 2")
    it.run("lt ckpt convert nxd back --to hf")
    it.run("lt ckpt diff model back")


def launch(it: Newcomer) -> None:
    """The recipe on this machine, and on Slurm if a cluster answers."""
    (it.out / "launched.toml").write_text(RECIPE.format(run="runs/launched", steps=STEPS))
    it.run("lt launch run launched.toml --nproc-per-node 2")
    expect(
        read_losses(it.out / "runs" / "launched") == read_losses(it.out / "runs" / "mine"), "a launch has other losses"
    )
    it.run("lt launch status launched")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo", "-h"], capture_output=True, check=False).returncode:
        print("    NOT DONE: no Slurm cluster answers here")
        return
    (it.out / "slurm.toml").write_text(RECIPE.format(run="runs/slurm", steps=STEPS))
    it.run("lt launch run slurm.toml --on slurm --nodes 2 --nproc-per-node 1")
    while any(state in it.run("lt launch status slurm") for state in ("pending", "running", "requeued")):
        time.sleep(2)
    it.run("lt launch logs slurm")
    expect(
        read_losses(it.out / "runs" / "slurm") == read_losses(it.out / "runs" / "mine"), "Slurm's run has other losses"
    )


def release(it: Newcomer) -> None:
    """A release that verifies and that repeats the first steps from itself alone; a changed byte is found."""
    (it.out / "licences.toml").write_text(LICENSES)
    it.run("lt release make runs/undisturbed --out released --licenses licences.toml --sources .")
    it.run("lt release verify released")
    it.run("lt release reproduce released --out again --steps 10")
    shutil.copytree(it.out / "released", it.out / "damaged")
    path = it.out / "damaged" / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("1", "2", 1))
    it.run("lt release verify damaged", code=1)


def report(it: Newcomer) -> None:
    """One page that needs nothing else."""
    it.run("lt train report runs/mine --out report.html")
    page = (it.out / "report.html").read_text(encoding="utf-8")
    expect("<svg" in page, "no picture in the report")
    expect("default-src 'none'" in page, "the report may load what is elsewhere")


def mistakes(it: Newcomer) -> None:
    """What newcomers mistype, each answered in a sentence."""
    for what, command in MISTAKES.items():
        text = it.run(command, code=64)
        expect(text.count("error") >= 1 and len(text) < 1000, f"{what} is told like this:\n{text}")


THINGS: list[Callable[[Newcomer], None]] = [
    quickstart, own_text, own_recipe, stop_and_resume, evaluate, export, convert, launch, release, report, mistakes
]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Do all of them in a new folder; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="a new folder")
    parser.add_argument("--quick", action="store_true", help="without the quickstart")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    it = Newcomer(options.out.resolve())
    things = [thing for thing in THINGS if not (options.quick and thing is quickstart)]
    for thing in [clone, *things]:
        start = time.monotonic()
        print(f"--- {thing.__name__}: {thing.__doc__}", flush=True)
        try:
            thing(it)
        except NotAsSaid as error:
            print(f"--- {thing.__name__}: NOT AS SAID: {error}", flush=True)
            return 1
        print(f"--- {thing.__name__}: ok in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(things)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
