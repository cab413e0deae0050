"""Text to ids and back: a thin, exact wrapper of a Hugging Face `tokenizer.json`, and the training of a new one.

The wrapper adds nothing to a text and cuts nothing off: no BOS or EOS (that is the policy of the store), no truncation,
no padding. A special token's string that stands in a text is text, never the special id, so that a document cannot
end itself, unless the caller wants the id. Cost: that of `tokenizers` (about 0.6 million ids per CPU-second) and a few
per cent.

Only this file imports `tokenizers`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from lt_data.errors import DataError
from lt_data.progress import Progress, silent
from lt_data.storage import new_folder, os_errors, write_file
from lt_data.tokenizing.files import CONFIG_FILE, MODEL_FILE, tokenizer_files

BYTES = 256  # ids that a byte-level tokenizer needs at least
Specials = Literal["text", "ids"]

# The split of Llama 3: contractions, words, numbers of at most three digits, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer and the files that make it.

    Attributes:
        files: file name -> content, all that another program needs to load the same tokenizer.
        name: where it was loaded from, for people.
        sha256: hex digest over the sorted names and contents of `files`.
        vocab_size: 1 + the highest id.
        bos_id: id that begins a document, None when the files name none.
        eos_id: id that ends a document, None when the files name none.
        pad_id: id of padding, None when the files name none.
        special_strings: the strings of the special tokens.
        added_strings: the strings of the other tokens that were added to the model and are found in any text.
    """

    def __init__(self, files: Mapping[str, bytes], *, name: str = "") -> None:
        if MODEL_FILE not in files:
            raise DataError(f"tokenizer {name or 'files'}: no {MODEL_FILE}; save the tokenizer in the fast format")
        self.files: Mapping[str, bytes] = {key: files[key] for key in sorted(files)}
        self.name = name
        self.sha256 = _digest(self.files)
        self._tokenizer = _build(self.files[MODEL_FILE], f"{name or 'tokenizer'}: {MODEL_FILE}")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer {name}: {MODEL_FILE} holds no token")
        self.vocab_size: int = 1 + max(vocabulary.values())
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_strings: tuple[str, ...] = tuple(sorted(token.content for token in added if token.special))
        self.added_strings: tuple[str, ...] = tuple(sorted(token.content for token in added if not token.special))
        self._with_specials: tokenizers.Tokenizer | None = None
        named = _named_tokens(self.files, name)
        self.bos_id: int | None = _id_of(named, "bos_token", vocabulary, name)
        self.eos_id: int | None = _id_of(named, "eos_token", vocabulary, name)
        self.pad_id: int | None = _id_of(named, "pad_token", vocabulary, name)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer from where it lies.

        Args:
            path: a folder that holds `tokenizer.json` (and the files beside it that name its special tokens), that file
                (the same), a file of another name, which is taken alone; the name of a model on a Hugging Face hub
                (`org/name@revision`, `hf://org/name`); or a URL such as `s3://bucket/prefix`.

        Raises:
            DataError: nothing there, unreadable, or not a tokenizer of this kind.
        """
        name, files = tokenizer_files(path)
        return cls(files, name=name)

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes], *, name: str = "") -> "Tokenizer":
        """Make a tokenizer from the contents of its files (see `files`)."""
        return cls(files, name=name)

    def encode_batch(self, texts: Sequence[str], *, specials: Specials = "text") -> list[np.ndarray]:
        """Encode each text alone.

        Args:
            texts: any texts.
            specials: what a special token's string in a text is: "text", or the special token ("ids").

        Returns:
            One uint32 array of ids per text.
        """
        tokenizer = self._tokenizer
        if specials == "ids":
            if self._with_specials is None:
                self._with_specials = _build(self.files[MODEL_FILE], self.name, specials="ids")
            tokenizer = self._with_specials
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int] | np.ndarray, *, skip_special: bool = False) -> str:
        """The text of some ids; with `skip_special` the special tokens are left out."""
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._tokenizer.decode(values, skip_special_tokens=skip_special)

    def save(self, folder: str | Path) -> None:
        """Write the files into a new (or empty) folder, which appears complete or not at all.

        Raises:
            DataError: the folder holds something, or the file system refuses.
        """
        folder = Path(folder)
        check_new_folder(folder)
        with new_folder(folder) as building:
            for name, content in self.files.items():
                write_file(building / name, content)


def check_new_folder(folder: Path) -> None:
    """Raise `DataError` when something stands where a tokenizer is to be saved."""
    with os_errors("read", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists and is not an empty folder: choose another place for the tokenizer")


def train_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|bos|>", "<|eos|>"),
    progress: Progress = silent,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the split of Llama 3. The same texts give the same files.

    Args:
        texts: what to learn from; walked once.
        vocab_size: ids, special tokens and the 256 bytes included. A small corpus may give fewer.
        special_tokens: the first is BOS and the last is EOS; they get the first ids.
        progress: told of the characters read.

    Returns:
        A tokenizer whose files `transformers.AutoTokenizer` loads; it adds no BOS or EOS by itself.

    Raises:
        DataError: `vocab_size` is too small for the bytes and the special tokens, or there is no text.
    """
    least = BYTES + len(special_tokens)
    if vocab_size < least:
        raise DataError(
            f"vocab_size={vocab_size}: at least {least} (256 bytes and {len(special_tokens)} special tokens)"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The properties of `tokenizers` have no setter in its type stubs.
    untyped = cast(Any, tokenizer)
    untyped.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    untyped.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            yield text
            characters += len(text)
            progress(characters, 0, "characters")

    tokenizer.train_from_iterator(counted(), trainer)
    if characters == 0:
        raise DataError("no text to train a tokenizer on: check the sources and the suffixes")
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if special_tokens:
        config |= {"bos_token": special_tokens[0], "eos_token": special_tokens[-1]}
    files = {
        MODEL_FILE: tokenizer.to_str(pretty=True).encode(),
        CONFIG_FILE: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    return Tokenizer(files, name=f"bpe-{tokenizer.get_vocab_size()}")


def _build(content: bytes, source: str, *, specials: Specials = "text") -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as exc:  # `tokenizers` raises a bare Exception or ValueError for any content it cannot read
        raise DataError(f"{source}: not a tokenizer that `tokenizers` {tokenizers.__version__} reads ({exc})") from exc
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(f"{source}: the model has dropout, so its ids are random; set dropout to null")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cast(Any, tokenizer).encode_special_tokens = specials == "text"
    return tokenizer


def _named_tokens(files: Mapping[str, bytes], name: str) -> dict[str, str]:
    """The strings of bos_token, eos_token and pad_token; the configuration wins over the older map."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", CONFIG_FILE):
        if file not in files:
            continue
        try:
            values = json.loads(files[file])
        except ValueError as exc:
            raise DataError(f"tokenizer {name}: {file} is not JSON ({exc})") from exc
        for key in ("bos_token", "eos_token", "pad_token"):
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named[key] = value
    return named


def _id_of(named: Mapping[str, str], key: str, vocabulary: Mapping[str, int], name: str) -> int | None:
    if key not in named:
        return None
    if named[key] not in vocabulary:
        raise DataError(f"tokenizer {name}: {key} {named[key]!r} is not in the vocabulary of {MODEL_FILE}")
    return vocabulary[named[key]]


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
