//! What clients of another interface want kept and nothing here understands: objects of their own, settings, and the parts
//! of their sandboxes that a record has no place for. Bodies are bytes; only who wrote them reads them.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use rand::RngCore as _;
use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_sandbox::{SandboxId, id::clip};

use super::{
    RequestKey, Selector, Store, StoreError, from_millis, now,
    requests::Requests,
    rows::{json, page, parsed},
    sandboxes::{expect, load},
    workspaces,
};

/// Objects of one kind in one workspace.
const MOST_OBJECTS: u64 = 1000;
/// Largest body, bytes.
const LARGEST: usize = 1 << 20;
/// Answers that are kept for a retry.
const ANSWERS: Requests = Requests { table: "foreign_answers", result: "answer" };

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Credentials and settings under a name.
    Provider,
    /// A port of a sandbox under a name.
    Service,
    /// What is said of a template that the template itself has no place for.
    Template,
}

impl Kind {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provider => "provider",
            Self::Service => "service",
            Self::Template => "template",
        }
    }
}

/// What can be wrong with them.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// No such object.
    #[error("no {} '{name}'", kind.as_str())]
    Missing {
        /// Of which kind.
        kind: Kind,
        /// Its name.
        name: String,
    },
    /// The name is in use.
    #[error("a {} named '{name}' exists already", kind.as_str())]
    Taken {
        /// Of which kind.
        kind: Kind,
        /// Its name.
        name: String,
    },
    /// Sandboxes hold it.
    #[error("{} '{name}' is attached to {sandboxes} sandboxes; detach it first", kind.as_str())]
    InUse {
        /// Of which kind.
        kind: Kind,
        /// Its name.
        name: String,
        /// How many.
        sandboxes: u64,
    },
    /// The caller's version is not the present one.
    #[error("version {expected} of {what} is stale: it is at version {found}")]
    Stale {
        /// Of what.
        what: String,
        /// The caller's.
        expected: u64,
        /// The present one.
        found: u64,
    },
    /// Too large to be kept.
    #[error("{what}: {bytes} bytes are more than the {LARGEST} that are kept")]
    TooLarge {
        /// What.
        what: &'static str,
        /// How large.
        bytes: usize,
    },
    /// As whoever reads the bodies has it.
    #[error("{field}: {problem}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
}

/// An object. Its name is unique in its workspace; of a service, in its sandbox.
#[derive(Clone, Debug)]
pub struct Object {
    /// For ever.
    pub id: String,
    /// Where it is.
    pub workspace: String,
    /// Whose it is.
    pub sandbox: Option<String>,
    /// Its name.
    pub name: String,
    /// Grows with every change.
    pub version: u64,
    /// The user's.
    pub labels: BTreeMap<String, String>,
    /// The rest.
    pub body: Vec<u8>,
    /// When it was made.
    pub created: SystemTime,
}

/// An object that is to be made.
#[derive(Clone, Debug)]
pub struct NewObject {
    /// Where.
    pub workspace: String,
    /// Whose.
    pub sandbox: Option<SandboxId>,
    /// Its name.
    pub name: String,
    /// The user's.
    pub labels: BTreeMap<String, String>,
    /// The rest.
    pub body: Vec<u8>,
}

/// Objects to look for.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Of which kind.
    pub kind: Kind,
    /// Of one sandbox.
    pub sandbox: Option<SandboxId>,
    /// With these labels, in these workspaces.
    pub selector: Selector,
    /// At most so many.
    pub size: usize,
    /// Those after the one with this workspace, sandbox and name.
    pub after: Option<[String; 3]>,
}

/// The parts of a sandbox that its record has no place for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// The spec as it was sent.
    pub spec: Vec<u8>,
    /// What it was made from.
    pub origin: Vec<u8>,
}

const COLUMNS: &str = "id, workspace, sandbox_id, name, version, labels, body, created_ms";

fn object(row: &Row<'_>) -> rusqlite::Result<(Object, String)> {
    let object = Object {
        id: row.get(0)?,
        workspace: row.get(1)?,
        sandbox: row.get(2)?,
        name: row.get(3)?,
        version: row.get(4)?,
        labels: BTreeMap::new(),
        body: row.get(6)?,
        created: from_millis(row.get(7)?),
    };
    Ok((object, row.get(5)?))
}

fn labelled((mut object, labels): (Object, String)) -> Result<Object, StoreError> {
    object.labels = parsed(&object.id, "labels", &labels)?;
    Ok(object)
}

fn fits(what: &'static str, body: &[u8]) -> Result<(), Problem> {
    if body.len() > LARGEST { Err(Problem::TooLarge { what, bytes: body.len() }) } else { Ok(()) }
}

/// A new random id.
fn object_id(kind: Kind) -> String {
    let mut bytes = [0_u8; 10];
    rand::rng().fill_bytes(&mut bytes);
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{digits}", kind.as_str())
}

/// The tables, in one transaction.
pub struct Foreign<'a>(&'a Connection);

impl Foreign<'_> {
    /// One object by its name.
    ///
    /// # Errors
    /// The database's.
    pub fn find(
        &self,
        kind: Kind,
        workspace: &str,
        sandbox: Option<&SandboxId>,
        name: &str,
    ) -> Result<Option<Object>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM foreign_objects
             WHERE kind = ?1 AND workspace = ?2 AND coalesce(sandbox_id, '') = coalesce(?3, '') AND name = ?4"
        );
        let key = (kind.as_str(), workspace, sandbox.map(SandboxId::as_str), name);
        self.0.prepare_cached(&sql)?.query_row(key, object).optional()?.map(labelled).transpose()
    }

    /// The same; it must be there.
    ///
    /// # Errors
    /// `Missing`, or the database's.
    pub fn get(
        &self,
        kind: Kind,
        workspace: &str,
        sandbox: Option<&SandboxId>,
        name: &str,
    ) -> Result<Object, StoreError> {
        let found = self.find(kind, workspace, sandbox, name)?;
        Ok(found.ok_or_else(|| Problem::Missing { kind, name: clip(name) })?)
    }

    /// Makes an object.
    ///
    /// # Errors
    /// `Taken`, `TooLarge`, `NoWorkspace`, `TooMany`, or the database's.
    pub fn add(&self, kind: Kind, new: NewObject) -> Result<Object, StoreError> {
        fits(kind.as_str(), &new.body)?;
        workspaces::expect(self.0, &new.workspace)?;
        if self.find(kind, &new.workspace, new.sandbox.as_ref(), &new.name)?.is_some() {
            return Err(Problem::Taken { kind, name: new.name }.into());
        }
        let count: u64 = self
            .0
            .prepare_cached("SELECT count(*) FROM foreign_objects WHERE kind = ?1 AND workspace = ?2")?
            .query_row((kind.as_str(), &new.workspace), |row| row.get(0))?;
        if count >= MOST_OBJECTS {
            return Err(StoreError::TooMany { what: kind.as_str(), most: MOST_OBJECTS });
        }
        self.0
            .prepare_cached("INSERT INTO foreign_objects VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6, ?7, ?8)")?
            .execute((
                object_id(kind),
                kind.as_str(),
                &new.workspace,
                new.sandbox.as_ref().map(SandboxId::as_str),
                &new.name,
                json(&new.name, "labels", &new.labels)?,
                &new.body,
                now(),
            ))?;
        self.get(kind, &new.workspace, new.sandbox.as_ref(), &new.name)
    }

    /// Writes another body and labels.
    ///
    /// # Errors
    /// `TooLarge`, or the database's.
    pub fn replace(&self, mut object: Object) -> Result<Object, StoreError> {
        fits("object", &object.body)?;
        object.version += 1;
        self.0
            .prepare_cached("UPDATE foreign_objects SET version = ?2, labels = ?3, body = ?4 WHERE id = ?1")?
            .execute((
                &object.id,
                object.version,
                json(&object.name, "labels", &object.labels)?,
                &object.body,
            ))?;
        Ok(object)
    }

    /// Removes an object.
    ///
    /// # Errors
    /// `InUse`, or the database's.
    pub fn remove(&self, kind: Kind, object: &Object) -> Result<(), StoreError> {
        let sandboxes: u64 = self
            .0
            .prepare_cached("SELECT count(*) FROM foreign_attached WHERE object_id = ?1")?
            .query_row([&object.id], |row| row.get(0))?;
        if sandboxes > 0 {
            return Err(Problem::InUse { kind, name: object.name.clone(), sandboxes }.into());
        }
        self.0.prepare_cached("DELETE FROM foreign_objects WHERE id = ?1")?.execute([&object.id])?;
        Ok(())
    }

    /// One page of objects, in the order of their workspaces, sandboxes and names; whether there are more.
    ///
    /// # Errors
    /// The database's.
    pub fn list(&self, listing: &Listing) -> Result<(Vec<Object>, bool), StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM foreign_objects
             WHERE kind = ?1 AND (?2 IS NULL OR sandbox_id = ?2)
               AND (workspace, coalesce(sandbox_id, ''), name) > (?3, ?4, ?5)
             ORDER BY workspace, coalesce(sandbox_id, ''), name"
        );
        // No name of a workspace is empty: everything comes after.
        let [workspace, sandbox, name] = listing.after.clone().unwrap_or_default();
        let mut statement = self.0.prepare_cached(&sql)?;
        let of = listing.sandbox.as_ref().map(SandboxId::as_str);
        let rows = statement.query_map((listing.kind.as_str(), of, workspace, sandbox, name), object)?;
        page(rows.map(|row| labelled(row?)), listing.size, |object| {
            listing.selector.reaches(&object.workspace) && listing.selector.matches(&object.labels)
        })
    }

    /// The sandbox's version, for a compare before a write.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, or the database's.
    pub fn expect_sandbox(&self, id: &SandboxId, version: u64) -> Result<(), StoreError> {
        expect(&load(self.0, id.as_str())?, Some(version).filter(|&version| version > 0))
    }

    /// Attaches an object to a sandbox; false: it was.
    ///
    /// # Errors
    /// The database's.
    pub fn attach(&self, id: &SandboxId, object: &Object) -> Result<bool, StoreError> {
        let sql = "INSERT INTO foreign_attached VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";
        Ok(self.0.prepare_cached(sql)?.execute((id.as_str(), &object.id, now()))? > 0)
    }

    /// Takes it back; false: it wasn't attached.
    ///
    /// # Errors
    /// The database's.
    pub fn detach(&self, id: &SandboxId, object: &Object) -> Result<bool, StoreError> {
        let sql = "DELETE FROM foreign_attached WHERE sandbox_id = ?1 AND object_id = ?2";
        Ok(self.0.prepare_cached(sql)?.execute((id.as_str(), &object.id))? > 0)
    }

    /// What is attached to a sandbox, in the order of the names.
    ///
    /// # Errors
    /// The database's.
    pub fn attached(&self, id: &SandboxId) -> Result<Vec<Object>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM foreign_objects
             WHERE id IN (SELECT object_id FROM foreign_attached WHERE sandbox_id = ?1) ORDER BY name"
        );
        let mut statement = self.0.prepare_cached(&sql)?;
        statement.query_map([id.as_str()], object)?.map(|row| labelled(row?)).collect()
    }

    /// The names alone of what is attached to a sandbox, in their order.
    ///
    /// # Errors
    /// The database's.
    pub fn attached_names(&self, id: &SandboxId) -> Result<Vec<String>, StoreError> {
        let sql = "SELECT name FROM foreign_objects
                   WHERE id IN (SELECT object_id FROM foreign_attached WHERE sandbox_id = ?1) ORDER BY name";
        let mut statement = self.0.prepare_cached(sql)?;
        Ok(statement.query_map([id.as_str()], |row| row.get(0))?.collect::<Result<_, _>>()?)
    }

    /// Keeps the rest of a sandbox, in place of what was kept.
    ///
    /// # Errors
    /// `TooLarge`, or the database's.
    pub fn keep(&self, id: &SandboxId, rest: &Rest) -> Result<(), StoreError> {
        fits("spec", &rest.spec)?;
        self.0
            .prepare_cached(
                "INSERT INTO foreign_sandboxes VALUES (?1, ?2, ?3)
                 ON CONFLICT (sandbox_id) DO UPDATE SET spec = ?2, origin = ?3",
            )?
            .execute((id.as_str(), &rest.spec, &rest.origin))?;
        Ok(())
    }

    /// The rest of a sandbox.
    ///
    /// # Errors
    /// The database's.
    pub fn kept(&self, id: &str) -> Result<Option<Rest>, StoreError> {
        Ok(self
            .0
            .prepare_cached("SELECT spec, origin FROM foreign_sandboxes WHERE sandbox_id = ?1")?
            .query_row([id], |row| Ok(Rest { spec: row.get(0)?, origin: row.get(1)? }))
            .optional()?)
    }

    /// The configuration of a sandbox, or of the gateway, with its version.
    ///
    /// # Errors
    /// The database's.
    pub fn config(&self, id: Option<&SandboxId>) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        Ok(self
            .0
            .prepare_cached("SELECT version, body FROM foreign_configs WHERE sandbox_id IS ?1")?
            .query_row([id.map(SandboxId::as_str)], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?)
    }

    /// Writes it; the new version.
    ///
    /// # Errors
    /// `TooLarge`, or the database's.
    pub fn set_config(&self, id: Option<&SandboxId>, body: &[u8]) -> Result<u64, StoreError> {
        fits("configuration", body)?;
        let id = id.map(SandboxId::as_str);
        let sql = "UPDATE foreign_configs SET version = version + 1, body = ?2 WHERE sandbox_id IS ?1
                   RETURNING version";
        let version: Option<u64> =
            self.0.prepare_cached(sql)?.query_row((id, body), |row| row.get(0)).optional()?;
        if let Some(version) = version {
            return Ok(version);
        }
        self.0.prepare_cached("INSERT INTO foreign_configs VALUES (?1, 1, ?2)")?.execute((id, body))?;
        Ok(1)
    }
}

impl Store {
    /// Reads the tables.
    ///
    /// # Errors
    /// The query's, or the database's.
    pub async fn foreign<T: Send + 'static>(
        self: &Arc<Self>,
        query: impl FnOnce(&Foreign<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.read(move |conn| query(&Foreign(conn))).await
    }

    /// The answer that a request got before, if it was made before.
    ///
    /// # Errors
    /// `RequestReused`, or the database's.
    pub async fn answered(self: &Arc<Self>, key: Option<&RequestKey>) -> Result<Option<Vec<u8>>, StoreError> {
        match key.cloned() {
            Some(key) => self.read(move |conn| ANSWERS.find(conn, &key)).await,
            None => Ok(None),
        }
    }

    /// Writes the tables, all of what `job` does or nothing. Its answer is kept with it, and is the answer to a retry.
    ///
    /// # Errors
    /// The job's, `RequestReused`, or the database's.
    pub async fn foreign_once(
        &self,
        key: Option<RequestKey>,
        job: impl FnOnce(&Foreign<'_>) -> Result<Vec<u8>, StoreError> + Send + 'static,
    ) -> Result<Vec<u8>, StoreError> {
        self.write_if_possible(move |conn, _| {
            let tables = Foreign(conn);
            let Some(key) = key else { return job(&tables) };
            if let Some(answer) = ANSWERS.find(conn, &key)? {
                return Ok(answer);
            }
            let answer = job(&tables)?;
            ANSWERS.note(conn, &key, &answer)?;
            Ok(answer)
        })
        .await
    }
}
