"""The tokenizer that lies beside a checkpoint's weights."""

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
"""What a checkpoint has of it, as data; code beside them is left alone."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
      library: the tokenizer itself, of the ``tokenizers`` library.
      bos: the token that begins a document; None if there is none.
      eos: the token that ends one; None if there is none.
      add_bos: whether texts are to begin with ``bos``, as the checkpoint's own settings say.
      chat_template: Jinja that writes messages as a text; None if the checkpoint has none.
    """

    library: tokenizers.Tokenizer
    bos: int | None
    eos: int | None
    add_bos: bool
    chat_template: str | None = None

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32 [S]. Raises UnicodeEncodeError for half a surrogate pair, which is no text."""
        text.encode()
        tokens = self.library.encode(text).ids
        if self.add_bos and self.bos is not None and tokens[:1] != [self.bos]:
            tokens = [self.bos, *tokens]
        return np.asarray(tokens, np.int32)

    def encode_as_it_is(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32 [S], special ones by their names and none that is not written there.

        Raises UnicodeEncodeError as ``encode``.
        """
        text.encode()
        return np.asarray(self.library.encode(text, add_special_tokens=False).ids, np.int32)

    @property
    def special(self) -> dict[str, str]:
        """What chat templates call the tokens that begin and end a text, and what these are in texts."""
        tokens = {"bos_token": self.bos, "eos_token": self.eos}
        return {
            name: str(self.library.id_to_token(token)) for name, token in tokens.items() if token is not None
        }

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without the special ones."""
        return self.library.decode([int(token) for token in tokens])

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character's."""
        return bytes_of(self.library.id_to_token(token) or "", self.decode([token]))


def bytes_of(name: str, text: str) -> bytes:
    """Return the bytes of a token, by its name in the tokenizer and the text that it is decoded to alone."""
    if "\ufffd" not in text:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", name):  # of a byte that no token of text has
        return bytes([int(name[3:5], 16)])
    if all(letter in _BYTES for letter in name):
        return bytes(_BYTES[letter] for letter in name)
    return text.encode()


def _letters() -> dict[str, int]:
    """The bytes by the letters that tokenizers of bytes write them with: what prints stands for itself, in Latin-1."""
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _letters()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read ``tokenizer.json``, from ``tokenizer_config.json`` which tokens begin and end a text, and the chat template.

    Raises:
      WeightsError: there is no ``tokenizer.json``, it is none, or its settings name tokens that it lacks.
    """
    path = Path(folder)
    try:
        library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception, for a missing file too
        raise WeightsError(path, [f"tokenizer.json: {error}"]) from None
    library.no_truncation()  # as its file may ask for: every text is taken whole, and as long as it is
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
    """A file of its own, else what the settings have: one, or several by name, of which "default" is meant."""
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
