//! The command line.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// What `--help` prints.
pub(super) const HELP: &str = "\
torpor-vmm: runs one virtual machine on KVM

usage: torpor-vmm [-name MARKER] (--config-fd N | --config FILE)

  -name MARKER    marks the process in /proc; it has no other meaning
  --config-fd N   reads the configuration (JSON) from descriptor N, to its end
  --config FILE   reads it from a file
  --version       prints the version
  --help          prints this

exit codes: 0 guest switched itself off, 1 not started, 2 wrong arguments, 10 guest reset itself, 11 guest panicked,
12 triple fault, 13 ended by the host, 14 a CPU can't go on, 15 torpor-vmm failed
";

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Version,
    Run(ConfigSource),
}

/// Where the configuration is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ConfigSource {
    Fd(RawFd),
    File(PathBuf),
}

/// Arguments that can't be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum ArgumentError {
    #[error("unknown argument {0:?}; see torpor-vmm --help")]
    Unknown(String),
    #[error("{0} needs a value; see torpor-vmm --help")]
    NoValue(&'static str),
    #[error("--config-fd needs a descriptor above 2, not {0:?}")]
    NoDescriptor(String),
    #[error("{0} was given before")]
    Twice(&'static str),
    #[error("there is no configuration; give --config-fd or --config")]
    NoConfig,
}

/// All arguments but the program's name.
pub(super) fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Command, ArgumentError> {
    let mut arguments = arguments;
    let mut source = None;
    let mut named = false;
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--help" | "-h") => return Ok(Command::Help),
            Some("--version" | "-V") => return Ok(Command::Version),
            Some("-name") => {
                arguments.next().ok_or(ArgumentError::NoValue("-name"))?;
                once("-name", std::mem::replace(&mut named, true))?;
            }
            Some("--config-fd") => {
                let value = arguments.next().ok_or(ArgumentError::NoValue("--config-fd"))?;
                once("the configuration", source.replace(ConfigSource::Fd(descriptor(&value)?)).is_some())?;
            }
            Some("--config") => {
                let value = arguments.next().ok_or(ArgumentError::NoValue("--config"))?;
                once("the configuration", source.replace(ConfigSource::File(value.into())).is_some())?;
            }
            _ => return Err(ArgumentError::Unknown(argument.to_string_lossy().into_owned())),
        }
    }
    source.map(Command::Run).ok_or(ArgumentError::NoConfig)
}

fn once(what: &'static str, before: bool) -> Result<(), ArgumentError> {
    if before { Err(ArgumentError::Twice(what)) } else { Ok(()) }
}

fn descriptor(value: &OsString) -> Result<RawFd, ArgumentError> {
    let number = value.to_str().and_then(|text| text.parse().ok()).filter(|number| *number > 2);
    number.ok_or_else(|| ArgumentError::NoDescriptor(value.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, ArgumentError> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_marker_and_one_source_of_the_configuration_are_taken_in_any_order() {
        let fd = Ok(Command::Run(ConfigSource::Fd(7)));
        assert_eq!(parsed("-name torpor-x-run-1 --config-fd 7"), fd);
        assert_eq!(parsed("--config-fd 7 -name torpor-x-run-1"), fd);
        assert_eq!(parsed("--config /c"), Ok(Command::Run(ConfigSource::File("/c".into()))));
        assert_eq!(parsed("--help"), Ok(Command::Help));
        assert_eq!(parsed("--version"), Ok(Command::Version));
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let cases = [
            ("", "there is no configuration"),
            ("-name", "-name needs a value"),
            ("-name a -name b --config c", "-name was given before"),
            ("--config a --config-fd 3", "the configuration was given before"),
            ("--config-fd", "--config-fd needs a value"),
            ("--config-fd 2", "above 2"),
            ("--config-fd x", "\"x\""),
            ("--config-fd -1", "\"-1\""),
            ("--name x", "\"--name\""),
        ];
        for (line, text) in cases {
            let error = parsed(line).unwrap_err().to_string();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
