"""Symmetric memory."""

from __future__ import annotations

IF_AVAILABLE = "if_available"
