"""CreateAlgorithm request of the published algorithm, built from the recipe's own schema.

Types, defaults and ranges are read from the recipe's fields. Contradictions between fields are found in the container
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic.fields import FieldInfo

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.service_model import check_request
from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.section import default_value, extra_of, leaves
from lt_trainer.config.sections import Recipe
from lt_trainer.run_directory.records import METRIC_DEFINITIONS

LARGEST = {"Integer": 2**31 - 1, "Continuous": 1e9}
"""Upper bound of hyperparameters that the recipe does not bound: SageMaker takes no range without one."""
OPEN_BOUND = 1e-12
"""Distance of a range from a bound that the recipe itself excludes."""
PUBLISHED_INSTANCE_TYPES = {
    "gpu": ("ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"),
    "neuron": ("ml.trn1.2xlarge", "ml.trn1.32xlarge", "ml.trn1n.32xlarge"),
}
"""Instance types of the published algorithm, by the engine in its image."""
CONTENT_TYPE = "application/octet-stream"
CHANNELS = (
    ("train", True, "token store made by lt data prepare and lt data pack"),
    ("tokenizer", False, "the tokenizer of the store; it must be the same, file by file"),
    ("validation", False, "token store for the validation loss"),
    ("run", False, "writable file system for checkpoints; needed with several instances"),
)


def create_algorithm_request(
    *, name: str, image: str, digest: str = "", description: str = "", engines: Sequence[str] = ("gpu",)
) -> dict[str, Any]:
    """Return the request that publishes a training image as an algorithm.

    Args:
        name: name of the algorithm.
        image: image in ECR, with tag.
        digest: digest of the image, `sha256:...`; empty leaves it out.
        description: text shown in the console.
        engines: gpu, neuron or both, the engines in the image; they decide the instance types.

    Raises:
        LaunchError: the service would reject it; names field and limit.
    """
    unknown = [engine for engine in engines if engine not in PUBLISHED_INSTANCE_TYPES]
    if unknown or not engines:
        raise LaunchError(
            f"--engine {', '.join(unknown) or '(none)'}: the engines are {', '.join(PUBLISHED_INSTANCE_TYPES)}"
        )
    specification: dict[str, Any] = {
        "TrainingImage": image,
        "SupportedHyperParameters": hyperparameter_specifications(),
        "SupportedTrainingInstanceTypes": [kind for engine in engines for kind in PUBLISHED_INSTANCE_TYPES[engine]],
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
    request: dict[str, Any] = {
        "AlgorithmName": name,
        "AlgorithmDescription": description or "Pre-training of decoder language models with lt",
        "TrainingSpecification": specification,
    }
    check_request("CreateAlgorithm", request)
    return request


def hyperparameter_specifications() -> list[dict[str, Any]]:
    """Return all hyperparameters with type, range, default and description, in recipe order."""
    return [
        _hyperparameter_specification(name, leaves(Recipe)[field]) for name, field in hyperparameter_fields().items()
    ]


def _hyperparameter_specification(name: str, field: FieldInfo) -> dict[str, Any]:
    unit = extra_of(field, "unit")
    kind = {int: "Integer", float: "Continuous", str: "FreeText"}[field.annotation or str]
    specification: dict[str, Any] = {
        "Name": name,
        "Description": f"{field.description} ({unit})" if unit else field.description,
        "Type": kind,
        "IsTunable": False,
        "IsRequired": False,
        "DefaultValue": str(default_value(field)),
    }
    if kind != "FreeText":
        bounds = {bound: value for one in field.metadata for bound, value in asdict(one).items()}
        low = bounds["ge"] if "ge" in bounds else bounds["gt"] + OPEN_BOUND
        high = min(bounds.get("le", LARGEST[kind]), bounds.get("lt", LARGEST[kind] + 1) - OPEN_BOUND, LARGEST[kind])
        specification["Range"] = {f"{kind}ParameterRangeSpecification": {"MinValue": str(low), "MaxValue": str(high)}}
    return specification
