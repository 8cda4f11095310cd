"""Steps in two halves: the plain forward's logits, and halves of equal cost that lose no token."""

import functools

import jax
import numpy as np
import pytest

from dualpipe_jax.parallel import make_mesh
from models import Dispatch, v3
from models.decode import Rows, decoder, experts
from models.decode.halves import Piece, fixed_cost, halve
from models.decode.programs import in_one_batch, in_two_microbatches, on_mesh, programs
from models.lazy import lazily
from tests.models.decode.small_models import QUICK, random_params, small
from tests.models.decode.small_models import whole as plain_forward

LENGTHS = ((9, 5, 12), (3, 11, 7))
"""Of the prompts of two devices, in tokens; all go on to TOTAL."""

TOTAL, SIZE, BLOCK, NUM_ROWS = 14, 4, 3, 4
TWICE = np.asarray([[[0, 1, 2], [3, 0, 1]]])


def a_step(model, weights, cache, rows, before=None):
    x, made = model.forward(weights, cache, rows, before)
    return model.logits(weights, x), made


def served(config, params, tokens, dispatch, held, microbatches):
    """Logits of all tokens [devices, prompts, S, V]: the prompts' in pieces, the rest one by one."""
    mesh, model = make_mesh(1, 2, jax.devices()[:2]), decoder(config, dispatch=dispatch)
    step = functools.partial(a_step, model)

    @functools.cache
    def run(attends):
        on_device = (
            functools.partial(in_two_microbatches, step, attends)
            if microbatches == 2
            else functools.partial(in_one_batch, step)
        )
        return jax.jit(on_mesh(on_device, mesh), compiler_options=QUICK)

    weights = experts.place(model.prepare(lazily(params)), held, config.num_experts, mesh, near=True)
    # NaN of whoever had the blocks before.
    cache = programs(model, False, mesh).init_cache(40, BLOCK) + np.float32(np.nan)
    rng = np.random.default_rng(1)
    tables = np.stack([rng.permutation(20)[:15].reshape(3, 5) for _ in LENGTHS]).astype(np.int32)
    done, found = np.zeros((2, 3), int), np.zeros((*tokens.shape, config.vocab), np.float32)

    def feed(rows_of, width, attends):
        """Pieces by device and row."""
        nonlocal cache
        fed = np.full((2, NUM_ROWS, width), 7, np.int32)
        starts, lengths = np.zeros((2, 2, NUM_ROWS), np.int32)
        own = np.zeros((2, NUM_ROWS, 5), np.int32)
        for device, row in np.ndindex(2, NUM_ROWS):
            if (piece := rows_of[device][row]) is not None:
                n, start, length = piece
                fed[device, row, :length] = tokens[device, n, start : start + length]
                starts[device, row], lengths[device, row], own[device, row] = start, length, tables[device, n]
        rows = Rows(*(a.reshape(2 * NUM_ROWS, *a.shape[2:]) for a in (fed, starts, lengths, own)))
        out, _, cache = run(attends)(weights, cache, rows)
        out = np.asarray(out).reshape(2, NUM_ROWS, width, -1)
        for device, row in np.ndindex(2, NUM_ROWS):
            if (piece := rows_of[device][row]) is not None:
                n, start, length = piece
                found[device, n, start : start + length] = out[device, row, :length]
                done[device, n] = max(done[device, n], start + length)

    while (done < LENGTHS).any():
        pieces = []
        for device, lengths in enumerate(LENGTHS):
            left = [
                (n, int(d), length - int(d))
                for n, (d, length) in enumerate(zip(done[device], lengths, strict=True))
            ]
            left = [one for one in left if one[2] > 0]
            if microbatches == 2:
                first, second = halve([one[1:] for one in left], NUM_ROWS // 2, SIZE, fixed_cost(config))
            else:
                first, second = (
                    [Piece(k, start, min(SIZE, rest)) for k, (_, start, rest) in enumerate(left)],
                    [],
                )
            rows = [p and Piece(left[p.number][0], *p[1:]) for p in first + second]
            pieces.append(rows + [None] * (NUM_ROWS - len(rows)))
        feed(pieces, SIZE, True)
    while (done < TOTAL).any():
        ones = [[Piece(n, int(d), 1) if d < TOTAL else None for n, d in enumerate(done[k])] for k in (0, 1)]
        feed([[*one, None] for one in ones], 1, False)
    return found


@pytest.mark.parametrize(
    "dispatch, placed, microbatches",
    [
        ("dropless", True, 2),
        pytest.param("capacity", False, 2, marks=pytest.mark.slow),
        pytest.param("capacity", True, 1, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_in_two_halves_is_the_plain_forward(dispatch, placed, microbatches):
    config = small()
    params = random_params(config, scale=0.2)  # with 0.4 float32's own noise is larger than what is allowed
    tokens = np.random.default_rng(1).integers(0, config.vocab, (2, 3, TOTAL)).astype(np.int32)
    wanted = np.asarray(plain_forward(config, params, tokens.reshape(6, TOTAL))).reshape(2, 3, TOTAL, -1)
    assert wanted.std() > 0.5
    held = TWICE if placed else experts.default_placement(config, 2)
    got = served(config, params, tokens, Dispatch(dispatch, axis_name="ep"), held, microbatches)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def cost(half, fixed):
    return sum(sum(fixed + p for p in range(one.start, one.start + one.length)) for one in half if one)


def test_halves_lose_no_token_and_cost_the_same():
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_rows, size, fixed = int(rng.integers(1, 5)), int(rng.integers(1, 9)), float(rng.integers(0, 50))
        prompts = [(int(rng.integers(0, 40)), int(rng.integers(1, 20))) for _ in range(rng.integers(0, 9))]
        halves = halve(prompts, num_rows, size, fixed)
        assert [len(half) for half in halves] == [num_rows, num_rows]
        taken = {}
        for half in halves:
            numbers = [one.number for one in half if one]
            assert len(set(numbers)) == len(numbers), "a request has one row in each half"
            for one in filter(None, half):
                assert 1 <= one.length <= size
                taken.setdefault(one.number, []).append(one)
        assert sorted(taken) == list(range(min(len(prompts), 2 * num_rows))), "first come, first served"
        for number, pieces in taken.items():
            at, left = prompts[number]
            for one in pieces:
                assert one.start == at
                at += one.length
            if len(pieces) == 1:
                assert pieces[0].length == min(size, left)
            else:
                assert at - prompts[number][0] == min(2 * size, left)
                rows = [half.index(one) for half, one in zip(halves, pieces, strict=True)]
                assert rows[0] == rows[1], "the later tokens find the earlier ones in their row"
        used = sum(map(len, taken.values()))
        assert used == 2 * num_rows or all(len(p) == 2 or prompts[n][1] == 1 for n, p in taken.items())
        pairs = {number: pieces for number, pieces in taken.items() if len(pieces) == 2}
        assert all(prompts[n][1] >= prompts[other][1] for n in pairs for other in taken.keys() - pairs.keys())
        for number, (first, second) in sorted(pairs.items())[-1:]:  # the last cut, after which none can level
            total = first.length + second.length
            apart = [
                cost([Piece(number, first.start, n)], fixed)
                - cost([Piece(number, first.start + n, total - n)], fixed)
                for n in range(max(1, total - size), min(size, total - 1) + 1)
            ]
            rest = (
                cost(halves[0], fixed) - cost(halves[1], fixed) - cost([first], fixed) + cost([second], fixed)
            )
            found = cost(halves[0], fixed) - cost(halves[1], fixed)
            assert abs(found) == min(abs(rest + one) for one in apart)


def test_a_prompt_alone_is_cut_where_its_halves_cost_the_same():
    """12 tokens from position 0, each as dear as its position: 0 to 8 make 36, 9 to 11 make 30."""
    (first,), (second,) = halve([(0, 12)], 1, 16, 0.0)
    assert (first, second) == (Piece(0, 0, 9), Piece(0, 9, 3))
    (first,), (second,) = halve([(0, 12)], 1, 16, 1e6)
    assert (first.length, second.length) == (6, 6)
    (first,), (second,) = halve([(100, 40)], 1, 16, 0.0)
    assert (first, second) == (Piece(0, 100, 16), Piece(0, 116, 16))


def test_whole_prompts_go_where_less_is_to_do():
    first, second = halve([(0, 8), (300, 8), (100, 8), (200, 8)], 2, 8, 0.0)
    assert sorted(one.number for one in first) == [0, 1] and sorted(one.number for one in second) == [2, 3]
    assert cost(first, 0.0) == cost(second, 0.0)


def test_what_a_token_costs_beside_attention():
    """V3: 187.1 million numbers of attention's matrices and 9 experts of 44.0 million and the router's 1.8, against 128
    heads of 192 and 128: as much as 14,300 positions."""
    attention = 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    matrices = attention + 9 * 3 * 7168 * 2048 + 7168 * 256
    assert fixed_cost(v3()) == pytest.approx(matrices / (128 * (192 + 128)), rel=1e-6)
