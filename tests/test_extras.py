"""The library alone: freezing, saving and undoing in a loop of one's own need no extras; commands name theirs."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, tempfile
import torch, torch._dynamo

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tyro", "rich", "tokenizers", "tensorboard", "datasets", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import saf
from saf.cli import main

model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(64, (4, 33))
model(tokens[:, :-1], tokens[:, 1:]).backward()
optimizer.step()
print(saf.freeze_(model, [tokens[:, :32]], saf.FreezeConfig(rate=0.25, max_fit_kl=9), optimizer=optimizer))
with tempfile.TemporaryDirectory() as folder:
    saf.save(model, folder + "/saved")
    saf.load(folder + "/saved")
saf.uninstall_(model, optimizer=optimizer)
assert main(["--help"]) == 0
assert main(["pretrain", "--help"]) == 2
"""


def test_the_library_needs_no_extra_and_commands_name_theirs():
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 of 16 heads frozen" in done.stdout
    assert "needs the package tyro, which is not installed: pip install 'saf[cli]'" in done.stderr
