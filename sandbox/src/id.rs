//! Ids, names and run numbers.

use std::{fmt, str::FromStr};

use rand::Rng as _;
use serde::{Deserialize, Serialize};

/// The letters of generated ids: no vowels (no words), nothing that looks like something else.
const ALPHABET: &[u8] = b"0123456789bcdfghjkmnpqrstvwxyz";
const ID_LETTERS: usize = 16;

/// What a sandbox is known by for ever: `sb-` and 16 letters, about 78 random bits. Never used twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

impl SandboxId {
    /// A new random id.
    pub fn generate() -> Self {
        let mut rng = rand::rng();
        let letters = (0..ID_LETTERS).map(|_| char::from(ALPHABET[rng.random_range(0..ALPHABET.len())]));
        Self(format!("sb-{}", letters.collect::<String>()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0
    }
}

impl TryFrom<String> for SandboxId {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.parse()
    }
}

impl FromStr for SandboxId {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let letters = text.strip_prefix("sb-").unwrap_or_default();
        if letters.len() == ID_LETTERS && letters.bytes().all(|b| ALPHABET.contains(&b)) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName { what: "sandbox id", text: clip(text), rule: "'sb-' and 16 letters or digits" })
        }
    }
}

/// What its user calls a sandbox: a DNS label, so that it can be a host name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxName(String);

const ADJECTIVES: &[&str] = &[
    "amber", "brisk", "calm", "dusky", "early", "fleet", "gentle", "hazy", "idle", "jolly", "keen", "lucid",
    "mellow", "nimble", "opal", "placid", "quiet", "rapid", "silent", "tidy", "urban", "vivid", "warm",
    "young",
];
const NOUNS: &[&str] = &[
    "badger", "bat", "bear", "beetle", "chipmunk", "dormouse", "echidna", "finch", "frog", "gecko",
    "hedgehog", "heron", "lemur", "marmot", "newt", "otter", "poorwill", "quail", "robin", "skunk", "swift",
    "tenrec", "turtle", "vole",
];

impl SandboxName {
    /// A name made of two words and a number, for those who give none.
    pub fn generate() -> Self {
        let mut rng = rand::rng();
        let adjective = ADJECTIVES[rng.random_range(0..ADJECTIVES.len())];
        let noun = NOUNS[rng.random_range(0..NOUNS.len())];
        Self(format!("{adjective}-{noun}-{}", rng.random_range(100..10_000)))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<SandboxName> for String {
    fn from(name: SandboxName) -> Self {
        name.0
    }
}

impl TryFrom<String> for SandboxName {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.parse()
    }
}

impl FromStr for SandboxName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let rule =
            "1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit, not an id ('sb-…')";
        let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = text.as_bytes();
        let fits = (1..=63).contains(&bytes.len())
            && bytes.iter().all(|&b| ok(b) || b == b'-')
            && bytes.first().copied().is_some_and(ok)
            && bytes.last().copied().is_some_and(ok)
            && !text.starts_with("sb-");
        if fits {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName { what: "sandbox name", text: clip(text), rule })
        }
    }
}

/// A name or id that breaks its rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} '{text}' is not valid: it must be {rule}")]
pub struct InvalidName {
    /// What was named.
    pub what: &'static str,
    /// What was given, cut to a printable length.
    pub text: String,
    /// What is allowed.
    pub rule: &'static str,
}

/// Hostile input is quoted in errors: keeps it short and printable.
pub fn clip(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Counts the starts of one sandbox, from 1; 0 means never started. The agent echoes it, so that late words of an old
/// life are told from those of the present one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Run(pub u64);

impl Run {
    /// The run after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_ids_and_names_follow_their_own_rules() {
        for _ in 0..1000 {
            let id = SandboxId::generate();
            assert_eq!(id.as_str().parse(), Ok(id.clone()));
            let name = SandboxName::generate();
            assert_eq!(name.as_str().parse(), Ok(name.clone()));
        }
    }

    #[test]
    fn an_id_can_never_be_taken_for_a_name() {
        assert!(SandboxId::generate().as_str().parse::<SandboxName>().is_err());
        assert!("web".parse::<SandboxId>().is_err());
    }

    #[test]
    fn names_that_could_leave_a_folder_or_a_terminal_line_are_refused() {
        for bad in ["", "-a", "a-", "A", "a/b", "..", "a b", "a\n", "ä", &"x".repeat(64), "sb-x"] {
            let error = bad.parse::<SandboxName>().unwrap_err().to_string();
            assert!(!error.contains('\n'), "{error}");
        }
        assert!("a".parse::<SandboxName>().is_ok() && "x".repeat(63).parse::<SandboxName>().is_ok());
    }
}
