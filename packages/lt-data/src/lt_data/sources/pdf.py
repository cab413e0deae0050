"""PDF files, the only module that imports pypdf. A file is one document, its pages joined by newlines.

pypdf extracts embedded text; a scanned page has none, and a file of scanned pages only is an empty document. The whole
file is in memory.
"""

import io
import logging
from collections.abc import Iterator
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.lines import read_whole
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, SourceRecord, check_text

# On a damaged file pypdf may raise any of these.
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


def read_pdf(stream: io.BufferedIOBase, options: SourceOptions) -> Iterator[SourceRecord]:
    """Yield the single record of a PDF file."""
    try:
        import pypdf
    except ImportError as exc:
        raise DataError('.pdf files need the pypdf package: pip install "lt-data[pdf]"') from exc
    content = read_whole(stream, options.max_document_bytes, "PDF")
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of everything that it repairs itself
    text = content if isinstance(content, BadRecord) else _extract_text(pypdf, content)
    yield SourceRecord(0, check_text(text, options.max_document_bytes) if isinstance(text, str) else text)


def _extract_text(pypdf: Any, content: bytes) -> str | BadRecord:
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            return BadRecord("encrypted PDF", "the PDF needs a password; remove it")
        return "\n".join(page.extract_text() for page in reader.pages)
    except (pypdf.errors.PyPdfError, *_FAULTS) as exc:
        return BadRecord("damaged PDF", f"pypdf cannot read it ({type(exc).__name__}: {exc}); download it again")
