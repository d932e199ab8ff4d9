import hashlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import data


@pytest.mark.parametrize("name", data.DOMAINS)
def test_a_domain_is_readable_text_of_enough_size(name):
    raw = data.domain_bytes(name)
    assert 100_000 < len(raw) <= data.DOMAIN_BYTES
    text = raw.tobytes().decode(errors="ignore")
    assert len(text.encode()) >= len(raw) - 3  # at most the last character is cut
    assert len(data.blocks(name)) >= 9 * len(data.blocks(name, held_out=True)) > 0


def test_the_card_shows_what_there_is():
    card = open("experiments/DATA.md", encoding="utf-8").read()
    assert all(f"| `{name}` |" in card for name in data.DOMAINS)
    if "3.12.1 " in sys.version:  # the digests are this version's
        assert data.card() in card


def test_a_domain_is_the_same_in_every_process():
    """Not by the order of sets, nor by addresses."""
    program = (
        "import hashlib; from experiments.data import *;"
        "print(hashlib.sha256(b''.join(domain_bytes(n).tobytes() for n in DOMAINS)).hexdigest())"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    ours = b"".join(data.domain_bytes(name).tobytes() for name in data.DOMAINS)
    assert out.strip() == hashlib.sha256(ours).hexdigest()


def test_train_and_held_out_parts_are_disjoint_and_complete():
    train, held_out = data.blocks("prose"), data.blocks("prose", held_out=True)
    whole = data.domain_bytes("prose").reshape(-1, data.BLOCK_BYTES)
    assert sorted(map(bytes, [*train, *held_out])) == sorted(map(bytes, whole))
    assert not set(map(bytes, train)) & set(map(bytes, held_out))


def test_a_sample_depends_on_seed_and_number_alone_and_stays_within_training_blocks():
    first = data.batch("source", 4, 33, seed=1, first=8)
    assert first.dtype == np.int32 and first.shape == (4, 33)
    np.testing.assert_array_equal(first[1:], data.batch("source", 3, 33, seed=1, first=9))
    for other in (dict(seed=1, first=12), dict(seed=2, first=8)):
        assert (first != data.batch("source", 4, 33, **other)).any(axis=1).all()
    train = [bytes(block) for block in data.blocks("source")]
    for row in first:
        assert any(bytes(row.astype(np.uint8)) in block for block in train)


def test_held_out_rows_are_distinct_and_from_all_over():
    rows = data.held_out_batch("source", 10, 100)
    held_out = [bytes(block) for block in data.blocks("source", held_out=True)]
    blocks = {i for row in rows for i, b in enumerate(held_out) if bytes(row.astype(np.uint8)) in b}
    assert len(blocks) > len(held_out) / 2
    assert len(set(map(bytes, rows))) == 10
