import dataclasses
import json

import pytest

from lt_model import ModelConfig, ModelError, RopeScaling

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def test_defaults_are_those_of_the_litespark_listing():
    config = ModelConfig(vocab_size=32000)
    assert dataclasses.astuple(config)[:11] == (32000, 768, 2072, 12, 12, 12, 4096, 10000.0, None, 1e-5, False)
    assert config.features() == {}
    assert config.head_width == 64


def test_it_is_frozen_hashable_and_keyword_only():
    config = ModelConfig(vocab_size=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 11  # type: ignore[misc]
    assert hash(config) == hash(ModelConfig(vocab_size=10))
    with pytest.raises(TypeError):
        ModelConfig(10)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size = 0: must be a whole number"),
        ({"n_layers": -1}, "n_layers = -1"),
        ({"n_layers": True}, "n_layers = True"),
        ({"hidden_size": 768.0}, r"hidden_size = 768\.0"),
        ({"hidden_size": 770}, "hidden_size = 770 is not a multiple of n_heads = 12"),
        ({"hidden_size": 36}, "hidden_size / n_heads = 3 is odd"),
        ({"n_kv_heads": 5}, "n_heads = 12 is not a multiple of n_kv_heads = 5"),
        ({"n_kv_heads": 24}, "n_heads = 12 is not a multiple of n_kv_heads = 24"),
        ({"norm_eps": 0.0}, r"norm_eps = 0\.0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
        ({"rope_scaling": {"factor": 8.0}}, "must be a RopeScaling or None"),
    ],
)
def test_bad_fields_are_named_with_their_value(fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig(**{"vocab_size": 100, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0}, "rope_scaling.factor = 0"),
        ({"high_freq_factor": 1.0}, r"rope_scaling.high_freq_factor = 1\.0 must be greater than"),
        ({"original_max_position_embeddings": 8192.5}, "rope_scaling.original_max_position_embeddings"),
    ],
)
def test_bad_rope_scaling_is_refused(fields, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(SCALING, **fields)


def test_errors_are_value_errors_with_the_exit_code_of_a_user_error():
    assert issubclass(ModelError, ValueError)
    assert ModelError.exit_code == 64


def test_whole_floats_may_be_given_as_ints():
    assert ModelConfig(vocab_size=10, rope_theta=500000) == ModelConfig(vocab_size=10, rope_theta=500000.0)
    assert isinstance(ModelConfig(vocab_size=10, rope_theta=500000).rope_theta, float)


def test_dict_round_trip_through_json(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 10, "hiden_size": 8}, "run.toml: unknown field 'hiden_size'"),
        ({}, "run.toml: field 'vocab_size' is missing"),
        ({"vocab_size": 0}, "run.toml: vocab_size = 0"),
        (
            {"vocab_size": 10, "rope_scaling": {"fator": 8.0}},
            "run.toml: rope_scaling: unknown field 'fator'",
        ),
    ],
)
def test_from_dict_names_the_source(values, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(values, "run.toml")
