"""Expected tensors of a model's checkpoint, from the parameter table of lt_model."""

from collections.abc import Sequence

from lt_ckpt.tensorfile import TensorSpec
from lt_model import LlamaConfig, param_specs


def expected_state_specs(
    config: LlamaConfig, *, dtype: str = "F32", groups: Sequence[str] = ("weights",)
) -> dict[str, dict[str, TensorSpec]]:
    """Return group → parameter name → dtype and shape for a model.

    Args:
        config: The model.
        dtype: Safetensors code of all of them.
        groups: Groups with a tensor of the parameter's shape per parameter: `weights`, slots of an optimizer.
    """
    specs = {parameter.name: TensorSpec(dtype, parameter.shape) for parameter in param_specs(config)}
    return {group: dict(specs) for group in groups}
