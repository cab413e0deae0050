"""Settings of a quickstart and its output folder.

A marker file in the folder holds the settings. A second start with the same settings continues the first; with others
it is rejected, unless --overwrite is given, which deletes only the quickstart's own files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from lt_trainer.errors import TrainerError
from lt_trainer.files import write_atomic

MARKER_FILE = ".lt-quickstart"
OWN_PATHS = (
    *("corpus", "tokenizer", "train", "validation", "run.toml", "run", "undisturbed", "model"),
    *("summary.json", "report.html"),
)
"""Files and folders that a quickstart creates in its folder."""


class QuickstartError(TrainerError):
    """Quickstart failed, or a result check failed."""


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings:
    """Settings of a quickstart.

    Attributes:
        source: Folder or file with text; "" for Python's standard library.
        interpreter: Version of the interpreter whose standard library is read; "" with a source.
        preset: Model preset.
        steps: Training steps.
    """

    source: str = ""
    interpreter: str = ""
    preset: str = "tiny-2m"
    steps: int = 1000

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise QuickstartError(f"--steps = {self.steps}: must be at least 4, to stop halfway and resume")


def claim_folder(out: Path, settings: QuickstartSettings, *, overwrite: bool) -> bool:
    """Create or reuse the output folder for these settings.

    Args:
        out: The folder.
        settings: The settings.
        overwrite: Delete the files of an earlier quickstart and start over.

    Returns:
        True if the folder has a quickstart with the same settings to continue.

    Raises:
        QuickstartError: Not a quickstart folder, one with other settings, or one that cannot be written.
    """
    marker, values = out / MARKER_FILE, asdict(settings)
    try:
        if marker.exists():
            previous = json.loads(marker.read_bytes())
            pairs = ((name, previous.get(name), value) for name, value in values.items())
            changed = [f"{name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]
            if not overwrite and not changed:
                return True
            if not overwrite:
                raise QuickstartError(
                    f"{out} has a quickstart with other settings ({', '.join(changed)}); pass --overwrite to start "
                    "over, or choose another folder with --out"
                )
            _remove_own(out)
        elif out.exists() and any(out.iterdir()):
            raise QuickstartError(f"{out} is not empty and not a quickstart folder; choose a new folder with --out")
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps(values, indent=1) + "\n")
    except OSError as exc:
        raise QuickstartError(f"--out = {out}: {exc.strerror}; choose a writable folder") from exc
    except (json.JSONDecodeError, AttributeError) as exc:
        raise QuickstartError(f"{marker} is damaged; remove the folder, or choose another with --out") from exc
    return False


def _remove_own(out: Path) -> None:
    for path in (out / name for name in OWN_PATHS):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
