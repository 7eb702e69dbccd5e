//! Templates: specs under a name, to make sandboxes of.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use rusqlite::{Connection, OptionalExtension as _, Row};
use torpor_sandbox::id::clip;

use super::{
    Page, RequestKey, Selector, Store, StoreError, from_millis, now,
    requests::{remember, replayed},
    rows::{json, page, parsed},
    workspaces,
};
use crate::templates::TemplateSpec;

/// Templates of one workspace.
const MOST: u64 = 1000;

/// A template.
#[derive(Clone, Debug)]
pub struct Template {
    /// Where it is.
    pub workspace: String,
    /// Unique there.
    pub name: String,
    /// Grows with every change.
    pub version: u64,
    /// The user's, and those of the sandboxes that are made of it.
    pub labels: BTreeMap<String, String>,
    /// The same.
    pub annotations: BTreeMap<String, String>,
    /// What is said of a sandbox.
    pub spec: TemplateSpec,
    /// When it was made.
    pub created: SystemTime,
    /// When it was changed last.
    pub changed: SystemTime,
}

/// A template's place: its workspace and its name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateKey {
    /// See above.
    pub workspace: String,
    /// See above.
    pub name: String,
}

impl std::fmt::Display for TemplateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&torpor_sandbox::spec::qualified(&self.workspace, &clip(&self.name)))
    }
}

const COLUMNS: &str = "workspace, name, version, labels, annotations, spec, created_ms, changed_ms";

type Texts = [String; 3];

fn raw(row: &Row<'_>) -> rusqlite::Result<(Template, Texts)> {
    let template = Template {
        workspace: row.get(0)?,
        name: row.get(1)?,
        version: row.get(2)?,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        spec: TemplateSpec::default(),
        created: from_millis(row.get(6)?),
        changed: from_millis(row.get(7)?),
    };
    Ok((template, [row.get(3)?, row.get(4)?, row.get(5)?]))
}

fn finish((mut template, [labels, annotations, spec]): (Template, Texts)) -> Result<Template, StoreError> {
    let id = format!("of template '{}'", template.name);
    template.labels = parsed(&id, "labels", &labels)?;
    template.annotations = parsed(&id, "annotations", &annotations)?;
    template.spec = parsed(&id, "spec", &spec)?;
    Ok(template)
}

fn texts(template: &Template) -> Result<Texts, StoreError> {
    let id = format!("of template '{}'", template.name);
    Ok([
        json(&id, "labels", &template.labels)?,
        json(&id, "annotations", &template.annotations)?,
        json(&id, "spec", &template.spec)?,
    ])
}

fn find(conn: &Connection, key: &TemplateKey) -> Result<Option<Template>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM templates WHERE workspace = ?1 AND name = ?2");
    let found = conn.prepare_cached(&sql)?.query_row((&key.workspace, &key.name), raw).optional()?;
    found.map(finish).transpose()
}

fn load(conn: &Connection, key: &TemplateKey) -> Result<Template, StoreError> {
    find(conn, key)?.ok_or_else(|| StoreError::NoTemplate(key.to_string()))
}

fn expect(template: &Template, key: &TemplateKey, expected: u64) -> Result<(), StoreError> {
    if expected == template.version {
        return Ok(());
    }
    Err(StoreError::StaleTemplate { name: key.to_string(), expected, found: template.version })
}

/// The template that a request id was used for before, which must still be there.
fn before(conn: &Connection, request: Option<&RequestKey>) -> Result<Option<Template>, StoreError> {
    let named = request.map(|request| replayed(conn, request)).transpose()?.flatten();
    let Some(named) = named else { return Ok(None) };
    let (workspace, name) = named.split_once('/').unwrap_or_default();
    load(conn, &TemplateKey { workspace: workspace.to_owned(), name: name.to_owned() }).map(Some)
}

/// As it is remembered with a request id.
fn place(key: &TemplateKey) -> String {
    format!("{}/{}", key.workspace, key.name)
}

impl Store {
    /// Writes a new template. A retry with the same request id returns the one that is there.
    ///
    /// # Errors
    /// `NoWorkspace`, `TemplateTaken`, `TooMany`, `RequestReused`, or the database's.
    pub async fn create_template(
        &self,
        key: TemplateKey,
        labels: BTreeMap<String, String>,
        annotations: BTreeMap<String, String>,
        spec: TemplateSpec,
        request: Option<RequestKey>,
    ) -> Result<Template, StoreError> {
        self.write_if_possible(move |conn, _| {
            if let Some(before) = before(conn, request.as_ref())? {
                return Ok(before);
            }
            workspaces::expect(conn, &key.workspace)?;
            if find(conn, &key)?.is_some() {
                return Err(StoreError::TemplateTaken(key.to_string()));
            }
            let count: u64 = conn
                .prepare_cached("SELECT count(*) FROM templates WHERE workspace = ?1")?
                .query_row([&key.workspace], |row| row.get(0))?;
            if count >= MOST {
                return Err(StoreError::TooMany { what: "templates of a workspace", most: MOST });
            }
            if let Some(request) = &request {
                remember(conn, request, &place(&key))?;
            }
            let at = now();
            let TemplateKey { workspace, name } = key;
            let (created, changed) = (from_millis(at), from_millis(at));
            let template =
                Template { workspace, name, version: 1, labels, annotations, spec, created, changed };
            let [labels, annotations, spec] = texts(&template)?;
            conn.prepare_cached("INSERT INTO templates VALUES (?1, ?2, 1, ?3, ?4, ?5, ?6, ?6)")?
                .execute((&template.workspace, &template.name, labels, annotations, spec, at))?;
            Ok(template)
        })
        .await
    }

    /// One template.
    ///
    /// # Errors
    /// `NoTemplate`, or the database's.
    pub async fn template(self: &Arc<Self>, key: TemplateKey) -> Result<Template, StoreError> {
        self.read(move |conn| load(conn, &key)).await
    }

    /// At most `size` templates of a workspace, by name, after the one with the name of the token.
    ///
    /// # Errors
    /// `NoWorkspace`, `BadToken`, or the database's.
    pub async fn templates(
        self: &Arc<Self>,
        workspace: String,
        size: usize,
        token: Option<String>,
        selector: Selector,
    ) -> Result<Page<Template>, StoreError> {
        let after = token.as_deref().map(parse_token).transpose()?.unwrap_or_default();
        self.read(move |conn| {
            workspaces::expect(conn, &workspace)?;
            let sql =
                format!("SELECT {COLUMNS} FROM templates WHERE workspace = ?1 AND name > ?2 ORDER BY name");
            let mut statement = conn.prepare_cached(&sql)?;
            let found = statement.query_map((&workspace, &after), raw)?.map(|row| finish(row?));
            let (rows, more) = page(found, size, |row| selector.matches(&row.labels))?;
            let next = rows.last().filter(|_| more).map(|row| template_token(&row.name));
            Ok(Page { rows, next })
        })
        .await
    }

    /// Writes another state of a template, which is at version `expected`.
    ///
    /// # Errors
    /// `NoTemplate`, `StaleTemplate`, `RequestReused`, or the database's.
    pub async fn update_template(
        &self,
        key: TemplateKey,
        expected: u64,
        change: impl FnOnce(&mut Template) + Send + 'static,
        request: Option<RequestKey>,
    ) -> Result<Template, StoreError> {
        self.write_if_possible(move |conn, _| {
            if let Some(before) = before(conn, request.as_ref())? {
                return Ok(before);
            }
            let mut template = load(conn, &key)?;
            expect(&template, &key, expected)?;
            if let Some(request) = &request {
                remember(conn, request, &place(&key))?;
            }
            let old = texts(&template)?;
            change(&mut template);
            let new = texts(&template)?;
            if old == new {
                return Ok(template);
            }
            let at = now();
            (template.version, template.changed) = (template.version + 1, from_millis(at));
            let [labels, annotations, spec] = new;
            conn.prepare_cached(
                "UPDATE templates SET version = ?3, labels = ?4, annotations = ?5, spec = ?6, changed_ms = ?7
                 WHERE workspace = ?1 AND name = ?2",
            )?
            .execute((
                &key.workspace,
                &key.name,
                template.version,
                labels,
                annotations,
                spec,
                at,
            ))?;
            Ok(template)
        })
        .await
    }

    /// Removes a template. True: it was there.
    ///
    /// # Errors
    /// `StaleTemplate`, or the database's.
    pub async fn delete_template(&self, key: TemplateKey, expected: Option<u64>) -> Result<bool, StoreError> {
        self.write_if_possible(move |conn, _| {
            let Some(template) = find(conn, &key)? else { return Ok(false) };
            expected.map_or(Ok(()), |expected| expect(&template, &key, expected))?;
            let sql = "DELETE FROM templates WHERE workspace = ?1 AND name = ?2";
            conn.prepare_cached(sql)?.execute((&key.workspace, &key.name))?;
            Ok(true)
        })
        .await
    }
}

/// A token for what comes after the template with this name.
pub fn template_token(name: &str) -> String {
    format!("t1.{name}")
}

fn parse_token(token: &str) -> Result<String, StoreError> {
    let name = token.strip_prefix("t1.").filter(|name| !name.is_empty());
    let wrong = || StoreError::BadToken(format!("'{}' is not a page token of templates", clip(token)));
    name.map(str::to_owned).ok_or_else(wrong)
}
