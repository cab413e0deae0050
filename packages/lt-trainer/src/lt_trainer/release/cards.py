"""Cards of a release: README.md (model card), DATA_CARD.md, CITATION.cff and mof.yml.

Pure functions of the facts. What is not known is said to be missing, or left out where the format has a place for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lt_trainer.release.data_files import SourceEntry
from lt_trainer.release.facts import CODE_LICENSE_TEXT, Facts, StoreFacts
from lt_trainer.release.markdown import code, paragraphs, plain, table
from lt_trainer.release.mof import CLASS_NAMES, COMPONENTS, FRAMEWORK_DATE, FRAMEWORK_VERSION
from lt_trainer.release.scores import Score
from lt_trainer.release.yaml_text import to_yaml

_HUB_LICENSES = """
apache-2.0 bsd-2-clause bsd-3-clause cc-by-4.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
cdla-sharing-1.0 ecl-2.0 isc mit mpl-2.0 unlicense
"""
HUB_LICENSES = frozenset(_HUB_LICENSES.split())
"""Identifiers that the hub lists; any other license is `other` with a name."""
NOT_GIVEN = "not given"


def front_matter(facts: Facts) -> dict[str, Any]:
    """Return the metadata of the model card, as the Hugging Face hub reads it."""
    license_name = facts.info.component_license("Model parameters (Final)")
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "lt"],
    }
    if license_name:
        listed = license_name.lower() in HUB_LICENSES
        values["license"] = license_name.lower() if listed else "other"
        if not listed:
            values["license_name"] = license_name.lower().replace(" ", "-")
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": "token-store", "name": result.name or "validation"},
            "metrics": [
                {"type": kind, "name": title, "value": value}
                for kind, title, value in (
                    ("loss", "loss, nats per token", result.loss),
                    ("bits_per_byte", "bits per byte", result.bits_per_byte),
                )
                if value is not None
            ],
        }
        for result in facts.validation
    ]
    results += [
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": "token-store" if score.kind == "store" else score.name, "name": score.name},
            "metrics": [{"type": metric, "value": value} for metric, value in score.metrics.items()],
        }
        for score in whole_scores(facts)
    ]
    if results:
        values["model-index"] = [{"name": facts.info.release.name, "results": results}]
    return values


def model_card(facts: Facts) -> str:
    """Return README.md."""
    info, openness = facts.info.release, facts.openness
    tokens = facts.trained_tokens
    rows: list[tuple[str, object]] = [
        ("architecture", "Llama (decoder-only transformer)"),
        ("parameters", f"{facts.n_parameters:,}"),
        ("layers, width, heads (key/value)", _shape(facts)),
        ("vocabulary", f"{facts.model['vocab_size']:,}"),
        ("rows", f"{facts.recipe['data']['seq_len']:,} positions, packed as {plain(facts.recipe['data']['packing'])}"),
        ("steps", describe_steps(facts)),
        ("tokens trained on", f"{tokens:,}" if tokens is not None else "not every step was logged"),
    ]
    if facts.train:
        rows.append(("last training loss", f"{facts.train[-1]['loss']:.6g} nats per token"))
    if facts.energy_kwh is not None:
        rows.append(("energy of the GPUs", f"{facts.energy_kwh:.6g} kWh"))
    rows += [
        ("license of the weights", plain(facts.info.component_license("Model parameters (Final)") or NOT_GIVEN)),
        ("openness", f"{openness.name} of the Model Openness Framework {FRAMEWORK_VERSION} (`mof.yml`)"),
    ]
    parts = [
        f"---\n{to_yaml(front_matter(facts))}---\n\n# {plain(info.name)}\n\n",
        f"{paragraphs(info.description) or 'No description was given.'}\n\n",
        table(("", ""), rows),
        _evaluation_section(facts),
        "\n## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("model")\n'
        'tokenizer = AutoTokenizer.from_pretrained("model")\n```\n',
        "\nIt is a base model: it continues text, and was not trained to follow instructions or to refuse. It repeats\n"
        "what its data says; DATA_CARD.md lists the data.\n",
        _contents_section(facts),
        _openness_section(facts),
        "\n## Check and repeat\n\n```\nlt release verify .\nlt release reproduce . --steps 20\n```\n\n"
        "`COMMANDS.md` has every command by hand.\n",
    ]
    return "".join(parts)


def describe_steps(facts: Facts) -> str:
    """Return the step of the final weights, and that of the recipe if the run has not reached it."""
    planned, step = int(facts.recipe["schedule"]["max_steps"]), facts.provenance.step
    return f"{step:,}" + (f" of {planned:,} in the recipe: the run was not completed" if step < planned else "")


def _shape(facts: Facts) -> str:
    model = facts.model
    return (
        f"{model['num_hidden_layers']}, {model['hidden_size']:,}, {model['num_attention_heads']} "
        f"({model['num_key_value_heads']})"
    )


def whole_scores(facts: Facts) -> list[Score]:
    """Return the scores on whole tasks and stores that have a number."""
    return [score for score in facts.scores if not score.group and score.metrics]


def _evaluation_section(facts: Facts) -> str:
    text = "\n## Evaluation\n"
    if facts.validation:
        rows = [
            (
                plain(result.name or "validation"),
                result.step,
                f"{result.loss:.6g}",
                "" if result.bits_per_byte is None else f"{result.bits_per_byte:.6g}",
                f"{result.tokens:,}",
            )
            for result in facts.validation
        ]
        text += "\n" + table(("validation set", "step", "nats per token", "bits per byte", "tokens"), rows)
    if facts.scores:
        text += "\n" + score_table(whole_scores(facts))
    if not facts.validation and not facts.scores:
        text += "\nThe run has no validation, and no evaluation results of these weights are here.\n"
    folders = sorted({path.rpartition("/")[0] for path in facts.result_files if path != "results/validation.json"})
    return text + (f"\nFiles: {', '.join(map(code, folders))}.\n" if folders else "")


def score_table(scores: Sequence[Score]) -> str:
    """Return scores as a Markdown table."""
    rows = [
        (
            plain(f"{score.name}, {score.group}" if score.group else score.name),
            "" if score.n_items is None else f"{score.n_items:,} {'tokens' if score.kind == 'store' else 'items'}",
            plain(score.text),
            code(score.file),
        )
        for score in scores
    ]
    return table(("task or store", "size", "result ± standard error", "from"), rows)


def _contents_section(facts: Facts) -> str:
    rows: list[tuple[str, str]] = [
        ("model/", f"weights after step {facts.provenance.step}, config, tokenizer"),
        ("checkpoints/", f"weights after steps {', '.join(map(str, facts.provenance.earlier_steps))}")
        if facts.provenance.earlier_steps
        else ("checkpoints/", "none: no earlier weights are released"),
        ("recipe/", "every setting with its origin"),
        ("data/, sources/", "manifests, packs, tokenizer; tokens and texts as far as their licenses allow"),
        ("run/", "metrics, events and samples of the machine"),
        ("environment/, wheels/", "packages with hashes, Python, machine; lt itself"),
    ]
    rows += [("results/", "validation and evaluation")] if facts.result_files else []
    removed = facts.provenance.removed_steps
    gone = (
        f"\nCheckpoints of steps {', '.join(map(str, removed))} were saved and removed before this release was made.\n"
        if removed
        else ""
    )
    return "\n## Contents\n\n" + table(("folder", "what"), rows) + gone


def _openness_section(facts: Facts) -> str:
    openness = facts.openness
    number = openness.class_number
    following = number - 1 if number else 3
    text = f"\n## Openness\n\nThis release reaches **{openness.name}**.\n"
    if following:
        text += f"\nFor {CLASS_NAMES[following]} it lacks:\n\n"
        text += "".join(f"- {plain(reason)}\n" for reason in openness.missing[following])
    return text


def data_card(facts: Facts) -> str:
    """Return DATA_CARD.md."""
    parts = [f"# Data of {plain(facts.info.release.name)}\n"]
    for store in facts.stores:
        parts.append(_store_section(store, [entry for entry in facts.sources if entry.store == store.name]))
    if not facts.stores:
        kind = plain(facts.recipe["data"].get("loader") or "random ids")
        parts.append(f"\nTraining rows are from {kind}; there is no token store.\n")
    if facts.tasks:
        rows = [
            (
                plain(task.name),
                f"{task.items:,}",
                "generated by lt" if task.is_generated else plain(task.license or NOT_GIVEN),
                code(task.file) if task.file else plain(task.url or ("" if task.is_generated else "no")),
            )
            for task in facts.tasks
        ]
        parts.append("\n## Tasks of the evaluation\n\n" + table(("task", "items", "license", "where"), rows))
    missing = [
        *_missing_licenses(facts.sources),
        *(f"- {plain(task.problem)}\n" for task in facts.tasks if task.problem),
    ]
    parts.append("\n## What is missing\n\n" + ("".join(missing) if missing else "Every source has a license.\n"))
    return "".join(parts)


def _missing_licenses(sources: Sequence[SourceEntry]) -> Iterator[str]:
    for entry in sources:
        if not entry.license:
            yield f"- {plain(entry.path)}: no license was given\n"
        elif not entry.redistribute:
            yield f"- {plain(entry.path)}: may not be redistributed, so neither it nor tokens of its store are here\n"
        elif not entry.file:
            yield f"- {plain(entry.path)}: not in this release: {plain(entry.left_out)}\n"


def _store_section(store: StoreFacts, sources: Sequence[SourceEntry]) -> str:
    manifest, pack = store.manifest, store.pack
    rows: list[tuple[str, object]] = [
        ("field of the recipe", code(store.field)),
        ("documents", f"{manifest['documents']:,}"),
        ("tokens", f"{manifest['tokens']:,}"),
        ("bytes of text", f"{manifest['text_bytes']:,}"),
        ("tokenizer", f"{code(manifest['tokenizer']['name'])}, {manifest['tokenizer']['vocab_size']:,} ids"),
        ("BOS and EOS", plain(f"{manifest['bos']}, {manifest['eos']}")),
        ("rows", f"{pack['rows']:,} of {pack['seq_len']:,} positions, mode {plain(pack['mode'])}"),
        ("fingerprint", code(manifest["fingerprint"])),
        ("tokens in this release", "yes" if store.has_tokens else "no"),
    ]
    if store.weight is not None:
        rows.append(("weight in the mixture", f"{store.weight:g}"))
    for reason, totals in manifest["left_out"].items():
        rows.append((plain(f"left out: {reason}"), f"{totals['documents']:,} documents"))
    if manifest.get("map"):
        rows.append(
            (
                "function over the records",
                f"{code(manifest['map']['function'])}, {plain(manifest['map']['sha256'][:16])}",
            )
        )
    listed = [
        (
            code(entry.path),
            f"{entry.bytes:,}",
            "" if entry.documents is None else f"{entry.documents:,}",
            "" if entry.tokens is None else f"{entry.tokens:,}",
            plain(entry.license or NOT_GIVEN),
            "yes" if entry.redistribute else "no",
            code(entry.file) if entry.file else plain(entry.url or "no"),
        )
        for entry in sources[:50]
    ]
    head = ("source", "bytes", "documents", "tokens", "license", "redistribution", "where")
    more = f"\nand {len(sources) - 50} more in `data/sources.jsonl`\n" if len(sources) > 50 else ""
    sources_table = table(head, listed) + more if listed else "The store does not list its sources.\n"
    return f"\n## {plain(store.name)}\n\n" + table(("", ""), rows) + "\n" + sources_table


def citation(facts: Facts) -> str:
    """Return CITATION.cff (version 1.2.0); without authors the producer is named."""
    info = facts.info.release
    names = info.authors or (info.producer,)
    values: dict[str, Any] = {
        "cff-version": "1.2.0",
        "message": "If you use this model, please cite it as below.",
        "title": info.name,
        "type": "software",
        "authors": [{"name": name} for name in names],
        "date-released": facts.provenance.date,
    }
    if info.version:
        values["version"] = info.version
    if info.url:
        values["url"] = info.url
    license_name = facts.info.component_license("Model parameters (Final)")
    if license_name and " " not in license_name and not license_name.startswith("LicenseRef-"):
        values["license"] = license_name
    return to_yaml(values)


def _license_text(facts: Facts, license_name: str | None) -> str | None:
    """Return the file of the release that has the text of a license; None without one."""
    return CODE_LICENSE_TEXT if license_name == facts.code_license else None


def mof_document(facts: Facts) -> str:
    """Return mof.yml: the framework's document, and lt's own part with the class and what is missing."""
    info, openness = facts.info, facts.openness
    paths = {component.name: component for component in facts.components}
    components = []
    for name, component in paths.items():
        if not component.paths:
            continue
        components.append(
            {
                "name": name,
                "description": f"{COMPONENTS[name].content}, needed for {CLASS_NAMES[COMPONENTS[name].class_number]}",
                "license": component.license or "unlicensed",
                "license_path": _license_text(facts, component.license),
                "component_path": component.paths[0],
            }
        )
    document = {
        "framework": {"name": "Model Openness Framework", "version": FRAMEWORK_VERSION, "date": FRAMEWORK_DATE},
        "release": {
            "name": info.release.name,
            "version": info.release.version,
            "license": {
                kind: {"name": info.licenses.get(kind), "path": _license_text(facts, info.licenses.get(kind))}
                for kind in ("distribution", "code", "data", "document")
            },
            "date": facts.provenance.date,
            "type": "language",
            "architecture": "transformer decoder",
            "treatment": "pre-trained",
            "origin": info.release.url,
            "producer": info.release.producer,
            "contact": "",
            "components": components,
        },
        "evaluation": {
            "class": openness.class_number,
            "class_name": openness.name,
            "missing": {CLASS_NAMES[number]: list(reasons) for number, reasons in openness.missing.items() if reasons},
            "remarks": list(openness.remarks),
        },
    }
    return to_yaml(document)
