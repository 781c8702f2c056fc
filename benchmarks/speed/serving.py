"""The HTTP server under load: throughput, latency, memory, and malformed requests.

    python -m benchmarks.speed.serving --workdir=FOLDER
    python -m benchmarks.speed.serving --workdir=FOLDER --hostile=1000

Starts `convbert_jax.serve` as a process and sends requests of one text to /v1/embeddings over
persistent connections, as base64. The texts are three of CoLA's dev set for each IMDb review, in
random order, truncated to the length of the model. `model.encode` computes the same texts in this
process in alternating rounds; the ratio is the throughput of the server divided by the throughput
of `model.encode`. Server and clients share the cores. The CPU time of a text, without the clients,
hardly depends on other load.

With --hostile, the requests are malformed, too large, or slow. Each must be answered with a status
4xx or its connection closed, and the server must answer a valid request afterwards.

Needs the data folder (CONVBERT_DATA).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks import timing
from benchmarks.speed.inference import read_cola, read_reviews

_SLOW = 40  # seconds in which a slow connection must be closed
_AT_ONCE = 100  # hostile connections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1024, help="requests of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_wait_ms", type=float, default=5.0)
    parser.add_argument("--hostile", type=int, default=0, help="number of hostile requests")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    texts = draw_texts(arguments.requests)
    flags = [f"--workdir={arguments.workdir}", f"--max_wait_ms={arguments.max_wait_ms}"]
    with serve(flags) as (process, port):
        if arguments.hostile:
            asyncio.run(attack(port, arguments.hostile, texts[0]))
            print(f"RSS of the server: {resident(process.pid):.0f} MB")
        else:
            compare(arguments, process.pid, port, texts)


def draw_texts(count: int) -> list[str]:
    reviews = read_reviews(-(-count // 4))
    texts = [*random.Random(0).choices(read_cola(), k=count - len(reviews)), *reviews]
    random.Random(1).shuffle(texts)
    return texts


@contextlib.contextmanager
def serve(flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen, int]]:
    """Yields the server's process and port once it is ready; prints the time of its start."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "convbert_jax.serve", "--port=0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
            while asyncio.run(exchange(port, head("GET", "/health"))) != 200:
                time.sleep(0.2)
            seconds = time.perf_counter() - started
            print(f"{timing.describe_processor()}; ready after {seconds:.1f} s")
            yield process, port
        finally:
            process.send_signal(signal.SIGTERM)
            print(f"exit code {process.wait()}")


def resident(process: int) -> float:
    """Returns the resident memory of a process in MB."""
    with open(f"/proc/{process}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1e3


def cpu_seconds(process: int) -> float:
    """Returns the CPU time of a process so far."""
    with open(f"/proc/{process}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def head(method: str, path: str, length: int = 0, kind: str = "application/json") -> bytes:
    """Returns the head of a request."""
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}")
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def post(body: bytes, path: str = "/v1/embeddings", **fields: str) -> bytes:
    return head("POST", path, len(body), **fields) + body


# --- Load ---


def compare(arguments: argparse.Namespace, process: int, port: int, texts: list[str]) -> None:
    import convbert_jax

    model = convbert_jax.load(arguments.workdir)
    tokens = statistics.mean(map(len, model.tokenize(texts)))
    print(f"{len(texts)} texts of {tokens:.1f} tokens, {arguments.clients} clients")
    before = resident(process)
    latencies: list[float] = []
    errors: Counter[int] = Counter()
    used: dict[str, list[float]] = {"model.encode": [], "server": []}

    def encode():
        started = cpu_seconds(os.getpid())
        model.encode(texts)
        used["model.encode"].append(cpu_seconds(os.getpid()) - started)

    def request():
        started = cpu_seconds(process)
        asyncio.run(load(port, texts, arguments.clients, latencies, errors))
        used["server"].append(cpu_seconds(process) - started)

    runs = {"model.encode": encode, "server": request}
    times = timing.alternate(runs, arguments.rounds, rest=0.5, alone=False)
    columns = ("texts/s, median", "texts/s, fastest", "relative to encode", "CPU ms/text")
    table = timing.Table("program", *columns)
    for name, found in times.items():
        rates = [1e3 * len(texts) / each for each in (statistics.median(found), min(found))]
        cpu = 1e3 * statistics.median(used[name][1:]) / len(texts)
        table.add(name, *rates, timing.describe_ratios(found, times["model.encode"]), cpu)
    latencies = latencies[len(texts) :]  # without the warm-up round
    cuts = statistics.quantiles(latencies, n=100)
    p50, p99 = 1e3 * cuts[49], 1e3 * cuts[98]
    print(f"latency: p50 {p50:.0f} ms, p99 {p99:.0f} ms, maximum {1e3 * max(latencies):.0f} ms")
    after = resident(process)
    print(f"errors: {dict(errors) or 0}; RSS: {before:.0f} MB before, {after:.0f} MB after")


async def load(
    port: int, texts: Sequence[str], clients: int, latencies: list[float], errors: Counter[int]
) -> None:
    """Sends each text in a request; every client waits for its answer before the next request."""
    waiting = iter(texts)

    async def run():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for text in waiting:
            body = json.dumps({"input": text, "encoding_format": "base64"}).encode()
            started = time.perf_counter()
            writer.write(post(body))
            status, _ = await read_answer(reader)
            latencies.append(time.perf_counter() - started)
            if status != 200:
                errors[status] += 1
        writer.close()

    await asyncio.gather(*(run() for _ in range(clients)))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns status and body."""
    lines = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", lines, re.IGNORECASE)
    return int(lines.split()[1]), await reader.readexactly(int(length[1]) if length else 0)


async def exchange(port: int, data: bytes) -> int:
    """Sends bytes in a new connection and returns the status; 0 if there is no answer."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        async with asyncio.timeout(_SLOW):
            status, _ = await read_answer(reader)
        writer.close()
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    return status


# --- Hostile requests ---


def hostile_requests() -> dict[str, bytes]:
    """Returns kinds of requests. Those that end early wait for the server to give up."""
    good = json.dumps({"input": "a"}).encode()
    return {
        "no HTTP": os.urandom(64) + b"\r\n\r\n",
        "large head": b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        "other host": post(good).replace(b"localhost", b"evil.example"),
        "form": post(good, kind="text/plain"),
        "unknown path": post(good, path="/unknown"),
        "unknown method": head("DELETE", "/model"),
        "no ability": post(b'{"texts": ["a"]}', path="/predict"),
        "no JSON": post(b'{"input": '),
        "not UTF-8": post(b'{"input": "\xff"}'),
        "no object": post(b"[]"),
        "nested": post(b"[" * 30_000 + b"]" * 30_000),
        "long number": post(b'{"input": "a", "dimensions": ' + b"9" * 10_000 + b"}"),
        "no texts": post(b'{"input": []}'),
        "empty text": post(b'{"input": ["a", " "]}'),
        "numbers": post(b'{"input": [1, 2]}'),
        "surrogate": post(b'{"input": "\\ud800"}'),
        "many texts": post(json.dumps({"input": ["a"] * 10_000}).encode()),
        "large body": post(json.dumps({"input": "a" * 2_000_000}).encode()),
        "dimensions": post(b'{"input": "a", "dimensions": 0}'),
        "slow head": b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\n",
        "slow body": post(good)[:-1],
    }


async def attack(port: int, count: int, text: str) -> None:
    """Sends hostile requests and prints the number of each result."""
    kinds = hostile_requests()
    found: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    limit = asyncio.Semaphore(_AT_ONCE)

    async def send(name):
        async with limit:
            try:
                status = await exchange(port, kinds[name])
            except TimeoutError:
                found[name]["open"] += 1
            else:
                found[name][str(status or "closed")] += 1

    names = [name for name, _ in zip(_repeat(kinds), range(count), strict=False)]
    await asyncio.gather(*map(send, names))
    table = timing.Table("request", "results")
    for name, results in found.items():
        table.add(name, ", ".join(f"{number} x {result}" for result, number in results.items()))
    results = sum(found.values(), Counter())
    good = sum(n for result, n in results.items() if result[0] == "4" or result == "closed")
    status = await exchange(port, post(json.dumps({"input": text}).encode()))
    print(f"{good} of {len(names)} were refused or closed; a valid request then got {status}")


def _repeat(names) -> Iterator[str]:
    while True:
        yield from names


if __name__ == "__main__":
    main()
