"""The package's own exceptions; arguments that are wrong raise TypeError and ValueError."""


class HobbitError(RuntimeError):
    """Something about offloaded experts failed at run time, said in one sentence."""


class Cancelled(HobbitError):
    """Llama.cancel() ended the call."""
