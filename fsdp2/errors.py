"""The exceptions of fsdp2. Ground layer: imports nothing.

Every error of the library derives from `FSDPError`, and also from the built-in type that client code of torch's FSDP2
may already catch. A message names the FQN, what was passed or found, what was expected, and what to do.
"""


class FSDPError(Exception):
    """Base class of all errors that fsdp2 raises deliberately."""


class ArgumentError(FSDPError, ValueError):
    """An argument has a value that cannot work."""


class OrderError(FSDPError, RuntimeError):
    """A call was made at a time when it cannot work."""


class MisuseError(FSDPError, AssertionError):
    """A module was used in a way that is not allowed, such as sharding it twice or pickling a sharded module."""


class UnsupportedError(FSDPError, NotImplementedError):
    """This version does not support what was requested."""


class CollectiveError(FSDPError, RuntimeError):
    """Communication with the other ranks failed; the message names the unit and this rank."""


class StepError(FSDPError, RuntimeError):
    """A rank failed in a step under `agree_on_step`. All ranks have discarded the step and can run the next one."""


class CheckpointError(FSDPError, RuntimeError):
    """A checkpoint could not be written or read; the message names the folder or file, and the rank that failed."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced or deleted while it was read. It is not damaged, but tensors may be partly filled."""


class CorruptError(CheckpointError):
    """Files of a checkpoint are damaged or differ from those in its manifest; their contents cannot be trusted."""


class MismatchError(CheckpointError):
    """A checkpoint does not match what it is loaded into: missing or unexpected names, other shapes or dtypes."""
