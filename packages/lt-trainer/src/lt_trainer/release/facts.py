"""Facts of a release, read from its own files: all that its cards and its class say.

Both making and verifying use them. Nothing is guessed: a number that the run did not record is None and does not
appear. Cost: reads the logs, the manifests and model/config.json; no tokens and no weights.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lt_ckpt.hf.folder import read_aux_files
from lt_ckpt.hf.tokenizer_classes import describe_other_ids
from lt_model import config_from_hf, n_parameters
from lt_trainer.release.bundle import LICENSE_FILE, SOURCE_ARCHIVE, Release, ReleaseError
from lt_trainer.release.data_files import SourceEntry, read_source_list
from lt_trainer.release.license_file import parse_license_file
from lt_trainer.release.mof import COMPONENTS, MofResult, ReleasedComponent, evaluate_openness
from lt_trainer.release.scores import METRICS, read_scores
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records

SAMPLES, PAPERS = "run/evaluation/**/samples*", "paper/*"
"""Files of generated texts, by how their names begin; files of the research paper."""


class StoreFacts(NamedTuple):
    """Store of the run: its manifest and pack header as they are in the release."""

    name: str
    manifest: Mapping[str, Any]
    pack: Mapping[str, Any]
    has_tokens: bool
    sources: Sequence[SourceEntry]


class Facts:
    """All that the documents of a release say; see the module's text.

    Args:
        bundle: Folder of the release.

    Attributes:
        release: Contents of release.json.
        info: Contents of licences.toml.
        recipe: Sections of the run's recipe.
        origins: Field of it → origin of its value.
        environment: The run's environment.json.
        model: model/config.json.
        shape: The model that it says, in one form for all families.
        tokenizer_problem: Why AutoTokenizer gives other ids than those of training, or "".
        train: Training records by step.
        validation: Last validation record of each set.
        start_event: Newest start event (device, number of ranks); empty without one.
        scores: Scores of the final weights.
        stores: Stores of the run.

    Raises:
        ReleaseError: A file is missing or damaged.
    """

    def __init__(self, bundle: Path) -> None:
        try:
            self._read(bundle)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise ReleaseError(str(bundle), [f"cannot be read: {type(exc).__name__}: {exc}"]) from exc

    def _read(self, bundle: Path) -> None:
        self.release = Release.model_validate_json((bundle / "release.json").read_bytes())
        self.info = parse_license_file((bundle / LICENSE_FILE).read_text(encoding="utf-8"), LICENSE_FILE)
        recipe = _read_json(bundle / "run" / "recipe.json")
        self.recipe, self.origins = recipe["recipe"], recipe["origins"]
        self.environment = _read_json(bundle / "run" / "environment.json")
        self.model = _read_json(bundle / "model" / "config.json")
        self.shape = config_from_hf(dict(self.model))
        self.tokenizer_problem = describe_other_ids(read_aux_files(bundle / "model"), self.shape.family)
        records = drop_superseded_records(read_jsonl(bundle / METRICS))
        records = [record for record in records if record["step"] <= self.release.step]
        self.train = [record for record in records if "loss" in record]
        self.validation = list({record.get("val_set"): record for record in records if "val_loss" in record}.values())
        starts = [event for event in read_jsonl(bundle / "run" / "events.jsonl") if event.get("event") == "start"]
        self.start_event = starts[-1] if starts else {}
        self.scores = read_scores(bundle, records, self.release.step)
        sources = read_source_list(bundle)
        self.stores = [
            _read_store(bundle / "data" / name, [entry for entry in sources if entry.store == name])
            for name in self.release.stores
        ]
        self._bundle = bundle

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return n_parameters(self.shape)

    @property
    def trained_tokens(self) -> int | None:
        """Labels that were trained on; None if not every step was logged."""
        steps = [record["step"] for record in self.train]
        complete = steps == list(range(1, self.release.step + 1))
        return sum(record["valid_tokens"] for record in self.train) if complete else None

    def _find(self, pattern: str) -> list[str]:
        return [path.relative_to(self._bundle).as_posix() for path in sorted(self._bundle.glob(pattern))]

    @cached_property
    def openness(self) -> MofResult:
        """Class of the Model Openness Framework that the release reaches."""
        return evaluate_openness(self.components)

    @cached_property
    def components(self) -> tuple[ReleasedComponent, ...]:
        """The framework's components that are in the release, with their files and licenses."""
        maps = {store.manifest["map"]["function"] for store in self.stores if store.manifest.get("map")}
        loader = self.recipe["data"].get("loader")
        lacking = {
            "Data preprocessing code": f"the record function {', '.join(maps)} is not in the release" if maps else "",
            "Training code": f"the data loader {loader} is not in the release" if loader else "",
        }
        paths: dict[str, Sequence[str]] = {
            "Model parameters (Final)": ["model"],
            "Model parameters (Intermediate)": ["checkpoints"] if self.release.earlier_steps else [],
            "Model metadata": ["model/config.json", "recipe"],
            "Sample model outputs": self._find(SAMPLES),
            "Model card": ["README.md"],
            "Data card": ["DATA_CARD.md"],
            "Technical report": ["REPORT.md"],
            "Research paper": self._find(PAPERS),
            "Evaluation results": [METRICS] if self.validation else [score.file for score in self.scores],
        }
        licenses = {name: self.info.component_license(name) for name in paths}
        for name, part in COMPONENTS.items():
            if part.content == "code":
                paths[name] = [SOURCE_ARCHIVE]
                licenses[name] = self.info.licenses.components.get(name, self.release.code_license)
        for name, kind in (("Datasets", "train"), ("Evaluation data", "validation")):
            stores = [store for store in self.stores if store.name.split("-")[0] == kind]
            paths[name] = [f"data/{store.name}" for store in stores]
            licenses[name], lacking[name] = _data_license(stores)
        return tuple(
            ReleasedComponent(name, licenses[name], tuple(paths[name]), lacking.get(name, ""))
            for name in COMPONENTS
            if paths[name]
        )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _data_license(stores: Sequence[StoreFacts]) -> tuple[str, str]:
    """Return the license of all sources of stores, and why they do not count as openly released, or ""."""
    sources = [entry for store in stores for entry in store.sources]
    problems = [f"store {store.name} does not list its sources" for store in stores if not store.sources]
    problems += [entry.problem for entry in sources if entry.problem]
    licenses = sorted({f"({entry.license})" if " " in entry.license else entry.license for entry in sources} - {""})
    return " AND ".join(licenses), "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" * (len(problems) > 3))


def _read_store(folder: Path, sources: Sequence[SourceEntry]) -> StoreFacts:
    (pack,) = folder.glob("packs/*/pack.json")
    manifest = _read_json(folder / "manifest.json")
    has_tokens = (folder / manifest["parts"][0]["path"] / "shards").is_dir()
    return StoreFacts(folder.name, manifest, _read_json(pack), has_tokens, sources)
