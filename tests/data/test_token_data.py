import json
import os
import shutil
from hashlib import sha256

import numpy as np
import pytest

from saf.data import TokenData, prepare
from saf.data.shards import ShardedTokens, ShardWriter, chunks, entropy, token_dtype
from saf.data.token_data import DataIndex
from saf.data.tokenizer import train_bpe
from saf.data.verification import check_content
from saf.errors import DataError, InputError, SafWarning
from saf.records.files import entries_hash


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def test_what_an_open_folder_tells(prepared):
    data = TokenData.open(prepared, verify=True)
    tokens = data.tokens("train")
    assert len(tokens) == data.num_tokens("train") == np.asarray(tokens).size
    assert data.vocab_size == data.tokenizer().vocab_size == 300
    assert data.tokenizer().fingerprint == data.index.tokenizer.sha256
    assert data.eot_id == data.tokenizer().eot_id
    assert len(data.fingerprint) == 64
    counts = np.bincount(np.asarray(tokens))
    share = counts[counts > 0] / counts.sum()
    assert data.unigram_entropy("train") == pytest.approx(-(share * np.log(share)).sum())
    with pytest.raises(InputError, match="a partition is one of train, calibration, controller, report"):
        data.tokens("test")


def test_tokens_span_shards(corpus, settings, prepared, tmp_path):
    prepare(corpus, tmp_path / "data", **settings, shard_tokens=1000)
    whole, many = TokenData.open(prepared), TokenData.open(tmp_path / "data", verify=True)
    shards = many.index.partitions["train"].shards
    assert len(shards) > 3
    assert {shard.bytes for shard in shards[:-1]} == {2000}
    expected, tokens = np.asarray(whole.tokens("train")), many.tokens("train")
    assert (np.asarray(tokens) == expected).all()
    assert tokens[990:2010].dtype == np.int64
    for start, stop in [(990, 1010), (0, 1000), (1000, 1001), (500, 3500), (7, 7), (-5, None)]:
        assert (tokens[start:stop] == expected[start:stop]).all()
    assert tokens[-1] == expected[-1]
    assert tokens[999] == expected[999]
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_the_writer_splits_at_the_limit_and_counts(tmp_path, rng):
    ids = [rng.integers(0, 70_000, size).astype(np.uint32) for size in (3, 0, 2500, 1)]
    dtype = token_dtype(70_000)
    writer = ShardWriter(tmp_path, "x", dtype, vocab_size=70_000, shard_tokens=1000)
    for chunk in chunks(ids, dtype):
        writer.write(chunk)
    info = writer.finish(documents=4, text_bytes=9, digests=np.zeros((4, 16), dtype=np.uint8))
    assert [shard.bytes for shard in info.shards] == [4000, 4000, 4 * 504]
    tokens = ShardedTokens([tmp_path / shard.file for shard in info.shards], dtype)
    assert (np.asarray(tokens) == np.concatenate(ids)).all()
    assert info.tokens == 2504


@pytest.mark.parametrize(("size", "name"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_shard_type_follows_the_vocabulary(size, name):
    assert token_dtype(size).name == name


def test_entropy_of_known_counts():
    assert entropy(np.array([0, 5])) == 0.0
    assert entropy(np.array([3, 3, 3, 3])) == pytest.approx(np.log(4))
    assert entropy(np.zeros(3)) is None


def test_the_fingerprint_knows_tokens_not_places(prepared, folder, corpus, settings, tmp_path):
    index = prepare(corpus, tmp_path / "again", **settings)
    assert TokenData.open(folder).fingerprint == TokenData.open(prepared).fingerprint == index.fingerprint
    other = prepare(corpus, tmp_path / "other", **{**settings, "vocab_size": 310})
    assert other.fingerprint != index.fingerprint


def test_the_index_round_trips(prepared):
    index = DataIndex.load(prepared)
    assert DataIndex.from_dict(json.loads(json.dumps(index.to_dict()))) == index


def test_another_tokenizer_is_refused(folder, texts):
    train_bpe(texts, vocab_size=310).save(folder / "tokenizer.json")
    with pytest.raises(DataError, match="a data folder made with another tokenizer"):
        TokenData.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        TokenData.open(folder)


def change_index(folder, change, *, seal=True):
    """Change index.json; with `seal`, its fingerprint and hash too, as nobody does by accident."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    if seal:
        shards = {name: [shard["sha256"] for shard in info["shards"]] for name, info in index["partitions"].items()}
        text = json.dumps(["saf.data/1", index["tokenizer"]["sha256"], index["dtype"], shards], sort_keys=True)
        index["fingerprint"] = sha256(text.encode()).hexdigest()
        index["hash"] = entries_hash(index)
    (folder / "index.json").write_text(json.dumps(index))


def damage(path, at, value):
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)


def test_a_changed_shard_is_named(folder):
    path = folder / "report-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    size = rf"report-00000.bin is damaged: expected {len(data):,} bytes, got {len(data) - 2:,}"
    with pytest.raises(DataError, match=size):
        TokenData.open(folder)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(
        DataError, match=r"report-00000.bin is damaged: expected SHA-256 \w+, got \w+; prepare it again"
    ):
        TokenData.open(folder)
    path.unlink()
    with pytest.raises(DataError, match=r"report-00000.bin is missing"):
        TokenData.open(folder)


def test_a_token_outside_the_vocabulary_is_named_with_its_place(folder, monkeypatch):
    monkeypatch.setattr("saf.data.verification.BLOCK_BYTES", 512)
    path = folder / "train-00000.bin"
    damage(path, 2 * 777, (300).to_bytes(2, "little"))
    outside = "token 300 at position 777 is outside the vocabulary of 300 ids"
    with pytest.raises(DataError, match=rf"train-00000.bin is damaged: expected SHA-256 .* \({outside}\)"):
        TokenData.open(folder)

    def seal(index):
        index["partitions"]["train"]["shards"][0]["sha256"] = sha256(path.read_bytes()).hexdigest()

    change_index(folder, seal)
    with pytest.raises(DataError, match=rf"train-00000.bin: {outside}; prepare it again"):
        TokenData.open(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["tokenizer"].update(vocab_size=280),
        lambda index: index["tokenizer"].update(eot_id=7),
        lambda index: index["partitions"]["report"].update(unigram_entropy=1.0),
        lambda index: index.update(calibration_from="train"),
    ],
)
def test_a_changed_index_is_refused(folder, change):
    change_index(folder, change, seal=False)
    with pytest.raises(DataError, match=r"index.json: damaged .* its entries were changed.*prepare it again"):
        TokenData.open(folder)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 280), ("eot_id", 7)])
def test_the_vocabulary_is_the_tokenizers(folder, name, value):
    change_index(folder, lambda index: index["tokenizer"].update({name: value}))
    with pytest.raises(
        DataError, match=r"index.json tells of \d+ ids and end-of-text \d, tokenizer.json has 300 and 0"
    ):
        TokenData.open(folder)


def test_a_fingerprint_of_other_data_is_refused(folder):
    def change(index):
        index["fingerprint"] = 64 * "0"
        index["hash"] = entries_hash(index)

    change_index(folder, change, seal=False)
    with pytest.raises(DataError, match=r"its fingerprint is 0000.*, its sums give"):
        TokenData.open(folder)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files that are read for their sums."""
    names = []

    def reading(path, *rest, **options):
        names.append(path.name)
        return check_content(path, *rest, **options)

    monkeypatch.setattr("saf.data.token_data.check_content", reading)
    return names


def test_what_was_found_whole_is_not_read_again_until_it_changes(folder, read, monkeypatch):
    TokenData.open(folder)
    TokenData.open(folder)
    assert len(read) == 16, "two seconds after a change another one might not show"
    monkeypatch.setattr("saf.data.verification.AT_REST", 0.0)
    TokenData.open(folder)
    read.clear()
    for _ in range(3):
        TokenData.open(folder)
    assert read == []
    TokenData.open(folder, verify=True)
    assert len(read) == 8
    path = folder / "train-00000.bin"
    times = path.stat()
    damage(path, 100, b"\1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"train-00000.bin is damaged: expected SHA-256"):
        TokenData.open(folder)


def test_nothing_can_be_remembered_where_nothing_can_be_written(folder, read, monkeypatch, tmp_path):
    monkeypatch.setattr("saf.data.verification.AT_REST", 0.0)
    (tmp_path / "file").write_text("no folder")
    for cache in (str(tmp_path / "file"), "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        read.clear()
        for _ in range(2):
            TokenData.open(folder)
        assert len(read) == 16
    assert not (folder / "relative").exists()


def test_folders_of_the_version_before_open_with_a_word_on_what_is_not_checked(folder, prepared):
    def older(index):
        index.update(schema="saf.data/1")
        del index["hash"]

    change_index(folder, older, seal=False)
    with pytest.warns(SafWarning, match=r"index.json is of a version that kept no hash of it: tokens.* are checked"):
        data = TokenData.open(folder)
    assert data.fingerprint == DataIndex.load(prepared).fingerprint
    change_index(folder, lambda index: index["tokenizer"].update(eot_id=7), seal=False)
    with pytest.warns(SafWarning), pytest.raises(DataError, match=r"tokenizer.json has 300 and 0"):
        TokenData.open(folder)


@pytest.mark.parametrize("name", ["../train-00000.bin", "/etc/passwd", "a/b.bin", "..", ""])
def test_shards_stay_inside_their_folder(folder, name):
    change_index(folder, lambda index: index["partitions"]["train"]["shards"][0].update(file=name))
    with pytest.raises(DataError, match="is not the name of a file in the folder"):
        TokenData.open(folder)


def test_a_document_in_two_partitions_is_refused(folder):
    train, report = folder / "train-documents.bin", folder / "report-documents.bin"
    data = train.read_bytes()[:16] + report.read_bytes()[16:]
    report.write_bytes(data)
    digest = sha256(data).hexdigest()
    change_index(folder, lambda index: index["partitions"]["report"]["digests"].update(sha256=digest))
    with pytest.raises(DataError, match="1 documents lie in two partitions"):
        TokenData.open(folder)


def test_partitions_of_the_same_text_are_refused(folder):
    change_index(folder, lambda index: index["partitions"].update(calibration=index["partitions"]["report"]))
    with pytest.raises(DataError, match="calibration and report hold the same text"):
        TokenData.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["partitions"].pop("report"), "damaged or from another version.*report"),
        (lambda index: index.update(schema="saf.data/9"), "schema 'saf.data/9', this version reads 'saf.data/2'"),
        (lambda index: index.update(dtype="float64"), "dtype 'float64'"),
        (lambda index: index["tokenizer"].update(eot_id=300), "eot_id 300 is none of 300 ids"),
        (lambda index: index["tokenizer"].update(vocab_size="many"), "vocab_size 'many' .* must be whole numbers"),
        (lambda index: index["partitions"]["train"].update(tokens=5), "train shards hold .* tokens, not 5"),
        (lambda index: index["partitions"]["train"].update(documents=5), "train digests are of .* documents, not 5"),
        (lambda index: index["partitions"]["train"].update(tokens=None), "tokens must be a whole number"),
        (lambda index: index["partitions"]["train"]["shards"][0].update(bytes=-1), "train-00000.bin: bytes -1"),
        (lambda index: index["partitions"]["train"].update(unigram_entropy="x"), "unigram_entropy must be a number"),
    ],
)
def test_a_damaged_index_is_named(folder, change, message):
    change_index(folder, change)
    with pytest.raises(DataError, match=message):
        TokenData.open(folder)


def test_folders_that_are_not_data_folders(tmp_path, folder):
    with pytest.raises(DataError, match="no such data folder here; give --data"):
        TokenData.open(tmp_path / "none")
    with pytest.raises(DataError, match=r"not a data folder, it has no index.json"):
        TokenData.open(tmp_path)
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json is not valid JSON.*; prepare it again"):
        TokenData.open(folder)
    (folder / "index.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"index.json is not valid JSON"):
        TokenData.open(folder)
    with pytest.raises(InputError, match=r"named by a string or a Path; got 5"):
        TokenData.open(5)
