"""Try to break the guarantee of the run in front of us."""

from lowkey.audit.mechanism import mechanism
from lowkey.audit.result import AuditResult, Check, Finding
from lowkey.audit.sampler import sampler

__all__ = ["AuditResult", "Check", "Finding", "mechanism", "sampler"]
