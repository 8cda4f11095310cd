"""Blocks: nobody has another's but by a common beginning, which stays known until its room is needed."""

import numpy as np

from models.decode import Blocks
from models.decode.blocks import keys_of

TEXT = [1, 2, 3, 4, 5, 6, 7]


def test_blocks_are_given_to_one_at_a_time():
    blocks = Blocks(5)
    (first, _), (second, _) = blocks.take(2), blocks.take(3)
    assert sorted(first + second) == list(range(5)) and len(blocks) == 0
    assert blocks.take(1) is None
    blocks.give_back(second)
    assert blocks.take(4) is None and len(blocks) == 3
    assert sorted(blocks.take(3)[0]) == sorted(second)


def test_keys_are_of_whole_blocks_and_all_that_is_before_them():
    keys = keys_of(TEXT, 2)
    assert len(keys) == 3 and len(set(keys)) == 3
    assert keys_of(np.asarray(TEXT[:4]), 2) == keys[:2]
    other = keys_of([9, *TEXT[1:]], 2)
    assert not set(other) & set(keys), "equal tokens behind others are another key"
    assert keys_of([12, 3], 1) != keys_of([1, 23], 1)


def test_a_token_ahead_has_its_part_in_a_key():
    assert len(keys_of(TEXT[:6], 2, ahead=1)) == 2 and len(keys_of(TEXT, 2, ahead=1)) == 3
    same, other = keys_of([1, 2, 3, 9], 2, ahead=1), keys_of([1, 2, 8, 9], 2, ahead=1)
    assert len(same) == 1 and same != other
    assert keys_of([1, 2, 3, 9], 2)[0] == keys_of([1, 2, 8, 9], 2)[0]


def test_a_common_beginning_is_shared_and_outlives_its_owners():
    blocks, keys = Blocks(6), keys_of(TEXT, 2)
    mine, filled = blocks.take(4, keys)
    assert filled == 0
    blocks.remember(mine, keys)
    yours, filled = blocks.take(4, keys_of([1, 2, 3, 4, 9, 9], 2))
    assert filled == 2 and yours[:2] == mine[:2] and not set(yours[2:]) & set(mine) and len(blocks) == 0
    blocks.give_back(mine)
    assert len(blocks) == 2, "what is shared is not free"
    blocks.give_back(yours)
    assert len(blocks) == 6
    again, filled = blocks.take(4, keys)
    assert filled == 3 and again[:3] == mine[:3]


def test_what_is_known_is_taken_last_and_ends_before_beginnings():
    blocks, keys = Blocks(5), keys_of(TEXT, 2)
    mine, _ = blocks.take(3)
    blocks.remember(mine, keys)
    blocks.give_back(mine)
    blocks.take(2)
    assert blocks.take(3, keys)[1] == 3, "the two others were taken"
    blocks.give_back(mine)
    (end,), _ = blocks.take(1)
    assert end == mine[2]
    assert blocks.take(2, keys) == (mine[:2], 2)


def test_a_beginning_does_not_make_room_where_there_is_none():
    blocks, keys = Blocks(3), keys_of(TEXT, 2)
    mine, _ = blocks.take(2)
    blocks.remember(mine, keys)
    blocks.give_back(mine)
    assert blocks.take(4, keys) is None and len(blocks) == 3
    assert blocks.take(3, keys)[1] == 2
