"""Models of a Hugging Face hub as sources, `hf://org/name@revision`."""
