"""Torch-saved state dict with Hugging Face names, as source and target (the input of NxD's scripts).

The file is a zip of stored records, so its tensors are read in place like those of any other format; its pickle is read
by an allow-list and never executed.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lt_ckpt import strict_json
from lt_ckpt.conversion import Target
from lt_ckpt.hf.folder import CONFIG, is_aux_file
from lt_ckpt.layout import FileLayout, Layout, whole_tensor
from lt_ckpt.llama_tensors import HEAD, IGNORED_BUFFERS, add_tied_head, stored_shapes, target_specs, tensor_shapes
from lt_ckpt.model_files import model_files
from lt_ckpt.source import Source, build_tensor_group
from lt_ckpt.torchfile.file import TorchWriter, read_checksums, read_extra_files, read_state_dict
from lt_model import config_from_hf


def read_pt_model_files(path: str | os.PathLike[str]) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """Read the configuration that a conversion put into a file, or None, and the model's other files."""
    found = read_extra_files(path)
    config = found.pop(CONFIG, None)
    return (
        None if config is None else strict_json.loads(config, f"{path}: {CONFIG}"),
        {name: data for name, data in found.items() if is_aux_file(name)},
    )


def open_pt(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: The file; the state dict may also be under "model", "state_dict" or "module" in it.
        config: The model's config.json.

    Raises:
        CheckpointError: Not such a file, or its tensors are not those of the model.
        lt_model.ModelError: The configuration is not a supported Llama.
    """
    file = Path(path)
    model = config_from_hf(dict(config), source=f"{file}: config")
    arrays = {name: array for name, array in read_state_dict(file).items() if not IGNORED_BUFFERS.search(name)}
    shapes = stored_shapes(model, HEAD in arrays)
    tensors = tuple(whole_tensor(name, shape) for name, shape in shapes.items())
    layout = Layout(files=(FileLayout(path=file.name, tensors=tensors),))
    group = add_tied_head(build_tensor_group(layout, {file.name: arrays}, shapes, str(file)), model)
    return Source(
        format="pt",
        path=file,
        root=file.parent,
        config=dict(config),
        groups={"weights": group},
        find_checksums=lambda name: read_checksums(file.parent / name),
        aux_files=read_pt_model_files(file)[1],
    )


def pt_target(source: Source, name: str, *, dtype: str | None = None) -> Target:
    """Return the target for a source with a configuration: one file, with the head of a tied model.

    Args:
        source: What will be converted.
        name: The file's name.
        dtype: Safetensors code to cast to; None: as stored.
    """
    assert source.config is not None
    model = config_from_hf(dict(source.config), source=f"{source.path}: config")
    specs = target_specs(source, tensor_shapes(model), dtype)
    tensors = tuple(whole_tensor(tensor, spec.shape) for tensor, spec in specs.items())
    return Target(
        format="pt",
        layout=Layout(files=(FileLayout(path=name, tensors=tensors),)),
        specs=specs,
        open_writer=partial(TorchWriter, extra_files=model_files(source, specs)),
        single_file=name,
    )
