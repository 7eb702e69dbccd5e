//! `torpor.v1.Files`: the client's stream on one side, the agent's on the other, and nothing kept in between.

use std::pin::{Pin, pin};

use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Channel};
use torpor_proto::{
    agent::v1::{self as agent, agent_client::AgentClient, upload_result},
    v1::{self, download_output, upload_input},
};
use torpor_sandbox::words::said;

use super::{
    Shared,
    exec::{agent_failed, left_ready, see_through},
    to_status,
};
use crate::{
    access::{self, Caller},
    error::{ApiError, Code},
    store::{Record, StoreError},
};

/// Messages under way in each direction; the rest of the back-pressure is HTTP/2's.
const BUFFER: usize = 4;
/// Most bytes of a file in one message.
const LARGEST_PIECE: usize = 1 << 20;
/// Most files in one answer: with the longest names and targets it still is a message that clients take.
const LARGEST_PAGE: u32 = 500;
/// Mode of a new directory when none is asked for.
const USUAL_MODE: u32 = 0o755;

type Reply<T> = Result<Response<T>, Status>;
type Outputs = Pin<Box<dyn Stream<Item = Result<v1::DownloadOutput, Status>> + Send>>;

/// See the module.
pub struct FilesApi(pub Shared);

/// A Ready sandbox, as long as it is.
struct Reached {
    service: Shared,
    record: Record,
    client: AgentClient<Channel>,
    session: CancellationToken,
}

impl Reached {
    async fn new(service: &Shared, caller: &Caller, sandbox: &str) -> Result<Self, Status> {
        let sandbox = &caller.key(sandbox).await?;
        let (record, channel, session) = service.connect(sandbox).await?;
        Ok(Self { service: service.clone(), record, client: AgentClient::new(channel), session })
    }

    /// The answer of a call to the agent, unless the sandbox leaves Ready before it.
    async fn ask<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Status> {
        tokio::select! {
            answer = call => match answer {
                Ok(answer) => Ok(answer.into_inner()),
                Err(status) => Err(self.failed(&status).await),
            },
            () = self.session.cancelled() => Err(left_ready(&self.service, &self.record).await),
            () = self.service.end.cancelled() => Err(StoreError::Closed.into()),
        }
    }

    /// A broken stream and a suspend come together: say which it was.
    async fn failed(&self, status: &Status) -> Status {
        if self.session.is_cancelled() {
            return left_ready(&self.service, &self.record).await;
        }
        if status.code() == tonic::Code::Unimplemented {
            let name = &self.record.name;
            let text = format!("the agent in sandbox '{name}' is of an older version, without files");
            let next = format!("torpor suspend {name}; torpor resume {name}");
            let error = ApiError::new(Code::FailedPrecondition, "AGENT_TOO_OLD", text).about(&self.record);
            return to_status(error.with("next", next));
        }
        agent_failed(&self.record, status)
    }

    fn refused(&self, error: &agent::FileError) -> Status {
        use agent::file_error::Kind;
        let name = &self.record.name;
        let (code, reason, next) = match error.kind() {
            Kind::NotFound => (Code::NotFound, "FILE_NOT_FOUND", None),
            Kind::Exists => (Code::AlreadyExists, "FILE_EXISTS", None),
            Kind::NotADirectory => (Code::FailedPrecondition, "NOT_A_DIRECTORY", None),
            Kind::IsADirectory => (Code::FailedPrecondition, "IS_A_DIRECTORY", None),
            Kind::NotAFile => (Code::InvalidArgument, "NOT_A_FILE", None),
            Kind::NotEmpty => (Code::FailedPrecondition, "DIRECTORY_NOT_EMPTY", None),
            Kind::BadPath => (Code::InvalidArgument, "BAD_PATH", None),
            Kind::Escapes => (Code::InvalidArgument, "PATH_ESCAPES", None),
            Kind::Full => {
                let next = format!("free space in the sandbox, or: torpor sandbox disk grow {name} SIZE");
                (Code::ResourceExhausted, "SANDBOX_DISK_FULL", Some(next))
            }
            Kind::ReadOnly => (Code::FailedPrecondition, "READ_ONLY", None),
            Kind::Denied => (Code::FailedPrecondition, "FILE_DENIED", None),
            Kind::PrefixDiffers => {
                (Code::Aborted, "PREFIX_DIFFERS", Some("the same from the beginning".to_owned()))
            }
            Kind::Busy => (Code::Aborted, "FILE_BUSY", Some("the same when the other has ended".to_owned())),
            Kind::TooMany => {
                (Code::ResourceExhausted, "TOO_MANY_TRANSFERS", Some("the same in a moment".to_owned()))
            }
            Kind::NoSuchUser => (Code::InvalidArgument, "NO_SUCH_USER", None),
            Kind::Protocol => (Code::InvalidArgument, "INVALID_ARGUMENT", None),
            Kind::Other | Kind::Unspecified => (Code::Internal, "FILE_FAILED", None),
        };
        let error = ApiError::new(code, reason, said(&error.message)).about(&self.record);
        to_status(match next {
            Some(next) => error.with("next", next),
            None => error,
        })
    }

    fn info(&self, result: agent::FileResult) -> Result<v1::FileInfo, Status> {
        match (result.error, result.info) {
            (Some(error), _) => Err(self.refused(&error)),
            (None, Some(info)) => Ok(info_of(info)),
            (None, None) => Ok(v1::FileInfo::default()),
        }
    }
}

fn invalid(field: &str, problem: impl std::fmt::Display) -> Status {
    ApiError::invalid(field, problem).into()
}

fn path_of(path: &str) -> Result<(), Status> {
    if path.is_empty() { Err(invalid("path", "a path is needed")) } else { Ok(()) }
}

#[tonic::async_trait]
impl v1::files_server::Files for FilesApi {
    async fn upload(&self, request: Request<Streaming<v1::UploadInput>>) -> Reply<v1::UploadResponse> {
        let caller = access::caller(&request)?;
        let mut input = request.into_inner();
        let start = match input.message().await? {
            Some(v1::UploadInput { kind: Some(upload_input::Kind::Start(start)) }) => start,
            _ => return Err(invalid("start", "the first message must say where to")),
        };
        path_of(&start.path)?;
        let reached = Reached::new(&self.0, &caller, &start.sandbox).await?;
        let (to_agent, inputs) = mpsc::channel(BUFFER);
        let first = agent::upload_input::Kind::Start(agent::UploadStart {
            path: start.path,
            parents: start.parents,
            user: start.user,
            keep_partial: start.keep_partial,
        });
        // Cannot fail: the channel is new and has room.
        let _ = to_agent.send(agent::UploadInput { kind: Some(first) }).await;
        let mut client = reached.client.clone();
        let call = reached.ask(client.upload(ReceiverStream::new(inputs)));
        let answer = {
            let mut call = pin!(call);
            tokio::select! {
                answer = &mut call => answer?,
                // Dropped with the call: the agent sees a break, and not an end.
                broken = upwards(input, to_agent) => match broken {
                    Err(status) => return Err(status),
                    Ok(()) => call.await?,
                },
            }
        };
        match answer.kind {
            Some(upload_result::Kind::Done(done)) => Ok(Response::new(v1::UploadResponse {
                files: done.files,
                directories: done.directories,
                symlinks: done.symlinks,
                bytes: done.bytes,
            })),
            Some(upload_result::Kind::Error(error)) => Err(reached.refused(&error)),
            None => Err(reached.failed(&Status::internal("it did not say what it had made")).await),
        }
    }

    type DownloadStream = Outputs;

    async fn download(&self, request: Request<v1::DownloadRequest>) -> Reply<Self::DownloadStream> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        path_of(&request.path)?;
        let reached = Reached::new(&self.0, &caller, &request.sandbox).await?;
        let mut client = reached.client.clone();
        let asked = client.download(agent::DownloadRequest {
            path: request.path,
            offset: request.offset,
            prefix_sha256: request.prefix_sha256,
            entries_only: request.entries_only,
        });
        let output = reached.ask(asked).await?;
        let (out, outputs) = mpsc::channel(BUFFER);
        tokio::spawn(async move {
            let Reached { service, record, session, .. } = &reached;
            let work = downwards(&reached, output, &out);
            see_through(service, session, &out, work, left_ready(service, record)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outputs))))
    }

    async fn stat(&self, request: Request<v1::StatFileRequest>) -> Reply<v1::FileInfo> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        path_of(&request.path)?;
        let reached = Reached::new(&self.0, &caller, &request.sandbox).await?;
        let mut client = reached.client.clone();
        let result = reached.ask(client.stat_file(agent::StatFileRequest { path: request.path })).await?;
        reached.info(result).map(Response::new)
    }

    async fn list(&self, request: Request<v1::ListFilesRequest>) -> Reply<v1::ListFilesResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        path_of(&request.path)?;
        let most = match u32::try_from(request.page_size) {
            Ok(0) => LARGEST_PAGE,
            Ok(size) if size <= LARGEST_PAGE => size,
            _ => return Err(invalid("page_size", format!("it is between 1 and {LARGEST_PAGE}"))),
        };
        let after = name_of(&request.page_token)
            .ok_or_else(|| invalid("page_token", "it is not one of an earlier answer"))?;
        let reached = Reached::new(&self.0, &caller, &request.sandbox).await?;
        let mut client = reached.client.clone();
        let asked = agent::ListFilesRequest { path: request.path, after: after.into(), most };
        let listed = reached.ask(client.list_files(asked)).await?;
        if let Some(error) = listed.error {
            return Err(reached.refused(&error));
        }
        let last = listed.files.last().and_then(|info| info.entry.as_ref()).filter(|_| listed.more);
        let next_page_token = last.map_or_else(String::new, |entry| token_of(&entry.path));
        let files = listed.files.into_iter().map(info_of).collect();
        Ok(Response::new(v1::ListFilesResponse { files, next_page_token }))
    }

    async fn make_directory(&self, request: Request<v1::MakeDirectoryRequest>) -> Reply<v1::FileInfo> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        path_of(&request.path)?;
        if request.mode > 0o7777 {
            return Err(invalid("mode", format!("{:o} has more than permission bits", request.mode)));
        }
        let reached = Reached::new(&self.0, &caller, &request.sandbox).await?;
        let mut client = reached.client.clone();
        let asked = agent::MakeDirectoryRequest {
            path: request.path,
            mode: if request.mode == 0 { USUAL_MODE } else { request.mode },
            parents: request.parents,
            user: request.user,
        };
        let result = reached.ask(client.make_directory(asked)).await?;
        reached.info(result).map(Response::new)
    }

    async fn remove(&self, request: Request<v1::RemoveFileRequest>) -> Reply<v1::RemoveFileResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        path_of(&request.path)?;
        let reached = Reached::new(&self.0, &caller, &request.sandbox).await?;
        let mut client = reached.client.clone();
        let asked = agent::RemoveFileRequest { path: request.path, recursive: request.recursive };
        let removed = match reached.ask(client.remove_file(asked)).await?.error {
            None => true,
            Some(error) if error.kind() == agent::file_error::Kind::NotFound && request.allow_missing => {
                false
            }
            Some(error) => return Err(reached.refused(&error)),
        };
        Ok(Response::new(v1::RemoveFileResponse { removed }))
    }
}

/// From the client to the agent, until the client's end.
async fn upwards(
    mut input: Streaming<v1::UploadInput>,
    to_agent: mpsc::Sender<agent::UploadInput>,
) -> Result<(), Status> {
    use agent::upload_input::Kind;
    loop {
        let Some(message) = input.message().await? else {
            return Err(invalid("end", "the upload ended without it"));
        };
        let kind = match message.kind {
            Some(upload_input::Kind::Data(data)) if data.len() > LARGEST_PIECE => {
                let problem =
                    format!("{} bytes in one message, and {LARGEST_PIECE} are the most", data.len());
                return Err(invalid("data", problem));
            }
            Some(upload_input::Kind::Data(data)) => Kind::Data(data),
            Some(upload_input::Kind::Entry(entry)) => Kind::Entry(entry_to_agent(entry)?),
            Some(upload_input::Kind::FileEnd(_)) => Kind::FileEnd(agent::FileEnd {}),
            Some(upload_input::Kind::End(_)) => Kind::End(agent::UploadEnd {}),
            Some(upload_input::Kind::Start(_)) => return Err(invalid("start", "it came twice")),
            // Something newer than this gateway.
            None => continue,
        };
        let last = matches!(kind, Kind::End(_));
        // An agent that takes no more says why in its answer, which is waited for.
        if to_agent.send(agent::UploadInput { kind: Some(kind) }).await.is_err() || last {
            return Ok(());
        }
    }
}

/// From the agent to the client; the status to end with, unless it ended well or the client has gone.
async fn downwards(
    reached: &Reached,
    mut output: Streaming<agent::DownloadOutput>,
    out: &mpsc::Sender<Result<v1::DownloadOutput, Status>>,
) -> Option<Status> {
    use agent::download_output::Kind;
    loop {
        let kind = match output.message().await {
            Ok(Some(message)) => message.kind,
            Ok(None) => return Some(reached.failed(&Status::unavailable("the download broke off")).await),
            Err(status) => return Some(reached.failed(&status).await),
        };
        let kind = match kind {
            Some(Kind::Entry(entry)) => download_output::Kind::Entry(entry_of(entry)),
            Some(Kind::Data(data)) => download_output::Kind::Data(data),
            Some(Kind::FileEnd(_)) => download_output::Kind::FileEnd(v1::FileEnd {}),
            Some(Kind::Skipped(skipped)) => {
                let why = said(&skipped.why);
                download_output::Kind::Skipped(v1::FileSkipped { path: skipped.path, why })
            }
            Some(Kind::End(_)) => download_output::Kind::End(v1::DownloadEnd {}),
            Some(Kind::Error(error)) => return Some(reached.refused(&error)),
            // Something newer than this gateway.
            None => continue,
        };
        let last = matches!(kind, download_output::Kind::End(_));
        if out.send(Ok(v1::DownloadOutput { kind: Some(kind) })).await.is_err() || last {
            return None;
        }
    }
}

fn entry_to_agent(entry: v1::FileEntry) -> Result<agent::FileEntry, Status> {
    if entry.mode > 0o7777 {
        return Err(invalid("entry.mode", format!("{:o} has more than permission bits", entry.mode)));
    }
    Ok(agent::FileEntry {
        path: entry.path,
        kind: entry.kind,
        mode: entry.mode,
        modified: entry.modified,
        size: entry.size,
        target: entry.target,
        offset: entry.offset,
        prefix_sha256: entry.prefix_sha256,
    })
}

/// The kinds have the same numbers in both protocols.
fn entry_of(entry: agent::FileEntry) -> v1::FileEntry {
    v1::FileEntry {
        path: entry.path,
        kind: entry.kind,
        mode: entry.mode,
        modified: entry.modified,
        size: entry.size,
        target: entry.target,
        offset: entry.offset,
        prefix_sha256: entry.prefix_sha256,
    }
}

fn info_of(info: agent::FileInfo) -> v1::FileInfo {
    let entry = info.entry.unwrap_or_default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    v1::FileInfo {
        name: text(&entry.path),
        kind: entry.kind,
        mode: entry.mode,
        modified: entry.modified,
        size: entry.size.unwrap_or(0),
        target: text(&entry.target),
        leads_to: info.leads_to,
        uid: info.uid,
        gid: info.gid,
        partial_bytes: info.partial_bytes,
    }
}

/// A name as a page token: names are bytes, tokens are text.
fn token_of(name: &[u8]) -> String {
    name.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn name_of(token: &str) -> Option<Vec<u8>> {
    if !token.bytes().all(|byte| byte.is_ascii_hexdigit())
        || !token.len().is_multiple_of(2)
        || token.len() > 512
    {
        return None;
    }
    (0..token.len()).step_by(2).map(|at| u8::from_str_radix(&token[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_token_holds_any_name_and_nothing_else_is_one() {
        let name = b"a\xff\n$";
        assert_eq!(name_of(&token_of(name)).as_deref(), Some(&name[..]));
        assert_eq!(name_of("").as_deref(), Some(&b""[..]));
        for bad in ["f", "zz", "é1", "+1"] {
            assert!(name_of(bad).is_none(), "{bad}");
        }
    }
}
