"""What an import loads and leaves alone, and that the library alone needs no extras; commands name theirs."""

import subprocess
import sys
from pathlib import Path

import pytest

LAZY = """
import random, sys, numpy
import saf
assert "torch" not in sys.modules and saf.__version__
from saf.models import GPT
assert "saf.optimizer_state" in sys.modules and "saf.public" not in sys.modules
assert set(dir(saf)) == {"__version__", *saf.__all__}
import torch

def state():
    return (random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes(),
            torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.nn.attention.current_flash_attention_impl())

before = state()
assert saf.GPT is GPT
import saf.train
saf.GPT.skip_init(saf.preset("tiny", vocab_size=8))
from saf import *
assert ops.__name__ == "saf.ops" and fit.__name__ == "saf.fit"
assert state() == before
assert not torch.cuda.is_initialized()
absent = ("triton", "transformers", "datasets", "tensorboard", "torch._dynamo", "torch.distributed.fsdp")
assert not [name for name in absent if name in sys.modules]
"""
WITHOUT_EXTRAS = """
import sys, tempfile
import torch, torch._dynamo

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tyro", "rich", "tokenizers", "tensorboard", "datasets", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.modules["triton"] = None
import saf
from saf.cli import main

model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(64, (4, 33))
model(tokens[:, :-1], tokens[:, 1:]).backward()
optimizer.step()
print(saf.freeze_(model, [tokens[:, :32]], saf.FreezeConfig(rate=0.25, max_fit_kl=9), optimizer=optimizer))
model(tokens[:, :-1], tokens[:, 1:]).backward()
with tempfile.TemporaryDirectory() as folder:
    saf.save(model, folder + "/saved")
    saf.load(folder + "/saved")
saf.uninstall_(model, optimizer=optimizer)
assert main(["--help"]) == 0
assert main(["pretrain", "--help"]) == 2
"""


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds this repository's package."""
    root = Path(__file__).resolve().parents[1]
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)


def test_an_import_loads_what_it_needs_and_leaves_global_state_alone():
    done = run_fresh(LAZY)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pretrian"]])
def test_what_the_command_says_by_itself_needs_no_torch(arguments):
    done = run_fresh(
        f"import sys; from saf.cli import main; main({arguments}); print('torch' in sys.modules, file=sys.stderr)"
    )
    assert done.stderr.splitlines()[-1] == "False"


def test_the_library_needs_no_extra_and_commands_name_theirs():
    done = run_fresh(WITHOUT_EXTRAS)
    assert done.returncode == 0, done.stderr
    assert "4 of 16 heads frozen" in done.stdout
    assert "pip install 'saf[cli]'" in done.stderr
