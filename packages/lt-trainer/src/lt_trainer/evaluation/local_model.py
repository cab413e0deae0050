"""Model on one device for scoring and generation, of any format that lt-ckpt reads.

A run directory stands for its newest valid checkpoint. Bytes that have a checksum are compared with it, and all are
hashed (`weight_hashes`). Weights are cast to the dtype of the computation as they are read. Needs torch
(`lt-trainer[torch]`); no engine, no process group, no optimizer state.

Cost: memory for the weights in their dtype, and on the way to a device for one of them on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lt_ckpt import CheckpointError, open_source
from lt_ckpt.source import TensorReader
from lt_data import Tokenizer
from lt_data.display.terminal import echo_error
from lt_model import DocumentBoundaries, LlamaConfig, config_from_hf, linear_label_scores
from lt_model.llama import Llama
from lt_trainer.engine import Control, SoloControl, StepBatch, Topology
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.evaluation.scorer import EvaluationError
from lt_trainer.evaluation.weight_hashes import hash_tensor, hash_weights
from lt_trainer.torch import DTYPE_CODES, cpu_multiplies_bfloat16, micro_batches_to_device

TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Model for inference on one device, with its tokenizer and source; a `Scorer`."""

    model: Llama
    tokenizer: Tokenizer
    source: Path
    weights_sha256: str
    """Hash of the weights as they were read, before the cast (`hash_weights`)."""
    step: int | None = None
    """Step of a checkpoint."""
    topology: Topology = field(default=Topology(rank=0, world_size=1, dp_rank=0, dp_size=1))
    control: Control = field(default_factory=SoloControl)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and computation."""
        return self.model.lm_head.weight.dtype

    @torch.no_grad()
    def score(self, batch: StepBatch) -> PositionScores:
        """Return the log-probability of each label and whether it is the greedy choice."""
        (n_micro, n_rows, seq_len), found = batch.labels.shape, []
        tensors = (micro_batches_to_device(a, self.device) for a in (batch.input_ids, batch.position_ids, batch.labels))
        for cu_seqlens, ids, positions, labels in zip(batch.cu_seqlens, *tensors, strict=True):
            cu_seqlens = cu_seqlens[: np.searchsorted(cu_seqlens, n_rows * seq_len) + 1]
            hidden = self.model.hidden_states(
                ids,
                position_ids_BT=positions,
                boundaries=DocumentBoundaries(torch.from_numpy(cu_seqlens.copy()), n_rows, seq_len),
            )
            scores = linear_label_scores(hidden, self.model.lm_head.weight, labels)
            found.append((scores.log_probs.cpu().numpy(), scores.is_greedy.cpu().numpy()))
        assert len(found) == n_micro
        log_probs, is_greedy = (np.stack(arrays) for arrays in zip(*found, strict=True))
        return PositionScores.at_positions(batch, np.arange(batch.labels.size), log_probs, is_greedy)


def load_model(path: Path, *, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """Load a model for inference.

    Args:
        path: checkpoint, run directory or model of another format.
        device: torch's name of a device; "auto": the first GPU if there is one, else the CPU.
        dtype: float32, bfloat16 or float64; "auto": bfloat16 on a GPU and on a CPU that multiplies it, as in runs,
            else float32.

    Raises:
        CheckpointError: nothing at `path` can be loaded, or it is damaged.
        EvaluationError: no such device, or no such dtype.
    """
    target = _find_device(device)
    compute_dtype = _find_dtype(dtype, target)
    source = open_source(path)
    for sentence in source.fallbacks:
        echo_error(sentence)
    assert source.config is not None, "open_source requires a config"
    weights = source.weights
    tensors: dict[str, torch.Tensor] = {}
    hashes: dict[str, str] = {}
    with TensorReader(source.root, source.find_checksums) as reader:
        for name, spec in weights.specs.items():
            raw = reader.read(weights, name)
            hashes[name] = hash_tensor(spec.dtype, spec.shape, raw.data)
            tensors[name] = _tensor(raw, spec.dtype, spec.shape).to(target, compute_dtype)
        reader.finish()
    return LoadedModel(
        model=_build(config_from_hf(dict(source.config)), tensors),
        tokenizer=_tokenizer(source.path, source.aux_files),
        source=source.path,
        weights_sha256=hash_weights(hashes),
        step=source.format_info.get("step"),
    )


def _find_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:  # torch without CUDA fails an assertion of its own
        problem = str(exc).splitlines()[0]
        raise EvaluationError(
            f"device {name!r} cannot be used here: {problem}; pass cpu, cuda, cuda:N or auto"
        ) from exc
    return device


def _find_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        has_bfloat16 = device.type == "cuda" or (device.type == "cpu" and cpu_multiplies_bfloat16())
        return torch.bfloat16 if has_bfloat16 else torch.float32
    if name not in COMPUTE_DTYPES:
        raise EvaluationError(f"dtype {name!r}: unknown; pass one of auto, {', '.join(COMPUTE_DTYPES)}")
    return COMPUTE_DTYPES[name]


def _tokenizer(path: Path, files: Mapping[str, bytes]) -> Tokenizer:
    if not files:
        raise CheckpointError(f"{path} has no tokenizer files; copy tokenizer.json and tokenizer_config.json into it")
    return Tokenizer.from_bytes(files)


def _tensor(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(TORCH_DTYPES[dtype]).view(shape)


def _build(config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    if config.tie_word_embeddings:  # saved once
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True, strict=True)
    return model.eval()
