"""Where runs are kept: one SQLite file, and a lock for each run's folder."""
