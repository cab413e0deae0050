"""Model on one device for scoring and generation, of any format that lt-ckpt reads.

A run directory stands for its newest valid checkpoint. Bytes that have a checksum are compared with it, and all are
hashed (`weight_hashes`). Weights are cast to the dtype of the computation as they are read. Needs torch
(`lt-trainer[torch]`); no engine, no process group, no optimizer state.

Cost: memory for the weights in their dtype, and on the way to a device for one of them on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lt_ckpt import CheckpointError, open_source
from lt_ckpt.checksums import check_undamaged
from lt_data import Tokenizer
from lt_data.display.terminal import echo_error
from lt_data.tokenizing.files import MODEL_FILE
from lt_model import config_from_hf, param_specs
from lt_trainer.control import Control
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.evaluation.position_scores import PositionScores
from lt_trainer.evaluation.scorer import EvaluationError
from lt_trainer.evaluation.weight_hashes import hash_tensor, hash_weights

try:
    import torch
except ModuleNotFoundError as exc:
    raise EvaluationError("a model on one device needs torch: pip install 'lt-trainer[torch]'") from exc

from lt_model import DocumentBoundaries, linear_label_scores
from lt_model.decoder import Decoder
from lt_trainer.torch import DTYPE_CODES, cpu_multiplies_bfloat16, to_device

TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Model for inference on one device, with its tokenizer and source; a `Scorer`."""

    model: Decoder
    tokenizer: Tokenizer
    source: Path
    weights_sha256: str
    """Hash of the weights as they were read, before the cast (`hash_weights`)."""
    step: int | None = None
    """Step of a checkpoint."""
    topology: Topology = field(default=Topology(rank=0, world_size=1, dp_rank=0, dp_size=1))
    control: Control = field(default_factory=Control)

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
        (_, n_rows, seq_len), found = batch.labels.shape, []
        tensors = (to_device(a, self.device) for a in (batch.input_ids, batch.position_ids, batch.labels))
        for cu_seqlens, ids, positions, labels in zip(batch.cu_seqlens, *tensors, strict=True):
            cu_seqlens = cu_seqlens[: np.searchsorted(cu_seqlens, n_rows * seq_len) + 1]
            boundaries = DocumentBoundaries(torch.from_numpy(cu_seqlens.copy()), n_rows, seq_len)
            hidden = self.model.hidden_states(ids, position_ids_BT=positions, boundaries=boundaries)
            softcap = self.model.config.logits_softcap
            scores = linear_label_scores(hidden, self.model.lm_head.weight, labels, softcap=softcap)
            found.append((scores.log_probs.cpu().numpy(), scores.is_greedy.cpu().numpy()))
        log_probs, is_greedy = (np.stack(arrays) for arrays in zip(*found, strict=True))
        return PositionScores.at_positions(batch.labels, np.arange(batch.labels.size), log_probs, is_greedy)


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
    has_bfloat16 = target.type == "cuda" or (target.type == "cpu" and cpu_multiplies_bfloat16())
    auto = torch.bfloat16 if has_bfloat16 else torch.float32
    compute_dtype = {"auto": auto, **COMPUTE_DTYPES}.get(dtype)
    if compute_dtype is None:
        raise EvaluationError(f"dtype {dtype!r}: unknown; pass one of auto, {', '.join(COMPUTE_DTYPES)}")
    source = open_source(path)
    for sentence in source.fallbacks:
        echo_error(sentence)
    if MODEL_FILE not in source.aux_files:
        raise CheckpointError(f"{source.path} has no {MODEL_FILE}; copy it and tokenizer_config.json into it")
    assert source.config is not None, "open_source requires a config"
    check_undamaged(source)
    config = config_from_hf(dict(source.config))
    kept_wide = {spec.name for spec in param_specs(config) if not spec.is_trained}
    tensors: dict[str, torch.Tensor] = {}
    hashes: dict[str, str] = {}
    for name, spec in source.weights.specs.items():
        raw = source.read(name)
        hashes[name] = hash_tensor(spec.dtype, spec.shape, raw.data)
        tensor = torch.from_numpy(raw).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        tensors[name] = tensor.to(target, torch.float32 if name in kept_wide else compute_dtype)
    with torch.device("meta"):
        model = Decoder(config)
    if model.config.tie_word_embeddings:  # saved once
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True, strict=True)
    return LoadedModel(
        model=model.eval(),
        tokenizer=Tokenizer.from_bytes(source.aux_files),
        source=source.path,
        weights_sha256=hash_weights(hashes),
        step=source.format_info.get("step"),
    )


def _find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as exc:  # torch without CUDA fails an assertion of its own
        raise EvaluationError(f"device {name!r} cannot be used here: {str(exc).splitlines()[0]}") from exc
