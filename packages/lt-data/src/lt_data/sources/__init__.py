"""Sources of text and of ready-made ids: what can be read, in which order, and what happens to what cannot.

`document.py` is what comes out, `options.py` what a caller chooses, `listing.py` finds files and puts them in order,
`reader.py` walks them, counts and hashes. One module per kind of file yields its records (`formats.py` has the table),
one module per heavy dependency: `parquet.py` (pyarrow), `zstd.py` (zstandard), `pdf.py` (pypdf), `hub.py` (datasets).
"""
