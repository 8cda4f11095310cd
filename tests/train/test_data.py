"""Data: pure batches, a held-out part that training never sees, clear errors."""

import numpy as np
import pytest

from train.data import SEPARATOR, DataError, draw_batch, even_batches, load_corpus, split, standard_library

SHAPE = (3, 2, 16)


@pytest.fixture(scope="module")
def library():
    return load_corpus()


def write_documents(folder, count):
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "some words " * (number + 5))
    return folder


def test_a_batch_is_a_function_of_seed_and_step(library):
    first, again = (draw_batch(library.train, 7, 3, SHAPE) for _ in range(2))
    np.testing.assert_array_equal(first.inputs, again.inputs)
    for seed, step in ((7, 4), (8, 3), (3, 7)):
        assert not np.array_equal(first.inputs, draw_batch(library.train, seed, step, SHAPE).inputs)


def test_a_batch_never_changes_between_releases():
    """The numbers of today: a run started with an older release continues on the same bytes."""
    batch = draw_batch(np.arange(256, dtype=np.uint8), 0, 1, (2, 2, 3))
    np.testing.assert_array_equal(batch.inputs[:, :, 0], [[91, 52], [245, 220]])


def test_targets_are_the_next_bytes(library):
    batch = draw_batch(library.train, 0, 0, SHAPE)
    assert batch.inputs.shape == batch.targets.shape == SHAPE
    assert batch.inputs.dtype == np.int32
    np.testing.assert_array_equal(batch.inputs[..., 1:], batch.targets[..., :-1])


def test_batches_reach_the_first_and_the_last_byte():
    tokens = np.arange(18, dtype=np.uint8)
    seen = [draw_batch(tokens, 0, step, SHAPE) for step in range(8)]
    assert min(batch.inputs.min() for batch in seen) == 0
    assert max(batch.targets.max() for batch in seen) == 17


def test_even_batches_span_the_held_out_text(library):
    batches = even_batches(library.heldout, 12, SHAPE)
    assert len(batches) == 2 and batches[0][0].inputs.shape == SHAPE
    np.testing.assert_array_equal(batches[0][0].inputs[0, 0], library.heldout[:16])
    np.testing.assert_array_equal(batches[-1][0].targets[-1, -1], library.heldout[-16:])


@pytest.mark.parametrize("shape", [(3, 2, 16), (1, 5, 16), (4, 8, 16), (1, 1, 16)])
def test_the_windows_are_the_same_for_every_batch_shape(library, shape):
    batches = even_batches(library.heldout, 7, shape)
    weights = np.concatenate([weight.reshape(-1) for _, weight in batches])
    windows = np.concatenate([batch.inputs.reshape(-1, 16) for batch, _ in batches])
    assert all(batch.inputs.shape == shape and weight.shape == shape[:2] for batch, weight in batches)
    assert weights.tolist() == [1] * 7 + [0] * (len(weights) - 7)
    last = len(library.heldout) - 17
    by_hand = [library.heldout[(start := n * last // 6) : start + 16] for n in range(7)]
    np.testing.assert_array_equal(windows[:7], by_hand)


def test_the_standard_library_is_a_tenth_held_out(library):
    assert library.num_documents > 300
    share = len(library.heldout) / (len(library.train) + len(library.heldout))
    assert 0.03 < share < 0.25
    assert not any("site-packages" in path.parts for path in standard_library())


def test_held_out_documents_are_not_trained_on(library):
    train, heldout = (set(bytes(part).split(bytes([SEPARATOR]))[:-1]) for part in library[:2])
    assert not train & heldout
    assert abs(len(heldout) - (len(train) + len(heldout)) / 10) < 1


@pytest.mark.parametrize("count", [1, 9])
def test_few_documents_give_their_last_tenths(count):
    documents = [bytes(range(1, 101))] * count
    train, heldout = split(documents)
    assert all(a + b == text and len(b) == 10 for a, b, text in zip(train, heldout, documents, strict=True))


def test_documents_end_with_a_separator(tmp_path):
    corpus = load_corpus([write_documents(tmp_path, 20)])
    assert corpus.num_documents == 20
    assert (corpus.train == SEPARATOR).sum() == 18 and corpus.train[-1] == SEPARATOR
    assert (corpus.heldout == SEPARATOR).sum() == 2


def test_repeats_count_once_and_order_does_not_matter(tmp_path):
    paths = sorted(write_documents(tmp_path, 12).iterdir())
    corpus = load_corpus(paths)
    again = load_corpus([*reversed(paths), *paths])
    assert again.num_documents == 12
    np.testing.assert_array_equal(corpus.train, again.train)


def test_folders_are_read_for_their_text_alone(tmp_path):
    write_documents(tmp_path, 3)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    assert load_corpus([tmp_path]).num_documents == 3


def test_what_cannot_be_read_is_named(tmp_path):
    binary, empty = tmp_path / "binary", tmp_path / "empty.txt"
    binary.write_bytes(b"a\0b")
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"--data: cannot read .*nowhere\.txt: No such file or directory"):
        load_corpus([tmp_path / "nowhere.txt"])
    with pytest.raises(DataError, match="binary is not text"):
        load_corpus([binary])
    with pytest.raises(DataError, match=r"nothing to read in .*empty\.txt"):
        load_corpus([empty])
