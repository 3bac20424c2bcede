"""`Tokenizer` turns text into token ids; it comes from a tokenizer.json, GPT-2's files, or `train_bpe` on the text."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from saf.errors import DataError
from saf.records.files import read_json, write_json

EOT = "<|endoftext|>"
# Usual names of the token that ends a document, for tokenizer files without another file that names it.
_EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class Tokenizer:
    """Turn text into token ids and back. Text that spells a special token is ordinary text, never that token."""

    def __init__(self, data: bytes, *, name: str = TOKENIZER_FILE, eos: str | None = None):
        """Build from the bytes of a tokenizer.json, without truncation and padding.

        `name` is the file's name in messages, `eos` the token that ends a document; None takes one of the usual names.
        """
        import tokenizers

        try:
            self._backend: Any = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:
            raise DataError(f"{name}: not a tokenizer file ({error}); expected a tokenizer.json") from error
        if self._backend.truncation or self._backend.padding:  # would cut documents, or fill them up, in silence
            self._backend.no_truncation()
            self._backend.no_padding()
            data = self._backend.to_str().encode()
        # A document that spells "<|endoftext|>" would otherwise end in its middle.
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        names = _EOT_NAMES if eos is None else (eos,)
        self.eot_token = next((token for token in names if token in vocabulary), "")
        if not self.eot_token:
            raise DataError(f"{name}: no end-of-text token, one of {', '.join(names)}; name it in a {CONFIG_FILE}")
        self.eot_id: int = vocabulary[self.eot_token]
        self.vocab_size: int = max(vocabulary.values()) + 1  # not len(vocabulary): ids may have gaps
        self.fingerprint = sha256(data).hexdigest()
        self._data = data

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or a folder with one or with GPT-2's two files; raise DataError when there is none.

        The end-of-text token is the one that tokenizer_config.json or special_tokens_map.json in its folder names.
        """
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if file.is_file():
            return cls(file.read_bytes(), name=str(file), eos=_eos_token(file.parent))
        for pair in _GPT2_FILES:
            if all((path / name).is_file() for name in pair):
                backend = _byte_level(*(str(path / name) for name in pair))
                backend.add_special_tokens([EOT])
                return cls(backend.to_str().encode(), name=str(path), eos=_eos_token(path))
        pairs = ", ".join(" + ".join(pair) for pair in _GPT2_FILES)
        raise DataError(f"{path}: no tokenizer there; give --tokenizer a folder with tokenizer.json, or {pairs}")

    @classmethod
    def named(cls, name: str) -> "Tokenizer":
        """Load a tokenizer from its folder or file, or download that of gpt2 or of a model on the hub, OWNER/NAME.

        Raises DataError where there is none.
        """
        repository = "openai-community/gpt2" if name == "gpt2" else name
        if repository.count("/") != 1 or Path(repository).exists():
            return cls.load(name)
        import huggingface_hub

        try:
            folder = huggingface_hub.snapshot_download(repository, allow_patterns=["*token*.json", "vocab*", "merges*"])
        except Exception as error:
            problem = f"no such folder here, and it could not be downloaded ({type(error).__name__}: {error})"
            raise DataError(f"{repository}: {problem}; give --tokenizer a folder with tokenizer.json") from error
        return cls.load(folder)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and the tokenizer_config.json that names the end-of-text token."""
        (folder / TOKENIZER_FILE).write_bytes(self._data)
        config = {"eos_token": self.eot_token, "tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(folder / CONFIG_FILE, config)

    def same(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer has the same tokens for every text."""
        # Not by the fingerprint, which is of the file: other white space in the JSON changes it.
        return self._backend.to_str() == other._backend.to_str()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, nothing added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, computed on all cores."""
        return [row.ids for row in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens spelled out."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)


def _eos_token(folder: Path) -> str | None:
    """Return the end-of-text token that a tokenizer's other files name; None without them."""
    for file in (folder / CONFIG_FILE, folder / "special_tokens_map.json"):
        if file.is_file() and (token := read_json(file, error=DataError).get("eos_token")) is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def _byte_level(*files: str) -> Any:
    """Build a BPE that splits bytes into words as GPT-2 does; untrained, or from GPT-2's vocabulary and merges."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    try:
        backend = Backend(models.BPE.from_file(*files) if files else models.BPE())
    except Exception as error:
        raise DataError(f"{', '.join(files)}: not GPT-2's vocabulary and merges ({error})") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def train_bpe(texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with GPT-2's word splitting on texts; end-of-text is token 0.

    The vocabulary has `vocab_size` tokens, at least 257; it is smaller where texts have too few pairs to merge.
    """
    from tokenizers import pre_tokenizers, trainers

    # The alphabet is all 256 bytes, so that any text can be encoded; sorted, since it comes in a random order.
    backend, alphabet = _byte_level(), sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str().encode())
