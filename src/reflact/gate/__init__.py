"""The gate: whether a candidate replaces the current skill.

``ranked_decision`` decides under ``gate.policy: ranked``. ``paired_decision`` decides under ``paired`` and ``strict``, and
for every target that repeats itself.
"""
