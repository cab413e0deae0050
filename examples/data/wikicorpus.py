"""The wikicorpus with Llama 3's tokenizer in rows of 8192 tokens, as HyperPod's Llama 3 recipe trains on it.

    python wikicorpus.py --tokenizer /fsx/Meta-Llama-3-70B --out examples_datasets/wikicorpus_llama3_tokenized_8k

Does what get_dataset.py of the recipe does: rows without padding whose labels are their ids, because the trainer shifts
them. No token is lost but those of the last row that is not full, which are counted. Unlike there, documents begin
with BOS and end with EOS (--no-borders leaves them out). wikicorpus has a loading script, which `datasets` no longer
runs, so the parquet files are read that the hub made of it.
"""

import argparse
from pathlib import Path

import lt_data
from lt_data.exports.export import export
from lt_data.exports.options import ExportOptions

WIKICORPUS = "hf://datasets/gsarti/wikicorpus@refs%2Fconvert%2Fparquet/raw_en/train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=WIKICORPUS)
    parser.add_argument("--tokenizer", default="meta-llama/Meta-Llama-3-70B", help="of the hub, a folder, an S3 prefix")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("examples_datasets/wikicorpus_llama3_tokenized_8k"))
    parser.add_argument("--store", type=Path, default=Path("examples_datasets/wikicorpus_llama3_store"))
    parser.add_argument("--no-borders", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()

    borders = not options.no_borders
    lt_data.prepare(
        [options.source],
        tokenizer=options.tokenizer,
        out=options.store,
        bos=borders,
        eos=borders,
        workers=options.workers,
    )
    rows = ExportOptions(to="hf", seq_len=options.seq_len, last_row="drop", labels="copy")
    done = export(options.store, out=options.out, options=rows)
    print(f"{done.samples} rows of {options.seq_len} tokens in {options.out}; {done.dropped_tokens} tokens left over")


if __name__ == "__main__":
    main()
