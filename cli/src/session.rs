//! What every command needs: where the gateway is and how to print.

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
};

use serde::Serialize;
use torpor_sdk::{Client, Options, Tls, v1};

use crate::{
    args::Global,
    failure::Failure,
    output::{self, Format, view},
};

/// The global options, worked out.
pub struct Session {
    pub endpoint: String,
    options: Options,
    pub format: Format,
    pub quiet: bool,
    token_file: Option<PathBuf>,
}

impl Session {
    pub fn new(global: &Global) -> Self {
        let by_default = if global.quiet { Format::Name } else { Format::Table };
        Self {
            endpoint: global.endpoint.clone(),
            options: Options {
                token: None,
                workspace: global.workspace.clone(),
                tls: Tls { ca: global.ca.clone(), identity: global.cert.clone().zip(global.key.clone()) },
            },
            token_file: global.token_file.clone(),
            format: global.output.unwrap_or(by_default),
            quiet: global.quiet,
        }
    }

    pub async fn connect(&self) -> Result<Client, Failure> {
        let options = Options { token: self.token()?, ..self.options.clone() };
        Ok(Client::connect_with(&self.endpoint, &options).await?)
    }

    /// The options that another process of ours needs to reach the same gateway as the same caller; a token in the
    /// environment is there for it as well.
    pub fn connection(&self) -> Vec<String> {
        let path = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let mut words = vec!["--endpoint".to_owned(), self.endpoint.clone()];
        let identity = self.options.tls.identity.as_ref();
        let files = [
            ("--token-file", self.token_file.as_ref()),
            ("--ca", self.options.tls.ca.as_ref()),
            ("--cert", identity.map(|(cert, _)| cert)),
            ("--key", identity.map(|(_, key)| key)),
        ];
        for (name, file) in files {
            if let Some(file) = file {
                words.extend([name.to_owned(), path(file).display().to_string()]);
            }
        }
        if let Some(workspace) = &self.options.workspace {
            words.extend(["--workspace".to_owned(), workspace.clone()]);
        }
        words
    }

    /// The token to show; the file counts for more than the environment.
    fn token(&self) -> Result<Option<String>, Failure> {
        let Some(path) = &self.token_file else {
            return Ok(std::env::var("TORPOR_TOKEN").ok().filter(|token| !token.is_empty()));
        };
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::usage(format!("token file '{}': {e}", path.display())))?;
        let token = text.trim().to_owned();
        if token.is_empty() {
            return Err(Failure::usage(format!("token file '{}' is empty", path.display())));
        }
        Ok(Some(token))
    }

    /// Whether somebody watches: progress goes to standard error, and only to a terminal.
    pub fn shows_progress(&self) -> bool {
        !self.quiet && io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
    }

    /// Whether the gateway's file system is ours, so that relative paths mean something to it.
    pub fn is_local(&self) -> bool {
        self.endpoint.starts_with("unix:")
    }

    /// A path of the gateway's host: made absolute when that is this host.
    pub fn host_path(&self, path: &str) -> Result<String, Failure> {
        if !self.is_local() {
            return Ok(path.to_owned());
        }
        let absolute = std::path::absolute(path)
            .map_err(|e| Failure::usage(format!("path '{path}' can't be made absolute: {e}")))?;
        absolute
            .into_os_string()
            .into_string()
            .map_err(|p| Failure::usage(format!("path '{}' is not UTF-8", p.display())))
    }

    /// Prints sandboxes: an object when one was asked for, else a list.
    pub fn print_sandboxes(
        &self,
        sandboxes: &[v1::Sandbox],
        one: bool,
        table: impl FnOnce(&[v1::Sandbox]) -> String,
    ) -> Result<(), Failure> {
        let views = || sandboxes.iter().map(view::Sandbox::from).collect::<Vec<_>>();
        match (self.format, sandboxes) {
            (Format::Table, _) => output::text(&table(sandboxes)),
            (Format::Name, _) => output::lines(sandboxes.iter().map(|s| s.name.as_str())),
            (_, [single]) if one => output::structured(self.format, &view::Sandbox::from(single)),
            _ => output::structured(self.format, &views()),
        }
    }

    /// Prints anything else that has a list of names and a table.
    pub fn print<T: Serialize>(
        &self,
        value: &T,
        names: impl FnOnce() -> Vec<String>,
        table: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.format {
            Format::Table => output::text(&table()),
            Format::Name => output::lines(names().iter().map(String::as_str)),
            format => output::structured(format, value),
        }
    }

    /// Prints what became of what was to go, each by its `key`, with the word for one that went and for one that wasn't there:
    /// an object when `one` was asked for, else a list.
    pub fn print_removed(
        &self,
        key: &str,
        done: &[(&str, bool)],
        one: bool,
        (gone, absent): (&str, &str),
    ) -> Result<(), Failure> {
        let value = |(name, removed): &(&str, bool)| serde_json::json!({ key: name, "removed": removed });
        let names = || done.iter().map(|(name, _)| (*name).to_owned()).collect();
        let line = |(name, removed): &(&str, bool)| {
            format!("{} {}\n", output::clean(name), if *removed { gone } else { absent })
        };
        let human = || done.iter().map(line).collect();
        match done {
            [] if one => Ok(()),
            [single] if one => self.print(&value(single), names, human),
            _ => self.print(&done.iter().map(value).collect::<Vec<_>>(), names, human),
        }
    }
}
