"""Freeze a quarter of the heads in an FSDP2 loop of your own: `torchrun --nproc-per-node 2 FILE [FOLDER]`.

A sharded copy of `whole` is trained. An event gathers it into `whole`, freezes heads, and shards a new copy.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard

import saf

LENGTH, UPDATES = 64, 20
FULL = dcp.StateDictOptions(full_state_dict=True, strict=False)  # weights without elements (below) have no state
distributed.init_process_group("gloo")  # yours: "nccl", and `whole` on the GPU of the process
rank, processes = distributed.get_rank(), distributed.get_world_size()
text = torch.tensor(list(Path(__file__).read_bytes())).repeat(8)  # yours: token ids, one a byte here
windows = text.unfold(0, LENGTH + 1, LENGTH + 1)
training, calibration = windows[8:], windows[:8, :LENGTH]  # calibrate on text that is not trained on


def optimizer_of(model, state=None):
    """Return a new optimiser, with a gathered state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state:
        dcp.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    return optimizer


def shard(whole, state=None):
    """Return a sharded copy of the model, and its optimiser with the state of `whole`'s."""
    model = copy.deepcopy(whole)
    empty = {each.requires_grad_(False) for each in model.parameters() if not each.numel()}  # all heads frozen
    for block in model.blocks:
        fully_shard(block, ignored_params=empty)
    return fully_shard(model, ignored_params=empty), optimizer_of(model, state)


torch.manual_seed(0)  # the same weights and rows in every process
whole = saf.GPT(saf.preset("tiny", vocab_size=256, max_length=LENGTH))
model, optimizer = shard(whole)
for update in range(UPDATES):
    if update == UPDATES // 2:  # every process makes the same calls
        whole.load_state_dict(dcp.get_model_state_dict(model, options=FULL))
        own = optimizer_of(whole, dcp.get_optimizer_state_dict(model, optimizer, options=FULL))
        report = saf.freeze_(whole, [calibration], saf.FreezeConfig(rate=0.25, max_fit_kl=1.0), optimizer=own)
        model, optimizer = shard(whole, dcp.get_optimizer_state_dict(whole, own, options=FULL))
    batch = training[torch.randint(len(training), (processes, 4))[rank]]
    model(batch[:, :-1], batch[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
whole.load_state_dict(dcp.get_model_state_dict(model, options=FULL))
if rank == 0:
    print(report)
    saf.save(whole, sys.argv[1] if len(sys.argv) > 1 else "frozen")
distributed.destroy_process_group()
