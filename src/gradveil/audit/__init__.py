"""Runs the grid of defenses, attacks and victims, keeps every finished row, and resumes where it stopped."""

from gradveil.audit.config import AuditConfig, read_config
from gradveil.audit.run import Step, default_folder, run
from gradveil.core.extras import AUDIT, require

__all__ = ["AuditConfig", "Step", "default_folder", "read_config", "run"]

require("gradveil.audit", AUDIT)  # now and not after hours of work
