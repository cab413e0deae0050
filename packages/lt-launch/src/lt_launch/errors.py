"""User errors of lt-launch."""


class LaunchError(ValueError):
    """Launch that cannot be made, or target that cannot be used. Commands end with `exit_code`.

    Args:
        text: field, value, source and remedy in one sentence.
        exit_code: 64 for a user error, 75 where a retry may succeed.
    """

    def __init__(self, text: str, *, exit_code: int = 64) -> None:
        super().__init__(text)
        self.exit_code = exit_code
