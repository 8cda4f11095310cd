"""Copies that a loop repeats, and memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dualpipe_jax.inspect import Memory, copies, memory
from dualpipe_jax.inspect.hlo import Array

TEXTS = Path(__file__).parent / "texts"
POOL = (3, 1024, 4096)


def dims(name, **options):
    return [(c.array.dims, c.changes_memory) for c in copies((TEXTS / f"{name}.hlo").read_text(), **options)]


def test_a_pool_copied_in_every_trip():
    found = copies((TEXTS / "v5e_copied_pool.hlo").read_text())
    assert [(c.array, c.nbytes) for c in found] == [(Array("bf16", POOL), 3 * 1024 * 4096 * 2)] * 2
    assert {c.context for c in found} == {"main.4_spmd/while.12 body"}
    assert all(c.in_loop and c.opcode == "copy" and not c.changes_memory for c in found)


def test_only_those_in_loops_unless_asked():
    assert not copies((TEXTS / "v5e_pair.hlo").read_text())
    everywhere = dims("v5e_pair", in_loops=False)
    assert ((1, 4096, 4096), True) in everywhere, "prefetched into vector memory"
    assert ((1, 1024, 4096), True) in everywhere


def test_smaller_ones_are_left_out():
    assert not copies((TEXTS / "v5e_copied_pool.hlo").read_text(), min_bytes=(3 << 23) + 1)
    assert len(copies((TEXTS / "v5e_copied_pool.hlo").read_text(), min_bytes=3 << 23)) == 2


FUSED = """HloModule by_hand, is_scheduled=true

%moves (p: f32[512,1024]) -> f32[1024,512] {
  %p = f32[512,1024]{1,0} parameter(0)
  %b = f32[512,1024]{1,0} bitcast(%p)
  ROOT %t = f32[1024,512]{1,0} transpose(%b), dimensions={1,0}
}

%computes (p: f32[512,1024]) -> f32[1024,512] {
  %p.1 = f32[512,1024]{1,0} parameter(0)
  %n = f32[512,1024]{1,0} negate(%p.1)
  ROOT %t.1 = f32[1024,512]{1,0} transpose(%n), dimensions={1,0}
}

ENTRY %main (x: f32[512,1024]) -> f32[1024,512] {
  %x = f32[512,1024]{1,0} parameter(0)
  %f = f32[1024,512]{1,0} fusion(%x), kind=kLoop, calls=%moves
  ROOT %g = f32[1024,512]{1,0} fusion(%x), kind=kLoop, calls=%computes
}
"""


def test_a_fusion_that_only_moves_is_a_copy():
    assert [c.name for c in copies(FUSED, in_loops=False)] == ["f"]


ASKING = """HloModule by_hand, is_scheduled=true

%asks (s: f32[512,1024]) -> pred[] {
  %s = f32[512,1024]{1,0} parameter(0)
  %copied = f32[512,1024]{1,0} copy(%s)
  ROOT %p = pred[] constant(false)
}

%goes (s: f32[512,1024]) -> f32[512,1024] {
  ROOT %s.1 = f32[512,1024]{1,0} parameter(0)
}

ENTRY %main (x: f32[512,1024]) -> f32[512,1024] {
  %x = f32[512,1024]{1,0} parameter(0)
  ROOT %w = f32[512,1024]{1,0} while(%x), condition=%asks, body=%goes
}
"""


def test_what_the_condition_of_a_loop_copies_is_copied_in_every_trip():
    assert [(c.name, c.in_loop) for c in copies(ASKING)] == [("copied", True)]


def updated_in_place(pool, x):
    def tick(pool, slot):
        return lax.dynamic_update_index_in_dim(pool, x, slot, 0), None

    return lax.scan(tick, pool, jnp.arange(4, dtype=jnp.int32))[0]


def read_after_written(pool, x):
    def tick(pool, slot):
        new = lax.dynamic_update_index_in_dim(pool, x, slot, 0)
        later = jnp.int32(new[0, 0, 0] > 0)
        return lax.dynamic_update_index_in_dim(new, pool[later], 3, 0), None

    return lax.scan(tick, pool, jnp.arange(4, dtype=jnp.int32))[0]


@pytest.mark.parametrize("function, copied", [(updated_in_place, 0), (read_after_written, 1)])
def test_what_is_compiled_here(function, copied):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 1000, 100), (1000, 100)]]
    compiled = jax.jit(function, donate_argnums=0).lower(*shapes).compile()
    found = [c for c in copies(compiled, 1 << 10) if c.array.dims == (4, 1000, 100)]
    assert bool(found) == copied


def test_memory_counts_shared_places_once():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 1000, 100), (1000, 100)]]
    found = memory(jax.jit(updated_in_place, donate_argnums=0).lower(*shapes).compile())
    pool, x = 4 * 1000 * 100 * 4, 1000 * 100 * 4
    assert (found.arguments, found.outputs, found.aliased) == (pool + x, pool, pool)
    assert found.peak == pool + x + found.temporaries + found.code
    assert Memory(arguments=10, outputs=8, aliased=6, temporaries=4, code=1).peak == 17


def test_memory_that_nobody_tells():
    class Silent:
        def memory_analysis(self):
            return None

    assert memory(Silent()) is None
