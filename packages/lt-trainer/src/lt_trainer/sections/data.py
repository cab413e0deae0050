"""`[data]`: what is read, and how rows are made of it."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is read, and how rows are made of it."""

    store: str = option("", "token store to train on, made by `lt data prepare`; required")
    validation: str = option("", "token store for the validation loss")
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
