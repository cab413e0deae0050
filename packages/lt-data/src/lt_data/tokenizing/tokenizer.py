"""Exact wrapper of a Hugging Face `tokenizer.json`, and BPE training.

The wrapper adds no BOS or EOS (the store does), truncates nothing and pads nothing. A special token's string in a text
is encoded as text, so that a document cannot contain an EOS id, unless the caller requests the id. Cost: that of
`tokenizers` (about 0.6 million ids per CPU-second) plus a few percent. Memory: about 114 bytes per character, of 2^19
characters or one text at a time.

Only this file imports `tokenizers`.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.storage import atomic_folder, write_file
from lt_data.tokenizing.files import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILES, read_tokenizer_files
from lt_data.tokenizing.special_tokens import SpecialTokens, read_special_tokens

N_BYTES = 256  # ids of single bytes in a byte-level tokenizer
SpecialTokensAs = Literal["text", "ids"]
_CALL_CHARACTERS = 1 << 19  # per call of `tokenizers`
_REFUSED_IF_MISSING = ("bos_token", "eos_token", "pad_token")

# Contractions, words, numbers of at most three digits, punctuation, line ends, spaces.
LLAMA3_SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with each digit alone.
QWEN2_SPLIT_REGEX = LLAMA3_SPLIT_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
SplitRule = Literal["llama3", "qwen2"]
"""Rule that divides text before the merges: the regex of Llama 3, or NFC and the regex of Qwen2."""


class TokenizerFailure(DataError):
    """Failure of the tokenizer on a text."""


class Tokenizer:
    """Tokenizer and its files.

        >>> tokenizer = Tokenizer.train(["A text.", "Another one."], vocab_size=260)
        >>> tokenizer.decode(tokenizer.encode("A text."))
        'A text.'

    Attributes:
        files: file name -> content: everything needed to load the same tokenizer.
        name: its origin, for messages.
        sha256: hex digest over the sorted names and contents of `files`.
        vocab_size: 1 + the highest id.
        bos_id: BOS id, None if the files name none.
        eos_id: EOS id, None if the files name none.
        pad_id: padding id, None if the files name none.
        special_strings: strings of the special tokens.
        definition: tokenizer.json, with the tokens that only the other files name.
    """

    def __init__(self, files: Mapping[str, bytes], *, name: str = "") -> None:
        if MODEL_FILE not in files:
            raise DataError(f"tokenizer {name or 'files'}: no {MODEL_FILE}; save the tokenizer in the fast format")
        self.files: Mapping[str, bytes] = {key: files[key] for key in sorted(files)}
        self.name = name
        self.sha256 = _digest(self.files)
        self._tokenizer = _build_tokenizer(self.files[MODEL_FILE], f"{name or 'tokenizer'}: {MODEL_FILE}")
        special = read_special_tokens(self.files, name)
        is_changed = _add_tokens(self._tokenizer, special)
        self.definition: bytes = self._tokenizer.to_str().encode() if is_changed else self.files[MODEL_FILE]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer {name}: {MODEL_FILE} has no tokens")
        self.vocab_size: int = 1 + max(vocabulary.values())
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_strings: tuple[str, ...] = tuple(sorted(token.content for token in added if token.special))
        self._with_specials: tokenizers.Tokenizer | None = None
        self.bos_id: int | None = _token_id(special, "bos_token", vocabulary, name)
        self.eos_id: int | None = _token_id(special, "eos_token", vocabulary, name)
        self.pad_id: int | None = _token_id(special, "pad_token", vocabulary, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process needs to make the same tokenizer."""
        return _make_tokenizer, (dict(self.files), self.name)

    @classmethod
    def load(cls, source: Any) -> "Tokenizer":
        """Load a tokenizer from a path, the hub or a URL, or convert one of another library.

        Args:
            source: a folder with `tokenizer.json` (and the files that name its special tokens) or that file; a file of
                another name, which is loaded alone; a model of the Hugging Face hub (`org/name@revision`,
                `hf://org/name`); a URL such as `s3://bucket/prefix`; a `tokenizers.Tokenizer`, which names no BOS or
                EOS; or a fast tokenizer of transformers.

        Raises:
            DataError: missing, unreadable, or not a supported tokenizer.
        """
        if isinstance(source, Tokenizer):
            return cls(source.files, name=source.name)
        if isinstance(source, str | Path):
            name, files = read_tokenizer_files(source)
            return cls(files, name=name)
        if isinstance(source, tokenizers.Tokenizer):
            return cls({MODEL_FILE: source.to_str().encode()}, name="of tokenizers")
        if not hasattr(source, "save_pretrained"):
            raise DataError(
                f"tokenizer: a {type(source).__name__}; give a path, a model of the hub, or a tokenizer of tokenizers "
                "or transformers"
            )
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            paths = [Path(folder, name) for name in TOKENIZER_FILES]
            files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        return cls(files, name=str(getattr(source, "name_or_path", "") or "of transformers"))

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes], *, name: str = "") -> "Tokenizer":
        """Create a tokenizer from the contents of its files (see `files`)."""
        return cls(files, name=name)

    @staticmethod
    def train(
        texts: Iterable[str],
        *,
        vocab_size: int,
        special_tokens: Sequence[str] = ("<|bos|>", "<|eos|>"),
        split: SplitRule = "llama3",
        progress: Progress = no_progress,
    ) -> "Tokenizer":
        """Train a byte-level BPE tokenizer, deterministically.

        Args:
            texts: training texts, iterated once.
            vocab_size: number of ids, including special tokens and the 256 bytes. A small corpus may give fewer.
            special_tokens: the first is BOS and the last is EOS; they get the first ids.
            split: rule that divides text before the merges; a model of type qwen2 needs "qwen2".
            progress: called with the characters read.

        Returns:
            A tokenizer whose files `transformers.AutoTokenizer` can load; it adds no BOS or EOS.

        Raises:
            DataError: `vocab_size` is too small for the bytes and the special tokens, the rule is unknown, or there is
                no text.
        """
        if split not in get_args(SplitRule):
            raise DataError(f"split = {split!r}: choose {' or '.join(get_args(SplitRule))}")
        min_size = N_BYTES + len(special_tokens)
        if vocab_size < min_size:
            raise DataError(
                f"vocab_size = {vocab_size}: at least {min_size} (256 bytes and {len(special_tokens)} special tokens)"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        _set_split(tokenizer, split)
        cast(Any, tokenizer).decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        characters = 0

        def iter_texts() -> Iterator[str]:
            nonlocal characters
            for text in texts:
                yield text
                characters += len(text)
                progress(characters, 0, "characters")

        tokenizer.train_from_iterator(iter_texts(), trainer)
        if characters == 0:
            raise DataError("no text to train a tokenizer on: check the sources and the suffixes")
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if special_tokens:
            config |= {"bos_token": special_tokens[0], "eos_token": special_tokens[-1]}
        files = {
            MODEL_FILE: tokenizer.to_str(pretty=True).encode(),
            CONFIG_FILE: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        }
        return Tokenizer(files, name=f"bpe-{tokenizer.get_vocab_size()}")

    def encode(self, text: str, *, special_tokens_as: SpecialTokensAs = "text") -> np.ndarray:
        """Return the ids of a text (uint32 [tokens]), without BOS and EOS; see `encode_batch`."""
        return self.encode_batch([text], special_tokens_as=special_tokens_as)[0]

    def encode_batch(self, texts: Sequence[str], *, special_tokens_as: SpecialTokensAs = "text") -> list[np.ndarray]:
        """Encode each text independently.

        Args:
            texts: any texts.
            special_tokens_as: encode special token strings as "text" or as special "ids".

        Returns:
            One uint32 array of ids per text.

        Raises:
            DataError: the tokenizer's regular expression backtracks without end on a text.
        """
        tokenizer = self._tokenizer
        if special_tokens_as == "ids":
            if self._with_specials is None:
                self._with_specials = _build_tokenizer(self.definition, self.name, special_tokens_as="ids")
            tokenizer = self._with_specials
        ids: list[np.ndarray] = []
        begin = characters = 0
        for end, text in enumerate(texts, start=1):
            characters += len(text)
            if characters >= _CALL_CHARACTERS or end == len(texts):
                ids += _encode(tokenizer, list(texts[begin:end]), self.name)
                begin, characters = end, 0
        return ids

    def decode(self, ids: Iterable[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """Decode ids to text, with `skip_special_tokens` without the special tokens."""
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._tokenizer.decode(values, skip_special_tokens=skip_special_tokens)

    def tokens_by_id(self) -> dict[int, str]:
        """Return the tokens, added ones too, by id."""
        return {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def has_split(self, split: SplitRule) -> bool:
        """Return whether this rule divides the text; a property of the files, not of ids."""
        expected = tokenizers.Tokenizer(models.BPE())
        _set_split(expected, split)
        return _split_settings(self.definition) == _split_settings(expected.to_str())

    def save(self, folder: str | Path) -> None:
        """Write the files to a new or empty folder, atomically.

        Raises:
            DataError: the folder is not empty, or a file system error.
        """
        folder = Path(folder)
        check_empty_folder(folder)
        with atomic_folder(folder) as building:
            for name, content in self.files.items():
                write_file(building / name, content)


def check_empty_folder(folder: Path) -> None:
    """Raise DataError if `folder` exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: exists and is not an empty folder; choose another folder for the tokenizer")


def _make_tokenizer(files: Mapping[str, bytes], name: str) -> Tokenizer:
    return Tokenizer(files, name=name)


def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str], name: str) -> list[np.ndarray]:
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # of pyo3, which derives it from BaseException and exports no name
            raise
        raise TokenizerFailure(f"tokenizer {name} fails on a text ({exc})") from exc
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _build_tokenizer(
    content: bytes, source: str, *, special_tokens_as: SpecialTokensAs = "text"
) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as exc:  # `tokenizers` raises bare Exception or ValueError
        raise DataError(f"{source}: not a tokenizer that `tokenizers` {tokenizers.__version__} reads ({exc})") from exc
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(f"{source}: the model has dropout, so its ids are random; set dropout to null")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cast(Any, tokenizer).encode_special_tokens = special_tokens_as == "text"
    return tokenizer


def _set_split(tokenizer: tokenizers.Tokenizer, split: SplitRule) -> None:
    untyped = cast(Any, tokenizer)  # the type stubs of `tokenizers` lack these setters
    regex = LLAMA3_SPLIT_REGEX
    if split == "qwen2":
        regex = QWEN2_SPLIT_REGEX
        untyped.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    untyped.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])


def _split_settings(definition: str | bytes) -> list[Any]:
    """Return normalizer and pre-tokenizer of a tokenizer.json, without a setting that changes no id."""
    values = json.loads(definition, object_hook=lambda table: {k: v for k, v in table.items() if k != "trim_offsets"})
    return [values.get("normalizer"), values.get("pre_tokenizer")]


def _add_tokens(tokenizer: tokenizers.Tokenizer, special: SpecialTokens) -> bool:
    """Add the tokens that the tokenizer lacks, or has with other flags; return whether there are any.

    `transformers` does the same when it loads a tokenizer. BOS, EOS and padding must be in the vocabulary.
    """
    present = tokenizer.get_added_tokens_decoder().values()
    named_strings = {token.content for token in special.names.values()}
    flags_of_present = {repr(token) for token in present}
    missing: list[AddedToken] = []
    for token in special.decoder:
        added = AddedToken(token.content, **token.flags)
        if repr(added) not in flags_of_present:
            added.special |= token.content in named_strings
            missing.append(added)
    known = {token.content for token in (*present, *missing)}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for name, token in special.names.items():
        is_refused = name in _REFUSED_IF_MISSING and token.content not in vocabulary
        if token.content not in known and not is_refused:
            known.add(token.content)
            missing.append(AddedToken(token.content, **token.flags))
    for token in special.additional:
        if token.content not in known:
            known.add(token.content)
            missing.append(AddedToken(token.content, **token.flags))
    tokenizer.add_tokens(missing)
    return bool(missing)


def _token_id(special: SpecialTokens, key: str, vocabulary: Mapping[str, int], name: str) -> int | None:
    string = special.string(key)
    if string is None:
        return None
    if string not in vocabulary:
        problem = f"{key} {string!r} is not in the vocabulary of {MODEL_FILE}"
        raise DataError(f"tokenizer {name}: {problem}; load and save the tokenizer with transformers, which adds it")
    return vocabulary[string]


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
