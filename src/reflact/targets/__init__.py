"""The frozen agents whose instructions are the skill."""

from __future__ import annotations
