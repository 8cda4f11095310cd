"""The two compiled programs of serving, for one device, or for all of an expert axis, each with its own requests.

Rows, blocks of the cache and experts are sharded over the axis; other weights are on every device. Rows are
in the order of the devices, and a row's table numbers the blocks of its own device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.functional import Tree
from dualpipe_jax.pair import side_by_side
from dualpipe_jax.parallel import EP
from dualpipe_jax.ynnpack import YNNPACK
from models.config import Config
from models.decode.cache import Rows, init_cache, write
from models.decode.experts import weight_specs
from models.decode.model import Decoder, LayerOutputs
from models.decode.running import Running, empty_running, repeated_decode, stateful_decode, stateful_prefill
from models.decode.steps import decode, prefill

ROWS, BLOCKS = PartitionSpec(EP), PartitionSpec(None, EP)
"""How rows and the cache are sharded over a mesh."""

Step = Callable[..., tuple[Any, Any]]


class Programs(NamedTuple):
    """The programs that an engine runs; the first three reuse the cache's memory for the cache that they return.

    Attributes:
      prefill: ``(weights, cache, (rows, next_tokens, sampling, running, finished)) -> ((Prefilled, Running),
        counts, cache)``; counts are int32 [devices, layers with experts, E], see ``LayerOutputs``.
      prefill_fresh: ``prefill`` for rows that all start at 0, in halves too: nothing is read from the cache,
        and attention is the layer's own, on a GPU a kernel. It is compiled when it is first called.
      decode: ``(weights, cache, (wanted, tables, sampling, running)) -> ((Decoded, Running), counts,
        cache)``, which runs several steps and returns their results as ``repeated_decode`` says; wanted is bool
        [B], false for slots whose request does not decode, or has ended as far as the host knows. In all
        three, sampling is None where all rows take the likeliest token, which is another program.
      init_cache: ``(num_blocks, block_size) -> cache``, for all devices.
      init_running: ``(num_slots) -> Running`` without requests, for all devices.
    """

    prefill: Callable[..., tuple[Any, Array, Array]]
    prefill_fresh: Callable[..., tuple[Any, Array, Array]]
    decode: Callable[..., tuple[Any, Array, Array]]
    init_cache: Callable[[int, int], Array]
    init_running: Callable[[int], Running]


# Equal arguments return the same programs, and with them what jax.jit has compiled.
@functools.cache
def programs(
    model: Decoder,
    drafts: bool,
    mesh: Mesh | None = None,
    microbatches: int = 1,
    scores: bool = False,
    num_steps: int = 1,
) -> Programs:
    """Build the programs.

    Args:
      model: see ``models.decode.decoder``; on a mesh its dispatch is over the axis "ep".
      drafts: see ``Engine``.
      mesh: a mesh with that axis alone; None for one device.
      microbatches: 2 cuts a device's rows in two halves, each of which is computed while the other's tokens
        travel. In a prefill the second half attends to the first, see ``cached_attention``; in a decode the
        halves hold different requests.
      scores: whether the programs also return how likely tokens are.
      num_steps: the number of decode steps that one call of ``decode`` runs.

    Raises:
      ValueError: model and mesh do not fit together, or ``microbatches`` is neither 1 nor 2.
    """
    check_mesh(model, mesh)
    if microbatches not in (1, 2):
        raise ValueError(f"Engine: microbatches is {microbatches}, must be 1 or 2")

    def compiled(
        step: Step, wrap: Callable[..., Any], *, attends: bool, fresh: bool = False
    ) -> Callable[..., tuple[Any, Array, Array]]:
        step = functools.partial(step, model.fresh() if fresh else model, drafts, scores)
        run = (
            functools.partial(in_two_microbatches, step, attends)
            if microbatches == 2
            else functools.partial(in_one_batch, step)
        )
        return jit_step(wrap(run), mesh, _options(model.platform))

    pad = pad_to_two_rows if model.platform == "gpu" else lambda run: run

    def wrap_prefill(run: Callable[..., Any]) -> Callable[..., Any]:
        return stateful_prefill(pad(run))

    def wrap_decode(run: Callable[..., Any]) -> Callable[..., Any]:
        steps = repeated_decode(stateful_decode(run, 1 + drafts), num_steps)
        # With a draft even a single row has two tokens.
        return steps if drafts else pad(steps)

    return Programs(
        compiled(prefill, wrap_prefill, attends=True),
        # Halves that both start at 0 hold different prompts: neither attends to the other.
        compiled(prefill, wrap_prefill, attends=False, fresh=True),
        compiled(decode, wrap_decode, attends=False),
        functools.partial(_init_cache, model.config, mesh),
        functools.partial(_init_running, mesh),
    )


def check_mesh(model: Decoder, mesh: Mesh | None) -> None:
    """Raise a ValueError that says why, if a model does not fit a mesh."""
    axis = model.dispatch.axis_name
    if mesh is None and axis is not None:
        raise ValueError(
            f"Engine: the model sends tokens to experts over axis {axis!r}: give a mesh, or build the model without "
            "dispatch"
        )
    if mesh is not None and (axis != EP or any(size > 1 for name, size in mesh.shape.items() if name != EP)):
        raise ValueError(
            f"Engine: the mesh is {dict(mesh.shape)} and the model's experts lie over {axis!r}; both must be over "
            f"{EP!r} alone: decoder(config, dispatch=Dispatch(axis_name={EP!r})), make_mesh(1, devices)"
        )


@functools.cache
def _options(platform: str) -> dict[str, str] | None:
    """The compiler's options: on a CPU, to use Eigen's products, which take half of YNNPACK's time for sixteen rows.

    For many rows both take equally long. None on other platforms, and for a version of JAX that lacks the
    option.
    """
    options = {YNNPACK: ""}
    if platform != "cpu":
        return None
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return None
    return options


def jit_step(run: Callable[..., Any], mesh: Mesh | None, options: dict[str, str] | None = None) -> Any:
    """Compile ``run``, on a mesh as ``on_mesh`` maps it; the cache's memory is reused for the cache that it returns.

    On a mesh the layout of the cache is fixed, with its dims in order. Without that a TPU's compiler makes
    the blocks the last dim, because 576 numbers do not fill its lanes, and then copies the whole cache to
    read one block.
    """
    if mesh is None:
        return jax.jit(
            lambda weights, cache, rows: run(weights, cache, *rows),
            donate_argnums=1,
            compiler_options=options,
        )
    cache_layout = cache_format(mesh)
    results_sharding = _replicated(mesh) if mesh.is_multi_process else None

    def step(weights: Tree, cache: Array, rows: tuple[Tree, ...]) -> Any:
        return on_mesh(run, mesh)(weights, cache, *rows)

    return jax.jit(
        step,
        donate_argnums=1,
        in_shardings=(None, cache_layout, None),
        out_shardings=(results_sharding, results_sharding, cache_layout),
        compiler_options=options,
    )


def _replicated(mesh: Mesh) -> NamedSharding:
    """Every device gets the whole array, because each process runs the engine and needs the tokens of all rows."""
    return NamedSharding(mesh, PartitionSpec())


def cache_format(mesh: Mesh) -> Format:
    """The cache's layout and sharding on a mesh."""
    return Format(Layout((0, 1, 2, 3)), NamedSharding(mesh, BLOCKS))


def on_mesh(run: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``run(weights, cache, rows, ...) -> (out, counts, cache)`` on every device of a mesh, each with its own part."""

    def on_all_devices(weights: Tree, cache: Array, *rows: Tree) -> Any:
        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(weight_specs(weights), BLOCKS, *(ROWS for _ in rows)),
            out_specs=(ROWS, ROWS, BLOCKS),
            check_vma=False,
        )
        return mapped(weights, cache, *rows)

    return on_all_devices


def in_one_batch(
    step: Step, weights: Tree, cache: Array, rows: Rows, *more: Tree
) -> tuple[Any, Array, Array]:
    """Run one step of one device, all its rows at once."""
    return _write_results(cache, [(rows, *step(weights, cache, rows, *more))])


def pad_to_two_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run`` so that it never gets one token alone: an empty second row is added and its results are dropped.

    XLA does not treat the product of a vector and a matrix as a matrix product. On a GPU it multiplies
    element by element, writes all these products, as many as the matrix has elements, and reads them again to
    add them up.

    Args:
      run: ``(weights, cache, *rows) -> (out, counts, cache)``; dim 0 of all arrays in ``rows`` and ``out`` is
        the row. The first array of ``rows`` has one element for each token.
    """

    def with_empty_row(leaf: Array) -> Array:
        # XLA fuses a select into the operation that reads it; a concatenation would be a kernel of its own.
        is_first = jnp.arange(2, dtype=jnp.int32).reshape(2, *[1] * (jnp.ndim(leaf) - 1)) == 0
        return jnp.where(is_first, leaf, jnp.zeros((), leaf.dtype))

    def padded(weights: Tree, cache: Array, *rows: Tree) -> tuple[Any, Array, Array]:
        if jax.tree.leaves(rows)[0].size > 1:
            return run(weights, cache, *rows)
        out, counts, cache = run(weights, cache, *jax.tree.map(with_empty_row, rows))
        return jax.tree.map(lambda leaf: leaf[:1], out), counts, cache

    return padded


def in_two_microbatches(
    step: Step, attends: bool, weights: Tree, cache: Array, rows: Rows, *more: Tree
) -> tuple[Any, Array, Array]:
    """Run one step in two microbatches, of which the first leads; if ``attends``, the second attends to the first."""

    def half(k: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.split(jnp.asarray(leaf), 2)[k], (rows, *more))

    @jax.named_scope("microbatch_a")
    def lead(fixed: Tree, *arguments: Tree) -> Any:
        return step(*fixed, *arguments)

    @jax.named_scope("microbatch_b")
    def follow(fixed: Tree, *arguments: Tree) -> Any:
        if not attends:
            return step(*fixed, *arguments)
        *arguments, ahead, latents = arguments  # type: ignore[assignment]
        return step(*fixed, *arguments, (ahead, latents))

    fixed, first, second = (weights, cache), half(0), half(1)
    followed, led = side_by_side(
        follow,
        (fixed, *second, *first[:1]) if attends else (fixed, *second),
        lead,
        (fixed, *first),
        passed=(lambda result: result[1].latents) if attends else None,
    )
    return _write_results(cache, [(first[0], *led), (second[0], *followed)])


def _write_results(cache: Array, parts: Sequence[tuple[Rows, Any, LayerOutputs]]) -> tuple[Any, Array, Array]:
    """The results of all parts one after the other, the sum of their counts, and the cache with their latents."""
    # Everything must be read before anything is written: otherwise XLA copies the cache.
    parts = lax.optimization_barrier(list(parts))
    for rows, _, made in parts:
        cache = write(cache, rows, made.latents)
    out = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(out for _, out, _ in parts))
    counts = functools.reduce(jnp.add, [jnp.stack(made.counts) for *_, made in parts])
    return out, counts[None], cache


def _init_cache(config: Config, mesh: Mesh | None, num_blocks: int, block_size: int) -> Array:
    make = functools.partial(init_cache, config, num_blocks, block_size)
    if mesh is None:
        return make()
    return jax.jit(make, out_shardings=cache_format(mesh))()


def _init_running(mesh: Mesh | None, num_slots: int) -> Running:
    running = empty_running(num_slots)
    if mesh is None:
        return jax.tree.map(jnp.asarray, running)
    # In the sharding of the programs' results; otherwise each program would be compiled twice.
    return jax.device_put(running, _replicated(mesh) if mesh.is_multi_process else NamedSharding(mesh, ROWS))
