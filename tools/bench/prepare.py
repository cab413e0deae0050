"""Cost of preparing a token store relative to the tokenizer alone, by engine, and its memory.

    uv run python tools/bench/prepare.py collect [--folder F]      # the text and the tokenizer, once
    uv run python tools/bench/prepare.py speed-1 speed-2 memory   # one round each; repeat several times
    uv run python tools/bench/prepare.py table [--out PAGE]        # medians of all rounds so far

The text is from a developer's machine: Python sources and documentation (of the interpreter and of its packages),
manual pages and the files under /usr/share/doc. All files are listed, ordered by the SHA-256 of the path, and read up
to 100 MB (1 GB) of text; exact duplicates, files over 4 MB and non-UTF-8 files are skipped. If there is less than 1 GB,
the files are read again, and the page says so. The tokenizer is a byte-level BPE of 32000 ids with the split of Llama
3, trained on the first 20 MB.

    speed-N  CPU seconds, children included, of a complete `prepare` (start, imports, reading, hashing, writing, fsync)
             with N encoding processes, per engine; against `raw`: encode_batch_fast of `tokenizers` over the same texts
             in memory, in batches of 1 MB by N single-threaded processes, nothing else counted, the ids discarded. All
             runs must produce the same ids.
    memory   peak memory of each process at 100 MB and at 1 GB of text; memory-hf,
             memory-gigatoken-large and the like measure a part of it
Every round measures each case once, in random order; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

MB = 10**6
SMALL_BYTES = 100 * MB
LARGE_BYTES = 1000 * MB
TRAIN_BYTES = 20 * MB
MAX_FILE_BYTES = 4 * MB
VOCAB = 32000
ENGINES = ("hf", "gigatoken")


def source_dirs() -> list[tuple[str, Path, tuple[str, ...]]]:
    code = (".py", ".pyi", ".md", ".rst", ".txt")
    return [
        ("Python sources and their documentation", Path(sysconfig.get_path("stdlib")), code),
        ("Python sources and their documentation", Path(sysconfig.get_path("purelib")), code),
        ("Python sources and their documentation", Path("/usr/lib/python3"), code),
        ("manual pages", Path("/usr/share/man"), (".gz",)),
        ("/usr/share/doc", Path("/usr/share/doc"), (".gz", ".txt", ".md", ".rst", "copyright", "README", "NEWS")),
    ]


def list_files() -> list[tuple[str, Path]]:
    found: dict[Path, str] = {}
    for kind, root, suffixes in source_dirs():
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if name.endswith(suffixes) and not path.is_symlink():
                    found.setdefault(path, kind)
    return [(found[path], path) for path in sorted(found, key=lambda p: hashlib.sha256(os.fsencode(p)).digest())]


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if it is too large, empty, or not text."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        if not 0 < len(data) <= MAX_FILE_BYTES or b"\0" in data:
            return None
        return data.decode()
    except (OSError, EOFError, ValueError):
        return None


def collect_texts(folder: Path) -> None:
    from lt_data import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    files = list_files()
    facts: dict[str, Any] = {"python": platform.python_version(), "files_listed": len(files), "date": str(date.today())}
    with (folder / "small.jsonl").open("w") as small, (folder / "large.jsonl").open("w") as large:
        size = documents = passes = once = 0
        kinds: Counter[str] = Counter()
        first: list[str] = []
        digest = hashlib.sha256()
        while size < LARGE_BYTES:
            passes += 1
            seen: set[bytes] = set()
            for kind, path in files:
                text = read_text(path)
                if text is None or (key := hashlib.sha256(text.encode()).digest()) in seen:
                    continue
                seen.add(key)
                line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
                if size < SMALL_BYTES:
                    small.write(line)
                    digest.update(key)
                    documents += 1
                    kinds[kind] += len(text.encode())
                if size < TRAIN_BYTES:
                    first.append(text)
                large.write(line)
                size += len(text.encode())
                if size >= LARGE_BYTES:
                    break
            once = once or size
    facts["small"] = {"documents": documents, "bytes": dict(kinds), "sha256": digest.hexdigest()}
    facts["large"] = {"bytes": size, "different_bytes": min(once, size), "passes": passes}
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    Tokenizer.train(first, vocab_size=VOCAB).save(folder / "tokenizer")
    (folder / "facts.json").write_text(json.dumps(facts, indent=2))
    print(json.dumps(facts, indent=2))


def read_documents(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def batch_texts(source: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in source:
        batch.append(text)
        size += len(text)
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# Child processes; the last line of output is JSON.


def child_raw(folder: Path, workers: int, name: str = "small") -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    batches = list(batch_texts(read_documents(folder / f"{name}.jsonl")))
    with get_context("fork").Pool(workers) as pool:
        found = pool.starmap(tokenize_part, [(folder, batches[i::workers]) for i in range(workers)], chunksize=1)
    return {"cpu_s": sum(cpu for cpu, _ in found), "tokens": sum(tokens for _, tokens in found)}


def tokenize_part(folder: Path, part: list[list[str]]) -> tuple[float, int]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    tokenizer.encode_special_tokens = True  # as in prepare: special tokens in a text are plain text
    begin = time.process_time()
    tokens = sum(sum(map(len, tokenizer.encode_batch_fast(batch, add_special_tokens=False))) for batch in part)
    return time.process_time() - begin, tokens


def child_prepare(folder: Path, name: str, engine: Literal["hf", "gigatoken"], workers: int) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import lt_data

    out = folder / f"store-{os.getpid()}"
    try:
        with MemoryMonitor() as monitor:
            manifest = lt_data.prepare(
                [folder / f"{name}.jsonl"],
                tokenizer=folder / "tokenizer",
                out=out,
                bos=False,
                eos=False,
                engine=engine,
                workers=workers,
                unit_bytes=2**30 if workers == 1 else 2**24,
            )
        ids = hashlib.sha256()
        cpu = cpu_seconds()  # before comparing the ids, which is not part of the work
        store = lt_data.TokenStore(out)
        for first in range(0, store.n_tokens, 2**24):
            ids.update(store.tokens(first, min(2**24, store.n_tokens - first)).tobytes())
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {
        "cpu_s": cpu,
        "tokens": manifest.tokens,
        "text_bytes": manifest.text_bytes,
        "ids": ids.hexdigest(),
        "engine": manifest.engine["name"],
        "memory_bytes": monitor.peak_bytes,
    }


def cpu_seconds() -> float:
    """Return user and system time of this process and of its finished children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class MemoryMonitor:
    """Thread that samples the peak memory (VmHWM) of this process and of each child while they run.

    Attributes:
        peak_bytes: peak of the process itself, then of its children, largest first.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self.peak_bytes: list[int] = []

    def __enter__(self) -> MemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._record(os.getpid())
        own = self._seen.pop(os.getpid())
        self.peak_bytes = [own, *sorted(self._seen.values(), reverse=True)]

    def _poll(self) -> None:
        while not self._end.wait(0.2):
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    self._record(int(child))

    def _record(self, process: int) -> None:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:  # it has ended
            return
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmHWM" in fields:
            self._seen[process] = int(fields["VmHWM"].split()[0]) * 1024


CHILDREN = {"raw": child_raw, "prepare": child_prepare}


def run_child(folder: Path, *words: str | int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--folder", str(folder), "child", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    return json.loads(done.stdout.splitlines()[-1])


def measure_round(folder: Path, what: str) -> None:
    """Measure one round and append it to the results file."""
    if what.startswith("speed-"):
        workers = int(what.removeprefix("speed-"))
        cases: list[tuple[str | int, ...]] = [("prepare", "small", engine, workers) for engine in ENGINES]
        cases.append(("raw", workers))
    elif what.startswith("memory"):
        cases = [("prepare", name, engine, 2) for engine in ENGINES for name in ("small", "large")]
        cases = [case for case in cases if all(part in case for part in what.split("-")[1:])]
    else:
        raise SystemExit(f"{what}: collect, table, speed-1, speed-2, or memory with a part of it")
    random.shuffle(cases)
    found = {" ".join(map(str, case)): run_child(folder, *case) for case in cases}
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "found": found}) + "\n")
    for name, result in found.items():
        print(f"{name:<32} {json.dumps(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/lt-bench-prepare")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.words[0] == "child":
        kind, *rest = options.words[1:]
        print(json.dumps(CHILDREN[kind](options.folder, *(int(w) if w.isdigit() else w for w in rest))))
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compile modules once, as for users
    for word in options.words:
        if word == "collect":
            collect_texts(options.folder)
        elif word == "table":
            write_page(options.folder, options.out)
        else:
            measure_round(options.folder, word)


def write_page(folder: Path, out: Path | None) -> None:
    facts = json.loads((folder / "facts.json").read_text())
    rounds = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    lines = render_page(facts, rounds)
    if out is None:
        print("\n".join(lines))
        return
    # The page has tables of other scripts too: replace only the part between the marks.
    begin, end = "<!-- tools/bench/prepare.py -->", "<!-- end of tools/bench/prepare.py -->"
    old = out.read_text() if out.exists() else "# Benchmarks of lt-data\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(end)[2]
    out.write_text(f"{before.rstrip()}\n\n{begin}\n\n" + "\n".join(lines) + f"\n\n{end}\n{after}")


def render_page(facts: dict[str, Any], rounds: list[dict[str, Any]]) -> list[str]:
    small, large = facts["small"], facts["large"]
    kinds = ", ".join(f"{size / MB:.0f} MB {kind}" for kind, size in small["bytes"].items())
    lines = [
        "## Preparing a token store",
        "",
        f"{date.today()}, {machine_info()}. Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("tokenizers", "gigatoken", "numpy", "datasets"))
        + ". Measured by `tools/bench/prepare.py`.",
        "",
        f"Text: {sum(small['bytes'].values()) / MB:.1f} MB in {small['documents']} documents ({kinds}), SHA-256 "
        f"`{small['sha256'][:16]}`; byte-level BPE of {VOCAB} ids with Llama 3's split.",
        "",
        "| processes | what | CPU-s (median) | MB per CPU-s | of raw | rounds |",
        "|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for workers in (1, 2):
        found = [entry["found"] for entry in rounds if entry["what"] == f"speed-{workers}"]
        names = {"raw": f"raw {workers}"} | {engine: f"prepare small {engine} {workers}" for engine in ENGINES}
        if not found:
            continue
        ids = {entry[names[engine]]["ids"] for entry in found for engine in ENGINES}
        if len(ids) > 1:
            raise SystemExit(f"ids differ between engines: {ids}")
        size = found[0][names["hf"]]["text_bytes"]
        cpu = {key: [entry[name]["cpu_s"] for entry in found] for key, name in names.items()}
        for key in names:
            share = statistics.median(raw / own for raw, own in zip(cpu["raw"], cpu[key], strict=True))
            median = statistics.median(cpu[key])
            label = "raw `encode_batch_fast`" if key == "raw" else f"`prepare`, {key}"
            lines.append(
                f"| {workers} | {label} | {median:.1f} | {size / MB / median:.2f} | {share:.1%} | {len(found)} |"
            )
        faster = [hf / fast for hf, fast in zip(cpu["hf"], cpu["gigatoken"], strict=True)]
        notes.append(
            f"- {workers} process{'es' if workers > 1 else ''}: `prepare` with gigatoken takes 1/"
            f"{statistics.median(faster):.1f} of the CPU time of `prepare` with hf (rounds: "
            f"{', '.join(f'{f:.1f}' for f in faster)}), start, imports and the parity check included; all ids "
            f"identical (SHA-256 `{min(ids)[:16]}`)."
        )
    lines += ["", *notes, "", *memory_lines(rounds, large)]
    return lines


def memory_lines(rounds: list[dict[str, Any]], large: dict[str, Any]) -> list[str]:
    found = [entry["found"] for entry in rounds if entry["what"].startswith("memory")]
    if not found:
        return []
    lines = [
        f"Peak memory of a process (VmHWM), two workers; 1 GB is {large['different_bytes'] / MB:.0f} MB of "
        + "different text"
        + (", read again." if large["passes"] > 1 else "."),
        "",
        "| engine | text | parent | larger worker | other worker |",
        "|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        for name, size in (("small", "100 MB"), ("large", "1 GB")):
            case = f"prepare {name} {engine} 2"
            peaks = [entry[case]["memory_bytes"][:3] for entry in found if case in entry]
            if not peaks:
                continue
            cells = " | ".join(f"{max(column) / MB:.0f} MB" for column in zip(*peaks, strict=True))
            lines.append(f"| {engine} | {size} | {cells} |")
    return [*lines, ""]


def machine_info() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{model}, {os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB"


if __name__ == "__main__":
    main()
