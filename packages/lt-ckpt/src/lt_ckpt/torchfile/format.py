"""Torch-saved state dict with Hugging Face names, as source and target (the input of NxD's scripts).

The model's other files are beside it: config.json and the tokenizer's.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt.conversion import Target
from lt_ckpt.laid_out_files import Place, write_layout
from lt_ckpt.layout import FileLayout, whole_file
from lt_ckpt.llama_tensors import HEAD, IGNORED_BUFFERS, add_tied_head, check_named_as_ours, stored_shapes, target_specs
from lt_ckpt.source import Source, build_tensor_group, group_of_arrays
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import load_pt, read_state_dict, write_pt
from lt_model import config_from_hf


def open_pt(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: The file; the state dict may also be under "model", "state_dict" or "module" in it.
        config: The model's config.json.

    Raises:
        CheckpointError: Not such a file, or its tensors are not those of the model.
        lt_model.ModelError: The configuration is of no supported family.
    """
    file = Path(path)
    model = config_from_hf(dict(config), source=f"{file}: config")
    check_named_as_ours(model)
    arrays = {name: array for name, array in read_state_dict(file).items() if not IGNORED_BUFFERS.search(name)}
    shapes = stored_shapes(model, HEAD in arrays)
    layout = (whole_file(file.name, shapes),)
    group = build_tensor_group(layout, {file.name: group_of_arrays(file.name, arrays)}, shapes, str(file))
    groups = {"weights": add_tied_head(group, model)}
    return Source(format="pt", path=file, root=file.parent, config=dict(config), groups=groups)


def pt_target(source: Source, name: str, *, dtype: str | None = None) -> Target:
    """Return the target for a source with a configuration: one file, with the head of a tied model.

    Args:
        source: What will be converted.
        name: The file's name.
        dtype: Safetensors code to cast to; None: as stored.
    """
    model = source.model
    check_named_as_ours(model)
    specs = target_specs(source, stored_shapes(model, head_is_stored=True), dtype)
    return Target(
        specs=specs,
        fill=write_layout(
            (whole_file(name, {tensor: spec.shape for tensor, spec in specs.items()}),), specs, lay_out_pt
        ),
        single_file=name,
    )


def lay_out_pt(path: Path, file: FileLayout, tensors: Mapping[str, TensorSpec]) -> dict[str, Place]:
    """Lay out a torch.save file (`lt_ckpt.laid_out_files.LayOut`)."""
    write_pt(path, OrderedDict(tensors))
    return {key: (path, array.byte_offset) for key, array in load_pt(path).items()}
