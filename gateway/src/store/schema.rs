//! The database's shape and how it came to be. A migration, once released, is never changed: the next one is added.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension as _};

use super::StoreError;

/// Every migration so far; `PRAGMA user_version` counts those applied.
const MIGRATIONS: &[&str] = &[
    r"
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

CREATE TABLE sandboxes (
    id          TEXT PRIMARY KEY,
    seq         INTEGER NOT NULL UNIQUE,
    name        TEXT NOT NULL UNIQUE,
    version     INTEGER NOT NULL,
    phase       TEXT NOT NULL,
    state       TEXT NOT NULL,
    spec        TEXT NOT NULL,
    labels      TEXT NOT NULL,
    image       TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    since_ms    INTEGER NOT NULL,
    change      INTEGER NOT NULL UNIQUE
) STRICT;
CREATE INDEX sandboxes_phase ON sandboxes (phase);
CREATE INDEX sandboxes_image ON sandboxes (image);

CREATE TABLE tombstones (
    change  INTEGER PRIMARY KEY,
    id      TEXT NOT NULL,
    name    TEXT NOT NULL,
    at_ms   INTEGER NOT NULL
) STRICT;

CREATE TABLE leases (
    sandbox_id    TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE RESTRICT,
    run           INTEGER NOT NULL,
    slot          INTEGER NOT NULL UNIQUE,
    cpus          TEXT NOT NULL,
    memory_bytes  INTEGER NOT NULL,
    acquired_ms   INTEGER NOT NULL
) STRICT;

CREATE TABLE slots (slot INTEGER PRIMARY KEY, released_ms INTEGER NOT NULL) STRICT;

CREATE TABLE history (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_id  TEXT NOT NULL,
    at_ms       INTEGER NOT NULL,
    from_phase  TEXT NOT NULL,
    to_phase    TEXT NOT NULL,
    why         TEXT NOT NULL,
    after_ms    INTEGER NOT NULL,
    run         INTEGER NOT NULL,
    version     INTEGER NOT NULL
) STRICT;
CREATE INDEX history_sandbox ON history (sandbox_id, seq);

CREATE TABLE requests (
    request_id  TEXT PRIMARY KEY,
    verb        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    sandbox_id  TEXT NOT NULL,
    at_ms       INTEGER NOT NULL
) STRICT;
CREATE INDEX requests_at ON requests (at_ms);

-- Rule 3 of the contract, held by the database itself.
CREATE TRIGGER rest_without_leases BEFORE UPDATE OF phase ON sandboxes
WHEN NEW.phase IN ('Suspended', 'Stopped') AND EXISTS (SELECT 1 FROM leases WHERE sandbox_id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'a suspended or stopped sandbox holds no lease'); END;
CREATE TRIGGER no_lease_at_rest BEFORE INSERT ON leases
WHEN (SELECT phase FROM sandboxes WHERE id = NEW.sandbox_id) IN ('Suspended', 'Stopped')
BEGIN SELECT RAISE(ABORT, 'a suspended or stopped sandbox takes no lease'); END;
",
    r"
-- What has something to do is found without a look at what rests.
CREATE INDEX sandboxes_unsettled ON sandboxes (id)
WHERE phase NOT IN ('Suspended', 'Stopped', 'Completed') OR json_extract(state, '$.then') IS NOT NULL;

-- Labels, so that a selector reads what it chooses and not everything.
CREATE TABLE labels (
    key   TEXT NOT NULL,
    value TEXT NOT NULL,
    seq   INTEGER NOT NULL,
    PRIMARY KEY (key, value, seq)
) STRICT, WITHOUT ROWID;
INSERT INTO labels SELECT j.key, j.value, s.seq FROM sandboxes s, json_each(s.labels) j;
CREATE TRIGGER labels_of_new AFTER INSERT ON sandboxes
BEGIN INSERT INTO labels SELECT j.key, j.value, NEW.seq FROM json_each(NEW.labels) j; END;
CREATE TRIGGER labels_of_changed AFTER UPDATE OF labels ON sandboxes
BEGIN
    DELETE FROM labels WHERE seq = OLD.seq AND (key, value) IN (SELECT j.key, j.value FROM json_each(OLD.labels) j);
    INSERT INTO labels SELECT j.key, j.value, NEW.seq FROM json_each(NEW.labels) j;
END;
CREATE TRIGGER labels_of_gone AFTER DELETE ON sandboxes
BEGIN
    DELETE FROM labels WHERE seq = OLD.seq AND (key, value) IN (SELECT j.key, j.value FROM json_each(OLD.labels) j);
END;

CREATE INDEX leases_memory ON leases (memory_bytes);
CREATE INDEX slots_released ON slots (released_ms);
DELETE FROM slots WHERE slot IN (SELECT slot FROM leases);
",
    r"
-- Ports of sandboxes that the host listens for; they go with their sandbox.
CREATE TABLE exposed (
    sandbox_id  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    port        INTEGER NOT NULL,
    host        TEXT NOT NULL UNIQUE,
    wake        INTEGER NOT NULL,
    created_ms  INTEGER NOT NULL,
    PRIMARY KEY (sandbox_id, port)
) STRICT, WITHOUT ROWID;
",
    r"
-- Workspaces. Outside the default one the column `name` of a sandbox is workspace/name, so that it stays unique.
ALTER TABLE sandboxes ADD COLUMN annotations TEXT NOT NULL DEFAULT '{}';
ALTER TABLE sandboxes ADD COLUMN workspace TEXT
    GENERATED ALWAYS AS (coalesce(json_extract(spec, '$.workspace'), 'default')) VIRTUAL;
CREATE INDEX sandboxes_workspace ON sandboxes (workspace, seq);

CREATE TABLE workspaces (
    name        TEXT PRIMARY KEY,
    seq         INTEGER NOT NULL UNIQUE,
    version     INTEGER NOT NULL,
    labels      TEXT NOT NULL,
    created_ms  INTEGER NOT NULL
) STRICT;
INSERT INTO workspaces VALUES ('default', 0, 1, '{}', CAST(unixepoch('subsec') * 1000 AS INTEGER));

CREATE TABLE members (
    workspace   TEXT NOT NULL REFERENCES workspaces (name) ON DELETE CASCADE,
    subject     TEXT NOT NULL,
    role        TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    PRIMARY KEY (workspace, subject)
) STRICT, WITHOUT ROWID;

-- Only a token's hash is kept. One without a workspace is good for the whole gateway, one with a sandbox for it alone.
CREATE TABLE tokens (
    id          TEXT PRIMARY KEY,
    name        TEXT NOT NULL,
    hash        TEXT NOT NULL,
    role        TEXT NOT NULL,
    workspace   TEXT REFERENCES workspaces (name) ON DELETE CASCADE,
    sandbox_id  TEXT REFERENCES sandboxes (id) ON DELETE CASCADE,
    created_by  TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    expires_ms  INTEGER
) STRICT;
CREATE INDEX tokens_workspace ON tokens (workspace);
CREATE INDEX tokens_sandbox ON tokens (sandbox_id);
CREATE INDEX tokens_created_by ON tokens (created_by);
",
    r"
-- What clients of openshell.v1 want kept and nothing here understands. A service belongs to a sandbox, a provider to none.
CREATE TABLE foreign_objects (
    id          TEXT PRIMARY KEY,
    kind        TEXT NOT NULL,
    workspace   TEXT NOT NULL REFERENCES workspaces (name) ON DELETE CASCADE,
    sandbox_id  TEXT REFERENCES sandboxes (id) ON DELETE CASCADE,
    name        TEXT NOT NULL,
    version     INTEGER NOT NULL,
    labels      TEXT NOT NULL,
    body        BLOB NOT NULL,
    created_ms  INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX foreign_objects_name ON foreign_objects (kind, workspace, coalesce(sandbox_id, ''), name);
CREATE INDEX foreign_objects_sandbox ON foreign_objects (sandbox_id);

CREATE TABLE foreign_attached (
    sandbox_id  TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    object_id   TEXT NOT NULL REFERENCES foreign_objects (id) ON DELETE RESTRICT,
    at_ms       INTEGER NOT NULL,
    PRIMARY KEY (sandbox_id, object_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX foreign_attached_object ON foreign_attached (object_id);

CREATE TABLE foreign_sandboxes (
    sandbox_id  TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    spec        BLOB NOT NULL,
    origin      BLOB NOT NULL
) STRICT;

-- Without a sandbox: the gateway's own.
CREATE TABLE foreign_configs (
    sandbox_id  TEXT UNIQUE REFERENCES sandboxes (id) ON DELETE CASCADE,
    version     INTEGER NOT NULL,
    body        BLOB NOT NULL
) STRICT;

CREATE TABLE foreign_answers (
    request_id  TEXT PRIMARY KEY,
    verb        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    answer      BLOB NOT NULL,
    at_ms       INTEGER NOT NULL
) STRICT;
CREATE INDEX foreign_answers_at ON foreign_answers (at_ms);
",
    r"
CREATE TABLE templates (
    workspace   TEXT NOT NULL REFERENCES workspaces (name) ON DELETE CASCADE,
    name        TEXT NOT NULL,
    version     INTEGER NOT NULL,
    labels      TEXT NOT NULL,
    annotations TEXT NOT NULL,
    spec        TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    changed_ms  INTEGER NOT NULL,
    PRIMARY KEY (workspace, name)
) STRICT, WITHOUT ROWID;
",
];

/// How many migrations a database has seen.
///
/// # Errors
/// `Newer`: more than there are here.
pub fn known(conn: &Connection) -> Result<usize, StoreError> {
    let at: usize = conn.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if at > MIGRATIONS.len() {
        return Err(StoreError::Newer { found: at, known: MIGRATIONS.len() });
    }
    Ok(at)
}

/// Brings the database to the present shape.
pub fn migrate(conn: &Connection) -> Result<(), StoreError> {
    let at = known(conn)?;
    for (number, migration) in MIGRATIONS.iter().enumerate().skip(at) {
        conn.execute_batch(&format!(
            "BEGIN IMMEDIATE; {migration} PRAGMA user_version = {}; COMMIT;",
            number + 1
        ))?;
    }
    Ok(())
}

/// A value of the `meta` table.
pub fn meta(conn: &Connection, key: &str) -> Result<Option<String>, StoreError> {
    Ok(conn
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()?)
}

/// Sets a value of the `meta` table.
pub fn set_meta(conn: &Connection, key: &str, value: &str) -> Result<(), StoreError> {
    conn.prepare_cached("INSERT INTO meta VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2")?
        .execute([key, value])?;
    Ok(())
}

/// Pages that the database keeps for itself, so that lifecycle verbs work on a full disk: they are free inside the
/// file, and the write-ahead log keeps the size it once had. No other writer can take them, as it could a reserve file
/// that is removed when space runs out.
const RESERVE_PAGES: i64 = 1024;

/// Sees to it that the reserve is there, outside of a transaction; without space for it nothing is lost but the
/// reserve. Growth of the database uses it up, so it is looked at again and again.
pub fn keep_reserve(conn: &Connection, database: &Path) -> Result<bool, StoreError> {
    let free: i64 = conn.query_row("PRAGMA freelist_count", [], |row| row.get(0))?;
    let page: i64 = conn.query_row("PRAGMA page_size", [], |row| row.get(0))?;
    let mut log = database.as_os_str().to_owned();
    log.push("-wal");
    let logged = std::fs::metadata(log).map_or(0, |found| found.len());
    if free >= RESERVE_PAGES / 2 && logged >= u64::try_from(RESERVE_PAGES * page / 2).unwrap_or_default() {
        return Ok(true);
    }
    let grown = conn.execute_batch(&format!(
        "BEGIN IMMEDIATE; CREATE TABLE reserve (b BLOB); INSERT INTO reserve VALUES (zeroblob({})); COMMIT;
         BEGIN IMMEDIATE; DROP TABLE reserve; COMMIT; PRAGMA wal_checkpoint(RESTART);",
        RESERVE_PAGES * page
    ));
    if grown.is_err() && !conn.is_autocommit() {
        conn.execute_batch("ROLLBACK")?;
    }
    Ok(grown.is_ok())
}
