import subprocess
import sys

import pytest

FROZEN_HEADS = """
import torch
pattern = saf.CompactPattern.from_parameters(torch.randn(2, 16).double(), torch.randn(2, 16).double())
frozen = saf.FrozenHeads.from_patterns(pattern, backend={backend!r}, dtype=torch.float64, device="cpu")
output = saf.frozen_attention(torch.ones(1, 2, 16, 4, dtype=torch.float64), frozen)
torch.testing.assert_close(output, torch.ones_like(output))
"""


def run_fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_saf_loads_no_optional_package_and_leaves_cuda_alone():
    loaded = "[name for name in ('triton', 'transformers', 'datasets', 'tensorboard') if name in sys.modules]"
    code = f"import sys, saf; saf.GPT; print({loaded}); import torch; print(torch.cuda.is_initialized())"
    assert run_fresh(code).split() == ["[]", "False"]


def test_a_model_to_be_filled_and_training_load_neither_the_compiler_nor_what_shards_need():
    made = "from saf.models import GPT, preset; GPT.undrawn(preset('tiny', vocab_size=8))"
    loaded = "[name for name in ('torch._dynamo', 'torch.distributed.fsdp') if name in sys.modules]"
    assert run_fresh(f"import sys, saf.train; {made}; print({loaded})") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pretrian"]])
def test_what_the_command_says_by_itself_needs_no_torch(arguments):
    code = f"import sys; from saf.cli import main; main({arguments}); print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "False"


def test_public_names_load_when_the_first_is_used():
    code = """
import sys, saf
assert 'torch' not in sys.modules and saf.__version__
assert set(dir(saf)) == {'__version__', *saf.__all__}
assert saf.GPT is __import__('saf.models', fromlist=['GPT']).GPT
try:
    saf.nothing
except AttributeError as error:
    print(error)
"""
    assert run_fresh(code) == "module 'saf' has no attribute 'nothing'"
    assert run_fresh("from saf import *; print(GPT.__name__, fit.__name__)") == "GPT saf.fit"
    assert run_fresh("import saf.heads; print(saf.ops.__name__)") == "saf.ops"


def test_import_saf_leaves_global_state_alone():
    code = """
import random, numpy, torch
def state():
    return (random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes(),
            torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision())
before = state()
import saf
saf.GPT
print(state() == before)
"""
    assert run_fresh(code) == "True"


@pytest.mark.parametrize("backend", ["reference", "toeplitz"])
def test_backends_work_without_optional_packages(backend):
    blocked = "import sys\nfor name in ('triton', 'transformers', 'datasets'): sys.modules[name] = None\nimport saf\n"
    run_fresh(blocked + FROZEN_HEADS.format(backend=backend))
