"""The tokenizer in the folder of a checkpoint."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from models.weights.errors import WeightsError
from models.weights.settings import read_settings

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The tokenizer's files in a checkpoint that are data; code is never read."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
      library: the tokenizer itself, of the ``tokenizers`` library.
      bos: the token that begins a document; None if there is none.
      eos: the token that ends a document; None if there is none.
      add_bos: whether each text begins with ``bos``, according to the checkpoint's settings.
      chat_template: the Jinja template that turns messages into one text; None if the checkpoint has none.
    """

    library: tokenizers.Tokenizer
    bos: int | None
    eos: int | None
    add_bos: bool
    chat_template: str | None = None

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32 [S]. Raises UnicodeEncodeError for half a surrogate pair, which is not text."""
        text.encode()
        tokens = self.library.encode(text).ids
        if self.add_bos and self.bos is not None and tokens[:1] != [self.bos]:
            tokens = [self.bos, *tokens]
        return np.asarray(tokens, np.int32)

    def encode_as_it_is(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32 [S]; special tokens only where the text has their names, none is added.

        Raises UnicodeEncodeError, as ``encode`` does.
        """
        text.encode()
        return np.asarray(self.library.encode(text, add_special_tokens=False).ids, np.int32)

    @property
    def special(self) -> dict[str, str]:
        """The texts of the tokens that begin and end a document, by their names in chat templates."""
        tokens = {"bos_token": self.bos, "eos_token": self.eos}
        return {
            name: str(self.library.id_to_token(token)) for name, token in tokens.items() if token is not None
        }

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without the special ones."""
        return self.library.decode([int(token) for token in tokens])

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be only part of a character."""
        return bytes_of(self.library.id_to_token(token) or "", self.decode([token]))


def bytes_of(name: str, text: str) -> bytes:
    """Return the bytes of a token, from its name in the tokenizer and the text that it decodes to on its own."""
    if "\ufffd" not in text:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", name):  # the name of a token for a byte that no other token has
        return bytes([int(name[3:5], 16)])
    if all(letter in _BYTE_BY_LETTER for letter in name):
        return bytes(_BYTE_BY_LETTER[letter] for letter in name)
    return text.encode()


def _bytes_by_letter() -> dict[str, int]:
    """Return the byte for each letter with which byte-level tokenizers write bytes.

    A byte that is a printing character of Latin-1 is written as that character.
    """
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_BY_LETTER = _bytes_by_letter()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a checkpoint's tokenizer.

    ``tokenizer.json`` has the tokenizer, ``tokenizer_config.json`` the tokens that begin and end a document. The chat
    template is in a file of its own, or else in ``tokenizer_config.json``.

    Raises:
      WeightsError: there is no ``tokenizer.json``, it is not a tokenizer, or the settings name tokens that it lacks.
    """
    path = Path(folder)
    try:
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception, for a missing file too
        raise WeightsError(path, [f"tokenizer.json: {error}"]) from None
    library.no_truncation()  # the file may ask for truncation and padding: every text is taken at its own length
    library.no_padding()
    own = path / "tokenizer_config.json"
    settings = read_settings(own) if own.exists() else {}
    ends, wrong = {}, []
    for key in ("bos_token", "eos_token"):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str | None):
            wrong.append(f"tokenizer_config.json: {key} is {token!r}, must be a text")
            continue
        ends[key] = None if text is None else library.token_to_id(text)
        if text is not None and ends[key] is None:
            wrong.append(f"tokenizer_config.json: {key} is {text!r}, which tokenizer.json does not have")
    if wrong:
        raise WeightsError(path, wrong)
    add_bos, template = bool(settings.get("add_bos_token")), _chat_template(path, settings)
    return Tokenizer(library, ends["bos_token"], ends["eos_token"], add_bos, template)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or else the settings'; of several there, the one named "default"."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(folder, [f"{file.name}: {error}"]) from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get(
            "default"
        )
    return found if isinstance(found, str) else None
