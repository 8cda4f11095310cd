"""A folder of all kinds of files: what can be read is, what cannot is named, what is hidden stays so."""

import bz2
import gzip
import json
import lzma
import os
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.train.prepare.test_data_prepare import prepare
from train.data import DataError, open_corpus
from train.data.text import describe_skipped, read_documents
from train.prepare.__main__ import main
from train.prepare.partition import BAD_LINES


def lines(*texts):
    return "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts).encode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / ".env").write_text("PASSWORD=1")
    (tmp_path / "deep" / ".git" / "config").write_text("url = secret")
    (tmp_path / "README.md").write_text("a readme")
    (tmp_path / "deep" / "rows.jsonl").write_bytes(lines("first row", "second row"))
    (tmp_path / "rows.ndjson.gz").write_bytes(gzip.compress(lines("packed row")))
    (tmp_path / "note.txt.bz2").write_bytes(bz2.compress(b"packed note"))
    words = pyarrow.array(["ein Wort", "zwei"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), tmp_path / "words.parquet")
    return tmp_path


NOISE = json.dumps({"text": np.random.default_rng(0).bytes(9999).hex()}).encode()
"""A document that does not pack well."""
READ = {b"a readme", b"first row", b"second row", b"packed row", b"packed note", b"ein Wort", b"zwei"}


def test_a_folder_is_read_as_scripts_prepare_reads_it(folder):
    documents, skipped = read_documents([folder])
    assert set(documents) == READ and len(documents) == len(READ) and skipped == []
    assert describe_skipped(skipped) == ""
    (source,) = open_corpus([folder]).sources
    assert source.num_documents == len(READ)


def test_what_is_skipped_is_named(folder):
    (folder / "wide.txt").write_bytes("text".encode("utf-16"))
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(lines("x" * 9999))[:-20])
    (folder / "deep.jsonl").write_text("[" * 200_000)
    (folder / "other.jsonl").write_text('{"body": "b"}\n')
    (folder / "no.parquet").write_text("not Parquet")
    for name, packed in (("bits.txt.xz", lzma.compress(NOISE)), ("bits.jsonl.gz", gzip.compress(NOISE))):
        (folder / name).write_bytes(packed[:99] + bytes(255 - byte for byte in packed[99:199]) + packed[199:])
    corpus = open_corpus([folder])
    told = describe_skipped(corpus.skipped)
    assert told.startswith("skipped    7 of the files of --data, each for a reason\n")
    for name, reason in {
        "wide.txt": "is no text: it holds zero bytes, as UTF-16",
        "cut.jsonl.gz": "cannot read",
        "deep.jsonl": "is not JSON",
        "other.jsonl": "no field 'text'; there is body; scripts/prepare --text-key names the field",
        "no.parquet": "is not Parquet",
        "bits.txt.xz": "cannot read",
        "bits.jsonl.gz": "cannot read",
    }.items():
        (line,) = [line for line in told.splitlines() if name in line]
        assert reason in line
        with pytest.raises(DataError, match=reason.split(",")[0]):  # named by itself it is an error
            open_corpus([folder / name])
    assert corpus.num_documents == len(READ)


def test_all_frames_of_zstandard_are_read_and_none_that_is_cut(tmp_path):
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    frames = zstd.compress(lines("one")) + zstd.compress(lines("two", "x" * 999))
    (tmp_path / "whole.jsonl.zst").write_bytes(frames)
    assert open_corpus([tmp_path / "whole.jsonl.zst"]).num_documents == 3
    (tmp_path / "cut.jsonl.zst").write_bytes(frames[:-5])
    with pytest.raises(DataError, match="cut.jsonl.zst: Compressed file ended before"):
        open_corpus([tmp_path / "cut.jsonl.zst"])


def test_zstandard_without_its_library_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    (tmp_path / "a.txt.zst").write_text("packed")
    with pytest.raises(
        DataError, match=r"a.txt.zst: Zstandard needs a library: .*pip install backports.zstd"
    ):
        open_corpus([tmp_path / "a.txt.zst"])


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())])
def test_what_is_not_utf8_is_read_as_it_is(tmp_path, kind):
    """Of a column as of a file of text, bytes are bytes."""
    texts = [b"fine", b"caf\xe9", "caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode()]
    latin = pyarrow.array([*texts, None], pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(4, *latin.buffers()[1:], latin.buffers()[0])
    column = column if kind == pyarrow.string() else column.dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "latin.parquet")
    found, skipped = read_documents([tmp_path])
    assert sorted(found) == sorted(texts) and skipped == []


def test_the_files_of_a_data_set_are_no_documents(tmp_path):
    """Below a folder it is to be named: the trainer leaves it out, a preparation ends."""
    inside = tmp_path / "deep" / "set"
    inside.mkdir(parents=True)
    (tmp_path / "note.txt").write_text("a note")
    for name in ("dataset_info.json", "state.json"):
        (inside / name).write_text("{}")
    documents, skipped = read_documents([tmp_path])
    assert documents == [b"a note"]
    part = f"is a part of a data set: name the set, {inside}, to read it"
    assert skipped == [f"{inside / name} {part}" for name in ("dataset_info.json", "state.json")]
    with pytest.raises(
        DataError, match=f"holds a data set, .*: name {inside} and what else is to be read, each"
    ):
        prepare(tmp_path / "out", [tmp_path])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_lines_of_another_encoding_are_not_left_out_one_by_one(encoding, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', encoding=encoding)
    with pytest.raises(DataError, match=r"a.jsonl: is UTF-.*, must be UTF-8: write it anew$"):
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], skip_bad=9)


def test_a_name_that_is_no_text_is_shown(tmp_path):
    (tmp_path / "a.txt").write_text("a document")
    (tmp_path / os.fsdecode(b"caf\xe9.bin")).write_bytes(b"a\0")
    shown = describe_skipped(open_corpus([tmp_path]).skipped).encode()
    assert shown.endswith(
        rb"/caf\udce9.bin is no text: it holds zero bytes, as UTF-16 and most other formats do"
    )


def test_of_many_the_first_ten_are_named(tmp_path):
    for number in range(13):
        (tmp_path / f"{number:02}.txt").write_bytes(b"\0")
    with pytest.raises(DataError) as error:
        read_documents([tmp_path])
    said = str(error.value).splitlines()
    assert (said[0], said[-1]) == (f"--data: nothing to read in {tmp_path}", "  and 3 more")
    assert len(said) == 12


def test_bad_lines_up_to_a_number_are_left_out(tmp_path):
    """Counted over all files; the message of one too many says how to leave it out."""
    good = [f"document {number}" for number in range(30)]
    for name in ("a", "b"):
        rows = lines(*good[:15]) if name == "a" else lines(*good[15:])
        (tmp_path / f"{name}.jsonl").write_bytes(
            b'{"text": \n' + rows + b'["no", "object"]\n' + b"[" * 100_000 + b"\n"
        )
    data = [tmp_path / "*.jsonl"]
    manifest = prepare(tmp_path / "six", data, skip_bad=6)
    assert manifest.origin["documents"] == len(good) and manifest.origin["dropped"] == {BAD_LINES: 6}
    with pytest.raises(DataError, match=rf"--data: 6 {BAD_LINES}, more than --skip-bad 5"):
        prepare(tmp_path / "five", data, skip_bad=5)
    with pytest.raises(DataError, match="is not JSON.*; --skip-bad 10 leaves out so many such lines"):
        prepare(tmp_path / "none", data)


def test_too_little_to_hold_anything_out_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "little.txt").write_text("a few bytes of text.")
    assert main(["out", "--data", "little.txt", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "20 to train on, 2 held out" in said, "a byte, and the separator"
    assert "scripts/train --data out --sequence 1, for no more can" in said
    (tmp_path / "less.txt").write_text("a")
    assert main(["less", "--data", "less.txt", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "too few tokens to train on; give more documents" in said and "scripts/train" not in said
