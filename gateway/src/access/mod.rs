//! Who calls, and what that caller may do.
//!
//! A caller is known by the unix socket's peer credentials, a token, a client certificate or an OIDC token. Its rights
//! come from the token itself, or from the members of workspaces; administrators may do everything. Every call is
//! checked twice: its method's class before it is served ([`layer`]), and the workspace it speaks of by [`Caller::key`]
//! and its likes, which every handler asks for the sandbox it was given.

mod audit;
mod identify;
mod layer;
mod methods;
mod oidc;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::Future,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use tokio_util::sync::CancellationToken;

use torpor_sandbox::{
    SandboxId, SandboxName,
    id::clip,
    spec::{DEFAULT_WORKSPACE, qualified, unqualified},
};

pub use audit::Audit;
pub use identify::{PREFIX as SECRET_PREFIX, Peer, certificate_subject, hash_of, new_secret};
pub use layer::Guard;
pub use methods::{Method, Need};

/// The method of a path, as the table has it.
pub fn method_of_path(path: &str) -> Option<&'static str> {
    methods::of_path(path).map(|method| method.path)
}

pub use oidc::Oidc;

use crate::{
    error::{ApiError, Code},
    store::{Member, Rights, Role, Scope, Store, StoreError},
};

/// So many callers are remembered before those without calls are forgotten.
const MANY_LIVE: usize = 10_000;
/// In place of what a caller may not see.
pub const REDACTED: &str = "REDACTED";
/// Begins the subjects of those who are known by a token of ours; its id follows.
const TOKEN: &str = "token:";

/// What the gateway knows of everybody's rights.
pub struct Access {
    store: Arc<Store>,
    /// By subject, then by workspace: what the table of members says.
    members: RwLock<HashMap<String, BTreeMap<String, Role>>>,
    admins: BTreeSet<String>,
    oidc: Option<Oidc>,
    audit: Audit,
    /// Held while the table is changed and read anew.
    changing: tokio::sync::Mutex<()>,
    /// Grows with every change of rights, before anybody's calls are ended for it.
    changes: AtomicU64,
    /// Ends the calls of those whose rights have shrunk, by subject. Each call holds that of its caller.
    live: Mutex<HashMap<String, Arc<CancellationToken>>>,
}

/// How a caller is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Credentials of the unix socket's peer.
    Peer,
    /// A token of ours.
    Token,
    /// A client certificate.
    Certificate,
    /// Somebody else's token, whose issuer is trusted.
    Oidc,
    /// Not at all: the plaintext listener lets it.
    Plaintext,
}

impl By {
    /// In one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Token => "token",
            Self::Certificate => "certificate",
            Self::Oidc => "oidc",
            Self::Plaintext => "plaintext",
        }
    }
}

/// Where rights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Everything.
    Admin,
    /// What the members of workspaces say of the subject.
    Membership,
    /// This role, in this workspace or in all.
    Fixed {
        /// What.
        role: Role,
        /// Where; none: everywhere.
        workspace: Option<String>,
    },
    /// A few calls about one sandbox.
    Sandbox(SandboxId),
}

/// Somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// "uid:1000", "cert:NAME", "oidc:SUBJECT", "token:NAME", "sandbox:ID".
    pub subject: String,
    /// How it is known.
    pub by: By,
    /// Its rights.
    pub grant: Grant,
    /// The workspace that its calls work in when they name none.
    pub home: Option<String>,
    /// It is nobody from then on.
    pub expires: Option<SystemTime>,
}

/// The caller of one call.
#[derive(Clone)]
pub struct Caller {
    identity: Identity,
    method: &'static Method,
    workspace: String,
    access: Arc<Access>,
    /// What it spoke of, for the audit log.
    named: Arc<Mutex<String>>,
}

impl Access {
    /// Reads the table of members.
    ///
    /// # Errors
    /// The database's.
    pub async fn open(
        store: Arc<Store>,
        admins: BTreeSet<String>,
        oidc: Option<Oidc>,
        audit: Audit,
    ) -> Result<Self, StoreError> {
        let access = Self {
            store,
            members: RwLock::default(),
            admins,
            oidc,
            audit,
            changing: tokio::sync::Mutex::default(),
            changes: AtomicU64::new(0),
            live: Mutex::default(),
        };
        access.reload().await?;
        Ok(access)
    }

    /// Makes a change of rights, and has it in force when this returns, whether or not the caller waits: what is under
    /// way with rights that are gone has ended then.
    ///
    /// # Errors
    /// The change's, or the database's.
    pub async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let access = self.clone();
        let done = tokio::spawn(async move {
            let _changing = access.changing.lock().await;
            let done = change.await?;
            access.reload().await?;
            Ok::<T, StoreError>(done)
        });
        Ok(done.await.map_err(ApiError::internal)??)
    }

    /// Ends what a caller has under way, after its rights have shrunk.
    fn end_calls(&self, subject: &str) {
        let ended = self.live.lock().unwrap_or_else(PoisonError::into_inner).remove(subject);
        if let Some(ended) = ended {
            ended.cancel();
        }
    }

    /// What ends when the rights of a caller shrink.
    fn joined(&self, subject: &str) -> Arc<CancellationToken> {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        let new = !live.contains_key(subject);
        if new && live.len() >= MANY_LIVE && live.len().is_power_of_two() {
            // A call that is under way holds its caller's.
            live.retain(|_, ended| Arc::strong_count(ended) > 1);
        }
        live.entry(subject.to_owned()).or_default().clone()
    }

    /// How many changes of rights there were. A caller that was found before one of them, and has joined after it, may have
    /// rights that are gone, and nothing would end its call.
    fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Callers with calls that can be ended, who are known by tokens of ours with these ids.
    fn live_tokens(&self) -> Vec<String> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.keys().filter_map(|subject| subject.strip_prefix(TOKEN)).map(str::to_owned).collect()
    }

    /// Reads the table of members anew. Whose role in a workspace shrank, and whose token is gone, loses what it has under
    /// way.
    async fn reload(&self) -> Result<(), StoreError> {
        // What was changed is in the database. Whoever joins from now on looks again; the others are among the live ones.
        self.changes.fetch_add(1, Ordering::SeqCst);
        // Before the tokens are read: one that is made meanwhile is not among them.
        let live = self.live_tokens();
        if !live.is_empty() {
            let there = self.store.token_ids().await?;
            live.iter()
                .filter(|id| !there.contains(*id))
                .for_each(|id| self.end_calls(&format!("{TOKEN}{id}")));
        }
        let mut members: HashMap<String, BTreeMap<String, Role>> = HashMap::new();
        for Member { workspace, subject, role, .. } in self.store.all_members().await? {
            members.entry(subject).or_default().insert(workspace, role);
        }
        let shrunk: Vec<String> = {
            let mut held = self.members.write().unwrap_or_else(PoisonError::into_inner);
            let shrank = |(subject, had): &(&String, &BTreeMap<String, Role>)| {
                let has = members.get(*subject);
                had.iter().any(|(place, role)| has.and_then(|has| has.get(place)) < Some(role))
            };
            let shrunk = held.iter().filter(shrank).map(|(subject, _)| subject.clone()).collect();
            *held = members;
            shrunk
        };
        shrunk.iter().for_each(|subject| self.end_calls(subject));
        Ok(())
    }

    fn memberships(&self, subject: &str) -> BTreeMap<String, Role> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.get(subject).cloned().unwrap_or_default()
    }
}

/// The caller that [`layer`] has found.
///
/// # Errors
/// There is none: the call came by no listener of ours.
pub fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, tonic::Status> {
    let found = request.extensions().get::<Caller>().cloned();
    found.ok_or_else(|| tonic::Status::internal("the caller of this call is not known to its handler"))
}

impl Caller {
    /// Who it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether it may do everything.
    pub fn is_admin(&self) -> bool {
        self.identity.grant == Grant::Admin
    }

    /// The rights, for who changes them.
    pub fn access(&self) -> &Arc<Access> {
        &self.access
    }

    /// The same caller in another workspace, which the message itself names; empty: where it is.
    #[must_use]
    pub fn in_workspace(mut self, named: &str) -> Self {
        if !named.is_empty() {
            named.clone_into(&mut self.workspace);
        }
        self
    }

    /// The workspace that the call works in, whatever the caller may do there.
    pub fn current(&self) -> &str {
        &self.workspace
    }

    /// Its role in a workspace.
    pub fn role_in(&self, workspace: &str) -> Option<Role> {
        match &self.identity.grant {
            Grant::Admin => Some(Role::Owner),
            Grant::Fixed { role, workspace: only } => {
                only.as_deref().is_none_or(|only| only == workspace).then_some(*role)
            }
            Grant::Membership => self.access.memberships(&self.identity.subject).get(workspace).copied(),
            Grant::Sandbox(_) => None,
        }
    }

    /// Hides the values of an environment from a caller who may only look: they are often credentials. The names stay.
    pub fn veil(&self, workspace: &str, environment: &mut HashMap<String, String>) {
        let own = matches!(self.identity.grant, Grant::Sandbox(_));
        if !own && self.role_in(workspace) < Some(Role::Editor) {
            environment.values_mut().for_each(|value| REDACTED.clone_into(value));
        }
    }

    /// Where it has which role, where that can be listed.
    pub fn memberships(&self) -> BTreeMap<String, Role> {
        match &self.identity.grant {
            Grant::Fixed { role, workspace: Some(workspace) } => [(workspace.clone(), *role)].into(),
            Grant::Membership => self.access.memberships(&self.identity.subject),
            _ => BTreeMap::new(),
        }
    }

    /// Remembers what the call speaks of, for the audit log.
    pub fn speaks_of(&self, what: &str) {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        *named = clip(what);
    }

    fn denied(&self, workspace: &str, role: Role, needed: Role) -> ApiError {
        let Identity { subject, .. } = &self.identity;
        let message = format!(
            "{subject} is {role} of workspace '{workspace}'; {} needs {needed}",
            self.method.path.rsplit('/').next().unwrap_or_default()
        );
        ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", message).with(
            "next",
            format!("torpor workspace member set {subject} --role {needed} --workspace {workspace}"),
        )
    }

    /// Whether it may make this call in a workspace; none: it may not even know that there is one.
    fn may(&self, workspace: &str) -> Option<Result<(), ApiError>> {
        let role = self.role_in(workspace)?;
        Some(match self.method.need {
            Need::Role(needed) if role < needed => Err(self.denied(workspace, role, needed)),
            Need::Admin if !self.is_admin() => Err(self.denied(workspace, role, Role::Owner)),
            _ => Ok(()),
        })
    }

    /// The workspace that is spoken of, when the caller may make this call there; empty: the one that it works in.
    ///
    /// # Errors
    /// `NOT_FOUND` where it has no role, `PERMISSION_DENIED` where it has too small a one.
    pub fn workspace(&self, named: &str) -> Result<String, ApiError> {
        let workspace = if named.is_empty() { &self.workspace } else { named };
        self.speaks_of(workspace);
        match self.may(workspace) {
            Some(allowed) => allowed.map(|()| workspace.to_owned()),
            None if matches!(self.identity.grant, Grant::Sandbox(_)) => Err(self.of_another_sandbox()),
            None => Err(StoreError::NoWorkspace(clip(workspace)).into()),
        }
    }

    /// The workspaces that are listed: the one that it works in, or all that it may look into.
    ///
    /// # Errors
    /// As [`Caller::workspace`].
    pub fn scope(&self, all: bool) -> Result<Scope, ApiError> {
        if !all {
            return Ok(Scope::In([self.workspace("")?].into()));
        }
        Ok(match &self.identity.grant {
            Grant::Admin | Grant::Fixed { workspace: None, .. } => Scope::All,
            Grant::Sandbox(_) => return Err(self.of_another_sandbox()),
            _ => Scope::In(self.memberships().into_keys().collect()),
        })
    }

    fn of_another_sandbox(&self) -> ApiError {
        let message = format!("{} may speak of its own sandbox only", self.identity.subject);
        ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", message)
    }

    /// The key of a sandbox that was named by its name ("box", "team/box") or id, when the caller may make this call
    /// about it. Whether there is one is found out by whoever uses the key; an empty name stays empty.
    ///
    /// # Errors
    /// As [`Caller::workspace`]; `NOT_FOUND` also for an id that isn't there.
    pub async fn key(&self, named: &str) -> Result<String, ApiError> {
        if named.is_empty() {
            return Ok(String::new());
        }
        self.speaks_of(named);
        if let Grant::Sandbox(own) = &self.identity.grant {
            return self.own(own, named).await;
        }
        if named.parse::<SandboxId>().is_ok() {
            if self.is_admin() {
                return Ok(named.to_owned());
            }
            let record = match self.access.store.get(named).await {
                // Whoever uses the key finds out, a retry of a delete among them.
                Err(StoreError::NotFound(_)) => return Ok(named.to_owned()),
                found => found?,
            };
            return match self.may(&record.spec.workspace) {
                Some(allowed) => allowed.map(|()| named.to_owned()),
                None => Err(StoreError::NotFound(clip(named)).into()),
            };
        }
        let (workspace, name) = named.split_once('/').unwrap_or((&self.workspace, named));
        // What is left is a name, and not another workspace's.
        if name.contains('/') || name.parse::<SandboxId>().is_ok() {
            return Err(StoreError::NotFound(clip(named)).into());
        }
        match self.may(workspace) {
            Some(allowed) => allowed.map(|()| qualified(workspace, name)),
            None => Err(StoreError::NotFound(clip(named)).into()),
        }
    }

    /// What runs in a sandbox speaks of that one, by whatever name.
    async fn own(&self, own: &SandboxId, named: &str) -> Result<String, ApiError> {
        if named == own.as_str() {
            return Ok(named.to_owned());
        }
        let record = self.access.store.get(own.as_str()).await?;
        let (workspace, name) = unqualified(&record.name);
        let is_own = [name, &record.name, &format!("{workspace}/{name}")].contains(&named);
        if is_own { Ok(own.to_string()) } else { Err(self.of_another_sandbox()) }
    }
}

/// A workspace's name from a client.
///
/// # Errors
/// It is no DNS label.
pub fn workspace_name(name: &str) -> Result<String, ApiError> {
    let parsed = name.parse::<SandboxName>().map_err(|e| ApiError::invalid("workspace", e))?;
    Ok(parsed.to_string())
}

/// The workspace of callers that name none.
pub fn usual_workspace() -> String {
    DEFAULT_WORKSPACE.to_owned()
}

/// What a token's rights are as a grant.
pub(crate) fn grant_of(rights: Rights, workspace: Option<String>) -> Grant {
    match rights {
        Rights::Admin => Grant::Admin,
        Rights::Role(role) => Grant::Fixed { role, workspace },
    }
}
