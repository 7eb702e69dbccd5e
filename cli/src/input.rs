//! Our standard input.

use std::{
    io::{self, Read as _},
    thread,
};

use bytes::Bytes;
use tokio::sync::mpsc;

/// Bytes read at once.
const PIECE: usize = 32 << 10;

/// Reads standard input to its end or an error, at most so many pieces ahead.
pub fn pieces(ahead: usize) -> mpsc::Receiver<Bytes> {
    let (sender, pieces) = mpsc::channel(ahead);
    // A read can't be called off: the thread is left behind when nobody wants its pieces any more.
    thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
        loop {
            match io::stdin().lock().read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
                Ok(count) => {
                    let piece = Bytes::copy_from_slice(buffer.get(..count).unwrap_or_default());
                    if sender.blocking_send(piece).is_err() {
                        break;
                    }
                }
            }
        }
    });
    pieces
}
