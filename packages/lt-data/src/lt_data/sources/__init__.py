"""Sources of text and ids: listing, order, formats, and the handling of bad input.

`document.py` defines the documents, `options.py` the options; `listing.py` lists files in order; `reader.py` reads,
counts and hashes them. One module per file format yields records (`formats.py` has the table), one module per heavy
dependency: `parquet.py` (pyarrow), `zstd.py` (zstandard), `pdf.py` (pypdf), `hub.py` (datasets).
"""
