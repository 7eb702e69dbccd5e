//! SSH sessions: leave to open SSH connections to a sandbox with one key. The connections are carried by the SSH server of
//! the sandbox's own image, started for each of them.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming, transport::Channel};
use torpor_proto::agent::v1::{
    ExecInput, ExecOutput, ExecStart, agent_client::AgentClient, exec_input, exec_output::Kind,
};
use torpor_sandbox::{SandboxId, words::said};

use crate::{
    error::{ApiError, Code},
    store::Record,
};

/// New connections are taken for this long when nothing is said.
pub const USUAL_LIFETIME: Duration = Duration::from_secs(600);
/// And for this long at most.
pub const LONGEST_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Sessions of one sandbox at once.
const MOST: usize = 64;
/// Longest public key, bytes: RSA of 16384 bits has fewer.
const LONGEST_KEY: usize = 4096;
/// For the server's key to be made on a slow machine.
const PREPARE_WITHIN: Duration = Duration::from_secs(60);
/// Messages under way.
const BUFFER: usize = 4;
/// Most bytes that are read of what a script says.
const LONGEST_ANSWER: usize = 16 << 10;

const FIND: &str = r#"
s=$(command -v sshd) || for p in /usr/sbin/sshd /usr/local/sbin/sshd /usr/bin/sshd; do [ -x "$p" ] && s=$p && break; done
[ -n "$s" ] || exit 41
d=/var/lib/torpor/ssh
"#;
/// Makes the host's key once and prints its public half. It stays on the sandbox's disk, so that clients know it again.
const PREPARE: &str = r#"
set -e
command -v ssh-keygen >/dev/null || exit 42
mkdir -p "$d"; chmod 711 "$d"
if ! [ -s "$d/host_key.pub" ]; then
  umask 077
  rm -f "$d/new" "$d/new.pub"
  ssh-keygen -q -t ed25519 -N '' -C torpor -f "$d/new" >&2
  mv "$d/new" "$d/host_key"; mv "$d/new.pub" "$d/host_key.pub"
fi
cat "$d/host_key.pub"
"#;
/// One connection on standard input and output. The key's file can be read by the user who logs in, and goes with it.
const CONNECT: &str = r#"
t=$(mktemp -d /run/torpor-ssh.XXXXXX 2>/dev/null) || t=$(mktemp -d /tmp/torpor-ssh.XXXXXX) || exit 43
trap 'rm -rf "$t"' EXIT
trap 'exit 143' HUP INT TERM
chmod 711 "$t"
printf '%s\n' "$TORPOR_SSH_KEY" > "$t/keys"; chmod 644 "$t/keys"; unset TORPOR_SSH_KEY
[ -d /run/sshd ] || { mkdir -p /run/sshd; chmod 755 /run/sshd; }
"$s" -i -e -f /dev/null -h "$d/host_key" -o AuthorizedKeysFile="$t/keys" -o StrictModes=no -o PidFile=none \
  -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
  -o LogLevel=ERROR -o PrintMotd=no -o AllowTcpForwarding=yes -o AllowAgentForwarding=yes -o X11Forwarding=no \
  -o AcceptEnv='LANG LC_*' -o Subsystem='sftp internal-sftp'
"#;

/// One session.
#[derive(Clone, Debug)]
pub struct Session {
    /// Whose.
    pub sandbox: SandboxId,
    /// The key that the client proves to have.
    pub public_key: String,
    until: Instant,
    /// Cancelled when it is revoked or the sandbox leaves Ready.
    pub end: CancellationToken,
}

/// Sessions by their tokens.
#[derive(Default)]
pub struct SshSessions(Mutex<HashMap<String, Session>>);

impl SshSessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        all.retain(|_, session| session.until > now && !session.end.is_cancelled());
        all
    }

    /// Makes a session; its token and until when new connections are taken. `ready` is cancelled when the sandbox leaves
    /// Ready.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when the sandbox has too many.
    pub fn create(
        &self,
        record: &Record,
        public_key: String,
        lifetime: Duration,
        ready: &CancellationToken,
    ) -> Result<(String, SystemTime), ApiError> {
        let mut all = self.lock();
        if all.values().filter(|session| session.sandbox == record.id).count() >= MOST {
            let text = format!("sandbox '{}' has {MOST} SSH sessions already", record.name);
            let error = ApiError::new(Code::ResourceExhausted, "TOO_MANY_SSH_SESSIONS", text).about(record);
            return Err(error.with("next", "revoke one, or wait until one runs out"));
        }
        let token: String = rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let session = Session {
            sandbox: record.id.clone(),
            public_key,
            until: Instant::now() + lifetime,
            end: ready.child_token(),
        };
        all.insert(token.clone(), session);
        Ok((token, SystemTime::now() + lifetime))
    }

    /// The session of a token, while it is good.
    pub fn get(&self, token: &str) -> Option<Session> {
        self.lock().get(token).cloned()
    }

    /// Ends a session and its connections; whether there was one.
    pub fn revoke(&self, token: &str) -> bool {
        let session = self.lock().remove(token);
        if let Some(session) = &session {
            session.end.cancel();
        }
        session.is_some()
    }
}

/// A public key as in authorized_keys, without options before it: those could run commands.
///
/// # Errors
/// `INVALID_ARGUMENT`, with what is wrong.
pub fn key_of(text: &str) -> Result<String, ApiError> {
    let wrong = |problem: &str| Err(ApiError::invalid("public_key", problem));
    let text = text.trim();
    if text.len() > LONGEST_KEY {
        return wrong("it has more than 4096 bytes");
    }
    if text.contains(char::is_control) {
        return wrong("it must be one line");
    }
    let mut words = text.split(' ');
    let (kind, data) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let known =
        ["ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-sha2-"].iter().any(|begin| kind.starts_with(begin));
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '-' | '@' | '.');
    if !known || data.len() < 16 || !kind.chars().all(plain) || !data.chars().all(plain) {
        return wrong("it must be a public key as in authorized_keys, without options: 'ssh-ed25519 AAAA…'");
    }
    Ok(format!("{kind} {data}"))
}

fn start(script: &str, environment: HashMap<String, String>) -> ExecInput {
    let start = ExecStart {
        argv: ["/bin/sh", "-c", &format!("{FIND}{script}")].map(str::to_owned).to_vec(),
        environment,
        workdir: "/".to_owned(),
        stdin: true,
        ..ExecStart::default()
    };
    ExecInput { kind: Some(exec_input::Kind::Start(start)) }
}

/// Why the sandbox can't do it, by the code that a script ended with.
fn refused(record: &Record, code: i32, said_last: &str) -> ApiError {
    let name = &record.name;
    let missing = |what: &str| {
        let text = format!("the image of sandbox '{name}' has no {what}, which SSH needs");
        ApiError::new(Code::FailedPrecondition, "SSH_SERVER_MISSING", text).about(record).with(
            "next",
            format!("torpor exec {name} -- sh -c 'apt-get update && apt-get install -y openssh-server'; or: torpor shell {name}"),
        )
    };
    match code {
        41 => missing("sshd"),
        42 => missing("ssh-keygen"),
        code => {
            let text =
                format!("the SSH server of sandbox '{name}' ended with code {code}: {}", said(said_last));
            ApiError::new(Code::Unavailable, "SSH_SERVER_FAILED", text).about(record)
        }
    }
}

/// Sees to it that the sandbox has a server and a key for it; the key's public half.
///
/// # Errors
/// `SSH_SERVER_MISSING` with what to install, and what goes wrong with the agent.
pub async fn prepare(record: &Record, channel: Channel) -> Result<String, ApiError> {
    let failed = |text: String| ApiError::new(Code::Unavailable, "AGENT_FAILED", text).about(record);
    let asked = async {
        let inputs = tokio_stream::once(start(PREPARE, HashMap::new()));
        let mut output = AgentClient::new(channel).exec(inputs).await?.into_inner();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        while let Some(message) = output.message().await? {
            match message.kind {
                Some(Kind::Stdout(data)) if out.len() < LONGEST_ANSWER => out.extend_from_slice(&data),
                Some(Kind::Stderr(data)) if err.len() < LONGEST_ANSWER => err.extend_from_slice(&data),
                Some(Kind::Exit(exit)) => return Ok((exit.code, out, err)),
                Some(Kind::Error(error)) => return Ok((126, out, error.message.into_bytes())),
                _ => {}
            }
        }
        Err(Status::unavailable("it ended without a word"))
    };
    let (code, out, err) = tokio::time::timeout(PREPARE_WITHIN, asked)
        .await
        .map_err(|_| {
            failed(format!("sandbox '{}' did not make a key for its SSH server in time", record.name))
        })?
        .map_err(|status: Status| {
            failed(format!("the agent of sandbox '{}': {}", record.name, status.message()))
        })?;
    if code != 0 {
        return Err(refused(record, code, &String::from_utf8_lossy(&err)));
    }
    key_of(&String::from_utf8_lossy(&out)).map_err(|_| {
        failed(format!("the SSH server of sandbox '{}' has a key that makes no sense", record.name))
    })
}

/// A connection to the server.
pub struct Connection {
    /// To it. Dropped, the server sees its client go.
    pub input: mpsc::Sender<ExecInput>,
    /// From it.
    pub output: Streaming<ExecOutput>,
}

/// What comes from a server.
pub enum Piece {
    /// Bytes.
    Data(bytes::Bytes),
    /// It has ended.
    End,
}

/// Starts a server for one connection.
///
/// # Errors
/// What the agent says.
pub async fn open(channel: Channel, session: &Session) -> Result<Connection, Status> {
    let (input, inputs) = mpsc::channel(BUFFER);
    let environment = HashMap::from([("TORPOR_SSH_KEY".to_owned(), session.public_key.clone())]);
    // Cannot fail: the channel is new and has room.
    let _ = input.send(start(CONNECT, environment)).await;
    let output = AgentClient::new(channel).exec(ReceiverStream::new(inputs)).await?.into_inner();
    Ok(Connection { input, output })
}

/// The next piece of a server.
///
/// # Errors
/// Why there was none at all; a server that ends after it has spoken has told its client itself.
pub async fn next(
    output: &mut Streaming<ExecOutput>,
    state: &mut Said,
    record: &Record,
) -> Result<Piece, ApiError> {
    loop {
        let message = output.message().await.map_err(|status| {
            let text = format!("the agent of sandbox '{}': {}", record.name, status.message());
            ApiError::new(Code::Unavailable, "AGENT_FAILED", text).about(record)
        })?;
        match message.and_then(|message| message.kind) {
            Some(Kind::Stdout(data)) => {
                state.spoke = true;
                return Ok(Piece::Data(data));
            }
            Some(Kind::Stderr(data)) if state.last.len() < LONGEST_ANSWER => {
                state.last.extend_from_slice(&data)
            }
            Some(Kind::Exit(_)) if state.spoke => return Ok(Piece::End),
            Some(Kind::Exit(exit)) => {
                return Err(refused(record, exit.code, &String::from_utf8_lossy(&state.last)));
            }
            Some(Kind::Error(error)) => return Err(refused(record, 126, &error.message)),
            Some(_) => {}
            None => return Ok(Piece::End),
        }
    }
}

/// What a server has said so far.
#[derive(Default)]
pub struct Said {
    spoke: bool,
    last: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_key_is_one_line_without_options() {
        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7";
        assert_eq!(key_of(&format!(" {key} me@here\n")).unwrap(), key);
        for bad in [
            "",
            "ssh-ed25519",
            "command=\"id\" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7",
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7\nssh-rsa AAAA",
            "ssh-ed25519 $(id)aaaaaaaaaaaaaaaaaaaa",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
            &format!("ssh-rsa {}", "A".repeat(5000)),
        ] {
            assert_eq!(key_of(bad).unwrap_err().code, Code::InvalidArgument, "{bad}");
        }
    }
}
