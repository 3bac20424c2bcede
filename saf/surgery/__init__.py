"""Editing a model in place: install and undo fixed patterns, with the optimiser's state carried along."""

from saf.surgery.apply import apply_
from saf.surgery.install import install_
from saf.surgery.pattern_group import pattern_parameters
from saf.surgery.state import restore_, state_of
from saf.surgery.uninstall import finalize_, uninstall_
from saf.surgery.weight_sums import weight_sums

__all__ = ["apply_", "finalize_", "install_", "pattern_parameters", "restore_", "state_of", "uninstall_", "weight_sums"]
