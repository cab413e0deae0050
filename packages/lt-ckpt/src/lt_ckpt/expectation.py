"""What a model's checkpoint must hold, from the parameter table of lt_model."""

from collections.abc import Sequence

from lt_ckpt.tensorfile import TensorSpec
from lt_model import LlamaConfig, parameters

STATE_GROUPS = ("weights", "exp_avg", "exp_avg_sq")


def expected(
    config: LlamaConfig, *, dtype: str = "F32", groups: Sequence[str] = STATE_GROUPS
) -> dict[str, dict[str, TensorSpec]]:
    """Returns group → parameter name → dtype and shape for a model trained with AdamW.

    Args:
        config: The model.
        dtype: Safetensors code of all of them.
        groups: The groups, each with a tensor per parameter.
    """
    specs = {parameter.name: TensorSpec(dtype, parameter.shape) for parameter in parameters(config)}
    return {group: dict(specs) for group in groups}
