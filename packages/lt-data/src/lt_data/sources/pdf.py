"""PDF files, the only module that imports pypdf. A file is one document, its pages joined by newlines.

pypdf extracts embedded text; a scanned page has none, and a file of scanned pages only is an empty document. The whole
file is in memory.
"""

import io
import logging
from collections.abc import Iterator
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.json_lines import read_whole
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, SourceRecord, check_surrogates, too_large

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


def read_pdf(stream: io.BufferedIOBase, options: SourceOptions, start: int) -> Iterator[SourceRecord]:
    """Yield the single record of a PDF file."""
    try:
        import pypdf
    except ImportError as exc:
        raise DataError('.pdf files need the pypdf package: pip install "lt-data[pdf]"') from exc
    if start == 0:
        content = read_whole(stream, options.max_document_bytes, "PDF")
        logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of everything that it repairs itself
        value = content if isinstance(content, BadRecord) else _text(pypdf, content)
        is_large = isinstance(value, str) and len(value) > options.max_document_bytes
        yield SourceRecord(1, 0, too_large(options.max_document_bytes, "text") if is_large else value)


def _text(pypdf: Any, content: bytearray) -> str | BadRecord:
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            return BadRecord("encrypted PDF", "the PDF needs a password; remove it")
        return check_surrogates("\n".join(page.extract_text() for page in reader.pages))
    except (pypdf.errors.PyPdfError, *_FAULTS) as exc:
        kind = type(exc).__name__
        return BadRecord("damaged PDF", f"pypdf cannot read it ({kind}: {exc}); download it again")
