"""Where tasks come from and how they are judged."""

from __future__ import annotations
