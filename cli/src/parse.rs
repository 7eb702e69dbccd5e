//! Values on the command line.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use torpor_sandbox::spec::NAMES_IN_DRIVER_CONFIG;
use torpor_sdk::v1;

use crate::failure::Failure;

/// A size: `512M`, `1GiB`, `1.5G`, or bytes. K, M, G and T are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "" | "B" => 1,
        "K" | "Ki" | "KiB" => 1 << 10,
        "M" | "Mi" | "MiB" => 1 << 20,
        "G" | "Gi" | "GiB" => 1 << 30,
        "T" | "Ti" | "TiB" => 1 << 40,
        _ => {
            return Err(format!(
                "'{unit}' is not a unit: use K, M, G or T (powers of 1024), as in 512M or 1GiB"
            ));
        }
    };
    let value: f64 =
        number.parse().map_err(|_| "a size is a number and a unit, as in 512M or 1GiB".to_owned())?;
    let bytes = value * factor as f64;
    if !(1.0..=(1_u64 << 60) as f64).contains(&bytes) {
        return Err("a size must be at least one byte and at most 1048576T".to_owned());
    }
    Ok(bytes as u64)
}

/// A time: `500ms`, `10s`, `5m`, `1h`, or seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(format!("'{unit}' is not a unit of time: use ms, s, m, h or d, as in 10s")),
    };
    let value: f64 =
        number.parse().map_err(|_| "a time is a number and a unit, as in 10s or 5m".to_owned())?;
    Duration::try_from_secs_f64(value * factor).map_err(|e| e.to_string())
}

/// A label: `key=value`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("it must be KEY=VALUE".to_owned()),
    }
}

/// A volume: `SOURCE:TARGET`, with `:ro` after it for one that can't be written to.
pub fn volume(text: &str) -> Result<v1::Volume, String> {
    let (text, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, true),
        None => (text.strip_suffix(":rw").unwrap_or(text), false),
    };
    match text.split_once(':') {
        Some((source, target)) if !source.is_empty() && target.starts_with('/') => {
            Ok(v1::Volume { source: source.to_owned(), target: target.to_owned(), read_only })
        }
        _ => Err("it must be SOURCE:TARGET or SOURCE:TARGET:ro, with an absolute path as TARGET".to_owned()),
    }
}

/// An endpoint: `NAME=PORT`, with a path after it for one that speaks HTTP.
pub fn endpoint(text: &str) -> Result<v1::Endpoint, String> {
    let wrong = || "it must be NAME=PORT or NAME=PORT/PATH, as in web=8080/health".to_owned();
    let (name, rest) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(wrong)?;
    let end = rest.find('/').unwrap_or(rest.len());
    let port = rest[..end].parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
    Ok(v1::Endpoint { name: name.to_owned(), port: port.into(), http_path: rest[end..].to_owned() })
}

/// Numbers of a `google.protobuf.Struct` are doubles: whole ones below this are what was written.
const WHOLE: f64 = 9_007_199_254_740_992.0;

/// A key and a value of `driver_config`: the value is JSON, or the text that it is.
pub fn config(text: &str) -> Result<(String, prost_types::Value), String> {
    let (key, value) = pair(text)?;
    let value = match serde_json::from_str::<serde_json::Value>(&value) {
        // A class that is called "1" or "true" is no number.
        Ok(read) if read.is_string() || !NAMES_IN_DRIVER_CONFIG.contains(&key.as_str()) => read,
        _ => serde_json::Value::String(value),
    };
    let value = wire(value).map_err(|problem| format!("{key}: {problem}"))?;
    Ok((key, value))
}

fn wire(value: serde_json::Value) -> Result<prost_types::Value, String> {
    use prost_types::{ListValue, Struct, value::Kind};
    use serde_json::Value;
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(yes) => Kind::BoolValue(yes),
        Value::Number(number) => {
            let double = number.as_f64().unwrap_or(f64::INFINITY);
            if double.fract() == 0.0 && double.abs() >= WHOLE || !double.is_finite() {
                return Err(format!("{number} is beyond what a number here can tell exactly (below 2^53)"));
            }
            Kind::NumberValue(double)
        }
        Value::String(text) => Kind::StringValue(text),
        Value::Array(all) => {
            Kind::ListValue(ListValue { values: all.into_iter().map(wire).collect::<Result<_, _>>()? })
        }
        Value::Object(all) => {
            let fields = all.into_iter().map(|(key, value)| Ok((key, wire(value)?)));
            Kind::StructValue(Struct { fields: fields.collect::<Result<_, String>>()? })
        }
    };
    Ok(prost_types::Value { kind: Some(kind) })
}

/// JSON of what `driver_config` says, to show it.
pub fn json(value: &prost_types::Value) -> serde_json::Value {
    use prost_types::value::Kind;
    use serde_json::Value;
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(yes)) => (*yes).into(),
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < WHOLE => {
            (*number as i64).into()
        }
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.as_str().into(),
        Some(Kind::ListValue(list)) => Value::Array(list.values.iter().map(json).collect()),
        Some(Kind::StructValue(inner)) => {
            Value::Object(inner.fields.iter().map(|(key, value)| (key.clone(), json(value))).collect())
        }
    }
}

/// How a limit of a wait is meant: 0 is none.
pub fn limit(timeout: Duration) -> Option<Duration> {
    (!timeout.is_zero()).then_some(timeout)
}

/// The options for environment variables.
#[derive(Args)]
pub struct Environment {
    /// An environment variable; KEY alone takes its value from here. May be repeated.
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    env: Vec<String>,
    /// A file of KEY=VALUE lines; empty lines and lines that begin with '#' are skipped. May be repeated; --env wins.
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
}

impl Environment {
    /// The variables, by name.
    pub fn read(&self) -> Result<HashMap<String, String>, Failure> {
        let mut all = HashMap::new();
        for path in &self.env_file {
            read_file(path, &mut all)?;
        }
        for entry in &self.env {
            add(entry, &mut all).map_err(|e| Failure::usage(format!("--env {entry}: {e}")))?;
        }
        Ok(all)
    }
}

fn read_file(path: &Path, all: &mut HashMap<String, String>) -> Result<(), Failure> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|e| Failure::usage(format!("environment file '{shown}' can't be read: {e}")))?;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_end_matches('\r');
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        add(line, all).map_err(|e| Failure::usage(format!("{shown}:{}: {e}", number + 1)))?;
    }
    Ok(())
}

fn add(entry: &str, all: &mut HashMap<String, String>) -> Result<(), String> {
    let (key, value) = match entry.split_once('=') {
        Some((key, value)) => (key, value.to_owned()),
        None => (
            entry,
            std::env::var(entry)
                .map_err(|e| format!("the variable's value can't be taken from here: {e}"))?,
        ),
    };
    if key.is_empty() || key.contains(char::is_whitespace) {
        return Err(format!("'{}' is not a variable's name", key.escape_debug()));
    }
    all.insert(key.to_owned(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_and_doubtful_units_are_refused() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("1.5G"), Ok(3 << 29));
        assert_eq!(size("4096"), Ok(4096));
        for bad in ["", "0", "G", "1MB", "-1G", "1e3", "1 G", "9999999999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units_and_bare_numbers_are_seconds() {
        assert_eq!(duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(limit(Duration::ZERO), None);
        for bad in ["", "s", "1y", "-5s", "1e999"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_volume_is_written_to_unless_it_says_otherwise() {
        let of = |text: &str| volume(text).map(|v| (v.source, v.target, v.read_only));
        assert_eq!(of("cache:/var/cache"), Ok(("cache".into(), "/var/cache".into(), false)));
        assert_eq!(of("./a:/b:ro"), Ok(("./a".into(), "/b".into(), true)));
        assert_eq!(of("a:/b:rw"), Ok(("a".into(), "/b".into(), false)));
        assert!(["", "a", ":/b", "a:b", "a:ro"].into_iter().all(|text| volume(text).is_err()));
    }

    #[test]
    fn an_endpoint_is_a_port_with_or_without_a_path() {
        let of = |text: &str| endpoint(text).map(|e| (e.name, e.port, e.http_path));
        assert_eq!(of("db=5432"), Ok(("db".into(), 5432, String::new())));
        assert_eq!(of("web=80/a/b?c=d"), Ok(("web".into(), 80, "/a/b?c=d".into())));
        assert!(
            ["", "web", "=80", "web=", "web=0", "web=70000", "web=80:x"].into_iter().all(|t| of(t).is_err())
        );
    }

    #[test]
    fn names_of_a_drivers_config_stay_text_and_numbers_are_what_was_written() {
        let of = |text: &str| config(text).map(|(key, value)| (key, json(&value)));
        let is = |text: &str, wanted: serde_json::Value| {
            assert_eq!(of(text).unwrap().1, wanted, "{text}");
        };
        for name in ["1", "1e3", "true", "null", "kata", "[]", ""] {
            is(&format!("priorityClassName={name}"), name.into());
        }
        is("runtimeClassName=\"kata\"", "kata".into());
        is("claimTemplates=true", true.into());
        is("nodeSelector={\"a\":\"1\"}", serde_json::json!({"a": "1"}));
        is(
            "tolerations=[{\"tolerationSeconds\":9007199254740991}]",
            serde_json::json!([{"tolerationSeconds": 9_007_199_254_740_991_i64}]),
        );
        is("x=-0.5", (-0.5).into());
        is("x=[not json", "[not json".into());
        for digits in
            ["9007199254740993", "-9007199254740993", "18446744073709551615", "100000000000000000000"]
        {
            for text in [format!("x={digits}"), format!("x=[{{\"a\":{digits}}}]")] {
                let refused = of(&text).unwrap_err();
                assert!(refused.starts_with("x: ") && refused.contains("2^53"), "{text}: {refused}");
            }
        }
        assert!(of("x").is_err() && of("=1").is_err());
    }

    #[test]
    fn an_environment_file_is_read_and_a_bad_line_is_named_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("env");
        fs::write(&path, "# a remark\n\nA=1\r\nB=x=y\n").unwrap();
        let environment = Environment { env: vec!["A=2".into()], env_file: vec![path.clone()] };
        let all = environment.read().unwrap();
        assert_eq!((all["A"].as_str(), all["B"].as_str()), ("2", "x=y"));
        fs::write(&path, "A=1\n=2\n").unwrap();
        let message = environment.read().unwrap_err().told.message;
        assert!(message.ends_with(":2: '' is not a variable's name"), "{message}");
    }
}
