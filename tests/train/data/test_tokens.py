"""What tokens stand for, by tokenizers of two kinds: of bytes, and of words with bytes for what no word has."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from train.data.vocabulary import BYTES, open_vocabulary

TEXTS = [
    "the cat, the hat",
    " the cat \N{CAT FACE} has 漢字",
    "Zw\N{LATIN SMALL LETTER O WITH DIAERESIS}lf  the\n",
    "<|endoftext|> the </s>",
]
"""Blanks at the beginning, between words and beside each other; characters of up to four bytes; separators' names."""


def of_bytes():
    """As GPT-2 has them."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    library.train_from_iterator(["the cat the hat"] * 9, trainer)
    return library


def of_words():
    """As Llama has them: a blank is put before a text, and taken from what is decoded."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thecas", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    library.add_special_tokens(["</s>"])
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


@pytest.mark.parametrize("make", [of_bytes, of_words])
def test_tokens_count_the_bytes_of_their_text(tmp_path, make):
    make().save(str(tmp_path / "tokenizer.json"))
    vocabulary = open_vocabulary(str(tmp_path))
    encoded = vocabulary.encode([text.encode() for text in TEXTS])
    separator = [vocabulary.separator]
    for text, tokens in zip(TEXTS, encoded, strict=True):
        assert vocabulary.decode(tokens[:-1]) == text and len(tokens) > 6
        before = np.concatenate([separator, tokens[:-1]])
        assert vocabulary.count_bytes(tokens, before) == len(text.encode()) + 1
    stream = np.concatenate([separator, *encoded])
    whole = sum(len(text.encode()) + 1 for text in TEXTS)
    for cut in range(1, len(stream)):
        parts = (stream[:cut], stream[cut - 1 :])
        assert sum(vocabulary.count_bytes(part[1:], part[:-1]) for part in parts) == whole, (
            "a character cut in two"
        )


def test_nothing_is_cut_off_or_filled_up_and_separators_are_a_vocabularys_own(tmp_path):
    """Published tokenizers may be set to do so for the model that they were made for."""
    made = of_bytes()
    made.save(str(tmp_path / "plain.json"))
    made.enable_truncation(3)
    made.enable_padding(length=40)
    made.save(str(tmp_path / "set.json"))
    plain, other = (open_vocabulary(str(tmp_path / name)) for name in ("plain.json", "set.json"))
    given = [text.encode() for text in TEXTS]
    for ours, theirs in zip(plain.encode(given), other.encode(given), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert open_vocabulary(str(tmp_path / "plain.json"), "t").fingerprint != plain.fingerprint
    assert plain.fingerprint == open_vocabulary(str(tmp_path / "plain.json")).fingerprint


def test_bytes_count_themselves():
    (tokens,) = BYTES.encode(["漢字".encode()])
    assert BYTES.count_bytes(tokens, tokens) == 7
