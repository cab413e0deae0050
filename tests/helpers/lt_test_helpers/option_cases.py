"""Cases that show that an option of a command has an effect, and the calls that check them.

A case is a command line, words added to it, and what must then differ: the documents of stores, files by name or by
content (JSON left out, since it repeats options), the printed text, or the exit code. Both lines run in this process,
each in a new folder over the same inputs. The line without the option runs twice, and what must differ is equal then,
so each difference is the option's.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lt_data import TokenStore
from lt_launch.__main__ import main

RATES_AND_TIMES = re.compile(r"[\d.]+ ?([kMG] )?(\w+/s|s|ms|min)\b")
WORDS = [
    "the", "loss", "of", "a", "model", "falls", "when", "its", "data", "is", "read", "in", "order", "and",
    "its", "state", "is", "kept",
]  # fmt: skip
"""Of the texts in stores that options are tried on."""
JSON_SUFFIXES = (".json", ".jsonl", ".toml", ".yaml")


@dataclass(frozen=True)
class OptionCase:
    """Option, the command line without it, the words that set it, what must differ, and lines that run before.

    `{w}` in a line is the folder of inputs. Beside commands, lines may be `cp FROM TO` (a folder) and `rm FILE`.
    """

    option: str
    line: str
    added: str
    changes: str
    before: tuple[str, ...] = ()


@dataclass
class Call:
    """Calls of command lines over the inputs `world`, each in a new folder below `folder`."""

    world: Path
    new_folder: Callable[[], Path]
    made: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    def check(self, capture: pytest.CaptureFixture[str], case: OptionCase) -> None:
        """Assert that the option makes the differences of the case."""
        base = (*case.before, case.line)
        if base not in self.made:
            self.made[base] = self.run(capture, base), self.run(capture, base)
        before, again = self.made[base]
        after = self.run(capture, (*case.before, f"{case.line} {case.added}"))
        names = case.changes.split()
        assert [before[name] for name in names] == [again[name] for name in names], "two equal calls differ"
        same = [name for name in names if before[name] == after[name]]
        assert not same, f"{same} as without {case.added}:\n{before['text']}\n{after['text']}"

    def check_ignored(self, capture: pytest.CaptureFixture[str], case: OptionCase) -> None:
        """Assert that the case fails where its option is ignored, as it must be when this is called."""
        with pytest.raises(AssertionError, match="as without"):
            Call(self.world, self.new_folder).check(capture, case)

    def run(self, capture: pytest.CaptureFixture[str], lines: tuple[str, ...]) -> dict[str, Any]:
        """Run lines in a new folder; return what the last of them printed, its exit code, and all files."""
        folder, code, text = self.new_folder() / "here", 0, ""
        folder.mkdir()
        with pytest.MonkeyPatch.context() as at:
            at.chdir(folder)
            for line in lines:
                words = [word.replace("{w}", str(self.world)) for word in line.split()]
                if words[0] == "cp":
                    shutil.copytree(words[1], words[2])
                elif words[0] == "rm":
                    Path(words[1]).unlink()
                else:
                    code = main(words[1:])
                    text = "".join(capture.readouterr())
        lines_shown = re.split(r"[\r\n]+", text.replace(str(folder), "HERE"))
        text = "\n".join(line for line in lines_shown if not RATES_AND_TIMES.search(line))
        return {"code": code, "text": text} | observe(folder)


def observe(folder: Path) -> dict[str, Any]:
    """Return the documents of the stores in a folder, names and content of files, and vocabularies of tokenizers."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    documents = {}
    for name, path in files.items():
        if path.name == "manifest.json" and (path.parent / "shards").is_dir():
            store = TokenStore.open(path.parent)
            documents[name] = [store.document(i).tolist() for i in range(store.n_documents)]
    content = {
        name: hashlib.sha256(path.read_bytes().replace(str(folder).encode(), b"HERE")).hexdigest()
        for name, path in files.items()
        if path.suffix not in JSON_SUFFIXES
    }
    vocabulary = {name: path.read_text() for name, path in files.items() if path.name == "tokenizer.json"}
    return {"documents": documents, "names": list(files), "content": content, "vocabulary": vocabulary}
