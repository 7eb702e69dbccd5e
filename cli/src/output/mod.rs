//! Printing: tables for people, JSON and YAML for programs.

pub mod disk;
pub mod network;
pub mod table;
pub mod view;

use std::io::{self, Write as _};

use clap::ValueEnum;
use serde::Serialize;

use crate::failure::{FAILED, Failure};

/// Form of what is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs.
    Json,
    /// As json, in YAML.
    Yaml,
    /// Names only, one a line.
    Name,
}

/// Prints text as it is.
pub fn text(text: &str) -> Result<(), Failure> {
    bytes(text.as_bytes())
}

/// Prints bytes as they are.
pub fn bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    Ok(stdout.flush()?)
}

/// Prints lines.
pub fn lines<'a>(lines: impl Iterator<Item = &'a str>) -> Result<(), Failure> {
    text(&lines.map(|l| format!("{}\n", clean(l))).collect::<String>())
}

/// Prints a value as JSON or YAML.
pub fn structured<T: Serialize>(format: Format, value: &T) -> Result<(), Failure> {
    let wrong = |e: String| Failure::new(FAILED, format!("can't write the output: {e}"));
    let printed = if format == Format::Yaml {
        serde_saphyr::to_string(value).map_err(|e| wrong(e.to_string()))?
    } else {
        serde_json::to_string_pretty(value).map_err(|e| wrong(e.to_string()))?
    };
    text(&format!("{}\n", printed.trim_end_matches('\n')))
}

/// Prints one value of a stream: JSON on a line of its own, YAML as a document.
pub fn structured_item<T: Serialize>(format: Format, value: &T) -> Result<(), Failure> {
    if format == Format::Yaml {
        text("---\n")?;
        return structured(format, value);
    }
    let line = serde_json::to_string(value)
        .map_err(|e| Failure::new(FAILED, format!("can't write the output: {e}")))?;
    text(&format!("{line}\n"))
}

/// Text without control characters: a hostile guest must not drive the user's terminal. Line breaks become spaces.
pub fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { if c.is_whitespace() { ' ' } else { '\u{fffd}' } } else { c })
        .collect()
}

/// As [`clean`], for longer text: line breaks and tabs stay, and colours go without a trace.
pub fn clean_block(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' => {}
            '\x1b' if chars.peek() == Some(&'[') => {
                chars.next();
                // A control sequence ends with a letter or one of "@[\]^_`{|}~".
                while chars.next_if(|c| !('\x40'..='\x7e').contains(c) && !c.is_control()).is_some() {}
                chars.next_if(|c| ('\x40'..='\x7e').contains(c));
            }
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_guest_reaches_the_terminal_as_a_command() {
        assert_eq!(clean("a\x1b]0;x\x07\nb"), "a\u{fffd}]0;x\u{fffd} b");
        assert_eq!(clean_block("\x1b[1;31mred\x1b[0m\r\n\tok\u{9b}2J"), "red\n\tok\u{fffd}2J");
        assert_eq!(clean_block("\x1b["), "");
    }

    #[test]
    fn yaml_keeps_words_that_look_like_other_things() {
        let value = serde_json::json!({"a": "no", "b": null, "c": "1", "d": ["x: y"], "e": "line\nbreak"});
        let printed = serde_saphyr::to_string(&value).unwrap();
        assert!(!printed.contains("a: no\n") && !printed.contains("c: 1\n"), "{printed}");
        assert!(printed.contains("b: null"), "{printed}");
    }
}
