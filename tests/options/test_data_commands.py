"""Options of `lt data`: each changes documents, files, the printed text or the exit code."""

from collections.abc import Callable

import pytest

from lt_test_helpers.option_cases import Call, OptionCase

PREPARE = "lt data prepare {w}/text --tokenizer {w}/tokenizer --out out"
LINES = "lt data prepare {w}/lines.jsonl --tokenizer {w}/tokenizer --out out"
EXPORT = "lt data export {w}/store --out out --to"
ROWS = EXPORT + " hf --seq-len 16"
CHUNKS = "lt data export {w}/store --to litespark --seq-len 14 --out chunks"
IMPORT = "lt data import chunks --from litespark --tokenizer {w}/tokenizer --boundaries bos --out out"
IMPORT_JSON = "lt data import {w}/ids.jsonl --from smp --tokenizer {w}/tokenizer --out out"
SPLIT = "lt data split {w}/store --holdout 20% --train out/train --validation out/validation"
TRAIN_TOKENIZER = "lt data train-tokenizer {w}/text --vocab-size 280 --out out"
STEPS = "lt data steps-per-epoch {w}/store --seq-len 16 --mode bfd --global-batch-size 4"
INSPECT = "lt data inspect {w}/store --seq-len 16 --mode bfd"
PACK = "lt data pack store --seq-len 24"
STORE = ("cp {w}/unpacked store",)
PARTS = tuple(PREPARE + f" --num-parts 2 --part {part}" for part in (0, 1))
MERGED = (PREPARE + " --no-bos", *PARTS)
UNITS = (PREPARE + " --unit-bytes 500",)
DATA = [
    OptionCase("lt data prepare --tokenizer", PREPARE, "--tokenizer {w}/tokenizer2", "documents"),
    OptionCase("lt data prepare --out", PREPARE, "--out other", "names"),
    OptionCase("lt data prepare --bos", PREPARE, "--no-bos", "documents"),
    OptionCase("lt data prepare --eos", PREPARE, "--no-eos", "documents"),
    OptionCase("lt data prepare --special-tokens-as", PREPARE, "--special-tokens-as ids", "documents"),
    OptionCase("lt data prepare --shard-tokens", PREPARE, "--shard-tokens 50", "names"),
    OptionCase("lt data prepare --overwrite", PREPARE + " --no-bos", "--overwrite", "code documents", (PREPARE,)),
    OptionCase("lt data prepare --suffix", PREPARE, "--suffix .md", "documents"),
    OptionCase("lt data prepare --text-field", LINES, "--text-field body", "documents"),
    OptionCase("lt data prepare --tokens-field", LINES, "--tokens-field ids", "documents"),
    OptionCase("lt data prepare --on-bad", LINES + " --text-field url", "--on-bad skip", "code documents"),
    OptionCase(
        "lt data prepare --max-document-bytes", LINES + " --on-bad skip", "--max-document-bytes 40", "documents"
    ),
    OptionCase("lt data prepare --min-chars", PREPARE, "--min-chars 60", "documents"),
    OptionCase("lt data prepare --max-chars", PREPARE, "--max-chars 60", "documents"),
    OptionCase("lt data prepare --min-tokens", PREPARE, "--min-tokens 20", "documents"),
    OptionCase("lt data prepare --max-tokens", PREPARE, "--max-tokens 20", "documents"),
    OptionCase("lt data prepare --drop-duplicates", PREPARE, "--drop-duplicates", "documents"),
    OptionCase("lt data prepare --map", LINES, "--map record_maps:shout", "documents"),
    OptionCase("lt data prepare --map-args", LINES + " --map record_maps:shout", '--map-args {"times":2}', "documents"),
    OptionCase("lt data prepare --keep", LINES, "--keep url", "names"),
    OptionCase("lt data prepare --part", PREPARE + " --num-parts 2", "--part 1", "documents names"),
    OptionCase("lt data prepare --num-parts", PREPARE, "--num-parts 2", "names"),
    OptionCase("lt data prepare --unit-bytes", PREPARE, "--unit-bytes 500", "names"),
    OptionCase("lt data merge --overwrite", "lt data merge out", "--overwrite", "code documents", MERGED),
    OptionCase("lt data merge --units", "lt data merge merged", "--units out", "code documents", UNITS),
    OptionCase("lt data append --suffix", "lt data append store {w}/text", "--suffix .md", "documents", STORE),
    OptionCase(
        "lt data append --text-field", "lt data append store {w}/lines.jsonl", "--text-field body", "documents", STORE
    ),
    OptionCase(
        "lt data append --tokens-field",
        "lt data append store {w}/lines.jsonl",
        "--tokens-field ids",
        "documents",
        STORE,
    ),
    OptionCase(
        "lt data append --on-bad", "lt data append store {w}/bad.jsonl", "--on-bad skip", "code documents", STORE
    ),
    OptionCase(
        "lt data append --max-document-bytes",
        "lt data append store {w}/lines.jsonl --on-bad skip",
        "--max-document-bytes 40",
        "documents",
        STORE,
    ),
    OptionCase("lt data export --to", EXPORT + " megatron", "--to mds", "names"),
    OptionCase("lt data export --out", EXPORT + " megatron", "--out other", "names"),
    OptionCase("lt data export --seq-len", ROWS, "--seq-len 32", "content"),
    OptionCase("lt data export --packing", ROWS, "--packing bfd", "content"),
    OptionCase("lt data export --last-row", ROWS.replace("16", "15"), "--last-row drop", "content"),
    OptionCase("lt data export --pad-id", ROWS.replace("16", "15"), "--pad-id 5", "content"),
    OptionCase("lt data export --labels", ROWS, "--labels copy", "content"),
    OptionCase(
        "lt data export --document-boundaries", ROWS + " --packing bfd", "--document-boundaries seq_lengths", "content"
    ),
    OptionCase("lt data export --gz", EXPORT + " smp", "--no-gz", "names"),
    OptionCase("lt data export --split", EXPORT + " litespark --seq-len 16", "--split test", "names"),
    OptionCase("lt data export --file-bytes", EXPORT + " smp", "--file-bytes 100", "names"),
    OptionCase("lt data import --out", IMPORT, "--out other", "names", (CHUNKS,)),
    OptionCase("lt data import --boundaries", IMPORT, "--boundaries files", "documents", (CHUNKS,)),
    OptionCase("lt data import --shard-tokens", IMPORT, "--shard-tokens 50", "names", (CHUNKS,)),
    OptionCase("lt data import --overwrite", IMPORT_JSON + " --bos", "--overwrite", "code documents", (IMPORT_JSON,)),
    OptionCase("lt data import --bos", IMPORT_JSON, "--bos", "documents"),
    OptionCase("lt data import --eos", IMPORT_JSON, "--eos", "documents"),
    OptionCase("lt data import --from", IMPORT_JSON, "--from hf", "code documents"),
    OptionCase("lt data import --tokenizer", IMPORT_JSON, "--tokenizer {w}/tokenizer2", "vocabulary"),
    OptionCase(
        "lt data import --pad-id",
        IMPORT,
        "--pad-id 5",
        "documents",
        (CHUNKS + " --pad-id 5", "rm chunks/lt-export.json"),
    ),
    OptionCase(
        "lt data import --seq-len", IMPORT + " --boundaries rows --seq-len 14", "--seq-len 4", "documents", (CHUNKS,)
    ),
    OptionCase(
        "lt data import --token-bytes",
        IMPORT,
        "--token-bytes 2",
        "code documents",
        (CHUNKS, "rm chunks/metadata.json", "rm chunks/lt-export.json"),
    ),
    OptionCase("lt data import --field", IMPORT_JSON, "--field other", "documents"),
    OptionCase("lt data pack --seq-len", PACK, "--seq-len 20", "names", STORE),
    OptionCase("lt data pack --mode", PACK + " --name x", "--mode concat", "content", STORE),
    OptionCase(
        "lt data pack --min-seq-len", PACK + " --mode buckets --min-seq-len 12", "--min-seq-len 6", "content", STORE
    ),
    OptionCase("lt data pack --name", PACK, "--name mine", "names", STORE),
    OptionCase("lt data pack --packs", PACK, "--packs packs", "names", STORE),
    OptionCase(
        "lt data pack --overwrite",
        PACK + " --mode concat --name x",
        "--overwrite",
        "code content",
        (*STORE, PACK + " --name x"),
    ),
    OptionCase("lt data split --holdout", SPLIT, "--holdout 60%", "documents"),
    OptionCase("lt data split --train", SPLIT, "--train other", "names"),
    OptionCase("lt data split --validation", SPLIT, "--validation other", "names"),
    OptionCase("lt data split --overwrite", SPLIT + " --holdout 60%", "--overwrite", "code documents", (SPLIT,)),
    OptionCase("lt data stats --duplicates", "lt data stats {w}/store", "--duplicates", "text"),
    OptionCase("lt data stats --global-batch-size", "lt data stats {w}/store", "--global-batch-size 4", "text"),
    OptionCase("lt data stats --dp-size", "lt data stats {w}/store --global-batch-size 4", "--dp-size 4", "text"),
    OptionCase("lt data stats --packs", "lt data stats {w}/unpacked", "--packs {w}/packs", "text"),
    OptionCase("lt data stats --json", "lt data stats {w}/store", "--json", "text"),
    OptionCase("lt data report --out", "lt data report {w}/store", "--out other.html", "names"),
    OptionCase("lt data report --png", "lt data report {w}/store", "--png charts", "names"),
    OptionCase("lt data report --duplicates", "lt data report {w}/store", "--duplicates", "content"),
    OptionCase("lt data report --global-batch-size", "lt data report {w}/store", "--global-batch-size 4", "content"),
    OptionCase("lt data report --dp-size", "lt data report {w}/store --global-batch-size 4", "--dp-size 4", "content"),
    OptionCase("lt data report --packs", "lt data report {w}/unpacked", "--packs {w}/packs", "content"),
    OptionCase(
        "lt data report --overwrite",
        "lt data report {w}/store",
        "--overwrite",
        "code",
        ("lt data report {w}/unpacked",),
    ),
    OptionCase("lt data steps-per-epoch --global-batch-size", STEPS, "--global-batch-size 2", "text"),
    OptionCase("lt data steps-per-epoch --dp-size", STEPS + " --global-batch-size 3", "--dp-size 3", "text"),
    OptionCase(
        "lt data steps-per-epoch --packs", STEPS.replace("/store", "/unpacked"), "--packs {w}/packs", "code text"
    ),
    OptionCase("lt data steps-per-epoch --seq-len", STEPS, "--seq-len 32", "text"),
    OptionCase("lt data steps-per-epoch --mode", STEPS + " --seq-len 12", "--mode concat", "text"),
    OptionCase("lt data steps-per-epoch --json", STEPS, "--json", "text"),
    OptionCase("lt data train-tokenizer --vocab-size", TRAIN_TOKENIZER, "--vocab-size 290", "vocabulary"),
    OptionCase("lt data train-tokenizer --out", TRAIN_TOKENIZER, "--out other", "names"),
    OptionCase("lt data train-tokenizer --suffix", TRAIN_TOKENIZER, "--suffix .md", "vocabulary"),
    OptionCase(
        "lt data train-tokenizer --text-field",
        TRAIN_TOKENIZER.replace("/text", "/lines.jsonl").replace("280", "259"),
        "--text-field body",
        "vocabulary",
    ),
    OptionCase(
        "lt data train-tokenizer --on-bad",
        TRAIN_TOKENIZER.replace("/text", "/bad.jsonl").replace("280", "258"),
        "--on-bad skip",
        "code",
    ),
    OptionCase("lt data verify --packs", "lt data verify {w}/unpacked", "--packs {w}/packs", "text"),
    OptionCase("lt data inspect --seq-len", INSPECT, "--seq-len 32", "text"),
    OptionCase("lt data inspect --mode", INSPECT, "--mode concat", "text"),
    OptionCase("lt data inspect --packs", INSPECT.replace("/store", "/unpacked"), "--packs {w}/packs", "code text"),
    OptionCase("lt data inspect --row", INSPECT, "--row 3", "text"),
    OptionCase("lt data inspect --rows", INSPECT, "--rows 2:3", "text"),
    OptionCase("lt data inspect --document", INSPECT, "--document 3", "text"),
    OptionCase("lt data inspect --full-text", INSPECT, "--full-text", "text"),
    OptionCase("lt data inspect --color", INSPECT, "--color", "text"),
    OptionCase("lt data inspect --json", INSPECT, "--json", "text"),
    OptionCase("lt data inspect --run", "lt data inspect --step 1 --run {w}/run", "--run {w}/run2", "text"),
    OptionCase("lt data inspect --step", "lt data inspect --run {w}/run --step 1", "--step 2", "text"),
    OptionCase("lt data inspect --store", "lt data inspect --step 1 --run {w}/moved", "--store {w}/store", "code text"),
]


@pytest.mark.parametrize("case", DATA, ids=lambda case: case.option)
def test_option_changes_what_the_command_does(call: Call, capsys: pytest.CaptureFixture[str], case: OptionCase) -> None:
    call.check(capsys, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", DATA, ids=lambda case: case.option)
def test_an_ignored_option_is_noticed(
    call: Call, capsys: pytest.CaptureFixture[str], ignore: Callable[[str], None], case: OptionCase
) -> None:
    ignore(case.option)
    call.check_ignored(capsys, case)
