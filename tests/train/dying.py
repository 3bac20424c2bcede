"""Train as one of the processes that torchrun started, of which the second fails before an update."""

import json
import sys

import saf.train.loop as loop
from saf.machine.processes import is_first
from saf.train import TrainConfig, pretrain

settings = TrainConfig.from_dict(json.loads(sys.argv[1]))
real = loop.run_update


def failing(run):
    if run.update + 1 == 3 and not is_first():
        raise RuntimeError("the power of this node is gone")
    return real(run)


loop.run_update = failing
pretrain(settings)
