//! Pages of lists that are kept here.

use crate::{
    api::sandboxes::page_size,
    error::ApiError,
    store::{Object, StoreError},
};

/// What begins a token of ours.
const PREFIX: &str = "f1.";

/// A page token that this gateway has not given.
pub fn not_ours(token: &str) -> StoreError {
    StoreError::BadToken(format!("'{}' is not a page token of ours", token.escape_debug()))
}

/// The size of a page, and after which object it begins.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn asked(size: i32, token: &str) -> Result<(usize, Option<[String; 3]>), ApiError> {
    let size = page_size(size)?;
    if token.is_empty() {
        return Ok((size, None));
    }
    let wrong = || not_ours(token);
    let parts: Vec<String> =
        token.strip_prefix(PREFIX).ok_or_else(wrong)?.split('/').map(str::to_owned).collect();
    Ok((size, Some(parts.try_into().map_err(|_| wrong())?)))
}

/// The token of the page after these objects, if there is one.
pub fn next(shown: &[Object], more: bool) -> String {
    let last = shown.last().filter(|_| more);
    last.map_or_else(String::new, |last| {
        format!("{PREFIX}{}/{}/{}", last.workspace, last.sandbox.as_deref().unwrap_or_default(), last.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str) -> Object {
        Object {
            id: "provider-1".into(),
            workspace: "default".into(),
            sandbox: None,
            name: name.into(),
            version: 1,
            labels: Default::default(),
            body: Vec::new(),
            created: std::time::SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_token_leads_back_to_the_last_object_shown() {
        let token = next(&[object("a"), object("b")], true);
        let (size, after) = asked(0, &token).unwrap();
        assert_eq!((size, after), (100, Some(["default".to_owned(), String::new(), "b".to_owned()])));
        assert_eq!(next(&[object("a")], false), "");
    }

    #[test]
    fn a_token_of_others_is_refused() {
        for token in ["x", "f1.a", "f1.a/b", "f1.a/b/c/d", "p1.3"] {
            assert!(asked(1, token).is_err(), "{token}");
        }
        assert!(asked(-1, "").is_err());
    }
}
