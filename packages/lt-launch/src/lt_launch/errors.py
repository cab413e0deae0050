"""The errors of lt-launch that a person can mend: what was given, where, what is wrong with it, what to do."""

__all__ = ["LaunchError"]


class LaunchError(ValueError):
    """A launch that cannot be made, or a target that cannot be used. Commands end with `exit_code`.

    Args:
        text: field, value, source and remedy in one sentence.
        exit_code: 64 where the person has to mend something, 75 where trying again may be all it needs.
    """

    def __init__(self, text: str, *, exit_code: int = 64) -> None:
        super().__init__(text)
        self.exit_code = exit_code
