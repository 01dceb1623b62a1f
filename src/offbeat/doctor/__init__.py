"""Diagnosis of a machine, and of the links between the ranks of a run: ``offbeat doctor``.

Each check is a :class:`Finding` with a verdict and, unless all is well, a fix.
"""

from offbeat.doctor.finding import Finding, Report

__all__ = ["Finding", "Report"]
