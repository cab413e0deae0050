"""The open release of a run: made, verified, repeated from itself, and found out where a bit of it was changed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from lt_ckpt.finished_folder import list_finished_files
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_model import config_from_hf, config_to_hf
from lt_trainer.config.recipe import load
from lt_trainer.release.bundle import ReleaseError, hash_file, list_files
from lt_trainer.release.cards import make_documents
from lt_trainer.release.facts import Facts
from lt_trainer.release.make import make_release
from lt_trainer.release.reproduce import reproduce_release
from lt_trainer.release.verify import verify_release

LICENSES = """
[release]
name = "tiny"
producer = "Example Lab"
paper = "paper.md"

[licenses]
data = "CDLA-Permissive-2.0"
document = "CC-BY-4.0"

[[sources]]
path = "text/train/*"
license = "CC0-1.0"
redistribute = true

[[sources]]
path = "text/validation/*"
license = "CC-BY-4.0"
redistribute = true

[stores.train.prepare]
unit_bytes = 9000
"""
UNITS = ("--unit-bytes", "9000")
NEOX = '{"family": "gpt_neox", "norm": "layer", "gated": false, "mlp_bias": true}'
"""A family without keys that others have in config.json."""
CLOSED = LICENSES.replace("redistribute = true", 'url = "https://x.org/v"').replace('paper = "paper.md"', "")
NASTY_NAMES = (
    b"!|a`b|<img src=x>.txt",
    b"$(touch pwned);&`touch pwned`'\".txt",
    b"!line\n```\n# heading\n| a | b |.txt",
    b"\x1b[31mred\\" + (b"\xff\xfe" if sys.platform == "linux" else b"") + b".txt",
    "!\u202egnp.bidi\u2028[x](javascript:y)*_~.txt".encode(),
    b"-rf --no-bos.txt",
)
"""Names of source files as strangers give them: shell, Markdown, HTML, control characters, no UTF-8."""


@pytest.fixture(scope="module")
def folder(prepared: Path, lt: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the prepared folder with a finished run in `run`, its evaluation and a license file."""
    root = tmp_path_factory.mktemp("release") / "work"
    shutil.copytree(prepared, root)
    train = root / "text" / "train"
    for number, name in enumerate(NASTY_NAMES):
        (train / f"{number:03}.txt").rename(train / os.fsdecode(name))
    shutil.rmtree(root / "train")
    lt("data", "prepare", "text/train", "--tokenizer", "tokenizer", "--out", "train", *UNITS, cwd=root)
    lt("data", "pack", "train", "--seq-len", "64", "--mode", "bfd", cwd=root)
    (root / "run.toml").write_text((root / "run.toml").read_text().replace(str(prepared), str(root)))
    (root / "licences.toml").write_text(LICENSES)
    (root / "paper.md").write_text("# A paper\n")
    changes = ("schedule.max_steps=8", "checkpoint.interval=2", "checkpoint.keep_last=2", "batch.micro_batch_size=4")
    changes += ("metrics.validation_tokens=-1", "model.n_kv_heads=4", f"model.shape={NEOX}")
    lt("train", "run", "run.toml", *(word for text in changes for word in ("--set", text)), cwd=root)
    lt("train", "evaluate", "run", "--store", "validation", "--device", "cpu", "--dtype", "float32", cwd=root)
    return root


@pytest.fixture(scope="module")
def made(folder: Path, lt: Callable[..., str]) -> tuple[Path, str]:
    """A release of that run by the command, and what it printed."""
    text = lt("release", "make", "run", "--out", "release", "--mof-class", "1", cwd=folder)
    return folder / "release", text


@pytest.fixture
def bundle(made: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the release that a test may change."""
    return Path(shutil.copytree(made[0], tmp_path / "release"))


@pytest.fixture
def work(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder that a test may change, as the current folder."""
    monkeypatch.chdir(Path(shutil.copytree(folder, tmp_path / "work")))
    return Path.cwd()


def make_with(licenses: str, out: Path) -> Facts:
    """Make a release of the run in the current folder with another license file."""
    path = Path("other-licences.toml")
    path.write_text(licenses)
    return make_release(Path("run"), out, licenses=path)


def rewrite_hashes(bundle: Path) -> None:
    """Make the list again, as one would who hides a change."""
    (bundle / HASH_LIST).write_bytes(format_hash_list({name: hash_file(bundle / name) for name in list_files(bundle)}))


def replace(old: str, new: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text, (path, old)
        path.write_text(text.replace(old, new, 1))

    return change


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_card_loads_the_tokenizer_with_the_ids_of_training(bundle: Path) -> None:
    assert "tokenizer = AutoTokenizer.from_pretrained" in (bundle / "README.md").read_text()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = config_from_hf({"model_type": "qwen2", "vocab_size": 300, "num_hidden_layers": 1, **sizes})
    (bundle / "model" / "config.json").write_text(json.dumps(config_to_hf(model)))
    card = make_documents(Facts(bundle))["README.md"]
    assert "import AutoModelForCausalLM, PreTrainedTokenizerFast" in card
    assert "tokenizer = PreTrainedTokenizerFast.from_pretrained" in card
    assert "AutoTokenizer gives other ids than those of training" in card


def test_a_release_has_what_a_reader_looks_for_and_is_verified(
    made: tuple[Path, str], folder: Path, lt: Callable[..., str]
) -> None:
    bundle, text = made
    digest = hash_file(bundle / HASH_LIST)
    assert "Class I (open science)" in text
    assert digest in text
    assert "verified" in lt("release", "verify", bundle, "--expect", digest, cwd=folder)
    text = lt("release", "verify", bundle, "--expect", "0" * 64, cwd=folder, code=1)
    assert f"{HASH_LIST}: is {digest}, expected {'0' * 64}" in text
    names = set(list_files(bundle))
    assert {"README.md", "DATA_CARD.md", "REPORT.md", "mof.yml", "licences.toml", "paper/paper.md"} <= names
    assert {"model/model.safetensors", "model/tokenizer.json", "checkpoints/step-00000006/model.safetensors"} <= names
    assert {"data/train/parts/00001/shards/00000.bin", "data/validation/manifest.json", "recipe/recipe.toml"} <= names
    assert {"source/lt.tar.gz", "source/requirements.txt", "source/LICENSE", "run/metrics.jsonl"} <= names
    assert len([name for name in names if name.startswith("sources/")]) == 66, "one per document of both stores"
    sources = [json.loads(line) for line in (bundle / "data" / "sources.jsonl").read_text().splitlines()]
    manifest = json.loads((bundle / "data" / "train" / "manifest.json").read_text())
    assert sum(source["tokens"] for source in sources if source["store"] == "train") == manifest["tokens"]
    steps = [json.loads(line) for line in (bundle / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(step["valid_tokens"] for step in steps if "loss" in step)
    assert f"8 steps, {tokens:,} tokens" in (bundle / "REPORT.md").read_text(), "those of all steps"
    texts = [path for name in names if (path := bundle / name).suffix in (".md", ".json", ".jsonl", ".toml", ".yml")]
    assert [path for path in texts if str(folder) in path.read_text(errors="replace")] == [], "folders are filtered"
    assert set(list_finished_files(bundle)) == {*names, HASH_LIST}, "all can be uploaded"


def test_the_hub_reads_the_model_card_with_scores_of_these_weights(made: tuple[Path, str], folder: Path) -> None:
    data = ModelCard((made[0] / "README.md").read_text()).data
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (validated,) = (record["val_loss"] for record in records if "val_loss" in record and record["step"] == 8)
    assert (data.license, data.model_name) == ("cdla-permissive-2.0", "tiny")
    by_run, by_command = (result.metric_value for result in data.eval_results if result.metric_type == "loss")
    assert by_run == validated
    assert by_command == pytest.approx(validated, rel=1e-6)


@pytest.mark.parametrize("is_hidden", [False, True], ids=["as it is", "with a new hash list"])
@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("model/model.safetensors", flip_last_byte, "model: "),
        ("checkpoints/step-00000006/model.safetensors", flip_last_byte, "checkpoints/step-00000006: "),
        ("data/train/parts/00001/shards/00000.bin", flip_last_byte, "data/train: "),
        ("data/train/packs/bfd-64/start.npy", flip_last_byte, "data/train: "),
        ("data/sources.jsonl", replace('"redistribute": true', '"redistribute": false'), "may not be redistributed"),
        ("release.json", replace('"fingerprint": "', '"fingerprint": "0'), "the run has read 0"),
        ("release.json", replace('"step": 8', '"step": "x"'), "cannot be read"),
        ("licences.toml", replace('data = "CDLA', '# data = "CDLA'), "mof.yml: states class 1"),
        ("mof.yml", replace("class: 1", "class: 2"), "mof.yml: states class 2"),
        ("weights.json", replace('"checkpoints', '"elsewhere'), "weights.json: has "),
    ],
)
def test_a_change_of_any_part_is_found(
    bundle: Path, file: str, change: Callable[[Path], object], told: str, is_hidden: bool
) -> None:
    change(bundle / file)
    if is_hidden:
        rewrite_hashes(bundle)
    problems = verify_release(bundle).problems
    assert any((told if is_hidden else file) in problem for problem in problems), problems


def test_missing_extra_and_linked_files_are_found(bundle: Path) -> None:
    (bundle / "REPORT.md").unlink()
    (bundle / "model" / "more.txt").write_text("x")
    (bundle / "DATA_CARD.md").unlink()
    (bundle / "DATA_CARD.md").symlink_to("/etc/hostname")
    problems = verify_release(bundle).problems
    for name in ("REPORT.md", "model/more.txt", "DATA_CARD.md"):
        assert any(name in problem for problem in problems), name


@pytest.mark.parametrize(
    ("change", "class_number", "lacks"),
    [
        (('path = "text/train/*"\nlicense = "CC0-1.0"', 'path = "text/train/*"'), 2, "Datasets: source text/train/"),
        (("text/validation/*", "text/test/*"), 3, "Evaluation data: source text/validation/"),
        (('data = "CDLA-Permissive-2.0"', ""), 0, "Model parameters (Final): has no license"),
    ],
    ids=["II", "III", "none"],
)
def test_a_release_of_each_class_gets_its_class(
    work: Path, tmp_path: Path, change: tuple[str, str], class_number: int, lacks: str
) -> None:
    facts = make_with(LICENSES.replace(*change), tmp_path / "out")
    assert facts.openness.class_number == class_number
    assert any(reason.startswith(lacks) for reason in facts.openness.missing[class_number - 1 if class_number else 3])
    result = verify_release(tmp_path / "out")
    assert (result.problems, result.openness) == ((), facts.openness)


def test_a_class_that_is_asked_for_and_not_reached_leaves_nothing(work: Path, lt: Callable[..., str]) -> None:
    (work / "licences.toml").write_text(LICENSES.replace('paper = "paper.md"', ""))
    text = lt("release", "make", "run", "--out", "out", "--mof-class", "1", cwd=work, code=64)
    assert "Class I (open science) is not reached" in text
    assert not list(work.glob("*out*"))


def test_all_that_is_wrong_is_in_one_list_and_nothing_is_written(work: Path, lt: Callable[..., str]) -> None:
    recipe = json.loads((work / "run" / "recipe.json").read_text())
    recipe["recipe"]["data"] |= {"store": "nowhere", "validation": "train"}
    (work / "run" / "recipe.json").write_text(json.dumps(recipe))
    flip_last_byte(next((work / "run" / "checkpoints").glob("*6/*.safetensors")))
    text = lt("release", "make", "run", "--out", "out", cwd=work, code=64)
    for told in (
        "remove this checkpoint",
        'data.store = "nowhere"',
        'data.validation = "train": the store has changed: the run has read',
    ):
        assert told in text
    for checkpoint in (work / "run" / "checkpoints").iterdir():
        (checkpoint / "COMMIT").unlink()
    (work / "licences.toml").write_text('[release]\nname = "x"\nproducer = "y"\n[licenses]\ndata = ""\n')
    text = lt("release", "make", "run", "--out", "out", cwd=work, code=64)
    assert "no committed checkpoint that verifies" in text
    assert 'licenses.data = "": not an SPDX expression' in text
    assert not list(work.glob("*out*"))
    text = lt("release", "make", "run", "--out", "out", "--licenses", "none", cwd=work, code=64)
    assert "--licenses = none: No such file" in text
    assert "not a run directory" in lt("release", "make", "text", "--out", "x", cwd=work, code=64)
    assert "not a release" in lt("release", "verify", "text", cwd=work, code=64)


def test_names_of_strangers_change_no_card(made: tuple[Path, str]) -> None:
    """Files of the training data are named as `NASTY_NAMES`; a real reader finds them as text in their cells."""
    for name in ("README.md", "DATA_CARD.md", "REPORT.md"):
        text = (made[0] / name).read_text()
        assert text.replace("\n", "").isprintable(), name
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        inner = [child.type for token in tokens for child in token.children or []]
        assert not {"html_inline", "link_open", "em_open", "s_open", "image"} & set(inner), name
        assert "html_block" not in [token.type for token in tokens], name
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[0] == "tiny: technical report"
    shown = [
        child.content
        for token in MarkdownIt().enable("table").parse((made[0] / "DATA_CARD.md").read_text())
        for child in token.children or []
    ]
    assert any(r"!\u202egnp.bidi\u2028[x](javascript:y)*_~.txt" in text for text in shown)


def test_a_release_alone_gives_the_same_losses_in_another_folder(
    bundle: Path, tmp_path: Path, lt: Callable[..., str]
) -> None:
    """Data prepared again from the sources in the release, then the recipe, to the end: losses and weights."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    text = lt("release", "reproduce", bundle, "--python", sys.executable, cwd=elsewhere)
    assert f"this runs what {bundle} contains" in text
    assert "losses of 8 steps: bit-equal" in text
    assert "final weights: bit-equal" in text
    logged = (elsewhere / "reproduction" / "reproduced" / "metrics.jsonl").read_text().splitlines()
    released = (bundle / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(line).get("loss") for line in lines if '"val_' not in line] for lines in (logged, released)]
    assert losses[0] == [loss for loss in losses[1] if loss is not None]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["reproduction"], "no name was a command"
    shutil.rmtree(elsewhere / "reproduction")
    replace('"loss": ', '"loss": 1')(bundle / "run" / "metrics.jsonl")
    rewrite_hashes(bundle)
    options = ("--steps", "2", "--python", sys.executable)
    assert "first different at step 1" in lt("release", "reproduce", bundle, *options, cwd=elsewhere, code=1)


def test_what_cannot_be_reproduced_is_said_before_anything_runs(work: Path, bundle: Path, tmp_path: Path) -> None:
    made = tmp_path / "closed"
    make_with(CLOSED, made)
    with pytest.raises(ReleaseError) as raised:
        reproduce_release(made, tmp_path / "again", steps=9)
    assert "--steps = 9: losses of 8 steps were logged" in raised.value.problems[-1]
    missing = [problem for problem in raised.value.problems if problem.startswith("source text/validation/")]
    assert len(missing) == 6
    assert f" from https://x.org/v at {tmp_path / 'again' / 'sources' / 'validation'}/" in missing[0]
    with pytest.raises(ReleaseError, match="expected 00"):
        reproduce_release(bundle, tmp_path / "again", expect="00")
    flip_last_byte(next((bundle / "sources").rglob("*.txt")))
    with pytest.raises(ReleaseError, match="was changed"):
        reproduce_release(bundle, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_in_a_fresh_environment_with_sources_from_elsewhere(work: Path, tmp_path: Path, lt: Callable[..., str]) -> None:
    """The environment is made from the sources and pins in the release; texts are matched by their hashes."""
    make_with(CLOSED, tmp_path / "made")
    assert not list((tmp_path / "made").glob("sources/**/*.txt"))
    texts = {hash_file(path): path for path in (work / "text").rglob("*.txt")}
    for entry in (entry for store in Facts(tmp_path / "made").stores for entry in store.sources):
        (tmp_path / "reproduction" / entry.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(texts[entry.sha256], tmp_path / "reproduction" / entry.file)
    text = lt("release", "reproduce", "made", "--steps", "3", cwd=tmp_path)
    assert "losses of 3 steps: bit-equal" in text
    python = tmp_path / "reproduction" / "env" / "bin" / "python"
    where = subprocess.run([python, "-c", "import lt_trainer; print(lt_trainer.__file__)"], capture_output=True)
    assert where.stdout.decode().startswith(str(python.parents[1]))


@pytest.mark.slow
def test_a_run_of_two_ranks_is_repeated_on_two_ranks(
    work: Path, tmp_path: Path, lt: Callable[..., str], torchrun: Callable[..., str]
) -> None:
    changes = ("run.dir=two", "schedule.max_steps=6", "checkpoint.interval=3", "batch.micro_batch_size=2")
    sets = (word for text in changes for word in ("--set", text))
    torchrun(2, "-m", "lt_trainer", "run", "run.toml", *sets, cwd=work)
    make_release(Path("two"), tmp_path / "made", licenses=Path("licences.toml"))
    assert load(tmp_path / "made" / "recipe" / "recipe.toml").recipe.run.dir == "reproduced"
    text = lt("release", "reproduce", "made", "--python", sys.executable, "--steps", "4", cwd=tmp_path)
    assert "losses of 4 steps: bit-equal" in text
    events = (tmp_path / "reproduction" / "reproduced" / "events.jsonl").read_text().splitlines()
    assert [event["world"] for event in map(json.loads, events) if event["event"] == "start"] == [2]
