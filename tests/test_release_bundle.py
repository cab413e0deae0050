"""The open release of a run: made, verified, and found out where a bit of it was changed."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lt_ckpt.finished_folder import list_finished_files
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_data import Selection, prepare
from lt_launch.__main__ import main as lt_main
from lt_test_helpers.hostile import (
    CONTENTS,
    CONTROL,
    FEW,
    PLACES,
    assert_harmless,
    assert_refused,
    mutate,
    replace,
    run_command,
)
from lt_trainer.config.recipe import load
from lt_trainer.release.errors import ReleaseError
from lt_trainer.release.facts import read_facts
from lt_trainer.release.make import MakeOptions, list_files, list_hashes, make_release
from lt_trainer.release.reproduce import ReproduceOptions, reproduce_release
from lt_trainer.release.verify import hash_of_list, verify_release

LICENSES = """
[release]
name = "tiny"
producer = "Example Lab"
version = "1.0"
authors = ["Ada Example"]
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

[[sources]]
path = "tasks/mine.jsonl"
license = "CC0-1.0"
redistribute = true
"""
NASTY_NAMES = (
    b"!|a`b|<img src=x>.txt",
    b"$(touch pwned);&`touch pwned`'\".txt",
    b"!line\n```\n# heading\n| a | b |.txt",
    b"\x1b[31mred\\" + (b"\xff\xfe" if sys.platform == "linux" else b"") + b".txt",
    "!\u202egnp.bidi\u2028[x](javascript:y)*_~.txt".encode(),
    b"-rf --no-bos.txt",
)
"""Names of source files as strangers give them: shell, Markdown, HTML, control characters, no UTF-8."""
TASK = "".join(
    json.dumps({"context": f"{i} and", "choices": [" the", " of", " a"], "label": i % 3}) + "\n" for i in range(12)
)
TASKS = (
    "evaluation.tasks=[lt_count, mine]",
    "evaluation.tasks_dir=tasks",
    "evaluation.limit=10",
    "evaluation.stores=true",
)


@pytest.fixture(scope="module")
def folder(prepared: Path, lt: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the prepared folder with a finished run in `run` and a license file."""
    root = tmp_path_factory.mktemp("release") / "work"
    shutil.copytree(prepared, root)
    train = root / "text" / "train"
    for number, name in enumerate(NASTY_NAMES):
        (train / f"{number:03}.txt").rename(train / os.fsdecode(name))
    shutil.rmtree(root / "train")
    lt("data", "prepare", "text/train", "--tokenizer", "tokenizer", "--out", "train", cwd=root)
    lt("data", "pack", "train", "--seq-len", "64", "--mode", "bfd", cwd=root)
    recipe = (root / "run.toml").read_text().replace(str(prepared), str(root))
    (root / "run.toml").write_text(recipe)
    (root / "licences.toml").write_text(LICENSES)
    (root / "paper.md").write_text("# A paper\n")
    (root / "tasks").mkdir()
    (root / "tasks" / "mine.jsonl").write_text(TASK)
    changes = ("schedule.max_steps=8", "checkpoint.interval=2", "checkpoint.keep_last=2", "batch.micro_batch_size=4")
    lt("train", "run", "run.toml", *(word for text in (*changes, *TASKS) for word in ("--set", text)), cwd=root)
    evaluated = ("--tasks", "lt_recall,mine", "--tasks-dir", "tasks", "--store", "validation", "--limit", "9")
    lt("train", "evaluate", "run", *evaluated, "--device", "cpu", cwd=root)
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


def rewrite_hashes(bundle: Path) -> None:
    """Make the list again, as one would who hides a change."""
    (bundle / HASH_LIST).write_bytes(format_hash_list(list_hashes(bundle)))


def change_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) >= 1, (path, old)
    path.write_bytes(content.replace(old, new, 1))


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_release_is_verified_and_compared_with_its_run(
    made: tuple[Path, str], folder: Path, lt: Callable[..., str]
) -> None:
    bundle, text = made
    digest = hash_of_list(bundle)
    assert "Class I (open science)" in text
    assert digest in text
    text = lt("release", "verify", bundle, "--expect", digest, "--run", "run", cwd=folder)
    assert digest in text
    assert "verified" in text
    text = lt("release", "verify", bundle, "--expect", "0" * 64, cwd=folder, code=1)
    assert f"{HASH_LIST}: is {digest}, expected {'0' * 64}" in text


def test_it_has_what_a_reader_looks_for(made: tuple[Path, str], folder: Path) -> None:
    bundle, _ = made
    names = set(list_files(bundle))
    assert {"README.md", "DATA_CARD.md", "REPORT.md", "CITATION.cff", "COMMANDS.md", "FILTERED.md", "mof.yml"} <= names
    assert {"model/model.safetensors", "model/config.json", "model/generation_config.json"} <= names
    assert {"model/tokenizer.json", "checkpoints/step-00000006/model.safetensors"} <= names
    assert {"data/train/shards/00000.bin", "data/validation/manifest.json", "recipe/recipe.toml"} <= names
    assert {"environment/requirements.txt", "run/metrics.jsonl", "results/validation.json"} <= names
    assert len([name for name in names if name.startswith("sources/")]) == 66, "one per document of both stores"
    sources = [json.loads(line) for line in (bundle / "data" / "sources.jsonl").read_text().splitlines()]
    manifest = json.loads((bundle / "data" / "train" / "manifest.json").read_text())
    assert sum(source["tokens"] for source in sources if source["store"] == "train") == manifest["tokens"]
    assert "Checkpoints of steps 2, 4 were saved and removed" in (bundle / "README.md").read_text()
    assert "energy of this run was not measured" in (bundle / "REPORT.md").read_text()
    steps = [json.loads(line) for line in (bundle / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(step["valid_tokens"] for step in steps if "loss" in step)
    assert f"{tokens:,}" in (bundle / "REPORT.md").read_text(), "those of all steps"
    texts = [path for name in names if (path := bundle / name).suffix in (".md", ".json", ".jsonl", ".toml", ".yml")]
    told = [path for path in texts if str(folder) in path.read_text(errors="replace")]
    assert told == [], "the machine's folders are filtered"


def test_the_same_run_gives_the_same_bytes(
    made: tuple[Path, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    make_release(Path("run"), tmp_path / "again", MakeOptions(licenses=Path("licences.toml")))
    assert hash_of_list(tmp_path / "again") == hash_of_list(made[0])


@pytest.mark.parametrize("is_hidden", [False, True], ids=["as it is", "with a new hash list"])
@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("model/model.safetensors", flip_last_byte, "model: "),
        ("checkpoints/step-00000006/model.safetensors", flip_last_byte, "checkpoints/step-00000006: "),
        ("data/train/shards/00000.bin", flip_last_byte, "data/train: "),
        ("data/train/packs/bfd-64/start.npy", flip_last_byte, "data/train: "),
        ("recipe/recipe.toml", lambda path: change_bytes(path, b"lr = 0.003", b"lr = 0.002"), "recipe/recipe.toml: "),
        ("recipe/recipe.json", lambda path: change_bytes(path, b'"lr": 0.003', b'"lr": 0.002'), "recipe/recipe.toml: "),
        (
            "results/validation.json",
            lambda path: change_bytes(path, b'"loss": ', b'"loss": 0'),
            "results/validation.json: ",
        ),
        (
            "results/evaluation/step-00000008-float32/results.jsonl",
            lambda path: change_bytes(path, b'"acc": 0', b'"acc": 1'),
            "results/evaluation/step-00000008-float32: acc = 1",
        ),
        (
            "results/evaluation/step-00000008/mine.jsonl",
            lambda path: change_bytes(path, b'"acc": ', b'"acc": 1'),
            "run/metrics.jsonl, step 8: acc = ",
        ),
        (
            "results/evaluation/step-00000008/validation.jsonl",
            lambda path: change_bytes(path, b'"loss": ', b'"loss": 1'),
            "run/metrics.jsonl, step 8: loss = ",
        ),
        ("data/tasks/mine.jsonl", flip_last_byte, "data/tasks/mine.jsonl: "),
        ("run/metrics.jsonl", lambda path: change_bytes(path, b'"loss": ', b'"loss": 1'), "REPORT.md: "),
        ("licences.toml", lambda path: change_bytes(path, b"CDLA-Permissive-2.0", b"MIT"), "mof.yml: "),
        (
            "data/sources.jsonl",
            lambda path: change_bytes(path, b'"redistribute": true', b'"redistribute": false'),
            "may not be redistributed",
        ),
        ("figures/loss.svg", lambda path: change_bytes(path, b"polyline", b"polygon"), "figures/loss.svg: "),
        ("bom.cdx.json", lambda path: change_bytes(path, b'"tiny"', b'"huge"'), "bom.cdx.json: "),
        ("README.md", lambda path: change_bytes(path, b"Class I ", b"Class 0 "), "README.md: "),
        ("model/config.json", lambda path: change_bytes(path, b'"rope_theta": 1', b'"rope_theta": 2'), "model"),
    ],
)
def test_a_change_of_any_part_is_found(
    bundle: Path, file: str, change: Callable[[Path], None], told: str, is_hidden: bool
) -> None:
    change(bundle / file)
    if is_hidden:
        rewrite_hashes(bundle)
    problems = verify_release(bundle).problems
    assert any(told in problem for problem in problems), problems
    assert is_hidden or any(file in problem for problem in problems), "the hash list names the file"


def test_cards_of_another_lt_are_not_compared_and_that_is_said(bundle: Path, lt: Callable[..., str]) -> None:
    """Another commit of the same version may write other cards; the wheel in the release tells."""
    (wheel,) = bundle.glob("wheels/lt_trainer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entries = {item: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for item, content in entries.items():
            archive.writestr(item, content.replace(b"# What was filtered", b"# What is filtered"))
    change_bytes(bundle / "FILTERED.md", b"# What was filtered", b"# What is filtered")
    rewrite_hashes(bundle)
    text = lt("release", "verify", bundle, cwd=bundle.parent)
    assert "were not compared with the files: another lt-trainer has made them" in text
    assert "verified, but for cards, figures and documents" in text


def test_a_run_of_other_sources_of_lt_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is the same, the files are not: wheels of these would not repeat the run."""
    monkeypatch.chdir(folder)
    run = Path(shutil.copytree("run", tmp_path / "run"))
    environment = json.loads((run / "environment.json").read_text())
    environment["sources"]["lt-data"] = "0" * 64
    (run / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(ReleaseError, match="lt-data: the files are not those with which the run has trained"):
        make_release(run, tmp_path / "out", MakeOptions(licenses=Path("licences.toml")))


def test_missing_and_extra_files_are_found(bundle: Path) -> None:
    (bundle / "REPORT.md").unlink()
    (bundle / "model" / "more.txt").write_text("x")
    problems = verify_release(bundle).problems
    assert any("REPORT.md" in problem for problem in problems)
    assert any("model/more.txt" in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "class_number", "lacks"),
    [
        ((), 1, ""),
        (('paper = "paper.md"', ""), 2, "Research paper: not in the release"),
        (('path = "text/train/*"\nlicense = "CC0-1.0"', 'path = "text/train/*"'), 2, "Datasets: source text/train/"),
        (("text/validation/*", "text/test/*"), 3, "Evaluation data: source text/validation/"),
        (('data = "CDLA-Permissive-2.0"', ""), 0, "Model parameters (Final): has no license"),
        (('data = "CDLA-Permissive-2.0"', 'data = "CC-BY-NC-4.0"'), 0, "Model parameters (Final): CC-BY-NC-4.0 is not"),
    ],
    ids=["I", "II without a paper", "II without a license of data", "III", "none", "none with a closed license"],
)
def test_a_release_of_each_class_gets_its_class(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str],
    class_number: int,
    lacks: str,
) -> None:
    monkeypatch.chdir(folder)
    text = LICENSES.replace(*change) if change else LICENSES
    shutil.copyfile("paper.md", tmp_path / "paper.md")
    (tmp_path / "licences.toml").write_text(text)
    facts = make_release(Path("run"), tmp_path / "out", MakeOptions(licenses=tmp_path / "licences.toml"))
    assert facts.openness.class_number == class_number
    following = class_number - 1 if class_number else 3
    assert any(reason.startswith(lacks) for reason in facts.openness.missing.get(following, (lacks,)))
    result = verify_release(tmp_path / "out")
    assert result.problems == ()
    assert result.openness is not None
    assert result.openness.class_number == class_number
    assert f"class: {class_number}" in (tmp_path / "out" / "mof.yml").read_text()
    if "without a license" in lacks or "text/test" in "".join(change):
        assert not list((tmp_path / "out").glob("data/validation/shards"))


def test_a_class_that_is_asked_for_and_not_reached_leaves_nothing(
    folder: Path, tmp_path: Path, lt: Callable[..., str]
) -> None:
    (tmp_path / "licences.toml").write_text(LICENSES.replace('paper = "paper.md"', ""))
    text = lt(
        *("release", "make", "run", "--out", tmp_path / "out", "--licenses", tmp_path / "licences.toml"),
        *("--mof-class", "1"),
        cwd=folder,
        code=64,
    )
    assert "Class I (open science) is not reached" in text
    assert "Research paper: not in the release" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["licences.toml"]


def test_all_that_is_wrong_is_in_one_list_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Path(shutil.copytree(folder, tmp_path / "work"))
    monkeypatch.chdir(work)
    recipe = json.loads((work / "run" / "recipe.json").read_text())
    recipe["recipe"]["data"] |= {"store": "train", "validation": "validation"}
    (work / "run" / "recipe.json").write_text(json.dumps(recipe))
    for checkpoint in (work / "run" / "checkpoints").iterdir():
        (checkpoint / "COMMIT").unlink()
    flip_last_byte(work / "validation" / "shards" / "00000.bin")
    shutil.rmtree(work / "train")
    (work / "licences.toml").write_text('[release]\nname = "x"\n[licenses]\ndata = ""\n')
    with pytest.raises(ReleaseError) as raised:
        make_release(Path("run"), Path("out"), MakeOptions(licenses=Path("licences.toml")))
    text = "\n".join(raised.value.problems)
    assert "licenses.data = '': must not be empty" in text
    assert "no committed checkpoint that verifies" in text
    assert "data.store = 'train'" in text
    assert "data.validation = 'validation'" in text
    assert raised.value.exit_code == 64
    assert not list(work.glob("*out*"))


def test_a_store_that_is_no_longer_the_one_that_was_read_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Path(shutil.copytree(folder, tmp_path / "work"))
    monkeypatch.chdir(work)
    recipe = json.loads((work / "run" / "recipe.json").read_text())
    recipe["recipe"]["data"] |= {"store": "validation"}
    (work / "run" / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(ReleaseError, match="the store has changed: the run has read"):
        make_release(Path("run"), Path("out"), MakeOptions(licenses=Path("licences.toml")))


def test_a_store_that_leaves_out_duplicates_by_a_list_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Path(shutil.copytree(folder, tmp_path / "work"))
    monkeypatch.chdir(work)
    selection = Selection(drop_duplicates=True)
    tokenizer = work / "train" / "tokenizer"
    prepare([work / "text" / "train"], tokenizer=tokenizer, out=work / "units", unit_bytes=2000, selection=selection)
    recipe = json.loads((work / "run" / "recipe.json").read_text())
    recipe["recipe"]["data"] |= {"store": "units"}
    (work / "run" / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(
        ReleaseError, match=r"data\.store = 'units': leaves out duplicates .* \(lt data merge --units\)"
    ):
        make_release(Path("run"), Path("out"), MakeOptions(licenses=Path("licences.toml")))


def test_energy_is_in_the_documents_if_it_was_measured_and_never_zero(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for energy, name in ((0.125, "measured"), (0.0, "zero")):
        run = Path(shutil.copytree("run", tmp_path / name / "run"))
        metrics = run / "metrics.jsonl"
        change_bytes(metrics, b'{"step": 8, "loss"', f'{{"energy_kwh": {energy}, "step": 8, "loss"'.encode())
        out = tmp_path / f"{name}-release"
        facts = make_release(run, out, MakeOptions(licenses=Path("licences.toml")))
        model = next(
            e for e in json.loads((out / "ai.spdx3.json").read_text())["@graph"] if e["type"] == "ai_AIPackage"
        )
        card = json.loads((out / "bom.cdx.json").read_text())["metadata"]["component"]["modelCard"]
        if energy:
            assert facts.energy_kwh == energy
            spent = model["ai_energyConsumption"]["ai_trainingEnergyConsumption"][0]
            assert (spent["ai_energyQuantity"], spent["ai_energyUnit"]) == (energy, "kilowattHour")
            spent = card["considerations"]["environmentalConsiderations"]["energyConsumptions"][0]
            assert spent["activityEnergyCost"] == {"value": energy, "unit": "kWh"}
            assert "0.125 kWh" in (out / "README.md").read_text()
        else:
            assert facts.energy_kwh is None
            assert "ai_energyConsumption" not in model
            assert "considerations" not in card
            assert "was not measured" in (out / "REPORT.md").read_text()


def test_every_package_has_one_declared_and_one_concluded_license(made: tuple[Path, str]) -> None:
    graph = json.loads((made[0] / "ai.spdx3.json").read_text())["@graph"]
    packages = [e["spdxId"] for e in graph if e["type"] in ("ai_AIPackage", "dataset_DatasetPackage")]
    assert len(packages) == 3
    for package in packages:
        kinds = sorted(e["relationshipType"] for e in graph if e.get("from") == package and "License" in str(e))
        assert kinds[:2] == ["hasConcludedLicense", "hasDeclaredLicense"]
        assert kinds.count("hasConcludedLicense") == kinds.count("hasDeclaredLicense") == 1


def test_the_hub_reads_the_model_card(made: tuple[Path, str]) -> None:
    from huggingface_hub import ModelCard

    data = ModelCard((made[0] / "README.md").read_text()).data
    validation = json.loads((made[0] / "results" / "validation.json").read_text())["validation"][0]
    assert data.license == "cdla-permissive-2.0"
    assert data.model_name == "tiny"
    assert data.eval_results[0].metric_value == validation["loss"]


def test_figures_are_those_that_the_script_of_the_bundle_draws(bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in (bundle / "figures").iterdir()}
    assert set(before) == {"loss.svg", "learning-rate.svg", "gradient-norm.svg", "throughput.svg", "tasks.svg"}
    shutil.rmtree(bundle / "figures")
    subprocess.run([sys.executable, "-I", str(bundle / "plots.py")], check=True, cwd="/")
    assert {path.name: path.read_bytes() for path in (bundle / "figures").iterdir()} == before
    assert all(b">step</text>" in figure for figure in before.values()), "the name of the axis"


def test_scores_of_the_released_weights_are_in_cards_and_documents(made: tuple[Path, str], folder: Path) -> None:
    """Of `[evaluation]` and of `lt train evaluate`, each in the model index, the report and both bills of materials."""
    from huggingface_hub import ModelCard

    bundle = made[0]
    facts = read_facts(bundle)
    found = [(score.kind, score.name, score.n_items) for score in facts.scores if not score.group]
    losses = [score for score in facts.scores if score.kind == "store"]
    assert found == [
        *(("task", "lt_count", 10), ("task", "mine", 10)),
        ("store", "validation", losses[0].n_items),
        *(("task", "lt_recall", 9), ("task", "mine", 9)),
        ("store", "validation", losses[0].n_items),
    ]
    assert {score.group.partition(" ")[0] for score in losses} == {"", "source", "length"}
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (counted,) = (r for r in records if r.get("eval_task") == "lt_count")
    (validated,) = (r for r in records if "val_loss" in r and r["step"] == 8)
    assert facts.scores[0].metrics["acc"] == counted["eval_acc"]
    of_run, of_command = (score for score in losses if not score.group)
    assert of_run.metrics["loss"] == pytest.approx(validated["val_loss"], rel=1e-6)
    assert of_command.metrics["loss"] == pytest.approx(of_run.metrics["loss"], rel=1e-6)
    shown = {(r.dataset_name, r.metric_type): r.metric_value for r in ModelCard(bundle_text(bundle)).data.eval_results}
    assert shown["lt_count", "acc"] == counted["eval_acc"]
    assert shown["validation", "bits_per_byte"] == of_command.metrics["bits_per_byte"]
    assert "| validation, length " in (bundle / "REPORT.md").read_text()
    card = json.loads((bundle / "bom.cdx.json").read_text())["metadata"]["component"]["modelCard"]
    assert ("lt_recall", "acc") in {(m["slice"], m["type"]) for m in card["quantitativeAnalysis"]["performanceMetrics"]}
    assert '"lt_count, acc"' in (bundle / "ai.spdx3.json").read_text()
    assert (bundle / "data" / "tasks" / "mine.jsonl").read_text() == TASK
    assert "| mine | 12 | CC0-1.0 | `data/tasks/mine.jsonl` |" in (bundle / "DATA_CARD.md").read_text()


def bundle_text(bundle: Path) -> str:
    return (bundle / "README.md").read_text()


def test_a_task_without_a_license_is_left_out_and_the_recipe_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (tmp_path / "licences.toml").write_text(
        LICENSES.replace("tasks/mine.jsonl", "tasks/other.jsonl").replace('paper = "paper.md"', "")
    )
    facts = make_release(Path("run"), tmp_path / "out", MakeOptions(licenses=tmp_path / "licences.toml"))
    assert facts.openness.class_number == 3
    assert "Evaluation data: task tasks/mine.jsonl has no license" in facts.openness.missing[2]
    assert not (tmp_path / "out" / "data" / "tasks").exists()
    recipe = load(tmp_path / "out" / "recipe" / "recipe.toml").recipe
    assert (recipe.evaluation.tasks, recipe.evaluation.tasks_dir) == (("lt_count",), "")
    assert verify_release(tmp_path / "out").problems == ()


def test_results_of_other_weights_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = Path(shutil.copytree("run/evaluation/step-00000008-float32", tmp_path / "scores")) / "results.jsonl"
    text = path.read_text()
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"weights": json.loads(text.split("\n")[0])["weights"], "text": "a"}) + "\n")
    options = MakeOptions(licenses=Path("licences.toml"), results=(tmp_path / "scores", samples))
    facts = make_release(Path("run"), tmp_path / "out", options)
    assert (tmp_path / "out" / "results" / "scores" / "results.jsonl").exists()
    (shown,) = (part for part in facts.components if part.name == "Sample model outputs")
    assert shown.paths == ("results/samples.jsonl",)
    samples.write_text(json.dumps({"weights": "0", "model": "another", "text": "a"}) + "\n")
    with pytest.raises(ReleaseError, match=r"samples.jsonl has results of other weights \(another\)"):
        make_release(Path("run"), tmp_path / "again", options)
    samples.write_text("")
    path.write_text(text.replace('"weights": "', '"weights": "0'))
    with pytest.raises(ReleaseError, match="scores has results of other weights"):
        make_release(Path("run"), tmp_path / "again", options)
    path.write_text('{"kind": "task"}\n')
    with pytest.raises(ReleaseError, match="not results of lt train evaluate"):
        make_release(Path("run"), tmp_path / "again", options)
    assert not (tmp_path / "again").exists()


NO_NETWORK = """
import socket


def refuse(*arguments, **options):
    raise AssertionError(f"the network is asked: {arguments}")


socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""
CROISSANT_RECORDS = """
import sys
from mlcroissant import Dataset

print(len(list(Dataset(jsonld=sys.argv[1]).records("sources"))))
"""
DAMAGE = [
    {
        "bom.cdx.json": ('"machine-learning-model"', '"machine-learning"', "is not one of"),
        "ai.spdx3.json": ('"kilowattHour"', '"hours"', "hours"),
        "croissant.json": ('"cr:Field"', '"cr:Feld"', "croissant/Feld"),
        "README.md": ("model-index:", "model-index: x\nother:", "model_index"),
    },
    {
        "bom.cdx.json": ('"bomFormat": "CycloneDX",', "", "'bomFormat' is a required property"),
        "ai.spdx3.json": ('"created"', '"creatd"', "creatd"),
        "croissant.json": ('"@id": "source-list"', '"@id": "source-lost"', "source-list"),
        "README.md": ("---\n", "--\n", "has no front matter"),
    },
    {
        "bom.cdx.json": ('"specVersion": "1.7"', '"specVersion": "1.6"', "'1.6' is not 1.7"),
        "ai.spdx3.json": ('"ai_typeOfModel"', '"ai_kindOfModel"', "ai_kindOfModel"),
        "croissant.json": ('"@vocab": "https://schema.org/"', '"@vocab": "https://x.org/"', "@context"),
        "README.md": ("---\n", "---\n]: [\n", "expected"),
    },
    {
        "bom.cdx.json": ("{", "{,", "JSONDecodeError"),
        "ai.spdx3.json": ("#producer", "#nobody", "#nobody is named, and is not in it"),
        "croissant.json": ('"contentUrl"', '"contentUri"', "contentUrl"),
        "README.md": ("library_name:", "- library_name:", "expected"),
    },
]
"""Releases: document → what is changed in it (once), by what, and what is told."""


def test_what_cannot_be_checked_against_its_schema_is_told(made: tuple[Path, str]) -> None:
    """The libraries of the extra `release` are no part of the workspace's environment, that of the model card is."""
    result = verify_release(made[0])
    assert result.problems == ()
    for file, module in (
        ("bom.cdx.json", "cyclonedx"),
        ("ai.spdx3.json", "spdx_python_model"),
        ("croissant.json", "mlcroissant"),
        ("README.md", "huggingface_hub"),
    ):
        told = [note for note in result.notes if note.startswith(f"{file} was not checked against the schema")]
        assert len(told) == (find_spec(module) is None), file
        assert all("pip install 'lt-trainer[release]'" in note for note in told)


@pytest.mark.slow
def test_the_command_checks_documents_with_the_real_validators(
    made: tuple[Path, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lt-trainer[release] from the wheels of the bundle, without a network: each kind of damage is found."""
    programs = tmp_path / "venv" / "bin"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    wheels = ("--find-links", str(made[0] / "wheels"), "--refresh-package", "lt-trainer")
    install = ("uv", "pip", "install", "--quiet", "--python", str(programs / "python"), *wheels)
    subprocess.run([*install, "lt-trainer[release]", "lt-launch"], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "sitecustomize.py").write_text(NO_NETWORK)

    def verify(bundle: Path) -> tuple[int, str]:
        done = subprocess.run(
            [str(programs / "lt"), "release", "verify", str(bundle)], capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    code, text = verify(made[0])
    assert (code, text.splitlines()[-1]) == (0, "verified"), text
    assert "schema" not in text, "all were checked, and nothing is recommended"
    command = [str(programs / "python"), "-c", CROISSANT_RECORDS, str(made[0] / "croissant.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "66"

    monkeypatch.chdir(folder)
    run = Path(shutil.copytree("run", tmp_path / "run"))
    change_bytes(run / "metrics.jsonl", b'{"step": 8, "loss"', b'{"energy_kwh": 0.125, "step": 8, "loss"')
    whole = tmp_path / "with-energy"
    make_release(run, whole, MakeOptions(licenses=Path("licences.toml")))
    assert verify(whole)[0] == 0
    names = {"bom.cdx.json": "CycloneDX 1.7", "ai.spdx3.json": "SPDX 3.0.1", "croissant.json": "Croissant 1.0"}
    for number, changes in enumerate(DAMAGE):
        bundle = Path(shutil.copytree(whole, tmp_path / f"damaged-{number}"))
        for file, (old, new, _) in changes.items():
            change_bytes(bundle / file, old.encode(), new.encode())
        rewrite_hashes(bundle)
        code, text = verify(bundle)
        assert code == 1
        for file, (_, _, told) in changes.items():
            begin = f"PROBLEM {file}: {names.get(file, 'the model card')}: "
            found = text[text.index(begin) :].partition("PROBLEM ")[2].partition("PROBLEM ")[0]
            assert told in found, (number, file, text)

    for change in (("uninstall", "jsonschema"), ("install", "cyclonedx-python-lib<11"), ("uninstall", "mlcroissant")):
        subprocess.run(["uv", "pip", change[0], "--quiet", "--python", programs / "python", change[1]], check=True)
        code, text = verify(made[0])
        assert code == 0, "a library that is missing or too old is no fault of the release"
        file = "croissant.json" if change[1] == "mlcroissant" else "bom.cdx.json"
        assert f"{file} was not checked against the schema" in text


def tokens_of(bundle: Path, name: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse((bundle / name).read_text())


def test_names_of_strangers_change_no_card(made: tuple[Path, str]) -> None:
    """Files of the training data are named as `NASTY_NAMES`; a real reader finds them as text in their cells."""
    bundle = made[0]
    headings = {
        "DATA_CARD.md": ["Data of tiny", "train", "validation", "Tasks of the evaluation", "What is missing"],
        "FILTERED.md": ["What was filtered"],
        "COMMANDS.md": ["The commands by hand"],
    }
    for name in ("README.md", "DATA_CARD.md", "REPORT.md", "FILTERED.md", "COMMANDS.md"):
        assert not CONTROL.search((bundle / name).read_text()), name
        tokens = tokens_of(bundle, name)
        inner = [child.type for token in tokens for child in token.children or []]
        assert not {"html_inline", "link_open", "em_open", "s_open"} & set(inner), name
        assert inner.count("image") == (5 if name == "REPORT.md" else 0), "its figures"
        assert "html_block" not in [token.type for token in tokens], name
        if name in headings:
            shown = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
            assert shown == headings[name]
    cells = [token.content for token in tokens_of(bundle, "DATA_CARD.md") if token.type == "inline"]
    assert r"!\\u202egnp.bidi\\u2028\[x\](javascript:y)\*\_\~.txt" in " ".join(cells)
    assert [token.type for token in tokens_of(bundle, "COMMANDS.md")].count("fence") == 1
    assert set(list_finished_files(bundle)) == {*list_files(bundle), HASH_LIST}, "all can be uploaded"


def test_a_shell_runs_the_commands_by_hand(made: tuple[Path, str], tmp_path: Path) -> None:
    """Those of the data, whose names are `NASTY_NAMES`: the stores are those of the run."""
    (fence,) = (token for token in tokens_of(made[0], "COMMANDS.md") if token.type == "fence")
    lines = [line for line in fence.content.splitlines() if line.startswith("env/bin/lt data ")]
    assert len(lines) == 4
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "lt").symlink_to(Path(sys.executable).with_name("lt"))
    script = "\n".join(["set -e", *lines])
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, env={**os.environ, "RELEASE": str(made[0])})
    for store in ("train", "validation"):
        there, here = (
            json.loads((folder / "data" / store / "manifest.json").read_text()) for folder in (made[0], tmp_path)
        )
        assert there["fingerprint"] == here["fingerprint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "env"]


HOSTILE_FILES = (
    "SHA256SUMS",
    "release.json",
    "licences.toml",
    "recipe/recipe.json",
    "recipe/recipe.toml",
    "environment/environment.json",
    "environment/requirements.txt",
    "data/sources.jsonl",
    "data/tasks.jsonl",
    "data/train/manifest.json",
    "data/train/packs/bfd-64/pack.json",
    "model/config.json",
    "model/SHA256SUMS",
    "run/metrics.jsonl",
    "run/events.jsonl",
    "results/evaluation/step-00000008-float32/results.jsonl",
    "results/evaluation/step-00000008/mine.jsonl",
    "results/validation.json",
    "weights.json",
    "wheels/LICENSE.spdx",
    "bom.cdx.json",
    "README.md",
)
"""Files of a release that `verify` and `reproduce` read."""
HOSTILE = PLACES | CONTENTS


def assert_found(bundle: Path, file: str, kind: str) -> None:
    """Put something in the place of a file: both commands refuse it in words, at once, and write nothing."""
    replace(bundle / file, HOSTILE[kind])
    if kind not in PLACES and file != HASH_LIST:  # as one would who hides it
        rewrite_hashes(bundle)
    outcome = run_command(lt_main, "release", "verify", bundle)
    assert_harmless(outcome)
    assert outcome.code in (1, 64), (file, kind, outcome)
    work = bundle.parent / "work"
    outcome = run_command(lt_main, "release", "reproduce", bundle, "--out", work, "--python", "/bin/false")
    assert_refused(outcome)
    is_read = "prepare-train failed" in outcome.err  # where that file has nothing that it needs
    assert work.exists() == is_read
    assert not is_read or kind not in PLACES
    shutil.rmtree(work, ignore_errors=True)


@pytest.mark.parametrize("number", range(0, len(HOSTILE), 2))
def test_what_stands_in_the_place_of_a_file_is_found(number: int, bundle: Path) -> None:
    """One kind in one file; the slow test puts most kinds in every file."""
    assert_found(bundle, HOSTILE_FILES[number % len(HOSTILE_FILES)], list(HOSTILE)[number])


@pytest.mark.slow
@pytest.mark.parametrize("file", HOSTILE_FILES)
def test_anything_in_the_place_of_any_file_is_found(file: str, made: tuple[Path, str], tmp_path: Path) -> None:
    for number, kind in enumerate([*FEW, "list", "object", "lone surrogate"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_found(Path(shutil.copytree(made[0], folder / "release")), file, kind)
        shutil.rmtree(folder)


RUN_FILES = (
    "recipe.json",
    "environment.json",
    "events.jsonl",
    "metrics.jsonl",
    "monitor/node00000.jsonl",
    "evaluation/step-00000008-float32/results.jsonl",
    "evaluation/step-00000008/validation.jsonl",
)
"""Files of a run that `make` reads."""


@pytest.mark.parametrize("file", [*RUN_FILES, "licences.toml"])
def test_a_run_of_a_stranger_is_refused_or_released_whole(
    file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    kind = "fifo" if file == "licences.toml" else list(CONTENTS)[2 * RUN_FILES.index(file)]
    run = Path(shutil.copytree("run", tmp_path / "run"))
    shutil.copyfile("licences.toml", tmp_path / "licences.toml")
    shutil.copyfile("paper.md", tmp_path / "paper.md")
    replace(run / file if file in RUN_FILES else tmp_path / file, HOSTILE[kind])
    licenses = ("--licenses", tmp_path / "licences.toml")
    outcome = run_command(lt_main, "release", "make", run, "--out", tmp_path / "out", *licenses)
    assert_harmless(outcome)
    assert outcome.code in (0, 64), (file, kind, outcome)
    assert (tmp_path / "out" / HASH_LIST).exists() == (outcome.code == 0)
    assert {path.name for path in tmp_path.iterdir()} - {"out"} == {"licences.toml", "paper.md", "run"}


@pytest.mark.slow
def test_values_that_were_changed_at_random(
    made: tuple[Path, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a release and in a run: each command ends in words. LT_FUZZ chooses how many times, LT_SEED which."""
    monkeypatch.chdir(folder)
    rng = random.Random(int(os.environ.get("LT_SEED", "0")))
    bundle, run = Path(shutil.copytree(made[0], tmp_path / "release")), Path(shutil.copytree("run", tmp_path / "run"))
    hashes = list_hashes(bundle)
    places = [(bundle, file) for file in HOSTILE_FILES if file.endswith((".json", ".jsonl"))]
    places += [(run, file) for file in RUN_FILES]
    for number in range(int(os.environ.get("LT_FUZZ", "150"))):
        root, file = rng.choice(places)
        whole = (root / file).read_text()
        lines = whole.splitlines() if file.endswith(".jsonl") else [whole]
        index = rng.randrange(len(lines))
        value = mutate(rng, json.loads(lines[index]))
        try:
            lines[index] = json.dumps(value)
        except ValueError:  # a number that JSON has no text for
            continue
        content = ("\n".join(lines) + "\n").encode()
        (root / file).write_bytes(content)
        if root == bundle:
            changed = hashes | {file: hashlib.sha256(content).hexdigest()}
            (bundle / HASH_LIST).write_bytes(format_hash_list(changed))
            outcomes = [run_command(lt_main, "release", "verify", bundle)]
            work = tmp_path / f"work-{number}"
            options = ("--out", work, "--python", "/bin/false", "--steps", "1")
            outcomes.append(run_command(lt_main, "release", "reproduce", bundle, *options))
            assert outcomes[1].code == 64
        else:
            outcomes = [run_command(lt_main, "release", "make", run, "--out", tmp_path / "out")]
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for outcome in outcomes:
            assert_harmless(outcome)
            assert outcome.code in (0, 1, 64), (number, file, lines[index], outcome)
        (root / file).write_text(whole)


def test_what_is_no_run_and_no_release_is_refused(folder: Path, lt: Callable[..., str]) -> None:
    assert "not a run directory" in lt("release", "make", "text", "--out", "x", cwd=folder, code=64)
    assert "not a release" in lt("release", "verify", "text", cwd=folder, code=64)
    text = lt("release", "make", "run", "--out", "x", "--licenses", "none.toml", cwd=folder, code=64)
    assert "none.toml: cannot be read" in text
    text = lt("release", "make", "run", "--out", "x", "--checkpoints", "7", cwd=folder, code=64)
    assert "the run has no valid checkpoint of step 7; it has [8]" in text
    assert not (folder / "x").exists()


def test_a_release_alone_gives_the_same_losses_in_another_folder(
    bundle: Path, tmp_path: Path, lt: Callable[..., str]
) -> None:
    """Data prepared again from the sources in the bundle, then the recipe, to the end: losses and weights."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    text = lt("release", "reproduce", bundle, "--python", sys.executable, cwd=elsewhere)
    assert "losses of 8 steps: bit-equal" in text
    assert "final weights: bit-equal" in text
    assert "environment:" not in text
    logged = (elsewhere / "reproduction" / "reproduced" / "metrics.jsonl").read_text().splitlines()
    released = (bundle / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("loss") for line in logged] == [json.loads(line).get("loss") for line in released]


def test_what_cannot_be_reproduced_is_said_before_anything_runs(
    folder: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    text = LICENSES.replace(
        'license = "CC-BY-4.0"\nredistribute = true', 'license = "CC-BY-4.0"\nurl = "https://x.org/v"'
    )
    (tmp_path / "licences.toml").write_text(text.replace('paper = "paper.md"', ""))
    made = tmp_path / "closed"
    make_release(Path("run"), made, MakeOptions(licenses=tmp_path / "licences.toml"))
    monkeypatch.chdir(tmp_path)
    assert not list(made.glob("data/validation/shards"))
    with pytest.raises(ReleaseError) as raised:
        reproduce_release(made, tmp_path / "work", ReproduceOptions(steps=9))
    assert "--steps = 9: the release has 8 steps" in raised.value.problems[0]
    missing = [problem for problem in raised.value.problems if problem.startswith("source text/validation/")]
    assert len(missing) == 6
    assert "it can be obtained from https://x.org/v" in missing[0]
    flip_last_byte(next((bundle / "sources").rglob("*.txt")))
    with pytest.raises(ReleaseError, match="was changed"):
        reproduce_release(bundle, tmp_path / "work", ReproduceOptions())
    assert not (tmp_path / "work").exists()


def test_steps_of_which_no_loss_was_logged_are_refused(bundle: Path, tmp_path: Path) -> None:
    metrics = bundle / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "loss" not in row or row["step"] > 5]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite_hashes(bundle)
    with pytest.raises(ReleaseError, match="--steps = 3: the first loss that was logged is of step 6"):
        reproduce_release(bundle, tmp_path / "work", ReproduceOptions(steps=3))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("weights.json", lambda values: {"model": 3}, "weights.json: model is not a table of hashes"),
        ("environment/environment.json", lambda values: values | {"python": "--help"}, "'--help' is no version"),
        (
            "environment/environment.json",
            lambda values: values | {"variables": {"OMP_NUM_THREADS": "1\0"}},
            "OMP_NUM_THREADS = '1\\x00' is no value",
        ),
        (
            "release.json",
            lambda values: values | {"stores": {"../out": values["stores"]["train"]}},
            "no name of a store",
        ),
        ("release.json", lambda values: values | {"step": "8"}, "step = '8' is not of its type"),
    ],
)
def test_what_a_repetition_needs_is_read_before_anything_runs(
    bundle: Path, tmp_path: Path, file: str, change: Callable[[dict[str, Any]], dict[str, Any]], told: str
) -> None:
    (bundle / file).write_text(json.dumps(change(json.loads((bundle / file).read_text()))))
    rewrite_hashes(bundle)
    with pytest.raises(ReleaseError) as raised:
        reproduce_release(bundle, tmp_path / "work", ReproduceOptions())
    assert told in str(raised.value)
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_in_a_fresh_environment_with_sources_from_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lt: Callable[..., str]
) -> None:
    """The environment is made from the lock and the wheels of the bundle; sources are matched by their hashes."""
    monkeypatch.chdir(folder)
    (tmp_path / "licences.toml").write_text(
        LICENSES.replace("redistribute = true", "").replace('paper = "paper.md"', "")
    )
    make_release(Path("run"), tmp_path / "made", MakeOptions(licenses=tmp_path / "licences.toml"))
    assert not list((tmp_path / "made").glob("sources/**/*.txt"))
    shutil.copytree(folder / "text", tmp_path / "mine" / "deep" / "down")
    text = lt("release", "reproduce", "made", "--sources", "mine", "--steps", "3", cwd=tmp_path)
    assert "losses of 3 steps: bit-equal" in text
    assert (tmp_path / "reproduction" / "env" / "bin" / "python").exists()


@pytest.mark.slow
def test_a_run_of_two_ranks_is_repeated_on_two_ranks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lt: Callable[..., str], torchrun: Callable[..., str]
) -> None:
    monkeypatch.chdir(folder)
    changes = ("run.dir=two", "schedule.max_steps=6", "checkpoint.interval=3", "batch.micro_batch_size=2")
    sets = (word for text in changes for word in ("--set", text))
    torchrun(2, "-m", "lt_trainer", "run", "run.toml", *sets, cwd=folder)
    make_release(Path("two"), tmp_path / "made", MakeOptions(licenses=Path("licences.toml")))
    text = lt("release", "reproduce", "made", "--python", sys.executable, "--steps", "4", cwd=tmp_path)
    assert "losses of 4 steps: bit-equal" in text
    started = [
        json.loads(line) for line in (tmp_path / "reproduction/reproduced/events.jsonl").read_text().splitlines()
    ]
    assert [event["world"] for event in started if event["event"] == "start"] == [2]
