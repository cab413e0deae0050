"""Text generation from a model in any format that lt-ckpt reads.

A run directory stands for its newest valid checkpoint. Bytes that have a checksum are compared with it.

Needs torch (`lt-trainer[torch]`) and memory for the weights; no engine, no process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lt_ckpt import CheckpointError, open_source
from lt_ckpt.source import TensorReader
from lt_data import Tokenizer
from lt_data.display.terminal import echo_error
from lt_model import LlamaConfig, config_from_hf, generate
from lt_model.llama import Llama
from lt_trainer.torch import DTYPE_CODES

TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Model on the CPU in float32, with its tokenizer and source."""

    model: Llama
    tokenizer: Tokenizer
    source: Path


def load_model(path: Path) -> LoadedModel:
    """Load a model for inference.

    Raises:
        CheckpointError: nothing at `path` can be loaded, or it is damaged.
    """
    source = open_source(path)
    for sentence in source.fallbacks:
        echo_error(sentence)
    assert source.config is not None, "open_source requires a config"
    weights = source.weights
    with TensorReader(source.root, source.find_checksums) as reader:
        tensors = {
            name: _tensor(reader.read(weights, name), spec.dtype, spec.shape) for name, spec in weights.specs.items()
        }
        reader.finish()
    return LoadedModel(
        model=_build(config_from_hf(dict(source.config)), tensors),
        tokenizer=_tokenizer(source.path, source.aux_files),
        source=source.path,
    )


def _tokenizer(path: Path, files: Mapping[str, bytes]) -> Tokenizer:
    if not files:
        raise CheckpointError(f"{path} has no tokenizer files; copy tokenizer.json and tokenizer_config.json into it")
    return Tokenizer.from_bytes(files)


def _tensor(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(TORCH_DTYPES[dtype]).view(shape).to(torch.float32)


def _build(config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    if config.tie_word_embeddings:  # saved once
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True, strict=True)
    return model.eval()


def generate_text(
    loaded: LoadedModel, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> str:
    """Continue `prompt`; stop at the end-of-text id or at the model's context length.

    Returns:
        The continuation, without the prompt.
    """
    tokenizer = loaded.tokenizer
    ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
    if tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise CheckpointError("the prompt is empty and the tokenizer has no beginning-of-text id; pass a prompt")
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    with torch.no_grad():
        new_ids = generate(
            loaded.model,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stops,
        )
    return tokenizer.decode([i for i in new_ids if i not in stops])
