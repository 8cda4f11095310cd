"""Several sources in their proportions; records and data sets; places that are not files; what nearly repeats."""

import gzip
import http.server
import json
import random
import shutil
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.train.prepare.test_data_prepare import prepare, write_lines
from train.config import configure
from train.data import DataError, open_corpus
from train.data.manifest import find_damage
from train.data.vocabulary import Vocabulary
from train.prepare import near
from train.setup import read_data

SHAPE = (2, 5, 8)


def letters(folder, name, letter, count=40, length=50):
    """A folder of documents that hold one letter and their numbers' digits."""
    place = folder / name
    place.mkdir()
    for number in range(count):
        (place / f"{number}.txt").write_text(f"{number:02d}" + letter * length)
    return place


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    for name in "abc":
        prepare(folder / name, [letters(folder, f"text-{name}", name)], held_out=0.2)
    return [folder / name for name in "abc"]


def mostly(rows):
    """The letter of each sequence."""
    return [max("abc", key=lambda letter: bytes(row.tolist()).count(letter.encode())) for row in rows]


def test_sources_are_drawn_in_their_proportions(three):
    corpus = open_corpus(three, weights=(0.5, 0.3, 0.2))
    for step in range(6):
        found = mostly(corpus.train_batch(1, step, SHAPE)["inputs"].reshape(10, 8))
        assert [found.count(letter) for letter in "abc"] == [5, 3, 2]
    heldout = [
        row for batch, weights in corpus.heldout_batches(20, SHAPE) for row in batch["inputs"][weights > 0]
    ]
    assert [mostly(heldout).count(letter) for letter in "abc"] == [10, 6, 4]


def test_a_source_in_a_mixture_is_visited_once_an_epoch(three):
    """The windows of b, of which there is one in every ten sequences, are those that b alone has, each once."""
    mixed = open_corpus(three, weights=(4, 1, 5))
    (b,) = open_corpus(three[1:2]).sources
    num_windows = (len(b.train) - 1) // 8 - 1
    rows = np.concatenate(
        [mixed.train_batch(1, s, SHAPE)["inputs"].reshape(10, 8) for s in range(num_windows)]
    )
    of_b = [row.tobytes() for row in rows if mostly([row]) == ["b"]]
    assert len(of_b) == num_windows
    tokens = b.train.windows(np.array([0]), len(b.train))[0]
    cuts = [
        sorted(tokens[at : at + 8].tobytes() for at in range(first, first + 8 * num_windows, 8))
        for first in range(len(tokens) - 8 * num_windows)
    ]
    assert sorted(of_b) in cuts


def test_without_weights_sources_count_by_their_tokens(tmp_path):
    small, large = letters(tmp_path, "text-a", "a", 20, 100), letters(tmp_path, "text-b", "b", 60, 100)
    for name, text in (("a", small), ("b", large)):
        prepare(tmp_path / name, [text], held_out=0.1)
    corpus = open_corpus([tmp_path / "a", tmp_path / "b"])
    rows = np.concatenate([corpus.train_batch(0, step, SHAPE)["inputs"].reshape(10, 8) for step in range(40)])
    assert abs(mostly(rows).count("a") - 100) <= 2


def test_folders_of_text_are_sources_of_their_own_if_they_have_weights(tmp_path):
    a, b = letters(tmp_path, "text-a", "a"), letters(tmp_path, "text-b", "b")
    assert len(open_corpus([a, b]).sources) == 1
    corpus = open_corpus([a, b], weights=(1, 4))
    assert mostly(corpus.train_batch(0, 0, SHAPE)["inputs"].reshape(10, 8)).count("a") == 2


def texts(stream):
    whole = stream.windows(np.array([0]), len(stream))[0]
    return set(bytes(whole.tolist()).split(b"\0")) - {b""}


def test_what_is_held_out_of_one_path_is_trained_on_from_none(tmp_path):
    whole, some = letters(tmp_path, "whole", "a", count=60), tmp_path / "some"
    some.mkdir()
    for number in range(30):
        name = f"{number}.txt"
        (some / name).write_text((whole / name).read_text())
    corpus = open_corpus([whole, some], [0.5, 0.5])

    train, heldout = (
        set().union(*(texts(getattr(source, split)) for source in corpus.sources))
        for split in ("train", "heldout")
    )
    assert not train & heldout and train | heldout == {f"{n:02d}".encode() + b"a" * 50 for n in range(60)}
    assert len(heldout) > 6, "a tenth of each path, not of one alone"


def test_the_held_out_end_of_a_document_is_trained_on_from_no_other_path(tmp_path):
    """Of fewer than ten documents ends are held out: another path may have the documents whole."""
    whole, book = letters(tmp_path, "whole", "a", count=60), tmp_path / "book.txt"
    book.write_bytes(bytes(range(1, 121)))
    (whole / "book.txt").write_bytes(book.read_bytes())
    for paths in ([whole, book], [book, whole]):
        corpus = open_corpus(paths, [0.5, 0.5])
        many, one = (corpus.sources[paths.index(path)] for path in (whole, book))
        assert texts(one.train) == {bytes(range(1, 109))} and texts(one.heldout) == {bytes(range(109, 121))}
        assert len(texts(many.train)) == 61 - 6 - 1 and book.read_bytes() not in texts(many.train)
    book.write_bytes(min(texts(many.heldout)))
    with pytest.raises(DataError, match="all its text is held out of other paths"):
        open_corpus([whole, book], [0.5, 0.5])
    (tmp_path / "copy.txt").write_bytes(book.read_bytes())
    both = open_corpus([book, tmp_path / "copy.txt"], [0.5, 0.5]).sources
    assert texts(both[0].train) == texts(both[1].train), "cut alike"


def test_a_path_all_of_whose_text_is_held_out_of_others_is_named(tmp_path):
    whole, held = letters(tmp_path, "whole", "a", count=120), tmp_path / "held"
    held.mkdir()
    heldout = open_corpus([whole]).sources[0].heldout
    for number, text in enumerate(sorted(texts(heldout))):
        (held / f"{number}.txt").write_bytes(text)
    with pytest.raises(DataError, match="held: all its text is held out of other paths; name it once"):
        open_corpus([whole, held], [0.5, 0.5])


def test_other_proportions_are_another_corpus(three):
    prints = {open_corpus(three, weights).fingerprint for weights in ((1, 1, 1), (1, 1, 2), (2, 1, 1))}
    assert len(prints) == 3
    assert open_corpus(three, (2, 2, 4)).fingerprint in prints
    assert open_corpus(three[:1]).fingerprint != open_corpus(three[1:2]).fingerprint
    assert open_corpus(three[:1]).fingerprint == open_corpus(three[:1], (7,)).fingerprint


def test_options_reach_the_corpus(three):
    paths = tuple(map(str, three))
    corpus = read_data(configure(data=paths, data_weights=(1.0, 2.0, 3.0), sequence=16))
    assert [source.weight for source in corpus.sources] == [1, 2, 3]
    with pytest.raises(DataError, match=r".*/a: \d+ bytes to train on, but --sequence 10000 takes more"):
        read_data(configure(data=paths, data_weights=(1.0, 2.0, 3.0), sequence=10_000))


def test_a_model_has_the_vocabulary_of_its_data(tmp_path):
    pytest.importorskip("tokenizers")
    from train.model import model_config

    prepare(tmp_path / "out", [letters(tmp_path, "text", "a")], train_tokenizer=300, held_out=0.2)
    config = configure(data=(str(tmp_path / "out"),), model="tiny", sequence=16)
    corpus = read_data(config)
    assert model_config(config, corpus.vocab).vocab == corpus.vocab < 300
    assert model_config(config, corpus.vocab).vocab > 256


def test_sources_that_do_not_fit_together_are_refused(three, tmp_path):
    pytest.importorskip("tokenizers")
    prepare(tmp_path / "bpe", [three[0].with_name("text-a")], train_tokenizer=300)
    others = r"bpe: its tokens \(\d+, separator 0\) are not those of the other sources"
    with pytest.raises(DataError, match=others):
        open_corpus([three[0], tmp_path / "bpe"])
    with pytest.raises(DataError, match="--data-weights: 2 for 3 paths of --data; give one for each"):
        open_corpus(three, (1, 2))
    with pytest.raises(DataError, match="every weight must be above 0"):  # before anything is read
        open_corpus([tmp_path / "nowhere", tmp_path / "neither"], (1.0, float("nan")))
    (tmp_path / "bpe" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not the one that its tokens were made with"):
        open_corpus([tmp_path / "bpe"])
    (tmp_path / "bpe" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"bpe: tokenizer.json is missing"):
        open_corpus([tmp_path / "bpe"])


# --- records


def make_array_record(folder, rows):
    module = pytest.importorskip("array_record.python.array_record_module")
    pytest.importorskip("grain")
    path = folder / "rows.array_record"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row.encode())
    writer.close()
    return path


def make_dataset(folder, rows):
    datasets = pytest.importorskip("datasets")
    path = folder / "set"
    datasets.Dataset.from_dict({"text": rows, "n": list(range(len(rows)))}).save_to_disk(str(path))
    return path


MAKERS = {"ArrayRecord": make_array_record, "datasets": make_dataset}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("default")
def test_records_train_like_files_of_text(kind, tmp_path):
    rows = [f"row {number} " + "äbc " * (number % 9) for number in range(50)] * 2
    path = MAKERS[kind](tmp_path, rows)
    (tmp_path / "text").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "text" / str(number)).write_text(row)
    records, files = open_corpus([path]), open_corpus([tmp_path / "text"])
    assert records.num_documents == 50
    assert (records.num_tokens, records.num_heldout) == (files.num_tokens, files.num_heldout)
    for step in range(5):
        for name, values in files.train_batch(2, step, SHAPE).items():
            np.testing.assert_array_equal(records.train_batch(2, step, SHAPE)[name], values)
    (tmp_path / "other").mkdir()
    other = open_corpus([MAKERS[kind](tmp_path / "other", [*rows[:49], "another"])])
    prints = [one.sources[0].fingerprint for one in (records, open_corpus([path]), other)]
    assert prints[0] == prints[1] != prints[2]
    made = prepare(tmp_path / "out", [path], held_out=0.1)
    assert made.origin["documents"] == 50
    again, first = open_corpus([tmp_path / "out"]), files.train_batch(2, 0, SHAPE)["inputs"]
    np.testing.assert_array_equal(again.train_batch(2, 0, SHAPE)["inputs"], first)


@pytest.mark.filterwarnings("default")
def test_a_data_set_without_text_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": ["a"] * 20}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match="set: no column 'text'; there are body"):
        open_corpus([tmp_path / "set"])


@pytest.mark.filterwarnings("default")
def test_rows_of_a_data_set_that_are_no_text(tmp_path):
    """None is an empty text, as in files of JSON; others are refused, and so is a folder of several sets."""
    datasets = pytest.importorskip("datasets")
    rows = [f"row {number}" for number in range(20)]
    datasets.Dataset.from_dict({"text": [*rows, None]}).save_to_disk(str(tmp_path / "none"))
    made = prepare(tmp_path / "out", [tmp_path / "none"])
    assert (made.origin["documents"], made.origin["dropped"]) == (20, {"empty": 1})
    assert open_corpus([tmp_path / "none"]).num_documents == 20
    datasets.Dataset.from_dict({"text": [7] * 20}).save_to_disk(str(tmp_path / "set"))
    for use in (open_corpus, lambda paths: prepare(tmp_path / "other", paths)):
        with pytest.raises(DataError, match="set: record 0: 'text' is not text but 7"):
            use([tmp_path / "set"])
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": rows})})
    both.save_to_disk(str(tmp_path / "both"))
    for use in (open_corpus, lambda paths: prepare(tmp_path / "third", paths)):
        with pytest.raises(
            DataError, match=r"both: holds several data sets; name those to be read: .*/both/train$"
        ):
            use([tmp_path / "both"])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("broken", ["state.json", "data-00000-of-00001.arrow"])
def test_a_damaged_data_set_is_named(broken, tmp_path):
    path = make_dataset(tmp_path, [f"row {number}" for number in range(20)])
    for content in (b"{}", None):
        (path / broken).unlink() if content is None else (path / broken).write_bytes(content)
        for use in (open_corpus, lambda paths: prepare(tmp_path / "out", paths)):
            with pytest.raises(DataError, match="cannot read .*set: it is damaged or no data set: "):
                use([path])


def test_a_damaged_array_record_is_named(tmp_path):
    path = make_array_record(tmp_path, ["row"] * 20)
    content = path.read_bytes()
    for broken in (b"", content[: len(content) // 2]):
        path.write_bytes(broken)
        for use in (open_corpus, lambda paths: prepare(tmp_path / "out", paths)):
            with pytest.raises(
                DataError, match="cannot read .*array_record: it is damaged or no ArrayRecord file"
            ):
                use([path])
        shutil.rmtree(tmp_path / "out")


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.array_record").write_bytes(b"")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    for library, name, text in (
        ("grain", "x.array_record", "pip install grain array_record"),
        ("datasets", "set", "pip install datasets"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(DataError, match=text):
            open_corpus([tmp_path / name])


# --- tables, places


def test_a_query_picks_the_rows(tmp_path):
    pytest.importorskip("duckdb")
    rows = [f"row {number}" for number in range(100)]
    inputs = [write_lines(tmp_path / "a.jsonl", rows[:60]), write_lines(tmp_path / "b.jsonl", rows)]
    query = "SELECT upper(text) AS text FROM documents WHERE id % 3 = 0"
    prepare(tmp_path / "out", inputs, sql=query, held_out=0.2)
    kept = [file.read_bytes() for file in (tmp_path / "out").glob("*.bin")]
    wanted = {row.upper() for part in (rows[:60], rows) for n, row in enumerate(part) if n % 3 == 0}
    assert set(b"".join(kept).decode().split("\0")[:-1]) == wanted
    with pytest.raises(DataError, match=r'--sql: .*"nothing"'):
        prepare(tmp_path / "other", inputs, sql="SELECT nothing FROM documents")
    for number, (bad, gives) in enumerate({"SELECT id FROM documents": "id BIGINT", "": "nothing"}.items()):
        message = (
            f"--sql: the query must give text in a column 'text'; it gives {gives}; name the column with AS"
        )
        with pytest.raises(DataError, match=message):
            prepare(tmp_path / f"bad-{number}", inputs, sql=bad)
    with pytest.raises(DataError, match="nothing is left to train on"):
        prepare(tmp_path / "none", inputs, sql="SELECT text FROM documents WHERE false")
    (tmp_path / "c.txt").write_text("c")
    kinds = "--sql: needs Parquet files alone or JSONL files alone, .* got lines, text"
    with pytest.raises(DataError, match=kinds):
        prepare(tmp_path / "third", [*inputs, tmp_path / "c.txt"], sql=query)


@pytest.mark.parametrize("query", ["SELECT text FROM documents;", "SELECT text FROM documents -- all"])
def test_a_query_as_it_is_written_elsewhere(query, tmp_path):
    pytest.importorskip("duckdb")
    made = prepare(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", ["a", "b", "c"])], sql=query)
    assert made.origin["documents"] == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_columns_are_those_of_the_files_and_not_of_their_folders(name, tmp_path):
    pytest.importorskip("duckdb")
    folder = tmp_path / "text=other"
    folder.mkdir()
    if name == "a.jsonl":
        write_lines(folder / name, ["a", "b", "c"])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"]}), folder / name)
    made = prepare(tmp_path / "out", [folder / name], sql="SELECT text FROM documents")
    assert made.origin["documents"] == 3


def test_a_query_over_files_that_duckdb_does_not_read(tmp_path):
    """Packed otherwise they are refused by name; a line that is not JSON is told without the list of all files."""
    pytest.importorskip("duckdb")
    query, rows = "SELECT text FROM documents", write_lines(tmp_path / "a.jsonl", ["a", "b", "c"])
    for ending in (".bz2", ".xz"):
        packed = tmp_path / f"a.jsonl{ending}"
        packed.write_bytes(b"")
        needed = f"--sql: needs .* JSONL files alone, these as they are, .gz or .zst, .* got lines from .*{ending}$"
        with pytest.raises(DataError, match=needed):
            prepare(tmp_path / "packed", [packed], sql=query)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert prepare(tmp_path / "out", [packed], sql=query).origin["documents"] == 3
    rows.write_text('{"text": "a"}\n{not\n')
    with pytest.raises(DataError, match=r'--sql: .*a\.jsonl".* line [23]: unexpected character\.$'):
        prepare(tmp_path / "bad", [rows], sql=query)


def test_a_query_reads_the_file_that_was_named(tmp_path):
    """And not those that its name stands for as a pattern."""
    pytest.importorskip("duckdb")
    write_lines(tmp_path / "x1.jsonl", ["another's"] * 3)
    file = write_lines(tmp_path / "x[1].jsonl", ["a", "b", "c"])
    made = prepare(tmp_path / "out", [file], sql="SELECT text FROM documents")
    assert made.origin["documents"] == 3


class Server(http.server.BaseHTTPRequestHandler):
    """Below ``/whole`` a file, below ``/cut`` half of it, below ``/stream`` one without its length."""

    def do_GET(self):
        how = self.path.split("/")[1]
        self.send_response(200 if how in ("whole", "cut", "stream") else 500)
        if how != "stream":
            self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        if self.command == "GET":
            half = len(self.server.content) // 2
            self.wfile.write(self.server.content[: half if how == "cut" else None])

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.content = b"".join(b'{"text": "<a href=\'b.jsonl\'>%d</a>"}\n' % n for n in range(20))
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


def test_a_file_of_links_is_no_folder(server, tmp_path):
    for number, name in enumerate(("whole/a.jsonl", "whole/a.txt")):
        made = prepare(tmp_path / str(number), [f"{server.url}/{name}"])
        assert [file[0] for file in made.origin["files"]] == [f"{server.url}/{name}"]
        assert made.origin["documents"] == (1 if number else 20)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cut/a.jsonl", "Not enough data"),
        ("cut/a.parquet", "Not enough data"),
        ("stream/a.jsonl", "Cannot seek streaming"),
        ("stream/a.parquet", "Cannot seek streaming"),
        ("broken/a.jsonl", "500"),
    ],
)
def test_a_server_that_fails_is_named(server, name, why, tmp_path):
    with pytest.raises(DataError, match=f"cannot read {server.url}/{name}: .*{why}"):
        prepare(tmp_path / "out", [f"{server.url}/{name}"])


def test_a_hub_that_cannot_be_reached_is_named(tmp_path, monkeypatch):
    httpx, fsspec = pytest.importorskip("httpx"), pytest.importorskip("fsspec")

    def info(self, path, **how):
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)
    with pytest.raises(DataError, match="cannot read memory://a.jsonl: Name or service not known"):
        prepare(tmp_path / "out", ["memory://a.jsonl"])


def test_data_elsewhere(tmp_path, monkeypatch):
    """From a file system that is no folder into one, and trained on from there."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = f"memory://{uuid.uuid4().hex}"
    rows = [f"row {number} " + "words " * (number % 7) for number in range(80)]
    with fsspec.open(f"{place}/in/rows.jsonl", "w") as file:
        file.write("".join(json.dumps({"text": row}) + "\n" for row in rows))
    made = prepare(f"{place}/out", [f"{place}/in"], shard_mb=0.001)
    local = prepare(tmp_path / "local", [write_lines(tmp_path / "rows.jsonl", rows)], shard_mb=0.001)
    assert made.fingerprint == local.fingerprint
    assert prepare(f"{place}/out", [f"{place}/in"], shard_mb=0.001).fingerprint == made.fingerprint
    trained = dict(shard_mb=0.001, train_tokenizer=300, near_duplicates=0.9)
    nowhere_here = prepare(f"{place}/more", [f"{place}/in"], work=f"{place}/work", **trained)
    assert (
        nowhere_here.fingerprint
        == prepare(tmp_path / "more", [tmp_path / "rows.jsonl"], **trained).fingerprint
    )
    assert not fsspec.filesystem("memory").exists(f"{place}/work")
    file = f"{place}/more/tokenizer.json"
    Vocabulary(300, 1, file).write(tmp_path)
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text("ends")
    Vocabulary(300, 1, tmp_path / "tokenizer.json").write(tmp_path)  # where it is already
    assert beside.read_text() == "ends"
    with fsspec.open(file, "rb") as content:
        assert (tmp_path / "tokenizer.json").read_bytes() == content.read()
    there, here = open_corpus([f"{place}/out"]), open_corpus([tmp_path / "local"])
    assert there.fingerprint == here.fingerprint
    found, wanted = (corpus.train_batch(0, 1, SHAPE)["inputs"] for corpus in (there, here))
    np.testing.assert_array_equal(found, wanted)
    (copy,) = [path.parent for path in (tmp_path / "cache").rglob("manifest.json")]
    assert find_damage(copy) == []
    for name in ("manifest.json", "train-000000.bin"):
        (tmp_path / f"old {name}").hardlink_to(copy / name)
    open_corpus([f"{place}/out"])
    assert not (copy / "manifest.json").samefile(tmp_path / "old manifest.json"), (
        "another process read a half of it"
    )
    assert (copy / "train-000000.bin").samefile(tmp_path / "old train-000000.bin"), "it is not fetched again"
    with pytest.raises(DataError, match=r"memory://.*/nowhere: cannot read manifest.json"):
        open_corpus([f"{place}/nowhere"])


# --- near duplicates


def jaccard(one, other, run=near.RUN):
    def runs(text):
        words = text.lower().split()
        return {tuple(words[at : at + run]) for at in range(max(1, len(words) - run + 1))}

    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


def edited(text, share, rng):
    """A text with a share of its words replaced, all in one place."""
    words = text.split()
    count = round(len(words) * share)
    return " ".join(words[: len(words) - count] + [f"new{rng.random()}" for _ in range(count)])


@pytest.mark.parametrize("similarity", [0.5, 0.8])
def test_bands_agree_as_often_as_their_formula_says(similarity):
    rng = random.Random(0)
    count, rows = near.band_shape(similarity)
    assert abs((1 / count) ** (1 / rows) - similarity) < 0.05
    agreed, expected = 0, 0.0
    for number in range(300):
        text = " ".join(f"w{number}-{rng.randrange(10**6)}" for _ in range(120))
        other = edited(text, rng.choice([0.05, 0.1, 0.2, 0.3, 0.5]), rng)
        one, two = (near.band_hashes(words.encode(), similarity) for words in (text, other))
        agreed += bool((one == two).any())
        expected += 1 - (1 - jaccard(text, other) ** rows) ** count
    assert abs(agreed - expected) < 4 * (300 * 0.25) ** 0.5 * 0.7


def test_near_duplicates_are_dropped_and_others_kept(tmp_path):
    rng = random.Random(2)
    texts = [" ".join(f"w{rng.randrange(3000)}" for _ in range(400)) for _ in range(30)]
    copies = [edited(text, 0.01, rng) for text in texts[:10]]
    others = [edited(text, 0.6, rng) for text in texts[10:20]]
    assert min(map(jaccard, texts, copies)) > 0.95 and max(map(jaccard, texts[10:20], others)) < 0.5
    write_lines(tmp_path / "a.jsonl", texts + others)
    write_lines(tmp_path / "b.jsonl", copies + texts[25:])
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    made = prepare(tmp_path / "out", inputs, near_duplicates=0.8, shard_mb=0.01)
    assert made.origin["dropped"] == {"exact duplicates": 5, "near duplicates": 10}
    assert made.origin["documents"] == 40
    kept = b"".join(file.read_bytes() for file in sorted((tmp_path / "out").glob("*.bin"))).decode()
    for text, copy in zip(texts, copies, strict=False):
        assert (text in kept.split("\0")) != (copy in kept.split("\0"))


def test_short_and_empty_texts_have_bands():
    for text in (b"", b"one", b"one two three", b"one two three four five six"):
        assert near.band_hashes(text, 0.8).shape == (near.band_shape(0.8)[0],)
    assert not np.array_equal(near.band_hashes(b"one", 0.8), near.band_hashes(b"two", 0.8))


def test_a_long_text_is_not_hashed_all_at_once():
    """128 hashes of each of a million runs would be a gigabyte."""
    text = " ".join(map(str, range(30_000))).encode()
    whole = near._mix(near.run_hashes(text)[:, None] ^ near._SALTS).min(0)
    count, rows = near.band_shape(0.8)
    key = np.arange(1, count + 1, dtype=np.uint64)
    for row in range(rows):
        key = near._mix(key ^ whole[: count * rows].reshape(count, rows)[:, row])
    np.testing.assert_array_equal(near.band_hashes(text, 0.8), key)


def test_the_cache_is_where_it_should_be(monkeypatch, tmp_path):
    from train.data.remote import cache_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dualpipe-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/dualpipe-jax").expanduser()
