"""One torch-saved state dict with Hugging Face's names, in and out: the input of NxD's scripts, the output of others.

The file is a zip of stored records, so its tensors are read in place like those of any other format; its pickle is read
by an allow-list and never executed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt.convert import Target
from lt_ckpt.layout import FileLayout, Layout, whole
from lt_ckpt.models import DROPPED, HEAD, shapes_of, stored_shapes, target_specs, with_head
from lt_ckpt.source import Source, join
from lt_ckpt.torchfile.file import TorchWriter, read_pt
from lt_model import LlamaConfig


def open_pt(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Opens a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: The file; the state dict may also stand under "model", "state_dict" or "module" in it.
        config: The model, as config.json has it.

    Raises:
        CheckpointError: Not such a file, or its tensors are not those of the model.
        lt_model.ModelError: The configuration is no Llama that lt_model knows.
    """
    file = Path(path)
    model = LlamaConfig.from_hf(dict(config), source=f"{file}: config")
    held = {name: found for name, found in read_pt(file).items() if not DROPPED.search(name)}
    shapes = stored_shapes(model, HEAD in held)
    tensors = tuple(whole(name, shape) for name, shape in shapes.items())
    layout = Layout(files=(FileLayout(path=file.name, tensors=tensors),))
    group = with_head(join(layout, {file.name: held}, shapes, str(file)), model)
    return Source(format="pt", path=file, root=file.parent, config=dict(config), groups={"weights": group})


def pt_target(source: Source, name: str, *, dtype: str | None = None) -> Target:
    """What to write for a source that carries a configuration: one file, the head of a tied model with it.

    Args:
        source: What will be converted.
        name: The file's name.
        dtype: Safetensors code to cast to; None: as stored.
    """
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    specs = target_specs(source, shapes_of(model), dtype)
    tensors = tuple(whole(tensor, spec.shape) for tensor, spec in specs.items())
    return Target(
        format="pt",
        layout=Layout(files=(FileLayout(path=name, tensors=tensors),)),
        specs=specs,
        opens=TorchWriter,
        single_file=name,
    )
