"""Options of commands whose work needs a network, a cluster, other processes or minutes: what is handed over changes.

The function that does the work is replaced by one that tells how it was called. What it makes of that has tests of its
own, which `tools/option_effects.toml` names beside these.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lt_test_helpers.option_cases import Call, OptionCase

HUB = "--tokenizer {w}/tokenizer --out out"
PREPARE = "lt data prepare {w}/text --tokenizer {w}/tokenizer --out out"
STORE = ("cp {w}/unpacked store",)
SPLIT = "lt data split {w}/store --holdout 10% --train a --validation b"
RUN = "lt train run {w}/run.toml"
BENCH = "lt train bench {w}/run.toml"
TUNE = "lt train tune {w}/run.toml"
TORCHRUN = "lt train torchrun {w}/run.toml --nproc-per-node 2"
PRECOMPILE = "lt train precompile {w}/neuron.toml"
EVALUATE = "lt train evaluate {w}/checkpoint"
SAMPLE = "lt train sample {w}/checkpoint"
WATCH = "lt train watch {w}/run"
MAKE = "lt release make {w}/run --out out"
VERIFY = "lt release verify {w}/run"
REPRODUCE = "lt release reproduce {w}/run"
LOGS = "lt launch logs {w}/launched"
DOCTOR = "lt launch doctor"
HYPER = "--hyperparameters {w}/hyperparameters.json"
UPLOAD, DOWNLOAD = "lt data upload {w}/store s3://bucket/a", "lt data download s3://bucket/a out"
ENDPOINT = "--endpoint-url http://127.0.0.1:1"


class ToldCall(ValueError):
    """How a replaced function was called; ends the command as a mistake of the user does."""

    exit_code = 64


@dataclass(frozen=True)
class Target:
    """Function to replace, and the command lines that call it with the options that change the call."""

    function: str
    command: str
    options: dict[str, str]
    before: tuple[str, ...] = ()


def target(function: str, line: str, command: str, *added: str, before: tuple[str, ...] = ()) -> Target:
    """Return a target whose options are the first words of `added`."""
    return Target(function, line, {f"{command} {words.split()[0]}": words for words in added}, before)


TARGETS = [
    target("lt_data.preparation.prepare_documents.encode_documents", PREPARE, "lt data prepare", "--workers 2"),
    target(
        "lt_data.append", "lt data append store {w}/text", "lt data append", "--workers 2", "--engine hf", before=STORE
    ),
    target("lt_data.prepare", PREPARE, "lt data prepare", "--no-resume", "--ray local", "--engine hf"),
    target("lt_data.append", "lt data append store {w}/text", "lt data append", "--no-resume", before=STORE),
    target("lt_data.merge", "lt data merge out", "lt data merge", "--no-resume"),
    target("lt_data.split", SPLIT, "lt data split", "--no-resume"),
    target("lt_data.pack", "lt data pack store --seq-len 24", "lt data pack", "--workers 2", before=STORE),
    *[
        target(
            "datasets.load_dataset",
            line,
            command,
            "--config en",
            "--split test",
            "--revision v1",
            "--streaming",
            before=before,
        )
        for command, line, before in [
            ("lt data prepare", "lt data prepare hf://org/name --split train " + HUB, ()),
            ("lt data append", "lt data append store hf://org/name --split train", STORE),
            (
                "lt data train-tokenizer",
                "lt data train-tokenizer hf://org/name --split train --vocab-size 280 --out out",
                (),
            ),
        ]
    ],
    target("lt_data.remote.sending.upload", UPLOAD, "lt data upload", "--overwrite", "--connections 3", ENDPOINT),
    target("lt_data.remote.fetching.download", DOWNLOAD, "lt data download", "--connections 3", ENDPOINT),
    target("lt_trainer.training.run", RUN, "lt train run", "--stop-after-step 2", "--verify-resume-steps 2"),
    target(
        "lt_trainer.training.run_benchmark",
        BENCH,
        "lt train bench",
        *("--steps 2", "--warmup 1", "--set model.n_layers=1", HYPER),
    ),
    target("lt_trainer.training.run_benchmark", "lt train bench", "lt train bench", "--preset tiny-2m"),
    target(
        "lt_trainer.tuning.tune_recipe",
        TUNE,
        "lt train tune",
        *("--nproc-per-node 2", "--steps 2", "--warmup 1", "--timeout 9", "--max-probes 3", "--device h100"),
        *("--journal a.jsonl", "--out a.toml", "--set model.n_layers=1", HYPER),
    ),
    target(
        "lt_trainer.cli.torchrun.run_torchrun",
        TORCHRUN,
        "lt train torchrun",
        *("--nproc-per-node 3", "--set model.n_layers=1", HYPER, "--check"),
    ),
    target(
        "lt_trainer_neuron.precompile.precompile",
        PRECOMPILE,
        "lt train precompile",
        *("--nproc-per-node 2", "--steps 2", "--set model.n_layers=1", HYPER),
    ),
    target(
        "lt_trainer.cli.evaluate.evaluate",
        EVALUATE,
        "lt train evaluate",
        *("--lm-eval-tasks a", "--include-path {w}", "--num-fewshot 1", "--device cpu", "--micro-batch-size 2"),
    ),
    target("lt_trainer.cli.sample.load_model", SAMPLE, "lt train sample", "--device cpu", "--dtype bfloat16"),
    target("lt_trainer.observability.watch.watch_run", WATCH, "lt train watch", "--interval 9", "--once"),
    target(
        "lt_trainer.quickstart.main.main",
        "lt quickstart",
        "lt quickstart",
        *("--out other", "--source {w}/text", "--preset llama-1b", "--steps 2", "--overwrite"),
    ),
    target(
        "lt_trainer.release.make.make_release",
        MAKE,
        "lt release make",
        *("--out other", "--licenses a", "--checkpoints final", "--sources {w}", "--results {w}", "--lock a"),
        "--mof-class 2",
    ),
    target("lt_trainer.release.verify.verify_release", VERIFY, "lt release verify", "--expect a", "--run {w}/run2"),
    target(
        "lt_trainer.release.reproduce.reproduce_release",
        REPRODUCE,
        "lt release reproduce",
        *("--out other", "--steps 2", "--sources {w}", "--python a", "--expect a"),
    ),
    target("lt_ckpt.s3.upload.upload", "lt ckpt upload {w}/hf s3://b/a", "lt ckpt upload", "--overwrite", "--dry-run"),
    target("lt_ckpt.hub.upload.upload_to_hub", "lt ckpt upload {w}/hf hf://o/n", "lt ckpt upload", "--public"),
    target(
        "lt_ckpt.s3.download.download lt_ckpt.s3.download.download_latest",
        "lt ckpt download s3://bucket/a out",
        "lt ckpt download",
        "--latest",
    ),
    target(
        "lt_launch.doctor.run_doctor",
        DOCTOR,
        "lt launch doctor",
        "--on ssh",
        "--profile {w}/slurm.toml",
        "--hostfile {w}/hosts",
    ),
    target(
        "lt_launch.doctor.run_doctor", DOCTOR + " {w}/job.toml", "lt launch doctor", "--nodes 2", "--nproc-per-node 2"
    ),
    target("lt_launch.local.LocalTarget.logs", LOGS, "lt launch logs", "--stage a", "--rank 1", "--follow"),
    target("lt_launch.status.show_target_jobs", "lt launch list", "lt launch list", "--on slurm"),
    target(
        "lt_launch.status.show_target_jobs", "lt launch list --on slurm", "lt launch list", "--profile {w}/slurm.toml"
    ),
    target(
        "lt_launch.status.show_nodes",
        "lt launch nodes",
        "lt launch nodes",
        "--profile {w}/slurm.toml",
        "--hostfile {w}/hosts",
    ),
    target("lt_launch.status.show_status", "lt launch status", "lt launch status", "--json"),
    target(
        "lt_launch.sagemaker.entrypoint.run_entrypoint",
        "lt launch sagemaker-entrypoint",
        "lt launch sagemaker-entrypoint",
        "--root {w}",
    ),
]
CASES = [
    pytest.param(one.function, OptionCase(option, one.command, added, "text", one.before), id=option)
    for one in TARGETS
    for option, added in one.options.items()
]


@pytest.fixture
def tell_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces functions, by their dotted names, by ones that tell how they were called."""
    launched = SimpleNamespace(target="local")
    monkeypatch.setattr("lt_launch.launch_dir.load_launch", lambda run: launched)
    monkeypatch.setattr("lt_data.sources.hub._resolve_commit", lambda repo, revision: revision)
    monkeypatch.setattr("lt_data.sources.hub._only_split", lambda *given: "only")
    monkeypatch.setattr("lt_trainer.resilience.install_handlers", lambda handler: None)

    def tell(name: str, /, *args: Any, **given: Any) -> None:
        raise ToldCall(re.sub(r" at 0x\w+", "", f"{name}{args}{given}"))

    def replace(functions: str) -> None:
        for path in functions.split():
            monkeypatch.setattr(path, partial(tell, path))

    return replace


@pytest.mark.parametrize(("function", "case"), CASES)
def test_option_changes_what_is_handed_over(
    call: Call, capsys: pytest.CaptureFixture[str], tell_calls: Callable[[str], None], function: str, case: OptionCase
) -> None:
    tell_calls(function)
    call.check(capsys, case)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "case"), CASES)
def test_an_ignored_option_is_noticed(
    call: Call,
    capsys: pytest.CaptureFixture[str],
    tell_calls: Callable[[str], None],
    ignore: Callable[[str], None],
    function: str,
    case: OptionCase,
) -> None:
    tell_calls(function)
    ignore(case.option)
    call.check_ignored(capsys, case)
