"""One of two processes with one device each that serve together: says the texts, before and after experts moved."""

import json
import sys

import jax

jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))

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
    Engine(model(), random_params(CONFIG), LIMITS, mesh=mesh(), prefixes=PrefixFolder("."))
except ValueError as error:
    refused = str(error)
print(json.dumps({"refused": refused, "texts": texts, "counted": int(serving.counts.sum())}, default=int))
