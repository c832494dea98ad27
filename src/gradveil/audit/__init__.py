"""The grid defense x attack x victim: run it, keep every finished row, resume it."""

from gradveil.audit.config import AuditConfig, read_config
from gradveil.audit.run import Step, default_folder, run

__all__ = ["AuditConfig", "Step", "default_folder", "read_config", "run"]
