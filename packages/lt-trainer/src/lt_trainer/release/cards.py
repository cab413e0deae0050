"""Documents of a release: README.md (model card), DATA_CARD.md, REPORT.md and mof.yml.

Functions of the facts, with the text of templates/. What is not known is said to be missing, or left out where the
format has a place for it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from lt_data.display.terminal import escape_controls
from lt_trainer.config.recipe import is_default
from lt_trainer.config.section import flatten
from lt_trainer.release.bundle import CODE_LICENSE
from lt_trainer.release.facts import Facts, StoreFacts
from lt_trainer.release.markdown import plain, table
from lt_trainer.release.mof import CLASS_NAMES, COMPONENTS, FRAMEWORK_DATE, FRAMEWORK_VERSION
from lt_trainer.run_directory.evaluation_results import format_metrics

_HUB_LICENSES = """
apache-2.0 bsd-2-clause bsd-3-clause cc-by-4.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
cdla-sharing-1.0 ecl-2.0 isc mit mpl-2.0 unlicense
"""
HUB_LICENSES = frozenset(_HUB_LICENSES.split())
"""Identifiers that the hub lists; any other license is `other` with a name."""
NOT_GIVEN = "not given"
MAX_SOURCES = 50
"""Sources of a store that the data card lists."""


def make_documents(facts: Facts) -> dict[str, str]:
    """Return file of the release → its text."""
    given = facts.info.component_license("Model parameters (Final)") or NOT_GIVEN
    description = plain(facts.info.release.description) or "No description was given."
    card = _fill("README.md", facts, description=description, license=plain(given), **_tokenizer_parts(facts))
    return {
        "README.md": _front_matter(facts) + card,
        "DATA_CARD.md": _data_card(facts),
        "REPORT.md": _fill("REPORT.md", facts, **_report_parts(facts)),
        "mof.yml": _mof_document(facts),
    }


def _tokenizer_parts(facts: Facts) -> dict[str, str]:
    """Return the class that loads the tokenizer with the ids of training, and why it is not AutoTokenizer."""
    if not facts.tokenizer_problem:
        return {"tokenizer_class": "AutoTokenizer", "tokenizer_note": ""}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "tokenizer_note": f"{plain(facts.tokenizer_problem)}.\n\n"}


def _fill(template: str, facts: Facts, **parts: Any) -> str:
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    planned, step, tokens = int(facts.recipe["schedule"]["max_steps"]), facts.release.step, facts.trained_tokens
    common = {
        "name": plain(facts.info.release.name),
        "steps": f"{step:,}" + (f" of {planned:,} in the recipe: the run was not completed" if step < planned else ""),
        "tokens": "not every step was logged: unknown" if tokens is None else f"{tokens:,}",
        "evaluation": _evaluation(facts),
    }
    return text.format(facts=facts, **{**common, **parts})


def _front_matter(facts: Facts) -> str:
    """Return the metadata of the model card, as the Hugging Face hub reads it."""
    given = facts.info.component_license("Model parameters (Final)").lower().replace(" ", "-")
    numbers = [(record.get("val_set", "validation"), "loss", record["val_loss"]) for record in facts.validation]
    numbers += [(score.name, metric, value) for score in facts.scores for metric, value in score.metrics.items()]
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="lt",
            dataset_name=escape_controls(name, keep=""),
            metric_type=escape_controls(metric, keep=""),
            metric_value=value,
        )
        for name, metric, value in numbers
    ]
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[str(facts.model["model_type"]), "lt"],
        license=given if given in HUB_LICENSES else "other",
        license_name=None if given in HUB_LICENSES else given or NOT_GIVEN,
        model_name=facts.info.release.name,
        eval_results=results or None,
    )
    return f"---\n{front.to_yaml()}\n---\n\n"


def _list(texts: Iterable[object]) -> str:
    return "".join(f"- {plain(text)}\n" for text in texts)


def _evaluation(facts: Facts) -> str:
    rows = [
        (plain(record.get("val_set", "validation")), record["val_tokens"], f"loss {record['val_loss']:.6g}")
        for record in facts.validation
    ]
    rows += [(plain(score.name), score.size, plain(format_metrics(score.metrics))) for score in facts.scores]
    return table(("set or task", "tokens or items", "result ± standard error"), rows) if rows else "There is none.\n"


def _data_card(facts: Facts) -> str:
    kind = plain(facts.recipe["data"].get("loader") or "random ids")
    stores = "".join(_store_section(facts, store) for store in facts.stores)
    return _fill(
        "DATA_CARD.md",
        facts,
        stores=stores or f"\nTraining rows are from {kind}; there is no token store.\n",
        missing=_list(entry.problem for store in facts.stores for entry in store.sources if entry.problem)
        or "Every source has an open license.",
    )


def _store_section(facts: Facts, store: StoreFacts) -> str:
    sources = [
        (
            *(plain(entry.path), entry.bytes, entry.documents, entry.tokens, plain(entry.license or NOT_GIVEN)),
            plain(entry.url or "no") if entry.left_out else plain(entry.file),
        )
        for entry in store.sources[:MAX_SOURCES]
    ]
    return _fill(
        "STORE.md",
        facts,
        store=store,
        name=plain(store.name),
        field=plain(facts.release.stores[store.name].field),
        tokenizer=plain(store.manifest["tokenizer"]["name"]),
        left_out=plain({why: total["documents"] for why, total in store.manifest["left_out"].items()} or "none"),
        sources=table(("source", "bytes", "documents", "tokens", "license", "where"), sources),
        n_sources=len(store.sources),
    )


def _report_parts(facts: Facts) -> dict[str, str]:
    values = flatten(facts.recipe)
    given = [(plain(name), plain(values.get(name))) for name, origin in facts.origins.items() if not is_default(origin)]
    train = [record for record in facts.train if record["loss"] is not None]
    losses = [(record["step"], f"{record['loss']:.6g}") for record in (*train[:1], *train[-1:])]
    shape, experts = facts.shape, ""
    if shape.has_experts:
        experts = f"; {shape.n_experts} experts of width {shape.expert_size:,}, {shape.experts_per_token} for a token"
    return {
        "experts": experts,
        "settings": table(("field", "value"), given),
        "results": table(("step", "training loss, nats per token"), losses),
    }


def _mof_document(facts: Facts) -> str:
    """Return mof.yml: the framework's document, and lt's own part with the class and what is missing."""
    info, openness, release = facts.info, facts.openness, facts.release
    texts = {release.code_license: CODE_LICENSE}  # of no other license is the text in a release
    components = [
        {
            "name": part.name,
            "description": f"{COMPONENTS[part.name].content}, for {CLASS_NAMES[COMPONENTS[part.name].class_number]}",
            "license": part.license or "unlicensed",
            "license_path": texts.get(part.license),
            "component_path": part.paths[0],
        }
        for part in facts.components
    ]
    kinds = info.licenses.model_dump(include={"distribution", "code", "data", "document"})
    document = {
        "framework": {"name": "Model Openness Framework", "version": FRAMEWORK_VERSION, "date": FRAMEWORK_DATE},
        "release": {
            **info.release.model_dump(include={"name", "version", "producer"}),
            "license": {kind: {"name": name, "path": texts.get(name)} for kind, name in kinds.items()},
            "date": release.date,
            "type": "language",
            "architecture": "transformer decoder",
            "treatment": "pre-trained",
            "origin": info.release.url,
            "contact": "",
            "components": components,
        },
        "evaluation": {
            "class": openness.class_number,
            "class_name": openness.name,
            "missing": {CLASS_NAMES[number]: list(reasons) for number, reasons in openness.missing.items() if reasons},
        },
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
