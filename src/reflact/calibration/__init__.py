"""Calibration: a critic that learns from contrasts of right and wrong evaluations, and is measured."""
