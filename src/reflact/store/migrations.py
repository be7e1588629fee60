"""The database's schema as numbered steps. Released steps never change; a change is a new step at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Migration:
    """One step: its name, which the database keeps as a receipt, and its SQL statements."""

    name: str
    sql: str


FIRST = """
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    config TEXT NOT NULL,
    created TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    status TEXT,
    reason TEXT,
    summary TEXT,
    seconds REAL NOT NULL DEFAULT 0
);

CREATE TABLE skills (
    hash TEXT PRIMARY KEY,
    text TEXT NOT NULL
);

CREATE TABLE steps (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    step INTEGER NOT NULL,
    record TEXT,
    state TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (run_id, step)
);

CREATE TABLE journal (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    step INTEGER NOT NULL,
    label TEXT NOT NULL,
    value TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (run_id, step, label)
);

CREATE TABLE events (
    sequence INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    id TEXT NOT NULL,
    event TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    UNIQUE (run_id, id)
);

CREATE TABLE replies (
    key TEXT PRIMARY KEY,
    run_id TEXT NOT NULL,
    reply TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

CREATE TABLE rollouts (
    key TEXT PRIMARY KEY,
    rollout TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    key TEXT NOT NULL,
    sample TEXT NOT NULL,
    role TEXT NOT NULL,
    purpose TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'settled', 'unsettled')),
    calls INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    usd REAL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

CREATE INDEX calls_by_run ON calls (run_id, key);
"""

COMMITS = """
CREATE TABLE commits (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    number INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('first', 'step', 'epoch', 'promotion')),
    step INTEGER NOT NULL,
    record TEXT,
    state TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (run_id, number)
);

INSERT INTO commits (run_id, number, kind, step, record, state, at)
SELECT
    run_id,
    step + 1,
    iif(record IS NULL, 'first', 'step'),
    step,
    json_set(
        json_remove(
            record, '$.skill_after', '$.version_after', '$.score_after', '$.best_hash', '$.best_score'
        ),
        '$.current', json_extract(state, '$.current'),
        '$.best', json_extract(state, '$.best'),
        '$.made', iif(
            json_extract(record, '$.verdict.action') IN ('accept', 'accept_new_best', 'force_accept'),
            json_array(json_extract(state, '$.current')),
            json_array()
        )
    ),
    json_set(state, '$.commits', step + 1),
    at
FROM steps;

DROP TABLE steps;

CREATE TABLE stage_times (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    stage TEXT NOT NULL,
    seconds REAL NOT NULL,
    PRIMARY KEY (run_id, stage)
);
"""

WORST_CASES = """
ALTER TABLE calls ADD COLUMN uncounted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN worst_calls INTEGER NOT NULL DEFAULT 1;
ALTER TABLE calls ADD COLUMN worst_input_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN worst_output_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN worst_usd REAL;
"""

FAULTS = """
CREATE TABLE faults (
    run_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (run_id, kind)
);
"""

MIGRATIONS = (
    Migration("0001_runs_and_effects", FIRST),
    Migration("0002_commits", COMMITS),
    Migration("0003_worst_cases", WORST_CASES),
    Migration("0004_faults", FAULTS),
)
