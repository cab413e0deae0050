"""Hugging Face folders: config.json, safetensors and their index."""
