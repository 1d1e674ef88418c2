"""Whole models: ``invariant`` makes one whose output does not depend on the batch, ``audit`` finds where one does."""

from rl_kernels.models.audits import AuditResult, Finding, audit
from rl_kernels.models.head import head_logp
from rl_kernels.models.invariance import Invariance, invariant

__all__ = ["AuditResult", "Finding", "Invariance", "audit", "head_logp", "invariant"]
