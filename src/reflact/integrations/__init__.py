"""Connections to other tools."""

from __future__ import annotations
