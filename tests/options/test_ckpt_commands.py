"""Options of `lt ckpt` and `lt model`: each changes files, the printed text or the exit code."""

from collections.abc import Callable

import pytest

from lt_test_helpers.option_cases import Call, OptionCase

CONVERT = "lt ckpt convert {w}/hf out --to nxd"
LARGE = "lt ckpt export {w}/large --out out --dtype f16"
TORN = "lt ckpt convert {w}/torn out --to hf"
ZERO1 = ("lt ckpt convert {w}/checkpoint nxd --to nxd --optimizer --dp 1",)
RESHARD = "lt ckpt reshard-optimizer nxd out --dp 2 --config {w}/checkpoint-config.json"
BARE = (CONVERT.replace(" out ", " bare "), "rm bare/config.json", "rm bare/SHA256SUMS")
GQA = CONVERT + " --tp 4 --qkv-linear --kv-size-multiplier 2"
CKPT = [
    OptionCase("lt ckpt convert --to", CONVERT, "--to pt", "names"),
    OptionCase(
        "lt ckpt convert --config",
        "lt ckpt convert bare out --to hf",
        "--config {w}/hf/config.json",
        "code names",
        BARE,
    ),
    OptionCase("lt ckpt convert --dtype", CONVERT, "--dtype bf16", "content"),
    OptionCase(
        "lt ckpt convert --allow-overflow",
        "lt ckpt convert {w}/large out --to pt --dtype f16",
        "--allow-overflow",
        "code names",
    ),
    OptionCase(
        "lt ckpt convert --max-shard-gb", "lt ckpt convert {w}/hf out --to hf", "--max-shard-gb 0.00002", "names"
    ),
    OptionCase("lt ckpt convert --tp", CONVERT, "--tp 2", "names"),
    OptionCase("lt ckpt convert --pp", CONVERT, "--pp 2", "names"),
    OptionCase("lt ckpt convert --virtual-pp", CONVERT + " --pp 2", "--virtual-pp 2", "content"),
    OptionCase("lt ckpt convert --kv-size-multiplier", GQA, "--kv-size-multiplier 4 --tp 8", "names"),
    OptionCase("lt ckpt convert --qkv-linear", CONVERT + " --tp 2", "--qkv-linear", "content"),
    OptionCase("lt ckpt convert --fuse-qkv", GQA, "--fuse-qkv", "content"),
    OptionCase("lt ckpt convert --coalesce-qkv", CONVERT.replace("/hf", "/mha"), "--coalesce-qkv", "content"),
    OptionCase("lt ckpt convert --xser", CONVERT, "--xser", "names"),
    OptionCase("lt ckpt convert --layout", CONVERT, "--layout v1", "names"),
    OptionCase("lt ckpt convert --tag", CONVERT, "--tag step_7", "names"),
    OptionCase("lt ckpt convert --head-order", GQA, "--head-order trn2", "content"),
    OptionCase(
        "lt ckpt convert --master-weights", "lt ckpt convert {w}/checkpoint out --to hf", "--master-weights", "content"
    ),
    OptionCase(
        "lt ckpt convert --optimizer", "lt ckpt convert {w}/checkpoint out --to nxd --dp 1", "--optimizer", "code names"
    ),
    OptionCase(
        "lt ckpt convert --dp", "lt ckpt convert {w}/checkpoint out --to nxd --optimizer --dp 1", "--dp 2", "names"
    ),
    OptionCase(
        "lt ckpt convert --source-head-order",
        "lt ckpt convert nxd out --to hf",
        "--source-head-order trn2",
        "code content",
        (GQA.replace(" out ", " nxd "),),
    ),
    OptionCase("lt ckpt export --out", "lt ckpt export {w}/checkpoint --out out", "--out other", "names"),
    OptionCase("lt ckpt export --group", "lt ckpt export {w}/checkpoint --out out", "--group master", "content"),
    OptionCase("lt ckpt export --dtype", "lt ckpt export {w}/checkpoint --out out", "--dtype f16", "content"),
    OptionCase(
        "lt ckpt export --max-shard-gb", "lt ckpt export {w}/checkpoint --out out", "--max-shard-gb 0.00002", "names"
    ),
    OptionCase(
        "lt ckpt export --config", "lt ckpt export bare --out out", "--config {w}/hf/config.json", "code names", BARE
    ),
    OptionCase("lt ckpt export --allow-overflow", LARGE, "--allow-overflow", "code names"),
    OptionCase("lt ckpt convert --allow-replica-mismatch", TORN, "--allow-replica-mismatch", "code names"),
    OptionCase("lt ckpt reshard-optimizer --dp", RESHARD, "--dp 4", "names", ZERO1),
    OptionCase("lt ckpt reshard-optimizer --config", RESHARD, "--config {w}/hf/config.json", "code", ZERO1),
    OptionCase("lt ckpt verify --config", "lt ckpt verify bare", "--config {w}/hf/config.json", "code text", BARE),
    OptionCase("lt ckpt verify --against", "lt ckpt verify {w}/hf", "--against {w}/large", "code"),
    OptionCase("lt ckpt verify --optimizer", "lt ckpt verify {w}/hf", "--optimizer", "code"),
    OptionCase("lt ckpt verify --logits", "lt ckpt verify {w}/hf --against {w}/hf", "--logits", "text"),
    OptionCase("lt ckpt diff --config", "lt ckpt diff bare {w}/hf", "--config {w}/hf/config.json", "code text", BARE),
    OptionCase("lt ckpt inspect --config", "lt ckpt inspect bare", "--config {w}/hf/config.json", "text", BARE),
    OptionCase("lt ckpt inspect --tensors", "lt ckpt inspect {w}/checkpoint", "--tensors", "text"),
    OptionCase("lt ckpt inspect --json", "lt ckpt inspect {w}/checkpoint", "--json", "text"),
    OptionCase(
        "lt ckpt prune --keep-last",
        "lt ckpt prune checkpoints --keep-last 2",
        "--keep-last 1",
        "names",
        ("cp {w}/run/checkpoints checkpoints",),
    ),
    OptionCase(
        "lt ckpt prune --keep-every",
        "lt ckpt prune checkpoints --keep-last 1",
        "--keep-every 2",
        "names",
        ("cp {w}/run/checkpoints checkpoints",),
    ),
]
MODEL = [
    OptionCase("lt model show --seq-len", "lt model show llama-1b", "--seq-len 512", "text"),
    OptionCase("lt model show --micro-batch-size", "lt model show llama-1b", "--micro-batch-size 3", "text"),
    OptionCase("lt model show --json", "lt model show llama-1b", "--json", "text"),
]


@pytest.mark.parametrize("case", [*CKPT, *MODEL], ids=lambda case: case.option)
def test_option_changes_what_the_command_does(call: Call, capsys: pytest.CaptureFixture[str], case: OptionCase) -> None:
    call.check(capsys, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CKPT, *MODEL], ids=lambda case: case.option)
def test_an_ignored_option_is_noticed(
    call: Call, capsys: pytest.CaptureFixture[str], ignore: Callable[[str], None], case: OptionCase
) -> None:
    ignore(case.option)
    call.check_ignored(capsys, case)
