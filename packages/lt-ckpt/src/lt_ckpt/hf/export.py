"""Export of a checkpoint's weights as a Hugging Face folder that `transformers` loads."""

import os
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.formats import ConvertOptions, convert_checkpoint
from lt_ckpt.hf.format import MAX_SHARD_BYTES
from lt_ckpt.llama_tensors import select_group
from lt_ckpt.lt_format import open_lt


def export_hf(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    group: str = "weights",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_overflow: bool = False,
    progress: files.ProgressCallback | None = None,
) -> Path:
    """Write the weights as a Hugging Face folder.

    The folder gets config.json, generation_config.json, model.safetensors or several files with their index, and the
    checkpoint's tokenizer files. A tied model has no lm_head.

    Args:
        checkpoint: What to export; the group must hold exactly the parameters of its model.
        out: Folder to make; an existing one must be empty.
        group: Group to write as the weights, for example `master`.
        dtype: Safetensors code to cast to (F64, F32, F16, BF16; rounding to nearest even); None: as stored.
        max_shard_bytes: Maximum bytes of tensors per file.
        allow_overflow: Let finite values beyond the range of `dtype` become infinite, instead of refusing.
        progress: Called with the bytes written so far and in all.

    Returns:
        The folder.

    Raises:
        CheckpointError: There is no such group, `out` is not empty, values overflow, the weights are not those of the
            model, replicas of a tensor differ, a tied model's head is not its embedding, or the disk fails.
        lt_model.ModelError: The manifest's model is not a supported Llama.
    """
    options = ConvertOptions(format="hf", dtype=dtype, max_shard_bytes=max_shard_bytes, allow_overflow=allow_overflow)
    return convert_checkpoint(select_group(open_lt(checkpoint), group), out, options, progress=progress)
