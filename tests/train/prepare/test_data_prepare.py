"""scripts/prepare: from documents to shards, against what plain loops over the same documents give."""

import errno
import fcntl
import functools
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console

from train.data import DataError, open_corpus
from train.data.inputs import File, Piece, cut_into_pieces, documents, find_files
from train.data.manifest import Manifest, Shard, find_damage, read_manifest
from train.prepare import pipeline, plan
from train.prepare.__main__ import main
from train.prepare.files import open_folder
from train.prepare.filters import drop_reason
from train.prepare.options import Options
from train.prepare.tokenise import _sample
from train.prepare.workers import Report

ROOT = Path(__file__).parents[3]
WORDS = ["pipe", "stage", "rank", "tick", "slot", "Äther", "☃", "42", "microbatch", "the", "of"]


def texts(count, seed=0):
    rng = random.Random(seed)
    return [f"document {n}\n" + " ".join(rng.choices(WORDS, k=rng.randint(3, 60))) for n in range(count)]


def write_lines(file, rows):
    file.write_text("".join(json.dumps({"id": n, "text": row}) + "\n" for n, row in enumerate(rows)))
    return file


def prepare(out, data, **options):
    options = {"workers": 1, **options}
    console = Console(file=io.StringIO(), width=200)
    return pipeline.prepare(Options(str(out), tuple(map(str, data)), **options), Report(console))


def content(out, split):
    """All tokens of a split, read with nothing of ours."""
    manifest = json.loads((out / "manifest.json").read_text())
    dtype = f"<{np.dtype(manifest['dtype']).str[1:]}"
    return [np.fromfile(out / shard["file"], dtype) for shard in manifest[split]]


def expected(rows, share):
    """The streams that the rows should become, as bytes: each row once, by its hash, a share held out."""
    rows = sorted({row.encode() for row in rows}, key=lambda row: hashlib.sha256(row).digest())
    count = int(len(rows) * share)
    return {
        "heldout": b"".join(row + b"\0" for row in rows[:count]),
        "train": b"".join(row + b"\0" for row in rows[count:]),
    }


def files_of(out):
    return {file.name: file.read_bytes() for file in out.iterdir() if file.name != "manifest.json"}


def test_bytes_are_the_documents_in_the_order_of_their_hashes(tmp_path):
    rows = texts(200)
    write_lines(tmp_path / "a.jsonl", rows + rows[:50])
    made = prepare(tmp_path / "out", [tmp_path / "a.jsonl"], shard_mb=0.005, held_out=0.1)
    streams = expected(rows, 0.1)
    for split, stream in streams.items():
        assert b"".join(part.tobytes() for part in content(tmp_path / "out", split)) == stream
    assert len(content(tmp_path / "out", "train")) > 3
    assert not (tmp_path / "out" / ".work").exists()
    order = streams["train"].split(b"\0")[:-1]
    for number in (0, 1, 40, len(order) - 1):
        assert document(tmp_path / "out", made, number) == order[number] + b"\0"


def document(folder, manifest, number):
    """The bytes of a document by the index of its shard, as docs/train.md describes it."""
    for shard in manifest.train:
        if number < shard.documents:
            start, stop = np.load(folder / shard.index)[number : number + 2]
            return np.fromfile(folder / shard.file, np.uint8)[start:stop].tobytes()
        number -= shard.documents


def test_a_run_reads_the_same_from_text_and_from_shards(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number, text in enumerate(texts(40)):
        (folder / f"{number}.txt").write_text(text)
    prepare(tmp_path / "out", [folder], shard_mb=0.003, held_out=0.1)
    ours, plain = open_corpus([tmp_path / "out"]), open_corpus([folder])
    assert (ours.num_documents, ours.vocab) == (plain.num_documents, plain.vocab)
    for step in range(5):
        for name, values in ours.train_batch(3, step, (2, 2, 32)).items():
            np.testing.assert_array_equal(values, plain.train_batch(3, step, (2, 2, 32))[name])
    (one,), (other,) = (corpus.heldout_batches(6, (1, 6, 32)) for corpus in (ours, plain))
    np.testing.assert_array_equal(one[0]["inputs"], other[0]["inputs"])


def test_every_kind_of_file_gives_the_same(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = texts(60)
    places = {kind: tmp_path / kind for kind in ("text", "lines", "gzip", "parquet", "mixed")}
    for place in places.values():
        place.mkdir()
    for number, row in enumerate(rows):
        (places["text"] / f"{number}.txt").write_text(row)
    write_lines(places["lines"] / "a.jsonl", rows)
    with gzip.open(places["gzip"] / "a.jsonl.gz", "wt") as file:
        file.write((places["lines"] / "a.jsonl").read_text())
    pq.write_table(
        pa.table({"text": rows, "n": range(60)}), places["parquet"] / "a.parquet", row_group_size=7
    )
    pq.write_table(pa.table({"text": [*rows[:20], None]}), places["mixed"] / "a.parquet")
    write_lines(places["mixed"] / "b.ndjson", rows[15:40])
    for number in range(35, 60):
        (places["mixed"] / f"{number}.md").write_text(rows[number])
    stream = expected(rows, 0.05)["train"]
    for kind, place in places.items():
        prepare(tmp_path / f"out-{kind}", [place])
        (tokens,) = content(tmp_path / f"out-{kind}", "train")
        assert tokens.tobytes() == stream, kind
    dropped = read_manifest(tmp_path / "out-mixed").origin["dropped"]
    assert dropped == {"empty": 1, "exact duplicates": 10}


def test_lines_and_row_groups_cut_into_pieces_are_all_read_once(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = texts(30)
    lines, table = write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": rows}), table, row_group_size=8)
    first_line = lines.read_bytes().index(b"\n") + 1
    for file, sizes in ((lines, (1, 50, 333, first_line, 10**9)), (table, (1000,))):
        for size in sizes:
            found = cut_into_pieces(find_files([str(file)]), size)
            assert len(found) == max(1, -(-file.stat().st_size // size)) if file == lines else len(found) > 2
            assert [text.decode() for piece in found for text in documents(piece, "text")] == rows
    for name, text in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).write_bytes(text)
    piece = Piece("text", (f"file://{tmp_path}/a", f"file://{tmp_path}/b"))
    assert list(documents(piece, "text")) == [b"one", b"two"], "a piece of text is the files themselves"


def test_globs_urls_and_folders(tmp_path):
    for name in ("a.txt", "b.txt", "c.md", ".hidden", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [Path(file.url).name for file in find_files([str(tmp_path / "*.txt"), f"file://{tmp_path}/c.md"])]
    assert names == ["a.txt", "b.txt", "c.md"]
    names = [Path(file.url).name for file in find_files([str(tmp_path), str(tmp_path / "a.txt")])]
    assert names == ["a.txt", "b.txt", "c.md", "d.txt"]
    with pytest.raises(DataError, match=r"nothing is named like .*/\*\.rst"):
        find_files([str(tmp_path), str(tmp_path / "*.rst")])


def test_prepared_text_within_the_data_is_no_text(tmp_path):
    data = tmp_path / "data"
    (data / "web").mkdir(parents=True)
    (data / "web" / "manifest.json").write_text('{"of": "another program"}')
    write_lines(data / "a.jsonl", texts(60))
    alone = open_corpus([data])
    for _ in range(2):
        prepare(data / "out", [data], train_tokenizer=300)
    beside = open_corpus([data])
    assert beside.fingerprint == alone.fingerprint and alone.num_documents == 61
    (reason,) = {re.sub(r".*/out/[^ ]*", "*", reason) for reason in beside.skipped}
    assert reason == f"* is a part of prepared text: name its folder, {data}/out, to train on it"
    with pytest.raises(
        DataError, match=f"--data {data}: holds prepared text, .*: move {data}/out, or name what"
    ):
        prepare(tmp_path / "other", [data])


@pytest.mark.parametrize("name", ["std::vector.3", "std::vector.jsonl.gz"])
def test_names_with_two_colons_are_no_chains_of_urls(name, tmp_path, monkeypatch):
    row = b'{"text": "a vector"}'
    (tmp_path / name).write_bytes(gzip.compress(row) if name.endswith(".gz") else row)
    monkeypatch.chdir(tmp_path)
    for path in (name, str(tmp_path), f"file://{tmp_path}"):
        (piece,) = cut_into_pieces(find_files([path]))
        assert list(documents(piece, "text")) == [b"a vector" if name.endswith(".gz") else row]
    open_corpus([name])


def test_more_workers_and_more_pieces_change_nothing(tmp_path, monkeypatch):
    rows = texts(120)
    for number in range(4):
        write_lines(tmp_path / f"{number}.jsonl", rows[number * 30 : number * 30 + 40])
    inputs = [tmp_path / f"{number}.jsonl" for number in range(4)]
    one = prepare(tmp_path / "one", inputs, shard_mb=0.005)
    monkeypatch.setattr(plan, "DOCUMENTS_AT_ONCE", 25)
    two = prepare(tmp_path / "two", inputs, shard_mb=0.005, workers=2)
    assert one.fingerprint == two.fingerprint
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert one.fingerprint != prepare(tmp_path / "three", inputs[:3], shard_mb=0.005).fingerprint


def test_more_files_than_a_process_may_open(tmp_path):
    """Each is a piece, and a shard has documents of all."""
    rows = texts(150)
    for number, row in enumerate(rows):
        write_lines(tmp_path / f"{number}.jsonl", [row])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 60, before[1]))
    try:
        prepare(tmp_path / "out", tmp_path.glob("*.jsonl"), near_duplicates=0.99)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert content(tmp_path / "out", "train")[0].tobytes() == expected(rows, 0.05)["train"]


def test_more_shards_than_a_process_may_open(tmp_path, monkeypatch):
    shards = []
    for number in range(120):
        (tmp_path / f"train-{number:06d}.bin").write_bytes(bytes([number + 1, 0]))
        shards.append(Shard(f"train-{number:06d}.bin", 2, 1, "", ""))
    (tmp_path / "manifest.json").write_text(Manifest("uint8", 256, 0, None, tuple(shards), ()).dumps())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 60, before[1]))
    try:
        stream = open_corpus([tmp_path]).sources[0].train
        assert stream.windows(np.array([0]), 240)[0].tolist() == [n for m in range(120) for n in (m + 1, 0)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(np, "memmap", lambda *_, **__: (tmp_path / "nothing/here").read_bytes())
    with pytest.raises(
        DataError, match="cannot map its 120 shards into memory: No such file or directory; if they"
    ):
        open_corpus([tmp_path])


def test_a_file_of_which_nothing_is_kept(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    write_lines(tmp_path / "rows.jsonl", rows := texts(30))
    inputs = [tmp_path / "empty.jsonl", tmp_path / "rows.jsonl"]
    made = prepare(tmp_path / "out", inputs, near_duplicates=0.99)
    assert made.origin["documents"] == len(rows)


def test_filters_drop_and_count(tmp_path):
    dropped = {
        "empty": "",
        "fewer letters than --min-letters": "1234567890 !!!! 9999",
        "longer than --max-bytes": "y" * 300,
        "matches --reject": "call me at BUY NOW please",
        "more repeated lines than --max-repeated-lines": "same line\nsame line\nsame line\nother",
        "not text": "zero \0 byte in it",
        "shorter than --min-bytes": "x",
    }
    write_lines(tmp_path / "a.jsonl", ["fine text that is kept", *dropped.values()])
    asked = dict(min_bytes=2, max_bytes=200, min_letters=0.5, max_repeated_lines=0.4, reject=r"BUY\s+NOW")
    made = prepare(tmp_path / "out", [tmp_path / "a.jsonl"], **asked)
    assert made.origin["dropped"] == dict.fromkeys(dropped, 1)
    assert made.origin["documents"] == 1


@pytest.mark.parametrize(
    ("text", "asked", "why"),
    [
        ("abc", dict(min_bytes=3, max_bytes=3, min_letters=1), None),
        ("ab1 ", dict(min_letters=2 / 3), None),
        ("a\nb\na\n" * 2 + "c\nd\ne\nf", dict(max_repeated_lines=0.4), None),
        ("a\na\na\na\nb\nc\nd\ne\nf\ng", dict(max_repeated_lines=0.3), None),
        (
            "a\na\na\na\nb\nc\nd\ne\nf\ng",
            dict(max_repeated_lines=0.29),
            "more repeated lines than --max-repeated-lines",
        ),
        (b"caf\xe9", {}, None),
        (b"caf\xe9", dict(train_tokenizer=300), "not UTF-8"),
        (b"caf\xe9", dict(tokenizer="own.json"), "not UTF-8"),
    ],
)
def test_filters_at_their_edges(text, asked, why):
    assert (
        drop_reason(text if isinstance(text, bytes) else text.encode(), Options("out", ("data",), **asked))
        == why
    )


def test_a_share_is_held_out_exactly(tmp_path):
    """0.29 * 100 is 28.999999999999996."""
    made = prepare(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", texts(100))], held_out=0.29)
    assert [shard.documents for shard in (*made.heldout, *made.train)] == [29, 71]


def test_half_a_pair_of_surrogates_is_no_question_mark(tmp_path):
    """JSON may hold it, and no text of UTF-8 can."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud83d"}\n')
    made = prepare(tmp_path / "out", [tmp_path / "a.jsonl"], train_tokenizer=257)
    assert (made.origin["documents"], made.origin["dropped"]) == (1, {"not UTF-8": 1})


def test_of_few_documents_the_ends_are_held_out(tmp_path):
    text = "ab" * 500
    (tmp_path / "a.txt").write_text(text)
    prepare(tmp_path / "out", [tmp_path / "a.txt"], held_out=0.1)
    assert [part.tobytes() for part in content(tmp_path / "out", "train")] == [text[:900].encode() + b"\0"]
    assert [part.tobytes() for part in content(tmp_path / "out", "heldout")] == [text[900:].encode() + b"\0"]


# --- tokenizers


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    rows = [*texts(150), "a text that says <|endoftext|> in the middle of itself"]
    write_lines(folder / "a.jsonl", rows)
    made = prepare(folder / "out", [folder / "a.jsonl"], train_tokenizer=400, shard_mb=0.004)
    return folder, rows, made


def test_a_tokenizer_is_trained_and_used(bpe, tmp_path):
    import tokenizers

    folder, rows, made = bpe
    theirs = tokenizers.Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert made.vocab == theirs.get_vocab_size() == 400 and made.dtype == "uint16"
    separator = theirs.token_to_id("<|endoftext|>")
    order = expected(rows, 0.05)
    for split in ("train", "heldout"):
        documents = order[split].decode().split("\0")[:-1]
        tokens = np.concatenate(content(folder / "out", split)).tolist()
        assert tokens == [id for text in documents for id in [*theirs.encode(text).ids, separator]]
        assert tokens.count(separator) == len(documents), "a text that mentions it does not end there"
    again = prepare(tmp_path / "again", [folder / "a.jsonl"], train_tokenizer=400, shard_mb=0.004)
    assert again.fingerprint == made.fingerprint, "the same command trains the same one"


def test_a_tokenizer_learns_from_so_much_text_and_no_more():
    parts = ("train", "heldout", "train", "train"), (b"abc", b"x" * 99, b"d", b"e")
    taken = [list(_sample(zip(*parts, strict=True), size)) for size in (1, 3, 4, 5, 99)]
    assert taken == [["abc"], ["abc"], ["abc", "d"], ["abc", "d", "e"], ["abc", "d", "e"]]


def test_a_tokenizer_does_not_see_what_is_held_out(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    rows = texts(40)
    first = min(rows, key=lambda row: hashlib.sha256(row.encode()).digest())
    secret = first + " " + "zzqqzzqq" * 200  # would surely become a token
    rows = [row for row in rows if row != first]
    second = min(hashlib.sha256(row.encode()).digest() for row in rows)
    while hashlib.sha256(secret.encode()).digest() > second:  # until its hash is the first, too
        secret += "q"
    write_lines(tmp_path / "a.jsonl", [*rows, secret])
    prepare(tmp_path / "out", [tmp_path / "a.jsonl"], train_tokenizer=350, held_out=0.03)
    vocabulary = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert "pipe" in vocabulary and not any("zz" in token for token in vocabulary)


def test_a_folder_that_is_prepared_anew_is_read_with_its_new_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    out, data = tmp_path / "out", [write_lines(tmp_path / "a.jsonl", texts(60))]
    for size in (280, 330):
        shutil.rmtree(out, ignore_errors=True)
        made = prepare(out, data, train_tokenizer=size)
        corpus = open_corpus([out])
        theirs = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        last = theirs.get_vocab_size() - 1
        assert made.vocab == corpus.vocab == last + 1
        tokens = np.concatenate(content(out, "train")).tolist()
        documents = expected(texts(60), 0.05)["train"].decode().split("\0")[:-1]
        assert tokens == [
            n for text in documents for n in (*theirs.encode(text).ids, corpus.vocabulary.separator)
        ]
        assert corpus.vocabulary.decode([last]) == theirs.decode([last])


def test_a_prepared_folder_tells_its_vocabulary_and_text(bpe):
    folder, _, _ = bpe
    corpus = open_corpus([folder / "out"])
    assert corpus.vocab == 400 and corpus.vocabulary.unit == "token"
    batch = corpus.train_batch(0, 0, (1, 2, 40))
    assert batch["inputs"].max() < 400
    assert re.search(r"document|pipe|stage|rank", corpus.vocabulary.decode(batch["inputs"][0, 0]))
    separator = corpus.vocabulary.separator
    whole = corpus.train_batch(0, 1, (2, 4, 200))
    np.testing.assert_array_equal(np.diff(whole["segment_ids"]) > 0, whole["inputs"][..., 1:] == separator)


def test_someone_elses_tokenizer(bpe, tmp_path):
    folder, rows, made = bpe
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "tokenizer.json").write_bytes((folder / "out" / "tokenizer.json").read_bytes())
    asked = dict(tokenizer=str(theirs), shard_mb=0.004)
    assert prepare(tmp_path / "out", [folder / "a.jsonl"], **asked).fingerprint == made.fingerprint
    (theirs / "tokenizer_config.json").write_text('{"eos_token": {"content": "A"}}')
    assert prepare(tmp_path / "other", [folder / "a.jsonl"], **asked).separator != made.separator
    (tmp_path / "a.txt").write_text("\n".join(rows))
    corpus = open_corpus([tmp_path / "a.txt"], tokenizer=str(folder / "out" / "tokenizer.json"))
    assert corpus.vocab == 400 and corpus.num_tokens < 0.7 * len("\n".join(rows))


# --- killed, damaged, foreign


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """Ended at the n-th file that is finished; what was finished is not made again."""
    rows, inputs = texts(90), [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(inputs):
        write_lines(file, rows[number * 30 : number * 30 + 30])
    whole = prepare(tmp_path / "whole", inputs, shard_mb=0.003)
    left, real, made = [-1], LocalFileSystem.mv, []

    def rename(self, part, file):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        made.append(file)
        real(self, part, file)

    monkeypatch.setattr(LocalFileSystem, "mv", rename)
    for after in (0, 1, 3, 5, 6, 8, 11):
        out, left[0] = tmp_path / str(after), after
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            prepare(out, inputs, shard_mb=0.003)
        assert not (out / "manifest.json").exists()
        left[0] = -1
        again = prepare(out, inputs, shard_mb=0.003)
        assert again == whole.__class__(**{**vars(whole), "origin": again.origin})
        assert files_of(out) == files_of(tmp_path / "whole")
        receipts = [name for name in made if re.search(r"(\d|plan|job)\.json$", name)]
        assert len(receipts) == len(set(receipts)), after


def test_what_it_works_with_is_none_of_its_data(tmp_path, monkeypatch):
    """Or the same command given again would find other files."""
    data = tmp_path / "data"
    data.mkdir()
    write_lines(data / "a.jsonl", texts(60))
    whole = prepare(tmp_path / "whole", [data], shard_mb=0.003)
    real = LocalFileSystem.mv

    def rename(self, part, file):
        real(self, part, file)
        if "train-" in file:
            raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "mv", rename)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", [data], shard_mb=0.003, work=data / "work")
    monkeypatch.setattr(LocalFileSystem, "mv", real)
    again = prepare(tmp_path / "out", [data], shard_mb=0.003, work=data / "work")
    assert again.fingerprint == whole.fingerprint


def test_killed_processes_leave_what_the_same_command_finishes(tmp_path):
    rows, names = texts(1200), [f"{number}.jsonl" for number in range(4)]
    for number, name in enumerate(names):
        write_lines(tmp_path / name, rows[number * 300 : number * 300 + 300])
    command = [sys.executable, "-P", "-m", "train.prepare", "out", "--data", *names]
    command += ["--shard-mb", "0.01", "--workers", "2", "--min-bytes", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "out/.work/read-000000.json").exists():
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    until = time.monotonic() + 60
    while any(Path(f"/proc/{worker}/stat").exists() for worker in workers):
        assert time.monotonic() < until, "a worker outlives the process that it works for"
        time.sleep(0.05)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = prepare(tmp_path / "whole", [tmp_path / name for name in names], shard_mb=0.01, min_bytes=2)
    assert read_manifest(tmp_path / "out").fingerprint == whole.fingerprint
    assert find_damage(tmp_path / "out") == []


INTERRUPTED = """
import sys, time
from pathlib import Path
from train.prepare.workers import run_jobs

def job(file, other, seconds):
    Path(file).touch()
    while not Path(other).exists():  # so that each of two workers has one
        time.sleep(0.05)
    time.sleep(seconds)

if __name__ == "__main__":
    try:
        list(run_jobs(job, [(*sys.argv[1:], 0), (*sys.argv[:0:-1], 120)], 2))
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_prints_no_tracebacks_of_workers(tmp_path):
    """A terminal sends it to all: to workers that wait for work, too, and to those that have some."""
    (tmp_path / "main.py").write_text(INTERRUPTED)
    files = [tmp_path / "idle", tmp_path / "busy"]
    line = [sys.executable, "main.py", *map(str, files)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = subprocess.Popen(line, cwd=tmp_path, env=environ, start_new_session=True, **streams)
    try:
        deadline = time.monotonic() + 120
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGINT)
        assert started.communicate(timeout=60)[0] == "interrupted\n"
    finally:
        started.kill()  # its workers end with it


def test_what_is_done_is_not_done_again(tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", texts(30))
    command = [str(tmp_path / "out"), "--data", str(tmp_path / "a.jsonl"), "--workers", "1"]
    assert main(command) == 0
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert main(command) == 0
    assert "is prepared already" in capsys.readouterr().out
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    assert main([*command, "--held-out", "0.2"]) == 2
    told = "is prepared otherwise: --held-out was 0.05; remove it or name another OUT"
    assert told in capsys.readouterr().err
    write_lines(tmp_path / "a.jsonl", texts(31))
    assert main(command) == 2
    assert "the files of --data have changed" in capsys.readouterr().err


def test_records_that_changed_and_kept_their_size_are_other_data(tmp_path):
    """An ArrayRecord file is filled up to blocks of 64 KiB, and Arrow's to 64 bytes."""
    rows, folder = tmp_path / "a.array_record", tmp_path / "set"
    folder.mkdir()
    for file in (rows, folder / "dataset_info.json", folder / "data-00000-of-00001.arrow"):
        file.write_bytes(b"a" * 64)
    for paths, changed in (([rows], rows), ([folder], file)):
        before = find_files(list(map(str, paths)))
        assert find_files(list(map(str, paths))) == before
        changed.write_bytes(b"b" * 64)
        os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))
        assert find_files(list(map(str, paths))) != before


def test_half_done_work_of_other_options_or_processes_is_not_mixed_in(tmp_path, monkeypatch):
    data, out, work = [write_lines(tmp_path / "a.jsonl", texts(30))], tmp_path / "out", tmp_path / "work"
    work.mkdir()
    with (
        pipeline._locked(open_folder(str(work))),
        pytest.raises(DataError, match=rf"process {os.getpid()} on .* is at work in .*work; let it end"),
    ):
        prepare(out, data, work=work)
    with monkeypatch.context() as patched:

        def refused(file, _, place=work):
            if Path(file.name).is_relative_to(place):
                raise OSError(errno.ENOLCK, "No locks available")

        patched.setattr(fcntl, "flock", refused)
        with pytest.raises(
            DataError, match="cannot lock .*work/lock: No locks available; name another --work"
        ):
            prepare(out, data, work=work)
        patched.setattr(fcntl, "flock", functools.partial(refused, place=tmp_path / "nfs"))
        assert prepare(tmp_path / "nfs" / "out", data, work=work).origin["documents"] == 30
    monkeypatch.setattr(pipeline, "tokenise", lambda *job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(out, data)
    message = r"is half done: --min-bytes was 1; give the same again .* or remove .*\.work"
    with pytest.raises(DataError, match=message):
        prepare(out, data, min_bytes=5)


def test_where_nothing_was_made_other_options_go_on(tmp_path):
    data, out = [write_lines(tmp_path / "a.jsonl", texts(30))], tmp_path / "out"
    with pytest.raises(DataError, match="no field 'body'"):
        prepare(out, data, text_key="body")
    assert prepare(out, data).origin["documents"] == 30


def test_shards_that_another_out_has_are_made_again(tmp_path, monkeypatch):
    """With one --work for two OUTs; or where OUT was removed meanwhile."""
    data, real = [write_lines(tmp_path / "a.jsonl", texts(60))], pipeline.tokenise
    monkeypatch.setattr(
        pipeline, "tokenise", lambda bucket, context: 1 / 0 if bucket == 2 else real(bucket, context)
    )
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / "one", data, shard_mb=0.002, work=tmp_path / "work")
    monkeypatch.setattr(pipeline, "tokenise", real)
    prepare(tmp_path / "two", data, shard_mb=0.002, work=tmp_path / "work")
    assert find_damage(tmp_path / "two") == []


def test_shards_that_another_preparation_wrote_over_are_made_again(tmp_path, monkeypatch):
    """Each with a --work of its own, and in the same OUT."""
    data, out, real = [write_lines(tmp_path / "a.jsonl", texts(60))], tmp_path / "out", pipeline.tokenise
    monkeypatch.setattr(
        pipeline, "tokenise", lambda bucket, context: 1 / 0 if bucket == 2 else real(bucket, context)
    )
    for work, asked in (("one", {}), ("two", {"reject": "document .5"})):
        with pytest.raises(ZeroDivisionError):
            prepare(out, data, shard_mb=0.002, work=tmp_path / work, **asked)
    monkeypatch.setattr(pipeline, "tokenise", real)
    prepare(out, data, shard_mb=0.002, work=tmp_path / "one")
    assert find_damage(out) == []


@pytest.mark.parametrize("place", ["two", None, "out/.work"])
def test_two_preparations_of_one_out_at_once_do_not_mix_their_shards(place, tmp_path, monkeypatch):
    """Each with a --work of its own, or in OUT: the second is refused, and the first ends well."""
    data, out, real = [write_lines(tmp_path / "a.jsonl", texts(60))], tmp_path / "out", pipeline.tokenise
    refused = []

    def meanwhile(bucket, context):
        if bucket == 2:
            asked = {} if place is None else {"work": tmp_path / place}
            with monkeypatch.context() as patched, pytest.raises(DataError, match="is at work in") as error:
                patched.setattr(pipeline, "tokenise", real)
                prepare(out, data, shard_mb=0.002, reject="document .5", **asked)
            refused.append(str(error.value))
        return real(bucket, context)

    monkeypatch.setattr(pipeline, "tokenise", meanwhile)
    prepare(out, data, shard_mb=0.002, work=tmp_path / "one")
    assert len(refused) == 1 and find_damage(out) == []
    assert {file.name for file in tmp_path.iterdir()} <= {"a.jsonl", "out", "two"}
    assert not (out / ".work").exists()


def test_shards_of_work_that_was_given_up_are_no_damage(tmp_path, monkeypatch):
    data, out, real = [write_lines(tmp_path / "a.jsonl", texts(60))], tmp_path / "out", pipeline.tokenise
    monkeypatch.setattr(
        pipeline, "tokenise", lambda bucket, context: 1 / 0 if bucket == 5 else real(bucket, context)
    )
    with pytest.raises(ZeroDivisionError):
        prepare(out, data, shard_mb=0.002)
    monkeypatch.setattr(pipeline, "tokenise", real)
    (out / "train-notes.bin").write_text("mine")
    with pytest.raises(DataError, match=r"half done.*or remove .*\.work"):
        prepare(out, data)
    shutil.rmtree(out / ".work")
    prepare(out, data)
    assert find_damage(out) == ["train-notes.bin: not in the manifest"]


@pytest.mark.parametrize(
    ("work", "out"), [("work", "out"), ("work", "work"), ("work", "work/out"), ("", "out")]
)
def test_a_folder_of_others_is_not_worked_in_and_removed(work, out, tmp_path):
    data = [write_lines(tmp_path / "a.jsonl", texts(60))]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(
        DataError, match=r"--work .*: is removed at the end, and .*; name a folder of its own"
    ):
        prepare(tmp_path / out, data, work=tmp_path / work)
    assert (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_ways_to_a_folder_that_are_written_otherwise_lead_there(tmp_path, monkeypatch):
    data = tmp_path / "data"
    (tmp_path / "here").mkdir()
    data.mkdir()
    (tmp_path / "link").symlink_to(data)
    write_lines(data / "a.jsonl", texts(60))
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match="is removed at the end, and .*work/out lies there"):
        prepare(tmp_path / "work" / "out", [data], work="../work")
    for out in (Path("../data/out"), tmp_path / "link" / "out", data / "out"):
        for path in (data, f"file://{data}"):
            for _ in range(2):
                prepare(out, [path])
            shutil.rmtree(out)


def test_another_tokenizer_in_the_folder_is_not_written_over(tmp_path):
    data, out = [write_lines(tmp_path / "a.jsonl", texts(60))], tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("a model's")
    message = r"out/tokenizer\.json: is there already and another; move it, and the same command ends, or name another"
    with pytest.raises(DataError, match=message):
        prepare(out, data, train_tokenizer=300)
    assert (out / "tokenizer.json").read_text() == "a model's"
    (out / "tokenizer.json").unlink()
    prepare(out, data, train_tokenizer=300)
    assert find_damage(out) == []


def test_work_that_was_killed_at_once_is_taken_up(tmp_path):
    """A process that was killed before it said what it makes leaves a lock, and a part of a file perhaps."""
    data, work = [write_lines(tmp_path / "a.jsonl", texts(60))], tmp_path / "work"
    work.mkdir()
    (work / "lock").touch()
    out = tmp_path / "out"
    out.mkdir()
    for left in (work / ".job.json.0123456789ab.part", out / ".train-000000.bin.0123456789ab.part"):
        left.touch()
    (out / "film.mkv.part").write_text("another's download")
    prepare(out, data, work=work)
    assert not work.exists()
    assert [file.name for file in out.glob("*.part")] == ["film.mkv.part"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "a.jsonl", texts(60))
    real = pipeline.partition

    def cut_short(*job):
        write_lines(file, texts(30))
        return real(*job)

    monkeypatch.setattr(pipeline, "partition", cut_short)
    message = (
        r"a\.jsonl has changed while it was read; remove .*work and give the same again when nothing writes"
    )
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "out", [file])
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.fixture
def prepared(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(100))
    prepare(tmp_path / "out", [tmp_path / "a.jsonl"], shard_mb=0.004)
    return tmp_path / "out"


def test_check_finds_every_flipped_bit(prepared, capsys):
    assert main([str(prepared), "--check"]) == 0
    assert "all whole" in capsys.readouterr().out
    rng = random.Random(1)
    for file in sorted(prepared.iterdir()):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        code = main(["--check", str(prepared)])
        said = capsys.readouterr()
        if file.name == "manifest.json":
            assert code == 2 and "manifest.json" in said.err
        else:
            assert code == 1 and f"{file.name}: damaged, its checksum is another" in said.out
            assert "1 damaged" in said.out
        file.write_bytes(good)
    assert main([str(prepared), "--check"]) == 0


def test_missing_and_strange_files_are_found(prepared):
    (prepared / "train-000001.bin").rename(prepared / "train-000777.bin")
    (prepared / "train-000000.index.npy").unlink()
    assert find_damage(prepared) == [
        "train-000000.index.npy: missing",
        "train-000001.bin: missing",
        "train-000777.bin: not in the manifest",
    ]


def change(prepared, **changes):
    file = prepared / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BROKEN = (
    (lambda out: (out / "train-000000.bin").unlink(), "cannot read shard train-000000.bin: No such"),
    (
        lambda out: os.truncate(out / "train-000001.bin", 17),
        r"shard train-000001.bin has 17 bytes, its manifest says \d+: it was cut short",
    ),
    (lambda out: change(out, vocab=100), "is damaged or was edited: its checksum is another"),
    (lambda out: change(out, version=2), "manifest.json: version 2, this program reads 1"),
    (lambda out: change(out, format="x"), "is not a manifest of dualpipe-jax tokens"),
    (
        lambda out: (out / "manifest.json").write_text("{"),
        "is damaged: it is not JSON; remove it and prepare",
    ),
    (lambda out: (out / "manifest.json").unlink(), "has shards of prepared text and no manifest.json"),
)


def test_what_cannot_be_trained_on_is_refused(prepared, tmp_path):
    for number, (spoil, message) in enumerate(BROKEN):
        copy = tmp_path / str(number)
        shutil.copytree(prepared, copy)
        spoil(copy)
        with pytest.raises(DataError, match=message):
            open_corpus([copy])


def test_tokens_beyond_the_vocabulary_are_refused(bpe, tmp_path):
    """Embedding one would silently give another's row."""
    folder, _, _ = bpe
    for file in (folder / "out").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in tmp_path.glob("train-*.bin"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(DataError, match=r"train-\d+.bin is damaged: token 65535 .* the vocabulary has 400"):
        open_corpus([tmp_path]).train_batch(0, 0, (1, 1, 16))


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    write_lines(tmp_path / "a.jsonl", texts(3))
    os.mkfifo(tmp_path / "pipe")
    assert [file.url for file in find_files([str(tmp_path)])] == [f"file://{tmp_path}/a.jsonl"]


def test_the_text_that_cannot_be_read_is_the_one_that_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"cannot read .*/b\.txt: No such file"):
        list(documents(Piece("text", (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))), "text"))
    (tmp_path / "b.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"cannot read .*/b\.txt: No such file"):
        prepare(tmp_path / "out", [tmp_path])


def test_what_a_link_leads_to_is_seen_to_change(tmp_path):
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "data" / "a.jsonl").symlink_to(tmp_path / "a.jsonl")
    prepare(tmp_path / "out", [tmp_path / "data"])
    os.utime(tmp_path / "a.jsonl", (1, 1))
    with pytest.raises(DataError, match="the files of --data have changed"):
        prepare(tmp_path / "out", [tmp_path / "data"])


def test_lines_of_a_file_whose_size_nobody_tells_are_read_to_its_end(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", texts(20))
    (piece,) = cut_into_pieces([File(f"file://{file}", "lines", 0)])
    assert [text.decode() for text in documents(piece, "text")] == texts(20)


def test_two_columns_of_one_name_are_refused(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table([["a"], [1], ["b"]], names=["text", "x", "text"]), tmp_path / "a.parquet")
    message = "2 columns 'text'; there is text, x, text; scripts/prepare --text-key names the column"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "out", [tmp_path / "a.parquet"])


def test_a_table_without_rows_has_no_documents(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])):
        pass
    with pytest.raises(
        DataError, match="nothing is left to train on; dropped: nothing, there are no documents"
    ):
        prepare(tmp_path / "out", [tmp_path / "a.parquet"])


@pytest.mark.parametrize(
    "config",
    [b'{"eos_token": ', b"[]", b"null", b'{"eos_token": 5}', b'{"eos_token": {"x": 1}}', b"\xff\xfe\0"],
)
def test_damaged_settings_of_a_tokenizer_are_named(config, bpe, tmp_path):
    shutil.copy(bpe[0] / "out" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    data = [write_lines(tmp_path / "a.jsonl", texts(20))]
    message = r"--tokenizer: .*tokenizer_config\.json is damaged: .*; mend it, or name .* with --separator"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "out", data, tokenizer=str(tmp_path))
    prepare(tmp_path / "out", data, tokenizer=str(tmp_path), separator="<|endoftext|>")


REFUSED = {
    "no data": ([], "--data: name files or folders of documents"),
    "missing": (["--data", "nowhere.jsonl"], "--data: cannot read nowhere.jsonl: No such file"),
    "empty folder": (["--data", "empty"], "--data: nothing to read in empty"),
    "no field": (["--data", "rows.jsonl", "--text-key", "body"], "no field 'body'; there is id, text; scripts/prepare"),
    "no json": (["--data", "bad.jsonl"], "bad.jsonl, byte 14: is not JSON"),
    "no text": (["--data", "rows.jsonl", "--text-key", "id"], "'id' is not text but 0"),
    "no parquet": (["--data", "bad.parquet"], "is not Parquet"),
    "all dropped": (["--data", "rows.jsonl", "--min-bytes", "9999"], "nothing is left to train on; dropped: 5 shorter"),
    "tokenizer": (["--data", "rows.jsonl", "--tokenizer", "x.json"], "--tokenizer x.json: there is no file x.json"),
    "no tokenizer": (["--data", "rows.jsonl", "--tokenizer", "rows.jsonl"], "is no tokenizer"),
    "two": (["--data", "rows.jsonl", "--tokenizer", "x", "--train-tokenizer", "300"], "leave out --tokenizer"),
    "small tokenizer": (["--data", "rows.jsonl", "--train-tokenizer", "256"], "must be at least 257"),
    "held out": (["--data", "rows.jsonl", "--held-out", "1"], "--held-out 1.0: must be between 0 and 1"),
    "workers": (["--data", "rows.jsonl", "--workers", "0"], "--workers 0: must be at least 1"),
    "similarity": (["--data", "rows.jsonl", "--near-duplicates", "2"], "must be above 0 and at most 1"),
    "reject": (["--data", "rows.jsonl", "--reject", "("], "--reject (: is no regular expression"),
    "protocol": (["--data", "nope://x/y"], "nope://x/y: Protocol not known: nope"),
    "ray and workers": (["--data", "rows.jsonl", "--ray", "auto", "--workers", "2"], "--workers 2: with --ray the"),
    "ray and check": (["--check", "--ray", "auto"], "--check: reads on this machine alone; leave out --ray"),
    "sql and bad lines": (["--data", "rows.jsonl", "--sql", "q", "--skip-bad", "5"], "leaves none out; leave out"),
    "sql elsewhere": (["--data", "rows.jsonl", "--sql", "q", "--work", "memory://w"], "--work, which must be a folder"),
    "not prepared": (["--check"], "cannot read manifest.json: No such file or directory; it is written last"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_options_and_data_are_refused_in_one_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "rows.jsonl", texts(5))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "bad.parquet").write_bytes(b"PAR0" * 100)
    arguments, message = REFUSED[case]
    assert main(["out", *arguments, *(["--workers", "1"] if "--workers" not in arguments else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert message in said
