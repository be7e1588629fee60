"""The schema of the database: runs, the journal, and the memory's pairs, tests and traces."""

from __future__ import annotations

from sqlite_utils import Database, Migrations

CURRENT_TIME = "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))"

RUN_TABLES = f"""
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    config TEXT NOT NULL,
    created TEXT NOT NULL DEFAULT {CURRENT_TIME},
    status TEXT,
    reason TEXT,
    summary TEXT,
    seconds REAL NOT NULL DEFAULT 0,
    owners INTEGER NOT NULL DEFAULT 0,
    owner TEXT
);

CREATE TABLE outcomes (
    kind TEXT NOT NULL,
    run_id TEXT NOT NULL DEFAULT '',
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    checksum TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME},
    PRIMARY KEY (kind, run_id, key)
);

CREATE TABLE commits (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    number INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('first', 'step', 'epoch', 'promotion')),
    step INTEGER NOT NULL,
    record TEXT NOT NULL,
    checksum TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME},
    PRIMARY KEY (run_id, number)
);

CREATE TABLE stage_times (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    step INTEGER NOT NULL,
    stage TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (run_id, step, stage)
);

CREATE TABLE faults (
    run_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (run_id, kind)
);

CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    key TEXT NOT NULL,
    call_id TEXT NOT NULL,
    role TEXT NOT NULL,
    purpose TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    model TEXT NOT NULL,
    step INTEGER NOT NULL,
    stage TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'settled', 'unsettled')),
    calls INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    uncounted INTEGER NOT NULL DEFAULT 0,
    billionths INTEGER,
    worst_calls INTEGER NOT NULL,
    worst_input_tokens INTEGER NOT NULL,
    worst_output_tokens INTEGER NOT NULL,
    worst_billionths INTEGER,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME}
);

CREATE INDEX calls_by_run ON calls (run_id, key);
"""

MEMORY_TABLES = f"""
CREATE TABLE memory_pairs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL
        CHECK (status IN ('quarantined', 'promoted', 'rejected', 'archived')),
    reason TEXT,
    failed_test INTEGER NOT NULL DEFAULT 0,
    utility REAL NOT NULL DEFAULT 0.5,
    changed_at TEXT NOT NULL,
    subject TEXT NOT NULL,
    pair TEXT NOT NULL,
    words TEXT NOT NULL
);

CREATE INDEX memory_pairs_by_status ON memory_pairs (status, id);
CREATE INDEX memory_pairs_by_subject ON memory_pairs (subject);
CREATE INDEX memory_pairs_weakest ON memory_pairs (
    failed_test DESC, utility, status = 'promoted', changed_at, number
) WHERE status IN ('quarantined', 'promoted');

CREATE TABLE memory_tests (
    number INTEGER PRIMARY KEY,
    test TEXT NOT NULL
);

CREATE TABLE memory_anchors (
    id TEXT PRIMARY KEY,
    subject TEXT NOT NULL,
    pair TEXT NOT NULL
);

CREATE INDEX memory_anchors_by_subject ON memory_anchors (subject);

CREATE TABLE memory_origins (
    owner TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    step INTEGER
);

CREATE UNIQUE INDEX memory_origins_by_owner ON memory_origins (owner, trace_id, coalesce(step, -1));
CREATE INDEX memory_origins_by_trace ON memory_origins (trace_id);

CREATE TABLE traces (
    id TEXT PRIMARY KEY,
    purpose TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME}
);

CREATE INDEX traces_by_content ON traces (content_hash);

CREATE TABLE trace_events (
    trace_id TEXT NOT NULL REFERENCES traces (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    event TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME},
    PRIMARY KEY (trace_id, step)
);

CREATE TABLE calibrations (
    identity TEXT PRIMARY KEY,
    baseline TEXT NOT NULL,
    result TEXT,
    at TEXT NOT NULL DEFAULT {CURRENT_TIME}
);
"""

SCHEMA = Migrations("reflact")


@SCHEMA(name="0001_schema")
def create_tables(tables: Database) -> None:
    """Create all tables; from the first release on, each change is a migration of its own with the
    next number.
    """
    # Not by ``executescript``, which tests each character and takes 20 ms.
    for statement in f"{RUN_TABLES}{MEMORY_TABLES}".split(";\n"):
        tables.execute(statement)
    tables.table("memory_pairs").enable_fts(["words"], tokenize="trigram", create_triggers=True)
