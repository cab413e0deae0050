"""Meta's own folders of Llama 1 to 3."""
