import random

import numpy as np
import torch

from mimatrix.profiler.rng_state import get_rng_state, set_rng_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_every_generator_continues_from_a_state_that_was_read() -> None:
    before = get_rng_state(CPU)
    numbers = draw()
    assert draw() != numbers
    set_rng_state(before, CPU)
    assert draw() == numbers
    set_rng_state(before, CPU)
