//! SSH sessions: tokens that are good for connections into one sandbox, as long as it stays Ready.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use tokio_util::sync::CancellationToken;
use tonic::Status;
use torpor_proto::openshell::v1::{self as os, DeletionOutcome};
use torpor_sandbox::SandboxId;

use super::{OpenShellApi, call::Call};
use crate::{
    access::{hash_of, new_secret},
    api::convert::time,
    error::{ApiError, Code},
};

/// Where the SSH server of a sandbox listens.
pub const PORT: u32 = 22;
/// How long a session's token is good for.
const LIFE: Duration = Duration::from_secs(8 * 3600);
/// Sessions of one gateway, and of one sandbox.
const MOST: usize = 10_000;
const MOST_OF_ONE: usize = 64;

struct Session {
    sandbox: SandboxId,
    workspace: String,
    expires: SystemTime,
    end: CancellationToken,
}

impl Session {
    fn is_over(&self) -> bool {
        self.end.is_cancelled() || self.expires <= SystemTime::now()
    }
}

/// The sessions, by the hashes of their tokens. They end with the gateway.
#[derive(Clone, Default)]
pub struct Ssh(Arc<Mutex<HashMap<String, Session>>>);

fn no_session() -> ApiError {
    let text = "the session's token is not known, has expired, was revoked, or ended when its sandbox was put to rest";
    ApiError::new(Code::Unauthenticated, "SESSION_ENDED", text).with("next", "CreateSshSession")
}

impl Ssh {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, session: Session) -> Result<String, ApiError> {
        let mut sessions = self.lock();
        sessions.retain(|_, session| !session.is_over());
        if sessions.len() >= MOST {
            let text = format!("{MOST} SSH sessions are open, which is the most");
            return Err(ApiError::new(Code::ResourceExhausted, "TOO_MANY", text));
        }
        if sessions.values().filter(|one| one.sandbox == session.sandbox).count() >= MOST_OF_ONE {
            let text = format!("the sandbox has {MOST_OF_ONE} SSH sessions already");
            let error = ApiError::new(Code::ResourceExhausted, "TOO_MANY_SSH_SESSIONS", text);
            return Err(error.with("next", "RevokeSshSession, for those that are not needed any more"));
        }
        let (_, token) = new_secret();
        sessions.insert(hash_of(&token), session);
        Ok(token)
    }

    /// Checks the token that comes with a connection, if one does; its end.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`; `PERMISSION_DENIED` for another sandbox's.
    pub fn check(&self, sandbox: &SandboxId, token: &str) -> Result<Option<CancellationToken>, ApiError> {
        if token.is_empty() {
            return Ok(None);
        }
        let sessions = self.lock();
        let session = sessions.get(&hash_of(token)).filter(|session| !session.is_over());
        let session = session.ok_or_else(no_session)?;
        if session.sandbox != *sandbox {
            let text = "the session's token is good for another sandbox";
            return Err(ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", text));
        }
        Ok(Some(session.end.clone()))
    }
}

pub async fn create(
    api: &OpenShellApi,
    call: Call,
    message: os::CreateSshSessionRequest,
) -> Result<os::CreateSshSessionResponse, Status> {
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    // Outside Ready there is nothing to connect to; and the session ends when it leaves Ready.
    let (record, _, end) = api.service.connect(record.id.as_str()).await?;
    let expires = SystemTime::now() + LIFE;
    let session = Session {
        sandbox: record.id.clone(),
        workspace: record.spec.workspace.clone(),
        expires,
        end: end.child_token(),
    };
    let token = api.ssh.add(session)?;
    let (gateway_scheme, host, port) = api.address.clone();
    Ok(os::CreateSshSessionResponse {
        sandbox_id: record.id.to_string(),
        token,
        gateway_host: host,
        gateway_port: port.into(),
        gateway_scheme,
        host_key_fingerprint: String::new(),
        expiration_time: time(expires),
    })
}

pub async fn revoke(
    api: &OpenShellApi,
    call: Call,
    message: os::RevokeSshSessionRequest,
) -> Result<os::RevokeSshSessionResponse, Status> {
    let key = hash_of(&message.token);
    let of = |session: &Session| (session.workspace.clone(), session.sandbox.clone());
    let found = api.ssh.lock().get(&key).filter(|session| !session.is_over()).map(of);
    let outcome = match found {
        Some((workspace, sandbox)) => {
            call.caller.workspace(&workspace)?;
            call.caller.speaks_of(sandbox.as_str());
            if let Some(session) = api.ssh.lock().remove(&key) {
                session.end.cancel();
            }
            DeletionOutcome::Completed
        }
        None if message.allow_missing => DeletionOutcome::AlreadyAbsent,
        None => {
            let text = "no such SSH session; it may have ended already";
            return Err(ApiError::new(Code::NotFound, "SESSION_NOT_FOUND", text).into());
        }
    };
    Ok(os::RevokeSshSessionResponse { outcome: outcome.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(sandbox: &SandboxId, expires: SystemTime) -> Session {
        Session {
            sandbox: sandbox.clone(),
            workspace: "default".into(),
            expires,
            end: CancellationToken::new(),
        }
    }

    #[test]
    fn one_sandbox_has_a_bounded_number_of_sessions() {
        let (ssh, one, other) = (Ssh::default(), SandboxId::generate(), SandboxId::generate());
        let later = SystemTime::now() + LIFE;
        let first = ssh.add(session(&one, later)).unwrap();
        (1..MOST_OF_ONE).for_each(|_| drop(ssh.add(session(&one, later)).unwrap()));
        assert_eq!(ssh.add(session(&one, later)).unwrap_err().reason, "TOO_MANY_SSH_SESSIONS");
        assert!(ssh.add(session(&other, later)).is_ok(), "others have their own");
        ssh.check(&one, &first).unwrap().unwrap().cancel();
        assert!(ssh.add(session(&one, later)).is_ok(), "one has ended");
    }

    #[test]
    fn a_token_is_good_for_its_sandbox_until_its_session_ends() {
        let (ssh, one, other) = (Ssh::default(), SandboxId::generate(), SandboxId::generate());
        let later = SystemTime::now() + LIFE;
        let token = ssh.add(session(&one, later)).unwrap();
        let end = ssh.check(&one, &token).unwrap().unwrap();
        assert_eq!(ssh.check(&other, &token).unwrap_err().code, Code::PermissionDenied);
        assert_eq!(ssh.check(&one, "tpr_x").unwrap_err().code, Code::Unauthenticated);
        assert!(ssh.check(&one, "").unwrap().is_none(), "the caller's own rights count");
        end.cancel();
        assert_eq!(ssh.check(&one, &token).unwrap_err().code, Code::Unauthenticated);
        let expired = ssh.add(session(&one, SystemTime::now())).unwrap();
        assert_eq!(ssh.check(&one, &expired).unwrap_err().code, Code::Unauthenticated);
    }
}
