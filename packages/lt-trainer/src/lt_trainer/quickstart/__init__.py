"""`lt quickstart`: real text in, a trained Llama out as a Hugging Face model, on any machine, with nothing downloaded.

Everything goes through the public API of the packages; each stage's module does one thing and can be read alone:
`corpus` (documents), `stages` (tokenizer, stores, packs, training, export), `baselines`, `compare`, `report`.
"""
