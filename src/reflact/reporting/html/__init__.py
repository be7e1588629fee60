"""Results as documents: HTML pages that stand for themselves and need no network."""
