"""How many examples a property test tries where the profile's number is not enough."""

from __future__ import annotations

from hypothesis import settings


def cases(thorough: int, dev: int = 50) -> settings:
    """Return settings for a test that tries ``thorough`` examples under that profile, else ``dev``."""
    chosen = thorough if settings.get_current_profile_name() == "thorough" else dev
    return settings(max_examples=chosen)
