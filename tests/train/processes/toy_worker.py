"""A stand-in for the trainer in tests of faults: steps of one collective, a checkpoint of one number, and a fault.

Arguments: folder, options (JSON), coordinator, number of processes, process. The fault strikes once, on the first
start: {"fault": "kill" | "stop" | "raise" | "save" | "spin" | "exit 2" | "leave", "process": I, "step": S}.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from train.__main__ import end_at_once
from train.config import ConfigError, LaunchConfig
from train.processes.heartbeat import WATCHER, Heartbeat
from train.processes.launch import detect_launch, initialize

STEPS = 12


def strike(fault, folder):
    (folder / "struck").touch()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise RuntimeError("only here")
    if fault == "exit 2":
        raise ConfigError("this will not do")
    if fault == "spin":
        time.sleep(1000)  # alive, and does not come


def train(processes, asked, folder, once):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("pp",))
    processes.check_equal({"folder": str(folder)})
    processes.connect(mesh)
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "pp"),
            mesh=mesh,
            in_specs=PartitionSpec("pp"),
            out_specs=PartitionSpec(),
        )
    )
    saved = folder / "saved"
    first = int(saved.read_text()) if saved.exists() else 0
    if processes.leads:
        print(f"from {first}", flush=True)
    for step in range(first, STEPS):
        processes.heartbeat.step(step + 1, compiles=step == first)
        ones = jax.make_array_from_callback(
            (mesh.size,),
            NamedSharding(mesh, PartitionSpec("pp")),
            lambda index: np.ones(mesh.size, np.float32)[index],
        )
        if once and (processes.id, step) == (asked["process"], asked["step"]):
            strike(asked["fault"], folder)
        assert float(np.asarray(add(ones))[0]) == mesh.size
        time.sleep(asked.get("pause", 0.02))
        stop = processes.preempted()
        if stop or step % 4 == 3:
            processes.heartbeat.phase(f"saving step {step + 1}")
            if processes.leads:
                new = folder / "saved.new"
                new.write_text(str(step + 1))
                if once and asked["fault"] == "save" and step >= asked["step"]:
                    (folder / "struck").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                new.rename(saved)
            processes.barrier()
        if stop:
            from train.errors import Stopped

            raise Stopped(f"saved {step + 1}", code=143)


def main():
    folder, asked, coordinator, count, process = sys.argv[1:]
    folder, asked = Path(folder), json.loads(asked)
    os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", "--xla_force_host_platform_device_count=1"
    marks = folder / f"struck.{process}"
    once = not marks.exists()
    marks.touch()
    config = LaunchConfig(coordinator=coordinator, num_processes=int(count), process_id=int(process))
    launch = detect_launch(config)
    assert launch is not None
    try:
        heartbeat = Heartbeat(
            int(os.environ[WATCHER]) if WATCHER in os.environ else None, asked.get("patience")
        )
        initialize(launch, config)
        from train.processes.group import connected_processes

        processes = connected_processes(heartbeat)
        train(processes, asked, folder, once)
        processes.leave()
    except BaseException as error:
        end_at_once(error, launch)


if __name__ == "__main__":
    main()
