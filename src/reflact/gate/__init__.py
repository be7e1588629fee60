"""The gate: whether a candidate replaces the current skill.

``ranked_decision`` holds the beliefs of ``gate.policy: ranked``. ``greater_mean`` has the rule for
``strict``, and for targets whose repeats never disagreed.
"""
