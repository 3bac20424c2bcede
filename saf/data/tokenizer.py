"""The tokenizer of a data folder: byte-level BPE in the `tokenizers` file format, given or trained on the text."""

import heapq
import importlib
import warnings
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from saf.data.config import PrepareConfig
from saf.data.cutting import Cutter
from saf.data.documents import (
    ReadingCounts,
    are_few,
    limited_texts,
    lowest_keys,
    may_be_held_out,
    order_key,
    split_text,
)
from saf.data.sources import Source
from saf.data.utf8 import decoded, digest_of
from saf.errors import DataError, InputError, SafWarning
from saf.records.files import read_json, write_json

EOT = "<|endoftext|>"
# Names of the token that ends a document, for tokenizer files that nothing beside them tells it of.
_EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
CONFIG_FILE = "tokenizer_config.json"
_HUB_FILES = ["tokenizer.json", CONFIG_FILE, "special_tokens_map.json", *_GPT2_FILES[0], *_GPT2_FILES[1]]
_GPT2_REPOSITORY = "openai-community/gpt2"
PIECE_CHARACTERS = 2**16
"""Longest piece that is drawn as a whole, so that one large file cannot be most of the sample."""
# A sample is drawn from the beginning of a large source, not from all of it: this many times its own size.
LOOK_AHEAD = 16


def tokenizers_package():
    """Import `tokenizers`; raise DataError when it is missing."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise DataError("tokenising needs a package: pip install tokenizers") from error


class Tokenizer:
    """Turn text into token ids and back. Text that spells a special token is ordinary text, never that token."""

    def __init__(self, data: bytes, *, name: str = "tokenizer.json", eos: str | None = None):
        """Build from the bytes of a tokenizer.json; raise DataError when they are not one.

        `eos` is the token that ends a document; one of the usual names, where the vocabulary has it, when None.
        Its own truncation and padding are switched off, with a SafWarning: `save` writes it without them.
        """
        try:
            self._backend = tokenizers_package().Tokenizer.from_str(data.decode("utf-8"))
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{name}: not a tokenizer file ({error}); expected a tokenizer.json") from error
        self._backend.encode_special_tokens = True
        if settings := whole_texts_(self._backend):
            data = _serialised(self._backend)
            warnings.warn(
                f"{name}: its {' and '.join(settings)} switched off, so that all text becomes tokens",
                SafWarning,
                stacklevel=2,
            )
        self._data = data
        self._cutter = Cutter(self._backend)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        names = _EOT_NAMES if eos is None else (eos,)
        self.eot_token = next((token for token in names if token in vocabulary), "")
        if not self.eot_token:
            raise DataError(
                f"{name}: no end-of-text token; its vocabulary must have one of {', '.join(names)}, or the eos_token "
                f"of a {CONFIG_FILE} beside it"
            )
        self.eot_id: int = vocabulary[self.eot_token]
        self.fingerprint = sha256(data).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or a folder with one or with GPT-2's two files.

        Raises DataError when there is neither, or one of them is damaged.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            return cls(file.read_bytes(), name=str(file), eos=_eos_token(file.parent))
        for vocabulary, merges in _GPT2_FILES:
            if (path / vocabulary).is_file() and (path / merges).is_file():
                return cls.from_gpt2_files(path / vocabulary, path / merges)
        pairs = ", ".join(" + ".join(pair) for pair in _GPT2_FILES)
        raise DataError(f"{path}: no tokenizer there; give --tokenizer a folder with tokenizer.json, or {pairs}")

    @classmethod
    def from_gpt2_files(cls, vocabulary: str | Path, merges: str | Path) -> "Tokenizer":
        """Build GPT-2's byte-level BPE from its vocabulary (JSON) and its merges (text)."""
        package = tokenizers_package()
        try:
            model = package.models.BPE.from_file(str(vocabulary), str(merges))
        except Exception as error:
            raise DataError(f"{vocabulary}, {merges}: not GPT-2's vocabulary and merges ({error})") from error
        return cls(_serialised(byte_level(model)), name=str(vocabulary), eos=_eos_token(Path(vocabulary).parent))

    @classmethod
    def from_hub(cls, repository: str = _GPT2_REPOSITORY) -> "Tokenizer":
        """Download a tokenizer; raise DataError when the network or the package is not there."""
        try:
            folder = importlib.import_module("huggingface_hub").snapshot_download(repository, allow_patterns=_HUB_FILES)
        except Exception as error:
            raise DataError(
                f"{repository}: no such folder here, and its tokenizer could not be downloaded "
                f"({type(error).__name__}: {error}); offline, give a folder with tokenizer.json, or with "
                "encoder.json and vocab.bpe, instead"
            ) from error
        return cls.load(folder)

    def save(self, path: str | Path):
        """Write the tokenizer.json."""
        Path(path).write_bytes(self._data)

    def save_config(self, path: str | Path):
        """Write the tokenizer_config.json that names the end-of-text token."""
        write_json(Path(path), {"eos_token": self.eot_token, "tokenizer_class": "PreTrainedTokenizerFast"})

    def pieces(self, data: bytes) -> Iterator[memoryview]:
        """Cut a UTF-8 text into pieces whose tokens are those of the whole; raise DataError where none can be found."""
        return self._cutter.pieces(data)

    def same(self, other: "Tokenizer") -> bool:
        """Return whether another one makes the same tokens of every text, however its file is laid out."""
        return self._backend.to_str(pretty=False) == other._backend.to_str(pretty=False)

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids, no end-of-text added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, on all cores."""
        return [row.ids for row in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens spelled out."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)


def _eos_token(folder: Path) -> str | None:
    """Return the eos_token that the files of transformers beside a tokenizer name; None without them."""
    for name in (CONFIG_FILE, "special_tokens_map.json"):
        if (folder / name).is_file():
            token = read_json(folder / name, error=DataError).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                return str(token)
    return None


def whole_texts_(backend) -> list[str]:
    """Switch off a tokenizer's own truncation and padding, meant for batches of a model; return what there was."""
    found = {"truncation": backend.truncation, "padding": backend.padding}
    if found["truncation"]:
        backend.no_truncation()
    if found["padding"]:
        backend.no_padding()
    return [
        f"{name} (to {setting['max_length'] if name == 'truncation' else setting['length'] or 'the longest'})"
        for name, setting in found.items()
        if setting
    ]


def byte_level(model):
    """Wrap a BPE model in GPT-2's splitting of bytes into words, with an end-of-text token."""
    package = tokenizers_package()
    backend = package.Tokenizer(model)
    backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = package.decoders.ByteLevel()
    backend.add_special_tokens([EOT])
    return backend


def train_bpe(texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with GPT-2's word splitting on texts; end-of-text is token 0.

    The vocabulary comes out smaller than `vocab_size` when the texts have too few pairs to merge. Raises
    InputError when it has no room for the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise InputError(f"vocab_size must be at least 257 (256 bytes and end-of-text); got {vocab_size}")
    package = tokenizers_package()
    backend = package.Tokenizer(package.models.BPE())
    backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(_serialised(backend))


def _serialised(backend) -> bytes:
    """Return the tokenizer's file as bytes."""
    return backend.to_str(pretty=False).encode()


def choose_tokenizer(sources: Sequence[Source], config: PrepareConfig) -> tuple[Tokenizer, dict | None]:
    """Return the tokenizer that the settings ask for, and what it was trained on (None for a given one)."""
    if config.tokenizer == "gpt2":
        return Tokenizer.from_hub(), None
    if config.tokenizer != "bpe":
        named = config.tokenizer.count("/") == 1 and not Path(config.tokenizer).exists()
        return (Tokenizer.from_hub if named else Tokenizer.load)(config.tokenizer), None
    sample, facts = sample_text(sources, config)
    return train_bpe(sample, vocab_size=config.vocab_size), facts


def sample_text(sources: Sequence[Source], config: PrepareConfig) -> tuple[list[str], dict]:
    """Return pieces of training text, at most `tokenizer_bytes`, and how they were drawn.

    Pieces of 65,536 characters are drawn by seeded content hash from the first `16 * tokenizer_bytes` bytes. A
    document that may be held out is never used; where there are few, all are read to know which may.
    """
    counts, read = ReadingCounts(), _Read(config)
    texts = limited_texts(sources, config, counts, lambda count: None)
    heap: list[tuple[int, int, str, int]] = []
    total = 0
    for key, piece, document in _pieces(texts, read, config.seed):
        size = len(piece.encode())
        heapq.heappush(heap, (key, size, piece, document))
        total += size
        while total > config.tokenizer_bytes and len(heap) > 1:
            total -= heapq.heappop(heap)[1]
        if counts.bytes >= LOOK_AHEAD * config.tokenizer_bytes:
            break
    drawn_from = counts.bytes
    while read.few and (data := next(texts, None)) is not None:
        read.take(data)
    kept_back = read.kept_back()
    pieces = [piece for _, _, piece, document in sorted(heap) if document not in kept_back]
    return pieces, {
        "bytes": sum(len(piece.encode()) for piece in pieces),
        "pieces": len(pieces),
        "drawn_from_bytes": drawn_from,
    }


def _pieces(texts: Iterator[bytes], read: "_Read", seed: int) -> Iterator[tuple[int, str, int]]:
    """Yield pieces of the sampled texts, each with its place in the order and its document's key."""
    for data in texts:
        document = read.take(data)
        if not read.is_lowest(document):
            for piece in split_text(decoded(data), PIECE_CHARACTERS):
                yield order_key(digest_of(piece.encode()), seed), piece, document


class _Read:
    """Hold the keys and sizes of documents that were read, as long as they are few, to know which may be held out."""

    def __init__(self, config: PrepareConfig):
        self._seed, self._fraction = config.seed, config.fraction
        self._lowest = 0 if self._fraction is None else lowest_keys(self._fraction)
        self._sizes: dict[int, int] = {}
        self.few = self._fraction is not None
        """Whether it takes all of them to know."""

    def take(self, data: bytes) -> int:
        """Take note of a document, and return its key."""
        key = order_key(digest_of(data), self._seed)
        if self.few and self._fraction is not None:
            self._sizes[key] = len(data)
            self.few = are_few(len(self._sizes), self._fraction)
        return key

    def is_lowest(self, key: int) -> bool:
        """Return whether a document may be held out whatever the others are."""
        return key < self._lowest

    def kept_back(self) -> set[int]:
        """Return the keys of the documents that may be held out for want of others."""
        if not self.few or self._fraction is None:
            return set()
        keys = np.fromiter(self._sizes, dtype=np.uint64)
        sizes = np.fromiter(self._sizes.values(), dtype=np.int64)
        return set(keys[may_be_held_out(keys, sizes, self._fraction)].tolist())
