"""ai.spdx3.json: SPDX 3.0.1 document with the AI and Dataset profiles, as JSON-LD.

Each package has exactly one declared and one concluded license; NoAssertion where none was given. Energy that was not
measured is absent.
"""

import json
from typing import Any

from lt_trainer.config.fields import flatten
from lt_trainer.release.cards import whole_scores
from lt_trainer.release.facts import Facts, StoreFacts

CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
NO_ASSERTION = "expandedlicensing_NoAssertionLicense"
HYPERPARAMETERS = ("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "schedule.kind", "schedule.max_steps")
HYPERPARAMETERS += ("schedule.warmup_steps", "batch.global_batch_size", "data.seq_len", "run.seed")


def spdx_document(facts: Facts) -> str:
    """Return the text of ai.spdx3.json."""
    base = f"urn:spdx:lt-release:{facts.provenance.date}:{next(iter(sorted(facts.weight_files.values())), '')[:16]}"
    graph = _Graph(base, facts)
    model = graph.add_model()
    for store in facts.stores:
        dataset = graph.add_dataset(store)
        graph.relate(model, "trainedOn" if store.is_training else "testedOn", dataset)
    return json.dumps({"@context": CONTEXT, "@graph": graph.finish(model)}, indent=1) + "\n"


class _Graph:
    """Elements of the document, in order."""

    def __init__(self, base: str, facts: Facts) -> None:
        self.base, self.facts = base, facts
        self.created = f"{facts.provenance.date}T00:00:00Z"
        self.agent, self.tool = f"{base}#producer", f"{base}#lt"
        self.licenses: dict[str, str] = {}
        self.n_relations = 0
        info = {"type": "CreationInfo", "@id": "_:creation", "specVersion": "3.0.1", "created": self.created}
        self.elements: list[dict[str, Any]] = [{**info, "createdBy": [self.agent], "createdUsing": [self.tool]}]
        self.add("Organization", self.agent, name=facts.info.release.producer)
        self.add("Tool", self.tool, name=f"lt-trainer {facts.provenance.lt['lt-trainer']}")

    def add(self, kind: str, identity: str, **values: Any) -> str:
        """Add an element; return its identity."""
        self.elements.append({"type": kind, "spdxId": identity, "creationInfo": "_:creation", **values})
        return identity

    def add_model(self) -> str:
        """Add the AI package; return its identity."""
        facts = self.facts
        values: dict[str, Any] = {
            "name": facts.info.release.name,
            "software_packageVersion": facts.info.release.version or "1",
            "software_primaryPurpose": "model",
            "software_downloadLocation": facts.info.release.url or "https://spdx.org/rdf/3.0.1/terms/Core/NoAssertion",
            "suppliedBy": self.agent,
            "releaseTime": self.created,
            "builtTime": self.created,
            "ai_typeOfModel": ["Llama, transformer decoder"],
            "ai_domain": ["text generation"],
            "ai_autonomyType": "noAssertion",
            "ai_useSensitivePersonalInformation": "noAssertion",
            "ai_informationAboutTraining": f"{facts.provenance.step} steps; see REPORT.md and recipe/recipe.toml",
            "ai_modelDataPreprocessing": ["tokenized and packed by lt data; see DATA_CARD.md"],
            "ai_hyperparameter": _entries(
                {name: value for name, value in flatten(facts.recipe).items() if name in HYPERPARAMETERS}
            ),
            "verifiedUsing": [
                {"type": "Hash", "algorithm": "sha256", "hashValue": digest}
                for _, digest in sorted(facts.weight_files.items())
            ],
        }
        metrics = {f"{r.name or 'validation'}, nats per token": r.loss for r in facts.validation}
        metrics |= {
            f"{score.name}, {metric}": value for score in whole_scores(facts) for metric, value in score.metrics.items()
        }
        if metrics:
            values["ai_metric"] = _entries(metrics)
        if facts.energy_kwh is not None:
            quantity = {"ai_energyQuantity": facts.energy_kwh, "ai_energyUnit": "kilowattHour"}
            training = [{"type": "ai_EnergyConsumptionDescription", **quantity}]
            values["ai_energyConsumption"] = {
                "type": "ai_EnergyConsumption",
                "ai_trainingEnergyConsumption": training,
            }
        identity = self.add("ai_AIPackage", f"{self.base}#model", **values)
        self.relate_license(identity, facts.info.component_license("Model parameters (Final)"))
        return identity

    def add_dataset(self, store: StoreFacts) -> str:
        """Add a store as a dataset package; return its identity."""
        entries = [entry for entry in self.facts.sources if entry.store == store.name]
        licenses = sorted({entry.license for entry in entries})
        wrapped = [f"({text})" if " " in text and len(licenses) > 1 else text for text in licenses]
        identity = self.add(
            "dataset_DatasetPackage",
            f"{self.base}#data-{store.name}",
            name=store.name,
            software_packageVersion=store.manifest["fingerprint"][:16],
            software_primaryPurpose="data",
            software_downloadLocation="https://spdx.org/rdf/3.0.1/terms/Core/NoAssertion",
            originatedBy=[self.agent],
            releaseTime=self.created,
            builtTime=self.created,
            dataset_datasetType=["text"],
            dataset_datasetSize=store.manifest["text_bytes"],
            dataset_dataPreprocessing=[f"{store.manifest['tokens']} tokens, packed in mode {store.pack['mode']}"],
        )
        if store.has_tokens:
            self.elements[-1]["dataset_datasetAvailability"] = "directDownload"
        self.relate_license(identity, "" if "" in licenses else " AND ".join(wrapped))
        return identity

    def relate_license(self, package: str, expression: str) -> None:
        """Declare and conclude the license of a package."""
        if expression and expression not in self.licenses:
            identity = f"{self.base}#license-{len(self.licenses)}"
            self.licenses[expression] = self.add(
                "simplelicensing_LicenseExpression", identity, simplelicensing_licenseExpression=expression
            )
        for kind in ("hasDeclaredLicense", "hasConcludedLicense"):
            self.relate(package, kind, self.licenses[expression] if expression else NO_ASSERTION)

    def relate(self, begin: str, kind: str, end: str) -> None:
        """Add a relationship."""
        identity = f"{self.base}#relation-{self.n_relations}"
        self.n_relations += 1
        self.add("Relationship", identity, **{"from": begin}, relationshipType=kind, to=[end])

    def finish(self, model: str) -> list[dict[str, Any]]:
        """Add the document element; return all elements."""
        members = [element["spdxId"] for element in self.elements if "spdxId" in element]
        self.add(
            "SpdxDocument",
            f"{self.base}#document",
            name=self.facts.info.release.name,
            rootElement=[model],
            element=members,
            profileConformance=["core", "software", "ai", "dataset", "simpleLicensing"],
        )
        return self.elements


def _entries(values: dict[str, Any]) -> list[dict[str, str]]:
    return [{"type": "DictionaryEntry", "key": key, "value": str(value)} for key, value in values.items()]
