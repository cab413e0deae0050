"""Cost of preparing a token store, beside what people would use, relative to the tokenizer alone.

    uv run python tools/bench/prepare.py [--folder F] [--rounds 5] [--processes 1 2]

The text is from a developer's machine: Python sources and documentation (of the interpreter and of its packages),
manual pages and the files under /usr/share/doc. All files are listed, ordered by the SHA-256 of the path, and read up
to 100 MB of text; exact duplicates, files over 4 MB and non-UTF-8 files are skipped. The tokenizer is a byte-level BPE
of 32000 ids with the split of Llama 3, trained on the first 20 MB. Both stay in the folder for the next run.

CPU seconds, children included, of complete processes (start, imports, reading, encoding, writing, fsync) that encode
with N processes:

    hf, gigatoken       `lt_data.prepare` by engine; both must give the same ids
    datasets            `load_dataset("json")`, `map` with the tokenizer of transformers, `save_to_disk`
    gigatoken command   `gigatoken bench`: encodes the texts and writes nothing; it takes as many threads as it likes
    raw                 `encode_batch_fast` of `tokenizers` over the same texts in memory, in batches of 1 MB, nothing
                        else counted, the ids discarded

Each round measures each case once, in random order; ratios are taken within a round. Memory is the largest resident
set of a process.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import describe_machine, format_table, run_child

MB = 10**6
TEXT_BYTES, TRAIN_BYTES, MAX_FILE_BYTES = 100 * MB, 20 * MB, 4 * MB
VOCAB = 32000
SEPARATOR = "<|separator|>"
LABELS = {
    "raw": "raw `encode_batch_fast`",
    "hf": "`lt data prepare`, hf",
    "gigatoken": "`lt data prepare`, gigatoken",
    "datasets": "`datasets.map`, `save_to_disk`",
    "gigatoken command": "`gigatoken bench`, nothing written",
}


def list_files() -> list[Path]:
    code = (".py", ".pyi", ".md", ".rst", ".txt")
    places = [(sysconfig.get_path(name), code) for name in ("stdlib", "purelib")]
    places += [("/usr/lib/python3", code), ("/usr/share/man", (".gz",))]
    places += [("/usr/share/doc", (".gz", ".txt", ".md", ".rst", "copyright", "README", "NEWS"))]
    found = {
        Path(folder, name)
        for root, suffixes in places
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(suffixes) and not Path(folder, name).is_symlink()
    }
    return sorted(found, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if it is too large, empty, or not text."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        return data.decode() if 0 < len(data) <= MAX_FILE_BYTES and b"\0" not in data else None
    except (OSError, EOFError, ValueError):
        return None


def collect_texts(folder: Path) -> None:
    """Write text.jsonl, text.txt with separators, tokenizer/ and facts.json."""
    from lt_data import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    size, seen, first, digest = 0, set[bytes](), list[str](), hashlib.sha256()
    with (folder / "text.jsonl").open("w") as out, (folder / "text.txt").open("w") as plain:
        for path in list_files():
            text = read_text(path)
            if text is None or (key := hashlib.sha256(text.encode()).digest()) in seen:
                continue
            seen.add(key)
            line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
            out.write(line)
            plain.write(text + SEPARATOR)
            digest.update(line.encode())
            if size < TRAIN_BYTES:
                first.append(text)
            size += len(text.encode())
            if size >= TEXT_BYTES:
                break
    Tokenizer.train(first, vocab_size=VOCAB).save(folder / "tokenizer")
    facts = {"documents": len(seen), "bytes": size, "sha256": digest.hexdigest()}
    (folder / "facts.json").write_text(json.dumps(facts))


# Cases: each runs in a process of its own.


def run_prepare(folder: Path, out: Path, engine: Any, processes: int) -> str:
    """Return a hash of the ids."""
    import lt_data

    lt_data.prepare(
        [folder / "text.jsonl"],
        tokenizer=folder / "tokenizer",
        out=out,
        bos=False,
        eos=False,
        engine=engine,
        workers=processes,
        unit_bytes=2**30 if processes == 1 else 2**24,
    )
    return "\n".join(shard.sha256 for shard in lt_data.TokenStore(out).manifest.shards)


def run_datasets(folder: Path, out: Path, processes: int) -> None:
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer/tokenizer.json"))
    texts: Any = load_dataset(
        "json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(out / "cache")
    )
    texts.map(
        lambda batch: {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        num_proc=processes if processes > 1 else None,
        remove_columns=["text"],
    ).save_to_disk(out / "ids")


def batch_texts(folder: Path) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    with (folder / "text.jsonl").open() as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            size += len(batch[-1])
            if size >= 1 << 20:
                yield batch
                batch, size = [], 0
    yield batch


def run_raw(folder: Path) -> float:
    """Return the CPU seconds of encoding alone; as many for any number of processes."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    tokenizer.encode_special_tokens = True  # as in prepare: special tokens in a text are plain text
    batches = list(batch_texts(folder))
    before = sum(os.times()[:2])
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return sum(os.times()[:2]) - before


def run_case(name: str, folder: Path, processes: int) -> None:
    """Run a case and print what it took as JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out = Path(tempfile.mkdtemp(dir=folder))
    found: dict[str, Any] = {}
    try:
        if name == "raw":
            found["cpu_s"] = run_raw(folder)
        elif name == "datasets":
            run_datasets(folder, out, processes)
        elif name == "gigatoken command":
            command = [str(Path(sys.executable).parent / "gigatoken"), "bench", "--doc-separator", SEPARATOR]
            files = [str(folder / "tokenizer/tokenizer.json"), str(folder / "text.txt")]
            subprocess.run([*command, *files], check=True, stdout=subprocess.DEVNULL)
        else:
            found["ids"] = run_prepare(folder, out / "store", name, processes)
    finally:
        shutil.rmtree(out)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(one.ru_utime + one.ru_stime for one in usage)
    print(json.dumps({"cpu_s": spent, "peak_bytes": max(one.ru_maxrss for one in usage) * 1024} | found))


def measure(folder: Path, processes: int, rounds: int) -> list[list[str]]:
    """Return the rows of the table for a number of processes."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LABELS}
    for _ in range(rounds):
        for name in random.sample(list(LABELS), len(LABELS)):
            options = ["--folder", folder, "--processes", str(processes), "--child", name]
            found[name].append(run_child([sys.executable, __file__, *options]))
            print(processes, name, found[name][-1]["cpu_s"], file=sys.stderr, flush=True)
    ids = {one["ids"] for name in ("hf", "gigatoken") for one in found[name]}
    assert len(ids) == 1, f"the engines give different ids: {ids}"
    size = json.loads((folder / "facts.json").read_text())["bytes"] / MB
    rows = []
    for name, measured in found.items():
        cpu = [one["cpu_s"] for one in measured]
        share = statistics.median(raw["cpu_s"] / own for raw, own in zip(found["raw"], cpu, strict=True))
        peak = max(one["peak_bytes"] for one in measured) / 2**20
        median = statistics.median(cpu)
        rows.append(
            [str(processes), LABELS[name], f"{median:.1f}", f"{size / median:.2f}", f"{share:.0%}", f"{peak:.0f}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/lt-bench-prepare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--child", choices=["collect", *LABELS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "collect":
        collect_texts(options.folder)
        return
    if options.child:
        run_case(options.child, options.folder, options.processes[0])
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compile modules once, as for users
    if not (options.folder / "facts.json").exists():  # in a process of its own: a child's peak begins at its parent's
        subprocess.run([sys.executable, __file__, "--folder", str(options.folder), "--child", "collect"], check=True)
    facts = json.loads((options.folder / "facts.json").read_text())
    rows = [row for processes in options.processes for row in measure(options.folder, processes, options.rounds)]
    n_bytes, documents, sha256 = facts["bytes"], facts["documents"], facts["sha256"]
    print(describe_machine("tokenizers", "gigatoken", "numpy", "datasets", "transformers"))
    print(f"\n{n_bytes / MB:.1f} MB of text in {documents} documents, SHA-256 `{sha256[:16]}`; byte-level BPE of")
    print(f"{VOCAB} ids with Llama 3's split. Medians of {options.rounds} rounds.\n")
    print(*format_table(["processes", "what", "CPU s", "MB per CPU s", "of raw", "memory MiB"], rows), sep="\n")


if __name__ == "__main__":
    main()
