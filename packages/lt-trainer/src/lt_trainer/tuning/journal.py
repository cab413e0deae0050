"""Journal of probes: a JSON-lines file, so that a tuning that was stopped goes on where it was.

Each line has the key of what was measured (a hash of the recipe without the tuned fields, ranks and steps) and one
result. Lines of other keys, and a last line that is torn, are not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_trainer.config.fields import flatten
from lt_trainer.config.recipe import to_dict
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import JsonlWriter, read_jsonl
from lt_trainer.tuning.probe import ProbeResult
from lt_trainer.tuning.settings import TUNED_FIELDS, TunedSetting


class ProbeJournal:
    """Results of probes by setting, in a file.

    Raises:
        RunDirError: the file cannot be read or written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self._key = path, key
        records = read_jsonl(path) if path.exists() else []
        try:
            own = [ProbeResult.from_dict(record) for record in records if record.get("key") == key]
        except ValueError as exc:
            raise RunDirError(f"{path}: a result is damaged ({exc}); move the file away") from exc
        self.results: dict[TunedSetting, ProbeResult] = {result.setting: result for result in own}
        self._writer = JsonlWriter(path)

    def append(self, result: ProbeResult) -> None:
        """Add a result."""
        self.results[result.setting] = result
        self._writer.write({"key": self._key, **result.to_dict()})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def journal_key(recipe: Recipe, measurement: Mapping[str, Any]) -> str:
    """Return the key of a recipe, whatever its tuned fields and its folder are, and of how it is measured."""
    values = flatten(to_dict(recipe))
    for name in ("run.dir", *TUNED_FIELDS):
        values.pop(name, None)
    text = json.dumps([values, dict(measurement)], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
