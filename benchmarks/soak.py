"""A server under clients of which a third leave in mid-stream: is any answer wrong, is any slot or memory lost?

scripts/bench soak [--minutes 10] [--clients 64] [--kills 3] [--growth 32]

The right answers are known from a single client at a server without a cache on disk. Then all clients at once
ask a server with such a cache; a third of them leave while they wait or in the middle of their answer, and
what they received must be the beginning of the right answer. At the end the server must hold no more slots,
blocks and open files than at the beginning. The process's memory may not have grown by more than --growth MiB
since a fifth of the time had passed. No request may fail.

Then the server is killed with SIGKILL under load and started again with the same --prefix-cache, --kills
times. At the end some files of the cache are cut off or changed, as a power failure may leave them, and a
single client must get the same answers, with beginnings taken from the undamaged files.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.on_http.clients import Known, Question, Tally, alone, crowd, questions
from benchmarks.on_http.server import Server, save_model

MIB = 1 << 20
HELD = "serve_slots_used", "serve_blocks_used", "process_open_fds"
NUM_ROWS = 20


async def soak(server: Server, known: Known, seconds: float, num_clients: int, growth: int) -> list[str]:
    """Put load on the server, print what it holds at intervals, and return what is wrong at the end."""
    before, tally, enough, memory = server.wait_until_idle(), Tally(), asyncio.Event(), list[float]()
    print(
        "| s | memory, MiB | open texts | slots | blocks | right | wrong | left | failed |\n"
        + "| ---: " * 9
        + "|"
    )
    began = time.monotonic()
    load = asyncio.create_task(crowd(server.url, known, tally, enough, num_clients, num_clients // 3))
    for row in range(1, NUM_ROWS + 1):
        await asyncio.wait([load], timeout=began + seconds * row / NUM_ROWS - time.monotonic())
        if load.done():
            break
        now = await asyncio.to_thread(server.metrics)
        memory.append(now["process_resident_memory_bytes",] / MIB)
        held = [f"{now[name,]:.0f}" for name in ("serve_texts_open", *HELD[:2])]
        print(
            f"| {time.monotonic() - began:.0f} | {memory[-1]:.0f} | {' | '.join(held + tally.cells)} |",
            flush=True,
        )
    enough.set()
    await load
    after = server.wait_until_idle()
    grown = memory[-1] - memory[NUM_ROWS // 5 - 1]
    reused, prompts = after["serve_reused_tokens_total",], after["serve_prompt_tokens_total",]
    print(
        f"{num_clients} clients, {num_clients // 3} of whom leave, for {seconds:.0f} s: {tally.right} answers right, "
        f"{len(tally.wrong)} wrong, {tally.left} left, {tally.failed.total()} failed; memory grew "
        f"by {grown:.1f} MiB since a fifth of the time; {reused / prompts:.0%} of prompts' tokens were known"
    )
    wrong = [
        f"{name}: {before[name,]:.0f} before, {after[name,]:.0f} after"
        for name in HELD
        if after[name,] > before[name,]
    ]
    if after["serve_texts_open",]:
        wrong.append(
            f"{after['serve_texts_open',]:.0f} texts have not ended a minute after the last client left"
        )
    if grown > growth:
        wrong.append(f"memory grew by {grown:.1f} MiB, more than {growth}")
    return [*wrong, *map(str, tally.wrong), *(f"{n} failed: {why}" for why, n in tally.failed.items())]


async def kill(server: Server, known: Known, num_clients: int, chance: random.Random) -> list[str]:
    """Kill the server under load and start it again; return what is wrong. Requests that fail are only counted."""
    tally, enough = Tally(), asyncio.Event()
    load = asyncio.create_task(crowd(server.url, known, tally, enough, num_clients, num_clients // 3))
    moment = chance.randint(1, 2 * num_clients)
    assert server.process is not None
    while tally.right < moment and not load.done() and server.process.poll() is None:
        await asyncio.sleep(0.01)
    code = server.stop(signal.SIGKILL)
    enough.set()
    await load
    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    failed = ", ".join(f"{number} {why}" for why, number in sorted(tally.failed.items()))
    print(
        f"killed: {tally.right} right, {len(tally.wrong)} wrong, {tally.left} left; failed: {failed or 'none'}",
        flush=True,
    )
    by_itself = [] if code == -signal.SIGKILL else [f"a server ended by itself with {code}"]
    return [*by_itself, *map(str, tally.wrong)]


def damage(folder: Path) -> int:
    """Cut a third of the files in half, and change a bit in another third; return the number of damaged files."""
    files = sorted(folder.glob("*/*.safetensors"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-len(content) // 4] ^= 1
        left: list[bytes | bytearray] = [content, content[: len(content) // 2], file.read_bytes()]
        file.write_bytes(left[number % 3])
    return sum(number % 3 < 2 for number in range(len(files)))


async def believe(server: Server, known: Known, folder: Path) -> list[str]:
    """Damage the cache of a server that is not running, start it, and return what is wrong with its answers."""
    num_damaged, said = damage(folder), len(server.log.read_text())
    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    found = await alone(server.url, list(known))
    reused = server.metrics()["serve_reused_tokens_total",]
    num_aside = server.log.read_text()[said:].count("is left aside")
    num_parts = len(list(folder.glob("*/*.part")))
    num_wrong = sum(found[question] != known[question] for question in known)
    print(
        f"{num_damaged} files damaged, {num_parts} half written: {num_aside} were read and left aside; to one client "
        f"alone {len(known) - num_wrong} answers right, {num_wrong} wrong, {reused:.0f} tokens of prompts were known"
    )
    wrong = [f"{num_wrong} answers after the damage"] if num_wrong else []
    if not num_aside:
        wrong.append("no damaged file was noticed")
    if not reused:
        wrong.append("nothing was taken from the cache on disk")
    return wrong


async def main() -> None:
    """Run all parts; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--growth", type=int, default=32, help="MiB that memory may grow by")
    given = parser.parse_args()
    chance, wrong = random.Random(0), list[str]()
    asked: list[Question] = questions(128, seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, log, kept = save_model(folder), folder / "log.txt", folder / "kept"
        servers = [Server(model, log), Server(model, log, "--at-once", "16", "--prefix-cache", str(kept))]
        try:
            servers[0].start()
            servers[0].wait_until_ready()
            known = await alone(servers[0].url, asked)
            servers[0].stop()
            servers[1].start()
            servers[1].wait_until_ready()
            # The other half is new to the server when it is killed, so that it is writing files then.
            half = dict(list(known.items())[::2])
            wrong += await soak(servers[1], half, 60 * given.minutes, given.clients, given.growth)
            for _ in range(given.kills):
                wrong += await kill(servers[1], known, given.clients, chance)
            servers[1].stop(signal.SIGKILL)
            wrong += await believe(servers[1], known, kept)
            if (code := servers[1].stop()) != 0:
                wrong.append(f"it ended on SIGTERM with {code}")
        finally:
            for server in servers:
                server.stop(signal.SIGKILL)
    if wrong:
        raise SystemExit("wrong:\n" + "\n".join(wrong[:20]))


if __name__ == "__main__":
    asyncio.run(main())
