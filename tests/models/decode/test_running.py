"""What devices know of their requests, against a plain account of each."""

import numpy as np
import pytest

from models.decode.cache import Rows
from models.decode.running import (
    NUM_STOPS,
    FinishedPrompts,
    Running,
    empty_running,
    stateful_decode,
    stateful_prefill,
)
from models.decode.steps import Decoded, Prefilled

SLOTS, VOCAB = 6, 12


class One:
    """A request by itself: what it is to be fed next, and when it ends."""

    def __init__(self, token, draft, start, room, stops, finite):
        self.start, self.room, self.stops, self.live = start, room, stops, True
        self._take([token], draft, finite)

    def feed(self):
        if not self.live:
            return []
        return [self.newest, self.draft] if self.draft >= 0 and self.start + 1 < self.room else [self.newest]

    def advance(self, tokens, draft, finite):
        self.start += len(tokens)
        self._take(tokens, draft, finite)

    def _take(self, tokens, draft, finite):
        self.newest, self.draft = tokens[-1], draft
        if not finite or self.start >= self.room or set(tokens) & set(self.stops):
            self.live = False


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_are_fed_what_each_request_by_itself_would_be(drafts):
    rng, width = np.random.default_rng(drafts), 1 + drafts
    running, plain = empty_running(SLOTS), [None] * SLOTS
    tables, fed, answer = np.zeros((SLOTS, 2), np.int32), [], {}

    def run_prefill(weights, cache, rows, next_tokens, sampling):
        return answer["prefill"], None, cache

    def run_decode(weights, cache, rows, sampling):
        fed.append(rows)
        # A draft is right where it is even, whatever a model would say.
        right = (rows.lengths > 1) & (rows.tokens[:, -1] % 2 == 0)
        accepted = np.minimum(rows.lengths, 1) + right.astype(np.int32)
        return (
            Decoded(answer["tokens"], accepted, rows.lengths, answer["finite"], answer["drafts"]),
            None,
            cache,
        )

    prefill, decode = stateful_prefill(run_prefill), stateful_decode(run_decode, width)
    ended = 0
    for _ in range(60):
        slots = rng.permutation(SLOTS)[:2].astype(np.int32)
        slots[rng.random(2) < 0.5] = -1
        tokens, guesses = rng.integers(0, VOCAB, (2, 2), dtype=np.int32)
        starts, lengths = rng.integers(1, 9, (2, 2), dtype=np.int32)
        rooms = starts + lengths + rng.integers(0, 12, 2, dtype=np.int32)
        stops = np.full((2, NUM_STOPS), -1, np.int32)
        stops[:, 3] = rng.integers(0, VOCAB, 2)
        finite, guesses = rng.random(2) < 0.9, guesses if drafts else guesses * 0 - 1
        answer["prefill"] = Prefilled(tokens, finite, guesses)
        rows = Rows(np.zeros((2, 4), np.int32), starts, lengths, tables[:2])
        (_, running), _, _ = prefill(
            None, None, rows, None, None, running, FinishedPrompts(slots, rooms, stops)
        )
        for n, slot in enumerate(slots):
            if slot >= 0:
                about = tokens[n], guesses[n], starts[n] + lengths[n], rooms[n], stops[n, 3:4], finite[n]
                plain[slot] = One(*about)
        for _ in range(3):
            answer["tokens"] = rng.integers(0, VOCAB, (SLOTS, width), dtype=np.int32)
            answer["drafts"] = rng.integers(-1, VOCAB if drafts else 0, SLOTS, dtype=np.int32)
            answer["finite"] = rng.random(SLOTS) < 0.95
            wanted = rng.random(SLOTS) < 0.8
            (out, running), _, _ = decode(None, None, wanted, tables, None, running)
            (rows,) = fed[-1:]
            for slot, one in enumerate(plain):
                mine = one.feed() if one and wanted[slot] else []
                assert rows.lengths[slot] == len(mine)
                if mine:
                    assert rows.tokens[slot, : len(mine)].tolist() == mine and rows.starts[slot] == one.start
                    accepted_tokens = answer["tokens"][slot, : int(out.accepted[slot])].tolist()
                    one.advance(accepted_tokens, answer["drafts"][slot], answer["finite"][slot])
                    ended += not one.live
    assert ended > 20 and isinstance(running, Running)
