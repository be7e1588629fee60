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

MEMORY = """
CREATE TABLE memory_units (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    pair TEXT,
    subject TEXT,
    scope TEXT NOT NULL,
    provenance TEXT NOT NULL,
    trace_id TEXT,
    status TEXT NOT NULL
        CHECK (status IN ('candidate', 'quarantined', 'promoted', 'rejected', 'archived')),
    reason TEXT,
    version INTEGER NOT NULL DEFAULT 1,
    trust REAL NOT NULL,
    utility REAL NOT NULL DEFAULT 0.5,
    created_by TEXT NOT NULL,
    created TEXT NOT NULL,
    changed TEXT NOT NULL
);

CREATE INDEX memory_units_by_status ON memory_units (status, id);
CREATE INDEX memory_units_by_trace ON memory_units (trace_id) WHERE trace_id IS NOT NULL;
CREATE INDEX memory_units_by_subject ON memory_units (subject) WHERE subject IS NOT NULL;
CREATE INDEX memory_units_weakest ON memory_units (
    kind, utility, status = 'promoted', trust, changed, number
) WHERE status IN ('candidate', 'quarantined', 'promoted');

CREATE TABLE memory_cards (
    id TEXT PRIMARY KEY,
    unit INTEGER NOT NULL REFERENCES memory_units (number) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);

CREATE INDEX memory_cards_by_unit ON memory_cards (unit);

CREATE VIRTUAL TABLE memory_words USING fts5 (tags, words, tokenize = "ascii tokenchars '_'");

CREATE TABLE memory_active (
    kind TEXT PRIMARY KEY,
    units INTEGER NOT NULL
);

CREATE TRIGGER memory_units_added AFTER INSERT ON memory_units
WHEN new.status IN ('candidate', 'quarantined', 'promoted')
BEGIN
    INSERT INTO memory_active (kind, units) VALUES (new.kind, 1)
    ON CONFLICT (kind) DO UPDATE SET units = units + 1;
END;

CREATE TRIGGER memory_units_removed AFTER DELETE ON memory_units
WHEN old.status IN ('candidate', 'quarantined', 'promoted')
BEGIN
    UPDATE memory_active SET units = units - 1 WHERE kind = old.kind;
END;

CREATE TRIGGER memory_units_moved AFTER UPDATE OF status ON memory_units
WHEN old.status IN ('candidate', 'quarantined', 'promoted')
    AND new.status NOT IN ('candidate', 'quarantined', 'promoted')
BEGIN
    UPDATE memory_active SET units = units - 1 WHERE kind = old.kind;
END;

CREATE TABLE memory_tests (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    held_out TEXT NOT NULL,
    before INTEGER NOT NULL,
    unit_ids TEXT NOT NULL,
    "use" TEXT NOT NULL CHECK ("use" IN ('promote', 'demote')),
    evidence TEXT,
    since INTEGER NOT NULL,
    at TEXT NOT NULL
);

CREATE INDEX memory_tests_by_set ON memory_tests (held_out);

CREATE TABLE memory_history (
    sequence INTEGER PRIMARY KEY,
    unit INTEGER NOT NULL REFERENCES memory_units (number) ON DELETE CASCADE,
    before TEXT,
    after TEXT NOT NULL,
    reason TEXT,
    test INTEGER REFERENCES memory_tests (number),
    version INTEGER NOT NULL,
    at TEXT NOT NULL
);

CREATE INDEX memory_history_by_unit ON memory_history (unit);

CREATE TABLE memory_anchors (
    id TEXT PRIMARY KEY,
    subject TEXT NOT NULL,
    trace_id TEXT,
    pair TEXT NOT NULL
);

CREATE INDEX memory_anchors_by_subject ON memory_anchors (subject);

CREATE TABLE traces (
    id TEXT PRIMARY KEY,
    purpose TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

CREATE TABLE trace_events (
    trace_id TEXT NOT NULL REFERENCES traces (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    event TEXT NOT NULL,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (trace_id, step)
);
"""

ORIGINS = """
CREATE TABLE memory_origins (
    unit INTEGER NOT NULL REFERENCES memory_units (number) ON DELETE CASCADE,
    trace_id TEXT NOT NULL,
    step INTEGER
);

CREATE INDEX memory_origins_by_unit ON memory_origins (unit);
CREATE INDEX memory_origins_by_trace ON memory_origins (trace_id, step);

INSERT INTO memory_origins (unit, trace_id, step)
SELECT number, trace_id, json_extract(provenance, '$.step') FROM memory_units WHERE trace_id IS NOT NULL;

DROP INDEX memory_units_by_trace;
ALTER TABLE memory_units DROP COLUMN trace_id;

CREATE TABLE memory_anchor_origins (
    anchor TEXT NOT NULL REFERENCES memory_anchors (id) ON DELETE CASCADE,
    trace_id TEXT NOT NULL,
    step INTEGER
);

CREATE INDEX memory_anchor_origins_by_anchor ON memory_anchor_origins (anchor);
CREATE INDEX memory_anchor_origins_by_trace ON memory_anchor_origins (trace_id, step);

INSERT INTO memory_anchor_origins (anchor, trace_id, step)
SELECT id, trace_id, json_extract(pair, '$.provenance.step') FROM memory_anchors WHERE trace_id IS NOT NULL;

ALTER TABLE memory_anchors DROP COLUMN trace_id;
"""

TESTED_TRACES = """
ALTER TABLE memory_tests ADD COLUMN traces TEXT;
DROP INDEX memory_tests_by_set;
"""

CALIBRATIONS = """
CREATE TABLE calibrations (
    number INTEGER PRIMARY KEY,
    identity TEXT NOT NULL,
    baseline TEXT NOT NULL,
    result TEXT,
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

CREATE INDEX calibrations_by_identity ON calibrations (identity, number);
"""

REFUSED = """
INSERT OR IGNORE INTO memory_refused (unit)
SELECT number FROM memory_units JOIN (
    SELECT value AS tested, max(at) AS last FROM memory_tests, json_each(unit_ids)
    WHERE evidence IS NOT NULL GROUP BY value
) ON tested = id WHERE status = 'quarantined' AND reason IS NULL AND last >= changed;
"""
"""Finds the units that a test has not shown to help, and that no test takes again as they are."""

REFUSED_UNITS = f"""
CREATE TABLE memory_refused (
    unit INTEGER PRIMARY KEY REFERENCES memory_units (number) ON DELETE CASCADE
);
{REFUSED}
"""

CONTENTS = """
ALTER TABLE traces ADD COLUMN content TEXT;
ALTER TABLE traces ADD COLUMN known INTEGER NOT NULL DEFAULT 0;
CREATE INDEX traces_by_content ON traces (content);

UPDATE traces SET known = (
    SELECT count(*) FROM trace_events
    WHERE trace_id = traces.id
    AND CASE WHEN json_valid(event) THEN json_extract(event, '$.gold.source') END <> 'agreement'
);
"""

TESTED_NAMES = """
ALTER TABLE memory_tests ADD COLUMN names TEXT NOT NULL DEFAULT '[]';
"""

TESTED_WORTH = """
UPDATE memory_units SET utility = (
    SELECT min(1.0, max(0.0, 0.5 + json_extract(evidence, '$.effect') / 20.0))
    FROM memory_tests, json_each(unit_ids)
    WHERE value = memory_units.id AND evidence IS NOT NULL ORDER BY memory_tests.number DESC LIMIT 1
)
WHERE id IN (SELECT value FROM memory_tests, json_each(unit_ids) WHERE evidence IS NOT NULL);
"""

MIGRATIONS = (
    Migration("0001_runs_and_effects", FIRST),
    Migration("0002_commits", COMMITS),
    Migration("0003_worst_cases", WORST_CASES),
    Migration("0004_faults", FAULTS),
    Migration("0005_memory", MEMORY),
    Migration("0006_origins", ORIGINS),
    Migration("0007_tested_traces", TESTED_TRACES),
    Migration("0008_calibrations", CALIBRATIONS),
    Migration("0009_refused_units", REFUSED_UNITS),
    Migration("0010_trace_contents", CONTENTS),
    Migration("0011_tested_names", TESTED_NAMES),
    Migration("0012_tested_worth", TESTED_WORTH),
)
