"""The corridor."""


class Trainer:
    """Trains a skill document."""
