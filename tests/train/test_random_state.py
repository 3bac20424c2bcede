import json
import random

import numpy as np
import torch

from saf.train.checkpoint import capture_random_state, restore_random_state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_every_generator_repeats_itself():
    original = capture_random_state()
    try:
        random.gauss(0, 1)
        np.random.randn()
        state = json.loads(json.dumps(capture_random_state()))
        first = draw()
        draw()
        restore_random_state(state)
        assert draw() == first
    finally:
        restore_random_state(original)
