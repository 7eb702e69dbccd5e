//! One call of a client: who makes it, and in which workspace.

use prost::Message;
use sha2::{Digest as _, Sha256};
use tonic::{Extensions, Request, metadata::MetadataMap};
use torpor_proto::openshell::datamodel::v1::{WorkspaceSelector, workspace_selector::Selection};
use torpor_sandbox::{SandboxId, id::clip};

use super::Shared;
use crate::{
    access::{Caller, caller},
    error::ApiError,
    service::request_key,
    store::{Record, RequestKey, Scope, StoreError},
};

/// What stays of a call when its message is taken out.
pub struct Call {
    /// Who makes it.
    pub caller: Caller,
    metadata: MetadataMap,
    extensions: Extensions,
}

/// The one workspace that a scope names; empty: it names none.
fn one_of(scope: Option<WorkspaceSelector>) -> Result<String, ApiError> {
    match scope.and_then(|scope| scope.selection) {
        None => Ok(String::new()),
        Some(Selection::Workspace(name)) if name.is_empty() => {
            Err(ApiError::invalid("workspace_scope.workspace", "a name is needed"))
        }
        Some(Selection::Workspace(name)) => Ok(name),
        Some(Selection::AllWorkspaces(_)) => {
            Err(ApiError::invalid("workspace_scope", "this call works in one workspace; name it"))
        }
    }
}

/// Takes the message out of a request.
///
/// # Errors
/// The caller is not known.
pub fn open<T>(request: Request<T>) -> Result<(Call, T), tonic::Status> {
    let caller = caller(&request)?;
    let (metadata, extensions, message) = request.into_parts();
    Ok((Call { caller, metadata, extensions }, message))
}

/// A sandbox that a call speaks of.
pub struct Named {
    /// Its workspace.
    pub workspace: String,
    /// Its name there, or its id: as `torpor.v1` is told of it in that workspace.
    pub key: String,
}

impl Call {
    /// The same call with a message of `torpor.v1`, in a workspace.
    pub fn ask<T>(&self, workspace: &str, message: T) -> Request<T> {
        let mut extensions = self.extensions.clone();
        extensions.insert(self.caller.clone().in_workspace(workspace));
        Request::from_parts(self.metadata.clone(), extensions, message)
    }

    /// The same call in another workspace; empty: where it is.
    #[must_use]
    pub fn within(self, workspace: &str) -> Self {
        Self { caller: self.caller.in_workspace(workspace), ..self }
    }

    /// The workspace that is meant, when the caller may make this call there.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for all of them, and as [`Caller::workspace`].
    pub fn workspace(&self, scope: Option<WorkspaceSelector>) -> Result<String, ApiError> {
        self.caller.workspace(&one_of(scope)?)
    }

    /// The same; it must be there.
    ///
    /// # Errors
    /// As [`Call::workspace`]; `NOT_FOUND`.
    pub async fn present(
        &self,
        service: &Shared,
        scope: Option<WorkspaceSelector>,
    ) -> Result<String, ApiError> {
        let workspace = self.workspace(scope)?;
        service.store.workspace(&workspace).await?;
        Ok(workspace)
    }

    /// The workspaces that are listed, and whether it is all of them.
    ///
    /// # Errors
    /// As [`Call::present`].
    pub async fn scope(
        &self,
        service: &Shared,
        scope: Option<WorkspaceSelector>,
    ) -> Result<(Scope, String, bool), ApiError> {
        if let Some(WorkspaceSelector { selection: Some(Selection::AllWorkspaces(_)) }) = scope {
            return Ok((self.caller.scope(true)?, String::new(), true));
        }
        let workspace = self.present(service, scope).await?;
        Ok((Scope::In([workspace.clone()].into()), workspace, false))
    }

    /// The sandbox of a workspace that is named.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` without a name; `NOT_FOUND` for an id that belongs to another workspace, and for what can be no
    /// name; as [`Call::workspace`]. Whether there is one is found out by whoever uses it.
    pub async fn sandbox(
        &self,
        service: &Shared,
        scope: Option<WorkspaceSelector>,
        name: &str,
    ) -> Result<Named, ApiError> {
        Ok(self.resolve(service, scope, name).await?.0)
    }

    /// The sandbox that is named, and its key in the store.
    async fn resolve(
        &self,
        service: &Shared,
        scope: Option<WorkspaceSelector>,
        name: &str,
    ) -> Result<(Named, String), ApiError> {
        if name.is_empty() {
            return Err(ApiError::invalid("name", "the name of a sandbox is needed"));
        }
        let unknown = || Err(StoreError::NotFound(clip(name)).into());
        let caller = self.caller.clone().in_workspace(&one_of(scope)?);
        let workspace = caller.current().to_owned();
        // A slash would name another workspace.
        if name.contains('/') || workspace.contains('/') {
            return unknown();
        }
        let key = caller.key(name).await?;
        if name.parse::<SandboxId>().is_ok() {
            match service.store.get(name).await {
                Ok(record) if record.spec.workspace != workspace => return unknown(),
                // Whoever uses the key finds out, a retry of a delete among them.
                Ok(_) | Err(StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok((Named { workspace, key: name.to_owned() }, key))
    }

    /// The record of the sandbox that is named.
    ///
    /// # Errors
    /// As [`Call::sandbox`]; `NOT_FOUND`.
    pub async fn record(
        &self,
        service: &Shared,
        scope: Option<WorkspaceSelector>,
        name: &str,
    ) -> Result<Record, ApiError> {
        let (_, key) = self.resolve(service, scope, name).await?;
        Ok(service.store.get(&key).await?)
    }

    /// The key under which the answer to a request is kept for a retry. `asked`: the message without its request id.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`.
    pub fn once(
        &self,
        id: String,
        verb: &'static str,
        asked: &impl Message,
    ) -> Result<Option<RequestKey>, ApiError> {
        if id.is_empty() {
            return Ok(None);
        }
        let workspace = self.caller.current();
        let asked = format!("{workspace} {:x}", Sha256::digest(asked.encode_to_vec()));
        request_key(workspace, Some(id), verb, &asked)
    }
}
