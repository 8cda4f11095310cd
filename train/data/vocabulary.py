"""From text to tokens and back: bytes, or a tokenizer's file."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualpipe_jax.installing import install_command
from train.data.errors import DataError
from train.data.remote import is_url, open_filesystem

SEPARATOR = 0
"""The byte between documents, which no text contains."""

_SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
)
"""Usual tokens that end a document; tried in this order, after the one of the tokenizer's own configuration."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of bytes, or that of a tokenizer's file, which is read at first use. Cheap to send to a process.

    Attributes:
      size: the vocabulary size; all tokens are below it.
      separator: the token after every document, which no document contains.
      file: path or URL of a ``tokenizer.json`` as the tokenizers library writes it, or None for bytes.
    """

    size: int = 256
    separator: int = SEPARATOR
    file: Path | str | None = None

    @property
    def unit(self) -> str:
        """The word for a token in messages: byte or token."""
        return "byte" if self.file is None else "token"

    @property
    def fingerprint(self) -> str:
        """A hash. If it is equal, equal text gives equal tokens."""
        content = self.content or b"bytes"
        return hashlib.sha256(content + f" {self.size} {self.separator}".encode()).hexdigest()

    @property
    def content(self) -> bytes | None:
        """The content of the tokenizer's file; None for bytes."""
        return None if self.file is None else _read(self.file)

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer dtype that can store all tokens."""
        return np.min_scalar_type(self.size - 1)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each text and the separator, [n] of ``dtype``. Text that looks like a special token is text."""
        if self.file is None:
            return [np.frombuffer(text + bytes([self.separator]), np.uint8) for text in texts]
        tokenizer = _load(self.file)
        encoded = tokenizer.encode_batch_fast(
            [text.decode(errors="replace") for text in texts], add_special_tokens=False
        )
        return [np.array([*one.ids, self.separator], self.dtype) for one in encoded]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, with separators and other special tokens shown."""
        if self.file is None:
            return bytes(int(token) for token in tokens).decode(errors="replace")
        return _load(self.file).decode([int(token) for token in tokens], skip_special_tokens=False)

    def count_bytes(self, tokens: np.ndarray, before: np.ndarray) -> int:
        """The number of bytes of text that tokens stand for; a separator counts as one, as if tokens were bytes.

        Args:
          tokens: int [n]; a character may be cut in two at the first and the last token.
          before: int [n], the token before each, which tells where a document begins.
        """
        if self.file is None:
            return tokens.size
        total, begins = 0, before == self.separator
        for first in (False, True):
            numbers, counts = np.unique(tokens[begins == first], return_counts=True)
            sizes = [self._size_of(number, first) for number in numbers.tolist()]
            total += int(np.dot(sizes, counts))
        return total

    def _size_of(self, token: int, first: bool) -> int:
        from models.weights.tokenizer import bytes_of

        if token == self.separator:
            return 1
        alone = self.decode([token])
        if first or "\ufffd" in alone:
            return len(bytes_of(self.name_of(token), alone))
        # Decoders of words drop the blank before the first word. The second of two equal tokens keeps its blank, as
        # tokens within a document do.
        return len(self.decode([token, token]).encode()) - len(alone.encode())

    def name_of(self, token: int) -> str:
        """The name of a token in the tokenizer's file; "" if it has none, and for bytes."""
        return "" if self.file is None else _load(self.file).id_to_token(token) or ""

    def write(self, folder: Path) -> None:
        """Write into ``folder`` the tokenizer as ``tokenizer.json``, and its companion files; nothing for bytes."""
        # Imported here because it loads JAX, and options are read without JAX.
        from models.weights.tokenizer import FILES

        if self.file is None:
            return
        (folder / FILES[0]).write_bytes(_read(self.file))
        for name in () if is_url(self.file) else FILES[1:]:
            if (beside := Path(self.file).with_name(name)).is_file():
                # Read before the target is opened: both may be the same file.
                (folder / name).write_bytes(beside.read_bytes())


BYTES = Vocabulary()
"""The vocabulary in which tokens are bytes."""


def open_vocabulary(name: str, separator: str | None = None) -> Vocabulary:
    """The vocabulary of a name on the command line: "bytes", a tokenizer.json, or a folder that holds one.

    The separator is the given one; else the ``eos_token`` of a ``tokenizer_config.json`` in the same folder, or a
    well-known one.

    Raises:
      DataError: there is no such file, it is no tokenizer, or it has no such token.
    """
    if name == "bytes":
        return BYTES
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise DataError(f"--tokenizer {name}: there is no file {file}; give bytes or a tokenizer.json")
    forget_tokenizers()
    tokenizer = _load(file)
    candidates = [separator] if separator is not None else [*_configured(file), *_SEPARATORS]
    for candidate in candidates:
        number = tokenizer.token_to_id(candidate)
        if number is not None:
            size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
            return Vocabulary(size, number, file)
    raise DataError(
        f"--tokenizer {name}: no token {' or '.join(map(repr, candidates))} to put between documents; "
        "name one of its tokens with --separator"
    )


def import_tokenizers() -> Any:
    """The tokenizers library. Raises DataError if it is missing."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(
            f"--tokenizer: needs the tokenizers library: {install_command('tokenizers')}"
        ) from None
    return tokenizers


def _read(file: Path | str) -> bytes:
    if not is_url(file):
        return Path(file).read_bytes()
    filesystem, path = open_filesystem(str(file))
    return filesystem.cat_file(path)


def forget_tokenizers() -> None:
    """Read every tokenizer's file again at its next use: what is prepared anew in a folder has another tokenizer."""
    _load.cache_clear()


@functools.lru_cache(maxsize=4)
def _load(file: Path | str) -> Any:
    tokenizers = import_tokenizers()
    content = _read(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"--tokenizer {file}: is no tokenizer: {error}") from None
    tokenizer.encode_special_tokens = True  # a document that mentions the separator does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _configured(file: Path) -> list[str]:
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return []
    try:
        token = json.loads(config.read_bytes()).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise TypeError(f"eos_token is {token!r}")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"--tokenizer: {config} is damaged: {error}; mend it, or name the token between documents with --separator"
        ) from None
    return [token] if token else []


def is_text(content: bytes) -> bool:
    """Whether content is taken for text: it has no zero bytes."""
    return 0 not in content
