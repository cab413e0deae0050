"""Export and import of token stores in other formats: hf, megatron, smp, litespark.

One module per format, each with `min_bytes`, `write` and `read`; `export` and `import_tokens` are their common part.
docs/reference/data-formats.md specifies the mapping of each.
"""
