"""A small random model, and ``scripts/serve`` of it in a process of its own."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import jax
from prometheus_client.parser import text_string_to_metric_families

import models
from dualpipe_jax.processes import free_port
from models import weights

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny"
CONTEXT = 256
START_SECONDS = 300


def save_model(folder: Path) -> Path:
    """Write random weights of a model of bytes that generates only printable characters: texts show every token."""
    # Large enough that a step takes longer than the work of its client.
    sizes = dict(dim=256, num_heads=8, dense_hidden=1024, expert_hidden=256)
    config = models.tiny(vocab=256, num_layers=2, num_mtp_layers=0, init_std=0.15, **sizes)
    params = models.deepseek(config).init(jax.random.key(0))
    head = params["shared"]["lm_head"]
    # The logits of the other bytes are 0; the largest logit is above 0.
    head["kernel"] = head["kernel"].at[:, :32].set(0).at[:, 127:].set(0)
    weights.save(folder / NAME, config, params)
    return folder / NAME


class Server:
    """One server, which may be started again and again; its programs are compiled once.

    Args:
      model: the folder of the weights.
      log: the file to which the server's output goes.
      options: further options of ``scripts/serve``.
    """

    def __init__(self, model: Path, log: Path, *options: str):
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        asked = ("--port", str(self.port), "--context", str(CONTEXT), "--precision", "float32", *options)
        self._command = [sys.executable, "-P", "-m", "train.generate.serve", str(model), *asked]
        self._environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(model.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process; see ``wait_until_ready``."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environ, stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        """Wait until the server is ready. Raises SystemExit with its output if it ends, or takes five minutes."""
        end = time.monotonic() + START_SECONDS
        while True:
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop(signal.SIGKILL)
                raise SystemExit(f"a server did not start:\n{self.log.read_text()[-2000:]}")
            try:
                self._get("/health")
                return
            except OSError:
                time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Send a signal to the server and return its exit code; None if it was never started."""
        if self.process is None:
            return None
        self.process.send_signal(number)
        return self.process.wait(120)

    def metrics(self) -> Counter:
        """The values of /metrics, by name and labels."""
        text = self._get("/metrics")
        return Counter(
            {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def wait_until_idle(self) -> Counter:
        """The values of /metrics once no text is being generated or waits, or after a minute at the latest."""
        end = time.monotonic() + 60
        while (found := self.metrics())["serve_texts_open",] and time.monotonic() < end:
            time.sleep(0.1)
        return found
