//! The workspace disk of a sandbox.

use bytes::Bytes;
use tonic::Streaming;
use torpor_proto::v1::{self, export_disk_chunk::Kind};

use crate::{
    client::Client,
    error::{Error, chain},
};

/// A disk that is being handed out. Dropping it ends the export.
pub struct DiskExport {
    stream: Streaming<v1::ExportDiskChunk>,
    size: Option<u64>,
    /// End of the last extent.
    reached: u64,
    data_bytes: u64,
    ended: bool,
}

/// What an export tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskPiece {
    /// The gateway makes it ready: bytes done, and all of them.
    Preparing(u64, u64),
    /// The file's size, bytes. Comes once, before the first data.
    Size(u64),
    /// Bytes at an offset, in rising order. What is between two of them, and after the last, is zeros.
    Data(u64, Bytes),
    /// All before this offset was sent.
    Reached(u64),
}

impl DiskExport {
    /// The next piece; none when all of the disk was sent.
    ///
    /// # Errors
    /// What the gateway answers: ABORTED when the sandbox was resumed, started or deleted meanwhile. [`Error::Lost`] when
    /// the connection ends before the disk does, [`Error::Protocol`] for pieces that don't fit together. What was received
    /// is then not the disk.
    pub async fn next(&mut self) -> Result<Option<DiskPiece>, Error> {
        while !self.ended {
            let Some(message) = self.stream.message().await.map_err(lost)? else {
                return Err(Error::Lost("the stream ended before the disk did".to_owned()));
            };
            if let Some(piece) = self.take(message)? {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    fn take(&mut self, message: v1::ExportDiskChunk) -> Result<Option<DiskPiece>, Error> {
        Ok(match (message.kind, self.size) {
            (Some(Kind::Start(start)), None) => {
                self.size = Some(start.size_bytes);
                Some(DiskPiece::Size(start.size_bytes))
            }
            (Some(Kind::Progress(p)), None) => Some(DiskPiece::Preparing(p.done_bytes, p.total_bytes)),
            (Some(Kind::Progress(p)), Some(_)) => Some(DiskPiece::Reached(p.done_bytes)),
            (Some(Kind::Extent(extent)), Some(size)) => {
                let length = extent.data.len() as u64;
                let end = extent.offset.checked_add(length).filter(|end| *end <= size);
                let end = end.filter(|_| extent.offset >= self.reached);
                self.reached = end.ok_or(Error::Protocol("a piece of a disk is out of order"))?;
                self.data_bytes += length;
                Some(DiskPiece::Data(extent.offset, extent.data))
            }
            (Some(Kind::End(end)), Some(_)) if end.data_bytes == self.data_bytes => {
                self.ended = true;
                None
            }
            (Some(Kind::End(_)), _) => return Err(Error::Protocol("a disk ended with pieces missing")),
            (Some(_), _) => return Err(Error::Protocol("a disk began twice, or with a piece of its middle")),
            // A kind of a newer gateway.
            (None, _) => None,
        })
    }

    /// Bytes of data so far.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }
}

fn lost(status: tonic::Status) -> Error {
    if Error::is_transport(&status) { Error::Lost(chain(&status)) } else { status.into() }
}

impl Client {
    /// Gives back to the host what the guest no longer uses, of a sandbox at rest; with `rewrite` by writing the disk anew.
    /// The last message of the stream holds the result.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn compact_disk(
        &self,
        sandbox: &str,
        rewrite: bool,
    ) -> Result<Streaming<v1::CompactDiskProgress>, Error> {
        let target = v1::Target { sandbox: sandbox.to_owned(), ..v1::Target::default() };
        let request = v1::CompactDiskRequest { target: Some(target), rewrite };
        Ok(self.sandboxes().compact_disk(request).await?.into_inner())
    }

    /// Hands out the disk of a sandbox at rest, with all that it stands on.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn export_disk(&self, sandbox: &str, format: v1::DiskFormat) -> Result<DiskExport, Error> {
        let request = v1::ExportDiskRequest { sandbox: sandbox.to_owned(), format: format.into() };
        let stream = self.sandboxes().export_disk(request).await?.into_inner();
        Ok(DiskExport { stream, size: None, reached: 0, data_bytes: 0, ended: false })
    }
}
