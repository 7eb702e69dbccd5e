//! Access tokens: who holds the secret may do what the row says. Only a hash of the secret is kept.

use std::{collections::HashSet, sync::Arc, time::SystemTime};

use rusqlite::{Connection, Params, Row};

use super::{Role, Store, StoreError, from_millis, millis, now, workspaces};

/// Tokens of one workspace, and those of none.
const MOST_TOKENS: u64 = 1000;
/// Tokens of one gateway.
const MOST_IN_ALL: u64 = 10_000;

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The public part of the secret; names the token.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// SHA-256 of the secret, hexadecimal.
    pub hash: String,
    /// What it allows.
    pub role: Rights,
    /// Where; none: in every workspace.
    pub workspace: Option<String>,
    /// Only this sandbox.
    pub sandbox: Option<String>,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created: SystemTime,
    /// From then on it is good for nothing.
    pub expires: Option<SystemTime>,
}

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rights {
    /// A role in its workspace, or in every one.
    Role(Role),
    /// Everything.
    Admin,
}

impl Rights {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Role(role) => role.as_str(),
            Self::Admin => "admin",
        }
    }

    /// The opposite.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "admin" => Some(Self::Admin),
            role => Role::parse(role).map(Self::Role),
        }
    }
}

const COLUMNS: &str = "id, name, hash, role, workspace, sandbox_id, created_by, created_ms, expires_ms";

fn token(row: &Row<'_>) -> rusqlite::Result<Token> {
    let role: String = row.get(3)?;
    let expires: Option<i64> = row.get(8)?;
    Ok(Token {
        id: row.get(0)?,
        name: row.get(1)?,
        hash: row.get(2)?,
        // Of a later version: nothing is given that isn't understood.
        role: Rights::parse(&role).ok_or(rusqlite::Error::InvalidColumnType(
            3,
            "role".to_owned(),
            rusqlite::types::Type::Text,
        ))?,
        workspace: row.get(4)?,
        sandbox: row.get(5)?,
        created_by: row.get(6)?,
        created: from_millis(row.get(7)?),
        expires: expires.map(from_millis),
    })
}

/// Removes the tokens that a condition chooses, with those that were made with them; whether there were any.
fn forget(conn: &Connection, chosen: &str, params: impl Params) -> Result<bool, StoreError> {
    let sql = format!(
        "WITH RECURSIVE doomed (id) AS (
             SELECT id FROM tokens WHERE {chosen}
             UNION SELECT tokens.id FROM tokens JOIN doomed ON tokens.created_by = 'token:' || doomed.id
         )
         DELETE FROM tokens WHERE id IN (SELECT id FROM doomed)"
    );
    Ok(conn.prepare_cached(&sql)?.execute(params)? > 0)
}

/// Tokens of a workspace live no longer than their maker may make them.
pub(super) fn forget_made_by(conn: &Connection, workspace: &str, subject: &str) -> Result<(), StoreError> {
    forget(conn, "workspace = ?1 AND created_by = ?2", (workspace, subject)).map(drop)
}

impl Store {
    /// Writes a token.
    ///
    /// # Errors
    /// `NoWorkspace`, `NotFound` (its sandbox), `TooMany`, or the database's.
    pub async fn add_token(&self, token: Token) -> Result<Token, StoreError> {
        self.write_if_possible(move |conn, _| {
            // What has expired is of no use to anybody.
            conn.prepare_cached("DELETE FROM tokens WHERE expires_ms < ?1")?.execute([now()])?;
            let sql = "SELECT count(*), count(*) FILTER (WHERE workspace IS ?1) FROM tokens";
            let (all, here): (u64, u64) = conn
                .prepare_cached(sql)?
                .query_row([&token.workspace], |row| Ok((row.get(0)?, row.get(1)?)))?;
            if here >= MOST_TOKENS || all >= MOST_IN_ALL {
                let most = if here >= MOST_TOKENS { MOST_TOKENS } else { MOST_IN_ALL };
                return Err(StoreError::TooMany { what: "tokens", most });
            }
            if let Some(workspace) = &token.workspace {
                workspaces::expect(conn, workspace)?;
            }
            if let Some(id) = &token.sandbox {
                super::sandboxes::load(conn, id)?;
            }
            let sql = format!("INSERT INTO tokens ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)");
            conn.prepare_cached(&sql)?.execute((
                &token.id,
                &token.name,
                &token.hash,
                token.role.as_str(),
                &token.workspace,
                &token.sandbox,
                &token.created_by,
                millis(token.created),
                token.expires.map(millis),
            ))?;
            Ok(token)
        })
        .await
    }

    /// One token by its id.
    ///
    /// # Errors
    /// The database's.
    pub async fn token(self: &Arc<Self>, id: &str) -> Result<Option<Token>, StoreError> {
        let id = id.to_owned();
        self.read(move |conn| {
            let sql = format!("SELECT {COLUMNS} FROM tokens WHERE id = ?1");
            let mut statement = conn.prepare_cached(&sql)?;
            let mut rows = statement.query_map([id], token)?;
            Ok(rows.next().transpose()?)
        })
        .await
    }

    /// Every token, of one workspace or of all, in the order of their making.
    ///
    /// # Errors
    /// The database's.
    pub async fn tokens(self: &Arc<Self>, workspace: Option<&str>) -> Result<Vec<Token>, StoreError> {
        let workspace = workspace.map(str::to_owned);
        self.read(move |conn| {
            let sql = format!(
                "SELECT {COLUMNS} FROM tokens WHERE ?1 IS NULL OR workspace = ?1 ORDER BY created_ms, id"
            );
            let mut statement = conn.prepare_cached(&sql)?;
            Ok(statement.query_map([workspace], token)?.collect::<Result<_, _>>()?)
        })
        .await
    }

    /// The ids of all tokens.
    ///
    /// # Errors
    /// The database's.
    pub async fn token_ids(self: &Arc<Self>) -> Result<HashSet<String>, StoreError> {
        self.read(|conn| {
            let mut statement = conn.prepare_cached("SELECT id FROM tokens")?;
            Ok(statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?)
        })
        .await
    }

    /// Removes a token with those that were made with it; whether it was there.
    ///
    /// # Errors
    /// The database's.
    pub async fn remove_token(&self, id: String) -> Result<bool, StoreError> {
        self.write_if_possible(move |conn, _| forget(conn, "id = ?1", [id])).await
    }
}
