"""What shapes the attention of another library's model beside its weights, to tell a model that attends otherwise."""

import json
from typing import Any

from torch import nn

SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")


def attention_settings(model: nn.Module) -> dict[str, Any]:
    """Return those of a model's configuration that it has, as plain values for JSON."""
    settings = model.config.to_dict() if hasattr(model, "config") else {}  # type: ignore[operator, union-attr]
    return json.loads(json.dumps({name: settings[name] for name in SETTINGS if name in settings}))


def differing_settings(model: nn.Module, saved: dict[str, Any]) -> list[str]:
    """Return "name: here, saved there" for every setting that is another one; earlier files have saved none."""
    own = attention_settings(model)
    return [
        f"{name}: {own[name]}, saved {value}" for name, value in saved.items() if name in own and own[name] != value
    ]
