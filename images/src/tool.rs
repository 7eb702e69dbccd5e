//! Running the few programs of the host that we need.

use std::collections::VecDeque;
use std::env;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use crate::Error;
use crate::error::At;
use crate::staging::Staging;

/// Lines of standard error kept for the message of a failure.
const TAIL: usize = 12;
const MAX_LINE: usize = 400;

/// A program and the Debian package that brings it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

impl Tool {
    pub(crate) const fn new(name: &'static str, package: &'static str) -> Self {
        Self { name, package }
    }

    /// Where the program is; `sbin` is looked at too, because a user's PATH often lacks it.
    pub(crate) fn find(self) -> Result<PathBuf, Error> {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path)
            .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
            .map(|dir| dir.join(self.name))
            .find(|file| file.is_file())
            .ok_or_else(|| Error::ToolMissing { tool: self.name.into(), package: self.package })
    }

    /// A command in a fixed locale, with no input.
    pub(crate) fn command(self) -> Result<Command, Error> {
        let mut command = Command::new(self.find()?);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        Ok(command)
    }

    /// A command that keeps `staging` locked while it runs.
    pub(crate) fn command_in(self, staging: &Staging) -> Result<Command, Error> {
        let mut command = self.command()?;
        command.stdin(staging.stdin()?);
        Ok(command)
    }

    /// Runs to the end and returns standard output; every line of standard error goes to `on_line` as it comes.
    pub(crate) fn run(
        self,
        command: &mut Command,
        action: &'static str,
        on_line: &mut dyn FnMut(&str),
    ) -> Result<Vec<u8>, Error> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().at("run", self.name)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (output, tail) = std::thread::scope(|scope| {
            let reader = scope.spawn(move || read_all(stdout));
            let tail = follow(stderr, on_line);
            (reader.join().unwrap_or_default(), tail)
        });
        let status = child.wait().at("wait for", self.name)?;
        if status.success() { Ok(output) } else { Err(self.failed(action, status, &tail)) }
    }

    /// The error for a program that ended badly.
    pub(crate) fn failed(self, action: &'static str, status: ExitStatus, output: &str) -> Error {
        Error::ToolFailed {
            tool: self.name.into(),
            action,
            status: status.to_string(),
            output: output.into(),
        }
    }
}

fn read_all(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        // A broken pipe means the program died; its exit status says so.
        from.read_to_end(&mut bytes).ok();
    }
    bytes
}

/// Passes lines on until the end, and returns the last ones.
pub(crate) fn follow(from: Option<impl Read>, on_line: &mut dyn FnMut(&str)) -> String {
    let mut tail = VecDeque::with_capacity(TAIL);
    if let Some(from) = from {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line);
            let line: String = text.trim_end().chars().take(MAX_LINE).collect();
            if line.is_empty() {
                continue;
            }
            on_line(&line);
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(line);
        }
    }
    // apt and mmdebstrap mark what went wrong; the rest is progress.
    let marked: Vec<&str> = tail.iter().filter_map(|line| line.strip_prefix("E: ")).collect();
    if marked.is_empty() { Vec::from(tail).join("; ") } else { marked.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let error = Tool::new("torpor-no-such-program", "some-package").find().unwrap_err();
        assert!(error.to_string().contains("apt-get install some-package"), "{error}");
    }

    #[test]
    fn a_failing_program_is_reported_with_its_last_words() {
        let tool = Tool::new("sh", "dash");
        let mut command = tool.command().unwrap();
        command.args(["-c", "echo out; echo first >&2; echo last words >&2; exit 3"]);
        let mut lines = Vec::new();
        let error = tool.run(&mut command, "test", &mut |line| lines.push(line.to_owned())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("last words") && text.contains("exit status: 3"), "{text}");
        assert_eq!(lines, ["first", "last words"]);
    }

    #[test]
    fn lines_that_are_marked_as_errors_stand_alone() {
        let said = "I: step\nE: Unable to locate package x\nI: more\n";
        assert_eq!(follow(Some(said.as_bytes()), &mut |_| ()), "Unable to locate package x");
    }

    #[test]
    fn much_output_on_both_streams_does_not_hang() {
        let tool = Tool::new("sh", "dash");
        let mut command = tool.command().unwrap();
        command.args([
            "-c",
            "i=0; while [ $i -lt 3000 ]; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; \
                       echo bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb >&2; i=$((i+1)); done",
        ]);
        assert_eq!(tool.run(&mut command, "test", &mut |_| ()).unwrap().len(), 3000 * 38);
    }
}
