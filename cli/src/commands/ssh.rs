//! `torpor ssh`, `ssh-config` and `ssh-proxy`: OpenSSH's client here, the SSH server of the sandbox's image there, and the
//! gateway between them. Keys are made here, and leave is given for a session; nothing listens anywhere.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::{
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
        process::ExitStatusExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::SystemTime,
};

use clap::Args;
use torpor_sdk::{Client, ForwardOutput, v1};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure, LOST, PRECONDITION},
    input, output,
    session::Session,
};

/// What a name in known_hosts and in a session begins with.
const ALIAS: &str = "torpor-";

#[derive(Args)]
pub struct SshArgs {
    /// Who to log in as.
    #[arg(short, long, default_value = "root")]
    login: String,
    /// An option of ssh's, which takes it after its own -o: `-O SendEnv=LANG`. May be repeated.
    #[arg(short = 'O', long = "option", value_name = "KEY=VALUE")]
    options: Vec<String>,
    /// Name or id of a ready sandbox.
    name: String,
    /// A command, after `--`; without it a login shell.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Args)]
pub struct SshConfigArgs {
    /// Names of sandboxes; all of them when none is given.
    names: Vec<String>,
    /// Who to log in as.
    #[arg(short, long, default_value = "root")]
    login: String,
}

#[derive(Args)]
pub struct SshProxyArgs {
    /// A folder of ours with a key, `id_ed25519.pub`, and what is known of hosts.
    #[arg(long, value_name = "DIR")]
    keys: PathBuf,
    /// A file with the token of a session that is there already.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Name or id of a ready sandbox.
    name: String,
}

fn failed(what: &str) -> impl Fn(io::Error) -> Failure + use<'_> {
    move |error| Failure::new(FAILED, format!("{what}: {error}"))
}

/// A folder that goes with this value.
struct Private(PathBuf);

impl Private {
    fn new() -> Result<Self, Failure> {
        let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let base = if base.is_dir() { base } else { std::env::temp_dir() };
        for attempt in 0..100_u32 {
            let nanos =
                SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
            let path = base.join(format!("torpor-ssh-{}-{nanos:x}{attempt}", std::process::id()));
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(&format!("make {}", path.display()))(error)),
            }
        }
        Err(Failure::new(FAILED, format!("no private folder can be made in {}", base.display())))
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a key pair in a folder unless there is one; the public half.
fn key_in(folder: &Path) -> Result<String, Failure> {
    let (key, public) = (folder.join("id_ed25519"), folder.join("id_ed25519.pub"));
    if !public.is_file() {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "torpor", "-f"])
            .arg(&key)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        match made {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(Failure::new(FAILED, format!("ssh-keygen ended with {status}"))),
            Err(error) => return Err(no_client("ssh-keygen", &error)),
        }
    }
    fs::read_to_string(&public).map_err(failed(&format!("read {}", public.display())))
}

fn no_client(program: &str, error: &io::Error) -> Failure {
    let mut failure = Failure::new(PRECONDITION, format!("{program} can't be run: {error}"));
    failure.told.next =
        "install OpenSSH's client here (openssh-client), or use: torpor shell NAME".to_owned();
    failure
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let part = path.with_extension(format!("{}.new", std::process::id()));
    let written =
        fs::File::options().write(true).create_new(true).mode(0o600).open(&part).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            fs::rename(&part, path)
        });
    written.map_err(failed(&format!("write {}", path.display())))
}

/// What ssh is told about one sandbox. Names and ids hold no characters that mean anything to ssh.
fn options(folder: &Path, id: &str) -> Vec<(&'static str, String)> {
    vec![
        ("HostName", format!("{ALIAS}{id}")),
        ("HostKeyAlias", format!("{ALIAS}{id}")),
        ("UserKnownHostsFile", quoted(&known_hosts(folder, id))),
        ("GlobalKnownHostsFile", "/dev/null".to_owned()),
        ("StrictHostKeyChecking", "yes".to_owned()),
        ("IdentityFile", quoted(&folder.join("id_ed25519"))),
        ("IdentitiesOnly", "yes".to_owned()),
        ("ControlMaster", "no".to_owned()),
    ]
}

fn known_hosts(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("known_hosts.{id}"))
}

/// A path for ssh's configuration.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('%', "%%"))
}

/// A word for the shell that runs the proxy, and for ssh, which looks for `%` in it first.
fn word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''").replace('%', "%%"))
}

fn proxy(session: &Session, folder: &Path, token: Option<&Path>, id: &str) -> Result<String, Failure> {
    let program = std::env::current_exe().map_err(failed("find this program"))?;
    let mut words = vec![word(&program.display().to_string())];
    words.extend(session.connection().iter().map(|text| word(text)));
    words.extend(["ssh-proxy".to_owned(), "--keys".to_owned(), word(&folder.display().to_string())]);
    if let Some(token) = token {
        words.extend(["--session".to_owned(), word(&token.display().to_string())]);
    }
    words.push(word(id));
    Ok(words.join(" "))
}

async fn session_for(
    client: &Client,
    folder: &Path,
    sandbox: &str,
    key: String,
) -> Result<v1::SshSession, Failure> {
    let made = client.create_ssh_session(sandbox, &key, None).await?;
    let line = format!("{ALIAS}{} {}\n", made.sandbox_id, made.host_key);
    write(&known_hosts(folder, &made.sandbox_id), &line)?;
    Ok(made)
}

/// Opens an SSH session with a key of its own.
pub async fn ssh(session: &Session, args: SshArgs) -> Outcome {
    if args.login.starts_with('-') || args.login.is_empty() {
        return Err(Failure::usage(format!("'{}' is no user's name", args.login)));
    }
    let client = session.connect().await?;
    let folder = Private::new()?;
    let key = key_in(&folder.0)?;
    let made = session_for(&client, &folder.0, &args.name, key).await?;
    // In a file: arguments can be seen by everybody.
    let token = folder.0.join("session");
    write(&token, &made.token)?;
    let mut ssh = Command::new("ssh");
    for (option, value) in options(&folder.0, &made.sandbox_id) {
        ssh.args(["-o", &format!("{option}={value}")]);
    }
    ssh.args(["-F", "/dev/null", "-o"]);
    ssh.arg(format!("ProxyCommand={}", proxy(session, &folder.0, Some(&token), &made.sandbox_id)?));
    for option in &args.options {
        ssh.args(["-o", option]);
    }
    if session.quiet {
        ssh.arg("-q");
    }
    ssh.args(["-l", &args.login, &format!("{ALIAS}{}", made.sandbox_id)]);
    if !args.command.is_empty() {
        ssh.arg("--").args(&args.command);
    }
    // ssh has the terminal and gets its signals; this program waits for it and tidies up.
    let _interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
    let ended = tokio::task::spawn_blocking(move || ssh.status()).await;
    // A session that is gone already needs no end.
    let _ = client.revoke_ssh_session(&made.token, true).await;
    match ended {
        Ok(Ok(status)) => {
            let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255);
            Ok(u8::try_from(code).unwrap_or(LOST))
        }
        Ok(Err(error)) => Err(no_client("ssh", &error)),
        Err(error) => Err(Failure::new(FAILED, format!("ssh was not waited for: {error}"))),
    }
}

/// The folder with the key that ssh's configuration names.
fn own_folder() -> Result<PathBuf, Failure> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let Some(base) = state.or_else(home) else {
        return Err(Failure::usage("there is no place for keys: set HOME or XDG_STATE_HOME"));
    };
    let folder = base.join("torpor/ssh");
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(failed(&format!("make {}", folder.display())))?;
    Ok(folder)
}

/// Prints what ssh needs to know: `ssh NAME.torpor` works then, and so do sftp, rsync and editors.
pub async fn config(session: &Session, args: SshConfigArgs) -> Outcome {
    let client = session.connect().await?;
    let sandboxes = if args.names.is_empty() {
        client.list("").await?
    } else {
        let mut found = Vec::new();
        for name in &args.names {
            found.push(client.get(name).await?);
        }
        found
    };
    let folder = own_folder()?;
    key_in(&folder)?;
    let mut text = String::new();
    for sandbox in sandboxes {
        // A workspace's name before it parts names as a dot does.
        let host: String = sandbox.name.split('/').rev().collect::<Vec<_>>().join(".");
        text.push_str(&format!("Host {host}.torpor\n"));
        for (option, value) in options(&folder, &sandbox.id) {
            text.push_str(&format!("  {option} {value}\n"));
        }
        text.push_str(&format!("  User {}\n", args.login));
        text.push_str(&format!("  ProxyCommand {}\n", proxy(session, &folder, None, &sandbox.id)?));
    }
    output::text(&text)?;
    Ok(0)
}

/// Carries one SSH connection on standard input and output.
pub async fn proxy_command(session: &Session, args: SshProxyArgs) -> Outcome {
    let client = session.connect().await?;
    let (token, ours) = match &args.session {
        Some(path) => {
            let token = fs::read_to_string(path).map_err(failed(&format!("read {}", path.display())))?;
            (token.trim().to_owned(), false)
        }
        None => {
            let key = key_in(&args.keys)?;
            (session_for(&client, &args.keys, &args.name, key).await?.token, true)
        }
    };
    let carried = carry(&client, &token).await;
    if ours {
        let _ = client.revoke_ssh_session(&token, true).await;
    }
    carried.map(|()| 0)
}

async fn carry(client: &Client, token: &str) -> Result<(), Failure> {
    let (server, output) = client.ssh(token).await?;
    let mut chunks = input::pieces(4);
    let upwards = async {
        while let Some(chunk) = chunks.recv().await {
            if !server.write(chunk).await {
                break;
            }
        }
        server.close().await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = downwards(output) => ended,
        () = upwards => Ok(()),
    }
}

async fn downwards(mut output: ForwardOutput) -> Result<(), Failure> {
    while let Some(bytes) = output.next().await? {
        output::bytes(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shell_and_ssh_would_act_on_is_quoted() {
        assert_eq!(word("/a b/$x%h'q"), r"'/a b/$x%%h'\''q'");
        assert_eq!(quoted(Path::new("/a b/%d")), "\"/a b/%%d\"");
    }

    #[test]
    fn a_private_folder_is_ours_alone_and_goes_with_its_value() {
        let folder = Private::new().unwrap();
        let path = folder.0.clone();
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o700);
        write(&path.join("session"), "secret").unwrap();
        drop(folder);
        assert!(!path.exists());
    }
}
