"""The errors `saf` raises on purpose; every message says what was expected, what came and what to do."""


class SafError(Exception):
    """Stand at the base of every error raised on purpose by `saf`."""


class SafWarning(UserWarning):
    """Warn that a call did less than asked, or has a consequence to know of; commands tell it as a plain line."""


class InputError(SafError, ValueError):
    """Say that an argument, shape or setting cannot be used."""


class DataError(SafError, ValueError):
    """Say that text, token shards or a tokenizer cannot be used."""


class CheckpointError(SafError):
    """Say that a checkpoint or sidecar is missing, damaged or belongs to something else."""


class SelectionError(SafError, ValueError):
    """Say that a replacement rate cannot be attained."""


class UnsupportedError(SafError):
    """Say that a model, backend or device cannot do what was asked."""


class DivergenceError(SafError):
    """Say that a loss or gradient is no longer finite."""


class AccuracyError(SafError):
    """Say that a result is further from the float64 answer than its budget allows."""


class CompareError(SafError, ValueError):
    """Say that two arms cannot be compared."""
