"""Converts configurations and skill documents of SkillOpt."""

from __future__ import annotations
