"""The former place of lt_data.sources."""

from lt_data.sources.document import Document as Document
from lt_data.sources.reader import DocumentReader as DocumentReader
