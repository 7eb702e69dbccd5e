//! JSON objects one after the other in a body that comes in pieces, with or without line ends in and between them.

use bytes::{Bytes, BytesMut};

/// Why a body is no sequence of objects.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// Something else than an object begins.
    #[error("a JSON object is expected, not '{}'", char::from(*.0).escape_debug())]
    NoObject(u8),
    /// One object is too long.
    #[error("one JSON object is longer than {0} bytes")]
    TooLong(usize),
    /// The body ended within one.
    #[error("the body ends in the middle of a JSON object")]
    Cut,
}

/// Finds where objects end. It looks at every byte once.
pub struct Splitter {
    buffer: BytesMut,
    /// Bytes of the buffer that were looked at.
    seen: usize,
    depth: usize,
    string: bool,
    escaped: bool,
    largest: usize,
}

impl Splitter {
    /// For objects of at most so many bytes.
    pub fn new(largest: usize) -> Self {
        Self { buffer: BytesMut::new(), seen: 0, depth: 0, string: false, escaped: false, largest }
    }

    /// More of the body.
    pub fn push(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    /// The next whole object; none: more is needed.
    ///
    /// # Errors
    /// See [`SplitError`].
    pub fn next(&mut self) -> Result<Option<Bytes>, SplitError> {
        if self.depth == 0 {
            let blank = self.buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let _ = self.buffer.split_to(blank);
        }
        while let Some(&byte) = self.buffer.get(self.seen) {
            self.seen += 1;
            if self.seen > self.largest {
                return Err(SplitError::TooLong(self.largest));
            }
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.string => self.escaped = true,
                b'"' if self.depth > 0 => self.string = !self.string,
                _ if self.string => {}
                b'{' | b'[' if self.depth > 0 || byte == b'{' => self.depth += 1,
                _ if self.depth == 0 => return Err(SplitError::NoObject(byte)),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        let object = self.buffer.split_to(self.seen).freeze();
                        self.seen = 0;
                        return Ok(Some(object));
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// The body has ended.
    ///
    /// # Errors
    /// [`SplitError::Cut`].
    pub fn end(&self) -> Result<(), SplitError> {
        let empty = self.buffer.iter().all(u8::is_ascii_whitespace);
        if empty { Ok(()) } else { Err(SplitError::Cut) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pieces: &[&str]) -> Result<Vec<String>, SplitError> {
        let mut splitter = Splitter::new(64);
        let mut found = Vec::new();
        for piece in pieces {
            splitter.push(piece.as_bytes());
            while let Some(object) = splitter.next()? {
                found.push(String::from_utf8(object.to_vec()).unwrap());
            }
        }
        splitter.end().map(|()| found)
    }

    #[test]
    fn objects_end_where_their_brace_closes() {
        assert_eq!(all(&["{}\n{\"a\":\"}\\\"\"}\n\n"]).unwrap(), ["{}", "{\"a\":\"}\\\"\"}"]);
        assert_eq!(
            all(&["{\n \"a\": [1, {\"b\":", " 2}]\n}", "{}"]).unwrap(),
            ["{\n \"a\": [1, {\"b\": 2}]\n}", "{}"]
        );
        assert_eq!(all(&[" \r\n\t"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn every_cut_gives_the_same_objects() {
        let text = "{\"a\":\"\\\\\"}{\"b\":{}}";
        for at in 0..text.len() {
            assert_eq!(
                all(&[&text[..at], &text[at..]]).unwrap(),
                ["{\"a\":\"\\\\\"}", "{\"b\":{}}"],
                "cut at {at}"
            );
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        assert_eq!(all(&["{}x"]), Err(SplitError::NoObject(b'x')));
        assert_eq!(all(&["[]"]), Err(SplitError::NoObject(b'[')));
        assert_eq!(all(&["{\"a\""]), Err(SplitError::Cut));
        assert_eq!(all(&[&format!("{{\"{}\"}}", "x".repeat(64))]), Err(SplitError::TooLong(64)));
    }
}
