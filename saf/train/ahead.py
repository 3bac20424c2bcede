"""Compiling ahead: the layouts that events may bring, by a process of its own that fills the compiler's cache on disk.

A model compiled by layers compiles after an event what layouts are new in it, and nearly all of that time goes into
code for the device, which the compiler keeps on disk by what it is made of. So a process beside training makes the code
of a layer with each number of frozen heads; the event then only traces its layers. That process has the compiler's
settings as PyTorch and the environment give them: a program that changed some (`torch._inductor.config`) finds none.
`main` reads what to compile as JSON from standard input.
"""

import copyreg
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import saf
from saf.adapters import adapter_for
from saf.calibration.plan import readable
from saf.machine.execution import Execution
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.surgery import install_
from saf.train.run import Run

COMPILE_THREADS = 4
"""Of the compiler in that process: training goes on beside it, and needs the host for its launches."""
LOG = "compile_ahead.log"
"""What the process says, among a run's files; empty unless it failed."""
NICENESS = 10
"""How much the process yields to training where both want a core."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Hold what is compiled: a layer of a model, as updates of one micro-batch run it, with so many frozen heads."""

    model: GPTConfig
    length: int
    """Tokens of a window."""
    batch_size: int
    """Windows of a micro-batch."""
    execution: Execution
    kernel: str
    """Of live heads, as in `live_attention`."""
    backend: str
    """Of frozen heads."""
    trainable: bool
    """Whether patterns are trained."""
    frozen: tuple[int, ...]
    """Numbers of frozen heads, a layout each."""

    @property
    def bytes(self) -> int:
        """Return what the process will hold on a device at most: a layer's activations twice over, and a context."""
        # 45 bytes a token and channel is what a layer of an update keeps; CUDA and its
        # libraries take about a GiB in every process.
        return 2 * 45 * self.batch_size * self.length * self.model.hidden_size + (1 << 30)

    def to_json(self) -> str:
        """Return it as the process reads it."""
        execution = {**asdict(self.execution), "device": str(self.execution.device)}
        return json.dumps({**asdict(self), "execution": execution})

    @classmethod
    def from_json(cls, text: str) -> "Layouts":
        """Build from `to_json`'s form."""
        values: dict[str, Any] = json.loads(text)
        execution = {**values["execution"], "device": torch.device(values["execution"]["device"])}
        made = {"model": GPTConfig(**values["model"]), "execution": Execution(**execution)}
        return cls(**{**values, **made, "frozen": tuple(values["frozen"])})

    def compile(self) -> None:
        """Compile the forward and the backward pass of a layer with each number of frozen heads, by running both."""
        device = self.execution.device
        shape = replace(self.model, num_layers=1)
        for count in self.frozen:
            model = GPT.undrawn(shape, device)
            model.reset_parameters()
            for site in adapter_for(model).sites():
                site.pin(self.kernel)
            flat = torch.zeros(count, self.length)
            heads = [(0, head) for head in range(count)]
            pattern = CompactPattern.from_parameters(flat, flat)
            install_(model, heads, pattern, backend=self.backend, trainable=self.trainable)
            layers = adapter_for(model).compiled_by_layer(
                activation_checkpointing=self.execution.activation_checkpointing
            )
            ids = torch.zeros(self.batch_size, self.length, dtype=torch.long, device=device)
            with self.execution.autocast():
                streams = layers.hidden(ids)
            torch.autograd.backward(streams, [torch.ones_like(stream) for stream in streams])


def start(layouts: Layouts, log: Path) -> subprocess.Popen[str]:
    """Begin the process and return it; what it says goes to `log`, and its compiler's cache is this process's.

    Its standard input stays open: when this process ends, however it does, so does that one.
    """
    _name_memory_formats()
    root = str(Path(saf.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    surroundings = {"PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", "from saf.train import ahead; ahead.main()"],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env={**os.environ, **surroundings},
        )
    assert process.stdin is not None
    process.stdin.write(layouts.to_json() + "\n")
    process.stdin.flush()
    return process


def _name_memory_formats() -> None:
    """Have memory formats pickled alike in this process and in the one that it begins, so that they share code.

    The compiler names code on disk by a pickle of what it was made for, memory formats of inputs among it. PyTorch
    leaves it to pickle to find these, as `torch.contiguous_format` of the first module imported that has a `torch`:
    another one in a program whose own module imported PyTorch first, and no code would be found.
    """
    copyreg.pickle(torch.memory_format, lambda named: (_memory_format, (str(named).removeprefix("torch."),)))


def _memory_format(name: str) -> torch.memory_format:
    """Return the memory format of a name, such as "channels_last"."""
    return getattr(torch, name)


class CompilingAhead:
    """Have the process beside a run, once; nothing where its settings do not ask for it or no event is to come."""

    def __init__(self):
        self._asked = False
        self._process: subprocess.Popen[str] | None = None

    def begin(self, run: Run) -> None:
        """Begin in a run's first process, unless it was asked before or the device has too little memory left."""
        if self._asked:
            return
        self._asked = True
        if not (run.config.compile_ahead and run.observer and run.proposer and not run.proposer.finished):
            return
        layouts, device = layouts_of(run), run.execution.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        if free is not None and free < layouts.bytes:
            run.say(
                f"nothing is compiled ahead: it takes {readable(layouts.bytes)}, the device has {readable(free)} left"
            )
            return
        self._process = start(layouts, run.folder / LOG)

    def stop(self) -> None:
        """End the process if it still runs; what it compiled so far stays on disk."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def layouts_of(run: Run) -> Layouts:
    """Return the layouts that a run's events may bring: layers with one frozen head, two, up to all of them."""
    freeze = run.config.freeze
    assert freeze is not None
    return Layouts(
        model=run.model.config,
        length=run.task.length,
        batch_size=run.config.batch_size,
        execution=run.execution,
        kernel=run.config.kernel,
        backend=freeze.backend,
        trainable=freeze.trainable,
        frozen=tuple(range(1, run.model.config.num_heads + 1)),
    )


def main() -> None:
    """Compile what the first line of standard input asks for; end at once when it is closed."""
    os.nice(NICENESS)
    _name_memory_formats()
    layouts = Layouts.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    layouts.compile()


def _end_with_input() -> None:
    """Wait until nobody can write to standard input any more, and end this process with its threads."""
    # Not by sys.stdin, whose lock this thread would hold while the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
