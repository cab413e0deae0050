"""User error of this package."""


class ModelError(ValueError):
    """Unusable model shape, preset, config file or option; the message names the place and the remedy."""

    exit_code: int = 64
