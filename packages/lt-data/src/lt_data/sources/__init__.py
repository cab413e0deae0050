"""Sources of text and ids: listing, order, formats, and the handling of bad input.

`document.py` defines the documents, `options.py` the options; `listing.py` lists files in order; `reader.py` reads,
counts and hashes them by files and ranges of them (`pieces.py`). One module per file format yields records: `lines.py`,
`tables.py` (pyarrow), `pdf.py` (pypdf), `hub.py` (datasets); `compression.py` decompresses files before.
"""
