"""What stands in two splits of a data set: near-duplicates, in any key and with small edits, and shared n-grams."""

from __future__ import annotations

from deeprnn.data.audit.report import Audit, audit

__all__ = ["Audit", "audit"]
