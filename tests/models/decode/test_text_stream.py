"""Text that is given out token by token is the text of all tokens, and no character is ever cut."""

import numpy as np
import pytest
import tokenizers

from models.decode.text import ByteTokenizer, Detokenizer, TokenOffsets

TEXT = "Größe 漢字 🙂🏽 naïve\n\tend — ok"


def byte_pairs():
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator([TEXT] * 3, trainer)
    return library


def word_pieces():
    """Its decoder takes away the space before the first word of whatever it is given."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁bc": 1, "d": 2}, unk_token="d"))
    library.decoder = tokenizers.decoders.Metaspace()
    return library


def streamed(decode, tokens):
    stream = Detokenizer(decode)
    parts = [stream.push(token) for token in tokens]
    return [*parts, stream.finish()]


def test_bytes():
    tokens = ByteTokenizer().encode(TEXT)
    assert tokens.dtype == np.int32 and bytes(tokens.tolist()).decode() == TEXT
    parts = streamed(ByteTokenizer().decode, tokens.tolist())
    assert "".join(parts) == TEXT and not any("\ufffd" in part for part in parts)
    assert parts[0] == "G" and parts[2:4] == ["", "ö"]


@pytest.mark.parametrize("make, tokens", [(byte_pairs, None), (word_pieces, [0, 1, 2, 1, 0])])
def test_tokenizers(make, tokens):
    library = make()
    tokens = library.encode(TEXT).ids if tokens is None else tokens
    parts = streamed(library.decode, tokens)
    assert "".join(parts) == library.decode(tokens)
    assert sum(map(bool, parts)) > len(tokens) / 3


@pytest.mark.parametrize("text", ["\ufffd\ufffd🎉 ok", "\ufffd\ufffd\ufffd", "\ufffd" * 9 + "é"])
def test_what_is_no_character_by_its_name_takes_none_with_it(text):
    assert "".join(streamed(ByteTokenizer().decode, ByteTokenizer().encode(text).tolist())) == text


@pytest.mark.parametrize("make", [byte_pairs, ByteTokenizer])
def test_tokens_stand_where_their_characters_do(make):
    text = make()
    tokens = text.encode(TEXT).tolist() if isinstance(text, ByteTokenizer) else text.encode(TEXT).ids
    offsets = TokenOffsets(text.decode)
    found = [offsets.push(token) for token in tokens]
    # The characters that are complete before a token, and the one that it is in.
    complete = [len(text.decode(tokens[:n]).rstrip("\ufffd")) for n in range(len(tokens))]
    assert found == complete


def test_what_is_no_character_does_not_hold_up_the_rest():
    stream = Detokenizer(ByteTokenizer().decode)
    parts = [stream.push(255) for _ in range(8)]
    assert parts == [""] * 7 + ["\ufffd" * 7]  # the last one might begin a character
    assert stream.push(65) == "\ufffdA"
    assert stream.push(0xE6) == "" and stream.finish() == "\ufffd"
