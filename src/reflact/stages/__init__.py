"""The six stages of a step, the updates at the end of an epoch, and the statistics of the final test."""
