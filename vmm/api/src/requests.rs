//! Requests out of the control socket's stream of bytes, however it is cut.

use std::ops::ControlFlow;

use crate::control::Request;

/// Longest request, bytes, without its line's end.
pub const LONGEST_REQUEST: usize = 4 << 10;

/// A line is longer than [`LONGEST_REQUEST`]: its connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request has at most {LONGEST_REQUEST} bytes")]
pub struct TooLong;

/// Takes a client's bytes apart. Holds one unfinished line at most, so what a client sends is bounded.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    line: Vec<u8>,
}

impl Requests {
    /// Takes bytes in and hands out what each whole line of them asks for, in order; of a line that is no request, what
    /// is wrong with it. `each` ends it by breaking: the rest of the bytes is then lost.
    ///
    /// # Errors
    /// [`TooLong`], after all lines before that one.
    pub fn take(
        &mut self,
        bytes: &[u8],
        mut each: impl FnMut(Result<Request, String>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, TooLong> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.add(&rest[..end])?;
            rest = &rest[end + 1..];
            let request = serde_json::from_slice(&self.line).map_err(|error| error.to_string());
            self.line.clear();
            if each(request).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        self.add(rest)?;
        Ok(ControlFlow::Continue(()))
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        if self.line.len() + bytes.len() > LONGEST_REQUEST {
            self.line = Vec::new();
            return Err(TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is heard of bytes that come in pieces of so many.
    fn heard(bytes: &[u8], piece: usize) -> (Vec<Result<Request, String>>, bool) {
        let (mut requests, mut all) = (Requests::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            let taken = requests.take(piece, |request| {
                all.push(request);
                ControlFlow::Continue(())
            });
            if taken.is_err() {
                return (all, true);
            }
        }
        (all, false)
    }

    #[test]
    fn requests_are_the_same_however_the_stream_is_cut() {
        let bytes = b"{\"request\":\"status\"}\nnonsense\n\n{\"request\":\"pause\"}\n{\"request\":\"res";
        let (whole, long) = heard(bytes, bytes.len());
        assert!(!long);
        assert_eq!((whole.len(), &whole[0], &whole[3]), (4, &Ok(Request::Status), &Ok(Request::Pause)));
        for piece in 1..bytes.len() {
            assert_eq!(heard(bytes, piece), (whole.clone(), false));
        }
    }

    #[test]
    fn a_line_that_is_too_long_ends_it_wherever_it_is_cut() {
        for length in [LONGEST_REQUEST, LONGEST_REQUEST + 1] {
            let bytes = [b"{\"request\":\"status\"}\n".as_slice(), &vec![b'x'; length], b"\n"].concat();
            for piece in [1, 100, 4096, bytes.len()] {
                let (requests, long) = heard(&bytes, piece);
                assert_eq!((requests.len(), long), (if long { 1 } else { 2 }, length > LONGEST_REQUEST));
            }
        }
    }
}
