"""Second pass: each range of hashes becomes a shard of tokens."""

import dataclasses
import hashlib
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from train.data.inputs import grouped
from train.data.manifest import SPLITS, TOKENIZER, Shard
from train.data.text import split_end
from train.data.vocabulary import Vocabulary, forget_tokenizers, import_tokenizers
from train.prepare.files import (
    Folder,
    array_bytes,
    flush_to_disk,
    partial_name,
    read_json,
    url_of,
    write,
    write_json,
)
from train.prepare.partition import piece_file
from train.prepare.plan import Plan, bucket_file

END_OF_TEXT = "<|endoftext|>"
BATCH = 2**20
"""The approximate number of bytes of text that are turned into tokens at once."""


@dataclasses.dataclass(frozen=True)
class BucketContext:
    """The inputs that the work on every bucket needs.

    Attributes:
      plan: which documents are kept.
      vocabulary: the vocabulary that turns text into tokens.
      work: the folder of intermediate files.
      out: the folder of the shards.
    """

    plan: Plan
    vocabulary: Vocabulary
    work: Folder
    out: Folder


def tokenise(bucket: int, context: BucketContext) -> dict[str, Any]:
    """Make a bucket's shards, unless they are there. Returns its receipt: the shard of each split or None, and the
    "bytes" of text in them."""
    receipt = f"bucket-{bucket:06d}.json"
    if (there := read_json(context.work, receipt)) is not None and _are_there(there, context):
        return there
    writers = {
        split: ShardWriter(context.out, f"{split}-{bucket:06d}.bin", context.vocabulary.dtype)
        for split in SPLITS
    }
    size = 0
    for texts in grouped(bucket_texts(bucket, context), lambda text: len(text[1]), BATCH):
        size += sum(len(text) for _, text in texts)
        for split in SPLITS:
            writers[split].add(context.vocabulary.encode([text for its, text in texts if its == split]))
    found: dict[str, Any] = {}
    for split, writer in writers.items():
        shard = writer.close()
        found[split] = None if shard is None else dataclasses.asdict(shard)
    found["bytes"] = size
    write_json(context.work, receipt, found)
    return found


def _are_there(receipt: dict[str, Any], context: BucketContext) -> bool:
    """Whether a receipt's shards are in OUT. With --work elsewhere they may be in another command's OUT, or another
    command may have written its own over them."""
    out, size = context.out, context.vocabulary.dtype.itemsize
    shards = [Shard(**receipt[split]) for split in SPLITS if receipt[split] is not None]
    names = [name for shard in shards for name in (shard.file, shard.index)]
    return all(map(out.exists, names)) and all(out.size(one.file) == one.tokens * size for one in shards)


def bucket_texts(bucket: int, context: BucketContext) -> Iterator[tuple[str, bytes]]:
    """Yield (split, text) of each document that a bucket keeps, or of both parts of it if documents are cut."""
    first = context.plan.first_document(bucket)
    for number, text in enumerate(_read(bucket, context.work), first):
        if context.plan.cut:
            both = zip(SPLITS, split_end(text, context.plan.cut), strict=True)
            yield from ((split, part) for split, part in both if part)
        else:
            yield ("heldout" if number < context.plan.heldout else "train"), text


def _read(bucket: int, work: Folder) -> list[bytes]:
    """A bucket's documents. Those of one piece lie together in its file, which is sorted by hash, so that they are read
    at once."""
    places = np.load(io.BytesIO(work.cat_file(bucket_file(bucket))))
    found: list[bytes] = [b""] * len(places)
    order = np.argsort(places[:, 0], kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(places[order, 0])) + 1):
        if len(rows):  # a bucket may be empty
            piece, start, stop = places[rows[0], 0], places[rows[0], 1], places[rows[-1], 2]
            content = work.cat_file(piece_file(piece, "text"), start=int(start), end=int(stop))
            for row in rows.tolist():
                found[row] = content[places[row, 1] - start : places[row, 2] - start]
    return found


class ShardWriter:
    """Writes a shard. The file gets its name, which ends in .bin, only in ``close``."""

    def __init__(self, folder: Folder, name: str, dtype: np.dtype):
        self._folder, self._name, self._dtype = folder, name, dtype.newbyteorder("<")
        self._file = folder.open(partial_name(name), "wb")
        self._hash = hashlib.sha256()
        self._ends: list[int] = [0]

    def add(self, documents: Iterable[np.ndarray]) -> None:
        for tokens in documents:
            content = tokens.astype(self._dtype).tobytes()
            self._file.write(content)
            self._hash.update(content)
            self._ends.append(self._ends[-1] + len(tokens))

    def close(self) -> Shard | None:
        """Give the file its name and write its index. Returns the shard, or None if there are no documents."""
        flush_to_disk(self._file)
        self._file.close()
        if len(self._ends) == 1:
            self._folder.rm_file(partial_name(self._name))
            return None
        self._folder.mv(partial_name(self._name), self._name)
        index = array_bytes(np.array(self._ends, np.uint64))
        shard = Shard(
            self._name,
            self._ends[-1],
            len(self._ends) - 1,
            self._hash.hexdigest(),
            hashlib.sha256(index).hexdigest(),
        )
        write(self._folder, shard.index, index)
        return shard


def train_tokenizer(context: BucketContext, size: int, sample: float) -> Vocabulary:
    """A byte-pair tokenizer (Sennrich et al., arXiv:1508.07909) over bytes, learnt from documents to train on.

    Documents are in the order of their hashes, so the first of them are a fair sample.

    Args:
      context: the documents; its vocabulary is not used.
      size: the largest number of tokens.
      sample: the bytes of text to learn from; the document that reaches this number is the last.

    Returns:
      The vocabulary of the tokenizer, whose file is in the folder of intermediate files. A file that is there already
      is used.
    """
    tokenizers = import_tokenizers()
    if not context.work.exists(TOKENIZER):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        everything = (bucket_texts(bucket, context) for bucket in range(context.plan.num_buckets))
        tokenizer.train_from_iterator(_sample(itertools.chain.from_iterable(everything), sample), trainer)
        write(context.work, TOKENIZER, tokenizer.to_str(pretty=True).encode())
    tokenizer = tokenizers.Tokenizer.from_buffer(context.work.cat_file(TOKENIZER))
    file = url_of(context.work, TOKENIZER)
    forget_tokenizers()
    return Vocabulary(tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_TEXT), file)


def _sample(texts: Iterable[tuple[str, bytes]], size: float) -> Iterator[str]:
    taken = 0
    for split, text in texts:
        if split == "train":
            yield text.decode()
            taken += len(text)
            if taken >= size:
                return
