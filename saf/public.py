"""The public names: what `import saf` offers, loaded when the first of them is used.

A name that is added or taken away here changes tests/test_public.py, which lists them all.
"""

from saf import fit, ops
from saf.calibration import QKGradient, calibrate, gate_gradients, head_outputs
from saf.errors import SafError
from saf.exponential_fit import fit_exponential
from saf.fit import fit_compact, fit_kl
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.frozen_state import storage_report
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT, GPTConfig, preset
from saf.ops import FrozenHeads, frozen_attention, mixed_attention
from saf.patterns import CompactPattern, DensePattern, ExponentialPattern
from saf.prefill import Prefill
from saf.saving import load, save
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget
from saf.scores import score
from saf.selection import select
from saf.statistics import AttentionStatistics
from saf.surgery import finalize_, install_, prune_, uninstall_
from saf.targets import dense_pattern

__all__ = [
    "GPT", "AttentionStatistics", "CompactPattern", "DensePattern", "ExponentialPattern", "FreezeConfig",
    "FreezeReport", "FrozenHeads", "GPTConfig", "Gradual", "HeadLayout", "HeadSet", "OneTime", "Prefill",
    "QKGradient", "SafError", "TrainLoss", "ValidationBudget", "calibrate", "dense_pattern", "finalize_", "fit",
    "fit_compact", "fit_exponential", "fit_kl", "freeze_", "frozen_attention", "gate_gradients", "head_outputs",
    "install_", "load", "mixed_attention", "ops", "preset", "prune_", "save", "score", "select", "storage_report",
    "uninstall_",
]  # fmt: skip
