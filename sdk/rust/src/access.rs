//! Workspaces, members and tokens.

use torpor_proto::v1::{self, access_client::AccessClient, workspaces_client::WorkspacesClient};

use crate::{client::Client, endpoint::Transport, error::Error, retry::fill_in};

/// Rows asked for at once.
const PAGE: i32 = 500;

impl Client {
    fn workspaces(&self) -> WorkspacesClient<Transport> {
        WorkspacesClient::new(self.transport())
    }

    fn access(&self) -> AccessClient<Transport> {
        AccessClient::new(self.transport())
    }

    /// Makes a workspace.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn create_workspace(
        &self,
        mut request: v1::CreateWorkspaceRequest,
    ) -> Result<v1::Workspace, Error> {
        fill_in(&mut request.request_id);
        retried!(self.workspaces().create(request))
    }

    /// One workspace; empty: the one that calls work in.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn get_workspace(&self, name: &str) -> Result<v1::Workspace, Error> {
        let request = v1::GetWorkspaceRequest { name: name.to_owned() };
        retried!(self.workspaces().get(request))
    }

    /// All workspaces that the caller may look into, through all pages.
    ///
    /// # Errors
    /// See [`Client`]; [`Error::Protocol`] when the pages go round in a circle.
    pub async fn list_workspaces(&self, label_selector: &str) -> Result<Vec<v1::Workspace>, Error> {
        let request = v1::ListWorkspacesRequest {
            page_size: PAGE,
            page_token: String::new(),
            label_selector: label_selector.to_owned(),
        };
        all_pages!(self.workspaces().list(request).workspaces)
    }

    /// Removes an empty workspace; whether it was there.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn delete_workspace(&self, name: &str, allow_missing: bool) -> Result<bool, Error> {
        let request = v1::DeleteWorkspaceRequest { name: name.to_owned(), allow_missing };
        // Not made again: a lost answer would become NOT_FOUND.
        Ok(self.workspaces().delete(request).await?.into_inner().removed)
    }

    /// Gives somebody a role in a workspace (empty: the one that calls work in), in place of the one it has.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn set_member(
        &self,
        workspace: &str,
        subject: &str,
        role: v1::Role,
    ) -> Result<v1::Member, Error> {
        let request = v1::SetMemberRequest {
            workspace: workspace.to_owned(),
            subject: subject.to_owned(),
            role: role.into(),
        };
        retried!(self.workspaces().set_member(request))
    }

    /// Takes a role back; whether there was one.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn remove_member(
        &self,
        workspace: &str,
        subject: &str,
        allow_missing: bool,
    ) -> Result<bool, Error> {
        let request = v1::RemoveMemberRequest {
            workspace: workspace.to_owned(),
            subject: subject.to_owned(),
            allow_missing,
        };
        Ok(self.workspaces().remove_member(request).await?.into_inner().removed)
    }

    /// All members of a workspace.
    ///
    /// # Errors
    /// See [`Client`]; [`Error::Protocol`] when the pages go round in a circle.
    pub async fn list_members(&self, workspace: &str) -> Result<Vec<v1::Member>, Error> {
        let request = v1::ListMembersRequest {
            workspace: workspace.to_owned(),
            page_size: PAGE,
            page_token: String::new(),
        };
        all_pages!(self.workspaces().list_members(request).members)
    }

    /// Who we are to the gateway.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn who_am_i(&self) -> Result<v1::WhoAmIResponse, Error> {
        let request = v1::WhoAmIRequest {};
        retried!(self.access().who_am_i(request))
    }

    /// Makes a token. Its secret is in the answer and nowhere else. Never made again by itself.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn create_token(
        &self,
        request: v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, Error> {
        Ok(self.access().create_token(request).await?.into_inner())
    }

    /// Tokens of a workspace (empty: the one that calls work in), or all.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn list_tokens(&self, workspace: &str, all_workspaces: bool) -> Result<Vec<v1::Token>, Error> {
        let request = v1::ListTokensRequest { workspace: workspace.to_owned(), all_workspaces };
        Ok(retried!(self.access().list_tokens(request))?.tokens)
    }

    /// Makes a token good for nothing; whether it was there.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn revoke_token(&self, id: &str, allow_missing: bool) -> Result<bool, Error> {
        let request = v1::RevokeTokenRequest { id: id.to_owned(), allow_missing };
        Ok(self.access().revoke_token(request).await?.into_inner().removed)
    }
}
