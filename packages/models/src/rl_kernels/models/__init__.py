"""Whole models: ``invariant`` makes a model batch-invariant, ``audit`` finds where its output depends on the batch."""

from rl_kernels.models.audits import AuditResult, Finding, audit
from rl_kernels.models.head import head_logp
from rl_kernels.models.invariance import Invariance, invariant
from rl_kernels.models.master_weights import MasterWeights
from rl_kernels.models.sequences import sequence_logp

__all__ = ["AuditResult", "Finding", "Invariance", "MasterWeights", "audit", "head_logp", "invariant", "sequence_logp"]
