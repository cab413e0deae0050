"""The first 10 % of SlimPajama: saved to the disk once, then read from there, without the network.

    python slimpajama.py --out data --workers 16

The folder that `save_to_disk` makes is read as it is, row by row, without `datasets`. Several machines that see the
folder share the work: run the same command on each.
"""

import argparse
from pathlib import Path

import lt_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cerebras/SlimPajama-627B")
    parser.add_argument("--split", default="train[:10%]")
    parser.add_argument("--tokenizer", default="meta-llama/Llama-2-7b-hf", help="of the hub, a folder, or an S3 prefix")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()

    saved, store = options.out / "slimpajama", options.out / "store"
    if not saved.exists():
        import datasets

        datasets.load_dataset(options.dataset, split=options.split).save_to_disk(saved)
    manifest = lt_data.prepare(
        [saved],
        tokenizer=options.tokenizer,
        out=store,
        workers=options.workers,
    )
    print(f"{manifest.documents} documents, {manifest.tokens} tokens of {manifest.text_bytes} bytes")
    pack = lt_data.pack(lt_data.TokenStore(store), seq_len=options.seq_len)
    print(f"{pack.n_rows} rows of {options.seq_len} tokens")


if __name__ == "__main__":
    main()
