"""The six doors of a step, and the final test."""
