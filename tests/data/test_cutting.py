import random

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from saf.data import TokenData, prepare
from saf.data.cutting import Cutter
from saf.data.encoding import EncodeWorker
from saf.data.tokenizer import EOT, Tokenizer, train_bpe
from saf.errors import DataError

PARTS = [
    *("don't we'll I'd she's they've 's't're'''s 'S x's's", " " * 3000, "\n" * 700, "\t \n\r\n  ", "word", EOT),
    *(
        "<|x|>",
        "\u3000",
        "\u00a0",
        "中文没有空格，只有标点。" * 30,
        "日本語のテキスト",
        "e\u0301a\u0300",
        "123456789" * 40,
    ),
    *(
        "👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈",
        "a1b2c3",
        "__init__",
        "?!...",
        "ﬁ½²Ⅷ",
        "\x1c\x85",
        "café Ärger",
        "x" * 900,
    ),
    "’s don’t",
]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def hard_text(seed: int, count: int = 60) -> str:
    """Text of runs and scripts that meet with and without spaces."""
    drawn = random.Random(seed)
    return "".join(drawn.choice(PARTS) + drawn.choice(["", "", " ", "\n"]) for _ in range(count))


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    """Tokenizers of the package: the default one, and Llama 3's way of parting text with the same vocabulary."""
    bpe = Backend.from_str(train_bpe([hard_text(seed) for seed in range(8)], vocab_size=900)._data.decode())
    llama = Backend.from_str(bpe.to_str())
    split = pre_tokenizers.Split(Regex(LLAMA), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    llama.normalizer = normalizers.NFC()
    for backend in (bpe, llama):
        backend.encode_special_tokens = True
    return {"bpe": bpe, "llama": llama}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("saf.data.cutting.PIECE_BYTES", 256)
    monkeypatch.setattr("saf.data.cutting.STRETCH", 64)


def ids(backend: Backend, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["bpe", "llama"])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_have_the_tokens_of_the_whole(backends, small, name, seed):
    backend, text = backends[name], hard_text(seed)
    pieces = [bytes(piece).decode() for piece in Cutter(backend).pieces(text.encode())]
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert [token for piece in pieces for token in ids(backend, piece)] == ids(backend, text)


def test_gpt2s_own_tokens(shared, small):
    tokenizer = Tokenizer.load(shared / "data" / "tokenizers" / "gpt2")
    for seed in range(6):
        text = hard_text(seed)
        pieces = [bytes(piece).decode() for piece in tokenizer.pieces(text.encode())]
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("text", [" " * 5000, "x" * 5000, "漢" * 5000, "👍" * 3000, "'" * 5000])
def test_where_no_cut_is_sure_the_text_stays_whole_up_to_a_limit(backends, small, monkeypatch, text):
    cutter, data = Cutter(backends["bpe"]), text.encode()
    assert list(cutter.pieces(data)) == [data]
    longer = text + " end " + text
    pieces = [bytes(piece).decode() for piece in cutter.pieces(longer.encode())]
    assert [token for piece in pieces for token in ids(backends["bpe"], piece)] == ids(backends["bpe"], longer)
    monkeypatch.setattr("saf.data.cutting.UNCUT_BYTES", 2000)
    with pytest.raises(DataError, match=r"no place in 2,000 bytes from byte 0 \(.*split_characters"):
        list(cutter.pieces(data))


def parting_otherwise(backend: Backend, how: str) -> Backend:
    """Return a tokenizer that would give other tokens if it were cut at the ends of words."""
    backend = Backend.from_str(backend.to_str())
    if how == "no pre-tokenizer":
        backend.pre_tokenizer = None
    if how == "text begins with a mark":
        backend.normalizer = normalizers.Prepend("_")
    if how == "an added token of two words":
        backend.add_tokens([AddedToken("over the")])
    if how == "an added token that takes spaces":
        backend.add_tokens([AddedToken("word", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "how",
    ["no pre-tokenizer", "text begins with a mark", "an added token of two words", "an added token that takes spaces"],
)
def test_tokenizers_that_part_otherwise_are_not_cut(backends, small, how):
    text = ("word over the word   more, " * 60).encode()
    assert len(list(Cutter(backends["bpe"]).pieces(text))) > 4
    assert list(Cutter(parting_otherwise(backends["bpe"], how)).pieces(text)) == [text]


def test_a_long_document_is_prepared_in_pieces_with_the_same_shards(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for number in range(24):
        (tmp_path / "text" / f"{number}.txt").write_text(hard_text(number, 12) + f" {number}")
    options = {"vocab_size": 400, "heldout_fraction": 0.4, "workers": 1}
    whole = prepare(tmp_path / "text", tmp_path / "whole", **options)
    for name, size in (("cutting.PIECE_BYTES", 300), ("utf8.BLOCK_BYTES", 100), ("readers.BLOCK_BYTES", 77)):
        monkeypatch.setattr(f"saf.data.{name}", size)
    monkeypatch.setattr("saf.data.spool.CHUNK_TOKENS", 50)
    monkeypatch.setattr("saf.data.shards.CHUNK_TOKENS", 50)
    sent, encode = [], EncodeWorker.encode

    def counted(worker, texts):
        sent.extend(texts)
        return encode(worker, texts)

    monkeypatch.setattr(EncodeWorker, "encode", counted)
    assert prepare(tmp_path / "text", tmp_path / "pieces", **options).fingerprint == whole.fingerprint
    assert len(sent) > 60
    TokenData.open(tmp_path / "pieces", verify=True)
