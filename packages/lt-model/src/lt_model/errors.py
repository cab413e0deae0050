"""The one error of this package that a person can put right."""


class ModelError(ValueError):
    """A model shape, preset, config file or option that cannot be used; the message says where and what to do."""

    exit_code: int = 64
