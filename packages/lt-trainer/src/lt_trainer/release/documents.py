"""All documents of a release, as functions of its facts.

What is made here is made again by `verify` and compared byte for byte.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from lt_trainer.release import plots
from lt_trainer.release.cards import citation, data_card, model_card, mof_document
from lt_trainer.release.commands import command_page
from lt_trainer.release.croissant import croissant_document
from lt_trainer.release.cyclonedx import cyclonedx_document
from lt_trainer.release.facts import Facts
from lt_trainer.release.filtering import PLACEHOLDERS
from lt_trainer.release.markdown import code
from lt_trainer.release.report import report_page
from lt_trainer.release.spdx import spdx_document


def filter_page(facts: Facts) -> str:
    """Return FILTERED.md: what was replaced before the files were hashed."""
    counts = facts.provenance.filtered
    text = (
        "# What was filtered\n\nBefore anything was hashed, these parts of the run's texts were replaced; the values\n"
        "are not kept anywhere in this release. Logs of the ranks are not released. Source files and tokens are as\n"
        "they were: what their documents say is not filtered.\n\n"
    )
    text += "".join(f"- `{name}`: {what}; {counts.get(name, 0)} times\n" for name, what in PLACEHOLDERS.items())
    if facts.provenance.changed_fields:
        text += (
            "\nFields of the recipe that were changed, so that it runs in this folder and writes nothing elsewhere:\n\n"
        )
        text += "".join(
            f"- {code(name)} = {code(repr(value))}\n" for name, value in facts.provenance.changed_fields.items()
        )
    return text


DOCUMENTS: Mapping[str, Callable[[Facts], str]] = {
    "README.md": model_card,
    "DATA_CARD.md": data_card,
    "REPORT.md": report_page,
    "COMMANDS.md": command_page,
    "CITATION.cff": citation,
    "FILTERED.md": filter_page,
    "mof.yml": mof_document,
    "bom.cdx.json": cyclonedx_document,
    "ai.spdx3.json": spdx_document,
    "croissant.json": croissant_document,
}
"""File of the bundle → its text."""
PLOTS = "plots.py"


def render_documents(facts: Facts) -> dict[str, str]:
    """Return all documents, the figures and the script that draws them, by file of the bundle."""
    texts = {name: render(facts) for name, render in DOCUMENTS.items()}
    texts |= {f"figures/{name}": text for name, text in facts.figures.items()}
    return texts | {PLOTS: Path(plots.__file__).read_text(encoding="utf-8")}
