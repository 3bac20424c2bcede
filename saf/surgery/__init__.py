"""Editing a model in place: install and undo fixed patterns, with the optimiser's state carried along.

`edit` is the sequence that every edit goes through; `install` freezes heads, `prune` removes them; `undo` takes back
what was done to heads; `rows` and `optimizer` move weights and moments; `state` is what of it files hold.
"""

from saf.surgery.edit import check_editable
from saf.surgery.install import install_, pattern_parameters
from saf.surgery.prune import prune_
from saf.surgery.state import adopt_, apply_, load_weights_, resize_, restore_, state_of
from saf.surgery.undo import finalize_, uninstall_

__all__ = [
    "adopt_",
    "apply_",
    "check_editable",
    "finalize_",
    "install_",
    "load_weights_",
    "pattern_parameters",
    "prune_",
    "resize_",
    "restore_",
    "state_of",
    "uninstall_",
]
