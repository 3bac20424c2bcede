"""What a Trainer asks of accelerate where one process trains on a CPU, for tests on machines without that package.

There accelerate passes models, batches and losses through; the wrappers of optimiser and scheduler are its own.
"""

import contextlib
import enum
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

import torch
from torch.utils.data import DataLoader


class DistributedType(enum.StrEnum):
    NO = "NO"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MULTI_GPU = "MULTI_GPU"


class PartialState:
    _shared_state: dict = {}  # noqa: RUF012
    distributed_type = DistributedType.NO
    device = torch.device("cpu")
    process_index = local_process_index = 0
    num_processes = 1
    is_main_process = is_local_main_process = True

    def __init__(self, **_):
        pass

    @classmethod
    def _reset_state(cls, **_):
        cls._shared_state.clear()

    def wait_for_everyone(self):
        pass


class AcceleratorState(PartialState):
    deepspeed_plugin = fsdp_plugin = None


class GradientState:
    sync_gradients = True
    end_of_dataloader = False
    remainder = -1
    plugin_kwargs: dict = {}  # noqa: RUF012

    def _set_sync_gradients(self, value):
        self.sync_gradients = value


class Optimizer(torch.optim.Optimizer):
    """As accelerate's: an optimiser by its class, whose own one lies inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)


class Accelerator:
    sync_gradients = True
    distributed_type = DistributedType.NO
    num_processes = 1
    optimizer_step_was_skipped = False
    scaler = parallelism_config = None
    is_main_process = True

    def __init__(self, **_):
        self.state, self.gradient_state, self._models = AcceleratorState(), GradientState(), []

    def prepare(self, *given):
        done = [self._prepare(one) for one in given]
        return done[0] if len(done) == 1 else tuple(done)

    def _prepare(self, one):
        if isinstance(one, torch.nn.Module):
            return self.prepare_model(one)
        return Optimizer(one) if isinstance(one, torch.optim.Optimizer) and type(one) is not Optimizer else one

    def prepare_model(self, model, **_):
        self._models.append(model)
        return model

    def unwrap_model(self, model, keep_torch_compile=True):
        return model

    def backward(self, loss, **_):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm, norm_type=2):
        return torch.nn.utils.clip_grad_norm_(parameters, norm, norm_type)

    def gather_for_metrics(self, data):
        return data

    gather = reduce = gather_for_metrics

    def pad_across_processes(self, data, **_):
        return data

    def free_memory(self, *given):
        return given

    def end_training(self):
        pass

    def wait_for_everyone(self):
        pass

    def no_sync(self, model):
        return contextlib.nullcontext()

    def maybe_context_parallel(self, **_):
        return contextlib.nullcontext()


class _Settings:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class _Skipped(torch.utils.data.Sampler):
    def __init__(self, batches, count):
        self.batches, self.count = batches, count

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number >= self.count:
                yield batch

    def __len__(self):
        return len(self.batches) - self.count


def skip_first_batches(loader, num_batches=0):
    return DataLoader(
        loader.dataset,
        batch_sampler=_Skipped(loader.batch_sampler, num_batches),
        collate_fn=loader.collate_fn,
        generator=loader.generator,
    )


def _refused(*_, **__):
    raise NotImplementedError("this stand-in of accelerate is for one process on a CPU")


def put_in_place() -> bool:
    """Put the stand-in where accelerate would be; return False, and do nothing, where accelerate is installed."""
    if importlib.util.find_spec("accelerate") is not None:
        return False
    utils = {
        "DataLoaderConfiguration": _Settings,
        "DistributedDataParallelKwargs": _Settings,
        "DistributedType": DistributedType,
        "GradientAccumulationPlugin": _Settings,
        "release_memory": lambda *given: given,
        **dict.fromkeys(("load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"), _refused),
    }
    names = {
        "accelerate": {"Accelerator": Accelerator, "skip_first_batches": skip_first_batches, "__version__": "1.1.0"},
        "accelerate.state": {"AcceleratorState": AcceleratorState, "PartialState": PartialState},
        "accelerate.utils": utils,
        "accelerate.utils.memory": {
            "clear_device_cache": lambda *_, **__: None,
            "should_reduce_batch_size": lambda *_: False,
        },
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__spec__, module.__file__, module.__path__ = ModuleSpec(name, None, is_package=True), __file__, []
        vars(module).update(members)
        sys.modules[name] = module
    return True


def take_away() -> None:
    """Remove the stand-in again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]
