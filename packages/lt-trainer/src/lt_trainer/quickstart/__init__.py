"""`lt quickstart`: from text to a trained Llama in Hugging Face format, without downloads, by lt's own commands."""
