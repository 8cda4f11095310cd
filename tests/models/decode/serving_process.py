"""One of two processes with one device each that serve together: says the texts, before and after experts moved."""

import json
import sys
from pathlib import Path

import jax

process, address, answer = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))

from models.decode import Engine, PrefixFolder  # noqa: E402  after the other process is known
from tests.models.decode.test_serving_on_a_mesh import (  # noqa: E402
    CONFIG,
    ELSEWHERE,
    LIMITS,
    TWICE,
    ask,
    mesh,
    model,
    random_params,
)

serving = Engine(model(), random_params(CONFIG), LIMITS, mesh=mesh(), placement=TWICE, microbatches=2)
texts = [one.tokens for one in ask(serving)]
serving.rebalance(ELSEWHERE)
texts += [one.tokens for one in ask(serving)]
try:
    Engine(model(), random_params(CONFIG), LIMITS, mesh=mesh(), prefixes=PrefixFolder(Path(".")))
except ValueError as error:
    refused = str(error)
found = {"refused": refused, "texts": texts, "counted": int(serving.counts.sum())}
Path(answer).write_text(json.dumps(found, default=int))
