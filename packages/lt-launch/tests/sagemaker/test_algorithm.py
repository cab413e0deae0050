"""The publisher's request: golden, inside every limit, and never at odds with the recipe that reads the values."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_launch.errors import LaunchError
from lt_launch.sagemaker.algorithm import create_algorithm_request, hyperparameter_specifications
from lt_trainer.config.hyperparameters import hyperparameter_fields
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lt:1"
BASE = {"data": {"store": "store"}}
SPECIFICATIONS = {one["Name"]: one for one in hyperparameter_specifications()}


def test_golden(golden: Callable[[str, str], None]) -> None:
    made = create_algorithm_request(name="lt-pretraining", image=IMAGE, engines=["gpu", "neuron"])
    golden("algorithm.json", json.dumps(made, indent=1) + "\n")
    assert list(SPECIFICATIONS) == list(hyperparameter_fields())
    assert len(SPECIFICATIONS) == 20
    defaults = {name: one["DefaultValue"] for name, one in SPECIFICATIONS.items()}
    assert load(hyperparameters=defaults, base=BASE).recipe == load(base=BASE).recipe


@pytest.mark.parametrize("name", sorted(SPECIFICATIONS.keys() - {"TOKENIZER"}))
def test_what_lies_below_a_range_the_recipe_refuses_and_a_bound_it_takes(name: str) -> None:
    """One field at a time: what contradicts other fields is not the range's to know."""
    ((kind, bounds),) = SPECIFICATIONS[name]["Range"].items()
    low = float(bounds["MinValue"])
    below = str(int(low) - 1) if kind.startswith("Integer") else str(low - 1e-6)
    assert hyperparameter_fields()[name] in fields_refused(name, below)
    for bound in bounds.values():
        assert fields_refused(name, bound) != [hyperparameter_fields()[name]], "alone it is taken"


def fields_refused(name: str, value: str) -> list[str]:
    try:
        load(hyperparameters={name: value}, base=BASE)
    except RecipeError as exc:
        return list(exc.values)
    return []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "a" * 64}, "AlgorithmName: must be at most 63.*change --name"),
        ({"digest": "sha256:0"}, "TrainingImageDigest"),
        ({"engines": ["tpu"]}, "the engines are gpu, neuron"),
    ],
)
def test_limits_are_checked(wrong: dict, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        create_algorithm_request(**{"name": "a", "image": IMAGE, **wrong})


def test_the_command_prints_it() -> None:
    digest = "sha256:" + "0" * 64
    words = ["launch", "sagemaker-algorithm", "--name", "lt-pretraining", "--image", IMAGE, "--digest", digest]
    done = subprocess.run([Path(sys.executable).with_name("lt"), *words], capture_output=True, text=True, check=True)
    made = create_algorithm_request(name="lt-pretraining", image=IMAGE, digest=digest)
    assert json.loads(done.stdout) == made
    types = made["TrainingSpecification"]["SupportedTrainingInstanceTypes"]
    assert types == ["ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge"]
