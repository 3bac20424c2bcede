import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.data.documents import (
    LEFT_OUT,
    assign,
    check_disjoint,
    divide,
    hold_out,
    leave_out_near_,
    lowest_keys,
    may_be_held_out,
    order_key,
    split_text,
)
from saf.data.utf8 import loose_digest
from saf.errors import DataError

THIRDS = (1 / 3, 1 / 3, 1 / 3)


@given(st.lists(st.integers(1, 100), min_size=30, max_size=200), st.integers(0, 2**32))
def test_parts_differ_by_less_than_the_longest_document(lengths, seed):
    tokens = np.array(lengths)
    keys = np.random.default_rng(seed).integers(0, 2**63, len(tokens)).astype(np.uint64)
    parts = divide(keys, tokens, THIRDS)
    totals = np.bincount(parts, weights=tokens, minlength=3)
    assert totals.max() - totals.min() <= tokens.max()


def test_order_of_documents_does_not_matter(rng):
    keys = rng.integers(0, 2**63, 200).astype(np.uint64) * np.uint64(2)
    tokens = rng.integers(10, 1000, 200)
    heldout = np.zeros(200, dtype=bool)
    shuffled = rng.permutation(200)
    one = assign(keys, tokens, heldout, sizes=tokens, fraction=0.2, shares=THIRDS)
    other = assign(keys[shuffled], tokens[shuffled], heldout, sizes=tokens[shuffled], fraction=0.2, shares=THIRDS)
    assert (one[shuffled] == other).all()


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_fraction_is_reached_from_the_lowest_keys(rng, fraction):
    keys = rng.integers(0, 2**63, 2000).astype(np.uint64) * np.uint64(2)
    tokens = rng.integers(10, 1000, 2000)
    mask = hold_out(keys, tokens, fraction, may_be_held_out(keys, 4 * tokens, fraction))
    assert tokens[mask].sum() / tokens.sum() == pytest.approx(fraction, abs=0.01)
    assert keys[mask].max() < keys[~mask].min()
    assert keys[mask].max() < lowest_keys(fraction)


@pytest.mark.parametrize("documents", [100, 400, 1900])
def test_few_documents_hold_out_what_was_asked_for_whatever_their_keys_are(documents):
    """Of documents as different as books and notes; a pool of twice the fraction of all keys alone held too little."""
    shares = {True: [], False: []}
    for seed in range(60):
        draw = np.random.default_rng(seed)
        keys, words = draw.integers(0, 2**64, documents, dtype=np.uint64), np.exp(draw.normal(6, 1.3, documents))
        tokens, sizes = (words * draw.uniform(1.2, 1.5, documents)).astype(int), (5 * words).astype(int)
        pool = may_be_held_out(keys, sizes, 0.05)
        for mended, chosen in ((True, pool), (False, keys < lowest_keys(0.05))):
            mask = hold_out(keys, tokens, 0.05, chosen)
            assert not (mask & ~chosen).any()
            shares[mended].append(tokens[mask].sum() / tokens.sum() / 0.05)
    assert min(shares[True]) > 0.85
    assert max(shares[True]) < 1.2
    assert min(shares[False]) < 0.85 or documents > 1000
    assert shares[True] == shares[False] or documents < 1000


def test_of_many_documents_the_pool_is_their_keys_alone(rng):
    keys = rng.integers(0, 2**64, 2000, dtype=np.uint64)
    sizes = np.where(keys < lowest_keys(0.05), 1, 10_000)
    assert (may_be_held_out(keys, sizes, 0.05) == (keys < lowest_keys(0.05))).all()
    assert may_be_held_out(keys[:1999], sizes[:1999], 0.05).sum() > (keys[:1999] < lowest_keys(0.05)).sum()


def test_what_is_held_out_of_few_documents_stays_so_when_others_are_added(rng):
    keys, tokens = rng.integers(0, 2**64, 300, dtype=np.uint64), rng.integers(50, 150, 300)
    before = np.zeros(0, dtype=bool)
    for some in (150, 225, 300):
        mask = hold_out(keys[:some], tokens[:some], 0.1, may_be_held_out(keys[:some], tokens[:some], 0.1))
        assert keys[:some][mask].max() < keys[:some][~mask].min()
        assert (mask[: len(before)] != before).sum() <= 3  # at the border
        before = mask


def test_a_very_long_document_stays_in_training(rng):
    keys = np.arange(101, dtype=np.uint64) * np.uint64(2**57)
    tokens = np.array([5000] + [100] * 100)
    mask = hold_out(keys, tokens, 0.1, may_be_held_out(keys, tokens, 0.1))
    assert not mask[0]
    assert tokens[mask].sum() == pytest.approx(0.1 * tokens.sum(), abs=100)


def test_a_share_of_zero_gets_nothing(rng):
    parts = divide(np.arange(50, dtype=np.uint64), rng.integers(1, 50, 50), (0.0, 0.5, 0.5))
    assert set(parts.tolist()) == {1, 2}


def test_too_few_documents_are_refused():
    keys, tokens = np.arange(4, dtype=np.uint64), np.array([10, 10, 10, 10])
    with pytest.raises(DataError, match="the report partition got no document: 4 documents in all, 2 held out"):
        assign(keys, tokens, np.array([True, True, False, False]), sizes=tokens, fraction=None, shares=THIRDS)
    with pytest.raises(DataError, match="the train partition got no document"):
        assign(keys, tokens, np.array([True] * 4), sizes=tokens, fraction=None, shares=THIRDS)


def test_a_shared_document_is_found(rng):
    digests = rng.integers(0, 256, (30, 16), dtype=np.uint8)
    partition = np.arange(30) % 4
    check_disjoint(digests, partition)
    digests[7] = digests[20]
    with pytest.raises(
        DataError, match=r"1 documents lie in two partitions, one of them in (train and report|report and train)"
    ):
        check_disjoint(digests, partition)
    partition[7] = partition[20]
    check_disjoint(digests, partition)


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 40), st.integers(1, 50))
def test_pieces_join_to_the_text(text, limit, step):
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    pieces = list(split_text(parts, limit))
    assert pieces == list(split_text([text], limit))
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)


def test_near_copies_of_held_out_documents_leave_training(rng):
    loose = rng.integers(0, 256, (8, 16), dtype=np.uint8)
    loose[2], loose[3], loose[6] = loose[5], loose[5], loose[4]
    partition = np.array([0, 0, 0, 1, 2, 3, 0, 2], dtype=np.int8)
    assert leave_out_near_(partition, loose) == 2
    assert partition.tolist() == [0, 0, LEFT_OUT, 1, 2, 3, LEFT_OUT, 2]
    with pytest.raises(DataError, match="every training document is also held out, but for white space and case"):
        leave_out_near_(np.array([0, 1], dtype=np.int8), np.zeros((2, 16), dtype=np.uint8))


@pytest.mark.parametrize("block", [1, 3, 2**20])
def test_white_space_and_case_make_no_other_text(monkeypatch, block):
    monkeypatch.setattr("saf.data.utf8.BLOCK_BYTES", block)
    one = "Ein Haus, GRÜSSE\n\tvon  \u3000drüben K\x1c."
    assert loose_digest(one.encode()) == loose_digest("einhaus,grüsse von DRÜBEN k.".encode())
    assert loose_digest(one.encode()) != loose_digest("einhaus grüsse von DRÜBEN k.".encode())
    assert loose_digest(b"One\ntwo\x1f") == loose_digest("\u00a0oneTWO".encode())


def test_keys_depend_on_seed_and_content():
    keys = {order_key(digest, seed) for digest in (b"a" * 16, b"b" * 16) for seed in (0, 1, 2**40)}
    assert len(keys) == 6
    assert all(0 <= key < 2**64 for key in keys)
