"""Two real processes as one JAX program, and what each has to say."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dualpipe_jax.processes import free_port
from tests.quick import QUICK, ROOT


def what_both_say(*program, arguments=(), devices=1):
    """Start ``python PROGRAM PROCESS ADDRESS ANSWER ARGUMENTS`` twice; the JSON that each leaves in the file ANSWER.

    Answers are files, for gloo greets on stdout at any moment, after the last line of a program as well.
    """
    address = f"127.0.0.1:{free_port()}"
    flags = f"{QUICK} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / str(process) for process in range(2)]
        children = [
            subprocess.Popen(
                [sys.executable, *program, str(process), address, answer, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for process, answer in enumerate(answers)
        ]
        try:
            said = [child.communicate(timeout=240)[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert [child.returncode for child in children] == [0, 0], said
        return [json.loads(answer.read_text()) for answer in answers]
