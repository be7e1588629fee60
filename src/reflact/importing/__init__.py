"""Reads what another trainer left behind: its configurations and the folders of its runs."""

from __future__ import annotations
