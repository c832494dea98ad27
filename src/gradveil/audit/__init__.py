"""Runs the grid of defenses, attacks and victims, keeps every finished row, and resumes where it stopped."""

from gradveil.audit.config import AuditConfig, read_config
from gradveil.audit.plan import Plan
from gradveil.audit.run import Step, default_folder, make_plan, run
from gradveil.core.extras import AUDIT, require

__all__ = ["AuditConfig", "Plan", "Step", "default_folder", "make_plan", "read_config", "run"]

require("gradveil.audit", AUDIT)  # now and not after hours of work
