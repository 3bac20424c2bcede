"""A Trainer that runs on machines without accelerate, too."""

import sys
from types import SimpleNamespace

import pytest

from tests.integrations import accelerate_stand_in


@pytest.fixture(scope="module")
def hf():
    """Trainer and its arguments, on a stand-in for one process where accelerate is not installed."""
    pytest.importorskip("transformers")
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM, modeling_utils  # noqa: F401
    from transformers.utils.import_utils import is_accelerate_available

    with pytest.MonkeyPatch.context() as patch:
        stands_in = accelerate_stand_in.put_in_place()
        if stands_in:
            is_accelerate_available.cache_clear()
            patch.setattr(modeling_utils, "is_accelerate_available", lambda *_: False)
            for name in ("training_args", "trainer_pt_utils"):  # imported without it
                sys.modules.pop(f"transformers.{name}", None)
        from transformers.trainer import Trainer
        from transformers.training_args import TrainingArguments

        from saf.integrations.transformers.trainer import join_trainers

        join_trainers()  # an import that found no accelerate left that out
        yield SimpleNamespace(Trainer=Trainer, TrainingArguments=TrainingArguments)
        if stands_in:
            accelerate_stand_in.take_away()
            is_accelerate_available.cache_clear()
