//! Workspaces and who may do what in them.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_sandbox::id::clip;

use super::{
    RequestKey, Store, StoreError, from_millis, now,
    requests::{remember, replayed},
    rows::{json, page, parsed},
    sandboxes::{Page, Selector, page_token, parse_token},
    tokens,
};

/// Workspaces of one gateway.
pub const MOST_WORKSPACES: u64 = 10_000;
/// Members of one workspace.
pub const MOST_MEMBERS: u64 = 10_000;

/// A workspace: names of sandboxes are unique in it, and its members have rights in it.
#[derive(Clone, Debug)]
pub struct Workspace {
    /// Unique.
    pub name: String,
    /// Order of creation.
    pub seq: u64,
    /// Grows with every change.
    pub version: u64,
    /// The user's.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created: SystemTime,
    /// How many sandboxes belong to it.
    pub sandboxes: u64,
}

/// What somebody may do in a workspace; more includes less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// See.
    Viewer,
    /// Make and use sandboxes.
    Editor,
    /// Say who is a member.
    Owner,
}

impl Role {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Editor => "editor",
            Self::Owner => "owner",
        }
    }

    /// The opposite.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Viewer, Self::Editor, Self::Owner].into_iter().find(|role| role.as_str() == text)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A member of a workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Of this one.
    pub workspace: String,
    /// Who: "uid:1000", "cert:alice", "oidc:ISSUER-SUBJECT", "token:NAME".
    pub subject: String,
    /// What it may do.
    pub role: Role,
    /// Since when.
    pub created: SystemTime,
}

const COLUMNS: &str = "name, seq, version, labels, created_ms,
    (SELECT count(*) FROM sandboxes WHERE sandboxes.workspace = workspaces.name)";

type Raw = (String, u64, u64, String, i64, u64);

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?))
}

fn workspace((name, seq, version, labels, created, sandboxes): Raw) -> Result<Workspace, StoreError> {
    let labels = parsed(format_args!("of workspace '{name}'"), "labels", &labels)?;
    Ok(Workspace { name, seq, version, labels, created: from_millis(created), sandboxes })
}

fn load(conn: &Connection, name: &str) -> Result<Workspace, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM workspaces WHERE name = ?1");
    let found = conn.prepare_cached(&sql)?.query_row([name], raw).optional()?;
    workspace(found.ok_or_else(|| StoreError::NoWorkspace(clip(name)))?)
}

fn is_there(conn: &Connection, name: &str) -> Result<bool, StoreError> {
    Ok(conn.prepare_cached("SELECT 1 FROM workspaces WHERE name = ?1")?.exists([name])?)
}

/// Refuses one that isn't there.
pub(super) fn expect(conn: &Connection, name: &str) -> Result<(), StoreError> {
    if is_there(conn, name)? { Ok(()) } else { Err(StoreError::NoWorkspace(clip(name))) }
}

/// Makes it if it isn't there.
pub(super) fn ensure(conn: &Connection, name: &str) -> Result<(), StoreError> {
    if is_there(conn, name)? { Ok(()) } else { insert(conn, name, &BTreeMap::new()) }
}

fn insert(conn: &Connection, name: &str, labels: &BTreeMap<String, String>) -> Result<(), StoreError> {
    let labels = json(format_args!("of workspace '{name}'"), "labels", labels)?;
    let last: Option<u64> = conn.query_row("SELECT max(seq) FROM workspaces", [], |row| row.get(0))?;
    conn.prepare_cached("INSERT INTO workspaces VALUES (?1, ?2, 1, ?3, ?4)")?.execute((
        name,
        last.map_or(0, |last| last + 1),
        labels,
        now(),
    ))?;
    Ok(())
}

/// Of a member, in the order that [`member`] reads.
const MEMBER: &str = "SELECT workspace, subject, role, created_ms FROM members";

fn member(row: &Row<'_>) -> rusqlite::Result<Member> {
    let role: String = row.get(2)?;
    Ok(Member {
        workspace: row.get(0)?,
        subject: row.get(1)?,
        // A role that a later version wrote: the least.
        role: Role::parse(&role).unwrap_or(Role::Viewer),
        created: from_millis(row.get(3)?),
    })
}

impl Store {
    /// Makes a workspace; its maker, when given, is its owner. `again`: the request's own id, whose retry has the same answer.
    ///
    /// # Errors
    /// `WorkspaceTaken`, `TooMany`, `RequestReused`, or the database's.
    pub async fn create_workspace(
        &self,
        name: String,
        labels: BTreeMap<String, String>,
        owner: Option<String>,
        again: Option<RequestKey>,
    ) -> Result<Workspace, StoreError> {
        self.write_if_possible(move |conn, _| {
            if let Some(made) = again.as_ref().map(|key| replayed(conn, key)).transpose()?.flatten() {
                return load(conn, &made);
            }
            if is_there(conn, &name)? {
                return Err(StoreError::WorkspaceTaken(name));
            }
            let count: u64 = conn.query_row("SELECT count(*) FROM workspaces", [], |row| row.get(0))?;
            if count >= MOST_WORKSPACES {
                return Err(StoreError::TooMany { what: "workspaces", most: MOST_WORKSPACES });
            }
            insert(conn, &name, &labels)?;
            if let Some(key) = again {
                remember(conn, &key, &name)?;
            }
            if let Some(owner) = owner {
                conn.prepare_cached("INSERT INTO members VALUES (?1, ?2, ?3, ?4)")?.execute((
                    &name,
                    owner,
                    Role::Owner.as_str(),
                    now(),
                ))?;
            }
            load(conn, &name)
        })
        .await
    }

    /// One workspace.
    ///
    /// # Errors
    /// `NoWorkspace`, or the database's.
    pub async fn workspace(self: &Arc<Self>, name: &str) -> Result<Workspace, StoreError> {
        let name = name.to_owned();
        self.read(move |conn| load(conn, &name)).await
    }

    /// Workspaces in the order of their creation, of those that the selector's scope reaches.
    ///
    /// # Errors
    /// `BadToken`, or the database's.
    pub async fn workspaces(
        self: &Arc<Self>,
        size: usize,
        token: Option<String>,
        selector: Selector,
    ) -> Result<Page<Workspace>, StoreError> {
        // The first one has the number 0, and a token names the last one shown.
        let after = token
            .as_deref()
            .map(parse_token)
            .transpose()?
            .map_or(-1, |after| i64::try_from(after).unwrap_or(i64::MAX));
        self.read(move |conn| {
            let sql = format!("SELECT {COLUMNS} FROM workspaces WHERE seq > ?1 ORDER BY seq");
            let mut statement = conn.prepare_cached(&sql)?;
            let found = statement.query_map([after], raw)?.map(|row| workspace(row?));
            let (rows, more) =
                page(found, size, |row| selector.reaches(&row.name) && selector.matches(&row.labels))?;
            let next = rows.last().filter(|_| more).map(|row| page_token(row.seq));
            Ok(Page { rows, next })
        })
        .await
    }

    /// Removes an empty workspace with its members, tokens and templates.
    ///
    /// # Errors
    /// `NoWorkspace`, `WorkspaceInUse`, or the database's.
    pub async fn delete_workspace(&self, name: String) -> Result<(), StoreError> {
        self.write_if_possible(move |conn, _| {
            let found = load(conn, &name)?;
            if found.sandboxes > 0 {
                return Err(StoreError::WorkspaceInUse { name, sandboxes: found.sandboxes });
            }
            conn.prepare_cached("DELETE FROM workspaces WHERE name = ?1")?.execute([&name])?;
            // Where earlier versions kept ids of requests.
            conn.prepare_cached("DELETE FROM meta WHERE substr(key, 1, length(?1)) = ?1")?
                .execute([format!("workspace-request/{name}/")])?;
            Ok(())
        })
        .await
    }

    /// Gives somebody a role in a workspace, in place of the one it has.
    ///
    /// # Errors
    /// `NoWorkspace`, `TooMany`, or the database's.
    pub async fn set_member(
        &self,
        workspace: String,
        subject: String,
        role: Role,
    ) -> Result<Member, StoreError> {
        self.write_if_possible(move |conn, _| {
            expect(conn, &workspace)?;
            let sql = "SELECT count(*) FROM members WHERE workspace = ?1 AND subject != ?2";
            let others: u64 =
                conn.prepare_cached(sql)?.query_row((&workspace, &subject), |row| row.get(0))?;
            if others >= MOST_MEMBERS {
                return Err(StoreError::TooMany { what: "members of one workspace", most: MOST_MEMBERS });
            }
            conn.prepare_cached(
                "INSERT INTO members VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (workspace, subject) DO UPDATE SET role = ?3",
            )?
            .execute((&workspace, &subject, role.as_str(), now()))?;
            if role < Role::Owner {
                tokens::forget_made_by(conn, &workspace, &subject)?;
            }
            let sql = format!("{MEMBER} WHERE workspace = ?1 AND subject = ?2");
            Ok(conn.prepare_cached(&sql)?.query_row((&workspace, &subject), member)?)
        })
        .await
    }

    /// Takes it back; whether there was one.
    ///
    /// # Errors
    /// `NoWorkspace`, or the database's.
    pub async fn remove_member(&self, workspace: String, subject: String) -> Result<bool, StoreError> {
        self.write_if_possible(move |conn, _| {
            expect(conn, &workspace)?;
            let sql = "DELETE FROM members WHERE workspace = ?1 AND subject = ?2";
            let removed = conn.prepare_cached(sql)?.execute((&workspace, &subject))? > 0;
            tokens::forget_made_by(conn, &workspace, &subject)?;
            Ok(removed)
        })
        .await
    }

    /// Members of a workspace in the order of their names, at most `size` after `after`.
    ///
    /// # Errors
    /// `NoWorkspace`, or the database's.
    pub async fn members(
        self: &Arc<Self>,
        workspace: &str,
        size: usize,
        after: Option<String>,
    ) -> Result<Page<Member>, StoreError> {
        let workspace = workspace.to_owned();
        self.read(move |conn| {
            expect(conn, &workspace)?;
            let sql = format!("{MEMBER} WHERE workspace = ?1 AND subject > ?2 ORDER BY subject");
            let mut statement = conn.prepare_cached(&sql)?;
            let found = statement.query_map((&workspace, after.unwrap_or_default()), member)?;
            let (rows, more) = page(found.map(|row| row.map_err(StoreError::from)), size, |_| true)?;
            let next = rows.last().filter(|_| more).map(|row| row.subject.clone());
            Ok(Page { rows, next })
        })
        .await
    }

    /// Every member of every workspace, for the gateway's own table of rights.
    ///
    /// # Errors
    /// The database's.
    pub async fn all_members(self: &Arc<Self>) -> Result<Vec<Member>, StoreError> {
        self.read(|conn| Ok(conn.prepare_cached(MEMBER)?.query_map([], member)?.collect::<Result<_, _>>()?))
            .await
    }
}
