"""Forward pass in bounded memory: layer by layer, each one's weights loaded, used and dropped.

So two checkpoints of a 70B model can be compared on a machine that could hold neither. The model is `lt_model`'s, in
the requested dtype, on the CPU; it needs lt-ckpt[torch]. Memory: in that dtype one layer, the embedding or the head,
whichever is largest, and the hidden states. A wrong head order or a swapped gate shows in the first affected layer,
where a comparison of losses would hide it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lt_ckpt.dtypes import cast
from lt_ckpt.llama_tensors import EMBED, HEAD
from lt_ckpt.source import Source, TensorReader
from lt_model import config_from_hf
from lt_model.llama import Llama
from lt_model.rope import rope_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

CODES = {torch.float64: "F64", torch.float32: "F32"}


@torch.no_grad()  # as a decorator around each step: a context inside the generator would leak to its caller
def layer_outputs(
    source: Source, token_ids: "Sequence[int]", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Run the model on one sequence of tokens.

    Args:
        source: The model, with a configuration.
        token_ids: T token ids.
        dtype: float32 or float64; weights are cast to it.

    Yields:
        "embedding", "layer 0", ..., "norm" with hidden states [T, D], and "logits" [T, V].

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    assert source.config is not None
    config = config_from_hf(dict(source.config), source=str(source.path))
    with torch.device("meta"):
        model = Llama(config)  # without memory until a part of it is loaded
    with TensorReader(source.root) as reader:

        def load_module(module: nn.Module, prefix: str) -> nn.Module:
            loaded = module.to_empty(device="cpu").to(dtype)
            for name, parameter in loaded.named_parameters():
                parameter.copy_(tensor(f"{prefix}{name}"))
            return loaded

        def tensor(name: str) -> Tensor:
            spec = source.weights.specs[name]
            raw = cast(reader.read(source.weights, name), spec.dtype, CODES[dtype])
            return torch.from_numpy(raw.view(np.dtype(f"<f{torch.finfo(dtype).bits // 8}"))).view(*spec.shape)

        ids_T = torch.tensor(list(token_ids))
        x_TD = tensor(EMBED)[ids_T]
        yield "embedding", x_TD
        x_BTD, rope = x_TD[None], rope_tables(config, torch.arange(len(ids_T)), dtype)
        for index in range(config.n_layers):
            layer = load_module(model.model.layers[index], f"model.layers.{index}.")
            x_BTD = layer(x_BTD, rope, None)
            model.model.layers[index].to("meta")
            yield f"layer {index}", x_BTD[0]
        x_BTD = load_module(model.model.norm, "model.norm.")(x_BTD)
        yield "norm", x_BTD[0]
        yield "logits", x_BTD[0] @ tensor(HEAD).T


def compare_logits(
    a: Source, b: Source, token_ids: "Sequence[int]", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, float, float]]:
    """Run both models side by side and compare hidden states and logits.

    Yields:
        After each layer: its name, the largest difference of the hidden states, and that over the largest value of the
        first model.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    pairs = zip(layer_outputs(a, token_ids, dtype), layer_outputs(b, token_ids, dtype), strict=True)
    for (name, left), (_, right) in pairs:
        difference = float((left - right).abs().max())
        largest = float(left.abs().max())
        yield name, difference, difference / largest if largest else difference
