//! `torpor.v1.Access`.

use std::time::{Duration, SystemTime};

use tonic::{Request, Response, Status};
use torpor_proto::v1;

use super::{
    Shared, convert,
    workspaces::{role, wanted_role},
};
use crate::{
    access::{self, Caller, Grant, hash_of, new_secret},
    error::{ApiError, Code},
    store::{Rights, Role, Token},
};

/// Longest name of a token, bytes.
const LONGEST_NAME: usize = 100;
/// The longest life of one that has an end.
const LONGEST_LIFE: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

type Reply<T> = Result<Response<T>, Status>;

/// See the module.
pub struct AccessApi(pub Shared);

fn shown(token: Token) -> v1::Token {
    let (admin, role) = match token.role {
        Rights::Admin => (true, 0),
        Rights::Role(own) => (false, role(own).into()),
    };
    v1::Token {
        id: token.id,
        name: token.name,
        role,
        admin,
        workspace: token.workspace.unwrap_or_default(),
        sandbox_id: token.sandbox.unwrap_or_default(),
        created_by: token.created_by,
        created: convert::time(token.created),
        expires: token.expires.and_then(convert::time),
    }
}

fn name(name: String) -> Result<String, ApiError> {
    let fits = !name.is_empty() && name.len() <= LONGEST_NAME && !name.contains(char::is_control);
    fits.then_some(name)
        .ok_or_else(|| ApiError::invalid("name", format!("1 to {LONGEST_NAME} bytes, to know the token by")))
}

fn expiry(lifetime: Option<prost_types::Duration>) -> Result<Option<SystemTime>, ApiError> {
    let Some(lifetime) = lifetime else { return Ok(None) };
    let lifetime = Duration::try_from(lifetime).ok().filter(|l| !l.is_zero() && *l <= LONGEST_LIFE);
    let lifetime =
        lifetime.ok_or_else(|| ApiError::invalid("lifetime", "above nothing, at most ten years"))?;
    Ok(Some(SystemTime::now() + lifetime))
}

fn admins_only(what: &str) -> ApiError {
    ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", format!("{what} is for administrators"))
}

impl AccessApi {
    /// A token that may be made, which is never for more than its maker has, and its secret.
    async fn wanted(
        &self,
        caller: &Caller,
        request: v1::CreateTokenRequest,
    ) -> Result<(Token, String), ApiError> {
        let name = name(request.name)?;
        // Never longer than the token that it is made with.
        let expires = match (expiry(request.lifetime)?, caller.identity().expires) {
            (Some(asked), Some(own)) => Some(asked.min(own)),
            (asked, own) => asked.or(own),
        };
        let role = wanted_role(request.role)?;
        if request.admin && (role.is_some() || !request.workspace.is_empty() || !request.sandbox.is_empty()) {
            return Err(ApiError::invalid("admin", "it is not bound to a role, workspace or sandbox"));
        }
        if request.all_workspaces && (!request.workspace.is_empty() || !request.sandbox.is_empty()) {
            return Err(ApiError::invalid(
                "all_workspaces",
                "it goes with neither a workspace nor a sandbox",
            ));
        }
        if !request.workspace.is_empty() && !request.sandbox.is_empty() {
            return Err(ApiError::invalid("workspace", "a sandbox's token is of its sandbox's workspace"));
        }
        if (request.admin || request.all_workspaces) && !caller.is_admin() {
            return Err(admins_only("a token for more than one workspace"));
        }
        let mut workspace = match request.admin || request.all_workspaces || !request.sandbox.is_empty() {
            true => None,
            false => Some(caller.workspace(&request.workspace)?),
        };
        let sandbox = match request.sandbox.as_str() {
            "" => None,
            named => {
                let record = self.0.store.get(&caller.key(named).await?).await?;
                workspace = Some(record.spec.workspace);
                Some(record.id.to_string())
            }
        };
        let rights = match (request.admin, &sandbox) {
            (true, _) => Rights::Admin,
            (false, Some(_)) if role.is_some() => {
                return Err(ApiError::invalid("role", "a sandbox's token has none"));
            }
            // Its few calls need no role; the least is written.
            (false, Some(_)) => Rights::Role(Role::Viewer),
            (false, None) => {
                let role = role.ok_or_else(|| ApiError::invalid("role", "viewer, editor or owner"))?;
                Rights::Role(role)
            }
        };
        let (id, secret) = new_secret();
        caller.speaks_of(&id);
        let (created_by, created) = (caller.identity().subject.clone(), SystemTime::now());
        let hash = hash_of(&secret);
        let token = Token { id, name, hash, role: rights, workspace, sandbox, created_by, created, expires };
        Ok((token, secret))
    }
}

#[tonic::async_trait]
impl v1::access_server::Access for AccessApi {
    async fn who_am_i(&self, request: Request<v1::WhoAmIRequest>) -> Reply<v1::WhoAmIResponse> {
        let caller = access::caller(&request)?;
        let identity = caller.identity();
        let memberships = caller.memberships().into_iter().map(|(workspace, own)| v1::Member {
            workspace,
            subject: identity.subject.clone(),
            role: role(own).into(),
            created: None,
        });
        Ok(Response::new(v1::WhoAmIResponse {
            subject: identity.subject.clone(),
            admin: caller.is_admin(),
            by: identity.by.as_str().to_owned(),
            memberships: memberships.collect(),
            workspace: caller.current().to_owned(),
            sandbox_id: match &identity.grant {
                Grant::Sandbox(id) => id.to_string(),
                _ => String::new(),
            },
        }))
    }

    async fn create_token(&self, request: Request<v1::CreateTokenRequest>) -> Reply<v1::CreateTokenResponse> {
        let caller = access::caller(&request)?;
        let (token, secret) = self.wanted(&caller, request.into_inner()).await?;
        let token = self.0.store.add_token(token).await?;
        Ok(Response::new(v1::CreateTokenResponse { token: Some(shown(token)), secret }))
    }

    async fn list_tokens(&self, request: Request<v1::ListTokensRequest>) -> Reply<v1::ListTokensResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = match request.all_workspaces {
            true if !caller.is_admin() => return Err(admins_only("the list of all tokens").into()),
            true => None,
            false => Some(caller.workspace(&request.workspace)?),
        };
        let tokens = self.0.store.tokens(workspace.as_deref()).await?;
        Ok(Response::new(v1::ListTokensResponse { tokens: tokens.into_iter().map(shown).collect() }))
    }

    async fn revoke_token(&self, request: Request<v1::RevokeTokenRequest>) -> Reply<v1::RevokeTokenResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace("")?;
        caller.speaks_of(&request.id);
        let found = self.0.store.token(&request.id).await?;
        // What is another workspace's isn't there.
        let found = found.filter(|token| caller.is_admin() || token.workspace.as_ref() == Some(&workspace));
        let removed = match found {
            Some(token) => {
                let store = self.0.store.clone();
                caller.access().change(async move { store.remove_token(token.id).await }).await?
            }
            None => false,
        };
        if !removed && !request.allow_missing {
            let message = format!("no token '{}'", request.id.escape_debug());
            let error = ApiError::new(Code::NotFound, "TOKEN_NOT_FOUND", message);
            return Err(error.with("next", "torpor token list").into());
        }
        Ok(Response::new(v1::RevokeTokenResponse { removed }))
    }
}
