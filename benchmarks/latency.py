"""Time to the first token and between tokens on CPU under 16 clients, against transformers with the same weights.

python benchmarks/latency.py [--clients 16] [--requests 100] [--prompt 32] [--cores 1] [--continuous]

Each client asks for a text, and for another as soon as it has the first; texts have 8 to 48 tokens, all
prompts the same length. Times are this process's CPU time in milliseconds, so other work of the machine
hardly counts. The time between tokens of a request is the mean over its tokens.

Transformers answers by ``generate``: a batch of one request of each client, and the next batch when the
longest text of this one is whole. Its continuous batching could not serve this model in version 5.24, and
took minutes to fail: its cache expects keys of another shape. ``--continuous`` tries it with two requests.
"""

import argparse
import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import torch
import transformers

from benchmarks.decode import shared_model
from dualpipe_jax.present.table import Table
from models.decode import Engine, Limits, SamplingParams, decoder

SHORTEST, LONGEST = 8, 48


def ours(engine, prompts, lengths, clients):
    """The times when each request was sent and its tokens came, by our engine, which serves requests as they come."""
    heard: list[list[float]] = [[] for _ in prompts]
    asked, free = [0.0] * len(prompts), clients
    waiting = iter(range(len(prompts)))
    left = len(prompts)
    while left:
        for request in (next(waiting, None) for _ in range(free)):
            if request is not None:
                asked[request] = time.process_time()
                engine.add(
                    prompts[request],
                    SamplingParams(max_tokens=lengths[request]),
                    lambda _, times=heard[request]: times.append(time.process_time()),
                )
        free = len(engine.step())
        left -= free
    return asked, heard


def theirs(model, prompts, lengths, clients):
    """The same from transformers, in batches; a client asks again when its own text is whole."""
    heard, asked = [], []
    ready = [time.process_time()] * clients
    for first in range(0, len(prompts), clients):
        batch = slice(first, first + clients)
        times: list[float] = []

        def note(_, scores, times=times):
            times.append(time.process_time())
            return scores

        with torch.no_grad():
            model.generate(
                torch.tensor(prompts[batch]),
                max_new_tokens=max(lengths[batch]),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=[note],
            )
        heard += [times[:length] for length in lengths[batch]]
        asked += ready[: len(lengths[batch])]
        ready = [times[length - 1] for length in lengths[batch]]
    return asked, heard


def refusal(model, prompts):
    """The reason why transformers' continuous batching cannot serve these weights; None if it can."""
    settings = transformers.GenerationConfig(
        max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    try:
        found = model.generate_batch(inputs=prompts[:2].tolist(), generation_config=settings)
    except Exception as error:  # whatever it is
        return repr(error)
    failed = [one for one in found.values() if len(one.generated_tokens) < 2]
    return None if not failed and found else str(getattr(failed[0], "error", None) if failed else "no answer")


def row(name, asked, heard):
    first = [times[0] - began for began, times in zip(asked, heard, strict=True)]
    between = [(times[-1] - times[0]) / (len(times) - 1) for times in heard]
    cells = [f"{1e3 * np.percentile(times, at):.0f}" for times in (first, between) for at in (50, 99)]
    total = sum(map(len, heard)) / (max(times[-1] for times in heard) - min(asked))
    return name, *cells, f"{total:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=32, help="number of tokens of each prompt")
    parser.add_argument("--cores", type=int, default=1, help="number of cores that both may use (Linux)")
    parser.add_argument("--continuous", action="store_true", help="try transformers' continuous batching")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    torch.set_num_threads(given.cores)
    transformers.utils.logging.disable_progress_bar()
    model, config, params = shared_model()
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab, (given.requests, given.prompt))
    lengths = rng.integers(SHORTEST, LONGEST + 1, given.requests).tolist()
    limits = Limits(
        max_requests=given.clients,
        max_positions=given.prompt + LONGEST,
        chunk_size=given.prompt,
        max_prefill=128,
    )
    engine = Engine(decoder(config), params, limits)
    engine.compile()
    rows = [
        row("ours", *ours(engine, prompts, lengths, given.clients)),
        row("transformers' generate", *theirs(model, prompts, lengths, given.clients)),
    ]
    head = ("CPU ms", "first token, median", "99th", "between tokens, median", "99th", "tokens a CPU second")
    print(Table(head, tuple(rows)).markdown())
    batching = f"continuous batching of transformers {transformers.__version__}"
    if not given.continuous:
        print(f"left out: {batching}, which --continuous tries")
    elif (why := refusal(model, prompts)) is None:
        print(f"{batching} takes the model: it is not timed here yet")
    else:
        print(f"left out: {batching}, which fails: {why}")


if __name__ == "__main__":
    main()
