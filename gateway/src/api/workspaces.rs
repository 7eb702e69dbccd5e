//! `torpor.v1.Workspaces`.

use std::collections::BTreeMap;

use tonic::{Request, Response, Status};
use torpor_proto::v1;
use torpor_sandbox::spec::{DEFAULT_WORKSPACE, validate_labels};

use super::{Shared, convert, sandboxes::page_size};
use crate::{
    access::{self, Caller, workspace_name},
    error::{ApiError, Code},
    service::request_key,
    store::{Member, Role, Selector, StoreError, Workspace},
};

/// Longest subject, bytes.
const LONGEST_SUBJECT: usize = 300;

type Reply<T> = Result<Response<T>, Status>;

/// See the module.
pub struct WorkspacesApi(pub Shared);

pub fn role(role: Role) -> v1::Role {
    match role {
        Role::Viewer => v1::Role::Viewer,
        Role::Editor => v1::Role::Editor,
        Role::Owner => v1::Role::Owner,
    }
}

/// A role from a client.
pub fn wanted_role(role: i32) -> Result<Option<Role>, ApiError> {
    match v1::Role::try_from(role) {
        Ok(v1::Role::Unspecified) => Ok(None),
        Ok(v1::Role::Viewer) => Ok(Some(Role::Viewer)),
        Ok(v1::Role::Editor) => Ok(Some(Role::Editor)),
        Ok(v1::Role::Owner) => Ok(Some(Role::Owner)),
        Err(_) => Err(ApiError::invalid("role", format!("{role} is not known"))),
    }
}

fn subject(text: String) -> Result<String, ApiError> {
    // Tokens have rights of their own.
    let kinds = ["cert:", "oidc:"];
    let known = match text.strip_prefix("uid:") {
        // Only as the kernel's own numbers are written does anybody match.
        Some(uid) => uid.parse::<u32>().is_ok_and(|number| number.to_string() == uid),
        None => kinds.iter().any(|kind| text.starts_with(kind) && text.len() > kind.len()),
    };
    if !known || text.len() > LONGEST_SUBJECT || text.contains(char::is_control) {
        let problem = "a subject is uid:NUMBER, cert:NAME or oidc:SUBJECT; `torpor whoami` shows one's own";
        return Err(ApiError::invalid("subject", problem));
    }
    Ok(text)
}

fn shown(caller: &Caller, workspace: Workspace) -> v1::Workspace {
    let own = caller.role_in(&workspace.name).filter(|_| !caller.is_admin());
    v1::Workspace {
        version: workspace.version,
        labels: workspace.labels.into_iter().collect(),
        created: convert::time(workspace.created),
        sandboxes: workspace.sandboxes,
        role: own.map_or(0, |own| role(own).into()),
        name: workspace.name,
    }
}

pub fn member(member: Member) -> v1::Member {
    v1::Member {
        workspace: member.workspace,
        subject: member.subject,
        role: role(member.role).into(),
        created: convert::time(member.created),
    }
}

#[tonic::async_trait]
impl v1::workspaces_server::Workspaces for WorkspacesApi {
    async fn create(&self, request: Request<v1::CreateWorkspaceRequest>) -> Reply<v1::Workspace> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let name = workspace_name(&request.name)?;
        caller.speaks_of(&name);
        let labels: BTreeMap<String, String> = request.labels.into_iter().collect();
        validate_labels(&labels).map_err(ApiError::from)?;
        let owner = convert::text(request.owner).map(subject).transpose()?;
        let asked = format!("{name} {labels:?} {owner:?}");
        let id = convert::text(request.request_id);
        let key = request_key(caller.current(), id, "create workspace", &asked)?;
        let store = self.0.store.clone();
        let change = async move { store.create_workspace(name, labels, owner, key).await };
        let made = caller.access().change(change).await?;
        Ok(Response::new(shown(&caller, made)))
    }

    async fn get(&self, request: Request<v1::GetWorkspaceRequest>) -> Reply<v1::Workspace> {
        let caller = access::caller(&request)?;
        let name = caller.workspace(&request.into_inner().name)?;
        let found = self.0.store.workspace(&name).await?;
        Ok(Response::new(shown(&caller, found)))
    }

    async fn list(&self, request: Request<v1::ListWorkspacesRequest>) -> Reply<v1::ListWorkspacesResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let size = page_size(request.page_size)?;
        let selector: Selector = request.label_selector.parse()?;
        let selector = selector.within(caller.scope(true)?);
        let page = self.0.store.workspaces(size, convert::text(request.page_token), selector).await?;
        Ok(Response::new(v1::ListWorkspacesResponse {
            workspaces: page.rows.into_iter().map(|row| shown(&caller, row)).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteWorkspaceRequest>,
    ) -> Reply<v1::DeleteWorkspaceResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        if request.name.is_empty() {
            return Err(ApiError::invalid("name", "a workspace is needed").into());
        }
        caller.speaks_of(&request.name);
        if request.name == DEFAULT_WORKSPACE {
            let message = "the default workspace can't be deleted: it is where calls work that name none";
            return Err(ApiError::new(Code::FailedPrecondition, "DEFAULT_WORKSPACE", message).into());
        }
        let store = self.0.store.clone();
        let change = async move {
            match store.delete_workspace(request.name).await {
                Ok(()) => Ok(true),
                Err(StoreError::NoWorkspace(_)) if request.allow_missing => Ok(false),
                Err(error) => Err(error),
            }
        };
        let removed = caller.access().change(change).await?;
        Ok(Response::new(v1::DeleteWorkspaceResponse { removed }))
    }

    async fn set_member(&self, request: Request<v1::SetMemberRequest>) -> Reply<v1::Member> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace(&request.workspace)?;
        caller.speaks_of(&format!("{workspace}/{}", request.subject));
        let wanted = wanted_role(request.role)?;
        let wanted = wanted.ok_or_else(|| ApiError::invalid("role", "viewer, editor or owner"))?;
        let subject = subject(request.subject)?;
        let store = self.0.store.clone();
        let change = async move { store.set_member(workspace, subject, wanted).await };
        let set = caller.access().change(change).await?;
        Ok(Response::new(member(set)))
    }

    async fn remove_member(
        &self,
        request: Request<v1::RemoveMemberRequest>,
    ) -> Reply<v1::RemoveMemberResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace(&request.workspace)?;
        caller.speaks_of(&format!("{workspace}/{}", request.subject));
        let (store, named, subject) = (self.0.store.clone(), workspace.clone(), request.subject.clone());
        let change = async move { store.remove_member(named, subject).await };
        let removed = caller.access().change(change).await?;
        if !removed && !request.allow_missing {
            let message =
                format!("'{}' is no member of workspace '{workspace}'", request.subject.escape_debug());
            return Err(ApiError::new(Code::NotFound, "MEMBER_NOT_FOUND", message).into());
        }
        Ok(Response::new(v1::RemoveMemberResponse { removed }))
    }

    async fn list_members(&self, request: Request<v1::ListMembersRequest>) -> Reply<v1::ListMembersResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace(&request.workspace)?;
        let size = page_size(request.page_size)?;
        let page = self.0.store.members(&workspace, size, convert::text(request.page_token)).await?;
        Ok(Response::new(v1::ListMembersResponse {
            members: page.rows.into_iter().map(member).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }
}
