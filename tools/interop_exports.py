"""Interoperability of exports: other programs read ours and we import theirs, bit for bit.

Run as `uv run python tools/interop_exports.py`. Two stores of random documents (16-bit and 32-bit ids) are exported.
Each reader runs in an environment of its own made by uv, because its pins conflict with ours, and compares every
sample. Its writer writes the same documents; they are imported, and its files are compared with ours byte for byte
where the format determines them.

    megatron   megatron-core: IndexedDataset, IndexedDatasetBuilder
    hf         datasets 2.19, an old version with other names of column types (the package's tests read the newest)

The first run downloads what uv's cache lacks (with torch several GB). Everything else is in a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 128
MAX_FILE_BYTES = 40_000  # several files each
STORES = {"narrow": 5_000, "wide": 70_000}  # vocabularies
REQUIREMENTS = {
    "megatron": ("megatron-core==0.16.1", "torch"),
    "hf": ("datasets==2.19.2",),
}
EXIT_NOT_INSTALLED = 3
"""Exit code if a reader could not be installed and the others found no difference."""
EXPORTS: dict[str, dict[str, dict[str, Any]]] = {
    "megatron": {"documents": {}},
    "hf": {"documents": {}, "rows": {"seq_len": SEQ_LEN, "packing": "bfd"}},
}


# --- In our environment ---------------------------------------------------------------------------------------------


def export_stores(folder: Path, peer: str) -> None:
    """Export both stores in the format of a peer, and save the expected contents."""
    from lt_data import Document, RowReader, TokenStore, pack, prepare
    from lt_data.exports.export import export
    from lt_data.exports.options import ExportOptions

    for name, vocabulary in STORES.items():
        rng = np.random.default_rng(vocabulary)
        lengths = np.minimum(1 + rng.lognormal(4.5, 1.2, 400).astype(int), 3000)
        documents = [
            Document(ids=rng.integers(0, vocabulary - 2, size=n), source=str(i)) for i, n in enumerate(lengths.tolist())
        ]
        store_folder = folder / name / "store"
        prepare(documents, tokenizer=make_tokenizer(vocabulary), out=store_folder, shard_tokens=20_000)
        store = TokenStore(store_folder)
        for shape, options in EXPORTS[peer].items():
            export_options = ExportOptions(to=peer, file_bytes=MAX_FILE_BYTES, **options)  # pyright: ignore[reportArgumentType]
            export(store, out=folder / name / shape, options=export_options)
        reader = RowReader(store, pack(store, seq_len=SEQ_LEN, mode="bfd"))
        rows = reader.read_rows(np.arange(reader.n_rows))
        np.savez(
            folder / name / "expected.npz",
            tokens=store.tokens(0, store.n_tokens),
            lengths=store.lengths,
            input_ids=rows.input_ids,
            mask=rows.doc_ids >= 0,
            labels=rows.labels,
            pad=np.int64(vocabulary - 1),
        )


def make_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer with that many ids, the last two of which are BOS and EOS."""
    import tokenizers
    from tokenizers import models

    from lt_data import Tokenizer

    words = {f"w{i}": i for i in range(vocabulary - 2)} | {"<s>": vocabulary - 2, "</s>": vocabulary - 1}
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()
    model = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0")).to_str().encode()
    return Tokenizer({"tokenizer.json": model, "tokenizer_config.json": config}, name=str(vocabulary))


def compare_imports(folder: Path, peer: str) -> list[str]:
    """Import the peer's files and compare stores and files with ours; return a line for each comparison."""
    from lt_data import SourceOptions, TokenStore, prepare
    from lt_data.exports.import_tokens import import_tokens
    from lt_data.exports.options import ImportOptions

    same: list[str] = []
    for name, vocabulary in STORES.items():
        store = TokenStore(folder / name / "store")
        theirs, tokenizer, back = folder / name / "theirs", make_tokenizer(vocabulary), folder / name / "back"
        if peer == "hf":
            source_options = SourceOptions(tokens_field="input_ids")
            prepare([theirs], options=source_options, tokenizer=tokenizer, out=back, bos=False, eos=False)
        else:
            import_tokens(theirs, options=ImportOptions(format="megatron"), tokenizer=tokenizer, out=back)
        back = TokenStore(back)
        assert np.array_equal(back.lengths, store.lengths), f"{name}: documents differ"
        assert np.array_equal(back.tokens(0, back.n_tokens), store.tokens(0, store.n_tokens)), f"{name}: ids differ"
        same.append(f"{name}: {back.n_documents} documents, {back.n_tokens} tokens of its writer imported")
        if peer == "hf":
            continue  # its files are split differently and have another version
        ours = folder / name / "documents"
        theirs = sorted(theirs.iterdir())
        files = [path for path in sorted(ours.iterdir()) if path.suffix in (".bin", ".idx")]
        assert [path.name for path in files] == [path.name for path in theirs], f"{name}: file names differ"
        for ours_file, theirs_file in zip(files, theirs, strict=True):
            assert ours_file.read_bytes() == theirs_file.read_bytes(), f"{name}: {ours_file.name} differs"
        same.append(f"{name}: {len(files)} files are byte-identical to those of its writer")
    return same


def is_installable(peer: str) -> bool:
    """Return whether uv can create the peer's environment; print the reason if not."""
    try:
        done = run_isolated(peer, ["-c", ""], Path.cwd())
    except FileNotFoundError:
        print(f"{peer}: not tried: uv is not installed", flush=True)
        return False
    if done.returncode:
        print(f"{peer}: not tried: uv cannot install it:\n{done.stderr[-2000:]}", flush=True)
    return done.returncode == 0


def run_peer(peer: str) -> bool:
    """Run one peer from export to comparison; return True if everything is equal."""
    with tempfile.TemporaryDirectory(prefix="lt-peers-") as name:
        folder = Path(name)
        export_stores(folder, peer)
        arguments = [str(Path(__file__).resolve()), "--child", peer, str(folder)]
        done = run_isolated(peer, arguments, folder)
        if done.returncode:
            print(f"{peer}: FAILED\n{done.stderr[-3000:]}", flush=True)
            return False
        found = json.loads(done.stdout.splitlines()[-1])
        for line in [*found["checks"], *compare_imports(folder, peer)]:
            print(f"{peer} ({found['version']}): {line}", flush=True)
    return True


def run_isolated(peer: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run python with these arguments in an environment with only the requirements of the peer."""
    command = ["uv", "run", "--isolated", "--no-project", "--no-config", "--python", sys.executable]
    for requirement in REQUIREMENTS[peer]:
        command += ["--with", pin_installed_version(requirement)]
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(
        [*command, "python", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def pin_installed_version(requirement: str) -> str:
    """Pin torch to the installed version, so that uv need not download another."""
    if requirement != "torch":
        return requirement
    return f"torch=={importlib.metadata.version('torch').partition('+')[0]}"


# --- In the environment of the peer, without lt_data ----------------------------------------------------------------


def load_expected(folder: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Load the expected arrays and documents."""
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    return expected, np.split(expected["tokens"], np.cumsum(expected["lengths"])[:-1])


def child_megatron(folder: Path) -> tuple[str, list[str]]:
    torch: Any = importlib.import_module("torch")
    module = importlib.import_module("megatron.core.datasets.indexed_dataset")
    checks: list[str] = []
    for name in STORES:
        expected, documents = load_expected(folder / name)
        for mmap in (True, False):
            read = module.IndexedDataset(str(folder / name / "documents" / "tokens"), mmap=mmap)
            assert len(read) == len(documents)
            assert np.array_equal(read.document_indices, np.arange(len(documents) + 1))
            assert np.array_equal(read.sequence_lengths, expected["lengths"])
            for i, ids in enumerate(documents):
                assert np.array_equal(read[i], ids), f"document {i}"
                assert np.array_equal(read.get(i, offset=ids.size // 2), ids[ids.size // 2 :]), f"document {i}"
        checks.append(f"{name}: {len(documents)} documents read, mapped and by file")
        (folder / name / "theirs").mkdir()
        prefix = folder / name / "theirs" / "tokens"
        dtype = module.DType.optimal_dtype(STORES[name])
        builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for ids in documents:
            builder.add_document(torch.tensor(ids.astype(np.int64)), [ids.size])
        builder.finalize(f"{prefix}.idx")
    return f"megatron-core {importlib.metadata.version('megatron-core')}", checks


def child_hf(folder: Path) -> tuple[str, list[str]]:
    datasets: Any = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    checks: list[str] = []
    for name in STORES:
        expected, documents = load_expected(folder / name)
        read = datasets.load_from_disk(str(folder / name / "documents"))
        assert [row["input_ids"] for row in read] == [ids.tolist() for ids in documents]
        rows = datasets.load_from_disk(str(folder / name / "rows"))
        mask = expected["mask"]
        assert np.array_equal(rows["attention_mask"], mask)
        assert np.array_equal(rows["input_ids"], np.where(mask, expected["input_ids"], expected["pad"]))
        assert np.array_equal(np.array(rows["labels"])[:, 1:], expected["labels"][:, :-1])
        checks.append(f"{name}: {len(read)} documents and {len(rows)} rows read")
        made = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents]})
        made.save_to_disk(str(folder / name / "theirs"), num_shards=3)
    return f"datasets {datasets.__version__}", checks


def run_child(peer: str, folder: Path) -> None:
    """Compare in the environment of the peer; print the result as JSON on the last line."""
    version, checks = {"megatron": child_megatron, "hf": child_hf}[peer](folder)
    print(json.dumps({"version": version, "checks": checks}), flush=True)


def main() -> int:
    """Run the given peers, or all; return 0 if everything is equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peers", nargs="*", choices=[*REQUIREMENTS, []], default=[])
    parser.add_argument("--child", nargs=2, metavar=("PEER", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child[0], Path(arguments.child[1]))
        return 0
    failed = absent = False
    for peer in arguments.peers or REQUIREMENTS:
        if not is_installable(peer):
            absent = True
            continue
        failed |= not run_peer(peer)
    return 1 if failed else EXIT_NOT_INSTALLED if absent else 0


if __name__ == "__main__":
    sys.exit(main())
