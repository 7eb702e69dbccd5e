//! Workspaces and their members.

use prost::Message as _;
use tonic::Status;
use torpor_proto::{
    openshell::{
        datamodel::v1::{ObjectMeta, Workspace, WorkspacePhase, WorkspaceStatus},
        v1::{self as os, DeletionOutcome, WorkspaceRole},
    },
    v1::{self, workspaces_server::Workspaces as _},
};

use super::{OpenShellApi, call::Call};
use crate::error::ApiError;

fn shown(from: v1::Workspace) -> Workspace {
    Workspace {
        metadata: Some(ObjectMeta {
            id: format!("workspace-{}", from.name),
            workspace: from.name.clone(),
            name: from.name,
            created_time: from.created,
            labels: from.labels.into_iter().collect(),
            resource_version: from.version,
            ..ObjectMeta::default()
        }),
        status: Some(WorkspaceStatus { phase: WorkspacePhase::Active.into() }),
    }
}

/// Those who only see have no role of theirs.
fn role(role: v1::Role) -> WorkspaceRole {
    match role {
        v1::Role::Owner => WorkspaceRole::Admin,
        v1::Role::Editor => WorkspaceRole::User,
        v1::Role::Viewer | v1::Role::Unspecified => WorkspaceRole::Unspecified,
    }
}

fn wanted_role(role: i32) -> Result<v1::Role, ApiError> {
    match WorkspaceRole::try_from(role) {
        Ok(WorkspaceRole::User) => Ok(v1::Role::Editor),
        Ok(WorkspaceRole::Admin) => Ok(v1::Role::Owner),
        Ok(WorkspaceRole::Unspecified) | Err(_) => Err(ApiError::invalid("role", "user or admin is needed")),
    }
}

fn member(from: v1::Member) -> os::WorkspaceMember {
    os::WorkspaceMember {
        role: role(from.role()).into(),
        metadata: Some(ObjectMeta {
            id: format!("member-{}-{}", from.workspace, from.subject),
            name: from.subject.clone(),
            created_time: from.created,
            workspace: from.workspace,
            ..ObjectMeta::default()
        }),
        principal_subject: from.subject,
    }
}

fn outcome(removed: bool) -> i32 {
    if removed { DeletionOutcome::Completed } else { DeletionOutcome::AlreadyAbsent }.into()
}

pub async fn create(
    api: &OpenShellApi,
    call: Call,
    message: os::CreateWorkspaceRequest,
) -> Result<os::CreateWorkspaceResponse, Status> {
    let request = v1::CreateWorkspaceRequest {
        name: message.name,
        labels: message.labels.into_iter().collect(),
        request_id: message.request_id,
        ..v1::CreateWorkspaceRequest::default()
    };
    let made = api.workspaces().create(call.ask("", request)).await?.into_inner();
    Ok(os::CreateWorkspaceResponse { workspace: Some(shown(made)) })
}

pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetWorkspaceRequest,
) -> Result<os::GetWorkspaceResponse, Status> {
    if message.name.is_empty() {
        return Err(ApiError::invalid("name", "the name of a workspace is needed").into());
    }
    let request = v1::GetWorkspaceRequest { name: message.name };
    let found = api.workspaces().get(call.ask("", request)).await?.into_inner();
    Ok(os::GetWorkspaceResponse { workspace: Some(shown(found)) })
}

pub async fn list(
    api: &OpenShellApi,
    call: Call,
    message: os::ListWorkspacesRequest,
) -> Result<os::ListWorkspacesResponse, Status> {
    let request = v1::ListWorkspacesRequest {
        page_size: message.page_size,
        page_token: message.page_token,
        label_selector: message.label_selector,
    };
    let page = api.workspaces().list(call.ask("", request)).await?.into_inner();
    Ok(os::ListWorkspacesResponse {
        workspaces: page.workspaces.into_iter().map(shown).collect(),
        next_page_token: page.next_page_token,
    })
}

pub async fn delete(
    api: &OpenShellApi,
    call: Call,
    mut message: os::DeleteWorkspaceRequest,
) -> Result<os::DeleteWorkspaceResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell delete workspace", &message)?;
    // The first one has deleted it: a retry is not told that it was absent.
    if api.service.store.answered(key.as_ref()).await?.is_some() {
        return Ok(os::DeleteWorkspaceResponse { outcome: DeletionOutcome::Completed.into() });
    }
    let request = v1::DeleteWorkspaceRequest { name: message.name, allow_missing: message.allow_missing };
    let removed = api.workspaces().delete(call.ask("", request)).await?.into_inner().removed;
    if removed {
        api.service.store.foreign_once(key, |_| Ok(Vec::new())).await?;
    }
    Ok(os::DeleteWorkspaceResponse { outcome: outcome(removed) })
}

pub async fn add_member(
    api: &OpenShellApi,
    call: Call,
    mut message: os::AddWorkspaceMemberRequest,
) -> Result<os::AddWorkspaceMemberResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell add member", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    // Whoever was removed since stays removed: a retry only says what came of the first one.
    if let Some(answer) = api.service.store.answered(key.as_ref()).await? {
        return Ok(os::AddWorkspaceMemberResponse::decode(answer.as_slice()).map_err(ApiError::internal)?);
    }
    let request = v1::SetMemberRequest {
        workspace: workspace.clone(),
        subject: message.principal_subject,
        role: wanted_role(message.role)?.into(),
    };
    let set = api.workspaces().set_member(call.ask(&workspace, request)).await?.into_inner();
    let answer = os::AddWorkspaceMemberResponse { member: Some(member(set)) };
    let kept = answer.encode_to_vec();
    api.service.store.foreign_once(key, move |_| Ok(kept)).await?;
    Ok(answer)
}

pub async fn remove_member(
    api: &OpenShellApi,
    call: Call,
    mut message: os::RemoveWorkspaceMemberRequest,
) -> Result<os::RemoveWorkspaceMemberResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell remove member", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    if api.service.store.answered(key.as_ref()).await?.is_some() {
        return Ok(os::RemoveWorkspaceMemberResponse { outcome: DeletionOutcome::Completed.into() });
    }
    let request = v1::RemoveMemberRequest {
        workspace: workspace.clone(),
        subject: message.principal_subject,
        allow_missing: message.allow_missing,
    };
    let removed = api.workspaces().remove_member(call.ask(&workspace, request)).await?.into_inner().removed;
    if removed {
        api.service.store.foreign_once(key, |_| Ok(Vec::new())).await?;
    }
    Ok(os::RemoveWorkspaceMemberResponse { outcome: outcome(removed) })
}

pub async fn members(
    api: &OpenShellApi,
    call: Call,
    message: os::ListWorkspaceMembersRequest,
) -> Result<os::ListWorkspaceMembersResponse, Status> {
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let request = v1::ListMembersRequest {
        workspace: workspace.clone(),
        page_size: message.page_size,
        page_token: message.page_token,
    };
    let page = api.workspaces().list_members(call.ask(&workspace, request)).await?.into_inner();
    Ok(os::ListWorkspaceMembersResponse {
        members: page.members.into_iter().map(member).collect(),
        next_page_token: page.next_page_token,
    })
}
