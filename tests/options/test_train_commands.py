"""Options of `lt train`: each changes files, the printed text or the exit code."""

from collections.abc import Callable

import pytest

from lt_test_helpers.option_cases import Call, OptionCase

RUN = "lt train run {w}/run.toml"
SHOW = "lt train show {w}/run.toml"
PLAN = "lt train plan {w}/run.toml --device h100 --devices 2"
CHECK = "lt train check {w}/run.toml"
EVALUATE = "lt train evaluate {w}/checkpoint --seq-len 16 --out out"
TASKS = EVALUATE + " --tasks lt_copy --limit 4"
SAMPLE = "lt train sample {w}/checkpoint --prompt the --max-new-tokens 8 --temperature 2"
REPORT = "lt train report {w}/run"
ENV = "lt train env {w}/neuron.toml"
CACHE = "--cache {w}/cache"
HYPER = "--hyperparameters {w}/hyperparameters.json"
CASES = [
    OptionCase("lt train run --set", RUN, "--set schedule.max_steps=1", "names"),
    OptionCase("lt train run --hyperparameters", RUN, HYPER, "names"),
    OptionCase("lt train show --set", SHOW, "--set schedule.max_steps=1", "text"),
    OptionCase("lt train show --hyperparameters", SHOW, HYPER, "text"),
    OptionCase("lt train show --json", SHOW, "--json", "text"),
    OptionCase("lt train plan --device", PLAN, "--device a100", "text"),
    OptionCase("lt train plan --devices", PLAN, "--devices 1", "text"),
    OptionCase("lt train plan --nodes", PLAN.replace("2", "1"), "--nodes 2", "text"),
    OptionCase("lt train plan --mfu", PLAN, "--mfu 0.11", "text"),
    OptionCase("lt train plan --set", PLAN, "--set model.n_layers=9", "text"),
    OptionCase("lt train plan --hyperparameters", PLAN, "--hyperparameters {w}/short.json", "text"),
    OptionCase("lt train plan --json", PLAN, "--json", "text"),
    OptionCase("lt train check --set", CHECK, "--set parallel.tp=3", "code"),
    OptionCase("lt train check --hyperparameters", CHECK, "--hyperparameters {w}/wrong.json", "code"),
    OptionCase("lt train evaluate --store", EVALUATE + " --store {w}/store", "--store {w}/unpacked", "text"),
    OptionCase("lt train evaluate --out", EVALUATE + " --store {w}/store", "--out other", "names"),
    OptionCase("lt train evaluate --dtype", EVALUATE + " --store {w}/store", "--dtype bfloat16", "text"),
    OptionCase("lt train evaluate --seq-len", EVALUATE + " --store {w}/store", "--seq-len 8", "text"),
    OptionCase("lt train evaluate --tasks", TASKS, "--tasks lt_count", "text"),
    OptionCase("lt train evaluate --tasks-dir", TASKS + " --tasks spelled", "--tasks-dir {w}/tasks", "code"),
    OptionCase("lt train evaluate --limit", TASKS, "--limit 3", "text"),
    OptionCase("lt train sample --prompt", SAMPLE, "--prompt loss", "text"),
    OptionCase("lt train sample --max-new-tokens", SAMPLE, "--max-new-tokens 3", "text"),
    OptionCase("lt train sample --temperature", SAMPLE, "--temperature 0", "text"),
    OptionCase("lt train sample --top-k", SAMPLE, "--top-k 1", "text"),
    OptionCase("lt train sample --top-p", SAMPLE, "--top-p 0.001", "text"),
    OptionCase("lt train sample --seed", SAMPLE, "--seed 1", "text"),
    OptionCase("lt train sample --samples", SAMPLE, "--samples 2", "text"),
    OptionCase("lt train sample --out", SAMPLE, "--out out", "names"),
    OptionCase("lt train report --out", REPORT, "--out other.html", "names"),
    OptionCase("lt train report --png", REPORT, "--png charts", "names"),
    OptionCase("lt train report --overwrite", REPORT, "--overwrite", "code", (REPORT,)),
    OptionCase("lt train env --set", ENV, "--set engine.neuron.malloc_arenas=9", "text"),
    OptionCase("lt train env --sdk", ENV, "--sdk 2.18", "text"),
    OptionCase("lt train env --export", ENV, "--export", "text"),
    OptionCase("lt train env --json", ENV, "--json", "text"),
    OptionCase("lt train neuron-cache list --cache", "lt train neuron-cache list {w}/neuron.toml", CACHE, "text"),
    OptionCase(
        "lt train neuron-cache list-failed --cache", "lt train neuron-cache list-failed {w}/neuron.toml", CACHE, "code"
    ),
    OptionCase(
        "lt train neuron-cache clean --cache",
        "lt train neuron-cache clean {w}/neuron.toml",
        "--cache cache",
        "names",
        ("cp {w}/cache cache",),
    ),
    OptionCase(
        "lt train neuron-cache clean --other-compilers",
        "lt train neuron-cache clean --cache cache",
        "--other-compilers 2.0",
        "names",
        ("cp {w}/cache cache",),
    ),
    OptionCase(
        "lt train neuron-cache clean --dry-run",
        "lt train neuron-cache clean --cache cache",
        "--dry-run",
        "names",
        ("cp {w}/cache cache",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_option_changes_what_the_command_does(call: Call, capsys: pytest.CaptureFixture[str], case: OptionCase) -> None:
    call.check(capsys, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_an_ignored_option_is_noticed(
    call: Call, capsys: pytest.CaptureFixture[str], ignore: Callable[[str], None], case: OptionCase
) -> None:
    ignore(case.option)
    call.check_ignored(capsys, case)
