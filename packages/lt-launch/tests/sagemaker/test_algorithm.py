"""The publisher's request: golden, inside every limit, and never at odds with the recipe that reads the values."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_launch.sagemaker.algorithm import HYPERPARAMETER_RANGES, create_algorithm_request, hyperparameter_specifications
from lt_launch.sagemaker.constraints import load_model_shapes
from lt_launch.sagemaker.errors import SageMakerError
from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.recipe import load
from lt_trainer.config.section import leaves
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"
BASE = {"data": {"store": "store"}}


def test_golden(golden: Callable[[str, str], None]) -> None:
    made = create_algorithm_request(name="lt-pretraining", image=IMAGE, engines=["gpu", "neuron"])
    golden("algorithm.json", json.dumps(made, indent=1) + "\n")


FIELDS = {name: leaves(Recipe)[field] for name, field in hyperparameter_fields().items()}


def test_the_twenty_hyperparameters_with_the_defaults_of_the_recipe() -> None:
    found = hyperparameter_specifications()
    assert [one["Name"] for one in found] == list(hyperparameter_fields())
    assert len(found) == 20
    defaults = {one["Name"]: one["DefaultValue"] for one in found}
    assert load(hyperparameters=defaults, base=BASE).recipe == load(base=BASE).recipe
    kinds = {one["Name"]: one["Type"] for one in found}
    assert [name for name, kind in kinds.items() if kind == "Continuous"] == [
        name for name, field in FIELDS.items() if field.annotation is float
    ]
    assert kinds["TOKENIZER"] == "FreeText"
    assert all(("Range" in one) == (one["Type"] != "FreeText") for one in found)


@pytest.mark.parametrize("name", sorted(HYPERPARAMETER_RANGES))
def test_what_lies_below_a_range_the_recipe_refuses_and_a_bound_it_takes(name: str) -> None:
    """One field at a time: what contradicts other fields is not the range's to know."""
    low, high = HYPERPARAMETER_RANGES[name]
    integer = FIELDS[name].annotation is int
    below = str(int(low) - 1) if integer else str(low - 1e-9 if low > 1e-9 else -1e-9)
    with pytest.raises(RecipeError):
        load(hyperparameters={name: below}, base=BASE)
    for bound in (low, high):
        written = str(int(bound)) if integer else str(bound)
        assert fields_refused(name, written) != [hyperparameter_fields()[name]], (
            "a bound alone is refused only with another field"
        )


def fields_refused(name: str, value: str) -> list[str]:
    try:
        load(hyperparameters={name: value}, base=BASE)
    except RecipeError as exc:
        return list(exc.values)
    return []


def test_instance_types_are_those_of_the_engine() -> None:
    def types(*engines: str) -> list[str]:
        made = create_algorithm_request(name="x", image=IMAGE, engines=list(engines))
        return made["TrainingSpecification"]["SupportedTrainingInstanceTypes"]

    assert types("gpu") == ["ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"]
    assert all("trn1" in kind for kind in types("neuron"))
    assert set(types("gpu", "neuron")) <= set(load_model_shapes()["TrainingInstanceType"]["enum"])


def test_limits_are_checked() -> None:
    with pytest.raises(SageMakerError, match="AlgorithmName: must be at most 63"):
        create_algorithm_request(name="a" * 64, image=IMAGE)
    with pytest.raises(SageMakerError, match="TrainingImageDigest"):
        create_algorithm_request(name="a", image=IMAGE, digest="sha256:0")
    with pytest.raises(SageMakerError, match="the engines are gpu, neuron"):
        create_algorithm_request(name="a", image=IMAGE, engines=["tpu"])
    assert create_algorithm_request(name="a", image=IMAGE, digest="sha256:" + "0" * 64)["TrainingSpecification"][
        "TrainingImageDigest"
    ]


def test_the_command_prints_it() -> None:
    words = ["launch", "sagemaker-algorithm", "--name", "lt-pretraining", "--image", IMAGE, "--engine", "gpu"]
    lt = Path(sys.executable).with_name("lt")
    done = subprocess.run([lt, *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == create_algorithm_request(name="lt-pretraining", image=IMAGE)
