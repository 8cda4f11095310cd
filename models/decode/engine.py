"""Continuous batching: requests join and leave between steps, and nothing is compiled again.

A step is started before the results of the last one are read: devices keep these results, see
``models.decode.running``, and never wait for the host. A program is compiled when a text first reaches the
length that it is for (``Limits.table_sizes``), or ``Engine.compile`` compiles all of them.
``models.decode.steps`` has what a device computes, ``models.decode.inputs`` its inputs,
``models.decode.scheduler`` the requests' slots; this module has the steps of the host.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from numpy.typing import ArrayLike

from dualpipe_jax.functional import Tree
from dualpipe_jax.parallel import EP
from models.decode import experts
from models.decode.cache import Rows, get_block, put_block
from models.decode.halves import Piece, fixed_cost, halve
from models.decode.inputs import Chunks, DeviceInputs, is_scored, sampling
from models.decode.model import Decoder
from models.decode.prefix_cache import DiskBlocks, PrefixFolder, model_digest
from models.decode.programs import ROWS, programs
from models.decode.requests import STEPS_ON_GPU, Completion, Limits, SamplingParams, check_request
from models.decode.running import results_of_step
from models.decode.scheduler import Request, Scheduler
from models.decode.scores import Score
from models.decode.steps import Decoded, Prefilled
from models.lazy import lazily, read_all


class Engine:
    """Serves requests step by step.

    Args:
      model: see ``models.decode.decoder``.
      params: the params of a one-stage pipeline, as ``models.weights.load`` reads them, or as ``open_lazily``
        opens them: then each device reads only its own part, after everything else has been checked.
      limits: the sizes, of all devices together.
      drafts: whether the first module of multi-token prediction guesses a token ahead. The text is the same.
      prefixes: a folder in which the latents of texts' beginnings are kept for other engines.
      mesh: a mesh with the axis "ep", over whose devices requests and experts are shared out; the model's
        ``dispatch`` must then be over that axis. None for one device.
      placement: int [R, devices, slots], the expert in each slot of each device, for every layer with experts, then
        for modules of multi-token prediction: ``Placement.experts`` of ``dualpipe_jax.balance``. None shares them out
        in order.
      microbatches: 2 runs a step in two halves, each computed while the other's tokens travel to experts and
        back, which pays where that takes long. Texts are the same.

    Raises:
      ValueError: drafts are asked for, and the model has no such module; model, limits, placement and mesh do
        not fit together; the folder's limit is less than 16 blocks; or a folder is given with a mesh of
        several processes.
    """

    def __init__(
        self,
        model: Decoder,
        params: Tree,
        limits: Limits = Limits(),  # noqa: B008
        *,
        drafts: bool = False,
        prefixes: PrefixFolder | None = None,
        mesh: Mesh | None = None,
        placement: ArrayLike | None = None,
        microbatches: int = 1,
    ):
        if drafts and not model.config.num_mtp_layers:
            raise ValueError(
                "Engine: drafts need a module of multi-token prediction, and the model has none; "
                "leave drafts out, or load weights with num_mtp_layers of 1."
            )
        if placement is not None and mesh is None:
            raise ValueError("Engine: a placement needs a mesh on whose devices it places experts")
        if prefixes is not None and mesh is not None and mesh.is_multi_process:
            raise ValueError(
                "Engine: prefixes are kept by one process, and the mesh has devices of several; leave them out"
            )
        self.config, self.limits, self._drafts = model.config, limits, drafts
        self._num_steps = limits.num_steps or (STEPS_ON_GPU if model.platform == "gpu" else 1)
        # The key says whether the programs return scores.
        self._programs = {
            scores: programs(model, drafts, mesh, microbatches, scores, self._num_steps)
            for scores in (False, True)
        }
        self._num_devices = 1 if mesh is None else mesh.shape[EP]
        self._device_limits = limits.share(self._num_devices)
        self._num_halves = microbatches
        if self._device_limits.max_requests % microbatches:
            raise ValueError(
                f"Engine: {self._device_limits.max_requests} requests of a device are not two equal halves; "
                f"give an even multiple of {self._num_devices} as max_requests"
            )
        # The rows of a device in one prefill, and the number of prefills in a step.
        chunks = max(1, limits.max_prefill // limits.chunk_size)
        self._num_rows = 1 if microbatches == 1 else 2 * max(1, chunks // 2)
        self._num_prefills = max(1, chunks // self._num_rows)
        self._fixed_cost = fixed_cost(self.config)
        self._has_kernel = model.platform != "cpu"
        self._mesh, self._near = mesh, model.dispatch.factor is None
        self._placement: np.ndarray = np.zeros((0, 0, 0))  # the placement, on a mesh
        if mesh is not None:
            if placement is None:
                placement = experts.default_placement(self.config, self._num_devices)
            self._placement = experts.check_placement(self.config, self._num_devices, placement)
        self._cache = self._programs[False].init_cache(limits.total_blocks, limits.block_size)
        self._running = self._programs[False].init_running(limits.max_requests)
        block = (self._cache.shape[0], *self._cache.shape[2:]), self._cache.dtype
        if prefixes is not None:
            prefixes.check_room(*block)
        # Everything that could be wrong has been checked by now, because reading the weights takes long.
        if mesh is None:
            self._weights = read_all(
                lambda leaf: jnp.asarray(np.asarray(leaf)).block_until_ready(), model.prepare(params)
            )
            # Commit both to the weights' device: the first step's results are committed, so uncommitted
            # arrays at the start would compile each program twice.
            sharding = jax.tree.leaves(self._weights)[0].sharding
            self._cache, self._running = jax.device_put((self._cache, self._running), sharding)
        else:
            lazy = model.prepare(lazily(params))
            self._weights = experts.place(
                lazy, self._placement, self.config.num_experts, mesh, near=self._near
            )
        self._scheduler = Scheduler(limits, self._num_devices, num_halves=microbatches, ahead=int(drafts))
        # Of the steps that were started: calls that read their results, and how many tokens chose each
        # expert.
        self._unread: list[Callable[[], None]] = []
        self._uncounted: list[Array] = []
        self._device_inputs = DeviceInputs(sharding if mesh is None else NamedSharding(mesh, ROWS))
        self._ended: list[Completion] = []
        # True while a step runs, and for good once one has not come to its end.
        self._is_broken = False
        num_rows = self.config.num_moe_layers + self.config.num_mtp_layers
        self._totals = np.zeros((num_rows, self.config.num_experts), np.int64)
        self._ids = itertools.count()
        self._disk_blocks: DiskBlocks | None = None
        if prefixes is not None:
            whole = (
                self._weights if mesh is None else experts.without_placement(self._weights, self._placement)
            )
            digest = model_digest(self.config, whole, drafts, *model.numerics)
            self._disk_blocks = DiskBlocks(prefixes, digest, *block)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._ended or self._scheduler.waiting or any(self._scheduler.slots))

    @property
    def num_running(self) -> int:
        """The number of requests that have a slot; others wait for one."""
        return sum(request is not None for request in self._scheduler.slots)

    @property
    def num_used_blocks(self) -> int:
        """The number of blocks of the cache that requests own; the others are free, but may hold known beginnings."""
        return self.limits.total_blocks - len(self._scheduler.blocks)

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams = SamplingParams(),  # noqa: B008
        on_token: Callable[[int], None] | None = None,
        on_score: Callable[[Score], None] | None = None,
    ) -> int:
        """Add a request, which waits until a step has room for it.

        Args:
          prompt: the tokens of the prompt, integers [S].
          params: how its text is generated.
          on_token: a function that is called with each token as soon as it is known, but not with a token
            that stops the text. If it raises, the request ends.
          on_score: a function that is called with the score of each token, if ``params`` ask for scores,
            before ``on_token`` is called with that token. The scores of the prompt's tokens, if asked for,
            come first.

        Returns:
          The request's number.

        Raises:
          RequestError: the request can never be served; the message says why.
        """
        tokens = np.asarray(prompt)
        self.check(tokens, params)
        request = Request(next(self._ids), tokens.astype(np.int32), params, on_token, on_score)
        self._scheduler.waiting.append(request)
        return request.id

    def check(self, prompt: np.ndarray, params: SamplingParams) -> None:
        """Raise a RequestError that says why, if a request can never be served. Any thread may call this."""
        check_request(prompt, params, self._device_limits, self.config.vocab)

    def cancel(self, number: int) -> None:
        """End a request; the next step returns its completion. A request that has ended is left alone."""
        for request in (*self._scheduler.waiting, *self._scheduler.slots):
            if request is not None and request.id == number:
                self._end(request, "cancelled")

    def step(self) -> list[Completion]:
        """Admit requests that fit, start prefills of prompts, and start decode steps of all requests that decode.

        Then read the results of what the step before started.

        Returns:
          The completions of the requests that ended.

        Raises:
          RuntimeError: an earlier step was interrupted or failed.
        """
        if self._is_broken:
            raise RuntimeError(
                "Engine: a step was interrupted or failed, and tokens that it had started are lost, so the texts "
                "under way cannot be continued; make a new Engine"
            )
        self._is_broken = True
        ended = self._step()
        self._is_broken = False
        return ended

    def _step(self) -> list[Completion]:
        unread, self._unread = self._unread, []
        uncounted, self._uncounted = self._uncounted, []
        self._scheduler.admit(self._load_blocks)
        for _ in range(self._num_prefills):
            pieces = [piece for device in range(self._num_devices) for piece in self._next_pieces(device)]
            if not any(pieces):
                break
            self._prefill(pieces)
        if any(r and r.decodes for r in self._scheduler.slots):
            self._decode()
        for read_results in unread:
            read_results()
        self._count(uncounted)
        ended, self._ended = self._ended, []
        return ended

    def compile(self) -> None:
        """Compile now what steps would compile later, when texts get longer: all programs, for all sizes of tables.

        Programs that return scores are compiled when a request first asks for scores.
        """
        for size in self.limits.table_sizes:
            num_positions = size * self.limits.block_size
            for draws in (False, True):
                for fresh in {False, self._has_kernel}:
                    self._prefill([None] * (self._num_rows * self._num_devices), num_positions, fresh, draws)
                self._decode(num_positions, draws)

    def run(self) -> list[Completion]:
        """Step until nothing is left to do; return all completions in the order of their numbers.

        Raises:
          RuntimeError: as ``step``.
        """
        ended = []
        while self.busy:
            ended += self.step()
        return sorted(ended, key=lambda completion: completion.id)

    @property
    def counts(self) -> np.ndarray:
        """How many tokens chose each expert of each layer so far, int64 [R, E]: loads for ``dualpipe_jax.balance``.

        R counts the layers with experts, then the modules of multi-token prediction, which are zeros without
        drafts.
        """
        self._count(self._uncounted)
        self._uncounted = []
        return self._totals.copy()

    def rebalance(self, placement: ArrayLike) -> None:
        """Move experts to other slots, between two steps. Texts are the same, and serving is not compiled again.

        The program that moves them is compiled for each power of two of experts that one device sends to
        another.

        Args:
          placement: the new placement, in the form of the engine's argument, with as many slots as the old
            one.

        Raises:
          ValueError: the placement does not fit, or the engine has no mesh.
        """
        if self._mesh is None:
            raise ValueError("Engine: on one device there is nowhere to bring experts; give a mesh")
        new_placement = experts.check_placement(self.config, self._num_devices, placement)
        if new_placement.shape != self._placement.shape:
            raise ValueError(
                f"Engine: the new placement has {new_placement.shape[2]} slots a device, the old one "
                f"{self._placement.shape[2]}; both need as many, or all would be compiled again"
            )
        self._weights = experts.move_to_placement(
            self._weights,
            self._placement,
            new_placement,
            self.config.num_experts,
            self._mesh,
            near=self._near,
        )
        self._placement = new_placement

    def _next_pieces(self, device: int) -> list[tuple[Request, Piece] | None]:
        """The pieces of prompts that a device takes in next, one for each row."""
        unfinished = (r for r in self._scheduler.slots_of(device) if r and r.num_cached < len(r.prompt))
        oldest = sorted(unfinished, key=lambda request: request.id)
        prompts = [(r.num_cached, len(r.prompt) - r.num_cached) for r in oldest]
        size = self.limits.chunk_size
        if self._num_halves == 2:
            first, second = halve(prompts, self._num_rows // 2, size, self._fixed_cost)
            pieces = first + second
        else:
            pieces = [Piece(0, start, min(size, left)) for start, left in prompts[:1]] or [None]
        return [None if piece is None else (oldest[piece.number], piece) for piece in pieces]

    def _load_blocks(self, blocks: Sequence[int], filled: int, keys: Sequence[bytes]) -> int:
        """Fill blocks from the folder as far as it has them; return how many blocks at the front are then filled."""
        for block, key in zip(blocks[filled : len(keys)], keys[filled:], strict=True):
            found = self._disk_blocks.read(key) if self._disk_blocks else None
            if found is None:
                break
            self._cache = put_block(self._cache.sharding)(self._cache, block, found)
            filled += 1
        self._scheduler.blocks.remember(blocks[:filled], keys)
        return filled

    def _store_blocks(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        self._scheduler.blocks.remember(blocks, keys)
        for block, key in zip(blocks, keys, strict=False):
            if self._disk_blocks and self._disk_blocks.should_write(key):
                self._disk_blocks.write(key, get_block(self._cache, block))

    def _prefill(
        self,
        pieces: Sequence[tuple[Request, Piece] | None],
        num_positions: int = 0,
        fresh: bool | None = None,
        draws: bool = False,
    ) -> None:
        chunks = Chunks.of(pieces, self.limits.chunk_size)
        requests, starts, lengths = chunks.requests, chunks.starts, chunks.lengths
        tables = self._scheduler.tables(requests, max(num_positions, int(np.max(starts + lengths))))
        programs = self._programs[chunks.are_scored]
        if fresh is None:  # all pieces begin their prompts: the layer's own attention reads no cache
            fresh = self._has_kernel and not starts.any()
        (out, self._running), counts, self._cache = (programs.prefill_fresh if fresh else programs.prefill)(
            self._weights,
            self._cache,
            (
                Rows(chunks.tokens, starts, lengths, tables),
                chunks.next_tokens,
                sampling(requests, draws),
                self._running,
                chunks.finished_prompts(self._scheduler, self._device_limits.max_requests),
            ),
        )
        self._uncounted.append(counts)
        for row, request in enumerate(requests):
            if request is not None:  # of a prompt in both halves, the row of the second half comes later
                request.num_cached = int(starts[row] + lengths[row])
                request.num_unread += int(chunks.ends[row])

        def read_results() -> None:
            found = jax.device_get(out._replace(drafts=None))
            for row, request in enumerate(requests):
                if request is None:
                    continue
                if request.params.score_prompt:
                    start = starts[row] + 1
                    self._score(request, found, row, 0, request.prompt[start : start + lengths[row]].tolist())
                if chunks.ends[row]:
                    self._receive(request, row, found.tokens[row : row + 1], found, lengths[row] - 1)

        if any(chunks.ends) or chunks.are_scored:
            self._unread.append(read_results)

    def _decode(self, num_positions: int = 0, draws: bool = False) -> None:
        width = 2 if self._drafts else 1
        requests = [r if r and r.decodes else None for r in self._scheduler.slots]
        for request in filter(None, requests):
            to_come = len(request.tokens) + width * (request.num_unread + self._num_steps) - 1
            num_positions = max(num_positions, min(len(request.prompt) + to_come, request.max_positions))
        scored = any(is_scored(request) for request in requests)
        rows = self._device_inputs(
            (
                np.asarray([request is not None for request in requests]),
                self._scheduler.tables(requests, num_positions),
                sampling(requests, draws),
            )
        )
        (out, self._running), counts, self._cache = self._programs[scored].decode(
            self._weights, self._cache, (*rows, self._running)
        )
        self._uncounted.append(counts)
        for request in filter(None, requests):
            request.num_unread += self._num_steps

        def read_results() -> None:
            found = jax.device_get(out._replace(drafts=None))  # only devices need the drafts
            for step in range(self._num_steps):
                self._read_step(requests, results_of_step(found, step))

        self._unread.append(read_results)

    def _read_step(self, requests: Sequence[Request | None], found: Any) -> None:
        for row, request in enumerate(requests):
            if request is not None and not request.ended:
                accepted = found.accepted[row]
                request.num_cached += accepted
                request.num_drafted += found.num_fed[row] - 1
                request.num_accepted += accepted - 1
                self._receive(request, row, found.tokens[row, :accepted], found, 0)

    def _receive(
        self, request: Request, row: int, tokens: np.ndarray, found: Prefilled | Decoded, start: int
    ) -> None:
        """Take the tokens that a step returned for a row; their scores stand from index ``start`` on."""
        if request.ended:
            return
        request.num_unread -= 1
        if not found.finite[row]:
            self._end_without_number(request, request.num_cached)
            return
        if not request.tokens:
            self._store_blocks(request.blocks, self._scheduler.keys(request, request.num_cached))
        for place, token in enumerate(map(int, tokens), start):
            if token in request.params.stop:
                if request.params.likeliest is not None:
                    request.stop_score = next(self._scores_of(request, found, row, place, [token]))
                self._end(request, "stop")
                return
            if request.params.likeliest is not None:
                self._score(request, found, row, place, [token])
            if request.ended:
                return
            request.tokens.append(token)
            self._call(request, request.on_token, token)
            if len(request.tokens) == request.params.max_tokens:
                self._end(request, "length")
            if request.ended:
                return

    def _score(
        self, request: Request, found: Prefilled | Decoded, row: int, start: int, tokens: list[int]
    ) -> None:
        for one in self._scores_of(request, found, row, start, tokens):
            if request.ended:
                return
            if not all(map(math.isfinite, (one.logprob, *(logprob for _, logprob in one.likeliest)))):
                first = 1 if request.params.score_prompt else len(request.prompt)
                self._end_without_number(request, first + len(request.scores))
                return
            request.scores.append(one)
            self._call(request, request.on_score, one)

    def _scores_of(
        self, request: Request, found: Prefilled | Decoded, row: int, start: int, tokens: list[int]
    ) -> Iterator[Score]:
        assert found.scores is not None
        return found.scores.of(row, start, tokens, request.params.likeliest or 0)

    def _end_without_number(self, request: Request, position: int) -> None:
        self._end(
            request,
            "error",
            f"the model's answer at position {position} is not a number: its weights hold NaN or "
            "infinity, or its activations grew beyond their type; check the weights, or compute in float32",
        )

    def _call(self, request: Request, callback: Callable[[Any], None] | None, value: Any) -> None:
        if callback is None or request.ended:
            return
        try:
            callback(value)
        except Exception as error:  # an error of the caller's function must not harm other requests
            name = "on_token" if callback is request.on_token else "on_score"
            self._end(request, "error", f"{name} raised {error!r}")

    def _end(self, request: Request, reason: Any, error: str | None = None) -> None:
        if request.ended:
            return
        request.ended = True
        if reason != "error" and request in self._scheduler.slots:
            self._store_blocks(request.blocks, self._scheduler.keys(request, request.num_cached))
        self._scheduler.release(request)
        numbers = int(request.num_drafted), int(request.num_accepted), request.num_reused
        of_prompt = len(request.prompt) - 1 if request.params.score_prompt else 0
        # on_score hears of a token first, and may end the request before the token is taken.
        end = of_prompt + len(request.tokens)
        scores = tuple(request.scores[of_prompt:end]), tuple(request.scores[:of_prompt]), request.stop_score
        self._ended.append(Completion(request.id, tuple(request.tokens), reason, error, *numbers, *scores))

    def _count(self, uncounted: Sequence[Array]) -> None:
        for counts in map(np.asarray, uncounted):
            self._totals[: counts.shape[1]] += counts.sum(0, dtype=np.int64)
