"""The publisher's side: a CreateAlgorithm request made of the recipe's own schema, so that the two cannot drift apart.

Types and defaults are read from the recipe's fields. Ranges are found by asking the schema itself: a bound stands here
only when the recipe refuses what lies beyond it, or where no number could be right (see `RANGES`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lt_launch.sagemaker.constraints import check
from lt_launch.sagemaker.errors import SageMakerError
from lt_launch.sagemaker.instances import PUBLISHED
from lt_trainer.fields import Leaf
from lt_trainer.hyperparameters import table
from lt_trainer.metrics import METRIC_DEFINITIONS

__all__ = ["RANGES", "algorithm", "hyperparameter_specifications"]

MOST = 2**31 - 1
RANGES: dict[str, tuple[float, float]] = {
    "VOCAB_SIZE": (0, MOST),
    "HIDDEN_SIZE": (2, 65536),
    "INTERMEDIATE_SIZE": (1, 262144),
    "N_HEADS": (1, 1024),
    "N_KV_HEADS": (1, 1024),
    "N_LAYERS": (1, 1024),
    "SEQ_LEN": (2, 1048576),
    "GLOBAL_BATCH_SIZE": (1, 1048576),
    "MICRO_BATCH_SIZE": (1, 65536),
    "LEARNING_RATE": (1e-12, 10.0),
    "WEIGHT_DECAY": (0.0, 10.0),
    "BETA1": (0.0, 0.999999),
    "BETA2": (0.0, 0.999999),
    "GRAD_CLIP": (0.0, 1e9),
    "MAX_STEPS": (1, MOST),
    "WARMUP_STEPS": (0, MOST),
    "MIN_LR": (0.0, 10.0),
    "NUM_NODES": (1, 1024),
    "CHECKPOINT_INTERVAL": (0, MOST),
}
"""Smallest and largest value of each number. What lies outside is refused by the recipe (the lower bounds) or would be
a slip of the keyboard (the upper ones); what contradicts other fields only the container can tell."""
CONTENT_TYPE = "application/octet-stream"
CHANNELS = (
    ("train", True, "token store made by lt data prepare and lt data pack"),
    ("tokenizer", False, "the tokenizer of the store; it must be the same, file by file"),
    ("validation", False, "token store for the validation loss"),
    ("run", False, "writable file system for checkpoints; needed with several instances"),
)


def algorithm(
    *, name: str, image: str, digest: str = "", description: str = "", engines: Sequence[str] = ("gpu",)
) -> dict[str, Any]:
    """The request that publishes a training image as an algorithm.

    Args:
        name: of the algorithm.
        image: in ECR, with tag.
        digest: of the image, `sha256:...`; empty leaves it out.
        description: for the console.
        engines: gpu, neuron or both: what the image can train on decides the instance types.

    Raises:
        SageMakerError: the service would refuse it, naming field and limit.
    """
    unknown = [engine for engine in engines if engine not in PUBLISHED]
    if unknown or not engines:
        raise SageMakerError(f"--engine {', '.join(unknown) or '(none)'}: the engines are {', '.join(PUBLISHED)}")
    specification: dict[str, Any] = {
        "TrainingImage": image,
        "SupportedHyperParameters": hyperparameter_specifications(),
        "SupportedTrainingInstanceTypes": [kind for engine in engines for kind in PUBLISHED[engine]],
        "SupportsDistributedTraining": True,
        "MetricDefinitions": [dict(definition) for definition in METRIC_DEFINITIONS],
        "TrainingChannels": [
            {
                "Name": channel,
                "Description": text,
                "IsRequired": required,
                "SupportedContentTypes": [CONTENT_TYPE],
                "SupportedCompressionTypes": ["None"],
                "SupportedInputModes": ["File", "FastFile"],
            }
            for channel, required, text in CHANNELS
        ],
    }
    if digest:
        specification["TrainingImageDigest"] = digest
    made: dict[str, Any] = {
        "AlgorithmName": name,
        "AlgorithmDescription": description or "Pre-training of Llama-family language models with lt",
        "TrainingSpecification": specification,
    }
    check("CreateAlgorithmInput", made)
    return made


def hyperparameter_specifications() -> list[dict[str, Any]]:
    """Every hyperparameter with type, range, default and description, in the order of the recipe."""
    return [_specification(name, leaf) for name, leaf in table().items()]


def _specification(name: str, leaf: Leaf) -> dict[str, Any]:
    kind = {int: "Integer", float: "Continuous", str: "FreeText"}[leaf.hint]
    made: dict[str, Any] = {
        "Name": name,
        "Description": leaf.help + (f" ({leaf.unit})" if leaf.unit else ""),
        "Type": kind,
        "IsTunable": False,
        "IsRequired": False,
        "DefaultValue": str(leaf.default),
    }
    if name in RANGES:
        low, high = RANGES[name]
        made["Range"] = {f"{kind}ParameterRangeSpecification": {"MinValue": str(low), "MaxValue": str(high)}}
    return made
