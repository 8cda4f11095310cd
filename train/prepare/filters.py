"""The reasons for which a document is dropped. Each is counted, and the counts are kept in the manifest."""

import re

from train.data.vocabulary import is_text
from train.prepare.options import Options


def drop_reason(text: bytes, options: Options) -> str | None:
    """What is wrong with a document, in words; None if nothing is."""
    if not text:
        return "empty"
    if not is_text(text):
        return "not text"
    if len(text) < options.min_bytes:
        return "shorter than --min-bytes"
    if options.max_bytes is not None and len(text) > options.max_bytes:
        return "longer than --max-bytes"
    try:
        content = text.decode()
    except UnicodeDecodeError:
        if makes_tokens(options):
            return "not UTF-8"
        content = text.decode(errors="replace")
    if options.min_letters > 0 and share_of_letters(content) < options.min_letters:
        return "fewer letters than --min-letters"
    if options.max_repeated_lines < 1 and share_of_repeated_lines(content) > options.max_repeated_lines:
        return "more repeated lines than --max-repeated-lines"
    if options.reject is not None and re.search(options.reject, content):
        return "matches --reject"
    return None


def makes_tokens(options: Options) -> bool:
    """Whether a tokenizer will read the text, which must be UTF-8 then; tokens that are bytes may be anything."""
    return options.tokenizer != "bytes" or options.train_tokenizer is not None


def share_of_letters(text: str) -> float:
    """The share of letters among all characters except white space; 0 if there are none."""
    dense = "".join(text.split())
    return sum(map(str.isalpha, dense)) / len(dense) if dense else 0.0


def share_of_repeated_lines(text: str) -> float:
    """The share of lines that repeat an earlier line, among all that are not blank; 0 if there are none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (len(lines) - len(set(lines))) / len(lines) if lines else 0.0
