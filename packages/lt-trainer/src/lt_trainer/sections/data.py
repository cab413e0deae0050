"""`[data]`: what is read, and how rows are made of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
KINDS = ("store",)
"""The fields of which one says what is trained on."""


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """`[data.validation_sets.NAME]`: one more set to validate on."""

    store: str = option("", "token store; required")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, and how rows are made of it."""

    store: str = option("", "token store to train on, made by `lt data prepare`; required")
    validation: str = option("", "token store for the validation loss")
    validation_sets: Mapping[str, ValidationOptions] = field(default_factory=dict)
    seq_len: int = option(4096, "positions in a row", unit="tokens", hp="SEQ_LEN")
    pack: Literal["bfd", "concat"] = option("bfd", "best-fit rows of whole documents, or documents joined and cut")
    document_mask: bool = option(True, "positions see only their own document")
    shuffle: bool = option(True, "rows in a new random order each epoch")
    tokenizer: str = option(
        "mindbeam-ai/Litespark",
        "name of the tokenizer; the store carries its own, so this is only compared with it when it is given",
        hp="TOKENIZER",
    )

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least(self, "data", 2, "seq_len")
        if not self.tokenizer:
            raise wrong(self, "data", "tokenizer", "the name is empty", "leave it out to use the store's tokenizer")
        self._settle("validation_sets")
        for name, entry in self.validation_sets.items():
            _needs_store(f"data.validation_sets.{name}", entry.store)

    def _settle(self, table: str) -> None:
        """Check the names and types of a table's sections, and put them into the order of their names."""
        entries: Mapping[str, Any] = getattr(self, table)
        for name, entry in entries.items():
            if not NAME.fullmatch(name):
                raise RecipeError(
                    "not a name: letters, digits, '_' and '-', the first a letter or a digit",
                    values={f"data.{table}": name},
                    remedy=f"write [data.{table}.NAME] with another name",
                )
            check_types(entry, f"data.{table}.{name}")
        object.__setattr__(self, table, {name: entries[name] for name in sorted(entries)})


def _needs_store(section: str, store: str) -> None:
    if not store:
        raise RecipeError("this section needs data", values={f"{section}.store": store}, remedy="set it to a store")
