"""The one door to models, and the transports below it."""
