"""Papers as PDF: the one module that knows pypdf. A file is one document, its pages joined by line feeds.

What pypdf finds is what the file says about its letters; a scanned page has none, and a paper of scanned pages only is
an empty document. The whole file is in memory.
"""

import io
import logging
from collections.abc import Iterator
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad, Record, whole

# A damaged file lets pypdf fall over anything: a missing key, a wrong type, a number too big, endless nesting.
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    EOFError,
)


def read_pdf(stream: io.BufferedIOBase, options: ReadOptions, start: int) -> Iterator[Record]:
    """The one record of a PDF file."""
    try:
        import pypdf
    except ImportError as exc:
        raise DataError('.pdf files need the pypdf package: pip install "lt-data[pdf]"') from exc
    content = stream.read()
    if start == 0:
        logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every oddity that it puts right itself
        yield Record(1, "", _text(pypdf, content))


def _text(pypdf: Any, content: bytes) -> str | Bad:
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            return Bad("encrypted PDF", "the PDF needs a password; remove it, or leave the file out")
        return whole("\n".join(page.extract_text() for page in reader.pages))
    except (pypdf.errors.PyPdfError, *_FAULTS) as exc:
        kind = type(exc).__name__
        return Bad("damaged PDF", f"pypdf cannot read it ({kind}: {exc}); fetch it again, or leave it out")
