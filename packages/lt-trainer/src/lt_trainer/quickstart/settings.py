"""Output folder of a quickstart, and its settings in a marker file there.

A second start with the same settings continues the first; with others it is rejected, unless --overwrite is given,
which deletes only the quickstart's own files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
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


def claim_folder(out: Path, settings: Mapping[str, str | int], *, overwrite: bool) -> bool:
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
    marker = out / MARKER_FILE
    try:
        if marker.exists() and not overwrite:
            previous = json.loads(marker.read_bytes())
            if previous == settings:
                return True
            raise QuickstartError(
                f"{out} has a quickstart with other settings ({previous}, not {dict(settings)}); pass --overwrite to "
                "start over, or choose another folder with --out"
            )
        if not marker.exists() and out.exists() and any(out.iterdir()):
            raise QuickstartError(f"{out} is not empty and not a quickstart folder; choose a new folder with --out")
        for path in (out / name for name in OWN_PATHS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps(settings, indent=1) + "\n")
    except OSError as exc:
        raise QuickstartError(f"--out = {out}: {exc.strerror}; choose a writable folder") from exc
    except json.JSONDecodeError as exc:
        raise QuickstartError(f"{marker} is damaged; remove the folder, or choose another with --out") from exc
    return False
