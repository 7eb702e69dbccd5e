//! Credentials of registries, as `docker login` leaves them in a file.

use std::{collections::HashMap, fs, path::PathBuf};

use base64::{Engine as _, engine::general_purpose};
use serde::Deserialize;
use serde_json::json;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    auths: HashMap<String, Entry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    #[serde(rename = "identitytoken")]
    identity_token: String,
}

/// The header that gives the engine what it needs for the registry of this image; none: it tries without.
pub(crate) fn header(files: &[PathBuf], image: &str) -> Option<String> {
    let registry = registry(image);
    files.iter().find_map(|file| {
        let text = fs::read(file).ok()?;
        let file: File = serde_json::from_slice(&text)
            .inspect_err(|error| tracing::warn!(file = %file.display(), %error, "credentials can't be read"))
            .ok()?;
        names(registry).iter().find_map(|name| credentials(registry, file.auths.get(name)?))
    })
}

fn credentials(registry: &str, entry: &Entry) -> Option<String> {
    let value = if entry.identity_token.is_empty() {
        let plain = general_purpose::STANDARD.decode(&entry.auth).ok()?;
        let plain = String::from_utf8(plain).ok()?;
        let (user, password) = plain.split_once(':')?;
        json!({"username": user, "password": password, "serveraddress": registry})
    } else {
        json!({"identitytoken": entry.identity_token, "serveraddress": registry})
    };
    Some(general_purpose::URL_SAFE.encode(value.to_string()))
}

/// The part before the first slash, when it can be a host; else Docker's own registry.
fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
        _ => "docker.io",
    }
}

/// What the file may call it.
fn names(registry: &str) -> Vec<String> {
    let mut names = vec![registry.to_owned(), format!("https://{registry}")];
    if registry == "docker.io" {
        names.push("https://index.docker.io/v1/".to_owned());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credentials_are_those_of_the_images_registry() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        // "ann:secret:1", and a token.
        let text = r#"{"auths": {"registry.test:5000": {"auth": "YW5uOnNlY3JldDox"},
            "https://index.docker.io/v1/": {"identitytoken": "t"}}, "credsStore": "x"}"#;
        fs::write(&file, text).unwrap();
        let of = |image: &str| {
            let header = header(&[folder.path().join("none"), file.clone()], image)?;
            let json = general_purpose::URL_SAFE.decode(header).unwrap();
            Some(serde_json::from_slice::<serde_json::Value>(&json).unwrap())
        };
        let own = of("registry.test:5000/team/web:1").unwrap();
        assert_eq!((own["username"].as_str(), own["password"].as_str()), (Some("ann"), Some("secret:1")));
        assert_eq!(of("alpine").unwrap()["identitytoken"], "t");
        assert_eq!(of("other.test/alpine"), None);
    }

    #[test]
    fn an_images_first_part_is_its_registry_when_it_can_be_a_host() {
        assert_eq!(registry("localhost/a"), "localhost");
        assert_eq!(registry("a.test/b:1"), "a.test");
        assert_eq!([registry("library/alpine"), registry("alpine:3")], ["docker.io"; 2]);
    }
}
