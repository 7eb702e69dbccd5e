//! Files by the agent's own service: what the library does with files is tested there.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{fs, path::Path, time::Duration};

use common::{Agent, Client, LIMIT, eventually};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use torpor_proto::agent::v1::{
    DownloadRequest, FileEnd, FileEntry, FileKind, ListFilesRequest, MakeDirectoryRequest, RemoveFileRequest,
    ShutdownRequest, StatFileRequest, UploadEnd, UploadInput, UploadResult, UploadStart, download_output,
    file_error, upload_input::Kind, upload_result,
};

struct Upload {
    input: mpsc::Sender<UploadInput>,
    result: JoinHandle<Result<UploadResult, tonic::Status>>,
}

impl Upload {
    async fn start(client: &Client, start: UploadStart) -> Self {
        let (input, inputs) = mpsc::channel(4);
        let mut client = client.clone();
        let result = tokio::spawn(async move {
            client.upload(ReceiverStream::new(inputs)).await.map(tonic::Response::into_inner)
        });
        let this = Self { input, result };
        this.send(Kind::Start(start)).await;
        this
    }

    async fn send(&self, kind: Kind) {
        // Nobody takes it when the agent has answered already.
        let _ = self.input.send(UploadInput { kind: Some(kind) }).await;
    }

    async fn file(&self, path: &str, data: &[u8]) {
        let kind = FileKind::File.into();
        let entry = FileEntry { path: path.to_owned().into(), kind, mode: 0o640, ..FileEntry::default() };
        self.send(Kind::Entry(entry)).await;
        self.send(Kind::Data(data.to_vec().into())).await;
    }

    async fn result(self) -> upload_result::Kind {
        drop(self.input);
        timeout(LIMIT, self.result).await.expect("the upload hangs").unwrap().unwrap().kind.unwrap()
    }

    async fn refused(self) -> file_error::Kind {
        match self.result().await {
            upload_result::Kind::Error(error) => error.kind(),
            done => panic!("{done:?}"),
        }
    }
}

fn into(folder: &Path) -> UploadStart {
    UploadStart { path: folder.to_str().unwrap().to_owned(), ..UploadStart::default() }
}

fn empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_uploaded_is_downloaded_and_a_break_leaves_no_half_file() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let folder = tempfile::tempdir().unwrap();
    let data = vec![7; 300_000];
    let upload = Upload::start(&client, into(folder.path())).await;
    upload.file("half", &data).await;
    assert!(eventually(|| !empty(folder.path())).await, "the bytes lie beside");
    assert_eq!(upload.refused().await, file_error::Kind::Protocol);
    assert!(eventually(|| empty(folder.path())).await);

    let deeper = folder.path().join("made/for it");
    let upload = Upload::start(&client, UploadStart { parents: true, ..into(&deeper) }).await;
    upload.file("whole", &data).await;
    upload.send(Kind::FileEnd(FileEnd {})).await;
    upload.send(Kind::End(UploadEnd {})).await;
    assert!(
        matches!(upload.result().await, upload_result::Kind::Done(done) if done.files == 1 && done.bytes == 300_000)
    );

    let request = DownloadRequest { path: deeper.to_str().unwrap().into(), ..DownloadRequest::default() };
    let mut output = client.download(request).await.unwrap().into_inner();
    let (mut names, mut got, mut ended) = (Vec::new(), Vec::new(), false);
    while let Some(message) = output.message().await.unwrap() {
        match message.kind.unwrap() {
            download_output::Kind::Entry(entry) => {
                names.push(String::from_utf8(entry.path.to_vec()).unwrap())
            }
            download_output::Kind::Data(piece) => got.extend_from_slice(&piece),
            download_output::Kind::End(_) => ended = true,
            download_output::Kind::FileEnd(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(names == ["", "whole"] && got == data && ended, "{names:?} {ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_typed_and_come_before_everything_was_sent() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let folder = tempfile::tempdir().unwrap();
    let nowhere = Upload::start(&client, into(&folder.path().join("nowhere"))).await;
    assert_eq!(nowhere.refused().await, file_error::Kind::NotFound);
    let nobody = UploadStart { user: "no such user".into(), ..into(folder.path()) };
    assert_eq!(Upload::start(&client, nobody).await.refused().await, file_error::Kind::NoSuchUser);
    let bad = Upload::start(&client, into(folder.path())).await;
    bad.file("../x", b"").await;
    // Endless, were it not refused at once.
    while !bad.input.is_closed() {
        bad.send(Kind::Data(vec![0; 1000].into())).await;
    }
    assert_eq!(bad.refused().await, file_error::Kind::BadPath);

    let stat = |path: String| {
        let mut client = client.clone();
        async move { client.stat_file(StatFileRequest { path }).await.unwrap().into_inner() }
    };
    assert_eq!(stat("/x".repeat(3000)).await.error.unwrap().kind(), file_error::Kind::BadPath);
    assert_eq!(stat("/a\0b".into()).await.error.unwrap().kind(), file_error::Kind::BadPath);
    assert_eq!(stat("/proc/self/root/etc".into()).await.error.unwrap().kind(), file_error::Kind::Escapes);
    let path = folder.path().join("d").to_str().unwrap().to_owned();
    let made = MakeDirectoryRequest { path: path.clone(), mode: 0o711, ..Default::default() };
    let made = client.make_directory(made).await.unwrap().into_inner().info.unwrap();
    assert_eq!(made.entry.unwrap().mode, 0o711);
    let listed =
        ListFilesRequest { path: folder.path().to_str().unwrap().into(), most: 5, ..Default::default() };
    assert_eq!(client.list_files(listed).await.unwrap().into_inner().files.len(), 1);
    let removed = RemoveFileRequest { path, recursive: false };
    assert!(client.remove_file(removed.clone()).await.unwrap().into_inner().error.is_none());
    let again = client.remove_file(removed).await.unwrap().into_inner().error.unwrap();
    assert_eq!(again.kind(), file_error::Kind::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_transfers_than_there_are_places_are_refused_and_a_shutdown_ends_those_under_way() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let folder = tempfile::tempdir().unwrap();
    let mut under_way = Vec::new();
    for number in 0..32 {
        let upload = Upload::start(&client, into(folder.path())).await;
        upload.file(&number.to_string(), b"some of it").await;
        under_way.push(upload);
    }
    assert!(eventually(|| fs::read_dir(folder.path()).unwrap().count() == 32).await);
    let one_more = Upload::start(&client, into(folder.path())).await;
    assert_eq!(one_more.refused().await, file_error::Kind::TooMany);

    let grace = Some(prost_types::Duration { seconds: 1, nanos: 0 });
    let ended = timeout(Duration::from_secs(20), client.shutdown(ShutdownRequest { grace })).await.unwrap();
    assert!(ended.unwrap().into_inner().flushed);
    for upload in under_way {
        let result = timeout(LIMIT, upload.result).await.expect("it hangs").unwrap();
        let told = matches!(&result, Ok(UploadResult { kind: Some(upload_result::Kind::Error(_)) }));
        assert!(told || result.is_err(), "{result:?}");
    }
    assert!(empty(folder.path()));
}
