"""Text generation from a checkpoint, a run directory (its newest valid one) or a Hugging Face folder.

Needs torch (`lt-trainer[torch]`) and memory for the weights; no engine, no process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lt_ckpt import CheckpointError, HFFolder, resolve_checkpoint
from lt_ckpt.discovery import describe_fallbacks
from lt_data import Tokenizer
from lt_data.display.terminal import echo_error
from lt_model import LlamaConfig, generate
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
    if (path / "config.json").is_file():
        folder = HFFolder.open(path)
        tensors = {name: _tensor(folder.read(name), folder.dtype(name), folder.shape(name)) for name in folder.names()}
        return LoadedModel(
            model=_build(folder.llama_config(), tensors),
            tokenizer=_tokenizer(path, folder.tokenizer_files()),
            source=path,
        )
    checkpoint, rejected = resolve_checkpoint(path)
    for sentence in describe_fallbacks(checkpoint, rejected):
        echo_error(sentence)
    config = LlamaConfig.from_dict(dict(checkpoint.manifest.model))
    tensors = {
        name: _tensor(
            checkpoint.read("weights", name),
            checkpoint.dtype("weights", name),
            checkpoint.global_shape("weights", name),
        )
        for name in checkpoint.names("weights")
    }
    return LoadedModel(
        model=_build(config, tensors),
        tokenizer=_tokenizer(checkpoint.path, checkpoint.tokenizer_files()),
        source=checkpoint.path,
    )


def _tokenizer(path: Path, files: dict[str, bytes]) -> Tokenizer:
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
