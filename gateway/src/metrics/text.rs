//! The text format of Prometheus, version 0.0.4.

use std::fmt::{Display, Write as _};

use super::{Label, Name};

/// A scrape that is being written.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// Begins a family.
    pub fn family<const L: usize>(&mut self, name: &Name<L>, kind: &str) {
        let help = name.help.replace('\\', "\\\\").replace('\n', "\\n");
        self.line(format_args!("# HELP {} {help}", name.name));
        self.line(format_args!("# TYPE {} {kind}", name.name));
    }

    /// One value.
    pub fn sample(&mut self, name: &str, keys: &[&str], values: &[Label], value: impl Display) {
        let labels = labels(keys, values, None);
        self.line(format_args!("{name}{labels} {value}"));
    }

    /// A bucket of a histogram.
    pub fn bucket(&mut self, name: &str, keys: &[&str], values: &[Label], bound: &str, count: u64) {
        let labels = labels(keys, values, Some(bound));
        self.line(format_args!("{name}_bucket{labels} {count}"));
    }

    /// A family of gauges.
    pub fn gauges<const L: usize>(
        &mut self,
        name: &Name<L>,
        all: impl IntoIterator<Item = ([Label; L], f64)>,
    ) {
        self.family(name, "gauge");
        for (values, value) in all {
            self.sample(name.name, &name.labels, &values, value);
        }
    }

    /// A gauge without labels.
    pub fn gauge(&mut self, name: &'static str, help: &'static str, value: f64) {
        self.gauges(&Name { name, help, labels: [] }, [([], value)]);
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String never fails.
        let _ = writeln!(self.0, "{line}");
    }

    /// What was written.
    pub fn finish(self) -> String {
        self.0
    }
}

fn labels(keys: &[&str], values: &[Label], bound: Option<&str>) -> String {
    let said = keys.iter().copied().zip(values.iter().map(AsRef::as_ref)).chain(bound.map(|le| ("le", le)));
    let all: Vec<String> = said.map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_values_of_labels_end_no_line() {
        let mut text = Text::default();
        text.sample("a", &["b"], &["x\"y\\z\nw".into()], 1);
        text.gauge("c", "C.", 0.5);
        assert_eq!(text.finish(), "a{b=\"x\\\"y\\\\z\\nw\"} 1\n# HELP c C.\n# TYPE c gauge\nc 0.5\n");
    }
}
