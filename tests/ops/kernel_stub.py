"""Stands in for a Triton kernel where none can run: counts compilations, and records how compiled ones are called."""


class Kernel:
    """A kernel with the given parameters."""

    def __init__(self, *arg_names: str):
        self.arg_names = arg_names
        self.asked = []
        self.direct = []

    @property
    def compiled(self) -> int:
        """How often Triton had to look at the arguments."""
        return len(self.asked)

    def __getitem__(self, grid):
        def first(*args, **constants):
            self.asked.append(constants)
            return Compiled(self)

        return first


class Compiled:
    """What Triton compiled."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.direct.append((grid, args))
