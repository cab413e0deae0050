"""What a quickstart was asked to do, where its parts lie, and the folder that says so.

The folder carries a marker with the settings. A second start with the same settings goes on where the first one ended;
with others it is refused, unless it is told to start over, and then only what the first start made is removed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from lt_trainer.errors import TrainerError

MARKER = ".lt-quickstart"
VERSION = 1
PARTS = (
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
"""Everything that a quickstart makes in its folder."""


class QuickstartError(TrainerError):
    """The quickstart cannot do what it was asked to, or the result is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One quickstart; `source` empty means the standard library of the interpreter that runs it."""

    source: str = ""
    interpreter: str = ""
    """Version of the interpreter whose standard library is read; empty with a source of one's own."""
    preset: str = "tiny-2m"
    steps: int = 1000
    vocab_size: int = 2048
    seq_len: int = 256
    global_batch: int = 4
    micro_batch: int = 4
    lr: float = 2e-3
    shadow_steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise QuickstartError(f"--steps {self.steps}: at least 4 are needed, to stop halfway and go on")

    @property
    def halfway(self) -> int:
        """The step after which training stops and goes on in a new process."""
        return self.steps // 2


@dataclass(frozen=True)
class Folder:
    """The quickstart's folder and the names in it."""

    out: Path

    @property
    def corpus_train(self) -> Path:
        """Training documents, one JSON object a line."""
        return self.out / "corpus" / "train.jsonl"

    @property
    def corpus_validation(self) -> Path:
        """Validation documents."""
        return self.out / "corpus" / "validation.jsonl"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.out / "tokenizer"

    @property
    def train(self) -> Path:
        """Token store to train on."""
        return self.out / "train"

    @property
    def validation(self) -> Path:
        """Token store to validate on."""
        return self.out / "validation"

    @property
    def recipe(self) -> Path:
        """The recipe of the run."""
        return self.out / "run.toml"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.out / "run"

    @property
    def log(self) -> Path:
        """What the training processes print."""
        return self.out / "training.log"

    @property
    def model(self) -> Path:
        """The exported Hugging Face model."""
        return self.out / "model"

    @property
    def summary(self) -> Path:
        """The numbers of the finished quickstart."""
        return self.out / "summary.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.out / "report.html"

    def claim(self, settings: Settings, *, fresh: bool) -> bool:
        """Make the folder ours for these settings.

        Args:
            settings: what is asked for now.
            fresh: remove what an earlier quickstart made here and start over.

        Returns:
            Whether an earlier start with the same settings left something to go on from.

        Raises:
            QuickstartError: the folder is not ours, or was made with other settings.
        """
        marker = self.out / MARKER
        try:
            if marker.is_file():
                found = _read(marker)
                if fresh:
                    self._remove_parts()
                elif found != asdict(settings):
                    differs = ", ".join(
                        f"{name} was {found.get(name)!r}, is {value!r}"
                        for name, value in asdict(settings).items()
                        if found.get(name) != value
                    )
                    raise QuickstartError(
                        f"{self.out} holds a quickstart with other settings ({differs}); add --fresh to start over "
                        "here, or name another folder with --out"
                    )
                else:
                    return True
            elif self.out.exists() and any(self.out.iterdir()):
                raise QuickstartError(
                    f"{self.out} is not empty and was not made by a quickstart; name a new folder with --out"
                )
            self.out.mkdir(parents=True, exist_ok=True)
            marker.write_text(json.dumps({"version": VERSION, "settings": asdict(settings)}, indent=1) + "\n")
        except OSError as exc:
            raise QuickstartError(f"--out {self.out}: {exc.strerror}; name a folder that can be written") from exc
        return False

    def _remove_parts(self) -> None:
        for name in PARTS:
            path = self.out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _read(marker: Path) -> dict[str, object]:
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise QuickstartError(f"{marker} is damaged; remove the folder, or name another with --out") from exc
    if content.get("version") != VERSION:
        raise QuickstartError(f"{marker} was written by another version of lt; name another folder with --out")
    return content["settings"]
