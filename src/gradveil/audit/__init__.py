"""The grid defense x attack x victim: run it, keep every finished row, resume it."""

from gradveil.audit.config import AuditConfig, read_config
from gradveil.audit.run import Step, default_folder, run
from gradveil.core.extras import AUDIT, require

__all__ = ["AuditConfig", "Step", "default_folder", "read_config", "run"]

require("gradveil.audit", AUDIT)  # now and not after hours of work
