"""Meta's order of query and key rows: the inverse of `permute` in transformers' convert_llama_weights_to_hf.py."""

import torch

from lt_model import ModelConfig


def meta_rows(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """What Meta's file has of a tensor of Hugging Face's."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    n_heads = config.n_heads if "q_proj" in name else config.n_kv_heads
    rows, columns = tensor.shape
    return tensor.view(n_heads, 2, rows // n_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
