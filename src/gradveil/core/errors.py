"""The errors gradveil raises. Each message says what was expected, what was received, and what to do."""


class GradveilError(Exception):
    """Base of every error that gradveil raises on purpose; the command line prints it without a traceback."""


class ParameterError(GradveilError, ValueError):
    """A parameter has the wrong type or lies outside its range."""


class InputError(GradveilError, ValueError):
    """Inputs, labels, gradients or a model do not fit each other or the operation."""


class NotFiniteError(InputError):
    """Gradients hold NaN or Inf: training has diverged, or the data is broken."""


class DataError(GradveilError):
    """A data file is missing, unreadable, truncated or not what it claims to be."""


class ThreatModelError(GradveilError):
    """An attack needs more than the threat model grants."""


class UnknownNameError(GradveilError, LookupError):
    """A defense, attack, dataset, model or parameter of that name does not exist."""


class OutputError(GradveilError):
    """Results cannot be written where they should go, or would overwrite others."""


class MissingPackageError(GradveilError, ImportError):
    """An optional feature was requested, but its packages are not installed."""


class PluginError(GradveilError):
    """A plugin, a file or an installed package, is broken or missing."""


class WorkerError(GradveilError):
    """A process that does a part of the work has ended, or cannot be started."""
