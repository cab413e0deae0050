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
from lt_trainer.files import read_json, write_atomic

MARKER_FILE = ".lt-quickstart"
VERSION = 1
OWN_PATHS = (
    "corpus",
    "tokenizer",
    "train",
    "validation",
    "run.toml",
    "run",
    "training.log",
    "model",
    "summary.json",
    "report.html",
)
"""Files and folders that a quickstart creates in its folder."""


class QuickstartError(TrainerError):
    """Quickstart failed, or a result check failed."""


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings:
    """Settings of a quickstart; an empty `source` means Python's standard library."""

    source: str = ""
    interpreter: str = ""
    """Version of the interpreter whose standard library is read; empty with a custom source."""
    preset: str = "tiny-2m"
    steps: int = 1000
    vocab_size: int = 2048
    seq_len: int = 256
    global_batch_size: int = 4
    micro_batch_size: int = 4
    lr: float = 2e-3
    verify_resume_steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise QuickstartError(f"--steps = {self.steps}: must be at least 4, to stop halfway and resume")

    @property
    def stop_after_step(self) -> int:
        """Step after which training stops and resumes in a new process."""
        return self.steps // 2


@dataclass(frozen=True)
class QuickstartFolder:
    """Output folder and the paths in it."""

    out: Path

    @property
    def corpus_train(self) -> Path:
        """Training documents as JSON Lines."""
        return self.out / "corpus" / "train.jsonl"

    @property
    def corpus_validation(self) -> Path:
        """Validation documents as JSON Lines."""
        return self.out / "corpus" / "validation.jsonl"

    @property
    def tokenizer(self) -> Path:
        """Tokenizer folder."""
        return self.out / "tokenizer"

    @property
    def train(self) -> Path:
        """Training token store."""
        return self.out / "train"

    @property
    def validation(self) -> Path:
        """Validation token store."""
        return self.out / "validation"

    @property
    def recipe(self) -> Path:
        """Recipe of the run."""
        return self.out / "run.toml"

    @property
    def run(self) -> Path:
        """Run directory."""
        return self.out / "run"

    @property
    def log(self) -> Path:
        """Output of the training processes."""
        return self.out / "training.log"

    @property
    def model(self) -> Path:
        """Exported Hugging Face model."""
        return self.out / "model"

    @property
    def summary(self) -> Path:
        """Numbers of the finished quickstart."""
        return self.out / "summary.json"

    @property
    def report(self) -> Path:
        """HTML report of the run."""
        return self.out / "report.html"

    def claim(self, settings: QuickstartSettings, *, overwrite: bool) -> bool:
        """Create or reuse the folder for these settings.

        Args:
            settings: the settings.
            overwrite: delete the files of an earlier quickstart and start over.

        Returns:
            True if the folder has a quickstart with the same settings to continue.

        Raises:
            QuickstartError: not a quickstart folder, or one with other settings.
        """
        marker = self.out / MARKER_FILE
        try:
            if marker.is_file():
                previous = _read_settings(marker)
                if overwrite:
                    self._remove_parts()
                elif previous != asdict(settings):
                    differences = ", ".join(
                        f"{name} was {previous.get(name)!r}, is {value!r}"
                        for name, value in asdict(settings).items()
                        if previous.get(name) != value
                    )
                    raise QuickstartError(
                        f"{self.out} has a quickstart with other settings ({differences}); pass --overwrite to start "
                        "over, or choose another folder with --out"
                    )
                else:
                    return True
            elif self.out.exists() and any(self.out.iterdir()):
                raise QuickstartError(
                    f"{self.out} is not empty and not a quickstart folder; choose a new folder with --out"
                )
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomic(marker, json.dumps({"version": VERSION, "settings": asdict(settings)}, indent=1) + "\n")
        except OSError as exc:
            raise QuickstartError(f"--out = {self.out}: {exc.strerror}; choose a writable folder") from exc
        return False

    def _remove_parts(self) -> None:
        for name in OWN_PATHS:
            path = self.out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _read_settings(marker: Path) -> dict[str, object]:
    try:
        content = read_json(marker)
        version, settings = content["version"], content["settings"]
    except (ValueError, KeyError, TypeError) as exc:
        raise QuickstartError(f"{marker} is damaged; remove the folder, or choose another with --out") from exc
    if not isinstance(settings, dict):
        raise QuickstartError(f"{marker} is damaged; remove the folder, or choose another with --out")
    if version != VERSION:
        raise QuickstartError(f"{marker} was written by another version of lt; choose another folder with --out")
    return settings
