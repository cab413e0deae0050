"""Models of a Hugging Face hub, `hf://org/name@revision`, down and up by huggingface_hub."""
