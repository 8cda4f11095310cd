"""One of two processes with two devices each: reads a checkpoint, says what it read, writes it again."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from dualpipe_jax.parallel import make_mesh
from models import weights

process, address, answer, source, target = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
read = []
_, params = weights.load(
    source, stages=(4, 2), mesh=make_mesh(2, 2), progress=lambda done, total: read.append((done, total))
)
experts = params["stages"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
parts = [(shard.index[0].start, float(np.sum(shard.data))) for shard in experts.addressable_shards]
weights.save(target, weights.inspect(source)[0].config, params, stages=(4, 2), max_file_bytes=20_000)
Path(answer).write_text(json.dumps({"read": read[-1], "parts": parts}))
