//! Files of a sandbox: trees in both directions, single looks and changes.

use bytes::Bytes;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};
use torpor_proto::v1::{self, download_output, upload_input};

use crate::{
    client::Client,
    error::{Error, chain},
};

/// Inputs that may wait for the network: beyond it the writer waits, so that memory stays flat.
const INPUTS_IN_FLIGHT: usize = 4;
/// Most bytes of a file in one message.
pub const LARGEST_PIECE: usize = 1 << 20;

/// An upload under way. Dropped before [`Upload::finish`], it is broken off.
#[derive(Debug)]
pub struct Upload {
    input: mpsc::Sender<v1::UploadInput>,
    answer: JoinHandle<Result<Response<v1::UploadResponse>, Status>>,
}

/// A download under way. Dropping it ends it.
#[derive(Debug)]
pub struct Download {
    stream: Streaming<v1::DownloadOutput>,
    ended: bool,
}

/// What a download brings.
#[derive(Clone, Debug, PartialEq)]
pub enum FilePiece {
    /// A file, whose bytes follow, or a folder or symlink.
    Entry(v1::FileEntry),
    /// Bytes of the file.
    Data(Bytes),
    /// The file is complete.
    FileEnd,
    /// Something that was left out.
    Skipped(v1::FileSkipped),
}

impl Upload {
    /// Begins a file, or makes a folder or symlink. False: the gateway has answered; [`Upload::finish`] tells what.
    pub async fn entry(&self, entry: v1::FileEntry) -> bool {
        self.send(upload_input::Kind::Entry(entry)).await
    }

    /// Bytes of the file that was begun last, at most [`LARGEST_PIECE`]. False as [`Upload::entry`].
    pub async fn data(&self, bytes: Bytes) -> bool {
        self.send(upload_input::Kind::Data(bytes)).await
    }

    /// The file that was begun last is complete. False as [`Upload::entry`].
    pub async fn file_end(&self) -> bool {
        self.send(upload_input::Kind::FileEnd(v1::FileEnd {})).await
    }

    /// Everything was sent.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn finish(self) -> Result<v1::UploadResponse, Error> {
        self.send(upload_input::Kind::End(v1::UploadEnd {})).await;
        drop(self.input);
        match self.answer.await {
            Ok(answer) => answer.map(Response::into_inner).map_err(lost),
            Err(error) => Err(Error::Lost(error.to_string())),
        }
    }

    async fn send(&self, kind: upload_input::Kind) -> bool {
        self.input.send(v1::UploadInput { kind: Some(kind) }).await.is_ok()
    }
}

impl Download {
    /// The next piece; none when everything has come.
    ///
    /// # Errors
    /// What the gateway answers. [`Error::Lost`] when the connection ends before the download does.
    pub async fn next(&mut self) -> Result<Option<FilePiece>, Error> {
        while !self.ended {
            let Some(message) = self.stream.message().await.map_err(lost)? else {
                return Err(Error::Lost("the stream ended before the download did".to_owned()));
            };
            return Ok(Some(match message.kind {
                Some(download_output::Kind::Entry(entry)) => FilePiece::Entry(entry),
                Some(download_output::Kind::Data(bytes)) => FilePiece::Data(bytes),
                Some(download_output::Kind::FileEnd(_)) => FilePiece::FileEnd,
                Some(download_output::Kind::Skipped(skipped)) => FilePiece::Skipped(skipped),
                Some(download_output::Kind::End(_)) => {
                    self.ended = true;
                    continue;
                }
                // A kind of a newer gateway.
                None => continue,
            }));
        }
        Ok(None)
    }
}

fn lost(status: Status) -> Error {
    if Error::is_transport(&status) { Error::Lost(chain(&status)) } else { status.into() }
}

impl Client {
    /// Begins an upload into a folder of a Ready sandbox. Must be called within a tokio runtime. Whatever is wrong is told
    /// by [`Upload::finish`].
    pub async fn upload(&self, start: v1::UploadStart) -> Upload {
        let (input, inputs) = mpsc::channel(INPUTS_IN_FLIGHT);
        let mut client = self.files();
        let answer = tokio::spawn(async move { client.upload(ReceiverStream::new(inputs)).await });
        let upload = Upload { input, answer };
        upload.send(upload_input::Kind::Start(start)).await;
        upload
    }

    /// A file, or a folder with all that is in it, of a Ready sandbox.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn download(&self, request: v1::DownloadRequest) -> Result<Download, Error> {
        let stream = self.files().download(request).await?.into_inner();
        Ok(Download { stream, ended: false })
    }

    /// What is at a path.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND with reason FILE_NOT_FOUND when nothing is there.
    pub async fn stat_file(&self, sandbox: &str, path: &str) -> Result<v1::FileInfo, Error> {
        let request = v1::StatFileRequest { sandbox: sandbox.to_owned(), path: path.to_owned() };
        retried!(self.files().stat(request))
    }

    /// What is in a folder, by name, through all pages.
    ///
    /// # Errors
    /// See [`Client`]; [`Error::Protocol`] when the pages go round in a circle.
    pub async fn list_files(&self, sandbox: &str, path: &str) -> Result<Vec<v1::FileInfo>, Error> {
        let request = v1::ListFilesRequest {
            sandbox: sandbox.to_owned(),
            path: path.to_owned(),
            ..v1::ListFilesRequest::default()
        };
        all_pages!(self.files().list(request).files)
    }

    /// Makes a folder.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn make_directory(&self, request: v1::MakeDirectoryRequest) -> Result<v1::FileInfo, Error> {
        // Not made again: a repeat of one that worked would be told that it is there.
        Ok(self.files().make_directory(request).await?.into_inner())
    }

    /// Removes a file, a symlink, or a folder; whether there was something.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn remove_file(&self, request: v1::RemoveFileRequest) -> Result<bool, Error> {
        // Not made again: a repeat of a removal that worked would be told NOT_FOUND.
        Ok(self.files().remove(request).await?.into_inner().removed)
    }
}
