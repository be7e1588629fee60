"""Rollouts in workers of Ray, on this machine or a cluster."""
