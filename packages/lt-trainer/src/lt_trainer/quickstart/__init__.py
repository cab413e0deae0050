"""`lt quickstart`: from text to a trained Llama in Hugging Face format, without downloads.

Uses only the public API of the packages. One module per stage: `corpus` (documents), `stages` (tokenizer, stores,
packs, recipe, export), `training`, `logits`, `baselines`, `report`.
"""
