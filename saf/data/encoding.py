"""Tokenising documents in several processes, in order: the pool of processes, and what runs in each of them.

A process runs this file by its path: it starts fast, because neither `saf` nor torch is imported for it. Requests on
its stdin: `<I` number of texts, `<Q` size of each in bytes, then the UTF-8 texts. Answers on its stdout: `<Q` number of
tokens of each text, then all token ids as `<u4`. The end of stdin ends it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

Tag = TypeVar("Tag")
Text = bytes | memoryview

# What a worker gets at once: large enough that the pipe costs nothing beside it, small enough to share text out evenly
# and to keep a worker's memory small (150 times as much); whichever comes first.
BATCH_BYTES = 2**19
BATCH_TEXTS = 1024  # where documents are so short that their number, not their text, is the work


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EncodeWorker:
    """Hold one tokenising process and the two pipes to it.

    A process of its own rather than a fork, which is unsafe once threads run, or `multiprocessing`'s spawn,
    which imports the caller's main script again.
    """

    def __init__(self, tokenizer_file: Path):
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(tokenizer_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def encode(self, texts: list[Text]) -> list[np.ndarray]:
        """Return the token ids (uint32) of each UTF-8 text; raise DataError when the process has died."""
        sizes = np.array([len(text) for text in texts], dtype="<u8")
        try:
            self._send(len(texts).to_bytes(4, "little"), sizes.tobytes(), *texts)
            ends = np.cumsum(np.frombuffer(self._receive(8 * len(texts)), dtype="<u8"))
            ids = np.frombuffer(self._receive(4 * int(ends[-1])), dtype="<u4")
        except (BrokenPipeError, EOFError) as error:
            from saf.errors import DataError  # here: the process that runs this file needs none of saf

            code = self.process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "no message; was it killed for memory?"
            raise DataError(f"a tokenising process died with exit code {code}: {reason}") from error
        return [ids[start:end] for start, end in pairwise([0, *ends.tolist()])]

    def _send(self, *parts: Text):
        """Write to the worker's input."""
        assert self.process.stdin is not None
        for part in parts:
            self.process.stdin.write(part)
        self.process.stdin.flush()

    def _receive(self, count: int) -> bytes:
        """Read so many bytes of the worker's output; raise EOFError when it ends before."""
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()


class EncodePool:
    """Run up to `workers` tokenising processes, started as they are needed; a context manager."""

    def __init__(self, tokenizer_file: Path, workers: int | None):
        self._file = tokenizer_file
        self._count = workers or usable_cores()
        self._threads = ThreadPoolExecutor(self._count)
        self._own = threading.local()
        self.workers: list[EncodeWorker] = []

    def __enter__(self) -> "EncodePool":
        return self

    def __exit__(self, *reason):
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self.workers):
            worker.process.kill()
        # A thread that was starting a process meanwhile finishes its batch first.
        self._threads.shutdown(wait=True)
        for worker in self.workers:
            worker.close()

    def _encode(self, texts: list[Text]) -> list[np.ndarray]:
        """Encode texts by the worker of this thread, started once."""
        worker = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = EncodeWorker(self._file)
            self.workers.append(worker)
        return worker.encode(texts)

    def encode(self, texts: Iterable[tuple[Text, Tag]]) -> Iterator[tuple[Tag, np.ndarray]]:
        """Yield what came with each text and its token ids (uint32), in the order given, a few batches ahead."""
        waiting: deque[tuple[list[Tag], Future]] = deque()
        for batch in batches(texts):
            tags = [tag for _, tag in batch]
            waiting.append((tags, self._threads.submit(self._encode, [text for text, _ in batch])))
            if len(waiting) > 2 * self._count:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def batches(texts: Iterable[tuple[Text, Tag]]) -> Iterator[list[tuple[Text, Tag]]]:
    """Group texts into lists of about `BATCH_BYTES`."""
    batch: list[tuple[Text, Tag]] = []
    size = 0
    for text, tag in texts:
        batch.append((text, tag))
        size += len(text)
        if size >= BATCH_BYTES or len(batch) == BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def answer_requests(tokenizer_file: str):
    """Tokenise what stdin asks for until it ends, in a process of its own."""
    from tokenizers import Tokenizer

    # Ctrl-C reaches the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.encode_special_tokens = True
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while header := stdin.read(4):
        sizes = np.frombuffer(stdin.read(8 * int.from_bytes(header, "little")), dtype="<u8")
        texts = [stdin.read(int(size)).decode("utf-8") for size in sizes]
        rows = [row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        stdout.write(np.array([len(row) for row in rows], dtype="<u8").tobytes())
        for row in rows:
            stdout.write(np.array(row, dtype="<u4").tobytes())
        stdout.flush()


if __name__ == "__main__":
    answer_requests(sys.argv[1])
