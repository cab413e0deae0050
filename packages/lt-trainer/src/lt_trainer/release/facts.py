"""Facts of a release, read from the bundle's own files: all that its cards and documents say.

`read_facts` is what both making and verifying use: cards, figures and documents are pure functions of it, so a changed
log, manifest, license or result shows as a document that is no longer the one its files give. Nothing is guessed: a
number that the run did not record is None and does not appear.

    release.json    what no other file has: `Provenance`
    Cost: reads the logs, the manifests and model/config.json; no tokens and no weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lt_data.file_names import is_plain_name
from lt_model import config_from_hf, n_parameters
from lt_trainer.files import read_json, read_text
from lt_trainer.release.data_files import SOURCE_LIST, SourceEntry, hash_file, read_source_list
from lt_trainer.release.license_file import LicenseFile, parse_license_file
from lt_trainer.release.lock import read_lock_hashes
from lt_trainer.release.mof import MofResult, ReleasedComponent, evaluate_openness
from lt_trainer.release.plots import draw_figures, read_records
from lt_trainer.release.scores import RESULT_FOLDER, Score, is_sample_file, read_scores
from lt_trainer.release.task_files import TASK_FOLDER, TaskEntry, read_tasks
from lt_trainer.release.typed import from_json, is_inside
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records

PROVENANCE, LICENSE_FILE, RECIPE = "release.json", "licences.toml", "recipe/recipe.json"
CODE_LICENSE_TEXT = "wheels/LICENSE"
"""Text of the license of lt, which its packages have; no text of another license is."""
FORMAT, VERSION = "lt-release", 1
CODE_PACKAGES = {
    "Model architecture": ("lt_model",),
    "Data preprocessing code": ("lt_data",),
    "Training code": ("lt_trainer", "lt_trainer_gpu", "lt_trainer_neuron"),
    "Inference code": ("lt_model", "lt_trainer"),
    "Evaluation code": ("lt_trainer",),
    "Supporting libraries and tools": ("lt_ckpt", "lt_launch"),
}
"""Component of code → packages of lt that are it."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Origin of a release, which its other files do not have.

    Attributes:
        lt: Versions of lt's packages with which it was made.
        date: Day of the run's last event, UTC.
        run: Name of the run directory.
        step: Step of the final weights.
        earlier_steps: Steps of the other released weights.
        removed_steps: Steps whose checkpoints were saved and are no longer there.
        commit: Commit of lt's sources; "" if they were no checkout.
        has_patch: True if the wheels differ from the commit, by environment/lt.patch.
        untracked: Untracked files of the sources that are in the wheels.
        without_hash: Packages of the lock whose archives have no hash.
        stores: Store in the bundle → field of the recipe, fingerprint that the run has read, flat or joined.
        changed_fields: Fields of the recipe that were replaced so that it runs in the bundle, with the new value.
        filtered: Placeholder → number of replacements in the bundle's texts.
        paper: File of the research paper; "" if there is none.
    """

    lt: Mapping[str, str]
    date: str
    run: str
    step: int
    earlier_steps: Sequence[int]
    removed_steps: Sequence[int]
    commit: str
    has_patch: bool
    untracked: Sequence[str]
    without_hash: Sequence[str]
    stores: Mapping[str, Mapping[str, str]]
    changed_fields: Mapping[str, Any]
    filtered: Mapping[str, int]
    paper: str


def write_provenance(bundle: Path, provenance: Provenance) -> None:
    """Write release.json."""
    values = {"format": FORMAT, "version": VERSION, **asdict(provenance)}
    (bundle / PROVENANCE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_provenance(bundle: Path) -> Provenance:
    """Read release.json.

    Raises:
        ValueError: It is not one, or of another version.
    """
    values: Any = read_json(bundle / PROVENANCE)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"{PROVENANCE}: not a release of lt")
    if (version := values.pop("version", None)) != VERSION:
        raise ValueError(f"{PROVENANCE}: version {version!r}, this lt-trainer reads {VERSION}; use a newer lt-trainer")
    provenance = from_json(Provenance, values, PROVENANCE)
    for name in provenance.stores:
        if not is_plain_name(name):
            raise ValueError(f"{PROVENANCE}: stores has {name!r}, which is no name of a store")
    if provenance.paper and not is_inside(provenance.paper):
        raise ValueError(f"{PROVENANCE}: paper = {provenance.paper!r} is not a path in the release")
    return provenance


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """Store of the run: its manifest and pack header as they are in the bundle."""

    name: str
    field: str
    manifest: Mapping[str, Any]
    pack: Mapping[str, Any]
    has_tokens: bool
    weight: float | None
    """Share of the rows, of a source of a mixture."""

    @property
    def is_training(self) -> bool:
        """True for training data, False for validation data."""
        return self.name.split("-")[0] == "train"


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Last validation of a set."""

    name: str
    step: int
    loss: float
    tokens: int
    bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the documents of a release say; see the module's text."""

    provenance: Provenance
    info: LicenseFile
    recipe: Mapping[str, Any]
    origins: Mapping[str, str]
    environment: Mapping[str, Any]
    model: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    validation: Sequence[ValidationResult]
    scores: Sequence[Score]
    stores: Sequence[StoreFacts]
    sources: Sequence[SourceEntry]
    tasks: Sequence[TaskEntry]
    result_files: Sequence[str]
    wheels: Sequence[str]
    code_license: str
    weight_files: Mapping[str, str]
    """Weight file of the final model → SHA-256."""
    requirements: Mapping[str, str]
    """Locked package → version."""
    source_list_sha256: str
    """SHA-256 of data/sources.jsonl."""
    figures: Mapping[str, str]
    """Figure of the log → its SVG text."""

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return n_parameters(config_from_hf(dict(self.model)))

    @property
    def trained_tokens(self) -> int | None:
        """Labels that were trained on; None if not every step was logged."""
        steps = [int(record["step"]) for record in self.train]
        complete = steps == list(range(1, self.provenance.step + 1))
        return sum(int(record["valid_tokens"]) for record in self.train) if complete else None

    @property
    def energy_kwh(self) -> float | None:
        """Energy of all GPUs of the run; None if it was not measured."""
        measured = [float(record["energy_kwh"]) for record in self.train if record.get("energy_kwh") is not None]
        return measured[-1] if measured and measured[-1] > 0 else None

    @property
    def start_event(self) -> Mapping[str, Any]:
        """Newest start event (device, number of ranks); empty without one."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})

    @cached_property
    def components(self) -> tuple[ReleasedComponent, ...]:
        """The framework's components that are in the bundle."""
        return tuple(_components(self))

    @cached_property
    def openness(self) -> MofResult:
        """Class of the Model Openness Framework that the bundle reaches."""
        return evaluate_openness(self.components)


def read_facts(bundle: Path) -> Facts:
    """Read the facts of a bundle.

    Raises:
        OSError: A file is missing.
        ValueError: A file is damaged.
    """
    recipe = _json(bundle / RECIPE)
    provenance = read_provenance(bundle)
    records = drop_superseded_records(read_jsonl(bundle / "run" / "metrics.jsonl"))
    records = [record for record in records if record["step"] <= provenance.step]
    license_path = bundle / LICENSE_FILE
    return Facts(
        provenance=provenance,
        info=parse_license_file(read_text(license_path), LICENSE_FILE),
        recipe=recipe["recipe"],
        origins=recipe["origins"],
        environment=_json(bundle / "environment" / "environment.json"),
        model=_json(bundle / "model" / "config.json"),
        train=[record for record in records if "loss" in record],
        events=read_jsonl(bundle / "run" / "events.jsonl"),
        validation=_validation(records),
        scores=read_scores(bundle, records, provenance.step),
        stores=[_store(bundle, name, entry, recipe["recipe"]) for name, entry in provenance.stores.items()],
        sources=read_source_list(bundle),
        tasks=read_tasks(bundle),
        result_files=_relative(bundle, f"{RESULT_FOLDER}/**/*"),
        wheels=_relative(bundle, "wheels/*.whl"),
        code_license=read_text(bundle / "wheels" / "LICENSE.spdx").strip(),
        weight_files=_hash_list(bundle / "model" / "SHA256SUMS"),
        requirements=dict(sorted(read_lock_hashes(bundle / "environment" / "requirements.txt"))),
        source_list_sha256=hash_file(bundle / SOURCE_LIST),
        figures=draw_figures(read_records(bundle / "run" / "metrics.jsonl")),
    )


def _json(path: Path) -> Any:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return values


def _relative(bundle: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(bundle).as_posix() for path in bundle.glob(pattern) if path.is_file())


def _hash_list(path: Path) -> dict[str, str]:
    rows = (line.split("  ", 1) for line in read_text(path).splitlines())
    return {name: digest for digest, name in rows if name.endswith(".safetensors")}


def _validation(records: Sequence[Mapping[str, Any]]) -> list[ValidationResult]:
    last = {str(record.get("val_set", "")): record for record in records if "val_loss" in record}
    return [
        ValidationResult(
            name=name,
            step=int(record["step"]),
            loss=float(record["val_loss"]),
            tokens=int(record["val_tokens"]),
            bits_per_byte=record.get("val_bits_per_byte"),
        )
        for name, record in sorted(last.items())
    ]


def _store(bundle: Path, name: str, entry: Mapping[str, str], recipe: Mapping[str, Any]) -> StoreFacts:
    folder = bundle / "data" / name
    (pack,) = sorted(folder.glob("packs/*/pack.json"))
    parts = entry["field"].split(".")
    mixture = recipe["data"].get("mixture", {}).get(parts[2]) if parts[1] == "mixture" else None
    return StoreFacts(
        name=name,
        field=entry["field"],
        manifest=_json(folder / "manifest.json"),
        pack=_json(pack),
        has_tokens=(folder / "shards").is_dir(),
        weight=None if mixture is None else float(mixture["weight"]),
    )


def _components(facts: Facts) -> list[ReleasedComponent]:
    """Return the components of the framework with their files and licenses."""
    code = facts.code_license
    given = facts.info.component_licenses
    lacking = {"Data preprocessing code": _missing_preprocessing(facts), "Training code": _missing_training(facts)}
    components = [
        ReleasedComponent(
            name=name,
            license=given.get(name, code),
            paths=tuple(path for package in packages for path in facts.wheels if path.startswith(f"wheels/{package}-")),
            missing=lacking.get(name, ""),
        )
        for name, packages in CODE_PACKAGES.items()
    ]
    own = {
        "Model parameters (Final)": ("model",),
        "Model parameters (Intermediate)": ("checkpoints",) if facts.provenance.earlier_steps else (),
        "Model metadata": ("model/config.json", "recipe"),
        "Sample model outputs": tuple(path for path in facts.result_files if is_sample_file(path)),
        "Model card": ("README.md",),
        "Data card": ("DATA_CARD.md",),
        "Technical report": ("REPORT.md",),
        "Research paper": (facts.provenance.paper,) if facts.provenance.paper else (),
        "Evaluation results": tuple(path for path in facts.result_files if not is_sample_file(path)),
    }
    components += [
        ReleasedComponent(name=name, license=facts.info.component_license(name), paths=paths)
        for name, paths in own.items()
        if paths
    ]
    for name, is_training in (("Datasets", True), ("Evaluation data", False)):
        component = _data_component(facts, name, is_training)
        if component is not None:
            components.append(component)
    return components


def _data_component(facts: Facts, name: str, is_training: bool) -> ReleasedComponent | None:
    stores = [store for store in facts.stores if store.is_training == is_training]
    names = {store.name for store in stores}
    sources = [entry for entry in facts.sources if entry.store in names]
    tasks = [] if is_training else facts.tasks
    files = [task for task in tasks if not task.is_generated]
    if not stores and not tasks:
        return None
    unknown = [store.name for store in stores if not any(entry.store == store.name for entry in sources)]
    problems = [f"store {store} does not list its sources" for store in unknown]
    problems += [entry.problem for entry in (*sources, *files) if entry.problem]
    licenses = sorted({entry.license for entry in (*sources, *files) if entry.license})
    licenses = licenses or ([facts.code_license] if tasks and not stores else [])  # generated tasks are code
    paths = [f"data/{store.name}" for store in stores]
    paths += [TASK_FOLDER] if any(task.file for task in files) else []
    paths += [path for path in facts.wheels if path.startswith("wheels/lt_trainer-")] if tasks and not paths else []
    wrapped = [f"({text})" if " " in text and len(licenses) > 1 else text for text in licenses]
    shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
    return ReleasedComponent(
        name=name,
        license=" AND ".join(wrapped),
        paths=tuple(paths),
        missing=shown,
    )


def _missing_preprocessing(facts: Facts) -> str:
    maps = sorted({store.manifest["map"]["function"] for store in facts.stores if store.manifest.get("map")})
    return f"the record function {', '.join(maps)} is not in the release" if maps else ""


def _missing_training(facts: Facts) -> str:
    loader = facts.recipe["data"].get("loader", "")
    return f"the data loader {loader} is not in the release" if loader else ""
