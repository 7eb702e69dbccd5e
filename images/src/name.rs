//! Names and digests of images.

use crate::Error;

const MAX_PART: usize = 63;

/// Checks that `name` can name an image: `name` or `name:tag`, each of lower-case letters, digits, `.`, `_` and `-`,
/// beginning with a letter or digit, 63 characters at most. A name is also a file name, so it holds no slash.
///
/// # Errors
/// [`Error::BadName`] with the broken rule.
pub fn check_name(name: &str) -> Result<(), Error> {
    let bad = |why| Err(Error::BadName { name: name.into(), why });
    let (base, tag) = match name.split_once(':') {
        Some((base, tag)) => (base, Some(tag)),
        None => (name, None),
    };
    if base == "sha256" || is_hex(base, 64) {
        return bad("it looks like a digest");
    }
    for part in std::iter::once(base).chain(tag) {
        if part.is_empty() {
            return bad("a part of it is empty");
        }
        if part.len() > MAX_PART {
            return bad("a part of it is longer than 63 characters");
        }
        if !part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b)) {
            return bad("it has a character that is not allowed");
        }
        if !part.as_bytes()[0].is_ascii_alphanumeric() {
            return bad("each part begins with a letter or a digit");
        }
    }
    Ok(())
}

/// Whether `text` is exactly `len` lower-case hex digits.
pub(crate) fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && is_hex_prefix(text, 0)
}

/// The hex digits of a whole or shortened digest (at least 12 digits), with or without `sha256:`.
pub(crate) fn digest_prefix(text: &str) -> Option<&str> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    is_hex_prefix(hex, 12).then_some(hex)
}

fn is_hex_prefix(text: &str, at_least: usize) -> bool {
    (at_least..=64).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_names_are_accepted() {
        for name in ["debian", "debian:12", "my_image-2.1", "a", "0x"] {
            check_name(name).unwrap();
        }
    }

    #[test]
    fn names_that_could_be_paths_options_or_digests_are_refused() {
        let hex = "a".repeat(64);
        let long = "a".repeat(64 - 1) + "z";
        for name in [
            "",
            ":",
            "a:",
            ":a",
            "../x",
            "a/b",
            ".hidden",
            "-rf",
            "A",
            "a b",
            "a:b:c",
            "sha256:ab",
            &hex,
            &long,
        ] {
            let error = check_name(name);
            assert!(matches!(error, Err(Error::BadName { .. })), "{name:?} gave {error:?}");
        }
    }

    #[test]
    fn a_digest_may_be_shortened_to_twelve_digits() {
        assert_eq!(digest_prefix("sha256:0123456789ab"), Some("0123456789ab"));
        assert_eq!(digest_prefix("0123456789ab"), Some("0123456789ab"));
        assert_eq!(digest_prefix("0123456789a"), None);
        assert_eq!(digest_prefix("debian"), None);
    }
}
