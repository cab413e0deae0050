"""bom.cdx.json: CycloneDX 1.7 bill of materials: model card, data sets and packages of a release."""

import json
import uuid
from typing import Any

from lt_trainer.release.cards import whole_scores
from lt_trainer.release.facts import Facts

NAMESPACE = uuid.UUID("6f6a2f04-5b1e-5d0a-9a57-2b1d6f0f3b11")
"""Namespace of serial numbers, which depend on the weights alone."""


def cyclonedx_document(facts: Facts) -> str:
    """Return the text of bom.cdx.json."""
    info = facts.info.release
    serial = uuid.uuid5(NAMESPACE, " ".join(sorted(facts.weight_files.values())))
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": info.name,
        "version": info.version or "1",
        **_licenses(facts.info.component_license("Model parameters (Final)")),
        "modelCard": _model_card(facts),
    }
    if info.producer:
        model["manufacturer"] = {"name": info.producer}
    if info.description:
        model["description"] = info.description
    weights = [
        {
            "type": "file",
            "bom-ref": f"weights-{i}",
            "name": f"model/{name}",
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for i, (name, digest) in enumerate(sorted(facts.weight_files.items()))
    ]
    if weights:
        model["components"] = weights
    libraries = [
        {"type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version}
        | {"purl": f"pkg:pypi/{name}@{version}"}
        for name, version in facts.requirements.items()
    ]
    own = [
        {"type": "library", "bom-ref": name, "name": name, "version": version, **_licenses(facts.code_license)}
        for name, version in facts.provenance.lt.items()
    ]
    data = [_data_component(facts, name) for name in facts.provenance.stores]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "timestamp": f"{facts.provenance.date}T00:00:00Z",
            "tools": {
                "components": [
                    {"type": "application", "name": "lt-trainer", "version": facts.provenance.lt["lt-trainer"]}
                ]
            },
            "component": model,
        },
        "components": [*data, *own, *libraries],
        "dependencies": [
            {"ref": "model", "dependsOn": [*(component["bom-ref"] for component in data), *facts.provenance.lt]}
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _licenses(expression: str) -> dict[str, Any]:
    return {"licenses": [{"expression": expression}]} if expression else {}


def _model_card(facts: Facts) -> dict[str, Any]:
    metrics = [
        {"type": kind, "value": repr(value), "slice": result.name or "validation"}
        for result in facts.validation
        for kind, value in (("nats per token", result.loss), ("bits per byte", result.bits_per_byte))
        if value is not None
    ]
    metrics += [
        {"type": metric, "value": repr(value), "slice": score.name}
        for score in whole_scores(facts)
        for metric, value in score.metrics.items()
    ]
    card: dict[str, Any] = {
        "modelParameters": {
            "approach": {"type": "self-supervised"},
            "task": "text generation",
            "architectureFamily": "transformer decoder",
            "modelArchitecture": "Llama",
            "datasets": [{"ref": f"data-{name}"} for name in facts.provenance.stores],
            "inputs": [{"format": "text"}],
            "outputs": [{"format": "text"}],
        },
        "properties": [
            {"name": "lt:parameters", "value": str(facts.n_parameters)},
            {"name": "lt:steps", "value": str(facts.provenance.step)},
            {"name": "lt:mof-class", "value": facts.openness.name},
        ],
    }
    if metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    if facts.energy_kwh is not None:
        energy = {"value": facts.energy_kwh, "unit": "kWh"}
        provider = {"organization": {"name": "not given"}, "energySource": "unknown", "energyProvided": energy}
        consumption = {"activity": "training", "energyProviders": [provider], "activityEnergyCost": energy}
        card["considerations"] = {"environmentalConsiderations": {"energyConsumptions": [consumption]}}
    return card


def _data_component(facts: Facts, name: str) -> dict[str, Any]:
    (store,) = (store for store in facts.stores if store.name == name)
    licenses = sorted({entry.license for entry in facts.sources if entry.store == name and entry.license})
    wrapped = [f"({text})" if " " in text and len(licenses) > 1 else text for text in licenses]
    manifest = store.manifest
    return {
        "type": "data",
        "bom-ref": f"data-{name}",
        "name": name,
        "version": manifest["fingerprint"][:16],
        **_licenses(" AND ".join(wrapped)),
        "data": [
            {
                "type": "dataset",
                "name": name,
                "description": f"{manifest['documents']} documents, {manifest['tokens']} tokens of text",
            }
        ],
        "properties": [
            {"name": "lt:fingerprint", "value": manifest["fingerprint"]},
            {"name": "lt:tokens-included", "value": str(store.has_tokens).lower()},
        ],
    }
