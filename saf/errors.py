"""The errors `saf` raises on purpose; every message says what was expected, what came and what to do."""


class SafError(Exception):
    """Base of every error raised on purpose by `saf`."""


class SafWarning(UserWarning):
    """A call did less than it was asked to, or has a consequence to know of; commands tell it as a plain line."""


class InputError(SafError, ValueError):
    """An argument, shape or setting that cannot be used."""


class DataError(SafError, ValueError):
    """Text, token shards or a tokenizer that cannot be used."""


class CheckpointError(SafError):
    """A checkpoint or sidecar that is missing, damaged or belongs to something else."""


class SelectionError(SafError, ValueError):
    """A replacement rate that cannot be attained."""


class UnsupportedError(SafError):
    """A model, backend or device that cannot do what was asked."""


class DivergenceError(SafError):
    """A loss or gradient that is no longer finite."""


class AccuracyError(SafError):
    """A result further from the float64 answer than its budget allows."""


class CompareError(SafError, ValueError):
    """Two arms that cannot be compared."""
