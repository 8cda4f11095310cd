"""Data: batches as pure functions, a held-out part that training never sees, documents that do not mix."""

import hashlib
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.data import Corpus, DataError, batches, open_corpus
from train.data.corpus import text_source
from train.data.streams import ArrayStream, DocumentStream
from train.data.text import hold_out_tenth, standard_library
from train.data.vocabulary import BYTES, SEPARATOR

SHAPE = (3, 2, 16)


def corpus_of(train, heldout=None, **changes):
    return Corpus((text_source("text", train, train if heldout is None else heldout, 1, BYTES),), **changes)


def stream(corpus, split="train"):
    """All tokens of a corpus of text, as bytes."""
    (source,) = corpus.sources
    (tokens,) = getattr(source, split).arrays
    return tokens.tobytes()


@pytest.fixture(scope="module")
def library():
    return open_corpus()


def write_documents(folder, count):
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "some words " * (number + 5))
    return folder


def test_a_batch_is_a_function_of_seed_and_step(library):
    first, again = (library.train_batch(7, 3, SHAPE) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    for seed, step in ((7, 4), (8, 3), (3, 7)):
        assert not np.array_equal(first["inputs"], library.train_batch(seed, step, SHAPE)["inputs"])


def test_a_batch_never_changes_between_releases():
    """The numbers of today: a run started with an older release continues on the same bytes."""
    corpus = corpus_of([bytes(range(1, 200))])
    inputs = corpus.train_batch(0, 1, (2, 2, 3))["inputs"]
    np.testing.assert_array_equal(inputs[:, :, 0], [[91, 175], [106, 187]])


def test_an_epoch_visits_every_window_once():
    text = bytes(itertools.islice(itertools.cycle(range(1, 251)), 1000))
    corpus, sequence = corpus_of([text]), 7
    num_windows = 1000 // sequence - 1
    cut = []
    for epoch in range(3):
        steps = range(epoch * num_windows, (epoch + 1) * num_windows)
        rows = [corpus.train_batch(5, step, (1, 1, sequence))["inputs"].tobytes() for step in steps]
        tokens = np.frombuffer(text + b"\0", np.uint8).astype(np.int32)
        offsets = [  # the first tokens from which cutting the text gives these very windows
            first
            for first in range(2 * sequence)
            if sorted(rows)
            == sorted(
                tokens[at : at + sequence].tobytes()
                for at in range(first, first + num_windows * sequence, sequence)
            )
        ]
        assert len(offsets) == 1
        cut.append((offsets[0], rows))
    assert len({rows[0] for _, rows in cut}) == 3, "every epoch has an order of its own"
    assert len({first for first, _ in cut}) > 1, "and mostly another first token"


def test_targets_are_the_next_bytes_whatever_the_shape(library):
    batch = library.train_batch(1, 4, (1, 12, 16))
    for name, values in library.train_batch(1, 4, (6, 2, 16)).items():
        assert values.shape == (6, 2, 16) and values.dtype == np.int32
        np.testing.assert_array_equal(values.reshape(12, 16), batch[name][0])
    text = stream(library)
    for inputs, targets in zip(batch["inputs"][0], batch["targets"][0], strict=True):
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        assert bytes([*inputs, targets[-1]]) in text


def slowly(window, separator):
    """Segments and positions of a window, token by token."""
    segments, positions = [], []
    segment, position = 1, 0
    for place, token in enumerate(window):
        if token == separator:
            segment, position = segment + (place > 0), 0
        segments.append(segment)
        positions.append(position)
        position += 1
    return segments, positions


def test_documents_are_told_apart():
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 4, (50, 13), dtype=np.int32)
    batch = batches.pack(windows, SEPARATOR)
    expected = [slowly(window[:-1], SEPARATOR) for window in windows.tolist()]
    np.testing.assert_array_equal(batch["segment_ids"], [segments for segments, _ in expected])
    np.testing.assert_array_equal(batch["positions"], [positions for _, positions in expected])


def test_parts_make_the_whole(library):
    """What each device would ask for, by JAX's own indices."""
    shape = (4, 6, 16)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pp", "ep"))
    whole = library.train_batch(3, 2, shape)
    for spec in ((None, "ep"), ("pp", "ep"), ("pp", None, "ep")):
        for index in NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape).values():
            for name, values in library.train_batch(3, 2, shape, index).items():
                np.testing.assert_array_equal(values, whole[name][index])


def test_a_part_reads_no_more_than_itself():
    asked = []

    class Spy(ArrayStream):
        def windows(self, starts, width):
            asked.append(len(starts))
            return super().windows(starts, width)

    (source,) = corpus_of([bytes(range(1, 250))]).sources
    spied = Corpus((source.__class__(**{**vars(source), "train": Spy(source.train.arrays, 256)}),))
    spied.train_batch(0, 0, (4, 6, 8), (slice(0, 4), slice(2, 4)))
    assert asked == [8]


def test_documents_that_are_read_when_needed_give_the_windows_of_all_in_a_row():
    documents = [np.arange(10 * n, 10 * n + length) for n, length in enumerate((3, 1, 7, 2))]
    order = np.array([2, 0, 3, 1])
    lengths = np.array([len(documents[number]) for number in order])
    stream = DocumentStream(documents.__getitem__, order, lengths)
    whole = np.concatenate([documents[number] for number in order])
    starts = np.arange(len(whole) - 5 + 1)
    assert len(stream) == len(whole) == 13
    np.testing.assert_array_equal(stream.windows(starts, 5), whole[starts[:, None] + np.arange(5)])
    documents[3] = documents[3][:1]
    with pytest.raises(DataError, match="document 3 changed while it was in use"):
        stream.windows(np.array([8]), 5)


def test_held_out_sequences_are_the_same_for_every_shape(library):
    def rows(shape):
        found = library.heldout_batches(10, shape)
        kept = [batch["inputs"][weights > 0] for batch, weights in found]
        assert sum(weights.sum() for _, weights in found) == 10
        return np.concatenate(kept)

    expected = rows((1, 10, 16))
    for shape in ((2, 2, 16), (3, 4, 16), (16, 4, 16)):
        np.testing.assert_array_equal(rows(shape), expected)
    text = stream(library, "heldout")
    assert bytes(expected[0].tolist()) == text[:16]
    (last,) = library.heldout_batches(10, (1, 10, 16))
    assert bytes(last[0]["targets"][0, -1].tolist()) == text[-16:]


def test_the_standard_library_is_a_tenth_held_out(library):
    train, heldout = (set(stream(library, part).split(b"\0")[:-1]) for part in ("train", "heldout"))
    assert not train & heldout and library.num_documents > 300
    assert abs(len(heldout) - (len(train) + len(heldout)) / 10) < 1
    assert 0.03 < library.num_heldout / (library.num_heldout + library.num_tokens) < 0.25
    assert not any("site-packages" in path.parts for path in standard_library())


def test_few_documents_give_their_last_tenths_and_no_character_is_cut_in_two():
    for count in (1, 9):
        documents = [bytes(range(1, 101))] * count
        train, heldout = hold_out_tenth(documents)
        assert all(
            a + b == text and len(b) == 10 for a, b, text in zip(train, heldout, documents, strict=True)
        )
    text = "ä€😀".encode() * 100
    for extra in range(12):
        ((train,), (heldout,)) = hold_out_tenth([text + b"x" * extra])
        assert train.decode() + heldout.decode() == (text + b"x" * extra).decode()


def test_documents_come_once_in_the_order_of_their_hashes_whatever_that_of_files(tmp_path):
    paths = sorted(write_documents(tmp_path, 30).iterdir())
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    corpus, again = open_corpus([tmp_path]), open_corpus([*reversed(paths), *paths])
    texts = sorted((path.read_bytes() for path in paths), key=lambda text: hashlib.sha256(text).hexdigest())
    assert stream(corpus) == stream(again) == b"".join(text + b"\0" for text in texts[3:])
    assert stream(corpus, "heldout") == b"".join(text + b"\0" for text in texts[:3])
    assert corpus.num_documents == again.num_documents == 30
    assert corpus.fingerprint == again.fingerprint


def test_a_fingerprint_tells_corpora_apart(tmp_path):
    texts = [b"one text", b"another text"]
    prints = {
        corpus_of(texts).fingerprint,
        corpus_of(texts[::-1]).fingerprint,
        corpus_of(texts, texts[:1]).fingerprint,
        corpus_of([b"one text\0another text"], [b""]).fingerprint,
        corpus_of(texts, [b"a third"]).fingerprint,
        corpus_of(texts[:1], [texts[1], b"a third"]).fingerprint,
    }
    assert len(prints) == 6
    assert corpus_of(texts).fingerprint == corpus_of(list(texts)).fingerprint


def test_what_cannot_be_read_is_named(tmp_path):
    binary, empty = tmp_path / "binary", tmp_path / "empty.txt"
    binary.write_bytes(b"a\0b")
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"--data: cannot read .*nowhere\.txt: No such file or directory"):
        open_corpus([tmp_path / "nowhere.txt"])
    with pytest.raises(DataError, match="binary is no text: it holds zero bytes"):
        open_corpus([binary])
    with pytest.raises(DataError, match=r"nothing to read in .*empty\.txt"):
        open_corpus([empty])


def test_a_corpus_shorter_than_a_sequence_is_refused():
    with pytest.raises(DataError, match="4 bytes held out, but --sequence 4 takes more"):
        corpus_of([b"x" * 50], [b"yyy"]).check(4)
    corpus_of([b"x" * 50], [b"yyyy"]).check(4)
