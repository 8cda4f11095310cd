"""Open the corpus that ``--data`` names: text, prepared folders, record files, data sets, or several of them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from train.data import records
from train.data.corpus import Corpus, Source, text_source
from train.data.errors import DataError
from train.data.manifest import (
    fetch_prepared,
    is_prepared,
    open_prepared,
    open_prepared_vocabulary,
    read_manifest,
)
from train.data.mixture import whole_weights
from train.data.remote import is_url
from train.data.text import hold_out_tenth, read_documents
from train.data.vocabulary import BYTES, Vocabulary, open_vocabulary


def open_corpus(
    paths: Sequence[str | Path] = (), weights: Sequence[float] = (), tokenizer: str | None = None
) -> Corpus:
    """Read or open the given paths; without any, the source text of Python's standard library.

    Without weights all text is one source, and sources are drawn from in proportion to their tokens.

    Args:
      paths: files, and folders of files, of text, JSON lines and Parquet, see ``read_documents``; folders (or fsspec
        URLs of folders) that ``scripts/prepare`` made;
        ArrayRecord files; folders of Hugging Face ``datasets``.
      weights: a share for each path, in any unit.
      tokenizer: the name of the vocabulary, see ``open_vocabulary``. None takes that of the first prepared folder, or
        bytes if there is no such folder.

    Raises:
      DataError: a path cannot be read, or the sources have different vocabularies.
    """
    if weights and len(weights) != len(paths):
        raise DataError(f"--data-weights: {len(weights)} for {len(paths)} paths of --data; give one for each")
    # Refuses what is no weight, before anything is read.
    whole_weights(weights)
    named = [fetch_prepared(path) if is_url(path) else Path(path) for path in paths]
    ready = [path for path in named if is_prepared(path)]
    vocabulary = None if tokenizer is None else open_vocabulary(tokenizer)
    if vocabulary is None and ready:
        vocabulary = open_prepared_vocabulary(ready[0], read_manifest(ready[0]))
    vocabulary = vocabulary or BYTES
    if weights:
        groups = [[path] for path in named]
    else:
        text = [path for path in named if not _is_ready(path)]
        groups = [[path] for path in named if path not in text] + ([text] if text or not named else [])
    sources = _open_all(groups, vocabulary)
    if weights:
        sources = [
            dataclasses.replace(source, weight=float(weight))
            for source, weight in zip(sources, weights, strict=True)
        ]
    elif len(sources) == 1:
        sources = [dataclasses.replace(sources[0], weight=1.0)]
    return Corpus(tuple(sources), vocabulary)


def _open_all(groups: Sequence[Sequence[Path]], vocabulary: Vocabulary) -> list[Source]:
    """Open the sources. A document that is held out of one source of text, or whose end is, is in no source's training
    text, but for the part that all sources of so few documents train on."""
    texts = {n: read_documents(group) for n, group in enumerate(groups) if not any(map(_is_ready, group))}
    parts = {number: hold_out_tenth(documents) for number, (documents, _) in texts.items()}
    held_out, cut = set[bytes](), set[bytes]()
    for number, (documents, _) in texts.items():
        heldout = parts[number][1]
        (cut if len(heldout) == len(documents) else held_out).update(documents[: len(heldout)])
    sources = []
    for number, group in enumerate(groups):
        if number not in texts:
            sources.append(_open(group[0], vocabulary))
            continue
        (documents, skipped), (train, heldout) = texts[number], parts[number]
        name = " ".join(map(str, group)) or "the standard library"
        others = held_out if len(heldout) == len(documents) else held_out | cut
        whole = documents[-len(train) :]
        train = [text for document, text in zip(whole, train, strict=True) if document not in others]
        if not train:
            raise DataError(
                f"--data {name}: all its text is held out of other paths; name it once, or leave it out"
            )
        source = text_source(name, train, heldout, len(documents), vocabulary)
        sources.append(dataclasses.replace(source, weight=max(1, len(source.train)), skipped=tuple(skipped)))
    return sources


def _is_ready(path: Path) -> bool:
    return is_prepared(path) or records.is_records(path)


def _open(path: Path, vocabulary: Vocabulary) -> Source:
    if not is_prepared(path):
        return records.open_records(path, vocabulary)
    source, its = open_prepared(path)
    if its.fingerprint != vocabulary.fingerprint:
        raise DataError(
            f"--data {path}: its tokens ({its.size}, separator {its.separator}) are not those of the other "
            f"sources or of --tokenizer ({vocabulary.size}, separator {vocabulary.separator}); prepare all sources "
            "with one tokenizer"
        )
    return source
