"""Two servers behind HAProxy, one of which is killed, or told to stop, under load: is any answer wrong, or lost?

scripts/bench replicas [--clients 32] [--seconds 20]

The balancer is that of docs/replicas/haproxy.cfg, and both servers share a --prefix-cache. All clients ask at
the balancer's address; the right answers are known from a single client at one server. In each of three parts
the first server is ended in the middle and started again: with SIGKILL, with SIGKILL while an eighth of the
clients leave in mid-stream, with SIGTERM. A wrong answer is always an error. After SIGKILL only streams whose
answer had begun may fail; after SIGTERM nothing may fail. In each part the first server must have answered
before its end and after its new start, and the second at all; both must hold nothing at the end.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.on_http.clients import Known, Tally, alone, crowd, questions
from benchmarks.on_http.server import Server, save_model
from dualpipe_jax.processes import free_port

CONFIGURATION = Path(__file__).resolve().parent.parent / "docs" / "replicas" / "haproxy.cfg"
ANSWERED = "serve_requests_total", "/v1/completions", "200"
HELD = "serve_texts_open", "serve_slots_used", "serve_blocks_used"


def balancer() -> str:
    """The path of the program. Raises SystemExit with a message that says what to install, if it is missing."""
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise SystemExit("error: there is no haproxy here: apt-get install haproxy, or brew install haproxy")
    return found


@contextmanager
def balanced(servers: list[Server], log: Path) -> Iterator[str]:
    """Yield the address of a balancer in front of two servers."""
    where = f"127.0.0.1:{free_port()}"
    one, two = (server.url.removeprefix("http://") for server in servers)
    environ = os.environ | {"BIND": where, "REPLICA_ONE": one, "REPLICA_TWO": two}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [balancer(), "-db", "-f", str(CONFIGURATION)], env=environ, stdout=file, stderr=file
        )
    try:
        yield f"http://{where}"
    finally:
        process.terminate()
        process.wait()


async def part(
    url: str,
    servers: list[Server],
    known: Known,
    seconds: float,
    num_clients: int,
    num_leaving: int,
    number: int,
) -> list[str]:
    """Under load end the first server by the signal ``number``, and start it again; return what is wrong."""
    tally, enough = Tally(), asyncio.Event()
    before = [server.metrics()[ANSWERED] for server in servers]
    load = asyncio.create_task(crowd(url, known, tally, enough, num_clients, num_leaving))
    await asyncio.sleep(seconds / 3)
    first = servers[0].metrics()[ANSWERED] - before[0]
    code = await asyncio.to_thread(servers[0].stop, number)
    await asyncio.sleep(seconds / 3)
    servers[0].start()
    await asyncio.to_thread(servers[0].wait_until_ready)
    await asyncio.sleep(seconds / 3)
    enough.set()
    await load
    after = [await asyncio.to_thread(server.wait_until_idle) for server in servers]
    served = first, after[0][ANSWERED], after[1][ANSWERED] - before[1]
    known_tokens = after[0]["serve_reused_tokens_total",]
    name, lost = (
        signal.Signals(number).name,
        ", ".join(f"{n} {why}" for why, n in sorted(tally.failed.items())),
    )
    total = tally.right + len(tally.wrong) + tally.left + tally.failed.total()
    cells = [
        name,
        *map(str, (num_clients, total)),
        *tally.cells,
        *(f"{n:.0f}" for n in served),
        f"{known_tokens:.0f}",
    ]
    print(f"| {' | '.join(cells)} | {lost or 'none'} |", flush=True)
    wrong = [f"{name}: {text}" for text in map(str, tally.wrong)]
    if number == signal.SIGTERM and code != 0:
        wrong.append(f"a server ended on SIGTERM with {code}")
    begun = sum(n for why, n in tally.failed.items() if "mid-stream" in why or "without its end" in why)
    if allowed := tally.failed.total() - (begun if number == signal.SIGKILL else 0):
        wrong.append(
            f"{name}: {allowed} requests failed whose answer had not begun, or after a SIGTERM: {lost}"
        )
    if not all(served):
        wrong.append(
            f"{name}: a server answered nothing: {served} by the first before and after, and the second"
        )
    wrong += [
        f"{name}: {held} is {one[held,]:.0f} at the end" for one in after for held in HELD if one[held,]
    ]
    return wrong


async def main() -> None:
    """Run all parts; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--seconds", type=float, default=20, help="duration of each part, without a server's start"
    )
    given = parser.parse_args()
    balancer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, log = save_model(folder), folder / "log.txt"
        shared = (
            "--shutdown-delay",
            "3",
            "--address-connections",
            "256",
            "--prefix-cache",
            str(folder / "kept"),
        )
        servers = [Server(model, log, *shared) for _ in range(2)]
        try:
            for (
                server
            ) in servers:  # one after the other, so that the second reuses the first one's compiled programs
                server.start()
                server.wait_until_ready()
            known = await alone(servers[0].url, questions(64, seed=0))
            print(
                "| ended by | clients | requests | right | wrong | left | failed | by the first | by it again | "
                "by the second | tokens known to it again | failed how |\n" + "| ---: " * 12 + "|"
            )
            wrong = list[str]()
            with balanced(servers, folder / "balancer.txt") as url:
                for number, leaving in (
                    (signal.SIGKILL, 0),
                    (signal.SIGKILL, given.clients // 8),
                    (signal.SIGTERM, 0),
                ):
                    wrong += await part(url, servers, known, given.seconds, given.clients, leaving, number)
        finally:
            for server in servers:
                server.stop(signal.SIGKILL)
        if wrong:
            raise SystemExit("\n".join(["wrong:", *wrong[:20], log.read_text()[-2000:]]))


if __name__ == "__main__":
    asyncio.run(main())
