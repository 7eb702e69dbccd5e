//! The guest's end: one session after the other, each ended by the greeting of the next.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::BytesMut;
use tokio::{
    io::{
        AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, ReadHalf,
        WriteHalf,
    },
    sync::mpsc,
};

use crate::wire::{self, Decoder, Item, Kind, Nonce, Side, Tag, VERSION};

/// Bytes between the pipe and the session's owner, each way.
const BUFFER: usize = 64 * 1024;

/// Serves sessions on `io` until it ends or fails. Must be called within a tokio runtime.
///
/// The owner of a [`Session`] must keep reading it or drop it: greetings come through the same pipe.
pub fn serve<I>(io: I) -> Sessions
where
    I: AsyncRead + AsyncWrite + Send + 'static,
{
    let (reader, writer) = tokio::io::split(io);
    let (yields, sessions) = mpsc::channel(1);
    let (commands, commanded) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut inbound = Inbound { reader, commands, yields, greeted: None, session: None };
        // Whichever direction ends first ends both: dropping the halves closes the pipe and the session.
        tokio::select! {
            _ = inbound.run() => {}
            _ = outbound(writer, commanded) => {}
        }
    });
    Sessions { sessions }
}

/// The sessions of one pipe.
#[derive(Debug)]
pub struct Sessions {
    sessions: mpsc::Receiver<Session>,
}

impl Sessions {
    /// The next session; the one before it has ended by then. None when the pipe has ended.
    pub async fn next(&mut self) -> Option<Session> {
        self.sessions.recv().await
    }
}

/// One session with the host: bytes in order, both ways. Reads end when the host closes or greets anew.
#[derive(Debug)]
pub struct Session {
    stream: DuplexStream,
}

impl AsyncRead for Session {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Session {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// What the reading direction tells the writing one.
enum Command {
    Welcome(Nonce),
    Begin(Tag, ReadHalf<DuplexStream>),
    End,
}

/// The writing direction is gone: the pipe failed.
struct Gone;

struct Inbound<I> {
    reader: ReadHalf<I>,
    commands: mpsc::Sender<Command>,
    yields: mpsc::Sender<Session>,
    /// Answered, not yet started.
    greeted: Option<Nonce>,
    session: Option<WriteHalf<DuplexStream>>,
}

impl<I: AsyncRead> Inbound<I> {
    async fn run(&mut self) -> Result<(), Gone> {
        let mut decoder = Decoder::new(Side::Host);
        loop {
            while let Some(item) = decoder.next() {
                self.take(item, &mut decoder).await?;
            }
            match self.reader.read_buf(decoder.space()).await {
                Ok(0) | Err(_) => return Ok(()),
                Ok(_) => {}
            }
        }
    }

    async fn take(&mut self, item: Item, decoder: &mut Decoder) -> Result<(), Gone> {
        match item {
            Item::Greeting { version, nonce } => {
                self.end().await?;
                // Another version gets an answer too, so that the host can say what is wrong.
                self.command(Command::Welcome(nonce)).await?;
                if version == VERSION {
                    self.greeted = Some(nonce);
                    decoder.expect(Tag::of(&nonce));
                }
            }
            Item::Frame { kind: Kind::Start, .. } => self.begin().await?,
            Item::Frame { kind: Kind::Data, data } => {
                if let Some(session) = &mut self.session
                    && session.write_all(&data).await.is_err()
                {
                    // Its owner dropped it; what still comes is for nobody.
                    self.session = None;
                }
            }
            Item::Frame { kind: Kind::Close, .. } => self.close().await,
            Item::Lost => self.end().await?,
        }
        Ok(())
    }

    async fn begin(&mut self) -> Result<(), Gone> {
        let Some(nonce) = self.greeted.take() else {
            return Ok(());
        };
        let (ours, theirs) = tokio::io::duplex(BUFFER);
        let (read, write) = tokio::io::split(ours);
        self.session = Some(write);
        self.command(Command::Begin(Tag::of(&nonce), read)).await?;
        self.yields.send(Session { stream: theirs }).await.map_err(|_| Gone)
    }

    /// The host says no more; the guest may still.
    async fn close(&mut self) {
        if let Some(mut session) = self.session.take() {
            // Shutting down an in-memory pipe can't fail.
            let _ = session.shutdown().await;
        }
    }

    async fn end(&mut self) -> Result<(), Gone> {
        self.close().await;
        self.greeted = None;
        self.command(Command::End).await
    }

    async fn command(&mut self, command: Command) -> Result<(), Gone> {
        self.commands.send(command).await.map_err(|_| Gone)
    }
}

async fn outbound<I: AsyncWrite>(
    mut writer: WriteHalf<I>,
    mut commands: mpsc::Receiver<Command>,
) -> io::Result<()> {
    let mut session: Option<(Tag, ReadHalf<DuplexStream>)> = None;
    let mut data = BytesMut::with_capacity(wire::MAX_PAYLOAD);
    let mut out = BytesMut::new();
    loop {
        data.clear();
        // Reading from an in-memory pipe loses nothing when the command comes first; a frame that is being written is
        // always finished.
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                None => return Ok(()),
                Some(Command::Welcome(nonce)) => wire::put_greeting(&mut out, Side::Guest, &nonce),
                Some(Command::Begin(tag, read)) => session = Some((tag, read)),
                Some(Command::End) => session = None,
            },
            read = read_some(session.as_mut(), &mut data) => {
                let (tag, count) = read?;
                if count == 0 {
                    wire::put_frame(&mut out, tag, Kind::Close, &[]);
                    session = None;
                } else {
                    wire::put_frame(&mut out, tag, Kind::Data, &data);
                }
            }
        }
        if !out.is_empty() {
            writer.write_all(&out).await?;
            writer.flush().await?;
            out.clear();
        }
    }
}

/// At most one frame's data from the session; waits for ever without one.
async fn read_some(
    session: Option<&mut (Tag, ReadHalf<DuplexStream>)>,
    data: &mut BytesMut,
) -> io::Result<(Tag, usize)> {
    let Some((tag, read)) = session else {
        return std::future::pending().await;
    };
    let mut limited = bytes::BufMut::limit(data, wire::MAX_PAYLOAD);
    Ok((*tag, read.read_buf(&mut limited).await?))
}
