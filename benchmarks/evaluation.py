"""Questions a second of a whole evaluation against an endpoint of fixed latency, and its memory as it grows.

Speed: the system `vanilla`, one call a question, at 64 questions in flight, judged by rule, rows written and
synced; the limit is the endpoint's, 64 calls in the time it takes to answer one. Counted is the command's
working time, from the first call that reaches the endpoint to the last row on the disk. Memory: the resident
set of the same command in a process of its own, whenever another 1,000 rows stand in its folder. The endpoint
is a process too. The limits are the project's own: 95 % of the endpoint's rate, memory that stays flat.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: it has a file named after a package

from reportlab.pdfgen.canvas import Canvas

from data.corpus import Corpus, ingest
from rollout.tables import format_table
from visor.retrieval.index import build_index, default_index_path
from visor.types import Question

ROOT = Path(__file__).parents[1]
WORDS = "apple banana cherry damson elder fig grape hazel".split()
REPLY = "<think>it says so</think><answer>apple</answer>"


# ---------------------------------------------------------------- the endpoint


def serve(latency: float, pipe: Connection) -> None:
    """Answer every chat completion after `latency` seconds, in a process of its own. Sends its port, then,
    for each message that comes, the time of the first request since the last one."""
    asyncio.run(_serve(latency, pipe))


async def _serve(latency: float, pipe: Connection) -> None:
    message = {"role": "assistant", "content": REPLY}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    )
    reply = (
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n{body}"
    ).encode()
    first: list[float] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(length)
                if not first:
                    first.append(time.monotonic())
                await asyncio.sleep(latency)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24, backlog=512)
    pipe.send(server.sockets[0].getsockname()[1])
    loop = asyncio.get_running_loop()
    while True:
        await loop.run_in_executor(None, pipe.recv)
        pipe.send(first[0] if first else None)
        first.clear()


class Endpoint:
    """The process of `serve`."""

    def __init__(self, latency: float):
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(latency, theirs), daemon=True
        )
        self.process.start()
        self.model = f"openai:m@http://127.0.0.1:{self.pipe.recv()}/v1"

    def first_request(self) -> float:
        """`time.monotonic` of the first request since the last call."""
        self.pipe.send("first")
        return self.pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


# ---------------------------------------------------------------- the runs


def make_corpus(folder: Path, questions: int) -> None:
    """A page for each word, an index, and a question file."""
    canvas = Canvas(str(folder / "fruit.pdf"), pagesize=(300, 200))
    for word in WORDS:
        canvas.drawString(20, 150, f"{word} page")
        canvas.showPage()
    canvas.save()
    assert ingest([folder / "fruit.pdf"], folder / "corpus", workers=1, ocr="off").ok
    corpus = Corpus.open(folder / "corpus")
    build_index(corpus, default_index_path(folder / "corpus"))
    pages = [page.page_id for page in corpus.pages()]
    records = (
        Question(
            question_id=f"q{number}",
            text=f"colour {number} of {WORDS[number % 8]}?",
            gold_answers=["apple"],
            gold_page_ids=[pages[number % 8]],
            tags={"hop": "single"},
        )
        for number in range(questions)
    )
    (folder / "questions.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in records))


def command(folder: Path, endpoint: Endpoint, output: str, questions: int, in_flight: int) -> list[str]:
    return [
        *(sys.executable, "-m", "rollout.evaluate", "--system", "vanilla", "--model", endpoint.model),
        *("--corpus", str(folder / "corpus"), "--benchmark", f"questions:{folder / 'questions.jsonl'}"),
        *("--output", str(folder / output), "--limit", str(questions), "--concurrency", str(in_flight)),
    ]


def speed(folder: Path, latency: float, questions: int, in_flight: int) -> tuple[float, float, float]:
    """(questions a second of the run, of an endpoint that is never left waiting, CPU seconds a question)."""
    endpoint = Endpoint(latency)
    arguments = command(folder, endpoint, "speed", questions, in_flight)
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    trajectories = folder / "speed" / "trajectories.jsonl"
    ended, marks = 0.0, []
    while process.poll() is None and not ended:
        count = _lines(trajectories) if trajectories.exists() else 0
        if count and (not marks or count == questions):
            marks.append((count, _cpu(process.pid)))
        ended = time.monotonic() if count == questions else 0.0
        time.sleep(0.02)
    process.wait()
    assert process.returncode == 0, process.stderr.read().decode()
    seconds = (ended or time.monotonic()) - endpoint.first_request()
    endpoint.close()
    waves = -(-questions // in_flight)
    (rows_1, cpu_1), (rows_2, cpu_2) = marks[0], marks[-1]
    cpu = (cpu_2 - cpu_1) / max(1, rows_2 - rows_1)
    return questions / seconds, questions / (waves * latency), cpu


def memory(
    folder: Path, latency: float, questions: int, in_flight: int, every: int
) -> list[tuple[int, float]]:
    """(rows, MiB resident) each time so many more rows are there."""
    endpoint = Endpoint(latency)
    arguments = command(folder, endpoint, "memory", questions, in_flight)
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    trajectories = folder / "memory" / "trajectories.jsonl"
    seen: list[tuple[int, float]] = []
    while process.poll() is None:
        count = _lines(trajectories) if trajectories.exists() else 0
        due = every * (len(seen) + 1)
        if count >= min(due, questions - in_flight):  # the last measure while the run still runs
            resident = _resident(process.pid)
            if resident and len(seen) < -(-questions // every):
                seen.append((count, resident))
        time.sleep(0.05)
    assert process.returncode == 0, process.stderr.read().decode()
    endpoint.close()
    return seen


_offsets: dict[Path, tuple[int, int]] = {}


def _lines(path: Path) -> int:
    """Complete lines of a growing file, each byte read once."""
    offset, count = _offsets.get(path, (0, 0))
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    _offsets[path] = (offset + len(data), count + data.count(b"\n"))
    return _offsets[path][1]


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has taken; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> float | None:
    """MiB; None when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds, for the speed (default: 2)")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--waves", type=int, default=20, help="calls after one another (default: 20)")
    parser.add_argument("--questions", type=int, default=5000, help="for the memory (default: 5000)")
    parser.add_argument("--memory-latency", type=float, default=0.2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, speed_questions = Path(name), arguments.in_flight * arguments.waves
        make_corpus(folder, max(arguments.questions, speed_questions))
        ours, limit, cpu = speed(folder, arguments.latency, speed_questions, arguments.in_flight)
        header = (
            f"{speed_questions} questions, {arguments.latency:g} s a call",
            "questions/s",
            "of the limit",
        )
        rows = [("the endpoint's limit", limit, ""), ("evaluation", ours, f"{ours / limit:.1%}")]
        print(format_table(header, rows))
        print(f"\n{1000 * cpu:.1f} ms of processor time a question", flush=True)
        if arguments.questions:
            every = max(1, arguments.questions // 5)
            seen = memory(folder, arguments.memory_latency, arguments.questions, arguments.in_flight, every)
            rows = [(count, resident, resident / seen[0][1]) for count, resident in seen]
            print("\n" + format_table(("rows", "resident, MiB", "of the first"), rows))


if __name__ == "__main__":
    main()
